"""TFRecord files with the names of TFDS and Kaggle."""

import gzip

import pytest
from tfrecord import TFRecordWriter

from layouts import colors_match, error_of_import, error_of_training, image, obey, obeyed_remedy, put
from paddle_resnet.data.formats import tfrecord
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options, tfrecords
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]
COUNTS = {"train": 20, "val": 8}


def tfds(k, i):
    return {"image": (image(k, i), "byte"), "label": (k, "int"), "file_name": (f"{i}.JPEG".encode(), "byte")}


def kaggle(k, i):
    return {"image": (image(k, i), "byte"), "class": (k, "int"), "id": (f"{k}{i}".encode(), "byte")}


def named(k, i):
    return {"img/bytes": (image(k, i, "PNG"), "byte"), "label": (NAMES[k].encode(), "byte"), "n": ([1.0, 2.0], "float")}


def tensorflow_models(k, i):
    label = {tfrecord.LABEL: (k + 1, "int"), tfrecord.SYNSET: (NAMES[k].encode(), "byte")}
    return {tfrecord.IMAGE: (image(k, i), "byte"), **label, "image/class/text": (b"text", "byte")}


def write(path, features, count, first=0, compress=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TFRecordWriter(str(path))
    for i in range(first, first + count):
        for k in (2, 0, 3, 1):
            writer.write(features(k, i))
    writer.close()
    if compress:
        put(path, gzip.compress(path.read_bytes()))


def build(train, val, features=tfds, compress=False):
    def built(root):
        for i, name in enumerate(train):
            write(root / name, features, 5 // len(train) + i * (5 % len(train)), 10 * i, compress)
        write(root / val, features, 2, 100, compress)

    return built


def tfds_folder(root):
    folder = root / "5.1.0"
    shards = [f"imagenet2012-train.tfrecord-0000{i}-of-00002" for i in range(2)]
    build(shards, "imagenet2012-validation.tfrecord-00000-of-00001")(folder)
    put(folder / "features.json", "{}")
    put(folder / "dataset_info.json", "{}")
    put(folder / "label.labels.txt", "".join(f"{name}\n" for name in NAMES))


LAYOUTS = {
    "TFDS": (tfds_folder, NAMES),
    "Kaggle": (build(["train00-8.tfrec", "train01-12.tfrec"], "val00-8.tfrec", kaggle), None),
    "Kaggle, folders": (build(["train/00-8.tfrec", "train/01-12.tfrec"], "val/00-8.tfrec", kaggle), None),
    "GZIP": (build(["train.tfrecord.gz"], "valid.tfrecord.gz", tfds, True), None),
    "GZIP without ending": (build(["my_train.tfrecords"], "my_test.tfrecords", tfds, True), None),
    "labels are names": (build(["x-train-0-of-2.tfrecord", "x-train-1-of-2.tfrecord"], "x-dev.tfrecord", named), NAMES),
    "tensorflow/models": (build(["x-train-00000-of-00001.tfrecord"], "x-val.tfrecords", tensorflow_models), NAMES),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_detected_and_labels_match_pixels(tmp_path, name):
    layout, names = LAYOUTS[name]
    layout(tmp_path)
    kind, splits, classes = sources.read(tmp_path)
    assert (kind, classes) == ("tfrecord", names)
    assert {split: len(images) for split, images in splits.items()} == COUNTS
    assert colors_match(image for images in splits.values() for image in images)


# Files of these layouts can be renamed instead of imported.
NEARLY_RIGHT = ("GZIP", "GZIP without ending", "labels are names", "tensorflow/models")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in NEARLY_RIGHT])
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    layout, names = LAYOUTS[name]
    layout(tmp_path / "x")
    assert obeyed_remedy(tmp_path / "x", "TFRecord files", COUNTS, capsys)[0] == names


def test_features_with_other_names_are_reported_with_remedy(tmp_path):
    build(["train-00000-of-00001"], "validation-00000-of-00001", kaggle)(tmp_path / "x")
    message = error_of_training(tmp_path / "x")
    assert "but the features are class, id, image); run `" in message
    assert colors_match(DataRoot(obey(message)).images(Mode.EVAL)[1])


def test_number_is_the_label_if_there_is_also_a_name(tmp_path):
    build(["train.tfrec"], "val.tfrec", lambda k, i: {**kaggle(k, i), "label": (NAMES[k].encode(), "byte")})(tmp_path)
    _, splits, names = sources.read(tmp_path)
    assert names is None and colors_match(splits["train"])


@pytest.mark.parametrize(
    "name", [lambda k, i: NAMES[k // 2], lambda k, i: f"{NAMES[k]}{i}", lambda k, i: NAMES[(k + (i == 0)) % 4]]
)
def test_names_that_are_not_those_of_the_classes_are_not_used(tmp_path, name):
    def features(k, i):
        return {**tensorflow_models(k, i), tfrecord.SYNSET: (name(k, i).encode(), "byte")}

    build(["x-train-00000-of-00001.tfrecord"], "x-val.tfrecords", features)(tmp_path)
    _, splits, names = sources.read(tmp_path)
    assert names is None and colors_match(splits["train"])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_images_are_recognized_by_their_content(tmp_path, kind):
    build(["train.tfrec"], "val.tfrec", lambda k, i: {**kaggle(k, i), "image": (image(k, i, kind), "byte")})(tmp_path)
    assert colors_match(sources.read(tmp_path)[1]["train"])


def test_labels_from_one_are_renumbered(tmp_path, capsys):
    def features(k, i):
        return {"image": (image(k, i), "byte"), "label": (k + 1, "int")}

    build(["train.tfrec"], "val.tfrec", features)(tmp_path)
    _, splits, names = sources.read(tmp_path)
    assert names is None
    assert colors_match(splits["val"])
    assert "labels from 1 to 4 are renumbered from 0" in capsys.readouterr().out


def test_unlabeled_test_files_are_left_out(tmp_path, capsys):
    write(tmp_path / "train.tfrec", kaggle, 5)
    write(tmp_path / "test.tfrec", lambda k, i: {"image": (image(k, i), "byte"), "id": (b"x", "byte")}, 1)
    _, splits, _ = sources.read(tmp_path)
    assert {split: len(images) for split, images in splits.items()} == {"train": 16, "val": 4}
    assert "test.tfrec: test images are left out, because they have no label" in capsys.readouterr().out
    for name, count in (("train", 5), ("test", 1)):
        write(
            tmp_path / f"x/{name}.tfrec",
            lambda k, i: {"image": (image(k, i), "byte"), "kind": (k, "int")},
            count,
            100 * (name == "test"),
        )
    _, splits, _ = sources.read(tmp_path / "x", options=Options(label_column="kind"))
    assert {split: len(images) for split, images in splits.items()} == {"train": 20, "val": 4}
    assert colors_match(splits["val"])


def test_features_and_labels_are_chosen_by_flags(tmp_path):
    def features(k, i):
        pixels = {"image": (image(7, i), "byte"), "crop": (image(k, i), "byte")}
        return {**pixels, "class": ([9, k], "int"), "target": (0, "int")}

    build(["train.tfrec"], "val.tfrec", features)(tmp_path)
    with pytest.raises(
        UsageError, match="train.tfrec: the features crop, image are all candidates for --image-column; "
    ):
        sources.read(tmp_path)
    with pytest.raises(
        UsageError, match=r"class, target are all .* class \(2 x int64\); crop \(bytes\); image \(bytes\)"
    ):
        sources.read(tmp_path, options=Options(image_column="crop"))
    options = {"image_column": "crop", "label_column": "class"}
    with pytest.raises(
        UsageError, match="byte 0: class: has 2 labels; .* so set --label-index to a number from 0 to 1"
    ):
        sources.read(tmp_path, options=Options(**options))
    put(tmp_path / "notes.csv", "file_name,label\nx,0\n")  # a table, for which --label-index is not supported
    _, splits, _ = sources.read(tmp_path, options=Options(**options, label_index=1))
    assert colors_match(splits["val"])
    (tmp_path / "notes.csv").unlink()
    with pytest.raises(UsageError, match="--label-index 2: .*class has only 2 labels; use a smaller index"):
        sources.read(tmp_path, options=Options(**options, label_index=2))
    with pytest.raises(UsageError, match="--label-index 1: .*target has only 1 label; use a smaller index"):
        sources.read(tmp_path, options=Options(image_column="crop", label_column="target", label_index=1))
    with pytest.raises(UsageError, match="--label-column x: .* has the features class"):
        sources.read(tmp_path, options=Options(image_column="crop", label_column="x"))


def test_compressed_file_above_the_limit_is_rejected(tmp_path, monkeypatch):
    build(["train.tfrec"], "val.tfrec", compress=True)(tmp_path)
    monkeypatch.setattr(tfrecords, "LIMIT", 3000)
    with pytest.raises(UsageError, match="when it is decompressed; run `gzip -dc` and import the result"):
        sources.read(tmp_path)


def damaged(position, value=b"\xff" * 9, compress=False):
    def built(root):
        build(["train.tfrec"], "val.tfrec", compress=compress)(root)
        data = bytearray((root / "train.tfrec").read_bytes())
        data[position : position + len(value)] = value
        put(root / "train.tfrec", bytes(data))

    return built


def cut(compress):
    def built(root):
        build(["train.tfrec"], "val.tfrec", compress=compress)(root)
        data = (root / "train.tfrec").read_bytes()
        put(root / "train.tfrec", data[: len(data) // 2])

    return built


def without(*names):
    return build(["a-train.tfrec"], "val.tfrec", lambda k, i: {n: v for n, v in tfds(k, i).items() if n not in names})


def two_images(k, i):
    return {"image": (image(k, i) if i == 0 else [image(k, i)] * 2, "byte"), "label": (k, "int")}


BAD = {
    "damaged record": (damaged(100), "train.tfrec: damaged at byte 0 (the checksum does not match); download it again"),
    "damaged compression": (damaged(2000, compress=True), "train.tfrec: damaged at byte "),
    "truncated": (cut(False), "train.tfrec: damaged at byte "),
    "truncated compression": (cut(True), "train.tfrec: damaged at byte "),
    "no label": (without("label"), "no feature is recognized for --label-column; set it to one of these: file_name (b"),
    "no image": (without("image"), "no feature is recognized for --image-column; set it to one of these: file_name (b"),
    "negative label": (
        build(["train0.tfrec"], "val.tfrec", lambda k, i: {**tfds(k, i), "label": (k - 1, "int")}),
        "train0.tfrec: record at byte ",
    ),
    "several images": (build(["train0.tfrec"], "val.tfrec", two_images), " has no image in image; choose the feature"),
    "shard missing": (
        lambda root: write(root / "x-train.tfrecord-00000-of-00002", tfds, 5),
        "1 of 2 files are missing (x-train.tfrecord-00001-of-00002); download them",
    ),
    "two data sets": (
        lambda root: [write(root / f"{size}/train/0.tfrec", kaggle, 2) for size in ("192", "224")],
        "the folders 192, 224 contain different data sets; import one folder, such as",
    ),
    "not an example": (
        lambda root: put(root / "train0.tfrec", b"\3" + bytes(7) + record_checksums()),
        "train0.tfrec: the record at byte 0 is not a tf.train.Example; write the file again",
    ),
}


def record_checksums():
    import crc32c

    head, payload = b"\3" + bytes(7), b"\xff\xff\xff"
    masked = [tfrecord._masked(crc32c.crc32c(data)).to_bytes(4, "little") for data in (head, payload)]
    return masked[0] + payload + masked[1]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    layout, message = BAD[name]
    layout(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys, "--as", "tfrecord")


def test_remedy_for_labels_that_are_not_utf_8(tmp_path, capsys):
    def features(k, i, label=b"caf\xe9", **more):
        return {"image": (image(k, i), "byte"), "label": (label, "byte"), **more}

    build(["a-train.tfrecord"], "a-val.tfrecord", lambda k, i: features(k, i, number=(k, "int")))(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys)
    remedy = "choose a different feature with --label-column, which may be one of number, or write the text as UTF-8"
    assert error.endswith(f": label is not UTF-8; {remedy}\n")
    splits = sources.read(tmp_path / "x", options=Options(label_column="number"))[1]  # obey the message
    assert colors_match(splits["train"])
    build(["a-train.tfrecord"], "a-val.tfrecord", features)(tmp_path / "y")
    assert error_of_import(tmp_path / "y", capsys).endswith(": label is not UTF-8; write the text as UTF-8\n")
    build(["a-train.tfrecord"], "a-val.tfrecord", named)(tmp_path / "z")  # obey the message
    assert colors_match(sources.read(tmp_path / "z")[1]["train"])


def test_remedy_for_labels_that_are_not_classes(tmp_path, capsys):
    def features(k, i):
        return {"image": (image(k, i), "byte"), "label": (100 * k, "int"), "number": (k, "int")}

    build(["a-train.tfrecord"], "a-val.tfrecord", features)(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys)
    assert error.endswith("number the classes from 0, or choose different labels with --label-column\n")
    splits = sources.read(tmp_path / "x", options=Options(label_column="number"))[1]  # obey the message
    assert colors_match(splits["train"])
