"""Running statistics of batch normalization with Paddle's kernels."""

import itertools

import paddle
from paddle import static
from paddle.utils import unique_name

from paddle_resnet import graph


def keep_statistics_finite(program: static.Program) -> None:
    """Change a program in place, so that the running statistics of a channel remain unchanged if the update would make
    its running mean or variance infinite or NaN. Frozen BN layers and evaluation programs are not changed.

    Without keep_statistics_finite, Paddle's batch_norm would make the running statistics of the channel infinite or NaN
    for the rest of the run, even if the output is finite. Dynamic loss scaling does not skip updates of running
    statistics. The added operators process all layers together. Custom kernels skip non-finite statistics themselves,
    so programs with custom kernels do not need this change.
    """
    block = graph.block(program)
    layers = [op for op in block.ops if "MeanOut" in op.output_names and not op.attr("is_test")]
    layers = [op for op in layers if not op.attr("use_global_stats")]
    if not layers:
        return
    last = block.ops.index(layers[-1]) + 1
    variables = {kind: [block.var(op.output(f"{kind}Out")[0]) for op in layers] for kind in ("Mean", "Variance")}
    sizes = [variable.shape[0] for variable in variables["Mean"]]

    def insert(at, op_type, inputs, dtype=paddle.float32, **attrs):
        name = unique_name.generate(f"running_statistics.{op_type}")
        out = block.create_var(name=name, shape=[sum(sizes)], dtype=dtype, stop_gradient=True)
        graph.insert(block, at, op_type, inputs, {"Out": out}, graph.FORWARD, **attrs)
        return out

    before = {kind: insert(0, "concat", {"X": inputs}, axis=0) for kind, inputs in variables.items()}
    at = itertools.count(last + len(before))
    after = {kind: insert(next(at), "concat", {"X": inputs}, axis=0) for kind, inputs in variables.items()}
    is_finite = [insert(next(at), "isfinite_v2", {"X": value}, paddle.bool) for value in after.values()]
    both = insert(next(at), "logical_and", dict(zip("XY", is_finite, strict=True)), paddle.bool)
    for kind, outputs in variables.items():
        chosen = insert(next(at), "where", {"Condition": both, "X": after[kind], "Y": before[kind]})
        attrs = {"axis": 0, "num": 0, "sections": sizes}
        graph.insert(block, next(at), "split", {"X": chosen}, {"Out": outputs}, graph.FORWARD, **attrs)
    graph.sync(block)
