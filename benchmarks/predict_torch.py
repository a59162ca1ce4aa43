"""Measure the inference speed of a timm network with PyTorch, and print rows like those of `python -m
paddle_resnet.predict --benchmark`.

    python benchmarks/predict_torch.py --arch ResNet50 --batches 1,8,64,256

Each row shows the latency from images in host memory (pinned on a machine with a GPU) to probabilities in host memory,
with random weights and the channels-last layout. Without --eager, torch.compile compiles the network, on a GPU in its
mode "reduce-overhead". Without --precision, a CPU measures only float32. The networks come from timm. In float16 rows,
the images are also float16, like those of the engine "captured step".
"""

import argparse
import statistics
import time

import numpy as np
import timm
import torch
from peers import TIMM

SECONDS, STEPS, WARMUP_STEPS = 2, 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=TIMM, default="ResNet50")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--crop-size", type=int, default=224)
    parser.add_argument(
        "--precision", choices=["float16", "float32"], action="append", help="precision to measure; may be repeated"
    )
    parser.add_argument("--eager", action="store_true", help="eager mode, without torch.compile")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{args.arch}, torch {torch.__version__}, {name}, random images in host memory, latency in ms")
    for precision in args.precision or (["float16", "float32"] if device.type == "cuda" else ["float32"]):
        for batch in args.batches:
            measure(args, device, getattr(torch, precision), batch)


def measure(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, batch: int) -> None:
    """Print the row of a precision and a batch size."""
    torch._dynamo.reset()
    model = timm.create_model(TIMM[args.arch]).eval().to(device, dtype, memory_format=torch.channels_last)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    forward = model if args.eager else torch.compile(model, mode=mode)
    images = torch.randn(batch, 3, args.crop_size, args.crop_size, dtype=torch.float32).to(dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    images = images.pin_memory() if device.type == "cuda" else images

    @torch.inference_mode()
    def run():
        return forward(images.to(device, non_blocking=True)).float().softmax(1).cpu()

    for _ in range(WARMUP_STEPS):
        run()
    times_ms = []
    while len(times_ms) < STEPS or sum(times_ms) < 1000 * SECONDS:
        start = time.perf_counter()
        run()
        times_ms.append(1000 * (time.perf_counter() - start))
    p50, p90, p99 = np.percentile(times_ms, [50, 90, 99])
    ips = 1000 * batch / statistics.mean(times_ms)
    label = "eager" if args.eager else "compile"
    dtype = str(dtype).removeprefix("torch.")
    print(f"{batch:5}  {'torch ' + label:16}  {dtype:9}  {p50:9.2f}  {p90:9.2f}  {p99:9.2f}  {ips:9.2f}", flush=True)


if __name__ == "__main__":
    main()
