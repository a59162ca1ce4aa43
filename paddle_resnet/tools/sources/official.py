"""Read the official splits of CUB-200, NABirds, Oxford-IIIT Pets, Oxford Flowers 102, Stanford Dogs, Tiny ImageNet and
Food-101.

All functions raise UsageError if a file is damaged or cannot be read.
"""

import json
import os
from collections import Counter

import numpy as np

from paddle_resnet.data.images import IMAGE_SUFFIXES, readable
from paddle_resnet.tools.sources.table_files import Row, read_lines
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.files import open_regular

Names = tuple[str, list[str], None]  # path of the file with the names, names in label order, no first number


def _pairs(path):
    """Return {id: (line number, value)} of a file with lines `ID VALUE`, each with a different id."""
    values = {}
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split(maxsplit=1)
        if len(cells) != 2 or cells[0] in values:
            problem = "repeats an id" if len(cells) == 2 else "is not `ID VALUE`"
            raise UsageError(f"{path}: line {number} {problem}; download it again")
        values[cells[0]] = number, cells[1].strip()
    return values


def cub(root: str) -> tuple[list[Row], Names]:
    """Read CUB-200 or NABirds: images.txt, image_class_labels.txt, train_test_split.txt and classes.txt. Return ([Row],
    (path of classes.txt, class names in label order, None)). Classes without images, such as the groups of species in
    NABirds, are left out, with a message. If several classes have the same name, their ids are added."""
    tables = {}
    for name in ("images", "image_class_labels", "train_test_split", "classes"):
        tables[name] = _pairs(os.path.join(root, f"{name}.txt"))
    path = os.path.join(root, "classes.txt")
    used = {label for _, label in tables["image_class_labels"].values()}
    name_of = {key: name for key, (_, name) in tables["classes"].items() if key in used}
    if len(name_of) < len(tables["classes"]):
        groups = counted(len(tables["classes"]) - len(name_of), "class", "classes")
        logger.info(f"{path}: {groups} without images left out")
    repeated = {name for name, count in Counter(name_of.values()).items() if count > 1}
    name_of = {key: f"{name} ({key})" if name in repeated else name for key, name in name_of.items()}
    rows = []
    for key, (number, image) in tables["images"].items():
        for name in ("image_class_labels", "train_test_split"):
            if key not in tables[name]:
                raise UsageError(f"{root}/{name}.txt: has no line for image {key}; download it again")
        line, label = tables["image_class_labels"][key]
        if label not in name_of:
            raise UsageError(
                f"{root}/image_class_labels.txt: line {line}: class {label} is not in classes.txt; download both again"
            )
        line, is_train = tables["train_test_split"][key]
        if is_train not in ("0", "1"):
            raise UsageError(f"{root}/train_test_split.txt: line {line}: expected 0 or 1; download it again")
        split = "train" if is_train == "1" else "test"
        place = f"{root}/images.txt: line {number}"
        rows.append(Row(image, name_of[label], split, place, "images"))
    return rows, (path, [*name_of.values()], None)


def pets(root: str) -> tuple[list[Row], Names]:
    """Read Oxford-IIIT Pets: annotations/trainval.txt and test.txt with `IMAGE CLASS SPECIES BREED`. The name of a
    class is the name of its images without the number. Return ([Row], (path of test.txt, class names in label order,
    None))."""
    rows, names = [], {}
    for file, split in (("trainval.txt", "train"), ("test.txt", "test")):
        path = os.path.join(root, "annotations", file)
        for number, line in enumerate(read_lines(path) if os.path.isfile(path) else [], 1):
            if line.startswith("#") or not line.strip():
                continue
            cells = line.split()
            if len(cells) != 4 or not cells[1].isdecimal():
                raise UsageError(f"{path}: line {number} is not `IMAGE CLASS SPECIES BREED`; download it again")
            name = cells[0].rpartition("_")[0]
            if names.setdefault(int(cells[1]), name) != name:
                raise UsageError(
                    f"{path}: line {number}: class {cells[1]} has the names {names[int(cells[1])]} and {name}; "
                    "download it again"
                )
            rows.append(Row(cells[0], name, split, f"{path}: line {number}", "images"))
    return rows, (path, [names[number] for number in sorted(names)], None)


def flowers(root: str) -> tuple[list[Row], None]:
    """Read Oxford Flowers 102: imagelabels.mat with labels from 1, and setid.mat with the numbers of the images of each
    split. Return ([Row] with labels from 0, None)."""
    (labels,) = _variables(os.path.join(root, "imagelabels.mat"), labels=int)
    path = os.path.join(root, "setid.mat")
    parts = _variables(path, trnid=int, valid=int, tstid=int)
    rows = []
    for numbers, split in zip(parts, ("train", "val", "test"), strict=True):
        for number in numbers:
            if not 1 <= number <= len(labels):
                raise UsageError(f"{path}: image {number} has no label; download both files again")
            label = str(labels[number - 1] - 1)
            rows.append(Row(f"image_{number:05d}.jpg", label, split, f"{path}: image {number}", "jpg"))
    return rows, None


def dogs(root: str) -> tuple[list[Row], Names]:
    """Read Stanford Dogs: train_list.mat and test_list.mat, also in lists/, with `file_list`, paths such as
    n02085620-Chihuahua/1.jpg, and `labels` from 1. Return ([Row], (path of test_list.mat, names of the class folders in
    label order, None))."""
    rows, folder_of = [], {}
    lists = root if os.path.isfile(os.path.join(root, "train_list.mat")) else os.path.join(root, "lists")
    for split in ("train", "test"):
        path = os.path.join(lists, f"{split}_list.mat")
        images, labels = _variables(path, file_list=str, labels=int)
        if len(images) != len(labels):
            raise UsageError(f"{path}: has {len(images)} images and {len(labels)} labels; download it again")
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            place, folder = f"{path}: image {i}", os.path.dirname(image)
            if folder_of.setdefault(label, folder) != folder:
                raise UsageError(
                    f"{place}: label {label} belongs to {folder_of[label]} and {folder}; download both files again"
                )
            rows.append(Row(image, folder, split, place, "Images"))
    return rows, (path, [folder_of[label] for label in sorted(folder_of)], None)


def _variables(path, **types):
    """Return the elements of variables in a .mat file, as a list per variable. `types` is {name: type of elements}."""
    from scipy import io

    with readable(path), open_regular(path) as f:
        try:
            content = io.loadmat(f, variable_names=[*types], squeeze_me=True)
            return [[*map(type_, np.ravel(content[name]).tolist())] for name, type_ in types.items()]
        except Exception as e:  # scipy raises many types of exceptions for damaged files
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise UsageError(f"{path}: damaged ({type(e).__name__}: {str(e)[:200]}); download it again") from e


def tiny_imagenet(root: str) -> tuple[list[Row], None]:
    """Read Tiny ImageNet: train/WNID/images/, and val/images/ with val_annotations.txt (image, WordNet id and box).
    Return ([Row] with WordNet ids as labels, None)."""
    rows = []
    train = os.path.join(root, "train")
    with readable(train):
        for wnid in sorted(os.listdir(train)) if os.path.isdir(train) else []:
            folder = os.path.join(train, wnid, "images")
            names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
            names = [name for name in names if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")]
            rows += (Row(f"train/{wnid}/images/{name}", wnid, "train", folder) for name in names)
    path = os.path.join(root, "val", "val_annotations.txt")
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) not in (2, 6):
            raise UsageError(f"{path}: line {number} is not an image, a WordNet id and a box; download it again")
        rows.append(Row(cells[0], cells[1].strip(), "val", f"{path}: line {number}", "val/images"))
    return rows, None


def food(root: str) -> list[Row]:
    """Read Food-101: meta/train.txt and test.txt with `CLASS/IMAGE`, or the same in JSON. Return [Row], or [] for a
    different layout."""
    rows = []
    for split in ("train", "test"):
        path = os.path.join(root, "meta", f"{split}.txt")
        if os.path.isfile(path):
            kind = "line"
            lines = [(number, line.strip()) for number, line in enumerate(read_lines(path), 1) if line.strip()]
        elif os.path.isfile(path := os.path.join(root, "meta", f"{split}.json")):
            text = "\n".join(read_lines(path))
            try:
                images = [image for images in json.loads(text).values() for image in images]
                kind, lines = "image", [*enumerate(map(str.strip, images), 1)]
            except (ValueError, AttributeError, TypeError, RecursionError) as e:
                raise UsageError(f"{path}: not a JSON object with lists of images ({e}); download it again") from e
        else:
            continue
        for number, image in lines:
            label, _, name = image.partition("/")
            if not name or " " in image:
                return []  # a list of MMPretrain, which contains labels
            rows.append(Row(image, label, split, f"{path}: {kind} {number}", "images"))
    return rows


# (files that a data set contains, function that reads the data set)
DATA_SETS = (
    (("imagelabels.mat", "setid.mat"), flowers),
    (("train_list.mat", "test_list.mat"), dogs),
    (("lists/train_list.mat", "lists/test_list.mat"), dogs),  # as unpacked from lists.tar
    (("images.txt", "image_class_labels.txt"), cub),
    (("annotations/trainval.txt",), pets),
    (("val/val_annotations.txt",), tiny_imagenet),
)
