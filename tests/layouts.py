"""Miniature data sets for the tests of dataset import. Each class has a color."""

import colorsys
import functools
import io
import os
import re
import shlex
import subprocess
import tarfile

import numpy as np
import pytest
from data_files import open_split
from PIL import Image

from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

COLORS = 8


@functools.cache
def image(k, i=0, kind="JPEG"):
    """Return an image file of class k with the color of this class. Different i yield different files."""
    pixels = np.empty((24, 28, 3))
    pixels[:] = [255 * value for value in colorsys.hsv_to_rgb(k / COLORS, 0.9, 0.85)]
    pixels += np.random.RandomState(1000 * k + i).normal(0, 8, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, kind)
    return out.getvalue()


def color_of(data):
    """Return the class of an image file according to its color."""
    with Image.open(io.BytesIO(data)) as picture:
        red, green, blue = np.asarray(picture.convert("RGB")).mean((0, 1)) / 255
    return round(colorsys.rgb_to_hsv(red, green, blue)[0] * COLORS) % COLORS


def colors_match(images):
    """Return whether the labels of all images, a nonempty iterable of Image, are those of their colors."""
    pairs = [read_image(image) for image in images]
    return bool(pairs) and all(color_of(data) == label for data, label in pairs)


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def write_tar(files, compression=""):
    """Return a tar file that contains [(name, content)]."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def obey(message):
    """Run the commands in an error message, and return the value of --image-root in this message or None."""
    commands = re.findall(r"`(.+?)`", message)
    assert commands, message
    for command in commands:
        before, is_ours, arguments = command.partition(" -m paddle_resnet.dataset ")
        if is_ours:
            assert dataset.main(shlex.split(arguments)) == 0
        else:
            subprocess.run(command, shell=True, check=True)
    root = re.search(r"use --image-root ('[^']*'|[^\s,;]+)", message)
    return root and shlex.split(root[1])[0]


def obeyed_remedy(root, what, counts, capsys):
    """Obey the error message of a training run on a folder that contains `what`. Check that training reads the imported
    data set, that it contains {split: number of images} `counts`, that `verify` accepts it, and that `import --list`
    also prints `what`. Return the class names and {Mode: [Image]}."""
    message = error_of_training(root)
    assert what in message
    imported = obey(message)
    names, images = None, {}
    for mode, count in zip(Mode, counts.values(), strict=True):
        numbers, images[mode] = DataRoot(imported).images(mode)
        names = numbers.classes
        assert len(images[mode]) == count
        assert colors_match(images[mode])
    assert dataset.main(["verify", imported]) == 0
    capsys.readouterr()
    assert dataset.main(["import", str(root), "--list"]) == 0
    assert what in capsys.readouterr().out
    return names, images


def error_of_import(root, capsys, *flags):
    """Return the error message of an import, which must exit with code 2 and leave no output."""
    assert dataset.main(["import", str(root), "--output", f"{root}_output", *flags]) == 2
    assert not os.path.exists(f"{root}_output")
    return capsys.readouterr().err


def error_of_training(root):
    """Return the error message of a training run that reads both splits of a folder."""
    with pytest.raises(UsageError) as e:
        for mode in Mode:
            open_split(str(root), "auto", mode, None, 0)
    return str(e.value)
