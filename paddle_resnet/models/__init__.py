"""The model registry: the networks for --model-arch-name, and functions to build and inspect a network.

Importing this package does not import Paddle, so an unknown --model-arch-name is reported before the slow import.
"""

import importlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddle_resnet.models import user_file
from paddle_resnet.utils.errors import UsageError, counted

if TYPE_CHECKING:
    from paddle import nn, static

RESIZE_RATIO = 256 / 224  # default ratio of --resize-short to --crop-size


@dataclass(frozen=True)
class Network:
    """Registry entry for a network in this package. Calling the entry imports Paddle and constructs the network.

    Attributes:
        module: name of a module in this package.
        constructor: name of the constructor in the module.
        paper: arXiv number of the paper.
        options: keyword arguments of the constructor that define the variant.
        image_size: height and width of the input images in pixels; the default of --crop-size.
        resize_ratio: default ratio of --resize-short to --crop-size.
        preprocessing: {flag with underscores, such as normalize_mean: default} for other preprocessing flags with a
            default that is specific to this network.
        timm: name of timm's network that has the same outputs for the same weights, or None.
    """

    module: str
    constructor: str
    paper: str
    options: dict = field(default_factory=dict)
    image_size: int = 224
    resize_ratio: float = RESIZE_RATIO
    preprocessing: dict = field(default_factory=dict)
    timm: str | None = None

    def __call__(self, **arguments: Any) -> "nn.Layer":
        module = importlib.import_module(f"paddle_resnet.models.{self.module}")
        return getattr(module, self.constructor)(**self.options, **arguments)


RESNET = "1512.03385"
LITE = "1905.11946"
# EfficientNet-Lite subtracts 127 from pixel values and divides by 128. At the published size, --resize-short is
# --crop-size + 32.
LITE_PREPROCESSING = {"interp": "cubic", "normalize_mean": [127 / 255] * 3, "normalize_std": [128 / 255] * 3}
RESNET_D = {"stem": "deep", "shortcut_pool": "average"}
XRESNET = RESNET_D | {"zero_init": True, "classifier_std": 2**-5}
RESNEXT = {"groups": 32, "group_width": 4}
MISH, SA = {"activation": "mish", "shortcut_pool": "max-blur"}, {"self_attention": True}


def _lite(number, size, resize_short, options):
    arguments = "efficientnet_lite", "EfficientNetLite", LITE, options, size, resize_short / size, LITE_PREPROCESSING
    return Network(*arguments, timm=f"tf_efficientnet_lite{number}")


# {--model-arch-name: Network}. To add a network, add one line here and a constructor with the arguments num_classes,
# in_channels and data_format.
MODELS = {
    "ResNet18": Network("resnet", "ResNet18", RESNET, timm="resnet18"),
    "ResNet18_CIFAR": Network("resnet", "ResNet18", RESNET, {"stem": "small"}, 32, 1.0),
    "ResNet34": Network("resnet", "ResNet34", RESNET, timm="resnet34"),
    "ResNet50": Network("resnet", "ResNet50", RESNET, timm="resnet50"),
    "ResNet101": Network("resnet", "ResNet101", RESNET, timm="resnet101"),
    "ResNet152": Network("resnet", "ResNet152", RESNET, timm="resnet152"),
    "ResNet18_vd": Network("resnet", "ResNet18", "1812.01187", RESNET_D | {"first_projection": True}),
    "ResNet50_vd": Network("resnet", "ResNet50", "1812.01187", RESNET_D, timm="resnet50d"),
    "SE_ResNet50_vd": Network("resnet", "ResNet50", "1709.01507", RESNET_D | {"se": True}),
    "ResNeXt50_32x4d": Network("resnet", "ResNet50", "1611.05431", RESNEXT, timm="resnext50_32x4d"),
    "XResNet50": Network("resnet", "ResNet50", "1812.01187", XRESNET, timm="resnet50d"),
    "XResNet50_Mish": Network("resnet", "ResNet50", "1908.08681", XRESNET | MISH),
    "XResNet50_Mish_SA": Network("resnet", "ResNet50", "1908.08681", XRESNET | MISH | SA),
    "XSEResNeXt50_Mish_SA": Network("resnet", "ResNet50", "1908.08681", XRESNET | MISH | SA | RESNEXT | {"se": True}),
    "XResNeXt50_Mish_SA_NoPool": Network(
        "resnet", "ResNet50", "1908.08681", XRESNET | MISH | SA | RESNEXT | {"stem": "deep-no-pool"}
    ),
    "MobileNetV2": Network("mobilenet_v2", "MobileNetV2", "1801.04381", timm="mobilenetv2_100"),
    "MobileNetV3_Large": Network("mobilenet_v3", "Large", "1905.02244", timm="mobilenetv3_large_100"),
    "MobileNetV3_Small": Network("mobilenet_v3", "Small", "1905.02244", timm="mobilenetv3_small_100"),
    "GhostNet": Network("ghostnet", "GhostNet", "1911.11907", timm="ghostnet_100"),
    "PPLCNet_x1_0": Network("pplcnet", "PPLCNet", "2109.15099", timm="lcnet_100"),
    "PPHGNetV2_B0": Network(
        *("pphgnet_v2", "PPHGNetV2", "2103.05959"),
        resize_ratio=232 / 224,
        preprocessing={"interp": "cubic"},
        timm="hgnetv2_b0",
    ),
    "EfficientNet_Lite0": _lite(0, 224, 256, {"width": 1.0, "depth": 1.0}),
    "EfficientNet_Lite1": _lite(1, 240, 272, {"width": 1.0, "depth": 1.1}),
    "EfficientNet_Lite2": _lite(2, 260, 292, {"width": 1.1, "depth": 1.2}),
}


@dataclass(frozen=True)
class Ends:
    """Parameter names of a network's first and last layers.

    Attributes:
        first: name of the weight of the convolution that reads the images.
        last: names of the bias and the weight of the classifier.
        file_sha256: sha256 of the user's file that defines the network; None for a network in this package.
    """

    first: str
    last: tuple
    file_sha256: str | None = None


_ends = weakref.WeakKeyDictionary()  # {Program: Ends of the network that build_model built in it}


def build_model(arch: str, num_classes: int, channels: int, data_format: str) -> "nn.Layer":
    """Build a network in the current program, and return the network.

    The network's attributes `first` (a Conv2D) and `last` (a Linear) are its first and last layers. ends(program)
    returns the names of their parameters.

    Args:
        arch: value of --model-arch-name.
        num_classes: number of outputs.
        channels: number of image channels.
        data_format: "NCHW" or "NHWC".
    Raises:
        UsageError: --model-arch-name is not in the registry, the user's file fails user_file.check or raises an
            exception, or the network is not a paddle.nn.Layer with suitable attributes `first` and `last`.
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
    _ends[static.default_main_program()] = Ends(*names, sha256)
    return model


def _declared_ends(arch, model, channels):
    from paddle import nn

    flag = f"--model-arch-name {arch}"
    if not isinstance(model, nn.Layer):
        raise UsageError(f"{flag}: the constructor returns {type(model).__name__}; return a paddle.nn.Layer")
    with user_file.errors(arch):
        first, last = getattr(model, "first", None), getattr(model, "last", None)
    if not isinstance(first, nn.Conv2D) or first.weight.shape[1] != channels:
        raise UsageError(
            f"{flag}: the network needs an attribute `first`, a Conv2D without groups that has "
            f"{counted(channels, 'input channel')}; set it to the convolution that reads the images"
        )
    if not isinstance(last, nn.Linear) or last.bias is None:
        raise UsageError(f"{flag}: the network needs an attribute `last`, a Linear with bias; set it to the classifier")
    return first, last


def logits(model: "nn.Layer", images: "static.Variable", arch: str, num_classes: int) -> "static.Variable":
    """Apply a network to images in the current program, and return the logits [N, num_classes].

    Args:
        model: result of build_model.
        images: input variable.
        arch, num_classes: see build_model.
    Raises:
        UsageError: the user's file raises an exception, or the output does not have the shape [N, num_classes].
    """
    with user_file.errors(arch):
        out = model(images)
    shape = list(getattr(out, "shape", []))
    if shape[1:] != [num_classes]:
        found = f"has the shape {shape}" if hasattr(out, "shape") else f"is a {type(out).__name__}"
        raise UsageError(f"--model-arch-name {arch}: the network's output {found}; return logits [N, {num_classes}]")
    return out


def ends(program: "static.Program") -> Ends:
    """Return the Ends of the network that build_model built in a program. Raises KeyError if there is none."""
    return _ends[program]


def registered(arch: str) -> Network | None:
    """Return the Network for a value of --model-arch-name, or None if the value is not in the registry. Names are
    matched as in registered_name."""
    network = {_simplified(name): network for name, network in MODELS.items()}.get(_simplified(arch))
    return network if isinstance(network, Network) else None


def registered_name(arch: str, flag: str = "--model-arch-name") -> str:
    """Return the registered name for a value of --model-arch-name, ignoring case, "-" and "_". FILE.py:NAME is returned
    unchanged. `flag` is the flag to name in errors.

    Raises:
        UsageError: the network is unknown, or user_file.check fails.
    """
    if user_file.split(arch):
        user_file.check(arch)
        return arch
    names = {_simplified(name): name for name in MODELS}
    if _simplified(arch) not in names:
        own = ", or FILE.py:NAME" if flag == "--model-arch-name" else ""  # --arch does not support users' files
        raise UsageError(f"{flag} {arch}: unknown network; use one of {', '.join(MODELS)}{own}")
    return names[_simplified(arch)]


def _simplified(name):
    return name.lower().replace("-", "").replace("_", "")
