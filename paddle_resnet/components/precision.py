"""Loss scaling of mixed precision (--amp)."""


def add(step):
    """With custom kernels, check all gradients and update the loss scale with one operator. The gradients remain scaled
    until the update multiplies them by step.factor in float32. Paddle's operators would unscale them in float16, where
    small gradients underflow."""
    if step.is_native:
        step.factor = check_natively(step.main.global_block())


def check_natively(block):
    """Replace Paddle's operators for loss scaling. Return the variable that contains the factor for the gradients, or
    None without loss scaling. The factor is 0 if the step must be skipped.

    Raises:
        UsageError: the program uses loss scaling, and a parameter has a regularizer of its own.
    """
    from paddle_resnet import graph
    from paddle_resnet.utils.errors import UsageError

    checks = [op for op in block.ops if op.type == "check_finite_and_unscale"]
    if not checks:
        return None
    if any("/regularization" in op.attr("op_namescope") for op in block.ops):
        # Paddle adds the regularization to the gradients, which are still scaled.
        raise UsageError(
            "--kernels native: loss scaling is not supported with a regularizer of a parameter (paddle.ParamAttr); use "
            "--kernels paddle, or remove the regularizer"
        )
    unscale = graph.float32(block, "unscale", [1])
    overflows = {op.output("FoundInfinite")[0] for op in checks}
    for op in block.ops:  # operators that combine the overflow flags of both data types or copy the combined flag
        if op.type in ("concat", "reduce_any", "memcpy") and overflows.issuperset(op.input_arg_names):
            overflows.update(op.output_arg_names)
            checks.append(op)
    scalings = [op for op in block.ops if op.type == "update_loss_scaling"]
    if scalings:
        _update_scale(block, [*checks, *scalings], scalings, unscale)
    else:
        scale = block.var(checks[0].input("Scale")[0])
        graph.replace(block, checks, checks[0], "reciprocal", {"X": scale}, {"Out": unscale}, {})
    graph.sync(block)
    return unscale


def _update_scale(block, ops, scalings, unscale):
    """Replace operators with one operator that checks the gradients and updates the loss scale."""
    from paddle_resnet import graph

    state = {"PrevLossScaling": "Scale", "InGoodSteps": "GoodSteps", "InBadSteps": "BadSteps"}
    state = {kind: block.var(scalings[0].input(name)[0]) for name, kind in state.items()}
    inputs = state | {"Gradients@VECTOR": [block.var(name) for op in scalings for name in op.input("X")]}
    outputs = {f"{name}Out": variable for name, variable in state.items()} | {"Unscale": unscale}
    rule = {"raise_after_steps": "incr_every_n_steps", "lower_after_steps": "decr_every_n_nan_or_inf"}
    rule |= {"raise_by": "incr_ratio", "lower_by": "decr_ratio"}
    attrs = {attr: scalings[0].attr(name) for attr, name in rule.items()}
    graph.replace(block, ops, scalings[0], "native_check_finite", inputs, outputs, attrs)
