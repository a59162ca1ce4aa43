"""Choose a decoder for an image file by its header, and reject kinds of files that DALI can misread or crash on.

docs/data.md lists the kinds of files; tests/image_kinds.py contains a file of each kind. DALI 2.4 with nvImageCodec 0.9
misreads some kinds on a GPU only (they have the flag CPU), and some on both devices (flag UNREADABLE).
"""

import shlex
from collections.abc import Sequence

import numpy as np

from paddle_resnet.utils.errors import python

# Flags of an image, which kinds() returns.
UNREADABLE = 1  # the image is rejected; problem() returns the reason
CPU = 2  # the CPU decodes the image: it is not a JPEG, or a JPEG that the GPU decoder would misread
PROGRESSIVE = 4  # a progressive JPEG; decoding a part of the image returns different pixels if some scans are missing

PNG, WEBP = 0x89, 0x52  # first byte of a file
ORIENTATION = 0x0112
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that begin a frame header
LOSSLESS = {0xC3, 0xC7, 0xCB, 0xCF}
# The header that libjpeg writes before the frame header of most color JPEGs: JFIF and two quantization tables. COMMON
# contains the expected bytes, and COMMON_MASK selects the bytes to compare. Files that match need no inspection.
COMMON, COMMON_MASK = np.zeros((2, 160), np.uint8)
for _place, _bytes in ((0, b"\xff\xd8\xff\xe0\0\x10JFIF"), (20, b"\xff\xdb\0\x43"), (89, b"\xff\xdb\0\x43"),
                       (158, b"\xff\xc0")):  # fmt: skip
    COMMON[_place : _place + len(_bytes)] = np.frombuffer(_bytes, np.uint8)
    COMMON_MASK[_place : _place + len(_bytes)] = 255


def kinds(files: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the flags of each image file, int32 scalars. `files` is a list of uint8 arrays [size]."""
    return [np.array(_inspect(memoryview(file))[0], np.int32) for file in files]


def problem(data: bytes | np.ndarray, path: str | None = None) -> str | None:
    """Return the reason why an image file is rejected although its header is valid, or None.

    Args:
        data: content of the file (bytes or uint8 array).
        path: path of the file, for the command that converts it; None if the image is not a file, but a record, for
            example.
    """
    reason = _inspect(memoryview(data))[1]
    return reason if reason is None or path is None else reason.replace(SAVE, f"; convert it with `{_save(path)}`")


def _inspect(data):
    """Return (flags, problem or None) of an image file. For the flags, see kinds; for the problem, see problem."""
    if data[:2] == b"\xff\xd8":
        return _inspect_jpeg(data)
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        reason = _tiff_problem(data)
        return CPU | (UNREADABLE if reason else 0), reason
    if data[:2] == b"BM" and data[14:15] != b"\x0c" and data[28:30] == b"\x10\0":
        return UNREADABLE, f"is a BMP file with 16 bits per pixel, which DALI may misread{SAVE}"
    # The decoder of DALI 2.4 crashed on some damaged JPEG 2000 files. JPEG 2000 is the only format known to DALI whose
    # second byte is 0 (container) or 0x4F (codestream).
    if data[1:2] in (b"\0", b"\x4f"):
        return UNREADABLE, "is a JPEG 2000 image, which is not supported"
    return CPU, None


def _inspect_jpeg(data):
    is_jfif, transform, exif_blocks, place, size = False, None, 0, 2, len(data)
    while place + 10 <= size and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # padding
            place += 1
            continue
        if marker in FRAMES:
            break
        content = data[place + 4 : place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")]
        if marker == 0xE0 and content[:5] == b"JFIF\0":
            is_jfif = True
        elif marker == 0xE1 and content[:6] == b"Exif\0\0":
            exif_blocks += 1
        elif marker == 0xEE and content[:5] == b"Adobe" and len(content) >= 12:
            transform = content[11]
        place += 4 + len(content)
    else:
        return 0, None  # the decoder will report the damaged header
    precision, components = data[place + 4], data[place + 9]
    reason = None
    if exif_blocks > 1:
        reason = (
            "has several EXIF blocks, and DALI may apply the orientation of the wrong block; save the image again with "
            "an image editor"
        )
    elif marker in LOSSLESS:
        reason = f"is a lossless JPEG, which is not supported{SAVE_ELSEWHERE}"
    elif precision != 8:
        reason = f"is a JPEG with {precision} bits per channel, which is not supported"
    elif components == 4 and transform is None:
        reason = f"is a CMYK JPEG without an Adobe marker, so its colors may be inverted{SAVE_ELSEWHERE}"
    # The rules of libjpeg (jdapimin.c) determine whether three components are RGB or YCbCr.
    ids = bytes(data[place + 10 : place + 10 + 3 * components : 3])
    is_rgb = components == 3 and not is_jfif and (transform == 0 if transform is not None else ids == b"RGB")
    flags = CPU * is_rgb | PROGRESSIVE * (marker & 3 == 2) | UNREADABLE * (reason is not None)
    return flags, reason


# Numbers of TIFF tags
BITS, COMPRESSION, PHOTOMETRIC, SAMPLES, PLANAR, TILE_WIDTH, EXTRA, FORMAT = 258, 259, 262, 277, 284, 322, 338, 339
# {PhotometricInterpretation: (samples per pixel without extra samples, allowed bits per sample)}. YCbCr (6) is allowed
# with JPEG compression only.
PHOTOMETRICS = {0: (1, (1, 8)), 1: (1, (1, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 5: (4, (8,)), 6: (3, (8,))}
# Supported values of the tag Compression: none, CCITT (three kinds), LZW, JPEG, Deflate (two numbers), PackBits,
# Zstandard
COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32946, 32773, 50000)
JPEG_COMPRESSION, ASSOCIATED_ALPHA, UNASSOCIATED_ALPHA, SEPARATE = 7, 1, 2, 2
# Remedy for the kinds that Pillow reads correctly, if the image is not a file.
SAVE = "; save it as an RGB PNG file with Pillow"
SAVE_ELSEWHERE = "; save it as an 8-bit RGB PNG file with the program that wrote it"


def _save(path):
    """Return the command that converts a file with Pillow. The command passes an open file to Pillow, because Pillow
    13.0 does not turn images upright that it opens by a path."""
    program = "import sys; from PIL import Image; Image.open(open(sys.argv[1], 'rb')).convert('RGB').save(sys.argv[2])"
    return f'{python()} -c "{program}" {shlex.quote(path)} {shlex.quote(f"{path}.png")}'


def _tiff_problem(data):
    tags = _tiff_tags(data)
    (compression,), (photometric,) = tags.get(COMPRESSION, (1,))[:1], tags.get(PHOTOMETRIC, (None,))[:1]
    if compression not in COMPRESSIONS:
        return f"is a TIFF file with compression {compression}, which DALI cannot decode{SAVE_ELSEWHERE}"
    if {*tags.get(FORMAT, ())} - {1}:
        return f"is a TIFF file with floating-point or signed numbers, which DALI would misread{SAVE_ELSEWHERE}"
    samples, allowed = PHOTOMETRICS.get(photometric, (0, ()))
    bits = {*tags.get(BITS, (1,))}
    if len(bits) != 1 or not bits <= {*allowed} or (photometric == 6 and compression != JPEG_COMPRESSION):
        kind = f"{'/'.join(map(str, sorted(bits)))} bits per channel and photometric interpretation {photometric}"
        return f"is a TIFF file with {kind}, which DALI would misread{SAVE_ELSEWHERE}"
    extra = tags.get(SAMPLES, (1,))[0] - samples
    is_turned = tags.get(ORIENTATION, (1,))[0] in range(2, 9)
    is_separate = samples > 1 and tags.get(PLANAR, (1,))[0] == SEPARATE
    if extra and (photometric != 2 or is_separate or is_turned or extra > 1):
        is_plain = tags.get(EXTRA, (0,))[0] == UNASSOCIATED_ALPHA
        return f"is a TIFF file whose alpha channel DALI would misread{SAVE if is_plain else SAVE_ELSEWHERE}"
    if extra and tags.get(EXTRA, (0,))[0] == ASSOCIATED_ALPHA:
        return f"is a TIFF file whose colors are multiplied by alpha, and DALI does not divide them{SAVE_ELSEWHERE}"
    if TILE_WIDTH in tags and is_turned:
        return f"is a TIFF file with tiles and an orientation, which DALI would misread{SAVE}"
    if is_separate and bits == {16}:
        return f"is a TIFF file with separate 16-bit channels, which DALI would misread{SAVE_ELSEWHERE}"
    return None


def _tiff_tags(data):
    """Return {tag: first values} of the integer tags of the first picture in a TIFF or BigTIFF file. Values beyond the
    end of the file are 0."""

    def number(place, size):
        return int.from_bytes(data[place : place + size], order)

    order = "little" if data[:2] == b"II" else "big"
    is_big = number(2, 2) == 43
    field, directory = (8, number(8, 8)) if is_big else (4, number(4, 4))
    count_size = 8 if is_big else 2
    tags = {}
    for i in range(min(number(directory, count_size), 4096)):
        entry = directory + count_size + i * (4 + 2 * field)
        size = {1: 1, 3: 2, 4: 4, 16: 8}.get(number(entry + 2, 2))  # BYTE, SHORT, LONG, LONG8
        if size is not None:
            count, place = number(entry + 4, field), entry + 4 + field
            place = place if count * size <= field else number(place, field)
            tags[number(entry, 2)] = [number(place + j * size, size) for j in range(min(count, 8))] or [0]
    return tags
