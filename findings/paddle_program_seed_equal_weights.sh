#!/usr/bin/env bash
# Expected: with a seed for the startup program, each run has the same initial weights, but two layers of one network
# have different ones, as with seeds in NumPy, PyTorch and JAX.
# Seen (Paddle 2.6.2 and 3.3.1 with legacy programs, CPU): the operators that draw the weights of the layers all begin
# with the seed of the program, so layers with weights of the same shape start with the same weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==2.6.2 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
cat > "$folder/seed.py" <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle import static

paddle.enable_static()
main, startup = static.Program(), static.Program()
startup.random_seed = 7
with static.program_guard(main, startup):
    layers = [paddle.nn.Linear(8, 8) for _ in range(2)]
static.Executor(paddle.CPUPlace()).run(startup)
first, second = (np.array(static.global_scope().find_var(layer.weight.name).get_tensor()) for layer in layers)
is_equal = np.array_equal(first, second)
print(f"Paddle {paddle.__version__}: the two layers have {'the same' if is_equal else 'different'} initial weights")
sys.exit(not (is_equal and np.unique(first).size == 64))
PYTHON
"$folder/venv/bin/python" "$folder/seed.py" 2>/dev/null || exit 1
