"""Tools for data sets: `python -m paddle_resnet.dataset sample --output DIR`."""

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
    parser = argparse.ArgumentParser(prog="python -m paddle_resnet.dataset", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sample = commands.add_parser("sample", help="write scikit-learn's handwritten digits as JPEG class folders")
    sample.add_argument("--output", required=True, metavar="DIR", help="folder to make, with train/ and val/")
    args = parser.parse_args(argv)
    try:
        n_train, n_val = write_sample(args.output)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: --output {args.output} cannot be written ({e.strerror}): name another folder", file=sys.stderr)
        return 2
    print(f"{args.output}: {n_train} training and {n_val} validation images in 10 classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
