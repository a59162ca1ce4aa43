"""The network of the frozen checkpoint: --model-arch-name network.py:Net."""

from paddle import nn


class Net(nn.Layer):
    def __init__(self, num_classes, in_channels, data_format):
        super().__init__()
        self.first = nn.Conv2D(in_channels, 8, 3, 2, 1, bias_attr=False, data_format=data_format)
        self.bn = nn.BatchNorm2D(8, data_format=data_format)
        self.second = nn.Conv2D(8, 16, 3, 2, 1, bias_attr=False, data_format=data_format)
        self.pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.last = nn.Linear(16, num_classes)

    def forward(self, images):
        x = nn.functional.relu(self.bn(self.first(images)))
        x = nn.functional.relu(self.second(x))
        return self.last(self.pool(x).flatten(1))
