"""Measure time and memory of `dataset import` on a synthetic archive like ILSVRC2012_img_train.tar; print a Markdown
table: `python benchmarks/import_archive.py DIR`.

The archive contains 50,000 JPEG files of 105 KB (64 different ones) in 1,000 classes. DIR needs 11 GB of free space.
"""

import argparse
import io
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
NAME = "ILSVRC2012_img_train.tar"
CLASSES, PER_CLASS, SIDE, QUALITY = 1000, 50, 465, 76
COMMANDS = (["--unchecked"], ["--unchecked", "--to", "folder"], [])
INTERVAL_S = 0.1  # time between two measurements of memory


def images():
    """Return 64 JPEG files of about 105 KB."""
    from PIL import Image

    files = []
    for i in range(64):
        noise = np.random.RandomState(i).normal(128, 45, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=QUALITY)
        files.append(file.getvalue())
    return files


def write(folder):
    """Write the archive, which contains a tar file for each class. Return the mean size of its images in bytes."""
    files = images()
    with tarfile.open(folder / NAME, "w") as archive:
        for k in range(CLASSES):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for i in range(PER_CLASS):
                    add(tar, f"n{k:08d}_{i}.JPEG", files[(k + i) % len(files)])
            add(archive, f"n{k:08d}.tar", inner.getvalue())
    return sum(map(len, files)) / len(files)


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def memory(group):
    """Return the memory of the processes of a process group in bytes, in which shared pages count once (PSS)."""
    total = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) == group:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # the process has ended
            continue
    return total


def measured(command):
    """Run a command. Return (seconds, maximum memory of its processes in bytes)."""
    start, peak = perf_counter(), 0
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seconds = []
    waiter = threading.Thread(target=lambda: (process.wait(), seconds.append(perf_counter() - start)))
    waiter.start()
    while waiter.is_alive():
        peak = max(peak, memory(process.pid))
        sleep(INTERVAL_S)
    if process.returncode:
        raise SystemExit(f"{command} failed with exit code {process.returncode}")
    return seconds[0], peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder for the archive and the outputs; 11 GB")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    source, output = args.dir / "downloads", args.dir / "imported"
    source.mkdir(parents=True)
    size = write(source)
    print(f"{CLASSES * PER_CLASS} images of {size / 1e3:.0f} KB, {(source / NAME).stat().st_size / 1e9:.2f} GB\n")
    print("| command | s, median (range) | images/s | memory, MB |\n|---|---|---|---|", flush=True)
    own = [sys.executable, "-m", "paddle_resnet.dataset", "import", source, "--output", output, "--allow-partial"]
    commands = {"`cp` of the archive": ["cp", source / NAME, output]}
    # Like the import, this command ends when the bytes are on the disk.
    commands |= {"`cp` of the archive, then `sync`": ["sh", "-c", 'cp "$0" "$1" && sync "$1"', source / NAME, output]}
    commands |= {f"`import {' '.join(flags)}`".replace(" `", "`"): [*own, *flags] for flags in COMMANDS}
    for name, command in commands.items():
        found = []
        for _ in range(args.repeats):
            shutil.rmtree(output, ignore_errors=True)
            output.unlink(missing_ok=True)
            found.append(measured(list(map(str, command))))
        times, peaks = zip(*found, strict=True)
        middle, rate = statistics.median(times), CLASSES * PER_CLASS / statistics.median(times)
        shown = f"{middle:.1f} ({min(times):.1f} to {max(times):.1f})"
        print(f"| {name} | {shown} | {rate:.0f} | {max(peaks) / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
