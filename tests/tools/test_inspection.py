import itertools
import re
from types import SimpleNamespace

import data_files
import multi_label_data
import numpy as np
import pytest
from PIL import Image

from conftest import TINY
from paddle_resnet import config, dataset
from paddle_resnet.tools import inspection
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def colors(tmp_path):
    """Create ten training images, each of a single color and in its own class."""
    for i in range(10):
        folder = tmp_path / "colors" / "train" / f"c{i}"
        folder.mkdir(parents=True)
        Image.new("RGB", (40 + i, 30), (20 * i, 0, 255)).save(folder / "x.png")
    return tmp_path / "colors"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--data-layout", "NHWC", "--image-shape", "4,32,32"],
        ["--normalize-mean", "0,0,1"],
        ["--image-shape", "3,32,48"],
    ],
)
def test_preview_shows_original_and_input_of_network(colors, flags):
    with Image.open(colors / "train/c0/x.png") as image:
        exif = image.getexif()
        exif[274] = 6  # orientation: the rows of the file are the columns of the image
        image.rotate(90, expand=True).save(image.filename, exif=exif)
    rows = inspection.augmented(colors, 25, 2, [*TINY, "--num-of-class", "10", *flags])
    assert [name for _, _, name in rows] == [f"c{i}" for i in range(10)]
    for i, (original, versions, _) in enumerate(rows):
        assert original.shape == (30, 40 + i, 3) and (original == (20 * i, 0, 255)).all()
        assert [version.shape for version in versions] == [(32, 48 if "3,32,48" in flags else 32, 3)] * 2
        assert all((version == (20 * i, 0, 255)).all() for version in versions)


@pytest.mark.parametrize("kind", ["csv", "folders", "vector"])
def test_preview_of_multi_label_images_names_all_classes(tmp_path, kind):
    root = multi_label_data.write(tmp_path / "root", kind)
    rows = inspection.augmented(root, 6, 1, [*TINY, "--multi-label"])
    for original, _, name in rows:
        corners = [(original[y + 8, x + 8] == color).all() for (y, x), color in multi_label_data.PATCHES]
        assert name == ", ".join(itertools.compress(multi_label_data.CLASSES, corners))
    assert len({name for *_, name in rows}) > 2


@pytest.mark.parametrize("flags", [[], ["--multi-label"]])
def test_preview_omits_undecodable_images_and_those_of_the_skip_list(colors, tmp_path, capsys, flags):
    (colors / "train/c5/x.png").write_bytes(b"not an image")
    (colors / "train/empty").mkdir()
    (tmp_path / "skip.txt").write_text("train/c3/x.png\n./train/c8/x.png\n")
    flags = [*TINY, "--num-of-class", "11", *flags, "--skip-list", str(tmp_path / "skip.txt")]
    rows = inspection.augmented(colors, 25, 1, flags)
    assert [name for *_, name in rows] == [f"c{i}" for i in range(10) if i not in (3, 5, 8)]
    assert f"{colors}: omitting 1 of 8 chosen images, which cannot be decoded" in capsys.readouterr().err


@pytest.mark.slow
def test_preview_applies_augmentation_flags_and_writes_png(photos, tmp_path, capsys):
    flags = ["--color-jitter", "0.5", "--rotate-degrees", "30"]
    [(*_, first), (_, plain, last)] = inspection.augmented(photos, 2, 3, TINY)
    assert (first, last) == ("class0", "class2")  # the chosen images are evenly spaced in the data set
    [*_, (_, changed, _)] = inspection.augmented(photos, 2, 3, [*TINY, *flags, "--auto-augment", "randaug"])
    assert not np.array_equal(plain, changed)
    assert not np.array_equal(changed[0], changed[1])
    output = tmp_path / "preview.png"
    assert dataset.main(["preview", str(photos), "--output", str(output), "--images", "5", *TINY, *flags]) == 0
    with Image.open(output) as image:
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image.convert("L")))) > 50
    out, err = capsys.readouterr()
    assert f"{output}: 5 training images, each with 3 augmented versions" in out and "omitted" not in err


@pytest.mark.parametrize(("images", "columns"), [(1, 4), (8, 4), (10, 8), (12, 8), (36, 12)])
def test_preview_arranges_versions_next_to_their_image(images, columns):
    rows = [(f"{i}", [f"{i} {version}" for version in range(3)], f"c{i}") for i in range(images)]
    pictures = [name for i in range(images) for name in (f"{i}", f"{i} 0", f"{i} 1", f"{i} 2")]
    titles = [title for i in range(images) for title in (f"c{i}", "", "", "")]
    assert inspection._grid(rows) == (pictures, titles, columns)


@pytest.mark.slow
def test_preview_skips_undecodable_images(colors, tmp_path, capsys, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    (colors / "train/c3/x.png").write_bytes(b"not an image")
    arguments = ["preview", str(colors), "--output", str(tmp_path / "x.png"), *TINY, "--num-of-class", "10"]
    assert dataset.main(arguments) == 0
    output = capsys.readouterr()
    assert "x.png: 9 training images" in output.out
    assert f"warning: {colors}: omitting 1 of 10 chosen images, which cannot be decoded; to list" in output.err
    with monkeypatch.context() as patch:
        patch.setattr(inspection.Path, "read_bytes", denied)
        assert dataset.main(arguments) == 2
    assert "train/c0/x.png: cannot be read (Permission denied); make it readable" in capsys.readouterr().err
    for path in colors.glob("train/*/*"):
        path.write_bytes(b"not an image")
    assert dataset.main(arguments) == 2
    assert "none of the 10 chosen images can be decoded" in capsys.readouterr().err


@pytest.mark.parametrize("data_format", ["filelist", "recordio", "tfrecord", "lmdb", "webdataset"])
def test_info_is_equal_in_every_format(photos, converted, data_format):
    expected, actual = inspection.info(photos), inspection.info(converted[data_format])
    assert actual.keys() == expected.keys() == {"train", "val"}
    for split in expected:
        names = ["0", "1", "2"] if data_format == "filelist" else list(expected[split]["classes"])
        assert actual[split]["classes"] == dict(zip(names, expected[split]["classes"].values(), strict=True))
        assert sorted(actual[split]["sizes"].tolist()) == sorted(expected[split]["sizes"].tolist())


@pytest.mark.parametrize("data_format", ["recordio", "tfrecord", "lmdb", "webdataset", "filelist", "folder"])
def test_preview_of_every_format_has_class_names(converted, data_format):
    """Without classes.txt, a file list has no class names, and the names are the labels."""
    flags, root = [], converted[data_format]
    if data_format == "folder":
        flags, root = ["--data-format", "folder"], converted["filelist"]  # the flag takes precedence over train.txt
    rows = inspection.augmented(root, 12, 1, [*TINY, *flags])
    assert len({name for *_, name in rows}) == 3  # the images are evenly spaced in the split
    for _, versions, name in rows:
        assert name.startswith("class") == (data_format != "filelist")
        # The images of class k have a gradient in color channel k.
        assert np.argmax(versions[0].mean(axis=(0, 1))) == int(name.removeprefix("class"))


def test_synthetic_data_have_speed_but_no_preview(photos):
    flags = [*TINY, "--data-format", "synthetic", "--batch-size", "32"]
    loader, args = inspection.open_loader(photos, flags)
    assert args.batch_size == 32  # photos contains only 30 images
    assert next(loader)[0]["label"].shape() == [32, 1]
    with pytest.raises(UsageError, match="--data-format synthetic: preview needs images"):
        inspection.augmented(photos, 1, 1, flags)


@pytest.mark.slow
def test_info_counts_images_and_measures_sizes(colors, tmp_path, capsys):
    (colors / "train" / "c0" / "broken.jpg").write_bytes(b"not an image")
    (colors / "val" / "c0").mkdir(parents=True)
    assert dataset.main(["info", str(colors), "--output", str(tmp_path / "info.png")]) == 0
    with Image.open(tmp_path / "info.png") as image:
        assert image.size[0] > 400
    assert "2 (c0)" in capsys.readouterr().out
    actual = inspection.info(colors)
    assert actual["train"]["classes"] == {"c0": 2, **{f"c{i}": 1 for i in range(1, 10)}}
    assert sorted(actual["train"]["sizes"].tolist()) == [[40 + i, 30] for i in range(10)]
    assert actual["val"]["classes"] == {f"c{i}": 0 for i in range(10)}
    assert actual["val"]["sizes"].shape == (0, 2)


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("data_format", ["folder", "tfrecord"])
def test_images_with_unreadable_header_are_counted(colors, tmp_path, capsys, data_format):
    (colors / "train/c0/x.png").write_bytes(b"not an image")
    root = colors
    if data_format != "folder":
        data_files.write(colors, root := tmp_path / "records", data_format)
    content = inspection.info(root)["train"]
    assert content["classes"] == {f"c{i}": 1 for i in range(10)}
    assert sorted(content["sizes"].tolist()) == [[40 + i, 30] for i in range(1, 10)]
    assert re.search("unreadable header │ +1 ", capsys.readouterr().out)


def test_images_may_be_outside_the_folder_only_if_allowed(colors, tmp_path):
    (tmp_path / "list").mkdir()
    (tmp_path / "list/train.txt").write_text(f"{colors}/train/c1/x.png 1\n{colors}/train/c0/x.png 0\n")
    flags = [*TINY, "--num-of-class", "2"]
    with pytest.raises(UsageError, match="--allow-outside"):
        inspection.info(tmp_path / "list")
    classes = inspection.info(tmp_path / "list", allow_outside=True)["train"]["classes"]
    assert [*classes.items()] == [("0", 1), ("1", 1)]
    with pytest.raises(UsageError, match="--allow-outside"):
        inspection.augmented(tmp_path / "list", 2, 1, flags)
    assert len(inspection.augmented(tmp_path / "list", 2, 1, [*flags, "--allow-outside"])) == 2


def test_info_omits_records_without_readable_label_and_counts_those_of_unknown_classes(colors, monkeypatch):
    monkeypatch.setattr(inspection, "_measure", lambda image: (image.label + 1 if image.label else None, None))
    expected = {"c0": 0, "c1": 0, **{f"c{i}": 1 for i in range(2, 10)}, "10": 1}
    assert inspection.info(colors)["train"]["classes"] == expected
    rows = {title: text({}, np.zeros((0, 2), int)) for title, text in inspection._statistics().items()}
    assert list(rows.values()) == ["0", "0", "0 (-)", "0", "0 (-)", "-", "-", "-", "-", "0"]


def test_statistics_of_info():
    sizes = 10 * np.array([[40, 30], [50, 60], [60, 20]])
    rows = {title: text({"a": 3, "b": 1, "c": 2}, sizes) for title, text in inspection._statistics().items()}
    assert list(rows.values()) == [
        *("6", "3", "3 (a)", "2", "1 (b)", "400 / 500 / 600", "200 / 300 / 600", "200 / 300 / 500"),
        *("120 / 120 / 300", "3"),
    ]


def test_info_shows_names_of_classes_txt_instead_of_folders(colors):
    (colors / "classes.txt").write_text("".join(f"color {i}\n" for i in range(10)))
    assert inspection.info(colors)["train"]["classes"] == {f"color {i}": 1 for i in range(10)}


def test_info_distinguishes_classes_with_same_name(colors):
    """Some ImageNet classes, for example, have the same name."""
    (colors / "classes.txt").write_text("crane\ncrane\nwren\n")
    (colors / "train.txt").write_text("train/c0/x.png 0\ntrain/c1/x.png 1\ntrain/c2/x.png 1\ntrain/c3/x.png 2\n")
    (colors / "train").rename(colors / "images")
    text = (colors / "train.txt").read_text().replace("train/", "images/")
    (colors / "train.txt").write_text(text)
    assert inspection.info(colors)["train"]["classes"] == {"crane (0)": 1, "crane (1)": 2, "wren": 1}


@pytest.mark.slow
def test_speed_measures_each_setting(photos, capsys):
    rows = inspection.speed(photos, [1, 2], [0.5, 0.9], batches=2, repeats=2, arguments=TINY)
    assert [row[:3] for row in rows] == [("cpu", 1, None), ("cpu", 2, None)]
    assert all(len(rates) == 2 and min(rates) > 0 for *_, rates in rows)
    capsys.readouterr()
    flags = ["--threads", "1,2", "--batches", "1", "--repeats", "2"]
    assert dataset.main(["speed", str(photos), *flags, *TINY]) == 0
    output = capsys.readouterr().out
    assert "images/s" in output
    assert output.count(": the train split is train/ (folder)") == 1


def test_speed_measures_the_flags_of_train_by_default(photos, tmp_path, capsys):
    [(_, threads, _, _)] = inspection.speed(photos, None, None, batches=1, repeats=1, arguments=TINY)
    assert f"--dali-num-threads {threads}" in " ".join(TINY)
    assert dataset.main(["speed", str(photos), "--image-root", "d"]) == 2
    assert "--image-root d: DIR already sets this folder; remove the flag" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("image_root: d\n")  # DIR replaces the value in the file
    assert inspection._parse(photos, [*TINY, "--config", str(tmp_path / "config.yaml")]).image_root == str(photos)


def test_speed_on_gpu_measures_decoder_loads(monkeypatch, capsys):
    def open_loader(root, arguments):
        args = config.parse_args(arguments)
        opened.append((args.dali_device, args.dali_num_threads, args.hw_decoder_load))
        loaders.append(iter(range(6)))
        return loaders[-1], args

    opened, loaders = [], []
    monkeypatch.setattr(inspection, "_parse", lambda root, arguments: SimpleNamespace(dali_device="gpu"))
    monkeypatch.setattr(inspection, "open_loader", open_loader)
    times = itertools.cycle([0, 1, 0, 4, 0, 2])  # begin and end of each measurement in seconds
    monkeypatch.setattr(inspection, "perf_counter", lambda: next(times))
    arguments = ["--batch-size", "8", "--dali-num-threads", "7", "--hw-decoder-load", "0.9"]
    rows = inspection.speed("data", [1], [0.5, 0.7], batches=3, repeats=3, arguments=arguments)
    assert [rates for *_, rates in rows] == [[24, 6, 12]] * 3  # images per second
    assert [list(loader) for loader in loaders] == [[]] * 9  # three batches as a warm-up, and three to measure
    expected = [("cpu", 1, 0.9), ("gpu", 1, 0.5), ("gpu", 1, 0.7)]
    assert opened == [setting for setting in expected for _ in range(3)]
    output = capsys.readouterr().out
    assert "data: loader throughput in images/s, n = 3, 3 batches of 8" in " ".join(output.split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert rows == [
        [decoder, "1", load, "12", "6", "24"] for decoder, load in (("cpu", ""), ("mixed", "0.5"), ("mixed", "0.7"))
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["preview", "/nowhere", "--output", "x.png"], "--image-root /nowhere: not a folder"),
        (["preview", "{photos}", "--output", "/proc/no.png", *TINY], "--output /proc/no.png: cannot be written"),
        (["preview", "{photos}", "--output", "x.png", "--colour-jitter", "1"], "use --color-jitter, or see --help"),
        (["info", "{photos}/train"], "neither train/ nor val/"),
        *(
            ([*command, "{photos}/train/class0/x.png"], "x.png: would change the data set's /")
            for command in (
                ["info", "{photos}", "--output"],
                ["preview", "{photos}", *TINY, "--output"],
                ["verify", "{photos}", "--fix-list"],
            )
        ),
        (["info", "{photos}", "--output", "/proc/no.png"], "--output /proc/no.png: cannot be written"),
        (["info", "{photos}", "--batch-size", "3"], "--batch-size: unknown flag"),
    ],
)
def test_invalid_command_exits_with_code_2_and_one_line(photos, capsys, arguments, message):
    assert dataset.main([argument.format(photos=photos) for argument in arguments]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert len(stderr.splitlines()) == 1


def test_batch_size_may_exceed_data_set(colors, tmp_path):
    arguments = [*TINY, "--num-of-class", "10", "--batch-size", "256"]
    [(_, _, _, rates)] = inspection.speed(colors, [1], [0.9], batches=2, repeats=1, arguments=arguments)
    assert min(rates) > 0
    (tmp_path / "skip.txt").write_text("train/c3/x.png\n")
    for flags in ([], ["--multi-label"]):
        _, args = inspection.open_loader(colors, [*arguments, "--skip-list", str(tmp_path / "skip.txt"), *flags])
        assert args.batch_size == 9


def test_preview_without_a_decodable_image_is_an_error(colors, tmp_path):
    for path in colors.glob("train/*/*"):
        path.write_bytes(b"not an image")
    with pytest.raises(UsageError, match="none of the 10 chosen images can be decoded; to list such images, run"):
        inspection.augmented(colors, 25, 1, [*TINY, "--num-of-class", "10"])


def test_invalid_flag_is_rejected_before_reading_data(photos):
    with pytest.raises(UsageError, match="--rotate-degrees"):
        inspection.augmented(photos, 1, 1, [*TINY, "--rotate-degrees", "200"])
