"""Components: one module per feature of the training step.

A component owns everything about its feature: its flags (Settings), the conflicts between them (conflicts), and the
operators that it adds to a step.builder.StepBuilder (add): custom operators if step.is_native, otherwise Paddle's. A
component sees only its own Settings, and does not import another component. Component modules import Paddle only inside
functions, because parsing the command line imports all components.
"""

from paddle_resnet.components import (
    accumulation,
    clipping,
    dropout,
    ema,
    lookahead,
    loss,
    mixing,
    optimizer,
    precision,
    quantization,
    rates,
    sparsity,
    stages,
)

COMPONENTS = (
    *(loss, mixing, dropout, optimizer, rates, clipping, accumulation, ema, lookahead),
    *(precision, sparsity, quantization, stages),
)
# Parts of a training program that change the images, the targets of the loss, or layers of the network.
INPUTS = (mixing, loss, dropout)
# The parts of the update, in the order in which their operators are added. Accumulation and precision change gradients
# that Paddle's minimize has added; precision and clipping set the factor with which the optimizer multiplies them.
UPDATE = (rates, accumulation, precision, clipping, optimizer, lookahead, ema)
