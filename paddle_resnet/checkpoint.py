"""Checkpoints: OUTPUT_DIR/ARCH/EPOCH/ with PREFIX.pdparams, PREFIX.pdopt and meta.json.

PREFIX.pdparams holds the parameters and the BN statistics, PREFIX.pdopt momentum, learning rate, loss scaling and
float32 master weights, both as pickled {name: array}, which is what `paddle.static.load` reads. meta.json holds
the epoch and the state of the learning-rate schedule. Parameters are float32 in every precision of training.
"""

import json
import os
import pickle
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import paddle
from paddle import static

from utils import logger
from utils.errors import UsageError

META = "meta.json"
FORMAT = 1
_MASTER = "_fp32_master_0"  # what Paddle appends to a float16 parameter's name for its master copy
_MASK = ".asp_mask"  # what ASP appends to a pruned parameter's name for its mask


def save(args, program, epoch, lr_scheduler):
    """Write the state after an epoch.

    Args:
        args: flags.
        program: the training Program (not the compiled one), whose variables are in the global scope.
        epoch: number of the epoch that is done.
        lr_scheduler: its state is saved too.
    Returns:
        the checkpoint's folder. It appears under its name when it is complete.
    """
    parameters, others = _variables(program)
    params = {name: _read(name) for name in parameters}
    for name in parameters:
        if name + _MASTER in others:
            params[name] = _read(name + _MASTER)
            if name + _MASK in parameters:  # the optimizer masks the float16 parameter, not its master
                params[name] *= _read(name + _MASK).astype(np.float32)
    meta = {
        "format": FORMAT,
        "epoch": epoch,
        "arch": args.model_arch_name,
        "num_of_class": args.num_of_class,
        "lr_scheduler": lr_scheduler.state_dict(),
    }
    folder = Path(args.output_dir) / args.model_arch_name / str(epoch)
    partial = folder.with_name(f".{epoch}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(partial / f"{args.model_prefix}.pdparams", pickle.dumps(params, protocol=4))
    _write(partial / f"{args.model_prefix}.pdopt", pickle.dumps({n: _read(n) for n in others}, protocol=4))
    _write(partial / META, json.dumps(meta, indent=1).encode())
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder


def prepare(args):
    """Make the folder that checkpoints go to.

    Raises:
        UsageError: it cannot be made or written.
    """
    folder = Path(args.output_dir) / args.model_arch_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UsageError(f"--output-dir {args.output_dir} cannot be written ({e.strerror}): name another folder") from e


def find(args):
    """The checkpoint that --from-checkpoint and --last-epoch-of-checkpoint name.

    Returns:
        (folder, start epoch).
    Raises:
        UsageError: it does not exist.
    """
    root, wanted = Path(args.from_checkpoint), args.last_epoch_of_checkpoint
    if not root.is_dir():
        raise UsageError(f"--from-checkpoint {root} does not exist: name a folder that holds a checkpoint")
    epochs = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and _params_file(args, p).is_file())
    if wanted is None:
        if not _params_file(args, root).is_file():
            remedy = f"it holds epochs {epochs}: add --last-epoch-of-checkpoint auto or a number"
            if not epochs:
                remedy = "name a folder that holds a checkpoint, or its --model-prefix"
            raise UsageError(f"--from-checkpoint {root} has no {_params_file(args, root).name}; {remedy}")
        return root, 0
    if wanted == "auto":
        if epochs:
            return root / str(epochs[-1]), epochs[-1] + 1
        wanted = _epoch_of(root)
    if wanted in epochs:
        return root / str(wanted), wanted + 1
    if wanted is not None and _epoch_of(root) == wanted and _params_file(args, root).is_file():
        return root, wanted + 1
    raise UsageError(
        f"--last-epoch-of-checkpoint {args.last_epoch_of_checkpoint}: {root} holds no such epoch with "
        f"{args.model_prefix}.pdparams: give one of {epochs or 'another folder'} or another --model-prefix"
    )


def load(args, program, lr_scheduler, place):
    """Restore parameters, optimizer and schedule from --from-checkpoint, strictly.

    Args:
        args: flags.
        program: training or evaluation Program whose start-up program has run. An evaluation program takes the
            parameters alone.
        lr_scheduler: gets its state back, unless --last-epoch-of-checkpoint is None; None for evaluation.
        place: where the program runs.
    Returns:
        the epoch to start with.
    Raises:
        UsageError: no such checkpoint, damaged, or of another model.
    """
    folder, start_epoch = find(args)
    prefix = folder / args.model_prefix
    flag = f"--from-checkpoint {folder}"
    _load_parameters(args, program, _unpickle(f"{prefix}.pdparams", flag), flag, place)
    if lr_scheduler is None:
        logger.info(f"loaded {folder}")
        return start_epoch
    _, others = _variables(program)
    _load_strictly(others, _unpickle(f"{prefix}.pdopt", flag), flag, place, "flags of the optimizer")
    if start_epoch:
        state = _meta(folder)["lr_scheduler"]
        with warnings.catch_warnings():  # LinearWarmup calls the state of the schedule inside it "unused"
            warnings.simplefilter("ignore")
            lr_scheduler.set_state_dict(state)
    logger.info(f"loaded {folder}: starts at epoch {start_epoch}")
    return start_epoch


def load_pretrained(args, program, place):
    """Set the parameters from --from-pretrained-params, strictly, and leave the optimizer fresh.

    Raises:
        UsageError: no such file, damaged, or of another model.
    """
    given = args.from_pretrained_params
    flag = f"--from-pretrained-params {given}"
    candidates = [Path(given), Path(f"{given}.pdparams"), _params_file(args, Path(given))]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise UsageError(f"{flag}: neither {candidates[1]} nor {candidates[2]} exists: name one of such files")
    _load_parameters(args, program, _unpickle(path, flag), flag, place)


def _load_parameters(args, program, state, flag, place):
    parameters, others = _variables(program)
    if not any(name.endswith(_MASK) for name in parameters):
        # A dense program takes the sparse weights and has no use for their masks.
        state = {name: array for name, array in state.items() if not name.endswith(_MASK)}
    elif args.prune_model and not any(name.endswith(_MASK) for name in state):
        # A sparse program starts from dense weights, which are pruned next.
        parameters = {name: shape for name, shape in parameters.items() if not name.endswith(_MASK)}
    remedy = f"--model-arch-name (now {args.model_arch_name}), --num-of-class, --image-shape and --asp"
    _load_strictly(parameters, state, flag, place, remedy)
    for name in parameters:
        if name + _MASTER in others:
            _set(name + _MASTER, state[name].astype(np.float32), place)


def _load_strictly(variables, state, flag, place, remedy):
    missing = sorted(set(variables) - set(state))
    unexpected = sorted(set(state) - set(variables))
    reshaped = [
        f"{name} is {list(state[name].shape)}, not {list(shape)}"
        for name, shape in sorted(variables.items())
        if name in state and tuple(state[name].shape) != shape
    ]
    if missing or unexpected or reshaped:
        problems = [
            f"{len(found)} {what} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
            for what, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
            if found
        ]
        raise UsageError(f"{flag} is of another model: {'; '.join(problems)}: give the {remedy} it was trained with")
    for name in variables:
        _set(name, state[name], place)


def _variables(program):
    """({parameter: shape}, {optimizer variable: shape}); BN statistics and ASP masks count as parameters."""
    parameters, others = {}, {}
    for var in program.list_vars():
        if var.persistable and var.name not in ("feed", "fetch"):
            is_parameter = isinstance(var, paddle.base.framework.Parameter)
            (parameters if is_parameter else others)[var.name] = tuple(_tensor(var.name).shape())
    return parameters, others


def _tensor(name):
    return static.global_scope().find_var(name).get_tensor()


def _read(name):
    return np.array(_tensor(name))


def _set(name, array, place):
    tensor = _tensor(name)
    dtype = np.array(tensor).dtype if array.dtype.kind == "f" else array.dtype
    tensor.set(np.ascontiguousarray(array.astype(dtype)), place)


def _params_file(args, folder):
    return folder / f"{args.model_prefix}.pdparams"


def _meta(folder):
    path = folder / META
    if not path.is_file():
        raise UsageError(
            f"--from-checkpoint {folder} has no {META}, so that the schedule cannot go on: load it with "
            "--last-epoch-of-checkpoint None"
        )
    return json.loads(path.read_text())


def _epoch_of(folder):
    return _meta(folder)["epoch"] if (folder / META).is_file() else None


def _unpickle(path, flag):
    try:
        with open(path, "rb") as f:
            state = pickle.load(f)
    except OSError as e:
        raise UsageError(f"{flag}: {path} cannot be read ({e.strerror}): name a whole checkpoint") from e
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as e:
        raise UsageError(f"{flag}: {path} is damaged or no Paddle file ({e}): name another one") from e
    # Paddle adds its own table of structured names when it saves a Layer.
    return {name: np.asarray(value) for name, value in state.items() if name != "StructuredToParameterName@@"}


def _write(path, data):
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
