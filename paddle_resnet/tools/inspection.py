"""`python -m paddle_resnet.dataset preview|info|speed`: inspect a data set and the loader's output."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from time import perf_counter

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

import config
from paddle_resnet import dali, resolution
from paddle_resnet.data import listing, pixels, records
from paddle_resnet.tools import drawing
from utils.errors import printable
from utils.mode import Mode


def preview(root, output, images, arguments):
    """Draw the first training images of a run as the network receives them, with their classes.

    Args:
        root: folder of the data set.
        output: file to write, in one of drawing.FORMATS.
        images: number of images.
        arguments: flags of train.py. The images are those that a single process with these flags reads first.
    Raises:
        UsageError: train.py would reject the flags or data, or output cannot be written.
    """
    drawing.check_name(output)
    pictures, classes = first_images(root, images, arguments)
    drawing.save(drawing.pictures(pictures, classes, math.ceil(math.sqrt(images))), output)


def first_images(root, images, arguments):
    """Return the first training images of a run, from several epochs if the data set has too few images.

    Returns:
        (list of uint8 arrays [H, W, 3] in RGB without normalization, list of class names)
    """
    loader, args = open_loader(root, arguments)
    pictures, classes = [], []
    while len(pictures) < images:
        try:
            batch = next(loader)[0]
        except StopIteration:
            loader.reset()
            continue
        pictures += list(
            pixels.pictures(
                batch["data"], args.data_layout, args.normalize_scale, args.normalize_mean, args.normalize_std
            )
        )
        classes += [loader.class_names[label] for label in np.array(batch["label"])[:, 0]]
    return pictures[:images], classes[:images]


def info(root, output=None, allow_outside=False):
    """Count images and classes, measure the images, and print and draw the result.

    Args:
        root: folder of a data set in any format, with a train split, a val split or both.
        output: file for the drawing, in one of drawing.FORMATS, or None.
        allow_outside: whether file lists may contain files outside root.
    Returns:
        {split: {"classes": {class: images}, "sizes": int array [images, 2]}}. Sizes are width and height in pixels as
        stored. Images whose header cannot be read are counted, but have no size.
    Raises:
        UsageError: there is no split, a split cannot be used, or output cannot be written.
    """
    if output is not None:
        drawing.check_name(output)
    root = str(root)
    result = {}
    with ThreadPoolExecutor(16) as pool:  # disk access is the bottleneck, not the CPU
        for mode in listing.splits(root):
            data_format, classes, images = listing.images(root, mode, allow_outside=allow_outside)
            names = listing.report_names(root, data_format, classes)
            measured = list(pool.map(_measure, images))
            counts = Counter(label for label, _ in measured if label is not None)
            name_of = dict(enumerate(names or []))
            name_of |= {label: str(label) for label in sorted(counts) if label not in name_of}
            repeated = {name for name, count in Counter(name_of.values()).items() if count > 1}  # as in ImageNet
            result[mode.value] = {
                "classes": {
                    f"{name} ({label})" if name in repeated else name: counts[label] for label, name in name_of.items()
                },
                "sizes": np.array([size for _, size in measured if size is not None], dtype=int).reshape(-1, 2),
            }
    splits = list(result)
    table = Table(title=Text(printable(root)))
    for column in ("", *splits):
        table.add_column(column, justify="right")
    for what, of_split in _statistics().items():
        table.add_row(what, *(Text(printable(of_split(**result[split]))) for split in splits))
    Console().print(table)
    if output is not None:
        drawing.save(drawing.balance(result), output)
    return result


def _statistics():
    """Return the rows of the table that info prints: {title: function(classes, sizes) that returns the text}."""

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
        "images of the median class": lambda classes, sizes: f"{np.median(list(classes.values()) or [0]):g}",
        "images of the smallest class": smallest,
        "width: minimum / median / maximum": lambda classes, sizes: quantiles(sizes[:, 0]),
        "height": lambda classes, sizes: quantiles(sizes[:, 1]),
        "shorter side": lambda classes, sizes: quantiles(sizes.min(axis=1)),
        "kilopixels": lambda classes, sizes: quantiles(sizes.prod(axis=1) / 1000),
        "header not readable": lambda classes, sizes: str(sum(classes.values()) - len(sizes)),
    }


def _measure(image):
    """Return (label, (width, height)) of a listing.Image. If one of the two cannot be read, it is None."""
    label = image.label
    try:
        if image.kind is None:
            source = image.path  # Pillow reads only the header
        else:
            data, label = records.read(image)
            source = BytesIO(data)
        with Image.open(source) as picture:
            return label, picture.size
    except Exception:  # Pillow's plugins raise many kinds of exceptions for damaged files
        return label, None


def speed(root, threads, loads, batches, repeats, arguments):
    """Measure the loader alone in images/s and print a table.

    Args:
        root: folder of the data set.
        threads: list of values for --dali-num-threads.
        loads: list of values for --hw-decoder-load, which applies to decoding on a GPU.
        batches: batches per measurement, which follow the same number of warm-up batches.
        repeats: measurements per setting.
        arguments: flags of train.py.
    Returns:
        [(decoder, threads, load or None, [images/s])]
    Raises:
        UsageError: train.py would reject the flags or data.
    """
    has_gpu = _parse(root, arguments).dali_device == "gpu"
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
            loader, args = open_loader(root, [*arguments, *map(str, flags)])
            _take(loader, batches)
            start = perf_counter()
            _take(loader, batches)
            rates.append(batches * args.batch_size / (perf_counter() - start))
            del loader
        rows.append((decoder, n, load, rates))
    title = f"{root}: images/s of the loader alone, n = {repeats}, {batches} batches of {args.batch_size}"
    table = Table(title=Text(printable(title)))
    for column in ("decoder", "threads", "hw-decoder-load", "median", "lowest", "highest"):
        table.add_column(column, justify="right")
    for decoder, n, load, rates in rows:
        speeds = (f"{f(rates):,.0f}" for f in (np.median, min, max))
        table.add_row(decoder, str(n), "" if load is None else f"{load:g}", *speeds)
    Console().print(table)
    return rows


def _take(loader, batches):
    while batches:
        try:
            next(loader)
            batches -= 1
        except StopIteration:
            loader.reset()


def _parse(root, arguments):
    """Parse flags of train.py, and resolve the devices in them."""
    args = config.parse_args([*arguments, "--image-root", str(root)])
    resolution.resolve_device(args)
    resolution.resolve_loader(args)
    return args


def open_loader(root, arguments):
    """Open the training loader of train.py: (loader, flags). The batch is never larger than the data set."""
    args = _parse(root, arguments)
    resolution.resolve_classes(args, Mode.TRAIN)
    if args.data_format != "synthetic":
        args.batch_size = min(args.batch_size, dali.open_data_set(args, Mode.TRAIN).size)
    return dali.build_dataloader(args, Mode.TRAIN), args
