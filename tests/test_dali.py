import base64
import itertools
import json
import shutil
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import data_files
import numpy as np
import pytest
from data_files import open_split
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug import rand_augment, trivial_augment
from nvidia.dali.auto_aug.core import signed_bin
from nvidia.dali.plugin.paddle import DALIGenericIterator
from PIL import Image

from conftest import TINY, assert_one_error
from helpers import NETWORK_EXAMPLE, epoch, take
from paddle_resnet import dali
from paddle_resnet.data import decoding, loader_state, shards
from paddle_resnet.data import loader as loader_module
from paddle_resnet.data.formats import FILES, FORMATS
from paddle_resnet.data.images import IMAGE_SUFFIXES
from paddle_resnet.settings.declarations import FLAGS
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode


@pytest.fixture
def numbered(tmp_path):
    """Create 10 classes with one training and one validation image each, so that the label identifies the image."""
    for split in ("train", "val"):
        for i in range(10):
            (tmp_path / split / f"{i:02d}").mkdir(parents=True)
            Image.new("RGB", (40, 40), (20 * i, 0, 0)).save(tmp_path / split / f"{i:02d}" / "x.png")
    return tmp_path


@pytest.fixture
def distinct(once, convert_here):
    """Create 37 images per split in every storage format and return {--data-format: --image-root}. The label identifies
    the image."""
    return in_every_format(once, "distinct", 37, 5)


@pytest.fixture
def few(once, convert_here):
    """Like distinct, with 3 images per split."""
    return in_every_format(once, "few", 3, 2)


def in_every_format(once, name, count, shards):
    def make(root):
        for split in ("train", "val"):
            for i in range(count):
                (root / "folder" / split / f"{i:02d}").mkdir(parents=True)
                Image.new("RGB", (36, 36), (6 * i, 0, 0)).save(root / "folder" / split / f"{i:02d}" / "x.png")
            lines = "".join(f"{split}/{i:02d}/x.png {i}\n" for i in range(count))
            (root / "folder" / f"{split}.txt").write_text(lines)
        for name in data_files.FORMATS:
            data_files.write(root / "folder", root / name, name, shards)

    root = once(name, make)
    return {"filelist": root / "folder", **{name: root / name for name in ("folder", *data_files.FORMATS)}}


def load(parse, root, mode, *flags):
    args = parse("--image-root", root, "--num-of-class", "10", "--allow-one-class", *flags)
    return dali.build_dataloader(args, mode)


@pytest.mark.parametrize(("rank", "places"), [(0, [0, 4, 10]), (1, [1, 3, 8])])
def test_loader_resumes_with_next_batch(parse, photos, shard, rank, places):
    shard(rank, 2)
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    assert len(loader) == 5
    states, batches = {}, []
    for done in places:
        batches += take(loader, done - len(batches))
        states[done] = json.loads(json.dumps(loader.state()))
    batches += take(loader, 12)
    for done, state in states.items():
        resumed = dali.build_dataloader(args, Mode.TRAIN, state)
        assert resumed.step == state["step"] == (done and (done - 1) % 5 + 1)
        expected = batches[done : done + 12]
        for (images, labels), (expected_images, expected_labels) in zip(take(resumed, 12), expected, strict=True):
            np.testing.assert_array_equal(labels, expected_labels)
            np.testing.assert_array_equal(images, expected_images)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "4"], "--batch-size is 4 and was 3"),
        (["--data-format", "synthetic"], "--data-format is synthetic and was folder"),
    ],
)
def test_loader_with_changed_flags_restarts_epoch_with_a_reason(parse, photos, capsys, flags, message):
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    take(loader, 2)
    args = parse("--image-root", photos, "--batch-size", "3", *flags)
    fresh = dali.build_dataloader(args, Mode.TRAIN, loader.state())
    assert fresh.step == 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dali-random-seed", "1"], "--dali-random-seed is 1 and was 42"),
        (["--image-shape", "3,30,30", "--crop-size", "30"], "--crop-size is 30 and was 32"),
        (["--rand-crop-scale", "0.5,1"], "--rand-crop-scale is 0.5,1.0 and was 0.08,1.0"),
        (["--image-shape", "4,32,32"], "--image-shape is 4,32,32 and was 3,32,32"),
        (["--image-shape", "3,32,48"], "--image-shape is 3,32,48 and was 3,32,32"),
        (["--dali-output-fp16"], "--dali-output-fp16 is True and was False"),
        (["--color-jitter", "0.4"], "--color-jitter is 0.4 and was 0.0"),
        (["--lighting", "0.1"], "--lighting is 0.1 and was 0.0"),
        (["--rotate-degrees", "10"], "--rotate-degrees is 10.0 and was 0.0"),
        (["--auto-augment", "trivial"], "--auto-augment is trivial and was none"),
        (["--auto-augment", "randaug", "--auto-augment-magnitude", "5"], "--auto-augment-magnitude is 5 and was 9"),
        (["--crop-padding", "4"], "--crop-padding is 4 and was 0"),
        (["--balanced-sampling"], "--balanced-sampling is True and was False"),
        (["--interp", "cubic"], "--interp is cubic and was linear"),
        (["--rand-crop-ratio", "1,1"], "--rand-crop-ratio is 1.0,1.0 and was "),
        (["--normalize-scale", "1/256"], "--normalize-scale is 0.00390625 and was "),
        (["--normalize-mean", "0,0,0"], "--normalize-mean is 0.0,0.0,0.0 and was "),
        (["--normalize-std", "1,1,1"], "--normalize-std is 1.0,1.0,1.0 and was "),
    ],
)
def test_changed_flag_of_the_batches_restarts_epoch_with_a_reason(parse, capsys, flags, message):
    before, after = (dali.batch_flags(parse(*changes).as_dict()) for changes in ([], flags))
    state = {"conditions": loader_state.conditions(before, "folder", 30, 1), "step": 2}
    assert loader_state.match(state, loader_state.conditions(after, "folder", 30, 1), after.before, 3) == (None, False)
    assert message in capsys.readouterr().err


def test_loader_state_depends_on_every_flag_that_the_pipeline_reads(parse, photos):
    args, names = parse("--image-root", photos), set()

    class Recorder:
        def __getattr__(self, name):
            names.add(name)
            return getattr(args, name)

    data_set = open_split(str(photos), "folder", Mode.TRAIN, 3, 0)
    loader_module.create_pipeline(Recorder(), data_set, Mode.TRAIN, 0, 1)
    conditions = {name for name, declaration in FLAGS.items() if declaration.batches}
    # These flags change neither the order nor the values of the images.
    assert names - conditions == {"dali_num_threads", "dali_prefetch", "data_layout"}


def test_loader_resumes_from_checkpoint_without_newer_flags(parse, photos, capsys):
    args = parse("--image-root", photos, "--interp", "linear")  # not the default, but the only filter of older versions
    loader = dali.build_dataloader(args, Mode.TRAIN)
    take(loader, 2)
    state = loader.state()
    for flag in ("--auto-augment", "--auto-augment-magnitude", "--crop-padding", "--interp", loader_state.LIST):
        del state["conditions"][flag]
    assert dali.build_dataloader(args, Mode.TRAIN, state).step == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("before", "now"), [(None, "val"), ("val", None), ("val", "val"), ("val", "valid")])
def test_validation_split_that_is_not_recorded_has_not_changed(parse, capsys, before, now):
    """Older checkpoints do not record it."""
    flags = dali.batch_flags(parse().as_dict())
    old, new = (loader_state.conditions(flags, "folder", 30, 1, validation=split) for split in (before, now))
    state = {"conditions": old, "step": 1}
    assert loader_state.match(state, new, flags.before, 3) == (state, False)
    err = capsys.readouterr().err
    assert "the validation split is valid and was val" in err if now == "valid" else err == ""


@pytest.mark.parametrize("name", loader_state.ORDER_CONDITIONS)
def test_change_of_the_order_restarts_it_after_an_epoch(parse, capsys, name):
    flags = dali.batch_flags(parse().as_dict())
    conditions = loader_state.conditions(flags, "folder", 30, 1)
    state = {"conditions": conditions | {name: "other"}, "step": 0}
    assert loader_state.match(state, conditions, flags.before, 3) == (None, False)
    assert "with the image order of the first epoch" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "is_kept"), [(0.0, True), (0.5, False)])
def test_loader_restarts_epoch_of_checkpoint_with_removed_flag_if_it_had_an_effect(parse, capsys, value, is_kept):
    flags = dali.batch_flags(parse().as_dict())
    conditions = loader_state.conditions(flags, "folder", 30, 1)
    state = {"conditions": conditions | {"--removed": value}, "step": 2}
    assert loader_state.match(state, conditions, flags.before, 3) == (state if is_kept else None, False)
    error = capsys.readouterr().err
    assert not error if is_kept else "--removed is a removed flag and was 0.5, so the loader restarts" in error


@pytest.mark.parametrize("is_in_epoch", [True, False])
def test_loader_of_a_newer_version_restarts_epoch_or_continues_order(parse, photos, capsys, is_in_epoch):
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    if is_in_epoch:
        take(loader, 2)
    else:
        epoch(loader)
    state = loader.state()
    del state["conditions"][loader_state.VERSION]
    state["pipeline"] = base64.b64encode(loader_state._first_operator(base64.b64decode(state["pipeline"]))).decode()
    assert dali.build_dataloader(args, Mode.TRAIN, state).step == 0
    effect = "the loader restarts at the beginning of the epoch" if is_in_epoch else "the image order continues"
    stderr = capsys.readouterr().err
    assert f"version of the loader is {loader_state.VERSION_NUMBER} and was 1, so" in stderr
    assert effect in stderr


def test_first_operator_of_a_state_may_be_long():
    """The length 300 is encoded in two bytes with seven bits each."""
    first = b"\n\xac\x02" + bytes(300)
    assert loader_state._first_operator(first + b"\n\x01x") == first
    longest = b"\n\x81\x80\x80\x80\x00a"
    assert loader_state._first_operator(longest + b"b") == longest


@pytest.mark.parametrize("checkpoint", [b"", b"\n", b"\n\x80", b"\x12\x01a", b"\n\x81\x80\x80\x80\x80\x00a"])
def test_state_without_reader_is_damaged(checkpoint):
    with pytest.raises(dali.StateError, match="no reader position"):
        loader_state._first_operator(checkpoint)


@pytest.mark.parametrize(
    ("error", "is_damaged"),
    [("out of memory", False), ("CUDA error", False), ("Assert on x failed: bad", True), ("bad", True)],
)
def test_lack_of_memory_does_not_mean_that_a_state_is_damaged(error, is_damaged):
    def build():
        raise RuntimeError(error)

    message = r"the loader state is damaged \(.*bad" if is_damaged else f"^{error}$"
    with pytest.raises(dali.StateError if is_damaged else RuntimeError, match=message):
        loader_state.restored(SimpleNamespace(build=build), None)


def test_damaged_pipeline_state_is_an_error(parse, photos):
    args = parse("--image-root", photos)
    state = dali.build_dataloader(args, Mode.TRAIN).state() | {"pipeline": base64.b64encode(b"damaged").decode()}
    with pytest.raises(dali.StateError, match="^the loader state is damaged"):
        dali.build_dataloader(args, Mode.TRAIN, state)


def test_damaged_image_does_not_mean_that_a_state_is_damaged():
    def make():
        raise DataError("x.jpg: cannot be decoded")

    with pytest.raises(DataError, match="^x.jpg: cannot be decoded$"):
        loader_state.restored(SimpleNamespace(build=lambda: None), make)


@pytest.mark.parametrize(
    ("class_weights", "balanced", "mode", "labels", "flag"),
    [
        ("balanced", False, Mode.TRAIN, None, "--class-weights balanced"),
        ("balanced", False, Mode.TRAIN, [0], None),
        ("weights.csv", True, Mode.TRAIN, None, "--balanced-sampling"),
        ("weights.csv", False, Mode.TRAIN, None, None),
        ("balanced", True, Mode.EVAL, None, None),
    ],
)
def test_balancing_requires_labels_of_training_images(class_weights, balanced, mode, labels, flag):
    args = SimpleNamespace(class_weights=class_weights, balanced_sampling=balanced)
    message = f"^{flag}: requires class folders or file lists, but the data format is lmdb; remove"
    with pytest.raises(UsageError, match=message) if flag else nullcontext():
        loader_module.check_labels(args, mode, "lmdb", labels)


def test_loader_of_fewer_processes_restarts_epoch_with_a_reason(parse, photos, capsys, shard):
    args = parse("--image-root", photos, "--batch-size", "3")
    shard(world_size=2)
    loader = dali.build_dataloader(args, Mode.TRAIN)
    take(loader, 2)
    shard(world_size=1)
    assert dali.build_dataloader(args, Mode.TRAIN, loader.state()).step == 0
    stderr = capsys.readouterr().err
    assert "number of processes is 1 and was 2, so the loader restarts at the beginning of the epoch" in stderr


@pytest.mark.parametrize(
    ("data_format", "change"),
    [
        *(("folder", change) for change in ("fewer", "more", "batch")),
        *((name, "fewer") for name in ("recordio", "tfrecord")),
        *(pytest.param(name, "more", marks=pytest.mark.soak) for name in FORMATS),
    ],
)
def test_order_continues_after_epoch_with_changed_job(parse, distinct, shard, capsys, data_format, change):
    """After the first epoch, either the number of processes or the batch size changes. The order of image files does
    not depend on these two numbers."""

    def build(world_size, batch, states=None):
        flags = ["--num-of-class", "37", "--data-format", data_format, "--batch-size", batch]
        loaders = []
        for rank in range(world_size):
            shard(rank, world_size)
            args = parse("--image-root", distinct[data_format], *flags)
            loaders.append(dali.build_dataloader(args, Mode.TRAIN, states and states[min(rank, len(states) - 1)]))
        return loaders

    def order(loaders):
        return [label for loader in loaders for label in np.concatenate(epoch(loader)[1])[:, 0].tolist()]

    before, after = {"fewer": ((2, 2), (1, 4)), "more": ((1, 4), (2, 2)), "batch": ((1, 4), (1, 2))}[change]
    first = build(*before)
    order(first)
    resumed = build(*after, [loader.state() for loader in first])
    assert "but the image order continues" in capsys.readouterr().err
    reference = build(*after)
    epochs = [order(reference) for _ in range(3)]
    continued = [order(resumed) for _ in range(2)]
    assert all(len(set(labels)) == len(labels) >= 36 for labels in continued)
    assert epochs[0] not in continued
    if data_format in FILES:
        assert continued == epochs[1:]


def test_added_processes_draw_their_own_crops_after_epoch(parse, photos, shard):
    args = parse("--image-root", photos, "--batch-size", "3")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    epoch(loader)
    mirrors = []
    for rank in range(2):
        shard(rank, 2)
        pipeline = dali.build_dataloader(args, Mode.TRAIN, loader.state())._pipes[0]
        mirrors.append(pipeline.checkpoint().partition(b"CoinFlip")[2])
    assert mirrors[0] != mirrors[1]


def test_batches_match_program_feeds(parse, photos):
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
        (["--image-shape", "3,48,32"], (8, 3, 48, 32), "float32"),
        (["--image-shape", "4,32,32", "--data-layout", "NHWC", "--dali-output-fp16"], (8, 32, 32, 4), "float16"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "synthetic"])
def test_batch_follows_layout_channels_and_dtype_flags(parse, photos, flags, shape, dtype, source):
    batch = next(iter(load(parse, photos, Mode.EVAL, "--data-format", source, *flags)))
    images = np.array(batch[0]["data"])
    assert images.shape == shape
    assert images.dtype == dtype
    if source == "folder" and 4 in shape[1:]:
        assert not images.take(3, axis=shape.index(4)).any()


@pytest.mark.parametrize(
    ("flags", "size", "rows", "columns"),
    [
        ([], (36, 50), slice(2, 34), slice(9, 41)),
        # The crops of 32 x 48 and 48 x 32 pixels require images of at least 36 x 54 and 54 x 36 pixels (36 / 32 times
        # the size of the crop). One side of each image has exactly the required length, so the image is not resized.
        (["--image-shape", "3,32,48"], (50, 54), slice(9, 41), slice(3, 51)),
        (["--image-shape", "3,48,32"], (54, 70), slice(3, 51), slice(19, 51)),
    ],
)
def test_evaluation_image_is_resized_cropped_and_normalized(parse, tmp_path, flags, size, rows, columns):
    pixels = np.random.RandomState(0).randint(0, 255, (*size, 3), dtype=np.uint8)
    (tmp_path / "val" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "val" / "a" / "x.png")
    image = np.array(next(iter(load(parse, tmp_path, Mode.EVAL, *flags)))[0]["data"])[0]
    crop = pixels[rows, columns].astype("float32") / 255
    expected = (crop - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(image, expected.transpose(2, 0, 1), atol=1e-5)


def test_normalize_flags_scale_and_shift_pixels(parse, numbered):
    flags = ["--normalize-scale", "1", "--normalize-mean", "10,0,0", "--normalize-std", "2,1,1"]
    images, labels = epoch(load(parse, numbered, Mode.EVAL, *flags))
    for image, label in zip(np.concatenate(images), np.concatenate(labels), strict=True):
        np.testing.assert_allclose(image[0], (20 * label[0] - 10) / 2)


def test_training_order_depends_on_epoch_and_seed(parse, numbered):
    def orders(seed):
        loader = load(parse, numbered, Mode.TRAIN, "--batch-size", "10", "--dali-random-seed", seed)
        return [np.concatenate(epoch(loader)[1])[:, 0].tolist() for _ in range(3)]

    first = orders(1)
    assert all(sorted(order) == list(range(10)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    assert first == orders(1)
    assert first != orders(2)


def test_only_training_images_are_augmented(parse, photos):
    for mode, same in ((Mode.TRAIN, False), (Mode.EVAL, True)):
        loader = load(parse, photos, mode)
        first, second = (np.sort(np.concatenate(epoch(loader)[0]).ravel()) for _ in range(2))
        assert np.array_equal(first, second) == same


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_training_drops_partial_batch_and_repeats_no_image(parse, numbered, batch):
    loader = load(parse, numbered, Mode.TRAIN, "--batch-size", batch)
    assert len(loader) == 10 // batch
    for _ in range(3):
        _, labels = epoch(loader)
        assert [len(part) for part in labels] == [batch] * (10 // batch)
        seen = np.concatenate(labels)[:, 0].tolist()
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(("world_size", "batch"), [(2, 3), (2, 4), (3, 1), (3, 3), (4, 1)])
def test_training_shards_have_equal_length_and_no_common_image(parse, numbered, shard, world_size, batch):
    loaders = []
    for rank in range(world_size):
        shard(rank, world_size)
        loaders.append(load(parse, numbered, Mode.TRAIN, "--batch-size", batch))
    for _ in range(world_size + 1):
        epochs = [epoch(loader)[1] for loader in loaders]
        assert {len(batches) for batches in epochs} == {10 // world_size // batch}
        seen = [label for batches in epochs for label in np.concatenate(batches)[:, 0].tolist()]
        assert len(set(seen)) == len(seen)


# One process, partial batches, as many processes as images, and more.
SHARDS_AND_BATCHES = [(1, 1), (1, 32), (2, 3), (3, 7), (4, 1), (12, 3)]
MORE_SHARDS_AND_BATCHES = [(10, 1), (10, 32), (11, 7), (23, 1)]


@pytest.mark.parametrize(
    ("world_size", "batch"),
    [*SHARDS_AND_BATCHES, *(pytest.param(*both, marks=pytest.mark.soak) for both in MORE_SHARDS_AND_BATCHES)],
)
def test_evaluation_yields_each_image_once(parse, numbered, shard, world_size, batch):
    loaders = []
    for rank in range(world_size):
        shard(rank, world_size)
        loaders.append(load(parse, numbered, Mode.EVAL, "--batch-size", batch))
    for _ in range(2):
        batches = [part for loader in loaders for part in epoch(loader)[1]]
        assert sorted(np.concatenate(batches)[:, 0].tolist()) == list(range(10))
    for loader in loaders:
        assert len(loader) == len(epoch(loader)[1])


def test_synthetic_batches_are_constant_and_epoch_has_size_of_imagenet(parse):
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


def test_synthetic_loaders_of_ranks_differ_and_resume(parse, shard):
    images = []
    for rank in (0, 1):
        shard(rank, 2)
        args = parse("--data-format", "synthetic", "--batch-size", "64")
        loader = dali.build_dataloader(args, Mode.TRAIN)
        assert len(loader) == 1281167 // 2 // 64
        take(loader, 3)
        images.append(np.array(next(dali.build_dataloader(args, Mode.TRAIN))[0]["data"]))
        state = json.loads(json.dumps(loader.state()))
        assert dali.build_dataloader(args, Mode.TRAIN, state).step == 3
        with pytest.raises(dali.StateError, match=f"step {len(loader) + 1} of {len(loader)}"):
            dali.build_dataloader(args, Mode.TRAIN, state | {"step": len(loader) + 1})
    assert not np.array_equal(*images)
    shard(0, 20)
    with pytest.raises(UsageError, match="--batch-size 65536: exceeds the 64058 synthetic images per process"):
        dali.build_dataloader(parse("--data-format", "synthetic", "--batch-size", 65536), Mode.TRAIN)


@pytest.mark.parametrize("has_sizes", [True, False])
def test_change_that_sizes_intends_is_not_a_warning(parse, capsys, has_sizes):
    flags = dali.batch_flags(parse().as_dict())
    conditions = loader_state.conditions(flags, "folder", 30, 1)
    assert loader_state.LIST not in conditions
    assert loader_state.conditions(flags, "", 30, 1, "0123456789abcdef-")[loader_state.LIST] == "0123456789abcdef"
    state = {"conditions": conditions | {"--batch-size": 9}, "step": 0}
    assert loader_state.match(state, conditions, flags.before, 3, has_sizes) == (state, True)
    output = capsys.readouterr()
    assert "but the image order continues" in (output.out if has_sizes else output.err)
    assert not (output.err if has_sizes else output.out)


@pytest.mark.parametrize("is_in_epoch", [True, False])
def test_changed_list_of_images_restarts_the_order(parse, photos, tmp_path, capsys, is_in_epoch):
    loader = dali.build_dataloader(parse("--image-root", photos), Mode.TRAIN)
    take(loader, 2)
    if not is_in_epoch:
        epoch(loader)
    changed = shutil.copytree(photos, tmp_path / "changed")
    (changed / "train/class0/00.jpg").rename(changed / "train/class0/renamed.jpg")
    assert dali.build_dataloader(parse("--image-root", changed), Mode.TRAIN, loader.state()).step == 0
    stderr = capsys.readouterr().err
    assert "list of images and labels (hash) is " in stderr
    assert "so the loader restarts at the beginning of the epoch, with the image order of the first epoch" in stderr


@pytest.mark.parametrize(("outputs", "classes", "warns"), [(11, 10, True), (10, 10, False), (11, 0, False)])
def test_unused_outputs_of_the_network_trigger_a_warning(capsys, outputs, classes, warns):
    """Synthetic images have no classes."""
    args = SimpleNamespace(num_of_class=outputs, image_root="root")
    dali.warn_of_unused_outputs(args, SimpleNamespace(classes=list(range(classes))))
    error = capsys.readouterr().err
    assert (
        error.startswith("warning: --num-of-class 11: exceeds the 10 classes in root; reduce it")
        if warns
        else not error
    )


def test_batch_larger_than_data_set_is_an_error(parse, numbered):
    with pytest.raises(UsageError, match="--batch-size 11: .* 10 training images.* use 10"):
        load(parse, numbered, Mode.TRAIN, "--batch-size", "11")
    loader = load(parse, numbered, Mode.EVAL, "--batch-size", "11")
    assert len(loader) == 1
    assert [len(list(loader)) for _ in range(2)] == [1, 1]  # each pass is one epoch


def test_more_processes_than_training_images_is_an_error(parse, numbered, shard):
    shard(0, 10)
    with pytest.raises(UsageError, match="--batch-size 2: exceeds the 1 training image per process in /.*; use 1"):
        load(parse, numbered, Mode.TRAIN, "--batch-size", "2")
    shard(0, 11)
    with pytest.raises(UsageError, match=r"too few training images \(10\) for 11 processes; start at most 10"):
        load(parse, numbered, Mode.TRAIN, "--batch-size", "1")
    with pytest.raises(
        UsageError, match=r"too few validation images \(10\) for a benchmark with 11 processes; start at most 10"
    ):
        load(parse, numbered, Mode.EVAL, "--batch-size", "1", "--benchmark")


BROKEN = {
    "empty": lambda jpeg: b"",
    "cut in the header": lambda jpeg: jpeg[:20],
    "cut in the image": lambda jpeg: jpeg[: len(jpeg) // 2],
    "not an image": lambda jpeg: b"this is not an image " * 50,
    "overwritten": lambda jpeg: jpeg[:200] + b"\0" * (len(jpeg) - 200),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("val/class0/00.jpg", damage) for damage in BROKEN),
        *(("train/class1/13.jpg", damage) for damage in ("not an image", "cut in the image")),
        ("val/class2/20.jpg", "cut in the image"),
    ],
)
def test_undecodable_image_is_reported_with_path(parse, photos, tmp_path, shard, damage, name):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    (root / name).write_bytes(BROKEN[damage]((photos / name).read_bytes()))
    shard(rank=0)
    flags = ["--batch-size", "4", "--dali-prefetch", "1"]
    with pytest.raises(DataError) as error:
        epoch(load(parse, root, Mode.TRAIN if name.startswith("train") else Mode.EVAL, *flags))
    message = str(error.value)
    assert "\n" not in message
    for part in (f"{root}/{name}: cannot be decoded (rank 0)", f"verify {root} --fix-list", "--skip-list"):
        assert part in message
    (tmp_path / "bad.txt").write_text(f"{name}\n")
    loader = load(parse, root, Mode.EVAL, *flags, "--skip-list", tmp_path / "bad.txt")
    assert len(np.concatenate(epoch(loader)[1])) == (22 if name.startswith("val") else 23)


@pytest.mark.parametrize("damage", [name for name in BROKEN if name != "cut in the image"])
@pytest.mark.parametrize("mode", Mode)
def test_invalid_header_is_detected_before_decoding(parse, photos, tmp_path, mode, damage):
    """DALI's decoders crash if a large batch contains an image with an invalid header. In a small batch, the decoders
    also raise an error, so the test checks which operator raised it."""
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for path in (root / mode.value).glob("*/*"):
        path.write_bytes(BROKEN[damage](path.read_bytes()))
    with pytest.raises(DataError) as error:
        next(load(parse, root, mode, "--batch-size", "1"))
    assert "nvidia.dali.fn.peek_image_shape" in str(error.value.__cause__)


# Evaluation uses a different decoding operator than training.
@pytest.mark.slow
@pytest.mark.parametrize("scope", [pytest.param("train_only", marks=pytest.mark.soak), "eval_only"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_undecodable_image_in_large_batch_stops_the_run(run_bare, tmp_path, capfd, scope, device):
    """The header of the image is valid, so the decoder of the CPU raises the error. Images with invalid headers, on
    which DALI's decoders crash in a large batch, are rejected earlier, by decoding.checked."""
    for i in range(64):
        folder = tmp_path / f"{'train' if scope == 'train_only' else 'val'}/class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(np.random.RandomState(i).randint(0, 255, (12, 16, 3)).astype(np.uint8))
        picture.resize((500, 375)).save(folder / f"{i:02d}.jpg")
    broken = folder / "05.jpg"
    broken.write_bytes(BROKEN["cut in the image"](broken.read_bytes()))
    network = tmp_path / "network.py"
    network.write_text(NETWORK_EXAMPLE)
    flags = ["--model-arch-name", f"{network}:Net", "--device", device, "--run-scope", scope]
    flags += ["--batch-size", "32", "--benchmark"]
    code, _ = run_bare(*TINY, *flags, image_root=tmp_path)
    if device == "gpu":
        assert code == 0  # the decoder on the GPU fills in missing pixels
        return
    assert code == 2
    assert_one_error(capfd.readouterr().err, [f"{broken}: cannot be decoded (rank 0)"])


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.EVAL])
def test_pipelines_do_not_use_dynamic_executor(parse, numbered, mode):
    """With the dynamic executor, DALI's default, repeated runs on a GPU have had different losses."""
    assert load(parse, numbered, mode)._pipes[0].exec_dynamic is False


def test_unrelated_loader_error_is_not_attributed_to_an_image(parse, numbered):
    loader = load(parse, numbered, Mode.EVAL)
    with pytest.raises(RuntimeError, match="out of memory"), loader._naming_bad_images():
        raise RuntimeError("CUDA runtime API error: out of memory")


# RAW disables cropping and normalization, so that tests can compare augmented PNG images with NumPy arrays.
RAW = [
    *("--normalize-scale", "1", "--normalize-mean", "0,0,0", "--normalize-std", "1,1,1", "--data-layout", "NHWC"),
    *("--rand-crop-scale", "1,1", "--rand-crop-ratio", "1,1"),
]
LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture
def copies(tmp_path):
    """Return a function that writes `count` copies of an image to train/ and one copy to val/."""

    def copies(pixels, count=64):
        for split, n in (("train", count), ("val", 1)):
            (tmp_path / split / "a").mkdir(parents=True)
            for i in range(n):
                Image.fromarray(pixels.astype("uint8")).save(tmp_path / split / "a" / f"{i:03d}.png")
        return tmp_path

    return copies


def random_image(side, low=0, high=255):
    return np.random.RandomState(0).randint(low, high + 1, (side, side, 3))


@pytest.fixture
def without_flips(parse, copies):
    """Return a function that reads an epoch of copies of an image, undoes the flips, and returns pixels from 0 to 255
    as an array [N, 32, 32, 3].

    To detect flips, the function also reads an epoch without augmentation flags. Augmentation must not change which
    images are flipped.
    """

    def without_flips(pixels, *flags, count=64):
        root = copies(pixels, count)
        plain, images = (np.concatenate(epoch(load(parse, root, Mode.TRAIN, *RAW, *f))[0]) for f in ((), flags))
        flipped = [np.array_equal(image, pixels[:, ::-1]) for image in plain]
        assert 0.25 * count < sum(flipped) < 0.75 * count
        assert all(flip or np.array_equal(image, pixels) for image, flip in zip(plain, flipped, strict=True))
        return np.stack([image[:, ::-1] if flip else image for image, flip in zip(images, flipped, strict=True)])

    return without_flips


def test_random_crop_follows_scale_and_ratio_ranges(parse, copies):
    ramp = np.tile(np.arange(200), (200, 1))
    root = copies(np.stack([ramp, ramp.T, ramp], axis=-1), 128)  # red encodes the column, green the row
    ranges = ["--rand-crop-scale", "0.2,0.6", "--rand-crop-ratio", "0.5,2"]
    windows = []
    for image in np.concatenate(epoch(load(parse, root, Mode.TRAIN, *RAW, *ranges))[0]):
        x, y = image[:, :, 0].mean(axis=0), image[:, :, 1].mean(axis=1)
        (dx, left), (dy, top) = np.polyfit(np.arange(32), x, 1), np.polyfit(np.arange(32), y, 1)
        assert np.abs(image[:, :, 0] - (left + dx * np.arange(32))).max() < 1
        assert np.abs(image[:, :, 1] - (top + dy * np.arange(32))[:, None]).max() < 1
        windows.append((abs(dx) * 32, dy * 32, dx > 0))
    width, height, upright = np.array(windows).T
    area, ratio = width * height / 200**2, np.log2(width / height)
    for actual, low, high in ((area, 0.2, 0.6), (ratio, -1, 1)):
        assert low - 0.02 < actual.min() < low + 0.1 * (high - low)
        assert high - 0.15 * (high - low) < actual.max() < high + 0.02
    assert 0.3 < upright.mean() < 0.7


def test_padded_crop_selects_each_position_of_the_padded_image(parse, copies):
    """The images are resized to 4 x 6 pixels and padded to 8 x 10 pixels, so a crop of 4 x 6 has 5 x 5 positions."""
    root = copies(np.random.RandomState(0).randint(0, 256, (8, 12, 3)), 512)
    flags = ["--data-layout", "NHWC", "--image-shape", "3,4,6", "--crop-size", "4", "--resize-short", "4"]
    flags += ["--normalize-mean", "100/255,110/255,120/255"]
    [[resized]] = epoch(load(parse, root, Mode.EVAL, *flags))[0]
    padded = np.pad(resized, ((2, 2), (2, 2), (0, 0)))
    crops = [padded[y : y + 4, x : x + 6] for y in range(5) for x in range(5)]
    crops += [crop[:, ::-1] for crop in crops]
    images = np.concatenate(epoch(load(parse, root, Mode.TRAIN, *flags, "--crop-padding", "2"))[0])
    differences = np.abs(images[:, None] - np.stack(crops)).max(axis=(2, 3, 4))
    assert differences.min(axis=1).max() < 1e-5
    counts = np.bincount(differences.argmin(axis=1), minlength=50)
    assert counts.min() > 0 and counts.max() < 30


@pytest.mark.parametrize(("kind", "is_on_cpu"), [(0, False), (2, True)])
def test_cpu_decodes_files_that_need_it(parse, monkeypatch, kind, is_on_cpu):
    image = SimpleNamespace(gpu=lambda: "copied to the GPU")
    monkeypatch.setattr(decoding, "crop_on_cpu", lambda *arguments: None)
    monkeypatch.setattr(decoding, "decode_on_gpu", lambda *arguments: None)
    monkeypatch.setattr(fn, "random_crop_generator", lambda header, **options: (0, 0))
    monkeypatch.setattr(fn, "slice", lambda images, *crop, **options: None)
    monkeypatch.setattr(fn, "resize", lambda images, **_: image)
    args = parse()
    args.dali_device = "gpu"
    images = decoding.random_resized_crop(args, None, kind, None, {})
    assert images == ("copied to the GPU" if is_on_cpu else image)


def test_gpu_decodes_with_hardware_decoder_and_preallocated_buffers(parse, monkeypatch):
    options = []
    monkeypatch.setattr(fn.decoders, "image", lambda encoded, **given: options.append(given))
    monkeypatch.setattr(decoding, "PREALLOCATE_WIDTH", 5)
    monkeypatch.setattr(decoding, "PREALLOCATE_HEIGHT", 6)
    args = parse("--hw-decoder-load", "0.7")
    args.dali_device = "gpu"
    decoding.decode(args, None, 0)
    expected = {"device": "mixed", "hw_decoder_load": 0.7, "jpeg_fancy_upsampling": True}
    expected |= {"preallocate_width_hint": 5, "preallocate_height_hint": 6}
    assert options == [{"output_type": types.RGB, **expected}]


def test_default_augmentation_matches_plain_dali_operators(parse, photos):
    """The reference consists of plain DALI operators in the same order as in the pipeline, because DALI derives random
    seeds from the order."""

    @pipeline_def(batch_size=8, num_threads=2, device_id=None, seed=42)
    def plain():
        args = parse("--image-root", photos)
        encoded, _ = open_split(args.image_root, "folder", Mode.TRAIN, 3, 42).read("Reader", 0, 1, True)
        images = fn.decoders.image_random_crop(
            encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=100
        )
        images = fn.resize(images, resize_x=32, resize_y=48, interp_type=types.INTERP_LINEAR, antialias=False)
        mirror = fn.random.coin_flip(probability=0.5)
        mean, std = ([255 * v for v in values] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        return fn.crop_mirror_normalize(images, crop=(48, 32), mean=mean, std=std, mirror=mirror)

    pipe = plain()
    pipe.build()
    for images in epoch(load(parse, photos, Mode.TRAIN, "--image-shape", "3,48,32"))[0]:
        np.testing.assert_array_equal(images, pipe.run()[0].as_array())


AUGMENTATION = ["--color-jitter", "0.4", "--lighting", "0.1", "--rotate-degrees", "15", "--interp", "triangular"]
AUGMENTATION = ["--auto-augment", "trivial", *AUGMENTATION]


@pytest.mark.parametrize(
    "flags", [AUGMENTATION, ["--auto-augment", "randaug"], ["--crop-padding", "4", *AUGMENTATION[2:]]], ids=str
)
def test_random_numbers_have_different_seeds(parse, photos, monkeypatch, flags):
    """With equal seeds, they would be correlated."""
    seeds = []
    for name in ("uniform", "normal"):
        draw = getattr(fn.random, name)
        monkeypatch.setattr(
            fn.random, name, lambda draw=draw, **options: seeds.append(options["seed"]) or draw(**options)
        )
    data_set = open_split(str(photos), "folder", Mode.TRAIN, 3, 0)
    args = parse("--image-root", photos, *flags)
    loader_module.create_pipeline(args.part(loader_module.Options), data_set, Mode.TRAIN, 0, 1)
    assert len(set(seeds)) == len(seeds) >= 2


@pytest.mark.slow
def test_augmentation_depends_on_seed_and_is_not_applied_in_evaluation(parse, photos):
    def images(seed, mode=Mode.TRAIN, flags=AUGMENTATION):
        loader = load(parse, photos, mode, *flags, "--dali-random-seed", seed)
        return np.concatenate([*epoch(loader)[0], *epoch(loader)[0]])

    first = images(1)
    assert np.array_equal(first, images(1))
    assert not np.array_equal(first, images(2))
    assert np.array_equal(images(1, Mode.EVAL, AUGMENTATION[:-2]), images(2, Mode.EVAL, []))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [AUGMENTATION, ["--auto-augment", "randaug"], ["--crop-padding", "4", *AUGMENTATION[2:]]],
    ids=["all", "randaug", "padding"],
)
def test_loader_with_augmentation_resumes_with_next_batch(parse, photos, flags):
    """With batches of three images, most operations of --auto-augment are applied to no image."""
    args = parse("--image-root", photos, "--batch-size", "3", *flags)
    loader = dali.build_dataloader(args, Mode.TRAIN)
    take(loader, 4)
    state = json.loads(json.dumps(loader.state()))
    resumed = take(dali.build_dataloader(args, Mode.TRAIN, state), 12)
    for (images, _), (expected, _) in zip(resumed, take(loader, 12), strict=True):
        np.testing.assert_array_equal(images, expected)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--auto-augment", "trivial"],
        ["--color-jitter", "0.4"],
        ["--lighting", "0.1"],
        ["--crop-padding", "4"],
    ],
    ids=["crop", "trivial", "jitter", "lighting", "padding"],
)
def test_ranks_draw_different_random_numbers(parse, copies, shard, flags):
    """Except in the test of crops, the images are uniform, so that crops and flips have no effect."""
    root = copies(np.full((40, 40, 3), (90, 100, 110)) if flags else random_image(40), 16)
    images = []
    for rank in (0, 1):
        shard(rank, 2)
        images.append(np.concatenate(epoch(load(parse, root, Mode.TRAIN, *flags))[0]))
    assert not np.array_equal(*images)


def test_lighting_adds_principal_components_to_each_image(without_flips):
    pixels = random_image(32)
    added = without_flips(pixels, "--lighting", "0.1", count=256) - pixels
    assert np.ptp(added, axis=(1, 2)).max() < 1e-3
    components = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    alpha = np.linalg.solve(components * [55.46, 4.794, 1.148], added[:, 0, 0].T)
    assert np.abs(alpha.mean(axis=1)).max() < 4 * 0.1 / 16
    np.testing.assert_allclose(alpha.std(axis=1), 0.1, rtol=0.2)
    assert np.abs(np.corrcoef(alpha) - np.eye(3)).max() < 0.25


def test_color_jitter_scales_saturation_contrast_and_brightness(without_flips):
    pixels = random_image(32, 100, 156)  # the narrow range of values avoids clipping
    images = without_flips(pixels, "--color-jitter", "0.3")
    luma = pixels @ LUMA
    chroma = pixels - luma[..., None]
    factors = []
    for image in images:
        slope, intercept = np.polyfit(luma.ravel() - 128, (image @ LUMA).ravel(), 1)
        brightness = intercept / 128
        contrast = slope / brightness
        saturation = (chroma * (image - (image @ LUMA)[..., None])).sum() / (chroma**2).sum() / slope
        jittered = brightness * (128 + contrast * (luma[..., None] + saturation * chroma - 128))
        assert np.abs(image - jittered).max() < 1  # tolerance for rounding of pixels and of the YIQ coefficients
        factors.append((brightness, contrast, saturation))
    factors = np.array(factors)
    assert factors.min() > 0.69
    assert factors.max() < 1.31
    np.testing.assert_allclose(factors.mean(axis=0), 1, atol=4 * 0.3 / np.sqrt(3 * len(images)))
    np.testing.assert_allclose(factors.std(axis=0), 0.3 / np.sqrt(3), rtol=0.3)
    assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.5


@pytest.fixture
def augmented():
    """Return a function that applies every operation to every image with every magnitude and sign, and returns {(index
    of the image, name, magnitude, sign): uint8 array [32, 32, 3]}."""

    def augmented(operations, images, magnitudes):
        inputs = list(itertools.product(range(len(images)), magnitudes, (0, 1)))
        arrays = [images[i] for i, *_ in inputs], *(np.int32([[x[k]] for x in inputs]) for k in (1, 2))

        @pipeline_def(batch_size=len(inputs), num_threads=2, device_id=None)
        def pipeline():
            pixels, magnitude, sign = fn.external_source(lambda: arrays, 3, layout=["HWC", None, None])
            options = {"magnitude_bin": signed_bin(magnitude[0], sign[0]), "num_magnitude_bins": 31}
            return tuple(operation(pixels, **options, shape=(32, 32)) for operation in operations)

        with warnings.catch_warnings(record=True):  # DALI's augmentation suites use deprecated operator names
            built = pipeline()
        built.build()
        outputs = zip(operations, built.run(), strict=True)
        return {(i, o.name, *x): p for o, out in outputs for (i, *x), p in zip(inputs, out.as_array(), strict=True)}

    return augmented


@pytest.mark.slow
def test_trivial_augment_draws_operation_magnitude_and_sign_independently(without_flips, augmented):
    pixels = random_image(32, 20, 230)
    suite = trivial_augment.get_trivial_augment_wide_suite()
    outcomes = {}  # if several draws produce the same image, only the first is stored
    for (_, *draw), image in augmented(suite, [np.uint8(pixels)], range(31)).items():
        outcomes.setdefault(image.tobytes(), draw)
    outcomes[np.uint8(pixels).tobytes()] = ["identity", 0, 0]
    draws = {operation.name: [] for operation in suite}
    for image in without_flips(pixels, "--auto-augment", "trivial", count=400):
        name, *draw = outcomes[np.uint8(np.round(image)).tobytes()]
        draws[name].append(draw)
    for operation in suite:
        assert 8 < len(draws[operation.name]) < 70
        magnitudes, signs = zip(*draws[operation.name], strict=True)
        if operation.mag_range is not None:
            assert min(magnitudes) < 10 and max(magnitudes) > 20
        assert set(signs) == ({0, 1} if operation.randomly_negate else {0})


def test_rand_augment_applies_two_operations_with_the_requested_magnitude(without_flips, augmented):
    pixels = random_image(32, 20, 230)
    suite = rand_augment.get_rand_augment_suite(use_shape=True)
    once = augmented(suite, [np.uint8(pixels)], [20])
    outcomes, draws = {}, list(once)
    for (i, name, _, sign), image in augmented(suite, list(once.values()), [20]).items():
        outcomes.setdefault(image.tobytes(), (*draws[i][1::2], name, sign))
    flags = ["--auto-augment", "randaug", "--auto-augment-magnitude", "20"]
    drawn = {outcomes[np.uint8(np.round(image)).tobytes()] for image in without_flips(pixels, *flags, count=200)}
    names = {operation.name for operation in suite}
    assert {first for first, *_ in drawn} | {second for *_, second, _ in drawn} == names
    assert len({(first, second) for first, _, second, _ in drawn}) > 80
    negated = {operation.name for operation in suite if operation.randomly_negate}  # the sign of the others is 0
    signs = {(sign, next_sign) for first, sign, second, next_sign in drawn if {first, second} <= negated}
    assert signs == {(0, 0), (0, 1), (1, 0), (1, 1)}


def rotated(pixels, degrees):
    """Rotate an image around its center with bilinear interpolation. Pixels from outside the image are black."""
    side = len(pixels)
    angle, center = np.deg2rad(degrees), (side - 1) / 2
    y, x = np.mgrid[:side, :side] - center
    source_x = np.cos(angle) * x - np.sin(angle) * y + center
    source_y = np.sin(angle) * x + np.cos(angle) * y + center
    padded = np.pad(pixels.astype(float), ((side, side), (side, side), (0, 0)))
    x0, y0 = np.floor(source_x).astype(int), np.floor(source_y).astype(int)
    result = np.zeros(pixels.shape)
    for dy in (0, 1):
        for dx in (0, 1):
            weight = (1 - np.abs(source_y - y0 - dy)) * (1 - np.abs(source_x - x0 - dx))
            result += weight[..., None] * padded[y0 + dy + side, x0 + dx + side]
    return result


def test_rotation_around_center_has_uniformly_distributed_angles(without_flips):
    ramp = 7.0 * np.arange(32) + 16
    pixels = np.stack([np.tile(ramp, (32, 1)), np.tile(ramp, (32, 1)).T, np.full((32, 32), 100)], axis=-1)
    y, x = np.mgrid[:32, :32] - 15.5
    inside = x**2 + y**2 < 14**2
    angles = []
    for image in without_flips(pixels, "--rotate-degrees", "25"):
        # Inside the circle, red and green encode the original position of the pixel (x, y): (x cos - y sin, x sin + y
        # cos).
        red, green = (image[..., i][inside] / 7 - (16 / 7 + 15.5) for i in (0, 1))
        sine, cosine = (green * x[inside] - red * y[inside]).sum(), (red * x[inside] + green * y[inside]).sum()
        angle = np.rad2deg(np.arctan2(sine, cosine))
        difference = np.abs(image - rotated(pixels, angle))
        assert difference[inside].max() < 1
        # Exclude pixels near the border, where an error of 0.01 degrees is visible.
        assert np.quantile(difference, 0.98) < 4
        angles.append(angle)
    assert np.abs(angles).max() < 25.1
    assert np.abs(np.mean(angles)) < 4 * 25 / np.sqrt(3 * len(angles))
    assert np.std(angles) == pytest.approx(25 / np.sqrt(3), rel=0.25)


FILTERS = {
    "linear": lambda t: np.maximum(0, 1 - np.abs(t)),
    "triangular": lambda t: np.maximum(0, 1 - np.abs(t)),
    "cubic": lambda t: np.where(
        np.abs(t) < 1,
        1.5 * np.abs(t) ** 3 - 2.5 * t**2 + 1,
        np.where(np.abs(t) < 2, -0.5 * np.abs(t) ** 3 + 2.5 * t**2 - 4 * np.abs(t) + 2, 0),
    ),
    "lanczos3": lambda t: np.where(np.abs(t) < 3, np.sinc(t) * np.sinc(t / 3), 0),
}


def resize_weights(size, new_size, interp):
    """Return the filter weights [new_size, size] for resizing. When an image shrinks, all filters except "linear"
    become wider. Borders are replicated."""
    scale = size / new_size
    width = max(1, scale) if interp != "linear" else 1
    center = (np.arange(new_size) + 0.5) * scale - 0.5
    weights = np.zeros((new_size, size))
    for pixel in range(-3 * size, 4 * size):
        weights[:, np.clip(pixel, 0, size - 1)] += FILTERS[interp]((pixel - center) / width)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("side", [20, 77])
@pytest.mark.parametrize("interp", FILTERS)
def test_interp_selects_filter_in_training_and_evaluation(parse, copies, interp, side):
    pixels = random_image(side)
    root = copies(pixels, 8)
    weights = resize_weights(side, 32, interp)
    expected = np.clip(np.einsum("ij,jkc,lk->ilc", weights, pixels.astype(float), weights), 0, 255)
    for mode in Mode:
        loader = load(parse, root, mode, *RAW, "--resize-short", "32", "--interp", interp)
        for image in np.concatenate(epoch(loader)[0]):
            error = min(np.abs(actual - expected).max() for actual in (image, image[:, ::-1]))
            assert error < 0.6  # tolerance for rounding to integers


@pytest.mark.slow
def test_evaluation_batches_are_equal_in_every_format(parse, photos, converted):
    expected = epoch(load(parse, photos, Mode.EVAL, "--data-format", "folder"))
    for data_format in data_files.ALL[1:]:
        actual = epoch(load(parse, converted[data_format], Mode.EVAL, "--data-format", data_format))
        for left, right in zip(expected, actual, strict=True):
            assert len(left) == len(right)
            for a, b in zip(left, right, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=data_format)


@pytest.mark.parametrize("data_format", data_files.ALL)
def test_training_shards_of_every_format_have_equal_length_and_no_common_image(parse, distinct, shard, data_format):
    """Each of the three processes has four batches of three images."""
    loaders = []
    for rank in range(3):
        shard(rank, 3)
        flags = ["--data-format", data_format, "--batch-size", 3, "--num-of-class", "37"]
        loaders.append(load(parse, distinct[data_format], Mode.TRAIN, *flags))
    orders, seen_by_rank_0 = [], set()
    for _ in range(4):
        epochs = [epoch(loader)[1] for loader in loaders]
        assert {len(batches) for batches in epochs} == {4}
        seen_by_rank_0.update(np.concatenate(epochs[0])[:, 0].tolist())
        orders.append([label for batches in epochs for label in np.concatenate(batches)[:, 0].tolist()])
        assert len(set(orders[-1])) == len(orders[-1])
    assert len({tuple(order) for order in orders}) == 4
    # Rank 0 must read different shards in different epochs.
    assert len(seen_by_rank_0) > 37 // 3 + 1


@pytest.mark.parametrize("data_format", data_files.ALL)
@pytest.mark.parametrize(("world_size", "batch"), [(1, 4), (3, 3)])
def test_evaluation_of_every_format_yields_each_image_once(parse, distinct, shard, data_format, world_size, batch):
    check_evaluation(parse, distinct[data_format], shard, data_format, 37, world_size, batch)


@pytest.mark.slow
@pytest.mark.parametrize("data_format", data_files.ALL)
@pytest.mark.parametrize("world_size", [3, 5])
def test_evaluation_with_few_images_yields_each_image_once(parse, few, shard, data_format, world_size):
    """The data set has three images, in two shards. Two of five processes have no images."""
    check_evaluation(parse, few[data_format], shard, data_format, 3, world_size, batch=2)


def check_evaluation(parse, root, shard, data_format, count, world_size, batch):
    """Check that the processes together read each of the images once, in two evaluations."""
    loaders = []
    for rank in range(world_size):
        shard(rank, world_size)
        flags = ["--data-format", data_format, "--batch-size", batch, "--num-of-class", count]
        loaders.append(load(parse, root, Mode.EVAL, *flags))
    for _ in range(2):
        batches = [part for loader in loaders for part in epoch(loader)[1]]
        assert sorted(np.concatenate(batches)[:, 0].tolist()) == list(range(count))


@pytest.mark.parametrize("data_format", data_files.ALL)
def test_training_order_of_every_format_depends_on_seed(parse, distinct, data_format):
    def orders(seed):
        flags = ["--data-format", data_format, "--num-of-class", "37", "--dali-random-seed", seed]
        loader = load(parse, distinct[data_format], Mode.TRAIN, *flags)
        return [np.concatenate(epoch(loader)[1])[:, 0].tolist() for _ in range(2)]

    first = orders(1)
    assert [len(set(order)) for order in first] == [4 * 8] * 2 and first[0] != first[1]
    assert first == orders(1)
    assert first != orders(2)


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("data_format", data_files.ALL)
def test_every_format_decodes_every_image_type(parse, tmp_path, data_format):
    pixels = np.random.RandomState(0).randint(0, 255, (40, 48, 3), dtype=np.uint8)
    for split in ("train", "val"):
        for suffix in IMAGE_SUFFIXES:
            folder = tmp_path / "folder" / split / suffix[1:]
            folder.mkdir(parents=True)
            options = {"lossless": True} if suffix == ".webp" else {}
            Image.fromarray(pixels).save(folder / f"x{suffix}", **options)
        lines = [f"{split}/{name[1:]}/x{name} {label}\n" for label, name in enumerate(sorted(IMAGE_SUFFIXES))]
        (tmp_path / "folder" / f"{split}.txt").write_text("".join(lines))
    root = tmp_path / "folder"
    if data_format in data_files.FORMATS:
        root = tmp_path / data_format
        data_files.write(tmp_path / "folder", root, data_format)
    images, labels = epoch(load(parse, root, Mode.EVAL, "--data-format", data_format))
    images = dict(zip(np.concatenate(labels)[:, 0].tolist(), np.concatenate(images), strict=True))
    lossless = sorted(IMAGE_SUFFIXES).index(".png")
    assert sorted(images) == list(range(len(IMAGE_SUFFIXES)))
    for label, suffix in enumerate(sorted(IMAGE_SUFFIXES)):
        if suffix not in (".jpg", ".jpeg", ".jfif"):
            np.testing.assert_array_equal(images[label], images[lossless], err_msg=suffix)


@pytest.mark.parametrize("data_format", ["folder", "filelist", *data_files.READERS])
@pytest.mark.parametrize(
    ("mode", "buffer", "places"), [(Mode.TRAIN, 5, [0, 13]), (Mode.TRAIN, 4096, [3]), (Mode.EVAL, 4096, [5])]
)
def test_pipeline_checkpoint_resumes_with_same_batches(distinct, monkeypatch, data_format, mode, buffer, places):
    """An epoch of a shard has three or four batches."""
    monkeypatch.setattr(shards, "SHUFFLE_BUFFER", buffer)
    data_set = open_split(str(distinct[data_format]), data_format, mode, 37, seed=5)

    def labels(pipeline, count):
        return [pipeline.run()[1].as_array()[:, 0].tolist() for _ in range(count)]

    for shard_id in (0, 2):

        @pipeline_def(batch_size=4, num_threads=1, device_id=None, seed=1, enable_checkpointing=True)
        def pipeline(shard_id=shard_id):
            return data_set.read("Reader", shard_id, 3, shuffle=mode is Mode.TRAIN)

        first, checkpoints, batches = pipeline(), {}, []
        for done in places:
            batches += labels(first, done - len(batches))
            checkpoints[done] = first.checkpoint()
        batches += labels(first, 12)
        for done, checkpoint in checkpoints.items():
            assert labels(pipeline(checkpoint=checkpoint), 12) == batches[done : done + 12]
