"""Train with several seeds and sets of flags, several runs at once, and print a table of top1 after the last epoch.

    python benchmarks/accuracy.py --output output/ablation --seeds 3 --gpus 0,1 --runs-per-gpu 2 \\
        --flags "--config configs/imagenette_128px_20epochs.yaml --image-root imagenette" \\
        --row "recipe:" --row "no lookahead: --lookahead None"

Rows have the same form as in sweep.py, but without GPUS. The run of a row with seed S (0, 1, ...) uses `--seed S` and
`--dali-random-seed 42+S`, and writes its checkpoints, report and log to OUTPUT/ROW/S. Runs start in the order of their
seeds, so that after an interruption, all rows have about the same number of results. If the command is repeated, it
resumes unfinished runs and does not repeat finished ones. OUTPUT/ROW/flags.json contains the flags and environment
variables of the row, including --flags; if these differ from those of the command, the command ends with an error.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import sweep  # noqa: E402


def result(folder: Path) -> tuple[float, float] | None:
    """Return (top1 after the last epoch, minutes since the last start) of a run, or None if the run has not
    finished."""
    path = folder / "report.json"
    last = path.read_text().rpartition("DLLL ")[2] if path.exists() else ""
    if not last.endswith("}\n"):  # empty, or the run was killed while it wrote the line
        return None
    entry = json.loads(last)
    if "val.top1" not in entry["data"] or entry["step"] != []:  # the last line of a finished run is the summary
        return None
    return entry["data"]["val.top1"], float(entry["elapsedtime"]) / 60


def check_flags(row: sweep.Row, args: argparse.Namespace) -> str | None:
    """Write the flags and variables of a row to OUTPUT/ROW/flags.json, and return None. If the file exists and contains
    different flags or variables, return an error message."""
    name, variables, flags = row
    text, path = json.dumps({"variables": variables, "flags": [*args.flags, *flags]}), args.output / name / "flags.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text() != text:
        return f"{path.parent}: contains runs with different flags ({path.name}); rename the row or change --output"
    path.write_text(text)
    return None


def train(row: sweep.Row, seed: int, args: argparse.Namespace, gpus: queue.Queue) -> tuple[float, float] | None:
    """Train a row with a seed on the next free GPU, unless the run has finished before. Return the result of the run,
    or None if the run failed."""
    name, variables, flags = row
    folder = args.output / name / str(seed)
    if result(folder) is None:
        folder.mkdir(parents=True, exist_ok=True)
        places = ["--output-dir", str(folder), "--report-file", str(folder / "report.json"), "--resume"]
        seeds = ["--seed", str(seed), "--dali-random-seed", str(42 + seed)]
        command = [sys.executable, "train.py", *args.flags, *flags, *seeds, *places]
        gpu = gpus.get()
        environment = os.environ | variables | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        try:
            with open(folder / "log.txt", "ab") as log:
                code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        finally:  # otherwise, the other runs would wait for this GPU forever
            gpus.put(gpu)
        if code or result(folder) is None:
            last = ((folder / "log.txt").read_text(errors="replace").strip() or "no message").splitlines()[-1]
            print(f"{name}, seed {seed}: no result, exit code {code} ({last})", file=sys.stderr, flush=True)
            return None
    top1, minutes = result(folder)
    print(f"{name}, seed {seed}: {top1:.4f}", file=sys.stderr, flush=True)
    return top1, minutes


def table(results: dict[str, list[tuple[float, float] | None]]) -> str:
    """Return a Markdown table. `results` is {name of the row: [result of each seed, or None if the run failed]}."""
    lines = ["| row | n | mean top1 | lowest to highest | all seeds | minutes |", "|---|---|---|---|---|---|"]
    for name, runs in results.items():
        finished = [run for run in runs if run is not None]
        failed = len(runs) - len(finished)
        cells = [name, f"{len(finished)}{f' ({failed} failed)' if failed else ''}", "", "", "", ""]
        if finished:
            values, minutes = zip(*finished, strict=True)
            cells[2:4] = [f"{statistics.mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}"]
            cells[4:] = [", ".join(f"{value:.4f}" for value in values), f"{statistics.median(minutes):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--row", action="append", required=True, type=sweep.parse_row, metavar="'NAME: FLAGS'", help="row of the table"
    )
    parser.add_argument("--flags", default="", type=shlex.split, metavar="FLAGS", help="flags of train.py for all rows")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--gpus", default="", metavar="0,1,...", help="GPUs to use (default: the first one, if any)")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="number of runs at once on each GPU")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    names = [name for name, _, _ in args.row]
    if len(set(names)) < len(names) or not all(name and name == Path(name).name for name in names):
        parser.error(f"--row: names are empty, contain a slash or are not unique ({', '.join(names)}); rename them")
    if problems := [problem for row in args.row if (problem := check_flags(row, args))]:
        parser.error("\n".join(problems))
    gpus = queue.Queue()
    for gpu in args.gpus.split(",") * args.runs_per_gpu:
        gpus.put(gpu)
    jobs = [(row, seed) for seed in range(args.seeds) for row in args.row]
    with concurrent.futures.ThreadPoolExecutor(gpus.qsize()) as threads:
        done = list(threads.map(lambda job: train(*job, args, gpus), jobs))
    results = {name: [] for name in names}
    for (row, _), run in zip(jobs, done, strict=True):
        results[row[0]].append(run)
    print(table(results))
    return 1 if None in done else 0


if __name__ == "__main__":
    sys.exit(main())
