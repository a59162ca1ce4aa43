"""The GPU that the driver reports, and the warning about a CPU build of Paddle on a machine with a GPU. A fake driver
replaces pynvml."""

import os
import subprocess
import sys
from types import SimpleNamespace

import paddle
import pytest

from conftest import ROOT
from paddle_resnet import export, predict
from paddle_resnet.machine import compat, driver, gpus
from paddle_resnet.utils.errors import UsageError


class NVMLError(Exception):
    pass


def fail(*arguments):
    raise NVMLError("not found")


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    module = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"NVIDIA RTX {handle}",
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpus.warn_of_cpu_build.cache_clear()
    return module


def test_driver_reports_first_gpu(nvml):
    assert driver.gpu() == ("NVIDIA RTX 0", (8, 9))


@pytest.mark.parametrize("fault", ["no package", "nvmlInit", "nvmlDeviceGetHandleByIndex", "hidden", "-1", "old"])
def test_machine_without_usable_gpu_has_none(nvml, monkeypatch, fault):
    if fault == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif fault in ("hidden", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", fault.replace("hidden", ""))
    elif fault == "old":
        nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (5, 2)
    else:
        setattr(nvml, fault, fail)
    assert driver.gpu() is None
    assert driver.remedy() == "install a GPU build of Paddle (see docs/install.md)"


# tests/test_makefile.py runs these commands.
@pytest.mark.parametrize(
    ("capability", "paddle_argument"),
    [((7, 0), "2.6.2"), ((8, 9), "2.6.2"), ((9, 0), '"3.3.1 -i URL"'), ((12, 0), '"3.3.1 -i URL"')],
)
def test_remedy_for_unsupported_paddle_keeps_the_gpu(nvml, capability, paddle_argument):
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: capability
    message = f"^Paddle 3.2.0: not supported.*; install a GPU build with make venv PADDLE={paddle_argument}"
    with pytest.raises(UsageError, match=message):
        compat.check_version("3.2.0")


def test_cpu_build_on_machine_with_gpu_is_a_warning(nvml, monkeypatch, capsys):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: False)
    assert gpus.resolve("cpu", 0, False) == "cpu"
    assert capsys.readouterr().err == ""
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == (
        f"warning: Paddle {paddle.__version__}: a CPU build, so the GPU (NVIDIA RTX 0) is not used; install a GPU "
        "build with make venv PADDLE=2.6.2\n"
    )
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == ""  # one warning per process
    gpus.warn_of_cpu_build.cache_clear()
    nvml.nvmlInit = fail
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == ""


FAKE_NVML = """
class NVMLError(Exception):
    pass

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda handle: "NVIDIA H200"
nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
"""


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="tests a CPU build of Paddle")
@pytest.mark.parametrize("command", ["train.py", "-m paddle_resnet.lr_find"])
def test_run_warns_of_cpu_build_at_startup(tmp_path, command):
    (tmp_path / "pynvml.py").write_text(FAKE_NVML)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = str(tmp_path)
    # The run ends soon, because the checkpoint does not exist.
    flags = ["--image-shape", "3,32,32", "--data-format", "synthetic", "--from-pretrained-params", "nowhere"]
    for device, count in (([], 1), (["--device", "cpu"], 0)):
        words = [sys.executable, *command.split(), *flags, *device, "--output-dir", tmp_path / "output"]
        done = subprocess.run(list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        warning = 'the GPU (NVIDIA H200) is not used; install a GPU build with make venv PADDLE="3.3.1 -i URL"'
        assert done.stderr.count(warning) == count, done.stderr


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="tests a CPU build of Paddle")
def test_predict_and_export_warn_of_cpu_build(nvml, tmp_path, capsys):
    for main, arguments in ((predict.main, []), (predict.main, ["--device", "cpu"]), (export.main, [])):
        gpus.warn_of_cpu_build.cache_clear()
        images = str(ROOT / "train.py") if main is predict.main else str(tmp_path / "exported")
        assert main([str(tmp_path / "nowhere"), images, *arguments]) == 2
        assert ("the GPU (NVIDIA RTX 0) is not used" in capsys.readouterr().err) == (not arguments)
