"""A process that checks rows of the combination tests, one after the other; see run.py.

Arguments: the folder of the worker, the device, and the folder of the data sets.
"""
# ruff: noqa: E402

import faulthandler
import re
import sys
import traceback
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import checks
import conflicts
import generate
import workers
from paddle_resnet.job import processes

SLOW_S = 80  # if a row takes longer, its log contains the Python stack at this time
ERROR = re.compile(r"(train\.py|paddle_resnet\.\w+): error: |[\w.]*(Error|Exception)\b")


def main(folder, device, data):
    checks.prepare(device)
    rank = processes.rank()
    workers.serve(folder, rank, partial(answer, device=device, data=Path(data), folder=Path(folder), rank=rank))


def answer(job, device, data, folder, rank):
    """Return "ok" or the error of a job."""
    log = folder / f"row{job}.{rank}.log"
    workers.redirect(log)
    faulthandler.dump_traceback_later(SLOW_S, file=sys.__stderr__)
    try:
        check(job, device, data, folder / f"row{job}", log)
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"[:500] + "".join(f" | {line[:300]}" for line in errors(log)[-2:])
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "ok"


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
    workers.flush()
    return [line for line in log.read_text(errors="replace").splitlines() if ERROR.match(line)]


if __name__ == "__main__":
    main(*sys.argv[1:])
