"""The CPU loader beside torchvision's, on the same files: images/s from JPEG files to normalised batches in memory.

Both make the augmentation of ImageNet training (random-resized crop to 224, flip, normalisation, float32 NCHW) with
batches of 32 and two threads or worker processes. They run in turn, each time in a new process, and each measures 60
batches after 60 for warming up.

    python benchmarks/loader_peers.py compare DIR --torch-python PYTHON

DIR holds train/CLASS/*.jpg. PYTHON is an interpreter with torch and torchvision, which need not be this one: their
CPU builds, `pip install torch torchvision` in a virtual environment of their own, are enough.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

BATCH, BATCHES, WORKERS, SIDE = 32, 60, 2, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def measure(batches):
    """images/s of an endless iterator of batches."""
    for _ in range(BATCHES):
        next(batches)
    start = perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return BATCHES * BATCH / (perf_counter() - start)


def dali(root):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from paddle_resnet import inspection

    flags = ["--image-shape", f"3,{SIDE},{SIDE}", "--crop-size", str(SIDE), "--batch-size", str(BATCH)]
    loader, _ = inspection.open_loader(root, [*flags, "--device", "cpu", "--dali-num-threads", str(WORKERS)])

    def endless():
        while True:
            yield from loader
            loader.reset()

    return measure(endless())


def torchvision(root, decode):
    import torch
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import datasets, io
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(
                SIDE, antialias=decode == "pil"
            ),  # on tensors it can be left out, as DALI's default does
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


def compare(root, torch_python, repeats):
    rates = {name: [] for name in LOADERS}
    for _ in range(repeats):
        for name in LOADERS:
            python = torch_python if name.startswith("torchvision") else sys.executable
            command = [python, __file__, "one", root, "--loader", name]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            rates[name].append(float(found.stdout.split()[-1]))
    first = statistics.median(rates["DALI (paddle_resnet)"])
    print("| loader | n | median images/s | lowest to highest | DALI is |\n|---|---|---|---|---|")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(
            f"| {name} | {repeats} | {middle:,.0f} | {min(found):,.0f} to {max(found):,.0f} | {first / middle:.2f} x |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "one"])
    parser.add_argument("root", metavar="DIR")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--loader", choices=list(LOADERS), help="the one that `one` measures")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.command == "one":
        print(LOADERS[args.loader](args.root))
    else:
        compare(args.root, args.torch_python, args.repeats)
