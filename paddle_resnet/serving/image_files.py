"""Predict the classes of image files: read, decode and preprocess them with DALI, and run a network on the batches."""

from __future__ import annotations

import os
import stat
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.data import bad_images, loader
from paddle_resnet.data import data_set as data_sets
from paddle_resnet.serving import inference, preprocessing
from paddle_resnet.utils import files
from paddle_resnet.utils.errors import RunError
from paddle_resnet.utils.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

    from paddle_resnet.serving.model import Model

    # A batch of files: (path or other source, problem or None) for each.
    Batch = Sequence[tuple[Any, str | None]]
    Reader = Callable[[Any], tuple[bytes | None, str | None]]


def predict(
    model: Model,
    paths: Sequence[Any],
    batch_size: int = 32,
    device: str = "cpu",
    threads: int = 4,
    read: Reader | None = None,
) -> Iterator[tuple[Any, np.ndarray | None, str | None]]:
    """Yield (path, probabilities, problem) for each image file, in order.

    Images are decoded, resized and normalized as in an evaluation (data/loader.py, Mode.EVAL).

    Args:
        model: serving.model.Model.
        paths: image files.
        batch_size: images per batch.
        device: device on which DALI decodes, "cpu" or "gpu".
        threads: number of CPU threads for DALI.
        read: function that returns (content of the image file, None) or (None, problem) for a path. By default, each
            path must refer to a regular file. A custom function can read images from other sources.
    Returns:
        iterator. `probabilities` is float32 [classes], and `problem` is None. If a file cannot be read or decoded, or
        its probabilities are not finite, `probabilities` is None and `problem` describes the error.
    Raises:
        RunError: DALI cannot load an image that bad_images.decode accepts.
    """
    for files_read, outputs in predict_batches(model, paths, batch_size, device, threads, read):
        rows = iter(outputs[0]) if outputs else iter(())
        for path, problem in files_read:
            yield path, next(rows) if problem is None else None, problem


def predict_batches(
    model: Model, paths: Sequence[Any], batch_size: int, device: str, threads: int, read: Reader | None = None
) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Yield ([(path, problem or None)], outputs) for each batch. The outputs of the model, float32 [N, classes] and,
    with features, [N, channels] (see model.Model.outputs), contain a row for each of the N files without a problem. If
    no file of the batch could be decoded, the outputs are []. For the arguments and exceptions, see predict."""
    running = [], []
    for files_read, images in image_batches(model.description, paths, batch_size, device, threads, read):
        submitted = files_read, [] if images is None else model.submit(images)
        yield _results(model, *running)  # while the device runs this batch, the host processes the previous batch
        running = submitted
    yield _results(model, *running)


def _results(model, files_read, submitted):
    """Return an item of predict_batches, in which each image whose outputs are not finite has a problem."""
    outputs = [np.asarray(rows) for rows in submitted]
    if all(np.isfinite(rows).all() for rows in outputs):
        return files_read, outputs
    is_finite = np.all([np.isfinite(rows).all(axis=1) for rows in outputs], axis=0)
    remedy = "use a different checkpoint"
    if model.precision == "float16":
        remedy = "use --precision float32" if model.steps else "export the checkpoint in float32"
    problem = f"has probabilities that are not finite in {model.precision}; {remedy}"
    each = iter(is_finite)
    checked = [(path, why if why is not None or next(each) else problem) for path, why in files_read]
    return checked, [rows[is_finite] for rows in outputs]


def image_batches(
    description: dict[str, Any],
    paths: Sequence[Any],
    batch_size: int,
    device: str,
    threads: int,
    read: Reader | None,
) -> Iterator[tuple[Batch, TensorListCPU | TensorListGPU | None]]:
    """Yield ([(path, problem or None)], images of the files without a problem, or None) for each batch.

    DALI decodes batches in advance. Unless `read` is set, DALI also reads the files, so that Python does not have
    to read them one by one. DALI stops at the first image that it cannot read or decode. After DALI has stopped, `read`
    (by default, _read_file) reads the files, and their headers are checked. If DALI stops again, all images that were
    read but not yielded are decoded one by one. For exceptions, see _alone."""
    remaining, ahead, is_read_by_dali = iter(paths), deque(), read is None
    read = _checked(read or _read_file, description)

    def batches():
        files_read, batch = [], []
        for path in remaining:
            source, problem = _checked_path(path, read) if is_read_by_dali else read(path)
            files_read.append((path, problem))
            if problem is None:
                batch.append(source)
            if len(batch) == batch_size:
                ahead.append(files_read)
                yield batch
                files_read, batch = [], []
        ahead.append(files_read)
        if batch:
            yield batch

    options = min(batch_size, len(paths)), device, threads
    while True:
        try:
            for images in _decoded(description, batches(), *options, are_paths=is_read_by_dali):
                yield ahead.popleft(), images
        except RuntimeError as error:
            files_read = [*chain.from_iterable(ahead)]
            ahead.clear()
            if is_read_by_dali:
                remaining, is_read_by_dali = chain([path for path, _ in files_read], remaining), False
                continue
            for path, problem in files_read:
                yield from _alone(description, path, problem, device, threads, read, error)
        else:
            yield from ((files_read, None) for files_read in ahead)  # only files without a decodable image remain
            return


def _alone(description, path, problem, device, threads, read, error):
    """Decode a single image, after DALI failed to decode a batch. Yield one item in the format of image_batches.

    Raises:
        RunError: DALI cannot decode the image, although bad_images.decode can.
    """
    encoded, problem = (None, problem) if problem else read(path)
    if encoded is not None:
        decoded = _decoded(description, iter([[encoded]]), 1, device, threads)
        try:
            images = next(decoded)
        except RuntimeError:
            problem = bad_images.decode(encoded.tobytes(), _file(path))
            if problem is None:
                reason = str(error).strip().splitlines()[-1]
                raise RunError(f"{path}: DALI cannot load this image ({reason}); remove it") from error
        else:
            yield [(path, None)], images
            return
    yield [(path, problem)], None


def _checked(read, description):
    """Return a function that returns (content of an image file as uint8 [size], None), or (None, problem) if the file
    cannot be read or its header is invalid."""
    shorter_side = _shorter_side(description)

    def read_and_check(path):
        data, problem = read(path)
        problem = problem or bad_images.header_problem(data, shorter_side, _file(path))
        return (None, problem) if problem else (np.frombuffer(data, np.uint8), None)

    return read_and_check


def _file(path):
    """Return the path of an image file, or None for an image that is not a file."""
    return path if isinstance(path, str) else None


def _shorter_side(description):
    """Return an upper limit in pixels for the shorter side of a resized image."""
    crop = preprocessing.sides(description["preprocessing"])
    return description["preprocessing"]["resize_short"] * max(crop) / min(crop)


def _checked_path(path, read):
    """Return (path as bytes, None) if DALI may open the file, otherwise (None, problem). DALI would block on pipes and
    read devices endlessly. `read` is the result of _checked, which describes the problem."""
    try:
        name = os.fsencode(path)
        status = os.stat(name)
        if stat.S_ISREG(status.st_mode) and 0 < status.st_size <= bad_images.MAX_BYTES:
            return name if name.startswith(b"/") else b"./" + name, None  # DALI would interpret s3:// at the start
    except (OSError, ValueError):
        pass
    return None, read(path)[1] or "cannot be read (changed while it was read)"


def _read_file(path):
    """Return (content of a regular file, None), or (None, problem)."""
    try:
        with files.open_regular(path, bad_images.MAX_BYTES) as file:
            return file.read(), None
    except OSError as e:
        return None, f"cannot be read ({e.strerror})"
    except ValueError as e:  # the path contains a null byte
        return None, f"cannot be read ({e})"


def _decoded(description, batches, batch_size, device, threads, are_paths=False):
    """Decode batches of images, and yield DALI's output for each batch. An output is valid until the next batch is
    requested. `batches` yields lists of encoded images or, if `are_paths` is set, of paths (bytes). RuntimeError is
    raised if DALI cannot read or decode an image."""
    args = inference.loader_args(description, batch_size, device, threads)
    if are_paths:
        data_set = data_sets.image_files(batches, _shorter_side(description))
    else:
        data_set = data_sets.encoded_images(batches)
    pipeline = loader.create_pipeline(args.part(loader.Options), data_set, Mode.EVAL, 0, 1)
    while True:
        try:
            images, _ = pipeline.run()
        except StopIteration:
            return
        yield images
