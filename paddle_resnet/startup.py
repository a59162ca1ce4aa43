"""The start of a run, up to the import of Paddle and DALI."""

from paddle_resnet.data import layout
from paddle_resnet.job.processes import check_environment, rank, world_size
from paddle_resnet.models import registered_name
from paddle_resnet.settings.values import Settings
from paddle_resnet.utils import logger, progress, signals
from paddle_resnet.utils.errors import RunError, command


def import_paddle(args: Settings) -> None:
    """Set up the log, and check what can be checked without Paddle, so that errors appear before Paddle and DALI are
    imported, which takes seconds. Finally, import Paddle and DALI.

    Raises:
        UsageError: a variable of the launcher, the network, --image-root or the version of Paddle cannot be used
            (compat.check_version, compat.use_pir).
        RunError: Paddle or DALI cannot be imported.
    """
    check_environment()
    logger.setup(rank=rank())
    args.replace(model_arch_name=registered_name(args.model_arch_name))
    # With several processes, --image-root is checked when the data set is first read.
    if args.data_format != "synthetic" and world_size() == 1:
        layout.check_root(args.image_root)
    progress.phase("Paddle import")
    try:
        with signals.importing_paddle():
            import paddle  # noqa: F401
        from paddle_resnet.machine import compat

        compat.check_version()
        if args.program_representation == "pir":
            compat.use_pir()
        from paddle_resnet import phases  # noqa: F401
    except ImportError as e:
        raise RunError(f"Paddle or DALI: cannot be imported ({e}); run {command('doctor')}") from e
