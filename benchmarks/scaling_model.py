"""Predict the speed of data-parallel training on many GPUs, with a formula fitted to measurements on a few GPUs.

See `python benchmarks/scaling_model.py --help`; docs/scaling.md contains the rows for one host. The step time of a
job is the sum of these parts:
- the step time of one GPU;
- the exposed part of the ring all-reduces. Within a node, all-reduces follow the backward pass and are entirely
  exposed. Between nodes, buckets overlap with the backward pass, and at least one bucket is exposed;
- a constant if there are several nodes (Setup.several_nodes_s);
- lost time that is fitted to measurements: either a constant overhead, or jitter, which arises because a job waits for
  its slowest GPU. On H200s, the lost time is constant: a step loses 0.9 ms, including all-reduces, with both 2 and 4
  GPUs. Active NVLink causes the loss of 0.9 ms: NVLink draws 26 W of each GPU's 700 W power limit, which lowers the
  GPU's clock (benchmarks/log/multi_gpu_h200.md).
"""

import argparse
import math
from dataclasses import dataclass

# Measured speed of ResNet-50 on H200s with AMP O2, NHWC and 256 synthetic images per GPU: {GPUs: images/s}. The values
# are medians from benchmarks/log/multi_gpu_h200.md.
MEASURED = {1: 8338.0, 2: 16203.0, 4: 32408.0}
GPUS = (8, 64, 1024)


@dataclass
class Setup:
    """Parameters of the formula.

    Attributes:
        batch: images per GPU and step.
        gradient_bytes: bytes that each GPU all-reduces per step.
        buckets: number of all-reduces per step in a job on several nodes. All-reduces between nodes overlap with the
            backward pass. Within a node, a single all-reduce follows the backward pass.
        gpus_per_node: number of GPUs that are connected by NVLink.
        nvlink: bytes/s that a GPU sends over NVLink in an all-reduce.
        network: bytes/s that a node sends to other nodes, over all adapters.
        latency_s: seconds per hop of an all-reduce between nodes, regardless of the message size.
        backward: fraction of a one-GPU step spent in the backward pass, which can overlap with transfers between nodes.
        several_nodes_s: additional seconds per step on several nodes, because NCCL's kernels occupy multiprocessors
            that the backward pass needs. The default was measured on two GPUs of one node, on which overlapping
            all-reduces without CUDA graphs increased the step time from 31.59 ms (0.17 ms of which was exposed
            communication) to 32.10 ms (0.03 ms). The increase in steps that run as CUDA graphs has not been measured.
    """

    batch: int = 256
    gradient_bytes: float = 25.6e6 * 2
    buckets: int = 6
    gpus_per_node: int = 8
    nvlink: float = 300e9
    network: float = 50e9
    latency_s: float = 10e-6
    backward: float = 0.6
    several_nodes_s: float = 0.65e-3


def all_reduce_s(setup: Setup, gpus: int, size: float) -> float:
    """Return the seconds that an all-reduce of `size` bytes takes.

    Within a node, the all-reduce is a ring: each of n GPUs sends 2 (n-1)/n of the bytes. Between nodes, the all-reduce
    is also a ring: each of n nodes sends 2 (n-1)/n of the bytes. The number does not depend on the GPUs per node,
    because the GPUs of a node divide the bytes among themselves. The latency grows with the logarithm of the number of
    nodes, as in a tree.
    """
    local = min(gpus, setup.gpus_per_node)
    nodes = math.ceil(gpus / setup.gpus_per_node)
    seconds = 2 * (local - 1) / local * size / setup.nvlink
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * size / setup.network + 2 * math.log2(nodes) * setup.latency_s
    return seconds


def exposed_s(setup: Setup, gpus: int, step_s: float) -> float:
    """Return the seconds of exposed communication per step. Within a node, all communication is exposed. Between nodes,
    the exposed time is the part that exceeds the backward pass, but at least the time of the last bucket, whose
    gradients are computed last."""
    if gpus <= setup.gpus_per_node:
        return all_reduce_s(setup, gpus, setup.gradient_bytes)
    bucket = all_reduce_s(setup, gpus, setup.gradient_bytes / setup.buckets)
    return max(bucket, setup.buckets * bucket - setup.backward * step_s)


def fit(setup: Setup, measured: dict[int, float]) -> tuple[float, float, float]:
    """Fit `step = step of one GPU + exposed + overhead + jitter sqrt(2 ln n)` to measurements within a node.

    The overhead is the same for any number of GPUs above one. On H200s, active NVLink causes the overhead: NVLink draws
    power, which lowers the clock of each GPU. The jitter is the standard deviation of a GPU's step time; a job waits
    for the slowest of n GPUs. Neither overhead nor jitter can be negative. If there is only one measurement with
    several GPUs, the lost time is attributed to overhead, which is the best case.

    Args:
        setup: parameters of the formula.
        measured: {GPUs: images/s} for 1 GPU and for at least one larger number of GPUs within a node.
    Returns:
        (step time of one GPU, overhead, jitter), in seconds.
    Raises:
        ValueError: there are too few measurements, or a measurement used several nodes.
    """
    alone, rows = _losses(setup, measured)
    mean_x, mean_y = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    jitter = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread) if spread else 0.0
    overhead = mean_y - jitter * mean_x
    return (alone, overhead, jitter) if overhead >= 0 else fit_jitter(setup, measured)


def fit_jitter(setup: Setup, measured: dict[int, float]) -> tuple[float, float, float]:
    """Return the same values as fit, but attribute the lost time to jitter. The result is the worst case, because
    jitter grows with the number of GPUs."""
    alone, rows = _losses(setup, measured)
    return alone, 0.0, max(0.0, sum(x * y for x, y in rows) / sum(x * x for x, _ in rows))


def _losses(setup, measured):
    """Return (step time of one GPU in seconds, [(sqrt(2 ln n), additional seconds per step on n GPUs)])."""
    if 1 not in measured or len(measured) < 2:
        raise ValueError("--measured: requires measurements on 1 GPU and on several GPUs; add the missing measurement")
    if max(measured) > setup.gpus_per_node:
        raise ValueError(
            f"--measured: {max(measured)} GPUs exceed the {setup.gpus_per_node} GPUs of a node; remove this measurement"
        )
    alone = setup.batch / measured[1]
    return alone, [
        (math.sqrt(2 * math.log(n)), n * setup.batch / ips - alone - exposed_s(setup, n, alone))
        for n, ips in sorted(measured.items())
        if n > 1
    ]


def predict(setup: Setup, fitted: tuple[float, float, float], gpus: int) -> dict[str, float]:
    """Return {"step_s", "ips", "efficiency", "exposed_s"} for a number of GPUs."""
    alone, overhead, jitter = fitted
    exposed = exposed_s(setup, gpus, alone)
    step = alone if gpus == 1 else alone + exposed + overhead + jitter * math.sqrt(2 * math.log(gpus))
    step += setup.several_nodes_s if gpus > setup.gpus_per_node else 0
    return {"step_s": step, "ips": gpus * setup.batch / step, "efficiency": alone / step, "exposed_s": exposed}


def table(setup: Setup, measured: dict[int, float], gpus: tuple[int, ...] = GPUS, file_bytes: float = 110e3) -> str:
    """Return a Markdown table of measured and predicted speeds by number of GPUs."""
    fitted, worst = fit(setup, measured), fit_jitter(setup, measured)
    alone, overhead, jitter = (f"{seconds * 1e3:.2f} ms" for seconds in fitted)
    columns = ["GPUs", "all-reduces ms", "exposed ms", "step ms", "images/s", "efficiency", "jitter only"]
    columns += ["GB/s per node"]
    lines = [
        f"One-GPU step: {alone}; efficiency: overhead {overhead}, jitter {jitter}; "
        f"jitter only: jitter {worst[2] * 1e3:.2f} ms",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for n in sorted({*measured, *gpus}):
        result = predict(setup, fitted, n)
        buckets = setup.buckets if n > setup.gpus_per_node else 1
        reduce_ms = buckets * all_reduce_s(setup, n, setup.gradient_bytes / buckets) * 1e3
        files = result["ips"] * min(n, setup.gpus_per_node) / n
        seen = f" (measured {measured[n]:,.0f})" if n in measured else ""
        lines.append(
            f"| {n} | {reduce_ms:.2f} | {result['exposed_s'] * 1e3:.2f} | {result['step_s'] * 1e3:.2f} | "
            f"{result['ips']:,.0f}{seen} | {result['efficiency']:.3f} | {predict(setup, worst, n)['efficiency']:.3f} | "
            f"{files * file_bytes / 1e9:.1f} |"
        )
    return "\n".join(lines)


def _measurement(text):
    gpus, _, ips = text.partition(":")
    return int(gpus), float(ips)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--measured",
        type=_measurement,
        nargs="+",
        default=list(MEASURED.items()),
        metavar="GPUS:IPS",
        help="measured speed in images/s",
    )
    setup = Setup()
    parser.add_argument("--batch", type=int, default=setup.batch, help="images per GPU")
    parser.add_argument(
        "--gradient-mb", type=float, default=setup.gradient_bytes / 1e6, help="megabytes to all-reduce per step"
    )
    parser.add_argument(
        "--buckets", type=int, default=setup.buckets, help="all-reduces per step in a job on several nodes"
    )
    parser.add_argument("--gpus-per-node", type=int, default=setup.gpus_per_node, help="GPUs per node")
    parser.add_argument(
        "--nvlink-gb-s", type=float, default=setup.nvlink / 1e9, help="NVLink speed of an all-reduce in GB/s per GPU"
    )
    parser.add_argument(
        "--network-gb-s",
        type=float,
        default=setup.network / 1e9,
        help="network speed in GB/s per node, over all adapters",
    )
    parser.add_argument(
        "--latency-us", type=float, default=setup.latency_s * 1e6, help="latency of a hop between nodes in microseconds"
    )
    parser.add_argument("--file-kb", type=float, default=110.0, help="mean size of an image file in kB")
    args = parser.parse_args(argv)
    setup = Setup(
        batch=args.batch,
        gradient_bytes=args.gradient_mb * 1e6,
        buckets=args.buckets,
        gpus_per_node=args.gpus_per_node,
        nvlink=args.nvlink_gb_s * 1e9,
        network=args.network_gb_s * 1e9,
        latency_s=args.latency_us * 1e-6,
    )
    try:
        print(table(setup, dict(args.measured), file_bytes=args.file_kb * 1e3))
    except ValueError as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
