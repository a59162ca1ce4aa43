"""Prepare the gradient operators of a program for fused operators and for sums in place, which would otherwise fail or
compute wrong gradients."""

from paddle import static

from paddle_resnet import graph
from paddle_resnet.graph.index import Graph


def complete_additions(program: static.Program) -> None:
    """Make the gradient operator of each residual addition compute the gradients of both summands, in place.

    If one summand is the output of frozen layers, as in the first residual unit of ResNet18 after a frozen stem, Paddle
    omits its gradient. But Paddle's pass fuse_bn_add_act_pass fuses such an addition only in the forward pass, so that
    the backward pass misses a variable: "(NotFound) batch_norm_5.tmp_2 not in VariableScope" (2.6.2). Custom kernels
    compute both gradients, too.
    """
    index = Graph(program)
    for op in index.block.ops:
        if op.type != "elementwise_add_grad" or all(map(op.output, op.output_names)):
            continue
        summands = index.variables(op, "X", "Y")
        first, second = summands.values()
        if len(first.shape) == 4 and first.shape == second.shape:
            for name, summand in summands.items():
                graph.set_output(op, f"{name}@GRAD", [index.output_or_unused(op, f"{name}@GRAD", summand).name])
    graph.sync(index.block)


def separate_padded_sums(program: static.Program) -> None:
    """Prevent sums in place (BuildStrategy.enable_addto) of gradients of convolutions whose opposite sides are padded
    differently, in place.

    Paddle's kernel computes such a gradient in temporary memory and copies it over the first summand. With sums in
    place, it would add the gradient to uninitialized memory and lose the first summand (read in
    phi/kernels/gpudnn/conv_grad_kernel.cu; on an H200 with 2.6.2, the gradients of the first layer of PPHGNetV2_B0
    differed between equal runs).
    """
    index = Graph(program)
    for op in index.block.ops:
        if op.type == "grad_add" and any(_is_padded_unevenly(index.producers.get(name)) for name in op.input_arg_names):
            graph.set_type(op, "elementwise_add")
            graph.set_attr(op, "axis", -1)
    graph.sync(index.block)


def _is_padded_unevenly(op):
    """Return whether an operator computes the gradient of a convolution whose opposite sides may be padded
    differently."""
    if op is None or op.type != "conv2d_grad":
        return False
    paddings = op.attr("paddings")
    return op.attr("padding_algorithm") == "SAME" or (len(paddings) == 4 and paddings[::2] != paddings[1::2])
