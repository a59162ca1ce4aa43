"""A training or evaluation program under construction."""

import numpy as np
from paddle import static

from paddle_resnet.job import processes
from paddle_resnet.step import facts, random_numbers, scalars


class StepBuilder:
    """A program to which components add operators. What a run needs to know after the construction is in `facts`.

    Args:
        settings: Settings.
        main, startup: the programs to fill.
        schedule: schedules.Schedule, which counts steps and batches; None in an evaluation program.

    Attributes:
        backend: "native" if components add custom operators, "paddle" if they add Paddle's.
        device: "cpu" or "gpu".
        model: the network (paddle.nn.Layer), once built.
        frozen: parameters that the optimizer does not update (--freeze).
    """

    def __init__(self, settings, main: static.Program, startup: static.Program, schedule=None):
        self.settings, self.main, self.startup, self.schedule = settings, main, startup, schedule
        self.backend = "native" if settings.kernels == "native" else "paddle"
        self.device = settings.device
        self.model, self.frozen = None, []
        facts.of(main).backend = self.backend

    @property
    def is_native(self) -> bool:
        return self.backend == "native"

    def declare(self, name: str, value_of, shape=(1,), dtype="float32") -> static.Variable:
        """Create a variable that the host writes before each step. See scalars.declare."""
        return scalars.declare(name, value_of, shape, dtype)

    def generator(self, name: str) -> np.random.Generator:
        """Return the random numbers of this process for the next batch and the use `name`."""
        return random_numbers.generator(self.settings.seed, self.schedule.batches, name, processes.rank())

    def declare_seed(self, name: str) -> static.Variable:
        """Return an int32 variable [1] that contains a new random seed for each batch."""
        return self.declare(f"{name}.seed", lambda: self.generator(name).integers(1, 2**31), dtype="int32")
