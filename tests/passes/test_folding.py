"""Folding batch normalization into the preceding convolution."""

import numpy as np
import pytest
from paddle import static

from helpers import build, random_batches
from paddle_resnet import phases
from paddle_resnet.checkpoints import variables
from paddle_resnet.passes import folding, fusion


@pytest.mark.parametrize("flags", [[], ["--data-layout", "NHWC", "--image-shape", "4,32,32"]], ids=["NCHW", "NHWC"])
def test_folded_program_has_same_results(parse, flags):
    """In float32, folding changes only the order of summation. The statistics and scales are random, and epsilon is
    large enough to affect the results."""
    args = parse(*flags)
    random = np.random.RandomState(1)
    _, exe, fetchs, _, program = build(args, is_train=False)
    names = [v.name for v in program.list_vars() if v.persistable and v.name.startswith("batch_norm")]

    def randomize():
        for name in names:
            array = variables.read(name)
            variables.set_variable(name, random.uniform(0.5, 2, array.shape).astype("float32"), exe.place)

    def losses(program):
        return [exe.run(program, dict(zip(("data", "label"), b, strict=True)), [loss])[0] for b in batches]

    loss, batches = fetchs["loss"][0], random_batches(2, (32, 32, 4) if flags else (3, 32, 32))
    randomize()
    for op in program.global_block().ops:
        if op.type == "batch_norm":
            op._set_attr("epsilon", 1e-3)
    plain = program.clone()
    expected = losses(plain)
    refold = folding.fold_batch_norms(program, exe, 1 if args.data_layout == "NCHW" else -1)
    assert not any(op.type == "batch_norm" for op in program.global_block().ops)
    np.testing.assert_allclose(losses(program), expected, rtol=2e-5, atol=1e-4)
    # New parameters take effect only after a refold.
    randomize()
    changed = losses(plain)
    assert np.abs(np.subtract(changed, expected)).max() > 1e-3
    np.testing.assert_allclose(losses(program), expected, rtol=2e-5, atol=1e-4)
    refold()
    np.testing.assert_allclose(losses(program), changed, rtol=2e-5, atol=1e-4)


def test_float32_program_is_not_folded(parse):
    args = parse()
    _, exe, fetchs, _, program = build(args, is_train=False)
    before = [op.type for op in program.global_block().ops]
    phases.compile_programs(args, exe, None, phases.Work(args, None, program, fetchs))
    assert [op.type for op in program.global_block().ops] == before
    assert static.global_scope().find_var("conv2d_0.w_0.folded") is None


def _insert_emulation(graph, ops, at, op_type, inputs, outputs, attrs):
    """Like fusion.Graph.replace, but insert operators that a CPU supports in place of the fused operator."""
    block, relu = graph.block, attrs.pop("activation") == "relu"
    filters, *results = (block.create_var(name=f"{inputs['Filter'].name}.{i}", dtype="float32") for i in range(4))
    attrs = {name: value for name, value in attrs.items() if name not in ("split_channels", "fuse_alpha")}
    new = [
        ("transpose2", {"X": inputs["Filter"]}, {"Out": filters, "XShape": results[2]}, {"axis": [0, 3, 1, 2]}),
        ("conv2d", {"Input": inputs["Input"], "Filter": filters}, {"Output": results[0]}, attrs),
        ("elementwise_add", {"X": results[0], "Y": inputs["Bias"]}, {"Out": results[1]}, {"axis": -1}),
    ]
    out = results[1]
    if "ResidualData" in inputs:
        out = results[0]
        new.append(("elementwise_add", {"X": results[1], "Y": inputs["ResidualData"]}, {"Out": out}, {"axis": -1}))
    new.append(("relu" if relu else "assign", {"X": out}, {"Out": outputs["Output"]}, {}))
    for op_type, op_inputs, op_outputs, op_attrs in new:
        block._insert_op_without_sync(
            block.ops.index(at), type=op_type, inputs=op_inputs, outputs=op_outputs, attrs=op_attrs
        )
    graph.replaced += ops


def test_float32_convolutions_are_fused_with_bn_and_relu(parse, monkeypatch):
    """The fused operator exists only on GPUs, so other operators replace it here."""
    args = parse("--model-arch-name", "Tiny", "--data-layout", "NHWC", "--image-shape", "4,32,32")
    _, exe, fetchs, _, program = build(args, is_train=False)
    monkeypatch.setattr(fusion.Graph, "replace", _insert_emulation)
    feed = dict(zip(("data", "label"), random_batches(1, (32, 32, 4))[0], strict=True))
    [expected] = exe.run(program, feed, [fetchs["loss"][0]])
    layers = sum(op.type == "conv2d" for op in program.global_block().ops)
    with static.program_guard(program, static.Program()):
        assert folding.fuse_convolutions(program, exe) == layers
    assert "batch_norm" not in {op.type for op in program.global_block().ops}
    np.testing.assert_allclose(exe.run(program, feed, [fetchs["loss"][0]])[0], expected, rtol=2e-5)
