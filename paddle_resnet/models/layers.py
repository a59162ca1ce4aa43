"""Layers that several networks share."""

import paddle
from paddle import nn
from paddle.nn.initializer import KaimingNormal


class BatchNorm(nn.BatchNorm2D):
    """The parameters are named after the class: batch_norm_N, as in checkpoints of NVIDIA's RN50v1.5 example."""


class ConvBN(nn.Layer):
    """Convolution without bias, then batch normalization; padding keeps the size at stride 1.

    Args:
        in_channels, channels: of input and output.
        kernel_size, stride: of the convolution.
        data_format: "NCHW" or "NHWC".
        groups: of the convolution; in_channels: depthwise.
        initializer: of the filters.
        epsilon, momentum: of batch normalization; momentum is the weight of the old running statistics.
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
    ):
        super().__init__()
        self.conv = nn.Conv2D(
            in_channels,
            channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            groups=groups,
            weight_attr=paddle.ParamAttr(initializer=initializer or KaimingNormal()),
            bias_attr=False,
            data_format=data_format,
        )
        self.bn = BatchNorm(channels, momentum=momentum, epsilon=epsilon, data_format=data_format)

    def forward(self, x):
        return self.bn(self.conv(x))
