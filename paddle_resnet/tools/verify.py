"""`python -m paddle_resnet.dataset verify`: find the images at which training would fail, before a run.

Separate from dataset.py because the worker processes import this module, which does not import Paddle.
"""

import hashlib
import io
import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from nvidia import nvimgcodec
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.table import Table

from paddle_resnet.data import bad_images, listing, readers, records
from utils.errors import UsageError
from utils.mode import Mode

# The codec, by nvImageCodec's name, that the suffix of a file name promises.
CODEC_OF_SUFFIX = {
    **{".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".bmp": "bmp"},
    **{".tif": "tiff", ".tiff": "tiff", ".webp": "webp"},
}
EXIF_ORIENTATION = 0x0112
SHOWN = 50  # number of failing images that are printed


@dataclass
class Report:
    """Result of verify.

    Attributes:
        images: number of images checked.
        errors: [sentence], each a reason why training cannot use the data set as a whole.
        failing: {name of an image (listing.Image.name): why training would end at it}.
        odd: {kind: [name or sentence]}, oddities that do not stop training but may not be intended.
    """

    images: int = 0
    errors: list = field(default_factory=list)
    failing: dict = field(default_factory=dict)
    odd: dict = field(default_factory=lambda: defaultdict(list))

    @property
    def training_would_fail(self):
        return bool(self.errors or self.failing)


def verify(root):
    """Decode every image of both splits with training's CPU decoders, on all cores.

    Args:
        root: folder of a data set in any format, with train, val or both.
    Returns:
        Report.
    Raises:
        UsageError: root has no split.
    """
    root = str(root)
    report = Report()
    images = []
    for mode in listing.splits(root):
        try:
            readers.open_split(root, "auto", mode, 2**31, 0)
        except UsageError as e:
            report.errors.append(str(e))
        try:
            data_format, classes, found = listing.images(root, mode)
        except UsageError as e:
            # For example a class only in val. The images can still be checked.
            report.errors += [str(e)] if str(e) not in report.errors else []
            data_format, classes, found = "folder", None, _images_of_folders(root, mode)
        images += [(mode, image, len(classes) if classes else None) for image in found]
        if data_format == "folder":
            _check_folders(root, mode, report)
    _compare_folders(root, report)
    report.images = len(images)
    digests = defaultdict(list)
    # Spawned, not forked: the threads of DALI do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _keep_quiet) as pool:
        results = pool.map(check, [(image, limit) for _, image, limit in images], chunksize=16)
        for (mode, image, _), (failure, oddities, digest) in zip(images, results, strict=True):
            if failure is not None:
                report.failing[image.name] = failure
            for kind in oddities:
                report.odd[kind].append(image.name)
            digests[digest].append((mode, image.name))
    for same in digests.values():
        if len({mode for mode, _ in same}) > 1:
            report.odd["the same file in train and val"].append(" = ".join(name for _, name in same))
    return report


def _images_of_folders(root, mode):
    folders = Path(root) / mode.value
    if not folders.is_dir():
        return []
    return [
        listing.Image(f"{mode.value}/{label}/{name}", str(folders / label / name), 0)
        for label in listing.class_folders(folders)
        for name in listing.image_files(folders / label)
    ]


def _check_folders(root, mode, report):
    """Report class folders without images, and files that training ignores."""
    folders = Path(root) / mode.value
    if not folders.is_dir():
        return
    for label in listing.class_folders(folders):
        images = set(listing.image_files(folders / label))
        if not images:
            report.odd["class folder without an image"].append(f"{mode.value}/{label}")
        others = sorted(e.name for e in os.scandir(folders / label) if e.is_file() and e.name not in images)
        if others:
            report.odd["file that is ignored for its name"] += [f"{mode.value}/{label}/{name}" for name in others]


def _compare_folders(root, report):
    folders = [Path(root) / mode.value for mode in Mode]
    if not all(folder.is_dir() for folder in folders):
        return
    train, val = (set(listing.class_folders(folder)) for folder in folders)
    for kind, labels in (("class only in train", train - val), ("class only in val", val - train)):
        if labels:
            report.odd[kind] += sorted(labels)


def _keep_quiet():
    """Silence the decoders, which print a line about each damaged file. The report names them."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def check(task):
    """Decode one image.

    Args:
        task: (listing.Image, number of classes or None)
    Returns:
        (None or why training fails at it, [kinds of oddities], digest of its bytes or None)
    """
    image, num_of_class = task
    try:
        data, label = records.read(image)
    except OSError as e:
        return f"cannot be read ({e.strerror})", [], None
    except UsageError as e:
        return f"is not an image with a label: {e}", [], None
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if not data:
        return "is empty", ["0 bytes"], None
    failure = bad_images.decode(data)
    if failure is None and num_of_class is not None and not 0 <= label < num_of_class:
        failure = f"has the label {label:g}, but there are {num_of_class} classes"
    return failure, _oddities(image, data), digest


def _oddities(image, data):
    found = []
    stream = nvimgcodec.CodeStream(data)
    try:
        codec, precision = stream.codec_name, stream.precision
    except RuntimeError:
        codec, precision = None, 8
    if image.kind is None and codec is not None and codec != CODEC_OF_SUFFIX.get(Path(image.path).suffix.lower()):
        found.append(f"{codec} under another name")
    if precision > 8:
        found.append(f"{precision} bits a channel")
    if codec == "jpeg" and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        found.append("truncated")  # no end-of-image marker after the last scan
    try:
        with Image.open(io.BytesIO(data)) as picture:
            mode, frames = picture.mode, getattr(picture, "n_frames", 1)
            orientation = picture.getexif().get(EXIF_ORIENTATION, 1)
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


def write_fix_list(report, path):
    """Write the names of the failing images, one per line, for --skip-list."""
    Path(path).write_text("".join(f"{name}\n" for name in report.failing), encoding="utf-8")


def show(report, console=None):
    """Print the report."""
    console = console or Console()
    odd = Table()
    odd.add_column("odd", no_wrap=True)
    odd.add_column("count")
    odd.add_column("fail")
    odd.add_column("for example", overflow="fold")
    for kind, names in sorted(report.odd.items()):
        odd.add_row(kind, str(len(names)), str(sum(name in report.failing for name in names)), names[0])
    if odd.row_count:
        console.print(odd)
    for name, why in list(report.failing.items())[:SHOWN]:
        console.print(f"fails: {name} {why}", soft_wrap=True, markup=False, highlight=False)
    if len(report.failing) > SHOWN:
        console.print(f"fails: {len(report.failing) - SHOWN} more: --fix-list FILE writes all")
    for error in report.errors:
        console.print(f"error: {error}", soft_wrap=True, markup=False)
    verdict = "training would fail" if report.training_would_fail else "training can read them all"
    console.print(f"{report.images} images, {len(report.failing)} cannot be decoded: {verdict}", highlight=False)
