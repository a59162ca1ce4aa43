"""The phases of a run before its first step, and the start of a later stage (enter_stage)."""

import dataclasses
import math
from collections import namedtuple
from pathlib import Path

import paddle
import yaml
from paddle import static

from paddle_resnet import budget, dali, graph, program, recipe, resolution, run_report
from paddle_resnet.checkpoints import folders, restore, saver, teachers, variables
from paddle_resnet.components import START, distillation, precision, quantization, task
from paddle_resnet.components.stages import stages_from, timeline
from paddle_resnet.data import classes, layout, pixels
from paddle_resnet.data.iterators import Loader, TrainingLoader
from paddle_resnet.job import agreement, exchange, processes, watchdog
from paddle_resnet.models import user_file
from paddle_resnet.optimizers import schedules
from paddle_resnet.passes import all_reduces, folding
from paddle_resnet.settings import durations, parsing, validation, values
from paddle_resnet.settings.declarations import RESUMED, of_kinds
from paddle_resnet.settings.groups import benchmark, output
from paddle_resnet.settings.values import flag_name, text
from paddle_resnet.step import averages, facts, trace
from paddle_resnet.step.compile import fused_operators
from paddle_resnet.utils import logger, outputs, progress
from paddle_resnet.utils.affinity import bind_to_gpu
from paddle_resnet.utils.errors import UsageError, command, counted
from paddle_resnet.utils.mode import Mode

# A Work contains what a run needs for training or for evaluation: a loader, the program that it feeds, and their
# settings. Only training has an lr_scheduler, an optimizer, and `later`, the list of later stages [(first epoch, Work
# without a loader)]. Only evaluation has the function `refresh`, which recomputes values derived from the weights
# (step/averages.py, passes/folding.py). Call refresh() before each evaluation.
Work = namedtuple(
    "Work", "settings loader program fetchs lr_scheduler optimizer compiled refresh later", defaults=[None] * 4 + [()]
)


# Maximum weight of the initial BN statistics in the running statistics at the end of a run, without a warning.
INITIAL_BN_WEIGHT = 0.05


def start(args: values.Settings) -> None:
    """Resolve the device, and enable static mode. With --enable-cpu-affinity on a GPU, also bind the process to the CPU
    cores closest to its GPU.

    Raises:
        UsageError: see resolution.resolve_device.
    """
    resolution.resolve_device(args)
    if args.enable_cpu_affinity and args.device == "gpu":
        bind_to_gpu(processes.local_gpu())
    paddle.enable_static()


def find_start(args: values.Settings) -> restore.StartCheckpoint | None:
    """Find the checkpoint from which the run starts, inherit its flags, resolve all other flags and freeze the
    settings.

    Returns:
        the checkpoint; None if the run starts from scratch or from --from-pretrained-params.
    Raises:
        UsageError: the processes have different settings; or the flags, the checkpoint, the data or the output folder
            cannot be used.
    """
    agreement.check_start(args)
    recipe.choose(args)
    restore.resolve_network(args)
    checkpoint = restore.find(args)
    restore.inherit_flags(args, checkpoint)
    progress.phase("kernel compilation")
    resolution.resolve_layout(args)
    resolution.resolve_loader(args)
    for warning in validation.warnings(args):
        logger.warn(warning)
    resolution.resolve_kernels(args)
    resolution.resolve_classes(args, Mode.TRAIN if args.run_scope.trains else Mode.EVAL)
    folder = folders.run_folder(args.output_dir, args.model_arch_name)
    resolution.resolve_report(args, folder, run_report.default_name(args.run_scope, args.benchmark))
    budget.is_needed(args, checkpoint)  # raises an error if the run cannot choose its epochs
    if args.run_scope.trains:
        if args.teacher is not None:
            args.set(args.origin("teacher"), teacher=teachers.resolve(args.teacher))
        teachers.check_resumed(checkpoint, teachers.find(args.as_dict()))
    args.finalize()
    if args.run_scope.trains and not args.benchmark:
        saver.check_folder(folder, checkpoint, args.input_folders(), args.overwrite, args.resume)
    return checkpoint


def is_done(args: values.Settings, checkpoint: restore.StartCheckpoint | None) -> bool:
    """Return whether this run trains, but the run that wrote the checkpoint has completed all steps that the flags
    specify, or --patience has ended it."""
    flags = args.iter_unit, args.epochs, args.num_iter, args.patience
    return args.run_scope.trains and checkpoint is not None and checkpoint.is_done(*flags)


def log_evaluated(args: values.Settings, checkpoint: restore.StartCheckpoint | None) -> int:
    """Log which checkpoint is evaluated, and return its epoch, or 0 if the epoch is unknown."""
    return restore.log_evaluated(*_origin(args, checkpoint))


def _origin(args, checkpoint):
    return restore.origin(checkpoint, args.from_pretrained_params, args.flag_value("model_prefix"))


def claim_outputs(args: values.Settings, checkpoint: restore.StartCheckpoint | None) -> None:
    """Check on rank 0 that the run can write all its files, and lock the report.

    Raises:
        UsageError: outputs.claim, logger.setup or run_report.check_replaced fails.
    """
    folder = folders.run_folder(args.output_dir, args.model_arch_name)
    exchange.from_rank_0(lambda: _claim(args, checkpoint, folder))


def _claim(args, checkpoint, folder):
    from paddle_resnet.results import lr_curve

    is_saving = args.run_scope.trains and not args.benchmark
    files = args.part(output.Settings), args.run_scope.evaluates and not args.benchmark, args.multi_label
    outputs.claim(
        run_report.outputs(*files) | {"the trace of --profile-steps": trace.path(args.profile_steps, args.output_dir)},
        {"--output-dir": folder if is_saving else None, "--tensorboard-dir": args.tensorboard_dir},
        inputs=[*input_files(args), ("the lr_find curve", folder / lr_curve.DATA)],  # shown by --report-html
        protected=[("the data set's", path) for path in layout.occupied(args.image_root)],
        run_folder=folder,
        announced=run_report.announced(*files),
    )
    logger.setup(args.report_file)  # lock the report before check_replaced examines it
    run_report.check_replaced(args.part(run_report.Options), checkpoint, folder)


def input_files(args: values.Settings) -> list[tuple[str, str | Path]]:
    """Return [(flag, path)] for the files that the run reads, except those of the data set."""
    starts = args.input_folders().items()
    read = [(flag_name(name), getattr(args, name)) for name in ("config", "skip_list")]
    read += [("--model-arch-name", path) for path, _ in filter(None, [user_file.split(args.model_arch_name)])]
    read += [(flag, f"{start}.{suffix}") for flag, start in starts for suffix in ("pdparams", "pdopt")]
    read += [(flag, path) for flag, start in starts for path in Path(start).glob("*.pd*")]
    return [(flag, path) for flag, path in read if path is not None]


def prepare(
    args: values.Settings, checkpoint: restore.StartCheckpoint | None
) -> tuple[static.Executor, restore.StartCheckpoint | None, Work | None, Work | None]:
    """Start Fleet, open the data, build the programs, load the weights, and compile the programs.

    Args:
        args: flags of the run.
        checkpoint: the checkpoint that the run starts from (result of find_start), or None.
    Returns:
        (Executor, checkpoint with the position at which training continues or None, training Work or None, evaluation
        Work or None).
    Raises:
        the errors of program.start_fleet, open_data, build_programs, set_weights and compile_programs.
    """
    program.start_fleet(args)
    exe = static.Executor(processes.place(args.device))
    training, evaluation = build_programs(args, exe, *open_data(args, checkpoint), checkpoint)
    checkpoint = set_weights(args, checkpoint, training, evaluation)
    return exe, checkpoint, *compile_programs(args, exe, training, evaluation)


def open_data(
    args: values.Settings, checkpoint: restore.StartCheckpoint | None
) -> tuple[TrainingLoader | None, Loader | None]:
    """Return (training loader, evaluation loader). A loader that the run does not need is None.

    Args:
        args: flags of the run.
        checkpoint: the checkpoint that the run starts from (result of find_start), or None.
    Raises:
        UsageError: dali.build_dataloader or trace.check fails, the loader state of the checkpoint is damaged, or the
            classes of a resumed run differ from those of its checkpoint.
        DataError: see dali.build_dataloader.
    """
    trains, root = args.run_scope.trains, dali.data_root(args)
    evaluates = args.run_scope.evaluates and not (trains and args.benchmark)
    if trains and checkpoint and checkpoint.resumes:
        restore.check_resumed_classes(checkpoint, dali.data_classes(args, root), _fine_tuning(args, checkpoint.folder))
    try:
        stage = stages_from(args, checkpoint.epoch if checkpoint else 0)[0].settings
        state = checkpoint and checkpoint.loader_state
        train_loader = dali.build_dataloader(stage, Mode.TRAIN, state, root=root) if trains else None
    except dali.StateError as e:
        raise UsageError(f"{checkpoint.folder}: {e}; move this checkpoint away, or choose a different one") from e
    folder, meta = _origin(args, checkpoint)
    trained = None  # in training, the data set defines the classes
    if not trains and folder is not None:
        trained = restore.recorded_classes(meta) or classes.numbers(args.num_of_class)
    eval_loader = dali.build_dataloader(args, Mode.EVAL, trained=trained, root=root) if evaluates else None
    restore.compare_classes(folder, meta, train_loader or eval_loader, is_fine_tuning=trains and not checkpoint)
    if trains:
        dali.warn_of_unused_outputs(args, train_loader)
    if checkpoint is None:  # for a run that continues, program.run checks --profile-steps, when the position is known
        steps = len(train_loader or eval_loader)
        if trains:
            uniform = durations.uniform(args.accumulate_steps, steps)
            steps = durations.first_pass(args.part(durations.Settings), uniform)
        trace.check(args.profile_steps, args.part(benchmark.Settings).total_steps or steps)
    return train_loader, eval_loader


def _fine_tuning(args, folder):
    """Return the command that starts a new run with these flags from the weights in a checkpoint folder, for example
    because the classes have changed."""
    changed = parsing.changed(args.as_dict())
    kept = [name for name in of_kinds(*RESUMED, "loader", "machine") if name in changed or args.is_explicit(name)]
    omitted = ("num_of_class", *(field.name for field in dataclasses.fields(distillation.Settings)))
    flags = {name: args.as_dict()[name] for name in (*kept, "run_scope") if name not in omitted}
    flags |= {"from_pretrained_params": folder, "pretrained_mismatch": "skip-classifier"}
    flags["output_dir"] = f"{args.output_dir.rstrip('/')}_fine_tuned"
    return command("train", *parsing.arguments(flags))


def build_programs(
    args: values.Settings,
    exe: static.Executor,
    train_loader: TrainingLoader | None,
    eval_loader: Loader | None,
    checkpoint: restore.StartCheckpoint | None = None,
) -> tuple[Work | None, Work | None]:
    """Build the programs and initialize their parameters, which training, evaluation and later stages share.

    Args:
        args: flags of the run.
        exe: Executor for the startup programs.
        train_loader, eval_loader: result of open_data.
        checkpoint: the checkpoint that the run starts from (result of find_start), or None.
    Returns:
        (training, evaluation), each a Work or None.
    Raises:
        UsageError: program.build, stages.timeline, build_lr_scheduler or teachers.check_classes fails.
    """
    training = evaluation = None
    eval_prog, eval_startup_prog = static.Program(), static.Program()
    startup_progs = [eval_startup_prog]
    paddle.seed(args.seed)
    if train_loader is not None:
        images = train_loader.data_set_size // processes.world_size()
        lr_scheduler = schedules.build_lr_scheduler(args.part(schedules.Options), timeline(args, images))
        stages = stages_from(args, checkpoint.epoch if checkpoint else 0)
        startup_progs = [static.Program() for _ in stages]
        works = [
            _training(stage.settings, startup_prog, lr_scheduler, train_loader.class_images)
            for stage, startup_prog in zip(stages, startup_progs, strict=True)
        ]
        if args.teacher is not None:
            teachers.check_classes(works[0].program, train_loader.classes)
        later = [(stage.first_epoch, work) for stage, work in zip(stages, works, strict=True)][1:]
        training = works[0]._replace(loader=train_loader, later=later)
    if eval_loader is not None:
        fetchs, *_ = program.build(args, eval_prog, eval_startup_prog, 0, is_train=False)
        evaluation = Work(args, eval_loader, eval_prog, fetchs)
    _initialize(exe, *startup_progs)
    return training, evaluation


def _training(args, startup_prog, lr_scheduler, class_images):
    main_prog = static.Program()
    fetchs, _, _, optimizer = program.build(
        args, main_prog, startup_prog, 0, lr_scheduler=lr_scheduler, class_images=class_images
    )
    return Work(args, None, main_prog, fetchs, lr_scheduler, optimizer)


def _initialize(exe, startup_prog, *later):
    """Run the startup program of the first stage and, of the startup programs of later stages, only the operators that
    initialize other variables, such as the sums of gradients (--accumulate-steps) of layers that the first stage
    freezes. All other operators in the startup programs of later stages are removed, because they would reset the
    variables that all stages share."""
    exe.run(startup_prog)
    initialized = {name for op in graph.block(startup_prog).ops for name in op.output_arg_names}
    for startup_prog in later:
        block = graph.block(startup_prog)
        graph.remove(block, [op for op in block.ops if initialized.issuperset(op.output_arg_names)])
        graph.sync(block)
        if block.ops:
            exe.run(startup_prog)


def show_on_tensorboard(args: values.Settings, training: Work, checkpoint: restore.StartCheckpoint | None) -> Work:
    """Return the training Work. If --tensorboard-dir is set, the loader of the returned Work also writes TensorBoard
    events."""
    if args.tensorboard_dir is None:
        return training
    from paddle_resnet.results import tensorboard

    def pictures(batch):
        if args.device == "gpu":
            paddle.device.cuda.synchronize()  # wait for the loader, which copies on a different stream
        normalization = args.normalize_scale, args.normalize_mean, args.normalize_std
        return pixels.pictures(batch["data"], args.data_layout, *normalization)

    timeline = training.lr_scheduler.timeline
    loader = tensorboard.follow(args.tensorboard_dir, training.loader, timeline, checkpoint, pictures)
    return training._replace(loader=loader)


def enter_stage(training: Work, epoch: int, saver: saver.Saver) -> Work:
    """Return the training Work for an epoch. If the epoch starts a new stage (--sizes, --unfreeze-at), compile the
    program of the stage. If the batch shape of the new stage differs, also build a new loader that continues the image
    order of the previous loader."""
    if not training.later or epoch < training.later[0][0]:
        return training
    (_, work), *later = training.later
    before, now = training.settings, work.settings
    if before.freeze and not now.freeze:
        logger.info(f"epoch {epoch}: training all layers from now on (--unfreeze-at)")
    loader = training.loader
    if (before.image_shape, before.batch_size) != (now.image_shape, now.batch_size):
        factor = work.lr_scheduler.timeline.lr_factor(work.lr_scheduler.done)
        logger.info(
            f"epoch {epoch}: training with --image-shape {text(now.image_shape)}, --batch-size {now.batch_size}, "
            f"learning rate x {factor:g} (--sizes)"
        )
        loader = dali.build_dataloader(now, Mode.TRAIN, training.loader.state())
    compiled = program.compile_prog(work.settings, work.program)
    compiled.trace = None  # --profile-steps traces only the first pass of a run
    saver.follow(loader, work.fetchs, work.program)
    return work._replace(loader=loader, compiled=compiled, later=later)


def set_weights(
    args: values.Settings, checkpoint: restore.StartCheckpoint | None, training: Work | None, evaluation: Work | None
) -> restore.StartCheckpoint | None:
    """Load the initial weights, restore the training state of a checkpoint, and let components change the weights, for
    example by pruning (--prune-model) or casting for mixed precision (--amp). Also set the thresholds with which a
    multi-label network is evaluated.

    Returns:
        The checkpoint with the position at which training continues, or None.
    Raises:
        UsageError: the weights or the state do not match this run.
    """
    place = processes.place(args.device)
    watchdog.phase("weight loading")
    options = variables.LoadOptions.of(args)
    names = variables.load_start(options, checkpoint, (training or evaluation).program, place)
    if training:
        missing = variables.load_states(options, checkpoint, training.program, place)
        if checkpoint is not None:
            checkpoint = restore.restore(
                *(checkpoint, training.lr_scheduler, training.loader, training.fetchs, place),
                iter_unit=args.iter_unit,
                is_verbose=args.verbose,
            )
        loaded = facts.Loaded(training.program, training.optimizer, place, names)
        for component in START:
            if component.start(args.part(component.Settings), loaded):
                missing = variables.states(training.program)
        variables.start_states(missing, checkpoint, training.program, place)
        if args.teacher is not None:
            teachers.load(training.program, place)
    if evaluation and not training:
        _, meta = _origin(args, checkpoint)
        args.part(task.Settings).task(args.num_of_class).restore(evaluation.fetchs, meta or {})
    if evaluation:
        float32 = quantization.float32_variables(evaluation.program)
        precision.start_evaluation(args.part(precision.Settings), evaluation.program, place, float32)
    return checkpoint


def compile_programs(
    args: values.Settings, exe: static.Executor, training: Work | None, evaluation: Work | None
) -> tuple[Work | None, Work | None]:
    """Compile the programs, and return (training, evaluation) with the compiled programs. Make the evaluation program
    use averages of the weights (such as those of --ema). In half precision, fold BN into convolutions in the evaluation
    program and in the network of --teacher. Raises the errors of program.compile_prog."""
    watchdog.phase("program compilation")
    if training:
        if args.amp and args.teacher is not None:
            for work in (training, *(work for _, work in training.later)):
                _fold(args, exe, work.program, distillation.PREFIX)
        training = training._replace(compiled=program.compile_prog(training.settings, training.program))
    if evaluation:
        updates = [averages.evaluate(training.program, evaluation.program, exe)] if training else []
        # In float32, BN is not folded, because float32 evaluations serve as the exact reference. With QAT, BN cannot be
        # folded into the quantized filters.
        if args.amp and not args.qat:
            updates += _fold(args, exe, evaluation.program)
        compiled = program.compile_prog(args, evaluation.program, is_train=False)
        evaluation = evaluation._replace(compiled=compiled, refresh=lambda: [update() for update in updates])
    return training, evaluation


def _fold(args, exe, inference, prefix=""):
    """Fold BN into the convolutions of a half-precision evaluation program, and return a list of the functions that
    recompute the folded filters. With custom kernels, BN is folded only in float16 (--amp-level O2) on a GPU, and only
    into the convolutions that fuse_convolutions replaces, because custom operators fuse the other BN layers. With the
    prefix of --teacher, `inference` is a training program, of which only the teacher is changed."""
    if args.kernels == "native":
        fuses = (args.device, args.data_layout, args.amp_level, args.amp_dtype) == ("gpu", "NHWC", "O2", "float16")
        return [folding.fuse_convolutions(inference, exe, prefix=prefix)[1]] if fuses else []
    return [] if prefix else [folding.fold_batch_norms(inference, exe, 1 if args.data_layout == "NCHW" else -1)]


def check_and_describe(
    args: values.Settings,
    exe: static.Executor,
    checkpoint: restore.StartCheckpoint | None,
    training: Work | None,
    evaluation: Work | None,
) -> tuple[values.Settings, Work | None]:
    """Check that all processes have the same data and network, choose the epochs for --budget-minutes (unless --dry-run
    is set), and log the settings and the start line.

    Returns:
        (settings, training Work or None), with the chosen epochs if epochs were chosen.
    Raises:
        UsageError: the processes differ, or budget.is_needed or budget.choose fails.
    """
    loaders = [work and work.loader for work in (training, evaluation)]
    main = training or evaluation
    agreement.check_work(args.kernels, *loaders, main.program)
    fused = fused_operators(args.device, main.compiled)
    if budget.is_needed(args, checkpoint) and not args.dry_run:
        args = budget.choose(args, exe, training, evaluation)
        training = _with_settings(args, training)
    if training and not args.benchmark:
        _warn_of_bn_momentum(args, training)
    if args.show_config:
        logger.info(describe(args))
    count = all_reduces.count_gradient_all_reduces(main.program)
    settings = (training or evaluation).settings
    options = settings.part(run_report.Options)
    logger.info(run_report.start_line(options, *loaders, fused, count, main.compiled.captured is not None))
    return args, training


def _with_settings(args, training):
    """Return the Work for training, which begins in epoch 0, with different settings. The programs and the settings on
    which they depend stay the same."""
    first, *later = stages_from(args, 0)
    works = [
        (stage.first_epoch, work._replace(settings=stage.settings))
        for stage, (_, work) in zip(later, training.later, strict=True)
    ]
    return training._replace(settings=first.settings, later=works)


def _warn_of_bn_momentum(args, training):
    """Warn if the run is so short that the initial BN statistics would have a weight above INITIAL_BN_WEIGHT in the
    running statistics at its end. A run that continues from a checkpoint is not checked again."""
    programs = [training.program, *(work.program for _, work in training.later)]
    momentum = max(map(all_reduces.bn_momentum, programs))
    schedule = training.lr_scheduler
    batches = (
        durations.total_steps(args.part(durations.Settings), schedule.timeline) * schedule.timeline.accumulate_steps
    )
    if momentum**batches <= INITIAL_BN_WEIGHT or schedule.done:
        return
    fitting = min(0.9, math.floor(INITIAL_BN_WEIGHT ** (1 / batches) * 100) / 100)
    origin = " (value of the network)" if args.bn_momentum is None else ""
    logger.warn(
        f"--bn-momentum {momentum:g}{origin}: too high for {counted(batches, 'training batch', 'training batches')}, "
        f"because the initial BN statistics keep a weight of {momentum**batches:.0%} until the last evaluation; use "
        f"--bn-momentum {fitting:g}"
    )


def describe(settings: values.Settings) -> str:
    """Return the settings as YAML with the origin of each value. If --show-config is explicit, include all settings;
    otherwise, include only the settings that differ from the defaults or that the program has chosen."""
    all_values = settings.as_dict()
    if not settings.is_explicit("show_config"):
        differing = parsing.changed(all_values)
        shown = {name: value for name, value in all_values.items() if name in differing or settings.is_chosen(name)}
    else:
        shown = all_values
    texts = {
        name: yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
        for name, value in shown.items()
    }
    return "\n".join(f"{name}: {text}  # {settings.origin(name)}" for name, text in texts.items())
