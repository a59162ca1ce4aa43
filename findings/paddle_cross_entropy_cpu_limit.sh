#!/usr/bin/env bash
# Expected: log_softmax and cross_entropy of the logits (x, 0) are -x and x for class 1, to rounding, if x is large: both
# are computed from differences to the largest logit, so nothing overflows.
# Seen (Paddle 2.6.2 and 3.3.1, CPU): logits that are more than 64 below the largest are raised to 64 below it, so the
# loss of a confident wrong prediction is at most 64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==2.6.2 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
cat > "$folder/loss.py" <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle import static

paddle.enable_static()
program = static.Program()
with static.program_guard(program, static.Program()):
    logits = static.data("logits", [None, 2], "float32")
    label = static.data("label", [None, 1], "int64")
    loss = paddle.nn.functional.cross_entropy(logits, label, reduction="none")
    log = paddle.nn.functional.log_softmax(logits)
executor = static.Executor(paddle.CPUPlace())
values = np.array([60, 65, 80, 100], "float32")
feed = {"logits": np.stack([values, np.zeros(4, "float32")], 1), "label": np.ones([4, 1], "int64")}
loss, log = executor.run(program, feed, [loss, log])
print(f"Paddle {paddle.__version__}: x {values}, cross_entropy {loss.ravel()}, log_softmax {log[:, 1]}")
limited = np.array([60, 64, 64, 64])
sys.exit(not (np.array_equal(loss.ravel(), limited) and np.array_equal(log[:, 1], -limited)))
PYTHON
"$folder/venv/bin/python" "$folder/loss.py" 2>/dev/null || exit 1
