"""The inference network as ONNX, written operator by operator: a ResNet has a dozen kinds of them."""

import numpy as np
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import compat
from utils.errors import UsageError

OPSET = 13  # of 2020: read by onnxruntime 1.7, TensorRT 8 and later
IR_VERSION = 7  # the format of that time
INSTALL = "pip install -r requirements-onnx.txt"
METADATA = "paddle_resnet"  # key of the content of model.json in the file


def require(name):
    """Import onnx or onnxruntime.

    Raises:
        UsageError: it is missing or broken.
    """
    try:
        return __import__(name)
    except Exception as e:  # a broken package raises errors of all kinds
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UsageError(f"ONNX needs the package {name}, which cannot be imported ({reason}): {INSTALL}") from e


def to_onnx(program, inputs, outputs, read, metadata):
    """Translate an inference program.

    Args:
        program: static.Program of a network in models/, in NCHW, from inputs to outputs.
        inputs: its input Variables [None, ...]. The batch size stays free.
        outputs: its output Variables [None, ...].
        read: function from the name of a parameter to its array.
        metadata: text to keep in the file.
    Returns:
        onnx.ModelProto, checked.
    """
    onnx = require("onnx")
    block = program.global_block()
    constants, nodes = {}, []
    for op in block.ops:
        for slot in op.input_names:
            for name in op.input(slot):
                if block.var(name).persistable:
                    constants[name] = read(name)
        if op.type == "assign_value":
            constants[op.output("Out")[0]] = compat.assigned(op)
            continue
        if op.type not in _TRANSLATIONS:
            raise UsageError(f"--onnx: the network has the operator {op.type}, which has no translation; remove --onnx")
        kind, operands, result, attributes = _TRANSLATIONS[op.type](op)
        names = []
        for number, operand in enumerate(operands):
            if isinstance(operand, str):
                names += op.input(operand)
            else:
                names.append(f"{op.output(result)[0]}.{number}")
                constants[names[-1]] = operand
        nodes.append(onnx.helper.make_node(kind, names, op.output(result), name=op.output(result)[0], **attributes))
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


def with_logits(serialized):
    """The bytes of an ONNX file of to_onnx with the input of its softmax as a second output."""
    onnx = require("onnx")
    model = onnx.load_from_string(serialized)
    [logits] = [node.input[0] for node in model.graph.node if node.op_type == "Softmax"]
    output = onnx.ValueInfoProto.FromString(model.graph.output[0].SerializeToString())
    output.name = logits
    model.graph.output.append(output)
    return model.SerializeToString()


def _value(onnx, variable):
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(convert_dtype(variable.dtype)))
    return onnx.helper.make_tensor_value_info(variable.name, dtype, ["N", *variable.shape[1:]])


def _conv(op):
    attributes = {"strides": op.attr("strides"), "pads": op.attr("paddings") * 2, "group": op.attr("groups")}
    return "Conv", ["Input", "Filter"], "Output", {**attributes, "dilations": op.attr("dilations")}


def _batch_norm(op):
    return "BatchNormalization", ["X", "Scale", "Bias", "Mean", "Variance"], "Y", {"epsilon": op.attr("epsilon")}


def _pool(op):
    if op.attr("adaptive"):
        assert op.attr("pooling_type") == "avg" and op.attr("ksize") == [1, 1]
        return "GlobalAveragePool", ["X"], "Out", {}
    assert op.attr("pooling_type") == "max" and not op.attr("ceil_mode")
    attributes = {"kernel_shape": op.attr("ksize"), "strides": op.attr("strides"), "pads": op.attr("paddings") * 2}
    return "MaxPool", ["X"], "Out", attributes


# Paddle's operator to (ONNX's operator, slots of its inputs or constants, slot of its output, attributes).
_TRANSLATIONS = {
    "conv2d": _conv,
    "depthwise_conv2d": _conv,
    "batch_norm": _batch_norm,
    "pool2d": _pool,
    "relu": lambda op: ("Relu", ["X"], "Out", {}),
    "relu6": lambda op: ("Clip", ["X", np.float32(0), np.float32(op.attr("threshold"))], "Out", {}),
    "elementwise_add": lambda op: ("Add", ["X", "Y"], "Out", {}),
    "elementwise_mul": lambda op: ("Mul", ["X", "Y"], "Out", {}),
    "flatten_contiguous_range": lambda op: ("Flatten", ["X"], "Out", {"axis": op.attr("start_axis")}),
    "matmul_v2": lambda op: ("MatMul", ["X", "Y"], "Out", {}),
    "softmax": lambda op: ("Softmax", ["X"], "Out", {"axis": op.attr("axis")}),
    "transpose2": lambda op: ("Transpose", ["X"], "Out", {"perm": op.attr("axis")}),
    "cast": lambda op: ("Cast", ["X"], "Out", {"to": 1}),  # TensorProto.FLOAT
}
