"""MobileNetV3 at width 1.0: Howard et al., "Searching for MobileNetV3", arXiv:1905.02244.

Initialization follows the authors' code (TF-slim); the momentum of batch normalization follows section 6.1.1. Padding
is symmetric, as in torchvision. The authors train with dropout before the classifier; to use dropout, add --dropout
0.2.
"""

from functools import partial

import paddle
import paddle.nn.functional as F
from paddle import nn, static

from paddle_resnet.models.layers import (
    BlockNetwork,
    ConvBN,
    InvertedResidual,
    SqueezeExcitation,
    rounded,
    truncated_normal,
)

# For each block: kernel size, channels of the depthwise convolution, output channels, whether the block has
# squeeze-and-excitation, activation, stride.
RE, HS = F.relu, F.hardswish
LARGE = (
    *((3, 16, 16, False, RE, 1), (3, 64, 24, False, RE, 2), (3, 72, 24, False, RE, 1)),
    *((5, 72, 40, True, RE, 2), (5, 120, 40, True, RE, 1), (5, 120, 40, True, RE, 1)),
    *((3, 240, 80, False, HS, 2), (3, 200, 80, False, HS, 1), (3, 184, 80, False, HS, 1), (3, 184, 80, False, HS, 1)),
    *((3, 480, 112, True, HS, 1), (3, 672, 112, True, HS, 1)),
    *((5, 672, 160, True, HS, 2), (5, 960, 160, True, HS, 1), (5, 960, 160, True, HS, 1)),
)
SMALL = (
    *((3, 16, 16, True, RE, 2), (3, 72, 24, False, RE, 2), (3, 88, 24, False, RE, 1)),
    *((5, 96, 40, True, HS, 2), (5, 240, 40, True, HS, 1), (5, 240, 40, True, HS, 1)),
    *((5, 120, 48, True, HS, 1), (5, 144, 48, True, HS, 1)),
    *((5, 288, 96, True, HS, 2), (5, 576, 96, True, HS, 1), (5, 576, 96, True, HS, 1)),
)
STEM = 16


class MobileNetV3(BlockNetwork):
    """Image classifier. resnet.ResNet describes the input, the output, and the arguments that are not listed
    here.

    Args:
        blocks: LARGE or SMALL.
        head: number of channels of the layer before the classifier.
    """

    def __init__(self, blocks, head, num_classes: int = 1000, in_channels: int = 3, data_format: str = "NCHW"):
        super().__init__()
        initializer = truncated_normal(0.09)
        layout = {"data_format": data_format, "initializer": initializer}
        common = layout | {"epsilon": 1e-3, "momentum": 0.99}
        self.stem = ConvBN(in_channels, STEM, 3, 2, **common)
        self.blocks = nn.LayerList()
        channels = STEM
        for kernel_size, hidden, out_channels, has_se, activation, stride in blocks:
            se = partial(SqueezeExcitation, hidden=rounded(hidden / 4, 8), gate=F.hardsigmoid, **layout)
            shape = channels, hidden, out_channels, kernel_size, stride
            self.blocks.append(InvertedResidual(*shape, activation, se if has_se else None, **common))
            channels = out_channels
        self.expand = ConvBN(channels, channels * 6, 1, 1, **common)
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        weights = {"weight_attr": paddle.ParamAttr(initializer=initializer)}
        self.head = nn.Linear(channels * 6, head, **weights)
        self.classifier = nn.Linear(head, num_classes, **weights)

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.global_pool(F.hardswish(self.expand(self.features(x, F.hardswish))))
        return self.classifier(F.hardswish(self.head(paddle.flatten(x, 1))))


Large = partial(MobileNetV3, LARGE, 1280)
Small = partial(MobileNetV3, SMALL, 1024)
