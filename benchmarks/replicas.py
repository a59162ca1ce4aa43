"""Measure the cost of comparing the ranks of a job (paddle_resnet/checkpoints/replicas.py).

    python benchmarks/replicas.py [FLAGS of train.py]
    python -m paddle.distributed.launch --gpus 0,1 benchmarks/replicas.py [FLAGS of train.py]

Prints the time that training pauses for a comparison, and the mean per training step. In a job with one process, the
ranks do not exchange their checksums. Without flags, the script measures ResNet-50 with AMP O2 on a GPU.
"""
# ruff: noqa: I001

import statistics
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
import paddle
from paddle import static

from paddle_resnet import config
from paddle_resnet import program
from paddle_resnet.checkpoints import replicas, variables
from paddle_resnet.job import exchange, processes

O2 = ["--device", "gpu", "--amp", "--use-pure-fp16", "--data-layout", "NHWC", "--dali-output-fp16"]
REPETITIONS = 20


def main() -> None:
    with exchange.exit_barrier():
        measure()


def measure() -> None:
    args = config.parse_args(["--data-format", "synthetic", *(sys.argv[1:] or O2)])
    main_prog, startup_prog = static.Program(), static.Program()
    args = program.start(args)
    paddle.seed(args.seed)  # Fleet broadcasts the parameters, but not their float32 copies for mixed precision
    _, _, _, optimizer = program.build(args, main_prog, startup_prog, step_each_epoch=1000)
    place = processes.place(args.device)
    static.Executor(place).run(startup_prog)
    if args.amp:
        optimizer.amp_init(place, scope=static.global_scope())
    size = sum(variables.read(name).nbytes for name in replicas.names(main_prog))
    times_ms = []
    for _ in range(REPETITIONS):
        start = perf_counter()
        if processes.world_size() == 1:
            replicas.checksums(main_prog)
        else:
            replicas.check(main_prog, "in a benchmark")
        times_ms.append(1e3 * (perf_counter() - start))
    median_ms = statistics.median(times_ms)
    print(
        f"{args.model_arch_name}, Paddle {paddle.__version__}, {processes.world_size()} x {args.device}: "
        f"{size / 1e6:.0f} MB, "
        f"{median_ms:.1f} ms per comparison (n = {REPETITIONS}, {min(times_ms):.1f} to {max(times_ms):.1f}), "
        f"{median_ms / replicas.INTERVAL_STEPS:.3f} ms per step"
    )


if __name__ == "__main__":
    main()
