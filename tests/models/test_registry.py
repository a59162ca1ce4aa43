"""Each network of the registry, with few blocks and tiny images, in train.py, export and predict."""

import importlib.util
import pickle

import numpy as np
import pytest

from conftest import NHWC, assert_two_of_four, phase
from few_blocks import QUICK, with_few_blocks
from paddle_resnet import export, models, predict

# The networks in COVERED differ from tested networks only in the number of blocks or channels.
COVERED = {"ResNet34", "ResNet101", "ResNet152", "EfficientNet_Lite0", "EfficientNet_Lite1"}
FLAGS = ["--device", "cpu", *NHWC, "--kernels", "native", "--print-interval", "1", "--lr", "0.01"]
FLAGS += ["--dropout", "0.2", "--interp", "linear", "--asp", "--prune-model"]
DROP_PATH = ["--drop-path", "0.2"]


ARCHS = [name for name in models.MODELS if name not in COVERED]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in QUICK else pytest.mark.soak) for a in ARCHS])
def test_network_in_every_command(run_train, losses_with_a_resume, fake, register, photos, tmp_path, capsys, arch):
    register(arch, with_few_blocks(models.MODELS[arch]))
    has_residual_branches = not arch.startswith("PPLCNet")
    flags = ["--model-arch-name", arch, *FLAGS, *(DROP_PATH if has_residual_branches else [])]
    # Captured and uncaptured steps have the same losses: the resumed part of the run does not capture its steps.
    expected, actual = losses_with_a_resume("0_1", *flags, changes=["--cuda-graph", "false"])
    assert fake.made[0].launches > 0
    assert actual == expected
    checkpoint = tmp_path / "uninterrupted/0"
    [line, *_] = [line for line in capsys.readouterr().out.splitlines() if "layers are 2:4 sparse" in line]
    assert_pruned(pickle.loads((checkpoint / "tiny.pdparams").read_bytes()), line)

    # Evaluations in NCHW with Paddle's kernels and in NHWC with custom kernels have the same loss.
    evaluation = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint, "--image-shape", "4,32,32"]
    code, report = run_train("--model-arch-name", arch, *evaluation)
    assert code == 0
    assert phase(report, [], "val.")["loss"] == pytest.approx(expected[0, "val"], rel=1e-4)

    has_onnx = importlib.util.find_spec("onnxruntime") is not None
    export.export(checkpoint, tmp_path / "exported", onnx=has_onnx, verify=photos)
    image = next((photos / "val").glob("*/*.jpg"))
    assert predict.main([str(tmp_path / "exported"), str(image), "--device", "cpu"]) == 0


def assert_pruned(parameters, line):
    """Check that filters with at least 4 input channels are 2:4 sparse, and that a log line lists all other filters."""
    filters = {name: array for name, array in parameters.items() if np.ndim(array) == 4 and name.endswith(".w_0")}
    sparse = {name for name, array in filters.items() if array.shape[1] >= 4}
    assert sparse
    for name in sparse:
        assert_two_of_four(filters[name])
    dense = line.split("dense: ")[1]
    assert [name for name in filters if name not in sparse and name.removesuffix(".w_0") not in dense] == []


@pytest.mark.soak
@pytest.mark.parametrize("arch", [*QUICK, "PPHGNetV2_B0"])
def test_two_processes_keep_the_same_parameters(launch, tmp_path, arch):
    report, _ = launch(2, "--model-arch-name", arch, *FLAGS, "--few-blocks", "--batch-size", "4")
    assert phase(report, [0], "train.")["images"] == 24
    first, second = (np.load(tmp_path / f"job0/epoch0_rank{rank}.npz") for rank in range(2))
    assert len(first.files) > 50
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
