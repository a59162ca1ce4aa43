"""2:4 sparsity (ASP)."""

import logging
import math

from paddle.incubate import asp
from paddle.incubate.asp.asp import ASPHelper, MaskAlgo

MASK = ".asp_mask"  # suffix of the name of a pruned parameter's mask
GROUP = 4  # size of a group of consecutive input channels; pruning sets two weights of each group to zero


def exclude_classifier(main_prog, model):
    """Exclude the classifier from pruning, as NVIDIA's example does. By default, Paddle excludes only filters with 3
    channels."""
    asp.set_excluded_layers([model.last.weight.name], main_program=main_prog)


def prune(main_prog, place, algorithm):
    """Set two of every four weights to zero, and keep them zero during training (--prune-model).

    On a machine without a GPU, the CUDA build of Paddle crashes if `paddle.incubate.asp.prune_model` is called for a
    Fleet program. Therefore prune() calls an internal function of Paddle that takes the device as an argument.

    Args:
        main_prog: training Program.
        place: device of the parameters.
        algorithm: value of --mask-algo.
    Returns:
        {parameter name: mask}.
    """
    # Silence Paddle, which logs a warning for each layer that remains dense; describe() lists all these layers in one
    # line.
    logging.getLogger("paddle.incubate.asp.supported_layer_list").setLevel(logging.ERROR)
    return ASPHelper.prune_model_by_program(place, main_program=main_prog, mask_algo=MaskAlgo[algorithm.upper()])


def layers(main_prog):
    """Return the parameters of convolutions and fully connected layers as three lists: (sparse, narrow, excluded).

    Narrow parameters have fewer than GROUP input channels per convolution group, as in depthwise convolutions and in
    the convolution that reads the images. Excluded parameters are those of the classifier.
    """
    block = main_prog.global_block()
    sparse, narrow, excluded = [], [], []
    for parameter in main_prog.all_parameters():
        shape = parameter.shape
        if len(shape) not in (2, 4) or parameter.name.endswith(MASK):
            continue
        if not block.has_var(parameter.name + MASK):
            excluded.append(parameter)
        else:
            inputs = shape[1] if len(shape) == 4 else shape[0]
            (sparse if inputs >= GROUP else narrow).append(parameter)
    return sparse, narrow, excluded


def counts(main_prog):
    """Return {"asp.sparse_layers", "asp.dense_layers": number} for the summary of a run with --asp."""
    sparse, narrow, excluded = layers(main_prog)
    return {"asp.sparse_layers": len(sparse), "asp.dense_layers": len(narrow) + len(excluded)}


def describe(main_prog):
    """Return a line of text that states which layers are 2:4 sparse and which remain dense."""
    sparse, narrow, excluded = layers(main_prog)
    total = [*sparse, *narrow, *excluded]
    weights, pruned = (sum(math.prod(p.shape) for p in parameters) for parameters in (total, sparse))

    def names(parameters):
        return ", ".join(p.name.partition(".")[0] for p in parameters)

    dense = [f"the classifier {names(excluded)}"]
    if narrow:
        dense.append(f"layers with fewer than {GROUP} input channels per group ({names(narrow)})")
    return (
        f"--asp: {len(sparse)} of {len(total)} layers are 2:4 sparse, {pruned / weights:.0%} of the weights; dense: "
        f"{' and '.join(dense)}"
    )
