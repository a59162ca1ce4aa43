"""The loader of a process: DALI pipelines that read, decode, augment and normalize images."""

import base64
import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import nvidia.dali
from nvidia.dali import fn, pipeline_def, types

from paddle_resnet.components import task
from paddle_resnet.data import augment, decoding, layout, loader_state
from paddle_resnet.data.data_set import BalancedSampler, DataSet, balanced
from paddle_resnet.data.iterators import READER, EmptyIterator, ShardIterator, SyntheticIterator
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import processes
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.mode import Mode

# Number of images that --data-format synthetic simulates: the size of ImageNet-1k.
SYNTHETIC_SIZE = {Mode.TRAIN: 1281167, Mode.EVAL: 50000}
# Values of --interp. "linear" interpolates between the four nearest pixels. "triangular", "cubic" and "lanczos3" widen
# their filters when an image is shrunk, so that every input pixel affects the output (antialiasing).
INTERPOLATION = {
    "linear": {"interp_type": types.INTERP_LINEAR, "antialias": False},
    "triangular": {"interp_type": types.INTERP_LINEAR, "antialias": True},
    "cubic": {"interp_type": types.INTERP_CUBIC, "antialias": True},
    "lanczos3": {"interp_type": types.INTERP_LANCZOS3, "antialias": True},
}


@dataclass(frozen=True, kw_only=True)
class Options(augment.Settings, task.Settings):
    """The flags of a loader: those of the base classes and the following; see `train.py --help all`."""

    allow_empty_classes: bool
    allow_one_class: bool
    balanced_sampling: bool
    batch_size: int
    benchmark: bool
    class_weights: str
    crop_size: int
    dali_device: str
    dali_num_threads: int
    dali_output_fp16: bool
    dali_prefetch: int
    dali_random_seed: int
    data_format: str
    data_layout: str
    device: str
    hw_decoder_load: float
    image_shape: list[int]
    interp: str
    normalize_mean: list[float]
    normalize_scale: float
    normalize_std: list[float]
    num_of_class: int
    resize_short: int
    sizes: str | None


def open_split(root: DataRoot, options: Options, mode: Mode, trains: bool, trained: list[str] | None = None) -> DataSet:
    """Return a split of a data set, without the images of the skip list. Raise UsageError if the split cannot be used.

    Args:
        root: DataRoot of the data set.
        options: flags of the loader.
        mode: the split, Mode.TRAIN or Mode.EVAL.
        trains: whether this run also reads the training split.
        trained: see build.
    """
    if not trains and root.data_format in ("auto", "folder"):
        # Check the split here, because root.open would suggest splitting train/, which this run does not read.
        layout.check_split("--image-root", root.image_root, mode)
    return root.open(
        mode,
        options.num_of_class,
        options.dali_random_seed,
        options.allow_empty_classes,
        trained,
        options.allow_one_class,
    )


def build(
    root: DataRoot,
    options: Options,
    flags: loader_state.BatchFlags,
    mode: Mode,
    trains: bool,
    state: dict[str, Any] | None = None,
    trained: list[str] | None = None,
) -> ShardIterator | EmptyIterator:
    """Build the iterator over this process's shard of a data set.

    Args:
        root: DataRoot of the data set.
        options: flags of the loader.
        flags: flags that determine the training batches, as conditions of the state.
        mode: with Mode.TRAIN, images are shuffled and augmented, and the last partial batch is dropped. With Mode.EVAL,
            the processes together read every image of the data set once, each in order, and the last batch may be
            smaller.
        trains: whether this run also reads the training split.
        state, trained: see dali.build_dataloader.
    Raises:
        UsageError, DataError, StateError: see dali.build_dataloader.
    """
    rank, world_size = processes.rank(), processes.world_size()
    image_root = root.image_root
    data_set = open_split(root, options, mode, trains, trained)
    check_labels(options, mode, data_set.data_format, data_set.class_images)
    per_process = data_set.size // world_size
    if mode is Mode.TRAIN and per_process < options.batch_size:
        raise UsageError(
            f"{_batch_size(options)} exceeds the {counted(per_process, 'training image')} per process in "
            f"{image_root}; use {per_process} or less"
            if per_process
            else f"--image-root {image_root}: too few training images ({data_set.size}) for {world_size} "
            f"processes; start at most {counted(data_set.size, 'process', 'processes')}"
        )
    validation = None
    if mode is Mode.TRAIN:
        with contextlib.suppress(UsageError):  # a run that only trains does not need this split
            validation = root.shown(Mode.EVAL)
    facts = data_set.data_format, data_set.size, world_size, data_set.digest, validation
    conditions = loader_state.conditions(flags, *facts)
    steps = per_process // options.batch_size
    state, continues_order_alone = loader_state.match(state, conditions, flags.before, steps, bool(options.sizes))
    checkpoint = base64.b64decode(state.get("pipeline", "")) if state else None
    done, step = (state.get("epoch", 0), state["step"]) if state else (0, 0)
    if mode is Mode.TRAIN and options.balanced_sampling:
        data = data_set, image_root, options.dali_random_seed
        sampler = BalancedSampler(*data, rank, options.batch_size, steps, done, step)
        data_set = balanced(data_set, sampler)
    elif not data_set.has_reader:
        data_set = replace(data_set, read=functools.partial(data_set.read, start=(done, step)))
    if continues_order_alone and not data_set.has_reader:
        checkpoint = None  # a Python source determines the image order, so there is no state of a DALI reader
    elif continues_order_alone:
        fresh = create_pipeline(options, data_set, mode, rank, world_size)
        fresh.build()
        checkpoint = loader_state.with_reader_of(checkpoint, fresh.checkpoint())
        del fresh
    if mode is Mode.TRAIN:
        images = steps * options.batch_size
    else:
        images = (rank + 1) * data_set.size // world_size - rank * data_set.size // world_size
    if per_process == 0:
        if options.benchmark:
            raise UsageError(
                f"--image-root {image_root}: too few validation images ({data_set.size}) for a benchmark "
                f"with {world_size} processes; start at most {counted(data_set.size, 'process', 'processes')}"
            )
        if images == 0:
            return EmptyIterator(data_set)
        # DALI does not support empty shards, so each process that has an image reads a shard of one image.
        rank, world_size = rank * data_set.size // world_size, data_set.size
    pipeline = create_pipeline(options, data_set, mode, rank, world_size, checkpoint)
    make = functools.partial(ShardIterator, pipeline, images, data_set, image_root, conditions, step, done)
    return make() if checkpoint is None else loader_state.restored(pipeline, make)


def _batch_size(options):
    """Return the start of an error message about the batch size, which --sizes can set for a stage."""
    if options.sizes:
        return f"--sizes {','.join(options.sizes)}: batch size {options.batch_size}"
    return f"--batch-size {options.batch_size}:"


def build_synthetic(
    options: Options, flags: loader_state.BatchFlags, mode: Mode, state: dict[str, Any] | None = None
) -> SyntheticIterator:
    """Return the iterator for --data-format synthetic. For the arguments, see build.

    Raises:
        UsageError: a flag requires labels that are known in advance, or the batch size exceeds the images per process.
        StateError: see dali.build_dataloader.
    """
    check_labels(options, mode, "synthetic", None)
    per_process, batch_size = SYNTHETIC_SIZE[mode] // processes.world_size(), options.batch_size
    size = SYNTHETIC_SIZE[mode]
    conditions = loader_state.conditions(flags, "synthetic", size, processes.world_size())
    state, _ = loader_state.match(state, conditions, flags.before, per_process // batch_size, bool(options.sizes))
    images = per_process // batch_size * batch_size if mode is Mode.TRAIN else per_process
    if images == 0:
        raise UsageError(
            f"{_batch_size(options)} exceeds the {counted(per_process, 'synthetic image')} per process; reduce it"
        )
    random = np.random.RandomState(options.dali_random_seed + processes.rank())
    channels, height, width = options.image_shape
    shape = (channels, height, width) if options.data_layout == "NCHW" else (height, width, channels)
    data = random.standard_normal((batch_size, *shape)).astype("float16" if options.dali_output_fp16 else "float32")
    batch = {"data": data, "label": options.task(options.num_of_class).draw_labels(random, batch_size)}
    return SyntheticIterator(batch, processes.place(options.device), images, options.num_of_class, conditions, state)


def check_labels(options: Options, mode: Mode, data_format: str, class_images: np.ndarray | None) -> None:
    """Raise UsageError if a flag requires the labels of all training images, but the data set does not contain them
    (DataSet.class_images is None)."""
    flags = {
        "--class-weights balanced": options.class_weights == "balanced",
        "--balanced-sampling": options.balanced_sampling,
    }
    for argument in (argument for argument, is_set in flags.items() if is_set):
        if mode is Mode.TRAIN and class_images is None:
            raise UsageError(
                f"{argument}: requires class folders or file lists, but the data format is {data_format}; remove "
                f"{argument.split()[0]}, or use a data set of class folders or file lists"
            )


def create_pipeline(
    options: Options, data_set: DataSet, mode: Mode, shard_id: int, num_shards: int, checkpoint: bytes | None = None
) -> nvidia.dali.Pipeline:
    """Define the DALI pipeline of one shard. The caller must build the pipeline.

    Args:
        options: flags of the loader.
        data_set: DataSet.
        mode: determines the augmentation. With Mode.TRAIN: random resized crop (padded random crop with
            --crop-padding), horizontal flip and, if their flags are set, TrivialAugment or RandAugment, color jitter,
            rotation and PCA lighting noise. With Mode.EVAL: resize to cover the crop times --resize-short /
            --crop-size, and center crop.
        shard_id: index of the shard, from 0.
        num_shards: number of shards.
        checkpoint: DALI checkpoint (bytes) from which a training pipeline resumes, or None.
    Returns:
        nvidia.dali.Pipeline whose outputs are images and labels on the device that --dali-device selects.
    """
    on_gpu = options.dali_device == "gpu"
    batch = pipeline_def(
        batch_size=options.batch_size,
        num_threads=options.dali_num_threads,
        device_id=processes.local_gpu() if on_gpu else None,
        # Each shard has its own seed, so that random crops differ between shards.
        seed=options.dali_random_seed + shard_id,
        prefetch_queue_depth=options.dali_prefetch,
        # With the dynamic executor (DALI's default), the Paddle plugin releases a batch while Paddle is still copying
        # it. With the older executor, DALI itself copies the batch, and DALI's stream waits for the copy before the
        # buffer is reused. The dynamic and the older executor are equally fast (benchmarks/log/kernels_h200.md).
        exec_dynamic=False,
        enable_checkpointing=mode is Mode.TRAIN,
        checkpoint=checkpoint,
        enable_conditionals=True,
    )(_define)
    return batch(options, data_set, mode, shard_id, num_shards)


def _define(options, data_set, mode, shard_id, num_shards):
    encoded, labels = data_set.read(READER, shard_id, num_shards, shuffle=mode is Mode.TRAIN)
    encoded, header, kind = decoding.checked(encoded)
    resize = INTERPOLATION[options.interp]
    # crop_mirror_normalize computes (pixel - mean) / std without scaling the pixels, so mean and std are divided by the
    # scale.
    mean = [m / options.normalize_scale for m in options.normalize_mean]
    std = [s / options.normalize_scale for s in options.normalize_std]
    if mode is Mode.TRAIN:
        seeds = augment.seeds_of(options.dali_random_seed, shard_id)
        if options.crop_padding:
            images = decoding.padded_crop(options, encoded, kind, resize, mean, seeds[augment.CROP_SEED])
        else:
            images = decoding.random_resized_crop(options, encoded, kind, header, resize)
        mirror = fn.random.coin_flip(probability=0.5)
        images, mean = augment.augment(images, mean, options, seeds)
    else:
        images = decoding.decode(options, encoded, kind)
        # The following computation matches serving/preprocessing.py. For a square crop, the shorter side becomes
        # --resize-short.
        covered = [int(options.resize_short * side / options.crop_size + 0.5) for side in options.image_shape[1:]]
        images = fn.resize(images, size=covered, mode="not_smaller", **resize)
        mirror = 0
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if options.dali_output_fp16 else types.FLOAT,
        output_layout=options.data_layout[1:],
        crop=options.image_shape[1:],
        mean=mean,
        std=std,
        mirror=mirror,
        pad_output=options.image_shape[0] == 4,
    )
    return images, labels.gpu() if options.dali_device == "gpu" else labels
