"""PP-HGNetV2 in the size B0, as defined by PaddleClas. No paper describes the network; its published weights were
trained by the distillation of Cui et al., "Beyond Self-Supervision: A Simple Yet Effective Network Distillation
Alternative to Improve Backbones", arXiv:2103.05959.

Initialization follows PaddleClas. Unlike in PaddleClas, the parameters of LearnableAffine have the same learning rate
as all others, not a hundredth of it.
"""

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Constant, KaimingNormal

from paddle_resnet.models.layers import ConvBN, DropPath

# For each stage: channels inside its blocks, output channels, number of blocks, whether the stage halves height and
# width, whether the layers of its blocks are Light, kernel size.
STAGES = (
    *((16, 64, 1, False, False, 3), (32, 256, 1, True, False, 3)),
    *((64, 512, 2, True, True, 5), (128, 1024, 1, True, True, 5)),
)
STEM, HEAD, LAYERS = 16, 2048, 3


class LearnableAffine(nn.Layer):
    """Multiply all elements by one learned number and add another. The initial values are 1 and 0."""

    def __init__(self):
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([1], default_initializer=Constant(0.0))

    def forward(self, x: static.Variable) -> static.Variable:
        return x * self.scale + self.bias


class Unit(ConvBN):
    """ConvBN, followed by ReLU and LearnableAffine. For the arguments, see ConvBN."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.lab = LearnableAffine()

    def forward(self, x: static.Variable) -> static.Variable:
        return self.lab(F.relu(super().forward(x)))


class Light(nn.Layer):
    """A 1x1 convolution with batch normalization, followed by a depthwise Unit."""

    def __init__(self, in_channels, channels, kernel_size, data_format):
        super().__init__()
        self.pointwise = ConvBN(in_channels, channels, 1, 1, data_format)
        self.depthwise = Unit(channels, channels, kernel_size, 1, data_format, groups=channels)

    def forward(self, x: static.Variable) -> static.Variable:
        return self.depthwise(self.pointwise(x))


class Stem(nn.Layer):
    """Five convolutions, two of them with stride 2. A chain of two convolutions and, in parallel, max pooling read the
    output of the first convolution. The 2x2 windows of the two convolutions and of the pooling have stride 1 and extend
    beyond the bottom and right edge, where convolutions read zeros. Pooling ignores the pixels beyond the edge, as in
    PaddleClas; timm pads with zeros, which differs if LearnableAffine returns negative values.

    Args:
        in_channels, channels: number of image channels and of output channels.
        data_format: "NCHW" or "NHWC".
    """

    def __init__(self, in_channels, channels, data_format):
        super().__init__()
        self.first = Unit(in_channels, channels, 3, 2, data_format)
        self.narrow = Unit(channels, channels // 2, 2, 1, data_format, padding="SAME")
        self.widen = Unit(channels // 2, channels, 2, 1, data_format, padding="SAME")
        self.pool = nn.MaxPool2D(2, stride=1, padding=[0, 1, 0, 1], data_format=data_format)
        self.merge = Unit(channels * 2, channels, 3, 2, data_format)
        self.last = Unit(channels, channels, 1, 1, data_format)
        self.axis = 1 if data_format == "NCHW" else 3

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.first(x)
        x = paddle.concat([self.pool(x), self.widen(self.narrow(x))], axis=self.axis)
        return self.last(self.merge(x))


class Block(nn.Layer):
    """A chain of layers, whose input and outputs are concatenated and merged by two 1x1 convolutions. A depthwise
    convolution with stride 2 precedes the chain if `halves` is set. If `is_residual` is set, the input is added to the
    output.

    Args:
        in_channels, hidden, channels: number of channels of the input, of each layer and of the output.
        kernel_size: kernel size of the layers.
        is_light: whether the layers are Light instead of Unit.
        data_format: "NCHW" or "NHWC".
    """

    def __init__(self, in_channels, hidden, channels, kernel_size, halves, is_light, is_residual, data_format):
        super().__init__()
        self.downsample = ConvBN(in_channels, in_channels, 3, 2, data_format, groups=in_channels) if halves else None
        self.layers = nn.LayerList()
        for i in range(LAYERS):
            inputs = in_channels if i == 0 else hidden
            layer = Light(inputs, hidden, kernel_size, data_format) if is_light else None
            self.layers.append(layer or Unit(inputs, hidden, kernel_size, 1, data_format))
        self.squeeze = Unit(in_channels + LAYERS * hidden, channels // 2, 1, 1, data_format)
        self.excite = Unit(channels // 2, channels, 1, 1, data_format)
        self.drop_path = DropPath() if is_residual else None
        self.axis = 1 if data_format == "NCHW" else 3

    def forward(self, x: static.Variable) -> static.Variable:
        x = x if self.downsample is None else self.downsample(x)
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        y = self.excite(self.squeeze(paddle.concat(outputs, axis=self.axis)))
        return y if self.drop_path is None else x + self.drop_path(y)


class PPHGNetV2(nn.Layer):
    """Image classifier. resnet.ResNet describes the input, the output, and the arguments that are not listed here.

    Args:
        stages: see STAGES.
    """

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, data_format: str = "NCHW", stages: tuple = STAGES
    ):
        super().__init__()
        self.stem = Stem(in_channels, STEM, data_format)
        self.blocks = nn.LayerList()
        width = STEM
        for hidden, channels, count, halves, is_light, kernel_size in stages:
            for i in range(count):
                shape = width, hidden, channels, kernel_size
                self.blocks.append(Block(*shape, halves and i == 0, is_light, i > 0, data_format))
                width = channels
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        weights = paddle.ParamAttr(initializer=KaimingNormal())
        self.head = nn.Conv2D(width, HEAD, 1, weight_attr=weights, bias_attr=False, data_format=data_format)
        self.lab = LearnableAffine()
        self.classifier = nn.Linear(HEAD, num_classes)

    @property
    def first(self) -> nn.Conv2D:
        return self.stem.first.conv

    @property
    def last(self) -> nn.Linear:
        return self.classifier

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.lab(F.relu(self.head(self.global_pool(x))))
        return self.classifier(paddle.flatten(x, 1))
