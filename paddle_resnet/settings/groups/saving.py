"""Checkpoints and the early end of a run."""

import argparse
import os
from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import files, numbers


def _file_name(text):
    # File systems limit a name to 255 bytes, including the suffix.
    if not text or "/" in text or text.startswith(".") or len(os.fsencode(text)) > 240:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a valid file name; use at most 240 bytes without / and without a leading dot, such as "
            "resnet50"
        )
    return text


@dataclass(frozen=True)
class Settings:
    keep_checkpoints: int = flag(
        3,
        "number of newest checkpoints to keep, in addition to the best checkpoint and the same number of newest "
        "end-of-epoch checkpoints",
        topic="checkpoints",
        kind="saving",
        parse=numbers.positive,
    )
    patience: int = flag(
        0,
        "number of consecutive evaluations without a higher top1 (with --multi-label: mAP) after which training ends; "
        "0: never",
        topic="checkpoints",
        kind="saving",
        parse=numbers.not_negative,
        metavar="N",
    )
    checkpoint_commit: str = flag(
        "rename",
        "method of completing a checkpoint; rename: rename its folder; marker: write meta.json last, for storage "
        "without atomic renames, such as object stores",
        topic="checkpoints",
        kind="saving",
        choices=["rename", "marker"],
    )
    model_prefix: str | None = flag(
        None,
        "prefix of the files of a checkpoint; checkpoints without meta.json are read with this prefix, or with a "
        "detected one if the flag is not set (default: chosen from the network, such as resnet_50_paddle)",
        topic="checkpoints",
        kind="saving",
        parse=_file_name,
        depends_on=("model_arch_name",),
    )
    max_bad_steps: int = flag(
        10,
        "number of consecutive non-finite losses after which the run stops; steps skipped by loss scaling do not count",
        topic="checkpoints",
        parse=numbers.positive,
    )
    output_dir: str = flag(
        "./output/",
        "parent folder of the checkpoints, OUTPUT_DIR/ARCH/EPOCH",
        topic="checkpoints",
        kind="output",
        parse=files.argument,
        metavar="OUTPUT_DIR",
    )
    inference_dir: str | None = flag(
        None,
        "no effect; accepted for scripts of NVIDIA's example; a warning contains the command that exports the "
        "trained network to DIR",
        topic="checkpoints",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="DIR",
    )
