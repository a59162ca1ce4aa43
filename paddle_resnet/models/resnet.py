"""ResNet v1.5: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, with the stride of a
bottleneck in its 3x3 convolution instead of the first 1x1, which is 5 % slower and gains 0.5 percentage points of top1.
"""

from functools import partial

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from paddle_resnet.models.layers import ConvBN


class Block(nn.Layer):
    """A residual unit: relu(branch(x) + shortcut(x)), with a projection as shortcut if the shape changes."""

    def __init__(self, branch, shortcut):
        super().__init__()
        self.branch = nn.LayerList(branch)
        self.shortcut = shortcut

    def forward(self, x):
        y = x
        for conv_bn in self.branch[:-1]:
            y = F.relu(conv_bn(y))
        # The fusion of BN, addition and ReLU matches exactly this form, relu(a + b).
        return F.relu(self.branch[-1](y) + (x if self.shortcut is None else self.shortcut(x)))


class BasicBlock(Block):
    """Two 3x3 convolutions (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, in_channels, width, stride, **kwargs):
        branch = [ConvBN(in_channels, width, 3, stride, **kwargs), ConvBN(width, width, 3, 1, **kwargs)]
        super().__init__(branch, _projection(in_channels, width, stride, **kwargs))


class BottleneckBlock(Block):
    """A 1x1, a 3x3 (with the stride) and a 1x1 convolution to four times the width (ResNet-50 and deeper)."""

    expansion = 4

    def __init__(self, in_channels, width, stride, **kwargs):
        out_channels = width * self.expansion
        branch = [
            ConvBN(in_channels, width, 1, 1, **kwargs),
            ConvBN(width, width, 3, stride, **kwargs),
            ConvBN(width, out_channels, 1, 1, **kwargs),
        ]
        super().__init__(branch, _projection(in_channels, out_channels, stride, **kwargs))


def _projection(in_channels, out_channels, stride, **kwargs):
    """Build the shortcut; call it after the branch, for the parameter names of NVIDIA's RN50v1.5 example."""
    if stride == 1 and in_channels == out_channels:
        return None
    return ConvBN(in_channels, out_channels, 1, stride, **kwargs)


class ResNet(nn.Layer):
    """Image classifier.

    Args:
        block: BasicBlock or BottleneckBlock.
        depths: number of blocks in each of the four stages.
        num_classes: number of logits.
        in_channels: 3, or 4 if the loader pads RGB with a zero channel for faster half-precision convolutions.
        data_format: "NCHW" or "NHWC", layout of the input and of all activations.
        width: channels of the stem and of the first stage.
    The input is [N, C, H, W] or [N, H, W, C]; the output is logits [N, num_classes].
    """

    def __init__(self, block, depths, num_classes=1000, in_channels=3, data_format="NCHW", width=64):
        super().__init__()
        common = {"data_format": data_format}
        self.stem = ConvBN(in_channels, width, 7, 2, **common)
        self.pool = nn.MaxPool2D(3, stride=2, padding=1, data_format=data_format)
        self.stages = nn.Sequential()
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if i == 0 and stage > 0 else 1
                self.stages.add_sublayer(f"{stage}_{i}", block(channels, width * 2**stage, stride, **common))
                channels = width * 2**stage * block.expansion
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        # Normal(0, 0.01): Goyal et al., arXiv:1706.02677, section 5.1.
        self.classifier = nn.Linear(channels, num_classes, weight_attr=paddle.ParamAttr(initializer=Normal(0.0, 0.01)))

    @property
    def first(self):
        return self.stem.conv

    @property
    def last(self):
        return self.classifier

    def forward(self, x):
        x = self.pool(F.relu(self.stem(x)))
        x = self.global_pool(self.stages(x))
        return self.classifier(paddle.flatten(x, 1))


ResNet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
ResNet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
ResNet50 = partial(ResNet, BottleneckBlock, (3, 4, 6, 3))
ResNet101 = partial(ResNet, BottleneckBlock, (3, 4, 23, 3))
ResNet152 = partial(ResNet, BottleneckBlock, (3, 8, 36, 3))
