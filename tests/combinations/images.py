"""Write the data sets of the combination tests: the same tiny images in each storage format."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import data_files
import numpy as np
from PIL import Image

from paddle_resnet.data.formats import SHARDED
from paddle_resnet.tools import workers

TRAIN, VAL = (20, 13, 7), (5, 4, 3)  # images of each class and process
FORMATS = ("recordio", "tfrecord", "lmdb", "webdataset", "parquet")


def write(root, ranks=1):
    """Write a folder for each --image-root in axes.py, with images for a job of several processes."""
    root = Path(root)
    _write_folder(root / "folder", len(TRAIN), ranks)
    (root / "skip.txt").write_text("train/class0/00.jpg\nval/class1/00.jpg\n")
    shutil.copytree(root / "folder", root / "empty_class")
    for split in ("train", "val"):
        (root / "empty_class" / split / "class3").mkdir()
    _write_folder(root / "one_class", 1, ranks)
    for name, first, is_outside in (("filelist", 0, False), ("outside", 0, True), ("from_1", 1, False)):
        _write_lists(root / "folder", root / name, first, is_outside)
    _convert(root)
    _write_tfrecord_from_1(root / "folder", root / "tfrecord_from_1")


def _write_folder(root, classes, factor):
    random = np.random.RandomState(0)
    for split, counts in (("train", TRAIN), ("val", VAL)):
        for label, count in enumerate(counts[:classes]):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count * factor):
                height, width = random.randint(30, 44, 2)
                pixels = random.randint(0, 100, (height, width, 3))
                pixels[:, :, label] += np.linspace(20, 120, width).astype(int)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02d}.jpg", quality=90)


def _images(folder, split):
    """Return [(path, label)] of the images of a split."""
    paths = sorted((folder / split).glob("*/*.jpg"))
    return [(path, int(path.parent.name.removeprefix("class"))) for path in paths]


def _write_lists(folder, root, first, is_outside):
    root.mkdir()
    for split in ("train", "val"):
        if not is_outside:
            shutil.copytree(folder / split, root / split)
        names = ((path if is_outside else path.relative_to(folder), label) for path, label in _images(folder, split))
        (root / f"{split}.txt").write_text("".join(f"{path} {label + first}\n" for path, label in names))


def _convert(root):
    """Write all record formats. Threads replace the worker processes, which start slowly."""
    replaced = workers.ProcessPoolExecutor, workers.signals.die_with_parent
    workers.ProcessPoolExecutor = lambda count, _, **options: ThreadPoolExecutor(count, **options)
    workers.signals.die_with_parent = lambda parent: None
    try:
        for name in FORMATS:
            data_files.write(root / "folder", root / name, name, 2)
    finally:
        workers.ProcessPoolExecutor, workers.signals.die_with_parent = replaced


def _write_tfrecord_from_1(folder, root):
    """Write TFRecords with labels from 1, like those of ImageNet."""
    root.mkdir()
    for split in ("train", "val"):
        with SHARDED["tfrecord"](str(root / f"{split}-00000-of-00001")) as write:
            for i, (path, label) in enumerate(_images(folder, split)):
                write(i, path.read_bytes(), "jpg", label + 1)
