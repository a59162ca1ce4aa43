"""MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", arXiv:1801.04381.
Initialization and batch normalization follow the authors' code (TF-slim); dropout before the classifier is omitted.
"""

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import TruncatedNormal

from paddle_resnet.models.layers import ConvBN

# Per stage: expansion of the channels inside a block, output channels, number of blocks, stride of the first block.
STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


class InvertedResidual(nn.Layer):
    """A 1x1 convolution to more channels, a depthwise 3x3 convolution, and a 1x1 projection without activation;
    the input is added if the shape is unchanged."""

    def __init__(self, in_channels, channels, stride, expansion, **common):
        super().__init__()
        hidden = in_channels * expansion
        self.expand = None if expansion == 1 else ConvBN(in_channels, hidden, 1, 1, **common)
        self.depthwise = ConvBN(hidden, hidden, 3, stride, groups=hidden, **common)
        self.project = ConvBN(hidden, channels, 1, 1, **common)
        self.has_shortcut = stride == 1 and in_channels == channels

    def forward(self, x):
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.has_shortcut else y


class MobileNetV2(nn.Layer):
    """Image classifier of width 1.0, with the arguments, input and output of resnet.ResNet."""

    def __init__(self, num_classes=1000, in_channels=3, data_format="NCHW", stages=STAGES):
        super().__init__()
        initializer = TruncatedNormal(std=0.09)
        common = {"data_format": data_format, "initializer": initializer, "epsilon": 1e-3, "momentum": 0.997}
        self.stem = ConvBN(in_channels, 32, 3, 2, **common)
        self.blocks = nn.LayerList()
        width = 32
        for expansion, channels, depth, stride in stages:
            for i in range(depth):
                self.blocks.append(InvertedResidual(width, channels, stride if i == 0 else 1, expansion, **common))
                width = channels
        self.head = ConvBN(width, 1280, 1, 1, **common)
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.classifier = nn.Linear(1280, num_classes, weight_attr=paddle.ParamAttr(initializer=initializer))

    @property
    def first(self):
        return self.stem.conv

    @property
    def last(self):
        return self.classifier

    def forward(self, x):
        x = F.relu6(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = self.global_pool(F.relu6(self.head(x)))
        return self.classifier(paddle.flatten(x, 1))
