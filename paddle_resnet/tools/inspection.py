"""`python -m paddle_resnet.dataset preview|info|speed`: look at a data set and at what the loader makes of it.

Apart from dataset.py, which makes data sets and has the command line.
"""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from time import perf_counter

import matplotlib
import numpy as np
from matplotlib import pyplot
from PIL import Image
from rich.console import Console
from rich.table import Table

import config
from paddle_resnet import dali
from paddle_resnet.data import listing, records
from paddle_resnet.job import processes
from utils.errors import UsageError
from utils.mode import Mode

matplotlib.use("Agg")  # draws into files and needs no screen


def preview(root, output, images, words):
    """Draw the first training images of a run as they reach the network, with their classes.

    Args:
        root: folder of the data set.
        output: PNG file to write.
        images: how many.
        words: flags of train.py. The pictures are those of the first batches of one process with these flags.
    Raises:
        UsageError: what train.py refuses, too; output cannot be written.
    """
    pictures, classes = first_images(root, images, words)
    columns = math.ceil(math.sqrt(images))
    figure, axes = _subplots(math.ceil(images / columns), columns, size=1.6)
    for axis in axes.flat:
        axis.axis("off")
    for axis, picture, name in zip(axes.flat, pictures, classes, strict=False):  # the last places may stay empty
        axis.imshow(picture)
        axis.set_title(name, fontsize=8, parse_math=False)  # a class may be called "$"
    _save(figure, output)


def first_images(root, images, words):
    """The first training images of a run, over several epochs if they are more than the data set.

    Returns:
        (list of uint8 arrays [H, W, 3], the normalisation undone; list of class names)
    """
    loader, args = open_loader(root, words)
    pictures, classes = [], []
    while len(pictures) < images:
        try:
            batch = next(loader)[0]
        except StopIteration:
            loader.reset()
            continue
        pixels = np.array(batch["data"], dtype=np.float32)
        if args.data_layout == "NCHW":
            pixels = pixels.transpose(0, 2, 3, 1)
        pixels = (pixels[..., :3] * args.normalize_std + args.normalize_mean) / args.normalize_scale
        pictures += list(pixels.clip(0, 255).round().astype(np.uint8))
        classes += [loader.classes[label] for label in np.array(batch["label"])[:, 0]]
    return pictures[:images], classes[:images]


def info(root, output=None):
    """Count images and classes, measure the images, print it as tables and draw it.

    Args:
        root: folder of a data set in any format, of train, val or both.
        output: PNG file, or None for no drawing.
    Returns:
        {split: {"classes": {class: images}, "sizes": array [images, 2] of width and height in pixels as stored; images
        whose header cannot be read are counted and not measured}}
    Raises:
        UsageError: no split, or one that cannot be used; output cannot be written.
    """
    root = str(root)
    result = {}
    with ThreadPoolExecutor(16) as pool:  # waits for the disk, not for the processor
        for mode in listing.splits(root):
            _, names, images = listing.images(root, mode)
            measured = list(pool.map(_measure, images))
            counts = Counter(label for label, _ in measured if label is not None)
            names = names or list(map(str, range(int(max(counts, default=0)) + 1)))
            names += map(str, range(len(names), int(max(counts, default=0)) + 1))  # labels that nothing names
            repeated = {name for name, count in Counter(names).items() if count > 1}  # as some of ImageNet's
            names = [f"{name} ({label})" if name in repeated else name for label, name in enumerate(names)]
            result[mode.value] = {
                "classes": {name: counts[label] for label, name in enumerate(names)},
                "sizes": np.array([size for _, size in measured if size is not None], dtype=int).reshape(-1, 2),
            }
    splits = list(result)
    table = Table(title=str(root))
    for column in ("", *splits):
        table.add_column(column, justify="right")
    for what, of_split in _figures().items():
        table.add_row(what, *(of_split(**result[split]) for split in splits))
    Console().print(table)
    if output is not None:
        figure, axes = _subplots(2, len(splits), size=4)
        for i, split in enumerate(splits):
            counts, sizes = sorted(result[split]["classes"].values(), reverse=True), result[split]["sizes"]
            axes[0, i].bar(range(len(counts)), counts, width=1)
            axes[0, i].set(title=f"{split}: images of each class", xlabel="class, largest first", ylabel="images")
            axes[1, i].plot(*sizes.T, ".", markersize=2, alpha=0.5)
            axes[1, i].set(title=f"{split}: image sizes", xlabel="width (pixels)", ylabel="height (pixels)")
        _save(figure, output)
    return result


def _figures():
    """{row of the table of info: text from classes and sizes}"""

    def quantiles(values):
        return " / ".join(f"{q:.0f}" for q in np.quantile(values, [0, 0.5, 1])) if len(values) else "-"

    def largest(classes, sizes):
        name, count = max(classes.items(), key=lambda item: item[1], default=("-", 0))
        return f"{count} ({name})"

    def smallest(classes, sizes):
        name, count = min(classes.items(), key=lambda item: item[1], default=("-", 0))
        return f"{count} ({name})"

    return {
        "images": lambda classes, sizes: str(sum(classes.values())),
        "classes": lambda classes, sizes: str(len(classes)),
        "images of the largest class": largest,
        "of the median class": lambda classes, sizes: f"{np.median(list(classes.values()) or [0]):g}",
        "of the smallest class": smallest,
        "width: least / median / most": lambda classes, sizes: quantiles(sizes[:, 0]),
        "height": lambda classes, sizes: quantiles(sizes[:, 1]),
        "shorter side": lambda classes, sizes: quantiles(sizes.min(axis=1)),
        "kilopixels": lambda classes, sizes: quantiles(sizes.prod(axis=1) / 1000),
        "header not readable": lambda classes, sizes: str(sum(classes.values()) - len(sizes)),
    }


def _measure(image):
    """(label, (width, height)) of a listing.Image, None for what cannot be read."""
    label = image.label
    try:
        if image.kind is None:
            source = image.path  # its header suffices
        else:
            data, label = records.read(image)
            source = BytesIO(data)
        with Image.open(source) as picture:
            return label, picture.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return label, None


def speed(root, threads, loads, batches, repeats, words):
    """Measure the loader alone in images/s and print a table.

    Args:
        root: folder of the data set.
        threads: list of --dali-num-threads.
        loads: list of --hw-decoder-load, for the decoders on a GPU.
        batches: batches of a measurement, after as many for warming up.
        repeats: measurements of each setting.
        words: flags of train.py.
    Returns:
        [(decoder, threads, load or None, [images/s])]
    Raises:
        UsageError: what train.py refuses, too.
    """
    has_gpu = _parse(root, words).dali_device == "gpu"
    settings = [("cpu", n, None) for n in threads]
    settings += [("mixed", n, load) for n in threads for load in loads] if has_gpu else []
    rows = []
    for decoder, n, load in settings:
        flags = ["--dali-num-threads", n]
        if decoder == "cpu":
            flags += ["--dali-device", "cpu", "--cpu-decoder-load", 0]
        else:
            flags += ["--dali-device", "gpu", "--hw-decoder-load", load]
        rates = []
        for _ in range(repeats):
            loader, args = open_loader(root, [*words, *map(str, flags)])
            _take(loader, batches)
            start = perf_counter()
            _take(loader, batches)
            rates.append(batches * args.batch_size / (perf_counter() - start))
            del loader
        rows.append((decoder, n, load, rates))
    table = Table(title=f"{root}: images/s of the loader alone, n = {repeats}, {batches} batches of {args.batch_size}")
    for column in ("decoder", "threads", "hw-decoder-load", "median", "lowest", "highest"):
        table.add_column(column, justify="right")
    for decoder, n, load, rates in rows:
        figures = (f"{f(rates):,.0f}" for f in (np.median, min, max))
        table.add_row(decoder, str(n), "" if load is None else f"{load:g}", *figures)
    Console().print(table)
    return rows


def _take(loader, batches):
    while batches:
        try:
            next(loader)
            batches -= 1
        except StopIteration:
            loader.reset()


def _parse(root, words):
    """The flags of train.py with all defaults settled."""
    args = config.parse_args([*words, "--image-root", str(root)])
    processes.resolve_devices(args)
    return args


def open_loader(root, words):
    """(training loader, flags of train.py)"""
    args = _parse(root, words)
    return dali.build_dataloader(args, Mode.TRAIN), args


def _subplots(rows, columns, size):
    return pyplot.subplots(rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout="constrained")


def _save(figure, output):
    try:
        figure.savefig(output, dpi=120, format="png")
    except OSError as e:
        raise UsageError(f"--output {output} cannot be written ({e.strerror}): name another file") from e
