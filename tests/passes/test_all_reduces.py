"""Programs with rewritten all-reduces. job/test_jobs.py tests complete jobs."""

import numpy as np
import paddle
import pytest
from paddle import static

from helpers import build, variable
from paddle_resnet.machine import compat
from paddle_resnet.passes import all_reduces
from paddle_resnet.step import facts


def append_all_reduce(block, name, role=1):
    compat.append_all_reduce(block, block.var(name))
    block.ops[-1]._set_attr("op_role", role)
    if compat.HAS_CALC_STREAM:
        block.ops[-1]._set_attr("use_calc_stream", False)  # Fleet sets this value


def test_all_reduces_of_the_project_run_on_the_computation_stream():
    block = static.Program().global_block()
    compat.append_all_reduce(block, block.create_var(name="g", shape=[2], dtype="float32"))
    [op] = block.ops
    assert op.attr("ring_id") == 0 and op.input_arg_names == op.output_arg_names == ["g"]
    assert not compat.HAS_CALC_STREAM or op.attr("use_calc_stream")


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
    assert depend.attr("op_role") == 1  # the role of the all-reduce


@pytest.mark.parametrize(
    ("device", "local_size", "expected"), [("gpu", "2", True), ("gpu", "1", False), ("cpu", "2", False)]
)
def test_all_reduces_use_computation_stream_within_host(environment, device, local_size, expected):
    environment(PADDLE_TRAINERS_NUM="2")
    environment(PADDLE_LOCAL_SIZE=local_size)
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


@pytest.mark.parametrize(
    ("device", "world_size", "is_removed"), [("cpu", 2, True), ("gpu", 2, False), ("cpu", 1, False)], ids=str
)
def test_cpu_jobs_have_no_nccl_operators(shard, device, world_size, is_removed):
    shard(world_size=world_size)
    programs = [static.Program(), static.Program()]
    for program in programs:
        with static.program_guard(program):
            value = program.global_block().create_var(name="g", shape=[2], dtype="float32")
            for _ in range(2):  # consecutive operators
                ring = {"X": value}, {"Out": value}, {"ring_id": 0}
                for name in ("c_sync_calc_stream", "c_sync_comm_stream"):
                    program.global_block().append_op(type=name, inputs=ring[0], outputs=ring[1], attrs=ring[2])
            paddle.scale(value)
    all_reduces.adapt_communication(*programs, device)
    for program in programs:
        types = [op.type for op in program.global_block().ops]
        assert types == (["scale"] if is_removed else ["c_sync_calc_stream", "c_sync_comm_stream"] * 2 + ["scale"])


def test_bn_statistics_are_averaged_over_all_processes(one_block, parse, monkeypatch, shard):
    """The simulated all-reduce adds the statistics of two other processes, which are each larger by 1."""
    _, exe, _, _, main = build(parse("--ema", "0.5"))
    names = all_reduces.own_statistics(main)
    before, weight = {name: variable(name) for name in names}, variable("conv2d_0.w_0")
    all_reduces.average_bn(exe, main)  # a single process keeps its statistics
    assert all((variable(name) == value).all() for name, value in before.items())
    shard(world_size=3)
    monkeypatch.setattr(
        compat, "append_all_reduce", lambda block, value: paddle.assign(paddle.scale(value, 3.0, 2.0), output=value)
    )
    programs = set()
    for count in (1, 2):
        all_reduces.average_bn(exe, main)
        for name, value in before.items():
            np.testing.assert_allclose(variable(name), value + count * 2 / 3, rtol=1e-6, err_msg=name)
        programs.add(facts.of(main).bn_average)
    assert len(programs) == 1
    np.testing.assert_array_equal(variable("conv2d_0.w_0"), weight)
    assert {name.removesuffix(".ema") for name in names} == {*all_reduces.bn_statistics(main)}
    assert len(names) == 2 * len(all_reduces.bn_statistics(main)) > 0
