"""Compare short training runs with recorded losses: `python -m paddle_resnet.doctor --self-test`.

Each run trains the network of models/self_test.py for 20 steps on generated images. The initial weights are equal on
all devices, the augmentation does not change the images (each image equals its mirror image), and self_test.json
contains the losses that Paddle 2.6.2 and 3.3.1 computed on a CPU: with each kind of kernels, and with two processes.

Exact comparisons:
- losses on a CPU with the recorded losses, if the version of Paddle, its kind of build and the vector extensions of the
  CPU are those of the recording. On other CPUs and with other versions or builds, sums can be rounded differently, and
  BOUNDS limits the difference.
- losses of captured steps with those of uncaptured steps, and of a resumed run with those of the original run, on the
  same machine.

On a GPU, all losses are compared with those of a CPU in float32, so a difference is expected. BOUNDS limits the
difference for each precision, relative to the first loss. Relative changes of all initial weights by up to 4e-3, the
rounding error of bfloat16, changed the losses by 7e-4 of the first loss; changes by up to 5e-4, the rounding error of
float16 and TF32, changed the losses by 9e-5.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from paddle_resnet.utils.children import ROOT, Row, reason, run, training_command

GOLDENS = Path(__file__).with_name("self_test.json")
NETWORK = f"{ROOT / 'paddle_resnet/models/self_test.py'}:Net"
STEPS, CLASSES, IMAGES, SIZE = 20, 4, {"train": 80, "val": 16}, 32
FLAGS = [
    *("--model-arch-name", NETWORK, "--num-of-class", str(CLASSES), "--data-layout", "NHWC"),
    *("--image-shape", f"4,{SIZE},{SIZE}", "--crop-size", str(SIZE), "--resize-short", str(SIZE)),
    *("--rand-crop-scale", "1,1", "--rand-crop-ratio", "1,1", "--batch-size", "8", "--epochs", "2"),
    *("--warmup-epochs", "0", "--lr", "0.05", "--bn-momentum", "0.8", "--print-interval", "1"),
    *("--show-config", "false", "--dali-num-threads", "2", "--comm-timeout-s", "60"),
]
_AMP = ["--amp", "--scale-loss", "128", "--use-dynamic-loss-scaling", "--amp-level"]
# {precision on a GPU: (flags of the precision, remedy: flags that avoid the precision)}
PRECISIONS = {
    "float32": ([], "--device cpu"),
    "AMP O1": ([*_AMP, "O1"], "--amp false"),
    "AMP O2": ([*_AMP, "O2"], "--amp-level O1"),
}
# Limits of |loss - recorded loss| / recorded loss of the first step.
BOUNDS = {"CPU": 1e-4, "float32": 0.005, "AMP O1": 0.02, "AMP O2": 0.02}
TIMEOUT_S = 100  # timeout of a child process, which may also have to build the custom kernels
# Environment variables of the runs: one thread, because the rounding of CPU kernels depends on the number of threads;
# and deterministic algorithms of cuDNN.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "FLAGS_cudnn_deterministic": "1"}
# Program of a child process that trains several times. The process exits after the first failure, because a failed CUDA
# call could make later runs fail.
_TRAIN = """
import json, os, sys
import paddle_resnet
from paddle import static
from paddle_resnet import train
for flags in json.loads(sys.argv[1]):
    with static.scope_guard(static.Scope()):
        code = train.main(flags)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
os._exit(0)  # skip the exit handlers of libraries, which may crash
"""


class Run(NamedTuple):
    """A training run of the self-test.

    Attributes:
        what: name of the row.
        flags: flags in addition to FLAGS.
        golden: name of the recorded losses.
        bound: name of the limit in BOUNDS.
        remedy: what to do if the run fails or its losses differ.
        twin: `what` of an earlier run whose losses must be equal, or None.
    """

    what: str
    flags: list[str]
    golden: str
    bound: str
    remedy: str
    twin: str | None = None

    @property
    def folder(self) -> str:
        return self.what.replace(", ", "_").replace(" ", "_")


def plan(device: str, has_native: bool) -> list[list[Run]]:
    """Return the runs in groups. A child process trains the runs of one group, one after another.

    Args:
        device: "gpu" or "cpu".
        has_native: whether the custom kernels can be built.
    """
    cpu = ["--device", "cpu", "--kernels"]
    versions = "use a version of Paddle that docs/install.md lists as tested"
    groups = [[Run("CPU, Paddle's kernels", [*cpu, "paddle"], "paddle", "CPU", versions)]]
    if has_native:
        groups[0].append(Run("CPU, custom kernels", [*cpu, "native"], "native", "CPU", "use --kernels paddle"))
    for name, (flags, remedy) in PRECISIONS.items() if device == "gpu" else ():
        on_gpu = [*flags, "--device", "gpu", "--kernels"]
        group = [Run(f"{name}, Paddle's kernels", [*on_gpu, "paddle"], "paddle", name, f"use {remedy}")]
        if has_native:
            native, captured = f"{name}, custom kernels", f"{name}, custom kernels, captured"
            for what, graph, avoid, twin in (
                (native, "false", "--kernels paddle", None),
                (captured, "true", "--cuda-graph false", native),
            ):
                options = [*on_gpu, "native", "--cuda-graph", graph]
                group.append(Run(what, options, "native", name, f"use {avoid}", twin))
        groups.append(group)
    return groups


def checks(device: str, missing: str | None, gpus: int, arithmetic: list[str]) -> Iterator[Row]:
    """Yield a Row for each check. The status of a Row is "no" if the check failed, and "note" if this machine cannot
    run the check. After a failure, the other checks still run, but resuming and exporting require a run that has
    trained.

    Args:
        device: device on which doctor can train, "gpu" or "cpu".
        missing: reason why custom kernels cannot be built, or None.
        gpus: number of GPUs.
        arithmetic: [version of Paddle, "cpu" or "cuda" (kind of build), vector extensions of the CPU].
    """
    golden, is_exact = _golden(arithmetic)
    groups = plan(device, missing is None)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(1, _cores() // 4)) as pool:
        folder = Path(name)
        write_images(folder / "data")
        job = pool.submit(_train_job, folder, device) if device == "cpu" or gpus > 1 else None
        answers = [pool.submit(_train, folder, group) for group in groups]
        trained, losses = [], {}
        for group, answer in zip(groups, answers, strict=True):
            for each in group:
                steps, problem = answer.result()[each.what]
                yield _compared(each, steps, problem, golden[each.golden], is_exact and each.bound == "CPU", losses)
                if problem is None:
                    losses[each.what] = steps
                    trained.append(each)
        if missing is not None:
            yield Row("custom kernels", f"not checked: {missing}", "note")
        last = trained[-1] if trained else None
        for what, check in (("resume", _resume), ("export", _export)):
            yield check(folder, last, losses) if last else Row(what, "not checked: no run has trained", "no")
        if job is None:
            yield Row("two processes", "not checked: the machine has one GPU", "note")
        else:
            each = Run("two processes", [], "two processes", "CPU" if device == "cpu" else "float32", "use one process")
            yield _compared(each, *job.result(), golden[each.golden], is_exact and device == "cpu", losses)


def _cores():
    return len(os.sched_getaffinity(0))


def _golden(arithmetic):
    """Return ({name: losses}, whether this machine must compute exactly these losses on a CPU). For a version without
    recorded losses, return the losses of the newest recorded version of Paddle."""
    goldens = json.loads(GOLDENS.read_text())
    golden = goldens.get(arithmetic[0]) or goldens[max(goldens)]
    return golden["losses"], golden["arithmetic"] == arithmetic


def write_images(folder: Path) -> None:
    """Write a data set of symmetric images, whose classes differ in color, to train/ and val/ in a folder."""
    random = np.random.RandomState(0)
    for split, count in IMAGES.items():
        for i in range(count):
            label = i % CLASSES
            half = random.randint(0, 160, (SIZE, SIZE // 2, 3))
            if label:
                half[:, :, label - 1] += 60
            path = folder / split / f"class{label}" / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.concatenate([half, half[:, ::-1]], axis=1).astype(np.uint8)).save(path)


def _flags(folder, name, *flags):
    output, report = folder / name, folder / f"{name}.json"
    places = ["--image-root", folder / "data", "--output-dir", output, "--report-file", report]
    return list(map(str, [*FLAGS, *flags, *places]))


def _train(folder, group):
    """Train the runs of a group. Return {what: (losses, problem or None)}."""
    answers, rest = {}, list(group)
    while rest:
        commands = [_flags(folder, each.folder, *each.flags) for each in rest]
        done = run(["-c", _TRAIN, json.dumps(commands)], timeout_s=TIMEOUT_S, environment=ENVIRONMENT)
        while rest:
            each = rest.pop(0)
            losses = _losses(folder / f"{each.folder}.json")
            is_complete = len(losses) == STEPS and (folder / each.folder / "Net" / "1").exists()
            answers[each.what] = losses, None if is_complete else reason(done.returncode, done.stderr)
            if not is_complete:
                break  # a new child process trains the rest
    return answers


def _train_job(folder, device):
    """Train with two processes. Return (losses, problem or None)."""
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", folder / "log"]
    flags = _flags(folder, "job", "--device", device, "--kernels", "paddle", "--batch-size", "4", "--lr", "0.025")
    command = [*map(str, launcher), *training_command(), *flags]
    done = run(command, cwd=folder, timeout_s=TIMEOUT_S, environment=ENVIRONMENT)
    if done.returncode == 0:
        return _losses(folder / "job.json"), None
    logs = sorted((folder / "log").glob("workerlog.*"))
    return [], reason(done.returncode, done.stderr + "".join(path.read_text(errors="replace") for path in logs))


def _losses(report):
    """Return the training losses of all steps in a report, in order; NaN for a loss that is not finite."""
    if not report.exists():
        return []
    lines = report.read_text().splitlines()
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines if line.endswith("}")]
    steps = [entry["data"] for entry in entries if entry["type"] == "LOG" and len(entry["step"]) == 2]
    losses = [step["train.loss"] for step in steps if "train.loss" in step]
    return [float("nan") if loss is None else loss for loss in losses]


def _compared(each, losses, problem, golden, is_exact, others):
    """Return the Row of a run: compare its losses with the recorded losses `golden` and, if `others` contains the run
    `each.twin`, with the losses of `each.twin`."""
    if problem is not None:
        return Row(each.what, problem, "no", each.remedy)
    difference = _difference(losses, golden)
    bound = 0 if is_exact else BOUNDS[each.bound]
    detail = f"losses differ by {difference:.1g} (limit {bound:g})" if difference else "losses are identical"
    works = difference <= bound
    if each.twin in others:
        change = _difference(losses, others[each.twin])
        works = works and change == 0
        detail += f"; {change:.1g} from uncaptured steps (limit 0)" if change else "; identical to uncaptured steps"
    return Row(each.what, detail, "ok") if works else Row(each.what, detail, "no", each.remedy)


def _difference(losses, others):
    """Return the largest difference relative to the first of `others`; infinity if a loss is not finite or missing."""
    if len(losses) != len(others) or not np.isfinite(losses).all():
        return float("inf")
    return float(np.abs(np.subtract(losses, others)).max() / others[0])


def _resume(folder, each, losses):
    """Resume a run after its first epoch, and compare the losses of the second epoch."""
    what, after = f"resume ({each.what})", STEPS // 2
    start = ["--from-checkpoint", folder / each.folder / "Net", "--last-epoch-of-checkpoint", "0"]
    resumed = Run(what, [*each.flags, *start], each.golden, each.bound, "start runs again instead of resuming them")
    command = _flags(folder, "resumed", *resumed.flags)
    done = run(["-c", _TRAIN, json.dumps([command])], timeout_s=TIMEOUT_S, environment=ENVIRONMENT)
    if done.returncode:
        return Row(what, reason(done.returncode, done.stderr), "no", resumed.remedy)
    return _compared(resumed, _losses(folder / "resumed.json"), None, losses[each.what][after:], True, {})


def _export(folder, each, losses):
    """Export the network of a run. The export compares its results on the validation images with the checkpoint's."""
    what = f"export ({each.what})"
    flags = ["--model-arch-name", NETWORK, "--verify", folder / "data"]
    command = ["-m", "paddle_resnet.export", folder / each.folder / "Net" / "1", folder / "exported", *flags]
    done = run(list(map(str, command)), timeout_s=TIMEOUT_S, environment=ENVIRONMENT)
    if done.returncode == 0:
        return Row(what, "verified on the validation images")
    remedy = "export with a version of Paddle that docs/install.md lists as tested"
    return Row(what, reason(done.returncode, done.stderr), "no", remedy)


def record(arithmetic: list[str]) -> None:
    """Store the losses that this machine computes on its CPU in GOLDENS, except those of failed runs. For the argument,
    see `checks`."""
    goldens = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "data")
        [group] = plan("cpu", True)
        answers = {each.golden: _train(folder, [each])[each.what] for each in group}
        answers["two processes"] = _train_job(folder, "cpu")
    losses = {name: losses for name, (losses, problem) in answers.items() if problem is None}
    goldens[arithmetic[0]] = {"arithmetic": arithmetic, "losses": losses}
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")
