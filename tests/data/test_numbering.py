"""One numbering of the classes for both splits, in all formats."""

import colorsys
import io
import shutil
import tarfile

import data_files
import numpy as np
import pytest
from data_files import open_split
from nvidia.dali import pipeline_def
from PIL import Image
from tfrecord import TFRecordWriter

from conftest import assert_one_error, phase
from paddle_resnet import dataset
from paddle_resnet.data import classes, numbering
from paddle_resnet.data.formats import tfrecord
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert, inspection, verify
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

NAMES = ["tench", "goldfish", "shark", "ray", "cock"]  # in the order of ImageNet, which is not the sorted order
WNIDS = [f"n0{k}" for k in range(8)]


def jpeg(k, i=0, classes=8):
    """Return a JPEG image whose color depends on the class k, with noise that depends on i."""
    pixels = np.empty((40, 48, 3))
    pixels[:] = [255 * c for c in colorsys.hsv_to_rgb(k / classes, 0.9, 0.85)]
    pixels += np.random.RandomState(1000 * k + i).normal(0, 12, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG")
    return out.getvalue()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def put_folders(root, names, splits=("train", "val"), count=2):
    for split in splits:
        for k, name in enumerate(names):
            for i in range(count):
                put(root / split / name / f"{i}.jpg", jpeg(k, i + 100 * (split == "val")))


def put_list(root, split, names, paths="{split}/{name}/{i}.jpg", count=2):
    lines = [f"{paths.format(split=split, name=n, i=i, k=k)} {k}" for k, n in enumerate(names) for i in range(count)]
    put(root / f"{split}.txt", "\n".join(lines))


def put_shard(path, classes, count=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for k in range(classes):
            for i in range(count):
                for suffix, data in (("jpg", jpeg(k, i)), ("cls", str(k).encode())):
                    member = tarfile.TarInfo(f"{k}_{i}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def put_tfrecords(root, classes=8, first=1, count=4, names=lambda k: {}):
    """Write TFRecords with the labels that tensorflow/models writes, which start at 1. names(k) returns the optional
    features of class k."""
    root.mkdir(parents=True, exist_ok=True)
    for split, start in (("train", 0), ("validation", 100)):
        writer = TFRecordWriter(str(root / f"{split}-00000-of-00001"))
        for k in range(classes):
            for i in range(count):
                example = {"image/encoded": (jpeg(k, i + start), "byte"), "image/class/label": (k + first, "int")}
                writer.write(example | {name: (text.encode(), "byte") for name, text in names(k).items()})
        writer.close()


def put_names(root, names):
    put(root / "classes.txt", "".join(f"{name}\n" for name in names))


def labels_of(root, mode, num_of_class=10, data_format="auto", **options):
    """Return {class: labels} as DALI reads them. The class is recognized by the mean color of the image."""
    data_set = open_split(root, data_format, mode, num_of_class, 0, **options)

    @pipeline_def(batch_size=data_set.size, num_threads=1, device_id=None)
    def pipeline():
        return data_set.read("Reader", 0, 1, False)

    labels = {}
    for content, label in zip(*pipeline().run(), strict=True):
        label = np.asarray(label).item()
        with Image.open(io.BytesIO(np.asarray(content).tobytes())) as image:
            color = np.asarray(image).mean(axis=(0, 1)) / 255
        labels.setdefault(round(colorsys.rgb_to_hsv(*color)[0] * 8) % 8, set()).add(label)
    return labels


def sorted_labels(names):
    return {k: {sorted(names).index(name)} for k, name in enumerate(names)}


def assert_list_order(root, classes=5, modes=tuple(Mode)):
    for mode in modes:
        assert labels_of(root, mode) == {k: {k} for k in range(classes)}


def error_of(root):
    """Check that training, evaluation, convert, verify and info raise the same error, and return its message."""
    messages = set()
    for read in (
        *(lambda mode=mode: open_split(root, "auto", mode, 12, 0) for mode in Mode),
        lambda: convert.convert(root, f"{root}_converted", "webdataset"),
        lambda: DataRoot(root).images(Mode.EVAL),
    ):
        with pytest.raises(UsageError) as error:
            read()
        messages.add(str(error.value))
    assert set(verify.verify(root).errors) == messages
    [message] = messages
    return message


@pytest.mark.parametrize("listed", ["train", "val"])
def test_list_that_contradicts_class_folders_is_an_error(tmp_path, verify_here, capsys, listed):
    """One split is numbered by its sorted class folders: tench has label 4; the list of the other split says 0."""
    put_folders(tmp_path, NAMES)
    put_list(tmp_path, listed, NAMES)
    message = error_of(tmp_path)
    assert message == (
        f"{tmp_path}/{listed}.txt: {listed}/tench/0.jpg has label 0, but class tench has label 4 among the sorted "
        f"class folders; write the names of all class folders to {tmp_path}/classes.txt in label order, or correct the "
        "labels"
    )
    put_names(tmp_path, NAMES)
    assert_list_order(tmp_path)
    assert verify.verify(tmp_path).errors == []
    (tmp_path / "classes.txt").unlink()
    put_list(tmp_path, listed, sorted(NAMES))
    for mode in Mode:
        assert labels_of(tmp_path, mode) == sorted_labels(NAMES)
    assert "warning" not in capsys.readouterr().err


def test_list_is_compared_with_numeric_class_folders(tmp_path, verify_here):
    """Sorted as strings, folder 2 of 0 to 11 has label 4."""
    names = [str(k) for k in range(12)]
    put_folders(tmp_path, names, count=1)
    put_list(tmp_path, "val", names, count=1)
    assert "val.txt: val/2/0.jpg has label 2, but class 2 has label 4 among the sorted" in error_of(tmp_path)
    put_names(tmp_path, names)
    for mode in Mode:
        classes = open_split(tmp_path, "auto", mode, 12, 0).classes
        assert classes == names
        listed = DataRoot(tmp_path).images(mode)[1]
        assert [image.label for image in listed] == [int(image.name.split("/")[1]) for image in listed]


def test_unchecked_numbering_triggers_one_warning(tmp_path, capsys, verify_here):
    put_folders(tmp_path, NAMES, ["train"])
    put_list(tmp_path, "val", NAMES, "val/{k}{i}.jpg")
    for k in range(5):
        for i in range(2):
            put(tmp_path / f"val/{k}{i}.jpg", jpeg(k, i))
    warning = (
        f"warning: --image-root {tmp_path}: the labels of train are the positions in the sorted list of its class "
        "folders, and those of val the numbers in its file list; to check that they agree, write the names of the "
        f"class folders to {tmp_path}/classes.txt in the order of the labels\n"
    )
    assert [labels_of(tmp_path, mode) for mode in Mode] == [sorted_labels(NAMES), {k: {k} for k in range(5)}]
    stderr = capsys.readouterr().err
    assert stderr.count(warning) == stderr.count("warning") == 1
    put_names(tmp_path, NAMES)
    assert_list_order(tmp_path)
    # PaddleClas: both lists number the images; only the training images are in class folders.
    (tmp_path / "classes.txt").unlink()
    put_list(tmp_path, "train", NAMES)
    assert_list_order(tmp_path)
    assert "warning" not in capsys.readouterr().err


def test_list_with_more_classes_than_folders_is_an_error(tmp_path, verify_here):
    """Two of the five classes have validation images. Sorted, these folders would get the labels 0 and 1."""
    put_list(tmp_path, "train", NAMES, "images/{k}{i}.jpg")
    for k in range(5):
        for i in range(2):
            put(tmp_path / f"images/{k}{i}.jpg", jpeg(k, i))
    for k in (2, 4):
        put(tmp_path / f"val/{NAMES[k]}/0.jpg", jpeg(k))
    assert error_of(tmp_path) == (
        f"{tmp_path}/train.txt: has label 4, but the data set has only 2 class folders, so the labels of the folders "
        f"are unknown; write the names of all classes to {tmp_path}/classes.txt in the order of the labels, or set "
        "--label-offset if the labels do not start at 0"
    )
    put_names(tmp_path, NAMES)
    assert labels_of(tmp_path, Mode.EVAL) == {2: {2}, 4: {4}}
    assert_list_order(tmp_path, modes=[Mode.TRAIN])


def test_records_and_class_folders_share_the_order_of_classes_txt(tmp_path, capsys, verify_here, convert_here):
    root = tmp_path / "root"
    put_shard(root / "train-000000.tar", 5)
    put_folders(root, NAMES, ["val"])
    assert labels_of(root, Mode.EVAL) == sorted_labels(NAMES)
    open_split(root, "auto", Mode.TRAIN, 5, 0)
    stderr = capsys.readouterr().err
    assert (
        stderr.count("warning") == stderr.count("train are the labels in its webdataset files, and those of val") == 1
    )
    put_names(root, NAMES)
    assert_list_order(root)
    convert.convert(root, tmp_path / "out", "tfrecord", workers=1)
    assert (tmp_path / "out/classes.txt").read_text().split() == NAMES
    assert_list_order(tmp_path / "out")
    assert "warning" not in capsys.readouterr().err
    put_names(root, ["background", *NAMES])  # the first class has no images
    assert labels_of(root, Mode.EVAL) == {k: {k + 1} for k in range(5)}


@pytest.mark.parametrize("style", ["Great White {}", "GREAT-WHITE_{}", "{k}. great white {}"])
def test_classes_txt_of_annotation_tool_numbers_the_folders(tmp_path, style):
    """The names differ from the folder names only in case, spaces, _, - and a leading number."""
    names = [f"great_white_{name}" for name in NAMES]
    put_folders(tmp_path, names)
    put_names(tmp_path, [style.format(name.title(), k=k + 1) for k, name in enumerate(NAMES)])
    assert_list_order(tmp_path)
    data_set = open_split(tmp_path, "auto", Mode.TRAIN, 5, 0)
    assert data_set.classes == names
    assert data_set.class_names == (tmp_path / "classes.txt").read_text().splitlines()


def test_display_name_of_another_folder_is_an_error(tmp_path, verify_here):
    put_folders(tmp_path, NAMES)
    put_names(tmp_path, ["Rooster", "Tench", "Ray", "Shark", "Goldfish"])
    message = error_of(tmp_path)
    assert message == (
        f"{tmp_path}/classes.txt: line 2 is Tench, but class folder tench has label 4; write the names of all class "
        "folders, which are then numbered in this order, or write Tench to line 5"
    )
    put_names(tmp_path, ["Rooster", "Goldfish", "Ray", "Shark", "Tench"])
    assert open_split(tmp_path, "auto", Mode.TRAIN, 5, 0).class_names[0] == "Rooster"
    assert labels_of(tmp_path, Mode.TRAIN) == sorted_labels(NAMES)


def test_labels_from_1_are_shifted_by_detection(tmp_path, capsys, verify_here, convert_here):
    """Published weights have 8 outputs for these 8 classes, labels 0 to 7."""
    put_tfrecords(tmp_path / "r")
    root = tmp_path / "r"
    assert DataRoot(root).count_classes(Mode.TRAIN) == 8
    for outputs in (8, None):
        assert [labels_of(root, mode, outputs) for mode in Mode] == [{k: {k} for k in range(8)}] * 2
    message = (
        f"--label-offset auto: the labels in the TFRecord files in {root} start at 1, so 1 is subtracted; to use them "
        "unchanged, set --label-offset 0"
    )
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count(message) == 1
    # A network with 9 outputs, as earlier versions trained, gets the labels as stored.
    assert (
        labels_of(root, Mode.TRAIN, 9)
        == labels_of(root, Mode.TRAIN, 9, label_offset=0)
        == {k: {k + 1} for k in range(8)}
    )
    report = verify.verify(root, 8)
    assert not report.training_would_fail and not verify.verify(root).training_would_fail
    convert.convert(root, tmp_path / "out", "webdataset", workers=1)
    assert_list_order(tmp_path / "out", 8)
    with pytest.raises(UsageError, match="contains a conversion with a different --label-offset .*; remove the folder"):
        convert.convert(root, tmp_path / "out", "webdataset", workers=1, label_offset=0)


def test_label_offset_of_a_conversion_of_class_folders_and_records(tmp_path, convert_here):
    put_tfrecords(tmp_path / "r")
    (tmp_path / "r/train-00000-of-00001").unlink()
    put_folders(tmp_path / "r", WNIDS, ["train"])
    convert.convert(tmp_path / "r", tmp_path / "out", "webdataset", workers=1)
    with pytest.raises(UsageError, match="contains a conversion with a different --label-offset"):
        convert.convert(tmp_path / "r", tmp_path / "out", "webdataset", workers=1, label_offset=0)


def test_label_offset_applies_to_every_format_with_labels(tmp_path, capsys, verify_here, convert_here):
    root = tmp_path / "r"
    put_folders(root, NAMES)
    for split in ("train", "val"):
        put_list(root, split, ["unused", *NAMES])
        text = (root / f"{split}.txt").read_text().split("\n")
        put(root / f"{split}.txt", "\n".join(text[2:]))  # labels 1 to 5
    assert DataRoot(root).count_classes(Mode.TRAIN) == 6
    assert DataRoot(root, "auto", False, 1).count_classes(Mode.TRAIN) == 5
    for mode in Mode:
        assert labels_of(root, mode, 5, label_offset=1) == {k: {k} for k in range(5)}
        assert labels_of(root, mode, 6) == {k: {k + 1} for k in range(5)}
    for to in data_files.FORMATS:
        out = tmp_path / to
        data_files.write(root, out, to, label_offset=0)
        for mode in Mode:
            assert labels_of(out, mode, 5, label_offset=1) == {k: {k} for k in range(5)}
        assert not verify.verify(out, 5, label_offset=1).training_would_fail
        with pytest.raises(UsageError, match="has label 1, but .* allows 2 to 6 with --label-offset 2; number the"):
            open_split(out, "auto", Mode.TRAIN, 5, 0, label_offset=2)
        digests = {open_split(out, "auto", Mode.TRAIN, 6, 0, label_offset=n).digest for n in (0, 1)}
        assert len(digests) == 2
    with pytest.raises(UsageError, match="--label-offset 1: class folders in .* contain no labels; use --label-offset"):
        open_split(root, "folder", Mode.TRAIN, 5, 0, label_offset=1)


def test_one_class_and_missing_shards_are_reported_once_with_label_offset(tmp_path, verify_here):
    put_tfrecords(tmp_path, classes=1, first=3)
    for name in ("0", "red"):
        message = f"--image-root {tmp_path}: all train images belong to one class, {name}; add other classes, or use"
        assert verify.verify(tmp_path, 1, label_offset=3).errors == [f"{message} --allow-one-class"]
        assert not verify.verify(tmp_path, 1, label_offset=3, allow_one_class=True).training_would_fail
        put_names(tmp_path, ["red"])
    for path in tmp_path.glob("train-*"):
        path.rename(str(path).replace("of-00001", "of-00002"))
    errors = verify.verify(tmp_path, 1, label_offset=3).errors
    assert errors == [f"--image-root {tmp_path}: has 1 of 2 train shards; add the missing ones"]


def test_tools_subtract_label_offset(tmp_path, capsys, verify_here):
    root = tmp_path / "root"
    put_folders(root, NAMES, ["images"])
    for split in ("train", "val"):
        text = "".join(f"images/{name}/0.jpg {k + 1}\n" for k, name in enumerate(NAMES))
        put(root / f"{split}.txt", text)
    put_names(root, NAMES)
    flags = ["--label-offset", "1"]
    assert list(inspection.info(root, label_offset=1)["train"]["classes"]) == NAMES
    rows = inspection.augmented(root, 5, 1, [*flags, "--device", "cpu", "--image-shape", "3,32,32"])
    assert [name for _, _, name in rows] == NAMES
    for command in (["verify"], ["info"]):
        assert dataset.main([*command, str(root), *flags]) == 0
    capsys.readouterr()
    assert dataset.main(["verify", str(root)]) == 1
    message = (
        "train.txt: has label 5, but classes.txt allows 0 to 4; number the classes from 0, or set --label-offset to"
    )
    assert message in capsys.readouterr().out
    assert dataset.main(["info", str(root), "--label-offset", "-1"]) == 2
    assert "error: --label-offset: -1 is too small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "outputs", "offset"),
    [
        ([1, 2, 3], None, 1),
        ([1, 2, 3], 3, 1),
        ([1, 2, 3], 4, 0),
        ([0, 1, 2, 3], None, 0),
        ([0, 1, 3], 3, 0),
        ([2, 3], None, 0),  # the sample contains too few classes
        ([2, 3], 3, 1),  # otherwise, label 3 would be an error
        ([1], None, 0),
    ],
)
def test_offset_is_detected_only_if_labels_end_at_the_number_of_classes(labels, outputs, offset):
    assert numbering._detected_offset({label: {(None, None)} for label in labels}, outputs) == offset


def test_imagenet_labels_are_detected_by_synsets():
    wnids = [wnid for wnid, _ in numbering.imagenet_classes()]
    sampled = {label: {(wnids[label - 1], "text")} for label in (3, 500, 999)}
    assert [numbering._detected_offset(sampled, outputs) for outputs in (None, 1000, 1001)] == [1, 1, 0]
    names, class_names = numbering._sampled_names(sampled, 1, 1000)
    assert (names, class_names[:2]) == (wnids, ["tench", "goldfish"])
    assert numbering._sampled_names(sampled, 0, 1000) == numbering._sampled_names(sampled, 1, 1001) == (None, None)


def test_offset_is_detected_from_both_splits(tmp_path, verify_here):
    """An evaluation subtracts the same number as training, even if the validation images are of few classes."""
    put_tfrecords(tmp_path / "few", classes=2)
    put_tfrecords(tmp_path / "all", names=lambda k: {"image/class/text": f"color {k}"})
    name = "validation-00000-of-00001"
    (tmp_path / "few" / name).replace(tmp_path / "all" / name)
    for data_format in ("auto", "tfrecord"):
        assert labels_of(tmp_path / "all", Mode.EVAL, 8, data_format, trained=classes.numbers(8)) == {0: {0}, 1: {1}}
    assert labels_of(tmp_path / "few", Mode.TRAIN, 8, trained=classes.numbers(8)) == {0: {1}, 1: {2}}
    # Class folders get the numbers of the names in train/, although the network has none.
    (tmp_path / "all" / name).unlink()
    (tmp_path / "all" / f"{name}.idx").unlink()
    put_folders(tmp_path / "all", ["Color_7"], ["val"])
    assert labels_of(tmp_path / "all", Mode.EVAL, 8, trained=classes.numbers(8)) == {0: {7}}
    put_tfrecords(tmp_path / "last", classes=1, first=8)  # only the number of outputs shows that labels start at 1
    assert labels_of(tmp_path / "last", Mode.TRAIN, 8, allow_one_class=True) == {0: {7}}
    flags = ["--num-of-class", "8", "--allow-one-class", "--device", "cpu", "--image-shape", "3,32,32"]
    assert [name for *_, name in inspection.augmented(tmp_path / "last", 1, 1, flags)] == ["7"]
    assert not verify.verify(tmp_path / "last", 8, allow_one_class=True).training_would_fail


@pytest.mark.parametrize("first", [0, 1])
def test_names_of_classes_come_from_tfrecords(tmp_path, first, convert_here):
    root = tmp_path / "r"
    features = {"image/class/synset": WNIDS, "image/class/text": [f"color {k}" for k in range(8)]}
    put_tfrecords(root, first=first, names=lambda k: {name: values[k] for name, values in features.items()})
    put_folders(tmp_path / "e", WNIDS, ["val"], 1)
    data_set = open_split(root, "auto", Mode.EVAL, 8, 0)
    assert (data_set.classes, data_set.class_names) == (WNIDS, features["image/class/text"])
    assert DataRoot(root).count_classes(Mode.TRAIN) == 8
    with pytest.raises(UsageError, match=f"{root}: n00 has label 0, but label 7 in the checkpoint; number the labels"):
        open_split(root, "auto", Mode.EVAL, 8, 0, trained=WNIDS[::-1])
    convert.convert(root, tmp_path / "out", "recordio", workers=1)
    assert (tmp_path / "out/classes.txt").read_text().split() == WNIDS
    # Class folders next to the records get the labels of the records.
    names = [f"color_{7 - k}" for k in range(8)]
    put_folders(root, names, ["val"])
    for path in root.glob("validation*"):
        path.unlink()
    put_tfrecords(tmp_path / "text", first=first, names=lambda k: {"image/class/text": names[k]})
    (tmp_path / "text/train-00000-of-00001").rename(root / "train-00000-of-00001")
    for path in root.glob("*.idx"):
        path.unlink()
    for mode in Mode:
        assert labels_of(root, mode, 8) == {k: {k} for k in range(8)}
    assert open_split(root, "auto", Mode.EVAL, 8, 0).classes == names


def test_examples_without_usable_names_have_none(tmp_path):
    put_tfrecords(tmp_path, first=0, names=lambda k: {"image/class/text": "x"} if k else {})
    assert open_split(tmp_path, "auto", Mode.EVAL, 8, 0).classes == classes.numbers(8)
    assert tfrecord.read_class(str(tmp_path / "train-00000-of-00001"), 0, 10**6) == (0, None, None)
    invalid = {label: {("n00", "x")} for label in (-(2**63), 2**63 - 1)}
    assert numbering._sampled_names(invalid, 0, None) == (None, None)
    assert numbering._detected_offset({2**63 - 1: {("n00", "x")}}, None) == 0
    ambiguous = {0: {("n00", "x"), ("n01", "y")}}
    assert numbering._sampled_names(ambiguous, 0, 1) == (None, None)


def test_subset_of_class_folders_requires_names_of_outputs(tmp_path):
    """Unnamed outputs are those of a network that was trained with records; folders 3, 5 and 7 of 8 exist."""
    unnamed = classes.numbers(8)
    put_folders(tmp_path, WNIDS, ["val"])
    assert labels_of(tmp_path, Mode.EVAL, 8, trained=unnamed) == {k: {k} for k in range(8)}
    for k in (0, 1, 2, 4, 6):
        for path in (tmp_path / "val" / WNIDS[k]).iterdir():
            path.unlink()
        (tmp_path / "val" / WNIDS[k]).rmdir()
    with pytest.raises(UsageError) as error:
        open_split(tmp_path, "auto", Mode.EVAL, 8, 0, trained=unnamed)
    assert str(error.value) == (
        f"--image-root {tmp_path}: has 3 class folders, but the network has 8 outputs without names, so the labels of "
        f"the folders are unknown; write the names of all 8 classes to {tmp_path}/classes.txt, one per line, in the "
        "order of the outputs"
    )
    put_names(tmp_path, WNIDS)
    assert labels_of(tmp_path, Mode.EVAL, 8, trained=unnamed) == {k: {k} for k in (3, 5, 7)}


def test_wordnet_ids_get_the_labels_of_imagenet(tmp_path):
    wnids = [wnid for wnid, _ in numbering.imagenet_classes()]
    put_folders(tmp_path, [wnids[i] for i in (7, 0, 999)], ["val"])
    labels = labels_of(tmp_path, Mode.EVAL, 1000, trained=classes.numbers(1000))
    assert labels == {0: {7}, 1: {0}, 2: {999}}
    with pytest.raises(UsageError, match="has 3 class folders, but the network has 8 outputs without names"):
        open_split(tmp_path, "auto", Mode.EVAL, 8, 0, trained=classes.numbers(8))


@pytest.mark.slow
def test_network_trained_with_labels_from_1_is_evaluated_with_class_folders(
    run_train, photos, tmp_path, capsys, one_block
):
    """Records with labels 1 to 3 and the class folders with the same images give the same loss and top1."""
    root, names = tmp_path / "records", ["class0", "class1", "class2"]
    root.mkdir()
    for split in ("train", "val"):
        writer = TFRecordWriter(str(root / f"{split}-00000-of-00001"))
        for path in sorted((photos / split).glob("*/*")):
            label = names.index(path.parent.name) + 1
            writer.write({"image/encoded": (path.read_bytes(), "byte"), "image/class/label": (label, "int")})
        writer.close()
    assert run_train("--epochs", "2", "--bn-momentum", "0.6", image_root=root)[0] == 0
    evaluate = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1"]
    results = [phase(run_train(*evaluate, image_root=data)[1], [], "val.") for data in (root, photos)]
    for name in ("loss", "top1"):
        assert results[0][name] == pytest.approx(results[1][name], abs=1e-6)
    subset = tmp_path / "subset"
    shutil.copytree(photos / "val", subset / "val")
    shutil.rmtree(subset / "val/class0")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "replaces an existing file" not in line]
    assert not warnings
    assert run_train(*evaluate, image_root=subset)[0] == 2
    assert_one_error(capsys.readouterr().err, ["has 2 class folders, but the network has 3 outputs without names"])
    predictions = tmp_path / "predictions.csv"
    put_names(subset, names)  # the remedy in the message
    assert run_train(*evaluate, "--predictions", predictions, image_root=subset)[0] == 0
    labels = {tuple(row.split(",")[:2]) for row in predictions.read_text().splitlines()[1:]}
    assert {(image.split("/")[1], label) for image, label in labels} == {("class1", "1"), ("class2", "2")}
    shutil.copytree(photos / "train", subset / "train")
    (subset / "classes.txt").unlink()
    put(subset / "val.txt", f"val/class1/{next((subset / 'val/class1').iterdir()).name} 2")
    assert run_train("--output-dir", tmp_path / "new", image_root=subset)[0] == 2
    assert_one_error(capsys.readouterr().err, ["has label 2, but class class1 has label 1 among the sorted"])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (["a", "b"], ["b", "a"], True),
        (["0", "1"], ["a", "b"], False),
        (["0", "1", "2"], ["0", "1"], False),
        (["0", "1", "2"], ["0", "2", "x"], True),  # the folder of digit 1 has been renamed
        ([], ["a"], False),
    ],
)
def test_only_lists_with_names_are_compared(first, second, expected):
    assert numbering.have_names(first, second) == numbering.have_names(second, first) == expected
