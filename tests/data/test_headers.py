import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import data_files
import image_kinds
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

from paddle_resnet import dali
from paddle_resnet.data import bad_images, decoding, headers
from paddle_resnet.serving import preprocessing
from paddle_resnet.tools import convert, verify
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode

# DALI raises an error for these kinds, which headers.problem accepts.
UNDECODABLE = {"webp: lossless, EXIF 6 after a padding byte"}
# Kinds that DALI would misread without an error, or whose decoders disagree, and a part of the message.
MISREAD = {
    "bmp: 16 bits, 5-5-5": "16 bits per pixel",
    "bmp: 16 bits, 5-6-5": "16 bits per pixel",
    "tif: gray, 2 bits": "2 bits per channel and photometric interpretation 1",
    "tif: gray, 4 bits": "4 bits per channel and photometric interpretation 1",
    "tif: WhiteIsZero, 2 bits": "2 bits per channel and photometric interpretation 0",
    "tif: WhiteIsZero, 4 bits": "4 bits per channel and photometric interpretation 0",
    "tif: WhiteIsZero, 16 bits": "16 bits per channel and photometric interpretation 0",
    "tif: gray, 32 bits": "32 bits per channel",
    **{f"tif: gray, signed {bits} bits": "signed" for bits in (8, 16)},
    **{f"tif: {color}, float{bits}": "floating-point" for color in ("gray", "RGB") for bits in (16, 32, 64)},
    "tif: gray, float32, 0 to 255": "floating-point",
    **{f"tif: gray + extra channel ({n})": "alpha" for n in ("unspecified", "associated", "unassociated")},
    "tif: RGB + extra channel (associated)": "multiplied by alpha",
    "tif: RGB + extra channel (associated), 16 bits": "multiplied by alpha",
    "tif: CIELab": "photometric interpretation 8",
    "tif: YCbCr, no subsampling": "photometric interpretation 6",
    **{f"tif: RGBA, orientation {i}": "alpha" for i in range(2, 9)},
    **{f"tif: RGB, tiles, orientation {i}": "tiles and an orientation" for i in range(2, 9)},
    "tif: RGB, lzma": "compression 34925",
    "tif: RGB, JPEG 2000": "compression 34712",
    "tif: RGB, PNG": "compression 34933",
    "jpg: CMYK, no Adobe": "CMYK JPEG without an Adobe marker",
    "jpg: CMYK, no Adobe, EXIF 6": "CMYK JPEG without an Adobe marker",
    "jpg: EXIF 6 + EXIF 1": "several EXIF blocks",
    "jpg: EXIF 1 + EXIF 6": "several EXIF blocks",
    **{f"jpg: {name}": "lossless" for name in image_kinds.STORED if "lossless" in name},
    "jpg: lossless YCbCr, JFIF": "lossless",
    "jpg: gray, 12 bits": "12 bits per channel",
    "jpg: RGB, 12 bits": "12 bits per channel",
}
READ = {name: kind for name, kind in image_kinds.kinds().items() if name not in {*MISREAD, *UNDECODABLE}}


@pipeline_def(num_threads=2, exec_dynamic=False, prefetch_queue_depth=1, enable_conditionals=True)
def _decoded(args, files):
    """Decode files as an evaluation does."""
    encoded = fn.external_source(source=iter([files]), dtype=types.UINT8, ndim=1)
    return decoding.decode(args, encoded, decoding.kinds(encoded))


def decode(kinds, device, **options):
    args = SimpleNamespace(dali_device=device, **options)
    files = [np.frombuffer(kind.data, np.uint8) for kind in kinds]
    pipeline = _decoded(args, files, batch_size=len(files), device_id=0 if device == "gpu" else None)
    (images,) = pipeline.run()
    return [np.asarray(image) for image in images.as_cpu()]


@pytest.fixture(scope="module")
def decoded_by_cpu():
    return dict(zip(READ, decode(READ.values(), "cpu"), strict=True))


@pytest.mark.parametrize("name", READ)
def test_cpu_decodes_each_kind_of_file(decoded_by_cpu, name):
    kind, image = READ[name], decoded_by_cpu[name]
    assert headers.problem(kind.data) is None
    assert image.shape == kind.pixels.shape
    assert np.abs(image.astype(int) - kind.pixels).max() <= kind.tolerance


@pytest.mark.parametrize("name", READ)
def test_preprocess_reads_each_kind_of_file_like_the_evaluation(decoded_by_cpu, name, tmp_path):
    kind = READ[name]
    path = tmp_path / f"x{kind.suffix}"
    path.write_bytes(kind.data)
    side = min(kind.pixels.shape[:2])
    options = {"resize_short": side, "center_crop": list(kind.pixels.shape[:2]), "interp": "triangular"}
    for image in (path, io.BytesIO(kind.data)):
        pixels = preprocessing.pixels(image, options)
        assert np.abs(pixels.astype(int) - decoded_by_cpu[name]).max() <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("load", [0.0, 1.0])
def test_gpu_decodes_each_kind_of_file_like_the_cpu(decoded_by_cpu, load):
    images = decode(READ.values(), "gpu", hw_decoder_load=load)
    differences = {
        name: np.abs(image.astype(int) - decoded_by_cpu[name]).max()
        for name, image in zip(READ, images, strict=True)
    }  # fmt: skip
    limits = {name: 4 if name.startswith("jpg") else 0 for name in READ}
    assert {name: value for name, value in differences.items() if value > limits[name]} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("load", [0.0, 1.0])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sampling", image_kinds.SAMPLINGS)
def test_gpu_interpolates_chroma_at_sharp_edges(load, progressive, sampling):
    options = {"quality": 92, "subsampling": image_kinds.SAMPLINGS[sampling], "progressive": progressive}
    data = image_kinds.encoded(image_kinds.edges(191, 255), "jpeg", **options)
    (image,) = decode([image_kinds.Kind(".jpg", data, None)], "gpu", hw_decoder_load=load)
    assert np.abs(image.astype(int) - image_kinds.decoded(data)).max() <= 4


@pytest.mark.parametrize("name", MISREAD)
def test_file_that_would_be_misread_is_rejected_by_name(name):
    data = image_kinds.kinds()[name].data
    assert MISREAD[name] in headers.problem(data)
    assert headers.kinds([np.frombuffer(data, np.uint8)])[0] & headers.UNREADABLE
    # nvImageCodec rejects some of these files, too, before headers.problem is called.
    assert bad_images.decode(data) is not None


@pytest.mark.parametrize("name", UNDECODABLE)
def test_undecodable_file_is_rejected(name):
    assert bad_images.decode(image_kinds.kinds()[name].data) is not None


PILLOW = sorted(n for n in MISREAD if (headers.problem(image_kinds.kinds()[n].data) or "").endswith(headers.SAVE))


# Runs several commands `python -c PROGRAM PATH ...` in one process.
RUN_EACH = """
import json, sys

for program, *arguments in json.load(sys.stdin):
    sys.argv[1:] = arguments
    exec(program)
"""


def test_printed_commands_convert_files(tmp_path):
    commands, paths = [], {}
    for number, name in enumerate(PILLOW):
        paths[name] = tmp_path / f'it\'s "a" $file {number}'
        data = image_kinds.kinds()[name].data
        paths[name].write_bytes(data)
        command = headers.problem(data, str(paths[name])).rpartition("; convert it with `")[2].removesuffix("`")
        _, option, *arguments = shlex.split(command)
        assert option == "-c"
        commands.append(arguments)
    subprocess.run([sys.executable, "-c", RUN_EACH], input=json.dumps(commands), text=True, check=True, timeout=60)
    for name, path in paths.items():
        with Image.open(f"{path}.png") as image:
            assert bad_images.decode(Path(f"{path}.png").read_bytes()) is None
            limit = 7 if "bmp" in name else 0  # Pillow rounds 5 bits
            assert np.abs(np.asarray(image).astype(int) - image_kinds.kinds()[name].pixels).max() <= limit, name


@pytest.mark.usefixtures("convert_here", "verify_here")
@pytest.mark.parametrize("data_format", ["folder", "tfrecord"])
@pytest.mark.parametrize("name", ["tif: gray + extra channel (unassociated)", "jpg: EXIF 6 + EXIF 1"])
def test_every_path_rejects_a_file_that_would_be_misread(photos, parse, tmp_path, name, data_format):
    root = tmp_path / "z"
    shutil.copytree(photos, root)
    kind = image_kinds.kinds()[name]
    for mode in Mode:
        (root / mode.value / f"class0/0{kind.suffix}").write_bytes(kind.data)
    with pytest.raises(UsageError, match=f"0{kind.suffix} {headers.problem(kind.data)[:20]}"):
        convert.convert(root, tmp_path / "y", "tfrecord", workers=1, check=verify.check_all)
    if data_format != "folder":
        data_files.write(root, tmp_path / "y", data_format)
        root = tmp_path / "y"
    paths = {mode: f"{root}/{mode.value}/class0/0{kind.suffix}" if data_format == "folder" else None for mode in Mode}
    problems = {mode: headers.problem(kind.data, path) for mode, path in paths.items()}
    assert sorted(verify.verify(root).failing.values()) == sorted(problems.values())
    for mode in Mode:
        with pytest.raises(DataError) as e:
            list(dali.build_dataloader(parse("--image-root", root), mode))
        assert str(e.value).startswith(paths[mode] or f"{root}/{mode.value}-")
        assert problems[mode] in str(e.value)


def test_progressive_image_with_missing_scans_has_the_same_pixels_in_training_and_evaluation(parse, tmp_path):
    data = image_kinds.kinds()["jpg: progressive, first scans only"].data
    for mode in Mode:
        (tmp_path / mode.value / "a").mkdir(parents=True)
        for i in range(8):
            (tmp_path / mode.value / f"a/{i}.jpg").write_bytes(data)
    flags = ["--image-root", tmp_path, "--image-shape", "3,48,64", "--crop-size", "48", "--resize-short", "48"]
    flags += ["--rand-crop-scale", "1,1", "--rand-crop-ratio", f"{64 / 48},{64 / 48}", "--num-of-class", "1"]
    flags += ["--batch-size", "8", "--allow-one-class"]
    train, val = (np.array(next(dali.build_dataloader(parse(*flags), mode))[0]["data"]) for mode in Mode)
    for image in train:
        assert min(np.abs(image - val[0]).max(), np.abs(image[:, :, ::-1] - val[0]).max()) < 1e-5


@pytest.mark.slow
def test_inspection_survives_truncated_headers():
    for kind in image_kinds.kinds().values():
        for size in range(0, min(len(kind.data), 260)):
            (flags,) = headers.kinds([np.frombuffer(kind.data[:size], np.uint8)])
            assert flags in range(8)
