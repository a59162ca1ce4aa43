"""Commands for error messages that unpack the archives in a folder."""

import contextlib
import os
import re
import shlex
import tarfile
import zipfile

from paddle_resnet.data.split_names import SPLIT_OF
from paddle_resnet.utils.errors import import_command, python

_HEAD_MEMBERS = 64  # number of members of an archive that are read to recognize it


def unpacking(folder: str, names: list[str]) -> str:
    """Return the remedy that unpacks archives and imports their content.

    Args:
        folder: folder of the archives.
        names: names of the archives.
    """
    target = f"{os.path.abspath(os.path.join(folder, names[0]) if len(names) == 1 else folder)}_unpacked"
    members = [os.path.normpath(member).split("/") for name in names for member in _members(os.path.join(folder, name))]
    # Training reads class folders in folders of splits as they are.
    is_ready = all(len(parts) == 3 and parts[0].lower() in SPLIT_OF for parts in members) and bool(members)
    use = f"use --image-root {shlex.quote(target)}" if is_ready else f"run {import_command(target)}"
    return f"{commands(folder, names, target)}, then {use}"


def commands(folder: str, names: list[str], target: str) -> str:
    """Return the commands that unpack archives, after "unpack it: " or "unpack them: ".

    Args:
        folder, names: see unpacking.
        target: folder to unpack to.
    """
    steps = [shlex.join(["mkdir", "-p", target])]
    for name in names:
        path, own = os.path.join(folder, name), target
        # Each archive without folders, such as one archive per class, gets its own folder.
        if (len(names) > 1 or target == folder) and _is_flat(path):
            own = os.path.join(target, re.sub(r"(\.tar)?\.\w+$", "", name))
            steps.append(shlex.join(["mkdir", "-p", own]))
        is_zip = name.lower().endswith(".zip")
        words = [python(), "-m", "zipfile", "-e", path, own] if is_zip else ["tar", "-xf", path, "-C", own]
        steps.append(shlex.join(words))
    return f"unpack {'it' if len(names) == 1 else 'them'}: `{' && '.join(steps)}`"


def rename_or_unpack(path: str, split: str, shard: str) -> str:
    """Return the command for a tar file with the images of a split: rename a tar shard to `shard`, or unpack an archive
    of class folders to the folder `split`."""
    members = _members(path)
    depths = {member.count("/") for member in members}
    # The images of a shard are next to files with their labels; the images of an archive are in class folders.
    if any(member.endswith(".cls") for member in members) or len(depths) != 1 or depths == {0}:
        return shlex.join(["mv", path, shard])
    unpack = ["tar", "-xf", path, "-C", split, f"--strip-components={depths.pop() - 1}"]
    return f"{shlex.join(['mkdir', '-p', split])} && {shlex.join(unpack)}"


def _is_flat(path):
    """Return whether the first files in an archive are not in folders; False if the archive cannot be read."""
    names = _members(path)
    return bool(names) and not any("/" in os.path.normpath(name) for name in names)


def _members(path):
    """Return the names of the first files in an archive, or [] if the archive cannot be read."""
    if os.path.isfile(path):  # a pipe could block
        with contextlib.suppress(OSError, EOFError, ValueError, tarfile.TarError, zipfile.BadZipFile):
            if path.lower().endswith(".zip"):
                with zipfile.ZipFile(path) as archive:
                    return [name for name in archive.namelist()[:_HEAD_MEMBERS] if not name.endswith("/")]
            with tarfile.open(path) as tar:
                members = (member for _, member in zip(range(_HEAD_MEMBERS), tar, strict=False))
                return [member.name for member in members if not member.isdir()]
    return []
