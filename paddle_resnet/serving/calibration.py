"""Post-training quantization: determine activation ranges from training images."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from paddle import static

from paddle_resnet.components import quantization
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import processes
from paddle_resnet.program import compile_prog
from paddle_resnet.serving import image_files
from paddle_resnet.serving.model import from_dali
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from pathlib import Path

    from paddle_resnet.data.images import Image
    from paddle_resnet.serving.networks import Network

# Number of bits per weight for each engine. For onnxruntime, the number is 7, because x86 CPUs that lack VNNI
# instructions add pairs of products in 16 bits, and these sums can overflow if the weights have 8 bits.
WEIGHT_BITS = {"onnxruntime": 7, "tensorrt": 8}
BATCH = 8
BINS = 2048
SMALLEST = 1e-30
PERCENTILE = 99.99  # percentage of values that are not clipped
# A tensor of an image is ignored if its largest activation exceeds OUTLIER times the median over the images so far. In
# a measured network, five of 512 images caused activations 10 to 1,000 times as large as the others
# (benchmarks/log/int8_2cpu.md), and would have determined the means of all images.
OUTLIER = 10


class Sample(NamedTuple):
    """The calibration images of a data set.

    Attributes:
        images: number of images.
        available: number of images in the training split.
        classes: number of different labels among the calibration images.
    """

    images: int
    available: int
    classes: int

    def text(self, outputs: int) -> str:
        """Describe the images for a network with `outputs` classes."""
        images = f"{self.images} of {self.available} training images"
        return f"{images}, which contain {self.classes} of {outputs} classes" if self.classes else images


class Histogram:
    """Histogram of the absolute values of an activation. Zeros are omitted, because INT8 represents them exactly.
    Values up to SMALLEST also count as zeros; for much smaller values, BINS / limit would overflow in float32.

    Attributes:
        counts: float64 [BINS], number of values in each bin.
        limit: upper end of the last bin.
    """

    def __init__(self) -> None:
        self.counts, self.limit = np.zeros(BINS), 0.0

    def add(self, array: np.ndarray) -> None:
        values = np.abs(array)
        values = values[values > SMALLEST]
        if values.size == 0:
            return
        largest = float(values.max())
        self.limit = self.limit or largest
        while largest > self.limit:  # double the width of each bin
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2)])
            self.limit *= 2
        places = (values * np.float32(BINS / self.limit)).astype(np.int32)
        self.counts += np.bincount(np.minimum(places, BINS - 1), minlength=BINS)

    def range(self) -> float:
        """Return the upper end of the activation range, which the highest INT8 level represents: the PERCENTILE of the
        values, or 1 if all values count as zeros. Larger values are clipped."""
        if self.limit == 0:
            return 1.0
        bins = int(np.searchsorted(np.cumsum(self.counts), self.counts.sum() * PERCENTILE / 100)) + 1
        return self.limit * bins / BINS


def quantize(network: Network, bits: int, image_root: str, images: int, allow_outside: bool = False) -> Sample:
    """Quantize a network in place: insert fake-quantization operators, determine the activation ranges from training
    images, and correct the biases. The images are preprocessed as in evaluation. If the largest value of an activation
    exceeds OUTLIER times the median of all images so far, this activation of the image is ignored, with a warning.

    Args:
        network: networks.Network on a CPU, with BN layers folded into the convolutions.
        bits: number of bits per weight.
        image_root: folder of the data set.
        images: maximum number of images to use.
        allow_outside: see draw.
    Returns:
        Sample of the images that were used.
    Raises:
        UsageError: the data set or an image cannot be used, or an activation is not finite.
        RunError: see image_files.predict.
    """
    drawn, available = draw(image_root, images, allow_outside, network.args.multi_label)
    names, layers = list(quantization.activations(network.program)), quantization.layers(network.program)
    histograms, means, counts = {name: Histogram() for name in names}, dict.fromkeys(names, 0.0), Counter()
    largest, unusual = {name: [] for name in names}, 0  # {activation: [largest value per image [images], per batch]}
    classes = set()
    compiled, exe = compile_prog(network.args, network.program, is_train=False), network.exe
    for batch, labels in _batches(network.description, image_root, drawn):
        classes |= {*labels} - {None}
        arrays = exe.run(compiled, {network.images.name: batch}, names, scope=network.scope)
        if not all(np.isfinite(array).all() for array in arrays):
            raise UsageError(
                f"--calibrate {image_root}: activations of the network are not finite; use a different checkpoint"
            )
        are_usual = np.ones(len(batch), bool)
        for name, array in zip(names, arrays, strict=True):
            largest[name].append(np.abs(array).reshape(len(batch), -1).max(axis=1))
            usual = np.median(np.concatenate(largest[name]))
            is_usual = (largest[name][-1] <= OUTLIER * usual) | (usual == 0)
            histograms[name].add(array[is_usual])
            means[name] += array[is_usual].mean(axis=tuple(range(2, array.ndim))).sum(axis=0, dtype=np.float64)
            counts[name] += is_usual.sum()
            are_usual &= is_usual
        unusual += (~are_usual).sum()
    if unusual:
        logger.warn(
            f"--calibrate {image_root}: ignoring tensors of {unusual} of {len(drawn)} images, because the largest "
            f"activation in these tensors exceeds {OUTLIER} times its median over the images"
        )
    with static.program_guard(network.program, static.Program()):
        quantization.insert(network.program)
    for i, histogram in enumerate(histograms.values()):
        _set(network, quantization.range_name(i), [histogram.range()])
    for layer in layers:
        if layer.bias is not None:
            shift = _mean_error(layer, network.parameter(layer.weight), means[layer.input] / counts[layer.input], bits)
            _set(network, layer.bias, network.parameter(layer.bias) - shift)
    return Sample(len(drawn), available, len(classes))


def _mean_error(layer, weight, means, bits):
    """Return how much weight quantization changes the mean of each output channel (Nagel et al., arXiv:1906.04721,
    section 4.2). The padding of convolutions is ignored.

    Args:
        layer: quantization.Layer.
        weight: array that contains the weights of the layer.
        means: mean value of each input channel.
        bits: number of bits per weight.
    """
    levels, scales = quantization.quantized(weight, layer.axis, bits)
    errors = np.moveaxis(levels * scales - weight, layer.axis, 0)  # [output channels, input channels of a group, ...]
    errors = errors.reshape(*errors.shape[:2], -1).sum(axis=2)
    inputs = means.reshape(layer.groups, -1).repeat(len(errors) // layer.groups, axis=0)
    return (errors * inputs).sum(axis=1)


def _set(network, name, values):
    tensor = network.scope.var(name).get_tensor()
    tensor.set(np.asarray(values, np.float32), processes.place("cpu"))


def draw(
    image_root: str | Path, count: int, allow_outside: bool = False, is_multi_label: bool = False
) -> tuple[list[Image], int]:
    """Draw training images at random, one from each of `count` sections of nearly equal length, so that the sample is
    representative both if the images are sorted by class and if the classes alternate.

    Args:
        image_root: folder of the data set.
        count: maximum number of images. If the data set has fewer, all are drawn.
        allow_outside: whether file lists may contain files outside image_root.
        is_multi_label: whether the images can have several classes (--multi-label).
    Returns:
        ([Image], number of images in the training split). The images are in random order and depend only on
        the data set and `count`.
    Raises:
        UsageError: the data set cannot be used, or its training split contains no images.
    """
    images = DataRoot(image_root, allow_outside=allow_outside, is_multi_label=is_multi_label).listed(Mode.TRAIN)
    if not images:
        raise UsageError(f"--calibrate {image_root}: the training split contains no images; add images")
    count = min(count, len(images))
    edges = np.arange(count + 1) * len(images) // count
    random = np.random.RandomState(0)
    places = random.randint(edges[:-1], edges[1:])
    return [images[place] for place in random.permutation(places)], len(images)


def _batches(description, image_root, images):
    """Yield (batch in the network's input format, labels) for `images`, [Image]. Raise UsageError if an image
    cannot be read or decoded."""
    label_of = {}

    def read(image):
        try:
            data, label_of[image] = read_image(image)
        except OSError as e:
            return None, f"cannot be read ({e.strerror})"
        return data, None

    for files_read, batch in image_files.image_batches(description, images, BATCH, "cpu", 4, read):
        for image, problem in files_read:
            if problem is not None:
                raise UsageError(
                    f"--calibrate {image_root}: {image.full_name}: {problem}; repair it, or list all such images with "
                    f"`{command('dataset', 'verify', image_root)}`"
                )
        if files_read:  # the last item is empty if the batch size divides the number of images
            yield from_dali(description, batch), [label_of.pop(image) for image, _ in files_read]
