"""Evaluate inference engines on the validation images of a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet import dali
from paddle_resnet.checkpoints import restore
from paddle_resnet.data import classes, layout
from paddle_resnet.serving import inference
from paddle_resnet.utils import label_metrics
from paddle_resnet.utils.errors import RunError
from paddle_resnet.utils.label_metrics import ScoreMeter
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddle_resnet.serving.model import Model
    from paddle_resnet.serving.networks import Network

# If the two largest probabilities of an image differ by less than TIE, rounding determines which of them is larger, so
# the predicted class may differ between engines. HALF_TIE is for networks in float16. With --qat, the probabilities
# that engines compute from the same quantized network usually differ by up to 0.02; QAT_TIE is for these networks.
TIE = 1e-4
QAT_TIE = 0.04
HALF_TIE = 0.02
PROBABILITY_TOLERANCE = 1e-4  # maximum difference between probabilities and the softmax or sigmoid of the logits
# Earlier versions computed losses on a CPU with Paddle's cross entropy, which raises logits to at least the maximum
# minus 64, so the losses that they recorded can be lower. The meta.json of their checkpoints lacks the key "cpu".
EARLIER_CLIP = 64


def is_half(network: Network) -> bool:
    """Return whether the loader of the checkpoint's run rounded images to float16."""
    return bool(network.meta["arguments"].get("dali_output_fp16"))


def score(
    network: Network,
    model: Model,
    image_root: str | Path,
    as_evaluated: bool = False,
    allow_outside: bool = False,
    keep: Callable[[tuple[np.ndarray, np.ndarray]], object] | None = None,
) -> dict[str, Any]:
    """Evaluate a Model that also returns logits. Return {"images", "correct", "ties" (images whose two largest
    probabilities differ by less than TIE, QAT_TIE or HALF_TIE, depending on the model), "loss", "clipped_loss"
    (loss with EARLIER_CLIP)}.

    For a multi-label network, "correct" and "ties" count pairs of image and class, whose probability is compared with
    the threshold, and there are also "decisions" (number of pairs), "map", and "map_ties": by how much mAP can change
    if images whose probabilities differ by less than this limit exchange their places, or share a place or not.

    Args:
        network: the checkpoint's Network.
        model: Model to evaluate.
        image_root: folder of the data set.
        allow_outside: whether file lists may contain files outside image_root.
        as_evaluated: whether to repeat the evaluation of the checkpoint's run, with its --batch-size,
            --dali-output-fp16 and --tta; if False, images are not rounded to float16 and not mirrored.
        keep: function that is called with (logits [N, classes], labels [N, 1]) of each batch, or None.
    Raises:
        UsageError: the data set cannot be used.
        RunError: the model's probabilities are not the softmax or, if multi-label, the sigmoid of its logits.
    """
    recorded, description = network.args, model.description
    args = inference.loader_args(description, recorded.batch_size if as_evaluated else min(32, recorded.batch_size))
    args.set(
        "internal",
        image_root=str(image_root),
        allow_outside=allow_outside,
        data_format="auto" if recorded.multi_label else layout.detect(str(image_root), Mode.EVAL),
        label_offset=recorded.label_offset,
        multi_label=recorded.multi_label,
        num_of_class=recorded.num_of_class,
        dali_output_fp16=as_evaluated and is_half(network),
    )
    mirrors = as_evaluated and recorded.tta == "flip"
    width_axis = 3 if description["input"]["layout"] == "NCHW" else 2
    tie = HALF_TIE if model.precision == "float16" else QAT_TIE if recorded.qat else TIE
    trained = restore.recorded_classes(network.meta) or classes.numbers(args.num_of_class)
    meter = ScoreMeter(args.num_of_class)
    losses, correct, ties = np.zeros((0, 2)), 0, 0
    for (batch,) in dali.build_dataloader(args, Mode.EVAL, trained=trained):
        images, labels = np.array(batch["data"]).astype(description["input"]["dtype"]), np.array(batch["label"])
        if mirrors:
            images = np.concatenate([images, np.flip(images, width_axis)])
        probabilities, logits = model.outputs(images)
        expected = label_metrics.probabilities(logits) if args.multi_label else np.exp(_log_softmax(logits))
        if not np.allclose(probabilities, expected, rtol=0, atol=PROBABILITY_TOLERANCE):
            function = "sigmoid" if args.multi_label else "softmax"
            raise RunError(
                f"--verify: the probabilities of {model.engine} differ from the {function} of its logits by up to "
                f"{np.abs(probabilities - expected).max():.2g}, and nothing was written; use a different "
                "version of the engine or a different checkpoint"
            )
        if keep is not None:
            keep((logits, labels))
        if args.multi_label:
            if mirrors:
                expected = np.split(expected, 2)[0] / 2 + np.split(expected, 2)[1] / 2
                logits = _mirrored_logits(logits)
            meter.update(np.hstack([logits, labels]).astype(np.float32), len(labels))
            losses = np.concatenate([losses, np.repeat(_binary_loss(logits, labels), 2, axis=1)])
            thresholds = np.array(description["multi_label"]["thresholds"])
            correct += np.count_nonzero((expected >= thresholds) == (labels > 0.5))
            ties += np.count_nonzero(np.abs(expected - thresholds) < tie)
            continue
        if mirrors:  # the logarithms of the average probabilities replace the logits, as in the evaluation
            logits = np.logaddexp(*np.split(_log_softmax(logits), 2)) - np.log(2)
        of_label = [np.take_along_axis(_log_softmax(logits, clip), labels, axis=1) for clip in (np.inf, EARLIER_CLIP)]
        losses = np.concatenate([losses, -np.hstack(of_label)])
        correct += np.count_nonzero(logits.argmax(axis=1) == labels[:, 0])
        # Add a class with probability 0, so that a network with one class also has two probabilities to compare.
        ranked = np.sort(np.pad(np.exp(_log_softmax(logits)), [(0, 0), (1, 0)]), axis=1)
        second, first = ranked[:, -2:].T
        ties += np.count_nonzero(first - second < tie)
    loss, clipped_loss = losses.mean(axis=0)
    result = {"images": len(losses), "correct": correct, "ties": ties, "loss": loss, "clipped_loss": clipped_loss}
    if args.multi_label:
        logits, labels = np.split(meter.rows(), 2, axis=1)
        scores, labels = label_metrics.probabilities(logits), labels > 0.5
        mean, change = map_and_ties(scores, labels, tie)
        result |= {"map": mean, "map_ties": change, "decisions": len(losses) * args.num_of_class}
    return result


def map_and_ties(scores: np.ndarray, labels: np.ndarray, tie: float) -> tuple[float, float]:
    """Return (mAP, by how much mAP can change because of rounding).

    Images with equal scores share a rank in mAP. Rounding can make equal scores different, or different ones equal.

    Args:
        scores: probabilities, array [images, classes].
        labels: bool array [images, classes].
        tie: maximum difference between scores whose order rounding can change.
    """
    different = np.linspace(0, tie / 1000, len(scores))[:, None]
    equal = tie * np.round(scores / tie)
    shifted = (scores - tie * labels + different, scores, equal + 2 * tie * labels)
    precisions = (label_metrics.average_precisions(labels, values) for values in shifted)
    low, mean, high = map(label_metrics.mean_average_precision, precisions)
    return mean, max(mean - low, high - mean)


def _binary_loss(logits, labels):
    """Return the binary cross entropy of each image, summed over its classes, float64 [N, 1]."""
    logits = logits.astype(np.float64)
    return (np.logaddexp(0, logits) - logits * labels).sum(axis=1, keepdims=True)


def _mirrored_logits(logits):
    """Return the logits of the mean probabilities of images and their mirror images, float64 [N, classes]."""
    logits = logits.astype(np.float64)
    means = [np.logaddexp(*np.split(-np.logaddexp(0, sign * logits), 2)) for sign in (-1, 1)]
    return means[0] - means[1]


def metric_text(score: dict[str, Any]) -> str:
    """Return "mAP X" or "top1 X" for a result of `score` or a recorded evaluation."""
    if "map" in score:
        return f"mAP {score['map']:.6g}"
    return f"top1 {score['top1'] if 'top1' in score else score['correct'] / score['images']:.6g}"


def _log_softmax(logits, clip=np.inf):
    """Return log probabilities, float64 [N, classes], computed without underflow. Logits below the row's maximum minus
    `clip` are raised to this limit."""
    logits = logits.astype(np.float64)
    logits = np.maximum(logits - logits.max(axis=1, keepdims=True), -clip)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
