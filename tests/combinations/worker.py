"""A process that checks rows of the combination tests, one after the other; see run.py.

Arguments: the folder of the worker, the device, and the folder of the data sets.
"""
# ruff: noqa: E402

import gc
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import checks
import conflicts
import generate
from paddle_resnet.job import processes

ERROR = re.compile(r"(train\.py|paddle_resnet\.\w+): error: |[\w.]*(Error|Exception)\b")


def main(folder, device, data):
    folder, data, rank = Path(folder), Path(data), processes.rank()
    (folder / f"rank{rank}.{os.getpid()}").touch()
    checks.prepare(device)
    gc.freeze()
    parent, done = os.getppid(), 0
    answer(folder, "ready")
    while os.getppid() == parent:
        jobs = (folder / "asked").read_text().split("\n")[:-1]
        if len(jobs) == done:
            time.sleep(0.02)
            continue
        log = folder / f"row{jobs[done]}.{rank}.log"
        redirect(log)
        try:
            check(jobs[done], device, data, folder / f"row{jobs[done]}", log)
            result = "ok"
        except Exception as e:
            traceback.print_exc()
            result = f"{type(e).__name__}: {e}"[:500] + "".join(f" | {line[:300]}" for line in errors(log)[-2:])
        gc.collect()
        answer(folder, result)
        done += 1


def check(job, device, data, folder, log):
    if not job.startswith("conflict"):
        checks.Row(int(job), generate.read()[int(job)], data, folder, device).check()
        return
    case = conflicts.cases()[int(job.removeprefix("conflict"))]
    names = checks.conflict_error(case, data, folder, device)
    message = " ".join(errors(log))
    if missing := [name for name in names if name not in message]:
        raise checks.Failed(f"{case.values} {' '.join(case.flags)}: the error does not contain {missing}")


def errors(log):
    sys.stdout.flush()
    sys.stderr.flush()
    return [line for line in log.read_text(errors="replace").splitlines() if ERROR.match(line)]


def redirect(path):
    """Write this process's output to a file, including that of C++ code."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def answer(folder, result):
    if processes.rank() == 0:
        with (folder / "answers").open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
