"""The task of images that belong to one class each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from paddle_resnet.utils import confidence, meters
from paddle_resnet.utils.checks import is_count, is_ratio
from paddle_resnet.utils.meters import AverageMeter, ConfidenceMeter, ConfusionMeter, TopMeter, class_metrics
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from paddle import static


class SingleLabel:
    """One class per image: the probabilities are the softmax of the logits.

    Args:
        num_classes: number of network outputs, C.
    Attributes:
        MAIN_METRIC: name of the metric that determines the best evaluation.
        METRICS, TRAIN_METRICS: names of the metrics of a complete evaluation and of a training epoch, except the loss.
        RATIOS: names of the ratios of each class that the HTML page of a run shows, ending with meters.CLASS_METRICS.
        TABLES: kinds of the CSV files that describe an evaluation.
        COLUMNS: {file: {required column: (type, check, whether a cell may be empty), or None for a text column}}.
        label: shape and type of the label of an image.
        checked_classes: number of classes if labels are class numbers, otherwise None.
    """

    MAIN_METRIC = "top1"
    METRICS = TRAIN_METRICS = ("top1", "top5")
    RATIOS = meters.CLASS_METRICS
    TABLES = ("classes", "averages", "confusion")
    COLUMNS: ClassVar[dict[str, dict[str, Any]]] = {
        "classes.csv": {
            **dict.fromkeys(("label", "images", "correct"), (int, is_count, False)),
            **{"top1": (float, is_ratio, True), "class": None},
        },
        "confusion.csv": {
            **dict.fromkeys(("label", "predicted", "images"), (int, is_count, False)),
            **dict.fromkeys(("class", "predicted_class")),
        },
        "predictions.csv": {
            **{"label": (int, is_count, False), "prediction": (int, is_count, True)},
            **{"probability_1": (float, is_ratio, True), **dict.fromkeys(("image", "predicted_class"))},
        },
    }

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    @property
    def label(self) -> tuple[list[int], str]:
        return [1], "int64"

    @property
    def checked_classes(self) -> int | None:
        return self.num_classes

    def draw_labels(self, random: np.random.RandomState, count: int) -> np.ndarray:
        """Return random labels for `count` synthetic images."""
        return random.randint(0, self.num_classes, (count, 1)).astype("int64")

    def soft_labels(self, label: "static.Variable") -> "static.Variable":
        """Return the labels as target probabilities, float32 [N, C]."""
        import paddle

        return paddle.nn.functional.one_hot(paddle.reshape(label, [-1]), self.num_classes)

    def weigh(self, targets: Mapping[str, Any], class_weights: "static.Variable") -> dict[str, Any]:
        """Return the entries of the targets with which the loss head applies class weights, float32 [1, C]."""
        from paddle_resnet.models import loss_head

        return {"image_weights": loss_head.weigh_images(targets, class_weights, self.num_classes)}

    def add_head(
        self,
        out: "static.Variable",
        targets: Mapping[str, Any],
        label_smoothing: float,
        mode: Mode,
        lists_images: bool = False,
    ) -> dict[str, tuple[Any, Any]]:
        """Add the loss and the metrics to the current program.

        Args:
            out: logits [N, C].
            targets: {"label"} and the entries that components of the training step add.
            label_smoothing: fraction of each label to spread over all classes, in training.
            mode: in Mode.EVAL, the loss has one value per image.
            lists_images: whether evaluations list the prediction of each image.
        Returns:
            {name: (variable, meter)}, see program.create_fetchs.
        """
        from paddle import static

        from paddle_resnet.models import loss_head
        from paddle_resnet.step import facts

        is_native = facts.of(static.default_main_program()).backend == "native"
        add = loss_head.add_native if is_native else loss_head.add_paddle
        head = add(out, dict(targets), self.num_classes, label_smoothing, mode is Mode.TRAIN)
        meters = {"confusion": ConfusionMeter(self.num_classes), "of_softmax": ConfidenceMeter()}
        fetchs: dict[str, tuple[Any, Any]] = {
            name: (variable, meters.get(name) or AverageMeter(name, is_ratio=name != "loss"))
            for name, variable in head.items()
        }
        if lists_images and mode is Mode.EVAL:
            fetchs["logits"] = loss_head.add_logits(out), TopMeter(min(5, self.num_classes))
        return fetchs

    def mean_over_mirrored(self, logits: "static.Variable") -> "static.Variable":
        """Return the logits of the mean probabilities of images and their mirror images (--tta flip). Logits [2 N, C],
        result [N, C]."""
        from paddle_resnet.models import loss_head

        return loss_head.mean_over_mirrored(logits)

    def probabilities(self, logits: "static.Variable") -> "static.Variable":
        """Return the probability of each class, [N, C]."""
        import paddle

        return paddle.nn.functional.softmax(logits)

    def divergence(self, logits: "static.Variable", target: "static.Variable") -> "static.Variable":
        """Return the Kullback-Leibler divergence of each image, float32 [N, 1], from the probabilities for `target` to
        those for `logits`, both [N, C]."""
        from paddle_resnet.models import divergence

        return divergence.of_softmax(logits, target)

    def reduce(self, meters_of_rank: Mapping[str, Any], is_benchmark: bool) -> dict[str, Any]:
        """Return the metrics of an evaluation that are not means, over the images of all processes. Every process must
        call reduce() with its meters, {name: meter}. A benchmark needs only the confusion counts."""
        result: dict[str, Any] = {}
        if "confusion" in meters_of_rank:
            result |= confusion_over_all_processes(meters_of_rank["confusion"])
            if not is_benchmark:
                result |= meters.average_metrics(result["confusion"], self.num_classes)
        if "of_softmax" in meters_of_rank and not is_benchmark:
            is_correct = meters_of_rank["confusion"].is_correct()
            result |= calibration_over_all_processes(meters_of_rank["of_softmax"].values(), is_correct)
        if "logits" in meters_of_rank:
            result |= predictions_on_rank_0(meters_of_rank["confusion"].labels(), meters_of_rank["logits"].rows())
        return result

    def restore(self, fetchs: Mapping[str, tuple[Any, Any]], meta: Mapping[str, Any]) -> None:
        """Prepare an evaluation of the checkpoint with this meta.json ({} if the checkpoint has no meta.json)."""

    def meta(self, evaluated: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return entries of meta.json for the result of the last evaluation, or for None if none has been run."""
        return {}

    def describe(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries of model.json for a network whose checkpoint has this meta.json."""
        return {}

    def tables(self, result: Mapping[str, Any], names: Sequence[str], epoch: int) -> dict[str, tuple[Sequence, list]]:
        """Return {kind in TABLES: (header, rows)} for the result of an evaluation. `names` has C class names."""
        ratios = meters.CLASS_METRICS
        metrics = class_metrics(result["confusion"], self.num_classes)
        rows = []
        for label, images in enumerate(metrics["images"]):
            top1, *cells = (f"{metrics[name][label]:.6f}" for name in ("recall", *ratios))
            rows.append((label, names[label], images, metrics["correct"][label], top1 if images else "", *cells, epoch))
        of_confusion = [
            (*pair, names[pair[0]], names[pair[1]], epoch)
            for pair in sorted(result["confusion"].tolist(), key=lambda pair: -pair[2])
        ]
        averages = meters.average_metrics(result["confusion"], self.num_classes)
        return {
            "classes": (("label", "class", "images", "correct", "top1", *ratios, "epoch"), rows),
            "averages": averages_table(averages, epoch),
            "confusion": (("label", "predicted", "images", "class", "predicted_class", "epoch"), of_confusion),
        }

    def predictions(self, result: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], list[list[Any]]] | None:
        """Return (header, rows) of the table with the prediction of each image, without the column of the image; None
        if the result of the evaluation has no predictions. For the arguments, see tables."""
        if "predictions" not in result:
            return None
        k = result["predictions"].shape[1] // 2
        return ["label", "prediction", "class", "predicted_class", *top_columns(k)], [
            *_rows(result["predictions"], names)
        ]


def _rows(predictions, names):
    k = predictions.shape[1] // 2
    for label, *row in predictions.tolist():
        named = [(int(c), names[int(c)]) if c < len(names) else ("", "") for c in row[:k]]
        top = [(c, name, p) for (c, name), p in zip(named, row[k:], strict=True)]
        yield [int(label), top[0][0], names[int(label)], top[0][1], *top_cells(top)]


def top_columns(k: int) -> list[str]:
    """Return the column names for the k most probable classes."""
    return [f"{name}_{i}" for i in range(1, k + 1) for name in ("label", "class", "probability")]


def top_cells(top: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the table cells of one image, in the order of the column names from top_columns(). `top` is [(label, class
    name, probability)]."""
    return [cell for label, name, p in top for cell in (label, name, f"{p:.7g}" if math.isfinite(p) else "")]


def averages_table(result: Mapping[str, Any], epoch: int) -> tuple[Sequence[str], list]:
    """Return (header, rows) of the table with the averages over the classes."""
    rows = [
        (kind, *(f"{result[f'{name}_{kind}']:.6f}" for name in meters.CLASS_METRICS), epoch) for kind in meters.AVERAGES
    ]
    return ("average", *meters.CLASS_METRICS, "epoch"), rows


def confusion_over_all_processes(meter: ConfusionMeter) -> dict[str, np.ndarray]:
    """Return the confusion counts, summed over all processes, and top1 per class. A process sends one code and one
    count per pair of classes that occurred, padded to the largest number of pairs in a process."""
    from paddle_resnet.job import exchange

    codes, counts = meter.counts()
    longest = int(exchange.all_gather([len(codes)]).max())
    padding = (0, longest - len(codes))
    all_ranks = exchange.all_gather([*np.pad(codes, padding), *np.pad(counts, padding)]).astype(np.int64)
    codes, places = np.unique(all_ranks[:, :longest], return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, places.reshape(-1), all_ranks[:, longest:].reshape(-1))
    confusion = np.column_stack([*divmod(codes, meter.class_num), counts])[counts > 0]  # remove the padding
    metrics = class_metrics(confusion, meter.class_num)
    return {"confusion": confusion, "class_top1": np.where(metrics["images"] > 0, metrics["recall"], np.nan)}


def calibration_over_all_processes(confidences: np.ndarray, is_correct: np.ndarray) -> dict:
    """Return {"ece": expected calibration error, "reliability": reliability diagram, see confidence.reliability} over
    the images of all processes. For the arguments, see confidence.bin_sums."""
    from paddle_resnet.job import exchange

    all_ranks = exchange.all_gather(confidence.bin_sums(confidences, is_correct).reshape(-1))
    sums = all_ranks.sum(axis=0).reshape(confidence.BINS, -1)
    return {"ece": confidence.expected_error(sums), "reliability": confidence.reliability(sums)}


def predictions_on_rank_0(labels: ArrayLike, rows: ArrayLike) -> dict[str, np.ndarray]:
    """On rank 0, return {"predictions": the predictions of all processes}; on all other ranks, return {}. Shards are
    assigned in rank order, so the predictions are in the order of the data set."""
    from paddle_resnet.job import exchange

    own = np.column_stack([labels, rows])
    all_ranks = exchange.gather(own.tobytes())
    if all_ranks is None:
        return {}
    return {"predictions": np.frombuffer(b"".join(all_ranks)).reshape(-1, own.shape[1])}
