"""Write, verify, list and delete checkpoint folders on disk. This module does not depend on the network.

Checkpoints are written atomically. ROOT/NAME/, where NAME is EPOCH or EPOCH_STEP, is a checkpoint if its meta.json is
valid and every file listed there has the listed size and sha256. Hidden entries next to it are work in progress. If a
run is killed, the next start removes them:

    .NAME.partial    being written
    .NAME.replaced   an older folder of that name, until the new folder has replaced it
    .lock            locked by the run that writes here

Deletion removes meta.json first. Until the deletion is complete, the file .unfinished lists the files to delete. Files
that this program did not write are kept, as are checkpoints of other programs, which have no meta.json.

The form "rename" writes a checkpoint under a hidden name and renames it. The form "marker" is for storage without
atomic renames: it writes to NAME/ directly, with NAME/.unfinished first and meta.json last.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import reprlib
import shutil
from pathlib import Path

from paddle_resnet.checkpoints import schema
from paddle_resnet.settings.values import network_name
from utils import locks, logger
from utils.errors import UsageError
from utils.files import finite, fsync, open_regular, written

META = "meta.json"
FORMAT = 2
META_LIMIT = 16 << 20  # in bytes; the file of a run with 1,000 classes and 1,000 processes has 2 MB
NVIDIAS_PREFIX = "resnet_50_paddle"
MARKERS = ("latest", "best")
_NAME = re.compile(r"(\d+)(?:_(\d+))?")
_LOCK, _PARTIAL, _REPLACED, _UNFINISHED = ".lock", ".partial", ".replaced", ".unfinished"
# The files that belong to a checkpoint if neither meta.json nor .unfinished lists them, because the checkpoint is
# damaged or from an older version.
_USUAL_FILES = re.compile(rf"{re.escape(META)}|bn_rank\d+\.npz|.*\.(pdparams|pdopt|pdema)")


class DamagedError(Exception):
    """Raised for a folder that is not a valid checkpoint. The message contains the file and the problem."""


def run_folder(args):
    """Return the folder of this run's checkpoints."""
    return Path(args.output_dir) / network_name(args.model_arch_name)


def hold(root):
    """Lock the folder of a run, like lock().

    Raises:
        UsageError: another run holds the lock.
    """
    try:
        return lock(root)
    except BlockingIOError as e:
        raise UsageError(
            f"--output-dir {root.parent}: another run ({e.strerror}) writes its checkpoints to {root}; wait until it "
            "ends, or choose a different folder"
        ) from e


def lock(root):
    """Prevent other runs from writing below ROOT.

    Returns:
        an open file. The lock lasts until this process exits or closes any file object for ROOT/.lock.
    Raises:
        BlockingIOError: another process holds the lock; strerror describes it.
        OSError: .lock cannot be opened, is a link (its target would be overwritten) or is not a regular file.
    """
    return locks.acquire(Path(root) / _LOCK, logger.warn)


def keep(root, file):
    """Return a lock on ROOT: the argument, or a new lock if .lock has been deleted or replaced.

    Raises:
        BlockingIOError: see lock.
    """
    if locks.is_of(file, Path(root) / _LOCK):
        return file
    logger.warn(f"{root}/.lock: was deleted or replaced during the run; another run may have written to the folder")
    return lock(root)


def unwritable(root, error):
    """Return the UsageError for an OSError that the folder of a run has caused at startup."""
    return UsageError(f"--output-dir {root.parent}: cannot be written ({error.strerror}); choose a different folder")


def commit(root, name, files, meta, form="rename"):
    """Write a checkpoint. It becomes valid only when all its data is on disk.

    Args:
        root: folder of the run's checkpoints.
        name: "EPOCH" or "EPOCH_STEP". An existing folder of that name belongs to a different run and is replaced.
        files: {file name: function that writes the content to a binary file}.
        meta: content of meta.json, of JSON types, without format, files and checksum.
        form: "rename" or "marker".
    Returns:
        the folder.
    Raises:
        OSError: for example, the disk is full or the folder is read-only; the checkpoint is not valid.
    """
    folder, partial = Path(root) / name, _hidden(root, name, _PARTIAL)
    if is_foreign(folder):
        _set_aside(folder)
    if form == "marker":
        delete(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_unfinished(folder, [*files, META])
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
    """Rename a folder that this program did not write."""
    names = (f"{folder.name}.old{n or ''}" for n in itertools.count())
    kept = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    folder.rename(kept)
    logger.warn(f"{folder}: has parameters but no {META}, so this program did not write it; renamed to {kept.name}")


def _write_files(folder, files, meta):
    manifest = {file_name: write_file(folder / file_name, write) for file_name, write in files.items()}
    meta = finite({"format": FORMAT, **meta, "files": manifest})
    text = json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)
    write_file(folder / META, lambda file: file.write(text.encode()))


def _unmark(folder):
    """Make the checkpoint in a folder invalid, and mark the folder for removal by clean()."""
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
            return {META, *json.loads(file.read())} & present
    return {name for name in present if _USUAL_FILES.fullmatch(name)} if {META, _UNFINISHED} & present else set()


def _remove_unmarked(folder):
    """Delete the files that this program wrote to an unmarked folder, and the folder unless it contains other files."""
    own = _own_files(folder)
    for path in folder.iterdir():
        if path.name in own and (path.is_symlink() or not path.is_dir()):
            _remove(path)
    if others := sorted({path.name for path in folder.iterdir()} - own - {_UNFINISHED}):
        _remove(folder / _UNFINISHED)
        logger.warn(
            f"{folder}: not deleted, because it contains files that this program did not write ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}); move or delete them"
        )
    elif own.isdisjoint(os.listdir(folder)):
        _remove(folder / _UNFINISHED)  # removed last, so clean() still detects the folder if the run is killed
        _remove(folder, Path.rmdir)


def _discard(replaced, folder):
    """Delete an older checkpoint folder after a new folder has replaced it. Files that this program did not write are
    moved to the new folder."""
    if replaced.is_symlink():
        replaced.unlink()
    if not replaced.exists():
        return
    own = {*_own_files(replaced), _UNFINISHED}
    for path in replaced.iterdir():
        if path.name not in own and not os.path.lexists(folder / path.name):
            path.rename(folder / path.name)
    delete(replaced)


def mark(root, marker, name):
    """Atomically point the symbolic link ROOT/MARKER to the checkpoint NAME.

    Raises:
        OSError: the link cannot be created, or a file or folder with its name exists.
    """
    if os.path.lexists(target := Path(root) / marker) and not target.is_symlink():
        raise FileExistsError(errno.EEXIST, "not a link", str(target))
    link = Path(root) / f".{marker}{_PARTIAL}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(target)


def read_meta(folder):
    """Return the content of a folder's meta.json.

    Raises:
        DamagedError: the file is missing or was changed after it was written.
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
        raise DamagedError(f"{META} has format {reprlib.repr(meta.get('format'))}, but this version reads {FORMAT}")
    if not is_intact:
        raise DamagedError(f"{META} is damaged")
    if problem := schema.problem(meta):
        raise DamagedError(f"{META} is damaged: {problem}")
    return meta


def prefix(args, folder):
    """Return the path of a checkpoint's two files without the suffixes .pdparams and .pdopt. meta.json determines their
    name or, if there is no meta.json, foreign_prefix.

    Raises:
        DamagedError: the folder's meta.json is damaged.
    """
    if os.path.lexists(Path(folder) / META):
        return Path(folder) / schema.prefix(read_meta(folder)["files"])
    return Path(folder) / foreign_prefix(args, folder)


def foreign_prefix(args, folder):
    """Return the prefix of the two files in a checkpoint folder of a different program: --model-prefix if it is
    explicit; otherwise NVIDIA's prefix, the network's prefix, or the only prefix in the folder."""
    if args.is_explicit("model_prefix"):
        return args.model_prefix
    names = [path.stem for path in Path(folder).glob("*.pdparams")]
    known = [name for name in (NVIDIAS_PREFIX, args.model_prefix) if name in names]
    return (known or (names if len(names) == 1 else [NVIDIAS_PREFIX]))[0]


def is_foreign(folder):
    """Return whether a folder contains parameters that this program did not write, such as a checkpoint of NVIDIA's
    example. Such a folder contains neither meta.json nor .unfinished."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return not {META, _UNFINISHED} & set(names) and any(name.endswith(".pdparams") for name in names)


def verify(folder):
    """Read every byte of a checkpoint and return its meta.json. Files that meta.json does not list are ignored.

    Raises:
        DamagedError: a file is missing or was changed after it was written.
    """
    meta = read_meta(folder)
    for name, expected in meta["files"].items():
        verify_file(Path(folder) / name, expected, META)
    return meta


def verify_file(path, expected, source):
    """Read every byte of a file.

    Args:
        path: path of the file.
        expected: result of write_file, {"size": bytes, "sha256": hexadecimal}.
        source: name of the file that contains `expected`.
    Raises:
        DamagedError: the file is missing or was changed after it was written.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["size"]:
                raise DamagedError(f"{path.name} has {size} bytes instead of {expected['size']}")
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise DamagedError(f"{path.name} cannot be read ({e.strerror})") from e
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedError(f"{path.name} does not match its sha256 in {source}")


def position(name):
    """Parse the name of a checkpoint folder. Return (epoch, completed steps or, for all steps, None), or None for other
    names."""
    match = _NAME.fullmatch(name)
    return match and (int(match[1]), match[2] and int(match[2]))


def below(root):
    """List the folders below ROOT that have the name of a checkpoint, sorted by epoch and step."""
    if not Path(root).is_dir():
        return []
    matches = [p for p in Path(root).iterdir() if position(p.name) and p.is_dir()]
    return sorted(matches, key=lambda p: (position(p.name)[0], position(p.name)[1] or float("inf")))


def finished(root):
    """List the folders below ROOT that contain a checkpoint, sorted. Damaged checkpoints and those of other programs
    are included; folders that clean() removes or that contain only other files are not."""
    return [folder for folder in below(root) if _holds_checkpoint(folder)]


def newest_first(root):
    """List the checkpoints below ROOT, most recently written first.

    Returns:
        [(folder, meta)] for checkpoints with a valid meta.json, and [(folder, problem)] for all other folders with the
        name of a checkpoint.
    """
    valid, damaged = [], []
    for folder in below(root):
        try:
            valid.append((folder, read_meta(folder)))
        except DamagedError as e:
            damaged.append((folder, str(e)))
    return sorted(valid, key=lambda pair: pair[1]["sequence"], reverse=True), damaged


def is_checkpoint(folder):
    """Return whether a folder contains a meta.json, valid or damaged, or is_foreign() is true."""
    return os.path.lexists(Path(folder) / META) or is_foreign(folder)


def run_in(path, arch=None):
    """Return the folder of a run's checkpoints: PATH itself or, if PATH is an --output-dir, the run folder in it.

    Args:
        path: folder.
        arch: name of the network, if it is known.
    Raises:
        UsageError: PATH contains runs of several networks.
    """
    path = Path(path)
    if not path.is_dir() or is_checkpoint(path) or finished(path):
        return path
    runs = runs_below(path)
    runs = [folder for folder in runs if folder.name == arch] or runs
    if len(runs) > 1:
        raise UsageError(f"{path}: contains runs of several networks; choose one of {', '.join(map(str, runs))}")
    return runs[0] if runs else path


def runs_below(path):
    """List the folders in an --output-dir that contain checkpoints, sorted."""
    return [folder for folder in sorted(Path(path).iterdir()) if folder.is_dir() and finished(folder)]


def resolve(path, arch=None, log=logger.info):
    """Return the checkpoint to use for a folder: the folder itself or, if it is the folder of a run (see run_in),
    `best`. If `best` does not exist, use the newest checkpoint at the end of an epoch; without such a checkpoint, use
    the newest.

    Args:
        path: folder.
        arch: name of the network, if it is known.
        log: function that logs the choice.
    Raises:
        UsageError: see run_in.
    """
    root = run_in(path, arch)
    if is_checkpoint(root) or not finished(root):
        return root
    checkpoint = root / "best"
    if not is_checkpoint(checkpoint):
        checkpoint = next((folder for folder, meta in newest_first(root)[0] if meta["step"] is None), newest(root))
    if checkpoint is None:  # all checkpoints are damaged
        return root
    link = f" ({checkpoint.resolve().name})" if checkpoint.is_symlink() else ""
    log(f"{path}: uses the checkpoint {checkpoint}{link}")
    return checkpoint


def newest(root):
    """Return the most recently written checkpoint below ROOT, without verifying it. If all checkpoints are from other
    programs, return the one with the last epoch; without checkpoints, return None."""
    valid, others = newest_first(root)
    foreign = [folder for folder, _ in others if is_foreign(folder)]
    return valid[0][0] if valid else next(reversed(foreign), None)


def delete(folder):
    """Delete a checkpoint. Files that this program did not write are kept, as is the target of a link. If the run is
    killed during the deletion, the remaining files are not a valid checkpoint. A failure causes only a warning."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            _unmark(folder)
            _remove_unmarked(folder)
    except OSError as e:
        logger.warn(f"{folder}: cannot be deleted ({e.strerror}); delete it manually")


def clean(root):
    """Remove the unfinished work of a killed run. Restore a checkpoint whose replacement was interrupted."""
    for path in sorted(Path(root).glob(".*")):
        name, suffix = path.name[1:].rsplit(".", 1)[0], path.suffix
        if not position(name) and name not in MARKERS:
            continue
        if suffix == _REPLACED:
            if (path.parent / name).exists():
                _discard(path, path.parent / name)
            else:
                path.rename(path.parent / name)
        elif suffix in (_PARTIAL, ".deleted"):  # older versions used .deleted for folders being deleted
            _remove(path)
    for folder in below(root):
        if _is_unfinished(folder) and not folder.is_symlink():
            _remove_unmarked(folder)


def remove_all(root):
    """Delete all checkpoints below ROOT that this program wrote, including damaged ones and links, and log their names.
    The targets of links to other folders are kept. If the run is killed during the deletion, the remaining checkpoints
    are still valid.

    Raises:
        OSError: a checkpoint cannot be deleted and is still valid.
    """
    checkpoints = [folder for folder in finished(root) if folder.is_symlink() or not is_foreign(folder)]
    links = [link for link in (Path(root) / marker for marker in MARKERS) if link.is_symlink()]
    if names := [path.name for path in checkpoints + links]:
        logger.info(f"--overwrite: deletes {', '.join(names)} in {root}")
    if kept := [folder.name for folder in finished(root) if folder not in checkpoints]:
        logger.warn(f"--overwrite: keeps {', '.join(kept)} in {root}, which this program did not write")
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
    except OSError:  # an unreadable folder is not unfinished work of this program
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
    """A file wrapper that counts and hashes the bytes written."""

    def __init__(self, file):
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data):
        self._file.write(data)
        self.size += memoryview(data).nbytes
        self.digest.update(data)


def write_file(path, write):
    """Write a file by calling write(file), and flush it to disk. Returns {"size": bytes, "sha256": hexadecimal}."""
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        write(hashing)
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.digest.hexdigest()}
