"""The phases of a run before its first step, and the start of a later stage (enter_stage)."""

import dataclasses
import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
import yaml
from paddle import static

from paddle_resnet import budget, dali, graph, program, recipe, resolution, run_report
from paddle_resnet.checkpoints import restore, run_folders, saver, teachers, variables
from paddle_resnet.components import START, distillation, precision, quantization, stages, task
from paddle_resnet.data import classes, layout, pixels
from paddle_resnet.data.iterators import Loader, TrainingLoader
from paddle_resnet.job import agreement, exchange, processes, watchdog
from paddle_resnet.models import user_file
from paddle_resnet.optimizers import schedules
from paddle_resnet.passes import all_reduces, folding
from paddle_resnet.settings import durations, parsing, validation, values
from paddle_resnet.settings.declarations import RESUMED, of_kinds
from paddle_resnet.settings.groups import benchmark, machine, network, output
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


@dataclass(frozen=True)
class FoldOptions(machine.Settings, precision.Settings, quantization.Settings, distillation.Settings):
    """The flags that determine which BN layers are folded."""


@dataclass(frozen=True)
class BnOptions(durations.Settings, network.Settings):
    """The flags that determine the weight of the initial BN statistics."""


@dataclass
class Run:
    """A run of train.py or lr_find. Its methods are the phases before the first step: start, find_start, claim_outputs,
    prepare, which consists of open_data, build_programs, set_weights and compile_programs, and check_and_describe.

    Attributes:
        settings: the flags; frozen by find_start.
        checkpoint: the checkpoint from which the run starts, or None if it starts from scratch or from
            --from-pretrained-params. Set by find_start; set_weights adds the position at which training continues.
        exe: static.Executor of all programs; set by prepare.
        training, evaluation: Work, or None if the run does not train or does not evaluate; set by build_programs.
    """

    settings: values.Settings
    checkpoint: restore.StartCheckpoint | None = None
    exe: Any = None
    training: Any = None
    evaluation: Any = None

    def start(self) -> None:
        """Resolve the device, and enable static mode. With --enable-cpu-affinity on a GPU, also bind the process to the
        CPU cores closest to its GPU.

        Raises:
            UsageError: see resolution.resolve_device.
        """
        resolution.resolve_device(self.settings)
        if self.settings.enable_cpu_affinity and self.settings.device == "gpu":
            bind_to_gpu(processes.local_gpu())
        paddle.enable_static()

    def find_start(self) -> None:
        """Find the checkpoint from which the run starts, inherit its flags, resolve all other flags and freeze the
        settings.

        Raises:
            UsageError: the processes have different settings; or the flags, the checkpoint, the data or the output
                folder cannot be used.
        """
        settings, trains = self.settings, self.settings.run_scope.trains
        agreement.check_start(settings.as_entry())
        recipe.choose(settings)
        settings.apply(restore.Network)
        self.checkpoint, pretrained = restore.find(settings.part(restore.Options))
        settings.replace(from_pretrained_params=pretrained)
        restore.inherit_flags(settings, self.checkpoint)
        progress.phase("kernel compilation")
        settings.apply(resolution.Layout)
        settings.apply(resolution.Loader)
        for warning in validation.warnings(settings):
            logger.warn(warning)
        settings.apply(resolution.Kernels)
        settings.apply(resolution.Classes, Mode.TRAIN if trains else Mode.EVAL)
        if settings.report_file is None:
            name = run_report.default_name(settings.run_scope, settings.benchmark)
            settings.resolve("--output-dir", report_file=str(self.folder / name))
        self._must_choose_epochs()  # raises an error if the run cannot choose its epochs
        if trains:
            if settings.teacher is not None:
                settings.replace(teacher=teachers.resolve(settings.teacher))
            teachers.check_resumed(self.checkpoint, teachers.find(settings.as_dict()))
        settings.finalize()
        if trains and not settings.benchmark:
            flags = settings.input_folders(), settings.overwrite, settings.resume
            saver.check_folder(self.folder, self.checkpoint, *flags)

    @property
    def folder(self) -> Path:
        """The run folder OUTPUT_DIR/ARCH."""
        return run_folders.run_folder(self.settings.output_dir, self.settings.model_arch_name)

    @property
    def is_done(self) -> bool:
        """Whether this run trains, but the run that wrote the checkpoint has completed all steps that the flags
        specify, or --patience has ended it."""
        settings, checkpoint = self.settings, self.checkpoint
        flags = settings.iter_unit, settings.epochs, settings.num_iter, settings.patience
        return settings.run_scope.trains and checkpoint is not None and checkpoint.is_done(*flags)

    def log_evaluated(self) -> int:
        """Log which checkpoint is evaluated, and return its epoch, or 0 if the epoch is unknown."""
        return restore.log_evaluated(*self._origin())

    def _origin(self):
        return restore.origin(self.checkpoint, self.settings.part(restore.Options))

    def claim_outputs(self) -> None:
        """Check on rank 0 that the run can write all its files, and set the path of the report.

        Raises:
            UsageError: outputs.claim, logger.setup or run_report.check_replaced fails.
        """
        exchange.from_rank_0(self._claim_outputs)

    def _claim_outputs(self):
        from paddle_resnet.results import lr_curve

        settings, folder = self.settings, self.folder
        is_saving = settings.run_scope.trains and not settings.benchmark
        evaluates = settings.run_scope.evaluates and not settings.benchmark
        files = settings.part(output.Settings), evaluates, settings.multi_label
        traced = {"the trace of --profile-steps": trace.path(settings.profile_steps, settings.output_dir)}
        outputs.claim(
            run_report.outputs(*files) | traced,
            {"--output-dir": folder if is_saving else None, "--tensorboard-dir": settings.tensorboard_dir},
            inputs=[*self.input_files(), ("the lr_find curve", folder / lr_curve.DATA)],  # shown by --report-html
            protected=[("the data set's", path) for path in layout.occupied(settings.image_root)],
            run_folder=folder,
            announced=run_report.announced(*files),
        )
        logger.setup(settings.report_file)  # fails if another run is writing to the report
        run_report.check_replaced(settings.part(run_report.Options), self.checkpoint, folder)

    def input_files(self) -> list[tuple[str, str | Path]]:
        """Return [(flag, path)] for the files that the run reads, except those of the data set."""
        settings, starts = self.settings, self.settings.input_folders().items()
        read = [(flag_name(name), getattr(settings, name)) for name in ("config", "skip_list")]
        read += [("--model-arch-name", path) for path, _ in filter(None, [user_file.split(settings.model_arch_name)])]
        read += [(flag, f"{start}.{suffix}") for flag, start in starts for suffix in ("pdparams", "pdopt")]
        read += [(flag, path) for flag, start in starts for path in Path(start).glob("*.pd*")]
        return [(flag, path) for flag, path in read if path is not None]

    def prepare(self) -> None:
        """Start Fleet, open the data, build the programs, load the weights, and compile the programs. Raises the errors
        of program.start_fleet and of these phases."""
        program.start_fleet(self.settings)
        self.exe = static.Executor(processes.place(self.settings.device))
        self.build_programs(*self.open_data())
        self.set_weights()
        self.compile_programs()

    def open_data(self) -> tuple[TrainingLoader | None, Loader | None]:
        """Return (training loader, evaluation loader). A loader that the run does not need is None.

        Raises:
            UsageError: dali.build_dataloader or trace.check fails, the loader state of the checkpoint is damaged, or
                the classes of a resumed run differ from those of its checkpoint.
            DataError: see dali.build_dataloader.
        """
        settings, checkpoint, data = self.settings, self.checkpoint, self.settings.part(dali.DataOptions)
        trains, root = settings.run_scope.trains, dali.data_root(data)
        evaluates = settings.run_scope.evaluates and not (trains and settings.benchmark)
        if trains and checkpoint and checkpoint.resumes:
            now = None if data.data_format == "synthetic" else root.data_classes(Mode.TRAIN)
            restore.check_resumed_classes(checkpoint, now, self._fine_tuning(checkpoint.folder))
        try:
            stage = settings.stage(self._stages()[0].changes)
            state = checkpoint and checkpoint.loader_state
            train_loader = dali.build_dataloader(stage, Mode.TRAIN, state, root=root) if trains else None
        except dali.StateError as e:
            raise UsageError(f"{checkpoint.folder}: {e}; move this checkpoint away, or choose a different one") from e
        folder, meta = self._origin()
        trained = None  # in training, the data set defines the classes
        if not trains and folder is not None:
            trained = restore.recorded_classes(meta) or classes.numbers(settings.num_of_class)
        eval_loader = dali.build_dataloader(settings, Mode.EVAL, trained=trained, root=root) if evaluates else None
        restore.compare_classes(folder, meta, train_loader or eval_loader, is_fine_tuning=trains and not checkpoint)
        if trains:
            dali.warn_of_unused_outputs(data, train_loader)
        # For a run that continues, program.run checks --profile-steps, when the position is known.
        if checkpoint is None:
            steps = len(train_loader or eval_loader)
            if trains:
                uniform = durations.uniform(settings.accumulate_steps, steps)
                steps = durations.first_pass(settings.part(durations.Settings), uniform)
            trace.check(settings.profile_steps, settings.part(benchmark.Settings).total_steps or steps)
        return train_loader, eval_loader

    def _stages(self):
        """Return the stages of the run from the one that contains its first epoch."""
        return stages.stages_from(self.settings.part(stages.Options), self.checkpoint.epoch if self.checkpoint else 0)

    def _fine_tuning(self, folder):
        """Return the command that starts a new run with these flags from the weights in a checkpoint folder, for
        example because the classes have changed."""
        flags, is_explicit = self.settings.as_dict(), self.settings.is_explicit
        changed = parsing.changed(flags).keys()
        if self.settings.budget_minutes is not None:
            changed -= {*durations.CHOSEN_FOR_BUDGET}  # the new run chooses them again
        kept = [name for name in of_kinds(*RESUMED, "loader", "machine") if name in changed or is_explicit(name)]
        omitted = ("num_of_class", *(field.name for field in dataclasses.fields(distillation.Settings)))
        flags = {name: flags[name] for name in (*kept, "run_scope") if name not in omitted}
        flags |= {"from_pretrained_params": folder, "pretrained_mismatch": "skip-classifier"}
        flags["output_dir"] = f"{self.settings.output_dir.rstrip('/')}_fine_tuned"
        return command("train", *parsing.arguments(flags))

    def build_programs(self, train_loader: TrainingLoader | None, eval_loader: Loader | None) -> None:
        """Build the programs and initialize their parameters, which training, evaluation and later stages share. Set
        `training` and `evaluation`.

        Args:
            train_loader, eval_loader: result of open_data.
        Raises:
            UsageError: program.build, stages.timeline, build_lr_scheduler or teachers.check_classes fails.
        """
        settings = self.settings
        eval_prog, eval_startup_prog = static.Program(), static.Program()
        startup_progs = [eval_startup_prog]
        paddle.seed(settings.seed)
        if train_loader is not None:
            images = train_loader.data_set_size // processes.world_size()
            timeline = stages.timeline(settings.part(stages.Options), images)
            lr_scheduler = schedules.build_lr_scheduler(settings.part(schedules.Options), timeline)
            works = []
            for stage in self._stages():
                main_prog, startup_prog, of_stage = static.Program(), static.Program(), settings.stage(stage.changes)
                shared = {"lr_scheduler": lr_scheduler, "class_images": train_loader.class_images}
                fetchs, _, _, optimizer = program.build(of_stage, main_prog, startup_prog, 0, **shared)
                work = Work(of_stage, None, main_prog, fetchs, lr_scheduler, optimizer)
                works.append((stage.first_epoch, work, startup_prog))
            teachers.check_classes(works[0][1].program, train_loader.classes)
            startup_progs = [startup_prog for _, _, startup_prog in works]
            later = [(first_epoch, work) for first_epoch, work, _ in works[1:]]
            self.training = works[0][1]._replace(loader=train_loader, later=later)
        if eval_loader is not None:
            fetchs, *_ = program.build(settings, eval_prog, eval_startup_prog, 0, is_train=False)
            self.evaluation = Work(settings, eval_loader, eval_prog, fetchs)
        _initialize(self.exe, *startup_progs)

    def set_weights(self) -> None:
        """Load the initial weights, restore the training state of the checkpoint, and let components change the
        weights, for example by pruning (--prune-model) or casting for mixed precision (--amp). Also set the thresholds
        with which a multi-label network is evaluated.

        Raises:
            UsageError: the weights or the state do not match this run.
        """
        settings, training, evaluation = self.settings, self.training, self.evaluation
        place = processes.place(settings.device)
        watchdog.phase("weight loading")
        options = settings.part(variables.LoadOptions)
        names = variables.load_start(options, self.checkpoint, (training or evaluation).program, place)
        if training:
            missing = variables.load_states(options, self.checkpoint, training.program, place)
            if self.checkpoint is not None:
                self.checkpoint = restore.restore(
                    *(self.checkpoint, training.lr_scheduler, training.loader, training.fetchs, place),
                    iter_unit=settings.iter_unit,
                    is_verbose=settings.verbose,
                )
            loaded = facts.Loaded(training.program, training.optimizer, place, names)
            for component in (*START, teachers):
                if component.start(settings.part(component.Settings), loaded):
                    missing = variables.states(training.program)
            variables.start_states(missing, self.checkpoint, training.program, place)
        if evaluation and not training:
            _, meta = self._origin()
            settings.part(task.Settings).task(settings.num_of_class).restore(evaluation.fetchs, meta or {})
        if evaluation:
            float32 = quantization.float32_variables(evaluation.program)
            precision.start_evaluation(settings.part(precision.Settings), evaluation.program, place, float32)

    def compile_programs(self) -> None:
        """Compile the programs. Make the evaluation program use averages of the weights (such as those of --ema). In
        half precision, fold BN into convolutions in the evaluation program and in the network of --teacher. Raises the
        errors of program.compile_prog."""
        watchdog.phase("program compilation")
        options, training, evaluation = self.settings.part(FoldOptions), self.training, self.evaluation
        if training:
            if options.amp and options.teacher is not None:
                for work in (training, *(work for _, work in training.later)):
                    _fold(options, self.exe, work.program, distillation.PREFIX)
            compiled = program.compile_prog(training.settings, training.program)
            self.training = training._replace(compiled=compiled)
        if evaluation:
            updates = [averages.evaluate(training.program, evaluation.program, self.exe)] if training else []
            # In float32, BN is not folded, because float32 evaluations serve as the exact reference. With QAT, BN
            # cannot be folded into the quantized filters.
            if options.amp and not options.qat:
                updates += _fold(options, self.exe, evaluation.program)
            compiled = program.compile_prog(self.settings, evaluation.program, is_train=False)
            self.evaluation = evaluation._replace(compiled=compiled, refresh=lambda: [update() for update in updates])

    def check_and_describe(self) -> None:
        """Check that all processes have the same data and network, choose the epochs for --budget-minutes (unless
        --dry-run is set), and log the settings and the start line.

        Raises:
            UsageError: the processes differ, or budget.is_needed or budget.choose fails.
        """
        loaders = [work and work.loader for work in (self.training, self.evaluation)]
        main = self.training or self.evaluation
        agreement.check_work(self.settings.kernels, *loaders, main.program)
        fused = fused_operators(self.settings.device, main.compiled)
        if self._must_choose_epochs() and not self.settings.dry_run:
            self._choose_epochs()
        if self.training and not self.settings.benchmark:
            _warn_of_bn_momentum(self.settings.part(BnOptions), self.training)
        if self.settings.show_config:
            logger.info(describe(self.settings))
        count = all_reduces.count_gradient_all_reduces(main.program)
        options = (self.training or self.evaluation).settings.part(run_report.Options)
        logger.info(run_report.start_line(options, *loaders, fused, count, main.compiled.captured is not None))

    def _must_choose_epochs(self):
        return budget.is_needed(self.settings.part(budget.Options), self.checkpoint)

    def _choose_epochs(self):
        """Choose the epochs of a run that begins in epoch 0, and give its stages the chosen number of epochs, on which
        neither the programs nor the other flags of the stages depend."""
        settings = self.settings.copy()
        chosen = budget.choose(settings.part(budget.Options), self.exe, self.training, self.evaluation)
        for reason, flags in chosen.items():
            settings.choose(reason, **flags)
        settings.finalize()
        self.settings = settings
        first, *later = [self.settings.stage(stage.changes) for stage in self._stages()]
        works = [
            (epoch, work._replace(settings=of_stage))
            for of_stage, (epoch, work) in zip(later, self.training.later, strict=True)
        ]
        self.training = self.training._replace(settings=first, later=works)

    def show_on_tensorboard(self) -> None:
        """If --tensorboard-dir is set, let the training loader also write TensorBoard events."""
        settings, training = self.settings, self.training
        if settings.tensorboard_dir is None:
            return
        from paddle_resnet.results import tensorboard

        def pictures(batch):
            if settings.device == "gpu":
                paddle.device.cuda.synchronize()  # wait for the loader, which copies on a different stream
            normalization = settings.normalize_scale, settings.normalize_mean, settings.normalize_std
            return pixels.pictures(batch["data"], settings.data_layout, *normalization)

        timeline = training.lr_scheduler.timeline
        loader = tensorboard.follow(settings.tensorboard_dir, training.loader, timeline, self.checkpoint, pictures)
        self.training = training._replace(loader=loader)

    def enter_stage(self, epoch: int, saver: saver.Saver) -> None:
        """If an epoch starts a new stage (--sizes, --unfreeze-at), make it the training Work, and compile its program.
        If the batch shape of the new stage differs, also build a new loader that continues the image order of the
        previous loader."""
        training = self.training
        if not training.later or epoch < training.later[0][0]:
            return
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
        self.training = work._replace(loader=loader, compiled=compiled, later=later)


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


def _fold(options, exe, inference, prefix=""):
    """Fold BN into the convolutions of a half-precision evaluation program, and return a list of the functions that
    recompute the folded filters. With custom kernels, BN is folded only in float16 (--amp-level O2) on a GPU, and only
    into the convolutions that fuse_convolutions replaces, because custom operators fuse the other BN layers. With the
    prefix of --teacher, `inference` is a training program, of which only the teacher is changed."""
    if options.kernels == "native":
        where, precision_of_run = (options.device, options.data_layout), (options.amp_level, options.amp_dtype)
        fuses = where == ("gpu", "NHWC") and precision_of_run == ("O2", "float16")
        return [folding.fuse_convolutions(inference, exe, prefix=prefix)[1]] if fuses else []
    return [] if prefix else [folding.fold_batch_norms(inference, exe, 1 if options.data_layout == "NCHW" else -1)]


def _warn_of_bn_momentum(options, training):
    """Warn if the run is so short that the initial BN statistics would have a weight above INITIAL_BN_WEIGHT in the
    running statistics at its end. A run that continues from a checkpoint is not checked again."""
    programs = [training.program, *(work.program for _, work in training.later)]
    momentum = max(map(all_reduces.bn_momentum, programs))
    schedule = training.lr_scheduler
    batches = durations.total_steps(options, schedule.timeline) * schedule.timeline.accumulate_steps
    if momentum**batches <= INITIAL_BN_WEIGHT or schedule.done:
        return
    fitting = min(0.9, math.floor(INITIAL_BN_WEIGHT ** (1 / batches) * 100) / 100)
    origin = " (value of the network)" if options.bn_momentum is None else ""
    logger.warn(
        f"--bn-momentum {momentum:g}{origin}: too high for {counted(batches, 'training batch', 'training batches')}, "
        f"because the initial BN statistics keep a weight of {momentum**batches:.0%} until the end of the run; use "
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
