import itertools
import sys
import weakref
from types import SimpleNamespace

import pytest

from paddle_resnet import export, predict
from paddle_resnet.machine import memory
from paddle_resnet.serving import benchmark, inference, networks
from paddle_resnet.serving.model import Model
from paddle_resnet.utils.errors import RunError

pytestmark = pytest.mark.usefixtures("one_block")


@pytest.mark.parametrize(("seconds", "steps"), [(0, 5), (6 / 128, 6), (6.5 / 128, 7)])
def test_benchmark_measures_for_minimum_duration(monkeypatch, seconds, steps):
    """Each step takes 1/128 s. The first steps are not measured."""
    clock, runs = itertools.count(step=1 / 128), []
    monkeypatch.setattr(benchmark, "MIN_S", seconds)
    monkeypatch.setattr(benchmark, "perf_counter", lambda: next(clock))
    description, begun, opened = {"input": {"shape": [None, 2], "dtype": "float32"}}, [], []

    def models():
        for _ in range(2):
            assert not any(reference() for reference in opened)  # the memory of the previous model has been freed
            begun.append("open")
            model = Model("Executor", description, lambda images: [runs.append(images)])
            opened.append(weakref.ref(model))
            yield model
            del model

    monkeypatch.setattr(memory, "Peak", lambda device: begun.append(device) or SimpleNamespace(mib=lambda: 6.5))
    row, _ = benchmark.measure(models(), [4], "cpu")
    assert begun == ["cpu", "open", "cpu", "open", "cpu"]  # opening the model also takes memory
    assert len(runs) == 2 * (benchmark.WARMUP_STEPS + steps) and row["memory_mib"] == 6.5
    assert (row["batch"], row["ips"], row["latency_p50_ms"]) == (4, 4 * 128, 1000 / 128)


@pytest.mark.slow
def test_benchmark_measures_every_available_engine(checkpoint, model_of, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "MIN_S", 0)
    results, measure = [], benchmark.measure
    monkeypatch.setattr(benchmark, "measure", lambda *args: (results.append(row) or row for row in measure(*args)))
    command = ["--benchmark", "--benchmark-batches", "1,3", "--device", "cpu"]
    assert predict.main([str(checkpoint), *command]) == 0
    assert all(row["ips"] == pytest.approx(1000 * row["batch"] / row["latency_mean_ms"]) for row in results)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for batch in ("1", "3"):
        engines = [line[1] for line in lines if line[0] == batch]
        assert engines in (["Executor", "paddle.inference"], ["Executor", "paddle.inference", "onnxruntime"])
        assert all(line[2] == "float32" for line in lines if line[0] == batch)
        for p50, p90, p99, ips, mib in (map(float, line[3:]) for line in lines if line[0] == batch):
            assert 0 < p50 <= p90 <= p99 and ips > 0 and mib >= 0
    assert predict.main([str(model_of("export", checkpoint)), *command]) == 0
    out, err = capsys.readouterr()
    assert "paddle.inference" in out and "Executor" not in out
    assert (
        "warning: onnxruntime: not measured: " in err
        and "contains no model.onnx; export the checkpoint with --onnx" in err
    )


@pytest.mark.parametrize(
    ("precision", "error", "expected"),
    [
        (None, None, ["float32", "float16", "Executor", "export", "float16 export", "onnxruntime"]),
        ("float16", None, ["float16", "Executor", "export", "float16 export", "onnxruntime"]),
        ("bfloat16", None, ["bfloat16", "Executor", "export", "onnxruntime"]),
        ("float16", RunError("differs"), ["float16", "Executor", "export", "float16 export"]),
    ],
)
def test_engines_of_a_checkpoint_on_a_gpu(monkeypatch, tmp_path, capsys, precision, error, expected):
    def write(checkpoint, folder, onnx=False, model_arch_name=None, precision="float32"):
        assert (checkpoint, model_arch_name) == (tmp_path, "net")
        if onnx and error:
            raise error
        folder.mkdir()
        (folder / "model.onnx" if onnx else folder / precision).touch()

    def opened(folder, device):
        return f"float16 export {device}" if (folder / "float16").exists() else f"export {device}"

    monkeypatch.setattr(export, "export", write)
    monkeypatch.setattr(inference, "resolve_precision", lambda precision, device: "float16")

    def open_checkpoint(path, device, arch, precision, sizes, engine):
        assert (path, arch, sizes, engine) == (tmp_path, "net", [4], "Paddle")
        return f"{precision} {device}"

    def load_checkpoint(path, device, model_arch_name):
        assert (path, model_arch_name) == (tmp_path, "net")
        return SimpleNamespace(model=lambda: f"Executor {device}")

    monkeypatch.setattr(inference, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(networks, "load_checkpoint", load_checkpoint)
    monkeypatch.setattr(inference, "open_paddle", opened)
    monkeypatch.setattr(inference, "open_onnx", lambda path, device: f"onnxruntime {device}")
    engines = benchmark.engines(tmp_path, "gpu", "net", precision, [4])
    assert list(engines) == [f"{name} gpu" for name in expected]
    assert capsys.readouterr().err == (f"warning: onnxruntime: not measured: {error}\n" if error else "")


def test_benchmark_of_an_onnx_file_measures_only_onnxruntime(checkpoint, model_of, capsys):
    models = list(benchmark.engines(model_of("ONNX", checkpoint), "cpu", None, None, [32]))
    assert [model.engine for model in models] == ["onnxruntime"] and capsys.readouterr().err == ""


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "session"])
def test_benchmark_skips_unusable_engine_with_a_warning(checkpoint, tmp_path, capsys, monkeypatch, package):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    if package == "session":
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *arguments, **options: onnxruntime.gone)
    else:
        (tmp_path / "broken").mkdir()
        (tmp_path / f"broken/{package}.py").write_text("import numpy\nnumpy.gone\n")
        monkeypatch.syspath_prepend(tmp_path / "broken")
        monkeypatch.delitem(sys.modules, package)
    monkeypatch.setattr(benchmark, "MIN_S", 0)
    assert predict.main([str(checkpoint), "--benchmark", "--benchmark-batches", "1", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split()[1] for line in out.splitlines()[2:]]
    assert rows == ["Executor", "paddle.inference"]
    assert err.startswith("warning: onnxruntime: not measured: ") and "has no attribute 'gone'" in err
