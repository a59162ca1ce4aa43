"""Quantization-aware training."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag


@dataclass(frozen=True)
class Settings:
    qat: bool = flag(
        False,
        "train with weights and activations rounded to INT8 in the forward pass (quantization-aware training); "
        "typically used to fine-tune a trained network (--from-pretrained-params)",
        topic="precision",
        kind="network",
    )
