"""Small image files of every kind that the suffix list admits, with the pixels that a decoder should return.

The pixels of most lossless files are known, because this module writes the files itself; the pixels of JPEG data and
lossy WebP files are those that Pillow decodes. Pillow's treatment of orientation and transparency is not used.
"""

import base64
import functools
import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import PIL
from PIL import Image, features

HEIGHT, WIDTH = 48, 64
ORIENTATION = 0x112  # EXIF tag
TILE = 32  # height and width in pixels


@dataclass(frozen=True)
class Kind:
    """One kind of image file.

    Attributes:
        suffix: file name suffix.
        data: content of the file.
        pixels: uint8 [H, W, 3], RGB, upright.
        tolerance: largest difference that decoders may have: 4 for JPEGs and lossy files, 0 for the others.
    """

    suffix: str
    data: bytes
    pixels: np.ndarray
    tolerance: int = 0


def picture(height=HEIGHT, width=WIDTH):
    """Return smooth pixels, uint8 [H, W, 3], without symmetry: a different gradient in each channel."""
    y, x = np.mgrid[0:height, 0:width]
    red, green, blue = 40 + 180 * x / width, 220 - 170 * y / height, 60 + 120 * (x / width * y / height)
    return np.stack([red, green, blue], axis=2).astype(np.uint8)


def edges(height=HEIGHT, width=WIDTH):
    """Return uint8 [H, W, 3] with sharp edges between saturated colors, where upsampled chroma differs most."""
    colors = np.array([[255, 0, 0], [0, 0, 255], [0, 255, 0], [255, 255, 0], [255, 0, 255], [16, 16, 16]])
    y, x = np.mgrid[0:height, 0:width]
    return colors[(y // 7 * 5 + x // 9) % 6].astype(np.uint8)


def gray(pixels):
    return pixels.astype(int).sum(axis=2, keepdims=True) // 3


def rgb(levels, bits=8):
    """Convert levels [H, W, 1 or 3] of `bits` bits to uint8 [H, W, 3]."""
    scaled = np.rint(levels.astype(np.float64) * 255 / (2**bits - 1)).astype(np.uint8)
    return scaled.repeat(3, axis=2) if scaled.shape[2] == 1 else scaled


def upright(pixels, orientation):
    """Apply an EXIF orientation (1 to 8) to stored pixels."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def exif_block(orientation, order="<"):
    """Return a TIFF structure that contains only the orientation."""
    entry = struct.pack(order + "HHIHH", ORIENTATION, 3, 1, orientation, 0)
    return (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, 1) + entry + bytes(4)


def xmp(orientation):
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{orientation}"/>'
        "</rdf:RDF></x:xmpmeta>"
    ).encode()


def rows_of(levels, bits, order=">"):
    """Pack levels [H, W, C] into H rows of bytes."""
    if bits in (16, 32):
        return [row.astype(f"{order}u{bits // 8}").tobytes() for row in levels]
    flat = levels.reshape(len(levels), -1).astype(np.uint8)
    if bits == 8:
        return [row.tobytes() for row in flat]
    ones = np.unpackbits(flat[:, :, None], axis=2)[:, :, 8 - bits :]
    return [np.packbits(row).tobytes() for row in ones.reshape(len(flat), -1)]


# PNG ------------------------------------------------------------------------------------------------------------------
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(levels, bits, color, chunks=(), interlaced=False):
    """Write a PNG. `levels` is [H, W, C]; `color` is the color type; `chunks` come before the image data."""
    height, width = levels.shape[:2]
    passes = [levels]
    if interlaced:
        starts = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
        passes = [levels[y::dy, x::dx] for y, x, dy, dx in starts]
    data = b"".join(b"\0" + row for part in passes for row in rows_of(part, bits))
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, int(interlaced))
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def palette_of(bits, seed=1):
    return np.random.RandomState(seed).randint(0, 256, (2**bits, 3))


def png_kinds():
    image, luma = picture(), gray(picture())
    alpha = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH, 1) % 256
    for interlaced in (False, True):
        end = ", interlaced" * interlaced
        for bits in (1, 2, 4, 8, 16):
            levels = luma * (2**bits - 1) // 255
            yield f"gray, {bits} bits{end}", png(levels, bits, 0, interlaced=interlaced), rgb(levels, bits)
        for bits in (8, 16):
            levels = image.astype(int) * (2**bits - 1) // 255
            yield f"RGB, {bits} bits{end}", png(levels, bits, 2, interlaced=interlaced), rgb(levels, bits)
            both = np.concatenate([levels, alpha * (2**bits - 1) // 255], axis=2)
            yield f"RGBA, {bits} bits{end}", png(both, bits, 6, interlaced=interlaced), rgb(levels, bits)
            levels = luma * (2**bits - 1) // 255
            both = np.concatenate([levels, alpha * (2**bits - 1) // 255], axis=2)
            yield f"gray + alpha, {bits} bits{end}", png(both, bits, 4, interlaced=interlaced), rgb(levels, bits)
        for bits in (1, 2, 4, 8):
            palette, indices = palette_of(bits), luma * (2**bits - 1) // 255
            chunks = [chunk(b"PLTE", palette.astype(np.uint8).tobytes())]
            pixels = palette[indices[:, :, 0]].astype(np.uint8)
            yield f"palette, {bits} bits{end}", png(indices, bits, 3, chunks, interlaced), pixels
            chunks.append(chunk(b"tRNS", bytes([0, 128])))
            yield f"palette, {bits} bits, tRNS{end}", png(indices, bits, 3, chunks, interlaced), pixels
    short = chunk(b"PLTE", palette_of(4)[:11].astype(np.uint8).tobytes())
    indices = luma * 10 // 255
    yield "palette, 4 bits, 11 colors", png(indices, 4, 3, [short]), palette_of(4)[indices[:, :, 0]].astype(np.uint8)
    levels = luma * 15 // 255
    yield "gray, 4 bits, tRNS", png(levels, 4, 0, [chunk(b"tRNS", struct.pack(">H", 3))]), rgb(levels, 4)
    yield "gray, 8 bits, tRNS", png(luma, 8, 0, [chunk(b"tRNS", struct.pack(">H", 30))]), rgb(luma)
    yield "RGB, 8 bits, tRNS", png(image, 8, 2, [chunk(b"tRNS", struct.pack(">HHH", *image[3, 3].tolist()))]), image
    yield "RGB, gamma", png(image, 8, 2, [chunk(b"gAMA", struct.pack(">I", 100000))]), image
    yield "RGB, sBIT", png(image, 8, 2, [chunk(b"sBIT", bytes([5, 6, 5]))]), image
    animated = chunk(b"acTL", struct.pack(">II", 1, 0))
    control = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 1, 0, 0))
    yield "animated", png(image, 8, 2, [animated, control]), image
    for orientation in range(1, 9):
        chunks = [chunk(b"eXIf", exif_block(orientation))]
        yield f"EXIF {orientation}", png(image, 8, 2, chunks), upright(image, orientation)
    yield "EXIF 6, big-endian", png(image, 8, 2, [chunk(b"eXIf", exif_block(6, ">"))]), upright(image, 6)
    yield (
        "palette, 4 bits, EXIF 6",
        png(indices, 4, 3, [short, chunk(b"eXIf", exif_block(6))]),
        upright(palette_of(4)[indices[:, :, 0]].astype(np.uint8), 6),
    )
    yield "16 bits, EXIF 8", png(image.astype(int) * 257, 16, 2, [chunk(b"eXIf", exif_block(8))]), upright(image, 8)
    yield "XMP 6", png(image, 8, 2, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6))]), image
    file = png(image, 8, 2)
    yield "EXIF 6 after the pixels", file[:-12] + chunk(b"eXIf", exif_block(6)) + file[-12:], upright(image, 6)
    profile = exif_block(6)
    text = f"\nexif\n{len(profile) + 6:8}\n{(b'Exif' + bytes(2) + profile).hex()}\n".encode()
    yield "EXIF in text 6", png(image, 8, 2, [chunk(b"tEXt", b"Raw profile type exif\0" + text)]), image


# BMP ------------------------------------------------------------------------------------------------------------------
def bmp(rows, width, height, bits, palette=b"", compression=0, masks=b"", header=40, raw=None):
    """Write a BMP. `rows` are the packed rows, bottom first; `raw` replaces them with compressed data."""
    data = raw if raw is not None else b"".join(row + bytes(-len(row) % 4) for row in rows)
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        colors = len(palette) // 4
        sizes = (compression, len(data), 2835, 2835, colors, 0)
        info = struct.pack("<IiiHHIIIIII", header, width, height, 1, bits, *sizes)
        info += masks + bytes(max(0, header - 40 - len(masks)))
    offset = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + info + palette + data


def bmp_kinds():
    image, luma = picture(), gray(picture())
    bottom_up = image[::-1, :, ::-1]
    size = WIDTH, HEIGHT
    yield "24 bits", bmp(rows_of(bottom_up, 8), *size, 24), image
    yield "24 bits, top-down", bmp(rows_of(image[:, :, ::-1], 8), WIDTH, -HEIGHT, 24), image
    yield "24 bits, OS/2", bmp(rows_of(bottom_up, 8), *size, 24, header=12), image
    yield "24 bits, V5", bmp(rows_of(bottom_up, 8), *size, 24, header=124), image
    four = np.concatenate([bottom_up, np.full((HEIGHT, WIDTH, 1), 255)], axis=2)
    yield "32 bits", bmp(rows_of(four, 8), *size, 32), image
    four[:, :, 3] = 0
    yield "32 bits, unused channel 0", bmp(rows_of(four, 8), *size, 32), image
    four[:, :, 3] = 100
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    yield "32 bits, alpha, V4", bmp(rows_of(four, 8), *size, 32, compression=3, masks=masks, header=108), image
    yield "32 bits, bit fields", bmp(rows_of(four, 8), *size, 32, compression=3, masks=masks[:12]), image
    for bits in (1, 4, 8):
        palette, indices = palette_of(bits), luma * (2**bits - 1) // 255
        entries = b"".join(bytes([*color[::-1], 0]) for color in palette.tolist())
        pixels = palette[indices[:, :, 0]].astype(np.uint8)
        yield f"palette, {bits} bits", bmp(rows_of(indices[::-1], bits), *size, bits, entries), pixels
    five = image.astype(int) * 31 // 255
    packed = (five[::-1, :, :1] << 10) + (five[::-1, :, 1:2] << 5) + five[::-1, :, 2:]
    yield "16 bits, 5-5-5", bmp(rows_of(packed, 16, "<"), *size, 16), rgb(five, 5)
    six = image.astype(int) * [31, 63, 31] // 255
    packed = (six[::-1, :, :1] << 11) + (six[::-1, :, 1:2] << 5) + six[::-1, :, 2:]
    fields = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    pixels = np.rint(six * 255 / [31, 63, 31]).astype(np.uint8)
    yield "16 bits, 5-6-5", bmp(rows_of(packed, 16, "<"), *size, 16, compression=3, masks=fields), pixels
    palette, indices = palette_of(8), luma[::-1, :, 0]
    entries = b"".join(bytes([*color[::-1], 0]) for color in palette.tolist())
    runs = b"".join(b"".join(bytes([1, v]) for v in row) + b"\0\0" for row in indices.tolist()) + b"\0\1"
    pixels = palette[luma[:, :, 0]].astype(np.uint8)
    yield "palette, 8 bits, run lengths", bmp((), *size, 8, entries, compression=1, raw=runs), pixels


# WebP -----------------------------------------------------------------------------------------------------------------
def encoded(pixels, file_format, **options):
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, file_format, **options)
    return file.getvalue()


def riff(data, name, content, flag):
    """Add a chunk to a WebP file, which becomes an extended file with the given flag."""
    parts = data[12:]
    if parts[:4] != b"VP8X":
        header = bytes([0, 0, 0, 0]) + struct.pack("<I", WIDTH - 1)[:3] + struct.pack("<I", HEIGHT - 1)[:3]
        parts = b"VP8X" + struct.pack("<I", 10) + header + parts
    parts = parts[:8] + bytes([parts[8] | flag]) + parts[9:]
    parts += name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts


def chunk_size(data):
    """Return the size of the first chunk of a WebP file. An odd size is followed by a padding byte."""
    return int.from_bytes(data[16:20], "little")


def webp_kinds():
    image = picture()
    lossless = encoded(image, "webp", lossless=True)
    lossy = encoded(image, "webp", quality=90)
    yield "lossless", lossless, image
    yield "lossy", lossy, decoded(lossy)
    alpha = np.concatenate([image, np.full((HEIGHT, WIDTH, 1), 200, np.uint8)], axis=2)
    yield "lossless, alpha", encoded(alpha, "webp", lossless=True, exact=True), image
    data = encoded(alpha, "webp", quality=90, exact=True)
    yield "lossy, alpha", data, np.asarray(Image.open(io.BytesIO(data)))[:, :, :3]
    assert chunk_size(lossy) % 2 == 0
    for orientation in (1, 6):
        pixels = upright(decoded(lossy), orientation)
        yield f"lossy, EXIF {orientation}", riff(lossy, b"EXIF", exif_block(orientation), 8), pixels
    pixels = decoded(lossy)
    yield "lossy, EXIF 6 with prefix", riff(lossy, b"EXIF", b"Exif\0\0" + exif_block(6), 8), pixels
    noisy = (np.random.RandomState(i).randint(0, 256, image.shape).astype(np.uint8) for i in range(100))
    odd = next((pixels for pixels in noisy if chunk_size(encoded(pixels, "webp", lossless=True)) % 2), image)
    data = riff(encoded(odd, "webp", lossless=True), b"EXIF", exif_block(6), 8)
    yield "lossless, EXIF 6 after a padding byte", data, upright(odd, 6)
    yield "lossy, XMP 6", riff(lossy, b"XMP ", xmp(6), 4), pixels
    frames = [Image.fromarray(image), Image.fromarray(image[::-1].copy())]
    yield "animated", encoded(frames[0], "webp", save_all=True, append_images=frames[1:], lossless=True), image


# TIFF -----------------------------------------------------------------------------------------------------------------
def tiff(
    data,
    bits,
    photometric,
    order="<",
    compression=1,
    orientation=None,
    extra=None,
    planar=None,
    tile=0,
    form=None,
    predictor=None,
    palette=None,
    size=(WIDTH, HEIGHT),
    big=False,
    samples=None,
    more=(),
):
    """Write a TIFF. `data` is a list of strips or tiles (bytes)."""
    samples = samples or (3 if photometric in (2, 6, 8) else 4 if photometric == 5 else 1) + (extra is not None)
    short, long = 3, 4
    tags = [(256, long, [size[0]]), (257, long, [size[1]]), (258, short, [bits] * samples)]
    tags += [(259, short, [compression]), (262, short, [photometric]), (277, short, [samples])]
    if orientation is not None:
        tags.append((274, short, [orientation]))
    if planar is not None:
        tags.append((284, short, [planar]))
    if predictor is not None:
        tags.append((317, short, [predictor]))
    if palette is not None:
        tags.append((320, short, (palette.T.reshape(-1) * 257).tolist()))
    if extra is not None:
        tags.append((338, short, [extra]))
    if form is not None:
        tags.append((339, short, [form] * samples))
    offsets = 324 if tile else 273
    if tile:
        tags += [(322, long, [tile]), (323, long, [tile])]
    else:
        tags.append((278, long, [size[1]]))
    tags += [(offsets, long, [0] * len(data)), (offsets + 1 if tile else 279, long, [len(part) for part in data])]
    tags = sorted([*tags, *more])
    entry, head = (20, 16) if big else (12, 8)
    count_size, pointer = (8, "Q") if big else (2, "I")
    place = head + count_size + entry * len(tags) + (8 if big else 4)
    outside = b""
    places, position = (
        [],
        place + sum(len(v) * {3: 2, 4: 4}[t] for _, t, v in tags if len(v) * {3: 2, 4: 4}[t] > (8 if big else 4)),
    )
    for part in data:
        places.append(position)
        position += len(part)
    directory = b""
    for tag, kind, values in tags:
        values = places if tag == offsets else values
        packed = struct.pack(f"{order}{len(values)}{'HI'[kind - 3]}", *values)
        directory += struct.pack(order + "HH" + pointer, tag, kind, len(values))
        if len(packed) <= (8 if big else 4):
            directory += packed.ljust(8 if big else 4, b"\0")
        else:
            directory += struct.pack(order + pointer, place + len(outside))
            outside += packed
    magic = b"II" if order == "<" else b"MM"
    if big:
        header = magic + struct.pack(order + "HHHQQ", 43, 8, 0, 16, len(tags))
    else:
        header = magic + struct.pack(order + "HIH", 42, 8, len(tags))
    return header + directory + bytes(8 if big else 4) + outside + b"".join(data)


def strip(levels, bits, order="<"):
    return [b"".join(rows_of(levels, bits, order))]


def tiles(levels, bits):
    padded = np.pad(levels, ((0, -HEIGHT % TILE), (0, -WIDTH % TILE), (0, 0)))
    return [
        b"".join(rows_of(padded[y : y + TILE, x : x + TILE], bits, "<"))
        for y in range(0, HEIGHT, TILE)
        for x in range(0, WIDTH, TILE)
    ]


def tiff_kinds():
    image, luma = picture(), gray(picture())
    alpha = np.full((HEIGHT, WIDTH, 1), 180)
    for order, name in (("<", ""), (">", ", big-endian")):
        yield f"RGB, 8 bits{name}", tiff(strip(image, 8), 8, 2, order), image
        yield f"RGB, 16 bits{name}", tiff(strip(image.astype(int) * 257, 16, order), 16, 2, order), image
        yield f"gray, 16 bits{name}", tiff(strip(luma * 257, 16, order), 16, 1, order), rgb(luma)
    for bits in (1, 2, 4, 8):
        levels = luma * (2**bits - 1) // 255
        yield f"gray, {bits} bits", tiff(strip(levels, bits), bits, 1), rgb(levels, bits)
        yield f"WhiteIsZero, {bits} bits", tiff(strip(2**bits - 1 - levels, bits), bits, 0), rgb(levels, bits)
        palette = palette_of(bits)
        pixels = palette[levels[:, :, 0]].astype(np.uint8)
        yield f"palette, {bits} bits", tiff(strip(levels, bits), bits, 3, palette=palette), pixels
    yield "WhiteIsZero, 16 bits", tiff(strip(65535 - luma * 257, 16), 16, 0), rgb(luma)
    yield "gray, 32 bits", tiff(strip(luma * 16843009, 32), 32, 1), rgb(luma)
    yield "gray, signed 8 bits", tiff(strip(luma // 2, 8), 8, 1, form=2), rgb(luma // 2 * 2)
    yield "gray, signed 16 bits", tiff(strip(luma * 128, 16), 16, 1, form=2), rgb(luma)
    for dtype, bits in (("<f2", 16), ("<f4", 32), ("<f8", 64)):
        data = (luma / 255).astype(dtype).tobytes()
        yield f"gray, float{bits}", tiff([data], bits, 1, form=3), rgb(luma)
        yield f"RGB, float{bits}", tiff([(image / 255).astype(dtype).tobytes()], bits, 2, form=3), image
    yield "gray, float32, 0 to 255", tiff([luma.astype("<f4").tobytes()], 32, 1, form=3), rgb(luma)
    rgba, la = np.concatenate([image, alpha], axis=2), np.concatenate([luma, alpha], axis=2)
    for extra, name in ((0, "unspecified"), (1, "associated"), (2, "unassociated")):
        yield f"RGB + extra channel ({name})", tiff(strip(rgba, 8), 8, 2, extra=extra), image
        yield f"gray + extra channel ({name})", tiff(strip(la, 8), 8, 1, extra=extra), rgb(luma)
        both = (rgba * 257).astype(int)
        yield f"RGB + extra channel ({name}), 16 bits", tiff(strip(both, 16), 16, 2, extra=extra), image
    yield "RGB, planar", tiff([strip(image[:, :, i : i + 1], 8)[0] for i in range(3)], 8, 2, planar=2), image
    yield "RGB, contiguous", tiff(strip(image, 8), 8, 2, planar=1), image
    cmyk = np.concatenate([255 - image, np.zeros((HEIGHT, WIDTH, 1), np.uint8)], axis=2)
    yield "CMYK", tiff(strip(cmyk, 8), 8, 5), image
    yield "CIELab", tiff(strip(image, 8), 8, 8), np.asarray(Image.fromarray(image, "LAB").convert("RGB"))
    ycc = np.asarray(Image.fromarray(image).convert("YCbCr"))
    full = [(530, 3, [1, 1])]
    yield "YCbCr, no subsampling", tiff(strip(ycc, 8), 8, 6, more=full), image
    yield "RGB, tiles", tiff(tiles(image, 8), 8, 2, tile=TILE), image
    yield "gray, tiles", tiff(tiles(luma, 8), 8, 1, tile=TILE), rgb(luma)
    yield "gray, 16 bits, tiles", tiff(tiles(luma * 257, 16), 16, 1, tile=TILE), rgb(luma)
    yield "RGBA, tiles", tiff(tiles(rgba, 8), 8, 2, extra=2, tile=TILE), image
    yield "BigTIFF", tiff(strip(image, 8), 8, 2, big=True), image
    for orientation in range(1, 9):
        expected = upright(image, orientation)
        yield f"RGB, orientation {orientation}", tiff(strip(image, 8), 8, 2, orientation=orientation), expected
        expected = upright(rgb(luma), orientation)
        yield f"gray, orientation {orientation}", tiff(strip(luma, 8), 8, 1, orientation=orientation), expected
        data = tiff(strip(luma * 257, 16), 16, 1, orientation=orientation)
        yield f"gray, 16 bits, orientation {orientation}", data, expected
        expected = upright(image, orientation)
        data = tiff(strip(image.astype(int) * 257, 16), 16, 2, orientation=orientation)
        yield f"RGB, 16 bits, orientation {orientation}", data, expected
        data = tiff(strip(rgba, 8), 8, 2, extra=2, orientation=orientation)
        yield f"RGBA, orientation {orientation}", data, expected
        data = tiff(tiles(image, 8), 8, 2, tile=TILE, orientation=orientation)
        yield f"RGB, tiles, orientation {orientation}", data, expected
        palette, levels = palette_of(4), luma * 15 // 255
        data = tiff(strip(levels, 4), 4, 3, palette=palette, orientation=orientation)
        pixels = upright(palette[levels[:, :, 0]].astype(np.uint8), orientation)
        yield f"palette, 4 bits, orientation {orientation}", data, pixels
    # Pillow's wheels contain Zstandard from version 12 on.
    zstandard = ["zstd"] if int(PIL.__version__.partition(".")[0]) >= 12 else []
    for name in ("tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "lzma", *zstandard):
        yield f"RGB, {name}", encoded(image, "tiff", compression=name), image
    for name in ("group3", "group4", "tiff_ccitt"):
        levels = luma // 128
        yield (
            f"two levels, {name}",
            encoded(Image.fromarray(levels[:, :, 0] > 0), "tiff", compression=name),
            rgb(levels, 1),
        )
    data = encoded(image, "tiff", compression="jpeg", quality=95)
    yield "RGB, jpeg", data, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    data = encoded(Image.fromarray(luma[:, :, 0].astype(np.uint8)), "tiff", compression="jpeg", quality=95)
    yield "gray, jpeg", data, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    data = encoded(image, "tiff", compression="jpeg", quality=95, tiffinfo={ORIENTATION: 6})
    yield "RGB, jpeg, orientation 6", data, upright(decoded(encoded(image, "tiff", compression="jpeg", quality=95)), 6)
    yield "RGB + extra channel (not described)", tiff(strip(rgba, 8), 8, 2, samples=4), image
    levels = np.concatenate([image[:, :1], np.diff(image, axis=1)], axis=1)
    data = [zlib.compress(strip(levels, 8)[0])]
    yield "RGB, deflate with predictor", tiff(data, 8, 2, compression=8, predictor=2), image
    yield "several pictures", encoded(image, "tiff", save_all=True, append_images=[Image.fromarray(image[::-1])]), image
    if features.check("jpg_2000"):
        data = encoded(image, "jpeg2000", no_jp2=True)
        yield "RGB, JPEG 2000", tiff([data], 8, 2, compression=34712), image
    yield "RGB, PNG", tiff([png(image, 8, 2)], 8, 2, compression=34933), image


# JPEG -----------------------------------------------------------------------------------------------------------------
SAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def segments(data):
    """Split a JPEG into [marker segments before the first scan] and the rest."""
    parts, place = [], 2
    while data[place + 1] != 0xDA:
        length = 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        parts.append(data[place : place + length])
        place += length
    return parts, data[place:]


def join(parts, rest):
    return b"\xff\xd8" + b"".join(parts) + rest


def segment(marker, content):
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def bare(data):
    """Remove the JFIF, Adobe, EXIF and comment segments of a JPEG."""
    parts, rest = segments(data)
    return join([part for part in parts if not 0xE0 <= part[1] <= 0xEF and part[1] != 0xFE], rest)


def with_segments(data, *added):
    return data[:2] + b"".join(added) + data[2:]


def with_ids(data, ids):
    """Replace the component ids in the frame and scan headers of a baseline JPEG."""
    parts, rest = segments(data)
    changed = []
    for part in parts:
        if 0xC0 <= part[1] <= 0xC2:
            part = bytearray(part)
            part[10::3] = bytes(ids)
        changed.append(bytes(part))
    rest = bytearray(rest)
    rest[5 : 5 + 2 * len(ids) : 2] = bytes(ids)
    return join(changed, bytes(rest))


def with_factors(data, horizontal, vertical):
    """Replace the sampling factors of luma. The picture is scrambled, but the file is valid if the number of blocks is
    unchanged. Pillow cannot write files with these factors."""
    parts, rest = segments(data)
    changed = [
        part[:11] + bytes([16 * horizontal + vertical]) + part[12:] if part[1] == 0xC0 else part for part in parts
    ]
    return join(changed, rest)


JFIF = segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0")


def adobe(transform):
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def exif(orientation, order="<"):
    return segment(0xE1, b"Exif\0\0" + exif_block(orientation, order))


def decoded(data):
    """Decode an image file with Pillow as RGB, without applying the orientation of a JPEG."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def jpeg_kinds():
    image = picture()
    for name, sampling in SAMPLINGS.items():
        for progressive in (False, True):
            data = encoded(image, "jpeg", quality=92, subsampling=sampling, progressive=progressive)
            yield f"{name}{', progressive' * progressive}", data, decoded(data)
    for name, sampling, factors in (("4:4:0", 1, (1, 2)), ("4:1:1", 2, (4, 1)), ("luma 1x4", 2, (1, 4))):
        data = with_factors(encoded(picture(64, 64), "jpeg", quality=92, subsampling=sampling), *factors)
        yield name, data, decoded(data)
    luma = Image.fromarray(gray(image)[:, :, 0].astype(np.uint8))
    data = encoded(luma, "jpeg", quality=92)
    yield "gray", data, decoded(data)
    yield "gray, progressive", encoded(luma, "jpeg", quality=92, progressive=True), decoded(data)
    yield "gray, no markers", bare(data), decoded(data)
    yield "gray, Adobe 0", with_segments(bare(data), adobe(0)), decoded(data)
    usual = encoded(image, "jpeg", quality=92, subsampling=0)
    expected = decoded(usual)
    yield "no markers", bare(usual), expected
    yield "Adobe 1", with_segments(bare(usual), adobe(1)), expected
    yield "JFIF + Adobe 1", with_segments(usual, adobe(1)), expected
    yield "Adobe 2", with_segments(bare(usual), adobe(2)), decoded(with_segments(bare(usual), adobe(2)))
    yield "ids 0, 1, 2", with_ids(bare(usual), (0, 1, 2)), expected
    yield "ids 34, 35, 36", with_ids(bare(usual), (34, 35, 36)), expected
    yield "JFIF, ids 0, 1, 2", with_ids(usual, (0, 1, 2)), expected
    yield "restart markers", encoded(image, "jpeg", quality=92, subsampling=0, restart_marker_blocks=3), None
    yield "comment first", with_segments(bare(usual), segment(0xFE, b"comment")), expected
    stored = base64.b64decode(RGB_BASELINE)
    pixels = decoded(stored)
    plain = bare(stored)
    yield "RGB, Adobe 0, ids R, G, B", stored, pixels
    yield "RGB, ids R, G, B", with_ids(plain, b"RGB"), pixels
    yield "RGB, Adobe 0, ids 1, 2, 3", with_segments(with_ids(plain, (1, 2, 3)), adobe(0)), pixels
    yield "RGB, Adobe 0, progressive", base64.b64decode(RGB_PROGRESSIVE), None
    yield "RGB, EXIF 1, Adobe 0", with_segments(with_ids(plain, (1, 2, 3)), exif(1), adobe(0)), pixels
    yield "RGB, EXIF 6, Adobe 0", with_segments(with_ids(plain, (1, 2, 3)), exif(6), adobe(0)), upright(pixels, 6)
    yield "JFIF + ids R, G, B", with_segments(with_ids(plain, b"RGB"), JFIF), None
    yield "JFIF + Adobe 0", with_segments(with_ids(plain, (1, 2, 3)), JFIF, adobe(0)), None
    yield "Adobe 0 + JFIF", with_segments(with_ids(plain, (1, 2, 3)), adobe(0), JFIF), None
    yield "Adobe 1, ids R, G, B", with_segments(with_ids(plain, b"RGB"), adobe(1)), None
    cmyk = Image.fromarray(image).convert("CMYK")
    data = encoded(cmyk, "jpeg", quality=92)
    yield "CMYK, Adobe 0", data, decoded(data)
    yield "CMYK, no Adobe", bare(data), decoded(bare(data))
    yield "CMYK, no Adobe, EXIF 6", with_segments(bare(data), exif(6)), upright(decoded(bare(data)), 6)
    yield "CMYK, Adobe 0, EXIF 6", with_segments(data, exif(6)), upright(decoded(data), 6)
    yield "YCCK, Adobe 2", with_segments(bare(data), adobe(2)), decoded(with_segments(bare(data), adobe(2)))
    for orientation in range(1, 9):
        for order in "<>":
            data = with_segments(bare(usual), exif(orientation, order))
            yield f"EXIF {orientation}{', big-endian' * (order == '>')}", data, upright(expected, orientation)
        yield f"JFIF + EXIF {orientation}", usual[:2] + JFIF + exif(orientation) + bare(usual)[2:], None
    for orientation in (0, 9):
        yield f"EXIF {orientation}", with_segments(bare(usual), exif(orientation)), expected
    block = exif_block(6).replace(b"\x12\x01\x03\0", b"\x12\x01\x04\0")
    yield (
        "EXIF 6 as a 32-bit number",
        with_segments(bare(usual), segment(0xE1, b"Exif\0\0" + block)),
        upright(expected, 6),
    )
    yield "EXIF 6 + EXIF 1", with_segments(bare(usual), exif(6), exif(1)), upright(expected, 6)
    yield "EXIF 1 + EXIF 6", with_segments(bare(usual), exif(1), exif(6)), expected
    packet = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(6))
    yield "XMP 6", with_segments(bare(usual), packet), expected
    yield "EXIF 1 + XMP 6", with_segments(bare(usual), exif(1), packet), expected
    profile = segment(0xE2, b"ICC_PROFILE\0\x01\x01" + bytes(200))
    yield "ICC profile", with_segments(usual, profile), expected
    pictures = [Image.fromarray(image), Image.fromarray(image[::-1].copy())]
    data = encoded(pictures[0], "mpo", save_all=True, append_images=pictures[1:], quality=92, subsampling=0)
    yield "several pictures (MPO)", data, None
    scans = encoded(image, "jpeg", quality=92, subsampling=0, progressive=True).split(b"\xff\xda")
    yield "progressive, first scans only", b"\xff\xda".join(scans[:4]) + b"\xff\xd9", None
    yield "lossless YCbCr, JFIF", with_segments(base64.b64decode(STORED["lossless RGB"]), JFIF), picture(16, 24)
    for name, text in STORED.items():
        yield name, base64.b64decode(text), None


# JPEGs of picture(16, 24) that store RGB, in base64, because Pillow 10.0 cannot write them.
RGB_BASELINE = (
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgICAgIDAgICAwMDAwQGBAQEBAQIBgYFBgkICgoJCAkJCgwPDAoLDgsJCQ0RDQ4PEBAR"
    "EAoMEhMSEBMPEBAQ/8AAEQgAEAAYA1IRAEcRAEIRAP/EAB8AAAEFAQEBAQEBAAAAAAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMC"
    "BAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElK"
    "U1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY"
    "2drh4uPk5ebn6Onq8fLz9PX29/j5+v/aAAwDUgBHAEIAAD8A+Wvh3/yy/CvpH/hcP/T1/wCPV8p2tr52OOtfUHw7/wCWX4Uf8Lh/"
    "6ev/AB6te18P+dj5M19QfDv/AJZfhR/wuH/p6/8AHq17XwR52P3PX2r8v/h3/wAsvwr4c/4XD/09f+PVkeH7Xz9vHWvqD4d/8svw"
    "o/4XD/09f+PV6b4e8Pedt+SvqD4d/wDLL8KP+Fw/9PX/AI9Xpvh/wP5+39z19q//2Q=="
)
RGB_PROGRESSIVE = (
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgICAgIDAgICAwMDAwQGBAQEBAQIBgYFBgkICgoJCAkJCgwPDAoLDgsJCQ0RDQ4PEBAR"
    "EAoMEhMSEBMPEBAQ/8IAEQgAEAAYA1IRAEcRAEIRAP/EABgAAQEBAQEAAAAAAAAAAAAAAAcABAYI/9oADANSAEcAQgAAAAEsSClQ"
    "tahbPL4djULp1C6b/8QAFRABAQAAAAAAAAAAAAAAAAAAAAX/2gAIAVIAAQUCnJycnJyc/8QAFRABAQAAAAAAAAAAAAAAAAAAABX/"
    "2gAIAUcAAQUCsLCwsLCw/8QAFxAAAwEAAAAAAAAAAAAAAAAAAAQRAv/aAAgBQgABBQLOaZXplKi+aLr0XRp//8QAFRABAQAAAAAA"
    "AAAAAAAAAAAAAAH/2gAIAVIABj8CiIiI/8QAFRABAQAAAAAAAAAAAAAAAAAAADL/2gAIAUcABj8CpSlKU//EABYQAQEBAAAAAAAA"
    "AAAAAAAAABAxAP/aAAgBQgAGPwIjN//EABQQAQAAAAAAAAAAAAAAAAAAACD/2gAIAVIAAT8hQAH/xAAWEAADAAAAAAAAAAAAAAAA"
    "AAAAEfD/2gAIAUcAAT8hlkslkslks//EABcQAQEBAQAAAAAAAAAAAAAAAAAhEFH/2gAIAUIAAT8hflz40MQv/9oADANSAEcAQgAA"
    "ABDfWX//xAAVEAEBAAAAAAAAAAAAAAAAAAAAwf/aAAgBUgABPxCKKKKKL//EABQQAQAAAAAAAAAAAAAAAAAAACD/2gAIAUcAAT8Q"
    "Ukkn/8QAGxAAAgIDAQAAAAAAAAAAAAAAACExYRBBUXH/2gAIAUIAAT8QQUiExLqjRTjPpKP/2Q=="
)
# Files that Pillow cannot write: picture(16, 24) in base64, written by libjpeg-turbo 2.1.5 (arithmetic coding) and 3.1.
STORED = {
    "arithmetic coding": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
        "FRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
        "FBQUFBQUFBT/yQARCAAQABgDAREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDRDK4E/oEb7lgoW6jW1b0iPPzNXnEN"
        "LAFc0u5JW1Evn37JXSUD9nVam/T4c2gh85x5263VoTupb0M2AzipVKtBSBo1J9yqPs+qQaN4vznGX4JrF5r/2Q=="
    ),
    "lossless RGB": (
        "/9j/7gAOQWRvYmUAZAAAAAAA/8MAEQgAEAAYA1IRAEcRAEIRAP/EABkAAQEBAQEBAAAAAAAAAAAAAAADBAIBB//aAAwDUgBHAEIA"
        "AQAA+T/XPndzQXNBc0FzQXNBc0FzQXNBc0FzQXNBcZFzQXND25oLvdBc0Pbmgu90FzQ9uaC5oe3NBd6yLmh7c0PbvdBd7oe3ND25"
        "oe3e6C73Q9uaHtzQ9u90F3rKuaHt3uh7d7oe3e6Ht3uh7d7oe3e6Ht3uh7c0PbvdD273Q9u9ZF3uh7d7odXe6Ht3uh1d7oe3e6HV"
        "3uh7d7odXe6Ht3uh1d7oe3esi73Q6u90OrvdDq73Q6u60PbutD27rQ9u60OrvdDq73Q6u90OrvWVd7odXdaHV3Wh1d1odXe6HV3W"
        "h1d1odXdaHV3uh1d1odXdaHV3TIu60OrutDq7rQ7u60OrutDq7vQ6u60OrutDu7rQ6u60OrutDu7plXdaHd3Wh3d1od3daHd3Wh3"
        "d1od3daHd3Wh3d1od3daHd3Wh3d0yLutDu7vQ7u70Oru9Du7vQ7u60O7u9Du7vQ7u60O7u9Du7vQ6u7ZF3eh3d3od3d6Hd3ehS7v"
        "Q7u70O7u9Du7vQpd3od3d6Hd3eh3d2yru9Du6mh3dTQ7upod3d6FLu9Cl3ehS7vQpd3od3U0O7qaHd1GRd3oUupoUu70KXU0KXd6"
        "FLqaFLu9Cl1NCl3ehS6mhS7vQpdRkXU0KXU0KXU0KXU0KXU0KXU0KXU0KXU0K3U0KXU0KXU0KXUZV1NCl1dCl1NCt1NCt1NCl1dC"
        "l1NCt1NCt1NCl1dCl1NCt1GRdTQrdXQpdXQrdTQrdXQpdXQrdTQrdXQrdTQrdXQpdXQrdT//2Q=="
    ),
    "lossless gray": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/wwALCAAQABgBAREA/8QAFgABAQEAAAAAAAAAAAAAAAAAAgMF/9oACAEBAAEAAMlppppppppp"
        "pphNNNptNNNptNTTbTbTTbTbTaYTbTbbTbbTbTc21RNttttUTbbc22222223RUVFRBtt0bbbdG223RzdG3RtujbdG3Rth0bdHRt0"
        "dG3R0bc3R0dHR0bo6N0dHRh0dHR0dHR0dKOjo6To6UdKOlHR0pR0dKOgdKUdKUdKUdKUdKUdKTpR0pSlHSlKUdXSlKUYdKUpSlKU"
        "pSlKUpSlHVzpSlKUpSlKVdaUpSlKUp//2Q=="
    ),
    "lossless gray, 16 bits": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/wwALEAAQABgBAREA/8QAFgABAQEAAAAAAAAAAAAAAAAACgsN/9oACAEBAAEAAMppYGgJgaAm"
        "BoCYGgJgaAmBoCYGgJgaAmBoCYGgJgaAmBj8QEwNATA0BMDYGgJgbA0BMDQEwNATA2BoCYGwNATA0BT+0BMDYGwNATA2BsDQEwNA"
        "TA2BsDQEwNgbA0BMDYGgJgY/EBMDYGwNATA2BsDYGwNATA2BsDYGwNATA2BsDQEwNgc/tgbA0BUBEBMDYGwNgbA2BsDYGwNAVARA"
        "TA2BsDYGwNgc/tgbA2BsDYGwNgbA2BsDYGwNgbA2B0BEBUBEBUBEBUBEBD8YGwNgbA2B0BGBsDYGwNgbA2B0BGBsDYGwNgbA2B0B"
        "GBz+2B0BGBsDYHQEYGwNgbA6AjA2BsDYHQEYGwNgdARgbA2Bj8YHQEYGwNgdARgdARgbA2B0BGB0BGBsDYHQEYHQEYGwNgc/tgdA"
        "RgdARgdARgdARgdARgbA6AjA6AjA2B0BGB0BGB0BGBj8YHQEYHQEYHQEYHQEYHQEYHQEYHQEYHQEoCMDoCMDoCMDoCT+6AjA6AlA"
        "RgdASgIwOgJQEYHQEYHQEoCUBGB0BGB0BKAjA6Ag/GB0BKAlARgdASgJQEYHQEoCUBGB0BKAlARgdASgJQEYHQEoCT+6AlARgdAS"
        "gJQEoCUBGB0BKAlASgJQEYHUFYHQEoCUBKAlARgY/GB0BKAlASgJQEoCUBKAlASgJQEoCUBKAlASgJQEoCUBGB1BWBz+6AlASgJQ"
        "EoCUBKAlASgJQEoCVBWB1BaAlASgJQEoCUBKAlASgJ//2Q=="
    ),
    "gray, 12 bits": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
        "FRUVDA8XGBYUGBIUFRT/wQALDAAQABgBAREA/8QAFgABAQEAAAAAAAAAAAAAAAAACwoM/8QALhAAAgADBQYEBwAAAAAAAAAAAQID"
        "BhEABQkhMQgKE1FhcRIVIpElQXKBobHw/9oACAEBAAA/AD7sF/HUiTI9weCYHiF2QrWOKU5ZGnL26WvQwX8V0zGbi+MRCCEFBHWg"
        "P1V7ewtepgwbcLTE1yIt4kglM+KNPl2OQ/H2yD+7z46SzC8sqZhd6mHnxqgA66nrZO7d5MVszO8tMt9uzEwwSIq+rXr+7J37vPtt"
        "i/1lweYsUYw8uIDUa8/6va3/2Q=="
    ),
    "RGB, 12 bits": (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
        "FRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
        "FBQUFBQUFBT/wQARDAAQABgDASIAAhEBAxEB/8QAGAAAAwEBAAAAAAAAAAAAAAAAAAoMCQv/xAAhEAAAAwkBAQAAAAAAAAAAAAAA"
        "AQIEBQkKERImRNEVJ//EABYBAQEBAAAAAAAAAAAAAAAAAAoGDP/EAC8RAAADAwURAAAAAAAAAAAAAAAKEQISFQEDBRZhBAcIExQX"
        "JSYxQUNiY3GBouL/2gAMAwEAAhEDEQA/ANAYU88ApsN0Z+s627pdDlEKedWU2eRnizrbul0SWMH6eAU2eL9AUdbd0uh4iD9OrKbD"
        "cueLOtm6XQAG7iqeeddX33+mu3wCYl+CyUOg+gkRzh9rBV3Qp5yxTYbozpZ1t3C6AcJuD9OWKbPFzpZ1s3C6ARM8Qarc3LSlUVe3"
        "4n5GglwFy4mT3maPYgnpys2D/9k="
    ),
}


@functools.cache
def kinds():
    """Return {name: Kind} for every kind of file."""
    return dict(_kinds())


def _kinds():
    tables = {".png": png_kinds, ".bmp": bmp_kinds, ".webp": webp_kinds, ".tif": tiff_kinds, ".jpg": jpeg_kinds}
    for suffix, table in tables.items():
        for name, data, pixels in table():
            if pixels is None and name in STORED:
                pixels = picture(16, 24) if "RGB" in name or "arith" in name else rgb(gray(picture(16, 24)))
            elif pixels is None:
                pixels = decoded(data)
                with Image.open(io.BytesIO(data)) as file:
                    pixels = upright(pixels, file.getexif().get(ORIENTATION, 1))
            is_lossy = suffix == ".jpg" or "lossy" in name or "jpeg" in name
            yield f"{suffix[1:]}: {name}", Kind(suffix, data, pixels, 4 if is_lossy else 0)
