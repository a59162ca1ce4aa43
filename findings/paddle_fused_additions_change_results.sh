#!/usr/bin/env bash
# Expected: BuildStrategy.fuse_elewise_add_act_ops only changes the speed of a program.
# Seen (Paddle 2.6.2, CPU):
# - The pass also fuses `scale` with an addition before or after it. The fused operator ignores the bias and the scale
#   tensor of `scale`, so x + (1 - y) becomes x - y, and (x + y) * s becomes x + y.
# - Of x + relu(y), only the backward pass is fused. x then gets a gradient of 0, and y gets a gradient although
#   relu(y) is 0.
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


def run(network, y, fuse, has_gradients=False):
    main = static.Program()
    with static.program_guard(main, static.Program()):
        inputs = [static.data(name, [1, 3]) for name in "xy"]
        for each in inputs:
            each.stop_gradient = not has_gradients
        out = network(*inputs)
        fetched = static.gradients(paddle.sum(out), inputs) if has_gradients else [out]
    strategy = static.BuildStrategy()
    strategy.fuse_elewise_add_act_ops = fuse
    compiled = static.CompiledProgram(main, build_strategy=strategy)
    return static.Executor(paddle.CPUPlace()).run(compiled, feed={"x": X, "y": y}, fetch_list=fetched)


is_same = True
for name, (network, right, seen) in NETWORKS.items():
    (plain,), (fused,) = run(network, Y, False), run(network, Y, True)
    print(f"Paddle {paddle.__version__}: {name} is {plain.tolist()}, fused {fused.tolist()}")
    is_same &= np.array_equal(plain, right) and np.array_equal(fused, seen)


def gradients(fuse):
    results = run(lambda x, y: x * 2 + paddle.nn.functional.relu(y * 2), -Y, fuse, has_gradients=True)
    return [result.ravel().tolist() for result in results]


plain, fused = gradients(False), gradients(True)
print(f"Paddle {paddle.__version__}: gradients of 2 x + relu(2 y) for y < 0 are {plain}, fused {fused}")
is_same &= plain == [[2.0] * 3, [0.0] * 3] and fused == [[0.0] * 3, [2.0] * 3]
sys.exit(not is_same)
PYTHON
"$folder/venv/bin/python" "$folder/fuse.py" 2>/dev/null || exit 1
