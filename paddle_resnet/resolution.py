"""Resolve the flags that depend on the machine, the checkpoint or the data. The flags are resolved in this order, and
then frozen:

command line, file   config.parse_args
device               resolve_device, before the processes connect; drops values of a file that the device excludes,
                     and --fuse-resunit, which has no effect
choice               recipe.choose (--choose-recipe)
checkpoint           restore.Network, find and inherit_flags, through settings/inheritance.py
machine              Layout, Loader and Kernels
data                 Classes
output               phases.Run.find_start: --report-file

A step, such as Layout, is a class that declares the flags it reads. Its method `changes` returns the values to set, and
values.Settings.apply sets them.
"""

from dataclasses import dataclass

import paddle

from paddle_resnet.components import task
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import gpus
from paddle_resnet.native import build as native
from paddle_resnet.settings import conflicts, validation, values
from paddle_resnet.settings.field import about
from paddle_resnet.settings.groups import benchmark, dataset, images, machine
from paddle_resnet.settings.values import Changes
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
        UsageError: resolve_data or Kernels fails.
    """
    resolved = resolve_data(settings, mode)
    if not resolved.is_frozen:
        resolved.apply(Kernels)
        resolved.finalize()
    return resolved


def resolve_data(settings: values.Settings, mode: Mode) -> values.Settings:
    """Return Settings whose flags for a loader are resolved: `settings` if they are frozen, otherwise a copy. Raises
    the same errors as resolve_device, Loader and Classes."""
    resolved = settings.resolved
    if not resolved.is_frozen:
        resolve_device(resolved)
        resolved.apply(Layout)
        resolved.apply(Loader)
        resolved.apply(Classes, mode)
    return resolved


def resolve_device(settings: values.Settings) -> None:
    """Apply Device, and call drop_unused, because values of a --config file may require a different device. Raises the
    errors of Device."""
    settings.apply(Device)
    drop_unused(settings)


def drop_unused(settings: values.Settings) -> None:
    """Drop values of a file or a recipe that conflict with flags of higher rank (validation.drop_unused). Log all
    dropped values that have not been logged."""
    validation.drop_unused(settings)
    while settings.dropped:
        logger.info(settings.dropped.pop(0))


@dataclass(frozen=True)
class Device(machine.Settings):
    def changes(self) -> Changes:
        """Resolve --device auto, and set --fuse-resunit, which has no effect, to false.

        Raises:
            UsageError: --device is gpu, but Paddle cannot use a GPU; or the job has several processes, which
                --program-representation pir does not support.
        """
        if self.program_representation == "pir" and processes.world_size() > 1:
            raise UsageError(
                f"--program-representation pir: requires a single process, but this job has {processes.world_size()}; "
                "start a single process, or use --program-representation legacy"
            )
        device = gpus.resolve(self.device, processes.local_gpu(), processes.world_size() > 1)
        if self.fuse_resunit:
            logger.warn(
                "--fuse-resunit: has no effect; remove the flag (in NHWC on a GPU, custom kernels fuse BN, addition "
                "and ReLU)"
            )
        return {"machine": {"device": device, "fuse_resunit": False}}


@dataclass(frozen=True)
class Layout(machine.Settings):
    origin_of_layout: str = about("origin", "data_layout")

    def changes(self) -> Changes:
        """On a CPU, choose NHWC for PIR programs, because only in this layout do they compute exactly what legacy
        programs compute. Also choose NHWC with --kernels auto if the custom kernels can be built, because the custom
        kernels are faster than Paddle's and support only NHWC. If --data-layout is explicit or inherited, its value
        does not change."""
        if self.device != "cpu" or self.origin_of_layout != "default":
            return {}
        if self.program_representation == "pir":
            return {"machine": {"data_layout": "NHWC"}}
        if self.kernels != "auto":
            return {}
        try:
            if not native.has_onednn():
                raise native.Unavailable("this build of Paddle contains no oneDNN 3")
            native.load()
        except native.Unavailable as e:
            _log_unavailable(e)
            return {"machine": {"kernels": "paddle"}}
        return {"machine": {"data_layout": "NHWC"}}


def _log_unavailable(reason: native.Unavailable) -> None:
    logger.info(f"--kernels auto: custom kernels are unavailable ({reason}); using Paddle's slower kernels")


@dataclass(frozen=True)
class Loader(conflicts.Device, images.Settings):
    has_fixed_shape: bool = about("is_fixed", "image_shape")
    has_inherited_shape: bool = about("is_inherited", "image_shape")

    def changes(self) -> Changes:
        """Resolve --dali-device auto. If --image-shape is neither explicit nor inherited, choose its number of
        channels.

        Raises:
            UsageError: the device does not support the precision or a loader flag.
        """
        validation.check_none(self.conflicts())
        if self.amp and self.amp_dtype == "bfloat16":
            check_bfloat16(paddle.device.cuda.get_device_capability(processes.local_gpu()))
        changes: Changes = {}
        if self.dali_device == "auto":
            changes["--device"] = {"dali_device": self.device}
        if not (self.has_fixed_shape or self.has_inherited_shape):
            # In NHWC on a GPU, Tensor Cores and custom kernels load the four values of a pixel at once. On a CPU or in
            # NCHW, a fourth channel has no benefit.
            channels = 4 if self.device == "gpu" and self.data_layout == "NHWC" else 3
            changes["machine"] = {"image_shape": [channels, *self.image_shape[1:]]}
        return changes


def check_bfloat16(capability: tuple[int, int]) -> None:
    """Raise UsageError if a GPU with this compute capability does not support bfloat16."""
    major, minor = capability
    if major < 8:
        raise UsageError(
            f"--amp-dtype bfloat16: requires compute capability 8.0 or higher, but this GPU has {major}.{minor}; "
            "use --amp-dtype float16"
        )


@dataclass(frozen=True)
class Kernels(machine.Settings, benchmark.Settings):
    def changes(self) -> Changes:
        """Resolve --kernels auto, load the custom operators if they are used, and turn --cuda-graph off if steps cannot
        be captured.

        Raises:
            UsageError: --kernels is native, but the custom kernels are unavailable or do not support the layout.
        """
        validation.check_none(machine.conflicts(self))
        is_on_gpu, kernels = self.device == "gpu", self.kernels
        if kernels == "auto":
            is_supported = self.data_layout == "NHWC" and self.program_representation == "legacy"
            kernels = "native" if is_supported else "paddle"
        if kernels == "native":
            try:
                native.load(paddle.device.cuda.get_device_capability(processes.local_gpu()) if is_on_gpu else None)
            except native.Unavailable as e:
                if self.kernels == "native":
                    raise UsageError(f"--kernels native: {e}; fix this problem, or use --kernels paddle") from e
                _log_unavailable(e)
                kernels = "paddle"
        # A run with --profile-steps does not capture steps, because a trace cannot attribute the kernels of a CUDA
        # graph to operators.
        can_capture = is_on_gpu and kernels == "native" and self.profile_steps is None
        return {"machine": {"kernels": kernels, "cuda_graph": self.cuda_graph and can_capture}}


@dataclass(frozen=True, kw_only=True)
class Classes(dataset.Settings, task.Settings):
    num_of_class: int | None

    def changes(self, mode: Mode) -> Changes:
        """If --num-of-class has no value, set it to the number of classes in the data, or to DEFAULT_CLASSES if the
        data does not define classes.

        Args:
            mode: the split whose classes are counted, Mode.TRAIN or Mode.EVAL.
        Raises:
            UsageError: the data set cannot be read.
        """
        if self.num_of_class is not None:
            return {}
        counted = None
        if self.data_format != "synthetic":
            # Only rank 0 counts the classes, because all ranks must have the same number when Fleet's startup program
            # broadcasts the parameters.
            root = DataRoot(
                *(self.image_root, self.data_format, self.allow_outside, self.label_offset),
                is_multi_label=self.multi_label,
            )
            counted = exchange.from_rank_0(lambda: root.count_classes(mode))
        return {"data": {"num_of_class": counted or DEFAULT_CLASSES}}
