import csv
import io
import json
import os
import shutil
import sys

import numpy as np
import pytest

from conftest import NHWC, phase
from paddle_resnet import export, inference, predict

KINDS = ["checkpoint", "export", "uint8 export", "ONNX", "uint8 ONNX"]


@pytest.fixture
def val_images(photos):
    """Paths and labels of the validation images."""
    paths = sorted(map(str, (photos / "val").glob("*/*.jpg")))
    return paths, [int(path.split("/class")[1][0]) for path in paths]


@pytest.fixture
def model_of(tmp_path):
    """The path of a model of a kind, made from a checkpoint."""

    def model_of(kind, checkpoint):
        if kind == "checkpoint":
            return checkpoint
        if "ONNX" in kind:
            pytest.importorskip("onnx")
            pytest.importorskip("onnxruntime")
        export.export(checkpoint, tmp_path / "exported", onnx="ONNX" in kind, uint8="uint8" in kind)
        return tmp_path / "exported" / ("model.onnx" if "ONNX" in kind else "")

    return model_of


def probabilities(path, images, **options):
    found = list(predict.predict(inference.open_model(path, "cpu"), images, **options))
    assert [image for image, *_ in found] == images
    return np.stack([row for _, row, _ in found])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_evaluation(run_train, tmp_path, model_of, val_images, kind):
    """With a foreign preprocessing and four channels, which come from the checkpoint."""
    preprocessing = ["--resize-short", "44", "--interp", "cubic", "--normalize-mean", "0.5,0.4,0.3"]
    code, report = run_train(*preprocessing, *NHWC)
    expected = phase(report, [0], "val.")
    paths, labels = val_images
    found = probabilities(model_of(kind, tmp_path / "output/Tiny/0"), paths, batch_size=5)
    assert found.shape == (23, 3)
    assert np.mean(found.argmax(axis=1) == labels) == expected["top1"]
    losses = -np.log(found[np.arange(23), labels].astype(np.float64))
    assert losses.mean() == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("size", ["0", "-1", "4.5", "many"])
def test_batch_size_that_is_none_is_refused(tmp_path, capsys, size):
    with pytest.raises(SystemExit) as e:
        predict.main([str(tmp_path), str(tmp_path), "--batch-size", size])
    assert e.value.code == 2
    assert f"--batch-size: '{size}' is not a whole number of at least 1" in capsys.readouterr().err


def test_the_batch_size_does_not_matter(checkpoint, val_images):
    paths, _ = val_images
    for batch_size in (1, 23, 64):
        found = probabilities(checkpoint, paths, batch_size=batch_size)
        np.testing.assert_allclose(found, probabilities(checkpoint, paths, batch_size=8), atol=1e-6)


def test_files_that_are_no_images_cost_only_themselves(checkpoint, photos, tmp_path, capsys):
    folder = tmp_path / "mixed"
    folder.mkdir()
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
    gone, text = str(tmp_path / "gone.jpg"), str(folder / "notes.txt")
    assert predict.main([str(checkpoint), str(folder), gone, text, "--batch-size", "4", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == [str(folder / f"{i}.jpg") for i in range(9)]
    bad = [*(str(folder / name) for name in ("0text.jpg", "5empty.jpg", "cut.jpg")), gone, text]
    assert [line.split(" ", 1)[0] for line in err.splitlines() if line.startswith(str(tmp_path))] == bad
    assert f"{gone} cannot be read (No such file or directory)" in err
    assert f"{folder / 'cut.jpg'} has damaged image data" in err
    assert f"{folder / '0text.jpg'} is not in an image format that DALI knows" in err


def test_output_for_people_and_programs(checkpoint, val_images, tmp_path, capsys, monkeypatch):
    paths = val_images[0][:3]
    expected = probabilities(checkpoint, paths)
    best = expected.argsort(axis=1)[:, ::-1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{path}\n" for path in paths)))
    table = tmp_path / "table.csv"
    assert predict.main([str(checkpoint), "-", "--csv", str(table), "--json", "--device", "cpu"]) == 0
    for i, line in enumerate(capsys.readouterr().out.splitlines()):
        found = json.loads(line)
        assert found["image"] == paths[i]
        assert [entry["label"] for entry in found["top"]] == best[i].tolist()
        assert [entry["class"] for entry in found["top"]] == [f"class{label}" for label in best[i]]
        assert [entry["probability"] for entry in found["top"]] == expected[i][best[i]].tolist()
    rows = list(csv.reader(table.open()))
    assert rows[0][:3] == ["image", "class1", "probability1"]
    for i, row in enumerate(rows[1:]):
        assert row[:2] == [paths[i], f"class{best[i][0]}"]
        assert float(row[2]) == pytest.approx(expected[i].max(), abs=1e-7)
    assert predict.main([str(checkpoint), *paths, "--csv", "-", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == table.read_text()
    assert predict.main([str(checkpoint), *paths, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{paths[0]}: class{best[0][0]} {expected[0].max():.4f}, class")


def test_top_five_of_many_classes():
    found = predict.top(np.array([0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.1]), list("abcdef"))
    assert [label for label, *_ in found] == [1, 3, 0, 2, 4]
    assert found[0] == (1, "b", 0.3)


def test_benchmark_names_every_engine(checkpoint, model_of, capsys, monkeypatch):
    monkeypatch.setattr(predict, "BENCHMARK_S", 0)
    command = ["--benchmark", "--benchmark-batches", "1,3", "--device", "cpu"]
    assert predict.main([str(checkpoint), *command]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for batch in ("1", "3"):
        engines = [line[1] for line in lines if line[0] == batch]
        assert engines in (["Executor", "paddle.inference"], ["Executor", "paddle.inference", "onnxruntime"])
        assert all(float(number) > 0 for line in lines if line[0] == batch for number in line[2:])
    assert predict.main([str(model_of("export", checkpoint)), *command]) == 0
    assert "paddle.inference" in (out := capsys.readouterr().out) and "Executor" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{root}/nowhere", "{image}"], "nowhere does not exist: name the folder of a checkpoint or of an export"),
        (["{root}", "{image}"], "meta.json cannot be read"),
        (["{run}", "{image}"], "holds the checkpoints 0: name one of them"),
        (["{run}/0"], "no images are named: give files, folders, or -"),
        (["{run}/0", "{root}/empty"], "empty holds no images (.jpg,"),
        (["{run}/0", "{image}", "--json", "--csv", "-"], "--json and --csv - both write to stdout"),
        (["{run}/0", "{image}", "--benchmark"], "--benchmark measures the network on random images"),
        (["{run}/0", "{image}", "--csv", "{root}/none/x.csv"], "x.csv cannot be written (No such file or directory)"),
        (["{root}/broken", "{image}"], "model.json does not describe a network of this program"),
    ],
)
def test_mistakes_are_sentences(checkpoint, val_images, tmp_path, capsys, words, says):
    (tmp_path / "run").mkdir()
    checkpoint.rename(tmp_path / "run/0")
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken/model.json").write_text('{"input": {}}')
    places = {"root": tmp_path, "run": tmp_path / "run", "image": val_images[0][0]}
    assert predict.main([word.format(**places) for word in words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and says in errors[0]


def test_an_interrupt_is_a_sentence(checkpoint, val_images, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(inference, "open_model", interrupt)
    assert predict.main([str(checkpoint), val_images[0][0]]) == 130
    assert capsys.readouterr().err == "paddle_resnet.predict: interrupted\n"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.pdmodel").write_bytes(b"no model"), "model.pdmodel has 8 bytes instead of "),
        (lambda folder: flip_a_bit(folder / "model.pdiparams"), "pdiparams has another sha256 than model.json says"),
        (lambda folder: (folder / "model.pdiparams").unlink(), "is damaged: model.pdiparams cannot be read"),
        (lambda folder: change(folder / "model.json", files={}), "json has no size and sha256 of model.pdmodel"),
        (lambda folder: change(folder / "model.json", classes=["a"] * 4), "names more classes than the network has"),
    ],
    ids=["model", "a bit of the weights", "no weights", "no list", "classes"],
)
def test_damaged_export_is_a_sentence(checkpoint, model_of, val_images, capsys, damage, says):
    folder = model_of("export", checkpoint)
    damage(folder)
    assert predict.main([str(folder), val_images[0][0], "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_damaged_onnx_file_is_a_sentence(val_images, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    model = tmp_path / "model.onnx"
    for data, says in ((None, "does not exist"), (b"no model", "cannot be opened by onnxruntime")):
        if data:
            model.write_bytes(data)
        assert predict.main([str(model), val_images[0][0], "--device", "cpu"]) == 2
        assert f"{model} {says}" in capsys.readouterr().err


def test_image_whose_name_is_not_utf_8_is_named(checkpoint, val_images, tmp_path, capsys):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")
    shutil.copy(val_images[0][0], name)
    assert predict.main([str(checkpoint), name, "--device", "cpu"]) == 1
    assert f"{tmp_path}/\\udcff.jpg has a name that is not valid UTF-8: rename it\n" in capsys.readouterr().err


def test_name_of_an_image_does_not_steer_the_terminal(checkpoint, val_images, tmp_path, capsys):
    name = f"{tmp_path}/a\x1b[31m\n.jpg"
    shutil.copy(val_images[0][0], name)
    assert predict.main([str(checkpoint), name, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/a\\x1b[31m\\n.jpg: class")
