"""Fixtures with tiny networks and tiny images, so that tests are fast on a CPU."""
# ruff: noqa: I001

import contextlib
import errno
import fcntl
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
import numpy as np
import paddle
import pytest
from nvidia.dali._utils import dali_trace
from paddle import static
from paddle.base.layers import math_op_patch
from PIL import Image

import data_files
from layouts import image, put
from workers import gpu_labels
from paddle_resnet.data import decoding, images
from paddle_resnet.data import root as root_module
from paddle_resnet import config, export
from paddle_resnet import resolution
from paddle_resnet import train
from paddle_resnet import models, program
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import compat, gpus
from paddle_resnet.native import build as native
from paddle_resnet.passes import fusion
from paddle_resnet.serving import int8_onnx
from paddle_resnet.step import build
from paddle_resnet.step import compile as compilation
from paddle_resnet.step import cuda_graph
from paddle_resnet.tools import verify, workers
from paddle_resnet.utils import cache as cache_folder
from paddle_resnet.utils import logger, signals
from paddle_resnet.models.mobilenet_v2 import MobileNetV2
from paddle_resnet.models.resnet import BasicBlock, BottleneckBlock, ResNet

ROOT = Path(__file__).parent.parent
TINY = [
    *("--model-arch-name", "Tiny", "--model-prefix", "tiny", "--num-of-class", "3"),
    *("--image-shape", "3,32,32", "--crop-size", "32", "--resize-short", "36", "--device", "cpu"),
    *("--batch-size", "8", "--dali-num-threads", "2", "--show-config", "false", "--warmup-epochs", "0"),
    *("--lr", "0.05", "--epochs", "1", "--interp", "linear"),
]
MASK_ALGORITHMS = ["mask_1d", "mask_2d_greedy", "mask_2d_best"]
TWO_EPOCHS = ["--epochs", "2", "--batch-size", "4", "--print-interval", "1"]
NHWC = ["--data-layout", "NHWC", "--image-shape", "4,32,32"]


def tiny(*flags):
    """Return the flags of the tiny network and further flags. Flags that set the length of a run in steps replace
    --epochs."""
    network = list(TINY)
    if {"--iter-unit", "--num-iter"} & {*flags}:
        at = network.index("--epochs")
        del network[at : at + 2]
    return list(map(str, [*network, *flags]))


# Paddle stores the Python call stack in each operator that it appends. When tensors are added with `+`, Paddle also
# reads the stack for a possible warning. Under pytest, the stack has about 50 frames, and reading all of them would
# take half of the test time of this process.
paddle.base.framework.traceback = SimpleNamespace(extract_stack=list)
math_op_patch.inspect = SimpleNamespace(stack=lambda: [None, (None, "a test", 0)])

# DALI also stores the call stack in each operator, for error messages.
dali_trace.set_tracing(enabled=False)

# Before a program first runs, the Executor applies a pass that reuses memory and rebuilds all Python objects of the
# program. On a CPU, this pass would take a tenth of this process's test time. Processes that tests start still apply
# the pass.
if not paddle.is_compiled_with_cuda():
    paddle.base.executor._apply_inplace_addto_pass = lambda *args: None

# Functions that log a message once per process, or whose messages are logged once because the result is cached.
ONCE_PER_PROCESS = [
    *(gpus.warn_of_cpu_build, gpus._warn_of_undetected_gpu, compat._warn_of_newer_version),
    *(compilation._warn_of_depthwise, images.log_once, cache_folder._private_folder),
]

# Ports for the launcher. The launcher's default range overlaps with the ephemeral ports of the system, so another
# program could take a port before the processes of a job listen on it.
os.environ["PORT_RANGE"] = "12000:32000"


run_executor = static.Executor.run


class FakeGraph:
    """A fake CUDA graph. During a capture, FakeGraph stores the calls to the Executor, and replay() repeats them."""

    recording, made = None, []

    def __init__(self, place):
        self.launches, self.step = 0, None
        FakeGraph.made.append(self)

    def capture_begin(self):
        FakeGraph.recording = self

    def capture_end(self):
        FakeGraph.recording = None
        self.addresses = self.tensors()

    def tensors(self):
        """Return the addresses of the tensors that a real graph would use."""
        scope, names = static.global_scope(), [v.name for v in self.step[0]._program.list_vars() if v.persistable]
        return {name: scope.find_var(name).get_tensor()._ptr() for name in names if scope.find_var(name) is not None}

    def replay(self):
        program = self.step[0]._program
        if hasattr(program, "lr_scheduler"):  # replaying a graph does not set the learning rate
            rate = static.global_scope().find_var(program.lr_scheduler._var_name).get_tensor()
            np.testing.assert_allclose(np.asarray(rate), program.lr_scheduler(), rtol=1e-6)
        assert self.tensors() == self.addresses
        self.launches += 1
        run_executor(self.executor, *self.step, fetch_list=[])

    def reset(self):
        self.step = None


def pytest_collection_modifyitems(config, items):
    for item in items:
        # The operators for the emulated GPU are compiled for half a minute.
        if item.path.name == "test_native.py" and "emulated" in item.name:
            item.add_marker(pytest.mark.slow)
    if "soak" not in config.option.markexpr:  # -m gpu also excludes soak tests
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def pytest_collection_finish(session):
    """Collect garbage rarely, because most objects are the modules and the parts of Paddle's programs: by default, the
    collector would take a tenth of the test time of this process."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Exit without running the destructors of Paddle's and DALI's libraries. In one of two runs of the complete suite,
    the destructors crashed after all tests had passed, in a process that had created hundreds of programs and
    pipelines. Other tests check the exit code of train.py in separate processes."""
    for name, module in sys.modules.items():
        if name.startswith("__autograph_generated_file"):  # DALI deletes these files at a normal exit
            os.remove(module.__file__)
    sys.stdout.flush()
    sys.stderr.flush()
    if hasattr(config, "exit_status"):  # exit_status is set if a session has started
        os._exit(config.exit_status)


@pytest.fixture(autouse=True)
def fresh_paddle(monkeypatch):
    """Prepare each test: enable static mode, create an empty scope, register tiny networks, disable the preallocation
    of decoder buffers for ImageNet's largest images, and let INT8 exports measure the speed of a few batches."""
    paddle.enable_static()
    monkeypatch.setattr(decoding, "PREALLOCATE_WIDTH", 0)
    monkeypatch.setattr(decoding, "PREALLOCATE_HEIGHT", 0)
    monkeypatch.setattr(int8_onnx, "SPEED_S", 0)
    monkeypatch.setitem(models.MODELS, "Tiny", partial(ResNet, BottleneckBlock, (1, 1), width=8))
    # In half precision, layers with 12 or 36 channels use the kernels for 8-byte vectors.
    monkeypatch.setitem(models.MODELS, "TinyMobile", partial(MobileNetV2, stages=((1, 12, 1, 1), (3, 24, 2, 2))))
    with static.scope_guard(static.Scope()):
        yield


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Restore after each test what a command sets for the rest of its process, so that the result of a test does not
    depend on the tests before it."""
    handlers = {number: signal.getsignal(number) for number in signals.NUMBERS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signals._received = exchange._stop_at = None
    logger.setup()  # as rank 0, without a report
    compat.leave_pir()
    for function in ONCE_PER_PROCESS:
        function.cache_clear()


def frozen(args):
    """Return a frozen copy of the settings. In train.py, the settings are frozen after Fleet has started."""
    args = args.copy()
    args.finalize()
    return args


@pytest.fixture
def four_stages(monkeypatch):
    """Register the tiny network with four stages instead of two."""
    monkeypatch.setitem(models.MODELS, "Tiny", partial(ResNet, BottleneckBlock, (1, 1, 1, 1), width=8))


@pytest.fixture
def one_block(monkeypatch):
    """Register the tiny network with a single block, to speed up tests that execute complete runs."""
    monkeypatch.setitem(models.MODELS, "Tiny", partial(ResNet, BasicBlock, (1,), width=8))


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    """Return a function once(name, make), which returns a folder that all worker processes of pytest-xdist share. The
    first call with a name fills the folder by calling make(folder). Tests must not change the folder."""
    root = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        root = root.parent

    def once(name, make):
        folder = root / name
        with open(root / f"{name}.lock", "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if lock.read() != "made":
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                lock.write("made")
        return folder

    return once


@pytest.fixture
def photo_paths(photos):
    """Return the paths of the 23 validation images."""
    return sorted(map(str, (photos / "val").glob("*/*.jpg")))


@pytest.fixture(scope="session")
def photos(once):
    """Create class folders with images of color gradients and a little noise: 3 classes, 30 training and 23 validation
    JPEG images of different sizes."""

    def make(root):
        random = np.random.RandomState(0)
        for split, count in (("train", 30), ("val", 23)):
            for i in range(count):
                label = i % 3
                folder = root / split / f"class{label}"
                folder.mkdir(parents=True, exist_ok=True)
                height, width = random.randint(40, 70, 2)
                pixels = random.randint(0, 60, (height, width, 3))
                pixels[:, :, label] += np.linspace(60, 190, width).astype(int)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02d}.jpg", quality=90)

    return once("photos", make)


@pytest.fixture
def colored(tmp_path):
    """Create class folders with 9 training and 9 validation images of 3 classes with a color each, and return their
    root."""
    for split, first in (("train", 0), ("val", 10)):
        for k in range(3):
            for i in range(first, first + 3):
                put(tmp_path / f"classes/{split}/c{k}/{i}.jpg", image(k, i))
    return tmp_path / "classes"


@pytest.fixture(scope="session")
def converted(photos, once):
    """Convert the photos to every storage format and return {--data-format: --image-root}. In formats with shards, the
    training images are in three shards."""

    def make(root):
        (root / "filelist").mkdir()
        for split in ("train", "val"):
            (root / "filelist" / split).symlink_to(photos / split)
            images = sorted((photos / split).glob("*/*"))
            lines = [f"{path.relative_to(photos)} {path.parent.name.removeprefix('class')}\n" for path in images]
            (root / "filelist" / f"{split}.txt").write_text("".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            use_threads(patch)
            for name in data_files.FORMATS:
                data_files.write(photos, root / name, name, 3, workers=2)

    root = once("converted", make)
    return {"folder": photos, **{name: root / name for name in ("filelist", *data_files.FORMATS)}}


@pytest.fixture
def verify_here(monkeypatch):
    """Make verify decode images and read records with DALI in this process, because starting a process takes a second.
    tests/tools/test_verify.py tests the processes."""
    monkeypatch.setattr(verify, "ProcessPoolExecutor", lambda *arguments: ThreadPoolExecutor(1))
    monkeypatch.setattr(verify, "_in_a_process", lambda function, *arguments: function(*arguments))


@pytest.fixture
def model_of(tmp_path):
    """Return a function that creates a model of a given kind from a checkpoint and returns the model's path."""

    def model_of(kind, checkpoint):
        if kind == "checkpoint":
            return checkpoint
        if "ONNX" in kind:
            pytest.importorskip("onnx")
            pytest.importorskip("onnxruntime")
        export.export(checkpoint, tmp_path / "exported", onnx="ONNX" in kind, uint8="uint8" in kind)
        return tmp_path / "exported" / ("model.onnx" if "ONNX" in kind else "")

    return model_of


@pytest.fixture
def convert_here(monkeypatch):
    """Make convert prepare images in threads instead of worker processes. tests/tools/test_convert.py tests the
    processes."""
    use_threads(monkeypatch)


def use_threads(patch):
    patch.setattr(workers, "ProcessPoolExecutor", lambda count, _, **options: ThreadPoolExecutor(count, **options))
    patch.setattr(workers.signals, "die_with_parent", lambda parent: None)


@pytest.fixture
def few_checked_labels(monkeypatch):
    """Check the labels of only two images before the first step of a run, so that a bad label is found later."""
    monkeypatch.setattr(root_module, "CHECKED_LABELS", 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use a new cache folder, in which indexes of tar shards are written, and return its parent."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets environment variables for the rest of the test. None removes a variable."""

    def environment(**variables):
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return environment


@pytest.fixture
def shard(environment):
    """Return a function that makes this process act as one rank of a job of several processes: it sets the environment
    variables of the launcher. A value that is None does not change."""

    def shard(rank=None, world_size=None):
        values = {"PADDLE_TRAINER_ID": rank, "PADDLE_TRAINERS_NUM": world_size}
        environment(**{name: value for name, value in values.items() if value is not None})

    return shard


class Store:
    """An in-memory replacement for Paddle's TCP store, for tests that run several ranks in one process."""

    def __init__(self):
        self.values, self.counts = {}, {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


@pytest.fixture
def as_rank(monkeypatch, shard):
    """Return a function that makes this process act as one rank of a job, which has not exchanged anything, and returns
    the in-memory store of all ranks. The state of exchange.py is restored after the test."""
    store = Store()
    monkeypatch.setattr(exchange, "_store", lambda: store)
    for name in ("_exchanges", "_polls", "_stop_at", "_last_gather"):
        monkeypatch.setattr(exchange, name, getattr(exchange, name))

    def as_rank(rank, world_size=3):
        shard(rank, world_size)
        exchange._exchanges = exchange._polls = 0
        exchange._stop_at = exchange._last_gather = None
        return store

    return as_rank


@pytest.fixture
def without_locks(monkeypatch):
    """Act like a file system that does not support locks, such as some network file systems."""

    def lockf(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)


@pytest.fixture
def scored(monkeypatch):
    """Return a function that sets the top1 of the next evaluations."""
    run = program.run

    def scored(*scores):
        values = iter(scores)
        monkeypatch.setattr(program, "run", lambda *args, **kwargs: run(*args, **kwargs) | {"top1": next(values)})

    return scored


@pytest.fixture
def on_two_ranks(monkeypatch):
    """Return a function that runs a function in two threads, which act as ranks and exchange numbers. Each rank has its
    own arguments."""
    barrier, sent, local = threading.Barrier(2, timeout=10), [None, None], threading.local()

    def all_gather(values):
        sent[local.rank] = values
        barrier.wait()
        rows = np.array(sent, dtype=np.float64)
        barrier.wait()
        return rows

    def on_two_ranks(function, *arguments):
        def call(rank):
            local.rank = rank
            return function(*arguments[rank])

        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
            patch.setattr(exchange, "all_gather", all_gather)
            return list(pool.map(call, range(2)))

    return on_two_ranks


@pytest.fixture
def work_in(monkeypatch):
    """Return a function that changes the working directory for the rest of the test."""
    return monkeypatch.chdir


@pytest.fixture
def uninstalled(monkeypatch):
    """Return a function after whose call Python cannot import some modules for the rest of the test, as if they were
    not installed."""

    def uninstalled(*modules):
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return uninstalled


@pytest.fixture
def import_from(monkeypatch):
    """Return a function after whose call Python imports modules from a folder for the rest of the test, and imports the
    named modules again."""

    def import_from(folder, *modules):
        monkeypatch.syspath_prepend(folder)
        for module in modules:
            monkeypatch.delitem(sys.modules, module, raising=False)

    return import_from


@pytest.fixture
def register(monkeypatch):
    """Return a function register(name, create) that registers a network for the rest of the test."""
    return partial(monkeypatch.setitem, models.MODELS)


@pytest.fixture
def parse():
    """Return a function that parses flags for the tiny network, resolves the device and the loader's settings, starts
    Fleet unless the test simulates several processes, and returns the settings."""

    def parse(*flags):
        args = config.parse_args(tiny(*flags))
        if args.kernels == "auto":  # test Paddle's kernels unless the test chooses the custom kernels
            args.resolve("machine", kernels="paddle")
        resolution.resolve_device(args)
        args.apply(resolution.Loader)
        if processes.world_size() == 1:
            program.start_fleet(args)
        return args

    return parse


@pytest.fixture
def run_train(photos, tmp_path):
    """Return a function that calls train.main in this process with the flags of the tiny network and further flags, and
    returns (exit code, report entries). The report is only that of this call."""

    def run_train(*flags, image_root=photos):
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        places = ["--image-root", image_root, "--output-dir", tmp_path / "output", "--report-file", report]
        with static.scope_guard(static.Scope()):
            code = train.main(tiny(*places, *flags))
        return code, read_report(report)

    return run_train


@pytest.fixture
def run_bare(photos, tmp_path):
    """Return a function like run_train, but without the flags that choose the tiny network and its images. It returns
    no report entries if the exit code is not 0."""

    def run_bare(*flags, image_root=photos):
        report = tmp_path / "bare.json"
        places = ["--image-root", image_root, "--output-dir", tmp_path / "bare", "--report-file", report]
        speed = ["--device", "cpu", "--batch-size", "8", "--dali-num-threads", "2", "--epochs", "1", "--lr", "0.01"]
        with static.scope_guard(static.Scope()):
            code = train.main([*map(str, (*places, *speed, "--warmup-epochs", "0", *flags))])
        return code, read_report(report) if code == 0 else []

    return run_bare


@pytest.fixture
def checkpoint(once, run_train, tmp_path, request):
    """Return a copy of a checkpoint that was saved after one epoch. The network is that of the fixture `one_block` if
    the test uses `one_block`, otherwise the tiny network. Each of the two networks is trained once for all tests."""

    def make(folder):
        assert run_train("--output-dir", folder)[0] == 0

    name = "checkpoint_one_block" if "one_block" in request.fixturenames else "checkpoint"
    return shutil.copytree(once(name, make) / "Tiny/0", tmp_path / "checkpoint")


@pytest.fixture
def trained(one_block, once, run_train, tmp_path):
    """Train for one epoch and return (copy of the checkpoint folder, evaluation metrics). Tests with the same flags
    share one run."""

    def trained(*flags):
        def make(folder):
            code, report = run_train(*flags, "--output-dir", folder)
            assert code == 0
            (folder / "metrics.json").write_text(json.dumps(phase(report, [0], "val.")))

        folder = shutil.copytree(once("_".join(["trained_for_export", *flags]), make), tmp_path / "output")
        return folder / "Tiny/0", json.loads((folder / "metrics.json").read_text())

    return trained


@pytest.fixture
def checkpoint_of(once, run_train):
    """Return a function that trains a network for one epoch and returns the checkpoint folder. Tests share the run."""

    def checkpoint_of(arch):
        def make(folder):
            flags = ["--model-arch-name", arch, "--run-scope", "train_only", "--output-dir", folder]
            assert run_train(*flags)[0] == 0

        return once(f"{arch}_for_export", make) / arch / "0"

    return checkpoint_of


@pytest.fixture
def train_process():
    """Return a function that runs train.py in a separate process, as a user does, and returns the finished process."""

    def train_process(*flags, timeout=120):
        command = [sys.executable, "train.py", *map(str, flags)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    return train_process


@pytest.fixture
def console_script(tmp_path):
    """Write the script paddle-resnet that pip would install, for a process with ROOT in PYTHONPATH, and return its
    path."""
    path = tmp_path / "bin/paddle-resnet"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom paddle_resnet.cli import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def stop_before(monkeypatch):
    """Return a function that simulates a stop signal before a training step, or at a poll during evaluations, both
    counted from 0. Without arguments, no signal is simulated."""

    def stop_before(train_step=None, eval_step=None):
        def counter(target):
            polls = iter(range(10**6))
            return lambda: next(polls) == target

        monkeypatch.setattr(exchange, "stop_agreed", counter(train_step))
        monkeypatch.setattr(exchange, "stop_asked", counter(eval_step))

    return stop_before


@pytest.fixture
def losses_with_a_stop(run_train, stop_before, tmp_path):
    """Return a function that stops a run before a training step (counted from 0), resumes the run with the same
    command, and returns the losses of both parts."""

    def losses_with_a_stop(train_step, *flags, **places):
        elsewhere = ["--output-dir", tmp_path / "stopped"]
        stop_before(train_step=train_step)
        code, report = run_train(*flags, *elsewhere, **places)
        assert code == 75
        first = losses(report)
        stop_before()
        code, report = run_train(*flags, *elsewhere, **places)
        assert code == 0
        return first | losses(report)

    return losses_with_a_stop


@pytest.fixture
def losses_with_a_resume(run_train, tmp_path):
    """Return a function that trains with a checkpoint after each step, deletes the checkpoints that are newer than
    `newest`, such as "1_1", and resumes the run. It returns (losses of the uninterrupted run, the same losses, but
    those after the checkpoint `newest` are from the resumed run), which must be equal. It needs one run less than
    losses_with_a_stop. The folder tmp_path / "uninterrupted" is a copy of the checkpoints of the uninterrupted run.
    `changes` are flags of only the resumed run."""

    def losses_with_a_resume(newest, *flags, changes=(), **places):
        flags = [*flags, "--save-interval-steps", 1, "--keep-checkpoints", 99]
        code, report = run_train(*flags, **places)
        assert code == 0
        expected = losses(report)
        [checkpoint] = (tmp_path / "output").glob(f"*/{newest}")
        root = checkpoint.parent
        shutil.copytree(root, tmp_path / "uninterrupted", symlinks=True)
        sequences = {path.parent: json.loads(path.read_text())["sequence"] for path in root.glob("[0-9]*/meta.json")}
        for folder, sequence in sequences.items():
            if sequence > sequences[checkpoint]:
                shutil.rmtree(folder)
        code, report = run_train(*flags, "--resume", *changes, **places)
        assert code == 0
        resumed = losses(report)
        assert (int(checkpoint.name.split("_")[0]), 0) not in resumed and len(resumed) < len(expected)
        return expected, expected | resumed

    return losses_with_a_resume


def read_report(path):
    """Return the entries of a report file, dictionaries with the keys "step" and "data"; [] if there is no file."""
    if not path.exists():
        return []
    return [strict_json(line.removeprefix("DLLL ")) for line in path.read_text().splitlines()]


def strict_json(text):
    """Parse strict JSON: NaN and Infinity are errors."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def phase(report, step, prefix):
    """Find the last report entry of a step that contains metrics whose names begin with the prefix, and return {name
    without the prefix: value}."""
    entries = [e["data"] for e in report if e["step"] == step and any(k.startswith(prefix) for k in e["data"])]
    return {k.removeprefix(prefix): v for k, v in entries[-1].items() if k.startswith(prefix)}


def assert_one_error(stderr, parts):
    """Check that stderr contains exactly one error message of train.py, and that the message contains all strings in
    `parts`."""
    errors = [line for line in stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(errors) == 1, stderr
    for part in parts:
        assert part in errors[0]


def losses(report):
    """Return {(epoch, step): training loss, (epoch, "train" or "val"): loss of the epoch}."""
    result = {}
    for entry in report:
        if len(entry["step"]) == 2 and "train.loss" in entry["data"]:
            result[tuple(entry["step"])] = entry["data"]["train.loss"]
        if len(entry["step"]) == 1:
            for phase in ("train", "val"):
                if f"{phase}.loss" in entry["data"]:
                    result[entry["step"][0], phase] = entry["data"][f"{phase}.loss"]
    return result


def assert_two_of_four(weight, algorithm="mask_1d"):
    """Check that in each group of four consecutive input channels of a filter [out, in, height, width], at most two
    weights are nonzero. For two-dimensional algorithms, also check groups of four consecutive filters."""
    rows = weight.transpose(2, 3, 0, 1).reshape(-1, weight.shape[1])
    assert (np.count_nonzero(rows.reshape(-1, 4), axis=1) <= 2).all()
    if algorithm != "mask_1d":
        assert (np.count_nonzero(rows.reshape(-1, 4, weight.shape[1]), axis=1) <= 2).all()


def assert_sparse(params, algorithm="mask_1d"):
    """Check that the parameters {name: array} contain a mask for each layer that can be pruned, and that the masks are
    applied."""
    pruned = [name for name in params if f"{name}.asp_mask" in params]
    filters = {name for name in params if name.startswith("conv2d_") and name.endswith(".w_0")}
    assert set(pruned) == filters  # the classifier is not pruned, as in NVIDIA's example
    for name in pruned:
        if params[name].shape[1] < 4:  # a first layer with three input channels is not pruned: its mask is 1
            assert (params[f"{name}.asp_mask"] == 1).all()
            continue
        density = params[f"{name}.asp_mask"].mean()  # some groups of two-dimensional masks keep fewer than two weights
        assert density == 0.5 or (algorithm != "mask_1d" and 0.4 < density < 0.5), name
        assert not params[name][params[f"{name}.asp_mask"] == 0].any(), name
        assert_two_of_four(params[name], algorithm)


def need_two_gpus():
    if paddle.device.cuda.device_count() < 2 and "SHARE_GPU" not in os.environ:
        pytest.skip("requires two GPUs")


@pytest.fixture
def fake(monkeypatch):
    """Emulate step capture on the CPU and return FakeGraph. The list `FakeGraph.made` contains the captured graphs."""
    if native.missing() is not None:
        pytest.skip(native.missing())

    def capture_or_run(self, *args, **kwargs):
        if FakeGraph.recording is None:
            return run_executor(self, *args, **kwargs)
        assert kwargs == {"fetch_list": []}  # CUDA graphs support neither feeds nor fetches
        FakeGraph.recording.executor, FakeGraph.recording.step = self, args
        return []

    def changes_of_kernels(self):
        changes = find_changes(self)
        assert not changes["machine"].pop("cuda_graph")  # by default, steps are not captured on a CPU
        return changes

    find_changes = resolution.Kernels.changes
    monkeypatch.setattr(resolution.Kernels, "changes", changes_of_kernels)
    monkeypatch.setattr(cuda_graph, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda_graph, "CAPTURE_FLAGS", {})
    monkeypatch.setattr(static.Executor, "run", capture_or_run)
    monkeypatch.setattr(paddle.device.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(paddle.device.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_graph, "_take_free_memory", lambda place: [])
    monkeypatch.setattr(FakeGraph, "made", [])
    yield FakeGraph
    FakeGraph.recording = None


@pytest.fixture
def launch(photos, tmp_path):
    """Return a function that runs a job, and returns (report entries, [parameters of each rank]). With succeeds=False,
    the job must fail, and the function returns (exit code, [log of each rank])."""

    def launch(processes, *flags, succeeds=True):
        name = f"job{len(list(tmp_path.glob('job*')))}"
        folder = tmp_path / name
        folder.mkdir()
        places = ["--image-root", photos, "--output-dir", tmp_path / "output", "--report-file", folder / "report.json"]
        places += ["--overwrite", "--parameters", folder]
        launcher = []
        if processes > 1:
            launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", processes, "--log_dir", folder / "log"]
        command = [sys.executable, *launcher, "tests/train_tiny.py", *tiny(*places, *flags)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        parameters = [np.load(path) for path in sorted(folder.glob("rank*.npz"))]
        if not succeeds:
            assert done.returncode != 0
            return done.returncode, [(folder / f"log/workerlog.{r}").read_text() for r in range(processes)]
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return read_report(folder / "report.json"), parameters

    return launch


@pytest.fixture
def two_processes(once, launch, tmp_path):
    """Run TWO_EPOCHS as a job of two processes and return (report entries, [parameters of each rank], folder of the
    checkpoints). All tests share one such job."""

    def make(folder):
        launch(2, *TWO_EPOCHS, "--output-dir", folder / "output")
        shutil.copytree(tmp_path / "job0", folder / "job")

    folder = once("two_processes", make)
    parameters = [np.load(path) for path in sorted(folder.glob("job/rank*.npz"))]
    return read_report(folder / "job/report.json"), parameters, folder / "output/Tiny"


@pytest.fixture
def launch_nodes(photos, tmp_path):
    """Return a function that simulates two machines: it starts two launchers with one process each and a common master
    on the loopback interface, and returns (launchers, folder of the job)."""
    started = []

    def launch_nodes(*flags, on_gpus=False):
        folder = tmp_path / "nodes"
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            master = f"127.0.0.1:{free.getsockname()[1]}"
        places = ["--image-root", photos, "--output-dir", folder / "output", "--report-file", folder / "report.json"]
        places += ["--parameters", folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        for node in range(2):
            launcher = ["-m", "paddle.distributed.launch", "--nnodes", 2, "--master", master, "--rank", node]
            launcher += ["--gpus", gpu_labels(2)[node]] if on_gpus else ["--nproc_per_node", 1]
            launcher += ["--log_dir", folder / f"log{node}"]
            command = [sys.executable, *launcher, "tests/train_tiny.py", *tiny(*places, *flags)]
            # With different host IDs, NCCL communicates over the network instead of NVLink.
            environment["NCCL_HOSTID"] = f"node{node}"
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **pipes))
        return started, folder

    yield launch_nodes
    for process in started:
        process.kill()


def wait_until(condition, seconds):
    end = monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):
            if condition():
                return
        assert monotonic() < end
        sleep(0.1)


@pytest.fixture
def tensor_cores(monkeypatch):
    """Act like a GPU with bfloat16 tensor cores, for which more operators are replaced."""
    monkeypatch.setattr(fusion, "has_bfloat16_tensor_cores", lambda: True)


@pytest.fixture
def with_component(monkeypatch):
    """Return a function with_component(name, component) that adds a component to a list of step/build.py, INPUTS or
    UPDATE, for the rest of the test."""

    def with_component(name, component):
        monkeypatch.setattr(build, name, (*getattr(build, name), component))

    return with_component


@pytest.fixture
def in_children(environment, tmp_path):
    """Return a function that sets a program to execute at the start of every Python child process."""

    def in_children(code):
        (tmp_path / "sitecustomize.py").write_text(code)
        environment(PYTHONPATH=tmp_path)

    return in_children


@pytest.fixture
def gpu_lists(monkeypatch):
    """Clear Paddle's list of operators without float16 kernels. In a CPU build, the list contains all operators, so AMP
    would cast nothing."""
    from paddle_resnet.components import precision

    lists = precision._amp_lists

    def all_supported(*args):
        result = lists(*args)
        result.unsupported_list = set()
        return result

    monkeypatch.setattr(precision, "_amp_lists", all_supported)
