#!/usr/bin/env bash
# Expected: DALI's CPU decoder reads every WebP file that libwebp writes, with and without an EXIF block, because RIFF
# chunks of odd size are followed by a padding byte, which readers skip.
# Seen (DALI 2.4.0, nvImageCodec 0.9.0): a lossless file whose image chunk has an odd size is read without an EXIF block,
# but an EXIF block makes it unreadable ("Unexpected end of stream"). With an image chunk of even size, both are read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check nvidia-dali-cuda120==2.4.0 \
    nvidia-nvimgcodec-cu12==0.9.0.20 numpy==1.26.4 pillow==13.0.0 setuptools==75.8.0
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import io
import sys

import numpy as np
import nvidia.dali
import PIL
from nvidia.dali import fn, pipeline_def, types
from PIL import Image


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def decode():
    return fn.decoders.image(fn.external_source(name="file", dtype=types.UINT8, ndim=1))


def is_read(data):
    pipeline = decode()
    pipeline.feed_input("file", np.frombuffer(data, np.uint8)[None])
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True


exif = Image.Exif()
exif[0x112] = 6  # orientation
seen = {}
for seed in range(100):
    image = Image.fromarray(np.random.RandomState(seed).randint(0, 256, (16, 24, 3)).astype(np.uint8))
    files = []
    for options in ({}, {"exif": exif}):
        file = io.BytesIO()
        image.save(file, "webp", lossless=True, **options)
        files.append(file.getvalue())
    parity = "odd" if int.from_bytes(files[0][16:20], "little") % 2 else "even"
    seen.setdefault(parity, [is_read(data) for data in files])
    if len(seen) == 2:
        break
print(f"DALI {nvidia.dali.__version__}, Pillow {PIL.__version__}")
for parity, (plain, with_exif) in sorted(seen.items()):
    print(f"image chunk of {parity} size: read without EXIF {plain}, read with EXIF {with_exif}")
sys.exit(seen != {"even": [True, True], "odd": [True, False]})
PYTHON
