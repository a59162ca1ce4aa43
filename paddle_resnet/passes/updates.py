"""Paddle's operators that update the parameters, corrected where their result is wrong."""

import itertools

import paddle
from paddle.utils import unique_name

from paddle_resnet.optimizers import table

OpRole = paddle.base.core.op_proto_and_checker_maker.OpRole


def mend_updates(args, main_prog):
    """Correct the update operators of a training program in place, where fusion.fuse does not replace them."""
    if args.kernels == "native":
        return
    if args.amp and args.amp_dtype == "bfloat16":
        _update_masters_in_float32(main_prog)
    if args.use_dynamic_loss_scaling:
        _keep_parameters_on_overflow(main_prog)


def place_state(args, startup_prog):
    """Make the start-up program create the optimizer's state where the program runs, in place.

    Paddle creates the powers of Adam's betas on the CPU, and its operators change them there. A custom operator keeps
    them on the GPU, so a captured step needs no value from the host.
    """
    if args.kernels == "native":
        for op in startup_prog.global_block().ops:
            if op.attr("op_device") == "cpu":
                op._set_attr("op_device", "")


def _update_masters_in_float32(program):
    """Make the optimizer update the float32 master of each bfloat16 parameter, then cast it to the parameter. Paddle
    lacks a momentum kernel for bfloat16, with and without masters."""
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
    """Make the learning rate 0 in a step that dynamic loss scaling skips, where Paddle's operator cannot skip it.

    Paddle then sets the gradients to 0, so momentum and weight decay would still move the parameters. One
    effect stays: momentum decays as for a gradient of 0, in one of thousands of steps. To avoid it would take one more
    operator for each parameter in every step.
    """
    block = program.global_block()
    scaling = next(op for op in block.ops if op.type == "update_loss_scaling")
    updates = [op for op in table.updates(program) if not ("SkipUpdate" in op.input_names and op.input("SkipUpdate"))]
    if not updates:
        return
    overflow = block.var(scaling.input("FoundInfinite")[0])
    rate = block.var(updates[0].input("LearningRate")[0])
    overflows, proceeds, effective_rate = (
        block.create_var(name=unique_name.generate(name), shape=[1], dtype=paddle.float32)
        for name in ("overflows", "proceeds", f"{rate.name}_unless_overflow")
    )
    for op in updates:
        op._rename_input(rate.name, effective_rate.name)
    at = block.ops.index(updates[0])
    _insert_update(block, at, "elementwise_mul", {"X": rate, "Y": proceeds}, effective_rate, {"axis": -1})
    _insert_update(block, at, "scale", {"X": overflows}, proceeds, {"scale": -1.0, "bias": 1.0})
    _insert_update(block, at, "cast", {"X": overflow}, overflows, _cast(overflow, overflows))
    block._sync_with_cpp()


def keep_statistics_finite(program):
    """Let channels whose mean or variance of a batch is not finite keep their running statistics, in place.

    Paddle's batch_norm would make the running statistics infinite or NaN for the rest of the run, although the output
    may be finite, and dynamic loss scaling does not skip the statistics of a step. The added operators work on all
    layers at once. Custom kernels have this check inside.
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
