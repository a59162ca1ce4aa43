import argparse
import re
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from paddle_resnet import dataset, export, predict
from paddle_resnet.tools import convert, verify
from utils.errors import UsageError


def files(folder):
    """Return {path relative to the folder: path} for all files in a folder."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "new" / "digits"
    assert dataset.write_sample(folder) == (1438, 359)
    return folder


def test_sample_has_ten_classes_in_two_splits(sample):
    classes = [str(label) for label in range(10)]
    for split, count in (("train", 1438), ("val", 359)):
        assert sorted(path.name for path in (sample / split).iterdir()) == classes
        assert len(files(sample / split)) == count
    assert sorted(path.name for path in sample.iterdir()) == ["train", "val"]


def test_sample_images_are_rgb_jpegs_of_64_pixels(sample):
    kinds = set()
    for path in files(sample).values():
        with Image.open(path) as image:
            kinds.add((image.format, image.mode, image.size))
    assert kinds == {("JPEG", "RGB", (64, 64))}


def test_sample_images_are_sorted_by_label_with_every_fifth_in_val(sample):
    actual = {int(path.stem): (path.parts[-3], int(path.parts[-2])) for path in files(sample).values()}
    assert actual == {i: ("val" if i % 5 == 4 else "train", label) for i, label in enumerate(load_digits().target)}


@pytest.mark.parametrize("index", [0, 4, 777, 1796])
def test_sample_image_matches_its_digit(sample, index):
    [path] = sample.glob(f"*/*/{index:04d}.jpg")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=float) / 255 * 16
    digits = load_digits().images
    assert np.abs(digits - pixels).mean((1, 2)).argmin() == index


def test_sample_is_byte_identical_in_every_folder(sample, tmp_path):
    dataset.write_sample(tmp_path / "digits")
    expected, actual = files(sample), files(tmp_path / "digits")
    assert actual.keys() == expected.keys()
    assert all(actual[name].read_bytes() == path.read_bytes() for name, path in expected.items())


def test_complete_sample_is_not_rewritten(sample):
    before = {name: path.stat().st_mtime_ns for name, path in files(sample).items()}
    assert dataset.write_sample(sample) == (1438, 359)
    assert {name: path.stat().st_mtime_ns for name, path in files(sample).items()} == before


def test_sample_replaces_partial_output_of_interrupted_run(sample, tmp_path):
    left_over = tmp_path / "digits.partial" / "train" / "0" / "left_over.jpg"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"half an image")
    dataset.write_sample(tmp_path / "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert files(tmp_path / "digits").keys() == files(sample).keys()


def test_interrupted_sample_leaves_no_output_folder(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dataset.write_sample(tmp_path / "digits")
    assert not (tmp_path / "digits").exists()


def test_sample_rejects_and_keeps_unrelated_folder(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert dataset.main(["sample", "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        f"paddle_resnet.dataset: error: --output {tmp_path}: exists and is not the sample data set"
    )
    assert captured.err.count("\n") == 1
    assert files(tmp_path).keys() == {"mine.txt"}


def test_sample_rejects_existing_file(tmp_path):
    path = tmp_path / "digits"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists and is not the sample data set"):
        dataset.write_sample(path)
    assert path.read_text() == "mine"


def test_sample_command_prints_image_counts(sample, capsys):
    assert dataset.main(["sample", "--output", str(sample)]) == 0
    assert capsys.readouterr().out == f"{sample}: 1438 training and 359 validation images in 10 classes\n"


@pytest.mark.parametrize("argv", [[], ["sample"], ["other"]])
def test_invalid_command_line_exits_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        dataset.main(argv)
    assert stop.value.code == 2
    assert "usage: python -m paddle_resnet.dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["split", "x", "--output", "y", "--val", "1.5"], "1.5 is not between 0 and 1"),
        (["split", "x", "--output", "y", "--val", "some"], "'some' is not a number"),
        (["split", "x", "--output", "y", "--val", "1"], "1 leaves one split empty; use a fraction between 0 and 1"),
        (["split", "x", "--output", "y", "--seed", "9" * 400], "is too large; use a whole number from 0 to"),
        (["speed", "x", "--threads", "2,many"], "'many' is not a whole number; use a whole number from 1 to 1024"),
        (["speed", "x", "--threads", "99999"], "99999 is too large"),
        (["speed", "x", "--loads", "0.5,nan"], "nan is not finite"),
        (["preview", "x", "--output", "y", "--images", "1000000000"], "1000000000 is too large"),
        (["verify", "x", "--num-of-class", str(2**31)], f"{2**31} is too large"),
        (["convert", "--from", "x", "--to", "lmdb", "--output", "y", "--workers", "100000"], "100000 is too large"),
    ],
)
def test_invalid_value_exits_with_code_2_and_an_error(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        dataset.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_sample_in_folder_below_a_file_exits_with_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file/digits"
    assert dataset.main(["sample", "--output", str(output)]) == 2
    message = f"--output {output}: cannot be written (Not a directory); choose a different path"
    assert capsys.readouterr().err == f"paddle_resnet.dataset: error: {message}\n"


def test_killed_workers_exit_with_code_2_and_a_remedy(tmp_path, capsys, monkeypatch):
    """If memory runs out, the kernel may kill worker processes. The test simulates a killed worker."""

    def killed(*args, **options):
        raise BrokenProcessPool

    monkeypatch.setattr(convert, "convert", killed)
    monkeypatch.setattr(verify, "verify", killed)
    arguments = ["convert", "--from", str(tmp_path / "data"), "--to", "lmdb", "--output", str(tmp_path / "x")]
    for argv, message in ((arguments, "with fewer workers"), (["verify", str(tmp_path)], "free memory, and repeat")):
        assert dataset.main(argv) == 2
        err = capsys.readouterr().err
        assert "a worker process was killed, possibly because memory ran out" in err and message in err


def test_help_states_the_defaults(monkeypatch, capsys):
    stated = {}
    add = argparse.ArgumentParser.add_argument

    def record(self, *names, **options):
        text = re.search(r"\(default: (\S+)\)$", options.get("help") or "")
        if text and options.get("default") is not None:
            stated[names[-1]] = (text[1], str(options["default"]))
        return add(self, *names, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", record)
    for module in (dataset, export, predict):
        with pytest.raises(SystemExit, match="^0$"):
            module.main(["--help"])
    assert stated.keys() >= {"--val", "--seed", "--images", "--batches", "--repeats"}
    assert all(text == default for text, default in stated.values()), stated
