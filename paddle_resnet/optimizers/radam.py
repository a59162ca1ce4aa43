"""RAdam: algorithm 2 of Liu et al., arXiv:1908.03265, with the threshold 5 from the authors' code. Paddle 2.6
lacks the rule, so this module changes the inputs of Paddle's AdamW."""

import math
from typing import Any

LEAST_EPSILON = 1e-12  # with a smaller epsilon, powers() would be inaccurate
_HUGE = 1e36  # a second moment divided by this number is negligible


def powers(step: int, beta1: float, beta2: float, epsilon: float) -> tuple[float, float]:
    """Return the values (power1, power2) with which AdamW's direction m / (1 - power1) / (sqrt(s / (1 - power2)) +
    epsilon) equals RAdam's direction up to rounding. AdamW itself sets power1 and power2 to the powers of the betas.

    RAdam multiplies the direction by a factor that depends on the step. In the first steps, there are too few gradients
    to estimate the second moment, so RAdam's direction is m / (1 - beta1^step).

    Args:
        step: number of the step, counted from 1.
        beta1, beta2, epsilon: as in AdamW. epsilon is at least LEAST_EPSILON.
    """
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (1 - correction2) / correction2
    if length <= 5:
        return 1 - correction1 / epsilon, 1 - _HUGE
    factor = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return 1 - correction1 / math.sqrt(factor), 1 - correction2


def rewrite(step: Any) -> None:
    """Change a training program from AdamW to RAdam. In all update operators, the result of powers() replaces the
    powers of the betas; the host writes this result before each step. The step count includes the steps that loss
    scaling skips."""
    from paddle_resnet import graph

    ops, schedule = graph.updates(step.main), step.schedule
    betas_and_epsilon = [ops[0].attr(name) for name in ("beta1", "beta2", "epsilon")]
    for i, name in enumerate(("Beta1Pow", "Beta2Pow")):
        power = step.declare(f"radam_{name}", lambda i=i: powers(schedule.done + 1, *betas_and_epsilon)[i])
        for op in ops:
            graph.set_input(op, name, [power.name])
            graph.set_output(op, f"{name}Out", [power.name])
    for op in ops:
        graph.set_attr(op, "use_global_beta_pow", True)  # so that the operator does not update the powers


# Values of table.Rule that differ from AdamW's. RAdam needs all layers from step 1 on, because a parameter whose
# training starts later would need its own step count.
RULE = {"rewrite": rewrite, "least_epsilon": LEAST_EPSILON, "needs_all_layers": True}
