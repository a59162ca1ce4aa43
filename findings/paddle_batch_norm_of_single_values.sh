#!/usr/bin/env bash
# Expected: in training, batch normalization of a channel with a single value gives the offset of the channel, 0 at the
# start, because the value equals the mean; or an error, as in PyTorch.
# Seen (Paddle 2.6.2 and 3.3.1, CPU): the layer returns its input. A network whose last feature map is 1 x 1 therefore
# trains with batch size 1, but without this normalization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check paddlepaddle==2.6.2 numpy==1.26.4 \
    protobuf==5.29.5 setuptools==75.8.0
cat > "$folder/norm.py" <<'PYTHON'
import sys

import numpy as np
import paddle
from paddle import static

paddle.enable_static()
main, startup = static.Program(), static.Program()
with static.program_guard(main, startup):
    x = static.data("x", [None, 3, 1, 1], "float32")
    y = paddle.nn.BatchNorm2D(3)(x)
executor = static.Executor(paddle.CPUPlace())
executor.run(startup)
results = []
for images in (1, 2):
    values = np.arange(1, 3 * images + 1, dtype="float32").reshape(images, 3, 1, 1)
    [result] = executor.run(main, {"x": values}, [y])
    results.append(result.ravel())
    print(f"Paddle {paddle.__version__}: batch normalization of {values.ravel()} is {result.ravel().round(3)}")
is_normalized = np.allclose(results[1], [-1, -1, -1, 1, 1, 1], atol=1e-3)
sys.exit(not (np.array_equal(results[0], [1, 2, 3]) and is_normalized))
PYTHON
"$folder/venv/bin/python" "$folder/norm.py" 2>/dev/null || exit 1
