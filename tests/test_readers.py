import numpy as np
import pytest
from nvidia.dali import pipeline_def

from paddle_resnet import readers
from utils.errors import UsageError
from utils.mode import Mode


@pytest.fixture
def make(tmp_path):
    """Write files, each with its own path for content (a reader decodes nothing); a name ending in / is a folder."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            folder = path if name.endswith("/") else path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(name)
        return str(tmp_path)

    return make


def contents(data_set, batch_size=None, **shard):
    """What the DALI operator yields in one batch, by default the whole split: [(path, label)]."""

    @pipeline_def(batch_size=batch_size or data_set.size, num_threads=1, device_id=None)
    def pipeline():
        return data_set.read("Reader", **{"shard_id": 0, "num_shards": 1, "shuffle": False, **shard})

    pipe = pipeline()
    pipe.build()
    encoded, labels = pipe.run()
    assert labels.as_array().dtype == np.int64
    assert labels.as_array().shape[1:] == (1,)
    paths = [bytes(np.asarray(encoded.at(i))).decode() for i in range(len(encoded))]
    return list(zip(paths, labels.as_array()[:, 0].tolist(), strict=True))


def refusal(image_root, mode, num_of_class=10):
    with pytest.raises(UsageError) as error:
        readers.folder(image_root, mode, num_of_class, 0)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_classes_are_sorted_and_label_the_images(make):
    root = make("train/b/1.jpg", "train/a/2.jpg", "train/C/3.jpg", "train/a/0.jpg")
    data_set = readers.folder(root, Mode.TRAIN, 10, 0)
    assert data_set.classes == ["C", "a", "b"]
    assert data_set.size == 4
    assert sorted(contents(data_set)) == [
        ("train/C/3.jpg", 0),
        ("train/a/0.jpg", 1),
        ("train/a/2.jpg", 1),
        ("train/b/1.jpg", 2),
    ]


def test_validation_images_come_in_order_whatever_the_seed(make):
    root = make("val/a/2.jpg", "val/a/1.jpg", "val/b/0.jpg", "train/a/0.jpg", "train/b/0.jpg")
    for seed in (0, 1):
        data_set = readers.folder(root, Mode.EVAL, 10, seed)
        assert contents(data_set) == [("val/a/1.jpg", 0), ("val/a/2.jpg", 0), ("val/b/0.jpg", 1)]


@pytest.mark.parametrize("b_in_val", [(), ("val/b/",)], ids=["missing", "empty"])
def test_class_without_validation_images_shifts_no_label(make, b_in_val):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/c/0.jpg", "val/a/0.jpg", "val/c/0.jpg", *b_in_val)
    data_set = readers.folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b", "c"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/c/0.jpg", 2)]


def test_without_training_images_val_numbers_the_classes(make):
    data_set = readers.folder(make("val/b/0.jpg", "val/a/0.jpg"), Mode.EVAL, 10, 0)
    assert data_set.classes == ["a", "b"]
    assert contents(data_set) == [("val/a/0.jpg", 0), ("val/b/0.jpg", 1)]


def test_what_is_no_class_and_no_image_is_ignored(make):
    images = [f"val/a/{i}{suffix}" for i, suffix in enumerate((*readers.IMAGE_SUFFIXES, ".JPG", ".JPEG"))]
    noise = ["list.txt", "jpg", "0.jpg.part", "._0.jpg", "folder.jpg/"]
    root = make(*images, *[f"val/a/{name}" for name in noise], "val/.cache/0.jpg", "val/0.jpg")
    data_set = readers.folder(root, Mode.EVAL, 10, 0)
    assert data_set.classes == ["a"]
    assert [path for path, _ in contents(data_set)] == images


def test_linked_class_folder_is_read(make, tmp_path):
    root = make("elsewhere/0.jpg", "val/")
    (tmp_path / "val" / "a").symlink_to(tmp_path / "elsewhere")
    assert contents(readers.folder(root, Mode.EVAL, 10, 0)) == [("elsewhere/0.jpg", 0)]


def test_training_order_follows_the_seed(make):
    root = make(*(f"train/{label}/{i}.jpg" for label in "abc" for i in range(8)))
    first, again, other = (contents(readers.folder(root, Mode.TRAIN, 10, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert first != sorted(first)


def test_last_batch_of_a_shard_repeats_the_last_image(make):
    root = make(*(f"val/a/{i}.jpg" for i in range(5)))
    data_set = readers.folder(root, Mode.EVAL, 10, 0)
    shards = [[path for path, _ in contents(data_set, 3, shard_id=i, num_shards=2)] for i in (0, 1)]
    assert shards == [["val/a/0.jpg", "val/a/1.jpg", "val/a/1.jpg"], ["val/a/2.jpg", "val/a/3.jpg", "val/a/4.jpg"]]


def test_as_many_classes_as_outputs_are_accepted(make):
    assert readers.folder(make("train/a/0.jpg", "train/b/0.jpg"), Mode.TRAIN, 2, 0).classes == ["a", "b"]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ["none", "file"])
def test_missing_root_is_refused(make, mode, name):
    root = f"{make('file')}/{name}"
    assert f"--image-root {root} is no folder" in refusal(root, mode)


@pytest.mark.parametrize(("mode", "split"), [(Mode.TRAIN, "train"), (Mode.EVAL, "val")])
def test_missing_split_is_refused(make, tmp_path, mode, split):
    says = f"--image-root {tmp_path} has no folder {split}/"
    assert says in refusal(str(tmp_path), mode)
    other = {"train": "val", "val": "train"}[split]
    assert says in refusal(make(f"{other}/a/0.jpg"), mode)


@pytest.mark.parametrize("name", ["train/", "train/0.jpg", "train/.hidden/0.jpg"])
def test_no_class_folders_are_refused(make, tmp_path, name):
    assert f"--image-root {tmp_path}: train/ holds no class folders" in refusal(make(name), Mode.TRAIN)


@pytest.mark.parametrize("names", [["val/a/"], ["val/a/0.txt"], ["val/", "train/a/0.jpg"]])
def test_no_images_are_refused(make, tmp_path, names):
    assert f"--image-root {tmp_path}: val/ holds no images" in refusal(make(*names), Mode.EVAL)


@pytest.mark.parametrize("mode", Mode)
def test_more_classes_than_outputs_are_refused(make, tmp_path, mode):
    root = make(*(f"{split}/{label}/0.jpg" for split in ("train", "val") for label in "abc"))
    message = refusal(root, mode, num_of_class=2)
    assert "--num-of-class 2" in message
    assert f"3 class folders in {tmp_path}" in message
    assert "give --num-of-class 3" in message


def test_class_in_val_alone_is_refused(make, tmp_path):
    message = refusal(make("train/a/0.jpg", "val/a/0.jpg", "val/b/0.jpg"), Mode.EVAL)
    assert f"--image-root {tmp_path}: val/b has no train/b" in message


def test_skip_list_leaves_images_out_and_keeps_the_labels(make, tmp_path):
    root = make("train/a/0.jpg", "train/b/0.jpg", "train/b/1.jpg", "val/a/0.jpg", "val/b/0.jpg")
    (tmp_path / "skip.txt").write_text("train/a/0.jpg\n\n./train/b/1.jpg\nval/a/0.jpg\n")
    skip = readers.read_skip_list(tmp_path / "skip.txt", root)
    assert contents(readers.folder(root, Mode.TRAIN, 10, 0, skip)) == [("train/b/0.jpg", 1)]
    assert contents(readers.folder(root, Mode.EVAL, 10, 0, skip)) == [("val/b/0.jpg", 1)]


@pytest.mark.parametrize("entry", ["train/a/1.jpg", "train/a", "0.jpg"])
def test_skip_list_with_an_entry_that_names_no_file_is_refused(make, tmp_path, entry):
    root = make("train/a/0.jpg")
    (tmp_path / "skip.txt").write_text(f"train/a/0.jpg\n{entry}\n")
    with pytest.raises(UsageError, match=f"--skip-list .*skip.txt: {entry} is no file in {root}: remove"):
        readers.read_skip_list(tmp_path / "skip.txt", root)


def test_skip_list_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--skip-list .*none.txt cannot be read"):
        readers.read_skip_list(tmp_path / "none.txt", tmp_path)


def test_skipping_every_image_is_refused(make, tmp_path):
    root = make("val/a/0.jpg")
    with pytest.raises(UsageError, match="val/ holds no images"):
        readers.folder(root, Mode.EVAL, 10, 0, frozenset({"val/a/0.jpg"}))
