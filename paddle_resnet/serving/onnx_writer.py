"""Translate an inference network to ONNX, operator by operator."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from paddle.base.data_feeder import convert_dtype

from paddle_resnet.components import quantization
from paddle_resnet.graph import block as block_of
from paddle_resnet.machine import compat
from paddle_resnet.utils.errors import UsageError, installation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from onnx import ModelProto
    from paddle import static

OPSET = 13  # released in 2020; supported by onnxruntime 1.7 or later and TensorRT 8 or later
IR_VERSION = 7  # version of the file format in the ONNX release that introduced OPSET
METADATA = "paddle_resnet"  # metadata key under which the content of model.json is stored
OUTPUTS = ("Softmax", "Sigmoid")  # operators that compute the probabilities; networks may contain more of them


def require(name: str) -> ModuleType:
    """Import onnx or onnxruntime.

    Raises:
        UsageError: the package is missing or broken.
    """
    try:
        return __import__(name)
    except Exception as e:  # importing a broken package can raise any exception
        reason = " ".join(str(e).split()) or type(e).__name__
        remedy = f"run {installation('onnx')}"
        raise UsageError(f"{name}: cannot be imported, but is required for ONNX ({reason}); {remedy}") from e


def to_onnx(
    program: static.Program,
    inputs: Sequence[static.Variable],
    outputs: Sequence[static.Variable],
    read: Callable[[str], np.ndarray],
    metadata: str,
    engine: str | None = None,
) -> ModelProto:
    """Translate an inference program to ONNX.

    Args:
        program: static.Program of a network in models/, in the layout NCHW, that computes `outputs` from `inputs`.
        inputs: input Variables [None, ...] of the program. The batch size remains variable.
        outputs: output Variables [None, ...] of the program.
        read: function that maps a parameter name to the parameter's array.
        metadata: text to store in the file.
        engine: engine that runs a network of components/quantization.py, or None to omit the quantization. For
            "onnxruntime", activations are uint8, and biases of quantized convolutions are int32. uint8 represents the
            same values as int8: signed activations have the zero point 128. For "tensorrt", activations are int8 and
            biases float32, because TensorRT does not dequantize int32.
    Returns:
        onnx.ModelProto that has passed ONNX's checker.
    Raises:
        UsageError: an operator or one of its attributes is not supported, or onnx cannot be imported.
    """
    onnx = require("onnx")
    block = block_of(program)
    constants, nodes = {}, []
    for op in block.ops:
        if op.type == "assign_value":
            constants[op.output("Out")[0]] = compat.assigned(op)
            continue
        if _is_folded_shift(block, op):
            _add_bias(onnx, op, nodes, constants, read, engine)
            continue
        if engine is None and op.type in (quantization.ACTIVATION, quantization.WEIGHT):
            constants |= {name: read(name) for name in op.input("X") if block.var(name).persistable}
            kind, operands, result, attributes = "Identity", ["X"], "Out", {}
        elif op.type == quantization.ACTIVATION:
            kind, operands, result, attributes = _quantized_activation(op, read, engine)
        elif op.type == quantization.WEIGHT:
            kind, operands, result, attributes = _quantized_weight(op, read)
        else:
            _check_translatable(op)
            constants |= {name: read(name) for name in op.input_arg_names if block.var(name).persistable}
            kind, operands, result, attributes = _TRANSLATIONS[op.type](op)
        _append(onnx, op, (kind, operands, attributes), op.output(result)[0], nodes, constants)
    used = {name for node in nodes for name in node.input}
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items() if name in used]
    graph = onnx.helper.make_graph(
        nodes, "network", [_value(onnx, v) for v in inputs], [_value(onnx, v) for v in outputs], initializers
    )
    opset = onnx.helper.make_opsetid("", OPSET)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="paddle_resnet")
    onnx.helper.set_model_props(model, {METADATA: metadata})
    onnx.checker.check_model(model, full_check=True)
    return model


def to_float16(model: ModelProto) -> ModelProto:
    """Convert a model written by to_onnx to float16 in place, and return it. The types of the input, the output
    and the last of OUTPUTS do not change. Raises UsageError if onnx cannot be imported."""
    onnx = require("onnx")
    graph, nodes = model.graph, []
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT

    def cast(name, dtype, suffix):
        nodes.append(onnx.helper.make_node("Cast", [name], [f"{name}.{suffix}"], name=f"{name}.{suffix}", to=dtype))
        return nodes[-1].output[0]

    for constant in graph.initializer:
        if constant.data_type == single:
            array = onnx.numpy_helper.to_array(constant).astype(np.float16)
            constant.CopyFrom(onnx.numpy_helper.from_array(array, constant.name))
    outputs = {v.name for v in graph.output}
    casts = {v.name: cast(v.name, half, "half") for v in graph.input if v.type.tensor_type.elem_type == single}
    for node in graph.node:
        node.input[:] = [casts.get(name, name) for name in node.input]
        if node.op_type in OUTPUTS and node.output[0] in outputs:
            node.input[0] = cast(node.input[0], single, "single")
        if node.op_type == "Cast":  # the cast of uint8 pixels
            node.attribute[0].i = half
        nodes.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model


def with_logits(serialized: bytes) -> bytes:
    """Add the input of the last of OUTPUTS as a second output to a serialized ONNX model written by to_onnx. Return the
    serialized result. Raises UsageError if onnx cannot be imported."""
    onnx = require("onnx")
    model = onnx.load_from_string(serialized)
    [*_, logits] = [node.input[0] for node in model.graph.node if node.op_type in OUTPUTS]
    output = onnx.ValueInfoProto.FromString(model.graph.output[0].SerializeToString())
    output.name = logits
    model.graph.output.append(output)
    return model.SerializeToString()


def _append(onnx, op, translation, output, nodes, constants):
    """Append the ONNX node that computes `output`. `translation` describes the node: (ONNX operator, operands,
    attributes).

    An operand is an input slot of `op`, a constant, or a nested translation, whose node is appended first.
    """
    kind, operands, attributes = translation
    names = []
    for number, operand in enumerate(operands):
        if isinstance(operand, str):
            names += op.input(operand)
            continue
        names.append(f"{output}.{number}")
        if isinstance(operand, tuple):
            _append(onnx, op, operand, names[-1], nodes, constants)
        else:
            constants[names[-1]] = operand
    nodes.append(onnx.helper.make_node(kind, names, [output], name=output, **attributes))


def _is_folded_shift(block, op):
    """Return whether an operator adds the shift of a folded BN layer (passes/folding.py) to the output of a
    convolution."""
    if op.type != "elementwise_add" or op.attr("axis") != 1 or not block.var(op.input("Y")[0]).persistable:
        return False
    x = op.input("X")[0]
    writers = [other.type for other in block.ops if x in other.output_arg_names]
    readers = [other for other in block.ops if x in other.input_arg_names]
    return writers in (["conv2d"], ["depthwise_conv2d"]) and len(readers) == 1


def _add_bias(onnx, op, nodes, constants, read, engine):
    """Replace an addition to the output of a convolution with a bias of this convolution."""
    at, conv = next((i, node) for i, node in enumerate(nodes) if node.output[0] == op.input("X")[0])
    bias, output = op.input("Y")[0], op.output("Out")[0]
    constants[bias] = read(bias)
    producers = {node.output[0]: node for node in nodes if node.op_type == "DequantizeLinear"}
    if {*conv.input} <= {*producers}:
        activation, weight = (producers[name].input for name in conv.input)
        _limit_bias(constants[bias], activation, weight, constants)
        if engine == "onnxruntime":
            # onnxruntime before 1.23 runs a convolution in INT8 only if its bias is int32.
            levels, scales = f"{output}.bias.levels", f"{output}.bias.scales"
            values = _quantized_bias(constants[bias], constants[activation[1]], constants[weight[1]])
            constants[levels], constants[scales] = values
            bias = f"{output}.bias"
            node = onnx.helper.make_node("DequantizeLinear", [levels, scales], [bias], name=bias, axis=0)
            nodes.insert(at, node)
            at += 1
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in conv.attribute}
    nodes[at] = onnx.helper.make_node(conv.op_type, [*conv.input, bias], [output], name=output, **attributes)


def _quantized_bias(bias, activation_scale, weight_scales):
    """Return (int32 levels, float32 scales) of a bias, float32 [channels]. An INT8 convolution adds the levels to its
    sums of products of activation and weight levels, so the scales are those of the products."""
    scales = weight_scales.astype(np.float64) * activation_scale
    return np.rint(bias / scales).astype(np.int32), scales.astype(np.float32)


def _limit_bias(bias, activation, weight, constants):
    """Increase the scales of filters that are nearly zero, so that engines can represent the bias as an int32 multiple
    of (activation scale * weight scale). The larger scales leave fewer levels for the weights of these filters.

    Args:
        bias: float32 [channels].
        activation, weight: input names of the DequantizeLinear nodes of the activation and the weight: (values, scale,
            zero point).
        constants: {name: array}, modified in place.
    """
    levels, scales = (constants[name] for name in weight[:2])
    larger = np.maximum(scales, np.abs(bias) / (constants[activation[1]] * np.float32(2**30)))
    factors = (scales / larger).reshape(-1, *[1] * (levels.ndim - 1))
    constants[weight[0]], constants[weight[1]] = np.rint(levels * factors).astype(np.int8), larger.astype(np.float32)


def _quantized_activation(op, read, engine):
    levels = 2 ** (quantization.bits(op) - 1) - 1
    zero = np.uint8(0 if levels == 255 else 128) if engine == "onnxruntime" else np.int8(0)
    scale = read(op.input("InScale")[0]).reshape(()) / np.float32(levels)
    return "DequantizeLinear", [("QuantizeLinear", ["X", scale, zero], {}), scale, zero], "Out", {}


def _quantized_weight(op, read):
    axis = op.attr("quant_axis")
    levels, scales = quantization.quantized(read(op.input("X")[0]), axis, quantization.bits(op))
    zeros = np.zeros(scales.size, np.int8)
    return "DequantizeLinear", [levels, scales.reshape(-1), zeros], "Out", {"axis": axis}


def _value(onnx, variable):
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(convert_dtype(variable.dtype)))
    return onnx.helper.make_tensor_value_info(variable.name, dtype, ["N", *variable.shape[1:]])


def _check_translatable(op):
    if op.type not in _TRANSLATIONS:
        raise _untranslatable(op)
    for name, values in _SUPPORTED.get(op.type, {}).items():
        if op.attr(name) not in values:
            raise _untranslatable(op, name)


def _untranslatable(op, attribute=None):
    detail = f" with {attribute} {op.attr(attribute)}" if attribute else ""
    output = next(name for name in op.output_arg_names if not op.block.var(name).persistable)
    return UsageError(
        f"ONNX: operator {op.type}{detail} (output {output}) cannot be translated to ONNX; remove --onnx and --int8"
    )


def _pads(op):
    """Convert paddings from Paddle's order, [height, width] or [top, bottom, left, right], to ONNX's order, [top, left,
    bottom, right]."""
    pads = op.attr("paddings")
    return pads * 2 if len(pads) == 2 else [pads[0], pads[2], pads[1], pads[3]]


def _conv(op):
    attributes = {"strides": op.attr("strides"), "group": op.attr("groups")}
    if op.attr("padding_algorithm") == "SAME":  # with SAME, Paddle ignores dilations
        return "Conv", ["Input", "Filter"], "Output", attributes | {"auto_pad": "SAME_UPPER"}
    attributes |= {"pads": _pads(op), "dilations": op.attr("dilations")}
    return "Conv", ["Input", "Filter"], "Output", attributes


def _batch_norm(op):
    return "BatchNormalization", ["X", "Scale", "Bias", "Mean", "Variance"], "Y", {"epsilon": op.attr("epsilon")}


def _pool(op):
    is_average = op.attr("pooling_type") == "avg"
    if op.attr("adaptive"):
        if not is_average or op.attr("ksize") != [1, 1]:
            raise _untranslatable(op, "ksize" if is_average else "pooling_type")
        return "GlobalAveragePool", ["X"], "Out", {}
    attributes = {"kernel_shape": op.attr("ksize"), "strides": op.attr("strides"), "pads": _pads(op)}
    if op.attr("ceil_mode"):
        attributes["ceil_mode"] = 1
    if is_average:
        return "AveragePool", ["X"], "Out", attributes | {"count_include_pad": int(not op.attr("exclusive"))}
    return "MaxPool", ["X"], "Out", attributes


def _flatten(op):
    last = len(op.block.var(op.input("X")[0]).shape) - 1
    if op.attr("stop_axis") not in (-1, last):  # Flatten in ONNX always returns two dimensions
        raise _untranslatable(op, "stop_axis")
    return "Flatten", ["X"], "Out", {"axis": 1}


def _matmul(op):
    operands = []
    for slot, transposes in (("X", op.attr("trans_x")), ("Y", op.attr("trans_y"))):
        axes = [*range(len(op.block.var(op.input(slot)[0]).shape))]
        perm = [*axes[:-2], *axes[:-3:-1]]
        operands.append(("Transpose", [slot], {"perm": perm}) if transposes else slot)
    return "MatMul", operands, "Out", {}


_FLOAT = 5  # Paddle's VarType.FP32
_WINDOW = {"data_format": ("NCHW", "AnyLayout"), "padding_algorithm": ("EXPLICIT",)}
_CONV = _WINDOW | {"padding_algorithm": ("EXPLICIT", "SAME")}
# {Paddle operator: {attribute: supported values}}, for attributes that the translations below ignore.
_SUPPORTED = {
    "conv2d": _CONV,
    "depthwise_conv2d": _CONV,
    "batch_norm": {"data_layout": ("NCHW", "AnyLayout"), "is_test": (True,)},
    "pool2d": {**_WINDOW, "global_pooling": (False,)},
    "hard_swish": {"threshold": (6.0,), "scale": (6.0,), "offset": (3.0,)},
    "swish": {"beta": (1.0,)},
    "elementwise_add": {"axis": (-1,)},
    "elementwise_mul": {"axis": (-1,)},
    "elementwise_div": {"axis": (-1,)},
    "reduce_mean": {"reduce_all": (True,), "keep_dim": (False,)},
    "scale": {"bias": (0.0,)},
    "flatten_contiguous_range": {"start_axis": (1,)},
    "cast": {"out_dtype": (_FLOAT,)},
    "dropout": {"dropout_implementation": ("upscale_in_train",), "is_test": (True,)},
}
_SILU = "Mul", ["X", ("Sigmoid", ["X"], {})], "Out", {}
# {Paddle operator: function that returns (ONNX operator, operands (see _append), output slot, attributes)}
_TRANSLATIONS = {
    "conv2d": _conv,
    "depthwise_conv2d": _conv,
    "batch_norm": _batch_norm,
    "pool2d": _pool,
    "relu": lambda op: ("Relu", ["X"], "Out", {}),
    "relu6": lambda op: ("Clip", ["X", np.float32(0), np.float32(op.attr("threshold"))], "Out", {}),
    "sigmoid": lambda op: ("Sigmoid", ["X"], "Out", {}),
    "hard_sigmoid": lambda op: ("HardSigmoid", ["X"], "Out", {"alpha": op.attr("slope"), "beta": op.attr("offset")}),
    # ONNX's HardSwish requires opset 14.
    "hard_swish": lambda op: ("Mul", ["X", ("HardSigmoid", ["X"], {"alpha": 1 / 6, "beta": 0.5})], "Out", {}),
    "silu": lambda op: _SILU,
    "swish": lambda op: _SILU,
    "mish": lambda op: ("Mul", ["X", ("Tanh", [("Softplus", ["X"], {})], {})], "Out", {}),
    "concat": lambda op: ("Concat", ["X"], "Out", {"axis": op.attr("axis")}),
    "elementwise_add": lambda op: ("Add", ["X", "Y"], "Out", {}),
    "elementwise_mul": lambda op: ("Mul", ["X", "Y"], "Out", {}),
    "flatten_contiguous_range": _flatten,
    "reshape2": lambda op: ("Reshape", ["X", np.array(op.attr("shape"), np.int64)], "Out", {}),
    "dropout": lambda op: ("Identity", ["X"], "Out", {}),
    "elementwise_div": lambda op: ("Div", ["X", "Y"], "Out", {}),
    "reduce_mean": lambda op: ("ReduceMean", ["X"], "Out", {"keepdims": 0}),
    "sqrt": lambda op: ("Sqrt", ["X"], "Out", {}),
    "scale": lambda op: ("Mul", ["X", np.float32(op.attr("scale"))], "Out", {}),
    "matmul_v2": _matmul,
    "softmax": lambda op: ("Softmax", ["X"], "Out", {"axis": op.attr("axis")}),
    "transpose2": lambda op: ("Transpose", ["X"], "Out", {"perm": op.attr("axis")}),
    "cast": lambda op: ("Cast", ["X"], "Out", {"to": 1}),  # TensorProto.FLOAT
}
