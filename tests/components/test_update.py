"""The parts of the update, in their order."""

import re

import pytest
from paddle import static

from conftest import NHWC, ROOT, frozen
from paddle_resnet import components, program
from paddle_resnet.native import build as native

FLAGS = "--lr-decay-by-layer 0.5 --accumulate-steps 2 --clip-grad-norm 1 --lookahead 5,0.5 --ema 0.9"
# {kernels: operators of rates, clipping, optimizer, lookahead and ema that no other part adds}
OPERATORS = {
    "paddle": ["squared_l2_norm", "momentum", "lerp"],
    "native": ["native_clip_factor", "native_momentum", "native_lookahead", "native_ema"],
}


@pytest.mark.parametrize("kernels", OPERATORS)
def test_operators_of_update_follow_order_of_components(parse, one_block, kernels):
    if kernels == "native":
        if native.missing() is not None:
            pytest.skip(native.missing())
        native.load()
    main = static.Program()
    program.build(frozen(parse(*NHWC, *FLAGS.split(), "--kernels", kernels)), main, static.Program(), 10)
    types = [op.type for op in main.global_block().ops]
    first = [types.index(name) for name in OPERATORS[kernels]]
    last = [len(types) - types[::-1].index(name) for name in OPERATORS[kernels]]
    assert all(end <= begin for end, begin in zip(last, first[1:], strict=False))
    sums = [i for i, op in enumerate(main.global_block().ops) if "accumulated." in str(op.input_arg_names)]
    assert sums and sums[-1] < first[0]


@pytest.mark.parametrize("name", ["accumulation", "clipping", "ema", "lookahead", "precision", "rates"])
def test_component_without_flags_adds_no_operator(parse, one_block, monkeypatch, name):
    texts = []
    for update in (components.UPDATE, [part for part in components.UPDATE if not part.__name__.endswith(name)]):
        monkeypatch.setattr("paddle_resnet.step.build.UPDATE", update)
        main, startup = static.Program(), static.Program()
        program.build(frozen(parse()), main, startup, 10)
        texts.append([[op.type for op in each.global_block().ops] for each in (main, startup)])
    assert texts[0] == texts[1]


def test_documented_order_is_that_of_the_list():
    text = (ROOT / "docs/architecture.md").read_text()
    listed = re.search(r"in this order: (.*?)\.", text, re.DOTALL).group(1)
    assert re.findall("`(\\w+)`", listed) == [part.__name__.rpartition(".")[2] for part in components.UPDATE]
