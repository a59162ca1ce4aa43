"""Measure this project's networks on one GPU with synthetic images, and print a Markdown table of training and
evaluation: images/s, peak GPU memory, kernel time per step, the fraction of this time for each kind of kernel, and the
memory bound.

    python benchmarks/networks.py --output networks.jsonl
    python benchmarks/networks.py --device cpu --arch ResNet18 --crop-size 32 --batch-size 4
    python benchmarks/networks.py --table networks.jsonl

The settings are those of `peers.py` for this project. Each network runs in a separate process, because Paddle cannot
reset its peak memory. One process at a time uses the GPU, while the next one imports Paddle. A profiler records the
last three steps of the warm-up; images/s and step time exclude these steps.

The memory bound is the time for reading each input and writing each output of every operator in the fused program
once, at the memory bandwidth --bandwidth-tb-s. "bound / step" is its fraction of the step time: at 100%, a step takes
only as long as moving this data. The bound excludes views, such as reshape2, and tensors without a fixed size, such as
some of self-attention.

The fractions of the kinds of kernels are relative to their total time ("kernels"). "convolution" includes matrix
products, "SE, concatenation" includes global average pooling, and "BN, activation, addition" includes dropout, other
elementwise kernels and the gradients of biases. The file --output contains the time of each kernel, so --table can
classify kernels again.
"""

import argparse
import collections
import concurrent.futures
import copy
import fcntl
import gc
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

if TYPE_CHECKING:
    from paddle import static

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers  # noqa: E402

from paddle_resnet.models import MODELS  # noqa: E402
from paddle_resnet.models.__main__ import SHAPE_ONLY  # noqa: E402

TASKS = {"train": "train, synthetic", "evaluate": "evaluate, synthetic"}
TRACED_STEPS = 3
MIN_WARMUP_STEPS = 3 + TRACED_STEPS  # the third step is captured
VIEWS = {f"{name}{grad}" for name in ("reshape2", "flatten_contiguous_range", "squeeze2") for grad in ("", "_grad")}
# {kind: regular expression}. A kernel belongs to the first kind whose expression occurs in its name.
KINDS = {
    "custom 1x1 convolution": r"^pointwise_",
    "depthwise": r"^depthwise_|[Dd]epthwise|conv2d_c1_k1",
    "convolution": r"^stem_|xmma|cutlass|gemm|gemv|scudnn|convolve|conv2d|winograd|fprop|[dw]grad|splitK|cask|im2col"
    r"|precompute_indices",
    "pooling": r"[Pp]ool",
    "SE, concatenation": r"^image_sums|^scale_images|^concat_|^split_(8|16)|Concat|SplitTensor|[Ss]igmoid",
    "loss, metrics": r"^loss_|[Ss]oft_?[Mm]ax|CrossEntropy|Accuracy|TopK|ArgM|OneHot",
    "update": r"^(momentum|adamw|radam|lamb|lookahead|advance|follow)_|^check_gradients|^sum_squares|^clip_factor"
    r"|Momentum|CheckFinite|LossScaling",
    "casts, copies": r"Cast|[Tt]ranspose|Shuffling|SwapDim|[Nn](chw|CHW)To|[Nn](hwc|HWC)To|(?i:memcpy|memset)"
    r"|scalePacked|convertTensor|tensorTransform|Padding|FullFunctor|Fill|CwiseNullary",
    "BN, activation, addition": r"^bn_|^affine_|^dropout|[Bb]atch_?[Nn]orm|bn_[fb]w|[Rr]elu|[Ss]wish|[Mm]ish|[Ss]ilu"
    r"|SumArray|Elementwise|Broadcast|ReduceHigherDim",
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel; "other" if no expression of KINDS occurs in its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def kernel_times(trace: str) -> dict[str, float]:
    """Return {kernel: ms} of all kernels, copies and memory sets in the content of a trace file."""
    times = collections.Counter()
    for event in json.loads(trace)["traceEvents"]:
        if str(event.get("cat")).lower() in ("kernel", "memcpy", "memset"):
            name = re.sub(r"\s*\[[^\]]*\]$", "", event["name"]).removeprefix("void ")  # Paddle appends the duration
            times[name] += event["dur"] / 1000
    return dict(times)


def bytes_moved(program: "static.Program", batch_size: int) -> int:
    """Return the number of bytes that the operators of a program read and write, if each operator reads each input and
    writes each output once. The first dimension of activations, -1, is the batch size."""
    from paddle.base.data_feeder import convert_dtype

    block = program.global_block()

    def size(name):
        variable = block.vars.get(name)
        shape = getattr(variable, "shape", None)
        if shape is None or min(shape[1:], default=1) < 0:  # such as cuDNN's reserve space, which has no fixed size
            return 0
        items = math.prod(batch_size if side == -1 else side for side in shape)
        if name.endswith(".mask"):  # a byte for each 8 float16 elements; Paddle does not know this shape
            return items // 8
        return items * np.dtype(convert_dtype(variable.dtype)).itemsize  # uint16 for bfloat16

    total = 0
    for op in block.ops:
        if op.type not in VIEWS:
            read = op.input("Out@GRAD") if op.type in SHAPE_ONLY else op.input_arg_names
            total += sum(size(name) for names in (read, op.output_arg_names) for name in set(names))
    return total


def measure(args: argparse.Namespace, arch: str, task: str) -> dict[str, Any]:
    """Train or evaluate a network like `train.py --benchmark`, and return the result as a dict.

    Raises:
        SystemExit: train.main failed, and has printed the error message.
    """
    import paddle
    from paddle import static

    from paddle_resnet import program, train
    from paddle_resnet.step import trace

    args = copy.copy(args)
    args.crop_size = args.crop_size or MODELS[arch].image_size
    all_compiled, compile_prog = [], program.compile_prog

    def compile_with_trace(settings, main_prog, *arguments, **options):
        compiled = compile_prog(settings, main_prog, *arguments, **options)
        steps = args.warmup_steps - TRACED_STEPS, args.warmup_steps
        compiled.trace = trace.Trace(steps, path, settings.device)  # --profile-steps would disable captured steps
        all_compiled.append((compiled, bytes_moved(compiled._program, args.batch_size)))
        return compiled

    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "trace.json", Path(folder) / "report.json"
        command = peers.own_command(args, arch, TASKS[task], report)
        flags = command[command.index("train.py") + 1 :]
        with mock.patch.object(program, "compile_prog", compile_with_trace):
            paddle.enable_static()
            with static.scope_guard(static.Scope()):
                code = train.main([*flags, "--num-of-class", "1000", "--output-dir", folder])
        if code:
            sys.exit(code)
        kernels = {name: ms / TRACED_STEPS for name, ms in kernel_times(path.read_text()).items()}
        result = {"arch": arch, "task": task, "batch_size": args.batch_size, **peers.read_report(report)}
    [(compiled, bytes_per_step)] = all_compiled
    is_captured = getattr(compiled.captured, "_graph", None) is not None
    return result | {"is_captured": is_captured, "bytes": bytes_per_step, "kernels": kernels}


def measure_all(args: argparse.Namespace, arch: str) -> None:
    """Evaluate and train a network in this process, and append the results to --output. The file --output is locked, so
    that processes with the same --output measure one after another."""
    import train  # noqa: F401  import Paddle and DALI before waiting for the GPU
    from paddle_resnet import phases  # noqa: F401
    from paddle_resnet.step import cuda_graph

    with open(args.output, "a", encoding="utf-8") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        for task in reversed(TASKS):  # evaluation first, because it has the lower peak memory
            output.write(json.dumps(measure(args, arch, task)) + "\n")
            output.flush()
            cuda_graph._workspaces.clear()
            gc.collect()


def run(args: argparse.Namespace) -> int:
    """Measure each network of --arch in a separate process. Return the exit code."""
    names = ("device", "batch_size", "crop_size", "steps", "warmup_steps", "output")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]

    def run_process(arch):
        done = subprocess.run([sys.executable, __file__, "--arch", arch, *flags], capture_output=True, text=True)
        outcome = (done.stderr.strip() or "no message").splitlines()[-1] if done.returncode else "measured"
        print(f"{arch}: {outcome}", file=sys.stderr, flush=True)
        return done.returncode

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return 1 if any([*threads.map(run_process, args.arch)]) else 0


def table(results: list[dict[str, Any]], bandwidth_tb_s: float) -> str:
    """Return a Markdown table of the latest result for each network and task."""
    kinds = [*KINDS, "other"]
    columns = ["network", "task", "images/s", "GPU memory, MiB", "step, ms", "kernels, ms"]
    columns += ["memory bound, ms", "bound / step", *kinds]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    latest = {(result["task"], result["arch"]): result for result in results}
    for task, arch in ((task, arch) for task in TASKS for arch in MODELS if (task, arch) in latest):
        result = latest[task, arch]
        step = 1000 * result["batch_size"] / result["ips"]
        bound = result["bytes"] / bandwidth_tb_s / 1e9
        times = collections.Counter()
        for kernel, ms in result["kernels"].items():
            times[kind_of(kernel)] += ms
        total = times.total()
        memory = result.get("peak_memory_allocated_mib")
        cells = [arch if result["is_captured"] else f"{arch} (not captured)", task, f"{result['ips']:,.0f}"]
        cells += [f"{memory:,.0f}" if memory else "", f"{step:.2f}", f"{total:.2f}" if total else ""]
        cells += [f"{bound:.2f}", f"{bound / step:.0%}"]
        cells += [f"{times[kind] / total:.0%}" if total else "" for kind in kinds]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=MODELS, help="network (default: all); may be repeated")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"], help="device (cpu: float32, for tests)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop-size", type=int, help="image size in pixels (default: that of the network)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument(
        "--bandwidth-tb-s", type=float, default=4.8, help="memory bandwidth in TB/s (default: 4.8, H200; H100: 3.35)"
    )
    parser.add_argument("--output", default="networks.jsonl", help="file to which JSON lines are appended")
    parser.add_argument("--table", metavar="FILE", help="print the table of an --output file without measuring")
    args = parser.parse_args(arguments)
    args.arch = args.arch or list(MODELS)
    args.paddle_python = sys.executable
    if args.warmup_steps < MIN_WARMUP_STEPS:
        parser.error(f"--warmup-steps {args.warmup_steps}: too few to trace; use {MIN_WARMUP_STEPS} or more")
    return args


def main() -> int:
    args = parse_args()
    code = 0
    if args.table is None and len(args.arch) == 1:
        measure_all(args, args.arch[0])
    elif args.table is None:
        code = run(args)
    path = Path(args.table or args.output)
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    gpus = {str(result["versions"].get("gpu", "CPU")) for result in results}
    print(f"{', '.join(sorted(gpus))}; memory bandwidth: {args.bandwidth_tb_s:g} TB/s\n")
    print(table(results, args.bandwidth_tb_s))
    return code


if __name__ == "__main__":
    sys.exit(main())
