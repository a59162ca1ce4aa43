"""Fold batch normalization into the preceding convolutions, for evaluation in half precision and for ONNX files.

In evaluation, BN statistics are fixed, so BN only scales and shifts each channel. The pass multiplies the filters by
the scale, and replaces BN with an addition of the shift. Without folding, half-precision evaluation with Paddle's
kernels spends more time on BN than on convolutions (benchmarks/log/kernels_h200.md).

For prediction and for evaluation in float16 on GPUs, this module also fuses or replaces the convolutions themselves.
"""

import os
from collections.abc import Callable

import paddle
import paddle.nn.functional as F
from paddle import static

from paddle_resnet.graph import block as block_of
from paddle_resnet.graph import rename_input
from paddle_resnet.graph.index import Graph
from paddle_resnet.machine import compat
from paddle_resnet.passes import fusion

# Attributes of the stem's convolution and of its pooling that the custom kernel requires.
STEM = {"strides": [2, 2], "paddings": [3, 3], "dilations": [1, 1], "groups": 1, "data_format": "NHWC"}
STEM_POOL = {"ksize": [3, 3], "strides": [2, 2], "paddings": [1, 1], "data_format": "NHWC", "pooling_type": "max"}
STEM_POOL |= {"global_pooling": False, "adaptive": False, "ceil_mode": False}
NHWC = [0, 2, 3, 1]  # order of the axes of filters in cuDNN's layout for NHWC, relative to Paddle's layout


def fold_batch_norms(program: static.Program, exe: static.Executor, channel_axis: int) -> Callable[[], None]:
    """Fold the BN layers of an evaluation program in place. A BN layer is folded only if _convolution returns its
    convolution.

    Args:
        program: evaluation Program with its parameters in the scope; in half precision, after cast_evaluation_program.
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
    graph, fold_prog, casts = Graph(program), static.Program(), {}
    block = graph.block
    for bn in [op for op in block.ops if op.type == "batch_norm"]:
        conv = _convolution(graph, bn)
        if conv is None:
            continue
        folded, shift = _folded(graph, fold_prog, bn, conv)
        (filters,) = conv.input("Filter")
        casts[filters] = graph.producers.get(filters)
        rename_input(conv, filters, folded.name)
        inputs, outputs = {"X": block.var(bn.input("X")[0]), "Y": shift}, {"Out": block.var(bn.output("Y")[0])}
        graph.replace([bn], bn, "elementwise_add", inputs, outputs, {"axis": channel_axis})
    read = {name for op in block.ops for name in op.input_arg_names}
    graph.replaced += [cast for filters, cast in casts.items() if cast is not None and filters not in read]
    graph.finish()
    return fold_prog


def fuse_convolutions(
    program: static.Program, exe: static.Executor, prefix: str = ""
) -> tuple[int, Callable[[], None]]:
    """Replace each convolution, its BN, its residual addition (if any) and its ReLU with one fused operator of Paddle,
    in place. The fused operator reads and writes each activation only once, and its filters are already in cuDNN's
    layout. If a convolution pads opposite sides of its images differently, its filters are extended by zeros, so that
    the padding becomes symmetric: for asymmetric padding, Paddle copies the images to a larger tensor.

    A convolution is not fused if it has groups, if _convolution does not return it, or if no ReLU follows it; without
    ReLU, fusing it is slower (benchmarks/log/kernels_h200.md).

    Args:
        program: Program in NHWC and float16 for a GPU, after cast_evaluation_program, with its parameters in the scope.
        exe: static.Executor.
        prefix: start of the names of the activations of an inference network in the program. If the program is not a
            training program, the entire program is an inference network.
    Returns:
        (number of fused convolutions, function that recomputes the folded filters as for fold_batch_norms).
    """
    graph, fold_prog, count = Graph(program), static.Program(), 0
    block = graph.block
    for bn in [op for op in block.ops if op.type == "batch_norm" and op.output("Y")[0].startswith(prefix)]:
        tail, conv = fusion.find_tail(graph, bn), _convolution(graph, bn)
        if conv is None or tail.activation != "relu" or conv.attr("groups") != 1:
            continue
        margins = _margins(graph, conv)
        folded, shift = _folded(graph, fold_prog, bn, conv, NHWC, margins)
        inputs = {"Input": block.var(conv.input("Input")[0]), "Filter": folded, "Bias": shift}
        if tail.addend is not None:
            inputs["ResidualData"] = tail.addend
        names = "strides", "paddings", "padding_algorithm", "dilations", "groups", "data_format"
        attrs = {name: conv.attr(name) for name in names} | {"activation": "relu", "split_channels": []}
        attrs |= {"exhaustive_search": False, "workspace_size_MB": 512, "fuse_alpha": 0.0}
        if margins is not None:
            attrs |= {"paddings": [max(sides) for sides in fusion.padding(graph, conv)]}
            attrs |= {"padding_algorithm": "EXPLICIT"}
        ops = [conv, bn, *tail.ops]
        graph.replace(ops, ops[-1], "fused_conv2d_add_act", inputs, {"Output": block.var(tail.out)}, attrs)
        count += 1
    graph.finish()

    def refold():
        exe.run(fold_prog)

    refold()
    return count, refold


def fuse_stem(program: static.Program) -> int:
    """Replace the stem of a ResNet (7x7 convolution with stride 2 and 64 filters, BN, ReLU, and 3x3 max pooling with
    stride 2) with one custom operator, in place. The custom operator reads images with three channels, so the operator
    that adds a fourth channel of zeros is also replaced. The stem is not replaced if the compute capability of the GPU
    is below 8.0 or the images have no fixed size. In float32, the stem is also not replaced if the environment variable
    NVIDIA_TF32_OVERRIDE=0 disables TF32, because the custom operator computes in TF32.

    Args:
        program: inference Program in NHWC, after cast_evaluation_program.
    Returns:
        the number of replaced operators.
    """
    graph = Graph(program)
    for conv in [op for op in graph.block.ops if op.type == "conv2d" and _is_stem(graph, op)]:
        x, out = graph.variables(conv, "Input", "Output").values()
        pad = graph.producers.get(x.name)
        ops = [conv]
        if pad is not None and pad.type == "pad":
            if pad.attr("paddings") != [0] * 7 + [1] or pad.attr("pad_value") != 0:
                continue
            x = graph.variables(pad, "X")["X"]
            ops += [pad] if len(graph.readers[pad.output("Out")[0]]) == 1 else []
        bn = graph.only_reader(out.name, ["batch_norm"])
        tail = fusion.find_tail(graph, bn) if bn is not None else None
        if x.shape[3] != 3 or tail is None or tail.activation != "relu" or tail.addend is not None:
            continue
        pool = graph.only_reader(tail.out, ["pool2d"])
        if pool is None or not _has_attributes(pool, STEM_POOL):
            continue
        inputs = {"X": x} | graph.variables(conv, "Filter") | graph.variables(bn, "Scale", "Bias", "Mean", "Variance")
        outputs = {"Y": graph.variables(pool, "Out")["Out"]}
        ops += [bn, *tail.ops, pool]
        graph.replace(ops, pool, "native_stem_inference", inputs, outputs, {"epsilon": bn.attr("epsilon")})
    return graph.finish()


def _is_stem(graph, conv):
    x, filters = graph.variables(conv, "Input", "Filter").values()
    has_shape = filters.shape in [(64, channels, 7, 7) for channels in (3, 4)] and min(x.shape[1:]) > 0
    is_known = has_shape and _has_attributes(conv, STEM) and filters.dtype == x.dtype and x.dtype in fusion.TYPES
    return is_known and (x.dtype != paddle.float32 or _has_tf32()) and fusion.has_bfloat16_tensor_cores()


def _has_attributes(op, attributes):
    is_explicit = op.attr("padding_algorithm") == "EXPLICIT"
    return is_explicit and all(op.attr(name) == value for name, value in attributes.items())


def _has_tf32():
    return os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def replace_convolutions(program: static.Program, exe: static.Executor) -> int:
    """Replace Paddle's float32 convolutions with custom operators, in place. In float32, Paddle's `conv2d` transposes
    its input and output in each step, because it does not support NHWC; the custom operator native_conv calls cuDNN in
    NHWC. The filters of native_conv are transposed to cuDNN's layout once.

    The 1x1 convolutions that fusion.fuse_pointwise_conv supports are replaced together with their BN, residual addition
    and activation. Because the custom kernel computes in TF32, native_conv replaces these 1x1 convolutions if the
    environment variable NVIDIA_TF32_OVERRIDE=0 disables TF32, or if the GPU does not support TF32.

    A convolution is not replaced if its padding is asymmetric, which cuDNN does not support; if its filters are not a
    parameter; if its images have no fixed size; or if has_depthwise_kernel is true, because fusion.fuse then replaces
    it.

    Args:
        program: inference Program in NHWC and float32 with its parameters in the scope.
        exe: static.Executor.
    Returns:
        the number of replaced operators.
    """
    graph, transpose_prog = Graph(program), static.Program()
    for op in [op for op in graph.block.ops if op.type in ("conv2d", "depthwise_conv2d")]:
        x, filters, out = graph.variables(op, "Input", "Filter", "Output").values()
        if not filters.persistable or op.attr("data_format") != "NHWC" or min(x.shape[1:]) < 0:
            continue
        is_pointwise = _has_tf32() and fusion.is_pointwise(graph, op, [paddle.float32])
        if is_pointwise and fusion.fuse_pointwise_conv(graph, op):
            continue
        padding = fusion.padding(graph, op)
        is_symmetric = all(begin == end for begin, end in padding)
        if not is_symmetric or (op.type == "depthwise_conv2d" and fusion.has_depthwise_kernel(graph, op)):
            continue
        transposed = _persistable(graph.block, f"{filters.name}.nhwc", [filters.shape[i] for i in NHWC], x.dtype)
        with static.program_guard(transpose_prog):
            block = block_of(transpose_prog)
            source, target = (_persistable(block, v.name, v.shape, v.dtype) for v in (filters, transposed))
            paddle.assign(paddle.transpose(source, NHWC), output=target)
        dilations = [1, 1] if op.attr("padding_algorithm") == "SAME" else op.attr("dilations")  # like Paddle
        attrs = {"strides": op.attr("strides"), "paddings": [begin for begin, _ in padding], "dilations": dilations}
        attrs |= {"groups": op.attr("groups")}
        graph.replace([op], op, "native_conv", {"X": x, "Filter": transposed}, {"Y": out}, attrs)
    exe.run(transpose_prog)
    return graph.finish()


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


def _margins(graph, conv):
    """Return the rows and columns of zeros by which the filters of a convolution must be extended so that the padding
    of its images becomes symmetric, as ((top, bottom), (left, right)). Return None if the padding is symmetric or
    unknown, or if the filters are dilated."""
    x = graph.variables(conv, "Input")["Input"]
    if min(x.shape[1:3]) < 0 or conv.attr("dilations") != [1, 1]:
        return None
    padding = fusion.padding(graph, conv)
    margins = tuple((max(sides) - sides[0], max(sides) - sides[1]) for sides in padding)
    return margins if any(map(any, margins)) else None


def _folded(graph, fold_prog, bn, conv, order=(0, 1, 2, 3), margins=None):
    """Create and return variables for the folded filters, which are extended by `margins` (see _margins) and whose axes
    are transposed to `order`, and for the shift. Append the operators that compute them to `fold_prog`."""
    block, margins = graph.block, margins or ((0, 0), (0, 0))
    filters, out = _filters(graph, conv), graph.variables(conv, "Output")["Output"]
    name = f"{filters.name}.{bn.input('Mean')[0]}"  # convolutions that share filters can precede different BN layers
    shape = [*filters.shape[:2], *(n + sum(margin) for n, margin in zip(filters.shape[2:], margins, strict=True))]
    folded = _persistable(block, f"{name}.folded", [shape[axis] for axis in order], out.dtype)
    shift = _persistable(block, f"{name}.shift", [filters.shape[0]], out.dtype)
    with static.program_guard(fold_prog):
        _compute(block_of(fold_prog), block, bn, filters, folded, shift, order, margins)
    return folded, shift


def _compute(fold_block, block, bn, filters, folded, shift, order, margins):
    """Append operators that compute the shift and the folded filters, for _folded."""
    scale, bias, mean, variance, filters = (
        _persistable(fold_block, variable.name, variable.shape, variable.dtype)
        for variable in (*(block.var(bn.input(name)[0]) for name in ("Scale", "Bias", "Mean", "Variance")), filters)
    )
    factor = scale / compat.sqrt(variance + bn.attr("epsilon"))
    product = filters.astype("float32") * paddle.reshape(factor, [-1, 1, 1, 1])
    rows, columns = margins
    if any(rows + columns):
        product = F.pad(product, [*columns, *rows])
    if list(order) != [0, 1, 2, 3]:
        product = paddle.transpose(product, list(order))
    for value, target in ((product, folded), (bias - mean * factor, shift)):
        target = _persistable(fold_block, target.name, target.shape, target.dtype)
        paddle.assign(value.astype(target.dtype), output=target)


def _persistable(block, name, shape, dtype):
    return block.create_var(name=name, shape=shape, dtype=dtype, persistable=True)
