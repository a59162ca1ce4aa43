"""Frozen layers (--freeze, --unfreeze-at) and learning rates by depth (--lr-decay-by-layer, --classifier-lr-factor)."""

import pickle
import shutil

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, assert_one_error, assert_sparse, frozen
from helpers import random_batches, variable
from paddle_resnet import models, phases, program
from paddle_resnet.models import build_model, parts
from paddle_resnet.native import build as native
from paddle_resnet.passes import all_reduces

KERNELS = [["--kernels", "paddle"], ["--kernels", "native", *NHWC]]


def model_of(arch, layout="NCHW"):
    with static.program_guard(static.Program(), static.Program()), paddle.utils.unique_name.guard():
        return build_model(arch, 3, 3, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("ResNet50", "stem stages.0 stages.1 stages.2 stages.3 classifier"),
        ("XResNet50", "stem stages.0 stages.1 stages.2 stages.3 classifier"),
        ("MobileNetV2", "stem blocks.0 blocks.16 head classifier"),
        ("MobileNetV3_Small", "stem blocks.0 blocks.10 expand head classifier"),
        ("GhostNet", "stem blocks.0 blocks.15 expand head classifier"),
        ("EfficientNet_Lite0", "stem blocks.0 blocks.15 head classifier"),
        ("PPLCNet_x1_0", "stem blocks.0 blocks.12 head classifier"),
        ("PPHGNetV2_B0", "stem blocks.0 blocks.4 head lab classifier"),
    ],
)
def test_every_network_has_layers_to_freeze(arch, names):
    model = model_of(arch)
    total = len([p for p in model.parameters() if p.trainable])
    factors = parts.rate_factors(model, 0.5, 3)
    for name in names.split()[:-1]:
        assert parts.freeze(model, [name])
    assert parts.freeze(model, [parts.ALL_BUT_CLASSIFIER]) or arch.endswith("ResNet50")
    assert [p.name for p in model.parameters() if p.trainable] == [p.name for p in model.last.parameters()]
    assert len(factors) == total
    depths = list(dict.fromkeys(factors.values()))
    assert depths[-1] == 3 and depths[:-1] == sorted(depths[:-1])
    assert depths[-2] == 0.5


def test_classifier_is_the_last_part_wherever_it_is_declared():
    factors = parts.rate_factors(model_of("Affine"), 0.5, 3)
    depths = {"linear": 3, "conv2d_0": 0.125, "conv2d_1": 0.25, "conv2d_2": 0.5, "batch_norm_0": 0.25}
    assert {part: factors[f"{part}_0.w_0" if part == "linear" else f"{part}.w_0"] for part in depths} == depths


def test_stage_selects_its_blocks_and_not_those_of_stage_ten():
    layers = ["stages.1_0", "stages.1_0.conv", "stages.1_1", "stages.10_0", "stages", "conv", "conv_2"]
    chosen = {
        name: [p for p in layers if parts._matches(layers, name, p)] for name in ("stages.1", "stages.1_0", "conv")
    }
    assert chosen == {
        "stages.1": ["stages.1_0", "stages.1_0.conv", "stages.1_1"],
        "stages.1_0": ["stages.1_0", "stages.1_0.conv"],
        "conv": ["conv"],
    }


def built(args, batches):
    """Train on `batches` and return (main program, compiled program, {name: value} before training, {name: value} after
    it)."""
    if args.kernels == "native":
        native.register()
    args = frozen(args)
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    fetchs, lr_scheduler, _, _ = program.build(args, main, startup, 10)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    compiled = program.compile_prog(args, main)
    names = [v.name for v in main.list_vars() if v.persistable and v.name not in ("feed", "fetch")]
    before = {name: variable(name) for name in names}
    for images, labels in batches:
        compiled.write_scalars()
        exe.run(compiled, feed={"data": images, "label": labels}, fetch_list=[])
        lr_scheduler.step()
    return main, compiled, before, {name: variable(name) for name in names}


@pytest.mark.parametrize("kernels", KERNELS, ids=["paddle", "native"])
@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW"])
def test_frozen_layers_do_not_change_and_compute_no_gradients(parse, kernels, optimizer):
    flags = ["--freeze", "stem,stages.0", "--weight-decay", "0.1", "--bn-weight-decay", "--ema", "0.9"]
    args = parse(*kernels, "--optimizer", optimizer, *flags)
    shape = (32, 32, 4) if "native" in kernels else (3, 32, 32)
    main, compiled, before, after = built(args, random_batches(3, shape))
    # Convolutions 0 to 4 belong to the stem and the first block.
    layers = [f"{kind}_{i}." for kind in ("conv2d", "batch_norm2d", "batch_norm") for i in range(5)]
    is_frozen = {name: name.startswith(tuple(layers)) for name in before}
    assert sum(is_frozen.values()) > 5 * 5
    for name, value in before.items():
        if is_frozen[name]:
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    for kind in ("conv2d", "batch_norm"):
        changed = [name for name in before if not is_frozen[name] and name.startswith(kind) and ".w_" in name]
        assert changed and all((after[name] != before[name]).any() for name in changed)
    gradients = [name for op in compiled._program.global_block().ops for name in op.output_arg_names]
    gradients = [name for name in gradients if "@GRAD" in name]
    assert gradients and not [name for name in gradients if name.startswith(tuple(layers))]
    statistics = all_reduces.own_statistics(main)
    assert statistics and not [name for name in statistics if is_frozen[name]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "names"), [("Tiny", "stages.0"), ("TinyMobile", "blocks.1"), ("TinyMobile", "all-but-classifier")]
)
def test_custom_kernels_match_paddle_with_frozen_layers(parse, arch, names):
    """Gradients flow through frozen layers if an earlier layer is trained."""
    changes = []
    for kernels in ("paddle", "native"):
        flags = ["--model-arch-name", arch, *NHWC, "--kernels", kernels, "--freeze", names, "--lr", "0.01"]
        with static.scope_guard(static.Scope()):
            main, compiled, before, after = built(parse(*flags), random_batches(3, (32, 32, 4)))
            changes.append({p.name: after[p.name] - before[p.name] for p in main.all_parameters()})
    assert not [op.type for op in compiled._program.global_block().ops if op.type.startswith("depthwise")]
    for name, change in changes[0].items():
        difference = np.linalg.norm(changes[1][name] - change)
        # The two kinds of kernels use different denominators for the running variances, and the gradients of some
        # shifts consist of rounding errors.
        assert difference <= 0.02 * np.linalg.norm(change) + 1e-6, name


def test_frozen_batch_norm_uses_running_statistics(parse):
    """Frozen BN layers are affine maps, so the gradient that the first layer receives through them for an image does
    not depend on the other images of the batch."""
    args = parse("--freeze", "stages.0,stages.1,classifier", "--lr", "0.1", "--momentum", "0", "--weight-decay", "0")
    [(images, labels)] = random_batches(1)
    changes = []
    for batch in ([0, 0], [1, 1], [0, 1]):
        with static.scope_guard(static.Scope()):
            _, _, before, after = built(args.copy(model_arch_name="Affine"), [(images[batch], labels[batch])])
            changes.append(after["conv2d_0.w_0"] - before["conv2d_0.w_0"])
    np.testing.assert_allclose((changes[0] + changes[1]) / 2, changes[2], rtol=1e-3, atol=1e-6)


@pytest.fixture(autouse=True)
def affine(monkeypatch):
    """Register a network whose first layer has no batch normalization, and which declares the classifier first."""

    class Affine(paddle.nn.Layer):
        def __init__(self, num_classes, in_channels, data_format):
            super().__init__()
            self.classifier = self.last = paddle.nn.Linear(8, num_classes)
            self.first = paddle.nn.Conv2D(in_channels, 8, 3, data_format=data_format)
            self.stages = paddle.nn.Sequential(*[models.layers.ConvBN(8, 8, 3, 2, data_format) for _ in range(2)])
            self.pool = paddle.nn.AdaptiveAvgPool2D(1, data_format=data_format)

        def forward(self, x):
            return self.last(paddle.flatten(self.pool(self.stages(self.first(x))), 1))

    monkeypatch.setitem(models.MODELS, "Affine", Affine)


@pytest.mark.parametrize(
    ("kernels", "optimizer"),
    [
        *((KERNELS[0], optimizer) for optimizer in ("Momentum", "AdamW", "LAMB")),
        *((KERNELS[1], optimizer) for optimizer in ("Nesterov", "AdamW", "LAMB")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_learning_rate_depends_on_depth(parse, kernels, optimizer):
    """The first update of each parameter is multiplied by the learning-rate factor of its layer group."""
    shape = (32, 32, 4) if "native" in kernels else (3, 32, 32)
    decay, last = 1 if optimizer == "LAMB" else 0.5, 1 if optimizer == "AdamW" else 4
    changes = []
    for flags in ([], ["--lr-decay-by-layer", decay, "--classifier-lr-factor", last]):
        with static.scope_guard(static.Scope()):
            args = parse(*kernels, "--optimizer", optimizer, "--lr", "0.25", *flags)
            main, compiled, before, after = built(args, random_batches(1, shape))
            trained = [p.name for p in main.all_parameters() if p.trainable]
            changes.append({name: after[name] - before[name] for name in trained})
    if "native" in kernels:  # layer groups: stem, stages.0_0, stages.1_0, classifier
        updates = [op for op in compiled._program.global_block().ops if "Rate" in op.input_names]
        assert len(updates) == (2 if decay == 1 else 4)
    for name, change in changes[0].items():
        number = int(name.split("_")[1 if name.startswith(("conv2d", "linear")) else 2].partition(".")[0])
        factor = last if name.startswith("linear") else decay ** (3 if number == 0 else 2 if number <= 4 else 1)
        np.testing.assert_allclose(changes[1][name], factor * change, rtol=2e-3, atol=2e-6, err_msg=name)


UNFREEZE = ["--freeze", "all-but-classifier", "--unfreeze-at", "1", "--ema", "0.9", "--lr-decay-by-layer", "0.5"]
UNFREEZE += ["--lookahead", "2,0.5"]


@pytest.mark.slow
@pytest.mark.parametrize("newest", ["0_1", "0", pytest.param("1_1", marks=pytest.mark.soak)])
def test_resume_in_either_phase_is_bit_identical(one_block, losses_with_a_resume, fake, newest):
    """Steps are captured. The first phase ends after the first epoch, with the checkpoint 0."""
    common = ["--kernels", "native", *NHWC, "--epochs", "3", "--print-interval", "1", "--cuda-graph", "true"]
    expected, actual = losses_with_a_resume(newest, *common, *UNFREEZE)
    # One graph per phase, and one for the evaluation. The resumed run captures only the phase that has enough steps.
    assert len(fake.made) == 3 + 2
    assert actual == expected


@pytest.mark.parametrize(
    "kernels", [pytest.param(KERNELS[0], marks=pytest.mark.slow), KERNELS[1]], ids=["paddle", "native"]
)
def test_gradients_of_unfrozen_layers_are_accumulated(one_block, losses_with_a_resume, kernels):
    """Regression test: the sums of the gradients of frozen layers were not initialized, so the run failed at
    --unfreeze-at. Each epoch has one step of two batches. The second run resumes with the last epoch."""
    flags = [*kernels, "--epochs", "3", "--accumulate-steps", "2", "--freeze", "stem", "--unfreeze-at", "1"]
    flags += ["--lookahead", "2,0.5", "--ema", "0.9", "--print-interval", "1"]
    expected, actual = losses_with_a_resume("1", *flags)
    assert np.isfinite([expected[epoch, "train"] for epoch in range(3)]).all()
    assert actual == expected


def test_startup_program_of_later_stage_initializes_only_new_variables():
    """The parameters, which all stages share, keep their values."""
    exe, startups = static.Executor(paddle.CPUPlace()), []
    for names in (["shared"], ["shared", "new"], ["shared"]):
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            for name in names:
                attribute = paddle.ParamAttr(name, paddle.nn.initializer.Normal())
                static.create_parameter([3], "float32", attr=attribute)
        startups.append(startup)
    paddle.seed(0)
    exe.run(startups[0])
    before = variable("shared")
    paddle.seed(0)
    phases._initialize(exe, *startups)
    np.testing.assert_array_equal(variable("shared"), before)
    assert variable("new").any()


def test_frozen_phase_keeps_pretrained_weights(one_block, run_train, checkpoint, tmp_path, capsys):
    flags = ["--from-pretrained-params", checkpoint, "--epochs", "2", *UNFREEZE]
    assert run_train(*flags)[0] == 0
    output = capsys.readouterr()
    assert output.out.count("--freeze all-but-classifier: 9 of 11 parameters are frozen") == 1
    assert "epoch 1: training all layers from now on (--unfreeze-at)" in output.out
    assert "random initial weights" not in output.err
    start, *epochs = [
        pickle.loads((folder / "tiny.pdparams").read_bytes())
        for folder in (checkpoint, tmp_path / "output/Tiny/0", tmp_path / "output/Tiny/1")
    ]
    for name, value in start.items():
        is_classifier = name.startswith("linear")
        assert (epochs[0][name] == value).all() != is_classifier, name
        assert (epochs[1][name] != value).any(), name
    # A resumed run may change --freeze.
    shutil.rmtree(tmp_path / "output/Tiny/1")
    assert run_train("--resume", "--unfreeze-at", "None", "--freeze", "stem", "--epochs", "2")[0] == 0
    assert "--freeze stem (was all-but-classifier)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["--kernels", "native", *NHWC], marks=pytest.mark.slow)], ids=["NCHW", "NHWC"]
)
def test_frozen_layers_are_pruned_and_remain_sparse(one_block, run_train, checkpoint, tmp_path, layout):
    """Layers that are frozen at first have masks, so that they remain sparse after --unfreeze-at and in later runs."""

    def train(name, *flags):
        assert run_train(*layout, *flags, "--output-dir", tmp_path / name)[0] == 0
        return pickle.loads((tmp_path / name / "Tiny/latest/tiny.pdparams").read_bytes())

    def assert_frozen(params, start):
        assert_sparse(params)
        convolutions = [name for name in start if name.startswith("conv2d") and name.endswith(".w_0")]
        for name in convolutions:
            np.testing.assert_array_equal(params[name], start[name] * params[f"{name}.asp_mask"])
        return {name: params[f"{name}.asp_mask"] for name in convolutions}

    if layout:  # four channels
        dense, start = train("dense"), tmp_path / "dense/Tiny/latest"
    else:
        dense, start = pickle.loads((checkpoint / "tiny.pdparams").read_bytes()), checkpoint
    sparse = ["--asp", "--prune-model", "--from-pretrained-params", start]
    frozen = ["--freeze", "all-but-classifier"]
    masks = assert_frozen(train("frozen", *sparse, *frozen), dense)
    unfrozen = train("frozen", *sparse, *frozen, "--unfreeze-at", "1", "--epochs", "2", "--resume")
    assert_sparse(unfrozen)
    assert any((unfrozen[name] != dense[name] * mask).any() for name, mask in masks.items())
    assert all((unfrozen[f"{name}.asp_mask"] == mask).all() for name, mask in masks.items())
    # Fine-tune the sparse weights.
    start = ["--asp", "--prune-model", "--from-pretrained-params", tmp_path / "frozen/Tiny/latest"]
    assert_frozen(train("tuned", *start, "--freeze", "stem,stages"), unfrozen)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--freeze", "body"], "--freeze body: body is not a layer of the network; use all-but-classifier, or layers "
         "from stem, stages.0, stages.1, classifier"),
        (["--freeze", "stem,stages,classifier"], "--freeze stem,stages,classifier: freezes all layers; remove at least "
         "one name"),
        (["--freeze", "stem,all-but-classifier"], "is not a list of layers; use layers such as stem,stages.0, or"),
        (["--unfreeze-at", "1"], "--unfreeze-at 1: requires --freeze"),
        (["--freeze", "stem", "--unfreeze-at", "1"], "--unfreeze-at 1: must be below --epochs 1; use an earlier epoch"),
        (["--lr-decay-by-layer", "0"], "0 is not positive; use a number above 0 and up to 1"),
    ],
)  # fmt: skip
def test_invalid_flags_exit_with_code_2(run_train, capsys, flags, message):
    assert run_train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, [message])


@pytest.mark.soak
@pytest.mark.parametrize("accumulate_steps", ["1", "2"])
def test_two_processes_train_the_same_network_with_frozen_layers(launch, accumulate_steps):
    """The processes keep the BN statistics of frozen layers and average those of the other layers."""
    flags = ["--freeze", "stem", "--unfreeze-at", "1", "--epochs", "2", "--batch-size", "4"]
    flags += ["--lr-decay-by-layer", "0.5", "--accumulate-steps", accumulate_steps]
    _, parameters = launch(2, *flags)
    assert parameters[0].files
    for name in parameters[0].files:
        np.testing.assert_array_equal(parameters[0][name], parameters[1][name], err_msg=name)


@pytest.mark.slow
def test_run_too_short_for_bn_momentum_warns_with_a_value_that_fits(one_block, run_train, capsys):
    """Regression test: the validation top1 of a short run stayed at chance, although it trained well."""

    def warnings(*flags):
        capsys.readouterr()
        assert run_train(*flags)[0] == 0
        return [line for line in capsys.readouterr().err.splitlines() if "--bn-momentum" in line]

    [warning] = warnings("--accumulate-steps", "3")
    assert warning == (
        "warning: --bn-momentum 0.9 (value of the network): too high for 3 training batches, because the initial BN "
        "statistics keep a weight of 73% until the end of the run; use --bn-momentum 0.36"
    )
    assert not warnings("--resume", "--epochs", "2")
    assert not warnings("--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "0")
    frozen_layers = ["--freeze", "all-but-classifier", "--overwrite"]
    assert not warnings(*frozen_layers)  # frozen BN keeps its statistics
    assert warnings(*frozen_layers, "--unfreeze-at", "1", "--epochs", "2")


@pytest.mark.parametrize(
    ("batches", "momentum", "value"),
    [
        (3, 0.36, None),
        (3, 0.37, "0.36"),
        (28, 0.9, "0.89"),
        (29, 0.9, None),
        (298, 0.99, "0.9"),
        (299, 0.99, None),
        (1, 0.9, "0.05"),
        (100, 0, None),
        (3, "0.9 --freeze all-but-classifier", None),
    ],
)
def test_bn_momentum_of_run_with_few_batches(parse, capsys, batches, momentum, value):
    args = parse("--bn-momentum", *str(momentum).split(), "--epochs", batches)
    main = static.Program()
    _, schedule, *_ = program.build(frozen(args), main, static.Program(), 1)
    phases._warn_of_bn_momentum(args.part(phases.BnOptions), phases.Work(args, None, main, None, schedule))
    err = capsys.readouterr().err
    if value is None:
        assert err == ""
    else:
        assert err.startswith(f"warning: --bn-momentum {momentum}: too high for ")
        assert err.endswith(f"use --bn-momentum {value}\n")


def test_bn_momentum_is_compared_with_all_batches_of_a_new_run(parse, capsys):
    """With 2 batches per step, 15 steps use 30 batches."""
    for accumulate, epochs, done, warns in ((2, 15, 0, False), (1, 15, 0, True), (1, 15, 1, False)):
        args = parse("--bn-momentum", "0.9", "--epochs", epochs, "--accumulate-steps", accumulate)
        main = static.Program()
        _, schedule, *_ = program.build(frozen(args), main, static.Program(), accumulate)
        schedule.step(done)  # a run that continues was checked when it started
        phases._warn_of_bn_momentum(args.part(phases.BnOptions), phases.Work(args, None, main, None, schedule))
        assert ("--bn-momentum 0.9: too high for" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_bn_momentum_weighs_previous_statistics(one_block, parse, kernels):
    layout, shape = (NHWC, (32, 32, 4)) if kernels == "native" else ([], (3, 32, 32))
    means = {}
    for momentum in ("0", "0.75"):
        with static.scope_guard(static.Scope()):
            args = parse("--kernels", kernels, *layout, "--bn-momentum", momentum)
            *_, state = built(args, random_batches(1, shape))
            means[momentum] = state["batch_norm_0.w_1"]  # the initial value is 0
    np.testing.assert_allclose(means["0.75"], 0.25 * means["0"], rtol=1e-5)
    assert means["0"].any()
