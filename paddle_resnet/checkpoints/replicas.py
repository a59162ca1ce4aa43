"""Check that all ranks train the same network, of which each rank has a replica.

All ranks start with equal variables, all-reduce their gradients, and apply the same update, so their variables remain
bit-identical although they are never sent. If a bit changes in the memory of one GPU, its rank computes the gradients
of a different network from then on, and rank 0 saves a network that the other ranks do not train.
"""

import zlib

import numpy as np
from paddle import static

from paddle_resnet import graph
from paddle_resnet.checkpoints import variables
from paddle_resnet.job import exchange, processes
from paddle_resnet.job.position import ranks
from paddle_resnet.step import facts
from paddle_resnet.utils.errors import RunError

INTERVAL_STEPS = 1000  # training steps between two checks; the variables are also checked before each checkpoint


def names(program: static.Program) -> list[str]:
    """Return the names of the variables of a training program that must be equal on all ranks, sorted.

    The result contains all variables that a checkpoint contains: parameters, float32 master weights, ASP masks,
    optimizer state (such as velocity, Adam moments, slow weights of --lookahead), learning rate, loss scale and EMA
    weights. The variables that the forward pass writes are excluded, because each rank computes them from its own
    images: BN statistics with their moving averages (--ema), and ranges of quantized activations (--qat). The
    half-precision copy of a parameter is included, although the next update overwrites it with its master weight.
    """
    ops = graph.block(program).ops
    own = {name for op in ops if op.attr("op_role") == graph.FORWARD for name in op.output_arg_names}
    own |= {follower for state in facts.of(program).states for name, follower in state.variables.items() if name in own}
    return sorted({variable.name for variable in variables.saved(program)} - own)


def check(program: static.Program, where: str) -> None:
    """Compare the variables of all ranks. Every rank must call check() between the same two steps, after it has waited
    for its device. In a job with a single process, check() does nothing.

    Args:
        program: training Program; its variables are in the global scope.
        where: position in the run for the message, such as "before step 2000 of epoch 3".
    Raises:
        RunError: the variables differ between the ranks. Every rank raises RunError with the same message.
    """
    if processes.world_size() == 1:
        return
    own = checksums(program)
    # If the variables are equal, the ranks exchange only one number each, because the store through which they exchange
    # numbers never frees memory.
    total = zlib.crc32(np.array([*own.values()], np.uint32))
    if len(np.unique(exchange.all_gather([total]))) == 1:
        return
    message = describe(exchange.all_gather([*own.values()]), [*own], where)
    exchange.let_others_leave()  # without this call, other ranks could report that rank 0 failed first
    raise RunError(message)


def checksums(program: static.Program) -> dict[str, int]:
    """Return {variable: CRC-32 of its bytes} for all variables in names(program). Each variable is copied to host
    memory and then discarded, so that only one copy exists at a time."""
    return {name: zlib.crc32(variables.read(name)) for name in names(program)}


def describe(rows: np.ndarray, compared: list[str], where: str) -> str:
    """Return the error message for variables that differ between ranks. If more than half of the ranks are equal, the
    message names only the other ranks.

    Args:
        rows: checksums, array [ranks, variables].
        compared: names of the variables.
        where: see check().
    """
    groups = {}  # ranks with equal checksums
    for rank, row in enumerate(rows):
        groups.setdefault(tuple(row), []).append(rank)
    majority = max(groups.values(), key=len)
    if 2 * len(majority) > len(rows):
        deviating = [rank for rank in range(len(rows)) if rank not in majority]
        who = f"differ on {ranks(deviating)} from all other ranks"
    else:
        listed = [ranks(group) for group in groups.values()]
        who = f"differ between {' and '.join(listed[:5])}{' and others' * (len(listed) > 5)}"
    differing = [name for name, column in zip(compared, np.transpose(rows), strict=True) if len({*column}) > 1]
    return (
        f"parameters and optimizer state: {who} {where} ({', '.join(differing[:3])}{', ...' * (len(differing) > 3)}); "
        "check the memory of these ranks' GPUs and machines for errors, and repeat the command with --resume, which "
        "continues from the newest valid checkpoint"
    )
