"""DataRoot: a data set in a folder, and what its readers share."""

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paddle_resnet.data import (
    classes,
    data_set,
    label_sets,
    layout,
    manifest,
    numbering,
    skip_list,
    sniffer,
    split_names,
)
from paddle_resnet.data.data_set import DataSet
from paddle_resnet.data.formats import FILES, FORMATS, filelist, folder
from paddle_resnet.data.image_files import Files
from paddle_resnet.data.images import IMAGE_ENDINGS, Image, some
from paddle_resnet.data.numbering import Numbering
from paddle_resnet.data.shards import Records
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

# Number of labels in record files to check before step 1, evenly spaced over the split. In Parquet files, all labels
# are checked.
CHECKED_LABELS = 256


class DataRoot:
    """A data set: the storage formats of its splits, the numbers of its classes, the images to omit, and whether it may
    contain files outside its folder. Formats, file lists and the skip list are read when they are first needed. Only
    file lists can be read several times, once for each label offset and number of classes.

    Args:
        image_root: the folder that contains the splits.
        data_format: a key of formats.FORMATS, or "auto" to detect the format of each split.
        allow_outside: whether file lists and the skip list may contain files outside image_root.
        label_offset: number to subtract from the labels in file lists and record files, or "auto".
        skip_list: path of a --skip-list, or None.
        skip: names (Image.name) of images to omit, instead of a skip list.
        is_multi_label: whether images have any number of classes (--multi-label).
    Attributes:
        image_root, data_format, label_offset, allow_outside: the arguments with these names.
    """

    def __init__(
        self,
        image_root: str | Path,
        data_format: str = AUTO,
        allow_outside: bool = False,
        label_offset: int | str = AUTO,
        skip_list: str | Path | None = None,
        skip: frozenset[str] = frozenset(),
        is_multi_label: bool = False,
    ):
        self.image_root = str(image_root)
        self.data_format, self.label_offset = data_format, label_offset
        self.allow_outside, self._is_multi_label = allow_outside, is_multi_label
        self._skip_list, self._skip = skip_list, skip
        self._formats, self._lists = {}, {}

    @functools.cached_property
    def skip(self) -> frozenset[str]:
        """Names of the images to omit. Raise UsageError if the skip list cannot be used."""
        if self._skip_list is None:
            return self._skip
        skip = skip_list.read(self._skip_list, self.image_root)
        if not self.allow_outside:
            skip_list.check_inside(self._skip_list, skip, self.image_root)
        return skip

    def kept(self, images: Iterable[Image]) -> list[Image]:
        """Return the images that are not in the skip list. Raise UsageError if the skip list cannot be used."""
        return [image for image in images if os.path.normpath(image.name) not in self.skip]

    def format(self, mode: Mode) -> str:
        """Return the storage format of a split. Raise UsageError if image_root is not a folder, or contains the split
        several times."""
        if self.data_format != AUTO:
            return self.data_format
        if mode not in self._formats:
            self._formats[mode] = layout.detect(self.image_root, mode)
        return self._formats[mode]

    def shown(self, mode: Mode) -> str:
        """Return the files and the format of a split for messages, such as "valid/ (folder)". For exceptions, see
        format()."""
        stored_as = self.format(mode)
        paths = FORMATS[stored_as].detect(self.image_root, mode)
        return f"{some([split_names.shown(self.image_root, path) for path in paths], 1)} ({stored_as})"

    def formats(self, mode: Mode) -> dict[Mode, str]:
        """Return {mode: storage format} for `mode` and, if it exists, for the other split."""
        other = next(m for m in Mode if m is not mode)
        formats = {mode: self.format(mode)}
        if self.data_format != AUTO:
            is_there = self.data_format != "folder" and FORMATS[self.data_format].detect(self.image_root, other)
            return formats | ({other: self.data_format} if is_there else {})
        with contextlib.suppress(UsageError):  # a run that also reads the other split reports this error later
            kind = self.format(other)
            path = folder.split_folder(self.image_root, other)
            if kind != "folder" or (os.path.isdir(path) and folder.class_folders(path)):
                formats[other] = kind
        return formats

    def file_list(self, mode: Mode, label_offset: int = 0, num_of_class: int | None = None) -> Files:
        """Return the images in a file list. Raise UsageError if formats.filelist.index fails, if the list contains
        files outside image_root that are not allowed, or if the first file in the list does not exist."""
        key = mode, label_offset, num_of_class
        if key not in self._lists:
            listed = filelist.index(self.image_root, mode, num_of_class, label_offset)
            if not self.allow_outside:
                filelist.check_inside(self.image_root, mode, listed)
            filelist.check_first(self.image_root, mode, listed)
            self._lists[key] = listed
        return self._lists[key]

    def data_classes(self, mode: Mode) -> list[str] | None:
        """Return the classes of the data set, see numbering.data_classes and label_sets.data_classes."""
        if self._is_multi_label:
            return label_sets.data_classes(self, mode)
        return numbering.data_classes(self, mode)

    def count_classes(self, mode: Mode) -> int | None:
        """Return the number of data_classes(), or None if it is unknown."""
        names = self.data_classes(mode)
        return None if names is None else len(names)

    def numbering(self, mode: Mode, num_of_class: int | None = None, trained: Sequence[str] | None = None) -> Numbering:
        """Number the classes, see numbering.establish."""
        return numbering.establish(self, mode, num_of_class, trained)

    def images(self, mode: Mode, num_of_class: int | None = None) -> tuple[Numbering, list[Image]]:
        """Return (Numbering, all images of a split in stored order, which is also the order of evaluation). The images
        of the skip list are included.

        Raises:
            UsageError: the split cannot be used.
        """
        numbers = self.numbering(mode, num_of_class)
        return numbers, self.listed(mode, numbers.classes, numbers.offset)

    def listed(self, mode: Mode, names: Sequence[str] | None = None, label_offset: int = 0) -> list[Image]:
        """List all images of a split, without checking that both splits number their classes in the same way. With
        --multi-label, the images of the skip list are omitted, and the images have no labels.

        Args:
            mode: the split, Mode.TRAIN or Mode.EVAL.
            names: names of the class folders in label order, see formats.folder.index.
            label_offset: number to subtract from the labels in file lists and records.
        Raises:
            UsageError: the split cannot be used.
        """
        if self._is_multi_label:
            return label_sets.listed(self, mode)
        if self.format(mode) in FILES:
            return [*self._files(mode, None, names, label_offset).images(self.image_root)]
        return [*self.records(mode, frozenset()).images(label_offset)]

    def open(
        self,
        mode: Mode,
        num_of_class: int | None,
        seed: int,
        allow_empty: bool = False,
        trained: Sequence[str] | None = None,
        allow_one_class: bool = False,
    ) -> DataSet:
        """Open a split for the DALI pipeline.

        Args:
            mode: the split, Mode.TRAIN or Mode.EVAL.
            num_of_class: number of network outputs. If num_of_class is None, only the data set defines the classes.
            seed: seed of the training order.
            allow_empty: whether class folders in train/ may be empty.
            trained: see numbering.establish.
            allow_one_class: whether all training images may belong to one class.
        Raises:
            UsageError: a file is missing, incomplete or damaged; the network has no output for a label; the classes
                cannot be numbered; the split has no images; or classes in train/ are empty, or all training images
                belong to one class, and this is not allowed.
        """
        if self._is_multi_label:
            layout.check_root(self.image_root)
            return label_sets.open_split(self, mode, num_of_class, seed, trained, allow_empty)
        stored_as = self.format(mode)
        content = "train/ and val/" if stored_as in FILES else f"the {stored_as} files"
        layout.check_root(self.image_root, content)
        numbers = self.numbering(mode, num_of_class, trained)
        if stored_as in FILES:
            opened = self._open_files(mode, num_of_class, seed, numbers, allow_empty, allow_one_class)
        else:
            opened = self._open_records(mode, num_of_class, seed, numbers, allow_one_class)
        logger.info(f"--image-root {self.image_root}: the {mode.value} split is {self.shown(mode)}")
        return replace(opened, class_names=numbers.class_names or opened.classes)

    def _files(self, mode, num_of_class=None, names=None, label_offset=0, is_trained=False):
        if self.format(mode) == "filelist":
            return self.file_list(mode, label_offset, num_of_class)
        layout.check_there(self.image_root, mode, "folder")
        return folder.index(self.image_root, mode, num_of_class, self.skip, names, is_trained)

    def _open_files(self, mode, num_of_class, seed, numbers, allow_empty, allow_one_class):
        root, stored_as = self.image_root, self.format(mode)
        listed = self._files(mode, num_of_class, numbers.classes, numbers.offset, numbers.is_trained)
        files, labels = listed.names, listed.labels
        names = numbers.classes if stored_as == "filelist" else listed.classes
        if not files:
            remedy = sniffer.advice(root) or folder.unsupported(root, mode) or f"add images ({IMAGE_ENDINGS})"
            split = os.path.basename(folder.split_folder(root, mode))
            raise UsageError(f"--image-root {root}: {split}/ contains no images in class folders; {remedy}")
        if names is None:
            names = classes.numbers(None if num_of_class is None else max(labels) + 1)
        classes.check_classes(root, mode, stored_as, labels, names, allow_empty, allow_one_class)
        if self.skip:
            kept = [i for i, name in enumerate(files) if os.path.normpath(name) not in self.skip]
            files, labels = [files[i] for i in kept], [labels[i] for i in kept]
            if not files:
                raise UsageError(f"--image-root {root}: --skip-list leaves no {mode.value} images; shorten the list")
            classes.check_classes(root, mode, stored_as, labels, names, True, allow_one_class)
        if stored_as == "filelist":
            filelist.check_listed(root, mode, files)
        identity = data_set.digest("\n".join([*files, *map(str, labels)]))
        in_list = files, np.array(labels, np.int64)
        if mode is Mode.TRAIN:
            # DALI's shuffle has a fixed seed, so the list is shuffled here with --dali-random-seed.
            order = np.random.RandomState(seed).permutation(len(files)).tolist()
            files = [files[i] for i in order]
            labels = [labels[i] for i in order]
        read = functools.partial(FORMATS[stored_as].read, root, files, labels)
        return DataSet(stored_as, len(files), names, read, identity, names, *in_list)

    def records(self, mode: Mode, skip: frozenset[str]) -> Records:
        """Open the record files of a split, without the images `skip`. Raise UsageError if the files cannot be
        used."""
        root, stored_as = self.image_root, self.format(mode)
        paths = layout.check_there(root, mode, stored_as)
        records = FORMATS[stored_as].index(root, mode, paths, skip)
        manifest.check_count(root, mode, stored_as, len(paths), "shard")
        manifest.check_count(root, mode, stored_as, sum(records.counts.values()))
        return records

    def _open_records(self, mode, num_of_class, seed, numbers, allow_one_class):
        stored_as = self.format(mode)
        records = self.records(mode, self.skip)
        has_file = os.path.lexists(os.path.join(self.image_root, "classes.txt"))
        names_file = "classes.txt" if has_file else None  # record files and class folders can also define the classes
        labels = []
        for path, label in records.sample(CHECKED_LABELS):
            labels.append(label)
            classes.check_labels(path, [label], num_of_class, numbers.classes, numbers.offset, names_file)
        identity = data_set.digest(*records.identity, labels)

        read = functools.partial(FORMATS[stored_as].read, records, seed=seed)
        if numbers.offset:
            read, identity = data_set.shifted(read, numbers.offset), data_set.digest(identity, numbers.offset)
        names = numbers.classes or classes.numbers(num_of_class)
        found = {label - numbers.offset for label in labels}
        if mode is Mode.TRAIN and records.size == len(labels) and len(found) == 1:
            classes.check_one_class(self.image_root, names, found.pop(), allow_one_class)
        return DataSet(
            stored_as,
            records.size,
            names,
            read,
            identity,
            has_reader=getattr(FORMATS[stored_as], "HAS_READER", True),
            records=functools.partial(records.images, numbers.offset),
        )
