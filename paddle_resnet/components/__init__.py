"""Components: one module per feature of the training step.

A component declares its flags (Settings) and, in most cases, has functions for the conflicts between them (conflicts)
and for adding its operators to a step.builder.StepBuilder (add). If step.is_native is true (--kernels native), `add`
can add custom operators; otherwise, it adds only Paddle's. A component does not import another component, and except
for stages.py reads only its own Settings. Component modules import Paddle only inside functions, because parsing the
command line imports all components.
"""

from paddle_resnet.components import (
    accumulation,
    clipping,
    distillation,
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
    task,
)

COMPONENTS = (
    *(task, loss, mixing, distillation, dropout, optimizer, rates, clipping, accumulation, ema, lookahead),
    *(precision, sparsity, quantization, stages),
)
# Components that change the images, the targets of the loss, the loss, or layers of the network. loss follows mixing,
# because the weight of a mixed image depends on both of its classes, and distillation follows mixing, because the
# teacher sees the mixed images. A component can have two functions: `add` is called before the network is built, and
# `add_loss`, which can replace StepBuilder.loss or add a term to it, after the loss head.
INPUTS = (mixing, loss, distillation, dropout)
# Components of the update, in the order in which `add` is called. With custom kernels, precision sets
# StepBuilder.factor, clipping reads and replaces it, and optimizer and ema read the result. optimizer replaces the
# update operators that rates, accumulation and clipping read. ema comes last, because it averages the parameters that
# lookahead sets.
UPDATE = (rates, accumulation, precision, clipping, optimizer, lookahead, ema)
# Components that change the weights of a training program after they have been loaded, in the order in which `start` is
# called.
START = (precision, sparsity)
