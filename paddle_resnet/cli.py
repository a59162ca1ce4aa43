"""The installed command: `paddle-resnet NAME ARGUMENTS` runs `python -m paddle_resnet.NAME ARGUMENTS`."""

import difflib
import runpy
import sys

from paddle_resnet import __version__
from paddle_resnet.utils import exit_codes
from paddle_resnet.utils.errors import SCRIPT, UsageError

# {name: purpose}
COMMANDS = {
    "train": "train, evaluate or benchmark a network",
    "lr_find": "suggest a learning rate",
    "predict": "predict the classes of images",
    "export": "export a checkpoint for Paddle Inference, ONNX and Triton",
    "dataset": "prepare and check data sets",
    "weights": "convert weights from other projects to a checkpoint",
    "models": "print the size of the networks",
    "report": "compare runs",
    "doctor": "check whether training works on this machine",
}
HELP = "\n".join(
    [
        f"{SCRIPT} COMMAND: train image classifiers with Paddle and NVIDIA DALI.\n",
        "Commands:",
        *(f"  {name:10}{purpose}" for name, purpose in COMMANDS.items()),
        f"\n{SCRIPT} COMMAND --help explains a command; {SCRIPT} --version prints the version.",
    ]
)


def main() -> int:
    """Run the command in sys.argv, which ends this process, or return the exit code of --help, --version or a usage
    error."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        name = sys.argv.pop(1)
        runpy.run_module(f"paddle_resnet.{name}", run_name="__main__", alter_sys=True)
    return exit_codes.of(SCRIPT, lambda: _main(sys.argv[1:]))


def _main(arguments):
    if not arguments:
        print(HELP, file=sys.stderr)
        return exit_codes.USAGE
    if arguments[0] in ("-h", "--help"):
        print(HELP)
    elif arguments[0] == "--version":
        print(SCRIPT, __version__)
    else:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        remedy = f"use {near[0]}" if near else f"see {SCRIPT} --help"
        raise UsageError(f"{arguments[0]}: unknown command; {remedy}")
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
