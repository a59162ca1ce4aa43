"""Replace Paddle's operators with custom operators (native/). In NHWC, custom operators compute BN, pooling, sigmoid
and channel scaling (squeeze-and-excitation), concatenations of channels, depthwise convolutions, and the filter
gradient of 1x1 convolutions with at most POINTWISE_CHANNELS input or output channels. Custom operators also compute
dropout, and the multiplication of images by a parameter of one element with the following addition of another
(LearnableAffine in models/pphgnet_v2.py). BN is fused with the next activation, or with the residual addition and, if
it follows, ReLU or Mish; in evaluation, BN is also fused with a preceding depthwise convolution (without residual
addition) or 1x1 convolution. fuse() lists further conditions.

fuse() is called after Paddle has added casts, gradients and all-reduces, so it does not change parameters, checkpoints
or communication.
"""

from collections import namedtuple
from collections.abc import Collection

import paddle
from paddle import static
from paddle.base.framework import Operator

from paddle_resnet.graph import block as block_of
from paddle_resnet.graph import remove_round_trips, set_output
from paddle_resnet.graph.index import GRADIENT_SUMS, Graph

TYPES = (paddle.float32, paddle.float16, paddle.bfloat16)
# The number of channels must be a multiple of CHANNELS, the size of the smallest vector that a kernel thread loads.
CHANNELS = 4
# A custom kernel computes the filter gradient of a 1x1 convolution if the data type is one of POINTWISE_TYPES, the
# number of input or output channels is at most POINTWISE_CHANNELS, and the images have at least POINTWISE_PIXELS
# pixels each. For smaller images, Paddle's operator computes this gradient.
POINTWISE_TYPES = (paddle.float16, paddle.bfloat16)
POINTWISE_CHANNELS, POINTWISE_PIXELS = 32, 14 * 14
# In inference, a custom kernel computes a 1x1 convolution together with its BN if the convolution has at most this
# number of input channels. With more channels, cuDNN is faster (benchmarks/log/kernels_h200.md).
POINTWISE_BN_CHANNELS = {paddle.float16: 672, paddle.bfloat16: 672, paddle.float32: 128}

# Activations that the kernels fuse: {Paddle's operator: (its required attributes, name in native/activations.h)}.
ACTIVATIONS = {
    "relu": ({}, "relu"),
    "relu6": ({"threshold": 6.0}, "relu6"),
    "hard_swish": ({"threshold": 6.0, "scale": 6.0, "offset": 3.0}, "hard_swish"),
    "silu": ({}, "silu"),
    "swish": ({"beta": 1.0}, "silu"),
    "mish": ({"threshold": 20.0}, "mish"),
}

CONVOLUTIONS = ("conv2d", "depthwise_conv2d")

# Activations that the kernels fuse with BN and a residual addition, in addition to "linear".
ADDED = ("relu", "mish")

# The operators that follow a BN operator and are fused with it: an activation, an addition, an addition and an
# activation, or none. The fields are these operators, the name of their result, the name of the activation ("linear"
# after an addition without activation, "" without both), and the variable that is added to the BN output (or None).
Tail = namedtuple("Tail", "ops out activation addend")


def fuse(program: static.Program, uses_onednn: bool = False) -> int:
    """Replace operators in a program with custom operators, and remove casts from half precision to float32 and back
    (graph.remove_round_trips), in place. Operators that the custom kernels do not support are not replaced. All kernels
    except those of dropout, LearnableAffine and oneDNN require that the size of the last axis, which is the number of
    channels in NHWC, is a multiple of 4. BN with fixed statistics is not replaced if a gradient passes through it. The
    functions _is_plain_pool, _is_global_average_pool, _scales_channels, _affine_addition, _concatenates_channels,
    has_depthwise_kernel and is_pointwise check the other conditions.

    Args:
        program: training Program after minimize, or evaluation Program after cast_evaluation_program.
        uses_onednn: whether custom operators also compute all other float32 convolutions in NHWC, with oneDNN, which
            requires a CPU.
    Returns:
        the number of replaced operators.
    """
    remove_round_trips(block_of(program))
    graph = Graph(program)
    for op in list(graph.block.ops):
        if op in graph.replaced:
            continue
        if op.type == "batch_norm" and op.attr("data_layout") == "NHWC" and _fills_vectors(graph, op):
            if _has_fixed_statistics(op):
                _fuse_inference(graph, op)
            elif not op.attr("is_test"):
                _fuse_training(graph, op)
        elif op.type == "pool2d" and _is_plain_pool(graph, op) and _fills_vectors(graph, op):
            _fuse_pool(graph, op)
        elif op.type == "pool2d" and _is_global_average_pool(op) and _fills_vectors(graph, op):
            _fuse_global_average_pool(graph, op)
        elif op.type == "elementwise_mul" and _scales_channels(graph, op) and _fills_vectors(graph, op):
            _fuse_channel_scaling(graph, op)
        elif op.type == "elementwise_mul" and (add := _affine_addition(graph, op)) is not None:
            _fuse_affine(graph, op, add)
        elif op.type == "sigmoid" and _fills_vectors(graph, op):
            _fuse_sigmoid(graph, op)
        elif op.type == "concat" and _concatenates_channels(graph, op):
            _fuse_concat(graph, op)
        elif op.type == "depthwise_conv2d" and has_depthwise_kernel(graph, op):
            _fuse_depthwise_conv(graph, op)
        elif uses_onednn and op.type in CONVOLUTIONS and op.attr("data_format") == "NHWC" and _has_float32(graph, op):
            _fuse_conv(graph, op)
        elif op.type == "conv2d" and is_pointwise(graph, op, POINTWISE_TYPES):
            fuse_pointwise_conv(graph, op)
            _split_pointwise_gradient(graph, op)
        elif op.type == "dropout" and op.input("Seed") and not op.attr("is_test"):
            _fuse_dropout(graph, op)
    return graph.finish()


def _fills_vectors(graph, op, name="X"):
    x = graph.variables(op, name)[name]
    return x.dtype in TYPES and len(x.shape) > 0 and x.shape[-1] % CHANNELS == 0


def paddle_depthwise(program: static.Program) -> tuple[str, ...]:
    """Return a tuple of the distinct depthwise convolutions in NHWC that Paddle's kernels compute.

    Each convolution is described by a string such as "7x7, stride 2, 12 channels".
    """
    block = block_of(program)
    layers = {}  # used as an ordered set
    for op in block.ops:
        if op.type == "depthwise_conv2d" and op.attr("data_format") == "NHWC":
            size = "x".join(str(n) for n in block.var(op.input("Filter")[0]).shape[2:])
            channels = block.var(op.input("Input")[0]).shape[-1]
            layers[f"{size}, stride {op.attr('strides')[0]}, {channels} channels"] = None
    return tuple(layers)


def find_tail(graph: Graph, bn: Operator) -> Tail:
    """Return the Tail of a BN operator, which describes the operators that are fused with this operator."""
    y = bn.output("Y")[0]
    if activation := _activation(graph, y):
        op, name = activation
        return Tail([op], op.output("Out")[0], name, None)
    add = graph.only_reader(y, ["elementwise_add"])
    if add is not None:
        first, second = graph.variables(add, "X", "Y").values()
        is_like = first.shape == second.shape and first.dtype == second.dtype and first.name != second.name
        # If both summands are outputs of BN operators, the addition is fused with the BN of the first summand.
        is_from_bn = first.name in graph.producers and graph.producers[first.name].type == "batch_norm"
        is_taken = first.name != y and is_from_bn and graph.only_reader(first.name, ["elementwise_add"]) is add
        if is_like and not is_taken:
            addend = second if first.name == y else first
            op, name = _activation(graph, add.output("Out")[0]) or (None, "")
            if name in ADDED:
                return Tail([add, op], op.output("Out")[0], name, addend)
            if graph.gradient(add) is not None or not graph.has_gradient([add]):
                return Tail([add], add.output("Out")[0], "linear", addend)
    return Tail([], y, "", None)


def _activation(graph, name):
    """Return (operator, its name in ACTIVATIONS) if the only reader of a variable is an activation with a kernel;
    otherwise None."""
    op = graph.only_reader(name, ACTIVATIONS)
    if op is None:
        return None
    attributes, activation = ACTIVATIONS[op.type]
    return (op, activation) if all(op.attr(key) == value for key, value in attributes.items()) else None


def _fuse_training(graph, bn):
    block, tail = graph.block, find_tail(graph, bn)
    ops = [bn, *tail.ops]
    gradients = [graph.gradient(op) for op in reversed(ops)]
    if None in gradients:
        return  # for example, the layer is partly or completely frozen
    buffer = graph.coalesced.get(gradients[-1].output("Scale@GRAD")[0])
    if buffer is not None and not graph.is_before(buffer, gradients[0]):
        return  # the fused operator would run before the gradient buffer exists
    coefficients = block.create_var(name=f"{tail.out}.coefficients", dtype=paddle.float32, stop_gradient=True)
    parameters = graph.variables(bn, "X", "Scale", "Bias", "Mean", "Variance")
    outputs = {"Y": block.var(tail.out), "Coefficients": coefficients} | graph.variables(bn, "MeanOut", "VarianceOut")
    attrs = {name: bn.attr(name) for name in ("momentum", "epsilon")}

    by_name = graph.variables(gradients[-1], "X@GRAD", "Scale@GRAD", "Bias@GRAD")
    dx, dscale, dbias = by_name.values()
    backward_inputs = {"X": parameters["X"], "Coefficients": coefficients}
    if buffer is not None:
        # The gradients of scale and bias are located in the buffer of a fused all-reduce.
        backward_inputs["Into@VECTOR@OPTIONAL"] = [dscale, dbias]
    gradient_outputs = {"DX": dx, "DScale": dscale, "DBias": dbias}
    out_gradient = f"{tail.out}@GRAD"
    if tail.addend is None:
        inputs = backward_inputs | {"DY": block.var(out_gradient)}
        graph.replace(ops, ops[-1], "native_bn_act", parameters, outputs, attrs | {"activation": tail.activation})
        graph.replace(
            gradients, gradients[0], "native_bn_act_backward", inputs, gradient_outputs, {"activation": tail.activation}
        )
        return
    summands, sums = graph.summands(out_gradient)
    parameters |= {"Z": tail.addend}
    inputs = backward_inputs | {"DY@VECTOR": summands}
    side = "Y@GRAD" if tail.ops[0].input("Y")[0] == tail.addend.name else "X@GRAD"
    gradient_outputs |= {"DZ": graph.variables(gradients[-2], side)[side]}
    if tail.activation == "relu":
        mask = block.create_var(name=f"{tail.out}.mask", dtype=paddle.uint8, stop_gradient=True)
        name, outputs["Mask"], inputs["Mask"], activation = "native_bn_add_relu", mask, mask, {}
    else:
        name, inputs["Z"], activation = "native_bn_add_act", tail.addend, {"activation": tail.activation}
    graph.replace(ops, ops[-1], name, parameters, outputs, attrs | activation)
    graph.replace([*sums, *gradients], gradients[0], f"{name}_backward", inputs, gradient_outputs, activation)


def _has_fixed_statistics(bn):
    return bn.attr("use_global_stats") or (bn.attr("is_test") and not bn.attr("trainable_statistics"))


def _fuse_inference(graph, bn):
    tail = find_tail(graph, bn)
    ops = [bn, *tail.ops]
    if graph.has_gradient(ops):
        return
    inputs = graph.variables(bn, "X", "Scale", "Bias", "Mean", "Variance")
    if tail.addend is not None:
        inputs["Z@OPTIONAL"] = tail.addend
    attrs = {"epsilon": bn.attr("epsilon"), "activation": tail.activation}
    graph.replace(ops, ops[-1], "native_bn_inference", inputs, {"Y": graph.block.var(tail.out)}, attrs)


def _is_plain_pool(graph, op):
    if op.attr("data_format") != "NHWC" or op.attr("padding_algorithm") != "EXPLICIT":
        return False
    (kernel, *kernels), (stride, *strides) = op.attr("ksize"), op.attr("strides")
    paddings = _square_padding(graph, op)
    is_plain = not any(op.attr(name) for name in ("global_pooling", "adaptive"))
    if kernels != [kernel] or strides != [stride] or paddings is None or not is_plain:
        return False
    fits_a_byte = kernel <= 15  # the kernel for max pooling stores positions in the window as bytes
    overlaps_the_image = max(paddings) < kernel  # every window contains at least one pixel of the image
    has_one_padding = op.attr("pooling_type") == "max" or paddings[0] == paddings[1]
    size = graph.variables(op, "X")["X"].shape[1:3]
    has_fixed_size = min(size) > 0
    rounds_up = op.attr("ceil_mode") and any((n + sum(paddings) - kernel) % stride for n in size)
    return fits_a_byte and overlaps_the_image and has_one_padding and has_fixed_size and not rounds_up


def _fuse_pool(graph, pool):
    x, out = graph.variables(pool, "X", "Out").values()
    padding, padding_end = _square_padding(graph, pool)
    attrs = {"kernel": pool.attr("ksize")[0], "stride": pool.attr("strides")[0], "padding": padding}
    if pool.attr("pooling_type") == "max":
        name, more = "native_max_pool", {"padding_end": padding_end}
        positions = graph.block.create_var(name=f"{out.name}.positions", dtype=paddle.uint8, stop_gradient=True)
        results = {"Positions": positions}
    else:
        name, results, more = "native_average_pool", {}, {}
        attrs["excludes_padding"] = pool.attr("exclusive")
    graph.replace([pool], pool, name, {"X": x}, {"Y": out, **results}, attrs | more)
    gradient = graph.gradient(pool)
    if gradient is not None:
        summands, sums = graph.summands(f"{out.name}@GRAD")
        sizes = {"height": x.shape[1], "width": x.shape[2]}
        dx = graph.variables(gradient, "X@GRAD")["X@GRAD"]
        inputs = {"DY@VECTOR": summands, **results}
        graph.replace([*sums, gradient], gradient, f"{name}_backward", inputs, {"DX": dx}, attrs | sizes)


def _is_global_average_pool(op):
    is_mean = op.attr("pooling_type") == "avg" and op.attr("data_format") == "NHWC"
    return is_mean and (op.attr("global_pooling") or (op.attr("adaptive") and op.attr("ksize") == [1, 1]))


def _fuse_global_average_pool(graph, pool):
    x, out = graph.variables(pool, "X", "Out").values()
    graph.replace([pool], pool, "native_image_sums", {"X": x}, {"Out": out}, {"mean": True})


def _scales_channels(graph, op):
    """Return whether a multiplication has one factor per image and channel, as in squeeze-and-excitation."""
    x, factors = graph.variables(op, "X", "Y").values()
    is_scale = len(x.shape) == 4 and factors.shape == (x.shape[0], 1, 1, x.shape[3])
    return is_scale and factors.shape != x.shape and factors.dtype == x.dtype


def _fuse_channel_scaling(graph, mul):
    """Replace a multiplication and its gradient. In squeeze-and-excitation, the gradient of the image is the sum of the
    multiplication's gradient and the pooling operator's gradient; one operator computes this sum."""
    x, factors, out = graph.variables(mul, "X", "Y", "Out").values()
    graph.replace([mul], mul, "native_scale_images", {"X": x, "Factors": factors}, {"Y": out}, {})
    gradient = graph.gradient(mul)
    if gradient is None:
        return
    dy, dx, dfactors = graph.variables(gradient, "Out@GRAD", "X@GRAD", "Y@GRAD").values()
    inputs = {"X": x, "Y@OPTIONAL": dy}
    graph.replace([gradient], gradient, "native_image_sums", inputs, {"Out": dfactors}, {"mean": False})
    inputs = {"X": dy, "Factors": factors}
    pool_gradient, add = _addition_of_pool_gradient(graph, dx.name)
    if add is None:
        graph.replace([], gradient, "native_scale_images", inputs, {"Y": dx}, {})
        return
    inputs["Offsets@OPTIONAL"] = graph.variables(pool_gradient, "Out@GRAD")["Out@GRAD"]
    dx = graph.variables(add, "Out")["Out"]
    graph.replace([pool_gradient, add], add, "native_scale_images", inputs, {"Y": dx}, {})


def _addition_of_pool_gradient(graph, name):
    """If the only reader of a gradient adds it to the gradient of global average pooling, return (gradient operator of
    the pooling, operator that adds). In all other cases, return (None, None)."""
    add, *others = graph.readers.get(name, [None])
    # The custom operator for a preceding BN or pooling layer may already compute this sum (see Graph.summands).
    if others or add is None or add.type not in GRADIENT_SUMS or add in graph.replaced:
        return None, None
    producers = [graph.producers[summand] for summand in add.input_arg_names if summand != name]
    if len(producers) != 1 or producers[0].type != "pool2d_grad" or not _is_global_average_pool(producers[0]):
        return None, None
    return producers[0], add


def _affine_addition(graph, mul):
    """If a multiplication of images by a parameter of one element is followed by the addition of another, and if the
    custom operator supports their type, return the addition; otherwise, return None."""
    x, product = graph.variables(mul, "X", "Out").values()
    add = graph.only_reader(product.name, ["elementwise_add"])
    if add is None or add.input("X") != [product.name] or len(x.shape) != 4 or x.dtype not in TYPES:
        return None
    return add if all(_is_number(graph, op.input("Y")[0], x.dtype) for op in (mul, add)) else None


def _is_number(graph, name, dtype):
    """Return whether a variable is a parameter of one element or, at AMP level O1, the cast of one."""
    number, producer = graph.block.var(name), graph.producers.get(name)
    source = producer.input("X")[0] if producer is not None and producer.type == "cast" else name
    return number.shape == (1,) and number.dtype == dtype and graph.block.var(source).persistable


def _fuse_affine(graph, mul, add):
    """Replace a multiplication and an addition with parameters of one element, and their gradients. The operators are
    not replaced if the backward pass includes only the addition, or if the fused gradient would run before the buffers
    of a fused all-reduce exist, in which the gradients of the parameters are located."""
    inputs = graph.variables(mul, "X") | {"Scale": graph.variables(mul, "Y")["Y"]}
    bias, out = graph.variables(add, "Y", "Out").values()
    add_gradient, mul_gradient = (graph.gradient(op, is_complete=False) for op in (add, mul))
    if add_gradient is not None:
        if mul_gradient is None:
            return
        dbias = graph.output_or_unused(add_gradient, "Y@GRAD", bias)
        dx = graph.output_or_unused(mul_gradient, "X@GRAD", inputs["X"])
        dscale = graph.output_or_unused(mul_gradient, "Y@GRAD", inputs["Scale"])
        buffers = [graph.coalesced[v.name] for v in (dscale, dbias) if v.name in graph.coalesced]
        if len(buffers) == 1 or not all(graph.is_before(buffer, add_gradient) for buffer in buffers):
            return
        backward_inputs = inputs | {"DY": graph.variables(add_gradient, "Out@GRAD")["Out@GRAD"]}
        if buffers:
            backward_inputs["Into@VECTOR@OPTIONAL"] = [dscale, dbias]
        outputs, gradients = {"DX": dx, "DScale": dscale, "DBias": dbias}, [add_gradient, mul_gradient]
        graph.replace(gradients, add_gradient, "native_affine_backward", backward_inputs, outputs, {})
    graph.replace([mul, add], add, "native_affine", inputs | {"Bias": bias}, {"Y": out}, {})


def _fuse_sigmoid(graph, op):
    """Replace a sigmoid operator and its gradient. In the build of the benchmarks, half of the values of Paddle's
    gradient are wrong in float16 (benchmarks/log/kernels_h200.md)."""
    x, y = graph.variables(op, "X", "Out").values()
    graph.replace([op], op, "native_sigmoid", {"X": x}, {"Y": y}, {})
    gradient = graph.gradient(op)
    if gradient is not None:
        dy, dx = graph.variables(gradient, "Out@GRAD", "X@GRAD").values()
        graph.replace([gradient], gradient, "native_sigmoid_backward", {"Y": y, "DY": dy}, {"DX": dx}, {})


def _concatenates_channels(graph, op):
    """Return whether an operator concatenates two images along the channels."""
    parts = [graph.block.var(name) for name in op.input("X")]
    is_plain = len(parts) == 2 and not op.input("AxisTensor") and op.attr("axis") in (3, -1)
    has_channels = all(len(x.shape) == 4 and x.shape[3] % CHANNELS == 0 and x.dtype in TYPES for x in parts)
    return is_plain and has_channels


def _fuse_concat(graph, concat):
    x, y = (graph.block.var(name) for name in concat.input("X"))
    out = graph.variables(concat, "Out")["Out"]
    graph.replace([concat], concat, "native_concat", {"X": x, "Y": y}, {"Out": out}, {})
    gradient = graph.gradient(concat)
    if gradient is not None and len(set(gradient.output("X@GRAD")) - {"@EMPTY@"}) == 2:
        dx, dy = (graph.block.var(name) for name in gradient.output("X@GRAD"))
        inputs = {"In": graph.variables(gradient, "Out@GRAD")["Out@GRAD"]}
        graph.replace([gradient], gradient, "native_split", inputs, {"X": dx, "Y": dy}, {"channels": x.shape[3]})


def has_depthwise_kernel(graph: Graph, op: Operator) -> bool:
    """Return whether a custom kernel computes a depthwise convolution."""
    x, filters = graph.variables(op, "Input", "Filter").values()
    stride = op.attr("strides")
    is_plain = len(set(stride)) == 1 and op.attr("dilations") == [1, 1] and op.attr("data_format") == "NHWC"
    has_filter = filters.shape in [(x.shape[-1], 1, size, size) for size in (3, 5)] and filters.dtype == x.dtype
    has_fixed_size = min(x.shape[1:]) > 0
    is_known = is_plain and stride[0] in (1, 2) and has_filter and has_fixed_size
    return is_known and _square_padding(graph, op) is not None and _fills_vectors(graph, op, "Input")


def _square_padding(graph, op):
    """Return the padding of a convolution or pooling as (rows at the top, rows at the bottom), or None if the columns
    are padded differently."""
    rows, columns = padding(graph, op)
    return rows if rows == columns else None


def padding(graph: Graph, op: Operator) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the padding of a convolution or pooling of NHWC images as ((top, bottom), (left, right))."""
    algorithm, values = op.attr("padding_algorithm"), op.attr("paddings")
    if algorithm == "SAME":
        # Pad until the last window covers the last pixel. If the total padding is odd, the end gets the extra pixel.
        x, filters = graph.variables(op, "Input", "Filter").values()
        axes = zip(x.shape[1:3], op.attr("strides"), filters.shape[2:], strict=True)
        sums = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size, stride, kernel in axes]
        return tuple((total // 2, -(-total // 2)) for total in sums)
    if algorithm == "VALID":
        return (0, 0), (0, 0)
    return (tuple(values[:2]), tuple(values[2:])) if len(values) == 4 else tuple((n, n) for n in values)


def _fuse_depthwise_conv(graph, op):
    x, filters, out = graph.variables(op, "Input", "Filter", "Output").values()
    top, bottom = _square_padding(graph, op)
    inputs, attrs = {"X": x, "Filter": filters}, {"stride": op.attr("strides")[0]}
    attrs |= {"padding": top, "padding_end": bottom}
    bn = graph.only_reader(out.name, ["batch_norm"])
    if bn is not None and bn.attr("data_layout") == "NHWC" and _has_fixed_statistics(bn):
        tail = find_tail(graph, bn)
        ops = [op, bn, *tail.ops]
        if tail.addend is None and not graph.has_gradient(ops):
            inputs |= graph.variables(bn, "Scale", "Bias", "Mean", "Variance")
            attrs |= {"epsilon": bn.attr("epsilon"), "activation": tail.activation}
            outputs = {"Y": graph.block.var(tail.out)}
            graph.replace(ops, ops[-1], "native_depthwise_conv_bn_inference", inputs, outputs, attrs)
            return
    graph.replace([op], op, "native_depthwise_conv", inputs, {"Y": out}, dict(attrs))
    _fuse_conv_gradient(graph, op, "native_depthwise_conv_backward", inputs, attrs)


def _fuse_conv_gradient(graph: Graph, op: Operator, name: str, inputs: dict, attrs: dict, needed: tuple = ()) -> None:
    """If the program has the gradient of a convolution, replace it with a custom operator.

    Args:
        op: convolution, which has already been replaced.
        name: custom operator.
        inputs, attrs: those of the custom operator that replaced `op`.
        needed: (boolean attribute, gradient of Paddle's operator) pairs. The attribute states whether the program uses
            the gradient.
    """
    gradient = graph.gradient(op, is_complete=False)
    if gradient is None:
        return
    x, filters = inputs["X"], inputs["Filter"]
    inputs = inputs | {"DY": graph.variables(gradient, "Output@GRAD")["Output@GRAD"]}
    dx, dfilter = (graph.output_or_unused(gradient, f"{n}@GRAD", v) for n, v in (("Input", x), ("Filter", filters)))
    if dfilter.name in graph.coalesced:
        inputs["Into@VECTOR@OPTIONAL"] = [dfilter]  # dfilter is located in the buffer of a fused all-reduce
    attrs = attrs | {attribute: bool(gradient.output(output)) for attribute, output in needed}
    graph.replace([gradient], gradient, name, inputs, {"DX": dx, "DFilter": dfilter}, attrs)


def _has_float32(graph: Graph, op: Operator) -> bool:
    return all(variable.dtype == paddle.float32 for variable in graph.variables(op, "Input", "Filter").values())


def _fuse_conv(graph: Graph, op: Operator) -> None:
    """Replace a convolution and its gradient with the operators of native/onednn.h."""
    x, filters, out = graph.variables(op, "Input", "Filter", "Output").values()
    attrs = {name: op.attr(name) for name in ("strides", "dilations", "groups")}
    attrs["paddings"] = [n for pair in padding(graph, op) for n in pair]
    inputs = {"X": x, "Filter": filters}
    graph.replace([op], op, "native_conv2d", inputs, {"Y": out}, dict(attrs))
    needed = ("needs_dx", "Input@GRAD"), ("needs_dfilter", "Filter@GRAD")
    _fuse_conv_gradient(graph, op, "native_conv2d_backward", inputs, attrs, needed)


def is_pointwise(graph: Graph, op: Operator, types: Collection) -> bool:
    """Return whether custom kernels support a 1x1 convolution on this GPU: without stride, groups and padding, with
    multiples of 4 channels, and with one of the data types `types`."""
    x, filters = graph.variables(op, "Input", "Filter").values()
    if filters.shape[2:] != (1, 1) or filters.dtype != x.dtype:
        return False
    is_plain = op.attr("strides") == [1, 1] and op.attr("groups") == 1 and op.attr("data_format") == "NHWC"
    has_channels = all(channels % CHANNELS == 0 for channels in filters.shape[:2])
    is_known = is_plain and not any(op.attr("paddings")) and has_channels
    return is_known and x.dtype in types and has_bfloat16_tensor_cores()


def has_bfloat16_tensor_cores() -> bool:  # GPUs with bfloat16 tensor cores also have TF32 tensor cores
    return paddle.is_compiled_with_cuda() and paddle.device.cuda.get_device_capability()[0] >= 8


def fuse_pointwise_conv(graph: Graph, op: Operator) -> bool:
    """Replace a 1x1 convolution, its BN and the Tail of the BN, if the BN has fixed statistics, no gradient passes
    through these operators and the convolution has at most POINTWISE_BN_CHANNELS input channels. Return whether the
    operators were replaced."""
    x, filters, out = graph.variables(op, "Input", "Filter", "Output").values()
    bn = graph.only_reader(out.name, ["batch_norm"])
    if bn is None or bn.attr("data_layout") != "NHWC" or not _has_fixed_statistics(bn):
        return False
    tail = find_tail(graph, bn)
    ops = [op, bn, *tail.ops]
    if filters.shape[1] > POINTWISE_BN_CHANNELS[x.dtype] or graph.has_gradient(ops):
        return False
    inputs = {"X": x, "Filter": filters} | graph.variables(bn, "Scale", "Bias", "Mean", "Variance")
    if tail.addend is not None:
        inputs["Z@OPTIONAL"] = tail.addend
    attrs = {"epsilon": bn.attr("epsilon"), "activation": tail.activation}
    graph.replace(ops, ops[-1], "native_pointwise_conv_bn_inference", inputs, {"Y": graph.block.var(tail.out)}, attrs)
    return True


def _split_pointwise_gradient(graph, op):
    """If the filter gradient of a 1x1 convolution meets the conditions at POINTWISE_TYPES, compute it with a custom
    operator. Paddle's operator still computes the input gradient."""
    gradient, (x, filters) = graph.gradient(op), graph.variables(op, "Input", "Filter").values()
    is_large = min(x.shape[1:3]) > 0 and x.shape[1] * x.shape[2] >= POINTWISE_PIXELS
    if gradient is None or min(filters.shape[:2]) > POINTWISE_CHANNELS or not is_large:
        return
    dy, dfilter = graph.variables(gradient, "Output@GRAD", "Filter@GRAD").values()
    inputs = {"X": x, "DY": dy}
    if dfilter.name in graph.coalesced:
        inputs["Into@VECTOR@OPTIONAL"] = [dfilter]  # dfilter is located in the buffer of a fused all-reduce
    graph.replace([], gradient, "native_pointwise_conv_backward_filter", inputs, {"DFilter": dfilter}, {})
    set_output(gradient, "Filter@GRAD", [])


def _fuse_dropout(graph, op):
    """Replace a dropout operator and its gradient. The custom gradient needs no stored mask, because it generates the
    same random numbers again."""
    variables, attrs = graph.variables(op, "X", "Seed", "Out"), {"rate": op.attr("dropout_prob")}
    out = variables.pop("Out")
    graph.replace([op], op, "native_dropout", variables, {"Y": out}, dict(attrs))
    gradient = graph.gradient(op)
    if gradient is not None:
        dx, dout = graph.variables(gradient, "X@GRAD", "Out@GRAD").values()
        inputs = {"X": dout, "Seed": variables["Seed"]}
        graph.replace([gradient], gradient, "native_dropout", inputs, {"Y": dx}, attrs)
