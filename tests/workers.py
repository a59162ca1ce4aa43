"""Processes that import Paddle once and then run one task after the other.

A test starts a Worker; the program of the worker calls `serve`.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Worker:
    """A process that runs tasks, or a job of several such processes. All processes read the tasks from the file
    `asked`, and each process writes a line for each task to its file `answersRANK`: "ok" or an error.

    Args:
        folder: folder that does not exist yet. Its file `output` contains the output of a single process, its folder
            `log` that of a job.
        program: command-line arguments of Python for the program, which must call serve(folder, ...).
        device: "cpu" or "gpu".
        ranks: number of processes; if there are several, Paddle's launcher starts them, on a GPU each with `device`
            "gpu".
        **environment: environment variables to change.
    """

    def __init__(self, folder, program, device, ranks, **environment):
        self.folder, self.has_ended, self._answers = Path(folder), False, 0
        self.folder.mkdir()
        self._files = [self.folder / f"answers{rank}" for rank in range(ranks)]
        for path in (self.folder / "asked", *self._files):
            path.touch()
        command = [sys.executable]
        if ranks > 1:
            count = ["--gpus", ",".join(gpu_labels(ranks))] if device == "gpu" else ["--nproc_per_node", ranks]
            command += ["-m", "paddle.distributed.launch", *count, "--log_dir", self.folder / "log"]
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": python_path, "PORT_RANGE": "12000:32000", **environment}
        with (self.folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [*map(str, [*command, *program])], cwd=ROOT, env=environment, stdout=output, stderr=output
            )

    def ask(self, task):
        """Send a task, which must be JSON data."""
        with (self.folder / "asked").open("a") as file:
            file.write(json.dumps(task) + "\n")

    def answer(self, limit_s):
        """Return "ok" when all processes have given the next answer "ok", or the first error. If the process exits or
        does not answer within the limit, kill all processes and return the reason."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            code = self._process.poll()
            lines = [path.read_text().split("\n")[:-1] for path in self._files]
            answers = [json.loads(each[self._answers]) for each in lines if len(each) > self._answers]
            errors = [each for each in answers if each != "ok"]
            if errors or len(answers) == len(lines):
                self._answers += 1
                return [*errors, "ok"][0]
            if code is not None:
                self.kill()
                return f"the process exited with {code}: {last_line(self.folder / 'output')}"
            time.sleep(0.02)
        self.kill()
        return f"no answer after {limit_s:.0f} s"

    def kill(self):
        self.has_ended = True
        pids = [int(path.suffix[1:]) for path in self.folder.glob("rank*.*")]
        for pid in (self._process.pid, *pids):  # the launcher first; otherwise, it would report the others
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that a driver blocks does not end
            self._process.wait(10)


def gpu_labels(count):
    """Return the names that the launcher uses for the first `count` visible GPUs. If $SHARE_GPU is set, return the name
    of the first GPU `count` times."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    labels = visible.split(",") if visible else [str(i) for i in range(count)]
    return labels[:1] * count if "SHARE_GPU" in os.environ else labels[:count]


def last_line(path):
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1][:200] if lines else ""


def serve(folder, rank, run):
    """Answer "ok". Then call run(task) for each task that Worker.ask sends, and answer with its result. Return when the
    process that started this one has ended.

    Args:
        folder: folder of the Worker.
        rank: rank of this process.
        run: function that returns "ok" or an error.
    """
    folder = Path(folder)
    (folder / f"rank{rank}.{os.getpid()}").touch()
    gc.freeze()
    parent, done = os.getppid(), 0
    with (folder / f"answers{rank}").open("a", buffering=1) as answers:
        answers.write(json.dumps("ok") + "\n")
        while os.getppid() == parent:
            tasks = (folder / "asked").read_text().split("\n")[:-1]
            if len(tasks) == done:
                time.sleep(0.02)
                continue
            result = run(json.loads(tasks[done]))
            gc.collect()
            answers.write(json.dumps(result) + "\n")
            done += 1


def redirect(path):
    """Append this process's output to a file, including that of C++ code."""
    flush()
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def flush():
    sys.stdout.flush()
    sys.stderr.flush()
