"""Decoding checks, and the search for the image at which a loader failed."""

import contextlib
import os
import re
import sys
from time import monotonic

import numpy as np
from nvidia import nvimgcodec
from nvidia.dali import fn, pipeline_def, types

# DALI's source_info of a record: in RecordIO and TFRecord files, in WebDataset files, and in an LMDB.
RECORD_PATTERNS = (r"(.+) at index (\d+)", r"(.+\.tar):(\d+):.*", r"(.+) at key (.+)")
SEARCH_S = 40  # so that a run ends within a minute after a bad image
MAX_PIXELS = 2**28  # per decoded image; paddle_resnet/__init__.py sets this limit for DALI's OpenCV
MAX_BYTES = 2**28  # per image file
_decoder = None


@contextlib.contextmanager
def decoders_silenced():
    """Discard what C libraries write to stderr: decoders report damaged images there, without file names and from
    prefetching threads. Python's sys.stderr is not affected."""
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
    except OSError:  # tests replace it
        return None


def decode(data):
    """Decode an image with the CPU decoders that training and evaluation use.

    Args:
        data: bytes of the image file.
    Returns:
        None, or the reason why the image cannot be decoded.
    """
    global _decoder

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def decoder():
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        # Evaluation uses the first decoder, training the second. Some files are accepted by only one of the two.
        return fn.decoders.image(encoded, output_type=types.RGB), fn.decoders.image_random_crop(encoded)

    problem = header_problem(data)
    if problem is not None:
        return problem
    if _decoder is None:
        _decoder = decoder()
        _decoder.build()
    try:
        _decoder.feed_input("encoded", [np.frombuffer(data, np.uint8)])
        _decoder.run()
    except RuntimeError as e:
        _decoder = None  # a failed pipeline cannot run again
        if "bad_alloc" in str(e):
            return "declares more pixels than fit into memory"
        return "has damaged image data, or a variant of its format that DALI cannot decode"
    return None


def header_problem(data):
    """Return why the header of an image file rules out decoding, or None."""
    if not len(data):
        return "is empty"
    try:
        stream = nvimgcodec.CodeStream(data)
        width, height = stream.width, stream.height
    except RuntimeError:
        width, height = 0, 0
    if not height:
        return "is not in an image format that DALI supports"
    if width * height > MAX_PIXELS:
        return f"declares {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}"
    return None


def reader_problem(message):
    """Return the problem in an error message of a DALI reader, or None if the message is not from a reader."""
    if "nvidia.dali.fn.readers." not in message:
        return None
    reason = message.partition("encountered:")[2].strip().partition("\n")[0]
    return re.sub(r'^Assert on ".*?" failed: ', "", reason) or "it cannot be read"


def bad_image(message, data_set, image_root):
    """Find the image that caused a DALI error.

    DALI's message names a file that it cannot read and most images that it cannot decode, but not an image whose header
    it cannot parse. In that case, this function checks the headers of all images. If all are valid, it decodes all
    images until one fails or SEARCH_S seconds have passed.

    Args:
        message: text of DALI's error.
        data_set: readers.DataSet that the loader reads.
        image_root: folder of the data set.
    Returns:
        Path or FILE@PLACE of the image, including image_root; "an image in IMAGE_ROOT" if the search found no bad
        image; None if no image caused the error.
    """
    unopened = re.search(r"(?:File mapping failed: |Could not open file )(.+?)(?:: [A-Z][a-z ]+)?$", message, re.M)
    if unopened:
        return unopened[1]
    undecoded = re.search(r"Failed to decode sample #\d+ : (.+)", message)
    if undecoded:
        return _whole_name(undecoded[1].strip(), image_root)
    if not re.search(r"nvidia\.dali\.fn\.(decoders\.|peek_image_shape)", message):
        return None
    deadline = monotonic() + SEARCH_S
    for find_problem in (header_problem, decode):
        try:
            for encoded, source in _undecoded(data_set):
                if find_problem(encoded) is not None:
                    return _whole_name(source, image_root)
                if monotonic() > deadline:
                    return f"an image in {image_root}"
        except RuntimeError as e:  # raised by the reader, with the file name in the message
            return bad_image(str(e), data_set, image_root)
    return None


def _whole_name(source, image_root):
    """Convert DALI's source_info of an image to the form of listing.Image.full_name. source_info contains the path of a
    record file as passed to DALI, but the path of an image file relative to image_root."""
    for pattern in RECORD_PATTERNS:
        place = re.fullmatch(pattern, source)
        if place:
            return f"{place[1]}@{place[2]}"
    return os.path.join(image_root, source)


def _undecoded(data_set):
    """Yield all images of a data set: (bytes of the file, source_info)."""

    @pipeline_def(batch_size=64, num_threads=1, device_id=None)
    def undecoded(shard_id, num_shards):
        encoded, _ = data_set.read("Reader", shard_id, num_shards, shuffle=False)
        return encoded, fn.get_property(encoded, key="source_info")

    shards = min(8, os.cpu_count(), data_set.size)  # read in parallel, since each reader has only one thread
    pipelines = [undecoded(shard_id, shards) for shard_id in range(shards)]
    for _ in range(0, -(-data_set.size // shards), 64):
        for pipeline in pipelines:
            for image, source in zip(*pipeline.run(), strict=True):
                yield bytes(np.asarray(image)), bytes(np.asarray(source)).decode()
