"""Training with the public functions of the package, without the phases of train.py."""

import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.paddle import DALIGenericIterator
from paddle import static

from conftest import ROOT, TINY
from paddle_resnet import config, dali, program
from paddle_resnet.data import iterators
from paddle_resnet.job import processes
from paddle_resnet.serving import inference, preprocessing
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

# FLAGS do not include --num-of-class and --device, so both are derived from the data and the machine.
FLAGS = [flag for flag in TINY if flag not in ("--num-of-class", "3", "--device", "cpu")]


@pytest.fixture
def flags(photos):
    return ["--image-root", str(photos), *FLAGS]


def train(args, loader, epochs=2):
    """Train and return the result of program.run for each epoch."""
    place = paddle.CUDAPlace(0) if paddle.is_compiled_with_cuda() else paddle.CPUPlace()
    main, startup, exe = static.Program(), static.Program(), static.Executor(place)
    paddle.seed(0)
    fetchs, lr_scheduler, _, _ = program.build(args, main, startup, 3)
    compiled = program.compile_prog(args, main)
    exe.run(startup)
    return [
        program.run(args, loader, exe, compiled, fetchs, epoch, Mode.TRAIN, lr_scheduler) for epoch in range(epochs)
    ]


# This program imports config, utils and train, the module names of NVIDIA's example, which exist only in a checkout. It
# imports Paddle before paddle_resnet.
EXAMPLE = """
import sys
import paddle
import config
from paddle_resnet import dali
from paddle_resnet.program import build, compile_prog, run
from utils.mode import Mode
from train import main

args = config.parse_args(sys.argv[1:])
paddle.enable_static()
main_prog, startup_prog = paddle.static.Program(), paddle.static.Program()
loader = dali.build_dataloader(args, Mode.TRAIN)
fetchs, lr_scheduler, feeds, optimizer = build(args, main_prog, startup_prog, step_each_epoch=3, is_train=True)
compiled = compile_prog(args, main_prog, loss_name="loss", is_train=True)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(startup_prog)
metrics = run(args, loader, exe, compiled, fetchs, 0, mode=Mode.TRAIN, lr_scheduler=lr_scheduler)
print("images", metrics["images"])
"""


@pytest.mark.slow
def test_example_with_imports_of_checkout_runs(photos):
    flags = ["--model-arch-name", "ResNet18", "--crop-size", "32", "--batch-size", "8", "--device", "cpu"]
    command = [sys.executable, "-c", EXAMPLE, "--image-root", str(photos), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "images 24"


class Unsized:
    """An iterable of NumPy arrays that has no length."""

    def __init__(self, epochs):
        self.epochs = iter(epochs)

    def __iter__(self):
        return iter(next(self.epochs))


class Sized(Unsized):
    def __len__(self):
        return 3


def copies(loader, epochs):
    """Copy the batches of each epoch to NumPy arrays."""
    actual = []
    for _ in range(epochs):
        actual.append([[{name: np.array(value) for name, value in batch.items()}] for [batch] in loader])
        loader.reset()
    return actual


def test_public_functions_resolve_flags_and_start_fleet(flags):
    args = config.parse_args(flags)
    loader = dali.build_dataloader(args, Mode.TRAIN)
    first, second = train(args, loader)
    assert (first["images"], first["steps"], second["images"]) == (24, 3, 24)
    assert args.as_dict() == config.parse_args(flags).as_dict() and not args.is_frozen  # the functions use a copy
    resolved = program.start(args)
    assert resolved.num_of_class == 3 and resolved.is_frozen and resolved is program.start(args)
    assert "auto" not in (resolved.device, resolved.dali_device, resolved.kernels)
    args.lr = 0.5
    assert program.start(args).lr == 0.5 and resolved.lr != 0.5


@pytest.mark.slow
def test_run_accepts_any_iterable_of_batches(flags):
    """Training with a loader and training with an iterable over NumPy copies of its batches have the same losses."""
    args = config.parse_args(flags)
    expected = [epoch["loss"] for epoch in train(args, dali.build_dataloader(args, Mode.TRAIN))]
    for kind in (Unsized, Sized):
        loader = kind(copies(dali.build_dataloader(config.parse_args(flags), Mode.TRAIN), 2))
        with static.scope_guard(static.Scope()):
            actual = train(config.parse_args(flags), loader)
        assert [(epoch["loss"], epoch["steps"]) for epoch in actual] == [(loss, 3) for loss in expected]


@pytest.mark.parametrize("mode", Mode)
def test_build_resolves_flags_and_starts_fleet_once(flags, monkeypatch, mode):
    starts, start, resolve = [], program.start_fleet, program.resolution.resolve
    monkeypatch.setattr(program.compat, "check_version", lambda: starts.append("version"))
    monkeypatch.setattr(program.fleet, "connect", starts.append)
    monkeypatch.setattr(program.resolution, "resolve", lambda args, mode: starts.append(mode) or resolve(args, mode))
    monkeypatch.setattr(program, "start_fleet", lambda args: (starts.append(args), start(args)))
    args = config.parse_args([*flags, "--data-layout", "NCHW"])
    for is_train in (mode is Mode.TRAIN, mode is not Mode.TRAIN):
        _, _, feeds, _ = program.build(args, static.Program(), static.Program(), 3, is_train)
    assert [*feeds["data"].shape] == [-1, 3, 32, 32]
    assert starts == ["version", args.comm_timeout_s, mode, args.resolved]


def test_calls_in_wrong_order_raise_errors(flags):
    args = config.parse_args(flags)
    main, startup, exe = static.Program(), static.Program(), static.Executor(paddle.CPUPlace())
    for premature_call in (
        lambda: program.compile_prog(args, main),
        lambda: program.create_strategy(args),
        lambda: processes.place(args.device),
    ):
        with pytest.raises(UsageError, match="--device auto: not resolved yet; use the settings that program.start"):
            premature_call()
    fetchs, *_ = program.build(args, main, startup, 3)
    with pytest.raises(UsageError, match="run: the program is not compiled; pass the result of compile_prog"):
        program.run(args, [], exe, main, fetchs, 0)
    compiled = program.compile_prog(program.start(args), main)
    for _ in range(2):
        message = r"run: parameter \w+\.\w+ has no value; call exe.run\(startup_prog\) first"
        with pytest.raises(UsageError, match=message):
            program.run(args, [], exe, compiled, fetchs, 0)
        # Create the variable that is checked, but do not initialize it.
        static.global_scope().var(compiled._program.all_parameters()[0].name)


IMAGES, LABELS = np.zeros((8, 3, 32, 32), "float32"), np.zeros((8, 1), "int64")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (iter(()), "the loader yielded no batches"),
        ([{"data": IMAGES, "label": LABELS}], r"yielded a batch in an unexpected format; yield \[{"),
        ([[{"data": IMAGES, "label": LABELS}] * 2], r"yielded a batch in an unexpected format; yield \[{"),
        ([[{"data": IMAGES}]], r"yielded a batch in an unexpected format; yield \[{"),
        (
            [[{"data": IMAGES, "label": LABELS[:, 0]}]],
            r"yielded label as int64 \['N'\], but the program expects int64 \['N', 1\]",
        ),
        ([[{"data": IMAGES, "label": LABELS.astype("int32")}]], "yielded label as int32 "),
        (
            [[{"data": IMAGES[:, :, :9], "label": LABELS}]],
            r"yielded data as float32 \['N', 3, 9, 32\], but the program expects",
        ),
        (
            [[{"data": IMAGES, "label": LABELS[:4]}]],
            "yielded a batch with 8 data and 4 label; yield at least one image, ",
        ),
        ([[{"data": IMAGES[:0], "label": LABELS[:0]}]], "yielded a batch with 0 data and 0 label"),
    ],
    ids=[
        "no batch",
        "not a list",
        "two",
        "no label",
        "one dimension",
        "int32",
        "different size",
        "few labels",
        "no images",
    ],
)
def test_incompatible_batches_raise_errors(batches, message):
    main = static.Program()
    with static.program_guard(main):
        program.create_feeds([3, 32, 32])
    with pytest.raises(UsageError, match=message):
        next(iter(iterators.adapted(batches, SimpleNamespace(_program=main))))


def test_tensors_of_a_loader_are_not_copied():
    main, tensors = static.Program(), {}
    with static.program_guard(main):
        program.create_feeds([3, 32, 32])
    for name, values in (("data", IMAGES), ("label", LABELS)):
        tensors[name] = paddle.framework.core.LoDTensor()
        tensors[name].set(values, paddle.CPUPlace())
    [batch] = next(iter(iterators.adapted([[tensors]], SimpleNamespace(_program=main))))
    assert all(batch[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device 'tpu': unknown value; use cpu or gpu"),
        ({"precision": "half"}, "precision 'half': unknown value; use float32, float16, bfloat16 or int8"),
        ({"tta": "five"}, "tta 'five': unknown value; use none or flip"),
    ],
)
def test_unknown_values_for_a_model_are_errors(changes, message):
    with pytest.raises(UsageError, match=message):
        inference.open_model("nowhere", **{"device": "cpu"} | changes)


def test_adapter_keeps_batches_until_gpu_has_read_them():
    """The loader may reuse the memory of a batch that is no longer referenced, but the GPU may be up to two steps
    behind the host."""

    class Counted(np.ndarray):
        alive = 0

        def __array_finalize__(self, other):
            Counted.alive += 1

        def __del__(self):
            Counted.alive -= 1

    adapter = iterators.Adapter.__new__(iterators.Adapter)
    adapter._inputs, adapter._tensor = {"data": None}, lambda name, value: value
    adapter._check_sizes = lambda batch: None
    adapter._loader = ([{"data": np.zeros(1).view(Counted)}] for _ in range(6))
    assert [Counted.alive for _ in adapter] == [1, 2, 3, 3, 3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("auto_reset", [True, False])
def test_dali_iterator_of_user_trains_on_gpu(flags, photos, auto_reset):
    @pipeline_def(batch_size=8, num_threads=2, device_id=0, seed=1)
    def batches():
        encoded, label = fn.readers.file(file_root=str(photos / "train"), pad_last_batch=True, name="Reader")
        images = fn.resize(fn.decoders.image(encoded, device="mixed"), resize_x=32, resize_y=32)
        images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, mean=[127.0] * 3, std=[64.0] * 3)
        return images, fn.cast(label, dtype=types.INT64).gpu()

    loader = DALIGenericIterator([batches()], ["data", "label"], reader_name="Reader", auto_reset=auto_reset)
    results = train(config.parse_args(flags), loader)
    assert [(epoch["images"], epoch["steps"]) for epoch in results] == [(32, 4)] * 2
    assert results[1]["loss"] < results[0]["loss"]


PAGE = (ROOT / "docs/api.md").read_text()


@pytest.mark.slow
def test_programs_of_api_page_run(photos, checkpoint, tmp_path, work_in, capsys):
    """The programs run in the order in which they appear on the page, with a tiny network and tiny images."""
    work_in(tmp_path)
    replacements = {"output/digits/ResNet18/best": checkpoint, "data/digits": photos, "ResNet18": "Tiny"}
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for name, own in replacements.items():
            block = block.replace(name, str(own))
        exec(block, namespace)
    assert namespace["trained"]["images"] == 16
    assert namespace["evaluated"]["images"] == 23
    assert namespace["probabilities"].shape == (3,)
    assert capsys.readouterr().out.splitlines()[-1].startswith(str(photos / "val"))


def test_signatures_on_api_page_match_functions():
    listed = re.findall(r"^(\w+)\.(\w+)(\(.*\))$", PAGE.partition("## Functions")[2], re.MULTILINE)
    modules = {
        module.__name__.rpartition(".")[2]: module for module in (config, dali, inference, preprocessing, program)
    }
    for module, name, signature in listed:
        actual = inspect.signature(getattr(modules[module], name))
        unannotated = [p.replace(annotation=p.empty) for p in actual.parameters.values()]
        actual = str(actual.replace(parameters=unannotated, return_annotation=actual.empty))
        assert actual.replace("<Mode.TRAIN: 'train'>", "Mode.TRAIN") == signature
    assert listed
