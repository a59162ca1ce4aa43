import re
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from PIL import Image

from paddle_resnet import dataset
from paddle_resnet.tools import convert, inspection, split, verify
from paddle_resnet.utils.errors import UsageError, python
from paddle_resnet.utils.mode import RunScope


def files(folder):
    """Return {path relative to the folder: path} for all files in a folder."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def digits():
    """Return the digits of scikit-learn, which takes a second to import, in the process that runs these tests."""
    from sklearn.datasets import load_digits

    return load_digits()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "new" / "parent" / "digits"
    assert dataset.write_sample(folder) == (1438, 359)
    return folder


@pytest.mark.slow
def test_sample_has_ten_classes_in_two_splits(sample):
    classes = [str(label) for label in range(10)]
    for name, count in (("train", 1438), ("val", 359)):
        assert sorted(path.name for path in (sample / name).iterdir()) == classes
        assert len(files(sample / name)) == count
    assert sorted(path.name for path in sample.iterdir()) == ["train", "val"]


@pytest.mark.slow
def test_sample_images_are_rgb_jpegs_of_64_pixels(sample):
    kinds = set()
    for path in files(sample).values():
        with Image.open(path) as image:
            kinds.add((image.format, image.mode, image.size))
    assert kinds == {("JPEG", "RGB", (64, 64))}


def test_sample_images_are_sorted_by_label_with_every_fifth_in_val(sample, digits):
    actual = {int(path.stem): (path.parts[-3], int(path.parts[-2])) for path in files(sample).values()}
    assert actual == {i: ("val" if i % 5 == 4 else "train", label) for i, label in enumerate(digits.target)}


@pytest.mark.parametrize("index", [0, 4, 777, 1796])
def test_sample_image_matches_its_digit(sample, digits, index):
    [path] = sample.glob(f"*/*/{index:04d}.jpg")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=float) / 255 * 16
    assert np.abs(digits.images - pixels).mean((1, 2)).argmin() == index


def test_sample_is_byte_identical_and_replaces_partial_output_of_interrupted_run(sample, tmp_path):
    left_over = tmp_path / "digits.partial" / "train" / "0" / "left_over.jpg"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"half an image")
    dataset.write_sample(tmp_path / "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    expected, actual = files(sample), files(tmp_path / "digits")
    assert actual.keys() == expected.keys()
    assert all(actual[name].read_bytes() == path.read_bytes() for name, path in expected.items())


def test_complete_sample_is_not_rewritten(sample):
    before = {name: path.stat().st_mtime_ns for name, path in files(sample).items()}
    assert dataset.write_sample(sample) == (1438, 359)
    assert {name: path.stat().st_mtime_ns for name, path in files(sample).items()} == before


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
    assert dataset.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("paddle_resnet.dataset: error: ")
    assert argv or error.endswith("the following arguments are required: COMMAND; see --help\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["split", "x", "--output", "y", "--val", "1.5"], "1.5 is not between 0 and 1"),
        (["split", "x", "--output", "y", "--val", "some"], "'some' is not a number"),
        (["split", "x", "--output", "y", "--val", "0"], "0 leaves one split empty; use a fraction between 0 and 1"),
        (["split", "x", "--output", "y", "--val", "1"], "1 leaves one split empty; use a fraction between 0 and 1"),
        (["split", "x", "--output", "y", "--seed", "9" * 400], "is too large; use a whole number from 0 to"),
        (["speed", "x", "--threads", "2,many"], "'many' is not a whole number; use a whole number from 1 to 1024"),
        (["speed", "x", "--threads", "99999"], "99999 is too large"),
        (["speed", "x", "--loads", "0.5,nan"], "nan is not finite"),
        (["preview", "x", "--output", "y", "--images", "1000000000"], "1000000000 is too large"),
        (["verify", "x", "--num-of-class", str(2**31)], f"{2**31} is too large"),
        (["convert", "--from", "x", "--to", "tfrecord", "--output", "y", "--workers", "100000"], "100000 is too large"),
        (["convert", "--from", "x", "--to", "zip", "--output", "y"], "invalid choice: 'zip'"),
        (["verify", "x", "--run-scope", "all"], "invalid choice: 'all'"),
    ],
)
def test_invalid_value_exits_with_code_2_and_an_error(argv, message, capsys):
    assert dataset.main(argv) == 2
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
    monkeypatch.setattr(split, "split", killed)
    convert_command = ["convert", "--from", str(tmp_path / "data"), "--to", "tfrecord", "--output", str(tmp_path / "x")]
    split_command = ["split", str(tmp_path / "data"), "--output", str(tmp_path / "x"), "--group-duplicates"]
    commands = (convert_command, "with fewer workers"), (["verify", str(tmp_path)], "free memory, and repeat")
    for argv, message in (*commands, (split_command, "free memory, and repeat")):
        assert dataset.main(argv) == 2
        err = capsys.readouterr().err
        assert "a worker process was killed, possibly because memory ran out" in err and message in err


@pytest.mark.parametrize(
    "command",
    [
        "split {0} --output {0}/new",
        "convert --from {0} --to tfrecord --output {0}/new",
        "preview {0} --output {0}/train/a/x.png",
        "verify {0} --fix-list {0}/train/a/x.txt",
        "info {0} --output {0}/train/a/x.png",
    ],
)
def test_outputs_in_the_data_set_exit_with_code_2(tmp_path, capsys, command):
    (tmp_path / "train/a").mkdir(parents=True)
    assert dataset.main(command.format(tmp_path).split()) == 2
    assert re.search(rf": would change the data set('s)? {tmp_path}(/train)?; choose a path", capsys.readouterr().err)


@pytest.mark.parametrize("name", [None, "full"])
def test_write_errors_exit_with_code_2_and_a_remedy(tmp_path, capsys, monkeypatch, name):
    def fail(*args, **options):
        raise OSError(28, "No space", name)

    for module, function in ((split, "split"), (convert, "convert")):
        monkeypatch.setattr(module, function, fail)
    output, file = tmp_path / "new", f" {name}" if name else ""
    for command, message in (
        ("split s --output {}", f"{output}: cannot be written (No space{file}); choose a different folder"),
        (
            "convert --from s --to tfrecord --output {}",
            f"{output}: cannot be written (No space{file and ':' + file}); fix the cause and repeat the command",
        ),
    ):
        assert dataset.main(command.format(output).split()) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"paddle_resnet.dataset: error: --output {message}"


REPORT = verify.Report(failing={"a.jpg": "is empty"})


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs a command without its work and returns the exit code, the calls of the functions that
    would do the work, and stdout."""
    output, calls = str(tmp_path / "x.png"), []

    def patch(module, name, result=None):
        def call(*arguments, **options):
            shown = {key: True if callable(value) else value for key, value in options.items()}
            calls.append((name, *arguments, shown) if options else (name, *arguments))
            return result

        monkeypatch.setattr(module, name, call)

    patch(split, "split", ({"train": 3, "val": 2}, 4))
    patch(convert, "convert", {"train": 3, "val": 2})
    patch(convert, "build_indexes", (1, 2))
    patch(verify, "verify", REPORT)
    for module, name in ((verify, "show"), (verify, "write_fix_list"), (inspection, "info"), (inspection, "speed")):
        patch(module, name)
    patch(inspection, "preview", 5)

    def run(command):
        code = dataset.main(command.format(output).split())
        made = [["OUT" if part == output else part for part in call] for call in calls]
        calls.clear()
        return code, made, capsys.readouterr().out.replace(output, "OUT")

    return run


def test_commands_pass_on_their_flags(run):
    text = "OUT: 3 training and 2 validation images in 4 classes\n"
    assert run("split s --output {}") == (0, [["split", "s", "OUT", 0.2, 0, False]], text)
    assert run("split s --output {} --val 0.3 --seed 7")[1] == [["split", "s", "OUT", 0.3, 7, False]]
    options = dict.fromkeys(("shards", "resize_short", "workers", "skip_list")) | {"quality": 95}
    options |= {"progress": True, "check": True, "allow_outside": False, "label_offset": "auto"}
    text = "OUT: 3 train and 2 val images as tfrecord\n"
    call = ["convert", "s", "OUT", "tfrecord"]
    assert run("convert --from s --to tfrecord --output {}") == (0, [[*call, options]], text)
    flags = "--shards 2 --resize-short 64 --quality 80 --workers 3 --skip-list f --allow-outside --unchecked"
    flags += " --label-offset 1"
    options = {"shards": 2, "resize_short": 64, "quality": 80, "workers": 3, "skip_list": "f", "allow_outside": True}
    options |= {"progress": True, "check": None, "label_offset": 1}
    assert run(f"convert --from s --to tfrecord --output {{}} {flags}")[1] == [[*call, options]]
    text = "s: 1 index file created, 2 already existed\n"
    assert run("index s") == (0, [["build_indexes", "s"]], text)
    calls = [["verify", "s", None, False, RunScope.TRAIN_EVAL, False, "auto", False], ["show", REPORT]]
    assert run("verify s") == (1, calls, "")
    flags = "--num-of-class 9 --run-scope train_only --allow-outside --allow-empty-classes --allow-one-class "
    flags += "--label-offset 1"
    options = True, RunScope.TRAIN_ONLY, True, 1, True
    calls = [["verify", "s", 9, *options], *calls[1:], ["write_fix_list", REPORT, "OUT"]]
    assert run(f"verify s --fix-list {{}} {flags}") == (1, calls, "OUT: 1 image for --skip-list\n")
    text = f"OUT: 5 training images, each with {inspection.VERSIONS} augmented versions\n"
    assert run("preview s --output {}") == (0, [["preview", "s", "OUT", 12, []]], text)
    assert run("preview s --output {} --images 7 --lr 1")[1] == [["preview", "s", "OUT", 7, ["--lr", "1"]]]
    assert run("info s") == (0, [["info", "s", None, False, "auto"]], "")
    assert run("info s --output {} --allow-outside --label-offset 2")[1] == [["info", "s", "OUT", True, 2]]
    assert run("speed s") == (0, [["speed", "s", None, None, 20, 3, []]], "")
    flags = "--threads 1,2 --loads 0.5,1 --batches 4 --repeats 5 --lr 1"
    assert run(f"speed s {flags}")[1] == [["speed", "s", [1, 2], [0.5, 1], 4, 5, ["--lr", "1"]]]


def test_unknown_flags_are_errors(capsys):
    assert dataset.main(["info", "s", "--allow"]) == 2
    assert "--allow: unknown flag;" in capsys.readouterr().err  # flags must not be abbreviated
    assert dataset.main(["info", "s", "--lr", "1"]) == 2
    assert f"--lr: unknown flag; see `{python()} -m paddle_resnet.dataset info --help`" in capsys.readouterr().err
    assert dataset.main(["convert", "--from", "s", "--to", "tfrecord", "--output", "x", "--quality", "9"]) == 2
    assert "--quality 9: requires --resize-short; add it, or remove --quality" in capsys.readouterr().err
