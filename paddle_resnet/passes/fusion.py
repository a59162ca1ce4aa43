"""Programs rewritten to custom operators (native/): in NHWC BN with the activation after it, or with the residual
addition and a ReLU, and max pooling; the update of all parameters, with the check of gradients and the loss scale.

This pass runs after all that Paddle writes into a program (precision, gradients, all-reduces). So parameters,
checkpoints and communication are the same with and without it.
"""

from collections import namedtuple

import paddle

from paddle_resnet.optimizers import table

VECTOR_BYTES = 16  # what a thread of the kernels reads at once
TYPE_BYTES = {paddle.float32: 4, paddle.float16: 2, paddle.bfloat16: 2}

# Paddle's activations that the kernels fuse: operator, with the attributes that it must have, and name in
# native/activations.h.
ACTIVATIONS = {
    "relu": ({}, "relu"),
    "relu6": ({"threshold": 6.0}, "relu6"),
    "hard_swish": ({"threshold": 6.0, "scale": 6.0, "offset": 3.0}, "hard_swish"),
    "silu": ({}, "silu"),
    "swish": ({"beta": 1.0}, "silu"),
}

# The operators from a BN to the tensor that the rest of the program reads: the activation, the addition of `addend`.
Tail = namedtuple("Tail", "ops out activation addend")


def fuse(program):
    """Rewrite a program in place. Paddle's operators stay where the kernels do not apply: layouts other than NHWC,
    channels that are not whole vectors of 16 bytes, gradients through fixed statistics, pooling without a fixed size.

    Args:
        program: training Program after minimize, or evaluation Program after cast_evaluation_program.
    Returns:
        number of Paddle's operators that were replaced.
    """
    graph = _Graph(program.global_block())
    for op in list(graph.block.ops):
        if op.type == "batch_norm" and op.attr("data_layout") == "NHWC" and graph.has_whole_vectors(op):
            if op.attr("is_test") and not op.attr("trainable_statistics"):
                _fuse_inference(graph, op)
            elif not op.attr("is_test") and not op.attr("use_global_stats"):
                _fuse_training(graph, op)
        elif op.type == "pool2d" and _is_plain_max_pool(graph, op) and graph.has_whole_vectors(op):
            _fuse_max_pool(graph, op)
    _fuse_updates(graph)
    return graph.finish()


class _Graph:
    """The producer and the readers of each variable of a block, and the replacements to make in it."""

    def __init__(self, block):
        self.block = block
        self.makers, self.readers = {}, {}
        for op in block.ops:
            self.makers.update(dict.fromkeys(op.output_arg_names, op))
            for name in set(op.input_arg_names):
                self.readers.setdefault(name, []).append(op)
        fused_buffers = [op for op in block.ops if op.type == "coalesce_tensor"]
        self.coalesced = {name: op for op in fused_buffers for name in op.output("Output")}
        self.replaced = []

    def variables(self, op, *names):
        """{name: variable} of inputs or outputs of an operator."""
        inputs = set(op.input_names)
        return {name: self.block.var((op.input if name in inputs else op.output)(name)[0]) for name in names}

    def has_whole_vectors(self, op):
        x = self.variables(op, "X")["X"]
        return x.dtype in TYPE_BYTES and x.shape[-1] * TYPE_BYTES[x.dtype] % VECTOR_BYTES == 0

    def only_reader(self, name, op_types):
        """The only forward operator that reads a variable, if it is of one of these types; else None."""
        readers = [op for op in self.readers.get(name, []) if not op.attr("op_role") & 1]
        return readers[0] if len(readers) == 1 and readers[0].type in op_types else None

    def gradient(self, op):
        """The operator that computes all gradients of another one; None if some are not needed."""
        out = op.output("Y" if op.type == "batch_norm" else "Out")[0]
        found = [reader for reader in self.readers.get(f"{out}@GRAD", []) if reader.type == f"{op.type}_grad"]
        return found[0] if found and all(found[0].output(name) for name in found[0].output_names) else None

    def has_gradient(self, ops):
        """Whether the backward pass goes through one of the operators."""
        return any(f"{name}@GRAD" in self.readers for op in ops for name in op.output_arg_names)

    def is_before(self, first, second):
        return self.block.ops.index(first) < self.block.ops.index(second)

    def summands(self, name):
        """The one or two variables that add up to a gradient, and the operators that add them."""
        maker = self.makers[name]
        summands = maker.input_arg_names
        adds = maker.type in ("sum", "grad_add") and len(summands) == 2 and len(self.readers[name]) == 1
        names, ops = (summands, [maker]) if adds else ([name], [])
        return [self.block.var(name) for name in names], ops

    def replace(self, ops, at, op_type, inputs, outputs, attrs):
        """Insert an operator before `at`; finish() removes `ops`."""
        attrs |= {name: at.attr(name) for name in ("op_role", "op_role_var") if at.has_attr(name)}
        place = self.block.ops.index(at)
        self.block._insert_op_without_sync(place, type=op_type, inputs=inputs, outputs=outputs, attrs=attrs)
        self.replaced += ops

    def finish(self):
        for op in self.replaced:
            self.block._remove_op(self.block.ops.index(op), sync=False)
        self.block._sync_with_cpp()
        return len(self.replaced)


def _tail(graph, bn):
    y = bn.output("Y")[0]
    op = graph.only_reader(y, ACTIVATIONS)
    if op is not None:
        attributes, name = ACTIVATIONS[op.type]
        if all(op.attr(key) == value for key, value in attributes.items()):
            return Tail([op], op.output("Out")[0], name, None)
    add = graph.only_reader(y, ["elementwise_add"])
    relu = add and graph.only_reader(add.output("Out")[0], ["relu"])
    # Where both summands come from a BN, the first one takes the addition.
    if relu and add.input("X")[0] == y:
        addend, normalized = graph.variables(add, "Y")["Y"], graph.block.var(y)
        if addend.name != y and addend.shape == normalized.shape and addend.dtype == normalized.dtype:
            return Tail([add, relu], relu.output("Out")[0], "relu", addend)
    return Tail([], y, "", None)


def _fuse_training(graph, bn):
    block, tail = graph.block, _tail(graph, bn)
    ops = [bn, *tail.ops]
    gradients = [graph.gradient(op) for op in reversed(ops)]
    if None in gradients:
        return  # frozen, in part or as a whole
    buffer = graph.coalesced.get(gradients[-1].output("Scale@GRAD")[0])
    if buffer is not None and not graph.is_before(buffer, gradients[0]):
        return  # the buffer of the gradients would be created after the fused operator
    coefficients = block.create_var(name=f"{tail.out}.coefficients", dtype=paddle.float32, stop_gradient=True)
    parameters = graph.variables(bn, "X", "Scale", "Bias", "Mean", "Variance")
    made = {"Y": block.var(tail.out), "Coefficients": coefficients} | graph.variables(bn, "MeanOut", "VarianceOut")
    attrs = {name: bn.attr(name) for name in ("momentum", "epsilon")}

    by_name = graph.variables(gradients[-1], "X@GRAD", "Scale@GRAD", "Bias@GRAD")
    dx, dscale, dbias = by_name.values()
    known = {"X": parameters["X"], "Coefficients": coefficients}
    if buffer is not None:
        known["Into@VECTOR@OPTIONAL"] = [dscale, dbias]  # memory in the buffer of a fused all-reduce
    wanted = {"DX": dx, "DScale": dscale, "DBias": dbias}
    out_gradient = f"{tail.out}@GRAD"
    if tail.addend is None:
        inputs = known | {"DY": block.var(out_gradient)}
        graph.replace(ops, ops[-1], "native_bn_act", parameters, made, attrs | {"activation": tail.activation})
        graph.replace(
            gradients, gradients[0], "native_bn_act_backward", inputs, wanted, {"activation": tail.activation}
        )
        return
    mask = block.create_var(name=f"{tail.out}.mask", dtype=paddle.uint8, stop_gradient=True)
    summands, sums = graph.summands(out_gradient)
    add_gradient = gradients[1]
    inputs = known | {"DY@VECTOR": summands, "Mask": mask}
    wanted |= {"DZ": graph.variables(add_gradient, "Y@GRAD")["Y@GRAD"]}
    graph.replace(ops, ops[-1], "native_bn_add_relu", parameters | {"Z": tail.addend}, made | {"Mask": mask}, attrs)
    graph.replace([*sums, *gradients], gradients[0], "native_bn_add_relu_backward", inputs, wanted, {})


def _fuse_inference(graph, bn):
    tail = _tail(graph, bn)
    ops = [bn, *tail.ops]
    if graph.has_gradient(ops):
        return
    inputs = graph.variables(bn, "X", "Scale", "Bias", "Mean", "Variance")
    if tail.addend is not None:
        inputs["Z@OPTIONAL"] = tail.addend
    attrs = {"epsilon": bn.attr("epsilon"), "activation": tail.activation}
    graph.replace(ops, ops[-1], "native_bn_inference", inputs, {"Y": graph.block.var(tail.out)}, attrs)


def _is_plain_max_pool(graph, op):
    if op.attr("pooling_type") != "max" or op.attr("data_format") != "NHWC":
        return False
    kernel, stride, padding = (op.attr(name) for name in ("ksize", "strides", "paddings"))
    is_square = all(len(set(values)) == 1 for values in (kernel, stride, padding))
    is_plain = not any(op.attr(name) for name in ("global_pooling", "adaptive", "ceil_mode"))
    fits_a_byte = max(kernel) <= 15  # a position in the window
    sees_the_image = max(padding) < min(kernel)  # every window does
    has_fixed_size = min(graph.variables(op, "X")["X"].shape[1:]) > 0
    is_known = is_square and is_plain and fits_a_byte and sees_the_image and has_fixed_size
    return is_known and op.attr("padding_algorithm") == "EXPLICIT"


def _fuse_max_pool(graph, pool):
    block = graph.block
    x, out = graph.variables(pool, "X", "Out").values()
    attrs = {"kernel": pool.attr("ksize")[0], "stride": pool.attr("strides")[0], "padding": pool.attr("paddings")[0]}
    positions = block.create_var(name=f"{out.name}.positions", dtype=paddle.uint8, stop_gradient=True)
    graph.replace([pool], pool, "native_max_pool", {"X": x}, {"Y": out, "Positions": positions}, dict(attrs))
    gradient = graph.gradient(pool)
    if gradient is not None:
        summands, sums = graph.summands(f"{out.name}@GRAD")
        sizes = {"height": x.shape[1], "width": x.shape[2]}
        dx = graph.variables(gradient, "X@GRAD")["X@GRAD"]
        inputs = {"DY@VECTOR": summands, "Positions": positions}
        graph.replace([*sums, gradient], gradient, "native_max_pool_backward", inputs, {"DX": dx}, attrs | sizes)


def _fuse_updates(graph):
    """One operator for all of Paddle's updates of a kind, and one that checks the gradients and updates the loss scale.

    Gradients keep the loss scale until the update reads them in float32. Paddle divides by it in float16, where small
    gradients are lost. A skipped step changes neither parameters nor the optimizer's state; BN statistics include its
    batch.
    """
    block = graph.block
    updates = table.updates(block.program)
    if not updates or any(op.type not in table.BY_OPERATOR for op in updates):
        return  # Paddle's operators would miss the loss scaling
    unscale = _fuse_loss_scaling(graph)
    # table.build_optimizer makes all of them alike.
    [(op_type, rate)] = {(op.type, op.input("LearningRate")[0]) for op in updates}
    rule = table.BY_OPERATOR[op_type]
    for has_masters in (False, True):
        ops = [op for op in updates if bool(op.input("MasterParam")) == has_masters]
        if not ops:
            continue
        tensors = {"Parameters": "Param", **rule.state} | ({"Masters": "MasterParam"} if has_masters else {})
        tensors = {ours: [block.var(op.input(name)[0]) for op in ops] for ours, name in tensors.items()}
        inputs = {f"{name}@VECTOR": variables for name, variables in tensors.items()}
        inputs["Gradients@VECTOR"] = [block.var(op.input("Grad")[0]) for op in ops]
        inputs["Rate"] = block.var(rate)
        if unscale is not None:
            inputs["Unscale@OPTIONAL"] = unscale
        outputs = {f"{name}Out@VECTOR": variables for name, variables in tensors.items()}
        attrs = {ours: ops[0].attr(name) for ours, name in rule.attrs.items()}
        attrs["decays"] = [rule.decay(op) for op in ops]
        graph.replace(ops, ops[0], rule.native + ("_masters" if has_masters else ""), inputs, outputs, attrs)


def _fuse_loss_scaling(graph):
    """Returns the factor for the gradients as a variable, 0 in a step to skip; None without loss scaling."""
    block = graph.block
    checks = [op for op in block.ops if op.type == "check_finite_and_unscale"]
    if not checks:
        return None
    unscale = block.create_var(name="unscale", shape=[1], dtype=paddle.float32, stop_gradient=True)
    found = {op.output("FoundInfinite")[0] for op in checks}
    for op in block.ops:  # operators that join the answers for float32 and for the other type, and copy the result
        if op.type in ("concat", "reduce_any", "memcpy") and found.issuperset(op.input_arg_names):
            found.update(op.output_arg_names)
            checks.append(op)
    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if not scalings:
        graph.replace(
            checks, checks[0], "reciprocal", {"X": graph.variables(checks[0], "Scale")["Scale"]}, {"Out": unscale}, {}
        )
        return unscale
    state = {"PrevLossScaling": "Scale", "InGoodSteps": "GoodSteps", "InBadSteps": "BadSteps"}
    state = {ours: block.var(scalings[0].input(name)[0]) for name, ours in state.items()}
    inputs = state | {"Gradients@VECTOR": [block.var(name) for op in scalings for name in op.input("X")]}
    outputs = {f"{name}Out": variable for name, variable in state.items()} | {"Unscale": unscale}
    rule = {"raise_after_steps": "incr_every_n_steps", "lower_after_steps": "decr_every_n_nan_or_inf"}
    rule |= {"raise_by": "incr_ratio", "lower_by": "decr_ratio"}
    attrs = {ours: scalings[0].attr(name) for ours, name in rule.items()}
    graph.replace([*checks, *scalings], scalings[0], "native_check_finite", inputs, outputs, attrs)
    return unscale
