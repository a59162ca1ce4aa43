"""Tools for data sets: `python -m paddle_resnet.dataset sample|preview|verify|info|speed --help`."""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from utils.errors import UsageError

SIDE = 64  # pixels of a sample image


def write_sample(output):
    """Write scikit-learn's 1,797 handwritten digits as JPEG class folders.

    The images are those of the UCI "Optical Recognition of Handwritten Digits" test set, 8x8 with 17 grey levels,
    here enlarged to 64x64. Every fifth image goes to val/ (359), the others to train/ (1,438). The
    folder appears under its name when it is complete; a complete one is left as it is.

    Args:
        output: folder to make, with train/0 ... train/9 and val/0 ... val/9.
    Returns:
        (training images, validation images).
    Raises:
        UsageError: the folder exists and holds something else.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    names = [f"{'val' if i % 5 == 4 else 'train'}/{label}/{i:04d}.jpg" for i, label in enumerate(digits.target)]
    n_val = sum(name.startswith("val/") for name in names)

    output = Path(output)
    if output.exists():
        if sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()) != sorted(names):
            raise UsageError(f"--output {output} exists and is not the sample data set: remove it or name another")
        return len(names) - n_val, n_val
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name, pixels in zip(names, digits.images, strict=True):
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
        grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(path, quality=95)
    partial.rename(output)
    return len(names) - n_val, n_val


def main(argv=None):
    """Run a command and return the exit code: 0 done, 1 training would fail (verify), 2 usage or data."""
    parser = argparse.ArgumentParser(prog="python -m paddle_resnet.dataset", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_sample, _add_preview, _add_verify, _add_info, _add_speed):
        add(commands)
    args, words = parser.parse_known_args(argv)
    try:
        if words and not args.takes_train_flags:
            raise UsageError(f"unknown flag {words[0]}: `{parser.prog} {args.command} --help` lists those there are")
        args.words = words
        return args.run(args) or 0
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _add(commands, name, run, help, takes_train_flags=False):
    more = "Takes the flags of train.py, too." if takes_train_flags else None
    command = commands.add_parser(name, help=help, description=help, epilog=more, allow_abbrev=False)
    command.set_defaults(run=run, takes_train_flags=takes_train_flags)
    return command


def _add_sample(commands):
    sample = _add(commands, "sample", _run_sample, "write scikit-learn's handwritten digits as JPEG class folders")
    sample.add_argument("--output", required=True, metavar="DIR", help="folder to make, with train/ and val/")


def _run_sample(args):
    try:
        n_train, n_val = write_sample(args.output)
    except OSError as e:
        raise UsageError(f"--output {args.output} cannot be written ({e.strerror}): name another folder") from e
    print(f"{args.output}: {n_train} training and {n_val} validation images in 10 classes")


def _add_preview(commands):
    command = _add(commands, "preview", _run_preview, "draw training images as the network gets them", True)
    command.add_argument("root", metavar="DIR", help="folder with train/ and val/")
    command.add_argument("--output", required=True, metavar="FILE", help="PNG file to write")
    command.add_argument("--images", type=_positive, default=36, metavar="N", help="how many (default 36)")


def _run_preview(args):
    from paddle_resnet import inspection

    inspection.preview(args.root, args.output, args.images, args.words)
    print(f"{args.output}: {args.images} training images")


def _add_verify(commands):
    command = _add(commands, "verify", _run_verify, "decode every image; exit code 1 if training would fail")
    command.add_argument("root", metavar="DIR", help="folder with train/ and val/")
    command.add_argument("--fix-list", metavar="FILE", help="write the failing paths there, for train.py --skip-list")


def _run_verify(args):
    from paddle_resnet import verify

    report = verify.verify(args.root)
    verify.show(report)
    if args.fix_list is not None:
        try:
            verify.write_fix_list(report, args.fix_list)
        except OSError as e:
            raise UsageError(f"--fix-list {args.fix_list} cannot be written ({e.strerror}): name another file") from e
        print(f"{args.fix_list}: {len(report.failing)} paths for train.py --skip-list")
    return 1 if report.training_would_fail else 0


def _add_info(commands):
    command = _add(commands, "info", _run_info, "count images and classes, measure the images")
    command.add_argument("root", metavar="DIR", help="folder with train/ and val/")
    command.add_argument("--output", metavar="FILE", help="PNG file to draw class balance and image sizes into")


def _run_info(args):
    from paddle_resnet import inspection

    inspection.info(args.root, args.output)


def _add_speed(commands):
    command = _add(commands, "speed", _run_speed, "measure the loader alone", True)
    command.add_argument("root", metavar="DIR", help="folder with train/ and val/")
    command.add_argument(
        "--threads", type=_list_of(int), default=[4], metavar="N,...", help="--dali-num-threads to try"
    )
    command.add_argument(
        "--loads", type=_list_of(float), default=[0.9], metavar="L,...", help="--hw-decoder-load to try"
    )
    command.add_argument("--batches", type=_positive, default=20, help="of a measurement (default 20)")
    command.add_argument("--repeats", type=_positive, default=3, help="measurements of each setting (default 3)")


def _run_speed(args):
    from paddle_resnet import inspection

    inspection.speed(args.root, args.threads, args.loads, args.batches, args.repeats, args.words)


def _positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def _list_of(kind):
    def values(text):
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"'{text}' is not a list such as 4,8") from e

    return values


if __name__ == "__main__":
    sys.exit(main())
