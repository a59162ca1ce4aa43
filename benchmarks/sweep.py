"""Benchmark this project with different flags or environment variables, and print a table of medians.

    python benchmarks/sweep.py --repeats 3 --flags "--data-format synthetic --data-layout NHWC --amp" \\
        --row "graph:" --row "no graph: --cuda-graph false" --row "two GPUs: GPUS=0,1 NCCL_ALGO=Ring"

A row consists of a name and arguments that are added to --flags. Environment variables are set by arguments of the form
NAME=VALUE before the first flag. GPUS lists the GPUs to use; for several GPUs, Paddle's launcher starts one process per
GPU. Each measurement runs in a separate process, by default `train.py --benchmark --run-scope train_only`. Each row is
measured --repeats times, in alternation with the other rows, so that a change in the machine's speed affects all rows.
If --flags contains a single flag, an equals sign is required: --flags=--amp.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = ["--benchmark", "--run-scope", "train_only", "--show-config", "false", "--print-interval", str(10**9)]
Row = tuple[str, dict[str, str], list[str]]  # name, environment variables, flags


def parse_row(text: str) -> Row:
    """Parse "NAME: VARIABLE=VALUE ... --flag ...". Return (name, {variable: value}, flags)."""
    name, colon, rest = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} has no colon after the name; write 'NAME: FLAGS'")
    arguments = shlex.split(rest)
    count = next((i for i, argument in enumerate(arguments) if not re.match(r"\w+=", argument)), len(arguments))
    return name.strip(), dict(argument.split("=", 1) for argument in arguments[:count]), arguments[count:]


def command(row: Row, common: list[str], python: str, folder: str) -> tuple[list[str], dict[str, str]]:
    """Return (arguments, environment) of a measurement process that writes FOLDER/report.json."""
    _, variables, flags = row
    gpus = variables.get("GPUS", "0").split(",")
    environment = os.environ | variables
    start = [python]
    if len(gpus) > 1:
        start += ["-m", "paddle.distributed.launch", "--gpus", ",".join(gpus), "--log_dir", f"{folder}/log"]
    elif "GPUS" in variables:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[0]
    places = ["--report-file", f"{folder}/report.json", "--output-dir", f"{folder}/output"]
    return [*start, "train.py", *BENCHMARK, *common, *flags, *places], environment


def measure(row: Row, common: list[str], python: str, limit_s: float) -> dict[str, Any]:
    """Run a measurement. Return {metric: value} or, if the run failed or took longer than limit_s, {"error": reason,
    "command": arguments}. The reason of a failure is the last line that rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, environment = command(row, common, python, folder)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        try:
            output, errors = process.communicate(timeout=limit_s)
        except BaseException as e:
            os.killpg(process.pid, signal.SIGKILL)  # kill the launcher and all processes that it has started
            process.wait()
            if isinstance(e, subprocess.TimeoutExpired):
                return {"error": f"not finished after {limit_s:g} s", "command": arguments}
            raise
        if process.returncode:
            log = Path(folder, "log/workerlog.0")
            text = log.read_text() if log.exists() else errors
            return {"error": (text.strip() or output.strip() or "no message").splitlines()[-1], "command": arguments}
        last = Path(folder, "report.json").read_text().splitlines()[-1]
    data = json.loads(last.removeprefix("DLLL "))["data"]
    return {name.rpartition(".")[2]: value for name, value in data.items()}


def table(names: list[str], results: list[tuple[str, dict[str, Any]]]) -> str:
    """Return a Markdown table of the results, which are (name of the row, result of measure). Failed measurements are
    counted, but excluded from the medians."""
    columns = ["row", "n", "median images/s", "lowest to highest", "median step, ms", "99th percentile, ms"]
    columns += ["wait for data, ms", "loss", "first step, s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in names:
        measured = [result for row, result in results if row == name and "error" not in result]
        failed = sum(row == name for row, _ in results) - len(measured)
        cells = [name, f"{len(measured)}{f' ({failed} failed)' if failed else ''}", *[""] * (len(columns) - 2)]
        if measured:

            def middle(key, measured=measured):
                return statistics.median(result[key] for result in measured)

            rates = [result["ips"] for result in measured]
            cells[2:4] = [f"{middle('ips'):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"]
            cells[4:6] = [f"{middle('latency_p50_ms'):.2f}", f"{middle('latency_p99_ms'):.2f}"]
            cells[6] = f"{middle('data_time') * 1e3:.2f}"
            cells[7] = ", ".join(sorted({f"{result['loss']:.7g}" for result in measured}))
            cells[8] = f"{middle('first_step_s'):.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--row", action="append", required=True, type=parse_row, metavar="'NAME: FLAGS'", help="row of the table"
    )
    parser.add_argument("--flags", default="", type=shlex.split, metavar="FLAGS", help="flags of train.py for all rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", metavar="FILE", help="file to which a JSON line per measurement is appended")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit per measurement in seconds")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args(argv)
    names = [name for name, _, _ in args.row]
    if len(set(names)) < len(names):
        parser.error(f"--row: names are not unique ({', '.join(names)}); rename one")
    results = []
    for repetition in range(args.repeats):
        for row in args.row:
            result = measure(row, args.flags, args.python, args.limit_s)
            results.append((row[0], result))
            print(f"{repetition} {row[0]}: {result.get('error') or round(result['ips'])}", flush=True)
            if args.output:
                with open(args.output, "a", encoding="utf-8") as output:
                    output.write(json.dumps({"row": row[0], "repetition": repetition, **result}) + "\n")
    print(table(names, results))
    return 1 if any("error" in result for _, result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
