"""A miniature data set for --multi-label: images in which each class that an image has is a patch of its own color."""

import csv
import json
import struct

import numpy as np
from PIL import Image

from paddle_resnet.data.formats import recordio

CLASSES = ["blue", "bluegreen", "red"]  # one name contains another
COUNTS = {"train": 24, "val": 13}
PATCHES = [((0, 0), (0, 0, 255)), ((0, 16), (0, 255, 0)), ((16, 0), (255, 0, 0))]


def labels(split):
    """Return the classes of the images of a split, [images, 3] of 0 and 1. All 8 sets of classes occur."""
    numbers = np.arange(COUNTS[split]) % 8
    return np.stack([numbers & 1, numbers >> 1 & 1, numbers >> 2 & 1], axis=1)


def write(root, kind="csv"):
    """Write the data set, and return its folder. `kind` is "csv", "list" (CSV with a column of names), "jsonl",
    "folders" (links, without the images that have no class), "vector" or "numbers" (RecordIO)."""
    for split in COUNTS:
        rows = labels(split).tolist()
        images = root / split if kind in ("csv", "list", "jsonl") else root / "images" / split
        images.mkdir(parents=True)
        for i, row in enumerate(rows):
            pixels = np.full((32, 32, 3), 128, np.uint8)
            for has_class, ((y, x), color) in zip(row, PATCHES, strict=True):
                if has_class:
                    pixels[y : y + 16, x : x + 16] = color
            Image.fromarray(pixels).save(images / f"{i:02d}.png")
        names = [[name for name, has_class in zip(CLASSES, row, strict=True) if has_class] for row in rows]
        files = [f"{split}/{i:02d}.png" for i in range(len(rows))]
        if kind in ("csv", "list"):
            columns = [CLASSES, *rows] if kind == "csv" else [["labels"], *(["|".join(row)] for row in names)]
            with open(root / f"{split}.csv", "w", newline="") as f:
                csv.writer(f).writerows([file, *row] for file, row in zip(["image", *files], columns, strict=True))
        elif kind == "jsonl":
            lines = [{"image": file, "labels": row} for file, row in zip(files, names, strict=True)]
            (root / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        elif kind == "folders":
            for i, row in enumerate(names):
                for name in row:
                    (root / split / name).mkdir(parents=True, exist_ok=True)
                    (root / split / name / f"{i:02d}.png").symlink_to(images / f"{i:02d}.png")
        else:
            vectors = rows if kind == "vector" else [np.flatnonzero(row).tolist() or [-1] for row in rows]
            write_records(root, split, vectors, [path.read_bytes() for path in sorted(images.iterdir())])
    if kind in ("vector", "numbers"):
        (root / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return root


def write_records(root, split, rows, images):
    """Write RecordIO files. `rows` are the labels of each image: 0 or 1 for each class, or the numbers of its classes,
    [-1] for an image without a class."""
    offset, lines = 0, []
    with open(root / f"{split}.rec", "wb") as f:
        for i, (row, image) in enumerate(zip(rows, images, strict=True)):
            lines.append(f"{i}\t{offset}\n")
            head = recordio.HEAD.pack(len(row), 0, i, 0) + struct.pack(f"<{len(row)}f", *row)
            f.write(recordio.encode(head + image))
            offset = f.tell()
    (root / f"{split}.idx").write_text("".join(lines))
