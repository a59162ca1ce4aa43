"""Broken images: `python -m paddle_resnet.dataset verify` finds them before a run, bad_image() when one has failed.

Apart from dataset.py because the workers of verify are processes of their own, which import this module and not Paddle.
"""

import hashlib
import io
import multiprocessing
import os
import re
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
from nvidia import nvimgcodec
from nvidia.dali import fn, pipeline_def, types
from PIL import Image, UnidentifiedImageError

from paddle_resnet import readers
from utils.errors import UsageError
from utils.mode import Mode

# What a file's bytes are (nvImageCodec's names) against what its name says.
FORMATS = {
    **{".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".bmp": "bmp"},
    **{".tif": "tiff", ".tiff": "tiff", ".webp": "webp"},
}
EXIF_ORIENTATION = 0x0112
SHOWN = 50  # failing images that are printed
SEARCH_S = 40  # a run with a bad image ends within a minute


@dataclass
class Report:
    """What verify found.

    Attributes:
        images: number of images that were decoded or should have been.
        errors: [sentence]: the data set as a whole cannot be used.
        failing: {path relative to the root: why}: training would end at this image.
        odd: {kind: [path or sentence]}: training goes on, perhaps not with what was meant.
    """

    images: int = 0
    errors: list = field(default_factory=list)
    failing: dict = field(default_factory=dict)
    odd: dict = field(default_factory=lambda: defaultdict(list))

    @property
    def training_would_fail(self):
        return bool(self.errors or self.failing)


def verify(root):
    """Decode every image under root/train/ and root/val/ as training on the CPU does, on all cores.

    Args:
        root: folder with train/, val/ or both, one folder a class each.
    Returns:
        Report.
    Raises:
        UsageError: root holds neither train/ nor val/.
    """
    splits = [split for split in ("train", "val") if os.path.isdir(os.path.join(root, split))]
    if not splits:
        raise UsageError(f"{root} has neither train/ nor val/: name the folder above them")
    report = Report()
    _check_folders(root, splits, report)
    names = [
        os.path.relpath(path, root)
        for split in splits
        for label in readers.class_folders(os.path.join(root, split))
        for path in readers.image_files(os.path.join(root, split, label))
    ]
    report.images = len(names)
    digests = defaultdict(list)
    # New processes, not copies of this one: DALI's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _keep_quiet) as pool:
        results = pool.map(check, [os.path.join(root, name) for name in names], chunksize=16)
        for name, (failure, oddities, digest) in zip(names, results, strict=True):
            if failure is not None:
                report.failing[name] = failure
            for kind in oddities:
                report.odd[kind].append(name)
            digests[digest].append(name)
    for same in digests.values():
        if len({name.split(os.sep)[0] for name in same}) > 1:
            report.odd["the same file in train and val"].append(" = ".join(same))
    return report


def _check_folders(root, splits, report):
    for split in splits:
        try:
            readers.folder(str(root), {"train": Mode.TRAIN, "val": Mode.EVAL}[split], 2**31, 0)
        except UsageError as e:
            report.errors.append(str(e))
        images, others = set(), []
        for label in readers.class_folders(os.path.join(root, split)):
            folder = os.path.join(root, split, label)
            images = set(readers.image_files(folder))
            if not images:
                report.odd["class folder without an image"].append(os.path.join(split, label))
            others += [e.path for e in os.scandir(folder) if e.is_file() and e.path not in images]
        report.odd["file that is ignored for its name"] += [os.path.relpath(path, root) for path in sorted(others)]
    if len(splits) == 2:
        train, val = (set(readers.class_folders(os.path.join(root, split))) for split in splits)
        report.odd["class in train alone"] += sorted(train - val)
        report.odd["class in val alone"] += sorted(val - train)
    for kind in [kind for kind, found in report.odd.items() if not found]:
        del report.odd[kind]


def _keep_quiet():
    """The decoders write a line of their own about each damaged file; the report says it in order."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def check(path):
    """Decode one file.

    Returns:
        (None or why DALI cannot decode it, [kinds of oddities], digest of its bytes)
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        return f"cannot be read ({e.strerror})", [], None
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if not data:
        return "is empty", ["0 bytes"], None
    return decode(data), _oddities(path, data), digest


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


def _oddities(path, data):
    found = []
    stream = nvimgcodec.CodeStream(data)
    try:
        codec, precision = stream.codec_name, stream.precision
    except RuntimeError:
        codec, precision = None, 8
    if codec is not None and codec != FORMATS[Path(path).suffix.lower()]:
        found.append(f"{codec} under another name")
    if precision > 8:
        found.append(f"{precision} bits a channel")
    if codec == "jpeg" and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        found.append("truncated")  # no end after the last start of image data
    try:
        with Image.open(io.BytesIO(data)) as image:
            mode, frames = image.mode, getattr(image, "n_frames", 1)
            orientation = image.getexif().get(EXIF_ORIENTATION, 1)
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        ValueError,
        SyntaxError,
        TypeError,
        KeyError,
    ):
        return [*found, "unknown to Pillow"]
    if mode == "CMYK":
        found.append("CMYK")
    if mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;"):
        found.append("grayscale")
    if mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        found.append("transparent")
    if frames > 1:
        found.append("several pictures")
    if orientation in range(2, 9):
        found.append("EXIF-rotated")
    return found


def bad_image(message, data_set):
    """The image that DALI's error is about: a path, "an image" if it could not be found, None if it is about none.

    DALI names the file that cannot be read and most images that cannot be decoded, but for example not one whose
    header it cannot make out. For those the headers of all images are read, then all images decoded, until one fails or
    SEARCH_S seconds are over.
    """
    named = re.search(r"(?:Failed to decode sample #\d+ : |File mapping failed: |Could not open file )(.+)", message)
    if named:
        return named[1].strip()
    if "nvidia.dali.fn.decoders." not in message:
        return None
    deadline = monotonic() + SEARCH_S
    for can_be_used in (has_header, lambda encoded: decode(encoded) is None):
        try:
            for encoded, source in _undecoded(data_set):
                if not can_be_used(encoded):
                    return source
                if monotonic() > deadline:
                    return "an image"
        except RuntimeError as e:  # of the reader, which names the file
            return bad_image(str(e), data_set)
    return None


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


def write_fix_list(report, path):
    """Write the failing paths, one a line, for --skip-list."""
    Path(path).write_text("".join(f"{name}\n" for name in report.failing), encoding="utf-8")


def show(report, console=None):
    """Print the report."""
    from rich.console import Console  # a training run, which imports this module for bad_image, needs no tables
    from rich.table import Table

    console = console or Console()
    odd = Table("odd, training goes on", "count")
    odd.add_column("for example", overflow="fold")
    for kind, names in sorted(report.odd.items()):
        odd.add_row(kind, str(len(names)), names[0])
    if odd.row_count:
        console.print(odd)
    for name, why in list(report.failing.items())[:SHOWN]:
        console.print(f"fails: {name} {why}", soft_wrap=True, markup=False, highlight=False)
    if len(report.failing) > SHOWN:
        console.print(f"fails: {len(report.failing) - SHOWN} more: see them with --fix-list FILE")
    for error in report.errors:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
    verdict = "training would fail" if report.training_would_fail else "training can read them all"
    console.print(f"{report.images} images, {len(report.failing)} cannot be decoded: {verdict}", highlight=False)
