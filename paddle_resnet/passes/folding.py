"""Fold batch normalization into the preceding convolutions, for evaluation on a GPU.

In evaluation, BN statistics are fixed, so BN only scales and shifts each channel. The pass multiplies the filters by
the scale, and replaces BN with an addition of the shift. Without this pass, half-precision evaluation spends more time
on BN than on convolutions (benchmarks/log/step_h200_2026-11-21.md).
"""

import paddle
from paddle import static

from paddle_resnet.machine import compat
from paddle_resnet.passes import fusion


def fold_batch_norms(program, exe, channel_axis):
    """Fold the BN layers of a half-precision evaluation program in place.

    Args:
        program: evaluation Program after cast_evaluation_program, with its parameters in the scope.
        exe: static.Executor.
        channel_axis: channel axis of the images, 1 or -1.
    Returns:
        a function without arguments that recomputes the folded filters from the current parameters. Call this function
        before each evaluation.
    """
    fold_prog = _fold(program, channel_axis)

    def refold():
        exe.run(fold_prog)

    refold()
    return refold


def _fold(program, channel_axis):
    """Rewrite the program, and return a second program that computes the folded filters and the shifts."""
    graph, fold_prog, casts = fusion.Graph(program.global_block()), static.Program(), {}
    block = graph.block
    for bn in [op for op in block.ops if op.type == "batch_norm"]:
        conv = _convolution(graph, bn)
        if conv is None:
            continue
        folded, shift = _folded(graph, fold_prog, bn, conv)
        (filters,) = conv.input("Filter")
        casts[filters] = graph.producers.get(filters)
        conv._rename_input(filters, folded.name)
        inputs, outputs = {"X": block.var(bn.input("X")[0]), "Y": shift}, {"Out": block.var(bn.output("Y")[0])}
        graph.replace([bn], bn, "elementwise_add", inputs, outputs, {"axis": channel_axis})
    read = {name for op in block.ops for name in op.input_arg_names}
    graph.replaced += [cast for filters, cast in casts.items() if cast is not None and filters not in read]
    graph.finish()
    return fold_prog


def fuse_convolutions(program, exe):
    """Replace each convolution, its BN, its residual addition (if any) and its ReLU (if any) with one fused operator of
    Paddle, in place. The fused operator reads and writes each activation only once, and its filters are already in
    cuDNN's layout. In float32, it also replaces Paddle's `conv2d`, which transposes its input and output in each step.

    A convolution is not fused if an activation other than ReLU follows it, if it has groups, or if it is in bfloat16.
    Without an activation, it is fused only in float32 and without a residual addition; in float16, fusing it is slower
    (benchmarks/log/prediction_h200_2026-11-26.md).

    Args:
        program: inference Program in NHWC for a GPU, after cast_evaluation_program, with its parameters in the scope.
        exe: static.Executor.
    Returns:
        the number of fused convolutions.
    """
    graph, fold_prog, count = fusion.Graph(program.global_block()), static.Program(), 0
    block = graph.block
    for bn in [op for op in block.ops if op.type == "batch_norm"]:
        tail, conv = fusion.find_tail(graph, bn), _convolution(graph, bn)
        if conv is None or not _can_fuse(graph, conv, tail):
            continue
        folded, shift = _folded(graph, fold_prog, bn, conv, [0, 2, 3, 1])
        inputs = {"Input": block.var(conv.input("Input")[0]), "Filter": folded, "Bias": shift}
        if tail.addend is not None:
            inputs["ResidualData"] = tail.addend
        names = "strides", "paddings", "padding_algorithm", "dilations", "groups", "data_format"
        attrs = {name: conv.attr(name) for name in names} | {"activation": tail.activation or "identity"}
        attrs |= {"split_channels": [], "exhaustive_search": False, "workspace_size_MB": 512, "fuse_alpha": 0.0}
        ops = [conv, bn, *tail.ops]
        graph.replace(ops, ops[-1], "fused_conv2d_add_act", inputs, {"Output": block.var(tail.out)}, attrs)
        count += 1
    graph.finish()
    exe.run(fold_prog)
    return count


def _can_fuse(graph, conv, tail):
    if conv.type != "conv2d" or conv.attr("groups") != 1 or conv.attr("data_format") != "NHWC":
        return False
    dtypes = {"relu": (paddle.float16, paddle.float32), "": (paddle.float32,)}.get(tail.activation, ())
    return graph.variables(conv, "Output")["Output"].dtype in dtypes


def _convolution(graph, bn):
    """Return the convolution whose output is read only by a BN layer and whose filters are a parameter, or None."""
    (name,) = bn.input("X")
    conv = graph.producers.get(name)
    is_conv = conv is not None and conv.type in ("conv2d", "depthwise_conv2d")
    is_folded = is_conv and graph.only_reader(name, ["batch_norm"]) is not None and _filters(graph, conv).persistable
    return conv if is_folded else None


def _filters(graph, conv):
    """Return the filters of a convolution before the cast, which exists only at AMP level O1."""
    (name,) = conv.input("Filter")
    cast = graph.producers.get(name)
    return graph.block.var(cast.input("X")[0] if cast is not None and cast.type == "cast" else name)


def _folded(graph, fold_prog, bn, conv, order=(0, 1, 2, 3)):
    """Create variables for the folded filters, whose axes are transposed to `order`, and for the shift. Append the
    operators that compute them to `fold_prog`."""
    block = graph.block
    filters, out = _filters(graph, conv), graph.variables(conv, "Output")["Output"]
    name = f"{filters.name}.{bn.input('Mean')[0]}"  # convolutions that share filters can precede different BN layers
    folded = _persistable(block, f"{name}.folded", [filters.shape[axis] for axis in order], out.dtype)
    shift = _persistable(block, f"{name}.shift", [filters.shape[0]], out.dtype)
    with static.program_guard(fold_prog):
        _compute(fold_prog.global_block(), block, bn, filters, folded, shift, order)
    return folded, shift


def _compute(fold_block, block, bn, filters, folded, shift, order=(0, 1, 2, 3)):
    """Append operators that compute the shift and the folded filters, whose axes are transposed to `order`."""
    scale, bias, mean, variance, filters = (
        _persistable(fold_block, variable.name, variable.shape, variable.dtype)
        for variable in (*(block.var(bn.input(name)[0]) for name in ("Scale", "Bias", "Mean", "Variance")), filters)
    )
    factor = scale / compat.sqrt(variance + bn.attr("epsilon"))
    product = filters.astype("float32") * paddle.reshape(factor, [-1, 1, 1, 1])
    if list(order) != [0, 1, 2, 3]:
        product = paddle.transpose(product, list(order))
    for value, target in ((product, folded), (bias - mean * factor, shift)):
        target = _persistable(fold_block, target.name, target.shape, target.dtype)
        paddle.assign(value.astype(target.dtype), output=target)


def _persistable(block, name, shape, dtype):
    return block.create_var(name=name, shape=shape, dtype=dtype, persistable=True)
