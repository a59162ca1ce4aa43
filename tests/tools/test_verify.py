import io
import os
import re
import resource
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import data_files
import numpy as np
import pytest
from PIL import Image

from paddle_resnet import dali, dataset
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import verify
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode, RunScope

PIXELS = np.random.RandomState(0).randint(0, 255, (48, 40, 3), dtype=np.uint8)


def encoded(mode="RGB", kind="JPEG", **options):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(exif=exif)


def several():
    buffer, frame = io.BytesIO(), Image.fromarray(PIXELS)
    frame.save(buffer, "TIFF", save_all=True, append_images=[frame])
    return buffer.getvalue()


def deep():
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257).save(buffer, "PNG")
    return buffer.getvalue()


pytestmark = pytest.mark.usefixtures("convert_here", "verify_here")
in_a_process = verify._in_a_process
JPEG = encoded()
# {file name: (content, whether training fails, unusual properties)}
FILES = {
    "good.jpg": (JPEG, False, []),
    "progressive.jpg": (encoded(progressive=True), False, []),
    "good.jfif": (JPEG, False, []),
    "good.png": (encoded(kind="PNG"), False, []),
    "good.webp": (encoded(kind="WEBP"), False, []),
    "good.bmp": (encoded(kind="BMP"), False, []),
    "good.tiff": (encoded(kind="TIFF"), False, []),
    "good.jpeg": (JPEG, False, []),
    "empty.jpg": (b"", True, ["0 bytes"]),
    "text.jpg": (b"this is not an image" * 9, True, ["unknown to Pillow"]),
    "half.jpg": (JPEG[: len(JPEG) // 2], True, ["truncated"]),
    # The comment contains an end-of-image marker, as a thumbnail does.
    "half_with_comment.jpg": (encoded(comment=b"\xff\xd9")[: len(JPEG) // 2], True, ["truncated"]),
    "header.jpg": (JPEG[:20], True, ["unknown to Pillow"]),
    "half.png": (encoded(kind="PNG")[:3000], True, ["unknown to Pillow"]),
    "cmyk.jpg": (encoded("CMYK"), False, ["CMYK"]),
    "gray.jpg": (encoded("L"), False, ["grayscale"]),
    "exif.jpg": (rotated(), False, ["EXIF-rotated"]),
    "png.jpg": (encoded(kind="PNG"), False, ["png with a different extension"]),
    "alpha.png": (encoded("RGBA", "PNG"), False, ["transparent"]),
    "gray_alpha.png": (encoded("LA", "PNG"), False, ["grayscale", "transparent"]),
    "one_bit.png": (encoded("1", "PNG"), False, ["grayscale"]),
    "deep.png": (deep(), False, ["16 bits per channel", "grayscale"]),
    "several.tif": (several(), False, ["several pictures"]),
    "gif.jpg": (encoded("P", "GIF"), True, []),
}


@pytest.mark.parametrize("name", FILES)
def test_failing_images_and_unusual_properties(tmp_path, name):
    data, fails, unusual = FILES[name]
    (tmp_path / name).write_bytes(data)
    failure, properties, *_ = verify.check((ListedImage(name, str(tmp_path / name), 0), None))
    assert (failure is not None) == fails
    assert sorted(properties) == sorted(unusual)


def test_name_that_is_not_utf_8_fails(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    path.write_bytes(JPEG)
    assert verify.check((ListedImage("x", str(path), 0), None))[0] == "has a name that is not valid UTF-8"


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_training_fails_on_the_same_images(parse, tmp_path, name):
    data, fails, _ = FILES[name]
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / name).write_bytes(data)
    for mode in Mode:
        try:
            args = parse("--image-root", tmp_path, "--batch-size", "1", "--allow-one-class")
            [batch] = dali.build_dataloader(args, mode)
        except DataError as e:
            assert fails
            assert f"{name}: cannot be decoded" in str(e)
        else:
            assert not fails
            assert np.isfinite(np.array(batch[0]["data"])).all()


@pytest.mark.parametrize(("orientation", "is_rotated"), [(0, False), (1, False), (2, True), (8, True), (9, False)])
def test_exif_orientations_other_than_upright_are_unusual(orientation, is_rotated):
    exif = Image.Exif()
    exif[0x0112] = orientation
    kinds = verify._unusual(ListedImage("x.jpg", "x.jpg", 0), encoded(exif=exif))
    assert kinds == (["EXIF-rotated"] if is_rotated else [])


def test_training_and_evaluation_apply_exif_rotation(parse, tmp_path):
    ramp = np.linspace(0, 250, 32)
    picture = Image.fromarray(np.stack(np.meshgrid(ramp, ramp / 2, ramp[:1]), axis=-1)[:, :, 0].astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        picture.save(tmp_path / split / "a" / "x.jpg", quality=100, subsampling=0, exif=exif)
    flags = ["--batch-size", "1", "--rand-crop-scale", "1,1", "--rand-crop-ratio", "1,1", "--data-layout", "NHWC"]
    flags += ["--resize-short", "32", "--normalize-scale", "1", "--normalize-mean", "0,0,0", "--normalize-std", "1,1,1"]
    flags += ["--allow-one-class"]
    upright = np.rot90(np.asarray(picture).astype(float), -1)  # orientation 6: rotate clockwise
    assert np.abs(upright - np.asarray(picture)).mean() > 20
    for mode in Mode:
        image = np.array(next(dali.build_dataloader(parse("--image-root", tmp_path, *flags), mode))[0]["data"])[0]
        assert min(np.abs(candidate - upright).mean() for candidate in (image, image[:, ::-1])) < 2


@pytest.fixture
def unusual(photos, tmp_path):
    """Copy the photos, add unusual folders, and put all unusual files into train/class0."""
    root = tmp_path / "unusual"
    shutil.copytree(photos, root)
    for name, (data, _, _) in FILES.items():
        (root / "train" / "class0" / name).write_bytes(data)
    shutil.copy(root / "train" / "class1" / "01.jpg", root / "val" / "class1" / "copy.jpg")
    (root / "train" / "class3").mkdir()
    (root / "val" / "class2" / "notes.txt").write_text("ignored")
    return root


@pytest.fixture
def reports(monkeypatch):
    """Return a list to which each call of verify adds its report."""
    collected, original = [], verify.verify
    monkeypatch.setattr(verify, "verify", lambda *args: collected.append(original(*args)) or collected[-1])
    return collected


@pytest.mark.slow
def test_report_on_folder_with_unusual_files(unusual, reports, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify, "ProcessPoolExecutor", ProcessPoolExecutor)
    command = ["verify", str(unusual), "--fix-list", str(tmp_path / "bad.txt")]
    assert dataset.main([*command, "--allow-empty-classes"]) == 1
    failing = [f"train/class0/{name}" for name, (_, fails, _) in FILES.items() if fails]
    assert sorted((tmp_path / "bad.txt").read_text().splitlines()) == sorted(failing)
    printed, warned = capsys.readouterr()
    for part in (
        "CMYK",
        "EXIF-rotated",
        "the same file in train and val",
        "1 entry ignored: training would",
    ):
        assert part in printed
    assert f"{unusual}/val: 1 entry ignored: 1 .txt (class2 1; for example class2/notes.txt)" in warned
    for split in ("train", "val"):
        assert f"{split} has no images for 1 of 4 classes (class3)" in warned
    [report] = reports
    assert report.images == 53 + len(FILES) + 1
    assert sorted(report.failing) == sorted(failing)
    assert not report.errors
    assert report.ignored == ["val/class2/notes.txt"]
    assert "train/class1/01.jpg = val/class1/copy.jpg" in report.unusual["the same file in train and val"]


@pytest.mark.slow
def test_training_accepts_fix_list_as_skip_list(unusual, run_train, tmp_path, capsys):
    flags = ["--num-of-class", "4", "--skip-list", tmp_path / "bad.txt"]
    assert dataset.main(["verify", str(unusual), "--fix-list", str(tmp_path / "bad.txt")]) == 1
    error = f"--image-root {unusual}: train has no images for 1 of 4 classes (class3); add images"
    assert f"error: {error}" in capsys.readouterr().out
    assert run_train(*flags, image_root=unusual)[0] == 2
    assert f"train.py: error: {error}" in capsys.readouterr().err
    assert run_train(*flags[:2], "--allow-empty-classes", image_root=unusual)[0] == 2
    assert run_train(*flags, "--allow-empty-classes", image_root=unusual)[0] == 0


@pytest.fixture
def unusual_data_sets(unusual, tmp_path, request):
    """Convert the folder with unusual files to a file list and to the requested record formats. Return {format:
    root}."""
    roots = {"filelist": tmp_path / "filelist"}
    roots["filelist"].mkdir()
    for mode in Mode:
        images = DataRoot(str(unusual)).listed(mode)
        lines = "".join(f"{image.name} {image.label}\n" for image in images)
        (roots["filelist"] / mode.value).symlink_to(unusual / mode.value)
        (roots["filelist"] / f"{mode.value}.txt").write_text(lines)
    for name in request.param:
        roots[name] = tmp_path / name
        data_files.write(unusual, roots[name], name, 2)
    return roots


@pytest.mark.slow
@pytest.mark.parametrize(
    "unusual_data_sets",
    [("lmdb",), pytest.param(("recordio", "tfrecord", "webdataset"), marks=pytest.mark.soak)],
    indirect=True,
)
def test_every_format_is_verified_and_trains_without_failing_images(
    unusual_data_sets, unusual, reports, parse, tmp_path
):
    expected = verify.verify(unusual)
    bad = tmp_path / "bad.txt"
    flags = ["--num-of-class", "4", "--batch-size", "4"]
    for data_format, root in unusual_data_sets.items():
        assert dataset.main(["verify", str(root), "--fix-list", str(bad)]) == 1
        report = reports[-1]
        assert report.images == expected.images
        assert sorted(report.failing.values()) == sorted(expected.failing.values())
        assert not any("DALI cannot read" in error for error in report.errors)
        for kind in ("CMYK", "EXIF-rotated", "grayscale", "truncated", "0 bytes", "the same file in train and val"):
            assert len(report.unusual[kind]) == len(expected.unusual[kind]) > 0

        with pytest.raises(DataError) as error:
            read_epochs(parse(*flags, "--image-root", root))
        message = str(error.value)
        [failing_path] = re.findall(r"^(\S+): cannot be decoded \(rank 0\)", message)
        names = [os.path.join(root, name) for name in report.failing]
        assert failing_path in names
        if data_format == "lmdb":
            assert "and convert the data set with --skip-list" in message
            command = ["convert", "--from", root, "--to", "tfrecord", "--output", tmp_path / "again"]
            assert dataset.main(list(map(str, [*command, "--skip-list", bad]))) == 0
            read_epochs(parse(*flags, "--image-root", tmp_path / "again"))
        else:
            read_epochs(parse(*flags, "--skip-list", bad, "--image-root", root))


def read_epochs(args):
    """Read one epoch of each split."""
    for mode in Mode:
        list(dali.build_dataloader(args, mode))


@pytest.mark.slow
def test_label_without_class_fails_verification(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_in_a_process", in_a_process)
    shutil.copytree(converted["tfrecord"], tmp_path / "x", ignore=shutil.ignore_patterns("train*"))
    (tmp_path / "x" / "classes.txt").write_text("a\nb\n")
    report = verify.verify(tmp_path / "x", run_scope=RunScope.EVAL_ONLY)
    assert "has label 2" in report.errors[0]
    assert len(report.failing) == 7
    assert set(report.failing.values()) == {"has label 2, which is not a whole number from 0 to 1"}


def test_folder_without_decodable_images_fails_verification(tmp_path, capsys):
    for name in [f"{split}/a/{i:02d}.jpg" for split in ("train", "val") for i in range(30)]:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_bytes(JPEG[:20])
    assert dataset.main(["verify", str(tmp_path / "x")]) == 1
    out = capsys.readouterr().out
    assert "fails: 10 more images; use --fix-list FILE to list all" in out
    assert out.count("fails: ") == 51


def test_valid_folder_passes_verification(photos, tmp_path):
    assert dataset.main(["verify", str(photos), "--fix-list", str(tmp_path / "bad.txt")]) == 0
    assert (tmp_path / "bad.txt").read_text() == ""
    assert verify.verify(photos, run_scope=RunScope.TRAIN_ONLY).images == 53  # val/ is checked if it exists


def test_unwritable_fix_list_is_rejected_before_verification(tmp_path, capsys):
    """The verification of a missing folder would end with a different error."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file/bad.txt"
    assert dataset.main(["verify", str(tmp_path / "missing"), "--fix-list", str(path)]) == 2
    assert f"--fix-list {path}: cannot be written (Not a directory)" in capsys.readouterr().err


def test_class_only_in_val_fails_verification(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "root")
    (tmp_path / "root/val").rename(tmp_path / "root/valid")
    shutil.copytree(photos / "val" / "class0", tmp_path / "root/valid/class9")
    (tmp_path / "root/valid/class9/bad.jpg").write_text("x")
    report = verify.verify(tmp_path / "root", num_of_class=2)
    copied = len(list((photos / "val/class0").iterdir()))
    assert report.images == 30 + 23 + copied + 1
    assert [*report.failing] == ["valid/class9/bad.jpg"]
    assert len(report.unusual["the same file in two classes"]) == copied
    assert len(report.errors) == 3  # each split has more than two classes
    assert "valid/class9 has no train/class9" in report.errors[2]
    assert report.training_would_fail
    assert len(verify.verify(tmp_path / "root").errors) == 1
    # A copy in the same class of both splits is not a copy in two classes, even if val/ lacks a class.
    shutil.rmtree(tmp_path / "root/valid/class1")
    shutil.copy(photos / "train/class2/02.jpg", tmp_path / "root/valid/class2/copy.jpg")
    unusual = verify.verify(tmp_path / "root").unusual
    assert unusual["the same file in train and val"] == ["train/class2/02.jpg = valid/class2/copy.jpg"]
    assert len(unusual["the same file in two classes"]) == copied


def test_empty_class_fails_verification_unless_allowed(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "root")
    (tmp_path / "root/train/class3").mkdir()
    [error] = verify.verify(tmp_path / "root").errors
    assert "train has no images for 1 of 4 classes (class3)" in error
    assert not verify.verify(tmp_path / "root", allow_empty=True).training_would_fail


@pytest.mark.parametrize("data_format", ["folder", "recordio"])
def test_one_class_fails_verification_unless_allowed(photos, tmp_path, data_format):
    root = tmp_path / "root"
    for split in ("train", "val"):
        shutil.copytree(photos / split / "class0", root / split / "class0")
    if data_format != "folder":
        data_files.write(root, tmp_path / "records", data_format)
        root = tmp_path / "records"
    assert any("--allow-one-class" in error for error in verify.verify(root).errors)
    assert not verify.verify(root, allow_one_class=True).training_would_fail


def test_missing_val_fails_verification_except_for_train_only(photos, tmp_path, capsys):
    root = tmp_path / "root"
    shutil.copytree(photos / "train", root / "train")
    assert dataset.main(["verify", str(root)]) == 1
    printed = capsys.readouterr().out
    assert f"--image-root {root}: has no folder val/; create the folder, or run `" in printed
    assert "training would fail" in printed
    assert dataset.main(["verify", str(root), "--run-scope", "train_only"]) == 0
    shutil.copytree(photos / "val", root / "Valid")
    assert dataset.main(["verify", str(root)]) == 0


@pytest.mark.parametrize("data_format", ["folder", "tfrecord"])
def test_copies_in_two_classes_are_reported(photos, tmp_path, capsys, data_format):
    root = tmp_path / "root"
    shutil.copytree(photos, root)
    shutil.copy(root / "train/class0/00.jpg", root / "train/class1/copy.jpg")
    shutil.copy(root / "train/class0/03.jpg", root / "train/class0/again.jpg")
    if data_format != "folder":
        data_files.write(root, tmp_path / "x", data_format)
        root = tmp_path / "x"
    report = verify.verify(root)
    verify.show(report)
    [names] = report.unusual["the same file in two classes"]
    assert f"the same file in two classes: {names}\n" in capsys.readouterr().out
    if data_format == "folder":
        assert names == "train/class0/00.jpg = train/class1/copy.jpg"
    assert [*report.unusual] == ["the same file in two classes"]  # and no image has a different extension


def test_empty_files_are_not_reported_as_copies(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "root")
    for name in ("train/class0/x.jpg", "val/class1/x.jpg"):
        (tmp_path / "root" / name).touch()
    assert not any("the same file" in kind for kind in verify.verify(tmp_path / "root").unusual)


def test_contradictory_labels_of_file_lists_are_reported(photos, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(photos / split)
        swap = {"class0": 0, "class1": 2, "class2": 1} if split == "val" else {f"class{i}": i for i in range(3)}
        names = sorted(path.relative_to(photos) for path in (photos / split).glob("*/*"))
        lines = "".join(f"{name} {swap[name.parent.name]}\n" for name in names)
        (tmp_path / f"{split}.txt").write_text(lines)
    report = verify.verify(tmp_path)
    assert report.unusual["folder with a different label in val.txt"] == ["class1 is 1 and 2", "class2 is 2 and 1"]


@pytest.mark.parametrize(
    ("train", "val", "is_reported"), [([0], [1], True), ([1], [1], False), ([0, 1], [1], False), ([0], [0, 1], False)]
)
def test_only_folders_with_one_label_per_list_are_compared(train, val, is_reported):
    report = verify.Report()
    verify._compare_lists([[ListedImage("a/x.jpg", "", i) for i in labels] for labels in (train, val)], report)
    assert list(report.unusual.values()) == ([["a is 0 and 1"]] if is_reported else [])


def test_split_without_decodable_records_is_not_read_with_dali(converted):
    root, report = str(converted["recordio"]), verify.Report()
    assert verify._read_with_dali(root, "recordio", Mode.EVAL, frozenset(), []) == ([], "23 images instead of 0")
    images = DataRoot(root).listed(Mode.EVAL)
    expected = [verify.check((image, None))[2:] for image in images]
    assert verify._read_with_dali(root, "recordio", Mode.EVAL, frozenset(), expected) == ([], None)
    expected[3], expected[22] = (b"", expected[3][1]), (expected[22][0], 9)
    assert verify._read_with_dali(root, "recordio", Mode.EVAL, frozenset(), expected) == ([3, 22], None)
    skip = frozenset([images[3].name])
    del expected[3]
    assert verify._read_with_dali(root, "recordio", Mode.EVAL, skip, expected) == ([21], None)
    image = ListedImage("val.rec@0", f"{root}/val.rec", None, "recordio")
    verify._compare_with_dali(root, Mode.EVAL, "recordio", [image], [("is empty", [], None, 0)], report)
    assert report == verify.Report()


@pytest.mark.parametrize(("count", "more"), [(50, ""), (52, "fails: 2 more images; use --fix-list FILE to list all\n")])
def test_only_many_failing_images_require_a_fix_list(capsys, count, more):
    verify.show(verify.Report(failing=dict.fromkeys(map(str, range(count)), "is empty")))
    *shown, more_shown = capsys.readouterr().out.split("is empty\n")
    assert len(shown) == 50
    assert more_shown == f"{more}0 images, {count} cannot be used: training would fail\n"


def test_printed_report(capsys):
    """Names are neither interpreted as markup nor wrapped."""
    long = "[b]" + 100 * "x"
    report = verify.Report(images=5, errors=[f"an error in {long}"], failing={"b": "is empty", long: "is cut"})
    report.unusual |= {"grayscale": ["c"], "CMYK": ["[b]a", "b", long], verify.IN_BOTH_SPLITS: [f"x = {long}"] * 51}
    report.ignored = ["i", "j"]
    verify.show(report)
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert rows[:2] == [["CMYK", "3", "2", "[b]a"], ["grayscale", "1", "0", "c"]]
    assert rows[2][:3] == [verify.IN_BOTH_SPLITS, "51", "0"]
    assert output.count(f"{verify.IN_BOTH_SPLITS}: x = {long}\n") == 50
    assert output.endswith(
        f"fails: b is empty\nfails: {long} is cut\nerror: an error in {long}\n"
        "5 images, 2 cannot be used, 2 entries ignored: training would fail\n"
    )
    verify.show(verify.Report(images=5))
    assert capsys.readouterr().out == "5 images, 0 cannot be used: training can read all images\n"


@pytest.mark.parametrize(("images", "most", "expected"), [(0, 4, 1), (31, 4, 1), (32, 4, 2), (320, 4, 4), (320, 9, 9)])
def test_each_process_checks_at_least_16_images(images, most, expected):
    assert verify._process_count(images, most) == expected


def test_system_folders_are_not_classes(photos, tmp_path, capsys):
    root = tmp_path / "root"
    shutil.copytree(photos, root)
    for name in ("train/__MACOSX", "train/.ipynb_checkpoints", "val/@eaDir", "train/class0/inner"):
        shutil.copytree(photos / "val/class0", root / name)
    report = verify.verify(root)
    assert report.images == 53
    assert not report.training_would_fail
    assert report.ignored == ["train/class0/inner"]
    verify.show(report)
    output = capsys.readouterr().out
    assert "53 images, 0 cannot be used, 1 entry ignored: training can read all other images" in output
    assert output.count(f"{root}/train: .ipynb_checkpoints, __MACOSX ignored: ") == 1
    assert output.count(f"{root}/val: @eaDir ignored: ") == 1


def test_images_may_be_outside_the_folder_only_if_allowed(photos, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text(f"{photos}/val/class0/00.jpg 0\n{photos}/val/class1/01.jpg 1\n")
    (tmp_path / "train/class0").mkdir(parents=True)
    (tmp_path / "train/class0/notes.txt").touch()
    assert ["--allow-outside" in error for error in verify.verify(tmp_path).errors] == [True, True]
    assert not verify.verify(tmp_path, 2, allow_outside=True).training_would_fail
    report = verify.verify(tmp_path, 1, allow_outside=True)
    assert report.failing == {f"{photos}/val/class1/01.jpg": "has label 1, which is not a whole number from 0 to 0"}
    assert report.ignored == []  # training reads only the listed files


def test_lack_of_file_descriptors_does_not_mean_that_an_image_is_damaged(tmp_path):
    image = ListedImage("x.jpg", str(tmp_path / "x.jpg"), 1.5)
    assert verify.check((image, None)) == ("cannot be read (No such file or directory)", [], None, None)
    (tmp_path / "x.jpg").write_bytes(JPEG)
    assert verify.check((image, None))[0] == "has label 1.5, which is not a whole number from 0"
    assert verify.check((image, 3))[0] == "has label 1.5, which is not a whole number from 0 to 2"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        next_descriptor = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            verify.check((image, None))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_folder_without_splits_is_rejected(tmp_path, capsys):
    with pytest.raises(UsageError, match="neither train/ nor val/"):
        verify.verify(tmp_path)
    assert dataset.main(["verify", str(tmp_path)]) == 2
    assert "neither train/ nor val/" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "message"),
    [
        (partial(os._exit, 0), "exit code 0"),
        (partial(signal.raise_signal, signal.SIGKILL), "SIGKILL"),
    ],
)
def test_crash_of_reader_process_is_reported(crash, message):
    """Certain damaged record files crash DALI's readers."""
    assert in_a_process(crash) == ([], f"its process exited with {message}")


def test_split_that_dali_cannot_read_fails_verification(converted, monkeypatch):
    def read(function, root, data_format, mode, *arguments):
        return ([0], None) if mode is Mode.TRAIN else ([], "its process exited with SIGKILL")

    monkeypatch.setattr(verify, "_in_a_process", read)
    root = converted["recordio"]
    report = verify.verify(root)
    assert list(report.failing.values()) == ["has a different image or label when DALI reads it"]
    message = f"{root}: DALI cannot read the val split (its process exited with SIGKILL); write it again"
    assert report.errors == [message]
    report = verify.Report()
    images = [ListedImage(name, "x", 0, "recordio") for name in ("damaged", "different")]
    checked = [("is empty", [], None, 0), (None, [], b"digest", 0)]
    verify._compare_with_dali(root, Mode.TRAIN, "recordio", images, checked, report)
    assert [*report.failing] == ["different"]  # DALI does not read the damaged image
    report = verify.Report()
    verify._compare_with_dali(root, Mode.TRAIN, "lmdb", images, checked, report)
    assert report == verify.Report()  # its reader of LMDBs cannot skip an image
