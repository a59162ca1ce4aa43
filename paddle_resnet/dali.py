"""The loader: DALI pipelines that read, decode, augment and normalize images."""

import base64
import functools
import warnings

import numpy as np
import nvidia.dali
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as dali_math
from nvidia.dali.auto_aug import rand_augment, trivial_augment
from nvidia.dali.auto_aug.core import signed_bin
from nvidia.dali.pipeline import do_not_convert

from paddle_resnet import resolution
from paddle_resnet.data import headers, listing, numbering, readers
from paddle_resnet.data.iterators import READER, EmptyIterator, ShardIterator, StateError, SyntheticIterator
from paddle_resnet.job import processes, watchdog
from paddle_resnet.settings.declarations import DEFAULTS, FLAGS
from paddle_resnet.settings.values import flag, text
from paddle_resnet.utils import logger
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
# Eigenvectors (columns) and eigenvalues of ImageNet's RGB values (0 to 255), which define the lighting noise of
# Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NeurIPS 2012, section 4.1.
PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
PCA_VALUES = np.array([55.46, 4.794, 1.148])
# Size of the largest image in ImageNet's train/. nvJPEG preallocates buffers of this size, because each later
# reallocation would stall the GPU.
PREALLOCATE_WIDTH, PREALLOCATE_HEIGHT = 5980, 6430
# Arguments of fn.slice for positions and sizes in pixels along both axes.
PIXELS = {"axes": [0, 1], "normalized_anchor": False, "normalized_shape": False}
# Number of magnitude levels per operation of --auto-augment, as in torchvision.
MAGNITUDES = 31
# Conditions that determine the order of the training images. The order does not depend on the number of processes.
ORDER_CONDITIONS = ("--data-format", "--dali-random-seed", "--balanced-sampling", "number of images", "DALI version")

LIST = "list of images and labels (hash)"
# Name and value of the condition for the version of this module. Increase the value if the operators of the training
# pipeline change, because DALI then rejects older checkpoints.
VERSION, VERSION_NUMBER = "version of the loader", 3


def warn_of_unused_outputs(args, loader):
    """Warn if the network has more outputs than the data set has classes."""
    classes = len(loader.classes)
    if args.num_of_class > classes > 0:
        logger.warn(
            f"--num-of-class {args.num_of_class}: exceeds the {counted(classes, 'class', 'classes')} in "
            f"{args.image_root}; reduce it, unless the unused outputs are intended"
        )


def build_dataloader(args, mode, state=None, trained=None):
    """Build the iterator over this process's shard.

    Args:
        args: flags. Unresolved flags for the device and the number of classes are resolved in place.
        mode: with Mode.TRAIN, images are shuffled and augmented, and the last partial batch is dropped. With Mode.EVAL,
            every image of the data set is read once, in order, and the last batch may be smaller.
        state: return value of state() of this process's training loader; the new loader resumes at the next batch. If
            flags have changed since then, a warning lists the changes. In this case, if the state was saved at the end
            of an epoch, the loader continues the image order, but restarts the random numbers of the augmentation. If
            the state was saved within an epoch, or if the data set or a condition in ORDER_CONDITIONS has changed, the
            loader restarts with the image order of the first epoch.
        trained: class names of a trained network in the order of its outputs, which determine the labels of class
            folders. If None, the data set defines the labels.
    Returns:
        ShardIterator (a DALIGenericIterator), SyntheticIterator, or EmptyIterator for a process without validation
        images. `len()` is the number of steps per epoch, which is the same in all processes during training.
        Attributes: `step`: number of completed steps in the epoch; `data_set_size`: number of images in the split,
        summed over all processes; `classes` and, for reports, `class_names`: names in label order; `digest`:
        readers.DataSet.digest, or None for synthetic images; `class_images` (training only): number of images of each
        label, or None if it is unknown.
    Raises:
        UsageError: the data set cannot be used with these flags.
        DataError: an image in the first batches cannot be read or decoded.
        StateError: the state is damaged.
    """
    watchdog.phase(f"image listing ({mode.value})")
    resolution.resolve_data(args, mode)
    rank, world_size = processes.rank(), processes.world_size()
    if args.data_format == "synthetic":
        return _synthetic_loader(args, mode, state)

    data_set = open_data_set(args, mode, trained)
    _check_labels(args, mode, data_set.data_format, data_set.labels)
    per_process = data_set.size // world_size
    if mode is Mode.TRAIN and per_process < args.batch_size:
        raise UsageError(
            f"--batch-size {args.batch_size}: exceeds the {counted(per_process, 'training image')} per process in "
            f"{args.image_root}; use {per_process} or less"
            if per_process
            else f"--image-root {args.image_root}: too few training images ({data_set.size}) for {world_size} "
            f"processes; start at most {counted(data_set.size, 'process', 'processes')}"
        )
    conditions = _conditions(args, data_set.data_format, data_set.size, data_set.digest)
    state, continues_order_alone = _usable(args, state, conditions, per_process // args.batch_size)
    checkpoint = base64.b64decode(state.get("pipeline", "")) if state else None
    done, step = (state.get("epoch", 0), state["step"]) if state else (0, 0)
    if mode is Mode.TRAIN and args.balanced_sampling:
        steps = per_process // args.batch_size
        data = data_set, args.image_root, args.dali_random_seed
        sampler = readers.BalancedSampler(*data, rank, args.batch_size, steps, done, step)
        data_set = readers.balanced(data_set, sampler)
    if continues_order_alone and not data_set.has_reader:
        checkpoint = None  # the sampler determines the image order, so the state of DALI's reader is not needed
    elif continues_order_alone:
        fresh = create_dali_pipeline(args, data_set, mode, rank, world_size)
        fresh.build()
        checkpoint = _with_reader_of(checkpoint, fresh.checkpoint())
        del fresh
    if mode is Mode.TRAIN:
        images = per_process // args.batch_size * args.batch_size
    else:
        images = (rank + 1) * data_set.size // world_size - rank * data_set.size // world_size
    if per_process == 0:
        if args.benchmark:
            raise UsageError(
                f"--image-root {args.image_root}: too few validation images ({data_set.size}) for a benchmark "
                f"with {world_size} processes; start at most {counted(data_set.size, 'process', 'processes')}"
            )
        if images == 0:
            return EmptyIterator(data_set)
        # DALI does not support empty shards, so each process that has an image reads a shard of one image.
        rank, world_size = rank * data_set.size // world_size, data_set.size
    pipeline = create_dali_pipeline(args, data_set, mode, rank, world_size, checkpoint)
    make = functools.partial(ShardIterator, pipeline, images, data_set, args.image_root, conditions, step, done)
    return make() if checkpoint is None else _restored(pipeline, make)


def _synthetic_loader(args, mode, state):
    """Return the iterator for --data-format synthetic. For the arguments, see build_dataloader."""
    _check_labels(args, mode, "synthetic", None)
    per_process, batch_size = SYNTHETIC_SIZE[mode] // processes.world_size(), args.batch_size
    conditions = _conditions(args, "synthetic", SYNTHETIC_SIZE[mode])
    state, _ = _usable(args, state, conditions, per_process // batch_size)
    images = per_process // batch_size * batch_size if mode is Mode.TRAIN else per_process
    if images == 0:
        raise UsageError(
            f"--batch-size {batch_size}: exceeds the {counted(per_process, 'synthetic image')} per process; reduce it"
        )
    random = np.random.RandomState(args.dali_random_seed + processes.rank())
    channels, height, width = args.image_shape
    shape = (channels, height, width) if args.data_layout == "NCHW" else (height, width, channels)
    data = random.standard_normal((batch_size, *shape)).astype("float16" if args.dali_output_fp16 else "float32")
    batch = {"data": data, "label": random.randint(0, args.num_of_class, (batch_size, 1)).astype("int64")}
    return SyntheticIterator(batch, processes.place(args.device), images, args.num_of_class, conditions, state)


def _check_labels(args, mode, data_format, labels):
    """Raise UsageError if a flag requires the labels of all training images, but the labels are unknown (None)."""
    flags = {
        "--class-weights balanced": args.class_weights == "balanced",
        "--balanced-sampling": args.balanced_sampling,
    }
    for argument in (argument for argument, is_set in flags.items() if is_set):
        if mode is Mode.TRAIN and labels is None:
            raise UsageError(
                f"{argument}: requires class folders or file lists, but the data format is {data_format}; remove "
                f"{argument.split()[0]}, or use a data set of class folders or file lists"
            )


def data_classes(args):
    """Return the classes of the training data (numbering.data_classes), or None if they are unknown."""
    if args.data_format == "synthetic":
        return None
    place = args.image_root, Mode.TRAIN, args.data_format, args.allow_outside, args.label_offset
    return numbering.data_classes(*place)


def open_data_set(args, mode, trained=None):
    """Return the readers.DataSet of a split, without the images in --skip-list. Raise UsageError if the data set cannot
    be used."""
    if not args.run_scope.trains and args.data_format in ("auto", "folder"):
        listing.check_split("--image-root", args.image_root, mode)  # open_split would suggest splitting train/
    skip = frozenset()
    if args.skip_list is not None:
        skip = listing.read_skip_list(args.skip_list, args.image_root, args.allow_outside)
    return readers.open_split(
        *(args.image_root, args.data_format, mode, args.num_of_class, args.dali_random_seed, skip),
        *(args.allow_outside, args.allow_empty_classes, trained, args.label_offset, args.allow_one_class),
    )


def _conditions(args, data_format, size, digest=None):
    """Return the conditions that must not change between saving a loader state and resuming from it."""
    flags = {flag(name): getattr(args, name) for name, declaration in FLAGS.items() if declaration.batches}
    counts = {"number of images": size, "number of processes": processes.world_size()}
    files = {LIST: digest[:16]} if digest else {}
    versions = {"DALI version": nvidia.dali.__version__, VERSION: VERSION_NUMBER}
    return {"--data-format": data_format, **flags, **counts, **files, **versions}


def _restored(pipeline, make):
    """Return an iterator over a pipeline that resumes from a DALI checkpoint. The pipeline is built before the
    iterator, because an error during the build indicates a damaged checkpoint, not a damaged image.

    Raises:
        StateError: the checkpoint is damaged.
    """
    try:
        pipeline.build()
    except (RuntimeError, LookupError, TypeError, ValueError) as e:
        if "memory" in str(e) or "CUDA" in str(e):
            raise
        raise _state_error(str(e).partition(" failed: ")[2] or repr(e)) from e
    try:
        return make()
    except UsageError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as e:  # DALI's plugin does not validate the checkpoint
        raise _state_error(repr(e)) from e


def _state_error(reason):
    return StateError(f"the loader state is damaged ({' '.join(reason.split())[:200]})")


def _usable(args, state, conditions, steps):
    """Compare a loader state with the current conditions, and log the conditions that have changed.

    Returns:
        (state, or None if it cannot be used; whether the loader resumes only the image order).
    Raises:
        StateError: the step in the state exceeds the steps per epoch.
    """
    if state is None:
        return None, False
    # Older checkpoints lack the conditions of newer flags, the hash of the image list, and the version of the loader.
    batches = {name: declaration.before for name, declaration in FLAGS.items() if declaration.batches}
    older = {flag(name): DEFAULTS[name] if before is None else before for name, before in batches.items()}
    older |= {LIST: conditions.get(LIST), VERSION: 1}
    before = older | state["conditions"]
    # Older checkpoints may contain conditions of flags that no longer exist. Such a flag had no effect if it was 0 or
    # false.
    removed = {name for name, value in before.items() if value and name.startswith("--")} - {*conditions}
    changes = {
        name: f"{name} is {text(now)} and was {text(before.get(name))}"
        for name, now in (conditions | dict.fromkeys(sorted(removed), "a removed flag")).items()
        if now != before.get(name)
    }
    if changes and state["step"] == 0 and not set(changes) & {*ORDER_CONDITIONS, LIST}:
        message = (
            f"loader state in the checkpoint: {', '.join(changes.values())}, so the random numbers of the "
            "augmentation restart, but the image order continues; restore the previous values to continue both"
        )
        (logger.info if args.sizes else logger.warn)(message)  # with --sizes, the change is intended
        return state, True
    if changes:
        logger.warn(
            f"loader state in the checkpoint: {', '.join(changes.values())}, so the loader restarts at the beginning "
            "of the epoch, with the image order of the first epoch; restore the previous values to continue within "
            "the epoch"
        )
        return None, False
    if state["step"] > steps:
        raise StateError(f"the loader state is damaged (step {state['step']} of {steps})")
    return state, False


def _with_reader_of(checkpoint, fresh):
    """Return the checkpoint `fresh`, with the reader's position from `checkpoint`. DALI checkpoints are protobuf
    messages that begin with the state of the first operator, the reader."""
    return _first_operator(checkpoint) + fresh[len(_first_operator(fresh)) :]


def _first_operator(checkpoint):
    """Return the first field of a protobuf message. The field consists of a tag, the length as a varint, and the
    content."""
    length, place = 0, 1
    while True:
        byte = checkpoint[place : place + 1]
        if checkpoint[:1] != b"\n" or not byte or place > 5:
            raise StateError("the loader state is damaged (no reader position)")
        length |= (byte[0] & 0x7F) << 7 * (place - 1)
        place += 1
        if byte[0] < 0x80:
            return checkpoint[: place + length]


def create_dali_pipeline(args, data_set, mode, shard_id, num_shards, checkpoint=None):
    """Define the DALI pipeline of one shard. The caller must build the pipeline.

    Args:
        args: flags.
        data_set: readers.DataSet.
        mode: determines the augmentation. With Mode.TRAIN: random resized crop (padded random crop with
            --crop-padding), TrivialAugment or RandAugment, color jitter, rotation, horizontal flip and PCA lighting
            noise. With Mode.EVAL: resizing of the shorter side to --resize-short and center crop.
        shard_id: index of the shard, from 0.
        num_shards: number of shards.
        checkpoint: DALI checkpoint (bytes) from which a training pipeline resumes, or None.
    Returns:
        nvidia.dali.Pipeline whose outputs are images and labels on the device that --dali-device selects.
    """
    on_gpu = args.dali_device == "gpu"
    batch = pipeline_def(
        batch_size=args.batch_size,
        num_threads=args.dali_num_threads,
        device_id=processes.local_gpu() if on_gpu else None,
        # Each shard has its own seed, so that random crops differ between shards.
        seed=args.dali_random_seed + shard_id,
        prefetch_queue_depth=args.dali_prefetch,
        # With the dynamic executor (DALI's default), the Paddle plugin releases a batch while Paddle is still copying
        # it. With the older executor, DALI itself copies the batch, and DALI's stream waits for the copy before the
        # buffer is reused. Both executors are equally fast (benchmarks/log/kernels_h200.md).
        exec_dynamic=False,
        enable_checkpointing=mode is Mode.TRAIN,
        checkpoint=checkpoint,
        enable_conditionals=True,
    )(_define)
    return batch(args, data_set, mode, shard_id, num_shards)


def _define(args, data_set, mode, shard_id, num_shards):
    encoded, labels = data_set.read(READER, shard_id, num_shards, shuffle=mode is Mode.TRAIN)
    # For large batches, DALI 2.4's decoders parse the headers in several threads and ignore errors, so they crash on an
    # invalid header. `peek_image_shape` raises an error for an invalid header. The reshape makes the decoder's input
    # depend on `peek_image_shape`, which therefore runs before the decoder. The reshape does not copy data. It
    # deliberately fails for files that DALI would misread.
    header, kind = fn.peek_image_shape(encoded), _kind(encoded)
    encoded = fn.reshape(encoded, shape=encoded.shape() + 0 * header[0] + (kind & headers.UNREADABLE))
    resize = INTERPOLATION[args.interp]
    # crop_mirror_normalize computes (pixel - mean) / std without scaling the pixels, so mean and std are divided by the
    # scale.
    mean = [m / args.normalize_scale for m in args.normalize_mean]
    std = [s / args.normalize_scale for s in args.normalize_std]
    if mode is Mode.TRAIN:
        # DALI assigns seeds in the order of the random operators in the graph. The optional augmentations have explicit
        # seeds, so that they do not change the random numbers for cropping and flipping.
        seeds = np.random.SeedSequence([args.dali_random_seed, shard_id]).generate_state(9).tolist()
        if args.crop_padding:
            images = _padded_crop(args, encoded, kind, resize, mean, seeds[5])
        else:
            images = _random_resized_crop(args, encoded, kind, header, resize)
        mirror = fn.random.coin_flip(probability=0.5)
        if args.auto_augment != "none":
            images = _auto_augment(images, args, seeds[6:])
        if args.color_jitter:
            images = _jitter(images, args.color_jitter, seeds[:3])
        if args.rotate_degrees:
            images = _rotate(images, args.rotate_degrees, seeds[3])
        if args.lighting:
            mean = types.Constant(np.float32(mean)) - _lighting(args.lighting, seeds[4])
    else:
        images = _decode(args, encoded, kind)
        # The following computation matches serving/preprocessing.py. For a square crop, the shorter side becomes
        # --resize-short.
        covered = [int(args.resize_short * side / args.crop_size + 0.5) for side in args.image_shape[1:]]
        images = fn.resize(images, size=covered, mode="not_smaller", **resize)
        mirror = 0
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if args.dali_output_fp16 else types.FLOAT,
        output_layout=args.data_layout[1:],
        crop=args.image_shape[1:],
        mean=mean,
        std=std,
        mirror=mirror,
        pad_output=args.image_shape[0] == 4,
    )
    return images, labels.gpu() if args.dali_device == "gpu" else labels


def _padded_crop(args, encoded, kind, resize, mean, seed):
    """Decode images, resize them so that they just cover the crop, pad them by --crop-padding pixels of the mean color
    on each side, and crop them at a random position. All positions in the padded image are equally likely. See He et
    al., arXiv:1512.03385, section 4.2."""
    padding, crop = args.crop_padding, args.image_shape[1:]
    # The sizes come from the headers, because the CPU cannot wait for the GPU inside a pipeline.
    size = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.FLOAT)
    size = dali_math.floor(size * dali_math.max(crop[0] / size[0], crop[1] / size[1]) + 0.5)
    positions = size + types.Constant(np.float32([2 * padding + 1 - side for side in crop]))  # along each axis
    start = dali_math.floor(fn.random.uniform(range=[0, 1], shape=[2], seed=seed) * positions)
    return fn.slice(
        fn.resize(_decode(args, encoded, kind), size=size, **resize),
        start=fn.cast(start, dtype=types.INT32) - padding,
        shape=crop,
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=_rounded(mean),
    )


def _rounded(color):
    """Round an RGB color to 8 bits."""
    return np.clip(np.round(color), 0, 255).tolist()


def _random_resized_crop(args, encoded, kind, header, resize):
    """Decode random crops and resize them. The crops depend neither on the device nor on the decoder."""
    crop = fn.random_crop_generator(
        header,
        random_area=args.rand_crop_scale,
        random_aspect_ratio=args.rand_crop_ratio,
        num_attempts=100,
    )
    height, width = args.image_shape[1:]
    resize = functools.partial(fn.resize, resize_x=width, resize_y=height, **resize)
    if args.dali_device == "cpu":
        images = resize(_crop_on_cpu(encoded, kind, crop))
    elif kind & headers.CPU != 0:  # DALI evaluates this condition for each image
        images = resize(_crop_on_cpu(encoded, kind, crop)).gpu()
    else:
        # The GPU decodes entire images, because it decodes crops with interpolated chroma at a lower speed
        # (benchmarks/log/loader_h200.md).
        images = resize(fn.slice(_decode_on_gpu(args, encoded), *crop, **PIXELS))
    return images


def _crop_on_cpu(encoded, kind, crop):
    """Decode a crop, (start, shape) in pixels, with the CPU decoder."""
    if kind & headers.PROGRESSIVE != 0:
        images = fn.slice(fn.decoders.image(encoded, output_type=types.RGB), *crop, **PIXELS)
    else:
        images = fn.decoders.image_slice(encoded, *crop, output_type=types.RGB, **PIXELS)
    return images


def _decode(args, encoded, kind):
    """Decode entire images. On a GPU, the CPU decodes the files that the GPU decoder would misread."""
    if args.dali_device == "cpu":
        images = fn.decoders.image(encoded, output_type=types.RGB)
    elif kind & headers.CPU != 0:
        images = fn.decoders.image(encoded, output_type=types.RGB).gpu()
    else:
        images = _decode_on_gpu(args, encoded)
    return images


def _decode_on_gpu(args, encoded):
    return fn.decoders.image(
        encoded,
        device="mixed",
        output_type=types.RGB,
        hw_decoder_load=args.hw_decoder_load,
        jpeg_fancy_upsampling=True,  # interpolate chroma, as the CPU decoder does
        preallocate_width_hint=PREALLOCATE_WIDTH,
        preallocate_height_hint=PREALLOCATE_HEIGHT,
    )


def _kind(encoded):
    """Return the flags of headers.kinds. To save time, Python inspects neither common JPEGs, which have no flags, nor
    PNG and WebP files, which the CPU decoder always reads correctly."""
    head = fn.slice(encoded, start=0, shape=len(headers.COMMON), axes=[0], out_of_bounds_policy="pad")
    differs = fn.reductions.max((head ^ types.Constant(headers.COMMON)) & types.Constant(headers.COMMON_MASK))
    if differs == 0:
        kind = 0
    elif (head[0] == headers.PNG) | (head[0] == headers.WEBP):
        kind = headers.CPU
    else:
        kind = fn.python_function(encoded, function=headers.kinds, batch_processing=True)
    return kind


def _auto_augment(images, args, seeds):
    """Apply random operations from DALI's suites to each image. trivial: one operation with a random magnitude (Müller
    and Hutter, "TrivialAugment", arXiv:2103.10158). randaug: two operations with the magnitude --auto-augment-magnitude
    (Cubuk et al., "RandAugment", arXiv:1909.13719). The signs of the magnitudes are random.

    DALI's own functions for selecting operations are not used. They pass the same seed to several random operators,
    which then draw the same numbers, so each operation would always have the same magnitude or sign.
    """
    if args.auto_augment == "trivial":
        count, operations = 1, trivial_augment.get_trivial_augment_wide_suite()
        magnitude = fn.random.uniform(values=list(range(MAGNITUDES)), dtype=types.INT32, seed=seeds[2])
    else:
        count, operations = 2, rand_augment.get_rand_augment_suite(use_shape=True)
        magnitude = args.auto_augment_magnitude
    choice = fn.random.uniform(values=list(range(len(operations))), shape=[count], dtype=types.INT32, seed=seeds[0])
    sign = fn.random.uniform(values=[0, 1], shape=[count], dtype=types.INT32, seed=seeds[1])
    with warnings.catch_warnings(record=True):  # DALI's suites use deprecated operator names
        for i in range(count):
            options = {"magnitude_bin": signed_bin(magnitude, sign[i]), "num_magnitude_bins": MAGNITUDES}
            images = _apply(operations, choice[i], images, {**options, "shape": args.image_shape[1:]})
    return images


def _apply(operations, choice, images, options):
    """Apply one of the operations to each image. DALI evaluates `choice < half` for each image."""
    if len(operations) == 1:
        # The operations contain no conditional statements, so DALI's code conversion is unnecessary.
        return do_not_convert(operations[0].__call__)(images, **options)
    half = len(operations) // 2
    if choice < half:
        images = _apply(operations[:half], choice, images, options)
    else:
        images = _apply(operations[half:], choice - half, images, options)
    return images


def _jitter(images, strength, seeds):
    """Scale saturation, contrast (around the level 128) and brightness, in this order, each by a random factor from
    [max(0, 1 - strength), 1 + strength]. Values are rounded only once, at the end."""
    factors = [max(0, 1 - strength), 1 + strength]
    brightness, contrast, saturation = (fn.random.uniform(range=factors, seed=seed) for seed in seeds)
    return fn.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation)


def _rotate(images, degrees, seed):
    """Rotate images about the center by a random angle from [-degrees, degrees]. The image size is unchanged, and
    uncovered corners are black."""
    angle = fn.random.uniform(range=[-degrees, degrees], seed=seed)
    return fn.rotate(images, angle=angle, keep_size=True, fill_value=0, interp_type=types.INTERP_LINEAR)


def _lighting(std, seed):
    """Return the offset [3] to add to the RGB values (0 to 255) of an image: the sum of ImageNet's eigenvectors, each
    multiplied by its eigenvalue and a random number from N(0, std).
    """
    alpha = fn.random.normal(shape=[3], mean=0, stddev=std, seed=seed)
    return fn.reductions.sum(types.Constant(np.float32(PCA_VECTORS * PCA_VALUES)) * alpha, axes=[1])
