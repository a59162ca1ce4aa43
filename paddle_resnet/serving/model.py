"""The common interface of all inference engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.results import predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

    from paddle_resnet.serving.fixed_sizes import Steps

TOP = 5  # maximum number of predicted classes per image of a single-label network


@dataclass
class Model:
    """An inference network that is ready to run.

    Attributes:
        engine: "Executor", "captured step", "paddle.inference", "onnxruntime" or "OpenVINO".
        description: content of model.json.
        outputs: function from images to [probabilities] or, if the network was opened with logits=True, to
            [probabilities, logits]; if it was opened with features=True, to [probabilities, input of the last layer].
            description["input"] defines the shape and type of the images. The outputs are float32 [N, classes] and
            [N, channels].
        precision: "float32", "float16", "bfloat16" or "int8".
        steps: fixed_sizes.Steps for the engine "captured step", otherwise None.
    """

    engine: str
    description: dict[str, Any]
    outputs: Callable[[np.ndarray], list[np.ndarray]]
    precision: str = "float32"
    steps: Steps | None = None

    def run(self, images: np.ndarray) -> np.ndarray:
        """Return the probabilities of a batch of images, float32 [N, classes]."""
        return self.outputs(images)[0]

    def submit(self, images: np.ndarray | TensorListCPU | TensorListGPU) -> Sequence[ArrayLike]:
        """Start inference for a batch of images, which may be an array or the output of a DALI pipeline for this model.

        Returns:
            values that np.asarray converts to the arrays that `outputs` returns. At most one other batch may be
            submitted before the conversion.
        """
        return self.steps.submit(images) if self.steps else self.outputs(from_dali(self.description, images))

    def host_images(self, images: int) -> np.ndarray:
        """Return an array with undefined content for `images` images, in the memory from which this engine copies
        fastest. In a model with `steps`, `images` must not exceed the largest batch size of the steps, and all arrays
        for batches of the same step share the same memory."""
        expected = self.description["input"]
        if self.steps:
            return self.steps.host_images(images)
        return np.empty([images, *expected["shape"][1:]], expected["dtype"])

    @cached_property
    def class_names(self) -> list[str]:
        """The names of all classes in label order."""
        return predictions.class_names(self.description["classes"], self.description["output"]["shape"][1])

    @property
    def thresholds(self) -> list[float] | None:
        """The threshold of each class of a multi-label network, otherwise None."""
        return self.description.get("multi_label", {}).get("thresholds")

    def predicted_classes(self, probabilities: np.ndarray) -> list[list[dict[str, Any]]]:
        """Return [{"label", "class", "probability"}] for each image, in descending order of the probability: the
        classes that `top` returns or, for a multi-label network, all classes whose probability is at least the
        threshold, also with "threshold". `probabilities` is [N, C] without NaN."""
        names, thresholds = self.class_names, self.thresholds
        if thresholds is None:
            return [
                [{"label": i, "class": names[i], "probability": p} for i, p in zip(*image, strict=True)]
                for image in zip(*(array.tolist() for array in top(probabilities)), strict=True)
            ]
        images = []
        for row in probabilities.astype(float).tolist():
            labels = sorted((i for i, p in enumerate(row) if p >= thresholds[i]), key=lambda i: -row[i])
            images.append(
                [{"label": i, "class": names[i], "probability": row[i], "threshold": thresholds[i]} for i in labels]
            )
        return images


def top(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the TOP most probable classes of each image in descending order: (labels, probabilities), both [N, k].
    Classes with equal probabilities are in label order. `probabilities` is [N, C] without NaN."""
    k = min(TOP, probabilities.shape[1])
    remaining, labels = np.array(probabilities), np.empty((len(probabilities), k), np.int64)
    for i in range(k):  # find the maximum k times instead of sorting all classes
        labels[:, i] = remaining.argmax(axis=1)
        np.put_along_axis(remaining, labels[:, i : i + 1], -np.inf, axis=1)
    return labels, np.take_along_axis(probabilities, labels, axis=1)


def from_dali(description: dict[str, Any], images: np.ndarray | TensorListCPU | TensorListGPU) -> np.ndarray:
    """Return images, an array or the output of a DALI pipeline, as an array with the type of description["input"]."""
    if not isinstance(images, np.ndarray):
        images = np.array(images.as_cpu().as_tensor())
    return images.astype(description["input"]["dtype"], copy=False)
