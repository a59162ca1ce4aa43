"""`python -m paddle_resnet.dataset verify`: find all images on which training with CPU decoders would fail.

Worker processes import this module instead of dataset.py, because this module does not import Paddle.

The file types that docs/data.md lists as accepted or rejected were tested with DALI 2.4 on the CPU, using 850 files:
test images from Pillow, libjpeg-turbo and DALI, and images from recurser/exif-orientation-examples.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import multiprocessing
import os
import signal
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from nvidia import nvimgcodec
from nvidia.dali import pipeline_def
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paddle_resnet.data import bad_images, classes, layout
from paddle_resnet.data.formats import FORMATS, RECORDS, folder, read_image
from paddle_resnet.data.images import Image as ListedImage
from paddle_resnet.data.images import is_utf8
from paddle_resnet.data.root import DataRoot
from paddle_resnet.data.skip_list import skip_list_line
from paddle_resnet.serving import preprocessing
from paddle_resnet.utils import outputs, signals
from paddle_resnet.utils.errors import UsageError, counted, printable
from paddle_resnet.utils.mode import Mode, RunScope
from paddle_resnet.utils.numbers import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterator

    Task = tuple[ListedImage, int | None]  # image, number of classes or None
    Result = tuple[str | None, list[str], bytes | None, float | None]  # result of check()

# {file suffix: nvImageCodec's name for the expected codec}
CODEC_OF_SUFFIX = {
    **{".jpg": "jpeg", ".jpeg": "jpeg", ".jfif": "jpeg", ".png": "png", ".bmp": "bmp"},
    **{".tif": "tiff", ".tiff": "tiff", ".webp": "webp"},
}
DALI_BATCH = 64
SHOWN = 50  # maximum number of failing images, and of unusual images of each kind, to print
IN_BOTH_SPLITS, IN_TWO_CLASSES = "the same file in train and val", "the same file in two classes"
# Processes are spawned instead of forked, because a fork does not copy DALI's threads.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class Report:
    """The result of verify().

    Attributes:
        images: number of images that were checked.
        errors: [message], where each message states why training cannot use the data set.
        failing: {name of an image (Image.name): reason why training would fail on the image}.
        unusual: {kind: [name or text]}, for properties that do not stop training, but may be unintended.
        ignored: [path below root] of entries that training ignores, see folder.ignored_files.
    """

    images: int = 0
    errors: list[str] = field(default_factory=list)
    failing: dict[str, str] = field(default_factory=dict)
    unusual: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    ignored: list[str] = field(default_factory=list)

    @property
    def training_would_fail(self) -> bool:
        return bool(self.errors or self.failing)


def verify(
    root: str | Path,
    num_of_class: int | None = None,
    allow_outside: bool = False,
    run_scope: RunScope = RunScope.TRAIN_EVAL,
    allow_empty: bool = False,
    label_offset: int | str = AUTO,
    allow_one_class: bool = False,
) -> Report:
    """Decode every image of the splits on all cores, with the CPU decoders that training uses.

    Record files are read twice: record by record to find damaged records, and by DALI in a separate process. DALI must
    return the same images and labels in the same order as reading record by record. DALI does not read an LMDB with
    damaged records, because its reader cannot skip them.

    Args:
        root: folder of a data set in any format, with a train split, a val split or both.
        num_of_class: number of network outputs, or None for any number.
        allow_outside: whether file lists may contain files outside root.
        run_scope: scope of the training run, which determines the required splits.
        allow_empty: whether class folders in train/ may be empty.
        label_offset: value of --label-offset.
        allow_one_class: whether all training images may belong to one class.
    Returns:
        Report of all checks.
    Raises:
        UsageError: root is not a folder, or contains no split.
    """
    root = str(root)
    report = Report()
    tasks, splits = [], []
    needed = {Mode.TRAIN: run_scope.trains, Mode.EVAL: run_scope.evaluates}
    there = layout.splits(root)
    data = DataRoot(root, AUTO, allow_outside, label_offset)
    for mode in (mode for mode in Mode if mode in there or needed[mode]):
        try:
            data.open(mode, num_of_class, 0, allow_empty, allow_one_class=allow_one_class)
        except UsageError as e:
            report.errors.append(str(e))
        try:
            data_format = data.format(mode)
            numbers, images = data.images(mode, num_of_class)
        except UsageError as e:
            # Check the images despite the error, whose cause can be, for example, a broken link or a class that exists
            # only in val.
            report.errors += [str(e)] if str(e) not in report.errors else []
            data_format, images = "folder", _images_of_folders(root, mode)
            limit = None
        else:
            limit = len(numbers.classes) if numbers.classes else num_of_class
        splits.append((mode, data_format, images))
        tasks += [(image, limit) for image in images]
        if data_format == "folder":
            report.ignored += folder.ignored_files(root, mode)
    _compare_lists([images for _, data_format, images in splits if data_format == "filelist"], report)
    report.images = len(tasks)
    results = check_all(tasks)
    copies = defaultdict(list)  # {digest: [(mode, label, name)]}
    for mode, data_format, images in splits:
        checked = list(itertools.islice(results, len(images)))
        for image, (failure, kinds, digest, label) in zip(images, checked, strict=True):
            if failure is not None:
                report.failing[image.name] = failure
            for kind in kinds:
                report.unusual[kind].append(image.name)
            if digest is not None:
                copies[digest].append((mode, label, image.name))
        if data_format in RECORDS:
            _compare_with_dali(root, mode, data_format, images, checked, report)
    for same in copies.values():
        modes, labels, names = map(list, zip(*same, strict=True))
        for kind, differ in ((IN_BOTH_SPLITS, modes), (IN_TWO_CLASSES, labels)):
            if len(set(differ)) > 1:
                report.unusual[kind].append(" = ".join(names))
    return report


def check_all(tasks: list[Task], workers: int | None = None) -> Iterator[Result]:
    """Yield the results of check() for a list of tasks, in order. `workers` is the number of processes, by default the
    number of cores, but at most one per 16 tasks."""
    return _in_processes(check, tasks, workers)


def failures(tasks: list[Task], workers: int | None = None) -> Iterator[str | None]:
    """Yield only the first item of each result of check_all, in less time."""
    return _in_processes(_failure, tasks, workers)


def _in_processes(function, tasks, workers):
    count = _process_count(len(tasks), workers or len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(count, _CONTEXT, _start_worker, (os.getpid(),)) as pool:
        with signals.deferred():
            results = pool.map(function, tasks, chunksize=16)
        yield from results


def _process_count(tasks, most):
    return max(1, min(most, tasks // 16))


def _images_of_folders(root, mode):
    """List the images in class folders, for a split that DataRoot.images rejects. Folders that cannot be listed are
    omitted. The label of an image is the index of its class folder among the folders of both splits."""
    paths = {mode: Path(folder.split_folder(root, mode)) for mode in Mode}
    folders = {mode: _listed_folders(path) for mode, path in paths.items()}
    names = sorted({name for listed in folders.values() for name, _ in listed})
    return [
        ListedImage(f"{paths[mode].name}/{label}/{name}", str(paths[mode] / label / name), names.index(label))
        for label, (images, *_) in folders[mode]
        for name in images
    ]


def _listed_folders(path):
    """Return [(name of a class folder, result of folder.image_names)] for all folders that can be listed."""
    listed = []
    with contextlib.suppress(UsageError):  # report.errors already contains the error
        for label in folder.class_folders(path):
            with contextlib.suppress(UsageError):
                listed.append((label, folder.image_names(path / label)))
    return listed


def _compare_lists(lists, report):
    """Report folders whose images have different labels in train.txt and val.txt."""
    labels_of = []
    for images in lists:
        labels = defaultdict(set)
        for image in images:
            labels[os.path.basename(os.path.dirname(image.name))].add(image.label)
        labels_of.append(labels)
    for name in sorted(set.intersection(*map(set, labels_of))) if len(labels_of) == 2 else ():
        train, val = (labels[name] for labels in labels_of)
        if len(train) == len(val) == 1 and train != val:
            report.unusual["folder with a different label in val.txt"].append(
                f"{name} is {train.pop()} and {val.pop()}"
            )


def _compare_with_dali(root, mode, data_format, images, checked, report):
    """Read record files with DALI, and compare the images and labels with the results of check(). Images for which
    check() failed are skipped. If check() failed for an image and the format cannot skip records, nothing is compared.
    """
    if not getattr(FORMATS[data_format], "CAN_SKIP", True) and any(failure for failure, *_ in checked):
        return
    pairs = zip(images, checked, strict=True)
    kept = [(image.name, digest, label) for image, (failure, _, digest, label) in pairs if failure is None]
    skip = frozenset(image.name for image, (failure, *_) in zip(images, checked, strict=True) if failure is not None)
    if not kept:
        return
    expected = [(digest, label) for _, digest, label in kept]
    arguments = root, data_format, mode, skip, expected, images[0].label_offset
    differing, problem = _in_a_process(_read_with_dali, *arguments)
    for place in differing:
        report.failing[kept[place][0]] = "has a different image or label when DALI reads it"
    if problem is not None:
        report.errors.append(f"{root}: DALI cannot read the {mode.value} split ({problem}); write it again")


def _in_a_process(function, *arguments):
    """Call a function in a new process, and return its result, or ([], reason) if the process exits without a
    result."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_send_result, args=(sender, function, arguments), daemon=True)
    with signals.deferred():
        process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        result = [], f"its process exited with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    process.join()
    return result


def _send_result(sender, function, arguments):
    _keep_quiet()
    sender.send(function(*arguments))


def _read_with_dali(root, data_format, mode, skip, expected, label_offset=0):
    """Compare the images that DALI reads with the expected images, in order.

    Args:
        expected: [(digest, label)] of all images.
        label_offset: number to subtract from the stored labels.
    Returns:
        ([index of each image that differs], problem or None)
    """
    differing, place = [], 0

    @pipeline_def(batch_size=DALI_BATCH, num_threads=1, device_id=None)
    def read():
        return data_set.read("Reader", 0, 1, shuffle=False)

    try:
        opened = DataRoot(root, data_format, label_offset=label_offset, skip=skip)
        data_set = opened.open(mode, None, 0, allow_one_class=True)
        if data_set.size != len(expected):
            raise UsageError(f"{data_set.size} images instead of {len(expected)}")
        pipeline = read()
        while place < len(expected):
            encoded, labels = pipeline.run()
            # Ignore the padding of the last batch.
            for data, label in itertools.islice(zip(encoded, labels, strict=True), len(expected) - place):
                if (_digest(np.asarray(data).tobytes()), np.asarray(label).item()) != expected[place]:
                    differing.append(place)
                place += 1
    except (UsageError, RuntimeError) as e:
        return differing, bad_images.reader_problem(str(e)) or str(e).partition("\n")[0]
    return differing, None


def _digest(data):
    return hashlib.blake2b(data, digest_size=16).digest()


def _start_worker(parent):
    _keep_quiet()
    signals.die_with_parent(parent)


def _keep_quiet():
    """Silence the decoders' messages about damaged files, because the report lists these files."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def check(task: Task) -> Result:
    """Check one image by decoding it.

    Args:
        task: (Image, number of classes or None)
    Returns:
        (reason why training fails on the image or None, [unusual properties], digest of the file's content or None,
        label or None)
    Raises:
        OSError: too many files are open.
    """
    failure, data, label = _decode(task)
    if data is None:
        return failure, [], None, None
    if not data:
        return failure, ["0 bytes"], None, label
    return failure, _unusual(task[0], data), _digest(data), label


def _failure(task):
    return _decode(task)[0]


def _decode(task):
    """Read and decode one image. Return (reason why training fails on the image or None, content of the file or None,
    label or None)."""
    image, num_of_class = task
    if not is_utf8(image.path):
        return "has a name that is not valid UTF-8", None, None
    try:
        data, label = read_image(image)
    except OSError as e:
        if e.errno == errno.EMFILE:  # too many open files; the image itself may be valid
            raise
        return f"cannot be read ({e.strerror})", None, None
    except UsageError as e:
        return f"cannot be used: {e}", None, None
    failure = bad_images.decode(data, image.path if image.kind is None else None)
    if failure is None and not classes.is_class(label, num_of_class):
        allowed = "a whole number from 0" if num_of_class is None else f"a whole number from 0 to {num_of_class - 1}"
        failure = f"has label {label:.15g}, which is not {allowed}"
    return failure, data, label


def _unusual(image, data):
    kinds = []
    stream = nvimgcodec.CodeStream(data)
    try:
        codec, precision = stream.codec_name, stream.precision
    except RuntimeError:
        codec, precision = None, 8
    if image.kind is None and codec is not None and codec != CODEC_OF_SUFFIX.get(Path(image.path).suffix.lower()):
        kinds.append(f"{codec} with a different extension")
    if precision > 8:
        kinds.append(f"{precision} bits per channel")
    if codec == "jpeg" and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        kinds.append("truncated")  # no end-of-image marker follows the last start-of-scan marker
    try:
        with Image.open(io.BytesIO(data)) as picture:
            mode, frames = picture.mode, getattr(picture, "n_frames", 1)
            is_turned = preprocessing.orientation(picture) != 1
    except Exception:  # Pillow's plugins raise many kinds of exceptions for damaged files
        return [*kinds, "unknown to Pillow"]
    if mode == "CMYK":
        kinds.append("CMYK")
    if mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;"):
        kinds.append("grayscale")
    if mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        kinds.append("transparent")
    if frames > 1:
        kinds.append("several pictures")
    if is_turned:
        kinds.append("EXIF-rotated")
    return kinds


def write_fix_list(report: Report, path: str | Path) -> None:
    """Write the names of the failing images, one per line, in the format of --skip-list. Raise OSError if the file
    cannot be written."""
    with outputs.replaced(path) as partial:
        partial.write_text("".join(map(skip_list_line, report.failing)), encoding="utf-8")


def show(report: Report, console: Console | None = None) -> None:
    """Print a report."""
    console = console or Console()
    unusual = Table()
    unusual.add_column("unusual", no_wrap=True)
    unusual.add_column("count")
    unusual.add_column("fail")
    unusual.add_column("example", overflow="fold")
    for kind, names in sorted(report.unusual.items()):
        unusual.add_row(
            kind, str(len(names)), str(sum(name in report.failing for name in names)), Text(printable(names[0]))
        )
    if unusual.row_count:
        console.print(unusual)
    for kind in (IN_BOTH_SPLITS, IN_TWO_CLASSES):
        for names in report.unusual.get(kind, [])[:SHOWN]:
            console.print(printable(f"{kind}: {names}"), soft_wrap=True, markup=False, highlight=False)
    for name, why in list(report.failing.items())[:SHOWN]:
        console.print(printable(f"fails: {name} {why}"), soft_wrap=True, markup=False, highlight=False)
    if len(report.failing) > SHOWN:
        console.print(f"fails: {counted(len(report.failing) - SHOWN, 'more image')}; use --fix-list FILE to list all")
    for error in report.errors:
        console.print(printable(f"error: {error}"), soft_wrap=True, markup=False)
    ignored = f", {counted(len(report.ignored), 'entry', 'entries')} ignored" if report.ignored else ""
    if report.training_would_fail:
        outcome = "training would fail"
    else:
        outcome = f"training can read all {'other ' if ignored else ''}images"
    console.print(
        f"{counted(report.images, 'image')}, {len(report.failing)} cannot be used{ignored}: {outcome}",
        soft_wrap=True,
        highlight=False,
    )
