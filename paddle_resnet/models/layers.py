"""Layers shared by several networks."""

import paddle
from paddle import nn, static
from paddle.nn.initializer import KaimingNormal
from paddle.utils import unique_name


def dropout(x, rate, seed):
    """Apply dropout: Srivastava et al., JMLR 15 (2014). Unlike paddle.nn.Dropout, it does not use Paddle's generator.

    Args:
        x: variable of any shape.
        rate: probability that an element becomes 0; the others are divided by 1 - rate.
        seed: variable [1] int32, positive, that determines the mask.
    """
    block = static.default_main_program().global_block()
    name = unique_name.generate("dropout")
    out = block.create_var(name=f"{name}.out", dtype=x.dtype)
    mask = block.create_var(name=f"{name}.mask", dtype="uint8", stop_gradient=True)
    attrs = {"dropout_prob": rate, "is_test": False, "dropout_implementation": "upscale_in_train"}
    block.append_op(type="dropout", inputs={"X": x, "Seed": seed}, outputs={"Out": out, "Mask": mask}, attrs=attrs)
    return out


class BatchNorm(nn.BatchNorm2D):
    """Batch normalization with the parameter names of NVIDIA's RN50v1.5 example, batch_norm_N, from the class name."""


class ConvBN(nn.Layer):
    """Convolution without bias, then batch normalization; at stride 1, padding preserves the size.

    Args:
        in_channels, channels: channels of input and output.
        kernel_size, stride: kernel size and stride of the convolution.
        data_format: "NCHW" or "NHWC".
        groups: groups of the convolution; depthwise if equal to in_channels.
        initializer: initializer of the filters.
        epsilon, momentum: batch normalization; momentum is the weight of the previous running statistics.
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
