"""Runs with --ema: evaluation, checkpoints, resuming, export and prediction."""

import pickle
import shutil

import numpy as np
import pytest

from conftest import NHWC, assert_one_error, assert_sparse, losses, phase
from paddle_resnet import export
from paddle_resnet.checkpoints import contents, folders
from paddle_resnet.serving import networks

pytestmark = pytest.mark.usefixtures("one_block")

FLAGS = ["--epochs", "3", "--print-interval", "1", "--lr", "0.2"]
EMA = [*FLAGS, "--ema", "0.8"]
RESULTS = ("loss", "top1", "top5")
EPOCH = "Tiny/2"


@pytest.fixture
def averaged(once, run_train, tmp_path):
    """Copy the output folder of a run with --ema; return the copy and the report entries. All tests share one such
    run."""

    def make(folder):
        code, report = run_train(*EMA, "--output-dir", folder / "output")
        assert code == 0
        (folder / "report").write_bytes(pickle.dumps(report))

    folder = once("averaged", make)
    shutil.copytree(folder / "output", tmp_path / "averaged", symlinks=True)
    return tmp_path / "averaged", pickle.loads((folder / "report").read_bytes())


def weights(folder, ending="pdema"):
    return pickle.loads((folder / f"tiny.{ending}").read_bytes())


def results(report, step=()):
    return {name: phase(report, list(step), "val.")[name] for name in RESULTS}


@pytest.mark.slow
def test_ema_does_not_change_training_losses(run_train, averaged):
    code, report = run_train(*FLAGS)
    assert code == 0
    expected, result = losses(report), losses(averaged[1])
    for key in expected:
        assert (result[key] == expected[key]) == (key[1] != "val"), key


def test_evaluation_uses_ema_weights_unless_path_is_a_weights_file(run_train, averaged, capsys):
    folder, report = averaged
    assert weights(folder / EPOCH).keys() == weights(folder / EPOCH, "pdparams").keys()
    for epoch in range(3):
        start = ["--from-checkpoint", folder / f"Tiny/{epoch}"]
        code, evaluated = run_train("--run-scope", "eval_only", *start)
        assert code == 0
        assert results(evaluated) == results(report, [epoch])
    message = f"--from-checkpoint {folder / EPOCH}: loading the averaged weights, tiny.pdema"
    assert message in capsys.readouterr().out
    for path, is_averaged in ((folder / EPOCH, True), (folder / EPOCH / "tiny.pdparams", False)):
        _, evaluated = run_train("--run-scope", "eval_only", "--from-pretrained-params", path)
        assert (results(evaluated) == results(report, [2])) == is_averaged


def test_best_checkpoint_is_selected_by_accuracy_of_ema_weights(averaged):
    folder, report = averaged
    top1 = [results(report, [epoch])["top1"] for epoch in range(3)]
    assert (folder / "Tiny/best").resolve().name == str(top1.index(max(top1)))
    assert contents.verify(folder / EPOCH)["best"]["top1"] == max(top1)


def test_prediction_and_export_use_ema_weights(averaged, photos, tmp_path, capsys):
    folder = averaged[0] / EPOCH
    expected = weights(folder)
    network = networks.load_checkpoint(folder)
    assert "loading the averaged weights" in capsys.readouterr().err
    for name in ("conv2d_2.w_0", "batch_norm_2.w_1", "linear_0.b_0"):
        np.testing.assert_array_equal(network.parameter(name), expected[name])
    # --verify compares the metrics of the export with those recorded in the checkpoint.
    export.export(folder, tmp_path / "export", verify=photos)


@pytest.mark.parametrize("kernels", [pytest.param("paddle", marks=pytest.mark.soak), "native"])
@pytest.mark.parametrize(
    "stop", [{"train_step": 4}, {"eval_step": 1}, pytest.param({"train_step": 6}, marks=pytest.mark.soak)]
)
def test_resume_with_ema_is_bit_identical(run_train, once, stop_before, tmp_path, stop, kernels):
    flags = [*FLAGS, *(NHWC if kernels == "native" else []), "--kernels", kernels]
    ema = ["--ema", "0.8"]

    def make(folder):
        code, report = run_train(*flags, *ema, "--output-dir", folder)
        assert code == 0
        (folder / "losses").write_bytes(pickle.dumps(losses(report)))

    uninterrupted = once(f"averaged_{kernels}", make)
    stop_before(**stop)
    code, report = run_train(*flags, *ema, "--resume")
    assert code == 75
    first = losses(report)
    stop_before()
    code, report = run_train(*flags, "--resume")  # --resume inherits --ema
    assert code == 0
    assert first | losses(report) == pickle.loads((uninterrupted / "losses").read_bytes())
    expected = weights(uninterrupted / EPOCH)
    for name, value in weights(tmp_path / "output" / EPOCH).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_resume_adds_or_removes_ema_weights(run_train, tmp_path, capsys):
    """If the checkpoint contains no EMA weights, --ema initializes them with the checkpoint's weights. With --ema None,
    the run ignores EMA weights in the checkpoint."""
    assert run_train(*FLAGS, "--epochs", "1")[0] == 0
    output = tmp_path / "output/Tiny"
    assert not list(output.glob("*/*.pdema"))
    before = weights(output / "0", "pdparams")
    assert run_train(*FLAGS, "--epochs", "2", "--resume", "--ema", "0.999")[0] == 0
    assert f"--ema: EMA weights initialized with the weights of {output}/0" in capsys.readouterr().out
    averaged, raw = weights(output / "1"), weights(output / "1", "pdparams")
    changes = [np.abs(state["linear_0.w_0"] - before["linear_0.w_0"]).max() for state in (averaged, raw)]
    assert 0 < changes[0] < changes[1]
    assert run_train(*FLAGS, "--resume", "--ema", "None")[0] == 0
    assert "--ema None (was 0.999)" in capsys.readouterr().err
    assert sorted(path.name for path in (output / "2").iterdir()) == ["meta.json", "tiny.pdopt", "tiny.pdparams"]


@pytest.mark.parametrize("is_pretrained", [False, True])
def test_ema_weights_of_sparse_network_are_sparse(run_train, averaged, tmp_path, is_pretrained):
    """The EMA weights of a dense checkpoint are replaced with the pruned weights, which do not change with a learning
    rate of 0."""
    start = ["--from-checkpoint", averaged[0] / EPOCH, "--lr", "0", "--epochs", "1"] if is_pretrained else []
    assert run_train(*EMA, "--asp", "--prune-model", *start)[0] == 0
    folder = tmp_path / "output" / ("Tiny/0" if is_pretrained else EPOCH)
    result = weights(folder)
    assert_sparse(result)
    if is_pretrained:
        raw = weights(folder, "pdparams")
        for name in ("conv2d_2.w_0", "linear_0.b_0"):
            np.testing.assert_allclose(result[name], raw[name], rtol=1e-5)


def test_fine_tuning_starts_from_ema_weights(run_train, averaged, tmp_path):
    start = ["--from-pretrained-params", averaged[0] / EPOCH]
    assert run_train("--lr", "0", "--warmup-epochs", "0", "--run-scope", "train_only", *start)[0] == 0
    result, expected = weights(tmp_path / "output/Tiny/0", "pdparams"), weights(averaged[0] / EPOCH)
    for name in ("conv2d_2.w_0", "linear_0.b_0"):
        np.testing.assert_array_equal(result[name], expected[name])


def test_benchmark_accepts_ema(run_train):
    steps = ["--benchmark-steps", "2", "--benchmark-warmup-steps", "1"]
    for scope in ("train_only", "eval_only"):
        assert run_train("--ema", "0.9", "--benchmark", *steps, "--run-scope", scope)[0] == 0


@pytest.mark.parametrize("damage", ["changed", "different network"])
def test_damaged_ema_weights_are_rejected(run_train, averaged, tmp_path, capsys, damage):
    folder = averaged[0] / "Tiny"
    content = b"not a pickle"
    if damage == "different network":
        state = weights(folder / "2")
        del state["conv2d_2.w_0"]
        content = pickle.dumps(state, protocol=4)
        meta = contents.verify(folder / "2")
        names = meta.pop("files")
        files = {name: lambda f, name=name: f.write((folder / "2" / name).read_bytes()) for name in names}
        files["tiny.pdema"] = lambda f: f.write(content)
        folder = folders.commit(tmp_path / "wrong", "2", files, meta).parent
    else:
        (folder / "2/tiny.pdema").write_bytes(content)
    problem = "tiny.pdema has" if damage == "changed" else "does not match the model (variables: 1 missing)"
    starts = [["--run-scope", "eval_only", "--from-checkpoint", folder / "2"]]
    starts.append(["--epochs", "4", "--from-checkpoint", folder, "--last-epoch-of-checkpoint", "2"])
    for start in starts:
        assert run_train(*start)[0] == 2
        assert_one_error(capsys.readouterr().err, [problem])
