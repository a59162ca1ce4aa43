"""The axes of the combination tests: features of a training run, with the flags of each value.

Each pair of values of two axes occurs in a row of table.csv, unless conflicts.py declares it as a conflict or the axes
are INDEPENDENT. After a change to this file or to conflicts.py, write the table again:
python tests/combinations/generate.py

In flags, {data} is the folder of the generated data sets, {run} the output folder, {start} the checkpoint from which a
run starts, {teacher} a checkpoint with the same network and preprocessing, {trace} the value of --profile-steps for the
first step of the run, and {files} a folder with a network. See checks.py.
"""

# The first value of an axis is the default that a row for a declared conflict uses.
AXES = {
    # Network and images
    "network": {
        "Tiny": ["--model-arch-name", "Tiny"],
        "ResNet18_CIFAR": ["--model-arch-name", "ResNet18_CIFAR"],
        "SE_ResNet50_vd": ["--model-arch-name", "SE_ResNet50_vd"],
        "XSEResNeXt50_Mish_SA": ["--model-arch-name", "XSEResNeXt50_Mish_SA"],
        "MobileNetV2": ["--model-arch-name", "MobileNetV2"],
        "MobileNetV3_Small": ["--model-arch-name", "MobileNetV3_Small"],
        "GhostNet": ["--model-arch-name", "GhostNet"],
        "PPLCNet_x1_0": ["--model-arch-name", "PPLCNet_x1_0"],
        "PPHGNetV2_B0": ["--model-arch-name", "PPHGNetV2_B0"],
        "EfficientNet_Lite0": ["--model-arch-name", "EfficientNet_Lite0"],
        "own file": ["--model-arch-name", "{files}/network.py:Net"],
    },
    "prefix": {"derived": [], "own": ["--model-prefix", "mine"]},
    "classes": {"data": [], "more": ["--num-of-class", "6"]},
    "shape": {
        "RGB": ["--image-shape", "3,32,32"],
        "four channels": ["--image-shape", "4,32,32"],
        "not square": ["--image-shape", "3,32,40"],
        "crop size": ["--crop-size", "32", "--resize-short", "40"],
    },
    "layout": {
        "NCHW": [],
        "NHWC": ["--data-layout", "NHWC"],
        "NHWC native": ["--data-layout", "NHWC", "--kernels", "native"],
    },
    "qat": {"off": [], "on": ["--qat"]},
    "interp": {
        "triangular": [],
        "linear": ["--interp", "linear"],
        "cubic": ["--interp", "cubic"],
        "lanczos3": ["--interp", "lanczos3"],
    },
    "normalization": {
        "ImageNet": [],
        "own": [
            *("--normalize-scale", "0.004", "--normalize-mean", "0.5,0.4,0.3"),
            *("--normalize-std", "0.3,0.25,0.2"),
        ],
    },
    # Data
    "format": {
        "folder": ["--image-root", "{data}/folder"],
        "named folder": ["--image-root", "{data}/folder", "--data-format", "folder"],
        "skip list": ["--image-root", "{data}/folder", "--skip-list", "{data}/skip.txt"],
        "empty class": ["--image-root", "{data}/empty_class", "--allow-empty-classes"],
        "one class": ["--image-root", "{data}/one_class", "--allow-one-class"],
        "filelist": ["--image-root", "{data}/filelist", "--data-format", "filelist"],
        "filelist outside": ["--image-root", "{data}/outside", "--allow-outside"],
        "filelist from 1": ["--image-root", "{data}/from_1", "--label-offset", "1"],
        "recordio": ["--image-root", "{data}/recordio", "--data-format", "recordio"],
        "tfrecord": ["--image-root", "{data}/tfrecord", "--data-format", "tfrecord"],
        "tfrecord from 1": ["--image-root", "{data}/tfrecord_from_1"],
        "lmdb": ["--image-root", "{data}/lmdb", "--data-format", "lmdb"],
        "webdataset": ["--image-root", "{data}/webdataset", "--data-format", "webdataset"],
        "parquet": ["--image-root", "{data}/parquet", "--data-format", "parquet"],
        "synthetic": ["--data-format", "synthetic"],
    },
    "batch": {"8": ["--batch-size", "8"], "5": ["--batch-size", "5"]},
    "fp16 images": {"off": [], "on": ["--dali-output-fp16"]},
    "seed": {"default": [], "own": ["--seed", "3", "--dali-random-seed", "5"]},
    "balanced sampling": {"off": [], "on": ["--balanced-sampling"]},
    "crop": {
        "default": [],
        "range": ["--rand-crop-scale", "0.5,0.9", "--rand-crop-ratio", "0.8,1.2"],
        "padding": ["--crop-padding", "4"],
    },
    "auto augment": {
        "none": [],
        "trivial": ["--auto-augment", "trivial"],
        "randaug": ["--auto-augment", "randaug", "--auto-augment-magnitude", "5"],
    },
    "color": {"off": [], "on": ["--color-jitter", "0.3", "--lighting", "0.1"]},
    "rotation": {"off": [], "on": ["--rotate-degrees", "10"]},
    "loader": {"default": [], "other": ["--dali-num-threads", "2", "--dali-prefetch", "1", "--dali-device", "cpu"]},
    # Length, start and end of the run
    "length": {
        "epochs": ["--epochs", "3"],
        "steps": ["--iter-unit", "batch", "--num-iter", "11"],
        "budget": ["--budget-minutes", "0.1"],
    },
    "scope": {"train_eval": [], "train_only": ["--run-scope", "train_only"]},
    "start": {
        "scratch": [],
        "weights": ["--from-pretrained-params", "{start}"],
        "other classes": ["--from-pretrained-params", "{start}", "--pretrained-mismatch", "skip-classifier"],
        "checkpoint": ["--from-checkpoint", "{start}", "--last-epoch-of-checkpoint", "auto"],
    },
    "recipe": {
        "flags": [],
        "file": ["--config", "configs/digits_cpu.yaml"],
        "GPU file": ["--config", "configs/cifar10_30epochs.yaml"],
        "photos": ["--config", "configs/photos.yaml"],
        "chosen": ["--choose-recipe"],
    },
    "sizes": {"one": [], "two": ["--sizes", "24:0,32:1"], "with batches": ["--sizes", "24:0:4:0.5,28:1,32:2:6"]},
    "freezing": {
        "none": [],
        "stem": ["--freeze", "stem"],
        "backbone": ["--freeze", "all-but-classifier"],
        "stem thawed": ["--freeze", "stem", "--unfreeze-at", "1"],
        "backbone thawed": ["--freeze", "all-but-classifier", "--unfreeze-at", "2"],
    },
    "accumulation": {"1": [], "2": ["--accumulate-steps", "2"]},
    # Loss, regularization and averages
    "label smoothing": {"default": [], "none": ["--label-smoothing", "0"]},
    "class weights": {"none": [], "balanced": ["--class-weights", "balanced"]},
    "labels": {
        "one": [],
        "several": ["--multi-label"],
        "asymmetric": ["--multi-label", "--asymmetric-loss", "4,0,0.05"],
    },
    "teacher": {
        "none": [],
        "own": ["--teacher", "{teacher}", "--distill-weight", "0.5", "--distill-temperature", "2"],
    },
    "mixup": {"off": [], "on": ["--mixup", "0.4"]},
    "cutmix": {"off": [], "on": ["--cutmix", "1"]},
    "dropout": {"off": [], "on": ["--dropout", "0.3"]},
    "drop path": {"off": [], "on": ["--drop-path", "0.4"]},
    "BN momentum": {"network": [], "own": ["--bn-momentum", "0.7"]},
    "ema": {"off": [], "on": ["--ema", "0.8"]},
    "lookahead": {"off": [], "on": ["--lookahead", "3,0.5"]},
    "weight decay": {"default": [], "none": ["--weight-decay", "0"], "more": ["--weight-decay", "0.01"]},
    "BN weight decay": {"off": [], "on": ["--bn-weight-decay"]},
    "sparsity": {
        "none": [],
        "mask_1d": ["--asp", "--prune-model"],
        "mask_2d_greedy": ["--asp", "--prune-model", "--mask-algo", "mask_2d_greedy"],
        "mask_2d_best": ["--asp", "--prune-model", "--mask-algo", "mask_2d_best"],
    },
    # Updates
    "optimizer": {
        "Momentum": ["--optimizer", "Momentum", "--momentum", "0.8", "--lr", "0.01"],
        "Nesterov": ["--optimizer", "Nesterov", "--momentum", "0.7", "--lr", "0.02"],
        "AdamW": [
            "--optimizer",
            "AdamW",
            "--beta1",
            "0.8",
            "--beta2",
            "0.98",
            "--opt-epsilon",
            "1e-6",
            "--lr",
            "0.002",
        ],
        "RAdam": ["--optimizer", "RAdam", "--beta1", "0.8", "--beta2", "0.98", "--opt-epsilon", "1e-6", "--lr", "0.01"],
        "LAMB": ["--optimizer", "LAMB", "--beta1", "0.8", "--beta2", "0.98", "--opt-epsilon", "1e-6", "--lr", "0.002"],
    },
    "clipping": {"off": [], "on": ["--clip-grad-norm", "0.5"]},
    "warm-up": {
        "none": ["--warmup-epochs", "0"],
        "default": [],
        "own": ["--warmup-epochs", "1", "--warmup-start-lr", "1e-6"],
    },
    "schedule": {
        "Cosine": [],
        "Cosine to minimum": ["--min-lr", "0.001"],
        "Piecewise": ["--lr-scheduler", "Piecewise", "--lr-decay-epochs", "1,2", "--lr-decay-factor", "0.5"],
        "Poly": ["--lr-scheduler", "Poly", "--lr-power", "3"],
        "OneCycle": ["--lr-scheduler", "OneCycle", "--lr-rise", "0.4"],
        "FlatCosine": ["--lr-scheduler", "FlatCosine", "--lr-flat", "0.5"],
    },
    "layer rates": {"equal": [], "decay": ["--lr-decay-by-layer", "0.7"]},
    "classifier rate": {"equal": [], "higher": ["--classifier-lr-factor", "5"]},
    # Evaluations, checkpoints and outputs
    "evaluations": {"each": [], "fewer": ["--eval-interval", "2"]},
    "saves": {"each": [], "fewer": ["--save-interval", "2"]},
    "step saves": {"off": [], "on": ["--save-interval-steps", "2"]},
    "kept": {"3": [], "1": ["--keep-checkpoints", "1"]},
    "patience": {"off": [], "on": ["--patience", "1"]},
    "commit": {"rename": [], "marker": ["--checkpoint-commit", "marker"]},
    "tta": {"none": [], "flip": ["--tta", "flip"]},
    "report": {"default": [], "own": ["--report-file", "{run}/own.json"]},
    "tensorboard": {"off": [], "on": ["--tensorboard-dir", "{run}/board"]},
    "page": {"off": [], "on": ["--report-html", "{run}/report.html"]},
    "predictions": {"off": [], "on": ["--predictions", "{run}/predictions.csv"]},
    "log interval": {"1": ["--print-interval", "1"], "3": ["--print-interval", "3"]},
    "trace": {"off": [], "on": ["--profile-steps", "{trace}"]},
}

# Flags that do not change what a run on a CPU trains, evaluates or saves, and flags that checks.py or run.py set.
UNCHANGED = {
    "resume": "checks.py adds it to each run that it has stopped",
    "overwrite": "deletes an earlier run before the start: tests/checkpoints/test_resume.py",
    "dry_run": "stops before step 1: tests/test_train.py",
    "output_dir": "each run has its own",
    "max_bad_steps": "only counts non-finite losses: tests/checkpoints/test_resume.py",
    "inference_dir": "only logs the command that exports the network: tests/test_train.py",
    "fuse_resunit": "has no effect: tests/test_program.py",
    "hw_decoder_load": "requires a GPU; see GPU_FLAGS and tests/test_gpu.py",
    "device": "argument of run.py",
    "program_representation": "requires Paddle 3 and a CPU: see PIR_FLAGS",
    "cuda_graph": "requires a GPU, on which it is the default: see GPU_FLAGS",
    "enable_cpu_affinity": "binds to the CPU cores of a GPU: tests/utils/test_affinity.py",
    "comm_timeout_s": "only limits waits: tests/job/test_monitor.py",
    "show_config": "only changes the log: tests/test_phases.py",
    "verbose": "only changes error messages: tests/checkpoints/test_variables.py",
    "print_config": "stops before the run: tests/test_config.py",
    "benchmark": "checks.py adds it to a run of each row",
    "benchmark_steps": "set with --benchmark",
    "benchmark_warmup_steps": "set with --benchmark",
}

# Two axes that cannot influence each other: a network gets the same batches from each format. All their values occur,
# but not each pair of them, which would require 15 x 11 rows.
INDEPENDENT = {"format", "network"}

# With Paddle 3, on a CPU and in a single process, the rows below PIR_ROWS also have these flags, unless they have one
# of the values in NOT_IN_PIR, with which they conflict.
PIR_FLAGS = ["--program-representation", "pir"]
PIR_ROWS = 80  # the rows from here on have no further values
NOT_IN_PIR = {"layout": ["NHWC native"], "qat": ["on"], "sparsity": ["mask_1d", "mask_2d_greedy", "mask_2d_best"]}
NOT_IN_PIR |= {"teacher": ["own"]}


def has_pir(number, values):
    """Return whether a row has PIR_FLAGS with Paddle 3, on a CPU and in a single process."""
    return number < PIR_ROWS and not any(values[axis] in excluded for axis, excluded in NOT_IN_PIR.items())


# On a GPU, a row also has these flags and a value of each of GPU_AXES. In NHWC, kernels are native and steps are
# captured by default. --hw-decoder-load 0: if several processes share a GPU, some of them may not get a hardware
# decoder, whose pixels differ from those of other decoders.
GPU_FLAGS = ["--hw-decoder-load", "0", "--data-layout", "NHWC"]
GPU_AXES = {
    "precision": {
        "O2": [*("--amp", "--amp-level", "O2"), *("--use-dynamic-loss-scaling", "--scale-loss", "128")],
        "pure fp16": ["--amp", "--use-pure-fp16", "--scale-loss", "128"],
        "O1": ["--amp", "--amp-level", "O1", "--use-dynamic-loss-scaling", "--scale-loss", "128"],
        "bfloat16 O2": ["--amp", "--amp-dtype", "bfloat16", "--amp-level", "O2"],
        "float32": ["--amp", "false"],
    },
    "loader": {"GPU": [], "CPU": ["--dali-device", "cpu"]},
}
# [(value of GPU_AXES that a row cannot have, values of the row that conflict with it, value to use instead)]
GPU_REPLACEMENTS = [(("precision", "bfloat16 O2"), ("sparsity", ("mask_1d", "mask_2d_greedy", "mask_2d_best")), "O2")]


def gpu_values(number, values):
    """Return the values of GPU_AXES for a row. Half of the rows have the first value of each axis."""
    result = {}
    for i, (axis, choices) in enumerate(GPU_AXES.items()):
        others = [*choices][1:]
        result[axis] = others[number // 4 % len(others)] if (number >> i) % 4 > 1 else next(iter(choices))
    for (axis, value), (other, conflicting), replacement in GPU_REPLACEMENTS:
        if result[axis] == value and values[other] in conflicting:
            result[axis] = replacement
    return result
