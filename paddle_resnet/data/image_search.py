"""Find the image file that a cell of a table means: a path, the end of a path, a name or an id."""

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator

from paddle_resnet.data.images import CONVERTED_SUFFIXES, IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES, is_system_name, some
from paddle_resnet.data.split_names import split_of
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import counted

SUFFIXES = (*IMAGE_SUFFIXES, *CONVERTED_SUFFIXES)
ELSEWHERE = re.compile(r"/|[a-z]:[\\/]|[a-z0-9]+://", re.IGNORECASE)  # start of an absolute path or a URL


class ImageSearch:
    """The image files below a folder. Each folder is listed at most once, when find() needs its files; all folders are
    listed if an image is neither in the folder of the table nor in the root."""

    def __init__(self, root: str, most: int | None = None):
        """Args:
        root: path of the folder.
        most: maximum number of files below the root to search by name, or None for no limit.
        """
        self._root, self._most = root, most
        self._listed = {}
        self._below = None  # {key: [relative path]} of all files

    def find(self, image: str, folder: str = "", split: str | None = None) -> list[str]:
        """Return the paths, relative to the root, of the files that a cell may mean, from the first place that contains
        such files: the folder of the table, the root, the folders named like the split, all other folders. A path may
        lack its extension or the folders at its start. If a path is from a different computer, only the longest end
        that exists below the root is used.

        Args:
            image: text of the cell.
            folder: folder of the table, relative to the root.
            split: "train", "val", "test" or None.
        """
        path = os.path.relpath(image, os.path.abspath(self._root)) if os.path.isabs(image) else image
        if re.match(r"\.\.[\\/]", image):  # from the folder of the table to a folder next to it
            path, folder = os.path.normpath(os.path.join(folder, image.replace("\\", "/"))), ""
        if path.startswith("..") or "/../" in path or ELSEWHERE.match(path):
            return self._moved(image, folder, split) if ELSEWHERE.match(image) else []
        for place in dict.fromkeys((folder, "")):
            parent, name = os.path.split(os.path.normpath(os.path.join(place, path)))
            if found := [os.path.join(parent, file) for file in self._names(parent).get(name, [])]:
                return found
        found = self._ending_in(os.path.normpath(path))
        found = [file for file in found if split_of(os.path.dirname(file)) == split] or found
        return found or (self.find(image.replace("\\", "/"), folder, split) if "\\" in image else [])

    def is_image(self, cell: str, folder: str = "") -> bool:
        """Return whether a cell of a table in `folder` is the path, name or id of an image."""
        found = self.find(cell.strip(), folder) if cell.strip() else []
        return any(path.lower().endswith(SUFFIXES) for path in found)

    def _moved(self, image, folder, split):
        parts = re.split(r"[\\/]+", image)[1:]
        if ".." in parts:
            return []
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((found for end in ends if end and (found := self.find(end, folder, split))), [])

    def _names(self, folder):
        """Return {key: [names of files]} of a folder. A key is the name of a file, or the name of an image file without
        its suffix."""
        if folder not in self._listed:
            names = defaultdict(list)
            path = os.path.join(self._root, folder)
            if os.path.isdir(path):
                for entry in os.scandir(path):
                    if entry.is_file():
                        for key in _keys(entry.name):
                            names[key].append(entry.name)
            self._listed[folder] = names
        return self._listed[folder]

    def _ending_in(self, path):
        """Return the paths of all files below the root that end in `path`, with or without their suffix."""
        if self._below is None:
            self._below = defaultdict(list)
            for file in itertools.islice(walk(self._root), self._most):
                for key in _keys(os.path.basename(file)):
                    self._below[key].append(file)
        folder, name = os.path.split(path)
        end = f"/{folder}" if folder else ""
        return [file for file in self._below.get(name, []) if f"/{os.path.dirname(file)}".endswith(end)]


def _keys(name):
    stem, suffix = os.path.splitext(name)
    return (name, stem) if suffix.lower() in SUFFIXES else (name,)


def images_below(root: str) -> list[str]:
    """Return the paths, relative to root, of the image files in a folder and its subfolders. If there are also images
    in formats that cannot be read, log a warning."""
    files = [*walk(root)]
    if unsupported := [path for path in files if path.lower().endswith(UNSUPPORTED_SUFFIXES)]:
        logger.warn(
            f"{root}: {counted(len(unsupported), 'file')} left out, because the format cannot be read "
            f"({some(unsupported)}); to import images in this format, convert them to JPEG or PNG"
        )
    return [path for path in files if path.lower().endswith(SUFFIXES)]


def walk(root: str, folder: str = "", seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the paths, relative to root, of the files in a folder and its subfolders, sorted, without hidden files and
    system folders. `seen` contains the parent folders, because a link in the folder can lead back to a parent folder.
    """
    path = os.path.join(root, folder)
    seen = seen | {os.path.realpath(path)}
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name.startswith(".") or is_system_name(entry.name):
            continue
        if not entry.is_dir():
            yield os.path.join(folder, entry.name)
        elif os.path.realpath(entry.path) not in seen:
            yield from walk(root, os.path.join(folder, entry.name), seen)
