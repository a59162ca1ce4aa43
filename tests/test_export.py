import json
import os
import pickle
import subprocess
import sys

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, ROOT, assert_sparse, assert_two_of_four, phase
from paddle_resnet import dali, export
from utils.errors import UsageError
from utils.mode import Mode

PREPROCESSING = [
    *("--resize-short", "44", "--interp", "cubic", "--normalize-scale", "0.01"),
    *("--normalize-mean", "0.5,0.4,0.3", "--normalize-std", "0.5,0.25,1"),
]
FLAGS = {
    "NCHW": [],
    "NHWC with four channels": NHWC,
    "ASP": ["--asp", "--prune-model"],
    "other preprocessing": PREPROCESSING,
}


@pytest.fixture
def trained(run_train, tmp_path):
    """Train an epoch; returns (checkpoint folder, its figures)."""

    def trained(*flags):
        code, report = run_train(*flags)
        assert code == 0
        return tmp_path / "output/Tiny/0", phase(report, [0], "val.")

    return trained


PREDICT = """
import sys
import numpy as np
import paddle.inference as inference

folder = sys.argv[1]
config = inference.Config(f"{folder}/model.pdmodel", f"{folder}/model.pdiparams")
config.disable_gpu()
predictor = inference.create_predictor(config)
predictor.get_input_handle("images").copy_from_cpu(np.load(f"{folder}/images.npy"))
predictor.run()
(name,) = predictor.get_output_names()
np.save(f"{folder}/probabilities.npy", predictor.get_output_handle(name).copy_to_cpu())
"""


def predict(folder, images):
    """Probabilities from Paddle Inference, in a process of its own, without what this project sets, as where models are
    deployed."""
    np.save(folder / "images.npy", images)
    environment = {name: value for name, value in os.environ.items() if name != "FLAGS_enable_pir_api"}
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, str(folder)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(folder / "probabilities.npy")


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_exported_model_scores_like_the_evaluation(trained, parse, photos, tmp_path, flags):
    checkpoint, expected = trained(*flags)
    found = export.export(checkpoint, tmp_path / "exported")
    assert found == json.loads((tmp_path / "exported/model.json").read_text())
    assert found["classes"] == ["class0", "class1", "class2"]
    assert found["evaluated"]["top1"] == expected["top1"]
    # The loader makes images as model.json says they are to be made.
    told = found["preprocessing"]
    words = ["--resize-short", told["resize_short"], "--interp", told["interp"], "--crop-size", told["center_crop"]]
    for name in ("scale", "mean", "std"):
        words.append(f"--normalize-{name}={','.join(map(str, np.atleast_1d(told[name])))}")
    args = parse("--image-root", photos, "--batch-size", 23, *words)
    batches = [batch for (batch,) in dali.build_dataloader(args, Mode.EVAL)]
    images, labels = (np.concatenate([np.array(batch[name]) for batch in batches]) for name in ("data", "label"))
    assert list(images.shape[1:]) == found["input"]["shape"][1:]
    probabilities = predict(tmp_path / "exported", images)
    assert probabilities.shape == (23, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert np.mean(probabilities.argmax(axis=1) == labels[:, 0]) == expected["top1"]
    losses = -np.log(np.take_along_axis(probabilities, labels, axis=1))
    assert losses.mean() == pytest.approx(expected["loss"], rel=1e-4)


def test_sparse_weights_stay_sparse(trained, tmp_path):
    checkpoint, _ = trained(*FLAGS["ASP"])
    params = pickle.loads((checkpoint / "tiny.pdparams").read_bytes())
    assert_sparse(params)
    export.export(checkpoint, tmp_path / "exported")
    with static.scope_guard(static.Scope()):
        program, _, _ = static.load_inference_model(
            str(tmp_path / "exported/model"), static.Executor(paddle.CPUPlace())
        )
        arrays = {
            p.name: np.array(static.global_scope().find_var(p.name).get_tensor())
            for p in program.list_vars()
            if p.persistable and p.name not in ("feed", "fetch")
        }
    assert not [name for name in arrays if "mask" in name or "velocity" in name]
    for name in params:
        if f"{name}.asp_mask" in params:
            np.testing.assert_array_equal(arrays[name], params[name])
            assert_two_of_four(arrays[name])


def test_checkpoints_that_cannot_be_exported(trained, tmp_path):
    checkpoint, _ = trained("--save-interval-steps", "2", "--keep-checkpoints", "9")
    with pytest.raises(UsageError, match="0_2 was saved after 2 steps of epoch 0"):
        export.export(checkpoint.with_name("0_2"), tmp_path / "exported")
    with pytest.raises(UsageError, match="is not a folder: name a checkpoint"):
        export.export(tmp_path / "nowhere", tmp_path / "exported")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="taken exists"):
        export.export(checkpoint, tmp_path / "taken")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        export.export(checkpoint, tmp_path / "file/exported")
    with open(checkpoint / "tiny.pdparams", "r+b") as f:
        f.write(b"damage")
    with pytest.raises(UsageError, match="Tiny/0 is damaged: tiny.pdparams has another sha256"):
        export.export(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_command(trained, tmp_path, capsys):
    checkpoint, _ = trained()
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 0
    assert "exported: Tiny, 3 classes, images [None, 3, 32, 32]" in capsys.readouterr().out
    assert export.main([str(checkpoint), str(tmp_path / "exported")]) == 2
    assert "exported exists: remove it or name another folder" in capsys.readouterr().err


EXPORT_WITH_A_LIMIT = """
import resource, sys
from functools import partial
import train
from paddle_resnet import export, models
from paddle_resnet.models.resnet import BottleneckBlock, ResNet

models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1, 1, 1, 1), width=8)
limit = int(sys.argv.pop())
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(export.main(sys.argv[1:]))
"""


def test_full_disk_is_a_sentence_and_leaves_nothing(trained, tmp_path):
    """RLIMIT_FSIZE lets every write beyond a size fail. Paddle's writer of the parameters, the largest file, does not
    tell."""
    checkpoint, _ = trained()
    export.export(checkpoint, tmp_path / "whole")
    sizes = [(tmp_path / "whole" / f"model.{ending}").stat().st_size for ending in ("pdmodel", "pdiparams")]
    assert sizes[0] < sizes[1]
    (tmp_path / "exported.partial").mkdir()  # the user's own
    for limit in (1000, sizes[1] - 1):
        command = [sys.executable, "-c", EXPORT_WITH_A_LIMIT, str(checkpoint), str(tmp_path / "exported"), str(limit)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2, done.stderr
        says = "File too large" if limit == 1000 else "model.pdiparams is incomplete"
        assert f"exported cannot be written ({says}): make room" in done.stderr
        assert "Traceback" not in done.stderr
        assert sorted(p.name for p in tmp_path.glob("*export*")) == ["exported.partial"]
