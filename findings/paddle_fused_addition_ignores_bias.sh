#!/usr/bin/env bash
# Expected: BuildStrategy.fuse_elewise_add_act_ops only changes the speed of a program.
# Seen (Paddle 2.6.2, CPU): the pass also fuses `scale` with an addition before or after it, and the fused operator
# ignores the bias and the scale tensor of `scale`. So x + (1 - y) becomes x - y, and (x + y) * s becomes x + y.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==2.6.2 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
cat > "$folder/fuse.py" <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle import static

paddle.enable_static()
X, Y = np.float32([[1, 2, 3]]), np.float32([[10, 20, 30]])
NETWORKS = {
    "x + (1 - y)": (lambda x, y: x + (1 - y), X + (1 - Y), X - Y),
    "1 - (x + y)": (lambda x, y: 1 - (x + y), 1 - (X + Y), -(X + Y)),
    "(x + y) * s": (lambda x, y: paddle.scale(x + y, paddle.full([1], 2.0)), 2 * (X + Y), X + Y),
}


def run(network, fuse):
    main = static.Program()
    with static.program_guard(main, static.Program()):
        out = network(static.data("x", [1, 3]), static.data("y", [1, 3]))
    strategy = static.BuildStrategy()
    strategy.fuse_elewise_add_act_ops = fuse
    compiled = static.CompiledProgram(main, build_strategy=strategy)
    return static.Executor(paddle.CPUPlace()).run(compiled, feed={"x": X, "y": Y}, fetch_list=[out])[0]


is_same = True
for name, (network, right, seen) in NETWORKS.items():
    plain, fused = run(network, False), run(network, True)
    print(f"Paddle {paddle.__version__}: {name} is {plain.tolist()}, fused {fused.tolist()}")
    is_same &= np.array_equal(plain, right) and np.array_equal(fused, seen)
sys.exit(not is_same)
PYTHON
"$folder/venv/bin/python" "$folder/fuse.py" 2>/dev/null || exit 1
