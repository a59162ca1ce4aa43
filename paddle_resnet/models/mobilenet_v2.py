"""MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", arXiv:1801.04381.
Initialization and batch normalization follow the authors' code (TF-slim); dropout before the classifier is omitted.
"""

import paddle
import paddle.nn.functional as F
from paddle import nn, static

from paddle_resnet.models.layers import BlockNetwork, ConvBN, InvertedResidual, truncated_normal

# For each stage: expansion factor of the channels, output channels, number of blocks, stride of the first block.
STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


class MobileNetV2(BlockNetwork):
    """Image classifier of width 1.0. resnet.ResNet describes the input, the output, and the arguments that are not
    listed here.

    Args:
        stages: see STAGES.
    """

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, data_format: str = "NCHW", stages: tuple = STAGES
    ):
        super().__init__()
        initializer = truncated_normal(0.09)
        common = {"data_format": data_format, "initializer": initializer, "epsilon": 1e-3, "momentum": 0.997}
        self.stem = ConvBN(in_channels, 32, 3, 2, **common)
        self.blocks = nn.LayerList()
        width = 32
        for expansion, channels, depth, stride in stages:
            for i in range(depth):
                shape = width, width * expansion, channels, 3, stride if i == 0 else 1
                self.blocks.append(InvertedResidual(*shape, **common))
                width = channels
        self.head = ConvBN(width, 1280, 1, 1, **common)
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.classifier = nn.Linear(1280, num_classes, weight_attr=paddle.ParamAttr(initializer=initializer))

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.global_pool(F.relu6(self.head(self.features(x, F.relu6))))
        return self.classifier(paddle.flatten(x, 1))
