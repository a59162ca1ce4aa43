"""Every optimizer in a small program: weight decay groups, Paddle's operators compared with the custom operator,
skipped steps, and resuming. tests/native/test_native.py tests the formulas."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn, static

import few_blocks
from conftest import NHWC, assert_sparse, frozen
from helpers import build, random_batches
from paddle_resnet import config, graph, models, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.components import clipping, sparsity
from paddle_resnet.native import build as native
from paddle_resnet.optimizers import schedules, table
from paddle_resnet.settings import durations, validation
from paddle_resnet.settings.declarations import FLAGS
from paddle_resnet.step import scalars
from paddle_resnet.step.build import add_update
from paddle_resnet.step.builder import StepBuilder
from paddle_resnet.utils.errors import UsageError

PLACE = paddle.CPUPlace()


class Run:
    """A network of two linear layers with batch normalization between them. Each instance has its own scope."""

    def __init__(self, *flags, fuse=False, scale=False, regularizer=None):
        args = config.parse_args(["--weight-decay", "0.1", "--lr", "0.1", "--warmup-epochs", "0", *flags])
        args.kernels, args.use_dynamic_loss_scaling = "native" if fuse else "paddle", scale
        self._scope = static.Scope()
        self.main, startup = static.Program(), static.Program()
        with (
            static.scope_guard(self._scope),
            static.program_guard(self.main, startup),
            paddle.utils.unique_name.guard(),
        ):
            paddle.seed(0)
            x = nn.Linear(8, 6, bias_attr=False)(static.data("x", [16, 8])).reshape([16, 6, 1, 1])
            x = F.relu(nn.BatchNorm2D(6)(x)).reshape([16, 6])
            last = {
                f"{kind}_attr": paddle.ParamAttr(name=f"last.{kind}", regularizer=regularizer)
                for kind in ("weight", "bias")
            }
            self._loss = paddle.mean(nn.Linear(6, 3, **last)(x) ** 2)
            self._rate = schedules.build_lr_scheduler(
                args.part(schedules.Options), durations.uniform(args.accumulate_steps, 10)
            )
            step = StepBuilder(args.part, self.main, startup, self._rate)
            optimizer = table.build_optimizer(args, self._rate)
            if scale:  # dynamic loss scaling in float32
                types = {op.type for op in self.main.global_block().ops}
                lists = static.amp.AutoMixedPrecisionLists(custom_black_list=types)
                optimizer = static.amp.decorate(optimizer, lists, 1024.0, decr_every_n_nan_or_inf=1)
            optimizer.minimize(self._loss, startup)
            add_update(step)
            self.paddle_updates = graph.updates(self.main)
            self.devices = {op.attr("op_device") for op in startup.global_block().ops}
            self._exe = static.Executor(PLACE)
            self._exe.run(startup)
            self._write_scalars = scalars.Writer(self.main, PLACE)

    def step(self, i, overflows=False):
        x = np.random.RandomState(i).randn(16, 8).astype("float32")
        x[0] = np.inf if overflows else x[0]
        with static.scope_guard(self._scope):
            self._write_scalars()
            self._exe.run(self.main, {"x": x}, [self._loss])
        self._rate.step()

    def state(self):
        with static.scope_guard(self._scope):
            parameters, others = variables.snapshot(self.main)
        return parameters | others

    def restore(self, state, steps):
        with static.scope_guard(self._scope):
            for name, value in state.items():
                variables.set_variable(name, value, PLACE)
        for _ in range(steps):
            self._rate.step()


@pytest.fixture(scope="module", autouse=True)
def operators():
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()


def test_flags_follow_from_table():
    users = {flag: uses.used_by[1] for flag, uses in FLAGS.items() if uses.used_by and uses.used_by[0] == "optimizer"}
    for name, rule in table.OPTIMIZERS.items():
        assert {flag for flag in users if name in users[flag]} == set(rule.flags)
    adaptive = {name: rule.rates for name, rule in table.OPTIMIZERS.items() if rule.is_adaptive}
    assert adaptive == {"AdamW": (5e-4, 1e-3), "RAdam": (5e-4, 1e-3), "LAMB": (5e-3, 5e-3)}


@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_values_of_flags_reach_update_operators(name):
    rule, values = table.OPTIMIZERS[name], {"momentum": 0.5, "beta1": 0.7, "beta2": 0.8, "opt_epsilon": 1e-3}
    flags = [argument for flag in rule.flags for argument in (f"--{flag.replace('_', '-')}", str(values[flag]))]
    expected = [values[flag] for flag in rule.flags] + [name == "Nesterov"] * ("use_nesterov" in rule.attrs)
    for op in Run("--optimizer", name, *flags).paddle_updates:
        assert [op.attr(attribute) for attribute in rule.attrs] == pytest.approx(expected)


@pytest.mark.parametrize("with_bn", [False, True])
@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_weight_decay_groups(name, with_bn):
    run = Run("--optimizer", name, *(["--bn-weight-decay"] if with_bn else []))
    rule = table.OPTIMIZERS[name]
    decays = {op.input("Param")[0]: rule.decay(op) for op in run.paddle_updates}
    expected = {"linear_0.w_0": True, "last.weight": True}
    expected |= {"last.bias": not rule.is_adaptive}
    expected |= dict.fromkeys(["batch_norm2d_0.w_0", "batch_norm2d_0.b_0"], with_bn)
    assert decays == {name: pytest.approx(0.1 * has_decay) for name, has_decay in expected.items()}


@pytest.mark.parametrize("regularizer", [paddle.regularizer.L1Decay(0.3), paddle.regularizer.L2Decay(0.3)])
@pytest.mark.parametrize("name", ["Momentum", "AdamW"])
def test_regularizer_of_parameter_replaces_weight_decay(name, regularizer):
    """Momentum applies L2Decay in its update operator; all other regularizers are added to the gradient."""
    runs = [Run("--optimizer", name, fuse=fuse, regularizer=regularizer) for fuse in (False, True)]
    is_l2 = isinstance(regularizer, paddle.regularizer.L2Decay)
    decay = 0.3 if name == "Momentum" and is_l2 else 0
    decays = {op.input("Param")[0]: table.OPTIMIZERS[name].decay(op) for op in runs[0].paddle_updates}
    assert decays["last.weight"] == decays["last.bias"] == pytest.approx(decay)
    for run in runs:
        run.step(0)
    expected, result = (run.state() for run in runs)
    for key, value in expected.items():
        np.testing.assert_allclose(result[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    if decay:
        Run("--optimizer", name, fuse=True, scale=True, regularizer=regularizer)
    else:
        with pytest.raises(UsageError, match="^--kernels native: loss scaling is not supported with a regularizer of"):
            Run("--optimizer", name, fuse=True, scale=True, regularizer=regularizer)
        scaled = Run("--optimizer", name, scale=True, regularizer=regularizer)
        scaled.step(0)
        result = scaled.state()
        np.testing.assert_allclose(result["last.weight"], expected["last.weight"], rtol=1e-5, atol=1e-6)


def decays(parse, layout, *flags):
    """Return {name of a parameter: its weight decay} for the training program of a network."""
    shape = "3,32,32" if layout == "NCHW" else "4,32,32"
    args = parse("--data-layout", layout, "--image-shape", shape, "--weight-decay", "0.1", *flags)
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 10)
    return {op.input("Param")[0]: table.OPTIMIZERS[args.optimizer].decay(op) for op in graph.updates(main)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*few_blocks.QUICK, pytest.param("PPHGNetV2_B0", marks=pytest.mark.soak)])
def test_decayed_parameters_of_registered_networks_do_not_depend_on_layout(parse, register, name):
    """Momentum decays all parameters except those of BN layers, as in NVIDIA's example, and except the factors of
    self-attention and of learnable affine layers. AdamW additionally excludes biases."""
    register(name, few_blocks.with_few_blocks(models.MODELS[name]))
    for optimizer in ("Momentum", "AdamW"):
        first, second = (
            decays(parse, layout, "--model-arch-name", name, "--optimizer", optimizer) for layout in ("NCHW", "NHWC")
        )
        assert first == second
        for parameter, decay in first.items():
            layer, field = parameter.split(".")
            is_affine = layer.startswith("learnable_affine")
            is_factor = layer.startswith("batch_norm") or parameter == "self_attention_0.w_1"
            is_factor = is_factor or (is_affine and field == "w_0")
            is_bias = field == "w_1" if is_affine else layer.startswith(("conv2d", "linear")) and field.startswith("b_")
            assert decay == pytest.approx(0.1 * (not is_factor and not (is_bias and optimizer == "AdamW"))), parameter


USER_NETWORK = """
import paddle
from paddle import nn
from paddle_resnet.models.layers import sigmoid


class Net(nn.Layer):
    def __init__(self, num_classes, in_channels, data_format):
        super().__init__()
        self.is_nchw = data_format == "NCHW"

        def parameter(name, shape, **attributes):
            return self.create_parameter(shape, attr=paddle.ParamAttr(name=name, **attributes))

        def attributes(layer, **more):
            return {f"{kind}_attr": paddle.ParamAttr(name=f"{layer}.{kind}", **more) for kind in ("weight", "bias")}

        self.first = nn.Conv2D(in_channels, 8, 3, stride=4, data_format=data_format, **attributes("first"))
        self.norms = nn.LayerList([
            nn.GroupNorm(2, 8, data_format=data_format, **attributes("group_norm")),
            nn.LayerNorm([8, 8, 8], **attributes("layer_norm")),
        ])
        own = paddle.regularizer.L2Decay(0.7)
        self.own = nn.BatchNorm2D(8, data_format=data_format, **attributes("own_norm", regularizer=own))
        vector = [8, 1, 1] if self.is_nchw else [8]
        self.scale, self.shift = parameter("scale", vector), parameter("shift", vector)
        self.gate = parameter("gate", vector)
        self.prelu = nn.PReLU(8, data_format=data_format, weight_attr=paddle.ParamAttr(name="slope"))
        self.prior = parameter("prior", [8, 8, 1] if not self.is_nchw else [1, 8, 8])
        self.narrow = nn.Linear(8, 1, **attributes("narrow"))
        self.hidden = nn.Linear(1, 8, **attributes("hidden", regularizer=own))
        self.last = nn.Linear(8, num_classes, **attributes("last"))

    def forward(self, images):
        x = self.first(images)
        for norm in [*self.norms, self.own]:
            x = norm(x)
        x = self.prelu(x * self.scale * sigmoid(self.gate) + self.shift) + self.prior
        x = paddle.mean(x, [2, 3] if self.is_nchw else [1, 2])
        return self.last(self.hidden(self.narrow(x)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--bn-weight-decay"], ["--qat"]], ids=["default", "all", "qat"])
@pytest.mark.parametrize("optimizer", table.OPTIMIZERS)
def test_decayed_parameters_of_user_network_do_not_depend_on_layout(parse, tmp_path, optimizer, flags):
    """Regression test: a scale of shape [C, 1, 1] decayed with AdamW, a scale of shape [C] did not; LayerNorm decayed
    with Momentum; and a regularizer of BN was ignored with Momentum."""
    file = tmp_path / "net.py"
    file.write_text(USER_NETWORK)
    flags = ["--model-arch-name", f"{file}:Net", "--optimizer", optimizer, *flags]
    first, second = (decays(parse, layout, *flags) for layout in ("NCHW", "NHWC"))
    assert first == second
    rule = table.OPTIMIZERS[optimizer]
    expected = dict.fromkeys(["first.weight", "narrow.weight", "last.weight", "prior"], 0.1)
    expected |= dict.fromkeys(["first.bias", "narrow.bias", "last.bias", "shift"], 0 if rule.is_adaptive else 0.1)
    factors = ["group_norm.weight", "group_norm.bias", "layer_norm.weight", "layer_norm.bias", "scale", "gate"]
    expected |= dict.fromkeys([*factors, "slope"], 0.1 if "--bn-weight-decay" in flags else 0)
    # Adaptive optimizers add the parameter's own regularization to its gradient.
    own = ["own_norm.weight", "own_norm.bias", "hidden.weight", "hidden.bias"]
    expected |= dict.fromkeys(own, 0 if rule.is_adaptive else 0.7)
    assert first == {name: pytest.approx(decay) for name, decay in expected.items()}


@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_rule_that_paddle_lacks_is_never_replaced_by_adamw(parse, monkeypatch, kernels):
    """Each program that build builds is rewritten, and a program that build has not built is rejected."""
    rewritten = []
    rule = table.OPTIMIZERS["RAdam"]
    rewrite = lambda step: (rewritten.append(step.main), rule.rewrite(step))  # noqa: E731
    monkeypatch.setitem(table.OPTIMIZERS, "RAdam", dataclasses.replace(rule, rewrite=rewrite))
    args = frozen(parse("--optimizer", "RAdam", "--lr", "0.001", "--kernels", kernels))
    main = static.Program()
    program.build(args, main, static.Program(), 10)
    assert rewritten == [main]
    program.compile_prog(args, main)
    own = static.Program()
    with static.program_guard(own, static.Program()):
        loss = paddle.mean(nn.Linear(2, 1)(static.data("x", [1, 2])))
        program.dist_optimizer(args, table.build_optimizer(args, 0.1)).minimize(loss)
    with pytest.raises(UsageError, match=r"^--optimizer RAdam: Paddle lacks .* \(operator adamw\); build the"):
        program.compile_prog(args, own)


@pytest.mark.parametrize("name", [name for name, rule in table.OPTIMIZERS.items() if rule.rewrite is None])
def test_update_of_program_without_build_uses_custom_operators(parse, name):
    """A program may use dist_optimizer and compile_prog without build."""
    args, own = parse("--optimizer", name, "--kernels", "native", "--cuda-graph", "false"), static.Program()
    with static.program_guard(own, static.Program()):
        loss = paddle.mean(nn.Linear(2, 1)(static.data("x", [1, 2])))
        program.dist_optimizer(args, table.build_optimizer(args, 0.1)).minimize(loss)
    types = [op.type for op in program.compile_prog(args, own)._program.global_block().ops]
    assert types.count(f"native_{table.OPTIMIZERS[name].native}") == 1 and table.OPTIMIZERS[name].op not in types
    assert [op.type for op in graph.updates(own)] == [table.OPTIMIZERS[name].op] * 2


@pytest.mark.parametrize("scale", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_custom_operator_equals_paddle_operators(name, scale):
    """With the custom operator and with Paddle's operators, parameters and optimizer state have the same names and
    values."""
    runs = [Run("--optimizer", name, fuse=fuse, scale=scale) for fuse in (False, True)]
    types = [op.type for op in runs[1].main.global_block().ops]
    assert types.count(f"native_{table.OPTIMIZERS[name].native}") == 1
    assert runs[1].devices == {""}  # updates run on the same device as the program
    assert types.count("native_check_finite") == scale
    assert not {"memcpy", "check_finite_and_unscale", "update_loss_scaling", runs[0].paddle_updates[0].type} & set(
        types
    )
    for run in runs:
        for i in range(4):
            run.step(i)
    expected, result = (run.state() for run in runs)
    assert expected.keys() == result.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(result[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def radam(p, gradients, beta1, beta2, epsilon, rate, decay):
    """Yield the parameter after each step of fastai's RAdam with decoupled weight decay, in float64."""
    m = v = np.zeros_like(p)
    for step, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        direction = m / (1 - beta1**step)
        limit = 2 / (1 - beta2) - 1
        rho = limit - 2 * step * beta2**step / (1 - beta2**step)
        if rho > 5:
            rectification = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
            direction *= rectification / (np.sqrt(v / (1 - beta2**step)) + epsilon)
        p = p - rate * (direction + decay * p)
        yield p


@pytest.mark.parametrize("fuse", [False, True], ids=["paddle", "native"])
@pytest.mark.parametrize(("beta1", "beta2", "epsilon"), [(0.95, 0.99, 1e-6), (0.9, 0.999, 1e-12), (0.5, 0.6, 1e-3)])
def test_radam_matches_formula(beta1, beta2, epsilon, fuse):
    """The loss is the dot product of the parameters and the input, so the gradient is the input. With a beta2 of 0.6,
    no step uses the second moment."""
    flags = ["--beta1", str(beta1), "--beta2", str(beta2), "--opt-epsilon", str(epsilon), "--weight-decay", "0.1"]
    args = config.parse_args(["--optimizer", "RAdam", *flags, "--lr", "0.1", "--lr-scheduler", "FlatCosine"])
    args.set("Python", warmup_epochs=0)
    main, startup = static.Program(), static.Program()
    gradients = np.random.RandomState(0).randn(40, 3, 7).astype("float32")
    gradients[:, :, 0] = 0
    with static.scope_guard(static.Scope()), static.program_guard(main, startup), paddle.utils.unique_name.guard():
        weights = [static.create_parameter([3, 7], "float32", name=f"weight_{i}") for i in range(2)]
        x = static.data("x", [3, 7])
        loss = sum(paddle.mean(weight * x) for weight in weights) * 21
        rate = schedules.build_lr_scheduler(
            args.part(schedules.Options), durations.uniform(args.accumulate_steps, 1000)
        )
        args.set("Python", kernels="native" if fuse else "paddle")
        step = StepBuilder(args.part, main, startup, rate)
        table.build_optimizer(args, rate).minimize(loss, startup)
        add_update(step)
        exe = static.Executor(PLACE)
        exe.run(startup)
        write_scalars = scalars.Writer(main, PLACE)
        before = [variables.read(weight.name).astype("float64") for weight in weights]
        expected = [radam(p, gradients, beta1, beta2, epsilon, 0.1, 0.1) for p in before]
        for g in gradients:
            write_scalars()
            exe.run(main, {"x": g})
            rate.step()
            for weight, values in zip(weights, expected, strict=True):
                np.testing.assert_allclose(variables.read(weight.name), next(values), rtol=2e-5, atol=2e-6)


def test_clipping_includes_gradients_of_all_types():
    """On GPUs, the other type is half precision."""
    main = static.Program()
    with static.program_guard(main, static.Program()):
        block, rate = main.global_block(), static.data("rate", [1])
        gradients = [static.data(dtype, [2], dtype) for dtype in ("float32", "float64")]
        for g in gradients:
            p = block.create_var(name=f"{g.name}.p", shape=[2], dtype=g.dtype, persistable=True)
            inputs = {"Param": p, "Grad": g, "LearningRate": rate}
            block.append_op(type="sgd", inputs=inputs, outputs={"ParamOut": p}, attrs={"op_role": 2})
        clipping.add(SimpleNamespace(main=main, is_native=False, part=lambda cls: cls(clip_grad_norm=1.0)))
    for op in graph.updates(main):
        block._remove_op(block.ops.index(op))
    feed = {"float32": np.float32([1, 2]), "float64": np.float64([2, 4])}
    for g, result in zip(gradients, static.Executor(PLACE).run(main, feed, gradients), strict=True):
        np.testing.assert_allclose(result, feed[g.name] / 5, rtol=1e-6)


@pytest.mark.parametrize("scale", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("fuse", [False, True], ids=["paddle", "native"])
def test_clipping_limits_global_norm(fuse, scale):
    """Without momentum and weight decay, parameters change in proportion to their gradients. The changes are compared
    in float64."""
    flags = ["--weight-decay", "0", "--momentum", "0", "--clip-grad-norm"]
    plain, high, low = (Run(*flags, limit, fuse=fuse, scale=scale) for limit in ("None", "1e3", "0.05"))
    types = [op.type for op in low.main.global_block().ops]
    assert types.count("native_clip_factor") == fuse
    assert types.count("squared_l2_norm") == (0 if fuse else 5)
    changes = []
    for run in (plain, high, low):
        before = run.state()
        run.step(0)
        after = run.state()
        names = [p.name for p in run.main.all_parameters() if p.trainable]
        changes.append(np.concatenate([(after[n] - before[n].astype("float64")).ravel() for n in names]))
    norm = np.linalg.norm(changes[0]) / 0.1  # 0.1 is the learning rate
    assert norm > 0.1
    np.testing.assert_array_equal(changes[1], changes[0])
    np.testing.assert_allclose(changes[2], changes[0] * 0.05 / norm, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("fuse", [False, True], ids=["paddle", "native"])
@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_skipped_step_does_not_change_state(name, fuse):
    run = Run("--optimizer", name, "--clip-grad-norm", "0.1", fuse=fuse, scale=True)
    run.step(0)
    before = run.state()
    run.step(1, overflows=True)
    after = run.state()
    assert after[variables.LOSS_SCALE] < before[variables.LOSS_SCALE]
    may_change = {variables.LOSS_SCALE, "num_bad_steps_0", "num_good_steps_0", "learning_rate_0"}
    may_change |= {"batch_norm2d_0.w_1", "batch_norm2d_0.w_2"}  # the running statistics include the skipped batch
    if not fuse:  # Paddle's operators treat the gradient as 0 and update the velocities
        may_change |= {key for key in before if key.endswith("_velocity_0")}
    for key in before.keys() - may_change:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)


@pytest.mark.parametrize("fuse", [False, True], ids=["paddle", "native"])
@pytest.mark.parametrize("name", table.OPTIMIZERS)
def test_resume_is_bit_identical(name, fuse):
    run, resumed = (Run("--optimizer", name, fuse=fuse) for _ in "ab")
    for i in range(4):
        if i == 2:
            resumed.restore(run.state(), steps=2)
        run.step(i)
        if i >= 2:
            resumed.step(i)
    expected, result = run.state(), resumed.state()
    for key, value in expected.items():
        np.testing.assert_array_equal(result[key], value, err_msg=key)


@pytest.mark.parametrize("name", [name for name, rule in table.OPTIMIZERS.items() if rule.op != "momentum"])
def test_sparse_weights_remain_sparse(parse, name):
    """Train a complete network with each optimizer except Momentum, which test_amp_and_sparsity.py covers."""
    args = parse("--optimizer", name, "--lr", "0.01", "--asp", "--prune-model", *NHWC)
    args.kernels = "native"
    compiled, exe, _, _, main = build(args)
    sparsity.prune(main, PLACE, args.mask_algo)
    before = variables.snapshot(main)[0]
    for images, labels in random_batches(2, (32, 32, 4)):
        exe.run(compiled, {"data": images, "label": labels}, [])
    after = variables.snapshot(main)[0]
    assert all(np.any(after[p.name] != before[p.name]) for p in main.all_parameters() if p.trainable)
    assert_sparse(after)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--beta1 0.8",
            "--beta1 0.8: not used by --optimizer Momentum; remove it, or use --optimizer AdamW or RAdam or LAMB",
        ),
        ("--optimizer AdamW --momentum 0.9", "--momentum 0.9: not used by --optimizer AdamW; remove it, or use"),
        ("--optimizer AdamW --beta2 1", "--beta2: 1 is not below 1; use a number of at least 0 and below 1, such as"),
        ("--optimizer LAMB --beta1 0.9999999999", "--beta1: 0.9999999999 is too close to 1 for float32; use 0.9999999"),
        ("--optimizer AdamW --opt-epsilon 1e-40", "--opt-epsilon: 1e-40 is too small for float32; use 1e-30 or more"),
        ("--optimizer RAdam --freeze stem", "--optimizer RAdam: its formula requires that all layers are trained"),
        ("--optimizer RAdam --opt-epsilon 1e-13", "--opt-epsilon 1e-13: too small for --optimizer RAdam; use 1e-12"),
        ("--clip-grad-norm 0", "--clip-grad-norm: 0 is not positive"),
        ("--optimizer Adam", "--optimizer: invalid choice: 'Adam'"),
    ],
)
def test_invalid_flags_are_rejected(flags, message):
    with pytest.raises(UsageError) as error:
        config.parse_args(flags.split())
    assert message in str(error.value)


def test_momentum_learning_rate_for_adamw_triggers_warning():
    [warning] = validation.warnings(config.parse_args(["--optimizer", "AdamW", "--lr", "0.256"]))
    assert "--lr 0.256" in warning and "0.001" in warning
    assert not list(validation.warnings(config.parse_args(["--optimizer", "AdamW", "--lr", "0.001"])))
