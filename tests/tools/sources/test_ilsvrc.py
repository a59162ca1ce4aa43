"""ImageNet in the layouts in which it is downloaded, in miniature: each class has a color, which tests compare with the
label."""

import io
import os
import shutil
import tarfile

import numpy as np
import pytest
from scipy import io as matlab

from layouts import color_of, colors_match, error_of_training, image, obey, put, write_tar
from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import convert, sources, workers
from paddle_resnet.tools.sources import Options, ilsvrc
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
WNIDS = ["n01440764", "n01443537", "n01484850", "n01491361"]
IDS = {"n01440764": 3, "n01443537": 1, "n01484850": 4, "n01491361": 2}  # the devkit's ids are not in sorted order
VAL = [2, 0, 3, 1, 1, 2, 0, 3]  # class of each validation image
PART = Options(allow_partial=True)


def train_name(k, i):
    return f"{WNIDS[k]}_{i}.JPEG"


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def inner_tar(k):
    return write_tar([(train_name(k, i), image(k, i)) for i in range(5)])


def val_images(folder=""):
    return [(f"{folder}{val_name(n)}", image(k, 100 + n)) for n, k in enumerate(VAL, 1)]


def synsets(ids=None):
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(number, wnid, "name, other name", 0) for wnid, number in (ids or IDS).items()]
    rows.append((99, "n00001740", "entity", 4))  # has subclasses
    f = io.BytesIO()
    matlab.savemat(f, {"synsets": np.array(rows, kinds).reshape(-1, 1)})
    return f.getvalue()


def truth(ids=None):
    return "".join(f"{(ids or IDS)[WNIDS[k]]}\n" for k in VAL).encode()


def devkit(**replaced):
    folder = "ILSVRC2012_devkit_t12/data/"
    files = {"meta.mat": synsets(), ilsvrc.TRUTH: truth()} | replaced
    return write_tar([(folder + name, data) for name, data in files.items() if data is not None], "gz")


def solution():
    rows = (f"{val_name(n)[:-5]},{WNIDS[k]} 1 2 3 4 {WNIDS[k]} 5 6 7 8 \n" for n, k in enumerate(VAL, 1))
    return "ImageId,PredictionString\n" + "".join(rows)


def official(root):
    put(root / ilsvrc.TRAIN_TAR, write_tar([(f"{WNIDS[k]}.tar", inner_tar(k)) for k in (2, 0, 3, 1)]))
    put(root / ilsvrc.VAL_TAR, write_tar(val_images()))
    put(root / f"{ilsvrc.DEVKIT}.tar.gz", devkit())


def folders(root):
    for k in range(4):
        for i in range(5):
            put(root / f"train/{WNIDS[k]}/{train_name(k, i)}", image(k, i))


def flat(root, folder="val"):
    folders(root)
    for name, data in val_images(f"{folder}/"):
        put(root / name, data)


def lines(folder=""):
    return "".join(f"{folder}{val_name(n)} {k}\n" for n, k in enumerate(VAL, 1))


def inner_tars(root, folder):
    for k in range(4):
        put(root / folder / f"{WNIDS[k]}.tar", inner_tar(k))
    put(root / ilsvrc.VAL_TAR, write_tar(val_images()))
    put(root / f"{ilsvrc.DEVKIT}.tar.gz", devkit())


def unpacked_devkit(root, folder="ILSVRC2012_devkit_t12/data"):
    flat(root)
    put(root / folder / "meta.mat", synsets())
    put(root / folder / ilsvrc.TRUTH, truth())


def official_with_extended_headers(root):
    official(root)
    headers = {"comment": "of all members"}
    with tarfile.open(root / ilsvrc.VAL_TAR, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
        folder = tarfile.TarInfo("val")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in val_images("val/"):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5  # the extended header contains the fraction of the time
            tar.addfile(member, io.BytesIO(data))


def unpacked_archives(root):
    flat_with(f"{ilsvrc.DEVKIT}.tar.gz", devkit(), "ILSVRC2012_img_val")(root)
    (root / "train").rename(root / "ILSVRC2012_img_train")


def kaggle(root):
    flat(root / "ILSVRC/Data/CLS-LOC")
    put(root / "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", image(0))
    put(root / "LOC_val_solution.csv", solution())
    put(root / "LOC_synset_mapping.txt", "".join(f"{wnid} name\n" for wnid in WNIDS))


def flat_with(name, content, folder="val"):
    def build(root):
        flat(root, folder)
        put(root / name, content)

    return build


LAYOUTS = {
    "official archives": (official, "."),
    "inner archives in train/": (lambda root: inner_tars(root, "train"), "."),
    "inner archives": (lambda root: inner_tars(root, "."), "."),
    "flat val/ and devkit archive": (flat_with(f"{ilsvrc.DEVKIT}.tar.gz", devkit()), "."),
    "flat val/ and devkit folder": (unpacked_devkit, "."),
    "flat val/ and content of the devkit": (lambda root: unpacked_devkit(root, "data"), "."),
    "archive of a different program": (official_with_extended_headers, "."),
    "folders with the names of the archives": (unpacked_archives, "."),
    "val/val/": (flat_with("LOC_val_solution.csv", solution(), "val/val"), "."),
    "val/ILSVRC2012_img_val/": (flat_with("LOC_val_solution.csv", solution(), "val/ILSVRC2012_img_val"), "."),
    "Kaggle": (kaggle, "."),
    "Kaggle, ILSVRC/": (kaggle, "ILSVRC"),
    "Kaggle, Data/": (kaggle, "ILSVRC/Data"),
    "Kaggle, CLS-LOC/": (kaggle, "ILSVRC/Data/CLS-LOC"),
    "MMPretrain": (flat_with("meta/val.txt", lines()), "."),
    "Caffe": (flat_with("val.txt", lines()), "."),
    "PaddleClas": (flat_with("val_list.txt", lines("val/")), "."),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_detected_and_labels_match_pixels(tmp_path, name):
    build, folder = LAYOUTS[name]
    build(tmp_path)
    kind, splits, classes = sources.read(tmp_path / folder, options=PART)
    assert (kind, classes) == ("ilsvrc", WNIDS)
    assert {split: len(images) for split, images in splits.items()} == {"train": 20, "val": 8}
    assert splits["val"][0].name == f"val/{WNIDS[VAL[0]]}/{val_name(1)}"
    assert colors_match(image for images in splits.values() for image in images)


# Training reads the class folders in train/ and these lists of validation images.
READ_BY_TRAINING = ("MMPretrain", "Caffe", "PaddleClas")


@pytest.mark.parametrize("name", READ_BY_TRAINING)
def test_training_reads_lists_of_validation_images(tmp_path, capsys, name):
    LAYOUTS[name][0](tmp_path)
    for mode, count in ((Mode.TRAIN, 20), (Mode.EVAL, 8)):
        images = DataRoot(tmp_path).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in READ_BY_TRAINING])
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    build, folder = LAYOUTS[name]
    build(tmp_path)
    message = error_of_training(tmp_path / folder)
    assert "ImageNet" in message
    imported = obey(message.replace("dataset import ", "dataset import --allow-partial "))
    for mode, count in ((Mode.TRAIN, 20), (Mode.EVAL, 8)):
        images = DataRoot(imported).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)
    assert dataset.main(["import", str(tmp_path / folder), "--list"]) == 0
    assert message.partition("it contains ")[2] in capsys.readouterr().out
    assert dataset.main(["info", str(tmp_path / folder)]) == 2
    assert message.partition("it contains ")[2] in capsys.readouterr().err


@pytest.mark.parametrize("to", ["webdataset", "folder"])
def test_official_archives_are_imported_without_unpacking(tmp_path, capsys, to):
    official(tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--to", to, "--workers", "1"]
    assert dataset.main(command) == 2
    error = capsys.readouterr().err
    problem = "has 20 of 1281167 training images, 8 of 50000 validation images, 4 of 1000 classes"
    assert f"{problem}; add the missing files, or use --allow-partial to import these images" in error
    assert not (tmp_path / "x").exists()
    assert dataset.main([*command, "--allow-partial"]) == 0
    output = capsys.readouterr()
    assert problem in output.err
    assert output.out.splitlines()[-1] == (f"{tmp_path}/x: 20 train and 8 val images in 4 classes from ilsvrc as {to}")
    assert (tmp_path / "x/classes.txt").read_text().split() == WNIDS
    for mode, count in ((Mode.TRAIN, 20), (Mode.EVAL, 8)):
        numbers, images = DataRoot(tmp_path / "x").images(mode)
        assert (numbers.classes, len(images)) == (WNIDS, count)
        assert colors_match(images)
    if to == "folder":
        assert (tmp_path / f"x/train/{WNIDS[1]}/{train_name(1, 3)}").read_bytes() == image(1, 3)
    assert dataset.main(["verify", str(tmp_path / "x")]) == 0


def test_numbers_of_complete_imagenet_are_accepted(tmp_path, monkeypatch, capsys):
    official(tmp_path)
    monkeypatch.setattr(ilsvrc, "EXPECTED", {"train": 20, "val": 8})
    monkeypatch.setattr(ilsvrc, "CLASSES", 4)
    sources.read(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(ilsvrc, "EXPECTED", {"train": 20, "val": 9})
    with pytest.raises(UsageError, match="has 8 of 9 validation images; add"):
        sources.read(tmp_path)
    monkeypatch.setattr(ilsvrc, "EXPECTED", {"train": 20, "val": 7})
    with pytest.raises(UsageError, match="has 8 of 7 validation images; remove the files that are not from ILSVRC2012"):
        sources.read(tmp_path)


@pytest.mark.parametrize("to", ["webdataset", "folder"])
def test_interrupted_import_continues_and_is_not_taken_for_complete(tmp_path, monkeypatch, to):
    official(tmp_path / "source")
    output = tmp_path / "x"
    shards = 5 if to == "webdataset" else None
    monkeypatch.setattr(workers, "BLOCK", 4)
    read, count = workers.read_image, 0

    def interrupted(listed):
        nonlocal count
        count += 1
        if count > 11:
            raise KeyboardInterrupt
        return read(listed)

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(workers, "read_image", interrupted)
        sources.import_(tmp_path / "source", output, to, shards=shards, options=PART, workers=1)
    with pytest.raises(UsageError, match="the import is incomplete; repeat the `.*dataset import` command"):
        DataRoot(output).images(Mode.TRAIN)
    written = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.suffix in (".tar", ".JPEG")}
    assert written
    if to == "folder":  # a process was killed while it wrote a file
        part = next(path for path in written if path.suffix == ".JPEG")
        part.write_bytes(part.read_bytes()[:100])
        del written[part]
    sources.import_(tmp_path / "source", output, to, shards=shards, options=PART, workers=1)
    assert written.items() <= {path: path.stat().st_mtime_ns for path in written}.items()
    for mode, count in ((Mode.TRAIN, 20), (Mode.EVAL, 8)):
        images = DataRoot(output).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)


@pytest.mark.parametrize("to", convert.FORMATS)
def test_import_interrupted_before_the_first_image_is_not_taken_for_an_empty_folder(tmp_path, monkeypatch, capsys, to):
    official(tmp_path / "source")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        for name in ("_write_folders", "_write_single_file", "_write_shards"):
            stopped.setattr(convert, name, interrupted)
        sources.import_(tmp_path / "source", tmp_path / "x", to, options=PART, workers=1)
    assert "the import is incomplete; repeat the" in error_of_training(tmp_path / "x")
    assert dataset.main(["info", str(tmp_path / "x")]) == 2
    assert "the import is incomplete; repeat the" in capsys.readouterr().err


def test_archive_as_source_is_rejected_with_remedy(tmp_path):
    official(tmp_path)
    for kind in (None, "ilsvrc"):
        with pytest.raises(UsageError, match="img_val.tar: not a table .*; use the folder that contains it"):
            sources.read(tmp_path / ilsvrc.VAL_TAR, kind, PART)
    with pytest.raises(UsageError, match="nowhere: does not exist"):
        sources.read(tmp_path / "nowhere")


def test_validation_alone_is_numbered_by_devkit(tmp_path):
    official(tmp_path)
    (tmp_path / ilsvrc.TRAIN_TAR).unlink()
    _, splits, classes = sources.read(tmp_path, options=PART)
    assert (classes, [*splits]) == (WNIDS, ["val"])
    assert colors_match(splits["val"])
    sources.import_(tmp_path, tmp_path / "x", "folder", options=PART, workers=1)
    assert sorted(path.name for path in (tmp_path / "x/val").iterdir()) == WNIDS
    sources.import_(tmp_path, tmp_path / "y", "webdataset", options=PART, workers=1)
    assert colors_match(DataRoot(tmp_path / "y").images(Mode.EVAL)[1])


def test_training_alone_is_divided_only_with_val(tmp_path):
    official(tmp_path)
    (tmp_path / ilsvrc.VAL_TAR).unlink()
    for options, counts in ((PART, {"train": 20}), (Options(allow_partial=True, val=0.4), {"train": 12, "val": 8})):
        _, splits, classes = sources.read(tmp_path, options=options)
        assert (classes, {split: len(images) for split, images in splits.items()}) == (WNIDS, counts)


def test_validation_images_of_missing_classes_are_left_out(tmp_path, capsys):
    flat(tmp_path)
    put(tmp_path / "LOC_val_solution.csv", solution())
    shutil.rmtree(tmp_path / "train" / WNIDS[0])
    _, splits, classes = sources.read(tmp_path, options=PART)
    assert classes == WNIDS[1:]
    assert len(splits["val"]) == 6
    assert [color_of(read_image(image)[0]) for image in splits["val"]] == [i.label + 1 for i in splits["val"]]
    assert ": 2 validation images left out, because" in capsys.readouterr().err


def broken(change):
    def build(root):
        official(root)
        change(root)

    return build


def truncate(name, size):
    return broken(lambda root: os.truncate(root / name, size(root / name) if callable(size) else size))


def replace(name, content):
    return broken(lambda root: put(root / name, content))


BAD = {
    "train cut in member": (truncate(ilsvrc.TRAIN_TAR, 5000), "img_train.tar: damaged at its start (n01484850.tar is"),
    "train cut in later member": (
        truncate(ilsvrc.TRAIN_TAR, lambda path: path.stat().st_size - 12000),
        "img_train.tar: damaged after n01491361.tar (n01443537.tar is truncated); download it again",
    ),
    "train without end": (
        truncate(ilsvrc.TRAIN_TAR, lambda path: path.stat().st_size // 10240 * 10240 - 10240),
        "img_train.tar: damaged after ",
    ),
    "inner cut": (
        replace(ilsvrc.TRAIN_TAR, write_tar([("n01440764.tar", inner_tar(0)[:3000])])),
        "img_train.tar: n01440764.tar: damaged ",
    ),
    "val cut": (truncate(ilsvrc.VAL_TAR, 3000), "img_val.tar: damaged after ILSVRC2012_val_0000000"),
    "val not tar": (replace(ilsvrc.VAL_TAR, b"<html>" * 1000), "img_val.tar: damaged at its start ("),
    "train of other content": (
        replace(ilsvrc.TRAIN_TAR, write_tar([("readme.txt", b"x")])),
        "img_train.tar: readme.txt is not named after a WordNet id, such as n01440764.tar",
    ),
    "member not image": (
        replace(ilsvrc.TRAIN_TAR, write_tar([("n01440764.tar", write_tar([("a.txt", b"x")]))])),
        "n01440764.tar: a.txt is not an image",
    ),
    "image twice": (
        replace(ilsvrc.TRAIN_TAR, write_tar([("n01440764.tar", write_tar([("a.JPEG", image(0))] * 2))])),
        "contains train/n01440764/a.JPEG twice",
    ),
    "validation image twice": (
        replace(ilsvrc.VAL_TAR, write_tar([*val_images("a/"), *val_images("b/")])),
        f"contains val/n01484850/{val_name(1)} twice; remove one of them",
    ),
    "devkit cut": (
        truncate(f"{ilsvrc.DEVKIT}.tar.gz", lambda path: path.stat().st_size // 2),
        "devkit_t12.tar.gz: damaged (",
    ),
    "devkit without truth": (
        replace(f"{ilsvrc.DEVKIT}.tar.gz", devkit(**{ilsvrc.TRUTH: None})),
        f"devkit_t12.tar.gz: contains no {ilsvrc.TRUTH}; download",
    ),
    "devkit of other year": (
        replace(f"{ilsvrc.DEVKIT}.tar.gz", devkit(**{"meta.mat": synsets(IDS | {"n01440764": 77})})),
        "line 2 is 3, which is not a class of meta.mat",
    ),
    "devkit of other classes": (
        replace(f"{ilsvrc.DEVKIT}.tar.gz", devkit(**{"meta.mat": synsets({"n02000000": 1})})),
        "does not list the class n01440764",
    ),
    "damaged meta.mat": (
        replace(f"{ilsvrc.DEVKIT}.tar.gz", devkit(**{"meta.mat": b"x" * 500})),
        "meta.mat cannot be read (",
    ),
    "short truth": (
        replace(f"{ilsvrc.DEVKIT}.tar.gz", devkit(**{ilsvrc.TRUTH: truth()[:10]})),
        "has no label for 3 of 8 validation images (ILSVRC2012_val_00000006.JPEG, ",
    ),
    "no devkit": (
        broken(lambda root: (root / f"{ilsvrc.DEVKIT}.tar.gz").unlink()),
        "8 validation images have no labels",
    ),
    "contradiction": (
        replace("LOC_val_solution.csv", solution().replace(WNIDS[2], WNIDS[1])),
        "ILSVRC2012_val_00000001 is n01484850, but n01443537 in ",
    ),
    "header changed": (
        replace(ilsvrc.VAL_TAR, write_tar(val_images()).replace(b"val_00000001", b"val_00000009", 1)),
        "img_val.tar: damaged at its start (bad checksum); download it again",
    ),
    "solution with two classes": (
        replace("LOC_val_solution.csv", f"ImageId,P\nx,{WNIDS[0]} 1 2 3 4 {WNIDS[1]} 5 6 7 8\n"),
        "line 2 is not IMAGE,WNID",
    ),
    "images and class folders": (
        flat_with(f"val/{WNIDS[0]}/x.JPEG", image(0)),
        f"val: contains both images and class folders ({WNIDS[0]}); move the images to class folders",
    ),
    "class twice": (
        replace(ilsvrc.TRAIN_TAR, write_tar([("n01440764.tar", inner_tar(0))] * 2)),
        "img_train.tar: contains n01440764.tar twice; download the archive again",
    ),
    "solution": (replace("LOC_val_solution.csv", "ImageId,P\nx,n01440764 1\n\ny,dog 1\n"), "line 4 is not IMAGE,WNID"),
    "solution twice": (
        replace("LOC_val_solution.csv", "ImageId,P\nx,n01440764 1\nx,n01440764 1\n"),
        "LOC_val_solution.csv: line 3 repeats x",
    ),
    "label out of range": (
        flat_with("val.txt", lines().replace(".JPEG 3", ".JPEG 4")),
        "line 3 has label 4, but there",
    ),
    "list without label": (flat_with("val.txt", lines() + "x.JPEG\n"), "val.txt: line 9 is not `IMAGE LABEL`"),
    "list twice": (flat_with("val.txt", lines() + lines()), "val.txt: line 9 repeats ILSVRC2012_val_00000001.JPEG"),
    "nothing": (lambda root: put(root / "train/readme", "x"), "contains neither ILSVRC2012_img_train.tar nor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--as", "ilsvrc", "--allow-partial"]
    assert dataset.main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("first", [489, 490])
def test_list_with_numbers_of_devkit_is_rejected(tmp_path, first):
    """The first validation images have the ids 490, 361 and 171 in the devkit."""
    wnids = [f"n{number:08d}" for number in range(1000)]
    labels = (first, first - 129, first - 319)
    put(tmp_path / "val.txt", "".join(f"{val_name(n)} {label}\n" for n, label in enumerate(labels, 1)))
    with pytest.raises(UsageError, match="contains the class numbers of .*; replace the list with ILSVRC2012_devkit"):
        ilsvrc._list(str(tmp_path / "val.txt"), wnids)


def test_memory_per_image_is_small():
    """1.3 million images must need less than 1 GB."""
    assert not hasattr(ListedImage("name", "path", 0), "__dict__")
