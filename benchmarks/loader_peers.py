"""Compare this project's CPU loader with torchvision's on the same files: images/s from JPEG files to normalized
batches in memory.

Both loaders apply the augmentation of ImageNet training (random-resized crop to 224, flip, normalization, float32 NCHW)
with batches of 32 and two threads or worker processes. The script alternates between the loaders. Each run is a new
process that measures 40 batches after 20 warm-up batches. The table also reports images per second of CPU time, which
other programs on the machine hardly affect.

    python benchmarks/loader_peers.py compare DIR --torch-python PYTHON

DIR contains train/CLASS/*.jpg. PYTHON is an interpreter with torch and torchvision, for example in a separate virtual
environment with the CPU builds of both (`pip install torch torchvision`).
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

BATCH, WARMUP, BATCHES, WORKERS, SIDE = 32, 20, 40, 2, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def measure(batches: Iterator) -> tuple[float, float]:
    """Read batches from an endless iterator and return (images/s, images per second of CPU time)."""
    for _ in range(WARMUP):
        next(batches)
    start, cpu_start = perf_counter(), cpu_time()
    for _ in range(BATCHES):
        next(batches)
    images = BATCHES * BATCH
    return images / (perf_counter() - start), images / (cpu_time() - cpu_start)


def cpu_time() -> float:
    """Return the CPU time in seconds that this process and its workers have used so far."""
    ticks = 0
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return process_time() + ticks / os.sysconf("SC_CLK_TCK")


def dali(root: str) -> tuple[float, float]:
    """Measure this project's loader. As in train.py, malloc keeps freed memory."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from paddle_resnet.machine import cpu
    from paddle_resnet.tools import inspection

    cpu.keep_freed_memory()
    flags = ["--image-shape", f"3,{SIDE},{SIDE}", "--crop-size", str(SIDE), "--batch-size", str(BATCH)]
    loader, _ = inspection.open_loader(
        root, [*flags, "--device", "cpu", "--interp", "linear", "--dali-num-threads", str(WORKERS)]
    )

    def endless():
        while True:
            yield from loader
            loader.reset()

    return measure(endless())


def torchvision(root: str, decode: str) -> tuple[float, float]:
    """Measure torchvision's loader. `decode` is "pil" for Pillow or "tensor" for decode_jpeg."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import datasets, io
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            # For comparability, disable antialiasing, as --interp linear does. Pillow always applies antialiasing.
            v2.RandomResizedCrop(SIDE, antialias=decode == "pil"),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    read = (
        {"loader": lambda path: io.decode_jpeg(io.read_file(path), io.ImageReadMode.RGB)} if decode == "tensor" else {}
    )
    files = datasets.ImageFolder(Path(root) / "train", transform, **read)
    order = RandomSampler(files, replacement=True, num_samples=10**6)
    return measure(iter(DataLoader(files, BATCH, sampler=order, num_workers=WORKERS)))


LOADERS = {
    "DALI (paddle_resnet)": dali,
    "torchvision, Pillow": lambda root: torchvision(root, "pil"),
    "torchvision, decode_jpeg": lambda root: torchvision(root, "tensor"),
}


def compare(root: str, torch_python: str, repeats: int) -> None:
    """Measure all loaders `repeats` times, alternating between them, and print the tables."""
    rates = {name: [] for name in LOADERS}
    for _ in range(repeats):
        for name in LOADERS:
            python = torch_python if name.startswith("torchvision") else sys.executable
            command = [python, __file__, "one", root, "--loader", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rates[name].append([float(number) for number in done.stdout.split()[-2:]])
    own = [statistics.median(column) for column in zip(*rates["DALI (paddle_resnet)"], strict=True)]
    for i, what in enumerate(("images/s", "images per second of CPU time")):
        print(f"\n| loader | n | median {what} | lowest to highest | speedup of DALI |\n|---|---|---|---|---|")
        for name, rows in rates.items():
            column = [row[i] for row in rows]
            middle = statistics.median(column)
            spread = f"{min(column):,.0f} to {max(column):,.0f}"
            print(f"| {name} | {repeats} | {middle:,.0f} | {spread} | {own[i] / middle:.2f} x |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "one"])
    parser.add_argument("root", metavar="DIR")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--loader", choices=list(LOADERS), help="loader to measure (command `one`)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.command == "one":
        print(*LOADERS[args.loader](args.root))
    else:
        compare(args.root, args.torch_python, args.repeats)
