"""RAdam, gradient clipping, and corrections to Paddle's operators that update parameters and BN statistics."""

import itertools
import math

import numpy as np
import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet.optimizers import table
from paddle_resnet.step import scalars

OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole


CLIPPING = "clip_grad_norm"  # name scope of the operators that clip_gradients inserts
_HUGE = 1e36  # a second moment divided by this number is negligible


def radam_powers(step, beta1, beta2, epsilon):
    """Return the values (power1, power2) with which AdamW's direction m / (1 - power1) / (sqrt(s / (1 - power2)) +
    epsilon) equals RAdam's direction. In AdamW, these values are the powers of the betas. RAdam is algorithm 2 of Liu
    et al., arXiv:1908.03265, with the threshold 5 from the authors' code.

    RAdam multiplies the direction by a factor that depends on the step. In the first steps, there are too few gradients
    to estimate the second moment, so RAdam's direction is m / (1 - beta1^step).

    Args:
        step: number of the step, counted from 1.
        beta1, beta2, epsilon: as in AdamW. The result is accurate for an epsilon of at least 1e-12.
    """
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (1 - correction2) / correction2
    if length <= 5:
        return 1 - correction1 / epsilon, 1 - _HUGE
    factor = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return 1 - correction1 / math.sqrt(factor), 1 - correction2


def rectify(main_prog, lr_scheduler):
    """Change a training program in place from AdamW to RAdam. All parameters share the powers of the two betas, which
    the host writes before each step. The step count includes the steps that loss scaling skips.

    Args:
        main_prog: the current Program, after minimize.
        lr_scheduler: schedules.Schedule, which counts the steps.
    """
    ops = table.updates(main_prog)
    betas_and_epsilon = [ops[0].attr(name) for name in ("beta1", "beta2", "epsilon")]
    for i, name in enumerate(("Beta1Pow", "Beta2Pow")):
        power = scalars.declare(f"radam_{name}", lambda i=i: radam_powers(lr_scheduler.done + 1, *betas_and_epsilon)[i])
        for op in ops:
            op.desc.set_input(name, [power.name])
            op.desc.set_output(f"{name}Out", [power.name])
    for op in ops:
        op.desc._set_bool_attr("use_global_beta_pow", True)  # so that the operator does not update the powers


def clip_gradients(main_prog, maximum):
    """Change a training program in place to limit the global norm of the gradients (Pascanu et al., arXiv:1211.5063).

    The clipping operators run after the gradients have been all-reduced and unscaled. These operators sum squares in
    float32, whereas paddle.nn.ClipGradByGlobalNorm sums the squares of float16 gradients in float16.
    """
    block, updates = main_prog.global_block(), table.updates(main_prog)
    at = itertools.count(block.ops.index(updates[0]))

    def insert(op_type, inputs, shape=(1,), dtype=paddle.float32, **attrs):
        out = block.create_var(name=unique_name.generate(f"{CLIPPING}.{op_type}"), shape=shape, dtype=dtype)
        _insert_update(block, next(at), op_type, {"X": inputs}, out, attrs)
        return out

    gradients = [block.var(op.input("Grad")[0]) for op in updates]
    with static.name_scope(CLIPPING):
        wide = [
            g if g.dtype == paddle.float32 else insert("cast", g, g.shape, in_dtype=g.dtype, out_dtype=paddle.float32)
            for g in gradients
        ]
        norm = insert("sqrt", insert("sum", [insert("squared_l2_norm", g) for g in wide]))
        larger = insert("clip", norm, min=maximum, max=float(np.finfo(np.float32).max))
        factor = insert("scale", insert("reciprocal", larger), scale=maximum)
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            cast_factor = factor
            if dtype != paddle.float32:
                cast_factor = insert("cast", factor, dtype=dtype, in_dtype=paddle.float32, out_dtype=dtype)
            for g in (g for g in gradients if g.dtype == dtype):
                _insert_update(block, next(at), "elementwise_mul", {"X": g, "Y": cast_factor}, g, {"axis": -1})
    block._sync_with_cpp()


def fix_updates(main_prog, is_bfloat16, is_dynamic):
    """Correct Paddle's update operators in a training program in place. The correction is not needed if fusion.fuse
    replaces these operators.

    Args:
        main_prog: training Program after minimize.
        is_bfloat16: whether AMP uses bfloat16.
        is_dynamic: whether dynamic loss scaling skips steps.
    """
    if is_bfloat16:
        _update_masters_in_float32(main_prog)
    if is_dynamic:
        _keep_parameters_on_overflow(main_prog)


def scale_rates(main_prog, factors):
    """Multiply the learning rate of each parameter by its factor, in place. `factors` is {parameter name: factor}. Call
    scale_rates() before fix_updates."""
    block, updates = main_prog.global_block(), table.updates(main_prog)
    at, rates = itertools.count(block.ops.index(updates[0])), {}
    for op in updates:
        factor, rate = factors[op.input("Param")[0]], block.var(op.input("LearningRate")[0])
        if factor == 1:
            continue
        if factor not in rates:
            name = unique_name.generate(f"{rate.name}_scaled")
            rates[factor] = block.create_var(name=name, shape=rate.shape, dtype=rate.dtype, stop_gradient=True)
            _insert_update(block, next(at), "scale", {"X": rate}, rates[factor], {"scale": float(factor)})
        op._rename_input(rate.name, rates[factor].name)
    block._sync_with_cpp()


def place_state(startup_prog):
    """Change a startup program in place to create the entire optimizer state on the device of the program, for the
    custom update operators.

    Paddle creates and updates the powers of Adam's betas on the CPU. The custom operators need these powers on the GPU,
    because a captured step must not read values from the host.
    """
    for op in startup_prog.global_block().ops:
        if op.attr("op_device") == "cpu":
            op._set_attr("op_device", "")


def _update_masters_in_float32(program):
    """Make the optimizer update the float32 master weight of each bfloat16 parameter, and then cast the master weight
    to the parameter. Paddle has no momentum kernel for bfloat16."""
    block = program.global_block()
    for op in reversed(table.updates(program)):
        i = block.ops.index(op)
        if block.var(op.input("Param")[0]).dtype != paddle.bfloat16:
            continue
        param, grad, master = (block.var(op.input(name)[0]) for name in ("Param", "Grad", "MasterParam"))
        grad_fp32 = block.create_var(
            name=unique_name.generate(f"{grad.name}_fp32"), shape=grad.shape, dtype=paddle.float32
        )
        for name, variable in (("Param", master), ("Grad", grad_fp32)):
            op.desc.set_input(name, [variable.name])
        op.desc.set_input("MasterParam", [])
        op.desc.set_output("ParamOut", [master.name])
        op.desc.set_output("MasterParamOut", [])
        op._set_attr("multi_precision", False)
        _insert_update(block, i + 1, "cast", {"X": master}, param, _cast(master, param))
        _insert_update(block, i, "cast", {"X": grad}, grad_fp32, _cast(grad, grad_fp32))
    block._sync_with_cpp()


def _keep_parameters_on_overflow(program):
    """Set the learning rate to 0 in each step that dynamic loss scaling skips. The change affects only update operators
    that cannot skip the step themselves.

    In a skipped step, Paddle only sets the gradients to 0, so momentum and weight decay would still change the
    parameters. Even with a learning rate of 0, a skipped step decays the velocity. The decay is acceptable, because
    Paddle raises the loss scale, which causes skipped steps, only after 2,000 steps without overflow, and because
    preventing the decay would require an additional operator per parameter.
    """
    block = program.global_block()
    scaling = next(op for op in block.ops if op.type == "update_loss_scaling")
    updates = [op for op in table.updates(program) if not ("SkipUpdate" in op.input_names and op.input("SkipUpdate"))]
    if not updates:
        return
    overflow = block.var(scaling.input("FoundInfinite")[0])
    rates = dict.fromkeys(op.input("LearningRate")[0] for op in updates)
    overflows, proceeds, *effective_rates = (
        block.create_var(name=unique_name.generate(name), shape=[1], dtype=paddle.float32)
        for name in ("overflows", "proceeds", *(f"{rate}_unless_overflow" for rate in rates))
    )
    at = block.ops.index(updates[0])
    for rate, effective_rate in zip(rates, effective_rates, strict=True):
        for op in updates:
            op._rename_input(rate, effective_rate.name)
        factors = {"X": block.var(rate), "Y": proceeds}
        _insert_update(block, at, "elementwise_mul", factors, effective_rate, {"axis": -1})
    _insert_update(block, at, "scale", {"X": overflows}, proceeds, {"scale": -1.0, "bias": 1.0})
    _insert_update(block, at, "cast", {"X": overflow}, overflows, _cast(overflow, overflows))
    block._sync_with_cpp()


def keep_statistics_finite(program):
    """Change a program in place, so that the running statistics of a channel remain unchanged if the batch mean or
    variance of the channel is not finite.

    Without this change, Paddle's batch_norm would make the running statistics of the channel infinite or NaN for the
    rest of the run, even if the output is finite. Dynamic loss scaling does not skip updates of running statistics. The
    added operators process all layers together. Custom kernels skip non-finite statistics themselves, so programs with
    custom kernels do not need this change.
    """
    block = program.global_block()
    layers = [op for op in block.ops if "MeanOut" in op.output_names and not op.attr("is_test")]
    layers = [op for op in layers if not op.attr("use_global_stats")]
    if not layers:
        return
    last = block.ops.index(layers[-1]) + 1
    variables = {kind: [block.var(op.output(f"{kind}Out")[0]) for op in layers] for kind in ("Mean", "Variance")}
    sizes = [variable.shape[0] for variable in variables["Mean"]]

    def insert(at, op_type, inputs, dtype=paddle.float32, **attrs):
        name = unique_name.generate(f"running_statistics.{op_type}")
        out = block.create_var(name=name, shape=[sum(sizes)], dtype=dtype, stop_gradient=True)
        attrs["op_role"] = int(OpRole.Forward)
        block._insert_op_without_sync(at, type=op_type, inputs=inputs, outputs={"Out": out}, attrs=attrs)
        return out

    before = {kind: insert(0, "concat", {"X": inputs}, axis=0) for kind, inputs in variables.items()}
    at = itertools.count(last + len(before))
    after = {kind: insert(next(at), "concat", {"X": inputs}, axis=0) for kind, inputs in variables.items()}
    is_finite = [insert(next(at), "isfinite_v2", {"X": value}, paddle.bool) for value in after.values()]
    both = insert(next(at), "logical_and", dict(zip("XY", is_finite, strict=True)), paddle.bool)
    for kind, outputs in variables.items():
        chosen = insert(next(at), "where", {"Condition": both, "X": after[kind], "Y": before[kind]})
        attrs = {"axis": 0, "num": 0, "sections": sizes, "op_role": int(OpRole.Forward)}
        block._insert_op_without_sync(
            next(at), type="split", inputs={"X": chosen}, outputs={"Out": outputs}, attrs=attrs
        )
    block._sync_with_cpp()


def _insert_update(block, i, op_type, inputs, output, attrs):
    role = {"op_role": int(OpRole.Optimize)}
    block._insert_op_without_sync(i, type=op_type, inputs=inputs, outputs={"Out": output}, attrs=attrs | role)


def _cast(source, target):
    return {"in_dtype": source.dtype, "out_dtype": target.dtype}
