"""The model registry: constructors for --model-arch-name, and the interface of a network to the other modules.

Importing this package does not import Paddle, so an unknown name is reported immediately.
"""

import importlib
from dataclasses import dataclass
from functools import partial

from paddle_resnet.models import user_file
from utils.errors import UsageError

# The constructors in each module of this package.
FAMILIES = {
    "resnet": ("ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152"),
    "mobilenet_v2": ("MobileNetV2",),
}


def _construct(family, name, **options):
    return getattr(importlib.import_module(f"paddle_resnet.models.{family}"), name)(**options)


MODELS = {name: partial(_construct, family, name) for family, names in FAMILIES.items() for name in names}


@dataclass(frozen=True)
class Ends:
    """Names of the parameters at the ends of a program's network.

    Attributes:
        first: filters of the convolution that reads the images.
        last: bias and weight of the classifier.
        file_sha256: sha256 of the user's file that defines the network; None for a network of this package.
    """

    first: str
    last: tuple
    file_sha256: str | None = None


def build_model(arch, num_classes, channels, data_format):
    """Build a network in the current program and return it.

    A network declares its first and last layer as attributes: `first`, a Conv2D, and `last`, a Linear. ends(program)
    returns the names of their parameters.

    Args:
        arch: --model-arch-name.
        num_classes: number of outputs.
        channels: number of channels of the images.
        data_format: "NCHW" or "NHWC".
    Raises:
        UsageError: --model-arch-name is not in the registry, the user's file fails, or its network lacks these
            attributes.
    """
    from paddle import static

    arch, sha256 = registered_name(arch), None
    if user_file.split(arch):
        constructor, sha256 = user_file.load(arch)
    else:
        constructor = MODELS[arch]
    with user_file.errors(arch):
        model = constructor(num_classes=num_classes, in_channels=channels, data_format=data_format)
    first, last = _declared_ends(arch, model, channels)
    names = first.weight.name, (last.bias.name, last.weight.name)
    static.default_main_program().network_ends = Ends(*names, sha256)
    return model


def _declared_ends(arch, model, channels):
    from paddle import nn

    flag = f"--model-arch-name {arch}"
    if not isinstance(model, nn.Layer):
        raise UsageError(f"{flag}: returns {type(model).__name__}; return a paddle.nn.Layer")
    with user_file.errors(arch):
        first, last = getattr(model, "first", None), getattr(model, "last", None)
    if not isinstance(first, nn.Conv2D) or first.weight.shape[1] != channels:
        raise UsageError(
            f"{flag}: the network has no attribute first that is a Conv2D with {channels} input channels; set it to "
            "the convolution that reads the images"
        )
    if not isinstance(last, nn.Linear) or last.bias is None:
        raise UsageError(
            f"{flag}: the network has no attribute last that is a Linear with bias; set it to the classifier"
        )
    return first, last


def logits(model, images, arch, num_classes):
    """Return the logits [N, num_classes] of a network for images in the current program.

    Args:
        model: result of build_model.
        images: input variable.
        arch, num_classes: as for build_model.
    Raises:
        UsageError: the user's file raises an exception, or the output has a different shape.
    """
    with user_file.errors(arch):
        out = model(images)
    shape = list(getattr(out, "shape", []))
    if shape[1:] != [num_classes]:
        raise UsageError(
            f"--model-arch-name {arch}: the output of the network has the shape {shape}; return logits "
            f"[N, {num_classes}]"
        )
    return out


def ends(program):
    """Return the Ends of the network that build_model has built in a program."""
    return program.network_ends


def registered_name(arch):
    """Return the registered name for --model-arch-name, which is case-insensitive; FILE.py:NAME unchanged.

    Raises:
        UsageError: the network is unknown, or user_file.check fails.
    """
    if user_file.split(arch):
        user_file.check(arch)
        return arch
    names = {name.lower(): name for name in MODELS}
    if arch.lower() not in names:
        raise UsageError(f"--model-arch-name {arch}: unknown network; use one of {', '.join(MODELS)}, or FILE.py:NAME")
    return names[arch.lower()]
