"""Checkpoint folders on disk: writing, verifying, listing and deleting them. This module knows nothing of networks.

A checkpoint is complete or invisible. ROOT/NAME/, where NAME is EPOCH or EPOCH_STEP, is a checkpoint if its meta.json
is valid and every file listed there has the listed size and sha256. Hidden entries beside it are work in progress. A
kill may leave them behind; the next start removes them:

    .NAME.partial    being written
    .NAME.replaced   an older folder of that name while the new one takes its place
    .lock            held by the run that writes here

A folder that is being deleted loses its meta.json first and holds a file .unfinished until the end.

The form "rename" writes a checkpoint under a hidden name and renames it. The form "marker" is for storage whose renames
are not atomic: it writes NAME/ itself, with NAME/.unfinished first and meta.json last.
"""

import hashlib
import json
import os
import re
import reprlib
import shutil
from pathlib import Path

from paddle_resnet.checkpoints import schema
from utils import locks, logger
from utils.errors import UsageError
from utils.files import finite, open_regular

META = "meta.json"
FORMAT = 2
META_LIMIT = 16 << 20  # bytes; 1,000 classes and 1,000 processes take 2 MB
NVIDIAS_PREFIX = "resnet_50_paddle"
MARKERS = ("latest", "best")
_NAME = re.compile(r"(\d+)(?:_(\d+))?")
_LOCK, _PARTIAL, _REPLACED, _UNFINISHED = ".lock", ".partial", ".replaced", ".unfinished"


class DamagedError(Exception):
    """A folder that is not a complete checkpoint. The message names the file and what is wrong with it."""


def run_folder(args):
    """The folder that holds this run's checkpoints."""
    return Path(args.output_dir) / args.model_arch_name


def hold(args):
    """Lock the run's folder, as lock().

    Raises:
        UsageError: another run holds the lock.
    """
    try:
        return lock(run_folder(args))
    except BlockingIOError as e:
        raise UsageError(
            f"--output-dir {args.output_dir}: another run ({e.strerror}) writes its checkpoints to {run_folder(args)}: "
            "wait until it ends, or name another folder"
        ) from e


def lock(root):
    """Keep other runs from writing below ROOT.

    Returns:
        an open file. The lock lasts until this process ends or closes any open file of ROOT/.lock.
    Raises:
        BlockingIOError: another process holds the lock; strerror names it.
        OSError: .lock cannot be opened, is a link, whose target would be overwritten, or no regular file.
    """
    return locks.acquire(Path(root) / _LOCK, logger.warn)


def keep(root, file):
    """Return a lock of ROOT: the given one, or a new one if .lock has been deleted or replaced meanwhile.

    Raises:
        BlockingIOError: as lock.
    """
    if locks.is_of(file, Path(root) / _LOCK):
        return file
    logger.warn(f"{root}/.lock was deleted or replaced during the run: another run could have written there")
    return lock(root)


def unwritable(args, error):
    """The UsageError for an OSError that the run's folder caused at the start."""
    return UsageError(f"--output-dir {args.output_dir} cannot be written ({error.strerror}): name another folder")


def commit(root, name, files, meta, form="rename"):
    """Write a checkpoint. It counts as one once all of it is on the disk.

    Args:
        root: folder of the run's checkpoints.
        name: "EPOCH" or "EPOCH_STEP". An existing folder of that name belongs to another run and is replaced.
        files: {file name: function that writes the file's content to a given binary file}.
        meta: content of meta.json except format, files and checksum; plain data.
        form: "rename" or "marker".
    Returns:
        the folder.
    Raises:
        OSError: full disk, read-only folder, ...; no checkpoint has appeared.
    """
    folder, partial = Path(root) / name, _hidden(root, name, _PARTIAL)
    if form == "marker":
        if folder.exists():
            _unmark(folder)
            _remove_unmarked(folder)
        folder.mkdir(parents=True)
        (folder / _UNFINISHED).touch()
        _write_files(folder, files, meta)
        (folder / _UNFINISHED).unlink()
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_files(partial, files, meta)
    fsync(partial)
    replaced = _hidden(root, name, _REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    fsync(root)
    if replaced.exists():
        _remove(replaced)
    return folder


def _write_files(folder, files, meta):
    manifest = {file_name: write_file(folder / file_name, write) for file_name, write in files.items()}
    meta = finite({"format": FORMAT, **meta, "files": manifest})
    text = json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)
    write_file(folder / META, lambda file: file.write(text.encode()))


def _unmark(folder):
    """Let a folder be no checkpoint from here on, and one that clean() removes."""
    (folder / _UNFINISHED).touch()
    (folder / META).unlink(missing_ok=True)


def _remove_unmarked(folder):
    for path in folder.iterdir():
        if path.name != _UNFINISHED:  # goes last: a kill in between leaves a folder that clean() knows
            _remove(path)
    _remove(folder)


def mark(root, marker, name):
    """Point the symbolic link ROOT/MARKER to the checkpoint NAME, atomically."""
    link = Path(root) / f".{marker}{_PARTIAL}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(Path(root) / marker)


def read_meta(folder):
    """The content of a folder's meta.json.

    Raises:
        DamagedError: it is missing or was changed after it was written.
    """
    path = Path(folder) / META
    try:
        with open_regular(path, META_LIMIT) as file:
            meta = json.loads(file.read())
        checksum = meta.pop("checksum")
        is_whole = checksum == _checksum(meta)
    except OSError as e:
        raise DamagedError(f"{META} cannot be read ({e.strerror})") from e
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise DamagedError(f"{META} is damaged") from e
    if meta.get("format") != FORMAT:
        raise DamagedError(f"{META} has format {reprlib.repr(meta.get('format'))} and this version reads {FORMAT}")
    if not is_whole:
        raise DamagedError(f"{META} is damaged")
    if problem := schema.problem(meta):
        raise DamagedError(f"{META} is damaged: {problem}")
    return meta


def prefix(args, folder):
    """The path of a checkpoint's two files without .pdparams and .pdopt. meta.json lists them; in a folder without one,
    the name is foreign_prefix.

    Raises:
        DamagedError: the folder's meta.json is damaged.
    """
    if os.path.lexists(Path(folder) / META):
        return Path(folder) / schema.prefix(read_meta(folder)["files"])
    return Path(folder) / foreign_prefix(args)


def foreign_prefix(args):
    """The name of the two files in folders of other programs: --model-prefix, by default that of NVIDIA's example."""
    return args.model_prefix if "model_prefix" in args.given else NVIDIAS_PREFIX


def verify(folder):
    """Read every byte of a checkpoint and return its meta.json. What meta.json does not list is not part of it.

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
        path: of the file.
        expected: {"size": bytes, "sha256": hexadecimal}, as write_file returned it.
        source: name of the file that says so.
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
        raise DamagedError(f"{path.name} has another sha256 than {source} says")


def position(name):
    """(epoch, steps done in it, or None at its end) from the name of a folder; None for other names."""
    match = _NAME.fullmatch(name)
    return match and (int(match[1]), match[2] and int(match[2]))


def below(root):
    """The folders below ROOT with the name of a checkpoint, sorted by epoch and step."""
    if not Path(root).is_dir():
        return []
    found = [p for p in Path(root).iterdir() if position(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: (position(p.name)[0], position(p.name)[1] or float("inf")))


def finished(root):
    """The folders below ROOT that hold a checkpoint, sorted. Damaged ones and those of other programs are among them;
    what clean() removes and folders with other files are not."""
    return [folder for folder in below(root) if _holds_checkpoint(folder)]


def newest_first(root):
    """The checkpoints below ROOT, the last written first.

    Returns:
        [(folder, meta)] of those with a valid meta.json, and [(folder, what is wrong)] of the other folders with the
        name of a checkpoint.
    """
    whole, damaged = [], []
    for folder in below(root):
        try:
            whole.append((folder, read_meta(folder)))
        except DamagedError as e:
            damaged.append((folder, str(e)))
    return sorted(whole, key=lambda pair: pair[1]["sequence"], reverse=True), damaged


def delete(folder):
    """Delete a checkpoint. A kill in between leaves nothing that looks complete; a failure is a warning."""
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        _unmark(folder)
    except OSError as e:
        logger.warn(f"{folder} cannot be deleted ({e.strerror}): delete it by hand")
        return
    _remove_unmarked(folder)


def clean(root):
    """Remove what a killed run left unfinished, and put back a checkpoint that was about to be replaced."""
    for path in sorted(Path(root).glob(".*")):
        name, suffix = path.name[1:].rsplit(".", 1)[0], path.suffix
        if suffix == _REPLACED and not (path.parent / name).exists():
            path.rename(path.parent / name)
        elif suffix in (_PARTIAL, _REPLACED, ".deleted"):  # older versions deleted under that name
            _remove(path)
    for folder in below(root):
        if _is_unfinished(folder) and not folder.is_symlink():
            _remove_unmarked(folder)


def remove_all(root):
    """Delete every checkpoint below ROOT, damaged ones included, and the links to them. A link to a folder elsewhere
    goes, the folder stays. A kill in between leaves whole checkpoints.

    Raises:
        OSError: one still counts as a checkpoint.
    """
    for link in (Path(root) / marker for marker in MARKERS):
        if link.is_symlink():
            link.unlink()
    for folder in finished(root):
        if folder.is_symlink():
            folder.unlink()
        else:
            _unmark(folder)
            _remove_unmarked(folder)


def _holds_checkpoint(folder):
    try:
        files = os.listdir(folder)
        return META in files or (_UNFINISHED not in files and any(name.endswith(".pdparams") for name in files))
    except OSError:  # it may
        return True


def _is_unfinished(folder):
    try:
        left = os.listdir(folder)
    except OSError:  # no work of this program
        return False
    return META not in left and (_UNFINISHED in left or not left)


def _hidden(root, name, suffix):
    return Path(root) / f".{name}{suffix}"


def _remove(path):
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as e:
        logger.warn(f"{path} cannot be deleted ({e.strerror}): delete it by hand")


def _checksum(meta):
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


class _HashingFile:
    """A file that counts and hashes what is written to it."""

    def __init__(self, file):
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data):
        self._file.write(data)
        self.size += memoryview(data).nbytes
        self.digest.update(data)


def write_file(path, write):
    """Let write(file) write a file and flush it to the disk; returns {"size": bytes, "sha256": hexadecimal}."""
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        write(hashing)
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.digest.hexdigest()}


def fsync(path):
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
