#!/usr/bin/env bash
# Expected: paddle.incubate.asp's get_mask_2d_best keeps at least as much of the weights' magnitude as
# get_mask_2d_greedy, because its documentation says that it maximizes the L1 norm of the kept weights.
# Seen (Paddle 2.6.2): it maximizes the signed sum. Of normally distributed weights it keeps about half of the magnitude,
# like a random mask; greedy keeps 69%, and the same search on absolute values 70%.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==2.6.2 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle.incubate.asp import utils

weights = np.random.RandomState(0).randn(256, 256)
masks = {
    "best": utils.get_mask_2d_best(weights, 2, 4),
    "best of absolute values": utils.get_mask_2d_best(np.abs(weights), 2, 4),
    "greedy": utils.get_mask_2d_greedy(weights, 2, 4),
}
kept = {name: float(np.abs(weights * mask).sum() / np.abs(weights).sum()) for name, mask in masks.items()}
print(f"Paddle {paddle.__version__}")
for name, fraction in kept.items():
    print(f"{name}: {fraction:.3f} of the magnitude is kept")
sys.exit(not (kept["best"] < 0.52 < 0.68 < kept["greedy"] < kept["best of absolute values"]))
PYTHON
