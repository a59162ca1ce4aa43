"""Check rows of the combination tests in this process.

Design. A row is a set of flags of train.py. train.main, export.main and predict.main run in this process, so Paddle is
imported once for all rows. The checks of a row:
1. The run succeeds. Its report, tables and last checkpoint are the reference.
2. A second run gets SIGTERM before a random step, exits with code 75 and continues with --resume, twice if it is long
   enough. In a job of several processes, it gets SIGTERM once, after one step, or not at all if it is short. Its last
   checkpoint, report and tables must be equal to the reference, bit for bit. In every fourth row, --resume must write
   the same summary again after it has been removed from the report.
3. `--run-scope eval_only` on the last checkpoint succeeds. Its metrics equal those of the last evaluation, unless the
   row has `--run-scope train_only`. In every second row, the same images are also evaluated in another format.
4. In every fourth row, `--benchmark` runs.
5. The export of the checkpoint passes --verify (omitted for synthetic images). In every second row, the checkpoint, the
   exported networks and preprocess.py classify images, and their classes and probabilities agree. exports.py rotates
   the flags of the commands over the rows; a flag that conflicts with the row is an error.
With --budget-minutes, two runs may choose different numbers of epochs. Therefore, in a row with this flag, only the run
that is stopped and resumed has the flag. This run comes first, and the reference has --epochs and --warmup-epochs of
its checkpoint instead.

The runs of a row take longer to start on a GPU. Therefore, a row on a GPU omits what the same row on the CPU shows and
a GPU does not change:
- the second stop, because a run that has resumed stops and resumes like any other run
- the evaluations of the teacher and of the run that trains the start, whose metrics are not compared
- the evaluation of the checkpoint in rows with --run-scope train_only, which have no metrics to compare
- the evaluation in another format, and the removal of the summary
- except in rows whose number is a multiple of 7, the benchmark, the export, which converts the float32 weights of the
  checkpoint and verifies the result on the CPU, and the predictions. With --rows 1/2, these rows have all values of
  the axes in exports.EXPORTS.
"""
# ruff: noqa: I001

import contextlib
import gc
import itertools
import json
import os
import pickle
import random
import re
import signal
import time
from functools import partial
from pathlib import Path

import conftest  # noqa: F401  speeds up Paddle and DALI
import numpy as np
import paddle
from paddle import static

import exports
import few_blocks
import reruns
from exports import Failed
from paddle_resnet.data import decoding
from paddle_resnet.data import loader as loader_module
from paddle_resnet import train
from run import PARTS
from conflicts import ONE_LABEL
from images import TRAIN
from axes import AXES, GPU_AXES, GPU_FLAGS, PIR_FLAGS, gpu_values, has_pir
from paddle_resnet import budget, models
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import compat
from paddle_resnet.models.resnet import BasicBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.serving import int8_onnx
from paddle_resnet.utils import logger
from paddle_resnet.utils.mode import Mode

ROOT = Path(__file__).parent.parent.parent
AGREEMENT_STEPS = 6  # maximum number of steps after a signal until all processes of a job stop
BUDGET_EPOCHS = 4  # number of epochs that --budget-minutes chooses in these tests
TRAINING_OUTPUTS = ("tensorboard", "trace", "report")  # axes that the benchmark and the evaluation of a row omit
TIMES = re.compile(r"steps|ips|time|latency|memory|energy|power|_s$|start|utilization")
OF_A_RUN = {"run", "sequence", "arguments", "checksum", "files"}  # keys of meta.json that differ between equal runs
# Formats of the same images, with the same classes, in the same order
SAME_IMAGES = ["folder", "named folder", "filelist", "filelist outside", "filelist from 1", "recordio", "tfrecord"]
SAME_IMAGES += ["tfrecord from 1", "lmdb", "webdataset", "parquet"]
FILES = {
    "network.py": (ROOT / "docs/networks.md").read_text().split("\n```python\n")[2].partition("```")[0],
}


def prepare(device):
    """Prepare this process: small networks, small synthetic data sets, small decoder buffers and, on a GPU,
    deterministic kernels of cuDNN."""
    os.chdir(ROOT)
    paddle.enable_static()
    if device == "gpu":
        paddle.set_flags({"FLAGS_cudnn_deterministic": True})
        # Compile the custom kernels now, so that no row waits for them.
        native.load(paddle.device.cuda.get_device_capability(processes.local_gpu()))
    few_blocks.shrink()
    models.MODELS["Tiny"] = partial(ResNet, BasicBlock, (1,), width=8)
    int8_onnx.SPEED_S = 0  # the export measures the speed of INT8 networks for this long
    loader_module.SYNTHETIC_SIZE = {Mode.TRAIN: 40 * processes.world_size(), Mode.EVAL: 11}
    decoding.PREALLOCATE_WIDTH = decoding.PREALLOCATE_HEIGHT = 0
    # Without this replacement, loaded machines would choose few epochs, and fast ones many.
    chosen = budget.epochs_within
    budget.epochs_within = lambda *arguments: BUDGET_EPOCHS if chosen(*arguments) else None
    # The processes of a job agree on a step two polls after a signal. With the default, short runs would end before
    # this step.
    exchange.STOP_POLL_STEPS = 2
    reruns.allow_reruns()
    gc.disable()  # building programs is faster; worker.py collects garbage after each row


class Row:
    """The checks of a row.

    Args:
        number: number of the row, which seeds its random choices.
        values: {axis: value}.
        data: folder that images.write has filled.
        folder: empty folder for the outputs.
        device: "cpu" or "gpu".
    """

    def __init__(self, number, values, data, folder, device):
        self.number, self.values, self.data, self.folder, self.device = number, values, data, Path(folder), device
        self.random, self.teacher, self.is_short = random.Random(number), None, device == "gpu"
        self.files = self.folder / "files"
        self.files.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            (self.files / name).write_text(text)
        self.arch = AXES["network"][values["network"]][1].format(files=self.files)
        self.name = self.arch.rpartition(":")[2]  # name of the run's folder

    def check(self):
        """Run all checks. Raises Failed if a check fails."""
        self.teacher = self._teacher()
        start = self.start()
        is_on_budget = self.values["length"] == "budget"
        if not is_on_budget:
            self._succeed("run", self.train("reference", start=start))
        steps = BUDGET_EPOCHS if is_on_budget else len(self.steps)
        stops = self._stop(steps, start)
        self._succeed("resumed run", self.train("stopped", "--resume", start=start))
        if is_on_budget:
            arguments = self._meta("stopped")["arguments"]
            length = ["--epochs", arguments["epochs"], "--warmup-epochs", arguments["warmup_epochs"]]
            self._succeed("run", self.train("reference", *length, start=start, without=["length"]))
        self._compare(stops)
        self._evaluate()
        if self.number % 4 == 1 and processes.world_size() == 1 and not self.is_short:
            self._complete(start)
        if self.number % (7 if self.is_short else 4) == 0:
            flags = ["--benchmark", "--benchmark-steps", 2, "--benchmark-warmup-steps", 1]
            without = [*TRAINING_OUTPUTS, "page", "predictions", "tta"]
            self._succeed("benchmark", self.train("benchmark", *flags, start=start, without=without))
        if processes.rank() == 0 and (not self.is_short or self.number % 7 == 0):
            self._export()

    def _stop(self, steps, start):
        """Train, but stop before a random step, and again after resuming if at least two steps are left. A job of
        several processes gets SIGTERM only once, after one step, or not at all if it is too short for an agreement.
        Return the steps before which the run stopped; [None] if it did not stop.

        Args:
            steps: number of steps that the run has at least.
            start: folder of the checkpoint from which the run starts, or None.
        """
        if processes.world_size() > 1:
            stop = 1 if steps > AGREEMENT_STEPS + 1 else None
            self._succeed("stopped run", self.train("stopped", start=start, stop=stop), 0 if stop is None else 75)
            return [stop]
        stop = self.random.randrange(1, max(2, steps))
        self._succeed("stopped run", self.train("stopped", start=start, stop=stop), 75)
        if self.is_short or steps - stop < 2:
            return [stop]
        more = self.random.randrange(1, steps - stop)
        self._succeed("second stopped run", self.train("stopped", "--resume", start=start, stop=more), 75)
        return [stop, stop + more]

    def train(self, name, *flags, start=None, stop=None, without=(), only=AXES):
        """Call train.main with the row's flags on the axes `only` except `without` and with further flags, and return
        the exit code. `stop` is the training step before which the run gets SIGTERM, or None."""
        row = self.flags(name, start, [axis for axis in only if axis not in without])
        logger._start_s = time.time()  # --budget-minutes counts from the start of the program
        if processes.world_size() > 1:
            reruns.start_run()
        if self.is_short:
            gc.collect()  # free the GPU memory and the threads of earlier runs
        part = self._part("resumed" if "--resume" in flags else name)
        with part, static.scope_guard(static.Scope()), stopped_before(stop) as self.steps:
            return train.main([*row, *map(str, flags)])

    @contextlib.contextmanager
    def _part(self, name):
        """Write the duration of a part of the row to the file PARTS: its name, and a number of seconds for each section
        of the part; a run has a section before and a section after the beginning of its first step."""
        start, self.steps = time.monotonic(), []
        self._write_part(f"{name} ")
        try:
            yield
        finally:
            times = [start, *self.steps[:1], time.monotonic()]
            self._write_part("+".join(f"{b - a:.1f}" for a, b in itertools.pairwise(times)) + "\n")

    def _write_part(self, text):
        if processes.rank() == 0:
            with (self.folder / PARTS).open("a") as file:
                file.write(text)

    def flags(self, name, start=None, only=AXES):
        """Return the flags of the row's values on the axes in `only`, for outputs in the folder `name`."""
        first = self._first_step(start)
        places = {
            "trace": f"{first}:{first + 1}",
            "data": self.data,
            "files": self.files,
            "run": self.folder / name,
            "start": start,
            "teacher": self.teacher,
        }
        flags = ["--device", self.device, "--dali-num-threads", "1", "--show-config", "false"]
        flags += ["--output-dir", "{run}"]
        if self.device == "gpu":
            flags += GPU_FLAGS
            for axis, value in gpu_values(self.number, self.values).items():
                flags += GPU_AXES[axis][value]
        elif compat.IS_PADDLE_3 and processes.world_size() == 1 and has_pir(self.number, self.values):
            flags += PIR_FLAGS
        for axis in only:
            flags += AXES[axis][self.values[axis]]
        return [flag.format_map(places) for flag in flags]

    def _first_step(self, start):
        """Return the step with which the first pass of a run begins. It is 0 unless the run continues training from the
        checkpoint `start` in the middle of an epoch."""
        if self.values["start"] != "checkpoint" or start is None:
            return 0
        meta = json.loads((start / "meta.json").read_text())
        step = meta["step"] or 0
        return step if step < meta["steps_each_epoch"] else 0

    def start(self):
        """Train the checkpoint from which the row starts, and return its folder. Return None if the row starts from
        scratch."""
        if self.values["start"] == "scratch":
            return None
        if self.values["start"] == "checkpoint":
            length = AXES["length"][next(iter(AXES["length"]))] if self.values["length"] == "budget" else []
            without = ["start", *(["length"] if length else [])]
            code = self.train("start", *length, without=without, stop=self.random.randrange(1, 5))
            self._succeed("first run", code, 75)
            return self.folder / "start" / self.name / "latest"
        # A configuration file may set the number of classes, so the first run needs it too.
        only = ["network", "shape", "layout", "classes", "format", "batch", "ema"]
        only += ["recipe"] if self.values["recipe"] in ("file", "GPU file") else []
        flags = ["--epochs", 1, "--warmup-epochs", 0, "--lr", 0.01]
        flags += ["--num-of-class", 7] if self.values["start"] == "other classes" else []
        self._succeed("first run", self.train("start", *flags, *self._short_scope(), only=only))
        return self._last("start")

    def _teacher(self):
        """Train a network with the row's classes and preprocessing, and return its checkpoint. Return None if the row
        has no teacher."""
        if self.values["teacher"] == "none":
            return None
        only = ["network", "prefix", "classes", "shape", "layout", "qat", "interp", "normalization", "format", "batch"]
        only += ["labels", "ema", "sparsity", *(["recipe"] if self.values["recipe"] in ("file", "GPU file") else [])]
        flags = ["--epochs", 1, "--warmup-epochs", 0, "--lr", 0.01]
        self._succeed("teacher", self.train("teacher", *flags, *self._short_scope(), only=only))
        return self._last("teacher")

    def _short_scope(self):
        return ["--run-scope", "train_only"] if self.is_short else []

    def _succeed(self, what, code, expected=0):
        if code != expected:
            raise Failed(f"{what}: exit code {code} instead of {expected}")

    def _last(self, name):
        """Return the newest checkpoint of a run."""
        return (self.folder / name / self.name / "latest").resolve()

    def _meta(self, name):
        return json.loads((self._last(name) / "meta.json").read_text())

    def _report_file(self, name, file=None):
        folder = self.folder / name
        is_own = self.values["report"] == "own" and not file
        return folder / "own.json" if is_own else folder / self.name / (file or "report.json")

    def _report(self, name, file=None):
        """Return {(position, metric): value} for the metrics that do not depend on the speed of the machine."""
        result = {}
        for line in self._report_file(name, file).read_text().splitlines():
            entry = json.loads(line.removeprefix("DLLL "))
            if isinstance(entry["step"], list):
                place = (*entry["step"], entry["data"].get("val.step", entry["data"].get("train.step")))
                result |= {(place, k): v for k, v in entry["data"].items() if not TIMES.search(k)}
        return result

    def _compare(self, stops):
        """Compare the stopped and resumed run with the uninterrupted run."""
        where = f"stopped before steps {stops}"
        expected, actual = map(self._report, ("reference", "stopped"))
        for key in expected.keys() | actual.keys():
            if key[1] != "teacher.folder" and expected.get(key) != actual.get(key):
                raise Failed(f"{where}: {key} is {actual.get(key)} instead of {expected.get(key)}")
        expected, actual = map(self._last, ("reference", "stopped"))
        if expected.name != actual.name:
            raise Failed(f"{where}: the last checkpoint is {actual.name} instead of {expected.name}")
        names = {path.name for path in expected.glob("*.pd*")}
        if names != {path.name for path in actual.glob("*.pd*")} or len(names) < 2:
            raise Failed(f"{where}: different files in the last checkpoint")
        for name in names:
            one, other = (pickle.loads((folder / name).read_bytes()) for folder in (expected, actual))
            if one.keys() != other.keys():
                raise Failed(f"{where}: different variables in {name}: {one.keys() ^ other.keys()}")
            for variable, value in one.items():
                # After a resume, the learning rate has shape (1,) instead of ().
                if np.ravel(value).tobytes() != np.ravel(other[variable]).tobytes():
                    raise Failed(f"{where}: {variable} in {name} differs")
        one, other = map(self._meta, ("reference", "stopped"))
        for key in (one.keys() | other.keys()) - OF_A_RUN:
            if without_times(one.get(key)) != without_times(other.get(key)):
                raise Failed(f"{where}: {key} in meta.json is {other.get(key)} instead of {one.get(key)}")
        one, other = map(self._tables, ("reference", "stopped"))
        if one != other:
            raise Failed(
                f"{where}: tables differ: {sorted(n for n in one.keys() | other if one.get(n) != other.get(n))}"
            )
        if self.values["page"] == "on" and not (self.folder / "stopped" / "report.html").stat().st_size:
            raise Failed("empty page")

    def _tables(self, name):
        """Return {file name: content} of the CSV files of a run."""
        return {path.name: path.read_bytes() for path in (self.folder / name).rglob("*.csv")}

    def _evaluate(self):
        """Evaluate the last checkpoint, and compare the metrics with those of the last evaluation, if there was one."""
        is_compared = self.values["scope"] != "train_only"
        if self.is_short and not is_compared:
            return
        checkpoint = self._last("reference")
        without = [*TRAINING_OUTPUTS, "start", "scope"]
        flags = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint]
        self._succeed("evaluation", self.train("evaluated", *flags, without=without))
        if not is_compared:
            return
        recorded = without_times(self._meta("reference")["evaluated"])
        self._compare_evaluation("evaluated", recorded)
        # With more outputs than classes, some formats require the names of all outputs, or have ambiguous labels.
        has_all_classes = self._meta("reference")["arguments"]["num_of_class"] == len(TRAIN)
        has_other = self.values["format"] in SAME_IMAGES and has_all_classes
        if has_other and self.number % 2 == 0 and not self.is_short:
            excluded = {self.values["format"], *(() if self.values["labels"] == "one" else ONE_LABEL)}
            others = [name for name in SAME_IMAGES if name not in excluded]
            other = others[self.number % len(others)]
            replaced = [flag.format(data=self.data) for flag in AXES["format"][other]]
            without = [*without, "format", "page", "predictions", "report"]
            self._succeed(f"evaluation of {other}", self.train("other", *flags, *replaced, without=without))
            self._compare_evaluation("other", recorded)

    def _compare_evaluation(self, name, expected):
        """Compare the metrics that the evaluation `name` reports with {metric: value}."""
        actual = {key: value for (_, key), value in self._report(name, "report.eval.json").items()}
        for key, value in expected.items():
            if value != actual[f"val.{key}"]:
                raise Failed(f"evaluation {name!r}: {key} is {actual[f'val.{key}']} instead of {value}")

    def _complete(self, start):
        """Remove the summary from the report of the stopped and resumed run, as if the run had been killed before it
        wrote the summary. With --resume, the run must write the same summary."""
        expected = self._report("stopped")
        path = self._report_file("stopped")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))
        self._succeed("completed run", self.train("stopped", "--resume", start=start))
        if (actual := self._report("stopped")) != expected:
            differing = {key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key)}
            values = {key: (expected.get(key), actual.get(key)) for key in differing}
            raise Failed(f"run without a summary: --resume changed {values}")

    def _export(self):
        """Export the last checkpoint. In every second row, and in all rows on a GPU, compare the predictions of the
        checkpoint and the export."""
        checkpoint, output = str(self._last("reference")), str(self.folder / "export")
        images = self.flags("x", only=["format"])
        root = images[images.index("--image-root") + 1] if "--image-root" in images else str(self.data / "folder")
        network = ["--model-arch-name", self.arch] if ":" in self.arch else []
        with self._part("export"):
            exports.write(checkpoint, output, self.values, self.number, root, images, network, self.device)
        if self.number % 2 == 1 and not self.is_short:
            return
        pictures = [str(path) for path in sorted((self.data / "folder/val").glob("*/*.jpg"))[::3]]
        tta = AXES["tta"][self.values["tta"]]
        with self._part("predict"):
            exports.compare(checkpoint, output, pictures, self.number, tta, network, self.device, str(self.folder))


def without_times(value):
    """Return a copy of JSON data that omits the metrics that depend on the speed of the machine."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if not TIMES.search(key)}
    return value


@contextlib.contextmanager
def stopped_before(step):
    """Send SIGTERM to this process before a training step, unless `step` is None or this process is not rank 0. Yield a
    list that gets the time of each training step. Steps that --budget-minutes measures are not counted."""
    agreed, steps = exchange.stop_agreed, []

    def stop_agreed():
        if not logger._only_warns:  # otherwise, --budget-minutes measures the step
            if len(steps) == step and processes.rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            steps.append(time.monotonic())
        return agreed()

    exchange.stop_agreed = stop_agreed
    try:
        yield steps
    finally:
        exchange.stop_agreed = agreed


def conflict_error(case, data, folder, device):
    """Check that a run with the flags of a conflicts.Flags exits with code 2 before step 1. Return the strings that its
    error message must contain."""
    row = Row(0, {axis: next(iter(values)) for axis, values in AXES.items()} | case.values, data, folder, device)
    start = row.start()
    code = row.train("conflict", *case.flags.format(start=start, data=data).split(), start=start, without=case.without)
    if code != 2 or list((row.folder / "conflict").glob("*/*.json")):
        raise Failed(f"{case.values} {case.flags}: exit code {code} instead of 2 before step 1")
    return [name.format(start=start, data=data) for name in case.names]
