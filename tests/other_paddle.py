"""Check that two versions of Paddle are compatible by exchanging a checkpoint, the losses of the next steps, and an
exported model.

`python tests/other_paddle.py write FOLDER` writes a checkpoint, losses and an exported model with the installed version
of Paddle, and `python tests/other_paddle.py check FOLDER` compares the files with the results of the installed version.
.ci/run checks both directions. The folders tests/goldens/paddle_* were also written by this script.
"""
# ruff: noqa: I001

import json
import pickle
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
import numpy as np
import paddle
from paddle import static

from paddle_resnet import config
from paddle_resnet import resolution
from conftest import TINY
from paddle_resnet import models, program
from paddle_resnet.checkpoints import variables
from paddle_resnet.models.resnet import BottleneckBlock, ResNet
from helpers import predict

STEPS = 3
RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.standard_normal((2 * STEPS, 8, 3, 32, 32)).astype("float32")
LABELS = RANDOM.randint(0, 3, (2 * STEPS, 8, 1))
FILES = ["tiny.pdparams", "tiny.pdopt"]


class Run:
    """A training program of a network with one block of width 2."""

    def __init__(self):
        paddle.enable_static()
        models.MODELS["Speck"] = partial(ResNet, BottleneckBlock, (1,), width=2)
        self.args = config.parse_args([*TINY, "--model-arch-name", "Speck"])
        resolution.resolve_device(self.args)
        self.args.apply(resolution.Loader)
        program.start_fleet(self.args)
        paddle.seed(0)
        self.main, startup, self._exe = static.Program(), static.Program(), static.Executor(paddle.CPUPlace())
        self._fetchs, self._scheduler, *_ = program.build(self.args, self.main, startup, 2 * STEPS)
        self._exe.run(startup)
        self._compiled = program.compile_prog(self.args, self.main)

    def train(self, first, count=STEPS):
        """Train for `count` steps, starting with step `first`, and return their losses."""
        losses = []
        for step in range(first, first + count):
            self._scheduler.step(step)
            feed = {"data": IMAGES[step], "label": LABELS[step]}
            losses.append(self._exe.run(self._compiled, feed, [self._fetchs["loss"][0]])[0].item())
        return losses

    def export(self, folder):
        evaluation = static.Program()
        with static.program_guard(evaluation, static.Program()), paddle.utils.unique_name.guard():
            images = static.data("images", [None, 3, 32, 32], "float32")
            network = models.build_model("Speck", self.args.num_of_class, 3, "NCHW")
            network.eval()
            out = paddle.nn.functional.softmax(network(images))
        static.save_inference_model(str(folder / "model"), [images], [out], self._exe, program=evaluation)
        remove_call_stacks(folder / "model.pdmodel")


def remove_call_stacks(path):
    """Remove the call stacks from the model, because they contain paths of the machine that exported it."""
    model = static.deserialize_program(path.read_bytes())
    for op in model.global_block().ops:
        if op.has_attr("op_callstack"):
            op._remove_attr("op_callstack")
    path.write_bytes(model.desc.serialize_to_string())


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    run = Run()
    first = run.train(0)
    for name, state in zip(FILES, variables.snapshot(run.main), strict=True):
        (folder / name).write_bytes(pickle.dumps(state, protocol=4))
    run.export(folder)
    expected = {"losses": first + run.train(STEPS), "probabilities": _predict(folder).tolist()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def check(folders, rtol):
    """Compare four results: the losses of training from the same seed, the loaded parameters, the losses of training
    that starts with these parameters, and the probabilities.

    Args:
        folders: folders that `write` has filled.
        rtol: relative tolerance of losses and probabilities. Parameters must be bit-identical.
    """
    run = Run()
    first = run.train(0)
    for folder in folders:
        expected = json.loads((folder / "expected.json").read_text())
        np.testing.assert_allclose(first, expected["losses"][:STEPS], rtol=rtol)
        variables.load(run.args.part(variables.LoadOptions), folder, run.main, paddle.CPUPlace())
        states = [pickle.loads((folder / name).read_bytes()) for name in FILES]
        for name, array in (states[0] | states[1]).items():
            np.testing.assert_array_equal(variables.read(name).reshape(array.shape), array, err_msg=name)
        np.testing.assert_allclose(run.train(STEPS), expected["losses"][STEPS:], rtol=rtol)
        np.testing.assert_allclose(_predict(folder), expected["probabilities"], rtol=rtol)


def _predict(folder):
    with tempfile.TemporaryDirectory() as copy:
        for path in folder.glob("model.*"):
            shutil.copy(path, copy)
        return predict(Path(copy), IMAGES[0])


if __name__ == "__main__":
    action, path = sys.argv[1:]
    write(Path(path)) if action == "write" else check([Path(path)], rtol=1e-5)
