"""Draw line charts as SVG. The style sheet of the page defines the colors."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    Points = list[tuple[float, float]]
    Series = list[tuple[str, str, Points]]  # (name, CSS class, points) of each line

SIZE = 4.6, 2.7  # inches; a page scales the chart to the width of its column
# With at least 10 values, the y axis ends at their 98th percentile if the largest value exceeds OUTLIER times this
# percentile.
OUTLIER = 3
TINY = 1e-30  # smaller values are drawn as 0, because matplotlib cannot place ticks between them
MOST_DOTS = 30  # lines with at most this number of points have dots
# {CSS variable of the page: color in matplotlib's file, which _inline replaces with the variable}
COLORS = {
    name: f"#0000{i:02x}" for i, name in enumerate(("soft", "line", "train", "val", *(f"c{i}" for i in range(6))), 1)
}


def chart(
    series: Series,
    xlabel: str = "epochs done",
    mark: tuple[float, float, str] | None = None,
    from_zero: bool = False,
    last_x: float = 0,
    has_log_x: bool = False,
) -> str:
    """Draw lines with a common x axis.

    Args:
        series: [(name, CSS class, [(x, y)])]; values from -TINY to TINY are drawn as 0.
        xlabel: label of the x axis.
        mark: (x, y, text) of a point to mark, or None.
        from_zero: whether the y axis begins at 0. If from_zero is False, all values are positive and the values span
            more than a factor of 30, the y axis is logarithmic.
        last_x: minimum upper end of the x axis, so that several charts can have the same axis.
        has_log_x: whether the x axis is logarithmic, in which case all x must be positive. If has_log_x is False, the x
            axis begins at 0.
    Returns:
        Markup of an <svg>, or "" if there are no points.
    """
    series = [(name, css, [(x, y if abs(y) > TINY else 0) for x, y in line]) for name, css, line in series if line]
    points = [point for _, _, line in series for point in line]
    if not points:
        return ""
    import matplotlib  # imported late, because a run without a page does not need it

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "id", "font.size": 8}):
        return _draw(series, points, xlabel, mark, from_zero, last_x, has_log_x)


def _draw(series, points, xlabel, mark, from_zero, last_x, has_log_x):
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(y for _, y in points), _without_outliers([y for _, y in points])
    figure, titles = Figure(SIZE), []
    axes = figure.add_axes((0.14, 0.16, 0.84, 0.81))

    def draw(line, title, css, **style):
        titles.append(title)
        xs, ys = zip(*line, strict=True)
        color = COLORS["train" if css == "faint" else css]
        axes.plot(xs, [min(y, high) for y in ys], color=color, clip_on=False, gid=f"title{len(titles) - 1}", **style)

    for name, css, line in series:
        faint = {"alpha": 0.3, "linewidth": 0.9} if css == "faint" else {"linewidth": 1.6}
        draw(line, name, css, **faint)
        if len(line) <= MOST_DOTS and all(float(x).is_integer() for x, _ in line):
            for point in line:
                draw([point], f"{name}, {label(point[0])}: {point[1]:.4g}", css, marker="o", markersize=3)
    if mark is not None:
        x, y, text = mark
        draw([(x, y)], text, "val", marker="o", markersize=8, fillstyle="none")
        side = "right" if x > max(x for x, _ in points) / 2 else "left"
        place = {"xytext": (-7 if side == "right" else 7, -11), "textcoords": "offset points"}
        axes.annotate(text, (x, y), ha=side, color=COLORS["val"], parse_math=False, **place)
    if has_log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, max(last_x, *(x for x, _ in points)) or 1)
    if from_zero:
        axes.set_ylim(bottom=0)
    elif 0 < 30 * low < high:
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
        axis.set_minor_formatter(NullFormatter())
        if axis.get_scale() == "log":
            first, last = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if last < 1000 * first else (1,)))
    axes.set_xlabel(xlabel, color=COLORS["soft"])
    axes.grid(axis="y", color=COLORS["line"])
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", bottom=False, left=False, labelcolor=COLORS["soft"])
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    return _inline(file.getvalue(), ", ".join(name for name, _, _ in series), titles)


def _inline(svg, names, titles):
    """Return a chart for a page: with a label, the colors of the page and tooltips instead of the ids "titleN", and
    without a size and the other ids of groups, which would not be unique."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style|clipPath).*?</\1>|font-family: [^;]*;", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (xmlns|xmlns:xlink|clip-path|width|height)="[^"]*"', "", svg)
    svg = re.sub(r'<g id="title(\d+)">', lambda match: f"<g><title>{escape(titles[int(match[1])])}</title>", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return Markup(svg.replace("<svg ", f'<svg class="chart" role="img" aria-label="{escape(names)}" ', 1))


def _without_outliers(values):
    """Return the upper end of the y axis: the largest value or, if the largest of at least 10 values is an outlier, the
    98th percentile. Larger values are drawn at the upper edge of the chart."""
    values = sorted(values)
    limit = values[int(0.98 * (len(values) - 1))]
    return limit if len(values) >= 10 and 0 < OUTLIER * limit < values[-1] else values[-1]


def label(value: float) -> str:
    """Return the label of a tick: at most five significant digits; from 10,000, in thousands with the suffix k."""
    return f"{value / 1000:g}k" if abs(value) >= 10000 else f"{value:.5g}"
