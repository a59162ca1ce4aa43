"""Layers shared by several networks."""

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Constant, Initializer, KaimingNormal, Normal, TruncatedNormal, Uniform
from paddle.utils import unique_name

from paddle_resnet import graph

if TYPE_CHECKING:
    from paddle.base.framework import Block, Operator

FLOAT32_SCOPE = "float32"  # mixed precision computes operators in this name scope in float32


def dropout(x: static.Variable, rate: float, seed: static.Variable) -> static.Variable:
    """Return x after dropout (Srivastava et al., JMLR 15, 2014). Unlike paddle.nn.Dropout, this function does not use
    Paddle's random number generator.

    Args:
        x: variable of any shape.
        rate: probability that an element is set to 0; the other elements are divided by 1 - rate.
        seed: int32 variable [1] with a positive value that determines the mask.
    """
    block = graph.block(static.default_main_program())
    name = unique_name.generate("dropout")
    out = block.create_var(name=f"{name}.out", dtype=x.dtype)
    mask = block.create_var(name=f"{name}.mask", dtype="uint8", stop_gradient=True)
    attrs = {"dropout_prob": rate, "is_test": False, "dropout_implementation": "upscale_in_train"}
    block.append_op(type="dropout", inputs={"X": x, "Seed": seed}, outputs={"Out": out, "Mask": mask}, attrs=attrs)
    return graph.written(out)


def _append(op_type, inputs, **attrs):
    return graph.operator(f"{op_type}.out", op_type, inputs, **attrs)


def sigmoid(x: static.Variable) -> static.Variable:
    """Return the sigmoid of each element of x."""
    return _append("sigmoid", {"X": x})


def product(x: static.Variable, y: static.Variable, trans_x: bool = False, trans_y: bool = False) -> static.Variable:
    """Return the batched matrix product of x and y. If trans_x or trans_y is set, the last two axes of x or y are
    transposed first."""
    return _append("matmul_v2", {"X": x, "Y": y}, trans_x=trans_x, trans_y=trans_y)


def is_float32(op: "Operator") -> bool:
    """Return whether mixed precision must keep an operator in float32."""
    return op.attr("op_namescope").startswith(f"/{FLOAT32_SCOPE}")


def rounded(channels: float, divisor: int) -> int:
    """Return a number of channels rounded to the nearest multiple of the divisor, or rounded up if the nearest multiple
    is more than 10 % smaller than the number."""
    result = int(channels + divisor / 2) // divisor * divisor
    return result + divisor if result < 0.9 * channels else result


def truncated_normal(std: float) -> Initializer:
    """Return an initializer with a normal distribution that is truncated at two standard deviations. Paddle 2.6 always
    truncates at two standard deviations; Paddle 3 truncates at the values a and b, by default -2 and 2, regardless of
    the standard deviation."""
    has_bounds = "a" in inspect.signature(TruncatedNormal).parameters
    return TruncatedNormal(std=std, **({"a": -2 * std, "b": 2 * std} if has_bounds else {}))


class FanOutNormal(Initializer):
    """Initializes filters from a normal distribution with the variance 2 / fan-out (He et al., arXiv:1502.01852,
    equation 14). As in TensorFlow's reference code for EfficientNet, the fan-out of a depthwise filter is its number of
    weights per channel."""

    def forward(self, var: static.Variable, block: "Block | None" = None) -> "Operator | None":
        outputs, inputs, *kernel = var.shape
        is_depthwise = inputs == 1
        fan_out = math.prod(kernel) * (1 if is_depthwise else outputs)
        return Normal(std=(2 / fan_out) ** 0.5)(var, block)


class BatchNorm(nn.BatchNorm2D):
    """Batch normalization. Paddle derives the parameter names batch_norm_N from the class name; NVIDIA's RN50v1.5
    example uses the same names."""


class ConvBN(nn.Layer):
    """Convolution without bias, followed by batch normalization. At stride 1, the default padding of an odd kernel size
    preserves height and width.

    Args:
        in_channels, channels: number of input and output channels.
        kernel_size, stride: kernel size and stride of the convolution.
        data_format: "NCHW" or "NHWC".
        groups: number of groups of the convolution; if it equals in_channels, the convolution is depthwise.
        initializer: initializer of the filters.
        epsilon, momentum: arguments of the BN layer; momentum is the weight of the previous running statistics.
        padding: padding of the convolution, by default kernel_size // 2 on all sides. "SAME" pads like TensorFlow: for
            stride 2, an odd kernel size and an even image size, the bottom gets one more row than the top, and the
            right one more column than the left.
        scale: initial scale of the BN layer.
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
        padding=None,
        scale=1.0,
    ):
        super().__init__()
        self.conv = nn.Conv2D(
            in_channels,
            channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2 if padding is None else padding,
            groups=groups,
            weight_attr=paddle.ParamAttr(initializer=initializer or KaimingNormal()),
            bias_attr=False,
            data_format=data_format,
        )
        scale = paddle.ParamAttr(initializer=Constant(scale))
        self.bn = BatchNorm(channels, momentum, epsilon, weight_attr=scale, data_format=data_format)

    def forward(self, x: static.Variable) -> static.Variable:
        return self.bn(self.conv(x))


class BlockNetwork(nn.Layer):
    """Base class of image classifiers that begin with a convolution (`stem`) and a list of blocks (`blocks`), and end
    with the linear layer `classifier`. The constructor of a subclass sets these attributes."""

    stem: ConvBN
    blocks: nn.LayerList
    classifier: nn.Linear

    @property
    def first(self) -> nn.Conv2D:
        return self.stem.conv

    @property
    def last(self) -> nn.Linear:
        return self.classifier

    def features(self, x: static.Variable, activation: Callable[[static.Variable], static.Variable]) -> static.Variable:
        """Return the output of the last block, given images and the activation after the stem."""
        x = activation(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x


class DropPath(nn.Layer):
    """Stochastic depth per image (Huang et al., arXiv:1603.09382). The input is the output of a residual block's
    branch, [N, ...].

    --drop-path sets the attributes rate and seed. With probability `rate`, the values of an image are set to 0; the
    values of all other images are divided by 1 - rate. Without --drop-path, the layer returns its input.
    """

    rate, seed = 0.0, None

    def forward(self, x: static.Variable) -> static.Variable:
        if not self.rate:
            return x
        places = list(range(1, len(x.shape)))
        first = paddle.slice(x, places, [0] * len(places), [1] * len(places))
        ones = graph.operator("drop_path.ones", "fill_any_like", {"X": first}, stop_gradient=True, value=1.0)
        factors = dropout(ones, self.rate, self.seed)
        return x * factors


class BlurPool(nn.Layer):
    """Blur with the filter [1, 2, 1] / 4 in both directions, then halve height and width, rounding up (Zhang,
    arXiv:1904.11486). At the border, edge pixels are repeated. The filter is implemented as two 2x2 average pooling
    layers; the first layer excludes padding from its averages.

    Args:
        data_format: "NCHW" or "NHWC".
    """

    def __init__(self, data_format):
        super().__init__()
        self.first = nn.AvgPool2D(2, stride=1, padding=1, exclusive=True, data_format=data_format)
        self.second = nn.AvgPool2D(2, stride=2, data_format=data_format)

    def forward(self, x: static.Variable) -> static.Variable:
        return self.second(self.first(x))


class SqueezeExcitation(nn.Layer):
    """Multiply each channel by a factor that is computed from the means of all channels (Hu et al., arXiv:1709.01507).

    Args:
        channels: number of channels of the input and of the output.
        hidden: number of channels between the two fully connected layers, which are implemented as 1x1 convolutions.
        data_format: "NCHW" or "NHWC".
        activation: function between the fully connected layers.
        gate: function that maps the output of the second layer to factors between 0 and 1.
        initializer: initializer of the weights; by default uniform between -fan_in**-0.5 and fan_in**-0.5, as in
            PaddleClas.
    """

    def __init__(self, channels, hidden, data_format, activation=F.relu, gate=sigmoid, initializer=None):
        super().__init__()

        def conv(inputs, outputs):
            limit = inputs**-0.5
            attr = paddle.ParamAttr(initializer=initializer or Uniform(-limit, limit))
            return nn.Conv2D(inputs, outputs, 1, weight_attr=attr, data_format=data_format)

        self.pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.reduce, self.expand = conv(channels, hidden), conv(hidden, channels)
        self.activation, self.gate = activation, gate

    def forward(self, x: static.Variable) -> static.Variable:
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))


class SelfAttention(nn.Layer):
    """Self-attention among channels: y = x + gamma * (x x^T / sqrt(P)) (W x), where x is the matrix [channels, P] of
    the P pixels of an image. W is divided by its largest singular value: Miyato et al., arXiv:1802.05957. gamma is
    initially 0.

    The layer is fastai's SimpleSelfAttention with two changes. The division by sqrt(P) prevents overflow in half
    precision. The singular value is recomputed in each step, so the layer has no state.

    Args:
        channels: number of channels of the input and of the output.
        data_format: "NCHW" or "NHWC".
    """

    SQUARINGS = 4  # number of iterations; each one multiplies the exponent of W^T W by 4

    def __init__(self, channels, data_format):
        super().__init__()
        self.is_nchw = data_format == "NCHW"
        # The weight has three axes, like a Conv1D filter, so that --asp does not mistake it for the weight of a Linear.
        attr = paddle.ParamAttr(initializer=Normal(std=(2 / channels) ** 0.5))
        self.weight = self.create_parameter([channels, channels, 1], attr=attr)
        self.gamma = self.create_parameter([1], default_initializer=Constant(0.0))

    def forward(self, x: static.Variable) -> static.Variable:
        channels, *size = x.shape[1:] if self.is_nchw else (x.shape[-1], *x.shape[1:-1])
        scale = math.prod(size) ** -0.5
        rows = paddle.reshape(x, [0, channels, -1] if self.is_nchw else [0, -1, channels])
        scaled = rows * scale
        # Compute (x x^T) (W x) as ((x x^T) W) x, which requires fewer multiplications.
        covariance = product(rows, scaled, trans_x=not self.is_nchw, trans_y=self.is_nchw)
        attention = product(covariance, self._scaled_weight())
        y = product(attention, rows) if self.is_nchw else product(rows, attention, trans_y=True)
        return x + paddle.reshape(y, [0, *x.shape[1:]])

    def _scaled_weight(self):
        """Return W * gamma / (largest singular value of W)."""
        # The parameters are read and the result is computed outside the name scope FLOAT32_SCOPE, so that mixed
        # precision casts both as usual.
        weight, factor = paddle.reshape(self.weight, self.weight.shape[:2]), paddle.reshape(self.gamma, [1])
        with static.name_scope(FLOAT32_SCOPE):
            # The power (W^T W)^(4^SQUARINGS) is approximately proportional to the projection onto the singular vector
            # of the largest singular value. The trace of the power is normalized to the number of elements of W.
            power = product(weight, weight, trans_x=True) / paddle.mean(weight * weight)
            for _ in range(self.SQUARINGS):
                square = product(power, power)
                power = product(square, square) / paddle.mean(square * square)
            power.stop_gradient = True
            factor = factor / _append("sqrt", {"X": paddle.mean(weight * product(weight, power))})
        return weight * factor


class InvertedResidual(nn.Layer):
    """Inverted residual block: a 1x1 convolution that expands the channels, a depthwise convolution, and a 1x1
    projection without activation. If the shape is unchanged, the input is added to the output. See Sandler et al.,
    arXiv:1801.04381.

    Args:
        in_channels, hidden, channels: number of channels of the input, of the depthwise convolution and of the output.
            The first convolution is omitted if hidden equals in_channels.
        kernel_size, stride: kernel size and stride of the depthwise convolution.
        activation: function after each of the first two convolutions.
        se: function that constructs the SqueezeExcitation before the projection, or None to omit it.
        common: keyword arguments for every ConvBN.
    """

    def __init__(self, in_channels, hidden, channels, kernel_size, stride, activation=F.relu6, se=None, **common):
        super().__init__()
        self.expand = None if hidden == in_channels else ConvBN(in_channels, hidden, 1, 1, **common)
        self.depthwise = ConvBN(hidden, hidden, kernel_size, stride, groups=hidden, **common)
        self.se = se and se(hidden)
        self.project = ConvBN(hidden, channels, 1, 1, **common)
        self.activation = activation
        self.drop_path = DropPath() if stride == 1 and in_channels == channels else None

    def forward(self, x: static.Variable) -> static.Variable:
        y = x if self.expand is None else self.activation(self.expand(x))
        y = self.activation(self.depthwise(y))
        y = self.project(y if self.se is None else self.se(y))
        return y if self.drop_path is None else x + self.drop_path(y)
