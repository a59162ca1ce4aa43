"""Temperature scaling: divide the logits so that probabilities match accuracies (Guo et al., arXiv:1706.04599)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.serving import scores, verification
from paddle_resnet.utils import confidence, logger
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from paddle_resnet.serving.networks import Network


def fit(
    network: Network, image_root: str | Path, allow_outside: bool = False
) -> tuple[dict[str, Any], confidence.Temperature]:
    """Fit a temperature to the validation images, and log its effect.

    Args:
        network: the checkpoint's Network, which takes normalized images as input.
        image_root, allow_outside: see scores.score.
    Returns:
        (result of scores.score, confidence.Temperature).
    Raises:
        UsageError: a logit is not finite, no temperature minimizes the loss, or scores.score fails.
        RunError: see scores.score.
    """
    batches = []
    score = scores.score(
        network, network.model(logits=True), image_root, allow_outside=allow_outside, keep=batches.append
    )
    logits, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    if not np.isfinite(logits).all():
        raise UsageError(
            "--temperature auto: the network has logits that are not finite; choose a different checkpoint"
        )
    fitted = confidence.fit_temperature(logits, labels[:, 0])
    if fitted is None:
        lowest, highest = confidence.RANGE
        raise UsageError(
            f"--temperature auto: no temperature from {lowest:g} to {highest:g} minimizes the loss of the "
            f"{score['images']} validation images in {image_root}, for example because all of them are classified "
            "correctly; remove the flag, or use more validation images"
        )
    logger.info(
        f"temperature {fitted.value:.6g}, from {fitted.images} validation images: ECE {fitted.ece_before:.6f} before, "
        f"{fitted.ece_after:.6f} after ({fitted.bins} bins); loss {fitted.loss_before:.7g} before, "
        f"{fitted.loss_after:.7g} after"
    )
    return score, fitted


def check(score: dict[str, Any], original_score: dict[str, Any], temperature: confidence.Temperature) -> None:
    """Raise RunError if the checkpoint's network with the temperature in its parameters classifies differently than the
    original network, or if its loss differs from the expected loss (temperature.loss_after)."""
    expected = original_score | {"loss": temperature.loss_after}
    remedy = "set the network's attribute `last` to the layer that returns the logits"
    verification.check_agreement(
        "the network with the temperature", score, "the checkpoint's network", expected, remedy
    )
