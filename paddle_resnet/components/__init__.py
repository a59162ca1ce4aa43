"""Components: one module per feature of the training step.

A component owns everything about its feature: its flags (Settings), the conflicts between them (conflicts), and the
operators that it adds to the step. A component sees only its own Settings, and does not import another component.
Component modules import Paddle only inside functions, because parsing the command line imports all components.
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
