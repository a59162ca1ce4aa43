"""Declare the flags of train.py. Each flag has one declaration of its name, type, default, help and kind.

The kind of a flag determines which runs inherit it from a checkpoint. Evaluation and fine-tuning inherit the
flags of the kinds "network" and "preprocessing". A resumed run also inherits the flags of the kinds "recipe" and
"saving". No run inherits the flags of the kinds "loader", "machine" and "output".

The topic of a flag is the part of `--help all` that describes it; `--help` lists only the flags in MAIN, each with its
help text up to the first semicolon.
"""

import argparse
import os
from collections import namedtuple
from functools import partial

from paddle_resnet.models import MODELS, parts
from paddle_resnet.optimizers.table import OPTIMIZERS
from paddle_resnet.settings import stages
from paddle_resnet.utils import files, numbers
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.mode import RunScope

KINDS = ("network", "preprocessing", "recipe", "saving", "loader", "machine", "output")
EVALUATED = ("network", "preprocessing")
RESUMED = (*EVALUATED, "recipe", "saving")
MOST_MINUTES = 366 * 24 * 60  # maximum duration of a run
LEAST_FRACTION = 1e-6  # minimum A in --lookahead K,A; values below 1e-45 would be 0 in float32
MAX_BELOW_ONE = 0.9999999  # float32 would round larger values to 1, and optimizers divide by 1 minus the value

# {topic of --help: description}
TOPICS = {
    "start": "parts of a run, configuration file, network, and checkpoint to start from",
    "fine-tune": "pretrained weights, frozen layers, learning rates per layer",
    "data": "data set, classes and labels",
    "image": "image size and preprocessing",
    "augment": "random changes of training images",
    "regularize": "label smoothing, weight decay, dropout, averaged weights",
    "optimizer": "update rule and batch size",
    "schedule": "length of the run and learning rate",
    "precision": "mixed precision, memory layout, sparsity, quantization",
    "checkpoints": "saving, evaluation and early end of the run",
    "machine": "device, kernels and loader threads",
    "logs": "report, TensorBoard, HTML page, predictions",
    "benchmark": "measuring and tracing steps",
}
# The flags that a first user needs: {question: flags}.
MAIN = {
    "What to train": (
        *("--image-root", "--config", "--choose-recipe", "--model-arch-name", "--from-pretrained-params"),
        "--num-of-class",
    ),
    "How to train": ("--epochs", "--budget-minutes", "--batch-size", "--lr", "--optimizer", "--crop-size", "--amp"),
    "What to run, and where to save": ("--run-scope", "--from-checkpoint", "--resume", "--output-dir"),
    "Where to run": ("--device", "--seed", "--dry-run"),
}
EXAMPLES = (
    (
        "train on your photos; the run chooses flags for the data and the machine",
        "--config configs/photos.yaml --image-root DIR",
    ),
    (
        "train with a recipe; configs/README.md lists all recipes",
        "--config configs/imagenet_resnet50_90epochs.yaml --image-root DIR",
    ),
    (
        "continue after an interruption: repeat the command with --resume",
        "--config configs/photos.yaml --image-root DIR --resume",
    ),
    (
        "evaluate the best checkpoint of a run",
        "--run-scope eval_only --from-checkpoint output/ResNet50 --image-root DIR",
    ),
)
# Flags of NVIDIA's RN50v1.5 Paddle example.
_OF_NVIDIA = (
    "amp asp batch-size benchmark benchmark-steps benchmark-warmup-steps bn-weight-decay crop-size dali-num-threads "
    "dali-output-fp16 dali-random-seed data-layout enable-cpu-affinity epochs eval-interval from-checkpoint "
    "from-pretrained-params fuse-resunit image-root image-shape inference-dir label-smoothing last-epoch-of-checkpoint "
    "lr lr-scheduler mask-algo model-arch-name model-prefix momentum normalize-mean normalize-scale normalize-std "
    "num-of-class optimizer output-dir print-interval prune-model qat rand-crop-ratio rand-crop-scale report-file "
    "resize-short run-scope save-interval scale-loss show-config use-dynamic-loss-scaling use-pure-fp16 warmup-epochs "
    "warmup-start-lr weight-decay"
)
NVIDIA = frozenset(f"--{name}" for name in _OF_NVIDIA.split())

# Attributes of a flag in addition to those of its argparse action:
# kind: one of KINDS.
# topic: one of TOPICS.
# batches: whether the flag determines the order or the content of the training batches.
# depends_on: other flags. If the user sets one of these flags to a value that differs from the checkpoint's, the flag
#     that this entry declares is not inherited from the checkpoint.
# used_by: (other flag, the values of the other flag for which the declared flag has an effect), for example the
#     schedules that use the declared flag; None if the declared flag always has an effect.
# before: value to assume for checkpoints that are older than the flag; None for the default.
Declaration = namedtuple("Declaration", "kind topic batches depends_on used_by before")


def _flag(parser, kind, name, topic, batches=False, depends_on=(), used_by=None, before=None, **options):
    if used_by is not None:
        depends_on = (*depends_on, used_by[0])
    if "choices" not in options:
        options.setdefault("metavar", {int: "N", float: "X"}.get(type(options.get("default"))))
    action = parser.add_argument(name, **options)
    action.declaration = Declaration(kind, topic, batches, depends_on, used_by, before)
    action.mark = " (N)" if name in NVIDIA else ""


def _switch(default=False):
    """Return the argparse options of a boolean flag: `--flag` without a value means true, and `--flag false` overrides
    the configuration file."""
    return {"nargs": "?", "const": True, "default": default, "type": _truth, "metavar": "false"}


def _of_optimizers(flag, text):
    """Return the argparse options of a flag that only some optimizers use."""
    users = tuple(name for name, rule in OPTIMIZERS.items() if flag in rule.flags)
    return {"help": f"{text} ({', '.join(users)})", "used_by": ("optimizer", users)}


def _build_parser():
    parser = Parser(
        prog="train.py",
        description="Train, evaluate or benchmark an image classifier with Paddle and NVIDIA DALI.",
        examples=EXAMPLES,
        main=MAIN,
        epilog="train.py --print-config FLAGS prints all values as a file for --config. There and on the command line, "
        "`false` turns a flag off, and `None` unsets it. (N): flag of NVIDIA's RN50v1.5 Paddle example.",
    )
    for kind, declare in (
        ("output", _start),
        ("network", _network),
        ("preprocessing", _preprocessing),
        ("recipe", _batches),
        ("recipe", _training),
        ("recipe", _learning_rate),
        ("recipe", _precision),
        ("saving", _saving),
        ("loader", _loader),
        ("machine", _machine),
        ("output", _output),
        ("output", _benchmark),
    ):
        declare(partial(_flag, parser, kind))
    flags = {action.option_strings[0]: action.declaration for action in parser._actions if action.dest != "help"}
    parser.topics = {
        topic: (description, [name for name, declaration in flags.items() if declaration.topic == topic])
        for topic, description in TOPICS.items()
    }
    return parser


def _start(add):
    add(
        "--config",
        "start",
        type=files.argument,
        metavar="FILE",
        help="YAML file that sets flags (recipe); each key is a flag name with underscores; values that "
        "conflict with flags on the command line are ignored",
    )
    add(
        "--run-scope",
        "start",
        default="train_eval",
        choices=[s.value for s in RunScope],
        metavar="SCOPE",
        help=f"phases of the run: {', '.join(s.value for s in RunScope)}",
    )
    add(
        "--resume",
        "start",
        **_switch(),
        help="continue from the newest valid checkpoint in OUTPUT_DIR/ARCH, if there is one",
    )
    add(
        "--overwrite",
        "start",
        **_switch(),
        help="delete the checkpoints of an earlier run in OUTPUT_DIR/ARCH/ before training",
    )
    add(
        "--from-checkpoint",
        "start",
        type=files.argument,
        metavar="DIR",
        help="checkpoint or run folder to load; includes the optimizer state; of a run folder, the best checkpoint or, "
        "if there is none, the newest at the end of an epoch",
    )
    add(
        "--last-epoch-of-checkpoint",
        "start",
        type=_epoch,
        metavar="{None,auto,N}",
        help="epoch in --from-checkpoint DIR after which to continue; auto: the newest epoch; None: start with epoch "
        "0 and the parameters of DIR, or of its best checkpoint if DIR is a run folder",
    )
    add(
        "--from-pretrained-params",
        "fine-tune",
        type=_path,
        metavar="DIR",
        help="checkpoint folder or file PREFIX.pdparams with initial weights; None: training from scratch",
    )
    add(
        "--pretrained-mismatch",
        "fine-tune",
        default="error",
        choices=["error", "skip-classifier"],
        help="action if the classifier of the pretrained parameters has a different shape; skip-classifier: "
        "initialize a new classifier, for fine-tuning",
    )
    add(
        "--choose-recipe",
        "start",
        **_switch(),
        help="choose the recipe for the data and the machine; sets network, pretrained weights, image and batch size, "
        "epochs, optimizer, learning rate, augmentation, precision and loader threads, unless you set them",
    )
    add(
        "--dry-run",
        "start",
        **_switch(),
        help="stop before training, after all checks; programs are built and the checkpoint is loaded",
    )


def _network(add):
    add(
        "--model-arch-name",
        "start",
        default="ResNet50",
        metavar="ARCH",
        help=f"network, or FILE.py:NAME for your own; the networks are {', '.join(MODELS)}; python -m "
        "paddle_resnet.models lists their sizes",
    )
    add(
        "--num-of-class",
        "data",
        type=numbers.num_of_class,
        default=argparse.SUPPRESS,
        metavar="N",
        help="number of network outputs; 1000 if the data defines no classes (default: chosen from the data)",
        before=1000,
    )
    add(
        "--image-shape",
        "image",
        type=numbers.shape,
        default=[4, 224, 224],
        metavar="C,H,W",
        help="shape of the network input; C: 3 for RGB, or 4 with an additional zero channel, which is faster in NHWC "
        "on a GPU; H,W: height and width of the crop (default: --crop-size and C 4 in NHWC on a GPU, otherwise 3)",
        batches=True,
    )

    add(
        "--qat",
        "precision",
        **_switch(),
        help="train with weights and activations rounded to INT8 in the forward pass (quantization-aware training); "
        "typically used to fine-tune a trained network (--from-pretrained-params)",
    )


def _preprocessing(add):
    add(
        "--crop-size",
        "image",
        type=numbers.side,
        default=224,
        help="shorter side of the network input in pixels; if not set, the shorter side in --image-shape",
        batches=True,
    )
    add(
        "--resize-short",
        "image",
        type=numbers.side,
        default=256,
        help="in evaluation, shorter side of an image before the center crop, in pixels; if the crop is not square, "
        "images are scaled to cover H,W times --resize-short / --crop-size (default: the network's ratio, such as "
        "256/224, times --crop-size)",
        depends_on=("crop_size", "image_shape"),
    )
    add(
        "--interp",
        "image",
        default="triangular",
        choices=["linear", "triangular", "cubic", "lanczos3"],
        help="resize filter in training and evaluation; all except linear use antialiasing when they shrink images; "
        "NVIDIA's example uses triangular",
        before="linear",
        batches=True,
    )
    add(
        "--normalize-scale",
        "image",
        type=numbers.positive_number,
        default=1 / 255,
        help="factor applied to pixel values before normalization",
        batches=True,
    )
    add(
        "--normalize-mean",
        "image",
        type=numbers.number_list,
        default=[0.485, 0.456, 0.406],
        metavar="R,G,B",
        help="mean per channel, which is subtracted from pixel values after multiplication by --normalize-scale",
        batches=True,
    )
    add(
        "--normalize-std",
        "image",
        type=numbers.number_list,
        default=[0.229, 0.224, 0.225],
        metavar="R,G,B",
        help="standard deviation per channel, by which pixel values are divided after subtraction of --normalize-mean",
        batches=True,
    )


def _batches(add):
    add(
        "--batch-size",
        "optimizer",
        type=numbers.batch_size,
        default=256,
        help="images per process and batch",
        batches=True,
    )
    add("--data-layout", "precision", default="NCHW", choices=["NCHW", "NHWC"], help="memory layout of the images")
    add("--dali-output-fp16", "precision", **_switch(), help="load images as float16", batches=True)
    add(
        "--dali-random-seed",
        "augment",
        type=numbers.seed,
        default=42,
        help="seed of the image order and of augmentation",
        batches=True,
    )
    add(
        "--label-offset",
        "data",
        type=numbers.label_offset,
        default=numbers.AUTO,
        metavar="{auto,N}",
        help="first label in file lists and records, which is subtracted from all labels; auto: 1 if the labels in "
        "TFRecords are 1 to the number of classes, otherwise 0",
        before=0,
    )
    add(
        "--balanced-sampling",
        "data",
        **_switch(),
        help="draw training images from all classes with equal probability, with replacement; the length of an epoch "
        "does not change",
        batches=True,
    )
    add(
        "--rand-crop-scale",
        "augment",
        type=numbers.number_list,
        default=[0.08, 1.0],
        metavar="MIN,MAX",
        help="range of the random crop's area, as a fraction of the image",
        used_by=("crop_padding", (0,)),
        batches=True,
    )
    add(
        "--rand-crop-ratio",
        "augment",
        type=numbers.number_list,
        default=[3 / 4, 4 / 3],
        metavar="MIN,MAX",
        help="range of the random crop's aspect ratio, width/height",
        used_by=("crop_padding", (0,)),
        batches=True,
    )
    add(
        "--crop-padding",
        "augment",
        type=numbers.integer(0, 1024),
        default=0,
        metavar="N",
        help="if positive, training images are resized to cover the crop, padded by N pixels on each side and cropped "
        "at a random position; the scale is not random",
        batches=True,
    )
    add(
        "--auto-augment",
        "augment",
        default="none",
        choices=["none", "trivial", "randaug"],
        help="random operations on each image; trivial: one operation of TrivialAugment (wide), with random "
        "magnitude; randaug: two operations of RandAugment, with --auto-augment-magnitude",
        batches=True,
    )
    add(
        "--auto-augment-magnitude",
        "augment",
        type=numbers.integer(0, 30),
        default=9,
        metavar="M",
        help="magnitude of RandAugment's operations, from 0 to 30; three times timm's m",
        used_by=("auto_augment", ("randaug",)),
        batches=True,
    )
    add(
        "--color-jitter",
        "augment",
        type=_not_negative_number,
        default=0.0,
        metavar="S",
        help="strength of color jitter: brightness, contrast and saturation are scaled by factors from 1-S to 1+S",
        batches=True,
    )
    add(
        "--lighting",
        "augment",
        type=_not_negative_number,
        default=0.0,
        metavar="STD",
        help="standard deviation of PCA lighting noise (AlexNet: 0.1)",
        batches=True,
    )
    add(
        "--rotate-degrees",
        "augment",
        type=_not_negative_number,
        default=0.0,
        metavar="D",
        help="maximum angle of random rotations in either direction, in degrees",
        batches=True,
    )


def _training(add):
    add(
        "--iter-unit",
        "schedule",
        default="epoch",
        choices=["epoch", "batch"],
        help="unit of --warmup-epochs, --lr-decay-epochs, --save-interval and --eval-interval; batch: training steps, "
        "and --num-iter sets the length of the run",
    )
    add(
        "--num-iter",
        "schedule",
        type=_positive_count_or_none,
        metavar="N",
        help="number of training steps, with --iter-unit batch",
        used_by=("iter_unit", ("batch",)),
    )
    add(
        "--epochs",
        "schedule",
        type=numbers.positive,
        default=90,
        help="number of epochs to train; requires --iter-unit epoch",
        used_by=("iter_unit", ("epoch",)),
    )
    add(
        "--budget-minutes",
        "schedule",
        type=_minutes_or_none,
        metavar="N",
        help="duration of the whole run, from which the run chooses --epochs; includes startup, evaluations and "
        "checkpoints",
        depends_on=("epochs",),
        used_by=("iter_unit", ("epoch",)),
    )
    add(
        "--accumulate-steps",
        "optimizer",
        type=numbers.positive,
        default=1,
        metavar="K",
        help="number of batches per training step; averaging the gradients of K batches simulates a batch K times as "
        "large",
    )
    add(
        "--seed",
        "start",
        type=numbers.seed,
        default=0,
        help="seed of the initial weights; also of --mixup, --cutmix, --dropout and --drop-path",
    )
    add(
        "--label-smoothing",
        "regularize",
        type=numbers.ratio,
        default=0.1,
        help="fraction of each label that is spread evenly over all classes",
    )
    add(
        "--class-weights",
        "data",
        default="none",
        choices=["none", "balanced"],
        help="class weights in the training loss; balanced: inversely proportional to the number of training images "
        "of the class, with a mean of 1 over all images",
    )
    add(
        "--max-bad-steps",
        "checkpoints",
        type=numbers.positive,
        default=10,
        help="number of consecutive non-finite losses after which the run stops; steps skipped by loss scaling do not "
        "count",
    )
    add(
        "--freeze",
        "fine-tune",
        type=_layers,
        metavar="LAYER,...",
        help="layers that are not trained, such as stem,stages.0; their batch normalization uses the running "
        f"statistics without updating them; {parts.ALL_BUT_CLASSIFIER}: all layers except the last",
    )
    add(
        "--unfreeze-at",
        "fine-tune",
        type=_positive_count_or_none,
        metavar="EPOCH",
        help="first epoch in which the layers in --freeze are trained",
    )
    add(
        "--optimizer",
        "optimizer",
        default="Momentum",
        choices=list(OPTIMIZERS),
        metavar="NAME",
        help=f"update rule; one of {', '.join(OPTIMIZERS)}; see docs/optimizer.md for the formulas",
    )
    add(
        "--momentum",
        "optimizer",
        type=numbers.ratio,
        default=0.875,
        **_of_optimizers("momentum", "weight of the previous velocity"),
    )
    add(
        "--beta1",
        "optimizer",
        type=_below_one,
        default=0.9,
        **_of_optimizers("beta1", "weight of the previous first moment"),
    )
    add(
        "--beta2",
        "optimizer",
        type=_below_one,
        default=0.999,
        **_of_optimizers("beta2", "weight of the previous second moment"),
    )
    add(
        "--opt-epsilon",
        "optimizer",
        type=_epsilon,
        default=1e-8,
        **_of_optimizers("opt_epsilon", "term added to the square root of the second moment"),
    )
    add(
        "--lookahead",
        "optimizer",
        type=_lookahead,
        metavar="K,A",
        help="interval K in steps and fraction A of lookahead, such as 6,0.5: every K steps, the slow weights move "
        "towards the weights by the fraction A of the difference, and the weights are set to the slow weights",
    )
    adaptive = [name for name, rule in OPTIMIZERS.items() if rule.is_adaptive]
    add(
        "--weight-decay",
        "regularize",
        type=_not_negative_number,
        default=3.0517578125e-05,
        help=f"coefficient of L2 weight decay, which is decoupled from the gradient in {', '.join(adaptive)}",
    )
    add(
        "--clip-grad-norm",
        "optimizer",
        type=_positive_or_none,
        metavar="F",
        help="maximum L2 norm of all gradients together, after averaging over the processes",
    )
    add(
        "--sizes",
        "image",
        type=stages.parse,
        metavar="S:E[:B[:F]],...",
        help="training stages, such as 128:0:512:2,160:20: from epoch E on, images have S x S pixels, batches have B "
        "images per process (if omitted, --batch-size), and the learning rate is multiplied by F (if omitted, 1); "
        "evaluation uses --crop-size",
    )
    add(
        "--mixup",
        "augment",
        type=_alpha,
        default=0.0,
        metavar="A",
        help="parameter of mixup, which mixes images and labels with a ratio from Beta(A, A); 0: off",
    )
    add(
        "--cutmix",
        "augment",
        type=_alpha,
        default=0.0,
        metavar="A",
        help="parameter of CutMix, which pastes a box from a second image; the relative area of the box is drawn "
        "from Beta(A, A); 0: off",
    )
    add(
        "--dropout",
        "regularize",
        type=_below_one,
        default=0.0,
        metavar="P",
        help="dropout rate before the last layer; 0: off",
    )
    add(
        "--drop-path",
        "regularize",
        type=_below_one,
        default=0.0,
        metavar="P",
        help="rate of stochastic depth: the probability with which the last residual block omits its branch for an "
        "image; the probability rises linearly from the first block to the last; 0: off",
    )
    add(
        "--bn-momentum",
        "fine-tune",
        type=_beta_or_none,
        metavar="M",
        help="weight of the previous value in the moving averages of the BN statistics; after B batches, "
        "the initial statistics have a weight of M^B (default: chosen from the network)",
    )
    add(
        "--ema",
        "regularize",
        type=_beta_or_none,
        metavar="DECAY",
        help="decay per step, such as 0.9999, of the exponential moving average of the weights, which evaluation uses",
    )
    add(
        "--bn-weight-decay",
        "regularize",
        **_switch(),
        help="apply weight decay also to the scale and shift of normalization layers and to other per-channel factors",
    )


def _learning_rate(add):
    add(
        "--lr",
        "schedule",
        type=_not_negative_number,
        default=0.256,
        help="peak learning rate for one process and one batch per step; the run multiplies it by the number of "
        "processes and by --accumulate-steps",
    )
    add(
        "--warmup-epochs",
        "schedule",
        type=numbers.not_negative,
        default=5,
        help="number of epochs of linear warm-up; with --iter-unit batch, number of steps, which is 0 if not set",
        depends_on=("iter_unit",),
    )
    add(
        "--lr-decay-by-layer",
        "fine-tune",
        type=_positive_ratio,
        default=1.0,
        metavar="F",
        help="ratio of the learning rate of each network part (stem, block, ...) to that of the next part",
    )
    add(
        "--classifier-lr-factor",
        "fine-tune",
        type=_factor,
        default=1.0,
        metavar="F",
        help="factor by which the learning rate of the last layer is multiplied",
    )
    add(
        "--warmup-start-lr",
        "schedule",
        type=_not_negative_number,
        default=0.0,
        help="learning rate at step 0 of the warm-up; not multiplied like --lr",
    )
    add(
        "--lr-scheduler",
        "schedule",
        default="Cosine",
        choices=["Cosine", "Piecewise", "Poly", "OneCycle", "FlatCosine"],
        help="learning-rate schedule after the warm-up; see docs/optimizer.md for the formulas",
    )
    add(
        "--min-lr",
        "schedule",
        type=_not_negative_number,
        default=0.0,
        help="final learning rate in all schedules except Piecewise; like --lr, multiplied by the number of processes "
        "and --accumulate-steps",
        used_by=("lr_scheduler", ("Cosine", "Poly", "OneCycle", "FlatCosine")),
    )
    add(
        "--lr-decay-epochs",
        "schedule",
        type=numbers.list_of(_not_negative_number),
        default=[30.0, 60.0, 80.0],
        metavar="E,...",
        help="epochs at which Piecewise multiplies the learning rate by --lr-decay-factor; with --iter-unit batch, "
        "steps",
        depends_on=("iter_unit",),
        used_by=("lr_scheduler", ("Piecewise",)),
    )
    add(
        "--lr-decay-factor",
        "schedule",
        type=_factor,
        default=0.1,
        help="factor by which Piecewise multiplies the learning rate at each of --lr-decay-epochs",
        used_by=("lr_scheduler", ("Piecewise",)),
    )
    add(
        "--lr-power",
        "schedule",
        type=numbers.positive_number,
        default=2.0,
        help="exponent of the Poly schedule",
        used_by=("lr_scheduler", ("Poly",)),
    )
    add(
        "--lr-rise",
        "schedule",
        type=numbers.ratio,
        default=0.25,
        help="fraction of the steps during which OneCycle rises to the peak",
        used_by=("lr_scheduler", ("OneCycle",)),
    )
    add(
        "--lr-flat",
        "schedule",
        type=numbers.ratio,
        default=0.75,
        help="fraction of the steps during which FlatCosine stays at the peak",
        used_by=("lr_scheduler", ("FlatCosine",)),
    )


def _precision(add):
    add("--amp", "precision", **_switch(), help="use mixed precision; GPUs only")
    add(
        "--amp-dtype",
        "precision",
        default="float16",
        choices=["float16", "bfloat16"],
        help="16-bit type of mixed precision; bfloat16 needs no loss scaling",
        depends_on=("amp",),
    )
    add(
        "--amp-level",
        "precision",
        default=argparse.SUPPRESS,
        choices=["O1", "O2"],
        help="level of mixed precision; O1: float32 parameters; O2: parameters in --amp-dtype with float32 master "
        "copies (default: O1)",
        depends_on=("amp",),
    )
    add(
        "--scale-loss",
        "precision",
        type=numbers.positive_number,
        default=1.0,
        help="loss scale; initial value if the scale is dynamic",
        depends_on=("amp", "amp_dtype"),
    )
    add(
        "--use-dynamic-loss-scaling",
        "precision",
        **_switch(),
        help="adjust the loss scale during training",
        depends_on=("amp", "amp_dtype"),
    )
    add(
        "--use-pure-fp16",
        "precision",
        **_switch(),
        help="shorthand for --amp-dtype float16 --amp-level O2",
        depends_on=("amp", "amp_dtype", "amp_level"),
    )
    add("--asp", "precision", **_switch(), help="train with 2:4 sparsity")
    add(
        "--prune-model",
        "precision",
        **_switch(),
        help="prune the weights to 2:4 sparsity before training (with --asp)",
        depends_on=("asp",),
    )
    add(
        "--mask-algo",
        "precision",
        default="mask_1d",
        choices=["mask_1d", "mask_2d_greedy", "mask_2d_best"],
        help="algorithm that chooses the 2:4 masks",
        depends_on=("asp",),
    )
    add(
        "--fuse-resunit",
        "precision",
        **_switch(),
        help="use Paddle's fused residual unit; only some builds of Paddle 3 have it; with other builds, the flag has "
        "no effect, and a warning is printed",
    )


def _saving(add):
    add(
        "--save-interval",
        "checkpoints",
        type=numbers.positive,
        default=1,
        help="number of epochs between checkpoints; with --iter-unit batch, number of steps, which is --num-iter if "
        "not set; the run always ends with a checkpoint",
        depends_on=("iter_unit",),
    )
    add(
        "--save-interval-steps",
        "checkpoints",
        type=numbers.not_negative,
        default=0,
        help="number of steps between additional checkpoints within an epoch; 0: no additional checkpoints",
        used_by=("iter_unit", ("epoch",)),
    )
    add(
        "--keep-checkpoints",
        "checkpoints",
        type=numbers.positive,
        default=3,
        help="number of newest checkpoints to keep, in addition to the best checkpoint and the same number of newest "
        "end-of-epoch checkpoints",
    )
    add(
        "--patience",
        "checkpoints",
        type=numbers.not_negative,
        default=0,
        metavar="N",
        help="number of consecutive evaluations without a higher top1 after which training ends; 0: never",
    )
    add(
        "--checkpoint-commit",
        "checkpoints",
        default="rename",
        choices=["rename", "marker"],
        help="method of completing a checkpoint; rename: rename its folder; marker: write meta.json last, for storage "
        "without atomic renames, such as object stores",
    )
    add(
        "--model-prefix",
        "checkpoints",
        type=_file_name,
        default=argparse.SUPPRESS,
        help="prefix of the files of a checkpoint; checkpoints without meta.json are read with this prefix, or with a "
        "detected one if the flag is not set (default: chosen from the network, such as resnet_50_paddle)",
        depends_on=("model_arch_name",),
    )
    add(
        "--eval-interval",
        "checkpoints",
        type=numbers.positive,
        default=1,
        help="number of epochs between evaluations; with --iter-unit batch, number of steps, which is --num-iter if "
        "not set; the run always ends with an evaluation",
        depends_on=("iter_unit",),
    )
    add(
        "--tta",
        "image",
        default="none",
        choices=["none", "flip"],
        help="test-time augmentation in evaluation; flip: average the probabilities of each image and its mirror image",
    )


def _loader(add):
    add(
        "--image-root",
        "data",
        type=files.argument,
        metavar="IMAGE_ROOT",
        default="/imagenet",
        help="folder of the data set, with train/ and val/; docs/data.md lists all formats",
    )
    add(
        "--data-format",
        "data",
        default="auto",
        choices=["auto", "folder", "filelist", "recordio", "tfrecord", "lmdb", "webdataset", "synthetic"],
        help="storage format of the data set; auto: detect the format; synthetic: one random batch in device memory",
    )
    add(
        "--skip-list",
        "data",
        type=files.argument,
        metavar="FILE",
        help="file with one image to skip per line, as a path relative to IMAGE_ROOT; python -m paddle_resnet.dataset "
        "verify can write it",
    )
    add(
        "--allow-empty-classes",
        "data",
        **_switch(),
        help="accept empty class folders in train/, with a warning",
    )
    add(
        "--allow-one-class",
        "data",
        **_switch(),
        help="accept training images of only one class, with a warning",
    )
    add(
        "--allow-outside",
        "data",
        **_switch(),
        help="accept files outside IMAGE_ROOT in file lists and --skip-list",
    )
    add(
        "--dali-device",
        "machine",
        default="auto",
        choices=["auto", "gpu", "cpu"],
        help="device that decodes and augments images; auto: the same as --device",
        batches=True,
    )
    add("--dali-num-threads", "machine", type=numbers.threads, default=4, help="number of loader threads per process")
    add(
        "--dali-prefetch",
        "machine",
        type=numbers.integer(1, 100),
        default=3,
        help="number of batches that the loader prepares in advance",
    )
    add(
        "--hw-decoder-load",
        "machine",
        type=numbers.ratio,
        default=0.9,
        help="fraction of each batch that the GPU's hardware JPEG decoder decodes, if the GPU has such a decoder",
    )


def _machine(add):
    add(
        "--device",
        "machine",
        default="auto",
        choices=["auto", "gpu", "cpu"],
        help="device to run on; auto: a GPU if Paddle finds one, otherwise the CPU",
    )
    add(
        "--kernels",
        "machine",
        default="auto",
        choices=["auto", "native", "paddle"],
        help="kernels of the training step; native: custom kernels for normalization, activations, depthwise and 1x1 "
        "convolutions, pooling, loss and optimizer, in NHWC only (docs/kernels.md); paddle: Paddle's kernels; auto: "
        "native on a GPU in NHWC if the custom kernels can be built, otherwise paddle",
    )
    add(
        "--cuda-graph",
        "machine",
        **_switch(True),
        help="capture a training step as a CUDA graph and replay it with one call; requires native kernels "
        "and a single host; not supported with --profile-steps",
    )
    add(
        "--enable-cpu-affinity",
        "machine",
        **_switch(True),
        help="bind each process to the CPU cores closest to its GPU",
    )
    add(
        "--comm-timeout-s",
        "machine",
        type=numbers.integer(1, 10**6),
        default=600,
        help="number of seconds without progress after which a job with several processes stops",
    )


def _output(add):
    add(
        "--output-dir",
        "checkpoints",
        type=files.argument,
        default="./output/",
        metavar="OUTPUT_DIR",
        help="parent folder of the checkpoints, OUTPUT_DIR/ARCH/EPOCH",
    )
    add(
        "--inference-dir",
        "checkpoints",
        type=_path,
        metavar="DIR",
        help="no effect; accepted for scripts of NVIDIA's example; a warning contains the command that exports the "
        "trained network to DIR",
    )
    add(
        "--report-file",
        "logs",
        type=_path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file for the metrics, in dllogger's format; --resume appends to it; an evaluation writes "
        "report.eval.json, and a benchmark report.benchmark.json (default: OUTPUT_DIR/ARCH/report.json)",
    )
    add(
        "--tensorboard-dir",
        "logs",
        type=_path,
        metavar="DIR",
        help="folder for TensorBoard events: the metrics of the report, the first training batch and the flags",
    )
    add(
        "--report-html",
        "logs",
        type=_path,
        metavar="FILE",
        help="file for an HTML page with curves, confused classes and images, written at the end of the run",
    )
    add(
        "--predictions",
        "logs",
        type=_path,
        metavar="FILE",
        help="CSV file for the five most probable classes of each validation image in the best evaluation of the run",
    )
    add("--print-interval", "logs", type=numbers.positive, default=10, help="number of steps between log lines")
    add(
        "--show-config",
        "logs",
        **_switch(True),
        help="print the flags at startup; true: all; false: none (default: those that differ from their defaults)",
    )
    add(
        "--verbose",
        "logs",
        **_switch(),
        help="list the variables of a checkpoint that do not match the network, instead of only their number",
    )
    add("--print-config", "start", **_switch(), help="print the flags as YAML and stop")


def _benchmark(add):
    add(
        "--benchmark",
        "benchmark",
        **_switch(),
        help="measure the speed of training, or of evaluation with --run-scope eval_only, and stop",
    )
    add("--benchmark-steps", "benchmark", type=numbers.positive, default=100, help="number of steps to measure")
    add(
        "--benchmark-warmup-steps",
        "benchmark",
        type=numbers.not_negative,
        default=100,
        help="number of steps before the measurement",
    )
    add(
        "--profile-steps",
        "benchmark",
        type=_steps,
        metavar="A:B",
        help="steps of the first epoch to trace, from A to B-1; the trace is written to OUTPUT_DIR/profile/",
    )


def _truth(text):
    values = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"'{text}' is not a boolean; use true or false")
    return values[text.lower()]


def _file_name(text):
    # File systems limit a name to 255 bytes, including the suffix.
    if not text or "/" in text or text.startswith(".") or len(os.fsencode(text)) > 240:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a valid file name; use at most 240 bytes without / and without a leading dot, such as "
            "resnet50"
        )
    return text


def _not_negative_number(text):
    value = numbers.number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; use 0 or more")
    return value


def _positive_or_none(text):
    """Parse a positive number, or "None" to override a value in the configuration file."""
    return None if text == "None" else numbers.positive_number(text)


def _minutes_or_none(text):
    value = _positive_or_none(text)
    if value is not None and value > MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text} is too large; use at most {MOST_MINUTES}, which is a year")
    return value


def _positive_count_or_none(text):
    """Parse a positive whole number, or "None" to override a value in the configuration file."""
    return None if text == "None" else numbers.positive(text)


def _alpha(text):
    value = _not_negative_number(text)
    if value > 1e6:
        raise argparse.ArgumentTypeError(f"{text} is too large; use a number up to 1e6, such as 0.2")
    return value


def _factor(text):
    value = numbers.positive_number(text)
    if value > 1000:  # powers of larger factors may overflow
        raise argparse.ArgumentTypeError(f"{text} is too large; use a number up to 1000, such as 0.1")
    return value


def _positive_ratio(text):
    value = numbers.ratio(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive; use a number above 0 and up to 1, such as 0.8")
    return value


def _layers(text):
    """Parse the value of --freeze, or "None" to override a value in the configuration file."""
    if text == "None":
        return None
    names = [name.strip() for name in text.split(",")]
    if "" in names or (parts.ALL_BUT_CLASSIFIER in names and len(names) > 1):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a list of layers; use layers such as stem,stages.0, or only {parts.ALL_BUT_CLASSIFIER}"
        )
    return names


def _below_one(text):
    value = numbers.ratio(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1; use a number of at least 0 and below 1, such as 0.9")
    if value > MAX_BELOW_ONE:
        raise argparse.ArgumentTypeError(f"{text} is too close to 1 for float32; use {MAX_BELOW_ONE} or less")
    return value


def _beta_or_none(text):
    return None if text == "None" else _below_one(text)


def _lookahead(text):
    """Parse --lookahead, or "None" to override a value in the configuration file."""
    if text == "None":
        return None
    try:
        interval, fraction = text.split(",")
        values = [numbers.positive(interval.strip()), numbers.ratio(fraction)]
        if values[1] < LEAST_FRACTION:
            raise ValueError
        return values
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not of the form K,A; use a whole number K above 0 and a fraction A from "
            f"{LEAST_FRACTION:g} to 1, such as 6,0.5"
        ) from e


def _epsilon(text):
    value = numbers.number(text)
    if value < 1e-30:
        raise argparse.ArgumentTypeError(f"{text} is too small for float32; use 1e-30 or more, such as 1e-8")
    return value


def _steps(text):
    """Parse A:B, A,B (from a YAML list), or "None" to override a value in the configuration file."""
    if text == "None":
        return None
    parts = text.replace(",", ":").split(":")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of steps; use A:B, such as 100:110")
    begin, end = (numbers.not_negative(part) for part in parts)
    if begin >= end:
        raise argparse.ArgumentTypeError(f"{begin}:{end} contains no step; use A:B with A less than B")
    return [begin, end]


def _path(text):
    """Parse a path, or "None" to override a value in the configuration file."""
    return None if text == "None" else files.argument(text)


def _epoch(text):
    if text == "None":
        return None
    return text if text == "auto" else numbers.not_negative(text)


PARSER = _build_parser()
ACTIONS = {action.dest: action for action in PARSER._actions if action.dest != "help"}
FLAGS = {name: action.declaration for name, action in ACTIONS.items()}
DEFAULTS = {name: None if a.default is argparse.SUPPRESS else a.default for name, a in ACTIONS.items()}


def of_kinds(*kinds):
    """Return the names of all flags whose kind is in `kinds`."""
    return tuple(name for name, declaration in FLAGS.items() if declaration.kind in kinds)
