"""Run rows of the combination tests.

python tests/combinations/run.py                                                       all rows, on a CPU
python tests/combinations/run.py --rows 1/10 --ranks 2                                 jobs of two processes
python tests/combinations/run.py --device gpu --rows 1/2 --processes 6                 on a GPU
python tests/combinations/run.py --device gpu --gpus 2 --rows 1/4                      on two GPUs

Each process imports Paddle once and checks one row after another. With --gpus N or --ranks N, each row is a job of N
processes on N GPUs or on the CPU instead, started by Paddle's launcher. Only one job at a time runs on several GPUs: if
two jobs shared the GPUs, an all-reduce of one job would wait while one of the GPUs computes for the other job.

For each row, this program prints one line: the number of the row, its duration, "ok" or the error, and the duration of
each part of the row. The duration of a run is two numbers, A+B: seconds until its first step begins, and after that.
The last line contains the sums over all rows. If a row takes longer than --row-limit-s, its process is killed. The exit
code is 0 if all rows succeeded.
"""

import argparse
import itertools
import queue
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from workers import Worker  # noqa: E402

# Maximum time to import Paddle and, on a GPU, to compile the custom kernels. On some machines, one process starts after
# the other.
START_LIMIT_S = 180
PARTS = "parts"  # file in the folder of a row with the duration of each of its parts; checks.py writes it


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="device on which the rows run")
    parser.add_argument(
        "--rows",
        default="all",
        metavar="all|K/N|R,R,...",
        help="rows to run; all: all rows and, with one process per row on the CPU, the declared conflicts; K/N: every "
        "N-th row, beginning with row K - 1; R,R,...: rows with these numbers; conflicts: only the declared conflicts",
    )
    parser.add_argument(
        "--processes", type=int, help="number of processes that check rows (default: 2; with --gpus 2 or more: 1)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs for each row")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes for each row on the CPU")
    parser.add_argument("--row-limit-s", type=float, default=90)
    parser.add_argument("--limit-s", type=float, default=540, help="time after which no more rows run")
    parser.add_argument("--keep", metavar="DIR", help="empty folder in which to keep outputs and logs")
    args = parser.parse_args(argv)
    args.processes = args.processes or (1 if args.gpus > 1 else 2)
    ranks = args.gpus if args.device == "gpu" else args.ranks
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(args.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        import images

        images.write(folder / "data", ranks)
        jobs = _jobs(args.rows)
        if args.rows == "all" and (args.device, ranks) == ("cpu", 1):
            jobs += _jobs("conflicts")
        print(f"{len(jobs)} rows, data sets after {time.monotonic() - start:.1f} s", flush=True)
        pool = Pool(args, ranks, folder, jobs, start + args.limit_s)
        results = pool.run()
    failed = [job for job in jobs if results.get(job) != "ok"]
    missing = [job for job in jobs if job not in results]
    print(
        f"{len(jobs) - len(failed)} of {len(jobs)} rows ok, {len(failed) - len(missing)} failed, {len(missing)} not "
        f"run, {time.monotonic() - start:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""),
        flush=True,
    )
    print(f"{len(results)} rows: {describe(total(pool.parts.values()))}", flush=True)
    return int(bool(failed))


def read_parts(path):
    """Return {name: [seconds of each section]} for a file that checks.py has written. A part that has not ended has no
    sections."""
    lines = [line.partition(" ") for line in path.read_text().splitlines()] if path.exists() else []
    return total({name: [float(seconds) for seconds in text.split("+") if seconds]} for name, _, text in lines)


def total(rows):
    """Return the sums of several {name: [seconds of each section]}."""
    result = {}
    for name, sections in (item for parts in rows for item in parts.items()):
        result[name] = [a + b for a, b in itertools.zip_longest(result.get(name, []), sections, fillvalue=0)]
    return result


def describe(parts):
    """Return a description of {name: [seconds of each section]}, such as "reference 6.0+2.2, export 1.3"."""
    return ", ".join(
        f"{name} {'+'.join(f'{seconds:.1f}' for seconds in sections) or 'unfinished'}"
        for name, sections in parts.items()
    )


def _jobs(rows):
    """Return the names of the jobs: numbers of rows, or conflictN."""
    import conflicts
    import generate

    if rows == "conflicts":
        return [f"conflict{i}" for i in range(len(conflicts.cases()))]
    count = len(generate.read())
    if rows == "all":
        return [*map(str, range(count))]
    if "/" in rows:
        first, step = map(int, rows.split("/"))
        return [*map(str, range(first - 1, count, step))]
    return rows.split(",")


class Pool:
    """Workers that check rows. Each thread of run() feeds one worker. A worker that crashes or hangs, or fails on a GPU
    or in a job of several processes, is replaced.

    Attributes:
        parts: {job: result of read_parts}.
    """

    def __init__(self, args, ranks, folder, jobs, end):
        self._args, self._ranks, self._folder, self._end = args, ranks, folder, end
        self._queue, self._names, self._results, self.parts = queue.SimpleQueue(), itertools.count(), {}, {}
        for job in jobs:
            self._queue.put(job)

    def run(self):
        """Return {job: "ok" or error} for all jobs that have run."""
        threads = [threading.Thread(target=self._feed) for _ in range(self._args.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._results

    def _feed(self):
        worker = None
        while time.monotonic() < self._end:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if worker is None:
                start = time.monotonic()
                worker = self._worker()
                problem = worker.answer(self._limited(START_LIMIT_S))
                if problem != "ok":
                    print(f"{worker.folder.name} does not start: {problem}", flush=True)
                    break
                print(f"{worker.folder.name} ready after {time.monotonic() - start:.1f} s", flush=True)
            start = time.monotonic()
            worker.ask(job)
            self._results[job] = result = worker.answer(self._limited(self._args.row_limit_s))
            self.parts[job] = parts = read_parts(worker.folder / f"row{job}" / PARTS)
            print(f"{job:>11} {time.monotonic() - start:6.1f} s  {result}  [{describe(parts)}]", flush=True)
            if not self._args.keep:
                shutil.rmtree(worker.folder / f"row{job}", ignore_errors=True)
            if result != "ok" and (self._ranks > 1 or self._args.device == "gpu"):
                worker.kill()  # the ranks may wait for each other, or CUDA may be unusable
            if worker.has_ended:
                worker = None
        if worker is not None:
            worker.kill()

    def _worker(self):
        folder, device = self._folder / f"worker{next(self._names)}", self._args.device
        return Worker(folder, [HERE / "worker.py", folder, device, self._folder / "data"], device, self._ranks)

    def _limited(self, seconds):
        return max(0, min(seconds, self._end - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
