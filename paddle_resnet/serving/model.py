"""The common interface of all inference engines."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paddle_resnet.serving.fixed_sizes import Steps


@dataclass
class Model:
    """An inference network that is ready to run.

    Attributes:
        engine: "Executor", "captured step", "paddle.inference" or "onnxruntime".
        description: content of model.json.
        outputs: function from images to [probabilities] or, if the network was opened with logits=True, to
            [probabilities, logits]. description["input"] defines the shape and type of the images. Both outputs are
            float32 [N, classes].
        precision: "float32", "float16", "bfloat16" or "int8".
        steps: fixed_sizes.Steps for the engine "captured step", otherwise None.
    """

    engine: str
    description: dict
    outputs: Callable
    precision: str = "float32"
    steps: Steps | None = None

    def run(self, images):
        return self.outputs(images)[0]

    def submit(self, images):
        """Start inference for a batch of images, which may be an array or the output of a DALI pipeline for this model.

        Returns:
            a value that np.asarray converts to the probabilities. At most one other batch may be submitted before the
            conversion.
        """
        return self.steps.submit(images) if self.steps else self.run(from_dali(self.description, images))

    def host_images(self, images):
        """Return an array for a number of images, in the memory from which this engine copies fastest. Its content is
        undefined. A model with `steps` returns the same memory again for the next batch of this size, which may contain
        at most as many images as the largest step."""
        expected = self.description["input"]
        if self.steps:
            return self.steps.host_images(images)
        return np.empty([images, *expected["shape"][1:]], expected["dtype"])


def from_dali(description, images):
    """Return images, an array or the output of a DALI pipeline, as an array with the type of description["input"]."""
    if not isinstance(images, np.ndarray):
        images = np.array(images.as_cpu().as_tensor())
    return images.astype(description["input"]["dtype"], copy=False)
