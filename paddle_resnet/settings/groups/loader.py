"""The loader: batches, threads and decoders."""

from dataclasses import dataclass

from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    batch_size: int = flag(
        256,
        "images per process and batch",
        topic="optimizer",
        parse=numbers.batch_size,
        batches=True,
    )
    dali_output_fp16: bool = flag(
        False,
        "load images as float16",
        topic="precision",
        batches=True,
    )
    dali_random_seed: int = flag(
        42,
        "seed of the image order and of augmentation",
        topic="augment",
        parse=numbers.seed,
        batches=True,
    )
    dali_device: str = flag(
        "auto",
        "device that decodes and augments images; auto: the same as --device",
        topic="machine",
        kind="loader",
        choices=["auto", "gpu", "cpu"],
        batches=True,
    )
    dali_num_threads: int = flag(
        4,
        "number of loader threads per process",
        topic="machine",
        kind="loader",
        parse=numbers.threads,
    )
    dali_prefetch: int = flag(
        3,
        "number of batches that the loader prepares in advance",
        topic="machine",
        kind="loader",
        parse=numbers.integer(1, 100),
    )
    hw_decoder_load: float = flag(
        0.9,
        "fraction of each batch that the GPU's hardware JPEG decoder decodes, if the GPU has such a decoder",
        topic="machine",
        kind="loader",
        parse=numbers.ratio,
    )
