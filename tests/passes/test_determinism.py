"""Every process builds the same programs, although each has its own hash seed, which determines the order of sets."""

import os
import subprocess
import sys

import pytest

from conftest import NHWC, ROOT, TINY
from paddle_resnet.native import build as native

# For each set of flags in `sets`, print the operators of the startup program, the training program and the compiled
# programs.
PRINT_PROGRAMS = """
from functools import partial

import paddle_resnet  # sets environment variables before Paddle is imported
from paddle_resnet import config
import paddle
from paddle import static
from paddle.utils import unique_name
from paddle_resnet import models, program, resolution
from paddle_resnet.models.resnet import BottleneckBlock, ResNet

models.MODELS["Tiny"] = partial(ResNet, BottleneckBlock, (1, 1), width=8)
paddle.enable_static()
ignored = "op_callstack", "op_namescope"  # the latter contains the number of programs that the process has built
for flags in sets:
    args = config.parse_args(flags)
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    args.apply(resolution.Kernels)
    program.start_fleet(args)
    main, startup = static.Program(), static.Program()
    with unique_name.guard():
        program.build(args, main, startup, 10, class_images=[5, 4, 3])
        compiled = program.compile_prog(args, main)
    for each in (startup, main, compiled._program, compiled.accumulating._program):
        print("PROGRAM of", flags)
        for op in each.global_block().ops:
            ends = [(name, op.input(name)) for name in op.input_names]
            ends += [(name, op.output(name)) for name in op.output_names]
            print(op.type, ends, [(name, op.attr(name)) for name in op.attr_names if name not in ignored])
"""
ACCUMULATION = ["--accumulate-steps", "2"]
FLAGS = [
    [
        *("--optimizer", "RAdam", "--lookahead", "6,0.5", "--ema", "0.9", "--clip-grad-norm", "1", *ACCUMULATION),
        *("--lr-decay-by-layer", "0.9", "--mixup", "0.4", "--cutmix", "1", "--dropout", "0.2"),
    ],
    ["--optimizer", "LAMB", "--asp", "--prune-model", "--qat", *ACCUMULATION],
    [
        *(*NHWC, "--kernels", "native", "--optimizer", "AdamW", "--ema", "0.9", "--clip-grad-norm", "1"),
        *("--class-weights", "balanced", "--freeze", "stem", *ACCUMULATION),
    ],
]


@pytest.mark.slow
def test_order_of_operators_is_equal_in_every_process(capsys):
    """Regression test: with --accumulate-steps, the order of the added operators depended on the hash seed. This
    process and the new process have different hash seeds."""
    common = [*TINY, "--data-format", "synthetic"]
    sets = [[*common, *flags] for flags in FLAGS if "native" not in flags or native.missing() is None]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    process = subprocess.Popen(
        [sys.executable, "-c", f"sets = {sets}\n{PRINT_PROGRAMS}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed},
        stdout=subprocess.PIPE,
        text=True,
    )
    capsys.readouterr()
    exec(PRINT_PROGRAMS, {"sets": sets})
    first, second = capsys.readouterr().out.splitlines(), process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert sum(line.startswith("PROGRAM") for line in first) == 4 * len(sets)
    assert first == second
