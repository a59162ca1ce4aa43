"""Read ImageNet (ILSVRC2012) as it is downloaded, without unpacking archives.

The training images are in ILSVRC2012_img_train.tar, which contains n01440764.tar and so on, in these inner archives, or
in class folders. The validation images are in class folders, in ILSVRC2012_img_val.tar, or in a folder without class
folders. If validation images are not in class folders, a separate file contains their labels. A label is the index of
the class among the sorted WordNet ids.
"""

import contextlib
import csv
import io
import os
import re
import tarfile

from paddle_resnet.data.formats.folder import image_names
from paddle_resnet.data.images import IMAGE_SUFFIXES, Image, read_slice, readable
from paddle_resnet.tools.sources.options import Options
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.files import open_regular

EXPECTED = {"train": 1_281_167, "val": 50_000}
CLASSES = 1000
WNID = re.compile(r"n\d{8}")
TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SOLUTION = "LOC_val_solution.csv"
LISTS = ("val.txt", "meta/val.txt", "val_list.txt", "caffe_ilsvrc12/val.txt")
# Folders of Kaggle's layout, ILSVRC/Data/CLS-LOC/{train,val}; LOC_val_solution.csv is next to ILSVRC.
KAGGLE = ("ILSVRC", "Data", "CLS-LOC")
# Labels of the first validation images in the devkit, which numbers the classes from 1 and in a different order than
# this project.
_FIRST_OF_DEVKIT = (490, 361, 171)
_TABLE_LIMIT = 1 << 26  # maximum size in bytes of a file with validation labels


def read(source: str, options: Options) -> tuple[dict[str, list[Image]], list[str] | None]:
    """List the images of ImageNet.

    Args:
        source: folder with the files of image-net.org, unpacked or not, or with those of Kaggle's
            imagenet-object-localization-challenge.
        options: Options of the import.
    Returns:
        ({split: [Image]}, sorted WordNet ids)
    Raises:
        UsageError: images or labels are missing (images: unless options.allow_partial is set), labels contradict each
            other, or an archive or a file with labels is damaged.
    """
    data = _data_folder(source)
    train = _training_images(data)
    val = _validation_images(data)
    if not train and not val:
        raise UsageError(
            f"{source}: contains neither {TRAIN_TAR} nor {VAL_TAR} nor their content; use the folder that contains them"
        )
    classes = sorted(train)
    wnid_of = _validation_labels(source, data, val, classes)
    if not classes:
        classes = sorted(set(wnid_of.values()))
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    labeled = _labeled(source, val, wnid_of, label_of)
    splits = {
        # pop frees the memory of each class
        "train": [_image("train", w, label_of[w], *place) for w in classes if w in train for place in train.pop(w)],
        "val": [_image("val", wnid, label_of[wnid], *place) for wnid, place in labeled],
    }
    _check_counts(source, splits, classes, options.allow_partial)
    return {split: images for split, images in splits.items() if images}, classes


def _image(split, wnid, label, name, path, place):
    kind = None if place is None else read_slice
    return Image(f"{split}/{wnid}/{os.path.basename(name)}", path, label, kind, place or ())


def _check_counts(source, splits, classes, allow_partial):
    problems = [
        f"{len(splits[split])} of {count} {'training' if split == 'train' else 'validation'} images"
        for split, count in EXPECTED.items()
        if len(splits[split]) != count
    ]
    if len(classes) != CLASSES:
        problems.append(f"{len(classes)} of {CLASSES} classes")
    if not problems:
        return
    message = f"{source}: has {', '.join(problems)}"
    if not allow_partial:
        raise UsageError(f"{message}; add the missing files, or use --allow-partial to import a part of ImageNet")
    logger.warn(f"{message}; only these images are imported")


def _data_folder(source):
    """Return the folder that contains train/ and val/ in Kaggle's layout, otherwise the source."""
    for i in range(len(KAGGLE)):
        folder = os.path.join(source, *KAGGLE[i:])
        if os.path.isdir(folder):
            return folder
    return source


def _training_images(data):
    """Return {wnid: [(name, path, (offset, size) in an archive or None)]} of the training images."""
    if os.path.isfile(path := os.path.join(data, TRAIN_TAR)):
        return _members_of_outer(path)
    folders = [os.path.join(data, name) for name in ("train", "ILSVRC2012_img_train", ".")]
    for folder in filter(os.path.isdir, folders):
        names = sorted(os.listdir(folder))
        if tars := [name for name in names if name.endswith(".tar") and WNID.fullmatch(name[:-4])]:
            return {tar[:-4]: _members(os.path.join(folder, tar)) for tar in tars}
        if wnids := [name for name in names if WNID.fullmatch(name) and os.path.isdir(os.path.join(folder, name))]:
            return {wnid: _files(os.path.join(folder, wnid)) for wnid in wnids}
    return {}


def _validation_images(data):
    """Return [(wnid or None, name, path, (offset, size) in an archive or None)] of the validation images."""
    if os.path.isfile(path := os.path.join(data, VAL_TAR)):
        return [(None, *image) for image in _members(path)]
    for name in ("val", "val/ILSVRC2012_img_val", "val/val", "ILSVRC2012_img_val"):
        folder = os.path.join(data, name)
        if not os.path.isdir(folder):
            continue
        wnids = sorted(wnid for wnid in os.listdir(folder) if WNID.fullmatch(wnid))
        if images := [(None, *image) for image in _files(folder)]:
            if wnids:
                raise UsageError(
                    f"{folder}: contains both images and class folders ({wnids[0]}); move the images to class folders"
                )
            return images
        if wnids:
            return [(wnid, *image) for wnid in wnids for image in _files(os.path.join(folder, wnid))]
    return []


def _files(folder):
    """Return [(name, path, None)] of the images in a folder."""
    names, unusable, _ = image_names(folder)
    if unusable:
        raise UsageError(f"{os.path.join(folder, unusable[0])}: a broken link, or not a file; remove it")
    return [(name, os.path.join(folder, name), None) for name in names]


def _members_of_outer(path):
    """Return {wnid: [(name, path, (offset, size))]} of the images in a tar file of tar files."""
    images = {}
    with _reading(path) as f:
        for name, offset, size in _entries(f, path, 0, os.fstat(f.fileno()).st_size):
            wnid, extension = os.path.splitext(os.path.basename(name))
            if extension != ".tar" or not WNID.fullmatch(wnid):
                raise UsageError(
                    f"{path}: {name} is not named after a WordNet id, such as n01440764.tar; download the archive again"
                )
            if wnid in images:
                raise UsageError(f"{path}: contains {name} twice; download the archive again")
            images[wnid] = _images_in(f, f"{path}: {name}", path, offset, offset + size)
    return images


def _members(path):
    """Return [(name, path, (offset, size))] of the images in a tar file, sorted by name."""
    with _reading(path) as f:
        return _images_in(f, path, path, 0, os.fstat(f.fileno()).st_size)


@contextlib.contextmanager
def _reading(path):
    with readable(path), open_regular(path) as f:
        yield f


def _images_in(f, what, path, start, end):
    """Return [(name, path, (offset, size))] of the images in an archive, sorted by name. For the other arguments, see
    _entries."""
    images = []
    for name, offset, size in _entries(f, what, start, end):
        if not name.lower().endswith(IMAGE_SUFFIXES):
            raise UsageError(f"{what}: {name} is not an image; download the archive again")
        images.append((name, path, (offset, size)))
    return sorted(images)


def _entries(f, what, start, end):
    """Yield (name, offset, size) of each regular file in the tar archive that occupies the bytes from start to end of
    an open file.

    Raises:
        UsageError: the archive is damaged or truncated. `what` is its path.
    """
    position, last = start, None
    try:
        while True:
            # Read the headers directly, because tarfile accepts truncated archives.
            head = os.pread(f.fileno(), max(0, min(tarfile.BLOCKSIZE, end - position)), position)
            if head == bytes(tarfile.BLOCKSIZE):
                return
            if len(head) < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it is truncated")
            name, size, kind = _parsed(head)
            data = position + tarfile.BLOCKSIZE
            if size < 0 or data + size > end:
                raise tarfile.ReadError(f"{name} is truncated")
            if kind in tarfile.REGULAR_TYPES:
                yield name, data, size
            elif kind not in (tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE):  # the last two are PAX headers
                raise tarfile.ReadError(f"{name} is neither a file nor a folder")
            last, position = name, data + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except (tarfile.TarError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        place = f"after {last}" if last else "at its start"
        raise UsageError(f"{what}: damaged {place} ({e}); download it again") from e


def _parsed(head):
    """Return (name, size, type) of the header of a tar member. Raise ValueError or tarfile.TarError if it is damaged.
    tarfile parses all fields of unusual headers, but takes five times as long."""
    size, checksum = head[124:135], head[148:154]
    is_usual = head[156:157] == tarfile.REGTYPE and not head[99] and not head[345] and (size + checksum).isdigit()
    if is_usual and int(checksum, 8) == sum(head) - sum(head[148:156]) + 8 * ord(" "):
        return head[: head.index(0)].decode(tarfile.ENCODING, "surrogateescape"), int(size, 8), tarfile.REGTYPE
    member = tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
    return member.name, member.size, member.type


def _validation_labels(source, data, val, classes):
    """Return {name of a validation image without extension: wnid}.

    Raises:
        UsageError: the files with labels contradict each other, there is no such file, or an image has no label.
    """
    unlabeled = [name for wnid, name, *_ in val if wnid is None]
    if not unlabeled:
        return {_stem(name): wnid for wnid, name, *_ in val}
    wnid_of, first = {}, None
    for path, labels in _label_files(source, data, classes):
        for name, wnid in labels.items():
            if wnid_of.setdefault(name, wnid) != wnid:
                raise UsageError(
                    f"{path}: {name} is {wnid}, but {wnid_of[name]} in {first}; remove the file that is wrong"
                )
        first = first or path
    if first is None:
        raise UsageError(
            f"{source}: the {len(unlabeled)} validation images have no labels; add {DEVKIT}.tar.gz of image-net.org or "
            f"{SOLUTION} of Kaggle to this folder"
        )
    missing = [name for name in unlabeled if _stem(name) not in wnid_of]
    if missing:
        raise UsageError(
            f"{first}: has no label for {len(missing)} of {len(unlabeled)} validation images "
            f"({', '.join(missing[:5])}); use the file that belongs to these images"
        )
    return wnid_of


def _labeled(source, val, wnid_of, label_of):
    """Yield (wnid, [name, path, place]) of the validation images whose class has training images. Log a warning with
    the number of all other validation images."""
    left_out = 0
    for wnid, *place in val:
        wnid = wnid or wnid_of[_stem(place[0])]
        if wnid in label_of:
            yield wnid, place
        else:
            left_out += 1
    if left_out:
        images = counted(left_out, "validation image")
        logger.warn(
            f"{source}: {images} left out, because their classes have no training images; add these training images to "
            "import all"
        )


def _label_files(source, data, classes):
    """Yield (path, {name of an image without extension: wnid}) for each file with validation labels."""
    for folder in dict.fromkeys((source, data, *_parents(source))):
        if os.path.isfile(path := os.path.join(folder, SOLUTION)):
            yield path, _solution(path)
        if os.path.isfile(path := os.path.join(folder, f"{DEVKIT}.tar.gz")):
            yield path, _devkit(path, _devkit_archive(path), classes)
        for path in (os.path.join(folder, DEVKIT, "data"), os.path.join(folder, "data")):
            if os.path.isfile(os.path.join(path, "meta.mat")):
                yield path, _devkit(path, _devkit_folder(path), classes)
    for path in (os.path.join(data, name) for name in LISTS):
        if os.path.isfile(path):
            yield path, _list(path, classes)


def _parents(source):
    """Yield the folders of Kaggle's layout above a source such as ILSVRC/Data/CLS-LOC."""
    folder = os.path.abspath(source)
    while os.path.basename(folder) in KAGGLE:
        folder = os.path.dirname(folder)
        yield folder


def _text(path):
    with readable(path), open_regular(path, _TABLE_LIMIT) as f:
        return f.read().decode(errors="replace")


def _solution(path):
    """Read Kaggle's LOC_val_solution.csv: ImageId,PredictionString with `WNID X Y X Y` for each box."""
    labels = {}
    for number, row in enumerate(csv.reader(io.StringIO(_text(path))), 1):
        if number == 1 or not row:
            continue
        wnids = set(row[1].split()[::5]) if len(row) == 2 else set()
        if len(wnids) != 1 or not WNID.fullmatch(min(wnids)):
            raise UsageError(
                f"{path}: line {number} is not IMAGE,WNID X Y X Y but {','.join(row)[:100]}; download it again"
            )
        if row[0] in labels:
            raise UsageError(f"{path}: line {number} repeats {row[0]}; download it again")
        labels[row[0]] = min(wnids)
    return labels


def _devkit_archive(path):
    """Return {"meta.mat": content, TRUTH: content} from the archive of the devkit."""
    contents = {}
    try:
        with readable(path), open_regular(path) as f, tarfile.open(fileobj=f, mode="r:gz") as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if member.isreg() and name in ("meta.mat", TRUTH) and member.size <= _TABLE_LIMIT:
                    contents[name] = tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f"{path}: damaged ({e}); download it again") from e
    return contents


def _devkit_folder(path):
    contents = {}
    for name in ("meta.mat", TRUTH):
        if os.path.isfile(file := os.path.join(path, name)):
            with readable(file), open_regular(file, _TABLE_LIMIT) as f:
                contents[name] = f.read()
    return contents


def _devkit(path, contents, classes):
    """Return the labels in the devkit. Line N of the ground truth is the id of image N; meta.mat lists the WNID of each
    id.

    Args:
        path: the devkit, for messages.
        contents: {"meta.mat": bytes, TRUTH: bytes}.
        classes: WordNet ids of the training images.
    """
    for name in ("meta.mat", TRUTH):
        if name not in contents:
            raise UsageError(f"{path}: contains no {name}; download {DEVKIT}.tar.gz")
    wnid_of = _synsets(path, contents["meta.mat"])
    unknown = sorted(set(classes) - set(wnid_of.values()))
    if unknown:
        raise UsageError(
            f"{path}: does not list the class {unknown[0]} of the training images; download {DEVKIT}.tar.gz"
        )
    labels = {}
    for number, line in enumerate(contents[TRUTH].split(), 1):
        wnid = wnid_of.get(int(line)) if line.isdigit() else None
        if wnid is None:
            raise UsageError(
                f"{path}: {TRUTH}: line {number} is {line[:20].decode(errors='replace')}, which is not a class of "
                f"meta.mat; download {DEVKIT}.tar.gz"
            )
        labels[f"ILSVRC2012_val_{number:08d}"] = wnid
    return labels


def _synsets(path, content):
    """Return {ILSVRC2012_ID: WNID} of the classes without subclasses in meta.mat."""
    from scipy import io as matlab

    try:
        synsets = matlab.loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
        rows = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], synsets["num_children"], strict=True)
        wnid_of = {int(number): str(wnid) for number, wnid, children in rows if children == 0}
    except Exception as e:  # scipy raises many types of exceptions for damaged files
        raise UsageError(f"{path}: meta.mat cannot be read ({e}); download {DEVKIT}.tar.gz") from e
    if not wnid_of or not all(map(WNID.fullmatch, wnid_of.values())):
        raise UsageError(f"{path}: meta.mat lists no classes; download {DEVKIT}.tar.gz")
    return wnid_of


def _list(path, classes):
    """Read a list of Caffe, MMPretrain or PaddleClas: lines `IMAGE LABEL`, where a label is the index of the class
    among the sorted WordNet ids."""
    labels, numbers = {}, {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name, *label = line.rsplit(maxsplit=1)
        if not label or not label[0].isdecimal():
            raise UsageError(f"{path}: line {number} is not `IMAGE LABEL` but `{line[:100]}`; correct it")
        if int(label[0]) >= len(classes):
            raise UsageError(
                f"{path}: line {number} has label {label[0]}, but there are {len(classes)} classes; as labels, "
                "use the indexes of the sorted WordNet ids of the training images"
            )
        if _stem(name) in labels:
            raise UsageError(f"{path}: line {number} repeats {name}; remove the line")
        numbers[_stem(name)] = int(label[0])
        labels[_stem(name)] = classes[int(label[0])]
    first = [numbers.get(f"ILSVRC2012_val_{number:08d}") for number in range(1, 4)]
    if first in ([*_FIRST_OF_DEVKIT], [number - 1 for number in _FIRST_OF_DEVKIT]):
        raise UsageError(
            f"{path}: contains the class numbers of ImageNet's development kit, which are not the indexes of the "
            f"sorted WordNet ids; replace the list with {DEVKIT}.tar.gz"
        )
    return labels


def _stem(name):
    return os.path.splitext(os.path.basename(name))[0]
