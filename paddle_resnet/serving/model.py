"""The common interface of all inference engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

    from paddle_resnet.serving.fixed_sizes import Steps


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


def from_dali(description: dict[str, Any], images: np.ndarray | TensorListCPU | TensorListGPU) -> np.ndarray:
    """Return images, an array or the output of a DALI pipeline, as an array with the type of description["input"]."""
    if not isinstance(images, np.ndarray):
        images = np.array(images.as_cpu().as_tensor())
    return images.astype(description["input"]["dtype"], copy=False)
