"""Conflicts between flags of different components and groups, and valid combinations that are rarely intended. Each
class declares the flags that it reads. settings.part returns an instance."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paddle_resnet.components import distillation, loss, optimizer, precision, quantization, rates, sparsity, task
from paddle_resnet.components import stages as stages_of
from paddle_resnet.data import augment
from paddle_resnet.models import RESIZE_RATIO
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import durations
from paddle_resnet.settings.declarations import DEFAULTS
from paddle_resnet.settings.field import Conflict, about
from paddle_resnet.settings.groups import benchmark, dataset, images, loader, machine, network, output, saving, start
from paddle_resnet.settings.values import argument, flag_name, listed, network_name, text
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import command
from paddle_resnet.utils.mode import RunScope

# Values of --data-format that store one label per image, so that --multi-label does not support them.
ONE_LABEL = ("filelist", "tfrecord", "webdataset", "lmdb", "parquet")
# Flags whose features PIR programs lack. --cuda-graph is not among them, because it has no effect without a GPU.
_NOT_IN_PIR = ("amp", "asp", "qat", "teacher")


def _between(message: str, *names: str) -> Conflict:
    """Return the Conflict of flags that exclude each other."""
    return Conflict(message, names, names)


@dataclass(frozen=True)
class Budget(durations.Settings, benchmark.Settings, start.Settings):
    has_explicit_budget: bool = about("is_explicit", "budget_minutes")
    has_explicit_epochs: bool = about("is_explicit", "epochs")
    origin_of_epochs: str = about("origin", "epochs")

    def conflicts(self) -> Iterator[Conflict]:
        if self.budget_minutes is None:
            return
        budget = f"--budget-minutes {self.budget_minutes:g}"
        if self.has_explicit_epochs:
            problem = f"conflicts with --epochs {self.epochs} ({self.origin_of_epochs}); remove one of them"
            yield _between(f"{budget}: {problem}", "budget_minutes", "epochs")
        if self.profile_steps is not None:
            problem = "not supported with --profile-steps; remove one of them"
            yield _between(f"{budget}: {problem}", "budget_minutes", "profile_steps")

    def warnings(self) -> Iterator[str]:
        if self.has_explicit_budget and (self.benchmark or not self.run_scope.trains):
            obstacle = "--benchmark" if self.benchmark else "--run-scope eval_only"
            yield f"--budget-minutes {self.budget_minutes:g}: has no effect with {obstacle}; remove --budget-minutes"


@dataclass(frozen=True)
class Evaluation(start.Settings, benchmark.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        has_weights = self.is_from_weights or self.benchmark or self.resume
        if self.run_scope is RunScope.EVAL_ONLY and not has_weights:
            remedy = "add --from-checkpoint DIR or --from-pretrained-params DIR"
            yield Conflict(f"--run-scope eval_only: requires a checkpoint; {remedy}")


@dataclass(frozen=True)
class Outputs(output.Settings, start.Settings, benchmark.Settings, images.Settings, dataset.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        obstacle = "--benchmark" if self.benchmark else f"--run-scope {self.run_scope.value}"
        unsupported = f"not supported with {obstacle}; remove one of them"
        trains, evaluates, phases = self.run_scope.trains, self.run_scope.evaluates, ("run_scope", "benchmark")
        if self.tensorboard_dir is not None and (self.benchmark or not trains):
            yield Conflict(f"--tensorboard-dir {self.tensorboard_dir}: {unsupported}", ("tensorboard_dir",), phases)
        if self.report_html is not None and self.benchmark:
            yield Conflict(f"--report-html {self.report_html}: {unsupported}", ("report_html",), ("benchmark",))
        if self.predictions is not None and (self.benchmark or not evaluates):
            problem = f"requires a complete evaluation; remove it or {obstacle}"
            yield Conflict(f"--predictions {self.predictions}: {problem}", ("predictions",), phases)
        if self.tta != "none" and (not evaluates or (self.benchmark and trains)):
            yield Conflict(f"--tta {self.tta}: requires an evaluation; remove it or {obstacle}", ("tta",), phases)
        for name in ("predictions", "report_html"):
            if getattr(self, name) is not None and self.data_format == "synthetic":
                problem = f"not supported with --data-format synthetic; remove {flag_name(name)}"
                yield Conflict(f"{argument(self, name)}: {problem}", (name,), ("data_format",))


@dataclass(frozen=True)
class MultiLabel(task.Settings, dataset.Settings, start.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        others = {
            "balanced_sampling": (self.balanced_sampling, "an image can have several classes"),
            "choose_recipe": (self.choose_recipe, "the chosen flags are for one class per image"),
            "label_offset": (self.label_offset not in (numbers.AUTO, 0), "classes are numbered from 0"),
            "data_format": (self.data_format in ONE_LABEL, "the format has one label per image"),
        }
        for name, (is_set, reason) in others.items():
            if self.multi_label and is_set:
                problem = f"not supported with --multi-label, because {reason}; remove one of them"
                yield Conflict(f"{argument(self, name)}: {problem}", (name,), ("multi_label",))


@dataclass(frozen=True)
class MultiLabelRecipe(MultiLabel):
    """The conflicts of MultiLabel that are errors before --choose-recipe chooses flags."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.choose_recipe:
            yield from super().conflicts()


@dataclass(frozen=True)
class Stages(stages_of.Options, durations.Settings):
    has_inherited_epochs: bool = about("is_inherited", "epochs")

    def conflicts(self) -> Iterator[Conflict]:
        # With --budget-minutes, a new run does not know its number of epochs yet; budget.choose checks the stages.
        is_known = self.iter_unit == "epoch" and (self.budget_minutes is None or self.has_inherited_epochs)
        if self.unfreeze_at is not None and is_known and self.unfreeze_at >= self.epochs:
            problem = f"must be below --epochs {self.epochs}; use an earlier epoch, or remove --unfreeze-at"
            yield Conflict(f"--unfreeze-at {self.unfreeze_at}: {problem}", ("unfreeze_at",), ("epochs",))
            return
        if self.sizes is None:
            return
        sizes, last = f"--sizes {text(self.sizes)}", stages_of.stages(self)[-1]
        if is_known and last.first_epoch >= self.epochs:
            problem = f"the last stage begins in epoch {last.first_epoch}, but --epochs is {self.epochs}"
            yield Conflict(f"{sizes}: {problem}; use an earlier epoch", ("sizes",), ("epochs",))
        if len(set(self.image_shape[1:])) > 1:
            problem = f"trains on square images, but --image-shape {text(self.image_shape)} is not square"
            yield Conflict(f"{sizes}: {problem}; remove --sizes, or use a square shape", ("sizes",), ("image_shape",))


@dataclass(frozen=True)
class Representation(
    machine.Settings, precision.Settings, sparsity.Settings, quantization.Settings, distillation.Settings
):
    def conflicts(self) -> Iterator[Conflict]:
        if self.program_representation == "legacy":
            return
        native = ["kernels"] if self.kernels == "native" else []
        for name in [name for name in _NOT_IN_PIR if getattr(self, name)] + native:
            problem = f"not supported with {argument(self, name)}; remove one of them"
            yield _between(f"--program-representation pir: {problem}", "program_representation", name)


@dataclass(frozen=True)
class Crop(images.Settings, augment.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        if 0 < self.crop_size <= self.crop_padding:
            yield Conflict(
                f"--crop-padding {self.crop_padding}: not below --crop-size {self.crop_size}, so crops could contain "
                "only padding; use a smaller value",
                ("crop_padding",),
                ("crop_size",),
            )

    def warnings(self) -> Iterator[str]:
        ratio = self.resize_short / self.crop_size
        if ratio > 1.3:
            yield (
                f"--resize-short {self.resize_short}: {ratio:.2f} times --crop-size {self.crop_size}, so an "
                f"evaluation uses only the center of each image; use {round(self.crop_size * RESIZE_RATIO)}"
            )


@dataclass(frozen=True)
class Decay(rates.Settings, durations.Settings, start.Settings):
    origin_of_decay_epochs: str = about("origin", "lr_decay_epochs")
    rank_of_decay_epochs: int = about("rank", "lr_decay_epochs")
    rank_of_unit: int = about("rank", "iter_unit")

    @property
    def _has_default_epochs(self) -> bool:
        """Whether --lr-decay-epochs has its default, and the default is meant as epochs: if the flag is not set, or if
        --iter-unit has a higher rank than --lr-decay-epochs, for example because the command line sets the unit and a
        file from --print-config contains the default."""
        is_set = self.origin_of_decay_epochs != "default" and self.rank_of_decay_epochs >= self.rank_of_unit
        return self.lr_decay_epochs == DEFAULTS["lr_decay_epochs"] and not is_set

    def conflicts(self) -> Iterator[Conflict]:
        if self.iter_unit == "batch" and self.lr_scheduler == "Piecewise" and self._has_default_epochs:
            yield Conflict(
                "--iter-unit batch: --lr-scheduler Piecewise has no default steps; set --lr-decay-epochs to the steps "
                "at which the learning rate decays"
            )

    def warnings(self) -> Iterator[str]:
        is_used = self.lr_scheduler == "Piecewise" and self.run_scope.trains and self.budget_minutes is None
        if is_used and min(self.lr_decay_epochs) >= self.length:
            yield (
                f"--lr-decay-epochs {listed(self.lr_decay_epochs)}: not before the end of the run ({self.iter_unit} "
                f"{self.length}), so the learning rate never decays; use lower values"
            )
        if self.warmup_start_lr and not self.warmup_epochs:
            rate = f"{self.warmup_start_lr:g}"
            remedy = "add it, or remove --warmup-start-lr"
            yield f"--warmup-start-lr {rate}: has no effect without --warmup-epochs; {remedy}"


@dataclass(frozen=True)
class Sparsity(sparsity.Settings, precision.Settings, start.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        if self.asp and not (self.prune_model or self.resume) and self.from_checkpoint is None:
            yield Conflict("--asp: requires pruned weights; add --prune-model or --from-checkpoint DIR")
        if self.asp and self.amp and self.amp_dtype == "bfloat16" and self.amp_level == "O2":
            remedy = "use --amp-level O1 or --amp-dtype float16"
            problem = f"--asp: bfloat16 parameters are not supported; {remedy}"
            yield _between(problem, "amp_level", "amp_dtype", "asp")


@dataclass(frozen=True)
class Optimizer(optimizer.Settings, rates.Settings, stages_of.Settings):
    def conflicts(self) -> Iterator[Conflict]:
        if OPTIMIZERS[self.optimizer].needs_all_layers and self.freeze:
            yield Conflict(
                f"--optimizer {self.optimizer}: its formula requires that all layers are trained from step 1 on; "
                "remove --freeze, or use --optimizer AdamW",
                ("freeze",),
                ("optimizer",),
            )

    def warnings(self) -> Iterator[str]:
        if OPTIMIZERS[self.optimizer].is_adaptive and self.lr > 0.03:
            yield f"--lr {self.lr:g}: high for --optimizer {self.optimizer}; use a lower rate, such as 0.001"


@dataclass(frozen=True)
class Patience(saving.Settings, durations.Settings, start.Settings):
    has_explicit_patience: bool = about("is_explicit", "patience")

    def conflicts(self) -> Iterator[Conflict]:
        if self.patience and not self.run_scope.evaluates:
            problem = "requires evaluations; use --patience 0, or remove --run-scope train_only"
            yield Conflict(f"--patience {self.patience}: {problem}", ("patience",), ("run_scope",))

    def warnings(self) -> Iterator[str]:
        evaluations = -(-self.length // self.eval_interval) if self.budget_minutes is None else math.inf
        if self.run_scope.trains and self.has_explicit_patience and self.patience >= evaluations:
            yield (
                f"--patience {self.patience}: not below the number of evaluations ({evaluations}), so training never "
                "ends early; use a lower value, or remove --patience"
            )


@dataclass(frozen=True)
class Training(start.Settings, loader.Settings, stages_of.Settings, loss.Settings, dataset.Settings):
    def warnings(self) -> Iterator[str]:
        if not self.run_scope.trains:
            return
        if self.batch_size == 1:
            yield (
                "--batch-size 1: batch normalization computes its statistics from a single image per process, so the "
                "network may not learn; use 2 or more"
            )
        if self.freeze and not (self.is_from_weights or self.resume):
            yield (
                f"--freeze {text(self.freeze)}: frozen layers would keep random initial weights; add "
                "--from-pretrained-params DIR"
            )
        if self.class_weights != "none" and self.balanced_sampling:
            yield "--class-weights balanced: --balanced-sampling already balances the classes; remove one of them"


@dataclass(frozen=True)
class Device(machine.Settings, precision.Settings, loader.Settings):
    """The flags that a device may not support, once --device is resolved."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.program_representation == "pir" and self.device == "gpu":
            yield Conflict(
                "--program-representation pir: requires a CPU, but this run is on a GPU; use --device cpu",
                ("program_representation",),
                ("device",),
            )
        if self.amp and self.device == "cpu":
            problem = f"requires a GPU, but this run is on the CPU, which has no {self.amp_dtype} kernels"
            yield Conflict(f"--amp: {problem}; use --amp false", ("amp",), ("device",))
        if self.dali_device == "gpu" and self.device == "cpu":
            problem = "requires a GPU, but this run is on the CPU; use --dali-device cpu"
            yield Conflict(f"--dali-device gpu: {problem}", ("dali_device",), ("device",))

    def warnings(self) -> Iterator[str]:
        if self.device == "cpu" and self.data_layout == "NHWC" and self.kernels == "paddle":
            yield "--data-layout NHWC: with --kernels paddle, slower than NCHW on a CPU; use --data-layout NCHW"
        if self.device == "cpu" and self.dali_output_fp16:
            yield "--dali-output-fp16: rounds images to half precision, which has no benefit on a CPU; remove the flag"


@dataclass(frozen=True)
class Unused(saving.Settings, network.Settings, benchmark.Settings):
    """Flags without an effect."""

    has_explicit_steps: bool = about("is_explicit", "benchmark_steps")
    has_explicit_warmup: bool = about("is_explicit", "benchmark_warmup_steps")

    def warnings(self) -> Iterator[str]:
        if self.inference_dir is not None:
            run_folder = os.path.join(self.output_dir, network_name(self.model_arch_name))
            export = command("export", run_folder, self.inference_dir)
            yield f"--inference-dir {self.inference_dir}: a run exports no network; after training, run {export}"
        explicit = {"benchmark_steps": self.has_explicit_steps, "benchmark_warmup_steps": self.has_explicit_warmup}
        for name, is_explicit in explicit.items():
            if is_explicit and not self.benchmark:
                remedy = f"add it, or remove {flag_name(name)}"
                yield f"{argument(self, name)}: has no effect without --benchmark; {remedy}"


WARNINGS: tuple[Any, ...] = (Crop, Training, Decay, Patience, Budget, Optimizer, Device, Unused)
