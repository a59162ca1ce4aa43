"""A program's variables and their files, PREFIX.pdparams and PREFIX.pdopt: pickled {name: array}, the format of
`paddle.static.load`. Loading is strict. Parameters are float32 on the disk, whatever the training precision.
"""

from pathlib import Path

import numpy as np
import paddle
from paddle import static

from paddle_resnet.checkpoints import arrays, folders
from paddle_resnet.models import ends
from utils import logger
from utils.errors import UsageError

LOSS_SCALE = "loss_scaling_0"  # Paddle's name of the variable
MASTER = "_fp32_master_0"  # what Paddle appends to a float16 parameter's name for its master copy
MASK = ".asp_mask"  # what ASP appends to a pruned parameter's name for its mask


def load_start(args, found, program, place):
    """Load what the run starts from: a checkpoint (restore.Found), pretrained parameters, or neither, which keeps the
    initial values of the start-up program.

    Returns:
        whether the weights are already pruned.
    Raises:
        UsageError: as load and load_pretrained.
    """
    if found is not None:
        return load(args, found.folder, program, place)
    if args.from_pretrained_params is not None:
        load_pretrained(args, program, place)
    return False


def load(args, folder, program, place):
    """Set parameters and, in a training program, the optimizer from a checkpoint's folder.

    Args:
        args: flags.
        folder: with PREFIX.pdparams and, for a training program, PREFIX.pdopt; folders.prefix says which.
        program: training or evaluation Program whose start-up program has run.
        place: where the program runs.
    Returns:
        whether the weights are already pruned.
    Raises:
        UsageError: a file is damaged or of another model.
    """
    resumed = args.resume and Path(folder).parent == folders.run_folder(args)
    flag = f"--resume: {folder}" if resumed else f"--from-checkpoint {folder}"
    try:
        prefix = folders.prefix(args, folder)
    except folders.DamagedError as e:
        raise UsageError(f"{flag} is damaged: {e}: name another checkpoint") from e
    state = _read(f"{prefix}.pdparams", flag)
    parameters, others = variables(program)
    _refuse_other_classes(args, state, parameters, ends(program).last, flag)
    _load_parameters(args, program, state, flag, place)
    if others:
        _load_strictly(others, _read(f"{prefix}.pdopt", flag), flag, place, "flags of the optimizer", args.verbose)
    if LOSS_SCALE in others and not args.use_dynamic_loss_scaling:
        before = read(LOSS_SCALE)
        if before.item() != args.scale_loss:  # a fixed scale is the flag's, not the checkpoint's
            logger.info(f"the loss scale is that of --scale-loss {args.scale_loss:g} (was {before.item():g})")
            set_variable(LOSS_SCALE, np.full_like(before, args.scale_loss), place)
    return any(name.endswith(MASK) for name in state)


def load_pretrained(args, program, place):
    """Load the parameters from --from-pretrained-params strictly; the optimizer keeps its initial state. With
    --pretrained-mismatch skip-classifier, a classifier of another shape keeps its initial values.

    Raises:
        UsageError: the file is missing, damaged or of another model.
    """
    flag = f"--from-pretrained-params {args.from_pretrained_params}"
    state = _read(pretrained_file(args), flag)
    skipped, (parameters, _) = [], variables(program)
    others = [name for name in ends(program).last if name not in state or tuple(state[name].shape) != parameters[name]]
    if args.pretrained_mismatch == "error":
        _refuse_other_classes(args, state, parameters, ends(program).last, flag)
    else:
        skipped = others
        state = {name: array for name, array in state.items() if name not in skipped}
        logger.info(f"--pretrained-mismatch skip-classifier: left out {', '.join(skipped) or 'nothing'}")
    _load_parameters(args, program, state, flag, place, skipped)


def pretrained_file(args):
    """The file that --from-pretrained-params names.

    Raises:
        UsageError: there is none.
    """
    given = Path(args.from_pretrained_params)
    flag = f"--from-pretrained-params {given}"
    try:
        candidates = [given, Path(f"{given}.pdparams"), Path(f"{folders.prefix(args, given)}.pdparams")]
    except folders.DamagedError as e:
        raise UsageError(f"{flag} is damaged: {e}: name another checkpoint") from e
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise UsageError(f"{flag}: neither {candidates[1]} nor {candidates[2]} exists: name such a file or its folder")
    return path


def _refuse_other_classes(args, state, parameters, classifier, flag):
    """If only the number of classes differs, the remedy depends on what the run does with the checkpoint."""
    differing = {
        name
        for name, shape in parameters.items()
        if not name.endswith(MASK) and (name not in state or _shape(state[name].shape) != shape)
    }
    weight = next(name for name in classifier if name.endswith(".w_0"))
    if differing != set(classifier) or weight not in state or state[weight].ndim != 2:
        return
    (inputs, classes), own = state[weight].shape, parameters[weight]
    if inputs == own[0]:
        remedy = f"use --num-of-class {classes}"
        if not args.run_scope.trains:
            remedy += " and images of its classes"
        elif args.from_pretrained_params is not None:
            remedy = f"add --pretrained-mismatch skip-classifier to train a new last layer, or {remedy}"
        elif not args.resume:
            remedy = (
                "use --from-pretrained-params and --pretrained-mismatch skip-classifier instead to train a new last "
                f"layer, or {remedy}"
            )
        raise UsageError(f"{flag} has {classes} classes and this run {own[1]}: {remedy}")


def load_statistics(args, path, place):
    """Set this process's own BN statistics from bn_rankN.npz.

    Raises:
        UsageError: the file is damaged or of another model.
    """
    state = _read(path, "--resume", arrays.read_npz)
    known = {name: _shape(_tensor(name).shape()) for name in state if static.global_scope().find_var(name) is not None}
    _load_strictly(known, state, f"--resume: {path}", place, "--model-arch-name", args.verbose)


def snapshot(program):
    """({parameter: float32 array}, {optimizer variable: array}) in host memory."""
    parameters, others = variables(program)
    params = {name: read(name) for name in parameters}
    optimizer = {name: read(name) for name in others}
    for name in parameters:
        if name + MASTER in others:
            if name + MASK in parameters:  # the optimizer masks the float16 parameter, but not its master
                optimizer[name + MASTER] = optimizer[name + MASTER] * params[name + MASK].astype(np.float32)
            params[name] = optimizer[name + MASTER]
    return params, optimizer


def _load_parameters(args, program, state, flag, place, skipped=()):
    parameters, others = variables(program)
    parameters = {name: shape for name, shape in parameters.items() if name not in skipped}
    is_sparse = any(name.endswith(MASK) for name in state)
    if not any(name.endswith(MASK) for name in parameters):
        # A dense program takes sparse weights without their masks. Training would change the zeros.
        if is_sparse and others:
            _check_masks_may_be_dropped(args, flag)
        state = {name: array for name, array in state.items() if not name.endswith(MASK)}
    elif not is_sparse:
        if not args.prune_model:
            raise UsageError(f"{flag}: has dense weights, and --asp requires pruned ones; add --prune-model")
        # A sparse program may start from dense weights, which are pruned next.
        parameters = {name: shape for name, shape in parameters.items() if not name.endswith(MASK)}
    elif dense := [name for name in parameters if name.endswith(MASK) and name not in state]:
        # Older versions excluded the first layer.
        state |= {name: np.ones_like(read(name)) for name in dense}
        logger.info(f"{flag}: has no {', '.join(dense)}; these weights remain dense")
    remedy = f"--model-arch-name (now {args.model_arch_name}), --num-of-class, --image-shape and --asp"
    _load_strictly(parameters, state, flag, place, remedy, args.verbose)
    for name in parameters:
        if name + MASTER in others:
            set_variable(name + MASTER, state[name].astype(np.float32), place)


def _check_masks_may_be_dropped(args, flag):
    if "asp" not in args.given:
        keep = "--asp" if args.from_pretrained_params is None else "--asp --prune-model"
        raise UsageError(
            f"{flag}: has 2:4 sparse weights, which training without --asp makes dense; use {keep} to keep them "
            "sparse, or --asp false"
        )
    logger.warn(f"{flag}: has 2:4 sparse weights, which --asp false makes dense")


def _load_strictly(variables, state, flag, place, remedy, is_verbose):
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
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped, "of another type": retyped}
    if counts := [f"{len(found)} {what}" for what, found in lists.items() if found]:
        lines = [f"{what}: {', '.join(found)}" for what, found in lists.items() if found and is_verbose]
        hint = "" if is_verbose else " (--verbose names the variables)"
        sentence = f"{flag} is of another model: {', '.join(counts)}: give the {remedy} it was trained with{hint}"
        raise UsageError(sentence, *lines)
    for name in variables:
        set_variable(name, state[name], place)


def variables(program):
    """({parameter: shape}, {optimizer variable: shape}); BN statistics and ASP masks count as parameters."""
    parameters, others = {}, {}
    for var in program.list_vars():
        if var.persistable and var.name not in ("feed", "fetch"):
            is_parameter = isinstance(var, paddle.base.framework.Parameter)
            (parameters if is_parameter else others)[var.name] = _shape(_tensor(var.name).shape())
    return parameters, others


def _has_type_of(name, array):
    """Whether an array suits a variable's type: floats of any width suit floats, others need the same type."""
    tensor = _tensor(name)
    dtype = np.array(tensor).dtype
    is_float = dtype.kind == "f" or tensor._dtype() == paddle.bfloat16
    return array.dtype == dtype or (is_float and array.dtype.kind == "f")


def _shape(shape):
    """The learning rate has shape () here; files of Paddle, and older ones of this project, may have (1,)."""
    return tuple(shape) or (1,)


def _tensor(name):
    return static.global_scope().find_var(name).get_tensor()


def read(name):
    return np.array(_tensor(name))


def set_variable(name, array, place):
    tensor = _tensor(name)
    if array.dtype.kind == "f":
        array = _bfloat16(array) if tensor._dtype() == paddle.bfloat16 else array.astype(np.array(tensor).dtype)
    # The shape stays the tensor's: ascontiguousarray would give a scalar, the learning rate, one dimension.
    tensor.set(np.ascontiguousarray(array).reshape(tensor.shape()), place)


def _bfloat16(array):
    """Round floats to the nearest bfloat16, ties to even as on a GPU. Paddle takes them as uint16, the upper half of a
    float32's bits."""
    bits = array.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _read(path, flag, read=arrays.read_pickle):
    try:
        return read(path)
    except arrays.UnreadableError as e:
        raise UsageError(f"{flag}: {path} cannot be read ({e}): name another checkpoint") from e
