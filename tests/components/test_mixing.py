"""Mixup, CutMix, dropout and drop path in a training program."""

from functools import partial

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, assert_one_error, frozen
from helpers import random_batches
from paddle_resnet import program
from paddle_resnet.components import mixing
from paddle_resnet.job import processes
from paddle_resnet.models import layers
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.passes import fusion
from paddle_resnet.step import facts, random_numbers, scalars

KERNELS = [["--kernels", "paddle"], [*NHWC, "--kernels", "native"]]


def generator(step=0):
    return random_numbers.generator(0, step, "mix", 0)


def test_mixup_draws_one_ratio_for_all_pixels():
    ratios = []
    for step in range(2000):
        rows, columns, ratio = mixing.draw(generator(step), {"mixup": 0.4}, 5, 7)
        assert (rows.shape, columns.shape) == ((5,), (7,))
        np.testing.assert_allclose(np.outer(rows, columns), np.full((5, 7), 1 - ratio), rtol=1e-12)
        ratios.append(ratio)
    # The Beta(a, a) distribution has mean 1/2 and variance 1 / (4 (2 a + 1)).
    assert np.mean(ratios) == pytest.approx(0.5, abs=0.03)
    assert np.var(ratios) == pytest.approx(1 / (4 * 1.8), rel=0.06)


def test_cutmix_draws_box_and_counts_pixels():
    """In arXiv:1905.04899, appendix A, the box has a random center, and the ratio determines its area. The box is then
    clipped at the edges of the image."""
    ratios = []
    for step in range(2000):
        rows, columns, ratio = mixing.draw(generator(step), {"cutmix": 1}, 200, 300)
        box = np.outer(rows, columns)
        assert {*rows, *columns} <= {0, 1}
        assert ratio == pytest.approx(1 - box.mean())
        for side in (rows, columns):  # the box covers consecutive rows and columns
            assert np.abs(np.diff(np.pad(side, 1))).sum() in (0, 2)
            # A box that is not clipped has equal numbers of pixels on both sides of its center.
            if side[0] == side[-1] == 0:
                assert side.sum() % 2 == 0
        ratios.append(ratio)
    # After clipping, a box of height r * H and width r * W with a uniformly distributed center covers on average the
    # fraction (r - r^2 / 4)^2 of the image, where r^2 = 1 - ratio.
    areas = [(r - r**2 / 4) ** 2 for r in np.sqrt(np.linspace(0, 1, 10001))]
    assert 1 - np.mean(ratios) == pytest.approx(np.mean(areas), abs=0.03)


def test_mixup_and_cutmix_alternate_by_batch():
    """Each kind has its own parameter: with 1e6, all boxes have half the area of the image before they are clipped."""
    mixes = [mixing.draw(generator(step), {"mixup": 0.4, "cutmix": 1e6}, 8, 8) for step in range(400)]
    is_box = [set(np.unique(np.outer(mix.rows, mix.columns))) <= {0, 1} for mix in mixes]
    assert np.mean(is_box) == pytest.approx(0.5, abs=0.1)
    boxes, others = ([mix.fraction for mix, box in zip(mixes, is_box, strict=True) if box == kind] for kind in (1, 0))
    assert min(boxes) == 0.75  # the sides are rounded down to 4 pixels
    assert np.var(others) == pytest.approx(1 / (4 * 1.8), rel=0.2)


def losses_of(args, feeds):
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.scope_guard(static.Scope()):
        fetchs, lr_scheduler, _, _ = program.build(frozen(args), main, startup, 10)
        exe = static.Executor(paddle.CPUPlace())
        exe.run(startup)
        compiled = program.compile_prog(frozen(args), main)
        result = []
        for images, labels in feeds:
            compiled.write_scalars()
            feed = {"data": images, "label": labels}
            result.append(exe.run(compiled, feed, [fetchs["loss"][0]])[0].item())
            lr_scheduler.step()
        return result


@pytest.mark.parametrize(
    ("flag", "kernels"),
    [("--mixup", KERNELS[0]), *(("--cutmix", kernels) for kernels in KERNELS)],
    ids=["mixup-paddle", "cutmix-paddle", "cutmix-native"],
)
def test_loss_of_mixed_batch_matches_formula(parse, monkeypatch, kernels, flag):
    """The reference computes the loss of each mixed batch twice, with the labels of the images and with the labels of
    their partners, and combines the two losses. The learning rate is 0, so all losses use the same parameters. The
    process has rank 1, and the random numbers depend on the rank."""
    if "native" in kernels:
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    monkeypatch.setattr(processes, "rank", lambda: 1)
    channels = 4 if "native" in kernels else 3
    flags = [*kernels, "--lr", "0", "--seed", "5", "--label-smoothing", "0.1", "--image-shape", f"{channels},48,32"]
    shape = (48, 32, 4) if "native" in kernels else (3, 48, 32)
    batches = random_batches(3, shape)
    result = losses_of(parse(*flags, flag, "0.5"), batches)
    mixed, ratios = [], []
    for step, (images, labels) in enumerate(batches):
        random = random_numbers.generator(5, step, "mix", 1)
        mix = mixing.draw(random, {flag.removeprefix("--"): 0.5}, 48, 32)
        weights = np.outer(mix.rows, mix.columns)[..., None] if "native" in kernels else np.outer(mix.rows, mix.columns)
        images = (1 - weights) * images + weights * images[::-1]
        mixed += [(images.astype("float32"), labels), (images.astype("float32"), labels[::-1].copy())]
        ratios.append(mix.fraction)
    parts = losses_of(parse(*flags), mixed)
    expected = [ratio * parts[2 * i] + (1 - ratio) * parts[2 * i + 1] for i, ratio in enumerate(ratios)]
    assert result == pytest.approx(expected, rel=1e-5)
    assert result != pytest.approx(losses_of(parse(*flags), batches), rel=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "rate"), [pytest.param("--dropout", "0.5", marks=pytest.mark.soak), ("--drop-path", "0.9")]
)
@pytest.mark.parametrize("kernels", KERNELS, ids=["paddle", "native"])
def test_dropped_values_differ_in_each_step_and_are_deterministic(parse, monkeypatch, kernels, flag, rate):
    if "native" in kernels:
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    [batch] = random_batches(1, (32, 32, 4) if "native" in kernels else (3, 32, 32))
    flags = [*kernels, "--lr", "0"]
    losses = losses_of(parse(*flags, flag, rate), [batch] * 3)
    assert len(set(losses)) == 3
    assert losses_of(parse(*flags, flag, rate), [batch] * 3) == losses
    assert losses_of(parse(*flags, flag, rate, "--seed", "9"), [batch] * 3) != losses
    assert len(set(losses_of(parse(*flags), [batch] * 2))) == 1
    monkeypatch.setattr(processes, "rank", lambda: 1)
    assert losses_of(parse(*flags, flag, rate), [batch] * 3) != losses


@pytest.mark.parametrize("kernels", KERNELS, ids=["paddle", "native"])
def test_drop_path_omits_or_scales_the_branch_of_each_image(parse, kernels):
    """Drop path multiplies the gradient by the same factors as the output."""
    if "native" in kernels:
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    layer = layers.DropPath()
    layer.rate = 0.25
    main = static.Program()
    with static.program_guard(main):
        x = static.data("x", [None, 2, 3, 4])
        x.stop_gradient = False
        layer.seed = static.data("seed", [1], "int32")
        y = layer(x)
        static.append_backward(paddle.mean(y * y), parameter_list=[x])
    assert main.global_block().ops[-1].output("Y@GRAD") == []  # the factors have no gradient
    if "native" in kernels:
        fusion.fuse(main)
        assert "dropout" not in [op.type for op in main.global_block().ops]
    feed = {"x": np.random.RandomState(0).uniform(1, 2, (4000, 2, 3, 4)).astype("float32"), "seed": np.int32([7])}
    y, gradient = static.Executor(paddle.CPUPlace()).run(main, feed, [y, "x@GRAD"])
    factors = y / feed["x"]
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :1, :1, :1], y.shape), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * y * factors / y.size, rtol=1e-5)
    kept = factors[:, 0, 0, 0] > 0
    np.testing.assert_allclose(factors[kept], 1 / 0.75, rtol=1e-6)
    assert kept.mean() == pytest.approx(0.75, abs=0.03)


def test_drop_path_rate_increases_with_depth_and_is_zero_in_evaluation(parse, four_stages):
    main = static.Program()
    program.build(frozen(parse("--drop-path", "0.2")), main, static.Program(), 10)
    rates = [op.attr("dropout_prob") for op in main.global_block().ops if op.type == "dropout"]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2])
    seeds = [op.input("Seed")[0] for op in main.global_block().ops if op.type == "dropout"]
    assert len({*seeds}) == 4 and {*seeds} <= facts.of(main).inputs.keys()
    main = static.Program()
    program.build(frozen(parse("--drop-path", "0.2")), main, static.Program(), 0, is_train=False)
    assert "dropout" not in [op.type for op in main.global_block().ops]


def test_drop_path_drops_branches_that_end_with_self_attention(parse, register):
    register("Tiny", partial(ResNet, BottleneckBlock, (2,), width=8, self_attention=True))
    main = static.Program()
    program.build(frozen(parse("--drop-path", "0.2")), main, static.Program(), 10)
    assert [op.attr("dropout_prob") for op in main.global_block().ops if op.type == "dropout"] == pytest.approx(
        [0.1, 0.2]
    )


def test_random_numbers_depend_on_seed_step_layer_and_rank():
    keys = [(0, 0, "mix", 0), (1, 0, "mix", 0), (0, 1, "mix", 0), (0, 0, "dropout", 0), (0, 0, "mix", 1)]
    numbers = [tuple(random_numbers.generator(*key).integers(0, 2**62, 4)) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert numbers == [tuple(random_numbers.generator(*key).integers(0, 2**62, 4)) for key in keys]
    # The random numbers of consecutive steps and ranks do not overlap, even in long sequences.
    neighbors = [(0, step, "mix", rank) for step in range(3) for rank in range(2)]
    drawn = [random_numbers.generator(*key).integers(0, 2**62, 1000) for key in neighbors]
    assert len(np.unique(drawn)) == 1000 * len(neighbors)


def test_only_seeds_of_paddle_dropout_are_on_the_host():
    with static.program_guard(main := static.Program(), static.Program()):
        seed = scalars.declare("seed", lambda: 1, dtype="int32")
        layers.dropout(static.data("x", [2]), 0.5, seed)
        other = scalars.declare("other", lambda: 1)
    places = scalars.Writer(main, "device")._places
    assert isinstance(places.pop(seed.name), paddle.CPUPlace) and places == {other.name: "device"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mixup", "0.2", "--batch-size", "1"], "--mixup: requires at least two images per batch"),
        (["--mixup", "1.7e308"], "--mixup: 1.7e308"),
        (["--cutmix", "1000001"], "--cutmix: 1000001 is too large; use a number up to 1e6"),
        (["--drop-path", "1"], "--drop-path: 1 is not below 1; use a number of at least 0 and below 1"),
        (["--dropout", "1"], "--dropout: 1 is not below 1; use a number of at least 0 and below 1"),
        (["--cutmix", "-1"], "--cutmix: -1 is negative"),
    ],
)
def test_invalid_values_are_rejected(run_train, capsys, flags, message):
    assert run_train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, [message])


def test_drop_path_without_residual_blocks_is_an_error(run_train, register, capsys):
    register("Tiny", partial(ResNet, BottleneckBlock, (), width=8))
    assert run_train("--drop-path", "0.1")[0] == 2
    expected = ["--drop-path 0.1: --model-arch-name Tiny has no", "remove --drop-path"]
    assert_one_error(capsys.readouterr().err, expected)
