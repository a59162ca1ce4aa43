"""Networks of the registry with fewer blocks. Each network still contains all kinds of layers of the full network."""

import importlib
from dataclasses import replace
from functools import partial

from paddle_resnet import models

# {module: function that takes the constructor of a full network and returns the constructor of the network with few
# blocks}.
CONSTRUCTORS = {
    "resnet": lambda full: partial(full.func, full.args[0], (1, 1), width=32),
    "mobilenet_v2": lambda full: partial(full, stages=((1, 16, 1, 1), (6, 24, 2, 2))),
    "mobilenet_v3": lambda full: partial(full.func, (*full.args[0][3:5], full.args[0][7]), 64),
    "efficientnet_lite": lambda full: partial(full, stages=((1, 3, 16, 1, 1), (6, 5, 24, 2, 2), (6, 3, 32, 1, 1))),
    "ghostnet": lambda full: partial(full, blocks=((5, 72, 40, True, 2), (5, 120, 40, True, 1))),
    "pplcnet": lambda full: partial(full, blocks=((3, 32, False, 1), (5, 64, True, 2))),
    "pphgnet_v2": lambda full: partial(full, stages=((8, 32, 1, False, False, 3), (8, 64, 2, True, True, 5))),
}
# Together, these networks contain every kind of layer that occurs in the other networks, except the learnable affine
# layers of PPHGNetV2.
QUICK = ("XSEResNeXt50_Mish_SA", "GhostNet", "MobileNetV3_Large")


def with_few_blocks(network):
    """Return a models.Network with fewer blocks and unchanged options. timm does not have this network."""
    module = importlib.import_module(f"paddle_resnet.models.{network.module}")
    name = f"FewBlocks{network.constructor}"
    setattr(module, name, CONSTRUCTORS[network.module](getattr(module, network.constructor)))
    return replace(network, constructor=name, timm=None)


def shrink():
    """Replace each network in the registry with a version that has few blocks."""
    models.MODELS.update({arch: with_few_blocks(network) for arch, network in models.MODELS.items()})
