"""Hide differences between Paddle 2.6 and Paddle 3. If a difference disappears, tests/machine/test_compat.py fails.

With both versions, the project builds legacy programs (paddle_resnet/__init__.py sets `FLAGS_enable_pir_api=0`), unless
--program-representation selects Paddle 3's PIR programs.
Paddle's internal modules are imported inside functions, because an unsupported version may lack them.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import paddle
from paddle import static

from paddle_resnet.machine import driver
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, command

if TYPE_CHECKING:
    from paddle.base.framework import Block, Operator

# The test suite passes with the versions LOWEST and HIGHEST. Newer patch releases of 2.6, and all versions newer than
# HIGHEST, are also accepted.
LOWEST, HIGHEST = (2, 6, 2), (3, 3, 1)
IS_PADDLE_3 = int(paddle.version.major) >= 3
_PIR = "FLAGS_enable_pir_api"
_ONEDNN = (
    "oneDNN cannot compute the gradient of the loss",
    "on a CPU, convolutions in NCHW use oneDNN without this flag",
)
# {flag of Paddle with which programs fail: (reason, alternative)}
_HARMFUL_FLAGS = {
    "FLAGS_check_nan_inf": (
        "loss and loss scaling use infinite values on purpose",
        "--max-bad-steps stops a run whose losses are not finite",
    ),
    "FLAGS_use_mkldnn": _ONEDNN,
    **({"FLAGS_use_onednn": _ONEDNN} if IS_PADDLE_3 else {}),
}


def check_version(version: str = paddle.__version__) -> None:
    """Check that the version of Paddle is supported, that Paddle builds legacy programs, and that no flag of Paddle
    makes these programs fail. Warn, once per process, if is_newer_than_tested(version). If an earlier command
    in this process has called use_pir, switch Paddle to legacy programs again.

    Raises:
        UsageError: the version is not supported, Paddle builds PIR programs although use_pir has not been called, or
            a flag in _HARMFUL_FLAGS is set.
    """
    numbers = _numbers(version)
    if numbers < HIGHEST and not (numbers[:2] == LOWEST[:2] and numbers >= LOWEST):
        lowest, highest = (".".join(map(str, tested)) for tested in (LOWEST, HIGHEST))
        replacement = driver.replacement(highest, f"paddlepaddle=={highest}")
        remedy = driver.remedy() if driver.gpu() else f"install one of them, for example with {replacement}"
        raise UsageError(
            f"Paddle {version}: not supported; this project is tested with {lowest} (lowest) and {highest} (highest); "
            f"{remedy}"
        )
    if is_newer_than_tested(version):
        _warn_of_newer_version(version)
    if _uses_pir:
        leave_pir()
    if builds_pir():
        raise UsageError(
            f"{_PIR}: Paddle {version} builds PIR programs, which lack Fleet's optimizer and sparsity; "
            f"unset {_PIR}, and import paddle_resnet before Paddle (see docs/paddle3.md)"
        )
    for name, (reason, alternative) in _HARMFUL_FLAGS.items():
        if paddle.get_flags(name)[name]:
            raise UsageError(f"{name}: not supported, because {reason}; unset {name} ({alternative})")


def is_newer_than_tested(version: str = paddle.__version__) -> bool:
    """Return whether a version of Paddle is newer than HIGHEST, apart from the patch number."""
    return _numbers(version)[:2] > HIGHEST[:2]


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


@functools.cache  # one warning per process
def _warn_of_newer_version(version):
    highest = ".".join(map(str, HIGHEST))
    logger.warn(
        f"Paddle {version}: newer than {highest}, the newest version with which this project is tested; run "
        f"{command('doctor', '--self-test')} to check it on this machine"
    )


def builds_pir() -> bool:
    """Return whether Paddle builds PIR programs."""
    return IS_PADDLE_3 and paddle.get_flags(_PIR)[_PIR]


def leave_pir() -> None:
    """Switch Paddle 3 to legacy programs after Paddle has been imported, as Paddle's OldIrGuard does."""
    global _uses_pir
    _uses_pir = False
    if builds_pir():
        from paddle import pir_utils

        paddle.set_flags({_PIR: False})
        pir_utils._switch_to_old_ir_()


_uses_pir = False


def use_pir() -> None:
    """Make Paddle build PIR programs, as Paddle's IrGuard does (--program-representation pir), until check_version or
    leave_pir is called.

    Raises:
        UsageError: the version of Paddle is older than 3.
    """
    global _uses_pir
    if not IS_PADDLE_3:
        raise UsageError(
            f"--program-representation pir: requires Paddle {'.'.join(map(str, HIGHEST))} or newer, but this is Paddle "
            f"{paddle.__version__}; use --program-representation legacy, or install a newer version"
        )
    _uses_pir = True
    if not builds_pir():
        from paddle import pir_utils

        paddle.set_flags({_PIR: True})
        pir_utils._switch_to_pir_()


# Type of the all-reduce operator that Fleet inserts for gradients. In Paddle 3, this operator has no attribute
# use_calc_stream and always runs on the communication stream.
ALL_REDUCE = "all_reduce" if IS_PADDLE_3 else "c_allreduce_sum"
HAS_CALC_STREAM = not IS_PADDLE_3


def append_all_reduce(block: "Block", variable: static.Variable) -> None:
    """Append an operator that sums a variable over all processes, in place.

    In Paddle 3.3, paddle.distributed.all_reduce fails in a legacy Program: "expected str instance, ReduceOp found".
    """
    if IS_PADDLE_3:
        x, out, attrs = "x", "out", {"reduce_type": int(paddle.distributed.ReduceOp.SUM)}
    else:
        x, out, attrs = "X", "Out", {"use_calc_stream": True}
    attrs["ring_id"] = 0
    block.append_op(type=ALL_REDUCE, inputs={x: variable}, outputs={out: variable}, attrs=attrs)


def start_gloo(prepare: Callable[[], object]) -> None:
    """Connect the processes of a CPU job through Gloo.

    In Paddle 3, operators need a communicator that uses Paddle's TCP store; otherwise, they fail with
    "NCCLCommContext is nullptr". In Paddle 2.6, operators need state from init_parallel_env, which also starts helper
    processes.

    Args:
        prepare: function to call before the helper processes of Paddle 2.6 start. The return value of `prepare` is
            kept alive until the helper processes have started.
    """
    if IS_PADDLE_3:
        from paddle.base import core

        store, environment = core.create_or_get_global_tcp_store(), paddle.distributed.ParallelEnv()
        core.CommContextManager.create_gloo_comm_context(store, "0", environment.rank, environment.world_size)
    else:
        kept = prepare()
        paddle.distributed.init_parallel_env()
        del kept


def sqrt(x: static.Variable) -> static.Variable:
    """Return the square root of x. Unlike this function, paddle.sqrt of Paddle 3.3 rejects legacy variables:
    "sqrt(): argument (position 1) must be Value"."""
    return _append("sqrt", x)


def accept_legacy_any() -> None:
    """Patch paddle.any to accept legacy variables, which Paddle 3.3 rejects.

    At level O2, Paddle's mixed precision combines the overflow flags of both precisions with paddle.any.
    """
    if IS_PADDLE_3:
        paddle.any = _any


_paddle_any = paddle.any


def _any(x, *args, **kwargs):
    if isinstance(x, static.Variable) and not args and not kwargs:
        return _append("reduce_any", x, dim=[0], keep_dim=False, reduce_all=True)
    return _paddle_any(x, *args, **kwargs)


def _append(op_type, x, **attrs):
    from paddle.base.layer_helper import LayerHelper

    helper = LayerHelper(op_type)
    out = helper.create_variable_for_type_inference(x.dtype)
    helper.append_op(type=op_type, inputs={"X": x}, outputs={"Out": out}, attrs=attrs)
    return out


def assigned(op: "Operator") -> np.ndarray:
    """Return the values of an assign_value operator of type float32 as an array. Paddle 3 stores the values as a list
    of Scalar objects, whereas Paddle 2.6 stores one list of numbers per type."""
    values = [value.value() for value in op.attr("values")] if IS_PADDLE_3 else op.attr("fp32_values")
    return np.array(values, np.float32).reshape(op.attr("shape"))
