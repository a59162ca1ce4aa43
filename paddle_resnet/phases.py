"""The phases of a run before its first step, in the order in which train.py goes through them."""

from collections import namedtuple
from pathlib import Path

import paddle
import yaml
from paddle import static

import config
from paddle_resnet import dali, optimizer, program, report
from paddle_resnet.checkpoints import folders, restore, saver, variables
from paddle_resnet.data import listing
from paddle_resnet.job import agreement, exchange, processes
from paddle_resnet.native import build as native
from paddle_resnet.passes import all_reduces, folding
from paddle_resnet.steps import trace
from utils import logger, outputs, progress
from utils.affinity import bind_to_gpu
from utils.errors import UsageError
from utils.mode import Mode

# Training or evaluation: a loader and the program that it feeds. Only training has an lr_scheduler and an optimizer.
# Only evaluation has `refold`, to be called before each pass (passes/folding.py).
Work = namedtuple("Work", "loader program fetchs lr_scheduler optimizer compiled refold", defaults=[None] * 4)


def start(args):
    """Resolve the device."""
    logger.setup(rank=processes.rank())
    processes.resolve_device(args)
    if args.enable_cpu_affinity and args.device == "gpu":
        bind_to_gpu(processes.local_gpu())
    paddle.enable_static()


def find_start(args):
    """What the run starts from: restore.Found or None. Inherits its flags, then resolves what follows the machine;
    refuses processes that differ and an output folder that cannot be used."""
    agreement.check_start(args)
    restore.settle_network(args)
    found = restore.find(args)
    restore.inherit_flags(args, found)
    processes.resolve_device_flags(args)
    for warning in config.warnings(args):
        logger.warn(warning)
    progress.phase("the custom kernels")
    native.resolve(args)
    saver.check_folder(args, found)
    return found


def claim_outputs(args, found):
    """Choose the report's file if no flag does, and check all files that the run writes.

    Raises:
        UsageError: as outputs.claim; or a file holds another run's report, which --overwrite does not release.
    """
    folder = folders.run_folder(args)
    args.report_file = args.report_file or str(folder / report.default_name(args))
    exchange.from_rank_0(lambda: _claim(args, found, folder))


def _claim(args, found, folder):
    is_saving = args.run_scope.trains and not args.benchmark
    starts = [(config.flag(name), getattr(args, name)) for name in ("from_checkpoint", "from_pretrained_params")]
    read = [(config.flag(name), getattr(args, name)) for name in ("config", "skip_list")]
    read += [(flag, f"{start}.{suffix}") for flag, start in starts if start for suffix in ("pdparams", "pdopt")]
    read += [(flag, path) for flag, start in starts if start for path in Path(start).glob("*.pd*")]
    outputs.claim(
        report.outputs(args) | {"the trace of --profile-steps": trace.path(args)},
        {"--output-dir": folder if is_saving else None, "--tensorboard-dir": args.tensorboard_dir},
        inputs=[(flag, path) for flag, path in read if path is not None],
        protected=[("the data set's", path) for path in listing.occupied(args.image_root)],
        run_folder=folder,
    )
    logger.setup(args.report_file)  # before what may suggest to replace a report that another run still writes
    report.check_replaced(args, found, folder)


def open_data(args, found):
    """The loaders that the run needs.

    Args:
        args: flags.
        found: restore.Found or None.
    Returns:
        (training loader, evaluation loader); None for one that is not needed.
    """
    trains = args.run_scope.trains
    evaluates = args.run_scope.evaluates and not (trains and args.benchmark)
    dali.settle_classes(args, Mode.TRAIN if trains else Mode.EVAL)
    try:
        train_loader = dali.build_dataloader(args, Mode.TRAIN, found and found.loader_state) if trains else None
    except dali.StateError as e:
        raise UsageError(f"{found.folder}: {e}: move it away, or start from another checkpoint") from e
    trained = restore.classes_of_outputs(args, found)
    eval_loader = dali.build_dataloader(args, Mode.EVAL, trained=trained) if evaluates else None
    restore.compare_classes(args, found, train_loader or eval_loader)
    dali.warn_of_unused_outputs(args, train_loader or eval_loader)
    trace.check(args, train_loader or eval_loader)
    return train_loader, eval_loader


def build_programs(args, exe, train_loader, eval_loader):
    """The programs with initial parameters. An evaluation beside training uses those of training.

    Returns:
        (training, evaluation), each a Work or None.
    """
    training = evaluation = None
    train_prog, eval_prog, startup_prog, eval_startup_prog = (static.Program() for _ in range(4))
    paddle.seed(args.seed)
    if train_loader is not None:
        fetchs, lr_scheduler, _, optimizer = program.build(args, train_prog, startup_prog, len(train_loader))
        training = Work(train_loader, train_prog, fetchs, lr_scheduler, optimizer)
    if eval_loader is not None:
        fetchs, *_ = program.build(args, eval_prog, eval_startup_prog, 0, is_train=False)
        evaluation = Work(eval_loader, eval_prog, fetchs)
    exe.run(startup_prog if training else eval_startup_prog)
    return training, evaluation


def set_weights(args, found, training, evaluation):
    """Load what the run starts from, restore the state of training, prune, cast."""
    place = processes.place(args)
    progress.phase("the weights")
    is_sparse = variables.load_start(args, found, (training or evaluation).program, place)
    if training:
        if found is not None:
            restore.restore(args, found, training.lr_scheduler, training.loader, training.fetchs, place)
        if args.amp:
            training.optimizer.amp_init(place, scope=static.global_scope())
        if args.prune_model and not is_sparse:
            optimizer.prune(args, training.program, place)
    if evaluation:
        optimizer.cast_evaluation_program(args, evaluation.program, place)


def compile_programs(args, exe, training, evaluation):
    """(training, evaluation) with their compiled programs."""
    progress.phase("the compilation of the programs")
    if training:
        training = training._replace(compiled=program.compile_prog(args, training.program))
    if evaluation:
        refold = folding.fold_batch_norms(args, evaluation.program, exe)
        compiled = program.compile_prog(args, evaluation.program, is_train=False)
        evaluation = evaluation._replace(compiled=compiled, refold=refold)
    return training, evaluation


def check_and_describe(args, training, evaluation):
    """Compare data and networks of all processes, and print the flags and the start line."""
    loaders = [work and work.loader for work in (training, evaluation)]
    main = training or evaluation
    agreement.check_work(args, *loaders, main.program)
    if args.show_config:
        values = config.as_dict(args)
        shown = values if "show_config" in args.given else config.changed(values)
        logger.info(yaml.safe_dump(shown, sort_keys=False, default_flow_style=None).rstrip())
    fused = program.fused_operators(args, main.compiled)
    logger.info(report.start_line(args, *loaders, fused, all_reduces.count_gradient_all_reduces(main.program)))
