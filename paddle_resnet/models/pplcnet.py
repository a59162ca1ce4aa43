"""PP-LCNet: Cui et al., "PP-LCNet: A Lightweight CPU Convolutional Neural Network", arXiv:2109.15099.

Initialization follows PaddleClas. As in timm, the last convolution has a bias, which is initially 0. The authors train
with dropout before the classifier; to use dropout, add --dropout 0.2. The network has no residual branches.
"""

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import KaimingNormal

from paddle_resnet.models.layers import BlockNetwork, ConvBN, SqueezeExcitation

# For each block: kernel size of the depthwise convolution, output channels, whether the block has
# squeeze-and-excitation, stride.
BLOCKS = (
    *((3, 32, False, 1), (3, 64, False, 2), (3, 64, False, 1), (3, 128, False, 2), (3, 128, False, 1)),
    *((3, 256, False, 2), *((5, 256, False, 1),) * 5, (5, 512, True, 2), (5, 512, True, 1)),
)
STEM, HEAD = 16, 1280


class Block(nn.Layer):
    """A depthwise convolution, squeeze-and-excitation if `has_se` is set, and a 1x1 convolution. Hard-swish follows
    each of the two convolutions."""

    def __init__(self, in_channels, kernel_size, channels, has_se, stride, data_format):
        super().__init__()
        self.depthwise = ConvBN(in_channels, in_channels, kernel_size, stride, data_format, groups=in_channels)
        self.se = None
        if has_se:
            options = {"gate": F.hardsigmoid, "initializer": KaimingNormal()}
            self.se = SqueezeExcitation(in_channels, in_channels // 4, data_format, **options)
        self.project = ConvBN(in_channels, channels, 1, 1, data_format)

    def forward(self, x: static.Variable) -> static.Variable:
        x = F.hardswish(self.depthwise(x))
        return F.hardswish(self.project(x if self.se is None else self.se(x)))


class PPLCNet(BlockNetwork):
    """Image classifier of width 1.0. resnet.ResNet describes the input, the output, and the arguments that are not
    listed here.

    Args:
        blocks: see BLOCKS.
    """

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, data_format: str = "NCHW", blocks: tuple = BLOCKS
    ):
        super().__init__()
        self.stem = ConvBN(in_channels, STEM, 3, 2, data_format)
        self.blocks = nn.LayerList()
        channels = STEM
        for kernel_size, out_channels, has_se, stride in blocks:
            self.blocks.append(Block(channels, kernel_size, out_channels, has_se, stride, data_format))
            channels = out_channels
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        weights = paddle.ParamAttr(initializer=KaimingNormal())
        self.head = nn.Conv2D(channels, HEAD, 1, weight_attr=weights, data_format=data_format)
        self.classifier = nn.Linear(HEAD, num_classes)

    def forward(self, x: static.Variable) -> static.Variable:
        x = F.hardswish(self.head(self.global_pool(self.features(x, F.hardswish))))
        return self.classifier(paddle.flatten(x, 1))
