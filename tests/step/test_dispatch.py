"""Dispatch of steps, with fake programs. test_host_metrics.py and test_cuda_graph.py dispatch real programs."""

import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_resnet.native import build as native
from paddle_resnet.step import host_metrics
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.utils.errors import NO_CLASS, DataError


@pytest.fixture
def events():
    return []


@pytest.fixture
def program(events):
    """Return a fake compiled program that is not captured and contains an async copy."""
    block = SimpleNamespace(ops=[SimpleNamespace(type="other"), SimpleNamespace(type=host_metrics.OPERATOR)])
    inner = SimpleNamespace(global_block=lambda: block)
    return SimpleNamespace(
        write_scalars=lambda: events.append("scalars"),
        step=lambda exe, variables: partial(exe.run, "compiled", fetch_list=variables),
        captured=None,
        _program=inner,
    )


@pytest.fixture
def library(events, monkeypatch):
    """Replace the library of custom operators and the handles of copied metrics."""
    library = SimpleNamespace(paddle_resnet_async_copies=lambda: events.append("number") or 7)
    monkeypatch.setattr(native, "register", lambda: library)
    monkeypatch.setattr(host_metrics, "AsyncCopy", lambda *arguments: arguments)
    return library


@pytest.mark.parametrize(
    ("error", "labels", "class_num", "is_data_error"),
    [
        (None, [5], 3, False),
        (IndexError, [0, 2], 3, False),
        (IndexError, [0, 3], 3, True),
        (ValueError, [-1, 0], 3, True),
        (ValueError, [1.5, 0], 3, True),
        (IndexError, [0, 3], None, False),
        (RuntimeError, [0, 3], 3, False),
    ],
)
def test_labels_are_checked_if_a_step_fails(events, program, error, labels, class_num, is_data_error):
    def run(*arguments, **options):
        events.append((arguments, options))
        if error is not None:
            raise error("step")
        return ["metrics"]

    step = Dispatcher(SimpleNamespace(run=run), program, ["v"], False, class_num)
    assert step.inputs == {}
    feed = {"label": np.array([[label] for label in labels])}
    if error is None:
        assert step(feed) == ["metrics"]
    else:
        with pytest.raises(DataError if is_data_error else error, match=NO_CLASS if is_data_error else "^step$"):
            step(feed)
    assert events == ["scalars", (("compiled",), {"fetch_list": ["v"], "feed": feed, "return_numpy": False})]


def test_program_without_async_copy_is_an_error(program, library):
    del program._program.global_block().ops[1]
    with pytest.raises(RuntimeError, match="^program: does not copy metrics to the host; build the"):
        Dispatcher(None, program, [], True)


@pytest.mark.parametrize("shares_inputs", [True, False])
@pytest.mark.parametrize("is_captured", [False, True])
def test_metrics_of_native_steps_are_copied(events, program, library, is_captured, shares_inputs):
    """The number of the step is read before the step runs."""

    class Captured:
        def __init__(self):
            self.inputs = {"data": "tensor"}

        def check(self):
            events.append("check")

        def __call__(self, run, feed):
            events.append("replay")
            run(feed=feed)

    if is_captured:
        program.captured = Captured()
    exe = SimpleNamespace(run=lambda *arguments, **options: events.append((arguments, options)))
    step = Dispatcher(exe, program, ["v", "w"], True, shares_inputs=shares_inputs)
    assert step.inputs == ({"data": "tensor"} if is_captured and shares_inputs else {})
    assert library.paddle_resnet_async_copies.restype is ctypes.c_uint64
    assert step("feed") == [(library, 7, 0, "v"), (library, 7, 1, "w")]
    run = ((program,), {"fetch_list": [], "feed": "feed"})
    assert events == (["check", "scalars", "number", "replay", run] if is_captured else ["scalars", "number", run])
