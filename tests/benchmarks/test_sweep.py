"""Tests of benchmarks/sweep.py on the CPU."""

import importlib.util
import json
import os

import pytest

from conftest import ROOT

spec = importlib.util.spec_from_file_location("sweep", ROOT / "benchmarks/sweep.py")
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)

FLAGS = (
    "--device cpu --data-format synthetic --model-arch-name ResNet18 --num-of-class 3 --image-shape 3,32,32 "
    "--crop-size 32 --batch-size 2 --benchmark-steps 2 --benchmark-warmup-steps 1"
)


def test_row_sets_flags_and_environment():
    row = sweep.parse_row("two: GPUS=0,1 NCCL_ALGO=Ring --lr 0.1 --row-like a=b")
    assert row == ("two", {"GPUS": "0,1", "NCCL_ALGO": "Ring"}, ["--lr", "0.1", "--row-like", "a=b"])
    arguments, environment = sweep.command(row, ["--seed", "3"], "python", "/tmp")
    assert arguments[:5] == ["python", "-m", "paddle.distributed.launch", "--gpus", "0,1"]
    # Flags of a row override the common flags.
    assert arguments.index("train.py") < arguments.index("--seed") < arguments.index("--lr")
    assert environment["NCCL_ALGO"] == "Ring" and environment["PATH"] == os.environ["PATH"]
    arguments, environment = sweep.command(sweep.parse_row("second: GPUS=1"), [], "python", "/tmp")
    assert arguments[:2] == ["python", "train.py"] and environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_row_without_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--row", "--cuda-graph false"])
    assert "has no colon" in capsys.readouterr().err


def test_duplicate_row_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--row", "a: --seed 1", "--row", "a: --seed 2"])
    assert "names are not unique" in capsys.readouterr().err


def test_measurement_is_stopped_after_limit_s(capsys):
    assert sweep.main(["--repeats", "1", "--flags", FLAGS, "--row", "a:", "--limit-s", "0.1"]) == 1
    assert "not finished after 0.1 s" in capsys.readouterr().out


@pytest.mark.soak
def test_rows_alternate_and_failures_are_counted(tmp_path, capsys):
    rows = ["--row", "plain:", "--row", "refused: --batch-size none"]
    output = tmp_path / "runs.jsonl"
    assert sweep.main(["--repeats", "2", "--flags", FLAGS, *rows, "--output", str(output)]) == 1
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["row"] for result in results] == ["plain", "refused"] * 2
    assert "--batch-size" in results[1]["error"]
    lines = capsys.readouterr().out.splitlines()
    plain, refused = (line.split(" | ") for line in lines[-2:])
    assert refused[:2] == ["| refused", "0 (2 failed)"] and not any(refused[2:-1])
    assert plain[1] == "2"
    low, high = sorted(results[i]["ips"] for i in (0, 2))
    assert plain[2:4] == [f"{(low + high) / 2:,.0f}", f"{low:,.0f} to {high:,.0f}"]
    assert plain[7] == f"{results[0]['loss']:.7g}"  # both rows report the same loss


@pytest.mark.soak
def test_evaluation_can_be_measured(capsys):
    assert sweep.main(["--repeats", "1", "--flags", FLAGS, "--row", "evaluation: --run-scope eval_only"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(" | ")[:2] == ["| evaluation", "1"]
