import json
import os
import re
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT
from paddle_resnet import export
from paddle_resnet import predict as predict_command
from paddle_resnet.serving import (
    inference,
    preprocessing,
    verification,
    writers,
)
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def checkpoint(one_block, checkpoint):
    return checkpoint


def test_float16_network_of_paddle_requires_a_gpu(checkpoint, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inference, "resolve_device", lambda device: "cpu")
    half = tmp_path / "half"
    assert export.main([str(checkpoint), str(half), "--precision", "float16", "--verify", str(photos)]) == 2
    problem = "--precision float16 requires a GPU, and Paddle cannot use one; remove --verify, or export on a machine"
    assert f"--verify {photos}: {problem}" in capsys.readouterr().err
    flags = ["--precision", "float16", "--int8", "--calibrate", str(photos)]
    assert export.main([str(checkpoint), str(half), *flags]) == 2
    assert "--precision float16: not supported with --int8; remove one of the flags" in capsys.readouterr().err
    assert not half.exists()
    devices = []
    with monkeypatch.context() as patch:
        patch.setattr(inference, "resolve_device", lambda device: "gpu")
        patch.setattr(verification, "verify", lambda network, folder, root, device, *_: devices.append((root, device)))
        patch.setattr(verification, "verify_recorded", lambda *arguments: None)
        assert export.main([str(checkpoint), str(half), "--precision", "float16", "--verify", str(photos)]) == 0
    assert devices == [(str(photos), "gpu")] and not (half / "model.onnx").exists()
    for flags in (["x.jpg"], ["--benchmark"], ["x.jpg", "--precision", "float32"]):
        assert predict_command.main([str(half), *flags]) == 2
        message = f"{half}: Paddle Inference runs this float16 model only on a GPU; use --device gpu, or export"
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_flags_that_a_network_trained_with_qat_does_not_support(trained, photos, tmp_path):
    """tests/components/test_quantization.py tests the exports that are supported for networks trained with --qat."""
    checkpoint, _ = trained("--qat")
    for options, message in (
        ({"int8": "tensorrt", "calibration": export.Calibration(photos)}, "--calibrate .*: .* already has activation"),
        (
            {"onnx": True, "precision": "float16"},
            "--precision float16: not supported with --onnx for a checkpoint trained",
        ),
        ({"safetensors": True}, "--safetensors: .* was trained with --qat, and the file cannot contain its"),
    ):
        with pytest.raises(UsageError, match=f"^{message}"):
            export.export(checkpoint, tmp_path / "exported", **options)
    export.export(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported/model.onnx").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--int8"], "--int8: requires training images to determine activation ranges; add --calibrate"),
        (["--calibrate", "DATA"], "--calibrate DATA: requires --int8; add it"),
        (["--int8-engine", "tensorrt"], "--int8-engine tensorrt: requires --int8; add it"),
        (["--int8", "--calibration-images", "9"], "--calibration-images 9: requires --calibrate IMAGE_ROOT; add it"),
        (["--int8", "--calibrate", "nowhere"], "--calibrate nowhere: not a folder"),
        (
            ["--int8", "--calibrate", "tests"],
            "--calibrate tests: has no train/; put the class folders into train/",
        ),
        (["--verify", "nowhere"], "--verify nowhere: not a folder"),
        (["--temperature", "auto"], "--temperature auto: requires a data set, whose validation images determine"),
        (["--verify", "tests"], "--verify tests: has no val/; put the class folders into val/, or use"),
    ],
)
def test_unusable_flags_are_an_error(checkpoint, tmp_path, capsys, flags, message):
    assert export.main([str(checkpoint), str(tmp_path / "exported"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c", "o", "--calibration-images", "0"], "--calibration-images: 0 is too small; use a whole number from 1"),
        (
            ["c", "o", "--calibration-method", "entropy"],
            "--calibration-method: 'entropy' is not supported in version 0.2.0 or later; remove the flag",
        ),
        (["c", "o", "--int8-engine", "paddle"], "--int8-engine: invalid choice: 'paddle'"),
        (["c", "o", "--temperature", "2"], "--temperature: invalid choice: '2'"),
        (["c", "o", "--precision", "int8"], "--precision: invalid choice: 'int8'"),
        (["c", "o", "--calibrate", ""], "--calibrate: '' is an empty path"),
        (["c", "o", "--verify", ""], "--verify: '' is an empty path"),
        (["", "o"], "CHECKPOINT: '' is an empty path"),
        (["c", ""], "OUT: '' is an empty path"),
        (["c", "o", "--uint"], "--uint: unknown flag; use --uint8"),  # flags must not be abbreviated
    ],
)
def test_invalid_value_exits_with_code_2_and_an_error(capsys, arguments, message):
    assert export.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", [["--verify"], ["--int8", "--calibrate"]], ids=["verify", "calibrate"])
def test_file_list_may_contain_files_outside_with_flag(checkpoint, photos, tmp_path, capsys, command):
    """Regression test: the error recommended --allow-outside, which the export did not have."""
    if "--int8" in command:
        pytest.importorskip("onnxruntime")
    root = tmp_path / "lists"
    root.mkdir()
    for split in ("train", "val"):
        paths = sorted((photos / split).glob("*/*.jpg"))
        (root / f"{split}.txt").write_text("".join(f"{path} {path.parent.name[-1]}\n" for path in paths))
    arguments = [str(checkpoint), str(tmp_path / "exported"), *command, str(root)]
    assert export.main(arguments) == 2
    assert "is outside" in (error := capsys.readouterr().err) and "or add --allow-outside" in error
    assert export.main([*arguments, "--allow-outside"]) == 0


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_onnx_package_is_an_error(checkpoint, tmp_path, capsys, uninstalled, package):
    pytest.importorskip("onnx") if package == "onnxruntime" else None
    uninstalled(package)
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--onnx"]) == 2
    error = capsys.readouterr().err
    assert f"{package}: cannot be imported, but is required for ONNX" in error
    assert "pip install -r requirements-onnx.txt" in error
    assert not (tmp_path / "exported").exists()


def test_export_folder_contains_model_and_standalone_script(checkpoint, photos, tmp_path, monkeypatch):
    """All files are flushed to the disk before the folder appears, and the rename of the folder is flushed
    afterwards."""
    synced, fsync = [], export.files.fsync
    monkeypatch.setattr(export.files, "fsync", lambda path: synced.append(path) or fsync(path))
    export.export(checkpoint, tmp_path / "new/exported")
    (tmp_path / "new/exported").rename(tmp_path / "exported")
    files = ["README.md", "labels.txt", "model.json", "model.pdiparams", "model.pdmodel", "preprocess.py"]
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == files
    assert {path.name for path in synced} >= {*files, "exported"} and synced[-1] == tmp_path / "new"
    assert (tmp_path / "exported/labels.txt").read_text() == "class0\nclass1\nclass2\n"
    # This process records no call stacks, so also check that the file has no place for them.
    model = (tmp_path / "exported/model.pdmodel").read_bytes()
    assert b"/" + ROOT.name.encode() + b"/" not in model and b"op_callstack" not in model
    description = json.loads((tmp_path / "exported/model.json").read_text())
    assert description["preprocessing"]["conventions"] == preprocessing.CONVENTIONS and description["epoch"] == 0
    (image, *_) = sorted((photos / "val").glob("*/*.jpg"))
    command = [sys.executable, "-I", tmp_path / "exported/preprocess.py", image]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{image}: float32 [1, 3, 32, 32], from -")
    assert description["evaluated"]["decoder"] == "cpu"
    line = f"recorded top1 {description['evaluated']['top1']:.6g}: validation images decoded on a "
    assert done.stdout.endswith(f"\n{line}CPU (pixels as computed here, within 2 levels)\n")
    description["evaluated"]["decoder"] = "gpu"
    text = preprocessing._decoder_text(description["evaluated"])
    assert text == f"{line}GPU (JPEG pixels within 6 levels of those here)\n"
    # A checkpoint without an evaluation, and an export from an earlier version.
    assert preprocessing._decoder_text(None) == preprocessing._decoder_text({"top1": 0.5}) == ""
    text = preprocessing._decoder_text({"map": 0.25, "loss": 1.0, "decoder": "cpu"})
    assert text.startswith("recorded mAP 0.25: validation images decoded on a CPU")


def test_interrupt_exits_with_code_130_and_leaves_no_output(checkpoint, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writers, "write_texts", interrupt)
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 130
    assert capsys.readouterr().err == "paddle_resnet.export: interrupted\n"
    assert not list(tmp_path.glob("*exported*"))


def test_partial_output_is_removed_unless_an_export_is_running(checkpoint, tmp_path):
    """The test also covers a folder whose name is not valid UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    left = folder / ".exported.partial"
    (left / "exported/model.json").mkdir(parents=True)
    lock = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", lock, left / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(UsageError, match=r"exported: in use by another process \(.*\); wait until that"):
            export.export(checkpoint, folder / "exported")
        assert (left / "exported/model.json").exists()
        other.kill()
    export.export(checkpoint, folder / "exported")
    assert [path.name for path in folder.iterdir()] == ["exported"]
    assert (folder / "exported/model.json").is_file()


def run_python_of_card(folder, image, *packages):
    """Run the code blocks of an export's model card that use none of `packages`, in the export folder, which is the
    working directory."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    chosen = [block for block in blocks if not any(re.search(rf"^(import|from) {p}\b", block, re.M) for p in packages)]
    results = []
    for block in chosen:
        shutil.copy(image, folder / "image.jpg")
        namespace = {}
        exec(block, namespace)
        results.append(namespace["probabilities"])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("uint8", [False, True])
def test_code_of_the_model_card_loads_each_network(checkpoint, photo_paths, tmp_path, work_in, import_from, uint8):
    pytest.importorskip("onnxruntime")
    export.export(checkpoint, tmp_path / "exported", onnx=True, uint8=uint8, safetensors=True)
    work_in(tmp_path / "exported")
    import_from(tmp_path / "exported", "preprocess")
    results = run_python_of_card(tmp_path / "exported", photo_paths[0], "safetensors")
    model = inference.open_paddle(tmp_path / "exported", "cpu")
    expected = model.run(preprocessing.model_input(str(photo_paths[0]), model.description))
    assert len(results) == 2
    for probabilities in results:
        np.testing.assert_allclose(np.reshape(probabilities, (1, 3)), expected, atol=1e-5)


def test_unusable_checkpoint_or_output_path_is_an_error(trained, photos, tmp_path):
    checkpoint, _ = trained("--save-interval-steps", "2", "--keep-checkpoints", "9")
    with pytest.raises(UsageError, match="nowhere: not a folder; choose the folder of a run"):
        export.export(tmp_path / "nowhere", tmp_path / "exported")
    with pytest.raises(UsageError, match=f"OUT {checkpoint}/x: would change CHECKPOINT {checkpoint}; choose a path"):
        export.export(checkpoint, checkpoint / "x")
    for options in ({"verify": photos}, {"calibration": export.Calibration(photos)}):
        with pytest.raises(UsageError, match=f"OUT {photos}/x: would change the data set {photos}; choose a path"):
            export.export(checkpoint, photos / "x", **options)
    # The folder 7 is reserved for the checkpoint of a later epoch.
    with pytest.raises(UsageError, match="/Tiny/7 is reserved for a checkpoint; choose a path outside it"):
        export.export(checkpoint, checkpoint.with_name("7"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "link").symlink_to("missing")
    for name in ("taken", "link"):
        with pytest.raises(UsageError, match=f"{name}: already exists"):
            export.export(checkpoint, tmp_path / name)
    (tmp_path / "file").write_text("")
    for name in ("file/exported", "x" * 300):
        with pytest.raises(UsageError, match="cannot be written"):
            export.export(checkpoint, tmp_path / name)
    with open(checkpoint / "tiny.pdparams", "r+b") as f:
        f.write(b"damage")
    with pytest.raises(UsageError, match=r"Tiny/0: unusable \(tiny.pdparams.* sha256"):
        export.export(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_command_prints_summary_and_rejects_existing_output(trained, tmp_path, capsys):
    checkpoint, _ = trained()
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 0
    assert "exported: Tiny, 3 classes, images [None, 3, 32, 32]" in capsys.readouterr().out
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 2
    assert "exported: already exists; remove the folder or choose a different one" in capsys.readouterr().err
    assert export.main([str(tmp_path / "exported"), str(checkpoint)]) == 2  # wrong order
    assert f"OUT {checkpoint}: already exists; choose a different folder\n" in capsys.readouterr().err


def test_full_disk_exits_with_code_2_and_leaves_no_output(checkpoint, tmp_path, capsys):
    """RLIMIT_FSIZE limits the file size, so writes fail as on a full disk."""
    export.export(checkpoint, tmp_path / "whole")
    sizes = [(tmp_path / "whole" / f"model.{ending}").stat().st_size for ending in ("pdmodel", "pdiparams")]
    assert sizes[0] < sizes[1]
    (tmp_path / "exported.partial").mkdir()  # an unrelated folder with a similar name must be kept
    for limit in (sizes[0] - 1, sizes[1] - 1):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            code = export.main([str(checkpoint), str(tmp_path / "exported")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error = capsys.readouterr().err
        assert code == 2, error
        assert "exported: cannot be written (File too large); free disk space" in error
        assert "Traceback" not in error
        assert sorted(p.name for p in tmp_path.glob("*export*")) == ["exported.partial"]
