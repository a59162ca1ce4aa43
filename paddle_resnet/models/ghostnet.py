"""GhostNet at width 1.0: Han et al., "GhostNet: More Features from Cheap Operations", arXiv:1911.11907.

As in the authors' code, the weights are initialized like PyTorch's defaults; biases, in contrast, are initially 0. The
authors train with dropout before the classifier; to use dropout, add --dropout 0.2.
"""

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import KaimingUniform

from paddle_resnet.models.layers import BlockNetwork, ConvBN, DropPath, SqueezeExcitation, rounded

# For each block: kernel size of the depthwise convolutions, expanded channels, output channels, whether the block has
# squeeze-and-excitation, stride.
BLOCKS = (
    *((3, 16, 16, False, 1), (3, 48, 24, False, 2), (3, 72, 24, False, 1), (5, 72, 40, True, 2), (5, 120, 40, True, 1)),
    *((3, 240, 80, False, 2), (3, 200, 80, False, 1), (3, 184, 80, False, 1), (3, 184, 80, False, 1)),
    *((3, 480, 112, True, 1), (3, 672, 112, True, 1), (5, 672, 160, True, 2)),
    *((5, 960, 160, False, 1), (5, 960, 160, True, 1), (5, 960, 160, False, 1), (5, 960, 160, True, 1)),
)
STEM, HEAD = 16, 1280
# Uniform distribution between -fan_in**-0.5 and fan_in**-0.5.
INITIALIZER = KaimingUniform(negative_slope=5**0.5, nonlinearity="leaky_relu")


class Ghost(nn.Layer):
    """Ghost module. A 1x1 convolution computes half of the output channels, from which a depthwise 3x3 convolution
    computes the other half.

    Args:
        in_channels, channels: number of input and output channels; `channels` must be even.
        activation: function to apply after each of the two convolutions, or None.
        data_format: "NCHW" or "NHWC".
    """

    def __init__(self, in_channels, channels, activation, data_format):
        super().__init__()
        half = channels // 2
        common = {"data_format": data_format, "initializer": INITIALIZER}
        self.primary = ConvBN(in_channels, half, 1, 1, **common)
        self.cheap = ConvBN(half, half, 3, 1, groups=half, **common)
        self.activation = activation or (lambda x: x)
        self.axis = 1 if data_format == "NCHW" else 3

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.activation(self.primary(x))
        return paddle.concat([x, self.activation(self.cheap(x))], axis=self.axis)


class Block(nn.Layer):
    """Residual block: a Ghost module that expands the channels, a depthwise convolution if the stride is 2,
    squeeze-and-excitation if `has_se` is set, and a Ghost module without activation. If the shape changes, the shortcut
    consists of a depthwise convolution and a 1x1 convolution."""

    def __init__(self, in_channels, kernel_size, hidden, channels, has_se, stride, data_format):
        super().__init__()
        common = {"data_format": data_format, "initializer": INITIALIZER}

        def depthwise(channels):
            return ConvBN(channels, channels, kernel_size, stride, groups=channels, **common)

        self.expand = Ghost(in_channels, hidden, F.relu, data_format)
        self.depthwise = depthwise(hidden) if stride > 1 else None
        self.se = None
        if has_se:
            self.se = SqueezeExcitation(hidden, rounded(hidden / 4, 4), gate=F.hardsigmoid, **common)
        self.project = Ghost(hidden, channels, None, data_format)
        self.drop_path = DropPath()
        self.shortcut = None
        if stride > 1 or in_channels != channels:
            self.shortcut = nn.Sequential(depthwise(in_channels), ConvBN(in_channels, channels, 1, 1, **common))

    def forward(self, x: static.Variable) -> static.Variable:
        y = self.expand(x)
        for layer in (self.depthwise, self.se):
            y = y if layer is None else layer(y)
        return self.drop_path(self.project(y)) + (x if self.shortcut is None else self.shortcut(x))


class GhostNet(BlockNetwork):
    """Image classifier. resnet.ResNet describes the input, the output, and the arguments that are not listed
    here.

    Args:
        blocks: see BLOCKS.
    """

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, data_format: str = "NCHW", blocks: tuple = BLOCKS
    ):
        super().__init__()
        common = {"data_format": data_format, "initializer": INITIALIZER}
        self.stem = ConvBN(in_channels, STEM, 3, 2, **common)
        self.blocks = nn.LayerList()
        channels = STEM
        for kernel_size, hidden, out_channels, has_se, stride in blocks:
            self.blocks.append(Block(channels, kernel_size, hidden, out_channels, has_se, stride, data_format))
            channels = out_channels
        self.expand = ConvBN(channels, hidden, 1, 1, **common)
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        weights = {"weight_attr": paddle.ParamAttr(initializer=INITIALIZER)}
        self.head = nn.Conv2D(hidden, HEAD, 1, data_format=data_format, **weights)
        self.classifier = nn.Linear(HEAD, num_classes, **weights)

    def forward(self, x: static.Variable) -> static.Variable:
        x = F.relu(self.head(self.global_pool(F.relu(self.expand(self.features(x, F.relu))))))
        return self.classifier(paddle.flatten(x, 1))
