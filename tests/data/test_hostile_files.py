"""Damaged and malicious files and folders. Each damaged or malicious file must cause an error message, both in training
and in verify."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import data_files
import numpy as np
import pytest
from PIL import Image
from webdataset import TarWriter

from conftest import ROOT
from helpers import without_permission
from paddle_resnet import dali, dataset
from paddle_resnet.data import bad_images, indexes
from paddle_resnet.data import root as root_module
from paddle_resnet.data.formats import INDEXED, RECORDS, folder, read_image, recordio
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import inspection, verify
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode, RunScope

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache", "one_block")


@pytest.fixture
def copy(converted, tmp_path):
    """Return a function that copies a converted data set and returns the new folder."""

    def copy(data_format):
        root = tmp_path / data_format
        shutil.copytree(converted[data_format], root)
        return root

    return copy


def open_split(root, mode=Mode.EVAL, num_of_class=3):
    return data_files.open_split(root, "auto", mode, num_of_class, 0)


def negative(rows):
    """Negate each number in the third row of an index."""
    columns = rows[2].replace("\t", " ").split(" ")
    return [*rows[:2], " ".join(f"-{column}" if column.isdigit() else column for column in columns), *rows[3:]]


def shifted(rows):
    columns = rows[2].replace("\t", " ").split(" ")
    columns[1 if len(columns) > 2 or "\t" in rows[2] else 0] = "4"
    return [*rows[:2], " ".join(columns), *rows[3:]]


ROWS = {
    "first row missing": lambda rows: rows[1:],
    "fourth row missing": lambda rows: [*rows[:3], *rows[4:]],
    "last row missing": lambda rows: rows[:-1],
    "row repeated": lambda rows: [*rows[:3], rows[2], *rows[3:]],
    "row replaced by previous row": lambda rows: [*rows[:3], rows[2], *rows[4:]],
    "all rows equal": lambda rows: [rows[0]] * len(rows),
    "negative": negative,
    "not at a record header": shifted,
    "huge": lambda rows: [*rows[:-1], rows[-1] + "0" * 5000],
    "above int64": lambda rows: [*rows[:-1], rows[-1] + "0" * 18],
    "with an underscore": lambda rows: [f"{rows[0][:-1]}_{rows[0][-1]}", *rows[1:]],
    "no rows": lambda rows: [],
}


@pytest.mark.parametrize("damage", ROWS)
@pytest.mark.parametrize("data_format", INDEXED)
def test_damaged_index_is_rejected(copy, data_format, damage):
    root = copy(data_format)
    shard = RECORDS[data_format].detect(str(root), Mode.EVAL)[0]
    path = Path(indexes.index_path(shard))
    rows = path.read_text().splitlines()
    head = [] if data_format != "webdataset" else [f"v1.1 {len(ROWS[damage](rows[1:]))}"]
    path.write_text("\n".join([*head, *ROWS[damage](rows[len(head) :])]) + "\n")
    with pytest.raises(UsageError, match="does not match .*; remove this index and run"):
        open_split(root)


@pytest.mark.parametrize("data_format", ["tfrecord", "webdataset"])
def test_index_in_wrong_order_is_rejected(copy, data_format):
    root = copy(data_format)
    path = Path(indexes.index_path(RECORDS[data_format].detect(str(root), Mode.EVAL)[0]))
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:2], rows[3], rows[2], *rows[4:]]))
    with pytest.raises(UsageError, match="idx: does not match"):
        open_split(root)


def test_recordio_index_with_gap_in_keys_is_compared_with_all_headers(copy, monkeypatch):
    root = copy("recordio")
    monkeypatch.setattr(recordio, "CHECKED_RECORDS", 1)
    path = root / "val.idx"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows).replace("5\t", "99\t", 1))
    assert open_split(root).size == 23
    path.write_text("".join([*rows[:5], *rows[6:]]))
    with pytest.raises(UsageError, match="does not match"):
        open_split(root)


def test_tar_index_may_omit_files_that_belong_to_no_sample(tmp_path):
    shard = str(tmp_path / "val-0.tar")
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("README", "folder/", "folder/ü.jpg", "folder/ü.cls", "folder/.hidden", "b.jpg", "b.cls", "end"):
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = 0 if name.endswith("/") else 1
            info.pax_headers = {"comment": "x" * 600} if name.startswith("b") else {}
            archive.addfile(info, io.BytesIO(b"1"))
    index = indexes.open_index(shard, INDEXED["webdataset"])
    assert len(index) == 2
    assert indexes.open_index(shard, INDEXED["webdataset"]).images.tolist() == index.images.tolist()


@pytest.mark.parametrize("data_format", [*INDEXED, "lmdb"])
def test_image_count_that_differs_from_convert_json_is_rejected(copy, data_format):
    root = copy(data_format)
    manifest = json.loads((root / "convert.json").read_text())
    manifest["splits"]["val"]["images"] = 24
    (root / "convert.json").write_text(json.dumps(manifest))
    for read in (open_split, lambda root: DataRoot(root).listed(Mode.EVAL)):
        with pytest.raises(UsageError, match=r"has 23 val images, but 24 according to convert.json"):
            read(root)


def test_missing_tar_shard_is_rejected(copy):
    root = copy("webdataset")
    (root / "train-000002.tar").unlink()
    with pytest.raises(UsageError, match=r"has 2 train shards, but 3 according to convert.json"):
        open_split(root, Mode.TRAIN)


MANIFESTS = ["", "[]", "{}", "null", '"x"', "[" * 100000, '{"complete": 1}', '{"splits": []}', "\xff"]


@pytest.mark.parametrize("text", MANIFESTS)
def test_damaged_manifest_is_rejected(copy, text):
    root = copy("recordio")
    (root / "convert.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"convert.json: damaged"):
        open_split(root)


@pytest.mark.parametrize("key", ["complete", "format", "splits", "shards"])
@pytest.mark.parametrize("value", [None, 5, "x", [1], {"val": None}, {"val": {"images": "3"}}])
def test_manifest_with_values_of_wrong_type_is_rejected(copy, key, value):
    root = copy("tfrecord")
    manifest = json.loads((root / "convert.json").read_text())
    (root / "convert.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(UsageError, match=r"convert.json: damaged"):
        open_split(root)


@pytest.mark.parametrize("offset", [-1, 100, 12, 3, 9])
def test_tfrecord_checksums_are_verified_by_indexing_and_reading(copy, offset):
    root = copy("tfrecord")
    shard = RECORDS["tfrecord"].detect(str(root), Mode.EVAL)[0]
    [image, *_] = DataRoot(str(root)).listed(Mode.EVAL)
    data = bytearray(Path(shard).read_bytes())
    data[offset % image.place[1]] ^= 1
    Path(shard).write_bytes(data)
    with pytest.raises(UsageError, match=r"checksum does not match|no record starts at this position"):
        read_image(image)
    os.unlink(indexes.index_path(shard))
    with pytest.raises(UsageError, match="damaged at byte 0"):
        open_split(root)


def truncate(root):
    """Truncate each file that contains images to a quarter of its size."""
    for path in root.rglob("*"):
        if path.is_file() and path.suffix not in (".idx", ".json", ".txt"):
            os.truncate(path, path.stat().st_size // 4)


@pytest.mark.parametrize("data_format", ["folder", "filelist", *INDEXED])
def test_file_truncated_during_a_run_raises_data_error(parse, photos, copy, tmp_path, data_format):
    """If a file is read through a memory map while it is truncated, SIGBUS kills the process. The test first checks
    that DALI does not map any file."""
    root = copy(data_format) if data_format in INDEXED else tmp_path / "photos"
    if data_format not in INDEXED:
        shutil.copytree(photos, root)
        images, labels, *_ = folder.index(str(root), Mode.EVAL)
        (root / "val.txt").write_text("".join(f"{i} {k}\n" for i, k in zip(images, labels, strict=True)))
    flags = ["--image-root", root, "--data-format", data_format, "--batch-size", "1", "--dali-prefetch", "1"]
    loader = dali.build_dataloader(parse(*flags), Mode.EVAL)
    next(loader)
    assert str(root) not in Path("/proc/self/maps").read_text()
    truncate(root)
    with pytest.raises(DataError, match=r"cannot be (decoded|read) \(rank 0") as error:
        list(loader)
    assert "dataset verify" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 100, 4096, 0.999])
def test_truncated_lmdb_is_rejected(copy, keep):
    """These LMDBs lack less than a page, or do not have a valid header, so neither LMDB nor DALI would crash."""
    root = copy("lmdb")
    data = root / "val_lmdb" / "data.mdb"
    os.truncate(data, int(keep if keep > 1 else keep * data.stat().st_size))
    with pytest.raises(UsageError, match="val_lmdb: not a Caffe LMDB, or damaged"):
        open_split(root)
    if keep == 0.999:
        assert "damaged" in verify.verify(root).errors[0]


LABELS = [b"", b" 7", b"1a", b"-1", b"1\0", b"1234567890", b"9" * 5000, b"\xd9\xa1", b"1 2", b"nan", b"0x1"]


def write_tar(root, labels):
    pixels = io.BytesIO()
    Image.new("RGB", (40, 40)).save(pixels, "PNG")
    with open(root / "val-0.tar", "wb") as f, TarWriter(f, encoder=False) as writer:
        for number, text in enumerate(labels):
            writer.write({"__key__": f"{number:03d}", "png": pixels.getvalue(), "cls": text})


def labels_of(loader):
    return np.concatenate([np.array(batch[0]["label"])[:, 0] for batch in loader]).tolist()


def test_invalid_label_text_is_rejected_and_never_becomes_a_class(parse, tmp_path):
    write_tar(tmp_path, [b"1", *LABELS, b"2\n", b"908765432\t\r"])
    names = [image.name for image in DataRoot(str(tmp_path)).listed(Mode.EVAL)]
    assert list(verify.verify(tmp_path).failing) == names[1:-2]
    with pytest.raises(UsageError, match="is not a number of up to 9 digits"):
        open_split(tmp_path)
    # The check before step 1 may miss invalid labels. The reader replaces such labels with -1, which the loss function
    # rejects.
    texts, places = data_files.unchecked([*LABELS, b"908765432\t\r"], b"2\n")
    (tmp_path / "large").mkdir()
    write_tar(tmp_path / "large", texts)
    labels = labels_of(dali.build_dataloader(parse("--image-root", tmp_path / "large"), Mode.EVAL))
    assert [labels[i] for i in places] == [*[-1] * len(LABELS), 908765432]
    assert labels.count(2) == len(texts) - len(places)


@pytest.mark.parametrize("label", [float("nan"), float("inf"), -1.0, 1.25, 3e9])
def test_invalid_recordio_label_is_rejected_and_never_becomes_a_class(parse, copy, monkeypatch, label):
    root = copy("recordio")
    data = bytearray((root / "val.rec").read_bytes())
    image = DataRoot(str(root)).listed(Mode.EVAL)[4]
    struct.pack_into("<f", data, image.place[0] + 12, label)
    (root / "val.rec").write_bytes(data)
    failure, _, _, checked_label = verify.check((image, 3))
    assert failure.startswith("has label ")
    assert checked_label == label or label != label
    assert verify.check((image, None))[0].endswith("which is not a whole number from 0")
    if label == -1:
        assert list(verify.verify(root).failing) == [image.name]
    with pytest.raises(UsageError, match="has label"):
        open_split(root)
    monkeypatch.setattr(root_module, "CHECKED_LABELS", 1)
    labels = labels_of(dali.build_dataloader(parse("--image-root", root), Mode.EVAL))
    assert not 0 <= labels[4] < 3
    assert labels[:4] + labels[5:] == [0] * 4 + [0] * 3 + [1] * 8 + [2] * 7


def test_missing_class_names_are_not_invented(copy, capsys):
    root = copy("recordio")
    (root / "classes.txt").unlink()
    assert open_split(root, num_of_class=None).classes == []
    assert not verify.verify(root).training_would_fail
    data = bytearray((root / "val.rec").read_bytes())
    struct.pack_into("<f", data, 12, 2e9)
    (root / "val.rec").write_bytes(data)
    classes = inspection.info(root)["val"]["classes"]
    assert classes == {"0": 7, "1": 8, "2": 7, "2000000000": 1}


def test_verify_checks_labels_against_num_of_class(copy, capsys):
    root = copy("tfrecord")
    (root / "classes.txt").unlink()
    assert dataset.main(["verify", str(root), "--num-of-class", "3"]) == 0
    assert dataset.main(["verify", str(root), "--num-of-class", "2"]) == 1
    assert "has label 2, which is not a whole number from 0 to 1" in capsys.readouterr().out


READ_IMAGES = """
import os, sys
from paddle_resnet import config
from paddle_resnet import dali, resolution
from paddle_resnet.data import bad_images
from paddle_resnet.utils.errors import DataError
from paddle_resnet.utils.mode import Mode

bad_images.MAX_PIXELS = int(os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"])
for root in sys.argv[1:3]:
    args = config.parse_args(["--image-root", root, *sys.argv[3:]])
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    for mode in Mode:
        try:
            next(dali.build_dataloader(args, mode))
            print("decoded")
        except DataError as error:
            print(error)
"""


@pytest.mark.slow
def test_image_with_too_many_pixels_is_not_decoded(tmp_path):
    """Small files of many pixels would need gigabytes of memory. The test lowers the limit of 2^28 pixels to 400 x 400,
    in a separate process, because DALI's OpenCV reads the limit only once."""
    assert os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] == str(bad_images.MAX_PIXELS)
    roots = [tmp_path / "400", tmp_path / "401"]
    for root in roots:
        for split in ("train", "val"):
            (root / split / "a").mkdir(parents=True)
            Image.new("1", (400, int(root.name))).save(root / split / "a/x.png")
    flags = ["--data-format", "folder", "--num-of-class", "1", "--device", "cpu"]
    flags += ["--batch-size", "1", "--allow-one-class", "--kernels", "paddle"]  # building the kernels would take 20 s
    command = [sys.executable, "-c", READ_IMAGES, *roots, *flags, "--dali-num-threads", "1", "--show-config", "false"]
    environment = os.environ | {"OPENCV_IO_MAX_IMAGE_PIXELS": str(400 * 400)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " split is " not in line]
    assert lines[:2] == ["decoded", "decoded"]
    for split, line in zip(("train", "val"), lines[2:], strict=True):
        assert line.startswith(f"{roots[1]}/{split}/a/x.png: cannot be decoded")


def train_and_val_images(args):
    """Read one epoch of each split and return [number of training images, number of validation images]."""
    return [len(labels_of(dali.build_dataloader(args, mode))) for mode in Mode]


def loop(path):
    path.symlink_to(path.name)


def dangling(path):
    path.symlink_to("nowhere")


def device(path):
    """Create a link to a device. Unlike a pipe, the device can be opened and read without waiting."""
    path.symlink_to("/dev/null")


@pytest.mark.slow
@pytest.mark.parametrize("make", [loop, dangling, device])
def test_image_that_is_not_a_regular_file_is_an_error(photos, parse, run_train, tmp_path, capsys, make):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    names = ["train/class0/00.jpg", "train/class2/02.jpg", "val/class1/01.jpg"]
    for name in names:
        (root / name).unlink()
        make(root / name)
    assert run_train(image_root=root)[0] == 2
    message = capsys.readouterr().err
    assert f"{root}/{names[0]}: a broken link, or not a regular file; remove it, or omit" in message
    fix_list = tmp_path / "bad.txt"
    assert dataset.main(["verify", str(root), "--fix-list", str(fix_list)]) == 1
    assert fix_list.read_text().split() == names
    assert "50 images" not in capsys.readouterr().out
    convert = ["convert", "--from", str(root), "--to", "tfrecord", "--output", str(tmp_path / "x")]
    assert dataset.main(convert) == 2
    assert dataset.main([*convert, "--skip-list", str(fix_list)]) == 0
    assert train_and_val_images(parse("--image-root", root, "--skip-list", fix_list)) == [24, 22]


@pytest.mark.parametrize("make", [loop, dangling])
def test_class_folder_that_is_a_broken_link_is_an_error(photos, tmp_path, make):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    shutil.rmtree(root / "val" / "class1")
    make(root / "val" / "class1")
    with pytest.raises(UsageError, match=r"val/class1: a broken link; repair or remove it"):
        open_split(root)
    assert "class1: a broken link" in verify.verify(root).errors[0]


REPLACED = {
    "tfrecord": ["val-00000-of-00003", "val-00000-of-00003.idx", "classes.txt", "convert.json"],
    "recordio": ["val.rec", "val.idx", "classes.txt", "convert.json"],
    "webdataset": ["val-000000.tar", "val-000000.idx"],
    "lmdb": ["val_lmdb/data.mdb"],
}


@pytest.mark.parametrize("make", [os.mkdir, device, loop])
@pytest.mark.parametrize(("data_format", "name"), [(kind, name) for kind, names in REPLACED.items() for name in names])
def test_unreadable_file_of_data_set_is_reported(copy, data_format, name, make):
    """A folder, a device or a link loop simulates a file without read permission, because root can read such a file."""
    root = copy(data_format)
    for path in root.glob("train*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (root / name).unlink()
    make(root / name)
    if name.endswith(".idx") and make is loop:
        assert open_split(root).size == 23  # a missing index is rebuilt
        return
    with pytest.raises(UsageError, match=name.partition("/")[0]):
        open_split(root)
    report = verify.verify(root, run_scope=RunScope.EVAL_ONLY)
    assert report.training_would_fail
    assert name.partition("/")[0] in report.errors[0]


def test_unlistable_folder_is_an_error(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    with without_permission(root), pytest.raises(UsageError, match=f"{root}: cannot be read \\(Permission denied\\)"):
        open_split(root)


def write_list(root, *lines):
    (root / "val.txt").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("name", ["../secret.jpg", "a/../../secret.jpg", "{outside}/secret.jpg", "./..//secret.jpg"])
def test_file_list_entry_outside_root_requires_allow_outside(photos, tmp_path, capsys, name):
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    shutil.copy(photos / "val/class0/00.jpg", tmp_path / "secret.jpg")
    shutil.copy(photos / "val/class0/00.jpg", root / "inside.jpg")
    write_list(root, "inside.jpg 0", f"{name.format(outside=tmp_path)} 0")
    message = r"val.txt: line 2 contains .*secret.jpg, which is outside .*; correct the path, or add --allow-outside"
    with pytest.raises(UsageError, match=message):
        open_split(root)
    arguments = ["convert", "--from", str(root), "--to", "webdataset", "--output", str(tmp_path / "x")]
    assert dataset.main(arguments) == 2
    assert dataset.main(["info", str(root)]) == 2
    assert dataset.main(["verify", str(root)]) == 1
    assert not (tmp_path / "x").exists()
    assert dataset.main([*arguments, "--allow-outside"]) == 0
    for tool in (["verify", "--run-scope", "eval_only"], ["info"]):
        assert dataset.main([*tool, str(root), "--allow-outside"]) == 0
    assert data_files.open_split(root, "auto", Mode.EVAL, 3, 0, allow_outside=True).size == 2


def test_sibling_folder_with_prefix_of_root_is_outside(tmp_path):
    (tmp_path / "root").mkdir()
    write_list(tmp_path / "root", "../root2/x.jpg 0")
    with pytest.raises(UsageError, match=r"line 1 contains ../root2/x.jpg, which is outside"):
        open_split(tmp_path / "root")


def test_file_list_accepts_any_path_to_files_inside_root(photos, tmp_path):
    (tmp_path / "a").mkdir()
    shutil.copy(photos / "val/class0/00.jpg", tmp_path / "a..b.jpg")
    write_list(tmp_path, "a/../a..b.jpg 0", f"{tmp_path}/a..b.jpg 0")
    assert open_split(tmp_path).size == 2


@pytest.mark.parametrize("line", ["a.jpg " + "9" * 5000, "a.jpg \u0661", "a\0.jpg 0", "a.jpg 1e3", "a.jpg nan"])
def test_file_list_line_without_valid_label_is_rejected(tmp_path, line):
    write_list(tmp_path, line)
    with pytest.raises(UsageError, match=r"val.txt: line 1 is not `PATH LABEL`"):
        open_split(tmp_path)


def test_skip_list_entry_outside_root_requires_allow_outside(parse, photos, tmp_path):
    path, outside = tmp_path / "skip.txt", os.path.relpath(__file__, photos)
    path.write_text(f"{outside}\n")
    with pytest.raises(UsageError, match=r"skip.txt: .* is outside .*; remove the line, or add --allow-outside"):
        dali.build_dataloader(parse("--image-root", photos, "--skip-list", path), Mode.EVAL)
    dali.build_dataloader(parse("--image-root", photos, "--skip-list", path, "--allow-outside"), Mode.EVAL)


NAMES = [
    *("new\nline", "return\r", "\x1b[31mred", "[red]markup", "[x", '"quoted"', "back\\slash", "tab\there", " "),
    *("unit\x1fseparator", "line\u2028separator", "\u202eright to left", "#hash", "a@b", "plain"),
]


def test_special_characters_in_names_are_escaped_in_output_and_fix_list(photos, parse, run_train, tmp_path, capsys):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    bad = [f"train/class0/{name}.jpg" for name in NAMES]
    for name in bad:
        (root / name).write_bytes(b"not an image")
    (root / "train" / "class0" / "[b]ignored\x1b[0m\n.txt").touch()
    assert dataset.main(["verify", str(root), "--fix-list", str(tmp_path / "bad.txt")]) == 1
    printed = capsys.readouterr().out
    assert set(printed) - {"\n"} <= {character for character in printed if character.isprintable()}
    for shown in (r"new\nline.jpg is not", r"\x1b[31mred.jpg", "[red]markup.jpg", r"\u202eright to left"):
        assert shown in printed
    assert DataRoot(root, skip_list=tmp_path / "bad.txt").skip == set(bad)
    assert (tmp_path / "bad.txt").read_text().count("\n") == len(bad)
    assert train_and_val_images(parse("--image-root", root, "--skip-list", tmp_path / "bad.txt")) == [24, 23]
    assert run_train(image_root=root)[0] == 2


def test_class_names_are_escaped_and_names_with_line_breaks_are_not_converted(photos, tmp_path, capsys):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "[b]\x1b[31m")
    assert dataset.main(["info", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"[b]\x1b[31m" in printed
    arguments = ["convert", "--from", str(root), "--to", "recordio", "--output"]
    assert dataset.main([*arguments, str(tmp_path / "x")]) == 0
    assert open_split(tmp_path / "x").classes == ["[b]\x1b[31m", "class0", "class2"]
    (tmp_path / "x" / "classes.txt").write_text("[/]\n[/b]\n[/nothing\n")
    assert dataset.main(["info", str(tmp_path / "x")]) == 0
    assert "[/nothing" in capsys.readouterr().out
    for before, after in (("class0", "two\nlines"), ("two\nlines", "two\rlines")):
        for split in ("train", "val"):
            (root / split / before).rename(root / split / after)
        assert dataset.main([*arguments, str(tmp_path / "y")]) == 2
        assert "a class name contains a line break" in capsys.readouterr().err


def test_error_message_of_tool_is_escaped(tmp_path, capsys):
    assert dataset.main(["verify", str(tmp_path / "a\x1b[31mb")]) == 2
    message = capsys.readouterr().err
    assert r"a\x1b[31mb" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("damage", ["swapped", "twice"])
def test_verify_detects_records_that_dali_reads_differently(copy, monkeypatch, damage):
    """The index contains an error that the checks of index files do not detect."""
    root = copy("tfrecord")
    original = indexes.check_index

    def check_index(shard, path, kind):
        index = original(shard, path, kind)
        rows = [1, 0] if damage == "swapped" else [0, 0]
        index.images[:2] = index.images[rows]
        return index

    monkeypatch.setattr(indexes, "check_index", check_index)
    report = verify.verify(root)
    assert set(report.failing.values()) == {"has a different image or label when DALI reads it"}
