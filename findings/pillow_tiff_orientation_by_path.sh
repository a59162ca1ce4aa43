#!/usr/bin/env bash
# Expected: Image.open(path) and Image.open(file) return the same upright pixels for a TIFF file with an orientation,
# because Pillow turns TIFF images when it loads them.
# Seen (Pillow 13.0.0): for an uncompressed RGBA file with orientation 6, Image.open(file).convert("RGB") is upright, but
# Image.open(path).convert("RGB") has the stored height and width.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check pillow==13.0.0 numpy==1.26.4
"$folder/venv/bin/python" - "$folder/image.tif" <<'PYTHON'
import sys

import numpy as np
import PIL
from PIL import Image

path = sys.argv[1]
pixels = np.arange(4 * 6 * 4, dtype=np.uint8).reshape(4, 6, 4)
Image.fromarray(pixels, "RGBA").save(path, tiffinfo={274: 6})
upright = np.rot90(pixels, -1)
with open(path, "rb") as file:
    by_file = np.asarray(Image.open(file).convert("RGB"))
by_path = np.asarray(Image.open(path).convert("RGB"))
print(f"Pillow {PIL.__version__}, stored {pixels.shape[:2]}, upright {upright.shape[:2]}")
for name, image in (("file", by_file), ("path", by_path)):
    print(f"opened by {name}: {image.shape[:2]}, upright: {np.array_equal(image, upright[:, :, :3])}")
sys.exit(not (np.array_equal(by_file, upright[:, :, :3]) and not np.array_equal(by_path, upright[:, :, :3])))
PYTHON
