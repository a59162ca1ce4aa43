"""The GPU that the driver reports, and the warning about a CPU build of Paddle on a machine with a GPU. A fake driver
replaces pynvml."""

import sys
from types import SimpleNamespace

import paddle
import pytest

from conftest import ROOT
from paddle_resnet import export, lr_find, predict, train
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
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
        nvmlDeviceGetCount=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_driver_reports_first_gpu(nvml):
    assert driver.gpu() == ("NVIDIA RTX 0", (8, 9))
    assert driver.facts()[1:] == (2, (12, 4))


@pytest.mark.parametrize("fault", ["no package", "nvmlInit", "nvmlDeviceGetHandleByIndex", "hidden", "-1"])
def test_machine_without_usable_gpu_has_none(nvml, environment, uninstalled, fault):
    if fault == "no package":
        uninstalled("pynvml")
    elif fault in ("hidden", "-1"):
        environment(CUDA_VISIBLE_DEVICES=fault.replace("hidden", ""))
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


@pytest.fixture
def cpu_build(nvml, monkeypatch):
    """Simulate a CPU build of Paddle on a machine with two GPUs, and return the simulated driver."""
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: False)
    return nvml


def test_cpu_build_on_machine_with_gpu_is_a_warning(cpu_build, capsys):
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
    cpu_build.nvmlInit = fail
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == ""


def test_gpu_without_any_build_is_a_warning(cpu_build, capsys):
    cpu_build.nvmlDeviceGetCudaComputeCapability = lambda handle: (5, 2)
    assert driver.gpu() is None
    assert gpus.resolve("auto", 0, False) == gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == (
        "warning: GPU (NVIDIA RTX 0): not used, because no supported build of Paddle has kernels for compute "
        "capability 5.2; use a GPU with compute capability 6.1 or higher\n"
    )
    assert gpus.problem(0).endswith("a CPU build; use --device cpu, or use a GPU with compute capability 6.1 or higher")


@pytest.fixture
def gpu_build(nvml, monkeypatch):
    """Simulate a build of Paddle for CUDA 12.6 that detects no GPU, although the driver reports two."""
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(paddle.version, "cuda", lambda: "12.6")
    return nvml


UNKNOWN = ": the reason is unknown; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
HIDES = "hides all GPUs; unset it, or use numbers of GPUs (0 to 1), or use --device cpu"


@pytest.mark.parametrize(
    ("version", "visible", "cause"),
    [
        (
            11040,
            None,
            ": the driver supports CUDA up to 11.4, but this build needs 12.6; update the driver, or install ",
        ),
        (12000, None, UNKNOWN),
        (12060, "2", f": CUDA_VISIBLE_DEVICES=2 {HIDES}"),
        (12060, "gpu0", f": CUDA_VISIBLE_DEVICES=gpu0 {HIDES}"),
        (12060, "1,0", UNKNOWN),
        (12060, "GPU-8932f937", UNKNOWN),
    ],
)
def test_gpu_that_a_gpu_build_does_not_detect_is_a_warning(gpu_build, environment, capsys, version, visible, cause):
    gpu_build.nvmlSystemGetCudaDriverVersion = lambda: version
    if visible is not None:
        environment(CUDA_VISIBLE_DEVICES=visible)
    problem = f"Paddle {paddle.__version__} does not detect GPU 0{cause}"
    assert gpus.resolve("auto", 0, False) == gpus.resolve("auto", 0, False) == "cpu"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --device auto: using the CPU instead of the GPU: {problem}")
    with pytest.raises(UsageError) as e:
        gpus.resolve("gpu", 0, False)
    assert str(e.value).startswith(f"--device gpu: {problem}")
    assert gpus.resolve("cpu", 0, False) == "cpu" and capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", ["nvmlInit", "", "-1"])
def test_gpu_build_without_a_gpu_is_no_warning(gpu_build, environment, capsys, fault):
    """The machine has no driver, or the user has turned its GPUs off."""
    if fault == "nvmlInit":
        gpu_build.nvmlInit = fail
    else:
        environment(CUDA_VISIBLE_DEVICES=fault)
    assert gpus.resolve("auto", 0, False) == "cpu"
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="tests a CPU build of Paddle")
@pytest.mark.parametrize(
    ("main", "device", "count"), [(train.main, [], 1), (train.main, ["--device", "cpu"], 0), (lr_find.main, [], 1)]
)
def test_run_warns_of_cpu_build_at_startup(nvml, tmp_path, capsys, main, device, count):
    # The run ends soon, because the checkpoint does not exist.
    flags = ["--image-shape", "3,32,32", "--data-format", "synthetic", "--from-pretrained-params", "nowhere"]
    assert main([*flags, *device, "--output-dir", str(tmp_path / "output")]) == 2
    warning = "the GPU (NVIDIA RTX 0) is not used; install a GPU build with make venv PADDLE=2.6.2"
    assert capsys.readouterr().err.count(warning) == count


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="tests a CPU build of Paddle")
def test_predict_and_export_warn_of_cpu_build(nvml, tmp_path, capsys):
    for main, arguments in ((predict.main, []), (predict.main, ["--device", "cpu"]), (export.main, [])):
        gpus.warn_of_cpu_build.cache_clear()
        images = str(ROOT / "train.py") if main is predict.main else str(tmp_path / "exported")
        assert main([str(tmp_path / "nowhere"), images, *arguments]) == 2
        assert ("the GPU (NVIDIA RTX 0) is not used" in capsys.readouterr().err) == (not arguments)
