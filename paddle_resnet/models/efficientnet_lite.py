"""EfficientNet-Lite: a variant of EfficientNet (Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional
Neural Networks", arXiv:1905.11946) that omits squeeze-and-excitation, replaces swish with ReLU6, and does not scale the
stem and the head (Renjie Liu, "Higher accuracy on vision models with EfficientNet-Lite", TensorFlow blog, March 2020).

Padding, initialization and batch normalization follow the authors' TensorFlow code. The authors train with dropout and
drop connect; to use both, add --dropout 0.2 (Lite2: 0.3) and --drop-path 0.2.
"""

import math

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Uniform

from paddle_resnet.models.layers import BlockNetwork, ConvBN, FanOutNormal, InvertedResidual, rounded

# For each stage: expansion factor of the channels, kernel size, output channels, number of blocks, stride of the first
# block.
STAGES = (
    *((1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2)),
    *((6, 5, 112, 3, 1), (6, 5, 192, 4, 2), (6, 3, 320, 1, 1)),
)
STEM, HEAD = 32, 1280


class EfficientNetLite(BlockNetwork):
    """Image classifier. resnet.ResNet describes the input, the output, and the arguments that are not listed
    here.

    Args:
        width: factor for the number of channels in all stages.
        depth: factor for the number of blocks in all stages except the first and the last.
        stages: see STAGES.
    """

    def __init__(
        self,
        width: float,
        depth: float,
        num_classes: int = 1000,
        in_channels: int = 3,
        data_format: str = "NCHW",
        stages: tuple = STAGES,
    ):
        super().__init__()
        norm = {"epsilon": 1e-3, "momentum": 0.99}
        common = {"data_format": data_format, "initializer": FanOutNormal(), "padding": "SAME", **norm}
        self.stem = ConvBN(in_channels, STEM, 3, 2, **common)
        self.blocks = nn.LayerList()
        channels = STEM
        for stage, (expansion, kernel_size, out_channels, count, stride) in enumerate(stages):
            is_scaled = 0 < stage < len(stages) - 1
            out_channels = rounded(out_channels * width, 8)
            for i in range(math.ceil(depth * count) if is_scaled else count):
                shape = channels, channels * expansion, out_channels, kernel_size, stride if i == 0 else 1
                self.blocks.append(InvertedResidual(*shape, **common))
                channels = out_channels
        self.head = ConvBN(channels, HEAD, 1, 1, **common)
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        limit = num_classes**-0.5
        self.classifier = nn.Linear(HEAD, num_classes, weight_attr=paddle.ParamAttr(initializer=Uniform(-limit, limit)))

    def forward(self, x: static.Variable) -> static.Variable:
        x = self.global_pool(F.relu6(self.head(self.features(x, F.relu6))))
        return self.classifier(paddle.flatten(x, 1))
