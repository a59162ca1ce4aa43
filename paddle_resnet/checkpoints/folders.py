"""Checkpoint folders on disk: writing, verifying, listing and deleting them. This module knows nothing of networks.

A checkpoint is complete or invisible. ROOT/NAME/, where NAME is EPOCH or EPOCH_STEP, is a checkpoint if its meta.json
is valid and every file listed there has the listed size and sha256. Hidden entries beside it are work in progress. A
kill may leave them behind; the next start removes them:

    .NAME.partial    being written
    .NAME.replaced   an older folder of that name while the new one takes its place
    .lock            held by the run that writes here

A folder that is being deleted loses its meta.json first and holds a file .unfinished until the end. It lists what to
delete: files that this program did not write stay, and so do checkpoints of other programs, which have no meta.json.

The form "rename" writes a checkpoint under a hidden name and renames it. The form "marker" is for storage whose renames
are not atomic: it writes NAME/ itself, with NAME/.unfinished first and meta.json last.
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
# The files of a checkpoint if no meta.json and no .unfinished lists them: it is damaged, or of an older version.
_USUAL_FILES = re.compile(rf"{re.escape(META)}|bn_rank\d+\.npz|.*\.(pdparams|pdopt)")


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
    partial.mkdir(parents=True)
    _write_files(partial, files, meta)
    fsync(partial)
    replaced = _hidden(root, name, _REPLACED)
    if os.path.lexists(folder):
        folder.rename(replaced)
    partial.rename(folder)
    fsync(root)
    _discard(replaced, folder)
    return folder


def _set_aside(folder):
    """Rename a folder that this program did not write."""
    names = (f"{folder.name}.old{n or ''}" for n in itertools.count())
    kept = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    folder.rename(kept)
    logger.warn(f"{folder}: has parameters without {META}, which this program did not write; renamed to {kept.name}")


def _write_files(folder, files, meta):
    manifest = {file_name: write_file(folder / file_name, write) for file_name, write in files.items()}
    meta = finite({"format": FORMAT, **meta, "files": manifest})
    text = json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)
    write_file(folder / META, lambda file: file.write(text.encode()))


def _unmark(folder):
    """Let a folder be no checkpoint from here on, and one that clean() removes."""
    _write_unfinished(folder, _own_files(folder))
    (folder / META).unlink(missing_ok=True)


def _write_unfinished(folder, names):
    (folder / _UNFINISHED).write_text(json.dumps(sorted(names)))


def _own_files(folder):
    """Names of the files in a folder that this program wrote, except .unfinished. Some may be missing."""
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
    """Delete what this program wrote to an unmarked folder, and the folder, unless it has other files."""
    own = _own_files(folder)
    for path in folder.iterdir():
        if path.name in own and (path.is_symlink() or not path.is_dir()):
            _remove(path)
    if others := sorted({path.name for path in folder.iterdir()} - own - {_UNFINISHED}):
        _remove(folder / _UNFINISHED)
        logger.warn(
            f"{folder}: not deleted, because it has files that this program did not write ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}); move or delete them"
        )
    elif own.isdisjoint(os.listdir(folder)):
        _remove(folder / _UNFINISHED)  # goes last: a kill before leaves a folder that clean() knows
        _remove(folder, Path.rmdir)


def _discard(replaced, folder):
    """Delete the older folder of a checkpoint that has taken its place. Files that this program did not write move to
    the new folder."""
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
    """Point the symbolic link ROOT/MARKER to the checkpoint NAME, atomically.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    if os.path.lexists(target := Path(root) / marker) and not target.is_symlink():
        raise FileExistsError(errno.EEXIST, "not a link", str(target))
    link = Path(root) / f".{marker}{_PARTIAL}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(target)


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
    return Path(folder) / foreign_prefix(args, folder)


def foreign_prefix(args, folder):
    """The name of the two files in a folder of another program: --model-prefix if it is set; otherwise that of NVIDIA's
    example, that of the network, or the only one there."""
    if "model_prefix" in args.given:
        return args.model_prefix
    names = [path.stem for path in Path(folder).glob("*.pdparams")]
    known = [name for name in (NVIDIAS_PREFIX, args.model_prefix) if name in names]
    return (known or (names if len(names) == 1 else [NVIDIAS_PREFIX]))[0]


def is_foreign(folder):
    """Whether a folder holds parameters that this program did not write, such as a checkpoint of NVIDIA's example: it
    has neither meta.json nor .unfinished."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return not {META, _UNFINISHED} & set(names) and any(name.endswith(".pdparams") for name in names)


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


def is_checkpoint(folder):
    """Whether a folder has a checkpoint's meta.json, damaged or not, or is_foreign."""
    return os.path.lexists(Path(folder) / META) or is_foreign(folder)


def run_in(path, arch=None):
    """The folder of a run's checkpoints: PATH, or the one below it, if PATH is an --output-dir.

    Args:
        path: folder.
        arch: name of the network, if it is known.
    Raises:
        UsageError: PATH has runs of several networks.
    """
    path = Path(path)
    if not path.is_dir() or is_checkpoint(path) or finished(path):
        return path
    runs = runs_below(path)
    runs = [folder for folder in runs if folder.name == arch] or runs
    if len(runs) > 1:
        raise UsageError(f"{path} has runs of several networks: choose one of {', '.join(map(str, runs))}")
    return runs[0] if runs else path


def runs_below(path):
    """The folders in an --output-dir that hold checkpoints, sorted."""
    return [folder for folder in sorted(Path(path).iterdir()) if folder.is_dir() and finished(folder)]


def resolve(path, arch=None, log=logger.info):
    """The checkpoint to use for a folder: itself, or that of a run (as run_in): its `best`, or without one its newest,
    if possible at the end of an epoch.

    Args:
        path: folder.
        arch: name of the network, if it is known.
        log: function that logs which checkpoint it is.
    Raises:
        UsageError: as run_in.
    """
    root = run_in(path, arch)
    if is_checkpoint(root) or not finished(root):
        return root
    checkpoint = root / "best"
    if not is_checkpoint(checkpoint):
        checkpoint = next((folder for folder, meta in newest_first(root)[0] if meta["step"] is None), newest(root))
    if checkpoint is None:  # all are damaged
        return root
    link = f" ({checkpoint.resolve().name})" if checkpoint.is_symlink() else ""
    log(f"{path}: uses the checkpoint {checkpoint}{link}")
    return checkpoint


def newest(root):
    """The checkpoint below ROOT that was written last; if all are of other programs, that of the last epoch; None if
    there is none. It is not verified."""
    whole, others = newest_first(root)
    foreign = [folder for folder, _ in others if is_foreign(folder)]
    return whole[0][0] if whole else next(reversed(foreign), None)


def delete(folder):
    """Delete a checkpoint. Files that this program did not write stay, and so does the folder of a link. A kill in
    between leaves nothing that counts as a checkpoint; a failure is a warning."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            _unmark(folder)
            _remove_unmarked(folder)
    except OSError as e:
        logger.warn(f"{folder} cannot be deleted ({e.strerror}): delete it by hand")


def clean(root):
    """Remove what a killed run left unfinished, and put back a checkpoint that was about to be replaced."""
    for path in sorted(Path(root).glob(".*")):
        name, suffix = path.name[1:].rsplit(".", 1)[0], path.suffix
        if not position(name) and name not in MARKERS:
            continue
        if suffix == _REPLACED:
            if (path.parent / name).exists():
                _discard(path, path.parent / name)
            else:
                path.rename(path.parent / name)
        elif suffix in (_PARTIAL, ".deleted"):  # older versions deleted under that name
            _remove(path)
    for folder in below(root):
        if _is_unfinished(folder) and not folder.is_symlink():
            _remove_unmarked(folder)


def remove_all(root):
    """Delete every checkpoint below ROOT that this program wrote, damaged ones included, and the links to them, and log
    their names. A link to a folder elsewhere goes, the folder stays. A kill in between leaves valid checkpoints.

    Raises:
        OSError: one still counts as a checkpoint.
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


def _remove(path, function=None):
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        (function or (shutil.rmtree if is_folder else Path.unlink))(path)
    except FileNotFoundError:
        pass
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
