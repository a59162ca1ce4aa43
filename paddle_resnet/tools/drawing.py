"""Draw the figures of the data-set tools to files, without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib import font_manager, pyplot

from paddle_resnet.utils import outputs
from paddle_resnet.utils.errors import UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.figure import Figure

    from paddle_resnet.results.lr_curve import Curve

matplotlib.use("Agg")
FORMATS = (".png", ".pdf", ".svg")
FONT = "DejaVu Sans"  # matplotlib includes this font
MOST_BARS = 60  # if there are more classes, only the largest and smallest have bars, and a curve shows all classes
EXTREMES = 15
NAME_LENGTH = 40


def check_name(output: str | Path) -> None:
    """Raise UsageError if the file name does not end with one of FORMATS."""
    if Path(output).suffix.lower() not in FORMATS:
        raise UsageError(f"--output {output}: unknown file format; use a name that ends in {', '.join(FORMATS)}")


def save(figure: Figure, output: str | Path, what: str = "--output") -> None:
    """Write a figure in the format that the suffix of the file name specifies.

    Args:
        figure: figure to write and close.
        output: path of the file.
        what: flag or description for the error message.
    Raises:
        UsageError: the file cannot be written.
    """
    drawn = io.BytesIO()  # draw to memory, because matplotlib's PDF writer does not always raise OSError
    try:
        figure.savefig(drawn, dpi=120, format=Path(output).suffix[1:].lower())
        with outputs.replaced(output) as partial:
            partial.write_bytes(drawn.getvalue())
    except OSError as e:
        raise UsageError(f"{what} {output}: cannot be written ({e.strerror}); choose a different file") from e
    finally:
        pyplot.close(figure)


def pictures(images: Sequence[np.ndarray], names: Iterable[str], columns: int) -> Figure:
    """Return a figure of images (uint8 arrays [H, W, 3] in RGB) with their names."""
    names = drawable(names)
    rows = -(-len(images) // columns)
    size = (1.6 * columns, 1.6 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, name in zip(axes.flat, images, names, strict=False):  # there may be more axes than images
        axis.imshow(image)
        axis.set_title(name, fontsize=8, parse_math=False)  # a class name may contain "$"
    return figure


def balance(splits: dict[str, dict[str, Any]], most_bars: int = MOST_BARS, extremes: int = EXTREMES) -> Figure:
    """Return a figure of the number of images per class and of the image sizes. The order of the classes is the same
    for all splits.

    Args:
        splits: result of inspection.info: {split: {"classes": {class: images}, "sizes": int array [images, 2]}}.
        most_bars: maximum number of classes of which each has a bar.
        extremes: if there are more classes, number of the largest classes, and of the smallest, that have bars.
    """
    of = {split: content["classes"] for split, content in splits.items()}
    first = next(iter(of))
    names = sorted(dict.fromkeys(name for counts in of.values() for name in counts), key=lambda n: -of[first].get(n, 0))
    has_curve = len(names) > most_bars
    shown = [*names[:extremes], None, *names[-extremes:]] if has_curve else names
    left_out = f"... {len(names) - len(shown) + 1} more"
    labels = drawable(left_out if name is None else _shortened(name) for name in shown)
    heights = [0.2 * len(shown) + 1, *([3] if has_curve else []), 4]
    figure, axes = pyplot.subplots(
        *(len(heights), len(splits)),
        figsize=(5 * len(splits) + 2, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for i, (split, content) in enumerate(splits.items()):
        bars = [None if name is None else of[split].get(name, 0) for name in shown]
        _bars(axes[0, i], bars, labels if i == 0 else [])
        axes[0, i].set(title=f"{split}: {sum(of[split].values()):,} images in {len(names):,} classes", xlabel="images")
        if has_curve:
            counts = [of[split].get(name, 0) for name in names]
            axes[1, i].step(range(1, len(counts) + 1), counts, where="mid")
            axes[1, i].set(xlabel=f"class, in the order of {first}", ylabel="images", xlim=(0, len(counts) + 1))
            axes[1, i].set_ylim(0)
        axes[-1, i].plot(*content["sizes"].T, ".", markersize=2, alpha=0.5)
        limits = _size_limits(splits)
        outside = int((content["sizes"] > limits).any(axis=1).sum())
        title = f"{split}: image sizes" + (f" ({outside:,} larger images not shown)" if outside else "")
        axes[-1, i].set(title=title, xlabel="width (pixels)", ylabel="height (pixels)")
        axes[-1, i].set(xlim=(0, 1.05 * limits[0]), ylim=(0, 1.05 * limits[1]))
    most = max(axis.get_xlim()[1] for axis in axes[0])
    for axis in axes[0]:
        axis.set_xlim(0, most)
    return figure


def _size_limits(splits):
    """Return the upper limits for width and height in the drawing. Each limit is the maximum over all splits or, if
    this is more than twice the 99th percentile, the percentile, so that the largest 1% of the sizes do not compress the
    rest of the drawing."""
    sizes = np.concatenate([content["sizes"] for content in splits.values()])
    if len(sizes) == 0:
        return np.ones(2)
    high, most = np.quantile(sizes, 0.99, axis=0), sizes.max(axis=0)
    return np.where(most > 2 * high, high, most)


def lr_curve(curve: Curve, title: str) -> Figure:
    """Return a figure of a results.lr_curve.Curve. Losses above curve.limit() are outside the figure."""
    [title] = drawable([title])
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    steps = np.array(curve.loss, np.float64)  # None becomes NaN
    axis.plot(curve.lr, steps, alpha=0.3, label="loss per step")
    axis.plot(curve.lr[: len(curve.smoothed)], curve.smoothed, color="C0", label="smoothed")
    if curve.steepest is not None:
        axis.axvline(curve.steepest, color="C1", label=f"steepest descent, --lr {curve.steepest:g}")
        axis.axvline(curve.minimum, color="C1", linestyle=":", label=f"lowest loss, {curve.minimum:g}")
    axis.set(xscale="log", xlabel="--lr", ylabel="training loss")
    lowest = min(steps[np.isfinite(steps)], default=0.0)
    top = max(curve.limit(), lowest + 1e-9)
    axis.set_ylim(lowest - 0.05 * (top - lowest), top)
    axis.set_title(title, parse_math=False)
    axis.legend()
    return figure


def _bars(axis, counts, labels):
    bars = axis.barh(range(len(counts)), [count or 0 for count in counts])
    axis.bar_label(bars, ["" if count is None else f"{count:,}" for count in counts], fontsize=7, padding=2)
    axis.set_ylim(len(counts) - 0.5, -0.5)  # the first class is at the top
    axis.margins(x=0.1)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)


def _shortened(name):
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def drawable(names: Iterable[str]) -> list[str]:
    """Return names in a form that can be drawn, and select fonts for the names. System fonts are used for characters
    that matplotlib's font lacks. A character that no font contains is replaced by an escape such as \\u4e2d."""
    names = [printable(name) for name in names]
    lacking = set("".join(names))
    lacking -= _characters(FONT, lacking)
    families = [FONT]
    if lacking:
        fonts = [font for font in font_manager.fontManager.ttflist if (font.style, font.weight) == ("normal", 400)]
        # The fonts named "Last Resort" contain only boxes.
        others = {font.name for font in fonts if not font.name.startswith("Last Resort")}
        served = {name: _characters(name, lacking) for name in sorted(others)}
        while any(served.values()):
            families.append(max(served, key=lambda name: len(served[name])))
            lacking -= served[families[-1]]
            served = {name: characters & lacking for name, characters in served.items()}
    matplotlib.rcParams["font.family"] = families
    return ["".join(ascii(c)[1:-1] if c in lacking else c for c in name) for name in names]


def _characters(family, wanted):
    """Return those characters in `wanted` that the regular font of a family contains."""
    try:
        properties = font_manager.FontProperties(family=[family])
        font = font_manager.get_font(font_manager.findfont(properties, fallback_to_default=False))
    except (RuntimeError, ValueError, OSError):  # the font file is damaged or not supported by FreeType
        return set()
    return {c for c in wanted if font.scalable and font.get_char_index(ord(c))}
