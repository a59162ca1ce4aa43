import dataclasses
import warnings

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager, pyplot

from paddle_resnet import dataset
from paddle_resnet.results import lr_curve
from paddle_resnet.tools import drawing
from paddle_resnet.utils.errors import UsageError


def splits(count):
    """Return the result of `dataset info` for `count` classes. Class i has i images in train/ and one image in val/."""
    names = [f"[b]$class$ {i}" for i in range(count)]
    sizes = np.array([[40, 30], [50, 60]])
    return {
        "train": {"classes": {name: i for i, name in enumerate(names)}, "sizes": sizes},
        "val": {"classes": dict.fromkeys(names, 1), "sizes": sizes},
    }


@pytest.mark.parametrize(
    ("count", "most", "extremes"),
    [
        (4, 4, 1),
        (6, 4, 1),
        pytest.param(5, 4, 1, marks=pytest.mark.slow),
        *(pytest.param(count, 60, 15, marks=pytest.mark.soak) for count in (60, 1000)),
    ],
)
def test_classes_are_labeled_in_same_order_in_both_splits(tmp_path, count, most, extremes):
    data = splits(count)
    figure = drawing.balance(data, most, extremes)
    bars = {axes.get_title().partition(":")[0]: axes for axes in figure.axes[:2]}
    assert list(bars) == ["train", "val"]
    names = [label.get_text() for label in bars["train"].get_yticklabels()]
    assert bars["val"].get_yticklabels() == []
    largest = sorted(data["train"]["classes"], key=data["train"]["classes"].get, reverse=True)
    if count <= most:
        assert names == largest
    else:
        assert names == [*largest[:extremes], f"... {count - 2 * extremes} more", *largest[-extremes:]]
    for split, axes in bars.items():
        counts = data[split]["classes"]
        assert [bar.get_width() for bar in axes.patches] == [counts.get(name, 0) for name in names]
        shown = [f"{counts[name]:,}" if name in counts else "" for name in names]
        assert [text.get_text() for text in axes.texts] == shown
        assert axes.get_ylim() == (len(names) - 0.5, -0.5)
        assert axes.get_title() == f"{split}: {sum(counts.values()):,} images in {count:,} classes"
    sizes = [axes for axes in figure.axes if axes.get_xlabel() == "width (pixels)"]
    assert [axes.get_ylabel() for axes in sizes] == ["height (pixels)"] * 2
    assert [axes.lines[0].get_xydata().tolist() for axes in sizes] == [[[40, 30], [50, 60]]] * 2
    curves = [axes for axes in figure.axes if axes.get_xlabel() == "class, in the order of train"]
    assert len(curves) == (2 if count > most else 0)
    for axes, split in zip(curves, data, strict=True) if curves else ():
        assert axes.lines[0].get_ydata().tolist() == [data[split]["classes"][name] for name in largest]
        assert axes.lines[0].get_xdata().tolist() == [*range(1, count + 1)]
        assert (axes.get_xlim(), axes.get_ylim()[0], axes.get_ylabel()) == ((0, count + 1), 0, "images")
    heights = [0.2 * len(names) + 1, *([3] if curves else []), 4]
    assert figure.get_size_inches().tolist() == [12, sum(heights)]
    assert figure.axes[0].get_gridspec().get_height_ratios() == heights
    if count in (4, 6):
        pyplot.close(figure)
        return  # to save time
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.save(figure, tmp_path / "x.png")
    width, height = pyplot.imread(tmp_path / "x.png").shape[1::-1]
    assert 800 < width < 3000
    assert 400 < height < 3000


def test_curves_of_many_classes_show_the_images_of_each_split():
    data = splits(3)
    data["val"]["classes"] |= {"[b]$class$ 1": 5, "only in val": 2}
    figure = drawing.balance(data, most_bars=2, extremes=1)
    curves = [axes.lines[0].get_ydata().tolist() for axes in figure.axes if axes.get_xlabel().startswith("class")]
    assert curves == [[2, 1, 0, 0], [1, 5, 1, 2]]  # in the order of train
    pyplot.close(figure)


def test_balance_of_single_split_can_be_drawn(tmp_path):
    figure = drawing.balance({"val": splits(3)["val"]})
    assert all(tick.is_integer() for tick in figure.axes[0].get_xticks())  # numbers of images
    drawing.save(figure, tmp_path / "x.png")


def test_classes_with_empty_and_long_names_have_bars(tmp_path):
    figure = drawing.balance({"val": {"classes": {"": 2, 41 * "a": 1}, "sizes": np.array([[40, 30]])}})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["", 39 * "a" + "…"]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [2, 1]
    drawing.save(figure, tmp_path / "x.png")


def test_limits_of_splits_without_readable_images():
    assert drawing._size_limits({"val": {"sizes": np.zeros((0, 2), int)}}).tolist() == [1, 1]


@pytest.mark.parametrize(("largest", "limit"), [(20, 20), (21, 10)])
def test_limits_exclude_a_size_above_twice_the_others(largest, limit):
    sizes = np.full((1000, 2), 10)
    sizes[5] = largest, 15
    splits = {"train": {"sizes": sizes[:500]}, "val": {"sizes": sizes[500:]}}
    assert drawing._size_limits(splits).tolist() == [limit, 15]


def test_long_names_are_shortened():
    assert [drawing._shortened("x" * length) for length in (40, 41)] == ["x" * 40, "x" * 39 + "…"]


def test_pictures_are_drawn_row_by_row():
    pictures = [np.full((2, 3, 3), i, np.uint8) for i in range(3)]
    figure = drawing.pictures(pictures, ["a", "$b$", "c"], 2)
    assert [axes.get_title() for axes in figure.axes] == ["a", "$b$", "c", ""]
    assert not figure.axes[1].title.get_parse_math()
    assert [axes.images[0].get_array().tolist() for axes in figure.axes[:3]] == [image.tolist() for image in pictures]
    assert figure.axes[0].get_gridspec().get_geometry() == (2, 2)
    wide = drawing.pictures(pictures, ["a", "b", "c"], 3)
    assert wide.get_size_inches().tolist() == pytest.approx([4.8, 1.6])
    pyplot.close(wide)
    assert not any(axes.axison for axes in figure.axes)
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("losses", "suggestion", "limits"),
    [([3.0, 2.0, None], (1e-3, 1e-2), (2 - 0.05 * 1.9, 3.9)), ([None], (None, None), (-0.065, 1.3))],
)
def test_curve_of_learning_rates(losses, suggestion, limits):
    rates = [1e-3, 1e-2, 1e-1][: len(losses)]
    curve = lr_curve.Curve(rates, losses, losses[:-1], 1, *suggestion, True, {})
    figure = drawing.lr_curve(curve, "a$b")
    [axis] = figure.axes
    assert axis.get_ylim() == pytest.approx(limits)
    assert [line.get_xdata()[0] for line in axis.lines[2:]] == [rate for rate in suggestion if rate]
    assert axis.lines[0].get_ydata()[:-1].tolist() == losses[:-1] and np.isnan(axis.lines[0].get_ydata()[-1])
    assert axis.lines[1].get_xydata().tolist() == [[*pair] for pair in zip(rates, losses[:-1], strict=False)]
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    named = ["steepest descent, --lr 0.001", "lowest loss, 0.01"] if suggestion[0] else []
    assert labels == ["loss per step", "smoothed", *named]
    assert (axis.get_title(), axis.get_xscale(), axis.get_xlabel()) == ("a$b", "log", "--lr")
    pyplot.close(figure)


# No matplotlib font contains the first character. Among the fonts of the test, only STIX contains the second, and only
# DejaVu Serif contains the third.
NAME = "猫 \u2312\u02ef a\x1b"


FAMILIES = ["DejaVu Sans", "DejaVu Serif", "STIXGeneral"]


@pytest.fixture
def fonts(monkeypatch):
    """Restrict the fonts of the system to FAMILIES and a font of boxes, and return them."""
    fonts = [font for font in font_manager.fontManager.ttflist if font.name in FAMILIES]
    fonts += [dataclasses.replace(font, name="Last Resort") for font in fonts if font.name == "STIXGeneral"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    return fonts


def test_character_without_font_is_escaped(fonts, monkeypatch):
    assert "\u2312" not in drawing._characters(drawing.FONT, {"\u2312"})
    assert drawing.drawable([NAME]) == ["\\u732b \u2312\u02ef a\\x1b"]
    assert matplotlib.rcParams["font.family"] == FAMILIES
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [f for f in fonts if f.name == "DejaVu Sans"])
    assert drawing.drawable([NAME, "cat"]) == ["\\u732b \\u2312\\u02ef a\\x1b", "cat"]
    assert matplotlib.rcParams["font.family"] == ["DejaVu Sans"]


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("ending", drawing.FORMATS)
def test_characters_of_several_fonts_are_drawn_without_warnings(tmp_path, ending):
    picture = np.zeros((8, 8, 3), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.save(drawing.pictures([picture] * 3, [NAME, "$a", "b"], 2), tmp_path / f"x{ending}")


def test_missing_or_damaged_font_has_no_characters(tmp_path, monkeypatch):
    assert drawing._characters("no such font", {"a"}) == set()
    damaged = tmp_path / "x.ttf"
    damaged.write_text("not a font")
    for path, error in ((damaged, RuntimeError), (tmp_path / "missing.ttf", OSError)):
        monkeypatch.setattr(font_manager, "findfont", lambda *arguments, path=path, **options: str(path))
        with pytest.raises(error):
            font_manager.get_font(str(path))
        assert drawing._characters(drawing.FONT, {"a"}) == set()


@pytest.mark.slow
def test_file_name_selects_format(photos, tmp_path):
    assert dataset.main(["info", str(photos), "--output", str(tmp_path / "x.PNG")]) == 0
    for ending in ("pdf", "svg"):
        drawing.save(figure := pyplot.figure(figsize=(1, 1)), tmp_path / f"x.{ending}")
        assert not pyplot.fignum_exists(figure.number)
    for ending, start in {"PNG": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
        assert (tmp_path / f"x.{ending}").read_bytes().startswith(start)


@pytest.mark.parametrize("command", [["info"], ["preview"]])
@pytest.mark.parametrize("name", ["x.doc", "x", ".png"])
def test_unknown_format_is_rejected_before_reading_data(tmp_path, capsys, command, name):
    assert dataset.main([*command, "/nowhere", "--output", str(tmp_path / name)]) == 2
    assert (
        f"--output {tmp_path}/{name}: unknown file format; use a name that ends in .png, .pdf, .svg"
        in capsys.readouterr().err
    )
    drawing.check_name(tmp_path / "x.PNG")


def test_splits_share_axes_and_huge_images_are_counted():
    sizes = np.full((500, 2), (400, 300))
    content = {"classes": {"a": 500}, "sizes": np.vstack([sizes, [[9000, 200], [300, 8000]]])}
    figure = drawing.balance({"train": content, "val": {"classes": {"a": 100}, "sizes": sizes[:100] // 2}})
    bars, scatters = figure.axes[:2], figure.axes[2:]
    assert len({axes.get_xlim() for axes in bars}) == 1
    assert {(axes.get_xlim(), axes.get_ylim()) for axes in scatters} == {((0, 420), (0, 315))}
    titles = [axes.get_title() for axes in scatters]
    assert titles == ["train: image sizes (2 larger images not shown)", "val: image sizes"]


@pytest.mark.parametrize("suffix", drawing.FORMATS)
def test_full_disk_is_an_error_in_every_format(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.symlink_to("/dev/full")
    with pytest.raises(UsageError, match=f"--output {path}: cannot be written \\(No space left on device\\); choose a"):
        drawing.save(figure := pyplot.figure(figsize=(1, 1)), path)
    assert not pyplot.fignum_exists(figure.number)
    with pytest.raises(UsageError, match=f"^the curve in --output-dir {path}: cannot be written"):
        drawing.save(pyplot.figure(figsize=(1, 1)), path, "the curve in --output-dir")
