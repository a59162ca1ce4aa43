"""The image at which a loader has failed, and whether a file can be decoded."""

import os
import re
from time import monotonic

import numpy as np
from nvidia import nvimgcodec
from nvidia.dali import fn, pipeline_def, types

# How DALI names a record of RecordIO and TFRecord, of WebDataset, and of LMDB.
RECORD_PATTERNS = (r"(.+) at index (\d+)", r"(.+\.tar):(\d+):.*", r"(.+) at key (.+)")
SEARCH_S = 40  # a run with a bad image ends within a minute
_decoder = None


def decode(data):
    """Why the CPU decoders of training and evaluation cannot decode an image, or None if they can.

    Args:
        data: bytes of the file.
    """
    global _decoder

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def decoder():
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        # The crop's decoder, too: there are files that only one of the two takes.
        return fn.decoders.image(encoded, output_type=types.RGB), fn.decoders.image_random_crop(encoded)

    if _decoder is None:
        _decoder = decoder()
        _decoder.build()
    try:
        _decoder.feed_input("encoded", [np.frombuffer(data, np.uint8)])
        _decoder.run()
    except RuntimeError as e:
        _decoder = None  # a pipeline that has failed does not run again
        if not has_header(data):
            return "does not begin like an image that DALI knows"
        if "bad_alloc" in str(e):
            return "claims to be larger than the memory"
        return "has damaged image data or is of a kind that DALI cannot decode"
    return None


def has_header(data):
    """Whether the file begins like an image that DALI knows."""
    try:
        return bool(nvimgcodec.CodeStream(data).height)
    except RuntimeError:
        return False


def bad_image(message, data_set, image_root):
    """The image that DALI's error is about: a path or CONTAINER@PLACE, "an image in" the root if it could not be found,
    None if the error is about no image.

    DALI names the file that cannot be read and most images that cannot be decoded, but for example not one whose
    header it cannot make out. For those the headers of all images are read, then all images decoded, until one fails or
    SEARCH_S seconds are over.
    """
    named = re.search(r"(?:Failed to decode sample #\d+ : |File mapping failed: |Could not open file )(.+)", message)
    if named:
        return os.path.join(image_root, _name(named[1].strip()))
    if not re.search(r"nvidia\.dali\.fn\.(decoders\.|peek_image_shape)", message):
        return None
    deadline = monotonic() + SEARCH_S
    for can_be_used in (has_header, lambda encoded: decode(encoded) is None):
        try:
            for encoded, source in _undecoded(data_set):
                if not can_be_used(encoded):
                    return os.path.join(image_root, _name(source))
                if monotonic() > deadline:
                    return f"an image in {image_root}"
        except RuntimeError as e:  # of the reader, which names the file
            return bad_image(str(e), data_set, image_root)
    return None


def _name(source):
    """DALI's words for where an image is, in the form of listing.Image's names: FILE or CONTAINER@PLACE."""
    for pattern in RECORD_PATTERNS:
        place = re.fullmatch(pattern, source)
        if place:
            return f"{place[1]}@{place[2]}"
    return source


def _undecoded(data_set):
    """All images of a data set in turn: (bytes of the file, path)."""

    @pipeline_def(batch_size=64, num_threads=1, device_id=None)
    def undecoded(shard_id, num_shards):
        encoded, _ = data_set.read("Reader", shard_id, num_shards, shuffle=False)
        return encoded, fn.get_property(encoded, key="source_info")

    shards = min(8, os.cpu_count(), data_set.size)  # read at once: each reader has one thread
    pipelines = [undecoded(shard_id, shards) for shard_id in range(shards)]
    for _ in range(0, -(-data_set.size // shards), 64):
        for pipeline in pipelines:
            for image, source in zip(*pipeline.run(), strict=True):
                yield bytes(np.asarray(image)), bytes(np.asarray(source)).decode()
