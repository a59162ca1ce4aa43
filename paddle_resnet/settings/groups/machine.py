"""The device, the kernels and the memory layout."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    device: str = flag(
        "auto",
        "device to run on; auto: the GPU if Paddle can use it, otherwise the CPU",
        topic="machine",
        kind="machine",
        choices=["auto", "gpu", "cpu"],
    )
    kernels: str = flag(
        "auto",
        "kernels of the training step; native: custom kernels for normalization, activations, depthwise and 1x1 "
        "convolutions, pooling, loss and optimizer, in NHWC only (docs/kernels.md); paddle: Paddle's kernels; auto: "
        "native in NHWC if the custom kernels can be built, otherwise paddle",
        topic="machine",
        kind="machine",
        choices=["auto", "native", "paddle"],
    )
    program_representation: str = flag(
        "legacy",
        "format of Paddle's programs; pir: Paddle 3's format, experimental, for one process on a CPU in float32 "
        "(docs/paddle3.md)",
        topic="machine",
        kind="machine",
        choices=["legacy", "pir"],
    )
    cuda_graph: bool = flag(
        True,
        "capture a training step as a CUDA graph and replay it with one call; requires native "
        "kernels; not supported with --profile-steps",
        topic="machine",
        kind="machine",
    )
    enable_cpu_affinity: bool = flag(
        True,
        "bind each process to the CPU cores closest to its GPU",
        topic="machine",
        kind="machine",
    )
    comm_timeout_s: int = flag(
        600,
        "number of seconds without progress after which a job with several processes stops",
        topic="machine",
        kind="machine",
        parse=numbers.integer(1, 10**6),
    )
    data_layout: str = flag(
        "NCHW",
        "memory layout of the images; on a CPU, NHWC is the default with --program-representation pir, and with "
        "--kernels auto if the custom kernels can be built",
        topic="precision",
        choices=["NCHW", "NHWC"],
    )
    fuse_resunit: bool = flag(
        False,
        "no effect except for a warning; accepted because the scripts of NVIDIA's example set it",
        topic="precision",
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --kernels is native and --data-layout is not NHWC."""
    if settings.kernels == "native" and settings.data_layout != "NHWC":
        yield Conflict(
            "--kernels native: supports NHWC only; use --data-layout NHWC or --kernels paddle",
            ("kernels",),
            ("data_layout",),
        )
