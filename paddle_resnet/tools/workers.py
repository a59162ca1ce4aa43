"""Worker processes of convert.py, which read images and write record files or class folders.

Worker processes import this module instead of dataset.py. The module imports neither DALI nor Paddle, so that the
processes do not wait for these imports.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any

import PIL.Image

from paddle_resnet.data import classes, indexes
from paddle_resnet.data.formats import INDEXED, SHARDED, read_image
from paddle_resnet.data.images import IMAGE_EXTENSIONS, IMAGE_SUFFIXES, Image, read_slice
from paddle_resnet.serving import preprocessing
from paddle_resnet.tools.split import link
from paddle_resnet.utils import files, signals
from paddle_resnet.utils.errors import UsageError

# (first bytes of a file, suffix) for all image formats except JPEG.
MAGIC = ((b"\x89PNG", "png"), (b"BM", "bmp"), (b"II", "tif"), (b"MM", "tif"), (b"RIFF", "webp"))
BLOCK = 64  # images per task of a worker for RecordIO (synced to disk after each block) and class folders
_OMIT = "or, with convert, omit the image with --skip-list"


class Workers:
    """A pool of processes that prepare images or write shards. An exception in the `with` block stops all processes.

    Args:
        count: number of processes.
        resize_short, quality: see convert.convert.
    Attributes:
        images: value with the number of images that write_shard has written.
    """

    def __init__(self, count: int, resize_short: int | None, quality: int) -> None:
        # Processes are spawned instead of forked, because a fork does not copy DALI's threads.
        context = multiprocessing.get_context("spawn")
        self.images = context.Value(ctypes.c_int64)
        self._stop = context.Event()
        arguments = (os.getpid(), self.images, self._stop, resize_short, quality)
        self._count = count
        self._pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=arguments)

    def submit(self, *call: Any) -> Future[Any]:
        """Start a call (function, arguments ...) in a worker process."""
        with signals.deferred():
            return self._pool.submit(*call)

    def map(self, function: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yield function(block) for each block of BLOCK items, in order. Only two blocks per worker are queued, which
        keeps all workers busy but limits memory use."""
        blocks = (self.submit(function, items[i : i + BLOCK]) for i in range(0, len(items), BLOCK))
        pending = deque(islice(blocks, 2 * self._count))
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(blocks, 1))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def _start_worker(parent, images, stop, resize_short, quality):
    global _images, _stop, _resize_short, _quality
    _images, _stop, _resize_short, _quality = images, stop, resize_short, quality
    signals.die_with_parent(parent)


def prepare(image: Image) -> tuple[bytes, str, int]:
    """Read an Image, and shrink the image if requested. Return (bytes to store, extension without dot, label).

    Raises:
        UsageError: the image cannot be read or shrunk, or its label is not a class.
        InterruptedError: the conversion is being stopped.
    """
    if _stop.is_set():
        raise InterruptedError
    try:
        data, label = read_image(image)
    except OSError as e:
        raise UsageError(f"{image.path}: cannot be read ({e.strerror}); make it readable {_OMIT}") from e
    if not classes.is_class(label):
        problem = f"label {label:.15g} is not a whole number from 0"
        raise UsageError(f"{image.full_name}: {problem}; correct the label {_OMIT}")
    label = int(label)
    if _resize_short is None:
        return data, _extension(image, data), label
    try:
        with PIL.Image.open(io.BytesIO(data)) as picture:
            short = min(picture.size)
            if short <= _resize_short:
                return data, _extension(image, data), label
            picture = PIL.Image.fromarray(preprocessing.upright_rgb(picture))
            size = [max(1, round(side * _resize_short / short)) for side in picture.size]
            picture = picture.resize(size, PIL.Image.Resampling.BICUBIC)
            out = io.BytesIO()
            picture.save(out, "JPEG", quality=_quality)
    except Exception as e:  # Pillow raises many types of exceptions for damaged files
        raise UsageError(f"{image.full_name}: cannot be decoded ({e}); repair the image {_OMIT}") from e
    return out.getvalue(), "jpg", label


def _extension(image, data):
    """Return the extension with which an image is stored: the extension of an image file if it is supported and not
    jfif; otherwise, and for a record, the extension that matches the first bytes of the image, by default jpg."""
    own = os.path.splitext(image.path)[1][1:].lower()
    if image.kind is None and own in IMAGE_EXTENSIONS and own != "jfif":  # .jpg is more common
        return own
    return next((extension for start, extension in MAGIC if data.startswith(start)), "jpg")


def write_shard(to: str, path: str, first: int, images: Sequence[Image]) -> None:
    """Write one shard and its index. The shard gets its final name only when the shard and its index are complete.

    Raises:
        UsageError: an image cannot be read, or its label is invalid.
        OSError: a file cannot be written.
        InterruptedError: the main process stops the workers.
    """
    with files.written(path, f"{path}.partial") as partial:
        lines = []
        with SHARDED[to](str(partial)) as write:
            for number, image in enumerate(images, first):
                lines.append(write(number, *prepare(image)))
                with _images.get_lock():
                    _images.value += 1
        files.fsync(partial)
        indexes.write_file(indexes.index_path(path), indexes.content(lines, INDEXED[to]))


def write_files(tasks: Sequence[tuple[Image, str]]) -> int:
    """Write or link the file of each (image, path), and return the number of files. For exceptions, see write_shard."""
    for image, path in tasks:
        if _stop.is_set():
            raise InterruptedError
        data = None
        if image.kind is None:
            size = os.path.getsize(image.path)
        elif image.kind is read_slice and path.lower().endswith(IMAGE_SUFFIXES):
            size = image.place[1]
        else:
            data, extension, _ = prepare(image)
            size = len(data)
            if not path.lower().endswith(IMAGE_SUFFIXES):
                path += f".{extension}"
        if os.path.lexists(path):
            if os.path.isfile(path) and os.path.getsize(path) == size:
                continue
            os.unlink(path)  # an interrupted import left a part of the file
        if image.kind is None:
            link(os.path.realpath(image.path), path)
            continue
        if data is None:
            data, *_ = prepare(image)
        with open(path, "wb") as f:
            f.write(data)
    return len(tasks)


def prepare_block(images: Sequence[Image]) -> list[tuple[bytes, int]]:
    """Return [(bytes to store, label)]. For exceptions, see prepare."""
    return [(data, label) for data, _, label in map(prepare, images)]
