#!/usr/bin/env bash
# Expected: with return_numpy=False, each call of Executor.run returns tensors that keep their values when the program
# runs again, because a caller reads the metrics of step n while step n+1 runs.
# Seen (Paddle 3.3.1, CPU): with PIR programs, the default of Paddle 3, the next run overwrites the fetched tensor of the
# previous run: both have the same memory. With legacy programs (FLAGS_enable_pir_api=0), they do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==3.3.1 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
cat > "$folder/fetch.py" <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle import static

paddle.enable_static()
program = static.Program()
with static.program_guard(program, static.Program()):
    x = static.data("x", [4], "float32")
    y = x * 2 + 1
executor = static.Executor(paddle.CPUPlace())
first, second = (
    executor.run(program, {"x": np.full(4, value, "float32")}, [y], return_numpy=False)[0] for value in (1, 2)
)
kind = "PIR" if paddle.framework.in_pir_mode() else "legacy"
print(f"Paddle {paddle.__version__}, {kind} program: after the second run, the first result is {np.array(first)[0]:g}")
sys.exit(not (np.array(first)[0] == float(sys.argv[1]) and np.array(second)[0] == 5))
PYTHON
"$folder/venv/bin/python" "$folder/fetch.py" 5 2>/dev/null || exit 1
FLAGS_enable_pir_api=0 "$folder/venv/bin/python" "$folder/fetch.py" 3 2>/dev/null || exit 1
