"""Print the size and speed of the networks; see `python -m paddle_resnet.models --help`."""

import csv
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from paddle_resnet.models import MODELS, registered, registered_name
from paddle_resnet.utils import exit_codes, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import program

SPEEDS = Path(__file__).parents[2] / "benchmarks" / "networks.csv"  # an installed package does not contain this file
BYTES = 2  # size of a float16 element
SHAPE_ONLY = ("elementwise_add_grad", "reduce_mean_grad")  # operators that read only the shapes of their inputs
CHANNELS, CLASSES = 3, 1000


def size(arch: str, side: int, num_classes: int = CLASSES) -> dict[str, int]:
    """Return the size of a network.

    Args:
        arch: value of --model-arch-name.
        side: height and width of the images in pixels.
        num_classes: number of outputs.
    Returns:
        {"parameters": number of trainable parameters,
        "multiply_adds": number of multiply-adds of all convolutions and matrix products for one image, excluding those
        that depend only on parameters (layers.FLOAT32_SCOPE),
        "activation_bytes": size per image of the float16 tensors that Paddle's backward operators read, excluding the
        image itself}.
    Raises:
        UsageError: see build_model and logits.
        RunError, OSError: Paddle cannot be imported (see signals.importing_paddle).
    """
    with signals.importing_paddle():
        import paddle
        from paddle import static
        from paddle.utils import unique_name

    from paddle_resnet import graph
    from paddle_resnet.models import build_model, logits
    from paddle_resnet.models.layers import is_float32

    paddle.enable_static()
    main = static.Program()
    with static.program_guard(main, static.Program()), unique_name.guard():
        images = static.data("images", [1, CHANNELS, side, side])
        out = logits(build_model(arch, num_classes, CHANNELS, "NCHW"), images, arch, num_classes)
        forward = list(graph.block(main).ops)
        static.append_backward(paddle.mean(out))
    block = graph.block(main)
    read = set()
    for op in block.ops:
        if op.attr("op_role") & 1 and op.type not in SHAPE_ONLY:
            read.update(op.input_arg_names)
    made = {block.var(name) for op in forward for name in op.output_arg_names if name in read}
    # Tensors without a fixed size, such as cuDNN's reserve space for BN, are excluded.
    activations = [math.prod(v.shape) for v in made if not v.persistable and min(v.shape, default=1) >= 0]
    return {
        "parameters": sum(math.prod(p.shape) for p in main.all_parameters() if p.trainable),
        "multiply_adds": sum(_multiply_adds(block, op) for op in forward if not is_float32(op)),
        "activation_bytes": BYTES * sum(activations),
    }


def _multiply_adds(block, op):
    """Return the number of multiply-adds of a convolution or matrix product; 0 for other operators."""
    if op.type in ("conv2d", "depthwise_conv2d"):
        each = math.prod(block.var(op.input("Filter")[0]).shape[1:])
        return each * math.prod(block.var(op.output("Output")[0]).shape)
    if op.type == "matmul_v2":
        summed = block.var(op.input("X")[0]).shape[-2 if op.attr("trans_x") else -1]
        return summed * math.prod(block.var(op.output("Out")[0]).shape)
    return 0


def speeds() -> dict[str, dict[str, str]]:
    """Return {network: row of benchmarks/networks.csv}, or {} if this file does not exist."""
    if not SPEEDS.exists():
        return {}
    with open(SPEEDS, newline="") as file:
        return {row["network"]: row for row in csv.DictReader(file)}


def rows(archs: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of the table as lists of strings: first the header, then one row per network."""
    measured = speeds()
    names = ["network", "image", "parameters", "multiply-adds", "activations", "paper", "timm"]
    yield [*names, "training", "evaluation", "on"]
    for arch in archs:
        network = registered(arch)
        side = network.image_size if network else 224
        sizes = size(arch, side)
        speed = measured.get(arch, {})
        yield [
            *(arch, str(side), f"{sizes['parameters']:,}", f"{sizes['multiply_adds'] / 1e6:,.0f} M"),
            f"{sizes['activation_bytes'] / 2**20:.1f} MiB",
            *((f"arXiv:{network.paper}", network.timm or "-") if network else ("", "")),
            *(speed.get(name, "") for name in ("training", "evaluation", "hardware")),
        ]


def _main(argv):
    parser = Parser(
        prog="models",
        description=f"Print the size of networks with {CLASSES:,} classes and {CHANNELS} input channels: image side in "
        "pixels, trainable parameters, and multiply-adds and activation memory per image. Activation memory counts the "
        "float16 tensors that the backward pass of Paddle's operators reads. The column timm contains the name of "
        "timm's network with the same outputs for the same weights. Speeds are in images/s and come from "
        "benchmarks/networks.csv.",
    )
    parser.add_argument("network", nargs="*", help="network names, or FILE.py:NAME for your own network (default: all)")
    archs = [registered_name(arch) for arch in parser.parse_intermixed_args(argv).network or MODELS]
    widths = {}
    table = list(rows(archs))
    for row in table:
        for i, text in enumerate(row):
            widths[i] = max(widths.get(i, 0), len(text))
    for row in table:
        cells = [text.rjust(widths[i]) if 1 <= i <= 4 else text.ljust(widths[i]) for i, text in enumerate(row)]
        print("  ".join(cells).rstrip())


def main(argv: list[str] | None = None) -> int:
    """Print the table and return the exit code (paddle_resnet/utils/exit_codes.py)."""
    return exit_codes.of(program("models"), lambda: _main(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
