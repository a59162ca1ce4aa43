"""Draw docs/data_way.svg and docs/step_timeline.svg from the YAML files in this folder.

`.venv/bin/python docs/drawings/draw.py` writes both drawings. They have their own background and follow the browser's
light or dark mode.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import yaml

HERE = Path(__file__).parent
WIDTH, LEFT = 1000, 44
LIGHT = {
    "page": ("#ffffff", "#d0d7de"), "idle": ("#f6f8fa", "#d0d7de"), "ink": "#1f2328", "soft": "#59636e",
    "green": ("#dafbe1", "#116329"), "blue": ("#ddf4ff", "#0550ae"), "orange": ("#fff1e5", "#953800"),
}  # fmt: skip
DARK = {
    "page": ("#0d1117", "#3d444d"), "idle": ("#151b23", "#3d444d"), "ink": "#f0f6fc", "soft": "#adb6c0",
    "green": ("#12331c", "#7ee787"), "blue": ("#0c2d50", "#a5d6ff"), "orange": ("#3d2413", "#ffc680"),
}  # fmt: skip
FONTS = """
text { font-family: -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", Helvetica, Arial, sans-serif }
.title { font-size: 20px; font-weight: 600 }
.name { font-size: 15px; font-weight: 600 }
.text { font-size: 13px }
.module { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 11px }
.arrow { stroke-width: 1.5; fill: none }
"""
COLORS = ("green", "blue", "orange")


def colors(palette):
    """Return the CSS rules for a palette. Each color name becomes a CSS class: boxes of the class get its fill and
    outline colors, and text gets its outline color."""
    rules = [f"text {{ fill: {palette['ink']} }} .text {{ fill: {palette['soft']} }}"]
    rules.append(f".arrow {{ stroke: {palette['soft']} }} .head {{ fill: {palette['soft']} }}")
    for name in ("page", "idle", *COLORS):
        fill, line = palette[name]
        rules.append(f"rect.{name} {{ fill: {fill}; stroke: {line} }} text.{name} {{ fill: {line} }}")
    return "\n".join(rules)


def text(x, y, words, style, anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x, y, width, height, style):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{style}"/>'


def arrow(*points):
    return f'<path class="arrow" marker-end="url(#head)" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>'


def page(height, title, shapes):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{FONTS}{colors(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{colors(DARK)}\n}}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" class="page"/>',
        text(LEFT, 42, title, "title"),
        *shapes,
        "</svg>\n",
    ])  # fmt: skip


def data_way(source):
    """Draw rows of boxes. The arrow to a box starts at the previous box, at the end of the row above, or at the box
    that its key `after` names."""
    box_width, box_height, gap, top, row_height = 164, 118, 27, 100, 182
    shapes = []
    for row, (content, color) in enumerate(zip(source["rows"], COLORS, strict=True)):
        y = top + row * row_height
        shapes += [
            text(LEFT, y - 14, content["name"], f"name {color}"),
            text(LEFT + 66, y - 14, content["note"], "text"),
        ]
        places = {}
        for column, entry in enumerate(content["boxes"]):
            x = places[entry["title"]] = LEFT + column * (box_width + gap)
            shapes += [box(x, y, box_width, box_height, color), text(x + 14, y + 26, entry["title"], "name")]
            shapes += [text(x + 14, y + 48 + 17 * i, line, "text") for i, line in enumerate(entry["text"].split("\n"))]
            shapes.append(text(x + 14, y + 106, entry["module"].removeprefix("paddle_resnet/"), f"module {color}"))
            middle, below = x + box_width / 2, y + box_height + 4
            if "after" in entry:
                start = places[entry["after"]] + box_width / 2
                shapes.append(arrow((start, below), (start, below + 18), (middle, below + 18), (middle, below)))
            elif column:
                shapes.append(arrow((x - gap + 4, y + box_height / 2), (x - 4, y + box_height / 2)))
            elif row:
                start, between = LEFT + 4.5 * box_width + 4 * gap, y - 46
                here = y + box_height / 2
                end_of_row = (start, below - row_height), (start, between), (20, between)
                shapes.append(arrow(*end_of_row, (20, here), (x - 4, here)))
    return [*shapes, text(LEFT, top + 3 * row_height - 16, source["footnote"], "text")]


def step_timeline(source):
    """Draw three lanes over three steps, with time on the horizontal axis. Intervals that would be invisible get a
    minimum width."""
    graph, copy, gap, loader_images_s = (float(f["figure"].replace(",", "")) for f in source["figures"].values())
    step, load = graph + copy + gap, source["batch"] / loader_images_s * 1000
    origin, scale, short, height = 128, 8.7, 92, 54
    loader, host, gpu, axis = 92, 184, 290, 366

    def x(ms):
        return origin + ms * scale

    def span(start, end, y, words, style):
        return [
            box(start, y, end - start, height, style),
            text((start + end) / 2, y + height / 2 + 5, words, "text", "middle"),
        ]

    shapes = [text(LEFT, 66, source["note"], "text")]
    for y, name, color in ((loader, "Loader", "green"), (host, "Host", "orange"), (gpu, "GPU", "blue")):
        shapes.append(text(LEFT, y + height / 2 + 5, name, f"name {color}"))
    for i, name in enumerate(("n-1", "n", "n+1")):
        start, end = x(i * step), x((i + 1) * step)
        after = f"n+{i}" if i else "n"
        ahead = f"n+{i + source['prefetch']}"
        shapes += span(start, x(i * step + load), loader, f"batch {ahead}", "green")
        shapes += span(x(i * step + load), end, loader, f"{source['prefetch']} batches are ready", "idle")
        shapes += span(start, start + short, host, f"launch {after}", "orange")
        shapes += span(start + short, end, host, f"waits for metrics of {name}", "idle")
        shapes += span(start, end - 2, gpu, f"step {name}: one CUDA graph", "blue")
        shapes.append(arrow((start + short / 2, loader + height + 4), (start + short / 2, host - 4)))
        if i < 2:
            shapes.append(
                arrow(
                    (start + short / 2, host + height + 4),
                    (start + short / 2, gpu - 20),
                    (end + 8, gpu - 20),
                    (end + 8, gpu - 4),
                )
            )
        shapes.append(arrow((end - 12, gpu - 4), (end - 12, host + height + 4)))
    for i in range(4):
        shapes += [
            box(x(i * step) - 0.5, axis, 1, 10, "idle"),
            text(x(i * step), axis + 26, f"{i * step:.1f} ms", "text", "middle"),
        ]
    numbers = {"graph": graph, "copy": copy, "gap": gap, "loader": loader_images_s, "load": load}
    notes = [note.format_map(numbers) for note in source["notes"]]
    return [*shapes, *(text(LEFT, axis + 62 + 22 * i, note, "text") for i, note in enumerate(notes))]


def main(folder=HERE.parent):
    for name, draw, height in (("data_way", data_way, 652), ("step_timeline", step_timeline, 498)):
        source = yaml.safe_load((HERE / f"{name}.yaml").read_text())
        (Path(folder) / f"{name}.svg").write_text(page(height, source["title"], draw(source)))


if __name__ == "__main__":
    main(*sys.argv[1:])
