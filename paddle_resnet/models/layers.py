"""Layers shared by several networks."""

import math

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Initializer, KaimingNormal, Normal
from paddle.utils import unique_name


def dropout(x, rate, seed):
    """Apply dropout: Srivastava et al., JMLR 15 (2014). Unlike paddle.nn.Dropout, it does not use Paddle's generator.

    Args:
        x: variable of any shape.
        rate: probability that an element becomes 0; the others are divided by 1 - rate.
        seed: variable [1] int32, positive, that determines the mask.
    """
    block = static.default_main_program().global_block()
    name = unique_name.generate("dropout")
    out = block.create_var(name=f"{name}.out", dtype=x.dtype)
    mask = block.create_var(name=f"{name}.mask", dtype="uint8", stop_gradient=True)
    attrs = {"dropout_prob": rate, "is_test": False, "dropout_implementation": "upscale_in_train"}
    block.append_op(type="dropout", inputs={"X": x, "Seed": seed}, outputs={"Out": out, "Mask": mask}, attrs=attrs)
    return out


class FanOutNormal(Initializer):
    """Normal distribution of the filters with the variance 2 / fan-out, He et al., arXiv:1502.01852, equation 14. The
    fan-out of a depthwise filter is its number of taps, as in TensorFlow's reference code for EfficientNet."""

    def forward(self, var, block=None):
        outputs, inputs, *kernel = var.shape
        is_depthwise = inputs == 1
        fan_out = math.prod(kernel) * (1 if is_depthwise else outputs)
        return Normal(std=(2 / fan_out) ** 0.5)(var, block)


class BatchNorm(nn.BatchNorm2D):
    """Batch normalization with the parameter names of NVIDIA's RN50v1.5 example, batch_norm_N, from the class name."""


class ConvBN(nn.Layer):
    """Convolution without bias, then batch normalization; at stride 1, padding preserves the size.

    Args:
        in_channels, channels: channels of input and output.
        kernel_size, stride: kernel size and stride of the convolution.
        data_format: "NCHW" or "NHWC".
        groups: groups of the convolution; depthwise if equal to in_channels.
        initializer: initializer of the filters.
        epsilon, momentum: batch normalization; momentum is the weight of the previous running statistics.
        padding: default kernel_size // 2 on all sides; "SAME" pads as TensorFlow does, at stride 2 and an even size
            with one more row and column at the bottom and right than at the top and left.
    """

    def __init__(
        self,
        in_channels,
        channels,
        kernel_size,
        stride,
        data_format,
        groups=1,
        initializer=None,
        epsilon=1e-5,
        momentum=0.9,
        padding=None,
    ):
        super().__init__()
        self.conv = nn.Conv2D(
            in_channels,
            channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2 if padding is None else padding,
            groups=groups,
            weight_attr=paddle.ParamAttr(initializer=initializer or KaimingNormal()),
            bias_attr=False,
            data_format=data_format,
        )
        self.bn = BatchNorm(channels, momentum=momentum, epsilon=epsilon, data_format=data_format)

    def forward(self, x):
        return self.bn(self.conv(x))


class InvertedResidual(nn.Layer):
    """A 1x1 convolution to more channels, a depthwise convolution, and a 1x1 projection without activation; the input
    is added if the shape is unchanged: Sandler et al., arXiv:1801.04381.

    Args:
        in_channels, hidden, channels: channels of the input, of the depthwise convolution and of the output. The first
            convolution is omitted if hidden equals in_channels.
        kernel_size, stride: of the depthwise convolution.
        activation: function after the first two convolutions.
        common: arguments of every ConvBN.
    """

    def __init__(self, in_channels, hidden, channels, kernel_size, stride, activation=F.relu6, **common):
        super().__init__()
        self.expand = None if hidden == in_channels else ConvBN(in_channels, hidden, 1, 1, **common)
        self.depthwise = ConvBN(hidden, hidden, kernel_size, stride, groups=hidden, **common)
        self.project = ConvBN(hidden, channels, 1, 1, **common)
        self.activation = activation
        self.has_shortcut = stride == 1 and in_channels == channels

    def forward(self, x):
        y = x if self.expand is None else self.activation(self.expand(x))
        y = self.project(self.activation(self.depthwise(y)))
        return x + y if self.has_shortcut else y
