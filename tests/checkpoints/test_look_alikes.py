"""Weights whose names and shapes fit several networks are converted only if their source is known."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_resnet.checkpoints import look_alikes
from paddle_resnet.models import MODELS
from paddle_resnet.utils.errors import UsageError

SCRIPT = Path(__file__).with_name("look_alikes.py")
# Supported sources without look-alikes.
UNIQUE = [
    *(f"torchvision.resnet{depth}" for depth in (34, 101, 152)),
    *("torchvision.resnext50_32x4d", "torchvision.mobilenet_v3_large", "torchvision.mobilenet_v3_small"),
    *("timm.mobilenetv2_100", "timm.ghostnet_100", "timm.lcnet_100", "timm.hgnetv2_b0"),
]
TORCH, PADDLE = {"bn1.running_mean": np.zeros(1)}, {"bn1._mean": np.zeros(1)}
NAMES = "torchvision, timm, paddle.vision"


def check(arch, source=None, tensors=TORCH, projects=NAMES):
    look_alikes.check("FILE", arch, tensors, projects, source)


@pytest.mark.parametrize("arch", look_alikes.LOOK_ALIKES)
def test_only_a_source_with_the_same_outputs_is_accepted(arch):
    assert arch in MODELS
    with pytest.raises(UsageError, match=f"^FILE: has the tensor names and shapes of {arch}, but also those of "):
        check(arch)
    for source, problem in look_alikes.LOOK_ALIKES[arch].items():
        for tagged in (source, f"{source}.a1_in1k"):
            if problem is None:
                check(arch, tagged)
            else:
                with pytest.raises(UsageError, match=f"^--source {tagged}: {problem}, unlike {arch}; "):
                    check(arch, tagged)


def test_messages_contain_the_remedy():
    with pytest.raises(UsageError) as error:
        check("ResNet18")
    assert str(error.value) == (
        "FILE: has the tensor names and shapes of ResNet18, but also those of timm.resnetblur18 (which blurs before it "
        "downsamples); state the source with --source torchvision.resnet18 or --source timm.resnet18, and check the "
        "accuracy with --verify IMAGE_ROOT"
    )
    with pytest.raises(UsageError, match="^--source timm.resnetblur18: .*use weights of torchvision.resnet18 or timm"):
        check("ResNet18", "timm.resnetblur18")
    with pytest.raises(UsageError, match="set --arch to the network of the weights$"):
        check("XResNet50_Mish", projects="timm's ResNet-D")
    with pytest.raises(
        UsageError, match="^--source timm.resnet34: not one of the known networks.*use torchvision.resnet18 or timm.res"
    ):
        check("ResNet18", "timm.resnet34")


@pytest.mark.parametrize(
    ("arch", "tensors", "projects"),
    [
        ("ResNet50", PADDLE, NAMES),
        ("ResNet50", PADDLE, "PaddleClas"),
        ("XResNet50", TORCH, "fastai's XResNet"),
        ("EfficientNet_Lite0", TORCH, "efficientnet-lite-pytorch"),
        ("MobileNetV2", TORCH, "timm"),
        ("MobileNetV3_Large", TORCH, "torchvision"),
        ("ResNet34", TORCH, NAMES),
    ],
)
def test_unambiguous_names_need_no_source(arch, tensors, projects):
    check(arch, None, tensors, projects)
    with pytest.raises(UsageError, match=r"^--source timm.resnet50: not needed, .*remove --source$"):
        check(arch, "timm.resnet50", tensors, projects)


@pytest.mark.soak
def test_table_contains_all_look_alikes_of_installed_libraries():
    """Run `python tests/checkpoints/look_alikes.py` with an environment that contains timm and torchvision."""
    if not all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        pytest.skip("timm and torchvision are not installed")
    tables = look_alikes.LOOK_ALIKES
    sources = {
        next(name for name, problem in table.items() if problem is None): arch
        for arch, table in tables.items()
        if None in table.values()
    }
    output = subprocess.run([sys.executable, SCRIPT, *sources, *UNIQUE], check=True, capture_output=True, text=True)
    found = json.loads(output.stdout.splitlines()[-1])
    for source, others in found.items():
        table = tables.get(sources.get(source), {})
        assert {name for name, difference in others.items() if difference > 1e-3} == {n for n, p in table.items() if p}
        assert {n for n, p in table.items() if p is None} <= {source, *others}
