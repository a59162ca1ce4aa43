"""Distillation: a network learns the outputs of a trained network, the teacher (Hinton et al., arXiv:1503.02531).

The teacher runs in evaluation mode inside the training step, on the same images as the trained network. The teacher's
parameters and BN statistics are persistable variables whose names begin with PREFIX, but not parameters of the program.
Therefore, optimizers, --asp, averages of the weights and all-reduces ignore these variables. Mixed precision converts
the teacher's operators like those of the trained network. checkpoints/teachers.py finds, checks and loads the teacher.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_resnet.settings.field import Conflict, flag, out_of_range
from paddle_resnet.settings.values import argument, flag_name
from paddle_resnet.utils import files, numbers

if TYPE_CHECKING:
    from paddle_resnet.step.builder import StepBuilder

PREFIX = "teacher."  # prefix of the variables of the teacher; checkpoints omit them


@dataclass(frozen=True)
class Settings:
    # A resumed run inherits --teacher, but checks only that the weights are the same, so a different path to the same
    # weights changes no result.
    teacher: str | None = flag(
        None,
        "checkpoint or run folder of a trained network, the teacher, whose outputs this run learns in addition to the "
        "labels; classes and preprocessing must be those of this run",
        topic="distill",
        kind="saving",
        parse=numbers.or_none(files.argument),
        metavar="DIR",
    )
    # The default weight and temperature of distillation are those of Tian et al., arXiv:1910.10699.
    distill_weight: float = flag(
        0.9,
        "weight W of the teacher's outputs in the training loss; the loss of the labels has the weight 1 - W",
        topic="distill",
        parse=numbers.positive_ratio,
        metavar="W",
    )
    distill_temperature: float = flag(
        4.0,
        "temperature T by which the logits of both networks are divided; the larger T, the more the network learns "
        "about improbable classes",
        topic="distill",
        parse=numbers.positive_number,
        metavar="T",
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each flag of distillation that is set without --teacher, and one if --distill-temperature is
    not in the range from 0.1 to 1000."""
    yield from out_of_range("distill_temperature", settings.distill_temperature, 0.1, 1000)
    if settings.teacher is None:
        default = Settings()
        for name in ("distill_weight", "distill_temperature"):
            if getattr(settings, name) != getattr(default, name):
                problem = f"requires --teacher DIR; add it, or remove {flag_name(name)}"
                yield Conflict(f"{argument(settings, name)}: {problem}", (name,), ("teacher",))


@dataclass(frozen=True)
class Teacher:
    """A trained network whose outputs a run learns.

    Attributes:
        arch: value of --model-arch-name.
        weights: path of the file with the weights, in the folder of their checkpoint.
        sha256: hexadecimal sha256 of the file `weights`.
        classes: classes in the order of the outputs; empty if they are unknown.
        metric: {name: value} of the main metric in the teacher's evaluation, such as {"top1": 0.9}; empty if
            the value is unknown.
    """

    arch: str
    weights: Path
    sha256: str
    classes: list[str]
    metric: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return the description of the teacher for meta.json and the summary of a run."""
        return {"folder": str(self.weights.parent), "arch": self.arch, "sha256": self.sha256, **self.metric}


def add(step: "StepBuilder") -> None:
    """With --teacher, add the teacher step.teacher to a training program, and its logits, float32 [N, classes], to the
    targets. Call add() after the images have been mixed."""
    from paddle import static
    from paddle.utils import unique_name

    from paddle_resnet import graph, models
    from paddle_resnet.step import facts

    if step.part(Settings).teacher is None:
        return
    arch, program = step.teacher.arch, static.Program()
    with static.program_guard(program, static.Program()), unique_name.guard():
        images = static.data("images", step.images.shape, step.images.dtype)
        channels = images.shape[1 if step.layout == "NCHW" else 3]
        model = models.build_model(arch, step.num_classes, channels, step.layout)
        model.eval()
        logits = models.logits(model, images, arch, step.num_classes)
    copies = graph.embed(program, graph.block(step.main), {images.name: step.images}, PREFIX)
    step.targets = step.targets | {"teacher": copies[logits.name]}
    facts.of(step.main).teacher = step.teacher


def convert(step: "StepBuilder") -> None:
    """With --teacher, store the weights of the teacher in the type in which mixed precision reads them, instead of
    casting them in each step. Call convert() after minimize."""
    from paddle_resnet import graph

    if step.part(Settings).teacher is not None:
        graph.absorb_casts(graph.block(step.main), PREFIX)


def add_loss(step: "StepBuilder") -> None:
    """With --teacher, replace the training loss L with (1 - W) L + W T^2 D. D is the mean over the images of the
    divergence of the networks' outputs (models/divergence.py)."""
    import paddle

    from paddle_resnet.models.divergence import op

    settings = step.part(Settings)
    if settings.teacher is None:
        return
    weight, temperature = settings.distill_weight, settings.distill_temperature
    divided = (op("scale", x, scale=1 / temperature, bias=0.0) for x in (step.logits, step.targets["teacher"]))
    terms = (step.loss, 1 - weight), (paddle.mean(step.task.divergence(*divided)), weight * temperature**2)
    step.loss = op("elementwise_add", *(op("scale", x, scale=factor, bias=0.0) for x, factor in terms))
