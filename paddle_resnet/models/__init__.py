"""The model registry: --model-arch-name to constructor."""

from functools import partial

from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet
from utils.errors import UsageError

MODELS = {
    "ResNet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "ResNet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "ResNet50": partial(ResNet, BottleneckBlock, (3, 4, 6, 3)),
    "ResNet101": partial(ResNet, BottleneckBlock, (3, 4, 23, 3)),
    "ResNet152": partial(ResNet, BottleneckBlock, (3, 8, 36, 3)),
}


def build_model(args):
    """The network that the flags ask for, built into the current program.

    Raises:
        UsageError: --model-arch-name is not in the registry.
    """
    return MODELS[registered_name(args.model_arch_name)](
        num_classes=args.num_of_class,
        in_channels=args.image_shape[0],
        data_format=args.data_layout,
        bn_weight_decay=args.bn_weight_decay,
    )


def registered_name(arch):
    """The registry's spelling of --model-arch-name, which may be written in any case.

    Raises:
        UsageError: no such network.
    """
    names = {name.lower(): name for name in MODELS}
    if arch.lower() not in names:
        raise UsageError(f"--model-arch-name {arch}: unknown network; use one of {', '.join(MODELS)}")
    return names[arch.lower()]
