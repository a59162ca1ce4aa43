"""2:4 sparsity (ASP).

The gradients of pruned weights are set to 0, and all values that belong to these weights start at 0: the weights, their
float32 master weights, the optimizer state, the slow weights and the averages. Every update rule keeps the values of
pruned weights at 0. Paddle instead sets the weights to 0 after each update. With Paddle's method, the gradients of
pruned weights would be part of the norm that --clip-grad-norm limits, and would change the optimizer state.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.utils import logger

if TYPE_CHECKING:
    from paddle import static

    from paddle_resnet.step.builder import StepBuilder
    from paddle_resnet.step.facts import Loaded

MASK = ".asp_mask"  # suffix of the name of a pruned parameter's mask
GROUP = 4  # size of a group of consecutive input channels; pruning keeps at most _KEPT weights of each group
_KEPT = 2
_MIN_BLOCKS = 1000  # if there are fewer blocks, all of them may have two ones in each row and column by chance


@dataclass(frozen=True)
class Settings:
    asp: bool = flag(
        False,
        "train with 2:4 sparsity",
        topic="precision",
    )
    prune_model: bool = flag(
        False,
        "prune the weights to 2:4 sparsity before training (with --asp)",
        topic="precision",
        depends_on=("asp",),
    )
    mask_algo: str = flag(
        "mask_1d",
        "algorithm that chooses the 2:4 masks",
        topic="precision",
        choices=["mask_1d", "mask_2d_greedy", "mask_2d_best"],
        depends_on=("asp",),
        used_by=("prune_model", (True,)),
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict if --prune-model is set without --asp."""
    if settings.prune_model and not settings.asp:
        yield Conflict("--prune-model: requires --asp; add it, or remove --prune-model", ("prune_model",), ("asp",))


def prepare(step: "StepBuilder") -> None:
    """With --asp, exclude the classifier from pruning, as NVIDIA's example does. Call prepare() before minimize. By
    default, Paddle excludes only weights with fewer than 4 inputs."""
    from paddle.incubate import asp

    if step.part(Settings).asp:
        asp.set_excluded_layers([step.model.last.weight.name], main_program=step.main)


def wrap(optimizer: Any, settings: Settings) -> Any:
    """If --asp is set, return an optimizer that adds masks to the program and keeps pruned weights at 0; otherwise,
    return `optimizer`."""
    from paddle.incubate import asp

    return asp.decorate(optimizer) if settings.asp else optimizer


def add(step: "StepBuilder") -> None:
    """With --asp, multiply the gradients by the masks, instead of the updated parameters as Paddle does. Also add masks
    for frozen parameters, for which Paddle adds none, so that --freeze does not change which variables a checkpoint
    contains."""
    from paddle.incubate.asp.asp import ASPHelper

    from paddle_resnet import graph

    if not step.part(Settings).asp:
        return
    ASPHelper._create_mask_variables(step.main, step.startup, step.frozen)
    block, updates = graph.block(step.main), graph.updates(step.main)
    graph.remove(block, [op for op in block.ops if op.type == "elementwise_mul" and op.input("Y")[0].endswith(MASK)])
    at = itertools.count(block.ops.index(updates[0]))
    for op in updates:
        mask = op.input("Param")[0] + MASK
        if block.has_var(mask):
            gradient = block.var(op.input("Grad")[0])
            inputs = {"X": gradient, "Y": block.var(mask)}
            graph.insert(block, next(at), "elementwise_mul", inputs, {"Out": gradient}, axis=-1)
    graph.sync(block)


def start(settings: Settings, loaded: "Loaded") -> bool:
    """With --prune-model, prune the loaded weights, unless they are already pruned. If this function does not
    prune, but --asp is set, apply the masks. Return whether the weights were pruned: the states of other components
    then start from the pruned weights."""
    is_pruning = settings.prune_model and not any(name.endswith(MASK) for name in loaded.names)
    if is_pruning:
        prune(loaded.program, loaded.place, settings.mask_algo)
    elif settings.asp:
        apply_masks(loaded.program, loaded.place)
    if settings.asp:
        logger.info(describe(loaded.program))
    return is_pruning


def prune(main_prog: "static.Program", place: Any, algorithm: str) -> dict[str, np.ndarray]:
    """Compute the masks of the sparse and narrow parameters (see layers), and set the pruned weights to 0 with
    apply_masks (--prune-model). The masks of narrow parameters contain only ones.

    Paddle's `asp.prune_model` is not used: with the CUDA build, it crashes for a Fleet program on a machine without a
    GPU, and its mask_2d_best maximizes the sum of the kept weights instead of the sum of their magnitudes.

    Args:
        main_prog: training Program.
        place: device of the parameters.
        algorithm: value of --mask-algo.
    Returns:
        {parameter name: mask}.
    """
    from paddle import static

    sparse, narrow, _ = layers(main_prog)
    dense = {parameter.name for parameter in narrow}
    scope, masks = static.global_scope(), {}
    for parameter in (*sparse, *narrow):
        weight = np.array(scope.find_var(parameter.name).get_tensor())
        mask = np.ones_like(weight) if parameter.name in dense else compute_mask(weight, algorithm)
        scope.find_var(parameter.name + MASK).get_tensor().set(mask, place)
        masks[parameter.name] = mask
    apply_masks(main_prog, place)
    return masks


def apply_masks(main_prog: "static.Program", place: Any) -> None:
    """Set all values of pruned weights to 0: the weights, their master weights, the optimizer state and the averages.
    Checkpoints of version 0.1.0 can contain values other than 0 in the optimizer state of pruned weights."""
    from paddle import static

    scope = static.global_scope()
    names = [variable.name for variable in main_prog.list_vars() if variable.persistable]
    for parameter in layers(main_prog)[0]:
        mask = np.array(scope.find_var(parameter.name + MASK).get_tensor())
        belonging = (f"{parameter.name}_", f"{parameter.name}.")
        for name in names:
            if name == parameter.name or (name.startswith(belonging) and not name.endswith(MASK)):
                tensor = scope.find_var(name).get_tensor()
                if tensor.shape() == list(mask.shape):  # skip the powers of Adam's betas
                    value = np.array(tensor)
                    tensor.set(value * mask.astype(value.dtype), place)


def compute_mask(weight: np.ndarray, algorithm: str) -> np.ndarray:
    """Return the mask that keeps at most two of every four consecutive inputs.

    Args:
        weight: [out, in, height, width] of a convolution or [in, out] of a fully connected layer.
        algorithm: mask_1d keeps the two largest magnitudes of each group. mask_2d_greedy and mask_2d_best also keep at
            most two of every four consecutive outputs: mask_2d_greedy chooses the weights of a 4 x 4 block by
            descending magnitude, and mask_2d_best maximizes the sum of their magnitudes.
    Returns:
        array of zeros and ones with the shape and type of the weight.
    """
    from paddle.incubate.asp import utils

    searches = {
        "mask_1d": functools.partial(utils.get_mask_1d, n=_KEPT, m=GROUP),
        "mask_2d_greedy": functools.partial(utils.get_mask_2d_greedy, n=_KEPT, m=GROUP),
        "mask_2d_best": _best_mask,
    }
    rows = weight.transpose(_axes(weight))
    mask = searches[algorithm](rows.reshape(-1, rows.shape[-1]).astype(np.float64))
    return mask.reshape(rows.shape).transpose(np.argsort(_axes(weight))).astype(weight.dtype)


def has_masks_of_signed_search(state: dict[str, np.ndarray]) -> bool:
    """Return whether Paddle's mask_2d_best probably computed the masks in a state {name: array}, which also contains
    the weights. Return False if the masks have fewer than _MIN_BLOCKS blocks.

    Every block of Paddle's masks has two ones in each row and column. In contrast, 2 % to 5 % of the blocks have only
    seven ones after compute_mask(weight, "mask_2d_best"), and 16 % after mask_2d_greedy. Most of the weights that
    Paddle's search keeps are positive (74 % of normally distributed weights).
    """
    masks = {name.removesuffix(MASK): mask for name, mask in state.items() if name.endswith(MASK)}
    masks = {name: mask for name, mask in masks.items() if mask.ndim in (2, 4) and name in state and not mask.all()}
    number = kept = positive = 0
    for name, mask in masks.items():
        rows = mask.transpose(_axes(mask))
        rows = rows.reshape(-1, rows.shape[-1])
        blocks = _blocks(rows[: len(rows) // GROUP * GROUP, : rows.shape[1] // GROUP * GROUP])
        if (blocks.sum(1) != _KEPT).any() or (blocks.sum(2) != _KEPT).any():
            return False
        number += len(blocks)
        kept, positive = kept + np.count_nonzero(state[name]), positive + (state[name] > 0).sum()
    return number >= _MIN_BLOCKS and positive > 0.6 * kept


def _axes(weight):
    """Return the order of axes in which the outputs precede the inputs, and both follow the positions in a filter."""
    return (3, 2, 0, 1) if weight.ndim == 4 else (1, 0)


def _best_mask(matrix):
    """Return the mask [outputs, inputs] that maximizes the sum of the kept magnitudes in each 4 x 4 block."""
    height, width = matrix.shape
    padded = np.pad(np.abs(matrix), [(0, -height % GROUP), (0, -width % GROUP)])
    blocks, patterns = _blocks(padded).reshape(-1, GROUP**2), _patterns()
    # The sums of all patterns need 12 times the memory of the weights, so they are computed for some blocks at a time.
    chunks = np.array_split(blocks, len(blocks) // 2**14 + 1)
    best = np.concatenate([(chunk @ patterns.reshape(-1, GROUP**2).T).argmax(1) for chunk in chunks])
    grid = patterns[best].reshape(len(padded) // GROUP, -1, GROUP, GROUP)
    return grid.transpose(0, 2, 1, 3).reshape(padded.shape)[:height, :width]


def _blocks(matrix):
    """Return the 4 x 4 blocks of a matrix, [number, 4, 4], row by row."""
    height, width = matrix.shape
    grid = matrix.reshape(height // GROUP, GROUP, width // GROUP, GROUP)
    return grid.transpose(0, 2, 1, 3).reshape(-1, GROUP, GROUP)


@functools.cache
def _patterns():
    """Return the maximal 4 x 4 masks with at most two ones in each row and column, [186, 4, 4].

    Paddle considers only the 90 masks with eight ones. A mask with seven ones can have a larger sum of kept magnitudes
    than all masks with eight ones.
    """
    rows = [row for row in itertools.product((0, 1), repeat=GROUP) if sum(row) <= _KEPT]
    masks = np.array(list(itertools.product(rows, repeat=GROUP)))
    masks = masks[(masks.sum(1) <= _KEPT).all(1)]
    is_free = (masks.sum(2) < _KEPT)[:, :, None] & (masks.sum(1) < _KEPT)[:, None, :] & (masks == 0)
    return masks[~is_free.any((1, 2))].astype(np.float64)


def layers(main_prog: "static.Program") -> tuple[list, list, list]:
    """Return the weights of convolutions and fully connected layers in a training program with --asp as three lists:
    (sparse, narrow, excluded).

    Narrow parameters have fewer than GROUP input channels per convolution group, as in depthwise convolutions and in
    the convolution that reads the images. Excluded parameters are those of the classifier.
    """
    from paddle_resnet import graph

    block = graph.block(main_prog)
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


def counts(main_prog: "static.Program") -> dict[str, int]:
    """Return {"sparse_layers", "dense_layers": number} of a training program with --asp."""
    sparse, narrow, excluded = layers(main_prog)
    return {"sparse_layers": len(sparse), "dense_layers": len(narrow) + len(excluded)}


def describe(main_prog: "static.Program") -> str:
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
