"""Learning rates of the layers (--lr-decay-by-layer, --classifier-lr-factor)."""

import itertools


def add(step):
    """Multiply the learning rate of each parameter by the factor of its layer."""
    from paddle.utils import unique_name

    from paddle_resnet import graph
    from paddle_resnet.models import parts

    decay, classifier_factor = step.settings.lr_decay_by_layer, step.settings.classifier_lr_factor
    if decay == classifier_factor == 1:
        return
    factors = parts.rate_factors(step.model, decay, classifier_factor)
    block, updates = step.main.global_block(), graph.updates(step.main)
    at, rates = itertools.count(block.ops.index(updates[0])), {}
    for op in updates:
        factor, rate = factors[op.input("Param")[0]], block.var(op.input("LearningRate")[0])
        if factor == 1:
            continue
        if factor not in rates:
            name = unique_name.generate(f"{rate.name}_scaled")
            rates[factor] = block.create_var(name=name, shape=rate.shape, dtype=rate.dtype, stop_gradient=True)
            graph.insert(block, next(at), "scale", {"X": rate}, {"Out": rates[factor]}, scale=float(factor))
        op._rename_input(rate.name, rates[factor].name)
    graph.sync(block)
