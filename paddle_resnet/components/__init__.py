"""Features of a training run. A component is a module that owns everything about one feature.

`add(step)` adds its operators to a step.builder.StepBuilder: custom operators if step.is_native, otherwise Paddle's. A
component looks into no other component. Paddle is imported inside functions, because the command line is parsed
without Paddle.
"""

from paddle_resnet.components import accumulation, clipping, ema, lookahead, optimizer, precision, rates

# The parts of the update, in the order in which their operators are added. Accumulation and precision work on the
# gradients that Paddle's minimize has added; clipping multiplies the factor with which the optimizer unscales them.
UPDATE = (rates, accumulation, precision, clipping, optimizer, lookahead, ema)
