"""Imbalanced classes: --class-weights balanced and --balanced-sampling."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static
from PIL import Image

from conftest import frozen, losses, read_report
from helpers import epoch, take
from paddle_resnet import dali, program
from paddle_resnet.components import mixing
from paddle_resnet.data.data_set import BalancedSampler
from paddle_resnet.models import loss_head
from paddle_resnet.native import build as native
from paddle_resnet.tasks import SingleLabel
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

IMAGES = [20, 3, 1]  # training images of each class


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory):
    """Create class folders with IMAGES training images and one validation image per class. Within a split, each image
    has a unique color."""
    root = tmp_path_factory.mktemp("imbalanced")
    for split, counts in (("train", IMAGES), ("val", [1, 1, 1])):
        for label, count in enumerate(counts):
            (root / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                color = 10 * i, 100 * label, 0
                Image.new("RGB", (36, 36), color).save(root / split / f"class{label}" / f"{i:02d}.png")
    return root


def test_balanced_weights_are_those_of_scikit_learn():
    """According to sklearn.utils.class_weight.compute_class_weight, the weight of a class is the number of all images
    divided by (number of nonempty classes * images of the class)."""
    labels = np.repeat([0, 1, 3], IMAGES)
    weights = loss_head.balanced_weights(np.bincount(labels, minlength=5))
    np.testing.assert_allclose(weights, [24 / (3 * 20), 24 / (3 * 3), 0, 24 / (3 * 1), 0])
    assert weights[labels].mean() == pytest.approx(1)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("smoothing", [0, 0.1])
@pytest.mark.parametrize("name", ["paddle", "native"])
def test_weighted_loss_matches_numpy(name, smoothing, is_mixed):
    """The loss of each image, with label smoothing, is multiplied by the weight of its label, or by the mean weight of
    its mixed labels. The sum is divided by the number of images."""
    if name == "native":
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    random = np.random.RandomState(0)
    x, y, class_weights = random.randn(6, 3) * 3, random.randint(0, 3, (6, 1)), np.array([0.4, 2.5, 8.0])
    main = static.Program()
    with static.program_guard(main):
        logits, label = static.data("x", [None, 3]), static.data("y", [None, 1], "int64")
        logits.stop_gradient = False
        targets = {"label": label}
        if is_mixed:
            targets["weights"] = mixing.mix_labels(SingleLabel(3), label, static.data("f", [1]))
        targets["image_weights"] = loss_head.weigh_images(targets, static.data("w", [1, 3]), 3)
        add = getattr(loss_head, f"add_{name}")
        each = add(paddle.scale(logits, 1.0), targets, 3, smoothing, False)["loss"]
        head = add(logits, targets, 3, smoothing, True)
        outputs = [head["loss"], head["top1"], each, *static.gradients(head["loss"], logits)]
    feed = {"x": x.astype("float32"), "y": y, "w": class_weights[None].astype("float32"), "f": np.float32([0.7])}
    loss, top1, each, gradient = static.Executor(paddle.CPUPlace()).run(main, feed, outputs)
    own = np.eye(3)[y[:, 0]]
    mixed = 0.7 * own + 0.3 * own[::-1] if is_mixed else own
    target = (1 - smoothing) * mixed + smoothing / 3
    log_softmax = x - np.log(np.exp(x).sum(1, keepdims=True))
    weights = mixed @ class_weights
    assert loss == pytest.approx((weights * -(target * log_softmax).sum(1)).sum() / 6, rel=1e-5)
    np.testing.assert_allclose(gradient, weights[:, None] * (np.exp(log_softmax) - target) / 6, rtol=1e-4, atol=1e-6)
    assert top1 == np.float32((x.argmax(1) == y[:, 0]).mean())
    np.testing.assert_allclose(each[:, 0], -(mixed * log_softmax).sum(1), rtol=1e-5)  # evaluation uses no class weights


def test_built_program_weights_mixed_images_by_both_labels(parse, monkeypatch):
    made = []
    for name in ("weigh_images", "balanced_weights"):
        function = getattr(loss_head, name)
        monkeypatch.setattr(loss_head, name, lambda *args, f=function: made.append(f(*args)) or made[-1])
    monkeypatch.setattr(mixing, "draw", lambda _, __, h, w: mixing.Mix(np.zeros(h), np.ones(w), 0.7))
    args = frozen(parse("--class-weights", "balanced", "--mixup", "1", "--batch-size", "2", "--num-of-class", "4"))
    main, startup = static.Program(), static.Program()
    program.build(args, main, startup, 3, class_images=np.array(IMAGES))
    (class_weights, weights), labels = made, np.array([[0], [1], [2], [0]])
    assert class_weights.shape == (4,) and class_weights[3] == 0  # the data set has no images of this class
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    compiled = program.compile_prog(args, main)
    compiled.write_scalars()
    feed = {"data": np.zeros((4, 3, 32, 32), np.float32), "label": labels}
    [actual] = exe.run(compiled, feed, [weights])
    np.testing.assert_allclose(actual, 0.7 * class_weights[labels] + 0.3 * class_weights[labels[::-1]], rtol=1e-6)


def test_build_without_class_counts_is_an_error(parse):
    args = parse("--class-weights", "balanced", "--num-of-class", "3")
    with pytest.raises(UsageError, match="--class-weights balanced: requires class_images"):
        program.build(args, static.Program(), static.Program(), 3)


def balanced_loader(parse, root, *flags, state=None):
    args = parse("--image-root", root, "--batch-size", "3", "--balanced-sampling", *flags)
    return dali.build_dataloader(args, Mode.TRAIN, state)


def test_balanced_sampling_draws_classes_equally(parse, imbalanced):
    loader = balanced_loader(parse, imbalanced, "--rand-crop-scale", "1,1")
    assert len(loader) == 8 and loader.class_images.tolist() == IMAGES
    epochs = [np.concatenate(epoch(loader)[1])[:, 0] for _ in range(20)]
    counts = Counter(np.concatenate(epochs).tolist())
    assert sum(counts.values()) == 20 * 24
    # The expected count is 160, with a standard deviation of 10.
    assert all(120 < counts[label] < 200 for label in range(3))
    assert len({tuple(labels) for labels in epochs}) == 20  # each epoch draws different images
    again = balanced_loader(parse, imbalanced, "--rand-crop-scale", "1,1")
    np.testing.assert_array_equal(np.concatenate(epoch(again)[1])[:, 0], epochs[0])


def test_classes_of_an_unsorted_list_are_drawn_equally():
    labels = np.random.RandomState(0).permutation(np.repeat([0, 1, 2], IMAGES))
    data_set = SimpleNamespace(files=list(map(str, labels)), labels=labels)
    paths, drawn = BalancedSampler(data_set, "root", 0, 0, 480, 1)()
    assert [bytes(path).decode() for path in paths] == [f"root/{label}" for label in drawn[:, 0]]
    # The expected count is 160, with a standard deviation of 10.
    assert all(120 < count < 200 for count in np.bincount(drawn[:, 0]))


@pytest.mark.parametrize("done", [0, 2, 4, 5])
def test_balanced_loader_resumes_with_next_batch(parse, imbalanced, shard, done):
    """The ranks draw different images, and each rank resumes with its own next batch."""
    firsts = []
    for rank in range(2):
        shard(rank, 2)
        loader = balanced_loader(parse, imbalanced)
        assert len(loader) == 4
        take(loader, done)
        state = json.loads(json.dumps(loader.state()))
        expected = take(loader, 10)
        resumed = balanced_loader(parse, imbalanced, state=state)
        for (images, labels), (expected_images, expected_labels) in zip(take(resumed, 10), expected, strict=True):
            np.testing.assert_array_equal(labels, expected_labels)
            np.testing.assert_array_equal(images, expected_images)
        firsts.append(np.concatenate([labels for _, labels in expected]).tolist())
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("done", [3, 8])
def test_balanced_loader_that_is_resumed_twice_repeats_no_draws(parse, imbalanced, done):
    """Regression test: the first resume must pass on the number of completed epochs, from which the second resume
    derives the position. `done` batches are read between the resumes, of 8 per epoch."""
    loader = balanced_loader(parse, imbalanced)
    take(loader, 2 * 8 + 2)
    resumed = balanced_loader(parse, imbalanced, state=json.loads(json.dumps(loader.state())))
    take(loader, done)
    take(resumed, done)
    state = resumed.state()
    assert (state["epoch"], state["step"]) == divmod(2 * 8 + 2 + done, 8)
    again = balanced_loader(parse, imbalanced, state=json.loads(json.dumps(state)))
    expected = [labels.tolist() for _, labels in take(loader, 16)]
    assert [labels.tolist() for _, labels in take(again, 16)] == expected


def test_balanced_order_continues_after_epoch_with_changed_flag(parse, imbalanced, capsys):
    loader = balanced_loader(parse, imbalanced)
    epoch(loader)
    expected = [labels.tolist() for _, labels in take(loader, 16)]
    loader = balanced_loader(parse, imbalanced)
    epoch(loader)
    changed = balanced_loader(parse, imbalanced, "--color-jitter", "0.4", state=loader.state())
    assert "but the image order continues" in capsys.readouterr().err
    assert [labels.tolist() for _, labels in take(changed, 16)] == expected


@pytest.mark.parametrize("values", [("true", "false"), ("false", "true")])
def test_order_restarts_after_epoch_if_flag_changes(parse, imbalanced, capsys, values):
    before, after = (["--balanced-sampling", value] for value in values)
    loader = balanced_loader(parse, imbalanced, *before)
    epoch(loader)
    changed = balanced_loader(parse, imbalanced, *after, state=loader.state())
    assert "with the image order of the first epoch" in capsys.readouterr().err
    expected = epoch(balanced_loader(parse, imbalanced, *after))[1]
    np.testing.assert_array_equal(epoch(changed)[1], expected)


@pytest.mark.parametrize("flag", [["--class-weights", "balanced"], ["--balanced-sampling"]])
@pytest.mark.parametrize("data_format", ["tfrecord", "synthetic"])
def test_balancing_without_labels_is_an_error(parse, converted, flag, data_format):
    root = converted.get(data_format, ".")
    args = parse("--image-root", root, "--data-format", data_format, "--num-of-class", "3", *flag)
    with pytest.raises(UsageError, match=f"{' '.join(flag)}: requires class folders or file lists"):
        dali.build_dataloader(args, Mode.TRAIN)


def test_undecodable_image_is_reported_with_balanced_sampling(parse, imbalanced, tmp_path):
    for label in range(3):
        (tmp_path / "train" / f"class{label}").mkdir(parents=True)
        for i in range(4):
            (tmp_path / "train" / f"class{label}" / f"{i}.png").write_bytes(
                (imbalanced / "val" / f"class{label}" / "00.png").read_bytes()
            )
    bad = tmp_path / "train/class1/2.png"
    bad.write_bytes(bad.read_bytes()[:50])
    with pytest.raises(UsageError, match=f"{bad}: cannot be decoded"):
        for _ in range(20):
            epoch(balanced_loader(parse, tmp_path))


def test_balanced_run_resumes_exactly_within_epoch(losses_with_a_resume, imbalanced, tmp_path):
    flags = ["--class-weights", "balanced", "--balanced-sampling", "--mixup", "0.2", "--epochs", "2"]
    flags += ["--print-interval", "1", "--batch-size", "4"]
    expected, actual = losses_with_a_resume("1_2", *flags, image_root=imbalanced)
    assert actual == expected
    parameters = read_report(tmp_path / "report.json")[0]["data"]
    assert (parameters["class_weights"], parameters["balanced_sampling"]) == ("balanced", True)


@pytest.mark.soak
def test_two_balanced_processes_resume_exactly_within_epoch(launch, tmp_path):
    flags = ["--class-weights", "balanced", "--balanced-sampling", "--epochs", "2", "--batch-size", "5"]
    flags += ["--print-interval", "1", "--save-interval-steps", "2", "--keep-checkpoints", "9"]
    report, _ = launch(2, *flags)
    expected = losses(report)
    for folder in (tmp_path / "output/Tiny").iterdir():
        if folder.is_symlink() or folder.name in ("latest", "best"):
            folder.unlink()
        elif folder.is_dir() and folder.name != "0_2":
            shutil.rmtree(folder)
    report, parameters = launch(2, *flags, "--overwrite", "false", "--resume")
    resumed = losses(report)
    assert (0, 2) in resumed and (0, 1) not in resumed
    assert resumed == {key: expected[key] for key in resumed}
    assert all((parameters[0][name] == parameters[1][name]).all() for name in parameters[0])
