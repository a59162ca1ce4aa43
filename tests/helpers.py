"""Functions that several test modules use: programs, loaders, checkpoints and exported models. Fixtures are in
conftest.py."""

import contextlib
import ctypes
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import paddle
from paddle import static

from conftest import ROOT, frozen
from paddle_resnet import program
from paddle_resnet.checkpoints import contents, folders
from paddle_resnet.serving import calibration

METRICS = {"loss": 1.0, "top1": 0.5, "top5": 1.0, "ips": 9.0}
META = {
    "sequence": 0,
    "run": "r",
    "epoch": 0,
    "step": None,
    "steps_each_epoch": 3,
    "lr_scheduler": {"last_epoch": 3},
    "world_size": 1,
    "classes": ["a", "b"],
    "arguments": {"lr": 0.1},
    "trained": None,
    "evaluated": None,
    "best": None,
    "seeds": {
        "python": json.dumps(random.Random(0).getstate()),
        "numpy": json.dumps(["MT19937", [1] * 624, 624, 0, 0.0]),
    },
    "ranks": [{"loader": {"step": 0, "conditions": {}}, "meters": {}}],
}
# The example files of docs/networks.md: the first file sets options of a ResNet, the second file defines a network.
OPTIONS_EXAMPLE, NETWORK_EXAMPLE = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/networks.md").read_text(), re.MULTILINE | re.DOTALL
)
# A program that locks the folder given as its first argument.
HOLDER = """
    import pathlib, sys, time
    from paddle_resnet.checkpoints import run_lock
    lock = run_lock.hold(pathlib.Path(sys.argv[1]))
    print("locked", flush=True)
    time.sleep(1000)
"""
# A program that locks a file, like an owner that writes "process 1 on x", until its stdin is closed.
OWNER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 1 on x", file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""
PREDICT = """
import gc
import os
import sys
gc.disable()  # imports are faster without garbage collection
import numpy as np
import paddle.inference as inference

folder = sys.argv[1]
config = inference.Config(f"{folder}/model.pdmodel", f"{folder}/model.pdiparams")
config.disable_gpu()
predictor = inference.create_predictor(config)
predictor.get_input_handle("images").copy_from_cpu(np.load(f"{folder}/images.npy"))
predictor.run()
(name,) = predictor.get_output_names()
assert name == sys.argv[2] or not sys.argv[2], name
np.save(f"{folder}/probabilities.npy", predictor.get_output_handle(name).copy_to_cpu())
os._exit(0)  # skip the destructors of Paddle's libraries, which take half a second
"""


def build(args, is_train=True, steps=10, seed=0, is_plain=False):
    """Build a program with newly initialized parameters and return (compiled program, executor, fetchs, lr_scheduler,
    program). If `is_plain` is set, only Paddle compiles the program, so it does not use oneDNN."""
    args = frozen(args)
    paddle.seed(seed)
    main, startup = static.Program(), static.Program()
    fetchs, lr_scheduler, _, _ = program.build(args, main, startup, steps, is_train=is_train)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    if is_plain:
        return static.CompiledProgram(main), exe, fetchs, lr_scheduler, main
    compiled = program.compile_prog(args, main, fetchs["loss"][0].name, is_train=is_train)
    return compiled, exe, fetchs, lr_scheduler, main


def logits_with_generated_weights(network):
    """Return the logits [2, classes] of a network for weights and images that do not depend on Paddle's random numbers.

    Args:
        network: function that creates the network, for NCHW and float64.
    """
    random = np.random.RandomState(1)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        model = network()
        model.eval()
        out = model(static.data("data", [None, 3, 66, 66], dtype="float64"))
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    for parameter in main.all_parameters():
        shape = parameter.shape
        fan_in = shape[0] if len(shape) == 2 else np.prod(shape[1:])
        values = random.uniform(0.5, 1, shape) if len(shape) == 1 else random.randn(*shape) * (2 / fan_in) ** 0.5
        static.global_scope().find_var(parameter.name).get_tensor().set(values, exe.place)
    return exe.run(main, {"data": random.randn(2, 3, 66, 66)}, [out])[0]


def random_batches(count, shape=(3, 32, 32), batch=8, classes=3):
    """Return `count` random batches: [(images, labels)]."""
    generator = np.random.RandomState(0)
    return [
        (generator.randn(batch, *shape).astype("float32"), generator.randint(0, classes, (batch, 1)).astype("int64"))
        for _ in range(count)
    ]


def variable(name):
    return np.array(static.global_scope().find_var(name).get_tensor())


def epoch(loader):
    """Read one epoch and return ([images of each batch], [labels of each batch])."""
    batches = [(np.array(b[0]["data"]), np.array(b[0]["label"])) for b in loader]
    loader.reset()
    return [b[0] for b in batches], [b[1] for b in batches]


def take(loader, count):
    """Read the next `count` batches and continue across epoch boundaries."""
    batches = []
    while len(batches) < count:
        batch = next(loader, None)
        if batch is None:
            loader.reset()
        else:
            batches.append((np.array(batch[0]["data"]), np.array(batch[0]["label"])))
    return batches


@contextlib.contextmanager
def without_permission(path):
    """Forbid reading a file, or listing a folder, while the `with` block runs. If the test runs as root, this thread
    gives up the right to ignore permissions (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, see capabilities(7))."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    before, mode = (ctypes.c_uint32 * 6)(), os.stat(path).st_mode
    assert libc.capget(header, before) == 0
    reduced = (ctypes.c_uint32 * 6)(*before)
    reduced[0] &= ~(1 << 1 | 1 << 2)  # the effective capabilities
    os.chmod(path, 0o300 if os.path.isdir(path) else 0)
    assert libc.capset(header, reduced) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
        os.chmod(path, mode)


@contextlib.contextmanager
def locked(path):
    """Hold a lock file in a separate process, "process 1 on x", while the `with` block runs."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", OWNER, str(path)], **pipes) as owner:
        assert owner.stdout.readline() == "locked\n"
        yield
        owner.stdin.close()


def write_checkpoint(root, name, text="abc", sequence=0, **meta):
    """Commit a checkpoint that consists of two small files and return its folder."""
    files = {"a.pdparams": lambda f: f.write(text.encode()), "a.pdopt": lambda f: f.write(b"x" * 100)}
    return folders.commit(root, name, files, META | {"sequence": sequence, **meta})


def with_meta(checkpoint, folder, arguments=(), files=(), **meta):
    """Copy a checkpoint into a folder and return the copy, whose meta.json, recorded flags and files are changed.

    Args:
        checkpoint: folder of the checkpoint.
        folder: folder in which the copy is made.
        arguments: {name of a flag: new value}.
        files: {name of a file: new content in bytes}.
        meta: new values in meta.json.
    """
    before = contents.read_meta(checkpoint)
    data = {name: (checkpoint / name).read_bytes() for name in before["files"]} | dict(files)
    writers = {name: lambda file, content=content: file.write(content) for name, content in data.items()}
    before["arguments"] = before["arguments"] | dict(arguments)
    before = {name: value for name, value in before.items() if name not in ("format", "files", "checksum")}
    return folders.commit(folder, checkpoint.name, writers, before | meta)


def predict(folder, images, output=""):
    """Compute probabilities with Paddle Inference in a separate process. As in a deployment, the process does
    not import this project, so the project's Paddle settings do not apply."""
    np.save(folder / "images.npy", images)
    environment = {name: value for name, value in os.environ.items() if name != "FLAGS_enable_pir_api"}
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, str(folder), output],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(folder / "probabilities.npy")


def training_images(description, image_root, count):
    """Return the batches of calibration images in a network's input format."""
    drawn, _ = calibration.draw(image_root, count)
    return [batch for batch, _ in calibration._batches(description, image_root, drawn)]


_AMP = "--amp --scale-loss 128.0 --use-dynamic-loss-scaling --data-layout NHWC"
# Flags of the training scripts of NVIDIA's RN50v1.5 Paddle example (scripts/training/train_resnet50_*_DGXA100.sh).
NVIDIA_SCRIPTS = {
    "TF32_90E": "--epochs 90 --inference-dir ./inference_tf32",
    "AMP_90E": f"--epochs 90 {_AMP} --fuse-resunit --inference-dir ./inference_amp",
    "AMP_QAT_10E": "--from-pretrained-params ./output/ResNet50/89 --model-prefix resnet_50_paddle --epochs 10 "
    f"{_AMP} --qat --lr 0.00005 --inference-dir ./inference_qat",
    "AMP_ASP_90E": "--from-pretrained-params ./output/ResNet50/89/resnet_50_paddle --epochs 90 "
    f"{_AMP} --asp --prune-model --mask-algo mask_1d",
}
