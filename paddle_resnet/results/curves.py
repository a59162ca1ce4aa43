"""Draw line charts as SVG. The style sheet of the page defines the colors."""

import math

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 270
RIGHT, TOP, BOTTOM = 24, 12, 34
CHARACTER = 8.2  # width of a digit on narrow screens, where the style sheet enlarges the text
MOST_LABELS = 9  # maximum number of labels on the x axis
# With at least 10 values, the y axis ends at their 98th percentile if the largest value exceeds OUTLIER times that.
OUTLIER = 3
TINY = 1e-30  # for smaller values, the ticks would exceed the precision of float64


def chart(series, xlabel="epochs done", mark=None, from_zero=False, last_x=0, has_log_x=False):
    """Draw lines with a common x axis.

    Args:
        series: [(name, CSS class, [(x, y)])]; values from -TINY to TINY are drawn as 0.
        xlabel: label of the x axis.
        mark: (x, y, text) of a point to mark, or None.
        from_zero: whether the y axis begins at 0. Otherwise, the axis is logarithmic if all values are positive and
            span more than a factor of 30.
        last_x: minimum upper end of the x axis, so that several charts can have the same axis.
        has_log_x: whether the x axis is logarithmic, in which case all x must be positive. Otherwise, the axis begins
            at 0.
    Returns:
        Markup of an <svg>, or "" if there are no points.
    """
    series = [(name, css, [(x, y if abs(y) > TINY else 0) for x, y in points]) for name, css, points in series]
    points = [p for _, _, line in series for p in line]
    if not points:
        return ""
    right = max(last_x, *(x for x, _ in points)) or 1
    xs = decades(min(x for x, _ in points), right) if has_log_x else ticks(0, right)
    right = xs[-1] if has_log_x else right
    scale_x = math.log10 if has_log_x else float
    low, high = min(y for _, y in points), _without_outliers([y for _, y in points])
    is_log = not from_zero and 0 < 30 * low < high
    scale = math.log10 if is_log else float
    ys = decades(low, high) if is_log else ticks(0 if from_zero else low, high)
    left = 16 + CHARACTER * max(len(label(y)) for y in ys)

    def px(x):
        return left + (scale_x(x) - scale_x(xs[0])) / (scale_x(right) - scale_x(xs[0])) * (WIDTH - left - RIGHT)

    def py(y):
        fraction = (scale(min(y, ys[-1])) - scale(ys[0])) / (scale(ys[-1]) - scale(ys[0]))
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)

    names = ", ".join(name for name, _, line in series if line)
    svg = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(names)}">']
    for y in ys:
        svg.append(f'<path class="grid" d="M{left:.1f} {py(y):.1f}H{WIDTH - RIGHT}"/>')
        svg.append(f'<text x="{left - 7:.1f}" y="{py(y) + 4:.1f}" text-anchor="end">{label(y)}</text>')
    step = -(-len(xs) // MOST_LABELS)
    for x in xs[::step]:
        if x <= right:
            svg.append(f'<text x="{px(x):.1f}" y="{HEIGHT - 17}" text-anchor="middle">{label(x)}</text>')
    svg.append(
        f'<text x="{(left + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(xlabel)}</text>'
    )
    for name, css, line in series:
        css, title = escape(css), f"<title>{escape(name)}</title>"
        path = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in line)
        svg.append(f'<path class="line {css}" d="M{path}">{title}</path>' if len(line) > 1 else "")
        if len(line) <= 30 and all(float(x).is_integer() for x, _ in line):
            svg += [
                f'<circle class="dot {css}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6">'
                f"<title>{escape(name)}, {label(x)}: {y:.4g}</title></circle>"
                for x, y in line
            ]
    if mark is not None:
        x, y, text = px(mark[0]), py(mark[1]), escape(mark[2])
        svg.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
        anchor, start = ("end", x - 9) if x > WIDTH / 2 else ("start", x + 9)
        svg.append(f'<text class="mark-text" x="{start:.1f}" y="{y + 16:.1f}" text-anchor="{anchor}">{text}</text>')
    return Markup("".join([*svg, "</svg>"]))


def _without_outliers(values):
    """Return the upper end of the y axis: the largest value or, if the largest of at least 10 values is an outlier, the
    98th percentile. Larger values are drawn at the upper edge of the chart."""
    values = sorted(values)
    limit = values[int(0.98 * (len(values) - 1))]
    return limit if len(values) >= 10 and 0 < OUTLIER * limit < values[-1] else values[-1]


def ticks(low, high):
    """Return evenly spaced round numbers that span the range from low to high."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def decades(low, high):
    """Return powers of ten that span the range from low to high. If there are fewer than four, also return 2 and 5
    times these powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**power for power in powers for m in ((1, 2, 5) if len(powers) < 4 else (1,))]
    # max() and min() use their defaults if log10 rounds up a number just below a power of ten, or rounds down one just
    # above it.
    first = max((i for i, y in enumerate(values) if y <= low), default=0)
    return values[first : 1 + min((i for i, y in enumerate(values) if y >= high), default=len(values) - 1)]


def label(value):
    return f"{value / 1000:g}k" if abs(value) >= 10000 else f"{value:.5g}"
