"""`python -m paddle_resnet.dataset preview|info|speed`: inspect a data set and the loader's output."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paddle_resnet import config, dali, resolution
from paddle_resnet.data import bad_images, data_set, label_sets, layout, pixels, sniffer
from paddle_resnet.data import loader as loaders
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.serving import preprocessing
from paddle_resnet.tools import drawing
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command, printable
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddle_resnet.data.iterators import EmptyIterator, ShardIterator, SyntheticIterator
    from paddle_resnet.settings.values import Settings

    Loader = ShardIterator | EmptyIterator | SyntheticIterator

VERSIONS = 3  # number of augmented versions of each image in a preview


def preview(root: str | Path, output: str | Path, images: int, arguments: list[str]) -> int:
    """Draw training images. Next to each image are VERSIONS augmented versions, as the network receives them before
    normalization.

    Args:
        root: folder of the data set.
        output: file to write, in one of drawing.FORMATS.
        images: maximum number of images, which are evenly spaced in the training split.
        arguments: flags of train.py.
    Returns:
        number of images in the drawing.
    Raises:
        UsageError: train.py would reject the flags or the data, one of the chosen images cannot be read, none can be
            decoded, or output cannot be written.
    """
    drawing.check_name(output)
    rows = augmented(root, images, VERSIONS, arguments)
    drawing.save(drawing.pictures(*_grid(rows)), output)
    return len(rows)


def _grid(rows):
    """Arrange the result of augmented() for drawing.pictures: return (pictures, titles, number of columns)."""
    pictures = [picture for original, versions, _ in rows for picture in (original, *versions)]
    titles = [title for _, versions, name in rows for title in (name, *[""] * len(versions))]
    groups = max(1, round(math.sqrt(len(rows)) / 2))  # number of images per row
    return pictures, titles, groups * (1 + VERSIONS)


def augmented(
    root: str | Path, images: int, versions: int, arguments: list[str]
) -> list[tuple[np.ndarray, list[np.ndarray], str]]:
    """Load training images, and apply the training augmentation to each image several times.

    Returns:
        [(uint8 [H, W, 3] in RGB, [uint8 arrays [crop height, crop width, 3] without normalization], class name or, with
        --multi-label, names of the classes)]
    Raises:
        UsageError: see preview.
    """
    args = _parse(root, arguments)
    if args.data_format == "synthetic":
        raise UsageError("--data-format synthetic: preview needs images; remove the flag")
    args.apply(resolution.Classes, Mode.TRAIN)
    args.set("internal", batch_size=versions)
    data_root = dali.data_root(args.part(dali.DataOptions))
    if args.multi_label:
        found = label_sets.read_labels(data_root, Mode.TRAIN, args.num_of_class, allow_empty=True)
        titles = [", ".join(found.classes[label] for label in row) for row in found.numbers]
        listed, names = data_root.listed(Mode.TRAIN), []
    else:
        numbers, listed = data_root.images(Mode.TRAIN, args.num_of_class)
        listed, titles, names = data_root.kept(listed), None, numbers.class_names or []
    places = np.linspace(0, len(listed) - 1, min(images, len(listed))).astype(int)
    decodable, skipped = [], 0
    for place in places:
        image = listed[place]
        try:
            data, label = (Path(image.path).read_bytes(), image.label) if image.kind is None else read_image(image)
        except OSError as e:
            raise UsageError(f"{image.path}: cannot be read ({e.strerror}); make it readable, or remove it") from e
        if bad_images.decode(data) is None:
            name = titles[place] if titles else names[label] if label < len(names) else str(label)
            decodable.append((data, name))
        else:
            skipped += 1
    if skipped:
        logger.warn(
            f"{root}: omitting {skipped} of {len(places)} chosen images, which cannot be decoded; to list such images, "
            f"run {command('dataset', 'verify', root)}"
        )
    if not decodable:
        raise UsageError(
            f"{root}: none of the {len(places)} chosen images can be decoded; to list such images, run "
            f"{command('dataset', 'verify', root)}"
        )
    batches = iter([[np.frombuffer(data, np.uint8)] * versions for data, _ in decodable])
    pipeline = loaders.create_pipeline(args.part(loaders.Options), data_set.encoded_images(batches), Mode.TRAIN, 0, 1)
    rows = []
    for data, name in decodable:
        batch = np.array(pipeline.run()[0].as_cpu().as_tensor())
        normalization = args.normalize_scale, args.normalize_mean, args.normalize_std
        with PIL.Image.open(BytesIO(data)) as original:
            original = preprocessing.upright_rgb(original)
            rows.append((original, list(pixels.pictures(batch, args.data_layout, *normalization)), name))
    return rows


def info(
    root: str | Path, output: str | Path | None = None, allow_outside: bool = False, label_offset: int | str = AUTO
) -> dict[str, dict[str, Any]]:
    """Count images and classes, determine image sizes, print the result and, if `output` is set, draw it.

    Args:
        root: folder of a data set in any format, with a train split, a val split or both.
        output: file for the drawing, in one of drawing.FORMATS, or None.
        allow_outside: whether file lists may contain files outside root.
        label_offset: value of --label-offset.
    Returns:
        {split: {"classes": {class: images}, "sizes": int array [images, 2]}}. Sizes are the stored width and height in
        pixels. Images with an unreadable header are counted, but omitted from "sizes". Records without a readable label
        are omitted from "classes".
    Raises:
        UsageError: root contains no split, a split cannot be used, or output cannot be written.
    """
    if output is not None:
        drawing.check_name(output)
    root = str(root)
    result, data = {}, DataRoot(root, AUTO, allow_outside, label_offset)
    with ThreadPoolExecutor(16) as pool:  # disk access is the bottleneck, not the CPU
        for mode in layout.splits(root):
            numbers, images = data.images(mode)
            if not images and (advice := sniffer.advice(root)):
                raise UsageError(f"{root}: the {mode.value} split contains no images; {advice}")
            measured = list(pool.map(_measure, images))
            counts = Counter(label for label, _ in measured if label is not None)
            name_of = dict(enumerate(numbers.class_names or []))
            name_of |= {label: str(label) for label in sorted(counts) if label not in name_of}
            # Several classes may have the same name, as in ImageNet.
            repeated = {name for name, count in Counter(name_of.values()).items() if count > 1}
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
    """Return the rows of the table that info prints: {title: function(classes, sizes) that returns the cell's text}."""

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
        "images in the largest class": largest,
        "images in the median class": lambda classes, sizes: f"{np.median(list(classes.values()) or [0]):g}",
        "images in the smallest class": smallest,
        "width: minimum / median / maximum": lambda classes, sizes: quantiles(sizes[:, 0]),
        "height": lambda classes, sizes: quantiles(sizes[:, 1]),
        "shorter side": lambda classes, sizes: quantiles(sizes.min(axis=1)),
        "kilopixels": lambda classes, sizes: quantiles(sizes.prod(axis=1) / 1000),
        "unreadable header": lambda classes, sizes: str(sum(classes.values()) - len(sizes)),
    }


def _measure(image):
    """Return (label, (width, height)) of an Image. A label or a size that cannot be read is None."""
    label = image.label
    try:
        if image.kind is None:
            source = image.path  # Pillow reads only the header
        else:
            data, label = read_image(image)
            source = BytesIO(data)
        with PIL.Image.open(source) as picture:
            return label, picture.size
    except Exception:  # Pillow raises many types of exceptions for damaged files
        return label, None


def speed(
    root: str | Path,
    threads: Sequence[int] | None,
    loads: Sequence[float] | None,
    batches: int,
    repeats: int,
    arguments: list[str],
) -> list[tuple[str, int, float | None, list[float]]]:
    """Measure the throughput of the loader without training, and print the results as a table in images/s.

    Args:
        root: folder of the data set.
        threads: list of values for --dali-num-threads, or None for the value in `arguments`.
        loads: list of values for --hw-decoder-load, which applies to decoding on a GPU, or None for the value in
            `arguments`.
        batches: number of batches per measurement. Before each measurement, the same number of batches is read as a
            warm-up.
        repeats: number of measurements per setting.
        arguments: flags of train.py.
    Returns:
        [(decoder, threads, load or None, [images/s])]
    Raises:
        UsageError: train.py would reject the flags or data, or an image cannot be decoded.
    """
    args = _parse(root, arguments)
    threads, loads = threads or [args.dali_num_threads], loads or [args.hw_decoder_load]
    has_gpu = args.dali_device == "gpu"
    settings = [("cpu", n, None) for n in threads]
    settings += [("mixed", n, load) for n in threads for load in loads] if has_gpu else []
    rows = []
    with logger.without_repeats():
        for decoder, n, load in settings:
            flags = ["--dali-num-threads", n]
            if decoder == "cpu":
                flags += ["--dali-device", "cpu"]
            else:
                flags += ["--dali-device", "gpu", "--hw-decoder-load", load]
            rates = []
            for _ in range(repeats):
                batches_of, args = open_loader(root, [*arguments, *map(str, flags)])
                _take(batches_of, batches)
                start = perf_counter()
                _take(batches_of, batches)
                rates.append(batches * args.batch_size / (perf_counter() - start))
                del batches_of
            rows.append((decoder, n, load, rates))
    title = f"{root}: loader throughput in images/s, n = {repeats}, {batches} batches of {args.batch_size}"
    table = Table(title=Text(printable(title)))
    for column in ("decoder", "threads", "hw-decoder-load", "median", "lowest", "highest"):
        table.add_column(column, justify="right")
    for decoder, n, load, rates in rows:
        speeds = (f"{f(rates):,.0f}" for f in (np.median, min, max))
        table.add_row(decoder, str(n), "" if load is None else f"{load:g}", *speeds)
    Console().print(table)
    return rows


def _take(iterator, batches):
    while batches:
        try:
            next(iterator)
            batches -= 1
        except StopIteration:
            iterator.reset()


def _parse(root, arguments):
    """Parse flags of train.py, and return the settings with the values that resolve_device and Loader choose.

    Raises:
        UsageError: the flags are invalid or contain --image-root, or the device or the data set cannot be used.
    """
    args = config.parse_args(arguments)
    if args.origin("image_root") == "command line":
        raise UsageError(f"--image-root {args.image_root}: DIR already sets this folder; remove the flag")
    args = config.parse_args([*arguments, "--image-root", str(root)])
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    return args


def open_loader(root: str | Path, arguments: list[str]) -> tuple[Loader, Settings]:
    """Open the training loader of train.py, and return (loader, settings). The batch size is limited to the number
    of training images. Raises UsageError if the flags or the data set cannot be used."""
    args = _parse(root, arguments)
    args.apply(resolution.Classes, Mode.TRAIN)
    data = dali.data_root(args.part(dali.DataOptions))
    if args.data_format != "synthetic":
        size = loaders.open_split(data, args.part(loaders.Options), Mode.TRAIN, True).size
        args.resolve("data", batch_size=min(args.batch_size, size))
    return dali.build_dataloader(args, Mode.TRAIN, root=data), args
