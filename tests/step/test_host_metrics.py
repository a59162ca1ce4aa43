"""Metrics that are copied asynchronously, compared with metrics that the Executor fetches."""

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, frozen, losses, phase
from helpers import random_batches
from paddle_resnet import program
from paddle_resnet.native import build as native
from paddle_resnet.step import dispatch, host_metrics
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.utils.errors import DataError

NATIVE = [*NHWC, "--kernels", "native", "--cuda-graph", "false"]


@pytest.fixture(autouse=True)
def operators():
    if native.missing() is not None:
        pytest.skip(native.missing())
    native.load()


def build(args, is_train):
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(frozen(args), main, startup, 10, is_train)
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    return program.compile_prog(args, main, is_train=is_train), exe, [variable for variable, _ in fetchs.values()]


@pytest.mark.parametrize("is_train", [True, False], ids=["train", "eval"])
def test_copied_values_equal_fetched_values(parse, is_train):
    """Values of all types and shapes are copied for batches of different sizes and read three steps later."""
    args = parse(*NATIVE, "--lr", "0")
    compiled, exe, variables = build(args, is_train)
    step = Dispatcher(exe, compiled, variables, is_native=True)
    feeds = [
        dict(zip(("data", "label"), random_batches(1, (32, 32, 4), size)[0], strict=True)) for size in (8, 3, 5, 8)
    ]
    handles = [step(feed) for feed in feeds]
    copies = [[np.asarray(handle) for handle in step] for step in handles]
    assert np.asarray(handles[-1][0], np.float64).dtype == np.float64
    for values, feed in zip(copies, feeds, strict=True):
        fetched = exe.run(compiled, feed, variables)
        for value, expected in zip(values, fetched, strict=True):
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)


def test_captured_step_copies_batches_from_loader_on_different_device(one_block, parse, fake):
    args = parse(*NHWC, "--kernels", "native", "--cuda-graph", "true")
    compiled, exe, variables = build(args, is_train=False)
    step = Dispatcher(exe, compiled, variables, is_native=True, shares_inputs=False)
    for batch in random_batches(5, (32, 32, 4)):
        feed = {}
        for name, array in zip(("data", "label"), batch, strict=True):
            feed[name] = paddle.framework.core.LoDTensor()
            feed[name].set(array, paddle.CPUPlace())
        values = [np.asarray(handle) for handle in step(feed)]
        for value, expected in zip(values, exe.run(compiled, feed, variables), strict=True):
            np.testing.assert_array_equal(value, expected)
    assert fake.made[0].launches > 1


def test_step_fetches_nothing(parse):
    """Fetching values with the Executor would block the host."""

    args = parse(*NATIVE)
    compiled, exe, variables = build(args, is_train=True)
    calls, run = [], exe.run
    exe.run = lambda program, feed, fetch_list: calls.append(fetch_list) or run(program, feed, fetch_list)
    write_scalars = compiled.write_scalars
    compiled.write_scalars = lambda: calls.append("scalars") or write_scalars()
    x, y = random_batches(1, (32, 32, 4))[0]
    Dispatcher(exe, compiled, variables, is_native=True)({"data": x, "label": y})
    assert calls == ["scalars", []]  # a step uses the learning rate of this step


def test_missing_values_raise_an_error(parse):
    args = parse(*NATIVE)
    compiled, exe, variables = build(args, is_train=True)
    step = Dispatcher(exe, compiled, variables, is_native=True)
    x, y = random_batches(1, (32, 32, 4))[0]
    late, *_ = [step({"data": x, "label": y}) for _ in range(5)]
    with pytest.raises(RuntimeError, match="more than three steps late"):
        np.asarray(late[0])
    other, exe, variables = build(parse(*NHWC), is_train=True)
    with pytest.raises(RuntimeError, match="does not copy metrics to the host; build the program with"):
        Dispatcher(exe, other, variables, is_native=True)({"data": x, "label": y})


def test_gpu_failure_raises_an_error():
    class Library:
        def paddle_resnet_wait(self, *key):
            return 700

    variable = static.data("value", [1], "float32")
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        np.asarray(host_metrics.AsyncCopy(Library(), 0, 0, variable))


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_step_error_is_data_error_only_if_a_label_is_out_of_range(error):
    def fail(**_):
        raise error("of Paddle")

    with pytest.raises(DataError, match="has a label that is not a class of the network"):
        dispatch._fetch(fail, 3, {"label": np.array([[0], [3]])})
    with pytest.raises(error, match="of Paddle"):
        dispatch._fetch(fail, 3, {"label": np.array([[0], [2]])})
    with pytest.raises(error, match="of Paddle"):  # on a GPU, the caller passes None as the number of classes
        dispatch._fetch(fail, None, {"label": np.array([[0], [3]])})


def test_logged_metrics_are_those_of_each_step(run_train):
    """The reference run uses Paddle's operators and fetches its metrics."""
    reports = {}
    for kernels in ("native", "paddle"):
        code, reports[kernels] = run_train(*NHWC, "--kernels", kernels, "--print-interval", "1", "--overwrite")
        assert code == 0
    native_losses, paddle_losses = losses(reports["native"]), losses(reports["paddle"])
    assert native_losses.keys() == paddle_losses.keys()
    for step in ((0, 0), (0, 1), (0, 2), (0, "train")):
        assert native_losses[step] == pytest.approx(paddle_losses[step], rel=1e-3)
    assert phase(reports["native"], [0], "val.")["images"] == phase(reports["paddle"], [0], "val.")["images"]
