"""`python -m paddle_resnet.dataset convert|import|index`: write record files, class folders, or indexes for existing
record files. workers.py contains the worker processes; tools/sources/ lists the images of an import.

If a conversion is interrupted, repeating the command resumes it. For TFRecord and WebDataset, each worker writes entire
shards atomically, and complete shards are kept. For RecordIO, which has one file per split, workers prepare the
images and one process writes them in order; images that have already been written are kept. In class folders, files
with the size of their images are kept. If the size or modification time of a source file has changed since the
conversion began, all images are written again. If a record file of a complete conversion is missing or has a different
size, this record file is written again.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_resnet.data import classes as class_checks
from paddle_resnet.data import indexes, layout, sniffer, split_names
from paddle_resnet.data import manifest as manifests
from paddle_resnet.data.formats import INDEXED, RECORDS, SHARDED, SINGLE_FILE
from paddle_resnet.data.images import Image, some
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools.workers import BLOCK, Workers, prepare_block, write_files, write_shard
from paddle_resnet.utils import locks, logger, outputs
from paddle_resnet.utils.errors import UsageError, command, counted
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

Progress = Callable[[int, int], object]  # called with (number of finished images, total number of images)

RECORD_FORMATS = (*SHARDED, *SINGLE_FILE)
FOLDER = "folder"  # class folders
FORMATS = (*RECORD_FORMATS, FOLDER)
IMAGES_PER_SHARD = 2000
QUALITY = 95  # default quality of JPEG files
# Seed of the random order in which training images are written. Because the stored order is random, a small shuffle
# buffer suffices in training.
ORDER_SEED = 0
_LOCK = ".lock"
# {key of convert.json: name of its value in messages, if this is not the flag with the name of the key}
_DIFFERING = {
    "splits": "different images",
    "classes_sha256": "different classes",
    "command": "a different command",
    "kind": "a different --as",
    "format": "a different --to",
}
NAMED = 10  # maximum number of unusable images or record files to list in a message


def parse_format(text: str) -> str:
    """Return the argument of --to unchanged. Raise ArgumentTypeError for lmdb, which can no longer be written."""
    if text == "lmdb":
        raise argparse.ArgumentTypeError("lmdb: LMDB files can be read, but no longer written; use webdataset")
    return text


def convert(
    source: str | Path,
    output: str | Path,
    to: str,
    shards: int | None = None,
    resize_short: int | None = None,
    quality: int = QUALITY,
    workers: int | None = None,
    progress: Progress | None = None,
    skip_list: str | None = None,
    allow_outside: bool = False,
    check: Progress | None = None,
    label_offset: int | str = AUTO,
    images_per_shard: int = IMAGES_PER_SHARD,
) -> dict[str, int]:
    """Convert all splits of a data set to a record format.

    The labels are those that training would use, so they start at 0. If the classes have names, the names are written
    to output/classes.txt. Training images are written in random order, and validation images in stored order.

    Args:
        source: folder of a data set in any format (--image-root).
        output: folder to create, which can then be used as --image-root.
        to: record format to write, one of RECORD_FORMATS.
        shards: number of training shards, by default one per images_per_shard images. Shards of the validation split
            contain about as many images as those of the training split.
        resize_short: maximum length of an image's shorter side in pixels. Larger images are shrunk and stored upright
            as RGB JPEG files. All other image files are copied unchanged.
        quality: JPEG quality of the shrunk images, 1 to 100.
        workers: number of processes, by default the number of cores.
        progress: function to call with (number of converted images, total number of images).
        skip_list: file that lists the images to omit (--skip-list).
        allow_outside: whether file lists and skip_list may contain files outside source.
        label_offset: value of --label-offset.
        check: progress function for the check that decodes all images before any file is written, or None to skip this
            check. A resumed conversion repeats the check only if source files have changed.
        images_per_shard: see shards.
    Returns:
        {split: number of images}.
    Raises:
        UsageError: the source, a class name or an image is unusable; the output folder contains other files or a
            different conversion; or `shards` exceeds the number of training images or is set for a format without
            shards.
        OSError: the output cannot be written.
    """
    splits, classes = _list_source(DataRoot(source, AUTO, allow_outside, label_offset, skip_list))
    options = {"progress": progress, "check": check, "images_per_shard": images_per_shard}
    return write(source, splits, classes, output, to, shards, resize_short, quality, workers, **options)


def write(
    source: str | Path,
    splits: dict[str, list[Image]],
    classes: list[str] | None,
    output: str | Path,
    to: str,
    shards: int | None = None,
    resize_short: int | None = None,
    quality: int = QUALITY,
    workers: int | None = None,
    progress: Progress | None = None,
    check: Progress | None = None,
    description: dict[str, Any] | None = None,
    remedy: str | None = None,
    images_per_shard: int = IMAGES_PER_SHARD,
) -> dict[str, int]:
    """Write listed images as record files or class folders.

    Args:
        source: path of the source, for messages.
        splits: {split: [Image]} in the order in which the images are written.
        classes: class names in label order, or None if the classes have only numbers.
        output, shards, resize_short, quality, workers, progress, check, images_per_shard: see convert().
        to: one of FORMATS. For FOLDER, resize_short must be None.
        description: further entries of convert.json, which must not change when the command is repeated.
        remedy: remedy in the error message of the check for unusable images; by default, to add --skip-list.
    Returns, Raises:
        see convert().
    """
    offsets = {image.label_offset for images in splits.values() for image in images}
    if to not in SHARDED and shards is not None:
        stored_as = "class folders have no shards" if to == FOLDER else f"{to} has one file per split"
        raise UsageError(f"--shards {shards}: {stored_as}; remove --shards")
    counts = {split: len(images) for split, images in splits.items()}
    largest = counts.get("train", counts.get("val"))
    if shards is not None and shards > largest:
        raise UsageError(f"--shards {shards}: {source} has only {counted(largest, 'image')}; use a smaller number")

    def shard_count(count):
        if to not in SHARDED:
            return 1
        return -(-count * shards // largest) if shards else -(-count // images_per_shard)

    manifest = {
        **(description or {}),
        "format": to,
        "shards": {split: shard_count(count) for split, count in counts.items()},
        "resize_short": resize_short,
        "quality": quality if resize_short else None,
        "label_offset": max(offsets) or None,  # None for 0, because older manifests lack this key
        "splits": {
            split: {"images": len(images), "sha256": _digest(images), "files_sha256": _digest_of_files(images)}
            for split, images in splits.items()
        },
    }
    complete = _continued(output, manifest)
    is_changed = complete is not None and _is_changed(output, manifest)
    damaged = _damaged(output) if complete and not is_changed else []
    # Writing class folders again adds missing images and keeps all others.
    if complete and not is_changed and not damaged and to != FOLDER:
        return counts
    if any("\n" in name or "\r" in name for name in classes or []):
        raise UsageError(f"{source}: a class name contains a line break; rename the class")
    if complete is None or is_changed:
        if check is not None:
            listed = [image for images in splits.values() for image in images]
            _check_decodable(source, listed, workers, check, remedy)
        os.makedirs(output, exist_ok=True)
        if is_changed:
            logger.warn(
                f"--output {output}: files in {source} have changed since the conversion began, so all images are "
                "converted again; do not change files during a conversion"
            )
            _remove_written(output, to)
        _write_manifest(output, manifest, complete=False)
    if damaged:
        names = ", ".join(map(os.path.basename, damaged[:NAMED]))
        logger.warn(
            f"--output {output}: record files that are missing or damaged ({names}) are written again; check the disk"
        )
        _remove(output, damaged, to)
    if classes is not None:
        indexes.write_file(os.path.join(output, "classes.txt"), "".join(f"{name}\n" for name in classes).encode())
    total = sum(counts.values())
    with Workers(workers or len(os.sched_getaffinity(0)), resize_short, quality) as pool:
        done = 0
        for split, images in splits.items():
            report = partial(_report_progress, progress, done, total)
            if to == FOLDER:
                _write_folders(output, split, images, classes, pool, report)
            elif to in SINGLE_FILE:
                _write_single_file(to, output, split, images, pool, report)
            else:
                _write_shards(to, output, split, images, manifest["shards"][split], pool, report)
            done += len(images)
    for name in _partial(output):
        os.unlink(os.path.join(output, name))
    sizes = {os.path.basename(path): _size(path) for path in _shards(output, to)}
    _write_manifest(output, manifest, complete=True, bytes=sizes)
    return counts


@contextlib.contextmanager
def locked(output: str | Path) -> Iterator[None]:
    """Create the output folder, and lock it while the `with` block runs, so that only one process converts to this
    folder.

    Raises:
        UsageError: another process is converting to the folder, or the folder is not writable.
    """
    is_new = not os.path.lexists(output)
    with outputs.writing("--output", output):
        os.makedirs(output, exist_ok=True)
    try:
        with locks.held(os.path.join(output, _LOCK), f"--output {output}", logger.warn):
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # a folder that contains files is kept
                os.rmdir(output)


def build_indexes(image_root: str) -> tuple[int, int]:
    """Create the missing index files (see indexes.index_paths) of the TFRecord, RecordIO and WebDataset files in a
    folder.

    Returns:
        (number of index files created, number of index files that already existed).
    Raises:
        UsageError: the path is not a folder, or the folder contains no record files in these formats; or a file is
            damaged, an index does not match its record file, or an index cannot be written.
    """
    if not os.path.isdir(image_root):
        raise UsageError(f"{image_root}: not a folder; use the folder that contains the shards")
    created, existing = 0, 0
    for data_format, kind in INDEXED.items():
        for mode in Mode:
            for shard in RECORDS[data_format].detect(image_root, mode):
                is_new = indexes.existing_index(shard) is None
                created, existing = created + is_new, existing + (not is_new)
                indexes.open_index(shard, kind)
    if created + existing == 0:
        raise UsageError(
            f"{image_root}: contains no record files with names such as train.rec, train-00000-of-00010 or "
            "train-000000.tar; rename the files, or use a different folder"
        )
    return created, existing


def _list_source(root):
    """Return ({split: [Image]}, class names or None) of a DataRoot. Training images are in random order.

    Raises:
        UsageError: the data set or the skip list cannot be used, or a split has no images.
    """
    source = root.image_root
    splits, classes = {}, None
    for mode in layout.splits(source):
        numbers, images = root.images(mode)
        names = numbers.classes
        classes = classes or names
        images = root.kept(images)
        if not images:
            remedy = sniffer.advice(source) or "add images, or shorten --skip-list"
            raise UsageError(f"{source}: no {mode.value} images to convert; {remedy}")
        if root.format(mode) == "folder":
            labels = [image.label for image in images]
            class_checks.check_classes(source, mode, "folder", labels, names, True, allow_one_class=True)
        if mode is Mode.TRAIN:
            images = shuffled(images)
        splits[mode.value] = images
    return splits, classes


def shuffled(images: Sequence[Image]) -> list[Image]:
    """Return the images in the random order in which training images are written to record files."""
    return [images[i] for i in np.random.RandomState(ORDER_SEED).permutation(len(images)).tolist()]


def _digest(images):
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.name}\0{image.label}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _digest_of_files(images):
    """Return a digest of the sizes and modification times of the files that contain the images."""
    digest = hashlib.sha256()
    for path in dict.fromkeys(image.path for image in images):
        for file in (path, os.path.join(path, "data.mdb")):
            with contextlib.suppress(OSError):  # a later read of the image reports this error
                status = os.stat(file)
                digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _is_changed(output, manifest):
    """Return whether any source file has changed since the conversion to the output folder began."""
    for split, recorded in manifests.read(output)["splits"].items():
        if "files_sha256" not in recorded:
            logger.warn(
                f"--output {output}: converted by an older version, so file changes cannot be detected; if images "
                "have changed, remove the folder and convert again"
            )
            return False
        if recorded["files_sha256"] != manifest["splits"][split]["files_sha256"]:
            return True
    return False


def _shards(output, to):
    """Return the paths of the record files that this module has written."""
    found = []
    for mode in Mode if to != FOLDER else ():
        for name in sorted(os.listdir(output)):
            match = split_names.match(RECORDS[to].NAMES, name, mode)
            if match and match["set"] in (mode.value, f"{mode.value}-"):
                found.append(os.path.join(output, name))
    return found


def _size(path):
    """Return the size of a record file in bytes, or None if the file does not exist."""
    path = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
    return os.path.getsize(path) if os.path.isfile(path) else None


def _damaged(output):
    """Return the paths of the record files of a complete conversion that are missing or do not have their recorded
    sizes."""
    sizes = manifests.read(output).get("bytes", {})  # older versions did not store sizes
    return [path for name, size in sizes.items() if _size(path := os.path.join(output, name)) != size]


def _remove_written(output, to):
    if to == FOLDER:
        _remove(output, filter(os.path.isdir, (os.path.join(output, mode.value) for mode in Mode)), to)
        return
    _remove(output, [*_shards(output, to), *(os.path.join(output, name) for name in _partial(output))], to)


def _remove(output, paths, to):
    """Mark a conversion as incomplete in convert.json, and remove `paths`: class folders, or record files and their
    indexes."""
    _write_manifest(output, manifests.read(output), complete=False)
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if to in INDEXED:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(indexes.index_path(path))


def _write_manifest(output, manifest, **entries):
    text = json.dumps(manifest | entries, indent=1) + "\n"
    indexes.write_file(os.path.join(output, manifests.MANIFEST), text.encode())


def _check_decodable(source, images, workers, progress, remedy=None):
    from paddle_resnet.tools import verify  # imported here, because verify imports DALI

    failing = []
    results = verify.failures([(image, None) for image in images], workers)
    for done, (image, failure) in enumerate(zip(images, results, strict=True), 1):
        if failure is not None:
            failing.append(f"{image.name} {failure}")
        if done % BLOCK == 0 or done == len(images):
            progress(done, len(images))
    if failing:
        fix = f"run `{command('dataset', 'verify', source, '--fix-list', 'bad.txt')}` and add --skip-list bad.txt"
        raise UsageError(
            f"{source}: {len(failing)} of {len(images)} images cannot be used: {some(failing, NAMED)}; "
            f"repair them, or {remedy or fix}"
        )


def _continued(output, manifest):
    """Return whether the conversion in the output folder is complete, or None if it has not begun. Raise UsageError if
    the folder contains a different conversion or other files."""
    recorded = manifests.read(output)
    if recorded is not None:
        # The default number of shards depends on the images, so different images are reported first.
        entries = manifest | {"splits": _images_of(manifest)}
        for key, value in sorted(entries.items(), key=lambda entry: entry[0] == "shards"):
            if (_images_of(recorded) if key == "splits" else recorded.get(key)) != value:
                what = _DIFFERING.get(key) or f"a different --{key.replace('_', '-')}"
                raise UsageError(
                    f"--output {output}: contains a conversion with {what} (see {manifests.MANIFEST}); remove the "
                    "folder, choose a different folder, or repeat the original command"
                )
        return recorded["complete"]
    if os.path.exists(output) and (not os.path.isdir(output) or set(os.listdir(output)) - {_LOCK, *_partial(output)}):
        raise UsageError(
            f"--output {output}: exists, but contains no conversion; remove {output} or choose a different folder"
        )
    return None


def _images_of(manifest):
    return {split: (recorded["images"], recorded.get("sha256")) for split, recorded in manifest["splits"].items()}


def _partial(output):
    """Return the names of incomplete files that a killed conversion left in the output folder."""
    return [name for name in os.listdir(output) if name.endswith(".partial")]


def _report_progress(progress, before, total, done):
    if progress is not None:
        progress(before + done, total)


def _write_shards(to, output, split, images, count, pool, report):
    pending, kept, start = set(), 0, pool.images.value
    for k in range(count):
        first, end = len(images) * k // count, len(images) * (k + 1) // count
        name = {"tfrecord": f"{split}-{k:05d}-of-{count:05d}", "webdataset": f"{split}-{k:06d}.tar"}[to]
        path = os.path.join(output, name)
        if os.path.exists(path):
            kept += end - first
        else:
            pending.add(pool.submit(write_shard, to, path, first, images[first:end]))
    while pending:
        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
        report(kept + pool.images.value - start)
    report(len(images))


def _write_folders(output, split, images, classes, pool, report):
    """Write SPLIT/CLASS/FILE for each image. Image files are linked, see split.link."""
    for name in classes:
        os.makedirs(os.path.join(output, split, name), exist_ok=True)
    taken, tasks = set(), []
    for number, image in enumerate(images):
        name = os.path.basename(image.name)
        place = os.path.join(split, classes[image.label], name)
        if place in taken:  # images from different folders of the source have the same name and the same class
            place = os.path.join(split, classes[image.label], f"{number:08d}_{name}")
        taken.add(place)
        tasks.append((image, os.path.join(output, place)))
    for done in itertools.accumulate(pool.map(write_files, tasks)):
        report(done)
    os.sync()  # files that were not synced could be empty after a power failure


def _write_single_file(to, output, split, images, pool, report):
    with SINGLE_FILE[to](output, split) as writer:
        report(len(writer))
        for block in pool.map(prepare_block, images[len(writer) :]):
            writer.write(block)
            report(len(writer))
        writer.finish()
