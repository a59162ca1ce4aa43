"""A program for training or evaluation, under construction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from paddle import static

from paddle_resnet import graph
from paddle_resnet.step import facts, random_numbers, scalars

_Settings = TypeVar("_Settings")  # class Settings of a component


@dataclass(frozen=True)
class Options:
    """The flags that describe a program; see `train.py --help all`."""

    batch_size: int
    data_layout: str
    device: str
    image_shape: list[int]
    kernels: str
    model_arch_name: str
    num_of_class: int
    seed: int


class StepBuilder:
    """A program to which components add operators. Facts about the program that a run needs after the construction are
    stored with facts.of.

    Args:
        part: function that returns the values of the flags that a dataclass declares (values.Settings.part).
        main, startup: the programs to fill.
        schedule: schedules.Schedule, which counts steps and batches; None in an evaluation program.
        rank: rank of this process.

    Attributes:
        backend: "native" if components add custom operators, "paddle" if they add Paddle's.
        device: "cpu" or "gpu".
        arch, layout, num_classes: the network; layout is "NCHW" or "NHWC".
        task: what the network predicts (tasks.Task), set by build.
        image_size: [height, width] of the images.
        batch_size: images per process and batch.
        images: the input of the network.
        logits: the output of the network [N, num_classes], once built.
        loss: the training loss [], once added, which components can replace. Evaluations always compute the cross
            entropy.
        targets: the inputs "data" and "label" of the program, and the entries that components add for the loss head of
            the task.
        class_images: number of training images of each class, or None if unknown.
        teacher: distillation.Teacher, or None without --teacher.
        model: the network (paddle.nn.Layer), once built.
        frozen: parameters that the optimizer does not update (--freeze).
        values, frozen_values: {trained or frozen parameter: variable that contains its float32 value}, set by
            describe_update.
        bn_statistics: names of the running means and variances, set by describe_update.
        factor: variable with which custom kernels multiply the gradients, 0 in a skipped step; None stands for 1.
    """

    def __init__(
        self, part: Callable, main: static.Program, startup: static.Program, schedule: Any = None, rank: int = 0
    ) -> None:
        options: Options = part(Options)
        self.main, self.startup, self.schedule = main, startup, schedule
        self.backend = "native" if options.kernels == "native" else "paddle"
        self.device, self._part, self._rank, self._seed = options.device, part, rank, options.seed
        self.arch, self.layout, self.num_classes = options.model_arch_name, options.data_layout, options.num_of_class
        self.image_size, self.batch_size = options.image_shape[1:], options.batch_size
        self.task: Any = None
        self.images: Any = None
        self.targets: dict[str, Any] = {}
        self.class_images: Sequence[int] | np.ndarray | None = None
        self.teacher: Any = None
        self.model: Any = None
        self.logits: Any = None
        self.loss: Any = None
        self.factor: Any = None
        self.frozen: list[Any] = []
        self.values: dict[str, str] = {}
        self.frozen_values: dict[str, str] = {}
        self.bn_statistics: list[str] = []
        facts.of(main).backend = self.backend

    @property
    def is_native(self) -> bool:
        return self.backend == "native"

    def part(self, cls: type[_Settings]) -> _Settings:
        """Return the settings of a component, an instance of its class Settings."""
        return self._part(cls)

    def declare(
        self, name: str, value_of: Callable, shape: Sequence[int] = (1,), dtype: str = "float32"
    ) -> static.Variable:
        """Create a variable that the host writes before each step. See scalars.declare. value_of must not refer to this
        StepBuilder: facts.py keeps value_of as long as the program exists, so a reference to the program would keep the
        program in memory."""
        return scalars.declare(name, value_of, shape, dtype)

    def random(self, name: str) -> Callable[[], np.random.Generator]:
        """Return a function that creates this process's random generator for the next batch. Generators with different
        names are independent."""
        seed, schedule, rank = self._seed, self.schedule, self._rank
        return lambda: random_numbers.generator(seed, schedule.batches, name, rank)

    def declare_seed(self, name: str) -> static.Variable:
        """Return an int32 variable [1] that contains a new random seed for each batch."""
        random = self.random(name)
        return self.declare(f"{name}.seed", lambda: random().integers(1, 2**31), dtype="int32")

    def describe_update(self, master: str, bn_statistics: list[str]) -> None:
        """Set the attributes that describe the operators that minimize has added, for the components of the update.

        Args:
            master: suffix of the names of master weights.
            bn_statistics: names of the running means and variances.
        """
        block, updates = graph.block(self.main), graph.updates(self.main)
        self.values = {op.input("Param")[0]: graph.value_of(op) for op in updates}
        names = [parameter.name for parameter in self.frozen]
        self.frozen_values = {name: name + master if block.has_var(name + master) else name for name in names}
        self.bn_statistics = bn_statistics
