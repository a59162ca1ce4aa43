"""Networks of other projects: layer names, shapes and logits in float64, recorded in other_projects.txt.

`other_projects.py "NETWORK, PROJECT"`, run as a program, uses the installed package to compute the section of this
network, and prints the section. Paddle is imported only for PaddleClas, because importing PyTorch after Paddle may
crash. The PaddleClas sections that are not in PADDLECLAS were generated with `section` and PaddleClas commit
d178931fca43.
"""

import importlib.util
import re
import sys
import types
import zlib
from pathlib import Path

import numpy as np

CLASSES = 5
TIMM = {
    "GhostNet, timm": "ghostnet_100",
    "MobileNetV3_Small, timm": "mobilenetv3_small_100",
    "PPHGNetV2_B0, timm": "hgnetv2_b0",
    "PPLCNet_x1_0, timm": "lcnet_100",
    "ResNet50_vd, timm": "resnet50d",
}
TORCHVISION = {
    "MobileNetV3_Large, torchvision": "mobilenet_v3_large",
    "ResNeXt50_32x4d, torchvision": "resnext50_32x4d",
}
# {case: (module, constructor)}
PADDLECLAS = {
    "PPHGNetV2_B0, PaddleClas": ("pp_hgnet_v2", "PPHGNetV2_B0"),
    "PPLCNet_x1_0, PaddleClas": ("pp_lcnet", "PPLCNet"),
}
FASTAI = "XResNet50, fastai"
PACKAGES = {**dict.fromkeys(TIMM, "timm"), **dict.fromkeys(TORCHVISION, "torchvision"), FASTAI: "fastai"}
PACKAGES |= dict.fromkeys(PADDLECLAS, "paddleclas")
# {network: factor of the scales of BN layers}. Without it, the logits of these networks hardly depend on the images.
GAINS = {"PPHGNetV2_B0": 2, "PPLCNet_x1_0": 2}
BN_OF_TORCH = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
BN_OF_PADDLE = ("weight", "bias", "_mean", "_variance")


def recorded():
    """Return {"NETWORK, PROJECT": ({tensor: shape}, logits [2, CLASSES])}."""
    sections = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n")
    return dict(map(parsed, sections))


def parsed(section):
    """Parse a section into ("NETWORK, PROJECT", ({tensor: shape}, logits)). The first line of a section contains the
    name, the second the logits, and each further line a tensor or, with the suffix :bn, a batch normalization layer."""
    case, numbers, *lines = section.strip().splitlines()
    fields = BN_OF_PADDLE if case.endswith(("PaddleClas", "paddle.vision")) else BN_OF_TORCH
    shapes = {}
    for line in lines:
        name, _, sizes = line.partition(" ")
        shape = tuple(map(int, sizes.split(",")))
        layer = name.removesuffix(":bn")
        names = [name] if layer == name else [f"{layer}.{field}" for field in fields]
        shapes |= {name: () if name.endswith("num_batches_tracked") else shape for name in names}
    return case, (shapes, np.array(numbers.split(), float).reshape(2, CLASSES))


def arch_of(case):
    return case.partition(", ")[0]


def section(case, shapes, logits):
    """Format a section. `parsed` is the inverse function."""
    lines = [case, " ".join(f"{value:.7g}" for value in logits.ravel())]
    for name, shape in shapes.items():
        layer, _, field = name.rpartition(".")
        if f"{layer}.running_mean" not in shapes and f"{layer}._mean" not in shapes:
            lines.append(f"{name} {','.join(map(str, shape))}")
        elif field == "weight":
            lines.append(f"{layer}:bn {shape[0]}")
    return "\n".join(lines) + "\n"


def weights(shapes, arch=None):
    """Return {tensor: array} with random values that depend only on the name, the shape and the network."""
    return {name: _weight(name, shape, GAINS.get(arch, 1)) for name, shape in shapes.items()}


def _weight(name, shape, gain):
    random = np.random.RandomState(zlib.crc32(name.encode()))
    if not shape:
        return np.array(3)
    if len(shape) == 1:
        is_factor = re.search("weight$|_var|scale$", name)
        values = random.uniform(*((0.5, 1) if is_factor else (-0.5, 0.5)), shape).astype("float32")
        return values * np.float32(gain) if name.endswith("weight") else values
    fan_in = np.prod(shape[1:]) if len(shape) == 4 else max(shape)
    return (random.randn(*shape) * (2 / fan_in) ** 0.5).astype("float32")


def images():
    """Return float32 images [2, 3, 66, 66]. This size leads to feature maps of odd sizes, so differences in padding and
    rounding affect the logits."""
    return np.random.RandomState(0).randn(2, 3, 66, 66).astype("float32")


def _network(case):
    if case in TIMM:
        import timm

        return timm.create_model(TIMM[case], num_classes=CLASSES)
    if case in TORCHVISION:
        import torchvision

        return getattr(torchvision.models, TORCHVISION[case])(num_classes=CLASSES)
    from fastai.vision.models.xresnet import xresnet50

    return xresnet50(n_out=CLASSES)


def _of_torch(case):
    """Return ({tensor: shape}, logits)."""
    import torch

    network = _network(case).double().eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict({name: torch.tensor(array) for name, array in weights(shapes, arch_of(case)).items()})
    with torch.no_grad():
        return shapes, network(torch.from_numpy(images()).double()).numpy()


def _of_paddleclas(case):
    """Like _of_torch. Of the package, only the module with the network is imported, because the package requires many
    others, in old versions."""
    import paddle

    [root] = importlib.util.find_spec("paddleclas").submodule_search_locations
    folders = ("ppcls", "ppcls/arch", "ppcls/arch/backbone", "ppcls/arch/backbone/base", "ppcls/utils")
    for folder in ("", *folders, "ppcls/arch/backbone/legendary_models"):
        name = ".".join(["paddleclas", *filter(None, folder.split("/"))])
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [f"{root}/{folder}"]
    saving = types.SimpleNamespace(load_dygraph_pretrain=None, load_dygraph_pretrain_from_url=None)
    sys.modules |= {"paddleclas.ppcls.utils.logger": None, "paddleclas.ppcls.utils.save_load": saving}
    sys.modules["paddleclas.ppcls.utils"].logger = None
    module, constructor = PADDLECLAS[case]
    module = importlib.import_module(f"paddleclas.ppcls.arch.backbone.legendary_models.{module}")
    paddle.set_default_dtype("float64")
    network = getattr(module, constructor)(class_num=CLASSES)
    network.eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    network.set_state_dict({name: array.astype("float64") for name, array in weights(shapes, arch_of(case)).items()})
    with paddle.no_grad():
        return shapes, network(paddle.to_tensor(images().astype("float64"))).numpy()


if __name__ == "__main__":
    [case] = sys.argv[1:]
    print(section(case, *(_of_paddleclas if case in PADDLECLAS else _of_torch)(case)))
