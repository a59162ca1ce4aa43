"""2:4 sparsity (ASP)."""

from paddle.incubate import asp
from paddle.incubate.asp.asp import ASPHelper, MaskAlgo

MASK = ".asp_mask"  # suffix of the name of a pruned parameter's mask


def exclude_classifier(main_prog, model):
    """Exclude the classifier from pruning, as NVIDIA's example does. Paddle itself excludes filters of 3 channels."""
    asp.set_excluded_layers([model.last.weight.name], main_program=main_prog)


def prune(main_prog, place, algorithm):
    """Set two of every four weights to zero, and keep them zero during training (--prune-model).

    Without a GPU, Paddle's CUDA build crashes in `paddle.incubate.asp.prune_model` on a Fleet program. The helper
    below takes the place as an argument and works.

    Args:
        main_prog: training Program.
        place: device of its parameters.
        algorithm: --mask-algo.
    Returns:
        {parameter name: mask}.
    """
    return ASPHelper.prune_model_by_program(place, main_program=main_prog, mask_algo=MaskAlgo[algorithm.upper()])
