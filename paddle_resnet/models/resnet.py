"""ResNet v1.5 and its variants: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385. In version
1.5, bottleneck blocks have their stride in the 3x3 convolution; in the paper, it is in the first 1x1 convolution.
According to the README of NVIDIA's example, version 1.5 is 5 % slower, and its top1 is 0.5 percentage points higher.

The variants are options of ResNet; models/__init__.py lists the options for each name:
- ..._vd: ResNet-D of He et al., arXiv:1812.01187, figure 2. The name comes from PaddleClas. As in PaddleClas, the
  shortcut of the first block of ResNet18_vd is a projection, although the shape is unchanged.
- SE_...: squeeze-and-excitation, Hu et al., arXiv:1709.01507.
- ResNeXt50_32x4d: 32 groups of 4 channels, Xie et al., arXiv:1611.05431.
- XResNet50: fastai's xresnet50, a ResNet-D whose branches initially output zero. XSEResNeXt50_Mish_SA: fastai's
  xse_resnext50 with the options of its Imagenette leaderboard.
- ..._Mish: Mish (Misra, arXiv:1908.08681) instead of ReLU; max pooling with BlurPool in the stem and in the shortcuts.
  ..._SA: SelfAttention. ..._NoPool: no max pooling in the stem.
"""

from functools import partial

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Normal

from paddle_resnet.models.layers import BlurPool, ConvBN, DropPath, SelfAttention, SqueezeExcitation

DEEP = [(0.5, 3, 2), (0.5, 3, 1), (1, 3, 1)]
# {stem: ([(fraction of the stem's output channels, kernel size, stride) of each convolution], whether max pooling
# follows)}
STEMS = {
    "7x7": ([(1, 7, 2)], True),
    "deep": (DEEP, True),
    "deep-no-pool": (DEEP, False),
    "small": ([(1, 3, 1)], False),
}


def _max_blur_pool(data_format):
    return nn.Sequential(nn.MaxPool2D(3, stride=1, padding=1, data_format=data_format), BlurPool(data_format))


# {shortcut_pool: function that constructs a layer that halves height and width, rounding up}
SHORTCUT_POOLS = {
    "average": lambda data_format: nn.AvgPool2D(2, stride=2, ceil_mode=True, data_format=data_format),
    "max": lambda data_format: nn.MaxPool2D(2, stride=2, ceil_mode=True, data_format=data_format),
    "max-blur": _max_blur_pool,
}
SE_REDUCTION = 16  # ratio of channels to hidden channels, from arXiv:1709.01507, section 6.1


class Block(nn.Layer):
    """A residual unit: activation(branch(x) + shortcut(x)). The shortcut is a projection if the shape changes.

    Args:
        in_channels: number of input channels.
        convolutions: (output channels, kernel size, stride, groups) for each convolution of the branch.
        projects: whether the shortcut is a projection even if the shape is unchanged.
        self_attention: whether SelfAttention follows the branch.
        activation, shortcut_pool, se, zero_init, data_format: see ResNet.
    """

    def __init__(
        self,
        in_channels,
        convolutions,
        projects=False,
        self_attention=False,
        activation=F.relu,
        shortcut_pool=None,
        se=False,
        zero_init=False,
        data_format="NCHW",
    ):
        super().__init__()
        branch, channels, reduction = [], in_channels, 1
        for i, (out_channels, kernel_size, stride, groups) in enumerate(convolutions, 1):
            scale = 0.0 if zero_init and i == len(convolutions) else 1.0
            branch.append(ConvBN(channels, out_channels, kernel_size, stride, data_format, groups, scale=scale))
            channels, reduction = out_channels, reduction * stride
        self.branch = nn.LayerList(branch)
        # The shortcut is created after the branch, so that parameter names match those of NVIDIA's RN50v1.5 example.
        self.shortcut = None
        if projects or reduction > 1 or in_channels != channels:
            if reduction > 1 and shortcut_pool:
                pool = SHORTCUT_POOLS[shortcut_pool](data_format)
                self.shortcut = nn.Sequential(pool, ConvBN(in_channels, channels, 1, 1, data_format))
            else:
                self.shortcut = ConvBN(in_channels, channels, 1, reduction, data_format)
        self.se = SqueezeExcitation(channels, channels // SE_REDUCTION, data_format, activation) if se else None
        self.self_attention = SelfAttention(channels, data_format) if self_attention else None
        self.drop_path = DropPath()
        self.activation = activation

    def forward(self, x: static.Variable) -> static.Variable:
        y = x
        for conv_bn in self.branch[:-1]:
            y = self.activation(conv_bn(y))
        y = self.branch[-1](y)
        y = y if self.se is None else self.se(y)
        y = self.drop_path(y if self.self_attention is None else self.self_attention(y))
        # The pass that fuses BN, addition and activation recognizes only the form activation(a + b).
        return self.activation(y + (x if self.shortcut is None else self.shortcut(x)))


class BasicBlock(Block):
    """A block with two 3x3 convolutions (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, in_channels, width, stride, groups=1, group_width=64, **options):
        if groups > 1:
            raise ValueError(f"groups={groups}: BasicBlock does not support groups; use BottleneckBlock")
        super().__init__(in_channels, [(width, 3, stride, 1), (width, 3, 1, 1)], **options)


class BottleneckBlock(Block):
    """A block with a 1x1 convolution, a 3x3 convolution with the block's stride, and a 1x1 convolution that outputs
    four times the width (ResNet-50 and deeper)."""

    expansion = 4

    def __init__(self, in_channels, width, stride, groups=1, group_width=64, **options):
        hidden = width * group_width // 64 * groups
        convolutions = [(hidden, 1, 1, 1), (hidden, 3, stride, groups), (width * self.expansion, 1, 1, 1)]
        super().__init__(in_channels, convolutions, **options)


class ResNet(nn.Layer):
    """Image classifier.

    Args:
        block: BasicBlock or BottleneckBlock.
        depths: number of blocks in each stage.
        num_classes: number of logits.
        in_channels: 3, or 4 if the loader adds a zero channel to RGB images.
        data_format: layout of the input and of all activations, "NCHW" or "NHWC".
        width: number of output channels of the stem, and width of the blocks of the first stage.
        stem: a key of STEMS: "7x7"; "deep" for three 3x3 convolutions; "deep-no-pool" for the same without max
            pooling, which doubles the height and width of all later activations; or "small" for one 3x3 convolution
            with stride 1 and no max pooling, for images of about 32 to 64 pixels.
        first_projection: whether the shortcut of the first block is a projection even if the shape is unchanged.
        groups, group_width: number of groups of the 3x3 convolutions, and number of channels per group in a stage of
            width 64; only for BottleneckBlock.
        classifier_std: standard deviation of the classifier's initial weights; 0.01 is from Goyal et al.,
            arXiv:1706.02677, section 5.1.
        activation: function that maps a variable to a variable, or the name of such a function in paddle.nn.functional,
            for example "mish".
        shortcut_pool: a key of SHORTCUT_POOLS, or None. If set, shortcuts with stride 2 consist of this pooling and a
            1x1 convolution with stride 1. "max-blur" also adds BlurPool to the max pooling of the stem.
        se: whether each branch ends with squeeze-and-excitation.
        self_attention: whether the last branch of the first stage ends with SelfAttention.
        zero_init: whether to initialize the scale of the last BN layer in each branch with 0: arXiv:1706.02677, section
            5.1.
    The input is [N, C, H, W] or [N, H, W, C]; the output is logits [N, num_classes].
    Raises:
        ValueError: the block does not support groups.
    """

    def __init__(
        self,
        block,
        depths,
        num_classes=1000,
        in_channels=3,
        data_format="NCHW",
        width=64,
        stem="7x7",
        first_projection=False,
        groups=1,
        group_width=64,
        classifier_std=0.01,
        activation=F.relu,
        shortcut_pool=None,
        self_attention=False,
        **options,
    ):
        super().__init__()
        self.activation = activation = getattr(F, activation) if isinstance(activation, str) else activation
        convolutions, has_pool = STEMS[stem]
        self.stem = nn.LayerList()
        channels = in_channels
        for fraction, kernel_size, stride in convolutions:
            self.stem.append(ConvBN(channels, int(width * fraction), kernel_size, stride, data_format))
            channels = int(width * fraction)
        self.pool = None
        if has_pool:
            max_pool = nn.MaxPool2D(3, stride=2, padding=1, data_format=data_format)
            self.pool = _max_blur_pool(data_format) if shortcut_pool == "max-blur" else max_pool
        options |= {"activation": activation, "shortcut_pool": shortcut_pool}
        options |= {"groups": groups, "group_width": group_width, "data_format": data_format}
        self.stages = nn.Sequential()
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if i == 0 and stage > 0 else 1
                options["projects"] = first_projection and stage == i == 0
                options["self_attention"] = self_attention and (stage, i) == (0, depth - 1)
                layer = block(channels, width * 2**stage, stride, **options)
                self.stages.add_sublayer(f"{stage}_{i}", layer)
                channels = width * 2**stage * block.expansion
        self.global_pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        initializer = Normal(0.0, classifier_std)
        self.classifier = nn.Linear(channels, num_classes, weight_attr=paddle.ParamAttr(initializer=initializer))

    @property
    def first(self) -> nn.Conv2D:
        return self.stem[0].conv

    @property
    def last(self) -> nn.Linear:
        return self.classifier

    def forward(self, x: static.Variable) -> static.Variable:
        for conv_bn in self.stem:
            x = self.activation(conv_bn(x))
        if self.pool is not None:
            x = self.pool(x)
        x = self.global_pool(self.stages(x))
        return self.classifier(paddle.flatten(x, 1))


ResNet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
ResNet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
ResNet50 = partial(ResNet, BottleneckBlock, (3, 4, 6, 3))
ResNet101 = partial(ResNet, BottleneckBlock, (3, 4, 23, 3))
ResNet152 = partial(ResNet, BottleneckBlock, (3, 8, 36, 3))
