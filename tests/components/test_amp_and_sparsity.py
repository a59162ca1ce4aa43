"""Mixed precision, loss scaling and 2:4 sparsity in training programs."""

import itertools
import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static
from paddle.incubate import asp
from paddle.incubate.asp import utils
from paddle.incubate.asp.utils import MaskAlgo
from paddle.static.amp import fp16_utils

from conftest import MASK_ALGORITHMS, NHWC, assert_two_of_four, frozen
from helpers import build, random_batches, variable
from paddle_resnet import graph, program
from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.components import optimizer, precision, sparsity
from paddle_resnet.models import layers, loss_head
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.optimizers import table
from paddle_resnet.passes import all_reduces, statistics


@pytest.mark.parametrize(("algorithm", "channels"), [*((name, 3) for name in MASK_ALGORITHMS), ("mask_1d", 4)])
def test_pruning_keeps_two_of_four_weights(parse, algorithm, channels):
    """As in NVIDIA's example, all layers except the classifier are pruned. Filters with three input channels remain
    dense, because Paddle cannot prune them."""
    args = parse("--asp", "--prune-model", "--mask-algo", algorithm, "--image-shape", f"{channels},32,32")
    _, _, _, _, main = build(args)
    before = {p.name: variable(p.name) for p in main.all_parameters()}
    masks = sparsity.prune(main, paddle.CPUPlace(), args.mask_algo)
    pruned = [name for name in before if np.any(variable(name) != before[name])]
    assert set(masks) == {f"conv2d_{i}.w_0" for i in range(9)}
    dense = {"conv2d_0.w_0"} if channels == 3 else set()
    assert {name.removesuffix(".asp_mask") for name in pruned} == set(masks) - dense
    assert {p.name for p in sparsity.layers(main)[0]} == set(masks) - dense
    assert ("fewer than 4 input channels" in sparsity.describe(main)) == (channels == 3)
    for name in set(masks) - dense:
        weight = variable(name)
        assert_two_of_four(weight, algorithm)
        kept = weight != 0
        np.testing.assert_array_equal(weight[kept], before[name][kept])
        # The algorithm mask_1d keeps the two weights with the largest magnitudes in each group.
        if algorithm == "mask_1d":
            sums = np.sort(np.abs(before[name]).transpose(2, 3, 0, 1).reshape(-1, 4), axis=1)[:, 2:].sum()
            np.testing.assert_allclose(np.abs(weight).sum(), sums, rtol=1e-5)


# [out, in, height, width] of convolutions and [in, out] of fully connected layers. 5, 6, 7 and 10 are not divisible by
# 4, so that the last blocks are padded.
SHAPES = [(64, 64, 3, 3), (6, 10, 3, 3), (7, 5, 1, 1), (4, 6, 1, 1), (128, 64), (10, 6), (5, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_keep_the_large_weights_in_two_of_four_inputs(shape):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    kept = {}
    for algorithm in MASK_ALGORITHMS:
        mask = sparsity.compute_mask(weight, algorithm)
        assert (mask.shape, mask.dtype, set(np.unique(mask))) == (shape, np.float32, {0, 1})
        rows = mask.T if len(shape) == 2 else mask.transpose(3, 2, 0, 1).reshape(-1, shape[1])
        padded = np.pad(rows, [(0, -size % 4) for size in rows.shape])
        assert (padded.reshape(len(padded), -1, 4).sum(2) <= 2).all()
        if algorithm != "mask_1d":
            assert (padded.reshape(-1, 4, padded.shape[1]).sum(1) <= 2).all()
        kept[algorithm] = np.abs(weight * mask).sum() / np.abs(weight).sum()
    assert kept["mask_1d"] >= kept["mask_2d_best"] >= kept["mask_2d_greedy"]
    if shape == (64, 64, 3, 3):
        assert [kept[name] for name in MASK_ALGORITHMS] == pytest.approx([0.74, 0.69, 0.70], abs=0.005)


def test_mask_2d_best_may_keep_seven_weights():
    """Paddle's search considers only masks with eight ones, with which it keeps 15 of this block's magnitude 16."""
    weight = np.zeros((4, 4), np.float32)
    weight[0, 0] = 10
    weight[1:, 1:] = [[1, 1, 0], [0, -1, 1], [-1, 0, 1]]
    for algorithm in ("mask_2d_best", "mask_2d_greedy"):
        assert (sparsity.compute_mask(weight, algorithm) == (weight != 0)).all()
    assert (np.abs(weight) * utils.get_mask_2d_best(np.abs(weight), 2, 4)).sum() == 15


def masked(search):
    """Return the parameters of two layers, pruned with masks [rows, inputs] that `search` computes."""
    random = np.random.default_rng(0)
    state = {"conv2d_1.w_0": random.standard_normal((64, 64, 3, 3)), "linear_1.w_0": random.standard_normal((64, 62))}
    state = {name: array.astype(np.float32) for name, array in state.items()}
    masks = {name + sparsity.MASK: search(array.T).T.astype(np.float32) for name, array in state.items()}
    dense = {"conv2d_0.w_0.asp_mask": np.ones((8, 3, 3, 3)), "conv2d_0.w_0": np.ones((8, 3, 3, 3))}
    return dense | {name: array * masks[name + sparsity.MASK] for name, array in state.items()} | masks


def test_masks_of_signed_search_are_recognized():
    def paddle_search(matrix):
        return asp.create_mask(matrix, MaskAlgo.MASK_2D_BEST, 2, 4)

    old = masked(paddle_search)
    assert sparsity.has_masks_of_signed_search(old)
    trained = {name: array * (1 if name.endswith(sparsity.MASK) else 1.5) for name, array in old.items()}
    assert sparsity.has_masks_of_signed_search(trained)
    for name in MASK_ALGORITHMS:
        assert not sparsity.has_masks_of_signed_search(masked(lambda m, n=name: sparsity.compute_mask(m.T, n).T))
    assert not sparsity.has_masks_of_signed_search(masked(lambda matrix: paddle_search(np.abs(matrix))))
    for unusual in ({}, {"a.asp_mask": np.zeros(3)}, {"a.asp_mask": np.zeros((4, 4))}, {"a.asp_mask": np.zeros(())}):
        assert not sparsity.has_masks_of_signed_search(unusual)


def test_dense_layers_are_listed(parse, capfd):
    """Depthwise convolutions have only one input channel per group, so they remain dense. Paddle's own warnings about
    depthwise convolutions must not be logged."""
    args = parse("--asp", "--prune-model", "--model-arch-name", "TinyMobile")
    main = build(args)[-1]
    sparsity.prune(main, paddle.CPUPlace(), args.mask_algo)
    assert "is not pruned" not in "".join(capfd.readouterr())
    sparse, narrow, excluded = sparsity.layers(main)
    depthwise = [op.input("Filter")[0] for op in main.global_block().ops if op.type == "depthwise_conv2d"]
    assert {p.name for p in narrow} == {"conv2d_0.w_0", *depthwise}
    assert [p.name for p in excluded] == ["linear_0.w_0"]
    assert all((variable(p.name) != 0).all() for p in narrow)
    assert all((variable(p.name) == 0).mean() == 0.5 for p in sparse)
    assert sparsity.counts(main) == {"sparse_layers": len(sparse), "dense_layers": len(narrow) + 1}
    line = sparsity.describe(main)
    assert f"--asp: {len(sparse)} of {len(sparse) + len(narrow) + 1} layers are 2:4 sparse" in line
    sizes = [sum(variable(p.name).size for p in parameters) for parameters in (sparse, narrow, excluded)]
    assert f", {sizes[0] / sum(sizes):.0%} of the weights; dense: " in line
    assert "conv2d_0, conv2d_1" in line and "classifier linear_0" in line


def test_groups_of_linear_layers_consist_of_inputs():
    main = static.Program()
    with static.program_guard(main, static.Program()):
        wide, narrow = (static.create_parameter(shape, "float32") for shape in ([8, 2], [2, 8]))
        for parameter in (wide, narrow):
            main.global_block().create_var(name=parameter.name + sparsity.MASK)
    assert sparsity.layers(main) == ([wide], [narrow], [])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("kernels", ["paddle", *(["native"] if native.missing() is None else [])])
def test_amp_casts_network_and_keeps_loss_head_in_float32(
    parse, monkeypatch, gpu_lists, level, dtype, is_train, kernels
):
    """This test only inspects the rewritten program. test_gpu.py executes programs with AMP."""
    half = getattr(paddle, dtype)
    # --report-html requires the logits.
    args = parse("--dali-output-fp16", "--data-layout", "NHWC", "--report-html", "page.html")
    if kernels == "native":
        native.load()
        args.kernels = "native"
    # The test sets AMP directly, because the parser rejects --amp on a CPU.
    args.amp, args.amp_dtype, args.amp_level = True, dtype, level
    if dtype == "float16":
        args.scale_loss, args.use_dynamic_loss_scaling = 128.0, True
    main = static.Program()
    fetchs, _, _, _ = program.build(frozen(args), main, static.Program(), 1, is_train=is_train)
    if not is_train:
        cast = []
        for p in main.all_parameters():  # the test creates the parameters itself, because no checkpoint is loaded
            static.global_scope().var(p.name).get_tensor().set(np.zeros(p.shape, "float32"), paddle.CPUPlace())
        done = "conv2d_0.w_0"  # already cast for a training program
        static.global_scope().find_var(done).get_tensor().set(
            np.zeros(main.global_block().var(done).shape, "float16"), paddle.CPUPlace()
        )
        monkeypatch.setattr(fp16_utils, "cast_parameters_to_fp16", lambda *values: cast.append(values[3]))
        precision.cast_evaluation_program(main, paddle.CPUPlace(), dtype, level)
        assert len(cast) == (level == "O2")
    block = main.global_block()
    by_type = {}
    for op in block.ops:
        by_type.setdefault(op.type, []).append(op)

    def dtypes(op, names):
        exact = (paddle.int64, paddle.int32, paddle.bool)
        return {block.var(name).dtype for name in names if block.var(name).dtype not in exact}

    for op in by_type["conv2d"]:
        assert dtypes(op, op.input("Input") + op.input("Filter") + op.output("Output")) == {half}
    head = [op for op in block.ops if loss_head.contains(op) and op.type != "cast"]
    assert ("native_loss" in by_type) == (kernels == "native")
    assert len(head) >= 2
    for op in [*head, *by_type.get("native_async_copy", [])]:
        assert dtypes(op, op.input_arg_names + op.output_arg_names) <= {paddle.float32}, op.type
    assert {variable.dtype for name, (variable, _) in fetchs.items() if name != "confusion"} == {paddle.float32}
    weights = {p.name for p in main.all_parameters() if "batch_norm" not in p.name and "mask" not in p.name}
    assert {block.var(name).dtype for name in weights} == {half if level == "O2" else paddle.float32}
    assert {p.dtype for p in main.all_parameters() if "batch_norm" in p.name} == {paddle.float32}
    if level == "O2" and not is_train:
        assert cast == [weights - {done}]
    for op in by_type.get("momentum", []) if kernels == "paddle" else []:  # Paddle's kernels support only these types
        allowed = {paddle.float32} if dtype == "bfloat16" else {paddle.float32, paddle.float16}
        assert dtypes(op, op.input_arg_names + op.output_arg_names) <= allowed


def test_listed_variables_remain_in_float32(monkeypatch):
    main, calls = static.Program(), []
    assert "x" in precision._amp_lists(main, "float16", {"x"}).black_varnames
    casts = []
    monkeypatch.setattr(fp16_utils, "cast_model_to_fp16", lambda *values, **options: casts.append((*values, options)))
    monkeypatch.setattr(
        precision, "_amp_lists", lambda *values: calls.append(values) or SimpleNamespace(unsupported_list="cpu")
    )
    levels = []
    loggers = {"paddle.static.amp.fp16_lists": SimpleNamespace(setLevel=levels.append)}
    monkeypatch.setattr(precision, "logging", SimpleNamespace(getLogger=loggers.get, ERROR=logging.ERROR))
    for for_gpu, has_cuda in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda has_cuda=has_cuda: has_cuda)
        precision.cast_evaluation_program(main, paddle.CPUPlace(), "bfloat16", "O1", {"x"}, for_gpu)
    assert calls == [(main, "bfloat16", {"x"})] * 3
    assert [lists.unsupported_list for _, lists, _ in casts] == ["cpu", set(), "cpu"]
    assert levels == [logging.ERROR]  # Paddle's warnings about missing kernels do not apply
    options = {"use_fp16_guard": False, "dest_type": paddle.bfloat16, "level": "O1"}
    assert all((program, given) == (main, options) for program, _, given in casts)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_normalizes_weight_of_self_attention_in_float32(parse, register, gpu_lists, level):
    network = partial(ResNet, BottleneckBlock, (1,), width=8, self_attention=True)
    register("Tiny", network)
    args = parse("--dali-output-fp16", *NHWC)
    args.amp, args.amp_dtype, args.amp_level, args.scale_loss = True, "float16", level, 128.0
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 1)
    block = main.global_block()
    normalization = [op for op in block.ops if layers.is_float32(op) and not op.type.startswith("cast")]
    names = {name for op in normalization for name in (*op.input_arg_names, *op.output_arg_names)}
    assert len(normalization) > 2 * layers.SelfAttention.SQUARINGS
    assert {block.var(name).dtype for name in names} == {paddle.float32}
    products = [op for op in block.ops if op.type == "matmul_v2" and op not in normalization]
    assert {block.var(name).dtype for op in products for name in op.input_arg_names} == {paddle.float16}
    parameters = {p.dtype for p in main.all_parameters() if p.name.startswith("self_attention")}
    assert parameters == {paddle.float16 if level == "O2" else paddle.float32}


@pytest.fixture
def use_native():
    """Return a function that changes the settings to use the custom kernels."""
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()

    def use_native(args):
        args.kernels = "native"

    return use_native


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("dtype", "is_dynamic", "name"),
    [
        ("float16", True, "Momentum"),
        ("float16", False, "Momentum"),
        ("bfloat16", None, "Momentum"),
        ("float16", True, "LAMB"),
    ],
    ids=["float16-dynamic", "float16-static", "bfloat16", "LAMB"],
)
def test_fused_update_contains_all_parameters(
    parse, monkeypatch, use_native, gpu_lists, dtype, level, is_dynamic, name
):
    """The operator receives the gradient, state and decay of each parameter and, in half precision, its float32 master.
    Paddle's operators are removed from the program."""
    args = parse("--dali-output-fp16", *NHWC, "--weight-decay", "0.01", "--optimizer", name)
    use_native(args)
    # The test sets AMP directly, because the parser rejects --amp on a CPU.
    args.amp, args.amp_dtype, args.amp_level = True, dtype, level
    if dtype == "float16":
        args.scale_loss, args.use_dynamic_loss_scaling = 128.0, is_dynamic
    main, startup = static.Program(), static.Program()
    expected, update_natively = {}, optimizer.update_natively

    def note_paddles_operators(block, rule, factor):
        for op in graph.updates(block.program):
            others = [name for word in ("Grad", *rule.state, "MasterParam") for name in op.input(word)]
            expected[op.input("Param")[0]] = [*others, np.float32(rule.decay(op))]
        update_natively(block, rule, factor)

    monkeypatch.setattr(optimizer, "update_natively", note_paddles_operators)
    program.build(frozen(args), main, startup, 1)
    assert {op.attr("op_device") for op in startup.global_block().ops} == {""}  # the state is on the device
    rule = table.OPTIMIZERS[name]
    assert expected.keys() == {parameter.name for parameter in main.all_parameters() if parameter.trainable}
    by_type, result = {op.type: op for op in main.global_block().ops}, {}
    fused = [op for op in main.global_block().ops if op.type == f"native_{rule.native}"]
    for op in fused:
        names, gradients, state = (op.input(f"{word}@VECTOR") for word in ("Parameters", "Gradients", "State"))
        state = np.reshape(state, (-1, len(names))).tolist()
        for parameter, *others, decay in zip(names, gradients, *state, op.attr("decays"), strict=True):
            result[parameter] = [*others, np.float32(decay)]
    assert result == expected
    assert len(fused) == (2 if level == "O2" else 1)  # with and without masters
    removed = {rule.op, "check_finite_and_unscale", "update_loss_scaling", "concat", "reduce_any", "memcpy"}
    assert not removed & by_type.keys()
    if dtype == "bfloat16":
        assert not op.input("Unscale@OPTIONAL")
    else:
        maker = by_type["native_check_finite" if is_dynamic else "reciprocal"]
        assert op.input("Unscale@OPTIONAL")[0] in maker.output_arg_names
        if is_dynamic:
            assert set(maker.input("Gradients@VECTOR")) == {values[0] for values in expected.values()}


def test_bfloat16_parameters_follow_float32_masters(parse):
    """Only the update is compared with float32, because the CPU has no bfloat16 kernels for the forward pass."""
    result = {}
    for dtype in (paddle.float32, paddle.bfloat16):
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup), paddle.utils.unique_name.guard(), static.scope_guard(static.Scope()):
            x = static.data("x", [4, 4], "float32")
            weight = paddle.create_parameter([4, 4], "float32", default_initializer=paddle.nn.initializer.Assign(START))
            weight.desc.set_dtype(dtype)  # AMP level O2 changes the type in the same way
            momentum = paddle.optimizer.Momentum(0.5, 0.9, weight_decay=paddle.regularizer.L2Decay(0.1))
            momentum._multi_precision = True
            grad = paddle.cast(x, dtype)
            momentum.apply_gradients([(weight, grad)])
            optimizer._update_masters_in_float32(main.global_block())
            exe = static.Executor(paddle.CPUPlace())
            exe.run(startup)
            master = f"{weight.name}_fp32_master_0" if dtype == paddle.bfloat16 else weight.name
            compiled = static.CompiledProgram(main)
            for i in range(3):
                exe.run(compiled, {"x": np.full((4, 4), i - 0.75, "float32")}, [])
            result[dtype] = variable(master), variable(f"{master}_velocity_0")
            if dtype == paddle.bfloat16:
                bits = variable(weight.name)
                assert bits.dtype == np.uint16
                rounded = (bits.astype(np.uint32) << 16).view(np.float32)
                # The CPU kernel truncates instead of rounding.
                np.testing.assert_allclose(rounded, result[dtype][0], rtol=2**-7)
                assert np.any(rounded != result[dtype][0])
    for in_float32, with_master in zip(result[paddle.float32], result[paddle.bfloat16], strict=True):
        np.testing.assert_array_equal(in_float32, with_master)


@pytest.mark.parametrize(
    "optimizer", ["Momentum", *(pytest.param(each, marks=pytest.mark.slow) for each in ("LAMB", "RAdam"))]
)
@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_all_values_of_pruned_weights_remain_zero(parse, use_native, kernels, optimizer):
    """These values include the optimizer state, which is part of norms, the slow weights and the averages."""
    flags = ["--optimizer", optimizer, "--lr", "0.1", "--weight-decay", "0.1", "--ema", "0.9", "--lookahead", "2,0.5"]
    args = parse("--asp", "--prune-model", "--clip-grad-norm", "1", *flags, *NHWC)
    if kernels == "native":
        use_native(args)
    compiled, exe, fetchs, lr_scheduler, main = build(args)
    mask = sparsity.prune(main, paddle.CPUPlace(), args.mask_algo)["conv2d_4.w_0"]
    for images, labels in random_batches(3, (32, 32, 4)):
        exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])
        lr_scheduler.step()
    names = [v.name for v in main.list_vars() if v.persistable and v.name.startswith("conv2d_4.w_0")]
    values = {name: variable(name) for name in names if variable(name).shape == mask.shape}
    assert len(values) == {"Momentum": 5, "LAMB": 6, "RAdam": 6}[optimizer] and np.mean(mask) == 0.5
    for name, value in values.items():
        np.testing.assert_array_equal(value != 0, mask != 0, err_msg=name)


def test_state_of_pruned_weights_in_old_checkpoints_is_set_to_zero(parse):
    """Version 0.1.0 masked the parameters after each update, but neither their master weights nor their velocities."""
    args = parse("--asp", "--prune-model", "--optimizer", "AdamW")
    *_, main = build(args)
    mask = sparsity.prune(main, paddle.CPUPlace(), args.mask_algo)["conv2d_4.w_0"]
    scope = static.global_scope()
    state = {
        name: variable(name)
        for name in ("conv2d_4.w_0_beta1_pow_acc_0", "conv2d_4.b_0", "linear_0.w_0_moment1_0")
        if scope.find_var(name) is not None
    }
    moment = scope.find_var("conv2d_4.w_0_moment1_0").get_tensor()
    moment.set(np.ones(mask.shape, np.float32), paddle.CPUPlace())
    sparsity.apply_masks(main, paddle.CPUPlace())
    np.testing.assert_array_equal(np.array(moment), mask)
    assert len(state) == 2
    for name, value in state.items():
        np.testing.assert_array_equal(variable(name), value)


def test_gradients_are_masked_between_loss_scaling_and_clipping(parse, gpu_lists):
    args = parse("--asp", "--prune-model", "--clip-grad-norm", "1", *NHWC)
    args.set("Python", amp=True, amp_dtype="float16", amp_level="O2", use_dynamic_loss_scaling=True)
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 1)
    block = main.global_block()
    [update] = [op for op in block.ops if "Param" in op.input_names and op.input("Param") == ["conv2d_4.w_0"]]
    gradient = update.input("Grad")[0]
    users = [(op.type, gradient in op.output_arg_names) for op in block.ops if gradient in op.input_arg_names]
    at = users.index(("elementwise_mul", True))
    assert [name for name, _ in users[:at]][-1] == "update_loss_scaling"
    assert [name for name, _ in users[at + 1 :]] == ["cast", "elementwise_mul", "momentum"]
    assert [op.type for op in block.ops if "conv2d_4.w_0" in op.output_arg_names] == ["momentum"]


START = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)


def pairs_first(*parameters):
    """Yield all combinations of values from three lists of two values each. By default, only four combinations run,
    which cover each pair of values exactly once. The other four run with -m soak."""
    for indices in itertools.product((0, 1), repeat=3):
        values = [values[i] for values, i in zip(parameters, indices, strict=True)]
        yield pytest.param(*values, marks=[pytest.mark.soak] if sum(indices) % 2 else [])


@pytest.mark.parametrize(
    ("kernels", "level", "is_sparse"), pairs_first(["paddle", "native"], ["O1", "O2"], [False, True])
)
def test_overflow_does_not_change_parameters(request, parse, kernels, level, is_sparse):
    """On the CPU, the test emulates AMP: the loss is scaled, but all values are float32."""
    flags = ["--asp", "--prune-model"] if is_sparse else []
    is_native = kernels == "native"
    args = parse("--lr", "0.1", "--weight-decay", "0.01", *(NHWC if is_native else []), *flags)
    if is_native:
        request.getfixturevalue("use_native")(args)
    args.amp, args.amp_level, args.use_dynamic_loss_scaling, args.scale_loss = True, level, True, 1024.0
    compiled, exe, fetchs, lr_scheduler, main = build(args)
    if flags:
        sparsity.prune(main, paddle.CPUPlace(), args.mask_algo)
    names = [p.name for p in main.all_parameters() if "_mean" not in p.name and "_variance" not in p.name]
    names = [name for name in names if name not in all_reduces.bn_statistics(main)]
    velocities = {p: f"{p}_velocity_0" for p in names if not p.endswith("asp_mask")}
    batches = iter(random_batches(6, (32, 32, 4) if is_native else (3, 32, 32)))

    def step():
        before = {name: variable(name) for name in [*names, *velocities.values()]}
        images, labels = next(batches)
        loss = exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])[0]
        assert np.isfinite(loss)
        lr_scheduler.step()
        return before, {name: variable(name) for name in before}

    for _ in range(2):
        before, after = step()
        assert all(np.any(before[name] != after[name]) for name in velocities)
    scale = static.global_scope().find_var(LOSS_SCALE).get_tensor()
    scale.set(np.array([3e38], "float32"), paddle.CPUPlace())
    classifier = static.global_scope().find_var("linear_0.w_0").get_tensor()
    # Large weights make the gradients of earlier layers overflow.
    classifier.set(100 * np.array(classifier), paddle.CPUPlace())
    before, after = step()
    np.testing.assert_allclose(variable(LOSS_SCALE), 1.5e38)
    for name in names:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    for name, velocity in velocities.items():
        expected = before[velocity]
        if not is_native:  # Paddle's operators treat the gradient as 0 and update the velocity
            decay = 0.0 if "batch_norm" in name else 0.01
            expected = args.momentum * before[velocity] + decay * before[name]
        np.testing.assert_allclose(after[velocity], expected, rtol=0 if is_native else 1e-5, atol=1e-8, err_msg=name)
    scale.set(np.array([1024], "float32"), paddle.CPUPlace())
    before, after = step()
    assert all(np.any(before[name] != after[name]) for name in velocities)
    assert np.isfinite(np.concatenate([after[name].ravel() for name in velocities])).all()
    # The variance of the first layer's output exceeds the range of float32.
    stem = {name: variable(name) for name in ("batch_norm_0.w_1", "batch_norm_0.w_2")}
    images, labels = next(batches)
    exe.run(compiled, {"data": images * np.float32(1e30), "label": labels}, [])
    assert all(np.isfinite(variable(name)).all() for name in all_reduces.bn_statistics(main))
    for name, value in stem.items():
        np.testing.assert_array_equal(variable(name), value)


def test_constant_statistics_are_not_checked(parse):
    frozen_layers = build(parse("--freeze", "all-but-classifier"))[-1]
    for main in (frozen_layers, build(parse())[-1].clone(for_test=True)):
        before = len(main.global_block().ops)
        statistics.keep_statistics_finite(main)
        assert len(main.global_block().ops) == before


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_fused_update_with_loss_scaling_equals_plain_update(parse, use_native, is_dynamic):
    result = []
    for is_scaled in (False, True):
        args = parse("--lr", "0.1", "--weight-decay", "0.01", *NHWC)
        use_native(args)
        if is_scaled:
            args.amp, args.use_dynamic_loss_scaling, args.scale_loss = True, is_dynamic, 1024.0
        with static.scope_guard(static.Scope()):
            compiled, exe, _, lr_scheduler, main = build(args)
            assert not is_scaled or not is_dynamic or variable(LOSS_SCALE) == 1024
            for images, labels in random_batches(3, (32, 32, 4)):
                exe.run(compiled, {"data": images, "label": labels}, [])
                lr_scheduler.step()
            names = [p.name for p in main.all_parameters()]
            names += [f"{name}_velocity_0" for name in names if name not in all_reduces.bn_statistics(main)]
            result.append({name: variable(name) for name in names})
    plain, scaled = result
    for name in plain:
        np.testing.assert_allclose(scaled[name], plain[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_steps_without_overflow_equal_plain_update(parse):
    def parameters(is_scaled):
        args = parse("--lr", "0.1")
        if is_scaled:  # by a power of two, which changes no digit
            args.amp, args.use_dynamic_loss_scaling, args.scale_loss = True, True, 1024.0
        with static.scope_guard(static.Scope()):
            compiled, exe, fetchs, lr_scheduler, main = build(args)
            for images, labels in random_batches(3):
                exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])
                lr_scheduler.step()
            return {p.name: variable(p.name) for p in main.all_parameters()}

    plain, scaled = parameters(False), parameters(True)
    for name in plain:
        np.testing.assert_array_equal(plain[name], scaled[name], err_msg=name)
