import contextlib
import io
import itertools
import os
import shlex
import shutil
import struct
import sys
import zlib
from types import SimpleNamespace

import data_files
import lmdb
import pytest
from data_files import open_split
from PIL import Image, features
from tfrecord import TFRecordWriter

from paddle_resnet import dali, dataset
from paddle_resnet.data import bad_images, indexes
from paddle_resnet.data.formats import INDEXED, RECORDS, read_image, recordio, tfrecord
from paddle_resnet.data.formats.lmdb import datum_class
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.errors import DataError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("one_block")


def test_stream_without_descriptor(tmp_path):
    assert bad_images._descriptor(io.StringIO()) is None
    with open(tmp_path / "x", "w") as file:
        assert bad_images._descriptor(file) == file.fileno()


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize(
    ("data_format", "name", "bytes_left"),
    [
        *(("folder", "train/class0/00.jpg", count) for count in (0, 20, 500)),
        ("tfrecord", "train-00000-of-00001@", 500),
        ("webdataset", "train-000000.tar@", 0),
        ("recordio", "train.rec@", 20),
        *(("lmdb", "train_lmdb@", count) for count in (0, 500)),
        ("parquet", "train-00000-of-00001.parquet@", 20),  # rows without content are rejected when they are read
    ],
)
def test_undecodable_image_is_reported_with_full_relative_path(
    photos, parse, tmp_path, work_in, data_format, name, bytes_left
):
    work_in(tmp_path)
    shutil.copytree(photos, "data/z")
    image = tmp_path / "data/z/train/class0/00.jpg"
    image.write_bytes(image.read_bytes()[:bytes_left])
    root = "data/z"
    if data_format != "folder":
        data_files.write(root, "data/y", data_format)
        root = "data/y"
    with pytest.raises(DataError) as e:
        list(dali.build_dataloader(parse("--image-root", root, "--batch-size", "6"), Mode.TRAIN))
    assert str(e.value).startswith(f"{root}/{name}")
    assert str(e.value).count(name) == 1
    assert ": cannot be decoded (rank 0); repair" in str(e.value)
    next_command = "convert the data set" if data_format == "lmdb" else "train"
    assert str(e.value).endswith(f" --fix-list bad.txt` and {next_command} with --skip-list bad.txt")


BAD = 17  # number of the record with a bad label
TFRECORD_LABELS = {
    "empty": ([], "int"),
    "missing": None,
    "float": (1.0, "float"),
    "bytes": (b"1", "byte"),
    "two labels": ([1, 2], "int"),
}


def write_records(root, images, data_format, bad):
    """Write `images`, [(bytes, label)], as training records. Record BAD has the label or header `bad`. Return its name
    in messages."""
    if data_format == "tfrecord":
        with contextlib.closing(TFRecordWriter(str(root / "train-00000-of-00001"))) as writer:
            for i, (image, label) in enumerate(images):
                feature = bad if i == BAD else (label, "int")
                labels = {} if feature is None else {tfrecord.LABEL: feature}
                writer.write({tfrecord.IMAGE: (image, "byte"), **labels})
    elif data_format == "recordio":
        heads = [recordio.HEAD.pack(0, label, i, 0) for i, (_, label) in enumerate(images)]
        heads[BAD] = bad
        content = [recordio.encode(head + image) for head, (image, _) in zip(heads, images, strict=True)]
        (root / "train.rec").write_bytes(b"".join(content))
    else:
        (root / "train_lmdb").mkdir()
        with lmdb.open(str(root / "train_lmdb"), map_size=1 << 24) as env, env.begin(write=True) as transaction:
            for i, (image, label) in enumerate(images):
                fields = bad if i == BAD else {"label": label, "encoded": True}
                transaction.put(b"%08d" % i, datum_class()(data=image, **fields).SerializeToString())
        return f"{root}/train_lmdb: record {BAD:08d} is not an encoded image with a label; write it again"
    [shard] = RECORDS[data_format].detect(root, Mode.TRAIN)
    place = indexes.open_index(shard, INDEXED[data_format]).images[BAD, 0]
    return f"{shard}: the record at byte {place} "


@pytest.mark.parametrize(
    ("data_format", "bad", "reason"),
    [
        *(("tfrecord", label, "one whole number in image/class/label, but ") for label in TFRECORD_LABELS.values()),
        ("recordio", struct.pack("<IfQQfff", 3, 0, BAD, 0, 1, 2, 0), "3 labels, but only --multi-label reads more"),
        ("lmdb", {"encoded": True}, ""),
    ],
    ids=[*TFRECORD_LABELS, "three labels", "LMDB without label"],
)
def test_record_without_one_label_is_reported_with_place(
    photos, parse, tmp_path, few_checked_labels, verify_here, data_format, bad, reason
):
    """Only some of the labels are checked before the run."""
    images = [(path.read_bytes(), int(path.parent.name[-1])) for path in sorted((photos / "train").glob("*/*"))]
    place = write_records(tmp_path, images, data_format, bad)
    flags = ["--image-root", tmp_path, "--run-scope", "train_only"]
    with pytest.raises(DataError) as e:
        list(dali.build_dataloader(parse(*flags), Mode.TRAIN))
    message = str(e.value)
    assert message.startswith(place) and reason in message and message.endswith("--skip-list bad.txt (rank 0)")
    if data_format == "lmdb":
        return
    bad_list = tmp_path / "bad.txt"
    command = shlex.split(message.split("`")[-2].replace("bad.txt", str(bad_list)))
    assert dataset.main([*command[3:], "--run-scope", "train_only"]) == 1
    batches = list(dali.build_dataloader(parse(*flags, "--skip-list", bad_list), Mode.TRAIN))
    assert len(batches) == 29 // 8


def test_record_with_a_bad_label_stops_run_with_exit_code_2(photos, run_train, tmp_path, few_checked_labels, capsys):
    images = [(path.read_bytes(), int(path.parent.name[-1])) for path in sorted((photos / "train").glob("*/*"))]
    (tmp_path / "root").mkdir()
    place = write_records(tmp_path / "root", images, "tfrecord", ([], "int"))
    assert run_train("--run-scope", "train_only", image_root=tmp_path / "root")[0] == 2
    assert place in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["empty", "float"])
def test_bad_label_among_labels_from_1_is_reported_and_can_be_skipped(
    photos, run_train, tmp_path, few_checked_labels, verify_here, capsys, bad
):
    """The examples that are read to detect the label offset include the record, but its label is not checked there."""
    images = [(path.read_bytes(), int(path.parent.name[-1]) + 1) for path in sorted((photos / "train").glob("*/*"))]
    root, bad_list = tmp_path / "root", tmp_path / "bad.txt"
    root.mkdir()
    place = write_records(root, images, "tfrecord", TFRECORD_LABELS[bad])
    assert run_train("--run-scope", "train_only", image_root=root)[0] == 2
    captured = capsys.readouterr()
    assert f"the labels in the TFRecord files in {root} start at 1, so 1 is subtracted" in captured.out
    assert captured.err.count(place) == 1 and "one whole number in image/class/label" in captured.err
    # Obey the message.
    assert dataset.main(["verify", str(root), "--run-scope", "train_only", "--fix-list", str(bad_list)]) == 1
    skip = DataRoot(root, skip_list=bad_list).skip
    data_set = open_split(root, "auto", Mode.TRAIN, 3, 0, skip)
    assert [read_image(image)[1] for image in data_set.records()] == [0] * 10 + [1] * 9 + [2] * 10
    assert run_train("--run-scope", "train_only", "--skip-list", bad_list, image_root=root)[0] == 0


def test_search_for_a_record_ends_after_deadline(tmp_path):
    (tmp_path / "x").write_bytes(b"7")
    image = ListedImage("x@0", str(tmp_path / "x"), None, "webdataset", (0, 1, 0, 1))
    data_set = SimpleNamespace(records=lambda: iter([image, image]))
    for message in ("Requested shape:\t1\n", "Requested shape:\t10\n"):
        assert bad_images.bad_record(message, data_set, "root") is None
    problem = f"root: a record after {image.full_name} is not an image with one label; write it again"
    assert bad_images.bad_record("Requested shape:\t1\n", data_set, "root", search_s=-1) == problem
    assert bad_images.bad_record("Requested shape:\t10\n", data_set, "root", search_s=-1) is None


@pytest.mark.parametrize("root", ["data/z", "./data/z", "my data/z"])
def test_deleted_file_of_file_list_is_reported_with_path(photos, parse, tmp_path, work_in, root):
    """The file is deleted after the check of the list. At that time, the loader has read only the first batches."""
    work_in(tmp_path)
    shutil.copytree(photos, root)
    deleted = tmp_path / root / "val/class0/99.jpg"
    shutil.copy(photos / "val/class0/00.jpg", deleted)
    (tmp_path / root / "val.txt").write_text("val/class0/00.jpg 0\n" * 99 + "val/class0/99.jpg 0\n")
    args = parse("--image-root", root, "--data-format", "filelist", "--batch-size", "5", "--allow-one-class")
    loader = dali.build_dataloader(args, Mode.EVAL)
    deleted.unlink()
    with pytest.raises(DataError) as e:
        list(loader)
    assert str(e.value).startswith(f"{root}/val/class0/99.jpg: cannot be opened (rank 0); make it readable, or run")
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


def test_only_output_of_c_libraries_is_discarded(capfd):
    with open(2, "w", closefd=False) as stderr, contextlib.redirect_stderr(stderr):  # as outside of pytest
        files = os.listdir("/proc/self/fd")
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


def png_header(width, height):
    """Return a PNG file without pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


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
def test_sizes_of_images_are_limited(width, height, side, problem):
    found = bad_images.header_problem(png_header(width, height), side)
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
    decoder = SimpleNamespace(feed_input=lambda name, batch: None, run=run)
    monkeypatch.setattr(bad_images, "_decoders", {False: decoder})
    assert bad_images.decode(file.getvalue()) == "declares more pixels than fit in memory"
    assert bad_images.decode(file.getvalue()) is None


def test_images_of_which_only_parts_cannot_be_decoded_are_found():
    """DALI decodes a truncated BMP file with 32 bits, but no crop of it. In an image this high, DALI chooses invalid
    crops. Most JPEGs without an EXIF block are decoded only once."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.new("RGB", (64, 48))
    for image, kind, options, cut, decoders in (
        (picture, "jpeg", {}, 0, [True]),
        (picture, "jpeg", {"progressive": True}, 0, [True]),
        (picture, "jpeg", {"exif": exif}, 0, [False]),
        (picture, "png", {}, 0, [False]),
        (picture.convert("RGBA"), "bmp", {}, 0, [False]),
        (picture.convert("RGBA"), "bmp", {}, 200, []),
        (Image.new("L", (8, 41000)), "jpeg", {}, 0, []),
        (Image.new("L", (8, 41000)), "png", {}, 0, []),
    ):
        file = io.BytesIO()
        image.save(file, kind, **options)
        bad_images._decoders.clear()
        failure = bad_images.decode(file.getvalue()[: len(file.getvalue()) - cut])
        assert list(bad_images._decoders) == decoders  # a pipeline that has failed is removed
        assert (failure is None) == bool(decoders)


def test_search_for_bad_image_ends_after_deadline(monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    message = "Error in operator nvidia.dali.fn.decoders.image"
    damaged = (file.getvalue().replace(b"IDAT", b"IDAX"), "c.png")
    monkeypatch.setattr(bad_images, "_undecoded", lambda *_: iter([damaged]))
    assert bad_images.bad_image(message, None, "root") == ("root/c.png", "cannot be decoded")
    images = [damaged, (file.getvalue(), "a.png"), (b"", "b.png")]
    monkeypatch.setattr(bad_images, "_undecoded", lambda *_: iter(images))
    assert bad_images.bad_image(message, None, "root")[0] == "root/b.png"  # the headers of all images are checked first
    assert bad_images.bad_image("Error in operator nvidia.dali.fn.resize", None, "root")[0] is None
    times = itertools.count()
    monkeypatch.setattr(bad_images, "monotonic", lambda: next(times))
    monkeypatch.setattr(bad_images, "SEARCH_S", 30)

    def check(image):  # needs 40 s for the second image
        for _ in range(40 if image == b"slow" else 0):
            next(times)

    monkeypatch.setattr(bad_images, "header_problem", check)
    images = [(b"", "a.png"), (b"slow", "b.png"), (b"", "c.png")]
    place = "an image in root (not found in 30 s; slowest to check: root/b.png)"
    assert bad_images.bad_image(message, None, "root") == (place, "cannot be decoded")


@pytest.mark.skipif(os.cpu_count() == 1, reason="requires two CPU cores")
def test_search_reads_a_data_set_with_fewer_images_than_cpu_cores(tmp_path):
    (tmp_path / "a.png").write_bytes(b"abc")
    (tmp_path / "val.txt").write_text("a.png 0\n")
    data_set = open_split(tmp_path, "filelist", Mode.EVAL, 1, 0)
    assert set(bad_images._undecoded(data_set, ".")) == {(b"abc", "a.png")}


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
def test_image_in_a_message_is_found_without_a_search(text, image):
    assert bad_images.bad_image(f"Error: {text}", None, "root")[0] == image

    def fail(*arguments, **options):
        raise RuntimeError(f"Error: {text}")

    unreadable = SimpleNamespace(size=1, read=fail)  # the reader that searches for the image reports the image
    for operator in ("decoders.image", "peek_image_shape", "_tensor_subscript", "reshape"):
        assert bad_images.bad_image(f"Error in operator nvidia.dali.fn.{operator}", unreadable, "root")[0] == image


@pytest.mark.parametrize(
    ("text", "reason"),
    [('\nencountered: Assert on "a" failed: no file\nmore', "no file"), ("\nencountered:", "unknown reason")],
)
def test_reason_of_a_reader_error(text, reason):
    assert bad_images.reader_problem(f"Error in operator nvidia.dali.fn.readers.file{text}") == reason
    assert bad_images.reader_problem(f"Error in operator nvidia.dali.fn.resize{text}") is None
