"""The parts of a network, ordered by depth, for --freeze, --lr-decay-by-layer and --classifier-lr-factor.

Each layer that is an attribute of the network and has parameters is a part. If the attribute is a list of layers, each
layer in the list is a part, except that the stem is always a single part. The classifier is always a part of its own.
"""

import re
from typing import TYPE_CHECKING

from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError

if TYPE_CHECKING:
    from paddle import nn, static
    from paddle.base.framework import Parameter

ALL_BUT_CLASSIFIER = "all-but-classifier"


def freeze(model: "nn.Layer", names: list[str]) -> "list[Parameter]":
    """Freeze layers of a network before its forward pass is built. The optimizer does not update the parameters of
    frozen layers. Frozen BN layers normalize with their running statistics and do not update these statistics.

    Args:
        model: result of build_model.
        names: layer paths from --freeze, such as "stem"; "stages.0" also selects the blocks of the stage, "stages.0_0",
            "stages.0_1" and so on. ALL_BUT_CLASSIFIER, as the only name, selects all layers outside the classifier.
    Returns:
        list of the frozen parameters.
    Raises:
        UsageError: a name matches no layer, or all parameters would be frozen.
    """
    flag = f"--freeze {','.join(names)}"
    layers = dict(model.named_sublayers(include_self=True))
    if names == [ALL_BUT_CLASSIFIER]:
        classifier = _classifier(model)
        chosen = [path for path in layers if not _is_in(path, classifier)]
    else:
        if unknown := [name for name in names if not any(_matches(layers, name, path) for path in layers)]:
            valid = dict.fromkeys(re.sub(r"_\d+$", "", part) for part in _parts(model))
            raise UsageError(
                f"{flag}: {unknown[0]} is not a layer of the network; use {ALL_BUT_CLASSIFIER}, or layers from "
                f"{', '.join(valid)}"
            )
        chosen = [path for path in layers if any(_matches(layers, name, path) for name in names)]
    frozen = []
    for layer in (layers[path] for path in chosen):
        if hasattr(layer, "_use_global_stats"):  # only BN layers have this attribute
            layer._use_global_stats = True
        for parameter in layer.parameters(include_sublayers=False):
            if parameter.trainable:
                parameter.trainable, parameter.stop_gradient = False, True
                frozen.append(parameter)
    trained = sum(parameter.trainable for parameter in model.parameters())
    if not trained:
        raise UsageError(f"{flag}: freezes all layers; remove at least one name")
    logger.info(f"{flag}: {len(frozen)} of {len(frozen) + trained} parameters are frozen")
    return frozen


def set_bn_momentum(model: "nn.Layer", momentum: float) -> None:
    """Set the momentum of all BN layers, which is the weight of the previous value in their moving averages."""
    for layer in model.sublayers():
        if hasattr(layer, "_use_global_stats"):
            layer._momentum = momentum


def stop_gradients(program: "static.Program") -> None:
    """Mark the variables of a forward pass that do not depend on trainable parameters, so that the backward pass omits
    their gradients."""
    from paddle_resnet import graph

    block = graph.block(program)
    for op in block.ops:
        if all(block.var(name).stop_gradient for name in op.input_arg_names):
            for name in op.output_arg_names:
                block.var(name).stop_gradient = True


def rate_factors(model: "nn.Layer", decay: float, classifier_factor: float) -> dict[str, float]:
    """Return {name of a trainable parameter: factor of its learning rate}. The factor of the last part, the classifier,
    is classifier_factor. The factor of the k-th part before the classifier is decay ** k."""
    parts = _parts(model)
    classifier, last = _classifier(model), len(parts) - 1
    factors = {part: decay ** (last - i) for i, part in enumerate(parts)} | {classifier: classifier_factor}
    return {p.name: factors[part] for part, parameters in parts.items() for p in parameters if p.trainable}


def _parts(model):
    """Return {name of a part: its parameters}. The classifier is the last part."""
    classifier, parts = _classifier(model), {}
    for path, parameter in model.named_parameters():
        head, _, rest = path.partition(".")
        if _is_in(path, classifier):
            head = classifier
        elif head != "stem" and rest[:1].isdigit():  # an entry of a list of layers
            head = f"{head}.{rest.partition('.')[0]}"
        parts.setdefault(head, []).append(parameter)
    return parts | {classifier: parts.pop(classifier)}


def _classifier(model):
    return next(path for path, layer in model.named_sublayers() if layer is model.last)


def _matches(layers, name, path):
    """Return whether --freeze NAME selects the layer at a path. A layer with exactly this name takes precedence over
    the blocks NAME_0, NAME_1 and so on."""
    if name in layers:
        return _is_in(path, name)
    return re.match(rf"{re.escape(name)}_\d+(\.|$)", path) is not None


def _is_in(path, layer):
    return path == layer or path.startswith(f"{layer}.")
