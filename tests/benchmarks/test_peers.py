"""Tests of the parts of benchmarks/peers.py that require neither PyTorch nor a GPU."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT
from paddle_resnet import config

spec = importlib.util.spec_from_file_location("peers", ROOT / "benchmarks" / "peers.py")
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)


def parse(*arguments):
    return peers.parse_args([*map(str, arguments)])


@pytest.mark.parametrize("task", sorted({task for task, _, _ in peers.ROWS.values()}))
def test_benchmark_command_uses_known_flags(environment, tmp_path, task):
    environment(CUDA_VISIBLE_DEVICES="5,3,2")
    args = parse("run", "--image-root", "photos", "--batch-size", "64", "--steps", "7", "--threads", "3")
    python, *launcher = peers.own_command(args, "ResNet18", task, tmp_path / "report.json")
    start = launcher.index("train.py")
    launcher, arguments = launcher[:start], launcher[start + 1 :]
    launch_on_two = ["-m", "paddle.distributed.launch", "--log_dir", str(tmp_path / "logs"), "--gpus", "5,3"]
    assert launcher == (launch_on_two if "two GPUs" in task else [])
    flags = config.parse_args(arguments)
    assert flags.benchmark and flags.amp and flags.amp_level == "O2" and flags.data_layout == "NHWC"
    assert (flags.batch_size, flags.benchmark_steps, flags.benchmark_warmup_steps) == (64, 7, 50)
    assert flags.model_arch_name == "ResNet18"
    assert flags.run_scope.trains == task.startswith("train")
    assert (flags.data_format == "synthetic") == ("synthetic" in task)
    if "synthetic" not in task:
        assert (flags.image_root, flags.dali_num_threads) == ("photos", 3)


@pytest.mark.slow
def test_measurement_reads_report_or_error(run_train, tmp_path):
    """Read the report of a real benchmark, and the error message of a failed run."""
    flags = ["--benchmark", "--benchmark-steps", "2", "--benchmark-warmup-steps", "1", "--run-scope", "train_only"]
    code, entries = run_train(*flags)
    assert code == 0
    measured = peers.read_report(tmp_path / "report.json")
    assert measured["ips"] == entries[-1]["data"]["train.ips"]
    assert measured["first_step_at"] < float(entries[-1]["timestamp"])
    assert "paddle" in measured["versions"]
    args = parse("run", "--image-root", tmp_path / "nowhere", "--device", "cpu")
    result = peers.measure(args, "ResNet50", "train, JPEG: paddle_resnet", tmp_path)
    assert result["returncode"] == 2
    assert f"{tmp_path}/nowhere" in result["error"]


def test_table_contains_medians_and_ratios():
    task = "train, synthetic"
    own, eager, compiled = (f"{task}: {who}" for who in ("paddle_resnet", "PyTorch eager", "PyTorch compile"))
    results = [
        {"row": own, "ips": ips, "first_step_s": ips / 1e3, "peak_memory_allocated_mib": ips - 1e3}
        for ips in (6e3, 7.2e3, 6.8e3)
    ]
    results += [{"row": compiled, "ips": ips, "first_step_s": s} for ips, s in ((800.0, 40.0), (850.0, 20.0))]
    results += [{"row": compiled, "error": "out of memory"}, {"row": eager, "error": "no torch"}]
    results += [{"row": own, "arch": "GhostNet", "ips": 70.0, "first_step_s": 9.0}]
    assert peers.table(results).splitlines()[2:] == [
        f"| ResNet50 | {task} | paddle_resnet | 3 | 6,800 | 6,000 to 7,200 | 1.000 x | 5,800 | 6.8 (6.0 to 7.2) |",
        f"| ResNet50 | {task} | PyTorch eager | 0 (1 failed) |  |  |  |  |  |",
        f"| ResNet50 | {task} | PyTorch compile | 2 (1 failed) | 825 | 800 to 850 | 8.242 x |  | 30.0 (20.0 to 40.0) |",
        f"| GhostNet | {task} | paddle_resnet | 1 | 70 | 70 to 70 | 1.000 x |  | 9.0 (9.0 to 9.0) |",
    ]


@pytest.fixture
def process(monkeypatch):
    """Replace the processes of measurements. Return the (command, environment) of each process, and its result."""
    calls, done = [], SimpleNamespace(returncode=0, stderr="", stdout='a line\n{"ips": 5, "first_step_at": 107}\n')

    def run(command, env, **_):
        calls.append((command, env))
        return done

    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setattr(peers.time, "time", lambda: 100)
    return calls, done


def test_baseline_uses_same_settings_and_its_own_environment(environment, process, tmp_path):
    calls, _ = process
    environment(PYTHONPATH="p", LD_LIBRARY_PATH="l")
    flags = ["--image-root", "photos", "--batch-size", "64", "--torch-pythonpath", "extra"]
    for more, path, libraries in (([], "extra:p", "l"), (["--torch-env-clear"], "extra", None)):
        args = parse("run", "--torch-python", "python3", *flags, *more)
        result = peers.measure(args, "ResNet18", "train, JPEG: PyTorch compile", tmp_path)
        command, environment = calls[-1]
        assert result == {"ips": 5, "first_step_s": 7, "command": command}
        arguments = ["worker", "train, JPEG", "--arch", "ResNet18", "--compile", "default", "--image-root=photos"]
        assert command[:9] == ["python3", peers.__file__, *arguments]
        assert {"--device=gpu", "--batch-size=64", "--crop-size=224", "--warmup-steps=50"} < set(command)
        assert (environment["PYTHONPATH"], environment.get("LD_LIBRARY_PATH")) == (path, libraries)
    args = parse("run", "--torch-python", "python3")
    peers.measure(args, "ResNet18", "train, synthetic, two GPUs: PyTorch compile", tmp_path)
    command, environment = calls[-1]
    assert command[:4] == ["python3", "-m", "torch.distributed.run", "--standalone"] and "None" not in str(command)
    assert environment["PYTHONPATH"] == "p"


def test_jax_runs_its_own_script_with_its_own_interpreter(environment, process, tmp_path):
    calls, _ = process
    environment(PYTHONPATH=None)
    args = parse("run", "--image-root", "photos", "--jax-python", "python3.12", "--torch-pythonpath", "t")
    peers.measure(args, "ResNet50", "train, synthetic: JAX", tmp_path)
    (python, script, *arguments), environment = calls[-1]
    assert (python, script, environment["PYTHONPATH"]) == ("python3.12", str(ROOT / "benchmarks/jax_resnet50.py"), "")
    flags = set(re.findall(r'add_argument\("(--[a-z-]+)"', Path(script).read_text()))
    passed = dict(zip(["--arch", *(flag.partition("=")[0] for flag in arguments[2:])], arguments[1:], strict=True))
    assert set(passed) == flags and passed["--arch"] == "ResNet50"


def test_failed_measurement_returns_the_last_lines(process, tmp_path):
    _, done = process
    args, done.returncode = parse("run"), 3
    (tmp_path / "report.json").write_text("of an earlier process")
    for stdout, stderr, error in (("a\n", "b\n" * 50 + "c\n", "c"), ("a\nd\n", "", "d"), ("", "", "no message")):
        done.stdout, done.stderr = stdout, stderr
        result = peers.measure(args, "ResNet18", "train, synthetic: paddle_resnet", tmp_path)
        assert (result["error"], result["returncode"], result["stderr"][-1]) == (error, 3, error)
        assert len(result["stderr"]) <= 40
    assert not (tmp_path / "report.json").exists()


def test_own_command_on_the_cpu_has_two_processes_and_float32(tmp_path):
    args = parse("run", "--device", "cpu")
    command = peers.own_command(args, "ResNet18", "train, synthetic, two GPUs", tmp_path / "report.json")
    assert command[command.index("--nproc_per_node") + 1] == "2" and not {"--gpus", "--amp"} & set(command)


def test_rows_alternate_and_results_are_appended(monkeypatch, tmp_path):
    rows = [f"evaluate, synthetic: {who}" for who in ("paddle_resnet", "PyTorch compile")]
    results = {rows[0]: {"ips": 5.0, "first_step_s": 1.0}, rows[1]: {"error": "x"}}
    monkeypatch.setattr(peers, "measure", lambda args, arch, row, folder: results[row])
    output = tmp_path / "peers.jsonl"
    args = parse("run", "--rows", "evaluate, synthetic", "--repeats", "2", "--output", output)
    assert [peers.run(args) for _ in range(2)] == [1, 1]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    order = [(repetition, "ResNet50", row) for repetition in (0, 1) for row in rows]
    assert [(line["repetition"], line["arch"], line["row"]) for line in lines] == order * 2


def test_zero_warmup_steps_is_an_error():
    with pytest.raises(SystemExit):
        parse("run", "--warmup-steps", "0")


def test_missing_image_root_is_an_error_before_measuring():
    args = parse("run", "--rows", "train, synthetic: paddle_resnet", "--rows", "JPEG: paddle_resnet")
    with pytest.raises(SystemExit, match="--image-root"):
        peers.run(args)


def test_some_rows_are_chosen_only_explicitly():
    for word in ("two GPUs", "JAX", "reduce-overhead", "max-autotune"):
        rows = [row for row in peers.ROWS if word in row]
        assert rows and not set(rows) & set(peers.choose(None))
        assert not set(rows) & set(peers.choose(["paddle_resnet", "compile", "synthetic"]))
        assert peers.choose([word]) == rows
    assert peers.choose(["train, synthetic: paddle_resnet", "two GPUs: paddle_resnet"]) == [
        "train, synthetic: paddle_resnet",
        "train, synthetic, two GPUs: paddle_resnet",
        "train, JPEG, two GPUs: paddle_resnet",
    ]
