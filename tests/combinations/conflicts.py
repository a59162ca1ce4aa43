"""Declared conflicts between flags. A run with conflicting flags exits with code 2 and an error that names both flags.

All combinations of axis values that are not in PAIRS must work.
"""

from typing import NamedTuple

from axes import AXES, PIR_FLAGS


class Pair(NamedTuple):
    """Values of two axes that conflict: each value in `values` with each value in `others`. The error message contains
    all strings in `names`."""

    axis: str
    values: tuple
    other_axis: str
    others: tuple
    names: tuple


def _all_but(axis, *values):
    return tuple(value for value in AXES[axis] if value not in values)


RECORDS = ("recordio", "tfrecord", "tfrecord from 1", "lmdb", "webdataset", "parquet", "synthetic")
ONE_LABEL = ("filelist", "filelist outside", "filelist from 1", *RECORDS[1:6])
SEVERAL = ("several", "asymmetric")  # values of the axis "labels"
# paddle_resnet/settings/validation.py detects these conflicts, unless the comment above a pair names a different
# module.
PAIRS = [
    Pair("optimizer", ("RAdam",), "freezing", _all_but("freezing", "none"), ("--optimizer RAdam", "--freeze")),
    Pair("length", ("steps",), "step saves", ("on",), ("--save-interval-steps", "--iter-unit")),
    Pair("length", ("budget",), "trace", ("on",), ("--budget-minutes", "--profile-steps")),
    # paddle_resnet/budget.py
    Pair("length", ("budget",), "start", ("checkpoint",), ("--budget-minutes", "--from-checkpoint")),
    Pair("scope", ("train_only",), "patience", ("on",), ("--patience", "--run-scope train_only")),
    Pair("scope", ("train_only",), "predictions", ("on",), ("--predictions", "--run-scope train_only")),
    Pair("scope", ("train_only",), "tta", ("flip",), ("--tta", "--run-scope train_only")),
    Pair("format", ("synthetic",), "predictions", ("on",), ("--predictions", "--data-format synthetic")),
    Pair("format", ("synthetic",), "page", ("on",), ("--report-html", "--data-format synthetic")),
    Pair("shape", ("not square",), "sizes", _all_but("sizes", "one"), ("--sizes", "--image-shape")),
    # paddle_resnet/components/dropout.py
    Pair("network", ("PPLCNet_x1_0", "own file"), "drop path", ("on",), ("--drop-path", "--model-arch-name")),
    # paddle_resnet/data/loader.py
    Pair("format", RECORDS, "balanced sampling", ("on",), ("--balanced-sampling", "data format is")),
    Pair("format", RECORDS, "class weights", ("balanced",), ("--class-weights", "data format is")),
    # paddle_resnet/recipe.py
    Pair("format", ("synthetic",), "recipe", ("chosen", "photos"), ("--choose-recipe", "--data-format synthetic")),
    Pair("labels", SEVERAL, "balanced sampling", ("on",), ("--balanced-sampling", "--multi-label")),
    Pair("labels", SEVERAL, "recipe", ("chosen",), ("--choose-recipe", "--multi-label")),
    # paddle_resnet/data/label_sets.py, unless --data-format is set
    Pair("labels", SEVERAL, "format", ONE_LABEL, ("--multi-label",)),
    Pair("format", ("one class",), "recipe", ("chosen", "photos"), ("--image-root", "one class")),
]


class Flags(NamedTuple):
    """Flags that conflict with each other, and strings that the error message contains. The flags are appended to those
    of a row with the first value of each axis, except that `values` are used and the axes in `without` are omitted."""

    flags: str
    names: tuple
    values: dict = {}  # noqa: RUF012  not changed
    without: tuple = ()


# Conflicts between flags of the same axis or of no axis.
FLAGS = [
    # Start
    Flags("--from-checkpoint x --from-pretrained-params x", ("--from-checkpoint x", "--from-pretrained-params x")),
    Flags("--last-epoch-of-checkpoint auto", ("--last-epoch-of-checkpoint auto", "--from-checkpoint")),
    Flags("--pretrained-mismatch skip-classifier", ("--pretrained-mismatch", "--from-pretrained-params")),
    Flags(
        "--run-scope eval_only --from-pretrained-params x --pretrained-mismatch skip-classifier",
        ("--pretrained-mismatch", "--run-scope is eval_only"),
    ),
    Flags("--run-scope eval_only", ("--run-scope eval_only", "--from-checkpoint")),
    Flags("--resume --run-scope eval_only", ("--resume", "--run-scope is eval_only")),
    Flags("--resume --overwrite", ("--resume", "--overwrite")),
    # Outputs
    Flags("--run-scope eval_only --from-checkpoint x --tensorboard-dir t", ("--tensorboard-dir", "eval_only")),
    Flags("--benchmark --tensorboard-dir t", ("--tensorboard-dir", "--benchmark")),
    Flags("--benchmark --report-html r", ("--report-html", "--benchmark")),
    Flags("--benchmark --predictions p", ("--predictions", "--benchmark")),
    Flags("--benchmark --tta flip", ("--tta flip", "--benchmark")),
    # Length and stages
    Flags("--budget-minutes 5 --epochs 3", ("--budget-minutes 5", "--epochs 3"), without=("length",)),
    Flags("--iter-unit batch", ("--iter-unit batch", "--num-iter"), without=("length",)),
    Flags(
        "--iter-unit batch --num-iter 9 --lr-scheduler Piecewise",
        ("--iter-unit batch", "--lr-decay-epochs"),
        without=("length",),
    ),
    Flags("--unfreeze-at 1", ("--unfreeze-at 1", "--freeze")),
    Flags("--freeze stem --unfreeze-at 3", ("--unfreeze-at 3", "--epochs 3")),
    Flags("--sizes 24:0,32:3", ("--sizes", "--epochs is 3")),
    # Values that another value makes unused
    *(
        Flags(
            f"--lr 0.001 --optimizer {optimizer} {flags}",
            (flags.split()[0], f"--optimizer {optimizer}"),
            without=("optimizer",),
        )
        for optimizer, flags in (
            ("AdamW", "--momentum 0.8"),
            ("RAdam", "--momentum 0.8"),
            ("LAMB", "--momentum 0.8"),
            ("Momentum", "--beta1 0.8"),
            ("Momentum", "--beta2 0.8"),
            ("Nesterov", "--opt-epsilon 1e-6"),
        )
    ),
    *(
        Flags(f"--lr-scheduler {schedule} {flags}", (flags.split()[0], f"--lr-scheduler {schedule}"))
        for schedule, flags in (
            ("Piecewise", "--min-lr 0.001 --lr-decay-epochs 1"),
            ("Cosine", "--lr-decay-epochs 1"),
            ("Poly", "--lr-decay-factor 0.5"),
            ("FlatCosine", "--lr-power 3"),
            ("Cosine", "--lr-rise 0.5"),
            ("OneCycle", "--lr-flat 0.5"),
        )
    ),
    Flags("--num-iter 9", ("--num-iter 9", "--iter-unit epoch")),
    Flags("--iter-unit batch --num-iter 9 --epochs 3", ("--epochs 3", "--iter-unit batch")),
    Flags(
        "--iter-unit batch --num-iter 9 --budget-minutes 5",
        ("--budget-minutes 5", "--iter-unit batch"),
        without=("length",),
    ),
    Flags("--crop-padding 4 --rand-crop-scale 0.5,0.9", ("--rand-crop-scale", "--crop-padding")),
    Flags("--crop-padding 4 --rand-crop-ratio 0.9,1.1", ("--rand-crop-ratio", "--crop-padding")),
    Flags("--auto-augment trivial --auto-augment-magnitude 5", ("--auto-augment-magnitude", "--auto-augment trivial")),
    # Limits that depend on another flag
    Flags("--min-lr 0.03", ("--min-lr", "--lr")),
    Flags("--crop-padding 32", ("--crop-padding 32", "--crop-size 32")),
    Flags("--crop-size 24", ("--image-shape 3,32,32", "--crop-size 24")),
    Flags("--resize-short 24", ("--resize-short 24", "--crop-size 32")),
    Flags("--opt-epsilon 1e-15", ("--opt-epsilon", "--optimizer RAdam"), {"optimizer": "RAdam"}),
    Flags("--mixup 0.4 --batch-size 1", ("--mixup", "--batch-size")),
    Flags("--cutmix 1 --batch-size 1", ("--cutmix", "--batch-size")),
    # Sparsity
    Flags("--asp", ("--asp", "--prune-model")),
    Flags("--prune-model", ("--prune-model", "--asp")),
    Flags("--mask-algo mask_2d_best", ("--mask-algo", "--prune-model")),
    # Distillation
    Flags("--distill-weight 0.5", ("--distill-weight 0.5", "--teacher")),
    Flags("--distill-temperature 2", ("--distill-temperature 2", "--teacher")),
    # Precision and device
    *(
        Flags(flags, (flags.split()[0], "--amp"))
        for flags in ("--use-pure-fp16", "--use-dynamic-loss-scaling", "--scale-loss 8")
    ),
    *(Flags(flags, (flags.split()[0], "--amp")) for flags in ("--amp-level O2", "--amp-dtype bfloat16")),
    Flags("--amp --use-pure-fp16 --amp-level O1", ("--use-pure-fp16", "--amp-level")),
    Flags("--amp --use-pure-fp16 --amp-dtype bfloat16", ("--use-pure-fp16", "--amp-dtype")),
    Flags("--amp --amp-dtype bfloat16 --use-dynamic-loss-scaling", ("--use-dynamic-loss-scaling", "bfloat16")),
    Flags("--amp --amp-dtype bfloat16 --scale-loss 8", ("--scale-loss", "bfloat16")),
    Flags("--amp --amp-dtype bfloat16 --amp-level O2 --asp --prune-model", ("--asp", "--amp-level", "--amp-dtype")),
    Flags("--amp", ("--amp", "on the CPU")),
    Flags("--dali-device gpu", ("--dali-device gpu", "on the CPU")),
    Flags("--kernels native", ("--kernels native", "--data-layout NHWC")),
    # Program representation
    *(
        Flags(" ".join([*PIR_FLAGS, flags]), ("--program-representation pir", name))
        for flags, name in (
            ("--amp", "--amp"),
            ("--asp --prune-model", "--asp"),
            ("--qat", "--qat"),
            ("--data-layout NHWC --kernels native", "--kernels native"),
            ("--teacher x", "--teacher x"),
        )
    ),
]


def conflicting():
    """Return {((axis, value), (other axis, other value)): names}. Each pair is in the order of AXES."""
    order, result = list(AXES), {}
    for pair in PAIRS:
        for value in pair.values:
            for other in pair.others:
                ends = (pair.axis, value), (pair.other_axis, other)
                result[tuple(sorted(ends, key=lambda end: order.index(end[0])))] = pair.names
    return result


def cases():
    """Return a Flags for each conflict, including those of PAIRS."""
    return [*(Flags("", names, dict(pair)) for pair, names in conflicting().items()), *FLAGS]
