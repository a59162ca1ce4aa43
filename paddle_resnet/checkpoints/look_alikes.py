"""Networks of timm and torchvision whose weights have the same names and shapes, but whose outputs differ.

tests/checkpoints/look_alikes.py compared all classifiers in timm 1.0.31 and torchvision 0.28.0, and their outputs for
the same random weights. Networks that LOOK_ALIKES does not contain have no look-alikes in timm 1.0.31 and torchvision
0.28.0.
"""

from collections.abc import Iterable
from pathlib import Path

from paddle_resnet.checkpoints.foreign_names import is_from_torch
from paddle_resnet.utils.errors import UsageError

_BLUR = "blurs before it downsamples"
_AVERAGE = "downsamples by average pooling"
_NO_TF = "does not pad like TensorFlow and has a different BN epsilon"
_TF = "pads like TensorFlow"
_RELU = "has ReLU instead of Mish"
_RESNET_D = {"timm.resnet50d": None, "timm.resnetaa50d": _AVERAGE, "timm.resnetblur50d": _BLUR}
# {network: {source: how its outputs differ, or None for a source with the same outputs}}
LOOK_ALIKES = {
    "ResNet18": {"torchvision.resnet18": None, "timm.resnet18": None, "timm.resnetblur18": _BLUR},
    "ResNet50": {
        **{"torchvision.resnet50": None, "timm.resnet50": None},
        **{"timm.resnetaa50": _AVERAGE, "timm.resnetblur50": _BLUR},
    },
    "ResNet50_vd": _RESNET_D,
    "XResNet50": _RESNET_D,
    "XResNet50_Mish": dict.fromkeys(_RESNET_D, _RELU),
    "MobileNetV2": {
        "torchvision.mobilenet_v2": None,
        "torchvision.quantized_mobilenet_v2": "has ReLU instead of ReLU6",
    },
    **{
        f"MobileNetV3_{size}": {f"timm.mobilenetv3_{name}": None, f"timm.tf_mobilenetv3_{name}": _TF}
        for size, name in (("Large", "large_100"), ("Small", "small_100"))
    },
    **{
        f"EfficientNet_Lite{i}": {f"timm.tf_efficientnet_lite{i}": None, f"timm.efficientnet_lite{i}": _NO_TF}
        for i in range(3)
    },
}


def check(path: str | Path, arch: str, tensors: Iterable[str], projects: str, source: str | None) -> None:
    """Check that the weights of a network are not those of a look-alike.

    Args:
        path: path of the file, for error messages.
        arch: registered name of the network.
        tensors: names of the tensors in the file, without a common prefix.
        projects: names of the projects that use these tensor names (result of foreign_names.convert).
        source: value of --source, or None.
    Raises:
        UsageError: the outputs of the source differ from those of the network; --source is not needed, or is not a
            network with these tensor names; or --source is not set, and the file may contain weights of a look-alike.
    """
    known = LOOK_ALIKES.get(arch, {}) if is_from_torch(tensors) else {}
    known = {name: problem for name, problem in known.items() if name.partition(".")[0] in projects}
    same = [name for name, problem in known.items() if problem is None]
    stated = source and ".".join(source.split(".")[:2])  # omit the weight tag in names of timm
    if stated in known and known[stated] is None:
        return
    if stated in known:
        remedy = f"use weights of {' or '.join(same)}" if same else "set --arch to the network of the weights"
        raise UsageError(f"--source {source}: {known[stated]}, unlike {arch}; {remedy}")
    if source is not None:
        if not known:
            problem = "not needed, because no other known network has these tensor names"
            raise UsageError(f"--source {source}: {problem}; remove --source")
        remedy = f"use {' or '.join(same or known)}"
        raise UsageError(f"--source {source}: not one of the known networks with these tensor names; {remedy}")
    if known:
        others = " or ".join(f"{name} (which {problem})" for name, problem in known.items() if problem)
        flags = " or ".join(f"--source {name}" for name in same)
        remedy = f"state the source with {flags}, and check the accuracy with --verify IMAGE_ROOT"
        raise UsageError(
            f"{path}: has the tensor names and shapes of {arch}, but also those of {others}; "
            + (remedy if same else "set --arch to the network of the weights")
        )
