"""Programs with rewritten all-reduces. job/test_jobs.py tests complete jobs."""

import paddle
import pytest
from paddle import static

from paddle_resnet.machine import compat
from paddle_resnet.passes import all_reduces


def append_all_reduce(block, name, role=1):
    compat.append_all_reduce(block, block.var(name))
    block.ops[-1]._set_attr("op_role", role)
    if compat.HAS_CALC_STREAM:
        block.ops[-1]._set_attr("use_calc_stream", False)  # Fleet sets this value


def test_fused_all_reduce_waits_for_every_gradient_in_its_buffer():
    """This test inspects the rewritten program. test_gpu.py tests the effect on two GPUs."""
    main = static.Program()
    block = main.global_block()
    with static.program_guard(main):
        for name in ("a", "b", "a@GRAD", "b@GRAD", "fused"):
            block.create_var(name=name, shape=[2], dtype="float32")
    fused = {"Input": ["a", "b"]}, {"Output": ["a@GRAD", "b@GRAD"], "FusedOutput": ["fused"]}
    block.append_op(type="coalesce_tensor", inputs=fused[0], outputs=fused[1], attrs={"dtype": block.var("a").dtype})
    append_all_reduce(block, "fused")
    append_all_reduce(block, "a@GRAD")
    all_reduces._order_fused_all_reduces(block)
    assert [op.type for op in block.ops] == ["coalesce_tensor", "depend", *[compat.ALL_REDUCE] * 2]
    depend = block.ops[1]
    assert depend.input("X") == depend.output("Out") == ["fused"]
    assert depend.input("Dep") == ["a@GRAD", "b@GRAD"]


@pytest.mark.parametrize(
    ("device", "local_size", "expected"), [("gpu", "2", True), ("gpu", "1", False), ("cpu", "2", False)]
)
def test_all_reduces_use_computation_stream_within_host(monkeypatch, device, local_size, expected):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", local_size)
    main = static.Program()
    with static.program_guard(main):
        main.global_block().create_var(name="g", shape=[2], dtype="float32")
        paddle.scale(main.global_block().var("g"))
    append_all_reduce(main.global_block(), "g")
    all_reduces.adapt_communication(main, static.Program(), device)
    other, op = main.global_block().ops
    assert not other.has_attr("use_calc_stream")
    assert op.has_attr("use_calc_stream") == compat.HAS_CALC_STREAM
    if compat.HAS_CALC_STREAM:
        assert op.attr("use_calc_stream") == expected


def test_count_gradient_all_reduces():
    main = static.Program()
    backward = int(paddle.base.core.op_proto_and_checker_maker.OpRole.Backward)
    with static.program_guard(main):
        main.global_block().create_var(name="g", shape=[2], dtype="float32")
        for role in (backward, backward, 0):  # the last all-reduce does not reduce a gradient
            append_all_reduce(main.global_block(), "g", role)
    assert all_reduces.count_gradient_all_reduces(main) == 2
