"""Read and verify the files in a checkpoint folder. meta.json lists the other files with their sizes and sha256."""

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from paddle_resnet.checkpoints import schema
from paddle_resnet.settings.values import FlagValue
from paddle_resnet.utils.files import finite, open_regular

META = "meta.json"
FORMAT = 2
META_LIMIT = 16 << 20  # maximum size of meta.json in bytes; 2 MB for 1,000 classes and 1,000 processes
UNFINISHED = ".unfinished"  # file in a folder whose checkpoint is incomplete, see folders.py
NVIDIAS_PREFIX = "resnet_50_paddle"


class DamagedError(Exception):
    """Raised if a folder is not a valid checkpoint. The message contains the file and the problem."""


class Writable(Protocol):
    """An object to which the content of a checkpoint file is written."""

    def write(self, data: bytes, /) -> object: ...


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


def _checksum(meta):
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


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
    return not {META, UNFINISHED} & set(names) and any(name.endswith(".pdparams") for name in names)


def verify(folder: str | Path) -> dict[str, Any]:
    """Check the size and sha256 of all files that meta.json lists, and return the content of meta.json.

    Raises:
        DamagedError: a file is missing or was changed after it was written, or read_meta fails.
    """
    meta = read_meta(folder)
    for name, expected in meta["files"].items():
        for _ in _verified_blocks(Path(folder) / name, expected, META):
            pass
    return meta


def read_file(path: Path, expected: dict[str, Any], source: str) -> bytes:
    """Return the content of a file as bytes. The file is read only once, so that it cannot change after the check.

    Args:
        path: path of the file.
        expected: result of write_file, {"size": bytes, "sha256": hexadecimal}.
        source: name of the file that contains `expected`.
    Raises:
        DamagedError: the file is missing or was changed after it was written.
    """
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
    if os.path.lexists(folder / UNFINISHED):
        raise DamagedError(f"{META} is missing, because the checkpoint is incomplete or being deleted")
    return {}


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


def write(folder: Path, files: Mapping[str, Callable[[Writable], object]], meta: dict[str, Any]) -> None:
    """Write the files of a checkpoint, then meta.json. For the arguments and exceptions, see folders.commit."""
    manifest = {name: write_file(folder / name, content) for name, content in files.items()}
    meta = finite({"format": FORMAT, **meta, "files": manifest})
    text = json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)
    write_file(folder / META, lambda file: file.write(text.encode()))
