"""The schema of meta.json. saver.py writes the file. contents.py validates the file on every read, so all other code
can rely on the schema.
"""

import base64
import json
import random
import re
import reprlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from paddle_resnet.tasks import TASKS
from paddle_resnet.utils.checks import is_count, is_list_of, is_none_or, is_number, is_ratio, is_table, is_text


def problem(meta: dict[str, Any]) -> str | None:
    """Return a description of the first problem in the content of a meta.json (without its checksum), or None if the
    content is valid."""
    for name, is_valid in SCHEMA.items():
        if name not in meta:
            return f"{name} is missing"
        if not is_valid(meta[name]):
            return f"{name} is {reprlib.repr(meta[name])[:100]}"
    step, steps = meta["step"], meta["steps_each_epoch"]
    if (step or 0) > steps:
        return f"step is {step} of {steps}"
    if step is not None and meta["trained"] is None:
        wrong = {rank["loader"]["step"] for rank in meta["ranks"]} - {step}
        if wrong:
            return f"step is {step}, but {min(wrong)} in a loader state"
    if not is_count(meta.get("evaluations_since_best", 0)):  # older checkpoints lack this key
        return f"evaluations_since_best is {reprlib.repr(meta['evaluations_since_best'])[:100]}"
    if not is_list_of(is_text)(meta.get("class_names", [])):  # older checkpoints lack this key
        return f"class_names is {reprlib.repr(meta['class_names'])[:100]}"
    task = TASKS[meta["arguments"].get("multi_label") is True]
    thresholds, count = meta.get("thresholds"), meta["arguments"].get("num_of_class")
    if not is_none_or(is_list_of(is_ratio))(thresholds) or (thresholds is not None and len(thresholds) != count):
        return f"thresholds is {reprlib.repr(meta['thresholds'])[:100]}"
    needed = {"evaluated": task.METRICS, "best": task.METRICS, "trained": task.TRAIN_METRICS}
    for name, metrics in needed.items():
        if meta[name] is not None and (missing := {*metrics} - {*meta[name]}):
            return f"{name} lacks {min(missing)}"
    if "teacher" in meta and not _is_teacher(meta["teacher"]):
        return f"teacher is {reprlib.repr(meta['teacher'])[:100]}"
    if "asp" in meta and not is_table(meta["asp"], sparse_layers=is_count, dense_layers=is_count):
        return f"asp is {reprlib.repr(meta['asp'])[:100]}"
    if "cpu" in meta and not is_table(meta["cpu"], threads=is_count, instructions=is_text):
        return f"cpu is {reprlib.repr(meta['cpu'])[:100]}"
    return None


def _is_result(value):
    """Return whether a value is a dictionary of training or evaluation metrics."""
    checks = {"loss": is_none_or(is_number), "ips": is_number}
    if not is_table(value, **checks) or not all(map(is_none_or(is_number), value.values())):
        return False
    ratios = [value[name] for name in ("top1", "top5", "map", "map_micro") if name in value]
    return all(map(is_ratio, ratios))


def _is_best(value):
    return _is_result(value) and is_count(value.get("epoch"))


def _is_rank(value):
    """Return whether a value is the state of a process, which consists of a loader state and the meter states."""
    return is_table(value, loader=_is_loader, meters=is_table) and all(map(_is_meter, value["meters"].values()))


def _is_loader(value):
    return (
        is_table(value, step=is_count, conditions=is_table)
        and is_count(value.get("epoch", 0))  # older checkpoints lack this key
        and _is_base64(value.get("pipeline", ""))
    )


def _is_base64(value):
    try:
        return is_text(value) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False


def _is_meter(value):
    return is_table(value, sum=is_number, count=is_count) and is_count(value.get("not_finite", 0))


def _are_seeds(value):
    """Return whether the random number generators accept their recorded states."""
    try:
        random.Random().setstate(as_tuples(json.loads(value["python"])))
        name, keys, position, *rest = json.loads(value["numpy"])
        np.random.RandomState().set_state((name, keys, position, *rest))
        return 0 <= position <= len(keys)  # NumPy 1.26 crashes at a wrong position
    except Exception:  # each generator raises different errors
        return False


def as_tuples(value: Any) -> Any:
    """Convert nested lists from JSON to tuples, which random.setstate requires."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def _is_teacher(value):
    """Return whether a value describes the teacher of a run (--teacher), possibly with its main metric."""
    is_described = is_table(value, folder=is_text, arch=is_text, sha256=_is_sha256)
    return is_described and all(is_ratio(value[name]) for name in ("top1", "map") if name in value)


def _are_files(value):
    """Return whether a value is {name: {"size", "sha256"}} for the files in a checkpoint folder, and includes
    parameters and optimizer state."""
    return (
        is_table(value)
        and all(re.fullmatch(r"[^/.\0][^/\0]*", name) for name in value)
        and all(is_table(entry, size=_is_size, sha256=_is_sha256) for entry in value.values())
        and prefix(value) is not None
    )


def prefix(files: Iterable[str]) -> str | None:
    """Return X if X.pdparams and X.pdopt are the only files with these suffixes, otherwise None."""
    [names, others] = (
        [name.removesuffix(end) for name in files if name.endswith(end)] for end in (".pdparams", ".pdopt")
    )
    return names[0] if names == others and len(names) == 1 else None


def _is_size(value):
    return type(value) is int and value >= 0


def _is_sha256(value):
    return is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None


SCHEMA = {
    "sequence": is_count,
    "run": is_text,
    "epoch": is_count,
    "step": is_none_or(is_count),
    "steps_each_epoch": is_count,
    "lr_scheduler": lambda value: is_table(value, last_epoch=is_count),
    "world_size": lambda value: is_count(value) and value > 0,
    "classes": is_list_of(is_text),
    "arguments": is_table,
    "trained": is_none_or(_is_result),
    "evaluated": is_none_or(_is_result),
    "best": is_none_or(_is_best),
    "seeds": _are_seeds,
    "ranks": lambda value: bool(value) and is_list_of(_is_rank)(value),
    "files": _are_files,
}
