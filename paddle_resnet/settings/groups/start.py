"""Flags of the start of a run: the configuration file, the phases, the checkpoint or parameters from which the run
starts, whether it replaces an earlier run, and the seed."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import files, numbers
from paddle_resnet.utils.mode import RunScope


def _epoch(text):
    if text == "None":
        return None
    return text if text == "auto" else numbers.not_negative(text)


@dataclass(frozen=True)
class Settings:
    config: str | None = flag(
        None,
        "YAML file that sets flags (recipe); each key is a flag name with underscores; values that "
        "conflict with flags on the command line are ignored",
        topic="start",
        kind="output",
        parse=files.argument,
        metavar="FILE",
    )
    run_scope: RunScope = flag(
        "train_eval",
        f"phases of the run: {', '.join(s.value for s in RunScope)}",
        topic="start",
        kind="output",
        choices=[s.value for s in RunScope],
        metavar="SCOPE",
    )
    resume: bool = flag(
        False,
        "continue from the newest valid checkpoint in OUTPUT_DIR/ARCH, if there is one",
        topic="start",
        kind="output",
    )
    overwrite: bool = flag(
        False,
        "delete the checkpoints of an earlier run in OUTPUT_DIR/ARCH/ before training",
        topic="start",
        kind="output",
    )
    from_checkpoint: str | None = flag(
        None,
        "checkpoint to load, with its optimizer state, or run folder; of a run folder, the best checkpoint or, if "
        "there is none, the newest, preferably at the end of an epoch",
        topic="start",
        kind="output",
        parse=files.argument,
        metavar="DIR",
    )
    last_epoch_of_checkpoint: str | None = flag(
        None,
        "epoch in --from-checkpoint DIR after which to continue; auto: the newest epoch; None: start at epoch 0 "
        "with the parameters and the optimizer state of DIR, or of its best checkpoint if DIR is a run folder",
        topic="start",
        kind="output",
        parse=_epoch,
        metavar="{None,auto,N}",
    )
    from_pretrained_params: str | None = flag(
        None,
        "checkpoint folder or file PREFIX.pdparams with initial weights; None: training from scratch",
        topic="fine-tune",
        kind="output",
        parse=numbers.or_none(files.argument),
        metavar="DIR",
    )
    pretrained_mismatch: str = flag(
        "error",
        "action if the classifier of the pretrained parameters has a different shape; skip-classifier: "
        "initialize a new classifier, for fine-tuning",
        topic="fine-tune",
        kind="output",
        choices=["error", "skip-classifier"],
    )
    choose_recipe: bool = flag(
        False,
        "choose the recipe for the data and the machine; sets network, pretrained weights, image and batch size, "
        "epochs, optimizer, learning rate, augmentation, precision and loader threads, unless you set them",
        topic="start",
        kind="output",
    )
    dry_run: bool = flag(
        False,
        "stop before training, after all checks; programs are built and the checkpoint is loaded",
        topic="start",
        kind="output",
    )
    print_config: bool = flag(
        False,
        "print the flags as YAML and stop",
        topic="start",
        kind="output",
    )
    seed: int = flag(
        0,
        "seed of the initial weights; also of --mixup, --cutmix, --dropout and --drop-path",
        topic="start",
        parse=numbers.seed,
    )

    @property
    def is_from_weights(self) -> bool:
        """Whether the run starts from a checkpoint or from pretrained parameters that a flag specifies."""
        return self.from_checkpoint is not None or self.from_pretrained_params is not None


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each conflict between the flags of the start."""
    if settings.from_checkpoint is not None and settings.from_pretrained_params is not None:
        yield Conflict(
            f"--from-checkpoint {settings.from_checkpoint}: cannot be combined with --from-pretrained-params "
            f"{settings.from_pretrained_params}; remove one of them",
            ("from_checkpoint", "from_pretrained_params"),
            ("from_checkpoint", "from_pretrained_params"),
        )
    if settings.last_epoch_of_checkpoint is not None and settings.from_checkpoint is None:
        yield Conflict(
            f"--last-epoch-of-checkpoint {settings.last_epoch_of_checkpoint}: requires --from-checkpoint DIR; add it",
            ("last_epoch_of_checkpoint",),
            ("from_checkpoint",),
        )
    if settings.resume and settings.run_scope is RunScope.EVAL_ONLY:
        yield Conflict(
            "--resume: continues training, but --run-scope is eval_only; use --from-checkpoint DIR "
            "--last-epoch-of-checkpoint auto instead",
            ("resume",),
            ("run_scope",),
        )
    if settings.resume and settings.overwrite:
        yield Conflict(
            "--resume: continues the run that --overwrite deletes; remove --resume or --overwrite",
            ("resume", "overwrite"),
            ("resume", "overwrite"),
        )
    if settings.pretrained_mismatch != "error" and settings.from_pretrained_params is None:
        yield Conflict(
            f"--pretrained-mismatch {settings.pretrained_mismatch}: requires --from-pretrained-params DIR; add it, "
            "or remove --pretrained-mismatch",
            ("pretrained_mismatch",),
            ("from_pretrained_params",),
        )
    if settings.run_scope is RunScope.EVAL_ONLY and settings.pretrained_mismatch != "error":
        yield Conflict(
            f"--pretrained-mismatch {settings.pretrained_mismatch}: leaves the classifier untrained, but --run-scope "
            "is eval_only; remove --pretrained-mismatch",
            ("pretrained_mismatch",),
            ("run_scope",),
        )
