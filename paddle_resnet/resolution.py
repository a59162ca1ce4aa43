"""Resolve the flags that depend on the machine, the checkpoint or the data. The flags are resolved in this order, and
then frozen:

command line, file   config.parse_args
device               resolve_device, before the processes connect; drops values of a file that the device excludes,
                     and --fuse-resunit, which has no effect
choice               recipe.choose (--choose-recipe)
checkpoint           restore.inherit_flags, through settings/inheritance.py
machine              resolve_layout, resolve_loader and resolve_kernels
data                 resolve_classes
output               phases.Run.find_start: --report-file
"""

import paddle

from paddle_resnet.components import precision
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import gpus
from paddle_resnet.native import build as native
from paddle_resnet.settings import conflicts, validation, values
from paddle_resnet.settings.groups import machine
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

DEFAULT_CLASSES = 1000  # number of classes in ImageNet, used if the data does not define classes


def resolve(settings: values.Settings, mode: Mode = Mode.TRAIN) -> values.Settings:
    """Resolve settings without inheriting values from a checkpoint, for programs that use the Python API (docs/api.md).

    Args:
        settings: flags, which are not changed.
        mode: the split that determines --num-of-class, Mode.TRAIN or Mode.EVAL.
    Returns:
        frozen Settings: `settings` if they are frozen, otherwise a copy. Until a value of `settings` changes, each call
        returns the same object.
    Raises:
        UsageError: resolve_data or resolve_kernels fails.
    """
    resolved = resolve_data(settings, mode)
    if not resolved.is_frozen:
        resolve_kernels(resolved)
        resolved.finalize()
    return resolved


def resolve_data(settings: values.Settings, mode: Mode) -> values.Settings:
    """Return Settings whose flags for a loader are resolved: `settings` if they are frozen, otherwise a copy. Raises
    the same errors as resolve_device, resolve_loader and resolve_classes."""
    resolved = settings.resolved
    if not resolved.is_frozen:
        resolve_device(resolved)
        resolve_layout(resolved)
        resolve_loader(resolved)
        resolve_classes(resolved, mode)
    return resolved


def resolve_device(settings: values.Settings) -> None:
    """Resolve --device auto, set --fuse-resunit, which has no effect, to false, and call drop_unused, because values of
    a --config file may require a different device.

    Raises:
        UsageError: --device is gpu, but Paddle cannot use a GPU; or the job has several processes, which
            --program-representation pir does not support.
    """
    if settings.program_representation == "pir" and processes.world_size() > 1:
        raise UsageError(
            f"--program-representation pir: requires a single process, but this job has {processes.world_size()}; "
            "start a single process, or use --program-representation legacy"
        )
    device = gpus.resolve(settings.device, processes.local_gpu(), processes.world_size() > 1)
    settings.resolve("machine", device=device)
    if settings.fuse_resunit:
        logger.warn(
            "--fuse-resunit: has no effect; remove the flag (in NHWC on a GPU, custom kernels fuse BN, addition and "
            "ReLU)"
        )
        settings.resolve("machine", fuse_resunit=False)
    drop_unused(settings)


def drop_unused(settings: values.Settings) -> None:
    """Drop values of a file or a recipe that conflict with flags of higher rank (validation.drop_unused). Log all
    dropped values that have not been logged."""
    validation.drop_unused(settings)
    while settings.dropped:
        logger.info(settings.dropped.pop(0))


def resolve_layout(settings: values.Settings) -> None:
    """On a CPU, choose NHWC for PIR programs, because only in this layout do they compute exactly what legacy programs
    compute. Also choose NHWC with --kernels auto if the custom kernels can be built, because the custom kernels are
    faster than Paddle's and support only NHWC. If --data-layout is explicit or inherited, its value does not change."""
    if settings.device != "cpu" or settings.origin("data_layout") != "default":
        return
    if settings.program_representation == "pir":
        settings.resolve("machine", data_layout="NHWC")
        return
    if settings.kernels != "auto":
        return
    try:
        if not native.has_onednn():
            raise native.Unavailable("this build of Paddle contains no oneDNN 3")
        native.load()
    except native.Unavailable as e:
        _log_unavailable(e)
        settings.resolve("machine", kernels="paddle")
    else:
        settings.resolve("machine", data_layout="NHWC")


def _log_unavailable(reason: native.Unavailable) -> None:
    logger.info(f"--kernels auto: custom kernels are unavailable ({reason}); using Paddle's slower kernels")


def resolve_loader(settings: values.Settings) -> None:
    """Resolve --dali-device auto. If --image-shape is neither explicit nor inherited, choose its number of channels.

    Raises:
        UsageError: the device does not support the precision or a loader flag.
    """
    validation.check_none(settings.part(conflicts.Device).conflicts())
    _check_precision(settings.part(precision.Settings))
    if settings.dali_device == "auto":
        settings.resolve("--device", dali_device=settings.device)
    if not settings.is_fixed("image_shape") and not settings.is_inherited("image_shape"):
        # In NHWC on a GPU, Tensor Cores and custom kernels load the four values of a pixel at once. On a CPU or in
        # NCHW, a fourth channel has no benefit.
        channels = 4 if settings.device == "gpu" and settings.data_layout == "NHWC" else 3
        settings.resolve("machine", image_shape=[channels, *settings.image_shape[1:]])


def _check_precision(settings: precision.Settings) -> None:
    if settings.amp and settings.amp_dtype == "bfloat16":
        major, minor = paddle.device.cuda.get_device_capability(processes.local_gpu())
        if major < 8:
            raise UsageError(
                f"--amp-dtype bfloat16: requires compute capability 8.0 or higher, but this GPU has {major}.{minor}; "
                "use --amp-dtype float16"
            )


def resolve_kernels(settings: values.Settings) -> None:
    """Resolve --kernels auto, load the custom operators if they are used, and turn --cuda-graph off if steps cannot be
    captured.

    Raises:
        UsageError: --kernels is native, but the custom kernels are unavailable or do not support the layout.
    """
    is_on_gpu = settings.device == "gpu"
    requested = settings.kernels
    validation.check_none(machine.conflicts(settings.part(machine.Settings)))
    if requested == "auto":
        is_supported = settings.data_layout == "NHWC" and settings.program_representation == "legacy"
        settings.resolve("machine", kernels="native" if is_supported else "paddle")
    if settings.kernels == "native":
        try:
            native.load(paddle.device.cuda.get_device_capability(processes.local_gpu()) if is_on_gpu else None)
        except native.Unavailable as e:
            if requested == "native":
                raise UsageError(f"--kernels native: {e}; fix this problem, or use --kernels paddle") from e
            _log_unavailable(e)
            settings.resolve("machine", kernels="paddle")
    # A run with --profile-steps does not capture steps, because a trace cannot attribute the kernels of a CUDA graph to
    # operators.
    can_capture = is_on_gpu and settings.kernels == "native" and settings.profile_steps is None
    if not can_capture:
        settings.resolve("machine", cuda_graph=False)


def resolve_classes(settings: values.Settings, mode: Mode) -> None:
    """If --num-of-class has no value, set it to the number of classes in the data, or to DEFAULT_CLASSES if the data
    does not define classes.

    Args:
        settings: values.Settings; modified in place.
        mode: the split whose classes are counted, Mode.TRAIN or Mode.EVAL.
    Raises:
        UsageError: the data set cannot be read.
    """
    if settings.num_of_class is not None:
        return
    counted = None
    if settings.data_format != "synthetic":
        # Only rank 0 counts the classes, because all ranks must have the same number when Fleet's startup program
        # broadcasts the parameters.
        root = DataRoot(
            *(settings.image_root, settings.data_format, settings.allow_outside, settings.label_offset),
            is_multi_label=settings.multi_label,
        )
        counted = exchange.from_rank_0(lambda: root.count_classes(mode))
    settings.set("data", num_of_class=counted or DEFAULT_CLASSES)
