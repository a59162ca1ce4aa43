import os
import sys
from types import SimpleNamespace

import pytest

from paddle_resnet.utils import affinity, logger


class NVMLError(Exception):
    pass


CORES_OF_GPU = {0: {0, 1, 2, 3}, 1: {3, 4, 64, 128}, 2: {5}}
UUIDS = {"GPU-aaaa": 0, "GPU-bbbb": 1}


class Bindings(list):
    error = None

    def bind(self, pid, cores):
        if self.error:
            raise self.error
        self.append((pid, cores))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Simulate a container in which os.cpu_count() returns 8, but processes may use cores 0, 1, 3, 4, 70 and 128.
    Return a list to which each binding is added. Its attribute `error` is the error of the next bindings."""
    bound = Bindings()
    monkeypatch.setattr(logger, "_quiet", False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0, 1, 3, 4, 70, 128}}.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", bound.bind)
    return bound


@pytest.fixture(autouse=True)
def nvml(monkeypatch):
    """Replace pynvml with a fake driver that has three GPUs."""

    def gpu(known, key):
        if key not in known:
            raise NVMLError(f"no GPU {key}")
        return known[key]

    def core_words(handle, count):
        assert count == 3
        return [sum(1 << core - 64 * i for core in CORES_OF_GPU[handle] if core // 64 == i) for i in range(count)]

    state = SimpleNamespace(open=0)
    module = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: setattr(state, "open", state.open + 1),
        nvmlShutdown=lambda: setattr(state, "open", state.open - 1),
        nvmlDeviceGetHandleByIndex=lambda index: gpu({i: i for i in CORES_OF_GPU}, index),
        nvmlDeviceGetHandleByUUID=lambda uuid: gpu(UUIDS, uuid),
        nvmlDeviceGetCpuAffinity=core_words,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    yield module
    assert state.open == 0  # NVML is always shut down


def fail(error):
    def call(*args):
        raise error

    return call


@pytest.mark.parametrize(("local_gpu", "cores"), [(0, {0, 1, 3}), (1, {3, 4, 128})])
def test_process_is_bound_to_its_cores_local_to_gpu(machine, capsys, local_gpu, cores):
    affinity.bind_to_gpu(local_gpu)
    assert machine == [(0, cores)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("visible", "local_gpu", "cores"),
    [
        (" ", 1, {3, 4, 128}),
        ("1", 0, {3, 4, 128}),
        ("2,1,0", 2, {0, 1, 3}),
        ("0, 1", 1, {3, 4, 128}),
        ("GPU-bbbb", 0, {3, 4, 128}),
        ("GPU-bbbb,GPU-aaaa", 1, {0, 1, 3}),
    ],
)
def test_gpu_index_is_relative_to_cuda_visible_devices(machine, environment, visible, local_gpu, cores):
    environment(CUDA_VISIBLE_DEVICES=visible)
    affinity.bind_to_gpu(local_gpu)
    assert machine == [(0, cores)]


def test_process_without_local_cores_logs_a_warning(machine, capsys):
    affinity.bind_to_gpu(2)
    assert machine == []
    assert (
        "warning: --enable-cpu-affinity: the affinity is unchanged, because none of the allowed cores is near GPU 2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("visible", "local_gpu"), [("", 3), ("0", 1), ("7", 0), ("GPU-none", 0), ("-1", 0), ("²", 0)], ids=str
)
def test_unknown_gpu_logs_a_warning(machine, environment, capsys, visible, local_gpu):
    environment(CUDA_VISIBLE_DEVICES=visible)
    affinity.bind_to_gpu(local_gpu)
    assert machine == []
    assert f"the affinity is unchanged, because the cores near GPU {local_gpu} cannot be" in capsys.readouterr().err


def test_missing_pynvml_logs_a_warning(machine, uninstalled, capsys):
    uninstalled("pynvml")
    affinity.bind_to_gpu(0)
    assert machine == []
    assert (
        "warning: --enable-cpu-affinity: the affinity is unchanged, because nvidia-ml-py is not installed"
        in capsys.readouterr().err
    )


def test_missing_driver_logs_a_warning(machine, nvml, capsys):
    nvml.nvmlInit = fail(NVMLError("Driver Not Loaded"))
    affinity.bind_to_gpu(0)
    assert machine == []
    assert "NVML is not available (Driver Not Loaded)" in capsys.readouterr().err


def test_missing_core_list_logs_a_warning(machine, nvml, capsys):
    nvml.nvmlDeviceGetCpuAffinity = fail(NVMLError("Not Supported"))
    affinity.bind_to_gpu(0)
    assert machine == []
    assert "GPU 0 cannot be determined or used (Not Supported)" in capsys.readouterr().err


def test_permission_error_logs_a_warning(machine, capsys):
    machine.error = PermissionError(1, "Operation not permitted")
    affinity.bind_to_gpu(0)
    assert "Operation not permitted" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "is_enabled"), [("gpu", True), ("gpu", False), ("cpu", True)])
def test_only_processes_with_a_gpu_are_bound(monkeypatch, device, is_enabled):
    from paddle_resnet import phases

    bound = []
    monkeypatch.setattr(phases.resolution, "resolve_device", lambda args: None)
    monkeypatch.setattr(phases, "bind_to_gpu", bound.append)
    phases.Run(SimpleNamespace(device=device, enable_cpu_affinity=is_enabled)).start()
    assert bool(bound) == (device == "gpu" and is_enabled)
