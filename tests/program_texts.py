"""Write and compare the programs of the sets of flags in SETS, to show whether a change affects the operators of a run.

    .venv/bin/python tests/program_texts.py write before    # at the commit before the change
    .venv/bin/python tests/program_texts.py write after     # with the change
    .venv/bin/python tests/program_texts.py compare before after

`write` builds the programs of each set of flags with Paddle's kernels and, if they are available, with custom kernels.
It writes each program to a file: the startup program, the training program, its compiled copies (for the last batch of
a step and for the other batches), the evaluation program and its compiled copy. A text contains the operators with
their inputs, outputs and attributes, and the variables that they use. It omits the Python call stacks in which the
operators were created.

Programs for GPUs, mixed precision and two processes are built on a CPU, but not run. Their operators are those of a run
on GPUs, with two exceptions: convolutions are not fused with BN in evaluation (folding.fuse_convolutions), and there
are no operators that create communicators. `compare` exits with code 1 if a text differs or there are no texts.
"""

import argparse
import contextlib
import difflib
import logging
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported

TINY = [
    *("--model-arch-name", "Tiny", "--num-of-class", "3", "--image-shape", "4,32,32", "--crop-size", "32"),
    *("--data-format", "synthetic", "--batch-size", "8", "--show-config", "false", "--warmup-epochs", "0"),
]
NHWC = "--data-layout NHWC "
UPDATE = "--clip-grad-norm 1 --ema 0.9 --lookahead 5,0.5 --lr-decay-by-layer 0.5 --accumulate-steps 2 "
FLOAT16 = {"amp": True, "amp_dtype": "float16", "scale_loss": 128.0, "use_dynamic_loss_scaling": True}
O1, O2 = FLOAT16 | {"amp_level": "O1"}, FLOAT16 | {"amp_level": "O2"}
BFLOAT16 = {"amp": True, "amp_dtype": "bfloat16", "amp_level": "O2"}
FIXED = O2 | {"use_dynamic_loss_scaling": False}
GPU, RANKS = {"device": "gpu"}, {"ranks": 2}
# {name: (flags, settings that config.parse_args would reject here, and the number of ranks)}
SETS = {
    "default": ("", {}),
    "nhwc": (NHWC, {}),
    "fp16_images": (NHWC + "--dali-output-fp16", {}),
    "nesterov": ("--optimizer Nesterov --bn-weight-decay", {}),
    "adamw": (NHWC + "--optimizer AdamW --lr 0.001", {}),
    "adamw_update": ("--optimizer AdamW --lr 0.001 " + UPDATE, {}),
    "radam": ("--optimizer RAdam --lr 0.001 --lookahead 6,0.5", {}),
    "radam_update": (NHWC + "--optimizer RAdam --lr 0.001 " + UPDATE, {}),
    "lamb": ("--optimizer LAMB --lr 0.001 --ema 0.9", {}),
    "lamb_update": (NHWC + "--optimizer LAMB --lr 0.001 " + UPDATE, {}),
    "update": (UPDATE, {}),
    "clipping": ("--clip-grad-norm 2", {}),
    "ema": (NHWC + "--ema 0.9", {}),
    "lookahead": ("--lookahead 5,0.5", {}),
    "accumulation": ("--accumulate-steps 4", {}),
    "rates": ("--lr-decay-by-layer 0.5 --classifier-lr-factor 3", {}),
    "classifier_rate": (NHWC + "--classifier-lr-factor 3", {}),
    "mixing": ("--mixup 0.4 --cutmix 1 --label-smoothing 0", {}),
    "mixing_nhwc": (NHWC + "--mixup 0.4 --class-weights balanced", {}),
    "class_weights": ("--class-weights balanced --bn-momentum 0.7", {}),
    "dropout": (NHWC + "--dropout 0.2 --drop-path 0.2", {}),
    "frozen": ("--freeze stem --ema 0.9 --lookahead 5,0.5 --accumulate-steps 2", {}),
    "frozen_nhwc": (NHWC + "--freeze stem --optimizer AdamW --lr 0.001 --ema 0.9", {}),
    "asp": ("--asp --prune-model --ema 0.9 --lookahead 5,0.5 --freeze stem", {}),
    "qat": ("--qat --tta flip", {}),
    "qat_nhwc": (NHWC + "--qat --asp --prune-model --accumulate-steps 2 --optimizer LAMB --lr 0.001", {}),
    "outputs": (NHWC + "--tta flip", {"report_html": "page.html"}),
    "mobile": (NHWC + "--model-arch-name MobileNetV2 " + UPDATE, {}),
    "excitation": (NHWC + "--model-arch-name SE_ResNet50_vd --drop-path 0.2", {}),
    "attention": (NHWC + "--model-arch-name XSEResNeXt50_Mish_SA --ema 0.9", O1 | GPU),
    "ghost": (NHWC + "--model-arch-name GhostNet", O2 | GPU),
    "affine": (NHWC + "--model-arch-name PPHGNetV2_B0 --drop-path 0.2", {}),
    "hard_swish": (NHWC + "--model-arch-name MobileNetV3_Small --dropout 0.2", O2 | GPU),
    "gpu": (NHWC + UPDATE, GPU),
    "o1": (NHWC + UPDATE, O1 | GPU),
    "o2": (NHWC + "--dali-output-fp16 " + UPDATE, O2 | GPU),
    "o2_plain": (NHWC + "--dali-output-fp16", O2 | GPU),
    "o2_nchw": ("--mixup 0.4 --dropout 0.2 --ema 0.9", O2 | GPU),
    "o2_fixed_scale": (NHWC + UPDATE, FIXED | GPU),
    "o2_adamw": (NHWC + "--optimizer AdamW --lr 0.001 " + UPDATE, O2 | GPU),
    "o2_radam": (NHWC + "--optimizer RAdam --lr 0.001 --class-weights balanced " + UPDATE, O2 | GPU),
    "o2_lamb": (NHWC + "--optimizer LAMB --lr 0.001 --freeze stem " + UPDATE, O2 | GPU),
    "o2_asp": (NHWC + "--asp --prune-model --qat " + UPDATE, O2 | GPU),
    "bfloat16": (NHWC + UPDATE, BFLOAT16 | GPU),
    "bfloat16_asp": (NHWC + "--ema 0.9 --freeze stem --lookahead 5,0.5 --optimizer LAMB --lr 0.001", BFLOAT16 | GPU),
    "two_ranks": ("--ema 0.9", RANKS),
    "two_ranks_nhwc": (NHWC + UPDATE, RANKS),
    "two_ranks_o2": (NHWC + UPDATE, O2 | GPU | RANKS),
    "two_ranks_o2_asp": (NHWC + "--asp --prune-model --mixup 0.4 --optimizer RAdam --lr 0.001", O2 | GPU | RANKS),
    "two_ranks_bfloat16": (NHWC + "--clip-grad-norm 1 --accumulate-steps 2", BFLOAT16 | GPU | RANKS),
}


def prepare():
    """Register tiny networks, and make this process build the programs of machines with GPUs and of two ranks."""
    import paddle
    from paddle import static
    from paddle.base.layers import math_op_patch
    from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper

    import few_blocks
    from paddle_resnet import models
    from paddle_resnet.job import fleet, processes
    from paddle_resnet.machine import compat
    from paddle_resnet.models.resnet import BottleneckBlock, ResNet
    from paddle_resnet.passes import folding, fusion

    logging.disable(logging.WARNING)  # Paddle warns that this build has no kernels in half precision
    few_blocks.shrink()
    models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1, 2), width=8)
    paddle.base.framework.traceback.extract_stack = list  # Paddle would store the call stack in each operator
    math_op_patch.inspect = argparse.Namespace(stack=lambda: [None, (None, "", 0)])
    paddle.enable_static()
    lists = static.amp.AutoMixedPrecisionLists

    def all_supported(*arguments, **options):
        """Return AMP's lists without unsupported operators. A CPU build lists operators that GPU builds support."""
        result = lists(*arguments, **options)
        result.unsupported_list = set()
        return result

    static.amp.AutoMixedPrecisionLists = all_supported
    fusion.has_bfloat16_tensor_cores = lambda: True
    folding.fuse_convolutions = lambda program, exe, **_: (0, lambda: None)  # its operator exists only in GPU builds
    processes.place = lambda device: paddle.CPUPlace()
    CollectiveHelper._init_communicator = lambda *arguments, **options: None  # operators that only NCCL needs
    compat.start_gloo = lambda prepare: None
    fleet.GPU_FLAGS = {"FLAGS_max_inplace_grad_add": 8}  # the only flag that changes programs


def settings_of(flags, kernels, changes):
    """Return the frozen settings of a set: its flags, a value of --kernels, and its further settings (`changes`). The
    number of ranks in `changes` is ignored."""
    from paddle_resnet import config

    settings = config.parse_args([*TINY, *flags.split(), "--device", "cpu"])
    values = {"device": "cpu", "kernels": kernels, "dali_device": "cpu", "cuda_graph": False}
    settings.set("Python", **(values | {name: value for name, value in changes.items() if name != "ranks"}))
    settings.finalize()
    return settings


@contextlib.contextmanager
def ranks(count):
    """If `count` is 2, make this process rank 0 of a job with two processes."""
    if count > 1:
        names = ["127.0.0.1:12001", "127.0.0.1:12002"]
        os.environ |= {"PADDLE_TRAINERS_NUM": str(count), "PADDLE_TRAINER_ID": "0", "PADDLE_LOCAL_SIZE": str(count)}
        os.environ |= {"PADDLE_TRAINER_ENDPOINTS": ",".join(names), "PADDLE_CURRENT_ENDPOINT": names[0]}
    yield
    for name in ("TRAINERS_NUM", "TRAINER_ID", "LOCAL_SIZE", "TRAINER_ENDPOINTS", "CURRENT_ENDPOINT"):
        os.environ.pop(f"PADDLE_{name}", None)


def programs(flags, kernels, changes):
    """Build the programs of a run, and return {kind: static.Program}."""
    import paddle
    from paddle import static

    from paddle_resnet import phases, program

    settings = settings_of(flags, kernels, changes)
    paddle.set_flags({"FLAGS_max_inplace_grad_add": 0})
    program.start_fleet(settings)
    paddle.seed(0)
    main, startup, evaluation = static.Program(), static.Program(), static.Program()
    exe = static.Executor(paddle.CPUPlace())
    with static.scope_guard(static.Scope()):
        fetchs, schedule, _, optimizer = program.build(settings, main, startup, 10, class_images=[5, 4, 3])
        training = phases.Work(settings, None, main, fetchs, schedule, optimizer)
        fetchs, *_ = program.build(settings, evaluation, static.Program(), 0, is_train=False)
        evaluated = phases.Work(settings, None, evaluation, fetchs)
        texts = {"startup": text(startup), "main": text(main), "evaluation": text(evaluation)}
        initialize(startup, main)
        run = phases.Run(settings, None, exe, training, evaluated)
        run.set_weights()
        run.compile_programs()
    texts["compiled"] = text(run.training.compiled._program)
    texts["compiled_evaluation"] = text(run.evaluation.compiled._program)
    if accumulating := program_of_other_batches(run.training.compiled):
        texts["accumulating"] = text(accumulating)
    return texts


def program_of_other_batches(compiled):
    return compiled.accumulating and compiled.accumulating._program


def initialize(startup, main):
    """Set all persistable variables of a program to 0, without a kernel."""
    import numpy as np
    import paddle
    from paddle import static

    types = {paddle.float16: "float16", paddle.bfloat16: "uint16"}
    for variable in main.list_vars():
        if variable.persistable and variable.name not in ("feed", "fetch"):
            dtype = types.get(variable.dtype) or paddle.base.data_feeder.convert_dtype(variable.dtype)
            value = np.zeros([max(size, 1) for size in variable.shape], dtype)
            static.global_scope().var(variable.name).get_tensor().set(value, paddle.CPUPlace())


def text(program):
    """Return the operators of a program and the variables that they use, one per line."""
    lines, used = [], {}
    for i, block in enumerate(program.blocks):
        for op in block.ops:
            names = [*op.input_arg_names, *op.output_arg_names]
            used |= {name: block._find_var_recursive(name) for name in names}
            ends = [f"{slot}={op.input(slot)}" for slot in sorted(op.input_names)]
            outs = [f"{slot}={op.output(slot)}" for slot in sorted(op.output_names)]
            attrs = [f"{name}={attribute(op, name)}" for name in sorted(op.attr_names) if name != "op_callstack"]
            lines.append(f"{i} {op.type} ({', '.join(ends)}) -> ({', '.join(outs)}) {{{', '.join(attrs)}}}")
    for name, variable in sorted(used.items()):
        if variable is not None and variable.type == variable.type.LOD_TENSOR:
            is_parameter = type(variable).__name__ == "Parameter"
            kind = f"persistable={variable.persistable} parameter={is_parameter}"
            lines.append(f"variable {name} {variable.dtype} {list(variable.shape)} {kind}")
    return "\n".join(lines) + "\n"


def attribute(op, name):
    value = op.attr(name)
    if isinstance(value, float):
        return f"{value:.9g}"
    return (
        [f"{number:.9g}" for number in value]
        if isinstance(value, list) and value[:1] and isinstance(value[0], float)
        else value
    )


def write(folder, names):
    """Write the texts of all sets of flags whose names contain one of `names`, or of all sets if `names` is empty."""
    from paddle_resnet.native import build as native

    prepare()
    kernels = ["paddle", "native"]
    if native.missing() is not None:
        print(f"without custom kernels: {native.missing()}", file=sys.stderr)
        kernels.remove("native")
    else:
        native.load()
    folder.mkdir(parents=True)
    for name, (flags, changes) in SETS.items():
        if names and not any(part in name for part in names):
            continue
        with ranks(changes.get("ranks", 1)):
            for kernel in kernels:
                for kind, lines in programs(flags, kernel, changes).items():
                    (folder / f"{name}.{kernel}.{kind}.txt").write_text(lines)


def compare(first, second, kinds, without):
    """Print the first differences of each text that differs. Return the number of these texts, or 1 if there are no
    texts."""
    names = sorted({path.name for folder in (first, second) for path in folder.glob("*.txt")})
    names = [name for name in names if not kinds or name.removesuffix(".txt").partition(".")[2] in kinds]
    differing = 0
    for name in names:
        before, after = (lines(folder / name, without) for folder in (first, second))
        if before == after:
            continue
        differing += 1
        print(f"{name} differs:")
        changes = [
            line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:3] not in ("---", "+++")
        ]
        print("\n".join(line[:300] for line in changes[:12]))
    print(f"{len(names)} texts, {differing} differ")
    return differing + (not names)


def lines(path, without):
    if not path.exists():
        return []
    result = path.read_text().splitlines()
    return [
        ", ".join(part for part in line.split(", ") if part.partition("=")[0].strip("{") not in without)
        for line in result
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="build the programs, and write their texts to a new folder")
    writing.add_argument("folder", type=Path)
    writing.add_argument("names", nargs="*", help="parts of the names of the sets of flags; if omitted, all sets")
    comparison = commands.add_parser("compare", help="compare two folders")
    comparison.add_argument("first", type=Path)
    comparison.add_argument("second", type=Path)
    comparison.add_argument("--kinds", nargs="*", help="such as native.compiled; if omitted, all kinds")
    comparison.add_argument("--without", nargs="*", default=[], help="attributes to ignore, such as op_namescope")
    args = parser.parse_args()
    if args.command == "write":
        write(args.folder, args.names)
        return 0
    return 1 if compare(args.first, args.second, args.kinds, args.without) else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the hash seed determines the order of sets
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
