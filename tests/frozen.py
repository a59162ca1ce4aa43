"""Write a checkpoint and results that later versions must reproduce.

`python tests/frozen.py CHECKOUT FOLDER` trains the network in FOLDER/network.py for two epochs with the version of
paddle_resnet in CHECKOUT, and fills FOLDER with these files:
- `checkpoint/`: the checkpoint before step 2 of epoch 1, which contains parameters with pruning masks (--asp), the
  optimizer state, EMA weights (--ema) and the state of the loader;
- `expected.json`: the losses of the later steps and the following evaluation, an evaluation of the checkpoint, and the
  probabilities of its export.

FOLDER should be named after the version. tests/goldens/version_0.1.0 was written with commit 3d0cf3db and Paddle 2.6.2:
    git worktree add ../old 3d0cf3db
    .venv/bin/python tests/frozen.py ../old tests/goldens/version_0.1.0
tests/checkpoints/test_frozen.py reads the files. Keep the files of each version unchanged.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

METRICS = ("train.loss", "val.loss", "val.top1")
SIZE, CLASSES = 20, 3  # pixels per side; number of classes
FIRST, COUNT = 2, 6  # first step after the checkpoint, and number of steps per epoch
DATA = [
    *("--image-root", "images", "--image-shape", "3,16,16", "--crop-size", "16", "--resize-short", "18"),
    *("--batch-size", "8", "--num-of-class", "3", "--device", "cpu", "--dali-num-threads", "1"),
    *("--model-arch-name", "network.py:Net", "--model-prefix", "net"),
    *("--output-dir", "output", "--report-file", "report.json"),
]
TRAIN = [
    *DATA,
    *("--epochs", "2", "--lr", "0.05", "--warmup-epochs", "0", "--seed", "1"),
    *("--ema", "0.9", "--asp", "--prune-model"),
    *("--print-interval", "1", "--save-interval-steps", "2", "--keep-checkpoints", "10"),
]
EVALUATE = [*DATA, "--run-scope", "eval_only", "--from-checkpoint", "checkpoint"]
EXPORT = ["checkpoint", "exported", "--model-arch-name", "network.py:Net"]
PREDICT = ["exported", "images/val", "--json", "--device", "cpu"]


def write_images(folder):
    """Write class folders with BMP images of noise around a color. The files have the same bytes on every machine."""
    generator = random.Random(0)
    for split, count in (("train", 16), ("val", 5)):
        for label in range(CLASSES):
            (folder / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                pixels = [
                    generator.randrange(160) + 60 * (channel == label)
                    for _ in range(SIZE * SIZE)
                    for channel in range(3)
                ]
                header = struct.pack(
                    "<2sIIIIiiHHIIiiII", b"BM", 54 + len(pixels), 0, 54, 40, SIZE, SIZE, 1, 24, *[0] * 6
                )
                (folder / split / f"class{label}" / f"{i:02}.bmp").write_bytes(header + bytes(pixels))


def read_report(path):
    """Return {"EPOCH STEP" or "EPOCH": loss and accuracy} of a report."""
    metrics = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line.removeprefix("DLLL "))
        if isinstance(entry["step"], list) and entry["step"]:
            chosen = {name: entry["data"][name] for name in METRICS if name in entry["data"]}
            metrics.setdefault(" ".join(map(str, entry["step"])), {}).update(chosen)
    return metrics


def after_checkpoint(metrics):
    """Return the losses of the steps after the checkpoint, and the metrics of the following evaluation."""
    losses = [metrics[f"1 {step}"]["train.loss"] for step in range(FIRST, COUNT)]
    return {"losses": losses, "evaluation": {name: metrics["1"][name] for name in ("val.loss", "val.top1")}}


def read_predictions(lines):
    """Return {image: {class: probability}} of the output of `predict --json`."""
    predictions = map(json.loads, lines)
    return {p["image"]: {top["class"]: top["probability"] for top in p["top"]} for p in predictions}


def write(checkout, folder):
    environment = {**os.environ, "PYTHONPATH": str(checkout)}

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=place, env=environment, check=True, stdout=subprocess.PIPE
        )
        return done.stdout.decode().splitlines()

    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        shutil.copy(folder / "network.py", place)
        write_images(place / "images")
        run(checkout / "train.py", *TRAIN)
        expected = after_checkpoint(read_report(place / "report.json"))
        shutil.copytree(place / f"output/Net/1_{FIRST}", place / "checkpoint")
        (place / "report.json").unlink()
        run(checkout / "train.py", *EVALUATE)
        expected["checkpoint"] = read_report(place / "report.json")["1"]
        run("-m", "paddle_resnet.export", *EXPORT)
        expected["probabilities"] = read_predictions(run("-m", "paddle_resnet.predict", *PREDICT))
        shutil.copytree(place / "checkpoint", folder / "checkpoint")
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write(*(Path(path).resolve() for path in sys.argv[1:]))
