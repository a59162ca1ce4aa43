"""The network of `doctor --self-test`, which trains it as --model-arch-name FILE.py:Net.

The initial weights are constants, so that they are equal on all devices and in all versions of Paddle, whose random
number generators differ.
"""

import numpy as np
from paddle import ParamAttr, nn, static


class Net(nn.Layer):
    """A residual network with 16 channels: one block with a depthwise convolution, max pooling, and logits
    [N, num_classes] of images of 32 x 32 pixels."""

    def __init__(self, num_classes, in_channels, data_format):
        super().__init__()
        random = np.random.RandomState(0)

        def weights(*shape):
            deviation = (2 / np.prod(shape[1:])) ** 0.5 if len(shape) == 4 else 0.1
            values = (random.standard_normal(shape) * deviation).astype("float32")
            return ParamAttr(initializer=nn.initializer.Assign(values))

        def conv(inputs, outputs, size, stride=1, groups=1):
            attr = weights(outputs, inputs // groups, size, size)
            options = {"groups": groups, "weight_attr": attr, "bias_attr": False, "data_format": data_format}
            return nn.Conv2D(inputs, outputs, size, stride, size // 2, **options)

        def norm():
            return nn.BatchNorm2D(16, data_format=data_format)

        # A fourth channel contains zeros, so its weights have no effect on the logits.
        self.first, self.norm = conv(in_channels, 16, 3, 2), norm()
        self.pool = nn.MaxPool2D(3, 2, 1, data_format=data_format)
        self.depthwise, self.depthwise_norm = conv(16, 16, 3, groups=16), norm()
        self.pointwise, self.pointwise_norm = conv(16, 16, 1), norm()
        self.average = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.last = nn.Linear(16, num_classes, weight_attr=weights(16, num_classes))

    def forward(self, images: static.Variable) -> static.Variable:
        x = self.pool(nn.functional.relu(self.norm(self.first(images))))
        y = nn.functional.relu6(self.depthwise_norm(self.depthwise(x)))
        x = nn.functional.relu(self.pointwise_norm(self.pointwise(y)) + x)
        return self.last(self.average(x).flatten(1))
