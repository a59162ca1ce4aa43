"""Find, check and load the teacher of --teacher (components/distillation.py)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet.checkpoints import contents, restore, run_folders, schema, variables
from paddle_resnet.components import quantization
from paddle_resnet.components.distillation import PREFIX, Settings, Teacher
from paddle_resnet.components.sparsity import MASK
from paddle_resnet.data import numbering
from paddle_resnet.job import exchange
from paddle_resnet.models import user_file
from paddle_resnet.settings import parsing
from paddle_resnet.settings.declarations import of_kinds
from paddle_resnet.step import facts
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.meters import main_metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddle_resnet.checkpoints.start import StartCheckpoint


def resolve(path: str) -> str:
    """Return the checkpoint folder that --teacher specifies. Rank 0 chooses the checkpoint for all ranks, because the
    best checkpoint of a run that is still training may change.

    Raises:
        UsageError: the folder does not exist or contains no checkpoint with a meta.json.
    """
    return exchange.from_rank_0(lambda: _resolve(path))


def _resolve(path):
    try:
        folder = run_folders.resolve(path)
    except OSError as e:
        raise UsageError(f"--teacher {path}: cannot be read ({e.strerror}); make it readable") from e
    if not os.path.lexists(folder / contents.META):
        problem = f"contains no {contents.META}" if folder.is_dir() else "is not a folder"
        raise UsageError(f"--teacher {path}: {problem}; choose the folder of a run or of a checkpoint")
    return str(folder)


def find(flags: dict[str, Any]) -> Teacher | None:
    """Return the teacher of a run, or None without --teacher.

    Args:
        flags: {flag: value} of the run; `teacher` is a result of resolve(). A Python file is imported only if
            `model_arch_name` specifies it.
    Raises:
        UsageError: the checkpoint is damaged; its network is from a file, but that of the run is not; its recorded
            flags are invalid; or its preprocessing, number of classes or value of --multi-label is different.
    """
    folder = flags["teacher"]
    if folder is None:
        return None
    label = f"--teacher {folder}"
    try:
        meta = contents.read_meta(folder)
    except contents.DamagedError as e:
        raise UsageError(f"{label}: unusable: {e}; choose a different checkpoint") from e
    file = _own_file(label, meta["arguments"].get("model_arch_name"), flags["model_arch_name"])
    recorded = restore.recorded_flags(folder, meta, file)
    if recorded.multi_label != flags["multi_label"]:
        value = str(recorded.multi_label).lower()
        raise UsageError(f"{label}: was trained with --multi-label {value}; use this value, or a different teacher")
    if recorded.num_of_class != flags["num_of_class"]:
        raise UsageError(
            f"{label}: has {recorded.num_of_class} classes, but this run has {flags['num_of_class']}; use a teacher "
            "that was trained on the classes of this run"
        )
    channels = flags["image_shape"][0]
    expected, own = _preprocessing(recorded.as_dict(), channels), _preprocessing(flags, channels)
    if expected != own:
        remedy = " ".join(parsing.arguments({name: v for name, v in expected.items() if v != own[name]}))
        raise UsageError(f"{label}: was trained with different preprocessing; use {remedy}, or a different teacher")
    prefix = schema.prefix(meta["files"])
    name = f"{prefix}{facts.AVERAGES}" if f"{prefix}{facts.AVERAGES}" in meta["files"] else f"{prefix}.pdparams"
    evaluated = meta["evaluated"] or {}
    metric = {main_metric(evaluated): evaluated[main_metric(evaluated)]} if evaluated else {}
    classes = restore.recorded_classes(meta) or []
    return Teacher(recorded.model_arch_name, Path(folder) / name, meta["files"][name]["sha256"], classes, metric)


def _preprocessing(flags, channels):
    """Return {flag: value} for the preprocessing in the flags of a run, {flag: value}, for images with a number of
    channels. A fourth channel contains zeros, so the teacher of a run may have three or four channels."""
    shape = {"image_shape": [channels, *flags["image_shape"][1:]]}
    return shape | {name: flags[name] for name in of_kinds("preprocessing")}


def _own_file(label, recorded, arch):
    """If the network of the teacher is from a user's file, return FILE.py:NAME for the file of the run, otherwise None.
    Raise UsageError if the network of the run is not from a file."""
    if not isinstance(recorded, str) or user_file.split(recorded) is None:
        return None
    _, name = user_file.split(recorded)
    if user_file.split(arch) is None:
        raise UsageError(
            f"{label}: its network {recorded} is from a file, which is imported only if --model-arch-name specifies "
            "it; define both networks in one file, or use a different teacher"
        )
    path, _ = user_file.split(arch)
    return f"{path}:{name}"


def check_resumed(checkpoint: StartCheckpoint | None, teacher: Teacher | None) -> None:
    """Raise UsageError if a run that resumes from `checkpoint` does not use the teacher of the run that wrote it."""
    if checkpoint is None or not checkpoint.resumes:
        return
    recorded = (checkpoint.meta or {}).get("teacher")
    if recorded is None and teacher is not None:
        raise UsageError(f"{checkpoint.label}: was trained without --teacher; use --teacher None, or start a new run")
    if recorded is not None and teacher is None:
        remedy = f"use --teacher {shlex.quote(recorded['folder'])}, or start a new run"
        raise UsageError(f"{checkpoint.label}: was trained with --teacher; {remedy}")
    if recorded is not None and recorded["sha256"] != teacher.sha256:
        raise UsageError(
            f"--teacher {teacher.weights.parent}: {teacher.weights.name} differs from the weights with which "
            f"{checkpoint.folder} was trained; use --teacher {shlex.quote(recorded['folder'])} with its original "
            "weights, or start a new run"
        )


def check_classes(program: static.Program, classes: Sequence[str]) -> None:
    """Raise UsageError if the names or the order of the classes differ between the teacher of a training program, if it
    has one, and the data set. Classes without names are only counted, by find()."""
    teacher, now = facts.of(program).teacher, [*classes]
    if teacher is None or not numbering.have_names(teacher.classes, now):
        return
    if teacher.classes != now:
        raise UsageError(
            f"--teacher {teacher.weights.parent}: its classes differ from those of the data set "
            f"({restore.first_difference(teacher.classes, now)}); use a teacher that was trained on the classes of "
            "this run"
        )


def start(settings: Settings, loaded: facts.Loaded) -> bool:
    """Like `start` of a component: load the teacher of a training program, and return whether the trained weights have
    changed. For exceptions, see load."""
    load(loaded.program, loaded.place)
    return False


def load(program: static.Program, place: variables.Place) -> None:
    """Load the weights of the teacher of a training program, if it has one. Later stages share the variables of the
    teacher.

    Args:
        program: training Program; the weights are stored in the global scope.
        place: device of the program.
    Raises:
        UsageError: the file is damaged, does not match the network or contains values that are not finite.
    """
    teacher = facts.of(program).teacher
    if teacher is None:
        return
    label = f"--teacher {teacher.weights.parent}"
    state = variables.read_weights(teacher.weights, label)
    own = [variable for variable in program.list_vars() if variable.persistable and variable.name.startswith(PREFIX)]
    names = {variable.name.removeprefix(PREFIX) for variable in own}
    # The zeros of pruned weights are stored in the weights, so the masks of --asp are not needed.
    state = {name: array for name, array in state.items() if not name.endswith(MASK)}
    if ranges := [name for name in state if quantization.is_range(name)]:
        logger.info(f"{label}: was trained with --qat, but runs without rounding to INT8")
        state = {name: array for name, array in state.items() if name not in ranges}
    if names != set(state):
        raise UsageError(
            f"{label}: {teacher.weights.name} does not match {teacher.arch} (variables: {len(names - set(state))} "
            f"missing, {len(set(state) - names)} unknown); use a checkpoint of this network with its classifier"
        )
    for variable in own:
        array, shape = state[variable.name.removeprefix(PREFIX)], tuple(variable.shape)
        if array.ndim == 4 and {array.shape[1], shape[1]} == {3, 4}:  # a fourth input channel contains zeros
            array = np.pad(array, [(0, 0), (0, 1), (0, 0), (0, 0)])[:, : shape[1]]
        if array.shape != shape or not np.isfinite(array).all():
            problem = f"the shape {list(array.shape)}" if array.shape != shape else "values that are not finite"
            name = variable.name.removeprefix(PREFIX)
            raise UsageError(f"{label}: {name} has {problem}; choose a different checkpoint")
        is_bfloat16 = variable.dtype == paddle.bfloat16
        array = variables.bfloat16(array) if is_bfloat16 else array.astype(convert_dtype(variable.dtype))
        static.global_scope().var(variable.name).get_tensor().set(np.ascontiguousarray(array), place)
    score = "".join(f", {name} {value:.4f}" for name, value in teacher.metric.items())
    logger.info(f"{label}: {teacher.arch}{score}")
