"""The command `python -m paddle_resnet.models`, which prints parameters, multiply-adds and activations."""

import csv
import re

import pytest
from paddle import static

from conftest import ROOT
from helpers import NETWORK_EXAMPLE, OPTIONS_EXAMPLE
from paddle_resnet.models import MODELS, Network, __main__, layers


# The numbers of parameters of GhostNet, PPLCNet_x1_0 and PPHGNetV2_B0 are those of timm (ghostnet_100, lcnet_100,
# hgnetv2_b0). tests/test_models.py tests those of more networks.
# The multiply-adds of convolutions and classifiers were counted with hooks in timm's networks. For all networks except
# ResNet50_vd, torchvision documents the same numbers: 1.814, 4.089, 4.230 and 0.301 billion.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "parameters", "multiply_adds"),
    [
        ("ResNet18", 11_689_512, 1_814_073_344),
        ("ResNet50", 25_557_032, 4_089_184_256),
        ("ResNet50_vd", 25_576_264, 4_328_824_832),
        ("ResNeXt50_32x4d", 25_028_904, 4_230_479_872),
        ("MobileNetV2", 3_504_872, 300_774_272),
        # This number was recorded after the logits had been compared with those of timm. arXiv:1911.11907 states 141
        # million.
        ("GhostNet", 5_182_508, 141_150_512),
        # Like GhostNet.
        ("PPLCNet_x1_0", 2_953_800, 155_700_480),
        ("PPHGNetV2_B0", 5_996_550, 321_326_464),
    ],
)
def test_parameters_and_multiply_adds(arch, parameters, multiply_adds):
    size = __main__.size(arch, 224)
    assert (size["parameters"], size["multiply_adds"]) == (parameters, multiply_adds)


def test_activations_of_small_network(tmp_path):
    """The backward pass reads convolution outputs, activations and pooled channels, but neither the logits nor the
    images. Each activation counts once, although the gradients of two layers depend on it."""
    path = tmp_path / "net.py"
    path.write_text(NETWORK_EXAMPLE)
    size = __main__.size(f"{path}:Net", 32, 10)
    # The pooled channels count twice: before and after the reshape.
    convolutions, pooled = 16 * 16 * 16 + 8 * 8 * 32, 2 * 32
    statistics = 2 * (16 + 32)  # mean and inverse standard deviation of each BN layer
    assert size["activation_bytes"] == 2 * (2 * convolutions + statistics + pooled)
    assert size["parameters"] == 9 * 3 * 16 + 9 * 16 * 32 + statistics + 32 * 10 + 10
    assert size["multiply_adds"] == 16 * 16 * 16 * 9 * 3 + 8 * 8 * 32 * 9 * 16 + 32 * 10


@pytest.mark.slow
def test_size_of_self_attention():
    """The multiply-adds do not include the singular value of the weight, which is computed once per step."""
    attention, none = (__main__.size(arch, 64) for arch in ("XResNet50_Mish_SA", "XResNet50_Mish"))
    channels, pixels = 256, 16 * 16
    assert attention["parameters"] - none["parameters"] == channels**2 + 1
    assert attention["multiply_adds"] - none["multiply_adds"] == 2 * channels**2 * pixels + channels**3


@pytest.mark.parametrize("x, transposed, y", [([5, 3], True, [5, 7]), ([3, 5], False, [5, 7])])
def test_multiply_adds_of_matrix_product(x, transposed, y):
    with static.program_guard(static.Program()):
        layers.product(static.data("x", x), static.data("y", y), trans_x=transposed)
        block = static.default_main_program().global_block()
    assert __main__._multiply_adds(block, block.ops[-1]) == 3 * 5 * 7


def test_number_of_channels_is_reduced_by_at_most_10_percent():
    rounded = {(9, 8): 16, (10, 9): 9, (11, 8): 16, (89, 8): 88, (3, 8): 8, (1, 8): 8}
    assert {key: layers.rounded(*key) for key in rounded} == rounded


def test_table_lists_networks_with_sizes(capsys, tmp_path, monkeypatch):
    path = tmp_path / "net.py"
    path.write_text(NETWORK_EXAMPLE)
    assert __main__.main(["resnet18", f"{path}:Net"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, first, second = cells = [re.split(r" {2,}", line) for line in lines]
    for i in range(1, 5):
        ends = [line.index(f"  {row[i]}") + len(row[i]) for line, row in zip(lines, cells, strict=True)]
        assert len(set(ends)) == 1, f"column {i} is not right-aligned"
    assert len({line.index(f"  {row[5]}") for line, row in zip(lines[:2], cells[:2], strict=True)}) == 1  # left-aligned
    assert header[:7] == ["network", "image", "parameters", "multiply-adds", "activations", "paper", "timm"]
    assert first[:4] == ["ResNet18", "224", "11,689,512", "1,814 M"]
    assert first[5:7] == ["arXiv:1512.03385", "resnet18"] and "1 H200" in first[-1]
    sizes = __main__.size(f"{path}:Net", 224)
    mib = f"{sizes['activation_bytes'] / 2**20:.1f} MiB"
    assert second == [f"{path}:Net", "224", f"{sizes['parameters']:,}", f"{sizes['multiply_adds'] / 1e6:,.0f} M", mib]
    monkeypatch.setattr(__main__, "SPEEDS", tmp_path / "none.csv")
    assert __main__.main(["ResNet18"]) == 0
    assert "H200" not in capsys.readouterr().out


def test_unknown_network_is_an_error(capsys):
    assert __main__.main(["ResNet51"]) == 2
    assert "ResNet51: unknown network" in capsys.readouterr().err


def test_measured_speeds_refer_to_existing_networks_and_pages():
    with open(ROOT / "benchmarks/networks.csv", newline="") as file:
        for row in csv.DictReader(file):
            assert row["network"] in MODELS
            page = (ROOT / "benchmarks" / row["page"]).read_text()
            assert row["training"] in page and row["evaluation"] in page


@pytest.mark.slow
def test_page_lists_all_networks_with_their_sizes():
    page = (ROOT / "docs/networks.md").read_text()
    listed = {}
    for names, parameters, multiply_adds in re.findall(r"^\| (\w[\w, ]+) \| ([\d., ]+) \| ([\d., ]+) \|", page, re.M):
        sizes = zip(parameters.split(", "), multiply_adds.split(", "), strict=True)
        listed |= dict(zip(names.split(", "), sizes, strict=True))
    assert set(listed) == {name for name, network in MODELS.items() if isinstance(network, Network)}
    for arch in ("ResNet18", "SE_ResNet50_vd", "MobileNetV3_Small", "EfficientNet_Lite2"):
        size = __main__.size(arch, MODELS[arch].image_size)
        expected = f"{size['parameters'] / 1e6:.1f}", f"{size['multiply_adds'] / 1e9:.2f}"
        assert listed[arch] == expected, arch


def test_page_lists_measured_speeds():
    page = (ROOT / "docs/networks.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| [\d.]+ \| ([\d,]+) \| ([\d,]+) \|", page, re.M)
    expected = {name: [row["training"], row["evaluation"]] for name, row in __main__.speeds().items()}
    assert {name: speeds for name, *speeds in rows} == expected


def test_documented_example_of_options_is_a_valid_network(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(OPTIONS_EXAMPLE)
    size = __main__.size(f"{path}:Small", 32, 10)
    # The example network has 3x3 instead of 7x7 filters in its stem, and 10 classes.
    assert size["parameters"] == 11_689_512 - 64 * 3 * (49 - 9) - 513 * 990
