"""Build the loader of a run from its flags (build_dataloader)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_resnet import resolution
from paddle_resnet.components import task
from paddle_resnet.data import loader
from paddle_resnet.data.iterators import Loader, StateError
from paddle_resnet.data.loader_state import BatchFlags
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import watchdog
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS
from paddle_resnet.settings.groups import dataset
from paddle_resnet.settings.values import Settings, flag_name
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import counted
from paddle_resnet.utils.mode import Mode

__all__ = ["DataOptions", "StateError", "build_dataloader", "data_root", "warn_of_unused_outputs"]


@dataclass(frozen=True, kw_only=True)
class DataOptions(dataset.Settings, task.Settings):
    """The flags of a data set."""

    num_of_class: int


def build_dataloader(
    args: Settings,
    mode: Mode,
    state: dict[str, Any] | None = None,
    trained: list[str] | None = None,
    root: DataRoot | None = None,
) -> Loader:
    """Build the iterator over this process's shard.

    Args:
        args: flags, which are not changed. Unresolved flags for the device and the number of classes are resolved for
            this loader only.
        mode: with Mode.TRAIN, images are shuffled and augmented, and the last partial batch is dropped. With Mode.EVAL,
            the processes together read every image of the data set once, each in order, and the last batch may be
            smaller.
        state: return value of state() of this process's training loader; the new loader resumes at the next batch. If
            loader_state.conditions differ from those in `state`, a log message lists the changes. If conditions have
            changed and the state was saved at the end of an epoch, the loader continues the image order, but restarts
            the random numbers of the augmentation. If conditions have changed and the state was saved within an epoch,
            or if the data set or a condition in loader_state.ORDER_CONDITIONS has changed, the loader restarts with the
            image order of the first epoch.
        trained: class names of a trained network in the order of its outputs, which determine the labels of class
            folders. If `trained` is None, the data set defines the labels.
        root: the data set (data_root), if the caller has already opened it.
    Returns:
        ShardIterator (a DALIGenericIterator), SyntheticIterator, or EmptyIterator for a process without validation
        images. `len()` is the number of steps per epoch, which is the same in all processes during training.
        Attributes: `step`: number of completed steps in the epoch; `data_set_size`: number of images in the split,
        summed over all processes; `classes` and, for reports, `class_names`: names in label order; `digest`:
        data_set.DataSet.digest, or None for synthetic images; `class_images` (training only): number of images of each
        label, or None if it is unknown.
    Raises:
        UsageError: the data set cannot be used with these flags.
        DataError: an image in the first batches cannot be read or decoded.
        StateError: the state is damaged.
    """
    watchdog.phase(f"image listing ({mode.value})")
    settings = resolution.resolve_data(args, mode)
    options, flags = settings.part(loader.Options), batch_flags(settings.as_dict())
    if settings.data_format == "synthetic":
        return loader.build_synthetic(options, flags, mode, state)
    root = root or data_root(settings.part(DataOptions))
    return loader.build(root, options, flags, mode, settings.run_scope.trains, state, trained)


def batch_flags(flags: Mapping[str, Any]) -> BatchFlags:
    """Return the flags that determine the training batches. `flags` are all flags of the run, {name: value}."""
    batches = {name: declaration.before for name, declaration in FLAGS.items() if declaration.batches}
    values = {flag_name(name): flags[name] for name in batches}
    return BatchFlags(
        values, {flag_name(name): DEFAULTS[name] if before is None else before for name, before in batches.items()}
    )


def data_root(options: DataOptions) -> DataRoot:
    """Return the data set that the flags specify."""
    return DataRoot(
        *(options.image_root, options.data_format, options.allow_outside, options.label_offset, options.skip_list),
        is_multi_label=options.multi_label,
    )


def warn_of_unused_outputs(options: DataOptions, loader: Loader) -> None:
    """Warn if the network has more outputs than the data set has classes."""
    classes = len(loader.classes)
    if options.num_of_class > classes > 0:
        logger.warn(
            f"--num-of-class {options.num_of_class}: exceeds the {counted(classes, 'class', 'classes')} in "
            f"{options.image_root}; reduce it, unless the unused outputs are intended"
        )
