"""Training reads splits under the names of other programs, and logs which files it reads."""

import shutil

import data_files
import numpy as np
import pytest
from data_files import open_split

from conftest import losses, read_report
from layouts import colors_match, error_of_training, image, put
from paddle_resnet import dali
from paddle_resnet.data import split_names
from paddle_resnet.data.formats import FORMATS
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache", "one_block")


def shown(root, capsys):
    """Open both splits of a data set, check their labels, and return what the log calls them."""
    found = []
    for mode in Mode:
        capsys.readouterr()
        open_split(str(root), "auto", mode, None, 0)
        lines = [line for line in capsys.readouterr().out.splitlines() if f"the {mode.value} split is" in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"--image-root {root}: the {mode.value} split is ")
        found.append(lines[0].partition(" split is ")[2])
        images = DataRoot(root).images(mode)[1]
        assert len(images) == 9
        assert colors_match(images)
    return found


@pytest.mark.parametrize(
    "names",
    [("train", "valid"), ("train", "validation"), ("Training", "Testing"), ("TRAIN", "test"), ("train", "dev")],
)
def test_class_folders_with_other_names(colored, capsys, names):
    for old, new in zip(("train", "val"), names, strict=True):
        (colored / old).rename(colored / new)
    assert shown(colored, capsys) == [f"{name}/ (folder)" for name in names]
    assert DataRoot(colored).listed(Mode.EVAL)[0].name == f"{names[1]}/c0/10.jpg"


RECORDS = [
    ("recordio", {"train.rec": "caltech_train.rec", "val.rec": "caltech_val.rec"}),
    ("recordio", {"train.rec": "train_rec.rec", "val.rec": "test.rec"}),
    ("lmdb", {"train_lmdb": "ilsvrc12_train_lmdb", "val_lmdb": "ilsvrc12_val_lmdb"}),
    ("lmdb", {"train_lmdb": "train.lmdb", "val_lmdb": "valid.lmdb"}),
    ("lmdb", {"train_lmdb": "train_db", "val_lmdb": "val_db"}),
    ("tfrecord", {"train-00000-of-00001": "train.tfrecord", "val-00000-of-00001": "validation.tfrec"}),
    (
        "tfrecord",
        {
            "train-00000-of-00001": "birds-train.tfrecord-00000-of-00001",
            "val-00000-of-00001": "birds-test.tfrecord-00000-of-00001",
        },
    ),
    ("webdataset", {"train-000000.tar": "birds-training-0.tar", "val-000000.tar": "birds_test-0.tar"}),
    (
        "parquet",
        {
            "train-00000-of-00001.parquet": "birds_train-00000-of-00001.parquet",
            "val-00000-of-00001.parquet": "birds_test-00000-of-00001.parquet",
        },
    ),
]


@pytest.mark.parametrize(("data_format", "names"), [case for case in RECORDS if case[0] in data_files.FORMATS])
def test_record_files_with_other_names(colored, tmp_path, capsys, data_format, names):
    root = tmp_path / "x y"
    data_files.write(colored, root, data_format)
    (root / "convert.json").unlink(missing_ok=True)
    for name, other in names.items():
        (root / name).rename(root / other)
    for index in root.glob("*.idx"):
        index.unlink()
    slash = "/" if data_format == "lmdb" else ""
    assert shown(root, capsys) == [f"{name}{slash} ({data_format})" for name in names.values()]


def test_only_the_first_of_several_shards_is_logged(colored, tmp_path, capsys):
    convert.convert(colored, tmp_path / "x", "webdataset", shards=3, workers=1)
    open_split(str(tmp_path / "x"), "auto", Mode.TRAIN, None, 0)
    assert "the train split is train-000000.tar and 2 more (webdataset)" in capsys.readouterr().out


def write_lists(root, pattern, base=""):
    for split, name in (("train", "train"), ("val", "val")):
        lines = [f"{path.relative_to(root / base.format(split))} {path.parent.name[1]}" for path in images(root, split)]
        put(root / pattern.format(name), "\n".join(lines) + "\n")


def images(root, split):
    return sorted((root / split).glob("*/*.jpg"))


@pytest.mark.parametrize("names", [None, ("birds_label_list.txt", "0 x\n1 y\n2 z\n"), ("labels.txt", "x\ny\nz\n")])
@pytest.mark.parametrize(
    ("pattern", "base"),
    [("{}_list.txt", ""), ("{}_list.txt", "{}"), ("meta/{}.txt", "{}"), ("meta/{}.txt", "meta"), ("{}.txt", "{}")],
)
def test_lists_of_images_that_are_not_in_class_folders(colored, capsys, pattern, base, names):
    """The lists of PaddleClas are relative to the data set, those of MMPretrain and Caffe to the folders of the
    splits. Paths may also be relative to the folder of the list."""
    lines = {}
    for split in ("train", "val"):
        lines[split] = []
        folder = colored / ("meta" if base == "meta" else "") / split
        folder.mkdir(parents=True, exist_ok=True)
        for path in images(colored, split):
            name = f"{path.parent.name}_{path.name}"
            path.rename(folder / name)
            prefix = "" if base == "{}" else f"{split}/"
            lines[split].append(f"{prefix}{name} {path.parent.name[1]}\n")
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
        put(colored / pattern.format(split), "".join(lines[split]))
    if names:
        put(colored / names[0], names[1])
    assert shown(colored, capsys) == [f"{pattern.format(split)} (filelist)" for split in ("train", "val")]
    is_read = names and pattern != "{}.txt"  # only lists of other programs have names in their files
    assert DataRoot(colored).numbering(Mode.TRAIN).class_names == (["x", "y", "z"] if is_read else None)


def test_list_takes_precedence_if_validation_images_are_not_in_class_folders(colored, capsys):
    """PaddleClas, ImageNet: the labels of both splits must come from the lists."""
    write_lists(colored, "{}_list.txt")
    assert shown(colored, capsys) == ["train/ (folder)", "val/ (folder)"]
    DataRoot(colored).format(Mode.TRAIN)
    for path in images(colored, "val"):
        path.rename(colored / "val" / f"{path.parent.name}{path.name}")
    for folder in (colored / "val").glob("c*/"):
        folder.rmdir()
    text = (colored / "val_list.txt").read_text()
    (colored / "val_list.txt").write_text(text.replace("/c0/", "/c0").replace("/c1/", "/c1").replace("/c2/", "/c2"))
    assert shown(colored, capsys) == ["train_list.txt (filelist)", "val_list.txt (filelist)"]


def test_list_next_to_class_folders_is_logged_and_can_be_chosen(colored, tmp_path, capsys):
    write_lists(colored, "{}_list.txt")
    DataRoot(colored).format(Mode.TRAIN)
    ignored = "train_list.txt in {} is ignored, because all splits consist of class folders; to use it, set {}"
    assert ignored.format(colored, "--data-format filelist") in capsys.readouterr().out
    open_split(str(colored), "filelist", Mode.TRAIN, None, 0)  # obey the message
    assert "the train split is train_list.txt (filelist)" in capsys.readouterr().out


@pytest.mark.parametrize("first", [0, 1])
def test_labels_are_numbered_from_the_first_number_in_a_file_of_names(colored, capsys, first):
    (colored / "train").rename(colored / "images")
    for split, root in (("train", "images"), ("val", "val")):
        lines = [f"{path.relative_to(colored)} {int(path.parent.name[1]) + first}\n" for path in images(colored, root)]
        put(colored / f"{split}_list.txt", "".join(lines))
    put(colored / "label_list.txt", "".join(f"{k + first} name{k}\n" for k in range(3)))
    for mode in Mode:
        numbers, found = DataRoot(colored).images(mode)
        assert numbers.class_names == ["name0", "name1", "name2"]
        assert colors_match(found)
    assert ("numbers the classes from 1, so 1 is subtracted" in capsys.readouterr().out) == bool(first)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda root: shutil.copytree(root / "val", root / "validation"), ("val/", "validation/")),
        (lambda root: shutil.copytree(root / "val", root / "Val"), ("Val/", "val/")),
        (
            lambda root: [write_lists(root, name) for name in ("{}.txt", "{}_list.txt")],
            ("train.txt", "train_list.txt"),
        ),
        (
            lambda root: [shutil.copyfile(file, root / f"a_{file.name}") for file in sorted(root.glob("*.rec"))],
            ("a_train.rec", "train.rec"),
        ),
    ],
    ids=["val and validation", "case", "lists", "records"],
)
def test_split_with_several_names_is_an_error(colored, tmp_path, make, names):
    root = colored
    if names[1].endswith(".rec"):
        root = tmp_path / "x"
        convert.convert(colored, root, "recordio", workers=1)
    make(root)
    split = "val" if names[0].lower().startswith("val") else "train"
    message = error_of_training(root)
    assert message == (
        f"--image-root {root}: contains the {split} split several times ({', '.join(names)}); move all but one to a "
        "different folder"
    )
    for name in (names[0], names[0].replace("train", "val")):  # obey the message
        if (root / name).exists():
            (tmp_path / "unused").mkdir(exist_ok=True)
            (root / name).rename(tmp_path / "unused" / name)
    for mode in Mode:
        assert colors_match(DataRoot(root).images(mode)[1])


def test_split_in_several_formats_names_the_flag(colored, tmp_path, capsys):
    convert.convert(colored, tmp_path / "x", "recordio", workers=1)
    for file in (tmp_path / "x").glob("*.rec"):
        file.rename(colored / f"caltech_{file.name}")
    message = (
        "contains the train split as recordio (caltech_train.rec) and folder (train/); choose one with --data-format"
    )
    assert message in error_of_training(colored)
    for data_format in ("recordio", "folder"):  # obey the message
        open_split(str(colored), data_format, Mode.TRAIN, None, 0)
        assert f"({data_format})" in capsys.readouterr().out


def test_test_split_is_read_only_without_a_validation_split(colored, capsys):
    shutil.copytree(colored / "val", colored / "test")
    assert shown(colored, capsys)[1] == "val/ (folder)"
    shutil.rmtree(colored / "val")
    assert shown(colored, capsys)[1] == "test/ (folder)"


@pytest.mark.parametrize("name", ["test", "validation", "eval"])
@pytest.mark.parametrize("content", ["x.jpg", "images/x.jpg", "a/b/x.jpg", "a/x.txt"])
def test_folder_without_class_folders_is_not_a_split(colored, name, content):
    (colored / "val").rename(colored / "kept")
    put(colored / name / content, image(0))
    assert f"--image-root {colored}: has no folder val/; " in error_of_training(colored)
    (colored / "kept").rename(colored / "val")
    assert colors_match(DataRoot(colored).images(Mode.EVAL)[1])


@pytest.mark.parametrize(
    ("name", "pattern", "mode", "expected"),
    [
        ("caltech_train.rec", "recordio", Mode.TRAIN, "caltech_train"),
        ("train_val.rec", "recordio", Mode.TRAIN, None),
        ("pretrain.rec", "recordio", Mode.TRAIN, None),
        ("trainval.rec", "recordio", Mode.EVAL, None),
        ("TEST.REC", "recordio", Mode.EVAL, "TEST"),
        ("train.rec.old", "recordio", Mode.TRAIN, None),
        ("a-train.tfrecord-00001-of-00002", "tfrecord", Mode.TRAIN, "a-train"),
        ("train-00001-of-00002.idx", "tfrecord", Mode.TRAIN, None),
        ("train00-230.tfrec", "tfrecord", Mode.TRAIN, None),
        ("my-test-train-000000.tar", "webdataset", Mode.TRAIN, "my-test-train-"),
    ],
)
def test_split_is_the_last_word_of_a_name(name, pattern, mode, expected):
    found = split_names.match(FORMATS[pattern].NAMES, name, mode)
    assert (found and found["set"]) == expected


def test_tfrecords_of_other_programs_are_not_indexed(tmp_path):
    from tfrecord import TFRecordWriter

    for split in ("train", "test"):
        writer = TFRecordWriter(str(tmp_path / f"birds-{split}.tfrecord-00000-of-00001"))
        for k in range(3):
            writer.write({"image": (image(k), "byte"), "label": (k, "int")})
        writer.close()
    assert "but the features are image, label); run `" in error_of_training(tmp_path)
    assert not [*tmp_path.glob("*.idx")]


@pytest.fixture
def renamed(photos, tmp_path):
    """Create class folders with the names Training and test, and return their root."""
    root = tmp_path / "renamed"
    for old, new in (("train", "Training"), ("val", "test")):
        shutil.copytree(photos / old, root / new)
    return root


@pytest.mark.slow
def test_run_and_evaluation_read_the_same_images_under_other_names(run_train, photos, renamed, tmp_path):
    results = []
    for root in (photos, renamed):
        report = tmp_path / f"{root.name}.json"
        output = tmp_path / f"{root.name}_output"
        run_train("--epochs", 1, "--report-file", report, "--output-dir", output, image_root=root)
        results.append([losses(read_report(report))])
        flags = ("--run-scope", "eval_only", "--from-checkpoint", output)
        run_train(*flags, "--report-file", report, image_root=root)
        results[-1].append(read_report(report)[-1]["data"])
    assert results[0][:-1] == results[1][:-1]
    assert results[0][-1]["val.loss"] == results[1][-1]["val.loss"]


def test_resumed_run_reads_the_same_files_or_names_a_new_alias(run_train, photos, renamed, tmp_path, capsys):
    output = tmp_path / "output"
    flags = ("--output-dir", output, "--resume")
    run_train("--epochs", 1, *flags, image_root=renamed)
    run_train("--epochs", 2, *flags, image_root=renamed)
    text = capsys.readouterr()
    assert "the loader restarts" not in text.out + text.err
    shutil.copytree(photos / "train", renamed / "train")
    with pytest.raises(UsageError, match=r"contains the train split several times \(Training/, train/\)"):
        DataRoot(renamed).open(Mode.TRAIN, 3, 0)


@pytest.mark.slow
def test_new_validation_split_of_a_resumed_run_is_a_warning(run_train, photos, renamed, tmp_path, capsys):
    flags = ("--output-dir", tmp_path / "output", "--resume")
    run_train("--epochs", 1, *flags, image_root=renamed)
    shutil.copytree(photos / "val", renamed / "val")
    run_train("--epochs", 2, *flags, image_root=renamed)
    output = "".join(capsys.readouterr())
    assert "the validation split is val/ (folder) and was test/ (folder), so the results before and after" in output
    assert "the loader restarts" not in output
    (renamed / "val").rename(tmp_path / "unused")  # obey the message
    run_train("--epochs", 3, *flags, image_root=renamed)
    assert "the validation split is test/ (folder) and was val/" in "".join(capsys.readouterr())


def test_second_process_reads_the_other_half(parse, renamed, shard):
    shard(world_size=2)
    seen = []
    for rank in range(2):
        shard(rank=rank)
        loader = dali.build_dataloader(parse("--image-root", renamed), Mode.EVAL)
        seen.append(sum(len(np.array(batch["label"])) for (batch,) in loader))
    assert seen == [11, 12]
