import io
import os
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest
from PIL import Image, features

from paddle_resnet import dali
from paddle_resnet.data import bad_images, listing, readers
from paddle_resnet.tools import convert
from utils.errors import DataError
from utils.mode import Mode


def test_stream_without_descriptor(tmp_path):
    assert bad_images._descriptor(io.StringIO()) is None
    with open(tmp_path / "x", "w") as file:
        assert bad_images._descriptor(file) == file.fileno()


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("bytes_left", [0, 20, 500])
@pytest.mark.parametrize(
    ("data_format", "name"),
    [
        ("folder", "train/class0/00.jpg"),
        ("tfrecord", "train-00000-of-00001@"),
        ("webdataset", "train-000000.tar@"),
        ("recordio", "train.rec@"),
        ("lmdb", "train_lmdb@"),
    ],
)
def test_undecodable_image_is_reported_with_full_relative_path(
    photos, parse, tmp_path, monkeypatch, data_format, name, bytes_left
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "data/z")
    image = tmp_path / "data/z/train/class0/00.jpg"
    image.write_bytes(image.read_bytes()[:bytes_left])
    root = "data/z"
    if data_format != "folder":
        convert.convert(root, "data/y", data_format, workers=1)
        root = "data/y"
    with pytest.raises(DataError) as e:
        list(dali.build_dataloader(parse("--image-root", root), Mode.TRAIN))
    assert str(e.value).startswith(f"{root}/{name}")
    assert str(e.value).count(name) == 1
    assert ": cannot be decoded (rank 0); repair" in str(e.value)
    next_command = "convert the data set" if data_format == "lmdb" else "train"
    assert str(e.value).endswith(f" --fix-list bad.txt` and {next_command} with --skip-list bad.txt")


@pytest.mark.parametrize("root", ["data/z", "./data/z", "my data/z"])
def test_deleted_file_of_file_list_is_reported_with_path(photos, parse, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    # Simulate a file that is deleted right after the check.
    monkeypatch.setattr(listing, "check_listed", lambda *args: None)
    shutil.copytree(photos, root)
    (tmp_path / root / "train.txt").write_text("".join(f"train/class0/{i:02d}.jpg 0\n" for i in (0, 3, 6, 9, 99)))
    args = parse("--image-root", root, "--data-format", "filelist", "--batch-size", "5")
    with pytest.raises(DataError) as e:
        list(dali.build_dataloader(args, Mode.TRAIN))
    assert str(e.value).startswith(f"{root}/train/class0/99.jpg: cannot be decoded (rank 0); repair")
    assert f"paddle_resnet.dataset verify {shlex.quote(root)} --fix-list bad.txt`" in str(e.value)


needs_jpeg_2000 = pytest.mark.skipif(not features.check("jpg_2000"), reason="Pillow cannot write JPEG 2000")


@needs_jpeg_2000
@pytest.mark.parametrize("no_jp2", [False, True])
@pytest.mark.parametrize("mode", Mode)
def test_loader_does_not_decode_jpeg_2000_image_with_suffix_of_jpeg(photos, parse, tmp_path, mode, no_jp2):
    shutil.copytree(photos, tmp_path / "z")
    image = tmp_path / "z" / mode.value / "class0/00.jpg"
    Image.new("RGB", (64, 48)).save(image, "jpeg2000", no_jp2=no_jp2)
    with pytest.raises(DataError, match=f"^{image}: is a JPEG 2000 image"):
        list(dali.build_dataloader(parse("--image-root", tmp_path / "z"), mode))


@needs_jpeg_2000
def test_jpeg_2000_is_not_decoded():
    """DALI decodes this valid image; only the check rejects it."""
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "jpeg2000")
    assert bad_images.decode(file.getvalue()) == "is a JPEG 2000 image, which is not supported"


def test_image_with_too_many_pixels_after_resize_is_rejected():
    """The resized images would have 64 x 4,194,304 pixels, which is the limit, and 65 x 4,259,840 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (65536, 1)).save(file, "png")
    problem = "has 65536 x 1 pixels and would exceed the limit of 268,435,456 after resizing"
    assert [bad_images.header_problem(file.getvalue(), side) for side in (64, 65)] == [None, problem]


def test_only_output_of_c_libraries_is_discarded(monkeypatch, capfd):
    monkeypatch.setattr(bad_images, "_descriptor", lambda stream: 2)
    stderr, files = sys.stderr, os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError), bad_images.decoders_silenced():
        os.write(2, b"decoder\n")
        print("python", file=sys.stderr)
        raise ZeroDivisionError
    assert sys.stderr is stderr and os.listdir("/proc/self/fd") == files
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "python\nafter\n"


def test_empty_file_and_unknown_format_are_rejected():
    assert bad_images.header_problem(b"") == "is empty"
    assert bad_images.header_problem(b"GIF89a") == "is not in an image format that DALI supports"


@pytest.mark.parametrize(
    ("width", "height", "side", "problem"),
    [
        (1, 1, None, None),
        (0, 9, None, "is not in an image format"),
        (9, 0, None, "is not in an image format"),
        (1, 65536, 64, None),
        (1, 65536, 65, "has 1 x 65536 pixels"),
        (65536, 1, 65, "has 65536 x 1 pixels"),
        (16384, 16384, 16384, None),
        (16385, 16384, None, "declares 16385 x 16384 pixels"),
    ],
)
def test_sizes_of_images_are_limited(monkeypatch, width, height, side, problem):
    stream = SimpleNamespace(width=width, height=height, codec_name="png")
    monkeypatch.setattr(bad_images.nvimgcodec, "CodeStream", lambda data: stream)
    found = bad_images.header_problem(b"x", side)
    assert found is None if problem is None else found.startswith(problem)


def test_image_with_too_many_pixels_is_rejected():
    file = io.BytesIO()
    Image.new("1", (16384, 1)).save(file, "bmp")
    # The height is a 32-bit number at byte 22 of a BMP file.
    images = [file.getvalue()[:22] + height.to_bytes(4, "little") + file.getvalue()[26:] for height in (16384, 16385)]
    problem = "declares 16384 x 16385 pixels, more than the limit of 268,435,456"
    assert [bad_images.header_problem(image) for image in images] == [None, problem]


def test_decoder_without_memory_is_replaced(monkeypatch):
    def run():
        raise RuntimeError("std::bad_alloc")

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    monkeypatch.setattr(bad_images, "_decoder", SimpleNamespace(feed_input=lambda name, batch: None, run=run))
    assert bad_images.decode(file.getvalue()) == "declares more pixels than fit in memory"
    assert bad_images.decode(file.getvalue()) is None


def test_search_for_bad_image_ends_after_deadline(monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    message = "Error in operator nvidia.dali.fn.decoders.image"
    damaged = (file.getvalue().replace(b"IDAT", b"IDAX"), "c.png")
    monkeypatch.setattr(bad_images, "_undecoded", lambda data_set: iter([damaged]))
    assert bad_images.bad_image(message, None, "root") == ("root/c.png", "cannot be decoded")
    images = [damaged, (file.getvalue(), "a.png"), (b"", "b.png")]
    monkeypatch.setattr(bad_images, "_undecoded", lambda data_set: iter(images))
    assert bad_images.bad_image(message, None, "root")[0] == "root/b.png"  # the headers of all images are checked first
    assert bad_images.bad_image("Error in operator nvidia.dali.fn.resize", None, "root")[0] is None
    monkeypatch.setattr(bad_images, "SEARCH_S", -1)
    assert bad_images.bad_image(message, None, "root")[0] == "an image in root"


def test_search_reads_a_data_set_with_fewer_images_than_cpu_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (tmp_path / "a.png").write_bytes(b"abc")
    (tmp_path / "val.txt").write_text("a.png 0\n")
    data_set = readers.open_split(tmp_path, "filelist", Mode.EVAL, 1, 0)
    assert set(bad_images._undecoded(data_set)) == {(b"abc", "a.png")}


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("Could not open file a b/x.jpg: No such file or directory\nmore", "a b/x.jpg"),
        ("\nFile mapping failed: x.jpg\nmore: Text", "x.jpg"),
        ("Failed to decode sample #12 : a/x.jpg \nmore", "root/a/x.jpg"),
        ("Failed to decode sample #0 : r/train.rec at index 5", "r/train.rec@5"),
        ("Failed to decode sample #0 : r/train-0.tar:512:jpg", "r/train-0.tar@512"),
        ("Failed to decode sample #0 : r/val_lmdb at key 0001", "r/val_lmdb@0001"),
    ],
)
def test_image_in_a_message_is_found_without_a_search(monkeypatch, text, image):
    assert bad_images.bad_image(f"Error: {text}", None, "root")[0] == image

    def fail(data_set):
        raise RuntimeError(f"Error: {text}")

    monkeypatch.setattr(bad_images, "_undecoded", fail)
    for operator in ("decoders.image", "peek_image_shape", "_tensor_subscript", "reshape"):
        assert bad_images.bad_image(f"Error in operator nvidia.dali.fn.{operator}", None, "root")[0] == image


@pytest.mark.parametrize(
    ("text", "reason"),
    [('\nencountered: Assert on "a" failed: no file\nmore', "no file"), ("\nencountered:", "unknown reason")],
)
def test_reason_of_a_reader_error(text, reason):
    assert bad_images.reader_problem(f"Error in operator nvidia.dali.fn.readers.file{text}") == reason
    assert bad_images.reader_problem(f"Error in operator nvidia.dali.fn.resize{text}") is None
