import json

import numpy as np
import pytest
from nvidia.dali.plugin.paddle import DALIGenericIterator
from PIL import Image

from paddle_resnet import dali
from utils.errors import UsageError
from utils.mode import Mode


def epoch(loader):
    """Images and labels of one epoch as lists of batches."""
    batches = [(np.array(b[0]["data"]), np.array(b[0]["label"])) for b in loader]
    loader.reset()
    return [b[0] for b in batches], [b[1] for b in batches]


@pytest.fixture
def shard(monkeypatch):
    """Make the loader believe it is one rank of several."""

    def shard(rank, world_size):
        monkeypatch.setattr("paddle_resnet.distributed.rank", lambda: rank)
        monkeypatch.setattr("paddle_resnet.distributed.world_size", lambda: world_size)

    return shard


@pytest.fixture
def numbered(tmp_path):
    """One class a file: 10 images for training and 10 for validation, so that the label names the image."""
    for split in ("train", "val"):
        for i in range(10):
            (tmp_path / split / f"{i:02d}").mkdir(parents=True)
            Image.new("RGB", (40, 40), (20 * i, 0, 0)).save(tmp_path / split / f"{i:02d}" / "x.png")
    return tmp_path


def load(parse, root, mode, *flags):
    args = parse("--image-root", root, "--num-of-class", "10", *flags)
    return dali.build_dataloader(args, mode)


def take(loader, count):
    """The next batches, over the ends of epochs."""
    batches = []
    while len(batches) < count:
        batch = next(loader, None)
        if batch is None:
            loader.reset()
        else:
            batches.append((np.array(batch[0]["data"]), np.array(batch[0]["label"])))
    return batches


@pytest.mark.parametrize("done", [0, 1, 3, 4, 8, 10])
@pytest.mark.parametrize("rank", [0, 1])
def test_loader_goes_on_with_the_next_batch(parse, photos, shard, rank, done):
    shard(rank, 2)
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    assert len(loader) == 5
    take(loader, done)
    state = json.loads(json.dumps(loader.state()))
    expected = take(loader, 12)
    resumed = dali.build_dataloader(args, Mode.TRAIN, state)
    assert resumed.step == state["step"] == (done and (done - 1) % 5 + 1)
    for (images, labels), (expected_images, expected_labels) in zip(take(resumed, 12), expected, strict=True):
        np.testing.assert_array_equal(labels, expected_labels)
        np.testing.assert_array_equal(images, expected_images)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch-size", "4"], "--batch-size is 4 and was 3"),
        (["--dali-random-seed", "1"], "--dali-random-seed is 1 and was 42"),
        (["--rand-crop-scale", "0.5,1"], "--rand-crop-scale is [0.5, 1.0] and was [0.08, 1.0]"),
        (["--data-format", "synthetic"], "--data-format is synthetic and was auto"),
    ],
)
def test_loader_with_other_batches_starts_an_epoch_and_says_why(parse, photos, capsys, flags, says):
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    take(loader, 2)
    args = parse("--image-root", photos, "--batch-size", "3", *flags)
    fresh = dali.build_dataloader(args, Mode.TRAIN, loader.state())
    assert fresh.step == 0
    assert says in capsys.readouterr().err


def test_batches_are_what_the_program_feeds(parse, photos):
    loader = load(parse, photos, Mode.TRAIN)
    assert isinstance(loader, DALIGenericIterator)
    images, labels = epoch(loader)
    assert images[0].shape == (8, 3, 32, 32)
    assert images[0].dtype == np.float32
    assert labels[0].shape == (8, 1)
    assert labels[0].dtype == np.int64


@pytest.mark.parametrize(
    ("flags", "shape", "dtype"),
    [
        (["--data-layout", "NHWC"], (8, 32, 32, 3), "float32"),
        (["--image-shape", "4,32,32"], (8, 4, 32, 32), "float32"),
        (["--image-shape", "4,32,32", "--data-layout", "NHWC", "--dali-output-fp16"], (8, 32, 32, 4), "float16"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "synthetic"])
def test_layout_channels_and_dtype(parse, photos, flags, shape, dtype, source):
    batch = next(iter(load(parse, photos, Mode.EVAL, "--data-format", source, *flags)))
    images = np.array(batch[0]["data"])
    assert images.shape == shape
    assert images.dtype == dtype
    if source == "folder" and 4 in shape[1:]:
        assert not images.take(3, axis=shape.index(4)).any()


def test_evaluation_image_is_resized_cropped_and_normalised(parse, tmp_path):
    pixels = np.random.RandomState(0).randint(0, 255, (36, 50, 3), dtype=np.uint8)
    (tmp_path / "val" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "val" / "a" / "x.png")
    image = np.array(next(iter(load(parse, tmp_path, Mode.EVAL)))[0]["data"])[0]
    crop = pixels[2:34, 9:41].astype("float32") / 255
    expected = (crop - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(image, expected.transpose(2, 0, 1), atol=1e-5)


def test_normalize_flags(parse, numbered):
    flags = ["--normalize-scale", "1", "--normalize-mean", "10,0,0", "--normalize-std", "2,1,1"]
    images, labels = epoch(load(parse, numbered, Mode.EVAL, *flags))
    for image, label in zip(np.concatenate(images), np.concatenate(labels), strict=True):
        np.testing.assert_allclose(image[0], (20 * label[0] - 10) / 2)


def test_training_order_changes_every_epoch_and_follows_the_seed(parse, numbered):
    def orders(seed):
        loader = load(parse, numbered, Mode.TRAIN, "--batch-size", "10", "--dali-random-seed", seed)
        return [np.concatenate(epoch(loader)[1])[:, 0].tolist() for _ in range(3)]

    first = orders(1)
    assert all(sorted(order) == list(range(10)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    assert first == orders(1)
    assert first != orders(2)


def test_training_images_are_augmented_and_evaluation_images_are_not(parse, photos):
    for mode, same in ((Mode.TRAIN, False), (Mode.EVAL, True)):
        loader = load(parse, photos, mode)
        first, second = (np.sort(np.concatenate(epoch(loader)[0]).ravel()) for _ in range(2))
        assert np.array_equal(first, second) == same


@pytest.mark.parametrize("batch", [1, 3, 4, 5])
def test_training_drops_the_last_partial_batch_and_no_image_comes_twice(parse, numbered, batch):
    loader = load(parse, numbered, Mode.TRAIN, "--batch-size", batch)
    assert len(loader) == 10 // batch
    for _ in range(3):
        _, labels = epoch(loader)
        assert [len(part) for part in labels] == [batch] * (10 // batch)
        seen = np.concatenate(labels)[:, 0].tolist()
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_shards_train_in_step_and_share_no_image_of_an_epoch(parse, numbered, shard, world_size, batch):
    if 10 // world_size < batch:
        batch = 1
    loaders = []
    for rank in range(world_size):
        shard(rank, world_size)
        loaders.append(load(parse, numbered, Mode.TRAIN, "--batch-size", batch))
    for _ in range(world_size + 1):
        epochs = [epoch(loader)[1] for loader in loaders]
        assert {len(batches) for batches in epochs} == {10 // world_size // batch}
        seen = [label for batches in epochs for label in np.concatenate(batches)[:, 0].tolist()]
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("batch", [1, 3, 7, 32])
def test_evaluation_yields_every_image_once(parse, numbered, shard, world_size, batch):
    loaders = []
    for rank in range(world_size):
        shard(rank, world_size)
        loaders.append(load(parse, numbered, Mode.EVAL, "--batch-size", batch))
    for _ in range(2):
        batches = [part for loader in loaders for part in epoch(loader)[1]]
        assert sorted(np.concatenate(batches)[:, 0].tolist()) == list(range(10))
    for loader in loaders:
        assert len(loader) == len(epoch(loader)[1])


def test_synthetic_batches_are_fixed_and_have_the_length_of_imagenet(parse):
    args = parse("--data-format", "synthetic", "--batch-size", "64")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    assert len(loader) == 1281167 // 64
    first, second = (next(loader)[0] for _ in range(2))
    assert np.array_equal(np.array(first["data"]), np.array(second["data"]))
    labels = np.array(first["label"])
    assert labels.shape == (64, 1)
    assert set(labels[:, 0]) == {0, 1, 2}

    loader = dali.build_dataloader(args, Mode.EVAL)
    sizes = [b[0]["label"].shape()[0] for b in loader]
    assert sum(sizes) == 50000
    assert sizes[-1] == 50000 % 64


def test_batch_larger_than_the_data_set_is_refused(parse, numbered):
    with pytest.raises(UsageError, match="--batch-size 11 .* 10 training images.* --batch-size 10"):
        load(parse, numbered, Mode.TRAIN, "--batch-size", "11")
    assert len(load(parse, numbered, Mode.EVAL, "--batch-size", "11")) == 1


@pytest.mark.parametrize("mode", Mode)
def test_more_processes_than_images_are_refused(parse, numbered, shard, mode):
    shard(0, 11)
    with pytest.raises(UsageError, match="11 processes .* 10 .* at most 10"):
        load(parse, numbered, mode, "--batch-size", "1")
