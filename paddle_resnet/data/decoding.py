"""Decode and crop images in a DALI pipeline, each with a decoder that reads it correctly (headers.py)."""

import functools
from typing import Any, Protocol

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

from paddle_resnet.data import headers

# Size of the largest image in ImageNet's train/. nvJPEG preallocates buffers of this size, because each later
# reallocation would stall the GPU.
PREALLOCATE_WIDTH, PREALLOCATE_HEIGHT = 5980, 6430
# Arguments of fn.slice for positions and sizes in pixels along both axes.
PIXELS = {"axes": [0, 1], "normalized_anchor": False, "normalized_shape": False}


class Options(Protocol):
    """Flags of the decoders and the random crops."""

    crop_padding: int
    dali_device: str
    hw_decoder_load: float
    image_shape: list[int]
    rand_crop_ratio: list[float]
    rand_crop_scale: list[float]


def checked(encoded: Any) -> tuple[Any, Any, Any]:
    """Return (encoded images, shape in their headers, flags of headers.kinds). The pipeline raises an error for an
    image with an invalid header, and for one that headers.py rejects."""
    # For large batches, DALI 2.4's decoders parse the headers in several threads and ignore errors, so they crash on an
    # invalid header. `peek_image_shape` raises an error for an invalid header. The reshape, which copies no data, makes
    # the decoder's input depend on `peek_image_shape`, which therefore runs before the decoder. The reshape
    # deliberately fails for files with the flag UNREADABLE.
    header, kind = fn.peek_image_shape(encoded), kinds(encoded)
    encoded = fn.reshape(encoded, shape=encoded.shape() + 0 * header[0] + (kind & headers.UNREADABLE))
    return encoded, header, kind


def decode(options: Options, encoded: Any, kind: Any) -> Any:
    """Decode entire images. With --dali-device gpu, the GPU decodes only the JPEGs that it reads correctly,
    and the CPU all other files."""
    if options.dali_device == "cpu":
        images = fn.decoders.image(encoded, output_type=types.RGB)
    elif kind & headers.CPU != 0:
        images = fn.decoders.image(encoded, output_type=types.RGB).gpu()
    else:
        images = decode_on_gpu(options, encoded)
    return images


def crop_on_cpu(encoded: Any, kind: Any, crop: tuple) -> Any:
    """Decode a crop, (start, shape) in pixels, with the CPU decoder. Progressive JPEGs are decoded as a whole, see
    headers.PROGRESSIVE."""
    if kind & headers.PROGRESSIVE != 0:
        images = fn.slice(fn.decoders.image(encoded, output_type=types.RGB), *crop, **PIXELS)
    else:
        images = fn.decoders.image_slice(encoded, *crop, output_type=types.RGB, **PIXELS)
    return images


def decode_on_gpu(options: Options, encoded: Any) -> Any:
    """Decode entire images on the GPU."""
    return fn.decoders.image(
        encoded,
        device="mixed",
        output_type=types.RGB,
        hw_decoder_load=options.hw_decoder_load,
        jpeg_fancy_upsampling=True,  # interpolate chroma, as the CPU decoder does
        preallocate_width_hint=PREALLOCATE_WIDTH,
        preallocate_height_hint=PREALLOCATE_HEIGHT,
    )


def kinds(encoded: Any) -> Any:
    """Return the flags of headers.kinds. To save time, Python inspects neither common JPEGs, which have no flags, nor
    PNG and WebP files, which the CPU decoder reads correctly or rejects."""
    head = fn.slice(encoded, start=0, shape=len(headers.COMMON), axes=[0], out_of_bounds_policy="pad")
    differs = fn.reductions.max((head ^ types.Constant(headers.COMMON)) & types.Constant(headers.COMMON_MASK))
    if differs == 0:
        kind = 0
    elif (head[0] == headers.PNG) | (head[0] == headers.WEBP):
        kind = headers.CPU
    else:
        kind = fn.python_function(encoded, function=headers.kinds, batch_processing=True)
    return kind


def random_resized_crop(options: Options, encoded: Any, kind: Any, header: Any, resize: dict[str, Any]) -> Any:
    """Decode random crops and resize them. The crops depend neither on the device nor on the decoder."""
    crop = fn.random_crop_generator(
        header,
        random_area=options.rand_crop_scale,
        random_aspect_ratio=options.rand_crop_ratio,
        num_attempts=100,
    )
    height, width = options.image_shape[1:]
    resize = functools.partial(fn.resize, resize_x=width, resize_y=height, **resize)
    # On a CPU, the operator `needs_cpu` has no effect, but the checkpoints of older versions contain it.
    needs_cpu = kind & headers.CPU
    if options.dali_device == "cpu":
        images = resize(crop_on_cpu(encoded, kind, crop))
    elif needs_cpu != 0:  # DALI evaluates this condition for each image
        images = resize(crop_on_cpu(encoded, kind, crop)).gpu()
    else:
        # The GPU decodes entire images, because it decodes crops with interpolated chroma at a lower speed
        # (benchmarks/log/loader_h200.md).
        images = resize(fn.slice(decode_on_gpu(options, encoded), *crop, **PIXELS))
    return images


def padded_crop(options: Options, encoded: Any, kind: Any, resize: dict[str, Any], mean: list[float], seed: int) -> Any:
    """Decode images, resize them so that they just cover the crop, pad them by --crop-padding pixels of the mean color
    on each side, and crop them at a random position. All positions in the padded image are equally likely. See He et
    al., arXiv:1512.03385, section 4.2."""
    padding, crop = options.crop_padding, options.image_shape[1:]
    # The sizes come from the headers, because the CPU cannot wait for the GPU inside a pipeline.
    size = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.FLOAT)
    size = dali_math.floor(size * dali_math.max(crop[0] / size[0], crop[1] / size[1]) + 0.5)
    positions = size + types.Constant(np.float32([2 * padding + 1 - side for side in crop]))  # along each axis
    start = dali_math.floor(fn.random.uniform(range=[0, 1], shape=[2], seed=seed) * positions)
    return fn.slice(
        fn.resize(decode(options, encoded, kind), size=size, **resize),
        start=fn.cast(start, dtype=types.INT32) - padding,
        shape=crop,
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=_rounded(mean),
    )


def _rounded(color):
    """Round an RGB color to 8 bits."""
    return np.clip(np.round(color), 0, 255).tolist()
