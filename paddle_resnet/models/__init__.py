"""The model registry: --model-arch-name to constructor, and what the rest of the program knows of a network.

Importing it does not import Paddle, so that an unknown name is reported at once.
"""

import importlib
from dataclasses import dataclass
from functools import partial

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
    """

    first: str
    last: tuple


def build_model(args):
    """The network that the flags ask for, built into the current program. ends(program) has its first and last layer,
    which a network declares as its properties `first`, a Conv2D, and `last`, a Linear.

    Raises:
        UsageError: --model-arch-name is not in the registry.
    """
    from paddle import static

    model = MODELS[registered_name(args.model_arch_name)](
        num_classes=args.num_of_class,
        in_channels=args.image_shape[0],
        data_format=args.data_layout,
    )
    last = (model.last.bias.name, model.last.weight.name)
    static.default_main_program().network_ends = Ends(model.first.weight.name, last)
    return model


def ends(program):
    """The Ends of the network that build_model has built into a program."""
    return program.network_ends


def registered_name(arch):
    """The registry's spelling of --model-arch-name, which may be written in any case.

    Raises:
        UsageError: no such network.
    """
    names = {name.lower(): name for name in MODELS}
    if arch.lower() not in names:
        raise UsageError(f"--model-arch-name {arch}: unknown network; use one of {', '.join(MODELS)}")
    return names[arch.lower()]
