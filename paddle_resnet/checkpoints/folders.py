"""Write and delete checkpoint folders.

Checkpoints are written atomically. The folder ROOT/NAME/, where NAME is EPOCH or EPOCH_STEP, is a checkpoint if its
meta.json is valid, and every file that meta.json lists has the listed size and sha256. If a run is killed, the next run
removes, restores or reuses these temporary hidden entries in ROOT:

    .NAME.partial    a checkpoint that is being written
    .NAME.replaced   the older folder NAME, until a new folder has replaced it
    .lock            locked by the run that writes to ROOT

Deletion removes meta.json first. Until the deletion is complete, the file .unfinished lists the files to delete. All
other files in the folder are kept. If meta.json and .unfinished are both damaged, the files to delete are those with
usual names of checkpoint files. Checkpoints of other programs, which have no meta.json, are also kept, if necessary
under a different name.

There are two ways to write a checkpoint (--checkpoint-commit). "rename" writes the folder under a hidden name and then
renames it. "marker", for storage without atomic renames, writes directly to NAME/, starting with the file .unfinished
and ending with meta.json.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddle_resnet.checkpoints import contents, run_folders
from paddle_resnet.checkpoints.contents import META, UNFINISHED
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import fsync, open_regular, written

_PARTIAL, _REPLACED = ".partial", ".replaced"
# Names of checkpoint files. The pattern is used if neither meta.json nor .unfinished lists the files of a checkpoint,
# which happens if the checkpoint is damaged or was written by an older version.
_USUAL_FILES = re.compile(rf"{re.escape(META)}|bn_rank\d+\.npz|.*\.(pdparams|pdopt|pdema)")


def unwritable(root: Path, error: OSError) -> UsageError:
    """Convert an OSError at startup to the UsageError for a run folder that is not writable."""
    is_within = error.filename is not None and Path(os.fsdecode(error.filename)).parent == root
    reason = f"{error.filename}: {error.strerror}" if is_within else error.strerror
    return UsageError(f"--output-dir {root.parent}: cannot be written ({reason}); choose a different folder")


def commit(
    root: str | Path,
    name: str,
    files: Mapping[str, Callable[[contents.Writable], object]],
    meta: dict[str, Any],
    form: str = "rename",
) -> Path:
    """Write a checkpoint, which becomes valid only when all its data is on disk.

    Args:
        root: folder of the run's checkpoints.
        name: "EPOCH" or "EPOCH_STEP". An existing checkpoint with this name is replaced. An existing checkpoint of
            another program is renamed.
        files: {file name: function that writes the content to a binary file}.
        meta: content of meta.json, as JSON types, without the keys format, files and checksum.
        form: "rename" or "marker".
    Returns:
        path of the checkpoint.
    Raises:
        OSError: the checkpoint cannot be written, for example because the disk is full, and is therefore not valid.
    """
    folder = Path(root) / name
    partial, replaced = (folder.with_name(f".{name}{suffix}") for suffix in (_PARTIAL, _REPLACED))
    if contents.is_foreign(folder):
        _set_aside(folder)
    if form == "marker":
        delete(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_unfinished(folder, files)
        contents.write(folder, files, meta)
        (folder / UNFINISHED).unlink()
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    with written(folder, partial):
        partial.mkdir(parents=True)
        contents.write(partial, files, meta)
        fsync(partial)
        if os.path.lexists(folder):
            folder.rename(replaced)
    fsync(root)
    _discard(replaced, folder)
    return folder


def _set_aside(folder):
    """Rename a folder that this program did not write to NAME.old, and log a warning."""
    names = (f"{folder.name}.old{n or ''}" for n in itertools.count())
    kept = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    folder.rename(kept)
    logger.warn(
        f"{folder}: not written by this program (no {META}), so it is renamed to {kept.name}; move it elsewhere"
    )


def _unmark(folder):
    """Invalidate the checkpoint in a folder, and mark the folder for removal by clean()."""
    _write_unfinished(folder, _own_files(folder))
    (folder / META).unlink(missing_ok=True)


def _write_unfinished(folder, names):
    (folder / UNFINISHED).write_text(json.dumps(sorted(names)))


def _own_files(folder):
    """Return the names of the files that this program wrote to a folder, except .unfinished. Some of the files may be
    missing."""
    with contextlib.suppress(contents.DamagedError):
        return {META, *contents.read_meta(folder)["files"]}
    present = set(os.listdir(folder))
    if UNFINISHED in present:
        with (
            contextlib.suppress(OSError, ValueError, TypeError),
            open_regular(folder / UNFINISHED, contents.META_LIMIT) as file,
        ):
            return {META, *json.loads(file.read())}
    return {name for name in present if _USUAL_FILES.fullmatch(name)} if {META, UNFINISHED} & present else set()


def _remove_unmarked(folder):
    """After _unmark(), delete the files that this program wrote to a folder. If no other files remain, delete the
    folder."""
    own = _own_files(folder)
    for path in folder.iterdir():
        if path.name in own and (path.is_symlink() or not path.is_dir()):
            _remove(path)
    if others := sorted({path.name for path in folder.iterdir()} - own - {UNFINISHED}):
        _remove(folder / UNFINISHED)
        logger.warn(
            f"{folder}: not deleted, because it contains files that this program did not write ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}); move or delete these files"
        )
    elif own.isdisjoint(os.listdir(folder)):
        _remove(folder / UNFINISHED)  # removed last, so that clean() detects the folder if the run is killed
        _remove(folder, Path.rmdir)


def _discard(replaced, folder):
    """Delete an older checkpoint folder after a new folder has replaced it. If the older folder contains files that
    this program did not write, move these files to the new folder."""
    if replaced.is_symlink():
        replaced.unlink()
    if not replaced.exists():
        return
    own = {*_own_files(replaced), UNFINISHED}
    for path in replaced.iterdir():
        if path.name not in own and not os.path.lexists(folder / path.name):
            path.rename(folder / path.name)
    delete(replaced)


def mark(root: str | Path, marker: str, name: str) -> None:
    """Atomically point the symbolic link ROOT/MARKER to the checkpoint NAME.

    Raises:
        OSError: the link cannot be created, or ROOT/MARKER is a file or folder.
    """
    if os.path.lexists(target := Path(root) / marker) and not target.is_symlink():
        raise FileExistsError(errno.EEXIST, "not a link", str(target))
    link = Path(root) / f".{marker}{_PARTIAL}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(target)


def delete(folder: Path) -> None:
    """Delete a checkpoint, except for files that this program did not write. If the folder is a link, delete only the
    link. If the run is killed during the deletion, the remaining files are not a valid checkpoint. If a file cannot be
    deleted, a warning is logged."""
    _remove(folder, _delete)


def _delete(folder):
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        _unmark(folder)
        _remove_unmarked(folder)


def clean(root: str | Path) -> None:
    """Remove the unfinished files of a killed run, and restore a checkpoint whose replacement was interrupted. If a
    file cannot be deleted, a warning is logged.

    Raises:
        OSError: a folder cannot be read or renamed.
    """
    for path in sorted(Path(root).glob(".*")):
        name, suffix = path.name[1:].rsplit(".", 1)[0], path.suffix
        if not run_folders.position(name) and name not in run_folders.MARKERS:
            continue
        if suffix == _REPLACED:
            if (path.parent / name).exists():
                _discard(path, path.parent / name)
            else:
                path.rename(path.parent / name)
        elif suffix in (_PARTIAL, ".deleted"):  # .deleted: suffix that older versions used during deletion
            _remove(path)
    for folder in run_folders.below(root):
        if _is_unfinished(folder) and not folder.is_symlink():
            _remove_unmarked(folder)


def remove_all(root: str | Path) -> None:
    """Delete all checkpoints below ROOT that this program wrote, including damaged checkpoints and links, and log their
    names. If a link refers to a folder elsewhere, keep that folder. If the run is killed during the deletion, the
    remaining checkpoints are still valid.

    Raises:
        OSError: a checkpoint cannot be deleted and is still valid.
    """
    folders = run_folders.finished(root)
    checkpoints = [folder for folder in folders if folder.is_symlink() or not contents.is_foreign(folder)]
    links = [link for link in (Path(root) / marker for marker in run_folders.MARKERS) if link.is_symlink()]
    if names := [path.name for path in checkpoints + links]:
        logger.info(f"--overwrite: deleting {', '.join(names)} in {root}")
    if kept := [folder.name for folder in folders if folder not in checkpoints]:
        logger.warn(
            f"--overwrite: keeps {', '.join(kept)} in {root}, because this program did not write them; move them "
            "elsewhere"
        )
    for path in links + checkpoints:
        _delete(path)


def _is_unfinished(folder):
    try:
        names = os.listdir(folder)
    except OSError:  # this program cannot have written an unreadable folder
        return False
    return META not in names and (UNFINISHED in names or not names)


def _remove(path, function=None):
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        (function or (shutil.rmtree if is_folder else Path.unlink))(path)
    except FileNotFoundError:
        pass
    except OSError as e:
        logger.warn(f"{path}: cannot be deleted ({e.strerror}); delete it manually")
