"""INT8 quantization, simulated in float32 as in Jacob et al., arXiv:1712.05877, section 3.

Fake-quantization operators round values to the levels that an INT8 engine would use. Weights have one range per output
channel, up to the largest absolute value in the channel. Activations have one range per tensor. All ranges are
symmetric around 0. insert() quantizes the inputs of convolutions, fully connected layers, pooling layers and residual
additions. serving/onnx_writer.py converts the fake-quantization operators to QuantizeLinear and DequantizeLinear.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.settings.field import flag

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet import graph
    from paddle_resnet.step.builder import StepBuilder

ACTIVATION = "fake_quantize_dequantize_moving_average_abs_max"
WEIGHT = "fake_channel_wise_quantize_dequantize_abs_max"
_LEVELS = {"bit_length": 8, "round_type": 0}  # round ties to even, as ONNX does
_SUFFIX = ".range"
# A convolution or fully connected layer in a program that insert() has not changed yet. The fields are the names of the
# layer's input, weight and bias [channels] (None if there is no bias), the axis of the output channels in the weight,
# and the number of groups.
Layer = namedtuple("Layer", "input weight bias axis groups")
# {operator type: (inputs that are activations, (input that is a weight, axis of the output channels) or None)}
_QUANTIZED = {
    "conv2d": (["Input"], ("Filter", 0)),
    "depthwise_conv2d": (["Input"], ("Filter", 0)),
    "matmul_v2": (["X"], ("Y", 1)),
    "pool2d": (["X"], None),
    "elementwise_add": (["X", "Y"], None),
}
_NOT_NEGATIVE = ("relu", "relu6", "sigmoid", "hard_sigmoid")
_SAME_SIGN = ("pool2d", "flatten_contiguous_range", "reshape2", ACTIVATION)


@dataclass(frozen=True)
class Settings:
    qat: bool = flag(
        False,
        "train with weights and activations rounded to INT8 in the forward pass (quantization-aware training); "
        "typically used to fine-tune a trained network (--from-pretrained-params)",
        topic="precision",
        kind="network",
    )


def add(step: "StepBuilder", first: int) -> None:
    """With --qat, insert fake-quantization operators into the network. `first` is the number of operators that precede
    it."""
    if step.part(Settings).qat:
        insert(step.main, first, step.schedule, step.device == "gpu")


def activations(program: "static.Program", first: int = 0) -> "dict[str, list[graph.Operator]]":
    """Return {name of an activation to quantize: operators that read the quantized value}, in program order. `first` is
    the number of operators that precede the network."""
    from paddle_resnet import graph

    block = graph.block(program)
    readers = {}
    for op in block.ops[first:]:
        for name in dict.fromkeys(op.input(slot)[0] for slot in _slots(block, op)):
            readers.setdefault(name, []).append(op)
    return readers


def layers(program: "static.Program") -> list[Layer]:
    """Return a Layer for each layer whose weights insert() would quantize."""
    from paddle_resnet import graph

    block = graph.block(program)
    # Some of Paddle's layers reshape their bias before they add it.
    reshaped = {op.output("Out")[0]: op.input("X")[0] for op in block.ops if op.type == "reshape2"}
    additions = [op for op in block.ops if op.type == "elementwise_add"]
    biases = {op.input("X")[0]: reshaped.get(op.input("Y")[0], op.input("Y")[0]) for op in additions}
    result = []
    for op in block.ops:
        if _slots(block, op) and _QUANTIZED[op.type][1]:
            [slot], (weight, axis) = _QUANTIZED[op.type]
            groups = op.attr("groups") if op.has_attr("groups") else 1
            bias = biases.get(op.output_arg_names[0])
            bias = bias if bias and block.var(bias).persistable else None
            result.append(Layer(op.input(slot)[0], op.input(weight)[0], bias, axis, groups))
    return result


def insert(program: "static.Program", first: int = 0, lr_scheduler: Any = None, on_gpu: bool = False) -> None:
    """Insert 8-bit fake-quantization operators into the forward pass of the current program, in place. In the backward
    pass, fake-quantization operators pass gradients through unchanged (straight-through estimator; Bengio et al.,
    arXiv:1308.3432).

    The parameter range_name(i) contains the upper end of the range of activation i. The startup program sets each
    range to 0. Ranges have no gradient; in training, a range is a moving average of the largest absolute value of its
    activation in each batch.

    Args:
        program: the current Program, without a backward pass.
        first: number of operators that precede the network.
        lr_scheduler: schedules.Schedule of a training program, or None to keep the ranges unchanged.
        on_gpu: whether the program runs on a GPU. On a GPU, weights whose output channels are on axis 1 are transposed
            before and after quantization, because Paddle's operator for axis 1 uses a different CUDA stream and cannot
            be captured.
    """
    from paddle_resnet import graph
    from paddle_resnet.step import scalars

    block = graph.block(program)
    if lr_scheduler is not None:
        new_weight = scalars.declare("range_weight", lambda: weight_of_batch(lr_scheduler.batches))
    for i, (name, readers) in enumerate(activations(program, first).items()):
        value, limit = block.var(name), _range(range_name(i))
        if lr_scheduler is not None:
            _follow(block, block.ops.index(readers[0]), value, limit, new_weight)
        quantized = block.create_var(name=f"{name}.quantized", dtype=value.dtype)
        inputs, outputs = {"X": value, "InScale": limit}, {"Out": quantized, "OutScale": limit}
        _insert(block, block.ops.index(readers[0]), ACTIVATION, inputs, outputs, is_test=True, **_LEVELS)
        for op in readers:
            graph.rename_input(op, name, quantized.name)
    for op in block.ops[first:]:
        if _slots(block, op) and _QUANTIZED[op.type][1]:
            slot, axis = _QUANTIZED[op.type][1]
            weight = block.var(op.input(slot)[0])
            graph.rename_input(op, weight.name, _quantize_weight(block, op, weight, axis, on_gpu).name)
    graph.sync(block)


def _quantize_weight(block, reader, weight, axis, on_gpu):
    """Insert operators that quantize a weight before the operator that reads it, and return the quantized variable."""

    def add(kind, source, end, attrs, *extra):
        """Insert an operator before `reader`, and return its output "Out". The names of the operator's outputs begin
        with the name of the weight."""
        outputs = {name: block.create_var(name=f"{weight.name}.{e}", dtype=weight.dtype) for name, e in [end, *extra]}
        for name, _ in extra:
            outputs[name].stop_gradient = True
        _insert(block, block.ops.index(reader), kind, {"X": source}, outputs, **attrs)
        return outputs["Out"]

    ranges = ("OutScale", "ranges")
    if axis == 0 or not on_gpu:
        return add(WEIGHT, weight, ("Out", "quantized"), {"quant_axis": axis, **_LEVELS}, ranges)
    swap = {"axis": [1, 0]}
    swapped = add("transpose2", weight, ("Out", "swapped"), swap, ("XShape", "shape"))
    swapped = add(WEIGHT, swapped, ("Out", "swapped.quantized"), {"quant_axis": 0, **_LEVELS}, ranges)
    return add("transpose2", swapped, ("Out", "quantized"), swap, ("XShape", "swapped.shape"))


def weight_of_batch(batch: int) -> float:
    """Return the weight of a batch (counted from 0) in the exponential moving average of a range. The weight falls from
    1 towards 0.1, so that the average does not depend on its initial value."""
    return 0.1 / (1 - 0.9 ** (batch + 1))


def ranges(program: "static.Program") -> list[str]:
    """Return the names of the activation ranges in a program."""
    from paddle_resnet import graph

    return [op.input("InScale")[0] for op in graph.block(program).ops if op.type == ACTIVATION]


def is_range(name: str) -> bool:
    return name.endswith(_SUFFIX)


def float32_variables(program: "static.Program") -> set[str]:
    """Return the names of the outputs of quantization operators, which must remain in float32 in mixed precision."""
    from paddle_resnet import graph

    ops = [op for op in graph.block(program).ops if op.type in (ACTIVATION, WEIGHT, "p_norm", "lerp")]
    return {name for op in ops for name in op.output_arg_names}


def _follow(block, at, value, limit, weight):
    """Insert operators that move a range towards the largest absolute value of the batch."""
    largest = block.create_var(name=f"{value.name}.largest", dtype="float32", stop_gradient=True)
    attrs = {"porder": float("inf"), "asvector": True}
    _insert(block, at, "p_norm", {"X": value}, {"Out": largest}, **attrs)
    _insert(block, at + 1, "lerp", {"X": limit, "Y": largest, "Weight": weight}, {"Out": limit})


def range_name(i: int) -> str:
    return f"quantization_{i}{_SUFFIX}"


def bits(op: "graph.Operator") -> int:
    """Return the number of bits that a fake-quantization operator uses, including a sign bit: at most 8 for int8, and 9
    for uint8, because the operator also counts a sign bit for the 255 positive levels."""
    return op.attr("bit_length")


def quantized(weight: np.ndarray, axis: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a weight to `bits` bits, at most 8, with one scale for each index of `axis`. Return (int8 levels with
    the shape of the weight, float32 scales that broadcast against the weight)."""
    ranges = np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis), keepdims=True)
    scales = np.where(ranges > 0, ranges, 1) / np.float32(2 ** (bits - 1) - 1)
    return np.rint(weight / scales).astype(np.int8), scales.astype(np.float32)


def use_levels_of(engine: str, program: "static.Program", weight_bits: int) -> None:
    """Set the number of quantization levels in an inference program, in place.

    For "tensorrt", all levels are int8 with zero point 0, as TensorRT requires; activations that cannot be negative,
    such as those after a ReLU, use only the levels 0 to 127. For "onnxruntime", activations that cannot be negative
    have the levels 0 to 255, stored as uint8 with zero point 0. On x86 CPUs, onnxruntime computes with uint8
    activations and omits the ReLU.

    Args:
        engine: "onnxruntime" or "tensorrt".
        program: Program after insert().
        weight_bits: number of bits per weight.
    """
    from paddle_resnet import graph

    block = graph.block(program)
    producers = {name: op for op in block.ops for name in op.output_arg_names}
    for op in block.ops:
        if op.type == WEIGHT:
            graph.set_attr(op, "bit_length", weight_bits)
        elif engine == "onnxruntime" and op.type == ACTIVATION and _is_not_negative(producers, op.input("X")[0]):
            graph.set_attr(op, "bit_length", 9)


def _is_not_negative(producers, name):
    op = producers.get(name)
    if op is not None and op.type in _SAME_SIGN:
        return _is_not_negative(producers, op.input("X")[0])
    return op is not None and op.type in _NOT_NEGATIVE


def _slots(block, op):
    """Return the input slots of an operator that receive activations to quantize."""
    from paddle_resnet.models.layers import is_float32

    slots, weight = ([], None) if is_float32(op) else _QUANTIZED.get(op.type, ([], None))
    if weight is not None and not block.var(op.input(weight[0])[0]).persistable:
        return []  # the second operand is not a weight, or is already quantized
    if op.type == "elementwise_add":
        x, y = (block.var(op.input(slot)[0]) for slot in slots)
        if x.shape != y.shape or x.persistable or y.persistable:
            return []  # not a residual addition; for example, the operator adds a bias
    return slots


def _range(name):
    import paddle
    from paddle.nn.initializer import Constant

    attr = paddle.ParamAttr(name=name, initializer=Constant(0.0), trainable=False)
    limit = paddle.static.create_parameter([1], "float32", attr=attr)
    limit.stop_gradient = True
    return limit


def _insert(block, at, kind, inputs, outputs, **attrs):
    from paddle_resnet import graph

    graph.insert(block, at, kind, inputs, outputs, graph.FORWARD, **attrs)
