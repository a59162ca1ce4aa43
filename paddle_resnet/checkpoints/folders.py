"""Write, verify, list and delete checkpoint folders on disk, independently of the network.

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
import hashlib
import itertools
import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from paddle_resnet.checkpoints import schema
from paddle_resnet.settings.values import FlagValue, network_name
from paddle_resnet.utils import locks, logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.files import finite, fsync, open_regular, written

META = "meta.json"
FORMAT = 2
META_LIMIT = 16 << 20  # maximum size of meta.json in bytes; 2 MB for 1,000 classes and 1,000 processes
NVIDIAS_PREFIX = "resnet_50_paddle"
MARKERS = ("latest", "best")
_NAME = re.compile(r"(\d+)(?:_(\d+))?")
_LOCK, _PARTIAL, _REPLACED, _UNFINISHED = ".lock", ".partial", ".replaced", ".unfinished"
# Names of checkpoint files. The pattern is used if neither meta.json nor .unfinished lists the files of a checkpoint,
# which happens if the checkpoint is damaged or was written by an older version.
_USUAL_FILES = re.compile(rf"{re.escape(META)}|bn_rank\d+\.npz|.*\.(pdparams|pdopt|pdema)")


class DamagedError(Exception):
    """Raised if a folder is not a valid checkpoint. The message contains the file and the problem."""


class Writable(Protocol):
    """An object to which the content of a checkpoint file is written."""

    def write(self, data: bytes, /) -> object: ...


def run_folder(output_dir: str | Path, arch: str) -> Path:
    """Return the folder for the checkpoints of a run, given --output-dir and --model-arch-name."""
    return Path(output_dir) / network_name(arch)


def hold(root: Path) -> TextIO:
    """Lock the folder of a run, and return the open lock file, as lock() does.

    Raises:
        UsageError: another run holds the lock.
        OSError: see lock().
    """
    try:
        return lock(root)
    except BlockingIOError as e:
        raise UsageError(
            f"--output-dir {root.parent}: another run ({e.strerror}) is writing its checkpoints to {root}; wait until "
            "it ends, or choose a different folder"
        ) from e


def lock(root: str | Path) -> TextIO:
    """Lock the folder ROOT, so that no other run writes to it.

    Returns:
        an open file. The lock lasts until this process exits or closes any file object for ROOT/.lock.
    Raises:
        BlockingIOError: another process holds the lock; strerror describes that process.
        OSError: .lock cannot be opened, is a link (the target would be overwritten) or is not a regular file.
    """
    return locks.acquire(Path(root) / _LOCK, logger.warn)


def keep(root: str | Path, file: TextIO) -> TextIO:
    """Return a valid lock on ROOT: `file`, or a new lock if ROOT/.lock has been deleted or replaced.

    Raises:
        BlockingIOError, OSError: see lock().
    """
    if locks.is_of(file, Path(root) / _LOCK):
        return file
    logger.warn(
        f"{root}/.lock: was deleted or replaced during the run, so another run may have written to the folder; make "
        "sure that no other run uses it"
    )
    return lock(root)


def unwritable(root: Path, error: OSError) -> UsageError:
    """Convert an OSError at startup to the UsageError for a run folder that is not writable."""
    is_within = error.filename is not None and Path(os.fsdecode(error.filename)).parent == root
    reason = f"{error.filename}: {error.strerror}" if is_within else error.strerror
    return UsageError(f"--output-dir {root.parent}: cannot be written ({reason}); choose a different folder")


def commit(
    root: str | Path,
    name: str,
    files: Mapping[str, Callable[[Writable], object]],
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
    folder, partial = Path(root) / name, _hidden(root, name, _PARTIAL)
    if is_foreign(folder):
        _set_aside(folder)
    if form == "marker":
        delete(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_unfinished(folder, files)
        _write_files(folder, files, meta)
        (folder / _UNFINISHED).unlink()
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    replaced = _hidden(root, name, _REPLACED)
    with written(folder, partial):
        partial.mkdir(parents=True)
        _write_files(partial, files, meta)
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


def _write_files(folder, files, meta):
    manifest = {file_name: write_file(folder / file_name, write) for file_name, write in files.items()}
    meta = finite({"format": FORMAT, **meta, "files": manifest})
    text = json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)
    write_file(folder / META, lambda file: file.write(text.encode()))


def _unmark(folder):
    """Invalidate the checkpoint in a folder, and mark the folder for removal by clean()."""
    _write_unfinished(folder, _own_files(folder))
    (folder / META).unlink(missing_ok=True)


def _write_unfinished(folder, names):
    (folder / _UNFINISHED).write_text(json.dumps(sorted(names)))


def _own_files(folder):
    """Return the names of the files that this program wrote to a folder, except .unfinished. Some of the files may be
    missing."""
    with contextlib.suppress(DamagedError):
        return {META, *read_meta(folder)["files"]}
    present = set(os.listdir(folder))
    if _UNFINISHED in present:
        with (
            contextlib.suppress(OSError, ValueError, TypeError),
            open_regular(folder / _UNFINISHED, META_LIMIT) as file,
        ):
            return {META, *json.loads(file.read())}
    return {name for name in present if _USUAL_FILES.fullmatch(name)} if {META, _UNFINISHED} & present else set()


def _remove_unmarked(folder):
    """After _unmark(), delete the files that this program wrote to a folder. If no other files remain, delete the
    folder."""
    own = _own_files(folder)
    for path in folder.iterdir():
        if path.name in own and (path.is_symlink() or not path.is_dir()):
            _remove(path)
    if others := sorted({path.name for path in folder.iterdir()} - own - {_UNFINISHED}):
        _remove(folder / _UNFINISHED)
        logger.warn(
            f"{folder}: not deleted, because it contains files that this program did not write ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}); move or delete these files"
        )
    elif own.isdisjoint(os.listdir(folder)):
        _remove(folder / _UNFINISHED)  # removed last, so that clean() detects the folder if the run is killed
        _remove(folder, Path.rmdir)


def _discard(replaced, folder):
    """Delete an older checkpoint folder after a new folder has replaced it. If the older folder contains files that
    this program did not write, move these files to the new folder."""
    if replaced.is_symlink():
        replaced.unlink()
    if not replaced.exists():
        return
    own = {*_own_files(replaced), _UNFINISHED}
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


def read_meta(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's meta.json, without the checksum.

    Raises:
        DamagedError: the file cannot be read, is damaged, or has a format that this version does not read.
    """
    path = Path(folder) / META
    try:
        with open_regular(path, META_LIMIT) as file:
            meta = json.loads(file.read())
        checksum = meta.pop("checksum")
        is_intact = checksum == _checksum(meta)
    except OSError as e:
        raise DamagedError(f"{META} cannot be read ({e.strerror})") from e
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise DamagedError(f"{META} is damaged") from e
    if meta.get("format") != FORMAT:
        raise DamagedError(
            f"{META} has format {reprlib.repr(meta.get('format'))}, but this version reads format {FORMAT}"
        )
    if not is_intact:
        raise DamagedError(f"{META} is damaged")
    if problem := schema.problem(meta):
        raise DamagedError(f"{META} is damaged: {problem}")
    return meta


def prefix(folder: str | Path, model_prefix: FlagValue) -> Path:
    """Return the common path of a checkpoint's .pdparams and .pdopt files, without these suffixes. The file name comes
    from meta.json or, if there is no meta.json, from foreign_prefix.

    Args:
        folder: path of the checkpoint.
        model_prefix: values.FlagValue of --model-prefix.
    Raises:
        DamagedError: the folder's meta.json is damaged, or the checkpoint is incomplete.
    """
    return Path(folder) / (schema.prefix(_listed_files(Path(folder))) or foreign_prefix(folder, model_prefix))


def foreign_prefix(folder: str | Path, model_prefix: FlagValue) -> str:
    """Return the file prefix in a checkpoint folder that another program wrote: --model-prefix if this flag is
    explicit; otherwise, NVIDIA's prefix or the value of --model-prefix if the folder contains a .pdparams file with
    this prefix; otherwise, the only prefix in the folder or, if there are none or several, NVIDIA's prefix."""
    if model_prefix.is_explicit:
        return model_prefix.value
    names = [path.stem for path in Path(folder).glob("*.pdparams")]
    known = [name for name in (NVIDIAS_PREFIX, model_prefix.value) if name in names]
    return (known or (names if len(names) == 1 else [NVIDIAS_PREFIX]))[0]


def is_foreign(folder: str | Path) -> bool:
    """Return whether a folder contains parameters that this project did not write, such as a checkpoint of NVIDIA's
    example: .pdparams files without meta.json and .unfinished."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return not {META, _UNFINISHED} & set(names) and any(name.endswith(".pdparams") for name in names)


def verify(folder: str | Path) -> dict[str, Any]:
    """Check the size and sha256 of all files that meta.json lists, and return the content of meta.json.

    Raises:
        DamagedError: a file is missing or was changed after it was written, or read_meta fails.
    """
    meta = read_meta(folder)
    for name, expected in meta["files"].items():
        verify_file(Path(folder) / name, expected, META)
    return meta


def verify_file(path: Path, expected: dict[str, Any], source: str) -> None:
    """Check that a file has the expected size and sha256.

    Args:
        path: path of the file.
        expected: result of write_file, {"size": bytes, "sha256": hexadecimal}.
        source: name of the file that contains `expected`.
    Raises:
        DamagedError: the file is missing or was changed after it was written.
    """
    for _ in _verified_blocks(path, expected, source):
        pass


def read_file(path: Path, expected: dict[str, Any], source: str) -> bytes:
    """Return the content of a file as bytes. The file is read only once, so that it cannot change after the check. For
    arguments and exceptions, see verify_file."""
    return b"".join(_verified_blocks(path, expected, source))


def _verified_blocks(path, expected, source):
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["size"]:
                raise DamagedError(f"{path.name} has {size} bytes instead of {expected['size']}")
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
                yield block
    except OSError as e:
        raise DamagedError(f"{path.name} cannot be read ({e.strerror})") from e
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedError(f"{path.name} does not match its sha256 in {source}")


def contains(path: Path) -> bool:
    """Return whether the meta.json in the folder of a file lists the file. If there is no meta.json, return whether
    the file exists.

    Raises:
        DamagedError: meta.json is damaged, or the checkpoint is incomplete.
    """
    listed = _listed_files(path.parent)
    return path.name in listed if listed else path.is_file()


def read_listed(path: Path) -> bytes | None:
    """Return the content of a checkpoint file, or None if no meta.json lists the file.

    Raises:
        DamagedError: the file is missing or was changed after it was written, meta.json is damaged, or the checkpoint
            is incomplete.
    """
    expected = _listed_files(path.parent).get(path.name)
    return expected and read_file(path, expected, META)


def _listed_files(folder):
    """Return the files that meta.json lists, {name: result of write_file}. If another program wrote the folder, return
    {}. Raise DamagedError if meta.json is damaged, or if .unfinished shows that the checkpoint is incomplete."""
    if os.path.lexists(folder / META):
        return read_meta(folder)["files"]
    if os.path.lexists(folder / _UNFINISHED):
        raise DamagedError(f"{META} is missing, because the checkpoint is incomplete or being deleted")
    return {}


def position(name: str) -> tuple[int, int | None] | None:
    """Parse the name of a checkpoint folder. Return (epoch, step), where step is the number of completed steps, or None
    for the end of the epoch. If `name` is not the name of a checkpoint, return None."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else None


def below(root: str | Path) -> list[Path]:
    """List the folders below ROOT whose names are checkpoint names, sorted by epoch and step."""
    if not Path(root).is_dir():
        return []
    positions = {path: at for path in Path(root).iterdir() if (at := position(path.name)) and path.is_dir()}
    steps = {path: math.inf if step is None else step for path, (_, step) in positions.items()}
    return sorted(positions, key=lambda path: (positions[path][0], steps[path]))


def finished(root: str | Path) -> list[Path]:
    """List the folders below ROOT that contain a checkpoint, sorted by epoch and step. The list includes damaged
    checkpoints and checkpoints of other programs, but neither folders that clean() removes nor folders without
    checkpoint files."""
    return [folder for folder in below(root) if _holds_checkpoint(folder)]


def newest_first(root: str | Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[tuple[Path, str]]]:
    """List the checkpoints below ROOT.

    Returns:
        ([(folder, meta)] of the checkpoints with a valid meta.json, most recently written first; [(folder, problem)] of
        all other folders with the name of a checkpoint, sorted by epoch and step).
    """
    valid, damaged = [], []
    for folder in below(root):
        try:
            valid.append((folder, read_meta(folder)))
        except DamagedError as e:
            damaged.append((folder, str(e)))
    return sorted(valid, key=lambda pair: pair[1]["sequence"], reverse=True), damaged


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder contains a checkpoint: a meta.json, valid or damaged, or parameters that a different
    trainer wrote (see is_foreign)."""
    return os.path.lexists(Path(folder) / META) or is_foreign(folder)


def run_in(path: str | Path, arch: str | None = None) -> Path:
    """Return the folder that contains the checkpoints of a run: PATH or, if PATH is an --output-dir, the run folder in
    PATH. If PATH is the link `latest` or `best`, return the checkpoint that it refers to.

    Args:
        path: path of the folder.
        arch: value of --model-arch-name, or None if the network is unknown.
    Raises:
        UsageError: PATH contains runs of several networks.
    """
    path = Path(path)
    if not path.is_dir() or is_checkpoint(path) or finished(path):
        return _target(path)
    runs = runs_below(path)
    runs = [folder for folder in runs if arch and folder.name == network_name(arch)] or runs
    if len(runs) > 1:
        raise UsageError(f"{path}: contains runs of several networks; choose one of {', '.join(map(str, runs))}")
    return runs[0] if runs else path


def runs_below(path: str | Path) -> list[Path]:
    """Return the sorted list of the folders in an --output-dir that contain checkpoints."""
    return [folder for folder in sorted(Path(path).iterdir()) if finished(folder)]


def resolve(path: str | Path, arch: str | None = None, log: Callable[[str], object] = logger.info) -> Path:
    """Return the checkpoint to use for a folder. If the folder contains the checkpoints of a run (see run_in), use
    `best`. If `best` does not exist, use the newest checkpoint at the end of an epoch or, if there is no such
    checkpoint, the newest checkpoint. If `best` refers to a missing checkpoint, log a warning. If there is no
    checkpoint, return the folder of the run.

    Args:
        path: path of the folder.
        arch: value of --model-arch-name, or None if the network is unknown.
        log: function that logs the choice.
    Raises:
        UsageError: the folder contains runs of several networks.
    """
    root = run_in(path, arch)
    if is_checkpoint(root):
        return root
    checkpoint = root / "best"
    if not is_checkpoint(checkpoint):
        checkpoint = next((folder for folder, meta in newest_first(root)[0] if meta["step"] is None), newest(root))
    if checkpoint is None:  # there is no valid checkpoint
        return root
    folder = _target(checkpoint)
    if os.path.lexists(root / "best") and not is_checkpoint(root / "best"):
        log(f"warning: {root / 'best'}: refers to a missing checkpoint, so a different checkpoint is used")
    log(f"{path}: using the checkpoint {checkpoint}" + (f" ({folder.name})" if folder != checkpoint else ""))
    return folder


def _target(path):
    """If a path is the link `latest` or `best`, return the checkpoint that it refers to, because a run that is still
    training may change the link before all files have been read. Return any other path unchanged."""
    return path.parent / os.readlink(path) if path.name in MARKERS and path.is_symlink() else path


def newest(root: str | Path) -> Path | None:
    """Return the most recently written checkpoint with a valid meta.json below ROOT. If no checkpoint has a valid
    meta.json, return the checkpoint of another program with the highest epoch number, or None. The files are not
    verified."""
    valid, others = newest_first(root)
    foreign = [folder for folder, _ in others if is_foreign(folder)]
    return valid[0][0] if valid else next(reversed(foreign), None)


def delete(folder: Path) -> None:
    """Delete a checkpoint, except for files that this program did not write. If the folder is a link, delete only the
    link. If the run is killed during the deletion, the remaining files are not a valid checkpoint. If a file cannot be
    deleted, a warning is logged."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            _unmark(folder)
            _remove_unmarked(folder)
    except OSError as e:
        logger.warn(f"{folder}: cannot be deleted ({e.strerror}); delete it manually")


def clean(root: str | Path) -> None:
    """Remove the unfinished files of a killed run, and restore a checkpoint whose replacement was interrupted. If a
    file cannot be deleted, a warning is logged.

    Raises:
        OSError: a folder cannot be read or renamed.
    """
    for path in sorted(Path(root).glob(".*")):
        name, suffix = path.name[1:].rsplit(".", 1)[0], path.suffix
        if not position(name) and name not in MARKERS:
            continue
        if suffix == _REPLACED:
            if (path.parent / name).exists():
                _discard(path, path.parent / name)
            else:
                path.rename(path.parent / name)
        elif suffix in (_PARTIAL, ".deleted"):  # .deleted: suffix that older versions used during deletion
            _remove(path)
    for folder in below(root):
        if _is_unfinished(folder) and not folder.is_symlink():
            _remove_unmarked(folder)


def remove_all(root: str | Path) -> None:
    """Delete all checkpoints below ROOT that this program wrote, including damaged checkpoints and links, and log their
    names. If a link refers to a folder elsewhere, keep that folder. If the run is killed during the deletion, the
    remaining checkpoints are still valid.

    Raises:
        OSError: a checkpoint cannot be deleted and is still valid.
    """
    checkpoints = [folder for folder in finished(root) if folder.is_symlink() or not is_foreign(folder)]
    links = [link for link in (Path(root) / marker for marker in MARKERS) if link.is_symlink()]
    if names := [path.name for path in checkpoints + links]:
        logger.info(f"--overwrite: deleting {', '.join(names)} in {root}")
    if kept := [folder.name for folder in finished(root) if folder not in checkpoints]:
        logger.warn(
            f"--overwrite: keeps {', '.join(kept)} in {root}, because this program did not write them; move them "
            "elsewhere"
        )
    for path in links + checkpoints:
        if path.is_symlink():
            path.unlink()
        else:
            _unmark(path)
            _remove_unmarked(path)


def _holds_checkpoint(folder):
    try:
        return META in os.listdir(folder) or is_foreign(folder)
    except OSError:  # an unreadable folder may contain a checkpoint
        return True


def _is_unfinished(folder):
    try:
        names = os.listdir(folder)
    except OSError:  # this program cannot have written an unreadable folder
        return False
    return META not in names and (_UNFINISHED in names or not names)


def _hidden(root, name, suffix):
    return Path(root) / f".{name}{suffix}"


def _remove(path, function=None):
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        (function or (shutil.rmtree if is_folder else Path.unlink))(path)
    except FileNotFoundError:
        pass
    except OSError as e:
        logger.warn(f"{path}: cannot be deleted ({e.strerror}); delete it manually")


def _checksum(meta):
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


class _HashingFile:
    """A file wrapper that counts and hashes all written bytes."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += memoryview(data).nbytes
        self.digest.update(data)


def write_file(path: Path, write: Callable[[Writable], object]) -> dict[str, Any]:
    """Write a file by calling write(file), and flush the file to disk. Return {"size": bytes, "sha256":
    hexadecimal}."""
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        write(hashing)
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.digest.hexdigest()}
