"""The update of the parameters (--optimizer). optimizers/table.py contains the update rules."""

from paddle_resnet.optimizers import table


def add(step):
    """Complete the update. Paddle's minimize has added one operator per parameter. With custom kernels, they are
    replaced; otherwise, they are corrected."""
    block = step.main.global_block()
    if step.is_native:
        update_natively(block, table.OPTIMIZERS[step.settings.optimizer], step.factor)
        _place_state(step.startup)
    else:
        _update_masters_in_float32(block)
        _keep_parameters_on_overflow(block)


def use_native(program):
    """Replace Paddle's update operators in a program that build has not built. Operators without a custom operator,
    which cannot read the factor that unscales the gradients, are not replaced."""
    from paddle_resnet import graph
    from paddle_resnet.components import precision

    rules = {table.rule_of(op) for op in graph.updates(program)}
    if len(rules) == 1 and None not in rules:
        block = program.global_block()
        update_natively(block, rules.pop(), precision.check_natively(block))


def update_natively(block, rule, factor):
    """Replace all update operators with one operator per precision and learning rate. If loss scaling skips a step, the
    parameters and the optimizer state do not change, but the BN statistics do.

    Args:
        block: block of a training program.
        rule: table.Rule.
        factor: variable that contains the factor of the gradients, 0 in a skipped step; or None.
    """
    from paddle_resnet import graph

    groups = {}
    for op in graph.updates(block.program):
        groups.setdefault((op.input("LearningRate")[0], bool(op.input("MasterParam"))), []).append(op)
    for (rate, has_masters), ops in groups.items():
        kinds = (*rule.state, *(["MasterParam"] if has_masters else []))
        parameters, gradients, *state = (
            [block.var(name) for name in dict.fromkeys(op.input(kind)[0] for op in ops)]
            for kind in ("Param", "Grad", *kinds)
        )
        state = [variable for variables in state for variable in variables]
        inputs = {"Parameters@VECTOR": parameters, "Gradients@VECTOR": gradients, "State@VECTOR": state}
        inputs["Rate"] = block.var(rate)
        if factor is not None:
            inputs["Unscale@OPTIONAL"] = factor
        outputs = {"ParametersOut@VECTOR": parameters, "StateOut@VECTOR": state}
        attrs = {"hyperparameters": [float(ops[0].attr(name)) for name in rule.attrs]}
        attrs["decays"] = [rule.decay(op) for op in ops]
        graph.replace(block, ops, ops[0], f"native_{rule.native}", inputs, outputs, attrs)
    graph.sync(block)


def _place_state(startup_prog):
    """Create the entire optimizer state on the device of the program.

    Paddle creates and updates the powers of Adam's betas on the CPU. The custom operators need these powers on the GPU,
    because a captured step must not read values from the host.
    """
    for op in startup_prog.global_block().ops:
        if op.attr("op_device") == "cpu":
            op._set_attr("op_device", "")


def _update_masters_in_float32(block):
    """Make the optimizer update the float32 master weight of each bfloat16 parameter, and then cast the master weight
    to the parameter. Paddle has no momentum kernel for bfloat16."""
    import paddle
    from paddle.utils import unique_name

    from paddle_resnet import graph

    for op in reversed(graph.updates(block.program)):
        i = block.ops.index(op)
        if block.var(op.input("Param")[0]).dtype != paddle.bfloat16:
            continue
        param, grad, master = (block.var(op.input(name)[0]) for name in ("Param", "Grad", "MasterParam"))
        grad_fp32 = block.create_var(
            name=unique_name.generate(f"{grad.name}_fp32"), shape=grad.shape, dtype=paddle.float32
        )
        for name, variable in (("Param", master), ("Grad", grad_fp32)):
            op.desc.set_input(name, [variable.name])
        op.desc.set_input("MasterParam", [])
        op.desc.set_output("ParamOut", [master.name])
        op.desc.set_output("MasterParamOut", [])
        op._set_attr("multi_precision", False)
        graph.insert(block, i + 1, "cast", {"X": master}, {"Out": param}, **graph.cast_types(master, param))
        graph.insert(block, i, "cast", {"X": grad}, {"Out": grad_fp32}, **graph.cast_types(grad, grad_fp32))
    graph.sync(block)


def _keep_parameters_on_overflow(block):
    """Set the learning rate to 0 in each step that dynamic loss scaling skips. The change affects only update operators
    that cannot skip the step themselves.

    In a skipped step, Paddle only sets the gradients to 0, so momentum and weight decay would still change the
    parameters. Even with a learning rate of 0, a skipped step decays the velocity. The decay is acceptable, because
    Paddle raises the loss scale, which causes skipped steps, only after 2,000 steps without overflow, and because
    preventing the decay would require an additional operator per parameter.
    """
    import paddle
    from paddle.utils import unique_name

    from paddle_resnet import graph

    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    updates = [op for op in graph.updates(block.program) if not _skips_steps(op)]
    if not scalings or not updates:
        return
    overflow = block.var(scalings[0].input("FoundInfinite")[0])
    rates = dict.fromkeys(op.input("LearningRate")[0] for op in updates)
    overflows, proceeds, *effective_rates = (
        block.create_var(name=unique_name.generate(name), shape=[1], dtype=paddle.float32)
        for name in ("overflows", "proceeds", *(f"{rate}_unless_overflow" for rate in rates))
    )
    at = block.ops.index(updates[0])
    for rate, effective_rate in zip(rates, effective_rates, strict=True):
        for op in updates:
            op._rename_input(rate, effective_rate.name)
        factors = {"X": block.var(rate), "Y": proceeds}
        graph.insert(block, at, "elementwise_mul", factors, {"Out": effective_rate}, axis=-1)
    graph.insert(block, at, "scale", {"X": overflows}, {"Out": proceeds}, scale=-1.0, bias=1.0)
    types = graph.cast_types(overflow, overflows)
    graph.insert(block, at, "cast", {"X": overflow}, {"Out": overflows}, **types)
    graph.sync(block)


def _skips_steps(op):
    return "SkipUpdate" in op.input_names and bool(op.input("SkipUpdate"))
