"""Networks that are defined in a user's file."""

import importlib.util
import json
import os
import re
import shutil
import sys

import pytest

from conftest import ROOT, assert_one_error
from helpers import NETWORK_EXAMPLE
from paddle_resnet import export, models, predict
from paddle_resnet.checkpoints import contents, restore
from paddle_resnet.job import agreement
from paddle_resnet.models import user_file
from paddle_resnet.serving import benchmark, onnx_writer
from paddle_resnet.utils.errors import UsageError

# Source code of a network file. Executing the code creates a file with the suffix .executed.
MARKED = f"{NETWORK_EXAMPLE}\nfrom pathlib import Path\nPath(__file__).with_suffix('.executed').touch()\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write the example network of docs/networks.md to the current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(MARKED)
    return path


@pytest.fixture
def own_run(run_train):
    """Return a variant of run_train that trains the network in net.py."""
    return lambda *flags: run_train("--model-arch-name", "net.py:Net", *flags)


@pytest.fixture
def trained(once, own_run, file, tmp_path):
    """Train the network in net.py for one epoch and return a copy of the folder of the run. All tests share the run."""

    def make(folder):
        assert own_run("--output-dir", folder)[0] == 0
        file.with_suffix(".executed").unlink()

    return shutil.copytree(once("own_network", make) / "Net", tmp_path / "output/Net", symlinks=True)


@pytest.mark.slow
def test_example_supports_resume_evaluation_export_and_prediction(
    own_run, file, trained, photos, tmp_path, capsys, monkeypatch
):
    meta = contents.read_meta(trained / "0")
    assert meta["arguments"]["model_arch_name"] == "net.py:Net"
    assert meta["network_sha256"] == user_file.sha256("net.py:Net")
    assert own_run("--resume", "--epochs", "2")[0] == 0
    assert (trained / "1").is_dir()
    assert own_run("--run-scope", "eval_only", "--from-checkpoint", trained)[0] == 0
    assert "the file has changed" not in capsys.readouterr().out

    onnx = ["--onnx"] * (importlib.util.find_spec("onnxruntime") is not None)
    flags = ["--model-arch-name", "net.py:Net", "--verify", str(photos), "--triton", *onnx]
    assert export.main([str(trained / "1"), "exported", *flags]) == 0
    assert json.loads((tmp_path / "exported/model.json").read_text())["arch"] == "Net"
    image = str(next((photos / "val").glob("*/*.jpg")))
    file.unlink()  # the export contains the network, so it does not need the file
    capsys.readouterr()
    assert predict.main(["exported", image, "--device", "cpu"]) == 0
    from_export = capsys.readouterr().out
    file.write_text(MARKED)
    assert predict.main([str(trained / "1"), image, "--device", "cpu", "--model-arch-name", "net.py:Net"]) == 0
    assert capsys.readouterr().out == from_export
    assert predict.main(["exported", image, "--device", "cpu", "--model-arch-name", "net.py:Net"]) == 2
    assert "exported; remove the flag" in capsys.readouterr().err
    monkeypatch.setattr(benchmark, "MIN_S", 0)
    monkeypatch.setattr(onnx_writer, "require", unavailable)
    flags = ["--benchmark", "--benchmark-batches", "1", "--device", "cpu", "--model-arch-name", "net.py:Net"]
    assert predict.main([str(trained / "1"), *flags]) == 0
    assert "onnxruntime: not measured: onnx is not installed" in capsys.readouterr().err


def unavailable(package):
    raise UsageError(f"{package} is not installed")


@pytest.mark.slow
def test_resume_inside_epoch_is_bit_identical(file, losses_with_a_resume):
    expected, actual = losses_with_a_resume("0_2", "--model-arch-name", "net.py:Net", "--print-interval", "1")
    assert actual == expected


def test_checkpoint_alone_never_executes_file(run_train, file, trained, tmp_path, capsys):
    forget()
    image = ROOT / "docs/data_way.svg"
    starts = [
        # The command fails, because the checkpoint does not match the network Tiny.
        lambda: run_train("--model-arch-name", "Tiny", "--from-checkpoint", trained)[0],
        lambda: export.main([str(trained / "0"), str(tmp_path / "exported")]),
        lambda: predict.main([str(trained / "0"), str(image), "--device", "cpu"]),
    ]
    assert [start() for start in starts] == [2, 2, 2]
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    remedy = "from a file, which is imported only if a flag specifies it; add --model-arch-name net.py:Net if you trust"
    assert [remedy in line for line in errors] == [False, True, True], errors
    assert not (tmp_path / "net.executed").exists()


def test_flag_chooses_the_file_of_heat_maps_and_exports(file, trained, photo_paths, tmp_path, capsys):
    """The file can have moved since the training run. Its network has no names of timm."""
    file.rename("moved.py")
    forget()
    flags = ["--model-arch-name", "moved.py:Net"]
    images = [photo_paths[0], "--device", "cpu", *flags, "--heat-map", "maps", photo_paths[1]]
    assert predict.main([str(trained), *images]) == 0
    assert len(list((tmp_path / "maps").iterdir())) == 2
    assert export.main([str(trained), "exported", *flags, "--safetensors"]) == 0
    with open("exported/model.safetensors", "rb") as tensors:
        header = json.loads(tensors.read(int.from_bytes(tensors.read(8), "little")))
    assert header["__metadata__"] == {"format": "np", "network": "paddle_resnet.Net"}


@pytest.mark.parametrize(
    "flags",
    [
        "--run-scope eval_only --from-checkpoint output/Net",
        "--from-checkpoint output/Net/0 --last-epoch-of-checkpoint auto --epochs 2",
        "--from-pretrained-params output/Net",
        "--resume --from-pretrained-params output/Net",
    ],
)
def test_training_requires_flag(run_train, file, trained, tmp_path, capsys, flags):
    forget()
    from paddle_resnet import train

    size = "--image-shape 3,32,32 --device cpu --batch-size 8 --warmup-epochs 0 --output-dir elsewhere"
    photos = json.loads((trained / "0/meta.json").read_text())["arguments"]["image_root"]
    assert train.main([*size.split(), "--image-root", photos, *flags.split()]) == 2
    assert_one_error(capsys.readouterr().err, [": its network net.py:Net is from a file", "add --model"])
    assert not (tmp_path / "net.executed").exists()


def forget():
    """Remove imported network files from sys.modules, so that Python executes the files again on their next use."""
    for name in [name for name in sys.modules if name.startswith(user_file.__name__ + "_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_changed_or_moved_file_resumes(run_train, own_run, file, trained, tmp_path, capsys):
    moved = tmp_path / "elsewhere.py"
    file.rename(moved)
    capsys.readouterr()
    assert run_train("--model-arch-name", f"{moved}:Net", "--resume", "--epochs", "2")[0] == 0
    output = capsys.readouterr()
    assert "--model-arch-name" not in output.err and "the file has changed" not in output.out + output.err
    moved.write_text(MARKED + "# a comment\n")
    assert run_train("--model-arch-name", f"{moved}:Net", "--resume", "--epochs", "3")[0] == 0
    output = capsys.readouterr()
    assert f"elsewhere.py:Net: the file has changed since the training of {trained}/1" in output.out + output.err
    meta = contents.read_meta(trained / "0")
    assert restore.recorded_flags(trained / "0", meta, f"{moved}:Other").model_arch_name == "net.py:Net"
    moved.write_text(MARKED.replace("32", "48"))
    assert run_train("--model-arch-name", f"{moved}:Net", "--resume", "--epochs", "4")[0] == 2
    assert_one_error(capsys.readouterr().err, ["does not match the model"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Net(", "class Other(", ["net.py does not define Net; use a name that it defines (Other)"]),
        ("super().__init__()", "super().__init__(", ["line 7: '(' was never closed; correct net.py"]),
        ("class Net(", "return\nclass Net(", ["line 5: 'return' outside function; correct net.py"]),
        (
            "class Net(",
            "import nowhere_at_all\nclass Net(",
            ["line 5: ModuleNotFoundError: No module named 'nowhere_a"],
        ),
        ("class Net(", "raise SystemExit(3)\nclass Net(", ["line 5: SystemExit: 3; correct net.py"]),
        (", in_channels, data", ", data", ["TypeError: ", "unexpected keyword argument 'in_channels'; correct net.py"]),
        ("self.stem = ", "self.stem = stem = 1 / 0 or ", ["line 8: ZeroDivisionError: division by zero; correct"]),
        ("self.stem(images)", "self.head(images)", ["line 14: AttributeError: ", "'head'"]),
        (
            "self.first, self.last = ",
            "self.begin, self.last = ",
            ["needs an attribute `first`", "3 input channels; set it to"],
        ),
        ("self.first, self.last = self.stem", "self.first, self.last = self.body", ["needs an attribute `first`"]),
        (
            "self.first, self.last = ",
            "self.first, self.end = ",
            ["needs an attribute `last`", "set it to the classifier"],
        ),
        (
            "(32, num_classes)",
            "(32, num_classes, bias_attr=False)",
            ["needs an attribute `last`, a Linear with bias"],
        ),
        (".flatten(1))", ".flatten(1)), images", ["is a tuple; return logits [N, 3]"]),
        ("(32, num_classes)", "(32, 5)", ["has the shape [-1, 5]; return logits [N, 3]"]),
        (".flatten(1))", ".flatten(1)).unsqueeze(1)", ["has the shape [-1, 1, 3]; return logits [N, 3]"]),
        ("class Net(nn.Layer):", "def Net(**_): return 3\nclass Other(nn.Layer):", ["returns int; return a paddle.nn"]),
    ],
    ids=lambda value: value[0][:24] if isinstance(value, list) else "",
)
def test_faults_in_file_are_reported(own_run, file, capsys, old, new, message):
    assert old in NETWORK_EXAMPLE
    file.write_text(NETWORK_EXAMPLE.replace(old, new))
    code, _ = own_run("--dry-run")
    assert code == 2
    assert_one_error(capsys.readouterr().err, ["--model-arch-name net.py:Net: ", *message])


def test_file_that_failed_is_executed_again(file):
    # Messages of Paddle's errors contain the name of the error.
    for error, message in (("SystemExit(3)", "SystemExit: 3"), ('ValueError("ValueError: a b")', "ValueError: a b")):
        file.write_text(NETWORK_EXAMPLE.replace("class Net(", f"raise {error}\nclass Net("))
        for _ in range(2):
            with pytest.raises(UsageError, match=f"net.py:Net: line 5: {message}; correct net.py"):
                user_file.load("net.py:Net")


def test_file_is_executed_once_at_each_path(file, tmp_path):
    (tmp_path / "copy.py").write_text(MARKED)
    first, again, copy = (user_file.load(f"{path}:Net")[0] for path in ("net.py", file, "copy.py"))
    assert first is again and first is not copy


def test_errors_of_registered_networks_are_unchanged():
    with pytest.raises(ZeroDivisionError), user_file.errors("ResNet50"):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("nowhere.py:Net", "nowhere.py cannot be read (No such file or directory); use a readable file"),
        ("folder.py:Net", "folder.py cannot be read (Is a directory); use a readable file"),
        ("\0.py:Net", "\0.py cannot be read (embedded null byte); use a readable file"),
        ("net.py", "unknown network; use one of ResNet18, "),
        ("net.py:../Net", "unknown network; use one of ResNet18, "),
        ("net.py:N\u00e9", "unknown network; use one of ResNet18, "),
        ("net.py:ConvBM", "net.py does not define ConvBM; use a name that it defines (Net)"),
    ],
)
def test_invalid_names_are_rejected(file, tmp_path, arch, problem):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"--model-arch-name {arch}: {problem}")):
        models.registered_name(arch)
    assert not (tmp_path / "net.executed").exists()


@pytest.mark.parametrize(
    "text", ["Net = 3", "from somewhere import Net", "def Net(): pass", "try:\n import x as Net\nexcept E: Net = 1"]
)
def test_names_are_found_without_executing_file(tmp_path, text):
    (tmp_path / "net.py").write_text(f"raise 1\n{text}\n")
    assert models.registered_name(f"{tmp_path}/net.py:Net") == f"{tmp_path}/net.py:Net"


def test_file_is_compared_between_processes(file, parse, monkeypatch):
    compared = []
    monkeypatch.setattr(agreement, "_compare", compared.append)
    args = parse("--model-arch-name", "net.py:Net")
    for text in (NETWORK_EXAMPLE, NETWORK_EXAMPLE, MARKED):
        file.write_text(text)
        agreement.check_start(args.as_entry())
    first, same, other = compared
    assert first == same
    assert [name for name in first if first[name] != other[name]] == ["file of --model-arch-name (hash)"]


def test_huge_file_is_not_read(file):
    os.truncate("net.py", 2**24 + 1)
    with pytest.raises(
        UsageError, match=r"net.py cannot be read \(16777217 bytes, limit 16777216\); use a readable file"
    ):
        models.registered_name("net.py:Net")


@pytest.mark.parametrize("source", ["-" * 100_000 + "1", "x" + ".a" * 50_000], ids=["parser", "compiler"])
def test_deep_nesting_is_an_error(tmp_path, source):
    path = tmp_path / "net.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=f"{path}:Net: expressions are nested too deeply for Python; correct {path}"):
        user_file.check(f"{path}:Net")
