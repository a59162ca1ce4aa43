#!/usr/bin/env bash
# Expected: fn.random_crop_generator returns a window inside the image for every image shape, because DALI's decoders
# accept images of up to 65,535 rows and use the same windows for random crops.
# Seen (DALI 2.4.0, without a GPU): for 8 columns and up to 40,132 rows, all windows are inside; from 40,133 rows, where
# height * height * 4 / 3 exceeds 2**31, no window is inside.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check nvidia-dali-cuda120==2.4.0 numpy==1.26.4
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import nvidia.dali
from nvidia.dali import fn, pipeline_def

COUNT, COLUMNS = 100, 8


@pipeline_def(batch_size=COUNT, num_threads=1, device_id=None, seed=1)
def windows(rows):
    shape = np.array([rows, COLUMNS, 3], np.int64)
    return tuple(fn.random_crop_generator(fn.external_source(lambda: np.tile(shape, (COUNT, 1)))))


def inside(rows):
    """Return the number of windows that are inside an image of this height."""
    pipeline = windows(rows)
    pipeline.build()
    anchors, shapes = (np.stack([np.array(each) for each in output]) for output in pipeline.run())
    return int(((anchors >= 0) & (shapes > 0) & (anchors + shapes <= [rows, COLUMNS])).all(1).sum())


print(f"DALI {nvidia.dali.__version__}, images with {COLUMNS} columns")
found = {rows: inside(rows) for rows in (40_000, 40_132, 40_133, 41_000)}
for rows, count in found.items():
    print(f"{rows} rows: {count} of {COUNT} windows are inside the image")
sys.exit([*found.values()] != [COUNT, COUNT, 0, 0])
PYTHON
