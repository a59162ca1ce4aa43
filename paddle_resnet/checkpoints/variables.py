"""Load checkpoint files into the variables of a program, and read the values of these variables. The files
PREFIX.pdparams and PREFIX.pdopt are pickles of {name: array}, the format of `paddle.static.load`. Loading is strict:
all names, shapes and types must match, except for the width of floating-point types and for the differences that the
flags allow (LoadOptions). Parameters are stored in float32, regardless of the training precision.

PREFIX.pdema contains averages of the weights (such as those of --ema) in the format of PREFIX.pdparams. If a checkpoint
contains PREFIX.pdema, evaluation, prediction, export and --from-pretrained-params read PREFIX.pdema instead of
PREFIX.pdparams.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddle import static

from paddle_resnet import graph
from paddle_resnet.checkpoints import arrays, contents
from paddle_resnet.checkpoints.start import StartCheckpoint
from paddle_resnet.components import distillation, quantization
from paddle_resnet.components.sparsity import MASK, has_masks_of_signed_search
from paddle_resnet.models import ends
from paddle_resnet.settings import values
from paddle_resnet.settings.field import about
from paddle_resnet.step import facts, scalars
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

Place = paddle.CPUPlace | paddle.CUDAPlace

LOSS_SCALE = "loss_scaling_0"  # Paddle's name for the variable that contains the loss scale
MASTER = "_fp32_master_0"  # suffix of the float32 master copy of a half-precision parameter


@dataclass(frozen=True)
class LoadOptions:
    """The flags that determine which differences between a checkpoint and the program are errors, and which remedies
    the error messages suggest; see `train.py --help all`."""

    from_pretrained_params: str | None
    model_arch_name: str
    pretrained_mismatch: str
    prune_model: bool
    resume: bool
    run_scope: RunScope
    scale_loss: float
    use_dynamic_loss_scaling: bool
    verbose: bool
    has_explicit_asp: bool = about("is_explicit", "asp")
    model_prefix: values.FlagValue = about("flag_value", "model_prefix")


def load_start(
    options: LoadOptions, checkpoint: StartCheckpoint | None, program: static.Program, place: Place
) -> set[str]:
    """Load the initial variables of a run from a checkpoint or from pretrained parameters. If there is neither a
    checkpoint nor pretrained parameters, the variables keep their values from the startup program.

    Returns:
        the set of names in PREFIX.pdparams of the checkpoint; empty if there is no checkpoint.
    Raises:
        UsageError: load or load_pretrained fails.
    """
    if checkpoint is not None:
        return load(options, checkpoint.folder, program, place, checkpoint.label)
    if options.from_pretrained_params is not None:
        load_pretrained(options, program, place)
    return set()


def load(
    options: LoadOptions,
    folder: str | Path,
    program: static.Program,
    place: Place,
    label: str | None = None,
    log: Callable[[str], object] = logger.info,
) -> set[str]:
    """Load the parameters and, for a training program, the optimizer state from a checkpoint folder.

    Args:
        options: how the run uses the weights.
        folder: folder with PREFIX.pdparams and, for a training program, PREFIX.pdopt, see contents.prefix.
        program: training or evaluation Program whose startup program has run.
        place: device of the program.
        label: name of the checkpoint in messages; if None, the path of the folder.
        log: function that logs a message if averages are loaded.
    Returns:
        the set of names in PREFIX.pdparams.
    Raises:
        UsageError: a file is damaged or does not match the model, or a training program finds no optimizer state.
    """
    label = label or str(folder)
    prefix = _prefix(options, folder, label)
    parameters, others = variables(program)
    state = read_weights(Path(f"{prefix}.pdparams") if others else _evaluated(prefix), label, log)
    _check_number_of_classes(options, state, parameters, ends(program).last, label)
    _load_parameters(options, program, state, label, place)
    if others:
        optimizer = _read(f"{prefix}.pdopt", label)
        if not optimizer:  # empty if `python -m paddle_resnet.weights` wrote the checkpoint
            raise UsageError(f"{label}: has no optimizer state; use --from-pretrained-params {folder}")
        remedy = "--optimizer, --lookahead and --amp flags"
        _load_strictly(others, optimizer, label, place, remedy, options.verbose)
    if LOSS_SCALE in others and not options.use_dynamic_loss_scaling:
        before = read(LOSS_SCALE)
        if before.item() != options.scale_loss:
            logger.info(f"--scale-loss {options.scale_loss:g}: replaces the checkpoint's loss scale {before.item():g}")
            set_variable(LOSS_SCALE, np.full_like(before, options.scale_loss), place)
    return set(state)


def _prefix(options, folder, label):
    try:
        return contents.prefix(folder, options.model_prefix)
    except contents.DamagedError as e:
        raise UsageError(f"{label}: unusable: {e}; choose a different checkpoint") from e


def _evaluated(prefix):
    """Return the path of the weights to evaluate: PREFIX.pdema if the checkpoint contains this file, otherwise
    PREFIX.pdparams."""
    path = Path(f"{prefix}{facts.AVERAGES}")
    return path if contents.contains(path) else Path(f"{prefix}.pdparams")


def read_weights(path: Path, label: str, log: Callable[[str], object] = logger.info) -> dict[str, np.ndarray]:
    """Return the content of PREFIX.pdparams or PREFIX.pdema. `label` is the name of the checkpoint in messages, and
    `log` logs a message if the weights are averages. Raises UsageError if the file is damaged or cannot be read."""
    if path.suffix == facts.AVERAGES:
        log(f"{label}: loading the averaged weights, {path.name}")
    return _read(path, label)


def states(program: static.Program) -> list[facts.State]:
    """Return the list of the facts.State of a training program."""
    return facts.of(program).states


def load_states(
    options: LoadOptions, checkpoint: StartCheckpoint | None, program: static.Program, place: Place
) -> list[facts.State]:
    """Load the states of a training program that have a file of their own (facts.State) from a checkpoint. load() loads
    the states in PREFIX.pdopt.

    Args:
        options: how the run uses the weights.
        checkpoint: the checkpoint that the run starts from, or None.
        program: training Program.
        place: device of the program.
    Returns:
        the states that start_states must initialize: those whose file the checkpoint does not contain, or all states if
        there is no checkpoint.
    Raises:
        UsageError: a file is damaged, cannot be read or does not match the model.
    """
    if checkpoint is None:
        return states(program)
    prefix, missing = _prefix(options, checkpoint.folder, checkpoint.label), []
    for state in states(program):
        if state.file in (None, facts.OPTIMIZER):
            continue
        path = Path(f"{prefix}{state.file}")
        if not contents.contains(path):
            missing.append(state)
            continue
        saved = _read(path, checkpoint.label)
        saved = {variable: saved[name] for name, variable in state.variables.items() if name in saved}
        shapes = {name: _shape(_tensor(name).shape()) for name in state.variables.values()}
        _load_strictly(shapes, saved, checkpoint.label, place, "--model-arch-name", options.verbose)
    return missing


def start_states(
    missing: list[facts.State], checkpoint: StartCheckpoint | None, program: static.Program, place: Place
) -> None:
    """Copy the current weights and BN statistics of a training program to the states in `missing` that start with the
    values of their sources (starts_as_source in facts.State)."""
    params, _ = snapshot(program)
    for state in missing:
        if not state.starts_as_source:
            continue
        for name, variable in state.variables.items():
            set_variable(variable, params[name], place)
        if checkpoint is not None and state.file != facts.OPTIMIZER:
            logger.info(f"{state.flag}: {state.what} initialized with the weights of {checkpoint.folder}")


def own_files(program: static.Program, params: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the content of the files of states (facts.State), {suffix: {name: array}}: the parameters `params` that
    snapshot() returned, in which the variables of the state replace their sources."""
    return {
        state.file: params | {name: read(variable) for name, variable in state.variables.items()}
        for state in states(program)
        if state.file not in (None, facts.OPTIMIZER)
    }


def load_pretrained(options: LoadOptions, program: static.Program, place: Place) -> None:
    """Load the parameters of --from-pretrained-params. The optimizer keeps its initial state. With
    --pretrained-mismatch skip-classifier, the variables of the classifier that are missing or have a different shape
    are set to zero (Kolesnikov et al., arXiv:1912.11370, section 3.3); all other parameters must match.

    Raises:
        UsageError: the file is missing or damaged, or does not match the model.
    """
    label = f"--from-pretrained-params {options.from_pretrained_params}"
    state = read_weights(pretrained_file(options.from_pretrained_params, options.model_prefix), label)
    skipped, (parameters, others) = [], variables(program)
    differing = [n for n in ends(program).last if n not in state or tuple(state[n].shape) != parameters[n]]
    if options.pretrained_mismatch == "skip-classifier":
        skipped = differing
        state = {name: array for name, array in state.items() if name not in skipped}
        names = f"skipped {', '.join(skipped)}, which start at 0" if skipped else "skipped nothing"
        logger.info(f"--pretrained-mismatch skip-classifier: {names}")
    else:
        _check_number_of_classes(options, state, parameters, ends(program).last, label)
    _load_parameters(options, program, state, label, place, skipped)
    for name in skipped:
        # Random logits would cause large gradients, which would damage the pretrained layers in the first steps.
        zeros = np.zeros(parameters[name], np.float32)
        set_variable(name, zeros, place)
        _set_master(name, zeros, others, place)


def pretrained_file(path: str | Path, model_prefix: values.FlagValue) -> Path:
    """Return the file that --from-pretrained-params specifies.

    Args:
        path: value of --from-pretrained-params.
        model_prefix: values.FlagValue of --model-prefix.
    Raises:
        UsageError: the file does not exist, or its checkpoint is damaged.
    """
    start = Path(path)
    flag = f"--from-pretrained-params {start}"
    try:
        candidates = [start, Path(f"{start}.pdparams"), _evaluated(contents.prefix(start, model_prefix))]
    except contents.DamagedError as e:
        raise UsageError(f"{flag}: unusable: {e}; choose a different checkpoint") from e
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise UsageError(
            f"{flag}: neither {candidates[1]} nor {candidates[2]} exists; choose a .pdparams file or its folder"
        )
    return path


def _check_number_of_classes(options, state, parameters, classifier, label):
    """Raise UsageError if the checkpoint matches the network except for the number of classes, or except for a missing
    classifier. The remedy in the message depends on how the run uses the checkpoint."""
    differing = {
        name
        for name, shape in parameters.items()
        if not name.endswith(MASK) and (name not in state or _shape(state[name].shape) != shape)
    }
    weight = next(name for name in classifier if name.endswith(".w_0"))
    if differing == set(classifier) and not differing & set(state):
        remedy = "--from-pretrained-params and --pretrained-mismatch skip-classifier"
        raise UsageError(f"{label}: has no classifier; train one with {remedy}")
    if differing != set(classifier) or weight not in state or state[weight].ndim != 2:
        return
    (inputs, classes), own = state[weight].shape, parameters[weight]
    if inputs == own[0]:
        remedy = f"use --num-of-class {classes}"
        if not options.run_scope.trains:
            remedy += " and images of its classes"
        elif options.from_pretrained_params is not None:
            remedy = f"add --pretrained-mismatch skip-classifier to train a new last layer, or {remedy}"
        elif not options.resume:
            remedy = (
                "to train a new last layer, use --from-pretrained-params and --pretrained-mismatch skip-classifier; "
                f"otherwise {remedy}"
            )
        raise UsageError(f"{label}: has {classes} classes, but this run has {own[1]}; {remedy}")


def load_statistics(path: str | Path, place: Place, is_verbose: bool) -> None:
    """Load the BN statistics of this process from bn_rankN.npz. Variables that follow a statistic (facts.State, such as
    NAME.ema) in the file, but are not in the program, are ignored.

    Args:
        path: path of the file.
        place: device of the program.
        is_verbose: whether error messages list the variables.
    Raises:
        UsageError: the file is damaged or does not match the model.
    """
    state = _read(path, "--resume", arrays.read_npz)
    known = {name: _shape(_tensor(name).shape()) for name in state if static.global_scope().find_var(name) is not None}
    state = {name: array for name, array in state.items() if name in known or name.rpartition(".")[0] not in state}
    _load_strictly(known, state, f"--resume: {path}", place, "--model-arch-name", is_verbose)


def snapshot(program: static.Program) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Copy variables to host memory, and return ({parameter: float32 array}, {optimizer variable: array})."""
    parameters, others = variables(program)
    params = {name: read(name) for name in parameters}
    optimizer = {name: read(name) for name in others}
    for name in parameters:
        if name + MASTER in others:
            params[name] = optimizer[name + MASTER]
    return params, optimizer


def _load_parameters(options, program, state, label, place, skipped=()):
    parameters, others = variables(program)
    parameters = {name: shape for name, shape in parameters.items() if name not in skipped}
    parameters, state = _match_ranges(options, program, parameters, state, label)
    is_sparse = any(name.endswith(MASK) for name in state)
    if is_sparse and has_masks_of_signed_search(state):
        logger.warn(
            f"{label}: its masks are from Paddle's mask_2d_best, which maximizes the sum of the kept weights instead "
            "of their magnitudes and thereby removes half of the total magnitude; prune the dense weights again with "
            "--asp --prune-model"
        )
    if not any(name.endswith(MASK) for name in parameters):
        # A program without --asp loads sparse weights without their masks, so training would make them dense.
        if is_sparse and others:
            _check_masks_may_be_dropped(options, label)
        state = {name: array for name, array in state.items() if not name.endswith(MASK)}
    elif not is_sparse:
        if not options.prune_model:
            raise UsageError(f"{label}: has dense weights, but --asp requires pruned weights; add --prune-model")
        # With --prune-model, a program can load dense weights, because they are pruned afterwards.
        parameters = {name: shape for name, shape in parameters.items() if not name.endswith(MASK)}
    elif dense := [name for name in parameters if name.endswith(MASK) and name not in state]:
        # Checkpoints of older versions have no mask for the first layer, which those versions did not prune.
        state |= {name: np.ones_like(read(name)) for name in dense}
        logger.info(f"{label}: has no {', '.join(dense)}; the weights of these masks remain dense")
    remedy = f"--model-arch-name (now {options.model_arch_name}), --num-of-class, --image-shape and --asp"
    _load_strictly(parameters, state, label, place, remedy, options.verbose)
    for name in parameters:
        _set_master(name, state[name], others, place)


def _set_master(name, array, others, place):
    """Set the float32 master weight of a parameter, if there is one. The first update overwrites the parameter with the
    master weight."""
    if name + MASTER in others:
        set_variable(name + MASTER, array.astype(np.float32), place)


def _match_ranges(options, program, parameters, state, label):
    """If only `parameters` or only the pretrained weights in `state` contain ranges of quantized activations (--qat),
    remove these ranges, because training may start from weights with or without ranges. Return (parameters, state).
    Raise UsageError if the program requires ranges that a checkpoint lacks."""
    own = set(quantization.ranges(program))
    if own and not own & set(state):
        if options.from_pretrained_params is None or not options.run_scope.trains:
            raise UsageError(
                f"{label}: was trained without --qat; use --from-pretrained-params to train with --qat, or remove --qat"
            )
        return {name: shape for name, shape in parameters.items() if name not in own}, state
    if not own and options.from_pretrained_params is not None:
        state = {name: array for name, array in state.items() if not quantization.is_range(name)}
    return parameters, state


def _check_masks_may_be_dropped(options, label):
    if not options.has_explicit_asp:
        keep = "--asp" if options.from_pretrained_params is None else "--asp --prune-model"
        raise UsageError(
            f"{label}: has 2:4 sparse weights, which training without --asp makes dense; use {keep} to keep them "
            "sparse, or --asp false"
        )
    logger.warn(f"{label}: has 2:4 sparse weights, which --asp false makes dense; remove this flag to keep them sparse")


def _load_strictly(variables, state, label, place, remedy, is_verbose):
    missing = sorted(set(variables) - set(state))
    unexpected = sorted(set(state) - set(variables))
    reshaped = [
        f"{name} is {list(state[name].shape)}, not {list(shape)}"
        for name, shape in sorted(variables.items())
        if name in state and _shape(state[name].shape) != shape
    ]
    retyped = [
        f"{name} is {state[name].dtype}"
        for name in sorted(variables)
        if name in state and not _has_type_of(name, state[name])
    ]
    lists = {
        "missing": missing,
        "unexpected": unexpected,
        "with a different shape": reshaped,
        "with a different type": retyped,
    }
    if counts := [f"{len(names)} {what}" for what, names in lists.items() if names]:
        lines = [f"{what}: {', '.join(names)}" for what, names in lists.items() if names and is_verbose]
        hint = "" if is_verbose else " (--verbose lists the variables)"
        problem = f"does not match the model (variables: {', '.join(counts)})"
        message = f"{label}: {problem}; use the {remedy} of its training{hint}"
        raise UsageError(message, *lines)
    for name in variables:
        set_variable(name, state[name], place)


def variables(program: static.Program) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return ({parameter: shape}, {optimizer variable: shape}). The parameters include BN statistics and ASP masks.
    Neither dictionary includes the states with a file of their own, such as averages of the weights."""
    parameters, others = {}, {}
    elsewhere = {
        name for state in states(program) if state.file != facts.OPTIMIZER for name in state.variables.values()
    }
    for var in saved(program):
        if var.name not in elsewhere:
            (parameters if graph.is_parameter(var) else others)[var.name] = _shape(_tensor(var.name).shape())
    return parameters, others


def saved(program: static.Program) -> list[static.Variable]:
    """Return the variables of a program that a checkpoint contains, including averages of the weights."""
    omitted = {"feed", "fetch"}
    omitted |= {name for state in states(program) if state.file is None for name in state.variables.values()}
    persistable = [var for var in program.list_vars() if var.persistable and var.name not in omitted]
    return [var for var in persistable if not var.name.startswith((scalars.PREFIX, distillation.PREFIX))]


def _has_type_of(name, array):
    """Return whether a variable can store an array. Floating-point types may differ in width; all other types must be
    equal."""
    tensor = _tensor(name)
    dtype = np.array(tensor).dtype
    is_float = dtype.kind == "f" or tensor._dtype() == paddle.bfloat16
    return array.dtype == dtype or (is_float and array.dtype.kind == "f")


def _shape(shape):
    """Return a shape as a tuple, with () replaced by (1,). The learning rate has the shape () in a program, but may
    have the shape (1,) in files from Paddle and from older versions of this project."""
    return tuple(shape) or (1,)


def _tensor(name):
    return static.global_scope().find_var(name).get_tensor()


@contextlib.contextmanager
def restored(program: static.Program, place: Place) -> Iterator[None]:
    """At the end of the `with` block, reset all persistable variables of a program to their values before the block,
    except host scalars, which are written before each step."""
    persistent = [variable.name for variable in program.list_vars() if variable.persistable]
    names = [name for name in persistent if name not in ("feed", "fetch") and not name.startswith(scalars.PREFIX)]
    present = {name: static.global_scope().find_var(name) for name in names}
    before = {name: read(name) for name, v in present.items() if v is not None and v.get_tensor()._is_initialized()}
    try:
        yield
    finally:
        for name, array in before.items():
            set_variable(name, array, place)


def read(name: str) -> np.ndarray:
    return np.array(_tensor(name))


def set_variable(name: str, array: np.ndarray, place: Place) -> None:
    tensor = _tensor(name)
    if array.dtype.kind == "f":
        array = bfloat16(array) if tensor._dtype() == paddle.bfloat16 else array.astype(np.array(tensor).dtype)
    # reshape() restores the shape of a scalar, such as the learning rate, because ascontiguousarray adds a dimension.
    tensor.set(np.ascontiguousarray(array).reshape(tensor.shape()), place)


def bfloat16(array: np.ndarray) -> np.ndarray:
    """Round floats to the nearest bfloat16, with ties to even, as a GPU does. Paddle represents bfloat16 in NumPy as
    uint16, the upper half of a float32."""
    bits = array.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _read(path, label, read=arrays.read_pickle):
    """Read a file of arrays. If the file belongs to a checkpoint, its content is verified, because the file may have
    changed since the checkpoint was verified. Raises UsageError if the file is damaged or cannot be read."""
    try:
        return read(path, contents.read_listed(Path(path)))
    except contents.DamagedError as e:
        raise UsageError(f"{label}: unusable: {e}; choose a different checkpoint") from e
    except arrays.UnreadableError as e:
        raise UsageError(f"{label}: {path} cannot be read ({e}); choose a different checkpoint") from e
