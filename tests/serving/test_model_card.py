"""Model cards. tests/test_export.py runs the code of a card."""

import pytest

from paddle_resnet.serving import model_card

DESCRIPTION = {
    "arch": "ResNet18",
    "input": {"name": "images", "shape": [None, 3, 224, 224], "dtype": "float32", "layout": "NCHW"},
    "output": {"name": "probabilities", "shape": [None, 3], "values": "probabilities"},
    "preprocessing": {
        **{"resize_short": 256, "interp": "triangular", "center_crop": 224, "scale": 1 / 255},
        **{"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    },
    "classes": ["cat", "a`b\n# c", "<img src=x>"],
    "epoch": 4,
    "evaluated": {"top1": 0.75, "top5": 1.0, "loss": 0.5, "decoder": "cpu"},
    "precision": "float32",
    "files": {"model.pdmodel": {}, "model.pdiparams": {}},
}
META = {
    "arguments": {"image_root": "/home/someone/data/pets", "optimizer": "Momentum", "from_pretrained_params": None},
    "evaluated": {"images": 1200},
}
CONVERTED = {
    "arguments": {"image_root": "/imagenet", "optimizer": "Momentum"},
    "license": "Apache-2.0",
    "source": {"file": "w.pth", "sha256": "0123", "url": "https://example.org/w", "network": "timm.resnet18"},
}


def files(*names):
    return {"files": {name: {} for name in names}}


def test_card_states_data_metrics_preprocessing_and_license():
    card = model_card.text(DESCRIPTION, META)
    for line in (
        "# ResNet18, 3 classes",
        "An image classifier, trained with PaddlePaddle and paddle_resnet.",
        "- 3 classes: `cat`, `a'b\\n# c`, `<img src=x>` (all: `labels.txt`)",
        "- data set: the folder `pets`",
        "- training: epoch 5, optimizer `Momentum`",
        "Evaluation of the checkpoint on 1,200 validation images:",
        "| top1 | 0.75 |",
        "Not recorded.",
    ):
        assert line in card.splitlines()
    assert "Shorter side: 256 pixels (triangular), then the central 224 x 224 pixels" in card
    assert "/home/someone" not in card  # the card is published
    assert "license:" not in card and "onnx" not in card and "timm" not in card
    assert model_card.text(DESCRIPTION, META, "resnet18") == card  # without --safetensors
    # Checkpoints of NVIDIA's example record no flags, and those of earlier versions no number of images.
    card = model_card.text(DESCRIPTION, {"arguments": {}})
    assert "data set" not in card and "Evaluation of the checkpoint on the validation images:" in card.splitlines()


def test_license_and_source_of_converted_weights():
    card = model_card.text(DESCRIPTION | {"evaluated": None}, CONVERTED)
    assert "license: apache-2.0" in card.splitlines()  # Hugging Face's identifiers are in lower case
    assert "- converted from `w.pth`, `timm.resnet18`, sha256 `0123`" in card.splitlines()
    assert "Apache-2.0 (https://example.org/w)" in card.splitlines()
    assert "The checkpoint contains no evaluation." in card.splitlines()
    assert "An image classifier, converted to PaddlePaddle by paddle_resnet." in card.splitlines()
    assert "data set" not in card
    tuned = META | {"arguments": META["arguments"] | {"from_pretrained_params": "weights/lite0/"}}
    card = model_card.text(DESCRIPTION, tuned)
    assert "- training started from the weights in the folder `lite0`" in card.splitlines()
    assert "The license of the weights from which training started also applies." in card


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        (files("model.onnx"), {"int8": "tensorrt"}, "ONNX (`model.onnx` in INT8 for tensorrt):"),
        (files("model.onnx") | {"precision": "float16"}, {}, "ONNX (`model.onnx` in float16):"),
        (files("model.safetensors"), {"timm": "resnet18"}, "library_name: timm"),
        (files("model.safetensors"), {"timm": "resnet18"}, 'timm.create_model("resnet18", num_classes=3).eval()'),
        (files("model.safetensors"), {"timm": "resnet18"}, "probabilities = network(images).softmax(1)"),
        (
            files("model.safetensors") | {"multi_label": {"thresholds": [0.5] * 3}},
            {"timm": "resnet18"},
            "probabilities = network(images).sigmoid()",
        ),
        ({"multi_label": {"thresholds": [0.5] * 3}}, {}, "at least its threshold (`multi_label.thresholds` in"),
        (
            {"input": DESCRIPTION["input"] | {"dtype": "uint8"}},
            {},
            "The Paddle and ONNX networks take uint8 pixels and normalize them.",
        ),
        ({"evaluated": {"top1": 0.5, "tta": "flip"}}, {}, "averaged over each image and its mirror image"),
        ({"evaluated": {"map": 0.5, "loss": None}}, {}, "| mAP | 0.5 |"),
        ({"evaluated": {"top1": 0.0}}, {}, "| top1 | 0 |"),
        (
            {"temperature": {"value": 1.5, "ece_before": 0.25, "ece_after": 0.125}},
            {},
            "divided by the temperature 1.5: expected calibration error 0.25 before, 0.125 after.",
        ),
        (
            {"preprocessing": DESCRIPTION["preprocessing"] | {"center_crop": [192, 256]}},
            {},
            "the central 192 x 256 (height x width) pixels",
        ),
        ({"classes": []}, {}, "- 3 classes, without names"),
        (files("model.safetensors") | {"classes": []}, {"timm": "resnet18"}, "num_classes=3"),
        ({"classes": [f"c{i}" for i in range(20)]}, {}, "`c19` (all: `labels.txt`)"),
        ({"classes": [f"c{i}" for i in range(30)]}, {}, "`c19`, ... (all: `labels.txt`)"),
    ],
)
def test_card_describes_the_form_of_the_network(changes, options, expected):
    card = model_card.text(DESCRIPTION | changes, META, **options)
    assert expected in card
    assert expected not in model_card.text(DESCRIPTION, META)
