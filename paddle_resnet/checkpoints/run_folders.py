"""Find checkpoints: the folders OUTPUT_DIR/ARCH of runs, and the checkpoints in such a folder ROOT."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_resnet.checkpoints import contents
from paddle_resnet.settings.values import network_name
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError

MARKERS = ("latest", "best")
_NAME = re.compile(r"(\d+)(?:_(\d+))?")


def run_folder(output_dir: str | Path, arch: str) -> Path:
    """Return the folder for the checkpoints of a run, given --output-dir and --model-arch-name."""
    return Path(output_dir) / network_name(arch)


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
    checkpoints and checkpoints of other programs, but neither folders that folders.clean removes nor folders without
    checkpoint files."""
    return [folder for folder in below(root) if _holds_checkpoint(folder)]


def _holds_checkpoint(folder):
    try:
        return contents.META in os.listdir(folder) or contents.is_foreign(folder)
    except OSError:  # an unreadable folder may contain a checkpoint
        return True


def newest_first(root: str | Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[tuple[Path, str]]]:
    """List the checkpoints below ROOT.

    Returns:
        ([(folder, meta)] of the checkpoints with a valid meta.json, most recently written first; [(folder, problem)] of
        all other folders with the name of a checkpoint, sorted by epoch and step).
    """
    valid, damaged = [], []
    for folder in below(root):
        try:
            valid.append((folder, contents.read_meta(folder)))
        except contents.DamagedError as e:
            damaged.append((folder, str(e)))
    return sorted(valid, key=lambda pair: pair[1]["sequence"], reverse=True), damaged


def newest(root: str | Path) -> Path | None:
    """Return the most recently written checkpoint with a valid meta.json below ROOT. If no checkpoint has a valid
    meta.json, return the checkpoint of another program with the highest epoch number, or None. The files are not
    verified."""
    valid, others = newest_first(root)
    foreign = [folder for folder, _ in others if contents.is_foreign(folder)]
    return valid[0][0] if valid else next(reversed(foreign), None)


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder contains a checkpoint: a meta.json, valid or damaged, or parameters that a different
    trainer wrote (see contents.is_foreign)."""
    return os.path.lexists(Path(folder) / contents.META) or contents.is_foreign(folder)


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
