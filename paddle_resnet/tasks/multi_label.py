"""The task of images that belong to any number of classes (--multi-label, docs/multilabel.md)."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paddle_resnet.tasks.single_label import averages_table
from paddle_resnet.utils import label_metrics
from paddle_resnet.utils.checks import is_count, is_ratio
from paddle_resnet.utils.label_metrics import DEFAULT_THRESHOLD, ScoreMeter
from paddle_resnet.utils.meters import CLASS_METRICS, AverageMeter
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from paddle import static

PROBABILITY = "probability_"  # start of the names of the columns with the probabilities


class MultiLabel:
    """Any number of classes per image: the probabilities are the sigmoid of the logits, and an image is predicted to
    have each class whose probability is not below the threshold of the class. See SingleLabel.

    Args:
        num_classes: number of network outputs, C.
        asymmetric_loss: parameters of the asymmetric loss, or None for binary cross entropy; see multi_label_head.add.
    """

    MAIN_METRIC = "map"
    METRICS = ("map", "map_micro")
    TRAIN_METRICS = ()
    RATIOS = ("ap", *CLASS_METRICS)
    TABLES = ("classes", "averages")
    COLUMNS: ClassVar[dict[str, dict[str, Any]]] = {
        "classes.csv": {
            **dict.fromkeys(("label", "images", "predicted", "correct"), (int, is_count, False)),
            **{"ap": (float, is_ratio, True), "threshold": (float, is_ratio, False), "class": None},
        },
        "predictions.csv": dict.fromkeys(("image", "labels", "prediction")),  # further columns contain probabilities
    }

    def __init__(self, num_classes: int, asymmetric_loss: list[float] | None = None) -> None:
        self.num_classes, self._asymmetric_loss = num_classes, asymmetric_loss

    @property
    def label(self) -> tuple[list[int], str]:
        return [self.num_classes], "float32"

    @property
    def checked_classes(self) -> int | None:
        return None

    def draw_labels(self, random: np.random.RandomState, count: int) -> np.ndarray:
        return random.randint(0, 2, (count, self.num_classes)).astype("float32")

    def soft_labels(self, label: "static.Variable") -> "static.Variable":
        return label

    def weigh(self, targets: Mapping[str, Any], class_weights: "static.Variable") -> dict[str, Any]:
        return {"class_weights": class_weights}

    def add_head(
        self,
        out: "static.Variable",
        targets: Mapping[str, Any],
        label_smoothing: float,
        mode: Mode,
        lists_images: bool = False,
    ) -> dict[str, tuple[Any, Any]]:
        from paddle_resnet.models import multi_label_head

        head = multi_label_head.add(out, targets, label_smoothing, self._asymmetric_loss, mode is Mode.TRAIN)
        meters = {"loss": AverageMeter("loss"), "scores": ScoreMeter(self.num_classes)}
        return {name: (variable, meters[name]) for name, variable in head.items()}

    def mean_over_mirrored(self, logits: "static.Variable") -> "static.Variable":
        from paddle_resnet.models import multi_label_head

        return multi_label_head.mean_over_mirrored(logits)

    def probabilities(self, logits: "static.Variable") -> "static.Variable":
        from paddle_resnet.models import multi_label_head

        return multi_label_head.probabilities(logits)

    def divergence(self, logits: "static.Variable", target: "static.Variable") -> "static.Variable":
        from paddle_resnet.models import divergence

        return divergence.of_sigmoid(logits, target)

    def reduce(self, meters_of_rank: Mapping[str, Any], is_benchmark: bool) -> dict[str, Any]:
        """Return the result of label_metrics.evaluate for the images of all processes, with arrays instead of lists. On
        rank 0, also return {"scores": float32 [images, 2 C] in the order of the data set}. Return {} in training and
        in a benchmark."""
        if is_benchmark or "scores" not in meters_of_rank:
            return {}
        from paddle_resnet.job import exchange

        meter: ScoreMeter = meters_of_rank["scores"]
        own = meter.rows()
        all_ranks = exchange.gather(own.tobytes())
        rows = np.frombuffer(b"".join(all_ranks or []), np.float32).reshape(-1, own.shape[1])
        result = exchange.from_rank_0(lambda: label_metrics.evaluate(rows, meter.thresholds))
        result = {name: np.array(value) if isinstance(value, list) else value for name, value in result.items()}
        return result | ({} if all_ranks is None else {"scores": rows})

    def restore(self, fetchs: Mapping[str, tuple[Any, Any]], meta: Mapping[str, Any]) -> None:
        """Use the thresholds of the checkpoint, instead of choosing them in the evaluation."""
        fetchs["scores"][1].thresholds = meta.get("thresholds")

    def meta(self, evaluated: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"thresholds": None if evaluated is None else evaluated["thresholds"].tolist()}

    def describe(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        thresholds = meta.get("thresholds") or [DEFAULT_THRESHOLD] * self.num_classes
        return {"multi_label": {"thresholds": thresholds}}

    def tables(self, result: Mapping[str, Any], names: Sequence[str], epoch: int) -> dict[str, tuple[Sequence, list]]:
        counts, ratios = ("images", "predicted", "correct"), ("ap", "threshold", *CLASS_METRICS)
        columns = [result["thresholds" if name == "threshold" else f"class_{name}"] for name in (*counts, *ratios)]
        rows = []
        for label, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            cells = [f"{value:.6f}" if math.isfinite(value) else "" for value in values[len(counts) :]]
            rows.append((label, names[label], *map(int, values[: len(counts)]), *cells, epoch))
        of_classes = ("label", "class", *counts, *ratios, "epoch"), rows
        return {"classes": of_classes, "averages": averages_table(result, epoch)}

    def predictions(self, result: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], list[list[Any]]] | None:
        """Like SingleLabel.predictions: the class names of the labels and of the prediction, and the probability of
        each class."""
        if "scores" not in result:
            return None
        return ["labels", "prediction", *(PROBABILITY + name for name in names)], [*_rows(result, names)]


def _rows(result, names):
    logits, labels = np.split(result["scores"], 2, axis=1)
    for label, values in zip(labels > 0.5, label_metrics.probabilities(logits), strict=True):
        chosen = (np.flatnonzero(is_chosen) for is_chosen in (label, values >= result["thresholds"]))
        sets = ["|".join(names[i] for i in labels) for labels in chosen]
        yield [*sets, *(f"{p:.7g}" for p in values.tolist())]
