from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from data_files import open_split
from paddle import static

from paddle_resnet import dali
from paddle_resnet.data import data_set, iterators
from paddle_resnet.data import loader as loader_module
from paddle_resnet.data.iterators import EmptyIterator, ShardIterator
from paddle_resnet.utils.errors import DataError, UsageError
from paddle_resnet.utils.mode import Mode


def batches_of_epochs(loader, count):
    """Yield the next `count` batches and continue across epoch boundaries."""
    while count:
        batch = next(loader, None)
        if batch is None:
            loader.reset()
        else:
            yield batch[0]
            count -= 1


def arrays(batch):
    return {name: np.array(tensor) for name, tensor in batch.items()}


def empty_targets():
    return {name: paddle.framework.core.LoDTensor() for name in ("data", "label")}


@pytest.mark.parametrize("mode", Mode)
def test_full_batch_is_written_into_target_tensors(parse, photos, mode):
    args = parse("--image-root", photos)
    expected = [arrays(batch) for batch in batches_of_epochs(dali.build_dataloader(args, mode), 6)]
    loader, targets = dali.build_dataloader(args, mode), empty_targets()
    loader.write_into(targets)
    for batch, reference in zip(batches_of_epochs(loader, 6), expected, strict=True):
        is_full = len(reference["label"]) == args.batch_size
        assert all((batch[name] is tensor) == is_full for name, tensor in targets.items())
        for name, values in arrays(batch).items():
            np.testing.assert_array_equal(values, reference[name])
    if mode is Mode.TRAIN:
        assert (loader.state()["epoch"], loader.state()["step"]) == (1, 3)


def test_synthetic_batch_is_not_written_into_target_tensors(parse):
    loader, targets = dali.build_dataloader(parse("--data-format", "synthetic"), Mode.TRAIN), empty_targets()
    expected = arrays(next(loader)[0])
    loader.write_into(targets)
    batch = next(loader)[0]
    assert not any(batch[name] is tensor for name, tensor in targets.items())
    assert next(loader)[0] is batch  # all full batches are the same
    for name, values in arrays(batch).items():
        np.testing.assert_array_equal(values, expected[name])


def test_loader_describes_its_data_set(parse, photos):
    (photos_set, synthetic) = (
        dali.build_dataloader(parse(*flags), Mode.EVAL)
        for flags in (("--image-root", photos), ("--data-format", "synthetic"))
    )
    expected = open_split(photos, "folder", Mode.EVAL, 3, 0)
    names = ("data_set_size", "classes", "class_names", "digest")
    assert [getattr(photos_set, name) for name in names] == [23, expected.classes, expected.classes, expected.digest]
    assert synthetic.data_set_size == loader_module.SYNTHETIC_SIZE[Mode.EVAL]
    assert (synthetic.classes, synthetic.digest, synthetic.class_images) == (["0", "1", "2"], None, None)
    next(photos_set)
    assert len(list(photos_set)) == len(photos_set) - 1 == 2  # iteration continues the epoch


def test_last_synthetic_batch_has_the_remaining_images():
    batch = {"data": np.arange(4, dtype=np.float32), "label": np.arange(4)}
    loader = iterators.SyntheticIterator(batch, paddle.CPUPlace(), 6, 3, {"number of images": 12})
    assert (len(loader), loader.data_set_size, loader.class_names) == (2, 12, ["0", "1", "2"])
    for _ in range(2):
        assert [np.array(batch["data"]).tolist() for [batch] in loader] == [[0, 1, 2, 3], [0, 1]]
        assert loader.step == 2
        loader.reset()
        assert loader.state() == {"conditions": {"number of images": 12}, "step": 0}


def test_every_rank_has_its_own_synthetic_batch(parse, shard):
    args, batches = parse("--data-format", "synthetic"), []
    for rank in (0, 1):
        shard(rank=rank)
        batches.append(arrays(next(dali.build_dataloader(args, Mode.TRAIN))[0]))
    assert not np.array_equal(batches[0]["data"], batches[1]["data"])


def test_synthetic_loader_resumes_at_its_position(parse):
    args = parse("--data-format", "synthetic")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    next(loader)
    assert loader.state()["step"] == 1
    last = len(loader) - 1
    resumed = dali.build_dataloader(args, Mode.TRAIN, loader.state() | {"step": last})
    assert (resumed.step, len(list(resumed))) == (last, 1)


@pytest.mark.parametrize(
    ("step", "problem"),
    [(0, r"the epoch ends \d+ images? early"), (6, "the epoch is too long"), (7, r"damaged \(step 7 of 6\)")],
)
def test_loader_state_with_wrong_step_is_an_error(parse, photos, step, problem):
    args = parse("--image-root", photos, "--batch-size", "5")
    loader = dali.build_dataloader(args, Mode.TRAIN)
    next(loader)
    with pytest.raises(dali.StateError, match=problem):
        list(dali.build_dataloader(args, Mode.TRAIN, loader.state() | {"step": step}))


def test_images_of_classes_are_counted_without_invalid_labels():
    loader = ShardIterator.__new__(ShardIterator)
    classes = ["a", "b", "c", "d"]
    for labels, expected in (([2, 0, -1, 4, 2, -9, 70], [1, 0, 2, 0]), ([3], [0, 0, 0, 1]), ([], [0] * 4)):
        loader._data_set = data_set.DataSet("folder", 3, classes, None, "", labels=np.array(labels, np.int64))
        assert loader.class_images.tolist() == expected
    loader._data_set = data_set.DataSet("folder", 3, classes, None, "")
    assert loader.class_images is None


@pytest.mark.parametrize(
    ("path", "problem", "data_format", "message"),
    [
        (None, None, "folder", "original"),
        (None, "no file", "lmdb", "root: the lmdb data cannot be read .rank 0: no file.; run `.* verify root`$"),
        ("a.jpg", None, "folder", "a.jpg: cannot be decoded .rank 0.; .* root --fix-list bad.txt` and train with"),
        ("a.jpg", "no file", "lmdb", "a.jpg: cannot be decoded .* and convert the data set with --skip-list bad.txt$"),
    ],
)
def test_errors_of_a_pipeline_name_the_image(monkeypatch, path, problem, data_format, message):
    calls, loader = [], ShardIterator.__new__(ShardIterator)
    loader._data_set, loader._image_root = data_set.DataSet(data_format, 3, [], None, ""), "root"
    found = path, "cannot be decoded"
    monkeypatch.setattr(iterators.bad_images, "bad_image", lambda *arguments: calls.append(arguments) or found)
    monkeypatch.setattr(iterators.bad_images, "reader_problem", lambda text: calls.append(text) or problem)
    error = RuntimeError if message == "original" else DataError
    with pytest.raises(error, match=f"^{message}"), loader._naming_bad_images():
        raise RuntimeError("original")
    assert calls == [("original", loader._data_set, "root"), "original"]


def test_errors_of_the_first_batches_name_the_image(monkeypatch):
    def fail(self, *arguments, **options):
        raise RuntimeError("Failed to decode sample #0 : a.jpg")

    monkeypatch.setattr(iterators.DALIGenericIterator, "__init__", fail)
    images = data_set.DataSet("folder", 3, ["a"], None, "")
    with pytest.raises(DataError, match="^root/a.jpg: cannot be decoded"):
        ShardIterator(SimpleNamespace(max_batch_size=2), 3, images, "root", {})


@pytest.fixture
def program():
    """Return a stand-in for a compiled program with two inputs."""
    main = static.Program()
    with static.program_guard(main, static.Program()):
        static.data("data", [None, 2], "float32")
        static.data("label", [None, 1], "int64")
        main.global_block().create_var(name="weight", shape=[2], dtype="float32")  # not an input
    return SimpleNamespace(_program=main)


DATA, LABELS = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[5], [6], [7]])


def test_any_iterable_is_adapted(program):
    tensor = paddle.framework.core.LoDTensor()
    tensor.set(LABELS, paddle.CPUPlace())
    every = [[{"data": DATA, "label": tensor, "name": "unused"}], ({"data": DATA[::-1], "label": LABELS},)]
    loader = iterators.adapted(every, program)
    assert len(loader) == 2
    assert iterators.adapted(loader, program) is loader
    assert len(iterators.adapted(iter(every), program)) == iterators.UNKNOWN_LENGTH
    for _ in range(2):  # each iteration is an epoch
        (first,), (second,) = loader
        assert first.keys() == {"data", "label"} and first["label"] is tensor
        np.testing.assert_array_equal(np.array(first["data"]), DATA)
        np.testing.assert_array_equal(np.array(second["data"]), DATA[::-1])
    batches = iter(iterators.adapted(every * 2, program))
    seen = [next(batches)[0] for _ in range(4)]
    assert [*batches.gi_frame.f_locals["in_use"]] == seen[1:]  # the GPU may still read the last three batches


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        ([], "no batches; pass an iterable that yields batches in every pass"),
        ([{"data": DATA, "label": LABELS}], r'a batch in an unexpected format; yield \[{"data": ..., "label": ...}\]'),
        ([[{"data": DATA, "label": LABELS}] * 2], "a batch in an unexpected format"),
        ([[{"data": DATA}]], "a batch in an unexpected format"),
        ([{0: {"data": DATA, "label": LABELS}}], "a batch in an unexpected format"),
        (
            [[{"data": DATA, "label": LABELS.astype(np.int32)}]],
            r"label as int32 \['N', 1\], but the program expects int64 \['N', 1\]; convert it in",
        ),
        ([[{"data": DATA[:, :1], "label": LABELS}]], r"data as float32 \['N', 1\], but the program expects float32"),
        ([[{"data": DATA, "label": LABELS[:2]}]], "a batch with 3 data and 2 label; yield at least one image, and one"),
        ([[{"data": DATA[:0], "label": LABELS[:0]}]], "a batch with 0 data and 0 label; yield at least one image"),
    ],
)
def test_invalid_batches_of_an_iterable_are_rejected(program, batches, problem):
    with pytest.raises(UsageError, match=f"^run: the loader yielded {problem}"):
        list(iterators.adapted(batches, program))


def test_empty_iterator_accepts_targets_and_yields_no_batch():
    class NoImages:
        size, classes, class_names, digest = 3, 2, ["a", "b"], "abc"

    loader = EmptyIterator(NoImages)
    # The ranks compare these attributes, which describe the data of all ranks.
    attributes = loader.data_set_size, loader.classes, loader.class_names, loader.digest
    assert attributes == (3, 2, ["a", "b"], "abc")
    loader.write_into(empty_targets())
    assert list(loader) == []
