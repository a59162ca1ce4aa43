"""Check whether images can be decoded, and find the image that caused a loader error."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np
from nvidia import nvimgcodec
from nvidia.dali import fn, pipeline_def, types

from paddle_resnet.data import headers
from paddle_resnet.data.formats import read_image
from paddle_resnet.utils.errors import UsageError

# Patterns of the source_info that DALI reports for a record: RecordIO or TFRecord, WebDataset, LMDB.
RECORD_PATTERNS = (r"(.+) at index (\d+)", r"(.+\.tar):(\d+):.*", r"(.+) at key (.+)")
SEARCH_S = 40  # number of seconds after which a search for a bad record or image ends
# Maximum number of pixels in a decoded image; paddle_resnet/__init__.py also sets this limit for DALI's OpenCV.
MAX_PIXELS = 2**28
UNDECODABLE, UNOPENED = "cannot be decoded", "cannot be opened"
# Number of pixels on a side from which training may fail on an intact image, because DALI 2.4 chooses invalid crops:
# the square of the height, times the largest aspect ratio (4/3), overflows 31 bits if the height exceeds 40,132.
LONG_SIDE = 2**15
MAX_BYTES = 2**28  # maximum size of an image file in bytes
_decoders = {}  # {result of _is_decoded_once: pipeline}


@contextlib.contextmanager
def decoders_silenced() -> Iterator[None]:
    """Discard what C libraries write to stderr, because the decoders' messages about damaged images lack file names.
    Output to Python's sys.stderr is not affected."""
    stderr, descriptor = sys.stderr, os.dup(2)
    stderr.flush()
    try:
        if _descriptor(stderr) == 2:
            sys.stderr = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = stderr
        os.dup2(descriptor, 2)
        os.close(descriptor)


def _descriptor(stream):
    try:
        return stream.fileno()
    except OSError:  # stderr may have no file descriptor, for example under pytest
        return None


def decode(data: bytes, path: str | None = None) -> str | None:
    """Check an image: its header, then whether DALI's CPU decoders can decode all of it and a part of it.

    Args:
        data: bytes of the image file.
        path: see headers.problem.
    Returns:
        None, or the reason why the image cannot be decoded.
    """
    problem = header_problem(data, path=path)
    if problem is not None:
        return problem
    once = _is_decoded_once(data)
    if once not in _decoders:
        _decoders[once] = _decoder(once)
        _decoders[once].build()
    try:
        _decoders[once].feed_input("encoded", [np.frombuffer(data, np.uint8)])
        _decoders[once].run()
    except RuntimeError as e:
        del _decoders[once]  # a pipeline that has failed cannot be reused
        if "bad_alloc" in str(e):
            return "declares more pixels than fit in memory"
        return "has damaged image data, or a variant of its format that DALI cannot decode"
    return None


def _is_decoded_once(data):
    """Return whether decoding the whole image finds all faults: whether the image is a JPEG without an EXIF block, and
    not extremely large. To decode a part of it, libjpeg-turbo reads a part of the same data. The other decoders, which
    also decode JPEGs with an orientation, can decode damaged files of which they cannot decode parts."""
    if not data.startswith(b"\xff\xd8") or b"Exif\0\0" in data:
        return False
    stream = nvimgcodec.CodeStream(data)
    return max(stream.width, stream.height) < LONG_SIDE


@pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
def _decoder(once):
    """Decode whole images, as evaluation does, and parts of them, as training does; if `once`, only whole images."""
    encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    image = fn.decoders.image(encoded, output_type=types.RGB)
    return image if once else (image, fn.decoders.image_random_crop(encoded))


def header_problem(data: bytes, shorter_side: int | None = None, path: str | None = None) -> str | None:
    """Check the header of an image file. Return the reason why the image is rejected, or None. Reasons are an invalid
    header, a kind of file that DALI would misread, and more than MAX_PIXELS. If shorter_side is set, the image must
    also have at most MAX_PIXELS after its shorter side is resized to this number of pixels. For `path`, see
    headers.problem."""
    if not len(data):
        return "is empty"
    try:
        stream = nvimgcodec.CodeStream(data)
        width, height = stream.width, stream.height
    except RuntimeError:
        width, height = 0, 0
    if min(width, height) < 1:
        return "is not in an image format that DALI supports"
    misread = headers.problem(data, path)
    if misread is not None:
        return misread
    if width * height > MAX_PIXELS:
        return f"declares {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}"
    if shorter_side is not None and shorter_side**2 * max(width, height) > MAX_PIXELS * min(width, height):
        return f"has {width} x {height} pixels and would exceed the limit of {MAX_PIXELS:,} after resizing"
    return None


def reader_problem(message: str) -> str | None:
    """Extract the reason from the error message of a DALI reader. Return None if the message is from a different
    operator."""
    if "nvidia.dali.fn.readers." not in message:
        return None
    reason = message.partition("encountered:")[2].strip().partition("\n")[0]
    return re.sub(r'^Assert on ".*?" failed: ', "", reason) or "unknown reason"


def bad_record(message: str, data_set: Any, image_root: str, search_s: float = SEARCH_S) -> str | None:
    """Find the record for which the check for exactly one label (shards.single) failed.

    Args:
        message: text of DALI's error.
        data_set: data_set.DataSet that the loader reads.
        image_root: folder of the data set.
        search_s: number of seconds after which the search ends.
    Returns:
        Error message with the file and the place of the first record that is not an image with one label, or with
        image_root and the last record that was read if the search timed out; None if the error
        has a different cause, the data set has no record files, or all records are valid.
    """
    # For a record without a label, DALI reports the first message if all records of the batch lack one, and the second
    # message if others have one. The third message is that of a record whose label is empty or has several
    # numbers.
    failed = r"Cannot apply an index to a scalar|Samples must have the same|Requested shape:\s+1\s"
    if not re.search(failed, message) or data_set.records is None:
        return None
    deadline = monotonic() + search_s
    for image in data_set.records():
        try:
            read_image(image)
        except UsageError as e:
            return str(e)
        if monotonic() > deadline:
            problem = f"a record after {image.full_name} is not an image with one label; write it again"
            return f"{image_root}: {problem}"
    return None


def bad_image(message: str, data_set: Any, image_root: str) -> tuple[str | None, str]:
    """Find the image that caused a DALI error.

    DALI's message contains the path of an unreadable file, and usually the path of an image that cannot be decoded, but
    never the path of an image with an invalid header. If the message contains no path, and the operator that failed
    reads encoded images, this function first checks the headers of all images and then decodes all images. The search
    ends at the first bad image or after SEARCH_S seconds.

    Args:
        message: text of DALI's error.
        data_set: data_set.DataSet that the loader reads.
        image_root: folder of the data set.
    Returns:
        (path or FILE@PLACE of the image, including image_root; problem). If the search timed out, the first item is "an
        image in IMAGE_ROOT" and the path of the image whose check took longest. If no bad image was found, the first
        item is None. The problem is "cannot be opened", "cannot be decoded" or a more specific reason.
    """
    unopened = re.search(r"(?:File mapping failed: |Could not open file )(.+?)(?:: [A-Z][a-z ]+)?$", message, re.M)
    if unopened:
        return unopened[1], UNOPENED
    undecoded = re.search(r"Failed to decode sample #\d+ : (.+)", message)
    if undecoded:
        return _whole_name(undecoded[1].strip(), image_root), UNDECODABLE
    if not re.search(r"nvidia\.dali\.fn\.(decoders\.|peek_image_shape|_tensor_subscript|reshape)", message):
        return None, UNDECODABLE
    deadline = monotonic() + SEARCH_S
    slowest = (0.0, "")
    for find_problem in (header_problem, decode):
        try:
            for encoded, source in _undecoded(data_set, image_root):
                begin = monotonic()
                if find_problem(encoded) is not None:
                    name = _whole_name(source, image_root)
                    path = name if os.path.isfile(name) else None  # otherwise, a record
                    return name, headers.problem(encoded, path) or UNDECODABLE
                slowest = max(slowest, (monotonic() - begin, source))
                if monotonic() > deadline:
                    name = _whole_name(slowest[1], image_root)
                    place = f"an image in {image_root} (not found in {SEARCH_S} s; slowest to check: {name})"
                    return place, UNDECODABLE
        except RuntimeError as e:  # the message of DALI's reader contains the file name
            return bad_image(str(e), data_set, image_root)
    return None, UNDECODABLE


def _whole_name(source, image_root):
    """Convert the source_info that DALI reports for an image to Image.full_name. The source_info of a record contains
    the path that was passed to DALI; the source_info of an image file is its path relative to image_root."""
    for pattern in RECORD_PATTERNS:
        place = re.fullmatch(pattern, source)
        if place:
            return f"{place[1]}@{place[2]}"
    return os.path.join(image_root, source)


def _undecoded(data_set, image_root):
    """Yield (content of the image file, source_info) for all images in a data set. If DALI reports no source_info, the
    name of the image relative to image_root replaces it."""

    @pipeline_def(batch_size=64, num_threads=1, device_id=None)
    def undecoded(shard_id, num_shards):
        encoded, _ = data_set.read("Reader", shard_id, num_shards, shuffle=False)
        return encoded, fn.get_property(encoded, key="source_info")

    shards = min(8, os.cpu_count(), data_set.size)  # several readers, because each reader has only one thread
    pipelines = [undecoded(shard_id, shards) for shard_id in range(shards)]
    names = None
    for start in range(0, -(-data_set.size // shards), 64):
        for shard_id, pipeline in enumerate(pipelines):
            for i, (image, source) in enumerate(zip(*pipeline.run(), strict=True), start):
                source = bytes(np.asarray(source)).decode()
                if not source:
                    names = names or [os.path.relpath(image.full_name, image_root) for image in data_set.records()]
                    first, end = (n * data_set.size // shards for n in (shard_id, shard_id + 1))
                    source = names[min(first + i, end - 1)]
                yield bytes(np.asarray(image)), source
