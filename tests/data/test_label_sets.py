"""Data sets for --multi-label: label tables, class folders and RecordIO files."""

import json
import os
import shutil

import multi_label_data
import numpy as np
import pytest
from multi_label_data import CLASSES, COUNTS, labels
from PIL import Image

from paddle_resnet import dali
from paddle_resnet.data import label_sets
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

KINDS = ["csv", "list", "jsonl", "folders", "vector", "numbers"]


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Return {kind: folder} of the miniature data set in all forms."""
    return {kind: multi_label_data.write(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def load(parse):
    """Return a function that returns [(images, labels)] of all batches of an epoch, and the loader."""

    def load(root, mode, *flags, state=None):
        args = parse("--multi-label", "--image-root", str(root), *flags)
        loader = dali.build_dataloader(args, mode, state)
        return [(np.array(batch["data"]), np.array(batch["label"])) for [batch] in loader], loader

    return load


def classes_in(images):
    """Return the labels of images in float32 NCHW, from the colors of their patches, of which the pixels are 2 if the
    channel is 255, and -2 if it is 0."""
    patches = [images[:, :, y + 4 : y + 12, x + 4 : x + 12].mean(axis=(2, 3)) for (y, x), _ in multi_label_data.PATCHES]
    return np.stack([patch.max(axis=1) - patch.min(axis=1) > 2 for patch in patches], axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_label_belongs_to_its_image(roots, load, kind):
    flags = ["--crop-size", "32", "--resize-short", "32"]
    batches, loader = load(roots[kind], Mode.EVAL, *flags)
    images, found = map(np.concatenate, zip(*batches, strict=True))
    assert found.dtype == np.float32 and loader.classes == CLASSES
    np.testing.assert_array_equal(found, classes_in(images))
    expected = labels("val")
    if kind == "folders":  # images without a class are in no folder, and the others are in the order of the folders
        expected = expected[expected.any(axis=1)]
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_all_images_with_their_labels(roots, load, kind):
    flags = ["--rand-crop-scale", "1,1", "--rand-crop-ratio", "1,1", "--batch-size", "3"]
    batches, loader = load(roots[kind], Mode.TRAIN, *flags)
    found = np.concatenate([label for _, label in batches])
    expected = labels("train")
    expected = expected[expected.any(axis=1)] if kind == "folders" else expected
    assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
    assert loader.class_images.tolist() == labels("train").sum(axis=0).tolist()
    again, _ = load(roots[kind], Mode.TRAIN, *flags)
    np.testing.assert_array_equal(found, np.concatenate([label for _, label in again]))


@pytest.mark.parametrize("kind", KINDS)
def test_loader_resumes_at_next_batch(roots, load, parse, kind):
    flags = ["--batch-size", "3"]
    batches, _ = load(roots[kind], Mode.TRAIN, *flags)
    loader = dali.build_dataloader(parse("--multi-label", "--image-root", str(roots[kind]), *flags), Mode.TRAIN)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    rest, _ = load(roots[kind], Mode.TRAIN, *flags, state=json.loads(json.dumps(loader.state())))
    assert len(rest) == len(batches) - 2
    for (image, label), (image_2, label_2) in zip(batches[2:], rest, strict=True):
        np.testing.assert_array_equal(image, image_2)
        np.testing.assert_array_equal(label, label_2)


@pytest.mark.parametrize(("kind", "world_size"), [("csv", 2), ("csv", 14), ("folders", 2), ("numbers", 2)])
def test_processes_read_each_validation_image_once(roots, load, shard, kind, world_size):
    rows = []
    for rank in range(world_size):
        shard(rank, world_size)
        rows += [label for _, label in load(roots[kind], Mode.EVAL)[0]]
    shard(0, 1)
    expected = np.concatenate([label for _, label in load(roots[kind], Mode.EVAL)[0]])
    np.testing.assert_array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_listed_images_are_in_order_of_evaluation(roots, kind):
    root = DataRoot(roots[kind], is_multi_label=True)
    names = [image.name for image in root.listed(Mode.EVAL)]
    assert names == label_sets.read_labels(root, Mode.EVAL).names
    assert len(names) == COUNTS["val"] - 2 * (kind == "folders")


def test_digest_depends_on_images_labels_and_classes(tmp_path):
    """A resumed run compares the digests, for example after labels were corrected."""
    path = multi_label_data.write(tmp_path / "csv") / "train.csv"
    header, *rows = path.read_text().splitlines()
    corrected = [f"{rows[0][:-1]}{1 - int(rows[0][-1])}", *rows[1:]]
    digests = []
    for lines in (
        [header, *rows],
        [header, *corrected],
        [header, *rows[::-1]],
        [f"{header}dish", *rows],
        [header, *rows],
    ):
        path.write_text("\n".join(lines))
        digests.append(DataRoot(path.parent, is_multi_label=True).open(Mode.TRAIN, None, seed=1).digest)
    assert digests[0] == digests[-1] and len(set(digests)) == 4
    root = multi_label_data.write(tmp_path / "vector", "vector")
    digests = []
    for names in (CLASSES, CLASSES[::-1], CLASSES):
        (root / "classes.txt").write_text("\n".join(names))
        digests.append(DataRoot(root, is_multi_label=True).open(Mode.TRAIN, None, seed=1).digest)
    assert digests[0] == digests[-1] != digests[1]


def test_listed_class_folders_may_be_empty_or_only_in_the_split(tmp_path):
    """Calibration lists the training images of a network that was trained with --allow-empty-classes."""
    path = multi_label_data.write(tmp_path / "folders", "folders")
    root = DataRoot(path, is_multi_label=True)
    expected = root.listed(Mode.TRAIN)
    (path / "train/white").mkdir()
    assert [image.name for image in DataRoot(path, is_multi_label=True).listed(Mode.TRAIN)] == [
        i.name for i in expected
    ]
    with pytest.raises(UsageError, match="train has no images for 1 of 4 classes .*--allow-empty-classes$"):
        DataRoot(path, is_multi_label=True).open(Mode.TRAIN, None, seed=1)
    opened = DataRoot(path, is_multi_label=True).open(Mode.TRAIN, None, seed=1, allow_empty=True)
    assert opened.classes == ["blue", "bluegreen", "red", "white"] and opened.class_images[3] == 0
    (path / "val/yellow").mkdir()
    Image.new("RGB", (8, 8)).save(path / "val/yellow/0.png")
    assert [image.name for image in DataRoot(path, is_multi_label=True).listed(Mode.EVAL)][-1] == "val/yellow/0.png"


@pytest.mark.parametrize("kind", ["csv", "vector"])
def test_more_outputs_than_classes(roots, load, kind):
    batches, _ = load(roots[kind], Mode.EVAL, "--num-of-class", "5")
    found = np.concatenate([label for _, label in batches])
    np.testing.assert_array_equal(found, np.pad(labels("val"), [(0, 0), (0, 2)]))


def test_classes_of_numbers_without_names_are_numbers(roots, tmp_path):
    for kind in ("vector", "numbers"):
        root = shutil.copytree(roots[kind], tmp_path / kind)
        (root / "classes.txt").unlink()
        assert DataRoot(root, is_multi_label=True).data_classes(Mode.EVAL) == ["0", "1", "2"]


@pytest.mark.parametrize(("row", "names", "classes"), [([0, 1], CLASSES, CLASSES), ([1], None, ["0", "1"])])
def test_labels_0_and_1_are_numbers_unless_there_is_one_per_class(tmp_path, row, names, classes):
    rows = [row, [0]] if names is None else [row, row]
    multi_label_data.write_records(tmp_path, "train", rows, [b"image"] * 2)
    if names:
        (tmp_path / "classes.txt").write_text("\n".join(names))
    found = label_sets.read_labels(DataRoot(tmp_path, is_multi_label=True), Mode.TRAIN)
    assert (found.numbers, found.classes, found.is_vector) == (rows, classes, False)


def test_validation_split_without_training_split_defines_the_classes(roots, tmp_path):
    for kind in ("csv", "list"):
        root = shutil.copytree(roots[kind], tmp_path / kind, ignore=shutil.ignore_patterns("train*"))
        assert label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL).classes == CLASSES


def test_data_format_chooses_class_folders_next_to_a_table(roots, tmp_path):
    root = shutil.copytree(roots["folders"], tmp_path / "root", symlinks=True)
    for split in COUNTS:
        (root / f"{split}.csv").write_text("image,labels\nblue/01.png,x\n")
    chosen = DataRoot(root, "folder", is_multi_label=True)
    expected = DataRoot(roots["folders"], is_multi_label=True)
    assert chosen.data_classes(Mode.EVAL) == CLASSES
    assert label_sets.read_labels(chosen, Mode.EVAL) == label_sets.read_labels(expected, Mode.EVAL)
    assert label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL).classes == ["x"]


def test_classes_txt_orders_classes_of_table(roots, tmp_path):
    root = shutil.copytree(roots["jsonl"], tmp_path / "root")
    (root / "classes.txt").write_text("red\nblue\nbluegreen\nunused\n")
    found = label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL)
    assert found.classes == ["red", "blue", "bluegreen", "unused"]
    assert found.numbers[5] == [0, 1]  # image 5 is blue and red


def test_classes_txt_orders_class_folders_whose_names_it_spells_differently(roots, tmp_path):
    root = shutil.copytree(roots["folders"], tmp_path / "root", symlinks=True)
    (root / "classes.txt").write_text("Red\nBlue\nBlue Green\n")
    assert DataRoot(root, is_multi_label=True).data_classes(Mode.EVAL) == ["red", "blue", "bluegreen"]


def test_classes_of_checkpoint_order_classes(roots):
    trained = ["red", "unused", "bluegreen", "blue"]
    for kind in ("csv", "list", "folders"):
        if kind == "csv":
            with pytest.raises(UsageError, match="has no column for the class unused"):
                label_sets.read_labels(DataRoot(roots[kind], is_multi_label=True), Mode.EVAL, 4, trained)
            continue
        found = label_sets.read_labels(DataRoot(roots[kind], is_multi_label=True), Mode.EVAL, 4, trained)
        of_image = {os.path.basename(name): row for name, row in zip(found.names, found.numbers, strict=True)}
        assert found.classes == trained and of_image["05.png"] == [0, 3]
        assert DataRoot(roots[kind], is_multi_label=True).open(Mode.EVAL, 4, 0, trained=trained).classes == trained


@pytest.mark.parametrize("kind", ["csv", "list", "folders"])
def test_data_set_names_the_outputs_of_a_checkpoint_without_names(roots, kind):
    root = DataRoot(roots[kind], is_multi_label=True)
    found = label_sets.read_labels(root, Mode.EVAL, 3, ["0", "1", "2"])
    assert found.classes == CLASSES and found.numbers == label_sets.read_labels(root, Mode.EVAL).numbers


def test_class_folder_that_is_not_an_output_of_the_checkpoint_is_an_error(tmp_path):
    """The names of the outputs, 0 to 2, are those of class folders."""
    for folder in ("train/0", "train/1", "val/0", "val/7"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.jpg").touch()
    with pytest.raises(UsageError, match="val/7 is not one of the 3 classes of the checkpoint"):
        label_sets.read_labels(DataRoot(tmp_path, is_multi_label=True), Mode.EVAL, 3, ["0", "1", "2"])


@pytest.mark.parametrize("kind", ["vector", "numbers"])
def test_records_are_numbered_as_in_the_checkpoint(roots, kind):
    root = DataRoot(roots[kind], is_multi_label=True)
    expected = label_sets.read_labels(root, Mode.EVAL).numbers
    for trained in ([*CLASSES, "unused"], ["0", "1", "2"]):
        found = label_sets.read_labels(root, Mode.EVAL, len(trained), trained)
        assert (found.numbers, found.classes) == (expected, trained if "unused" in trained else CLASSES)
    with pytest.raises(UsageError, match="classes.txt: blue has label 0, but label 2 in the checkpoint; number the"):
        label_sets.read_labels(root, Mode.EVAL, 3, CLASSES[::-1])
    with pytest.raises(UsageError, match="--num-of-class 2: fewer than the 3 classes in .*classes.txt"):
        label_sets.read_labels(root, Mode.EVAL, 2, CLASSES[:2])
    with pytest.raises(UsageError, match="--num-of-class 2: fewer than the 3 classes in .*; use --num-of-class 3"):
        label_sets.read_labels(root, Mode.EVAL, 2)


def test_records_without_names_have_at_most_the_classes_of_the_checkpoint(roots, tmp_path):
    root = shutil.copytree(roots["vector"], tmp_path / "root")
    (root / "classes.txt").unlink()
    with pytest.raises(UsageError, match="each RecordIO record of val has 3 labels.* but the checkpoint has 2 classes"):
        label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL, 2, CLASSES[:2])


def test_copies_are_one_image_and_equal_names_are_not(roots, tmp_path, capsys):
    root = shutil.copytree(roots["folders"], tmp_path / "root")  # copies the files instead of the links
    count = len(label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.TRAIN).names)
    assert count == COUNTS["train"] - 3
    Image.new("RGB", (8, 8)).save(root / "train/red/05.png")  # is also in blue/
    found = label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.TRAIN)
    of_image = dict(zip(found.names, found.numbers, strict=True))
    assert of_image["train/blue/05.png"] == [0] and of_image["train/red/05.png"] == [2]
    assert len(found.names) == count + 1 and found.names == sorted(found.names)
    assert "1 file name in several class folders of train/ with different content" in capsys.readouterr().out


@pytest.mark.parametrize("skipped", ["val/blue/05.png", "val/red/05.png"])
def test_skip_list_omits_image_by_any_of_its_names(roots, skipped):
    root = DataRoot(roots["folders"], skip=frozenset([skipped]), is_multi_label=True)
    names = label_sets.read_labels(root, Mode.EVAL).names
    assert len(names) == COUNTS["val"] - 3 and not any(name.endswith("05.png") for name in names)


@pytest.mark.parametrize("prefix", ["", "./"])
def test_skip_list_omits_image_of_table(roots, load, tmp_path, prefix):
    root = shutil.copytree(roots["csv"], tmp_path / "root")
    text = (root / "val.csv").read_text()
    (root / "val.csv").write_text(text.replace("val/", f"{prefix}val/"))
    (tmp_path / "skip.txt").write_text("val/03.png\n")
    batches, _ = load(root, Mode.EVAL, "--skip-list", tmp_path / "skip.txt")
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), np.delete(labels("val"), 3, axis=0))


def test_paths_may_be_relative_to_folder_of_split(roots, tmp_path):
    root = shutil.copytree(roots["csv"], tmp_path / "root")
    text = (root / "val.csv").read_text()
    (root / "val.csv").write_text(text.replace("val/", ""))
    assert label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL).names[0] == "val/00.png"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "folders", "vector"])
def test_split_may_have_other_name(roots, tmp_path, kind):
    root = shutil.copytree(roots[kind], tmp_path / "root")
    for path in root.glob("val*"):
        path.rename(path.with_name(path.name.replace("val", "valid", 1)))
    for path in root.glob("valid.[cj]s*"):
        path.write_text(path.read_text().replace("val/", ""))  # relative to valid/
    found = label_sets.read_labels(DataRoot(root, is_multi_label=True), Mode.EVAL)
    expected = label_sets.read_labels(DataRoot(roots[kind], is_multi_label=True), Mode.EVAL)
    assert found.numbers == expected.numbers and found.classes == CLASSES
    assert all(name.startswith("valid") for name in found.names)


@pytest.mark.parametrize(
    ("separated", "expected"),
    [
        ("haze primary", ["haze", "primary"]),
        ("a b|c", ["a b", "c"]),
        ("a b; c", ["a b", "c"]),
        ('"a, b"', ["a", "b"]),
        ("", []),
    ],
)
def test_separators_of_class_names(tmp_path, separated, expected):
    (tmp_path / "train.csv").write_text(f"image,tags\n1.jpg,{separated}\n")
    assert label_sets.read_table(str(tmp_path / "train.csv")).labels == [expected]


def test_spaces_around_cells_are_ignored(tmp_path):
    (tmp_path / "train.csv").write_text("image, a, b\n 1.jpg, 0, 1 \n")
    assert label_sets.read_table(str(tmp_path / "train.csv")) == (["1.jpg"], [["b"]], ["a", "b"])


def test_json_lines_may_begin_with_a_byte_order_mark_and_contain_file_names(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"file_name": "1.jpg", "labels": ["a"]}', encoding="utf-8-sig")
    assert label_sets.read_table(str(tmp_path / "train.jsonl")) == (["1.jpg"], [["a"]], None)


INVALID_TABLES = {
    "": "the first line is ''",
    "image\n1.jpg\n": "write different names of columns",
    "image,a,a\n1.jpg,0,1\n": "write different names",
    "image,a,b\n1.jpg,0\n": "row 2 has 2 cells",
    "image,a,b\n1.jpg,0,-1\n": "row 2 has '-1' in a column for a class",
    "image,a\n1.jpg,0\n": "the column a contains only 0 and 1",
    "image,a,b\n": "contains no images",
    "image,a,b\n1.jpg,0,1\n1.jpg,1,0\n": "1.jpg occurs 2 times",
}
INVALID_LINES = ["[]", "{", '{"image": "1.jpg"}', '{"image": "1.jpg", "labels": "a"}', '{"image": 1, "labels": []}']
INVALID_LINES += ['{"image": "1.jpg", "labels": [1]}']


@pytest.mark.parametrize(("text", "problem"), INVALID_TABLES.items())
def test_invalid_csv_is_an_error(tmp_path, text, problem):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(UsageError, match=problem):
        label_sets.read_table(str(tmp_path / "train.csv"))


@pytest.mark.parametrize("line", INVALID_LINES)
def test_invalid_jsonl_is_an_error(tmp_path, line):
    (tmp_path / "train.jsonl").write_text(f'{{"image": "0.jpg", "labels": []}}\n{line}\n')
    with pytest.raises(UsageError, match="line 2 is .*; write lines such as"):
        label_sets.read_table(str(tmp_path / "train.jsonl"))


def test_unreadable_tables_are_errors(tmp_path):
    path = tmp_path / "train.csv"
    path.write_bytes(b"image,a,b\n\xff,0,1\n")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        label_sets.read_table(str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="cannot be read"):
        label_sets.read_table(str(path))


def test_faults_of_data_set_are_errors(roots, tmp_path):
    def check(problem, mode=Mode.TRAIN, num_of_class=None, **options):
        with pytest.raises(UsageError, match=problem):
            DataRoot(root, is_multi_label=True, **options).open(mode, num_of_class, 0)

    root = shutil.copytree(roots["csv"], tmp_path / "root")
    check("--num-of-class 2: fewer than the 3 classes", num_of_class=2)
    (root / "train.jsonl").touch()
    check("train.jsonl also contains the labels")
    (root / "train.jsonl").unlink()
    (root / "val.csv").write_text("image,blue,bluegreen,red,new\nval/00.png,0,0,0,1\n")
    check("the class new is not one of the 3 classes", Mode.EVAL)
    (root / "val.csv").write_text("image,blue,bluegreen\nval/00.png,0,0\n")
    check("has no column for the class red", Mode.EVAL)
    (root / "val.csv").write_text("image,blue,bluegreen,red\nval/00.png,0,0,0\n")
    check("no image of val has a class", Mode.EVAL)
    (root / "val.csv").write_text("image,blue,bluegreen,red\nval/99.png,0,0,1\n")
    check("val/99.png is not in", Mode.EVAL)
    (root / "val.csv").write_text("image,blue,bluegreen,red\nval/00.png,0,0,1\nval/99.png,0,0,1\n")
    check("val.csv: val/99.png is missing", Mode.EVAL)
    (root / "val.csv").write_text(f"image,blue,bluegreen,red\n{roots['csv']}/val/00.png,0,0,1\n")
    check("is outside", Mode.EVAL)
    (root / "classes.txt").write_text("blue\nbluegreen|\nred\n")
    (root / "val.csv").write_text("image,blue,bluegreen|,red\nval/00.png,0,0,1\n")
    check("contains |, which separates names".replace("|", r"\|"), Mode.EVAL)
    (root / "classes.txt").unlink()
    (root / "val.csv").write_text(f"image,blue,bluegreen,red\n{roots['csv']}/val/00.png,0,0,1\n")
    opened = DataRoot(root, allow_outside=True, is_multi_label=True).open(Mode.EVAL, 3, 0)
    assert opened.size == 1


def test_invalid_labels_of_records_are_errors(tmp_path):
    for row in ([0, 3], [0.5], [-2], [-1, 1]):
        root = tmp_path / str(row)
        root.mkdir()
        multi_label_data.write_records(root, "train", [[2], row], [b"image"] * 2)
        (root / "classes.txt").write_text("a\nb\nc\n")
        with pytest.raises(UsageError, match="store class numbers from 0 to 2, -1 for"):
            DataRoot(root, is_multi_label=True).open(Mode.TRAIN, 3, 0)


@pytest.mark.parametrize("name", ["filelist", "tfrecord", "webdataset", "lmdb", "parquet"])
def test_formats_with_one_label_are_errors(converted, name):
    with pytest.raises(UsageError, match=f"--multi-label: {name} has one label per image"):
        DataRoot(converted[name], is_multi_label=True).open(Mode.TRAIN, 3, 0)


@pytest.mark.parametrize("mode", Mode)
def test_class_folders_without_links_have_one_label_per_image(photos, load, mode):
    batches, _ = load(photos, mode)
    assert (np.concatenate([label for _, label in batches]).sum(axis=1) == 1).all()
