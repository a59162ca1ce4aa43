import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import NHWC, ROOT
from paddle_resnet import export, predict
from paddle_resnet.checkpoints import contents
from paddle_resnet.data import bad_images
from paddle_resnet.data.images import IMAGE_SUFFIXES
from paddle_resnet.serving import image_files, inference
from paddle_resnet.utils import locks
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block")

KINDS = ["checkpoint", "export", "uint8 export", "ONNX", "uint8 ONNX"]


@pytest.fixture
def val_images(photo_paths):
    """Return the paths and the labels of the validation images."""
    return photo_paths, [int(path.split("/class")[1][0]) for path in photo_paths]


@pytest.fixture
def exported(once, checkpoint, tmp_path):
    """Return a copy of the folder of an export. All tests share the export."""

    def make(folder):
        export.export(checkpoint, folder / "export")

    return shutil.copytree(once("export_for_predict", make) / "export", tmp_path / "export")


def probabilities(path, images, **options):
    actual = list(image_files.predict(inference.open_model(path, "cpu"), images, **options))
    assert [image for image, *_ in actual] == images
    return np.stack([row for _, row, _ in actual])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, "4,32,32") for kind in KINDS), ("checkpoint", "3,32,48"), ("uint8 export", "4,48,32")],
)
def test_predictions_match_evaluation(trained, model_of, val_images, kind, shape):
    """Preprocessing, channels, width and height come from the checkpoint."""
    preprocessing = ["--resize-short", "44", "--interp", "cubic", "--normalize-mean", "0.5,0.4,0.3"]
    preprocessing += ["--normalize-scale", "0.005"]
    checkpoint, expected = trained(*preprocessing, *NHWC, "--image-shape", shape)
    paths, labels = val_images
    actual = probabilities(model_of(kind, checkpoint), paths, batch_size=5)
    assert actual.shape == (23, 3)
    assert np.mean(actual.argmax(axis=1) == labels) == expected["top1"]
    losses = -np.log(actual[np.arange(23), labels].astype(np.float64))
    assert losses.mean() == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--batch-size", "0", "0 is too small; use a whole number from 1 to 65536"),
        ("--batch-size", "4.5", "'4.5' is not a whole number"),
        ("--batch-size", "1" * 400, "is too large; use a whole number from 1 to 65536"),
        ("--dali-num-threads", "100000", "100000 is too large; use a whole number from 1 to 1024"),
        ("--benchmark-batches", "1,1000000000", "1000000000 is too large; use a whole number from 1 to 65536"),
        ("--serve", "65536", "65536 is too large; use a whole number from 0 to 65535"),
        ("--serve-max-mb", "257", "257 is too large; use a whole number from 1 to 256"),
        ("--serve-max-images", "0", "0 is too small; use a whole number from 1 to 1000"),
        ("--device", "tpu", "invalid choice: 'tpu' (choose from"),
        ("--precision", "half", "invalid choice: 'half' (choose from"),
        ("--tta", "rotate", "invalid choice: 'rotate' (choose from"),
        ("--csv", "", "'' is an empty path"),
    ],
)
def test_flag_values_out_of_range_exit_with_code_2(tmp_path, capsys, flag, value, message):
    assert predict.main([str(tmp_path), str(tmp_path), flag, value]) == 2
    error = capsys.readouterr().err
    assert f"predict: error: {flag}: " in error and message in error
    assert predict.main(["", "x.jpg"]) == 2
    assert "error: MODEL: '' is an empty path" in capsys.readouterr().err


def test_flags_must_not_be_abbreviated(capsys):
    assert predict.main(["model", "x.jpg", "--tt", "flip"]) == 2
    assert "--tt: unknown flag; use --tta, or see --help" in capsys.readouterr().err


def test_invalid_image_files_are_reported_and_skipped(checkpoint, photos, tmp_path, capfd):
    """There must be one line on stderr per invalid file. The fixture capfd also captures C libraries, which must not
    print anything."""
    folder = tmp_path / ".cache/mixed"  # a parent folder of an argument may be hidden
    folder.mkdir(parents=True)
    for i, path in enumerate(sorted((photos / "val").glob("*/*.jpg"))[:9]):
        (folder / f"{i}.jpg").write_bytes(path.read_bytes())
    jpeg = (folder / "0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "0text.jpg").write_text("no image")
    (folder / "5empty.jpg").write_bytes(b"")
    (folder / ".hidden.jpg").write_bytes(b"")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "left.jpg").write_bytes(b"")
    (folder / "notes.txt").write_text("")
    (folder / "6device.jpg").symlink_to("/dev/null")
    with open(tmp_path / "huge.jpg", "wb") as huge:
        huge.truncate(bad_images.MAX_BYTES + 1)
    gone, text, huge = str(tmp_path / "gone.jpg"), str(folder / "notes.txt"), str(tmp_path / "huge.jpg")
    arguments = [str(folder), gone, text, "/dev/null", huge, "a\0b.jpg"]
    assert predict.main([str(checkpoint), *arguments, "--batch-size", "4", "--device", "cpu"]) == 1
    out, err = capfd.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == [str(folder / f"{i}.jpg") for i in range(9)]
    unknown = "is not in an image format that DALI supports"
    lines = [line for line in err.splitlines() if not line.startswith("onnxruntime: not used")]
    assert lines.pop(1).removeprefix(f"{checkpoint}: ") in (
        "onnxruntime, float32, on the CPU",
        "Executor, float32, on the CPU",
    )
    suffixes = f"{', '.join(IMAGE_SUFFIXES[:-1])} or .webp"
    assert lines == [
        f"warning: {folder}: skipped 2 hidden or system files, 1 .txt; if these include images, rename them so that "
        f"they end in {suffixes}",
        f"{folder / '0text.jpg'} {unknown}",
        f"{folder / '5empty.jpg'} is empty",
        f"{folder / '6device.jpg'} cannot be read (not a regular file)",
        f"{folder / 'cut.jpg'} has damaged image data, or a variant of its format that DALI cannot decode",
        f"{gone} cannot be read (No such file or directory)",
        f"{text} is empty",
        "/dev/null cannot be read (not a regular file)",
        f"{huge} cannot be read (268435457 bytes, limit 268435456)",
        "a\\x00b.jpg cannot be read (embedded null byte)",
    ]
    # An image may have been replaced by a folder after the command listed the images.
    [(_, _, problem)] = image_files.predict(inference.open_model(checkpoint, "cpu"), [str(tmp_path)])
    assert problem == "cannot be read (Is a directory)"


def test_folders_are_searched_like_in_training(photos, tmp_path, capsys):
    """The command follows links to folders, but reads no folder twice."""
    folder = tmp_path / "mixed"
    (folder / "below").mkdir(parents=True)
    (folder / "link").symlink_to(photos / "val/class1")
    (folder / "below/loop").symlink_to(folder)
    (folder / "copy").symlink_to(folder / "below")
    for name in ("a.gif", "b.GIF", "c.heic", "Makefile", ".hidden.jpg"):
        (folder / "below" / name).write_text("")
    (folder / "UPPER.JPG").write_text("")
    names = sorted(path.name for path in (photos / "val/class1").iterdir())
    expected = [str(folder / "UPPER.JPG"), *(str(folder / "link" / name) for name in names)]
    assert predict.find_images([str(folder)], None) == expected
    skipped = "2 .gif, 2 folders already read (links), 1 .heic, 1 hidden or system files, 1 without extension"
    assert capsys.readouterr().err.startswith(
        f"warning: {folder}: skipped {skipped}; if these include images, rename them so that they end in .jpg, "
    )
    for i in range(predict.SHOWN_REASONS - 4):
        assert ", ..." not in skipped
        (folder / f"below/a.x{i}").write_text("")
        predict.find_images([str(folder)], None)
        skipped = capsys.readouterr().err.partition("; if these include images")[0]
    assert skipped.endswith(", ...") and skipped.count(", ") == predict.SHOWN_REASONS
    predict.find_images([str(photos / "val/class1")], None)
    assert capsys.readouterr().err == ""
    (folder / "below/loop").unlink()
    with pytest.raises(UsageError, match=r"copy: contains no images \(\.jpg, .*\); skipped: 2 \.gif, "):
        predict.find_images([str(folder / "copy")], None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "-: stdin is closed"),
        (b"\0" * 5000, "-: a line on stdin exceeds 4096 bytes"),
        (b"\n\n", "-: stdin contains no paths; pipe paths into it"),
    ],
)
def test_unusable_stdin_is_an_error(data, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        predict.find_images(["-"], data and io.TextIOWrapper(io.BytesIO(data)))


def test_paths_on_stdin_may_begin_and_end_with_spaces_and_have_4096_bytes():
    stdin = io.TextIOWrapper(io.BytesIO(b" a .jpg \n\n" + b"x" * 4096 + b"\n"))
    assert predict.find_images(["b.jpg", "-", "a.jpg"], stdin) == ["b.jpg", " a .jpg ", "x" * 4096, "a.jpg"]


def test_text_json_and_csv_output(checkpoint, val_images, tmp_path, capsys):
    paths = val_images[0][:3]
    expected = probabilities(checkpoint, paths)
    best = expected.argsort(axis=1)[:, ::-1]
    table, link = tmp_path / "new/folder/table.csv", tmp_path / "link.csv"
    link.symlink_to(table)
    assert predict.main([str(checkpoint), *paths, "--csv", str(link), "--json", "--device", "cpu"]) == 0
    for i, line in enumerate(capsys.readouterr().out.splitlines()):
        prediction = json.loads(line)
        assert prediction["image"] == paths[i]
        assert [entry["label"] for entry in prediction["top"]] == best[i].tolist()
        assert [entry["class"] for entry in prediction["top"]] == [f"class{label}" for label in best[i]]
        assert [entry["probability"] for entry in prediction["top"]] == expected[i][best[i]].tolist()
    rows = list(csv.reader(table.open()))
    top = [f"{name}_{i}" for i in (1, 2, 3) for name in ("label", "class", "probability")]
    # With three classes, the columns are those of --predictions without label and class.
    assert rows[0] == ["image", "prediction", "predicted_class", *top]
    for i, row in enumerate(rows[1:]):
        assert len(row) == len(rows[0])
        assert row[:6] == [paths[i], *[str(best[i][0]), f"class{best[i][0]}"] * 2, f"{expected[i].max():.7g}"]
    assert predict.main([str(checkpoint), *paths, "--csv", "-", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == table.read_text()
    assert predict.main([str(checkpoint), *paths, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{paths[0]}: class{best[0][0]} {expected[0].max():.4f}, class")


def arguments(*argv, **changes):
    """Return the parsed arguments of a command."""
    parsed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "_main", parsed.append)
        predict.main([*argv])
    return SimpleNamespace(**vars(parsed[0]) | changes)


def test_defaults_of_flags():
    flags = (
        "model_arch_name",
        "csv",
        "heat_map",
        "features",
        "batch_size",
        "dali_num_threads",
        "precision",
        "benchmark_batches",
    )
    flags += "serve", "serve_host", "serve_max_mb", "serve_max_images"
    switches = {"json": False, "benchmark": False, "device": "auto", "tta": "none"}
    assert vars(arguments("m")) == {"model": "m", "images": []} | switches | dict.fromkeys(flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}/nowhere", "{image}"], "nowhere: does not exist; choose the folder of a checkpoint or export"),
        (["{root}/empty", "{image}"], "empty: contains neither meta.json nor parameters; choose the folder of a run"),
        (["{run}/0"], "IMAGE: missing; add files, folders, or -"),
        (["{run}/0", "{root}/empty"], "empty: contains no images (.jpg,"),
        (
            ["{run}/0", "{image}", "--json", "--csv", "-"],
            "--json: not supported with '--csv -', which also",
        ),
        (["{run}/0", "{image}", "--benchmark"], "--benchmark: measures random images"),
        (["{run}/0", "--benchmark", "--json"], "--benchmark: measures random images"),
        (["{run}/0", "--benchmark", "--tta", "flip"], "--tta flip: not supported with --benchmark; remove one of"),
        (
            ["{run}/0", "--benchmark", "--batch-size", "8"],
            "--batch-size 8: not supported with --benchmark; use --benchmark-batches instead",
        ),
        (
            ["{run}/0", "--benchmark", "--dali-num-threads", "8"],
            "--dali-num-threads 8: not supported with --benchmark; remove --dali-num-threads",
        ),
        (
            ["{run}/0", "{image}", "--benchmark-batches", "1,8"],
            "--benchmark-batches 1,8: requires --benchmark; remove --benchmark-batches",
        ),
        (["{run}/0", "--benchmark", "--heat-map", "h"], "--heat-map h: not supported with --benchmark; remove --heat"),
        (["{run}/0", "--serve", "0", "--heat-map", "h"], "--heat-map h: not supported with --serve, whose page shows"),
        (
            ["{run}/0", "{image}", "--tta", "flip", "--heat-map", "h"],
            "--heat-map h: not supported with --tta flip, which averages two predictions; remove one of them",
        ),
        (["{run}/0", "{image}", "--heat-map", "{root}"], ": not empty; choose a new folder"),
        (["{run}/0", "{image}", "--heat-map", "{image}/x"], "x: cannot be written (Not a directory)"),
        (["{run}/0", "{image}", "--heat-map", "{run}/0/x"], "/0 is reserved for a checkpoint; choose a path outside"),
        (["{run}/0", "--benchmark", "--csv", "x.csv"], "--benchmark: measures random images"),
        (["{run}/0", "{image}", "--csv", "{image}/x.csv"], "x.csv: cannot be written (Not a directory)"),
        (["{run}/0", "{image}", "--csv", "{image}"], "the same file as the image"),
        (["{run}/0", "{image}", "--csv", "{run}/0/x.csv"], "/0 is reserved for a checkpoint; choose a path outside it"),
        (["{root}/x.onnx", "{image}", "--csv", "{root}/x.onnx"], "the same file as MODEL"),
        (
            ["{run}/0", "{image}", "--model-arch-name", "{root}/net.py:Net", "--csv", "{root}/net.py"],
            "the same file as --model-arch-name",
        ),
        (["{root}/broken", "{image}"], "model.json: not a valid description of a network (preprocessing.resize"),
    ],
)
def test_invalid_command_exits_with_code_2_and_an_error(checkpoint, val_images, tmp_path, capsys, arguments, message):
    (tmp_path / "run").mkdir()
    checkpoint.rename(tmp_path / "run/0")
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken/model.json").write_text('{"input": {}}')
    (tmp_path / "net.py").write_text("Net = None")
    places = {"root": tmp_path, "run": tmp_path / "run", "image": val_images[0][0]}
    assert predict.main([argument.format(**places) for argument in arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: lengthen(folder / "model.pdmodel"), "bytes instead of "),
        (lambda folder: flip_a_bit(folder / "model.pdiparams"), "pdiparams does not match its sha256 in model.json"),
        (lambda folder: (folder / "model.pdiparams").unlink(), ": unusable (model.pdiparams cannot be read"),
        (
            lambda folder: change(folder / "model.json", files={}),
            "`files` lacks the size or sha256 of model.*",
        ),
        (
            lambda folder: change_table(folder / "model.json", "output", shape=[None, 4]),
            "output has shape [1, 3] instead of",
        ),
        (
            lambda folder: change_table(folder / "model.json", "input", name="image"),
            "network does not match its description",
        ),
        (lambda folder: pipe(folder / "model.json"), "model.json: cannot be read (not a regular file)"),
        (lambda folder: dangling(folder / "model.json"), "model.json: cannot be read (No such file or directory)"),
    ],
    ids=["model", "flipped bit of the weights", "no weights", "no file list", "outputs", "input", "pipe", "link"],
)
def test_damaged_export_exits_with_code_2_and_an_error(exported, val_images, capsys, damage, message):
    damage(exported)
    assert predict.main([str(exported), val_images[0][0], "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--precision", "float16"], "--precision float16: {} was exported in float32"),
        (["--model-arch-name", "Tiny"], "--model-arch-name Tiny: not supported with the export {}"),
    ],
    ids=["precision", "network"],
)
def test_flags_that_an_export_determines_are_errors(exported, val_images, capsys, flags, problem):
    for arguments in ([val_images[0][0]], ["--benchmark", "--benchmark-batches", "1"]):
        assert predict.main([str(exported), *arguments, "--device", "cpu", *flags]) == 2
        assert problem.format(exported) in capsys.readouterr().err


def test_files_of_an_export_are_read_only_once(exported, val_images, monkeypatch):
    """Paddle would crash if it read a file that changed after the check of its sha256."""
    open_regular = contents.open_regular

    def open_and_remove(path):
        file = open_regular(path)
        os.unlink(path)
        return file

    monkeypatch.setattr(contents, "open_regular", open_and_remove)
    assert predict.main([str(exported), val_images[0][0], "--device", "cpu"]) == 0
    assert not (exported / "model.pdiparams").exists()


@pytest.mark.parametrize(
    ("make", "problem"),
    [(os.mkfifo, "neither a folder nor an ONNX file"), (lambda path: path, "does not exist")],
    ids=["pipe", "nothing"],
)
def test_model_that_is_not_a_folder_is_an_error(tmp_path, capsys, make, problem):
    make(tmp_path / "model")
    assert predict.main([str(tmp_path / "model"), "x.jpg", "--device", "cpu"]) == 2
    assert f"{tmp_path}/model: {problem}; choose" in capsys.readouterr().err


def test_empty_image_path_is_an_error(tmp_path, capsys):
    assert predict.main([str(tmp_path), "", "--device", "cpu"]) == 2
    assert "error: IMAGE '': an empty path; use" in capsys.readouterr().err


def lengthen(path):
    """Append an unknown protobuf field, which Paddle ignores."""
    path.write_bytes(path.read_bytes() + b"\xf8\x07\x01")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_table(path, table, **values):
    change(path, **{table: json.loads(path.read_text())[table] | values})


def dangling(path):
    path.unlink()
    path.symlink_to("missing")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def test_damaged_onnx_file_exits_with_code_2_and_an_error(checkpoint, model_of, val_images, tmp_path, capsys):
    exported = model_of("ONNX", checkpoint).read_bytes()
    model = tmp_path / "model.onnx"
    for data, message in (
        (None, ": cannot be read"),
        (b"no model", ": cannot be opened by onnxruntime"),
        (
            exported.replace(b'"epoch": ', b'"ep\xffch": '),
            ": cannot be opened by onnxruntime ('utf-8' codec can't decode",
        ),
        (
            exported.replace(b'"dtype": "float32"', b'"dtype": "float64"'),
            ": not a valid description of a network",
        ),
    ):
        if data:
            model.write_bytes(data)
        assert predict.main([str(model), val_images[0][0], "--device", "cpu"]) == 2
        assert f"{model}{message}" in capsys.readouterr().err


def test_flipped_bit_in_onnx_file_of_an_export_is_an_error(checkpoint, model_of, val_images, capsys):
    model = model_of("ONNX", checkpoint)
    flip_a_bit(model)
    assert predict.main([str(model), val_images[0][0], "--device", "cpu"]) == 2
    assert "model.onnx: damaged (it does not match its sha256 in model.json)" in capsys.readouterr().err


def test_model_folder_name_may_be_invalid_utf_8(checkpoint, model_of, val_images, tmp_path):
    (image, *_), _ = val_images
    folder = tmp_path / os.fsdecode(b"\xff")
    model_of("ONNX", checkpoint).parent.rename(folder)
    for model in (checkpoint.rename(tmp_path / os.fsdecode(b"\xfe")), folder, folder / "model.onnx"):
        probabilities(model, [image])


def test_image_name_may_be_invalid_utf_8(checkpoint, val_images, tmp_path, capsys):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")
    shutil.copy(val_images[0][0], name)
    assert predict.main([str(checkpoint), name, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/\\udcff.jpg: class")
    table = tmp_path / "table.csv"
    assert predict.main([str(checkpoint), name, "--device", "cpu", "--csv", str(table)]) == 0
    assert capsys.readouterr().out == ""
    assert table.read_text().splitlines()[1].startswith(f"{tmp_path}/\\udcff.jpg,")


def test_csv_of_an_interrupted_command_does_not_replace_the_previous_file(
    checkpoint, val_images, tmp_path, monkeypatch
):
    def interrupted(model, paths, *args):
        assert args == (2, "cpu", 3)
        yield [(paths[0], None)], [np.ones((1, 3))]
        raise KeyboardInterrupt

    table = tmp_path / "table.csv"
    table.write_text("previous\n")
    monkeypatch.setattr(image_files, "predict_batches", interrupted)
    flags = ["--device", "cpu", "--csv", str(table), "--batch-size", "2", "--dali-num-threads", "3"]
    assert predict.main([str(checkpoint), *val_images[0], *flags]) == 130
    assert table.read_text() == "previous\n"
    assert [path.name for path in tmp_path.iterdir() if "table" in path.name] == ["table.csv"]


def test_csv_device_is_not_locked():
    with predict._csv_writer(os.devnull, []) as write:
        write([[0]])
        assert not locks.file_of(os.devnull).exists()


@contextlib.contextmanager
def closed_stdout():
    """Replace stdout by a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, contextlib.redirect_stdout(pipe):
        yield


@pytest.mark.slow
def test_csv_with_json_requires_that_stdout_is_read(exported, val_images, tmp_path, capsys):
    """If closing stdout were not an error, `... | head -1` would end the command without a message and without the
    file."""
    flags = ["--device", "cpu", "--csv", str(tmp_path / "table.csv"), "--json"]
    with closed_stdout():
        assert predict.main([str(exported), *val_images[0], *flags]) == 1
    assert capsys.readouterr().err.endswith(
        f"error: --csv {tmp_path}/table.csv: not written, because stdout was closed; read all of stdout, or remove "
        "--json\n"
    )
    assert not [path for path in tmp_path.iterdir() if "table" in path.name]


def test_closed_pipe_ends_csv_silently(exported, val_images, capsys):
    with closed_stdout():
        assert predict.main([str(exported), *val_images[0], "--device", "cpu", "--csv", "-"]) == 141
    assert "error" not in capsys.readouterr().err


@pytest.mark.slow
def test_closed_pipe_ends_predictions_of_paths_on_stdin_silently(exported, val_images):
    command = [sys.executable, "-m", "paddle_resnet.predict", exported, "-", "--device", "cpu"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        process.stdin.write("".join(f"{path}\n" for path in val_images[0]))
        process.stdin.close()
        assert "error" not in process.stderr.read()
    assert process.returncode == 141


def test_csv_quotes_line_breaks_in_image_names(checkpoint, val_images, tmp_path):
    names = [f"{tmp_path}/a{character}.jpg" for character in ("\r", "\n", "\r\n", '"', ",")]
    for name in names:
        shutil.copy(val_images[0][0], name)
    table = tmp_path / "table.csv"
    assert predict.main([str(checkpoint), *names, "--device", "cpu", "--csv", str(table)]) == 0
    with open(table, newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["image", *names]


def test_control_characters_in_image_name_are_escaped(checkpoint, val_images, tmp_path, capsys):
    name = f"{tmp_path}/a\x1b[31m\n.jpg"
    shutil.copy(val_images[0][0], name)
    assert predict.main([str(checkpoint), name, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/a\\x1b[31m\\n.jpg: class")


def test_second_process_cannot_write_to_csv_file_of_first(checkpoint, val_images, tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_text("of the first process\n")
    lock = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    arguments = [str(checkpoint), *val_images[0][:1], "--device", "cpu", "--csv", str(table)]
    with subprocess.Popen([sys.executable, "-c", lock, tmp_path / ".table.csv.lock"], **pipes) as holder:
        holder.stdout.readline()
        assert predict.main(arguments) == 2
        message = f"error: --csv {table}: in use by another process (unknown); wait until that process ends"
        assert message in capsys.readouterr().err
        assert table.read_text() == "of the first process\n"
        holder.communicate("\n")
    assert predict.main(arguments) == 0
    assert len(table.read_text().splitlines()) == 2
    assert not (tmp_path / ".table.csv.lock").exists()


def test_csv_that_another_process_wrote_during_startup_is_replaced_with_a_warning(
    checkpoint, val_images, tmp_path, capsys, monkeypatch
):
    table, claim = tmp_path / "table.csv", predict._claim_outputs
    write = partial(table.write_text, "of another process\n")
    monkeypatch.setattr(predict, "_claim_outputs", lambda *args: (claim(*args), write()))
    assert predict.main([str(checkpoint), val_images[0][0], "--device", "cpu", "--csv", str(table)]) == 0
    assert f"warning: {table}: replaces the file that another process wrote" in capsys.readouterr().err
    assert len(table.read_text().splitlines()) == 2
