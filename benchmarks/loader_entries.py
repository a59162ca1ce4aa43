"""Measure how the loader's startup time, memory and speed depend on the number of images, and print a Markdown table:
`python benchmarks/loader_entries.py`.

The script creates data sets of N images in 1,000 classes: class folders and file lists with hard links to 1,000 JPEG
files of 64x64 pixels, and record files with the same images. Each measurement runs in a separate process.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

RECORD_FORMATS = ("recordio", "tfrecord", "webdataset")
ROOT = Path(__file__).resolve().parent.parent
CLASSES = 1000
COLUMNS = ("format", "images", "n", "seconds to the first batch", "images/s", "peak memory (MiB)")
sys.path.insert(0, str(ROOT))


def make_files(root: Path, entries: int) -> None:
    """Create class folders root/folder/train/CLASS/, and root/filelist/ with a file list of the images."""
    from PIL import Image

    sources = root / "sources"
    sources.mkdir(parents=True)
    random = np.random.RandomState(0)
    for i in range(CLASSES):
        pixels = random.randint(0, 255, (8, 8, 3)).astype(np.uint8)
        image = Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC)
        image.save(sources / f"{i}.jpg")
    lines = []
    for i in range(entries):
        name = f"train/n{i % CLASSES:08d}/n{i % CLASSES:08d}_{i}.JPEG"
        if i < CLASSES:
            (root / "folder" / name).parent.mkdir(parents=True)
        os.link(sources / f"{i % CLASSES}.jpg", root / "folder" / name)
        lines.append(f"{name} {i % CLASSES}\n")
    (root / "filelist").mkdir()
    (root / "filelist" / "train").symlink_to(root / "folder" / "train")
    (root / "filelist" / "train.txt").write_text("".join(lines))


def measure(image_root: str, data_format: str) -> None:
    """Print the import time in s, the time to the first batch in s, the speed after the first batch in images/s, and
    the peak resident memory in MiB. The time to the first batch excludes the imports."""
    start = perf_counter()
    import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
    from paddle_resnet import config, dali, resolution
    from paddle_resnet.utils.mode import Mode

    flags = ["--image-root", image_root, "--data-format", data_format, "--device", "cpu", "--image-shape", "3,32,32"]
    flags += ["--crop-size", "32", "--dali-num-threads", "2"]
    args = config.parse_args(flags)
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    imported = perf_counter()
    args.apply(resolution.Classes, Mode.TRAIN)
    loader = dali.build_dataloader(args, Mode.TRAIN)
    batches = 0
    first = None
    while batches < 40:
        try:
            next(loader)
        except StopIteration:
            loader.reset()
            continue
        first = first or perf_counter()
        batches += 1
    rate = (batches - 1) * args.batch_size / (perf_counter() - first)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{imported - start:.2f} {first - imported:.2f} {rate:.0f} {memory:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_281_167])
    parser.add_argument("--formats", nargs="+", default=["folder", "filelist", *RECORD_FORMATS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("DIR", "FORMAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure)

    from paddle_resnet.tools import convert

    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for entries in args.entries:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            make_files(root, entries)
            for data_format in args.formats:
                if data_format in RECORD_FORMATS:
                    convert.convert(root / "folder", root / data_format, data_format)
                _, seconds, rate, memory = np.array([run(root, data_format) for _ in range(args.repeats)]).T
                times = f"{np.median(seconds):.1f} ({seconds.min():.1f} to {seconds.max():.1f})"
                cells = [data_format, f"{entries:,}", str(args.repeats), times]
                cells += [f"{np.median(rate):,.0f}", f"{np.median(memory):,.0f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


def run(root: Path, data_format: str) -> list[float]:
    """Call measure in a separate process and return the numbers that the process prints."""
    command = [sys.executable, __file__, "--measure", str(root / data_format), data_format]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


if __name__ == "__main__":
    main()
