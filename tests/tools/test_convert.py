import contextlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import data_files
import numpy as np
import pytest
from PIL import Image

from conftest import ROOT
from layouts import obey
from paddle_resnet import dataset
from paddle_resnet.data import indexes
from paddle_resnet.data.formats import INDEXED, SINGLE_FILE, read_image, recordio
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert, workers
from paddle_resnet.utils import files
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here")


def contents(root, mode=Mode.EVAL):
    """Return [(bytes of the image, label)] of a split, in the stored order."""
    return [read_image(image) for image in DataRoot(str(root)).listed(mode)]


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("to", convert.RECORD_FORMATS)
def test_conversion_keeps_bytes_labels_and_class_names(photos, converted, to):
    for mode in Mode:
        expected, actual = contents(photos, mode), contents(converted[to], mode)
        if mode is Mode.TRAIN:
            assert actual != expected  # the order of records is random
            expected, actual = sorted(expected), sorted(actual)
        assert actual == expected
    assert (converted[to] / "classes.txt").read_text() == "class0\nclass1\nclass2\n"


def test_recordio_header_contains_number_of_index(converted):
    data = (converted["recordio"] / "val.rec").read_bytes()
    index = [line.split() for line in (converted["recordio"] / "val.idx").read_text().splitlines()]
    assert len(index) == 23
    for number, offset in index:
        extra_labels, _, image, unused = recordio.HEAD.unpack_from(data, int(offset) + 8)
        assert (extra_labels, image, unused) == (0, int(number), 0)


def test_members_of_tar_file(converted):
    with tarfile.open(converted["webdataset"] / "train-000001.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
        assert {member.mtime for member in tar} == {0}
    assert sorted(members) == [f"{i:08d}.{extension}" for i in range(10, 20) for extension in ("cls", "jpg")]
    labels = [label for _, label in contents(converted["webdataset"], Mode.TRAIN)[10:20]]
    assert [int(members[f"{i:08d}.cls"]) for i in range(10, 20)] == labels


@pytest.mark.parametrize("to", convert.RECORD_FORMATS)
@pytest.mark.parametrize("source", data_files.FORMATS)
def test_record_files_can_be_converted(converted, tmp_path, monkeypatch, source, to):
    monkeypatch.setattr(convert, "BLOCK", 4)  # more blocks than are queued at once
    assert convert.convert(converted[source], tmp_path / "x", to, workers=1) == {"train": 30, "val": 23}
    assert contents(tmp_path / "x") == contents(converted[source])
    assert (tmp_path / "x" / "classes.txt").read_text() == "class0\nclass1\nclass2\n"


def test_conversion_of_file_list_writes_no_class_names(converted, tmp_path):
    assert convert.IMAGES_PER_SHARD == 2000
    partial = tmp_path / "x/convert.json.host.1.partial"  # left by a conversion that was killed at its start
    partial.parent.mkdir()
    partial.touch()
    convert.convert(converted["filelist"], tmp_path / "x", "tfrecord", workers=1, images_per_shard=15)
    assert not partial.exists()
    assert not (tmp_path / "x" / "classes.txt").exists()
    assert json.loads((tmp_path / "x/convert.json").read_text())["shards"] == {"train": 2, "val": 2}
    assert contents(tmp_path / "x") == contents(converted["filelist"])


@pytest.mark.parametrize(("to", "names"), [("tfrecord", "{}-*-of-000??"), ("webdataset", "{}-??????.tar")])
def test_shards_flag_sets_number_of_equal_shards(photos, tmp_path, to, names):
    done = []
    convert.convert(photos, tmp_path / "x", to, shards=7, workers=2, progress=lambda n, total: done.append(n))
    assert done == sorted(done) and done[-1] == 53
    shards = sorted(path for path in (tmp_path / "x").glob(names.format("train")))
    assert len(shards) == 7
    # As many images per shard as in train: 23 / (30 / 7), rounded up.
    assert len(list((tmp_path / "x").glob(names.format("val")))) == 6
    sizes = [len(indexes.open_index(str(shard), INDEXED[to])) for shard in shards]
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 1
    swapped = tmp_path / "swapped"  # more validation images than training images
    swapped.mkdir()
    (swapped / "train").symlink_to(photos / "val")
    (swapped / "val").symlink_to(photos / "train")
    convert.convert(swapped, tmp_path / "y", to, shards=7, workers=2)
    assert [len(list((tmp_path / "y").glob(names.format(split)))) for split in ("train", "val")] == [7, 10]
    with pytest.raises(UsageError, match="has only 23 images"):
        convert.convert(swapped, tmp_path / "z", to, shards=24, workers=2)


@pytest.mark.parametrize("command", ["convert --from x", "import x"])
def test_lmdb_is_no_longer_written(tmp_path, capsys, command):
    assert dataset.main([*command.split(), "--to", "lmdb", "--output", str(tmp_path / "y")]) == 2
    message = "--to: lmdb: LMDB files can be read, but no longer written; use webdataset\n"
    assert capsys.readouterr().err == f"paddle_resnet.dataset: error: {message}"


def test_resize_short_shrinks_large_images_upright_and_keeps_small_ones(tmp_path):
    folder = tmp_path / "source" / "val" / "a"
    folder.mkdir(parents=True)
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:, 100:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation 6: rotate by 90 degrees clockwise
    Image.fromarray(pixels).save(folder / "0.jpg", exif=exif, quality=95)
    Image.fromarray(pixels[:50, :80]).save(folder / "1.png")  # not larger than 50 pixels
    Image.fromarray(pixels).convert("CMYK").save(folder / "2.tif")
    for to in convert.RECORD_FORMATS:
        output = tmp_path / to
        convert.convert(tmp_path / "source", output, to, resize_short=50, quality=90, workers=1)
        first, second, third = (data for data, _ in contents(output))
        Image.new("RGB", (1, 1)).save(tmp_path / "quality_90.jpg", quality=90)
        with Image.open(io.BytesIO(first)) as image, Image.open(tmp_path / "quality_90.jpg") as expected:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (50, 100))
            assert image.quantization == expected.quantization
            gray = np.asarray(image.convert("L"))
            assert gray[:45].max() < 30
            assert gray[55:].min() > 225
        assert second == (folder / "1.png").read_bytes()
        with Image.open(io.BytesIO(third)) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (100, 50))
        if to == "webdataset":
            with tarfile.open(output / "val-000000.tar") as tar:
                names = [name for name in tar.getnames() if not name.endswith(".cls")]
            assert names == ["00000000.jpg", "00000001.png", "00000002.jpg"]


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_resize_short_scales_16_bit_images(tmp_path, suffix):
    """As in DALI, 16-bit values are scaled to 8 bits, not clipped at 255."""
    folder = tmp_path / "source" / "val" / "a"
    folder.mkdir(parents=True)
    values = np.tile(np.linspace(0, 65535, 100).astype(np.uint16), (100, 1))
    Image.fromarray(values).save(folder / f"0{suffix}")
    convert.convert(tmp_path / "source", tmp_path / "x", "recordio", resize_short=50, quality=95, workers=1)
    [(data, _)] = contents(tmp_path / "x")
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_allclose(np.asarray(image.convert("L"))[25], np.linspace(1, 254, 50), atol=4)


def test_file_list_images_may_have_any_suffix(photos, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a.jfif", "b"):
        shutil.copy(photos / "val/class0/00.jpg", source / name)
    (source / "val.txt").write_text("a.jfif 0\nb 1\n")
    convert.convert(source, tmp_path / "x", "webdataset", workers=1)
    assert contents(tmp_path / "x") == contents(source)


def test_skipped_images_are_omitted(photos, tmp_path, capsys):
    (tmp_path / "bad.txt").write_text("val/class0/00.jpg\ntrain/class1/01.jpg\n")
    counts = convert.convert(photos, tmp_path / "x", "recordio", workers=1, skip_list=str(tmp_path / "bad.txt"))
    assert counts == {"train": 29, "val": 22}
    assert contents(tmp_path / "x") == contents(photos)[1:]
    assert "has no images" not in capsys.readouterr().err
    (tmp_path / "bad.txt").write_text("".join(f"{path.relative_to(photos)}\n" for path in photos.glob("*/class1/*")))
    convert.convert(photos, tmp_path / "y", "recordio", workers=1, skip_list=str(tmp_path / "bad.txt"))
    warnings = capsys.readouterr().err
    for split in ("train", "val"):
        assert f"{split} has no images for 1 of 3 classes (class1); add images" in warnings


def test_skipped_images_may_have_different_paths_in_file_list(photos, tmp_path):
    root = tmp_path / "list"
    root.mkdir()
    (root / "val").symlink_to(photos / "val")
    (root / "val.txt").write_text("./val/class0/00.jpg 0\nval/class1/01.jpg 1\n")
    (tmp_path / "bad.txt").write_text("val/class0/00.jpg\n")
    skip_list = str(tmp_path / "bad.txt")
    assert convert.convert(root, tmp_path / "x", "tfrecord", workers=1, skip_list=skip_list) == {"val": 1}


def test_images_of_the_same_name_and_class_are_all_written_to_its_folder(photos, tmp_path):
    images = [ListedImage(f"{i}/x.jpg", each.path, 0) for i, each in enumerate(DataRoot(photos).listed(Mode.EVAL)[:3])]
    (tmp_path / "x.jpg").symlink_to(os.path.relpath(images[2].path, tmp_path))
    images[2] = ListedImage("x.jpg", str(tmp_path / "x.jpg"), 0)
    write = partial(convert.write, "x", {"val": images}, ["a"], tmp_path / "x", convert.FOLDER, workers=1)
    with pytest.raises(UsageError, match="--shards 2: class folders have no shards; remove --shards"):
        write(shards=2)
    write()
    (tmp_path / "x/val/a/x.jpg").unlink()
    (tmp_path / "x/val/a/x.jpg").symlink_to(tmp_path / "nowhere")
    write()  # repairs the folder
    assert len(contents(tmp_path / "x")) == 3 and not (tmp_path / "nowhere").exists()
    assert sorted(contents(tmp_path / "x")) == sorted(map(read_image, images))


# RecordIO has one record file per split. The shards of the other formats are written one after the other.
OTHERS = [pytest.param(to, marks=pytest.mark.soak) for to in convert.SHARDED]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["recordio", *OTHERS])
def test_killed_conversion_resumes_with_same_images(photos, converted, tmp_path, to):
    """The test kills the command whenever a new file appears."""
    output = tmp_path / "x"
    command = [sys.executable, "-m", "paddle_resnet.dataset", "convert", "--from", photos, "--to", to]
    command += ["--output", output, "--workers", "1", "--unchecked"]
    command += ["--shards", "3"] if to in convert.SHARDED else []
    seen = set()
    for _ in range(8):
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            present = (name for _, folders, files in os.walk(output) for name in (*folders, *files))
            normalized = {re.sub(r"[^.]+\.\d+\.partial", "partial", name) for name in present}
            if normalized - seen:
                seen |= normalized
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True).returncode == 0
    assert json.loads((output / "convert.json").read_text())["complete"]
    assert not list(output.glob("*.partial"))
    assert sorted(tree(output)) == sorted(tree(converted[to]))
    for mode in Mode:
        assert contents(output, mode) == contents(converted[to], mode)


def test_damaged_records_of_killed_conversion_are_rejected(photos, converted, tmp_path):
    output = tmp_path / "x"
    shutil.copytree(converted["recordio"], output)
    plan = json.loads((output / "convert.json").read_text())
    (output / "convert.json").write_text(json.dumps(plan | {"complete": False}))
    for name in ("val.idx", "val.rec"):
        (output / name).rename(output / f"{name}.partial")
    os.truncate(output / "val.rec.partial", (output / "val.rec.partial").stat().st_size // 2)
    with pytest.raises(UsageError, match=r"val\.rec\.partial: damaged; remove its folder and convert again"):
        convert.convert(photos, output, "recordio", workers=1)


@pytest.mark.parametrize("to", convert.RECORD_FORMATS)
def test_finished_files_are_not_rewritten(photos, tmp_path, to):
    output = tmp_path / "x"
    shards = 3 if to in convert.SHARDED else None
    convert.convert(photos, output, to, shards=shards, workers=1)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    convert.convert(photos, output, to, shards=shards, workers=1)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    # Mark the conversion as incomplete, but keep all record files.
    manifest = json.loads((output / "convert.json").read_text())
    (output / "convert.json").write_text(json.dumps({**manifest, "complete": False}))
    done = []
    progress = {"progress": lambda n, total: done.append((n, total)), "check": lambda *_: pytest.fail("checked again")}
    convert.convert(photos, output, to, shards=shards, quality=80, workers=1, **progress)  # no image is resized
    after = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    written = {path.name for path in after if after[path] != before[path]}
    assert written == {"convert.json", "classes.txt"}
    assert done[-1] == (53, 53)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "webdataset"}, "contains a conversion with a different --to "),
        ({"shards": 4}, "contains a conversion with a different --shards "),
        ({"resize_short": None}, "contains a conversion with a different --resize-short "),
        ({"quality": 80}, "contains a conversion with a different --quality "),
    ],
)
def test_different_conversion_to_same_folder_is_rejected(photos, tmp_path, options, message):
    first = {"to": "tfrecord", "shards": 3, "resize_short": 30, "workers": 1}
    convert.convert(photos, tmp_path / "x", **first)
    before = tree(tmp_path / "x")
    with pytest.raises(UsageError, match=message):
        convert.convert(photos, tmp_path / "x", **first | options)
    assert tree(tmp_path / "x") == before


@pytest.mark.parametrize("to", ["recordio", "webdataset"])
def test_conversion_with_changed_image_list_is_rejected(photos, tmp_path, to):
    options = {"workers": 1, "images_per_shard": 29}  # 2 shards for 30 images, which become 29
    shutil.copytree(photos, tmp_path / "photos")
    convert.convert(tmp_path / "photos", tmp_path / "x", to, **options)
    (tmp_path / "photos" / "train" / "class0" / "00.jpg").unlink()
    with pytest.raises(UsageError, match="contains a conversion with different images"):
        convert.convert(tmp_path / "photos", tmp_path / "x", to, **options)
    image, renamed = (ListedImage(name, str(photos / "val/class0/00.jpg"), 0) for name in ("a", "b"))
    assert convert._digest([image]) != convert._digest([renamed])


def test_digest_of_files_depends_on_size_time_and_database(tmp_path):
    """An LMDB database is a folder, whose own size and modification time do not change with its content."""

    def digest(path, content, time_s):
        path.write_bytes(content)
        os.utime(path, (time_s, time_s))
        return convert._digest_of_files([ListedImage("name", str(tmp_path / "x"), 0)])

    (tmp_path / "x").write_bytes(b"")
    file = tmp_path / "x"
    assert digest(file, b"a", 1) == digest(file, b"b", 1)
    assert len({digest(file, b"a", 1), digest(file, b"ab", 1), digest(file, b"a", 2)}) == 3
    file.unlink()
    file.mkdir()
    assert digest(file / "data.mdb", b"a", 1) != digest(file / "data.mdb", b"ab", 1)


def test_conversion_with_changed_label_is_rejected(photos, tmp_path):
    source = shutil.copytree(photos, tmp_path / "photos")
    shutil.rmtree(source / "train")
    images = sorted(path.relative_to(source) for path in source.glob("val/*/*.jpg"))
    for last in (2, 1):  # label of the last image
        labels = [i % 3 for i in range(len(images) - 1)] + [last]
        (source / "val.txt").write_text(
            "".join(f"{image} {label}\n" for image, label in zip(images, labels, strict=True))
        )
        if last == 2:
            convert.convert(source, tmp_path / "x", "recordio", workers=1)
    with pytest.raises(UsageError, match="contains a conversion with different images"):
        convert.convert(source, tmp_path / "x", "recordio", workers=1)


@pytest.mark.parametrize(("to", "is_complete"), [("recordio", False), ("webdataset", True)])
def test_changed_image_is_converted_again(photos, tmp_path, capsys, to, is_complete):
    source, output = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "x"
    options = {"to": to, "shards": 2 if to in convert.SHARDED else None, "workers": 1}
    convert.convert(source, output, **options)
    manifest = json.loads((output / "convert.json").read_text())
    (output / "convert.json").write_text(json.dumps({**manifest, "complete": is_complete}))
    if to == "recordio":  # the conversion was killed before the files got their final names
        for name in ("val.rec", "val.idx"):
            (output / name).rename(output / f"{name}.partial")
    image = source / "val/class0/00.jpg"
    image.write_bytes(image.read_bytes()[:-3] + b"?\xff\xd9")  # the size is unchanged
    other = output / ("old_train.rec" if to == "recordio" else "old_train-000000.tar")
    other.touch()
    convert.convert(source, output, **options)
    other.unlink()  # the conversion removes only files that it has written
    assert f"--output {output}: files in {source} have changed since the conversion began" in capsys.readouterr().err
    assert contents(output) == contents(source)
    assert len(contents(output, Mode.TRAIN)) == 30
    convert.convert(source, output, **options)
    assert capsys.readouterr().err == ""


def test_changed_images_are_checked_before_they_are_converted_again(photos, tmp_path):
    source = shutil.copytree(photos, tmp_path / "photos")
    command = ["convert", "--from", str(source), "--to", "recordio", "--output", str(tmp_path / "x"), "--workers", "1"]
    assert dataset.main(command) == 0
    before = tree(tmp_path / "x")
    (source / "val/class0/00.jpg").write_bytes(b"damaged")
    assert dataset.main(command) == 2
    assert tree(tmp_path / "x") == before


@pytest.mark.parametrize("command", [["info"], ["convert", "--to", "recordio", "--output", "x", "--from"]])
def test_split_without_images_is_reported_with_remedy(photos, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "val"):
        for label in ("class0", "class1"):
            shutil.copytree(photos / name / label, tmp_path / "source" / name / f"x{label}" / label)
    assert dataset.main([*command, str(tmp_path / "source")]) == 2
    message = capsys.readouterr().err
    assert "train/xclass0/class0/, train/xclass1/class1/: class folders one level too deep; run `" in message
    assert dataset.main([*command, obey(message)]) == 0


def test_conversion_of_older_version_is_kept_with_a_warning(photos, tmp_path, capsys):
    convert.convert(photos, tmp_path / "x", "recordio", workers=1)
    manifest = json.loads((tmp_path / "x/convert.json").read_text())
    for key in ("bytes", "label_offset"):
        del manifest[key]
    for split in manifest["splits"].values():
        del split["files_sha256"]
    (tmp_path / "x/convert.json").write_text(json.dumps(manifest))
    before = tree(tmp_path / "x")
    convert.convert(photos, tmp_path / "x", "recordio", workers=1)
    assert "converted by an older version, so file changes cannot be detected" in capsys.readouterr().err
    assert tree(tmp_path / "x") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "recordio", "--shards", "2"], "--shards 2: recordio has one file per split"),
        (["--to", "tfrecord", "--shards", "31"], "has only 30 images; use a smaller number"),
        (["--to", "tfrecord", "--quality", "101"], "101 is too large; use a whole number from 1 to 100"),
        (["--to", "tfrecord", "--quality", "50"], "--quality 50: requires --resize-short; add it, or remove"),
        (["--to", "tfrecord", "--shards", "0"], "0 is too small"),
        (["--to", "jpeg"], "invalid choice: 'jpeg'"),
    ],
)
def test_invalid_flags_exit_with_code_2(photos, tmp_path, capsys, flags, message):
    assert dataset.main(["convert", "--from", str(photos), "--output", str(tmp_path / "x"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_flags_set_size_and_quality(photos, tmp_path):
    def image(*flags):
        """Convert the photos with these flags and return (first image, its length in bytes)."""
        output = tmp_path / f"converted{len(flags)}"
        command = ["convert", "--from", str(photos), "--to", "tfrecord", "--output", str(output)]
        assert dataset.main([*command, *flags]) == 0
        data, _ = contents(output)[0]
        return Image.open(io.BytesIO(data)), len(data)

    original, resized, compressed = (
        image(),
        image("--resize-short", "30"),
        image("--resize-short", "30", "--quality", "50"),
    )
    assert [min(picture.size) for picture, _ in (original, resized, compressed)] == [min(original[0].size), 30, 30]
    assert min(original[0].size) > 30 and compressed[1] < resized[1]
    Image.new("RGB", (1, 1)).save(tmp_path / "quality_95.jpg", quality=95)  # the default
    with Image.open(tmp_path / "quality_95.jpg") as expected:
        assert resized[0].quantization == expected.quantization


def test_source_may_have_as_many_shards_as_images(photos, tmp_path):
    source = tmp_path / "source/val/a"
    source.mkdir(parents=True)
    shutil.copy(photos / "val/class0/00.jpg", source / "x.jpg")
    assert convert.convert(tmp_path / "source", tmp_path / "x", "tfrecord", shards=1, workers=1) == {"val": 1}
    with pytest.raises(UsageError, match="--output .*x.jpg: exists, but contains no conversion"):
        convert._continued(source / "x.jpg", {})
    for name in ("a\rb", "a\nb"):
        source = source.rename(source.with_name(name))
        with pytest.raises(UsageError, match="a class name contains a line break"):
            convert.convert(tmp_path / "source", tmp_path / "y", "tfrecord", workers=1)


def test_invalid_source_or_output_exits_with_code_2(photos, tmp_path, capsys):
    convert_to = ["convert", "--to", "tfrecord", "--from"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ([str(photos), "--output", str(photos)], f"--output {photos}: would change the data set {photos}"),
        ([str(photos), "--output", str(photos / "train/rec")], "/train/rec: would change the data set"),
        ([str(photos), "--output", str(tmp_path / "full")], "exists, but contains no conversion"),
        ([str(tmp_path / "full"), "--output", str(tmp_path / "x")], "contains neither train/ nor val/"),
        ([str(tmp_path / "none"), "--output", str(tmp_path / "x")], "not a folder"),
    ):
        assert dataset.main([*convert_to, *arguments]) == 2
        assert message in capsys.readouterr().err


HOLDER = """
import sys
from paddle_resnet.utils import locks
file = locks.acquire(sys.argv[1], print)
print("locked", flush=True)
sys.stdin.read()
"""


def test_concurrent_conversion_to_same_output_is_rejected(photos, tmp_path, capsys):
    """A concurrent second conversion would write every record again, so it is rejected. A rejected conversion must not
    leave any files."""
    (tmp_path / "x").mkdir()
    command = ["convert", "--from", str(photos), "--to", "recordio", "--unchecked", "--output"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "x/.lock"], cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == "locked\n"
        assert dataset.main([*command, str(tmp_path / "x")]) == 2
        message = f"--output {tmp_path}/x: in use by another process (process {holder.pid} on "
        assert message in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "x").iterdir()] == [".lock"]
        holder.communicate("")
    (tmp_path / "none").mkdir()
    for name, is_kept in (("y", False), ("none", True)):  # a folder that existed before is kept
        (tmp_path / "source").mkdir(exist_ok=True)
        assert dataset.main(["convert", "--from", str(tmp_path / "source"), *command[3:], str(tmp_path / name)]) == 2
        assert (tmp_path / name).exists() == is_kept


@pytest.mark.parametrize(
    ("to", "name", "damage"),
    [
        ("tfrecord", "train-00000-of-00003", "missing"),
        ("webdataset", "val-000000.tar", "pipe"),
        ("recordio", "val.rec", "shorter"),
    ],
)
def test_missing_or_damaged_record_files_are_written_again(photos, converted, tmp_path, capsys, to, name, damage):
    root = shutil.copytree(converted[to], tmp_path / "x")
    arguments = (photos, root, to, 3 if to in convert.SHARDED else None)
    record = root / name
    if damage == "shorter":
        os.truncate(record, 50)
    else:
        record.unlink()
        if damage == "pipe":
            os.mkfifo(record)
    done = []
    convert.convert(*arguments, workers=1, progress=lambda n, total: done.append((n, total)))
    assert f"warning: --output {root}: record files that are missing or damaged ({name})" in capsys.readouterr().err
    if to == "tfrecord":  # one of three training shards is written
        assert done[-3:] == [(30, 53), (30, 53), (53, 53)]
    assert done[-1] == (53, 53)
    assert sorted(contents(root, Mode.TRAIN)) == sorted(contents(photos, Mode.TRAIN))
    assert contents(root) == contents(converted[to])
    convert.convert(*arguments, workers=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "entry", [{"../train-0.tar": 1}, {"train-000000.tar": "1"}, {"classes.txt": 1}, ["train-0.tar"]]
)
def test_invalid_names_and_sizes_in_convert_json_are_rejected(photos, converted, tmp_path, entry):
    """The command deletes damaged record files, so it must not accept other file names."""
    shutil.copytree(converted["webdataset"], tmp_path / "x")
    (tmp_path / "train-0.tar").touch()
    manifest = tmp_path / "x/convert.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"bytes": entry}))
    with pytest.raises(UsageError, match=r"convert.json: damaged"):
        convert.convert(photos, tmp_path / "x", "webdataset", 3)
    assert (tmp_path / "train-0.tar").exists()


def test_class_names_of_one_split_are_enough(photos, tmp_path):
    """The class folders of train/ have names; the file list of the validation split has only labels."""
    (tmp_path / "train").symlink_to(photos / "train")
    (tmp_path / "images").symlink_to(photos / "val")
    names = sorted(str(path.relative_to(photos / "val")) for path in (photos / "val").glob("*/*"))
    (tmp_path / "val.txt").write_text("".join(f"images/{name} {name[5]}\n" for name in names))
    splits, classes = convert._list_source(DataRoot(tmp_path))
    assert classes == ["class0", "class1", "class2"]
    assert [image.name for image in splits["val"]] == [f"images/{name}" for name in names]
    train = [image.name for image in splits["train"]]
    assert train != sorted(train) and len(train) == 30
    assert [image.name for image in convert._list_source(DataRoot(tmp_path))[0]["train"]] == train


def test_output_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    message = f"^--output {tmp_path}/file/x: cannot be written \\(Not a directory\\); choose a different path$"
    with pytest.raises(UsageError, match=message), convert.locked(tmp_path / "file/x"):
        pass


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_unusable_lock_is_an_error(photos, tmp_path, capsys, make):
    (tmp_path / "x").mkdir()
    make(tmp_path / "x/.lock")
    command = ["convert", "--from", str(photos), "--to", "recordio", "--unchecked", "--output", str(tmp_path / "x")]
    assert dataset.main(command) == 2
    assert f"--output {tmp_path}/x: {tmp_path}/x/.lock cannot be locked (" in capsys.readouterr().err
    assert os.path.lexists(tmp_path / "x/.lock")


@pytest.mark.slow
def test_undecodable_image_to_resize_is_reported(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", ProcessPoolExecutor)  # a worker process sends the error
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "train" / "class0" / "00.jpg").write_bytes(b"not an image")
    for to in ("tfrecord", "recordio"):
        with pytest.raises(UsageError, match=r"train/class0/00.jpg: cannot be decoded"):
            convert.convert(tmp_path / "photos", tmp_path / to, to, resize_short=30, workers=1)


def test_undecodable_record_to_resize_is_named(tmp_path):
    (tmp_path / "source/val/a").mkdir(parents=True)
    (tmp_path / "source/val/a/0.jpg").write_bytes(b"not an image")
    convert.convert(tmp_path / "source", tmp_path / "x", "recordio", workers=1)
    with pytest.raises(UsageError, match=f"^{tmp_path}/x/val.rec@0: cannot be decoded .*; repair the image or"):
        convert.convert(tmp_path / "x", tmp_path / "y", "recordio", resize_short=30, workers=1)


def test_all_undecodable_images_are_reported_before_writing(photos, tmp_path, capsys):
    root, output, bad = tmp_path / "my photos", tmp_path / "x", tmp_path / "bad.txt"
    shutil.copytree(photos, root)
    names = ["train/class0/00.jpg", "val/class2/02.jpg"]
    for name in names:
        (root / name).write_bytes((root / name).read_bytes()[:300])
    command = ["convert", "--from", str(root), "--to", "tfrecord", "--output", str(output)]
    assert dataset.main(command) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert f"{root}: 2 of 53 images cannot be used: " in stderr
    assert f"paddle_resnet.dataset verify '{root}' --fix-list bad.txt` and add --skip-list bad.txt" in stderr
    assert all(name in stderr for name in names)
    assert not output.exists()
    bad.write_text("".join(f"{name}\n" for name in names))
    assert dataset.main([*command, "--skip-list", str(bad)]) == 0
    assert dataset.main([*command[:-1], str(tmp_path / "y"), "--unchecked"]) == 0
    assert "30 train and 23 val images" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "more"), [(10, ""), (130, " and 120 more")])
def test_many_undecodable_images_are_counted(tmp_path, count, more):
    (tmp_path / "empty.jpg").touch()
    images = [ListedImage(f"{i}.jpg", str(tmp_path / "empty.jpg"), 0) for i in range(count)]
    calls = []
    with pytest.raises(UsageError, match=rf"^d: {count} of {count} images .*, 9.jpg is empty{more}; repair them"):
        convert._check_decodable("d", images, 1, lambda *progress: calls.append(progress))
    assert calls == [(done, count) for done in (64, 128, count) if done <= count]


def test_unwritable_progress_bar_does_not_fail_the_conversion(photos, tmp_path, capsys):
    command = ["convert", "--from", str(photos), "--to", "recordio", "--output", str(tmp_path / "x"), "--workers", "1"]
    with open("/dev/full", "w") as full, contextlib.redirect_stderr(full):
        assert dataset.main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path}/x: 30 train and 23 val images as recordio\n"


def test_recordio_payload_may_contain_magic_number(tmp_path):
    """The writer splits images at the magic number, and the reader joins the parts again."""
    magic = struct.pack("<I", recordio.MAGIC)
    images = [magic, b"abcd" + magic + b"efgh" + magic, b"ab" + magic, 3 * magic + b"x", b"", b"1234567"]
    (tmp_path / "source" / "val" / "a").mkdir(parents=True)
    for i, image in enumerate(images):
        (tmp_path / "source" / "val" / "a" / f"{i}.jpg").write_bytes(image)
    convert.convert(tmp_path / "source", tmp_path / "x", "recordio", workers=1)
    assert contents(tmp_path / "x") == [(image, 0) for image in images]
    # Every magic number at a multiple of 4 bytes starts a record or a part.
    data = (tmp_path / "x" / "val.rec").read_bytes()
    places = [i for i in range(0, len(data), 4) if data[i : i + 4] == magic]
    assert all(struct.unpack_from("<I", data, i + 4)[0] & (1 << 29) - 1 <= len(data) for i in places)


def test_index_command_creates_missing_indexes(converted, tmp_path, cache, capsys):
    for name in ("recordio", "tfrecord", "webdataset"):
        root = tmp_path / name
        shutil.copytree(converted[name], root)
        kept = sorted(root.glob("*.idx"))
        expected = {path: path.read_bytes() for path in kept}
        for path in kept[1:]:
            path.unlink()
        assert dataset.main(["index", str(root)]) == 0
        created = counted(len(kept) - 1, "index file")
        assert f"{root}: {created} created, 1 already existed" in capsys.readouterr().out
        cached = [path for path in cache.rglob("*.idx") if path.name.startswith(("train-", "val-"))]
        if name == "webdataset":
            assert sorted(root.glob("*.idx")) == kept[:1]
            assert sorted(path.read_bytes() for path in cached) == sorted(expected[path] for path in kept[1:])
        else:
            assert {path: path.read_bytes() for path in sorted(root.glob("*.idx"))} == expected and not cached
        assert convert.build_indexes(root) == (0, len(kept))
        kept[0].write_bytes(b"".join(kept[0].read_bytes().splitlines(keepends=True)[:-1]))
        assert dataset.main(["index", str(root)]) == 2  # existing indexes are checked, too
        assert f"{kept[0]}: does not match" in capsys.readouterr().err
    assert dataset.main(["index", str(converted["folder"])]) == 2
    assert "contains no record files with names such as train.rec" in capsys.readouterr().err
    assert dataset.main(["index", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path}/nowhere: not a folder; use the folder that contains the shards" in capsys.readouterr().err


def test_unwritable_index_exits_with_code_2(converted, tmp_path, cache, capsys):
    shutil.copytree(converted["recordio"], tmp_path / "x")
    index = tmp_path / "x/train.idx"
    index.unlink()
    files.partial_path(index).mkdir()  # root could write to a read-only folder
    cache.write_text("a file")
    assert dataset.main(["index", str(tmp_path / "x")]) == 2
    message = "can be written; make one of the folders writable"
    assert message in capsys.readouterr().err
    cache.unlink()  # obey the message
    assert dataset.main(["index", str(tmp_path / "x")]) == 0


def test_skipping_every_image_of_a_split_exits_with_code_2(photos, tmp_path, capsys):
    skip = tmp_path / "skip.txt"
    skip.write_text("".join(f"{path.relative_to(photos)}\n" for path in photos.glob("val/*/*")))
    command = [
        "convert",
        "--from",
        str(photos),
        "--to",
        "recordio",
        "--output",
        str(tmp_path / "x"),
        "--skip-list",
        str(skip),
    ]
    assert dataset.main(command) == 2
    assert f"{photos}: no val images to convert; add images, or shorten --skip-list" in capsys.readouterr().err


# A program that converts images in blocks of four. After some images, the program prints the process IDs of its workers
# and kills itself.
KILLED = """
import multiprocessing, os, signal, sys
from paddle_resnet.tools import convert, workers

def progress(done, total):
    if done >= 9:
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

workers.BLOCK = 4
convert.convert(*sys.argv[1:], workers=2, progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", convert.SINGLE_FILE)
def test_killed_conversion_stops_workers_and_keeps_images(photos, converted, tmp_path, to):
    output = tmp_path / "x"
    output_file = tmp_path / "stdout"  # a file, because surviving workers would keep a pipe open
    with open(output_file, "w") as f:
        killed = subprocess.run([sys.executable, "-c", KILLED, str(photos), str(output), to], cwd=ROOT, stdout=f)
    assert killed.returncode == -signal.SIGKILL
    workers = output_file.read_text().split()
    assert workers
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    done = []
    convert.convert(photos, output, to, workers=1, progress=lambda n, total: done.append(n))
    assert done[0] >= 8
    assert tree(output).keys() == tree(converted[to]).keys()
    for mode in Mode:
        assert contents(output, mode) == contents(converted[to], mode)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"  # a zombie process has already exited
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("to", ["recordio"])
def test_full_disk_exits_with_code_2_and_resumes(photos, tmp_path, capsys, to):
    """RLIMIT_FSIZE limits the file size, so writes fail as on a full disk. Without the limit, the same command resumes
    the conversion."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, 25_000));"
    code += "from paddle_resnet import dataset; sys.exit(dataset.main(sys.argv[1:]))"
    arguments = ["convert", "--from", photos, "--to", to, "--output", tmp_path / "out", "--workers", "1", "--unchecked"]
    arguments = list(map(str, arguments))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, done.stderr
    assert f"--output {tmp_path}/out: cannot be written (" in done.stderr
    assert dataset.main(arguments) == 0
    assert "30 train and 23 val images" in capsys.readouterr().out


def test_incomplete_record_of_killed_conversion_is_removed(tmp_path):
    images = [(b"x" * 101, 0), (b"y" * 50, 1)]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    with SINGLE_FILE["recordio"](str(tmp_path / "whole"), "train") as writer:
        writer.write(images)
        writer.finish()
    with SINGLE_FILE["recordio"](str(tmp_path / "killed"), "train") as writer:
        writer.write(images[:1])
    for ending, rest in ((".rec", b"half"), (".idx", b"1\t")):
        with open(tmp_path / f"killed/train{ending}.partial", "ab") as file:
            file.write(rest)
    with SINGLE_FILE["recordio"](str(tmp_path / "killed"), "train") as writer:
        assert len(writer) == 1
        writer.write(images[1:])
        writer.finish()
    for name in ("train.rec", "train.idx"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
