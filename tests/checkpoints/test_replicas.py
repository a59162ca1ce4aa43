"""Comparison of the variables of all ranks. tests/job/test_jobs.py tests complete jobs."""

import re
import zlib

import numpy as np
import paddle
import pytest

from helpers import build, random_batches, variable
from paddle_resnet.checkpoints import replicas, variables
from paddle_resnet.job import exchange
from paddle_resnet.passes import all_reduces
from paddle_resnet.utils.errors import RunError

pytestmark = pytest.mark.usefixtures("one_block")


@pytest.fixture
def two_ranks(shard, monkeypatch):
    """Return a function that makes this process act as rank 0 of two, and returns the list of the numbers that rank 0
    sends. The variables of rank 1 keep the values that they have when the function is called."""

    def two_ranks(program):
        of_rank_1 = [*replicas.checksums(program).values()]
        answers, sent = [[zlib.crc32(np.array(of_rank_1, np.uint32))], of_rank_1], []

        def all_gather(values):
            sent.append(values)
            return np.array([values, answers.pop(0)], np.float64)

        shard(0, 2)
        monkeypatch.setattr(exchange, "all_gather", all_gather)
        monkeypatch.setattr(exchange, "let_others_leave", lambda: sent.append("leave"))
        return sent

    return two_ranks


def flip(name):
    """Change one bit, the lowest of the last element."""
    array = variable(name)
    array.reshape(-1).view(np.uint8)[-array.itemsize] ^= 1
    variables.set_variable(name, array, paddle.CPUPlace())


@pytest.mark.parametrize(
    "name",
    ["conv2d_1.w_0", "batch_norm_0.b_0", "conv2d_1.w_0_velocity_0", "conv2d_1.w_0.ema", "conv2d_1.w_0.slow"],
)
def test_one_changed_bit_is_detected(parse, two_ranks, name):
    *_, main = build(parse("--ema", "0.9", "--lookahead", "2,0.5"))
    sent = two_ranks(main)
    flip(name)
    where = "differ between rank 0 and rank 1 before step 2 of epoch 5"
    with pytest.raises(RunError, match=rf"{where} \({re.escape(name)}\); check the memory"):
        replicas.check(main, "before step 2 of epoch 5")
    assert [len(values) for values in sent[:2]] == [1, len(replicas.names(main))]
    assert sent[2:] == ["leave"]


def test_equal_ranks_exchange_one_number(parse, two_ranks):
    *_, main = build(parse())
    sent = two_ranks(main)
    replicas.check(main, "here")
    assert [len(values) for values in sent] == [1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--ema", "0.9", "--qat"],
        ["--asp", "--prune-model", "--optimizer", "LAMB"],
        ["--accumulate-steps", "2", "--mixup", "0.2", "--dropout", "0.1", "--kernels", "paddle"],
    ],
    ids=" ".join,
)
def test_only_values_from_images_of_a_rank_are_not_compared(parse, flags):
    """After two steps with the images of rank 0, exactly the variables that depend on these images may differ."""
    compiled, exe, _, lr_scheduler, main = build(parse(*flags))
    own = {*all_reduces.own_statistics(main)}
    assert {*replicas.names(main)} == {v.name for v in variables.saved(main)} - own
    before = {name: variable(name) for name in own}
    for images, labels in random_batches(2):
        compiled.write_scalars()
        exe.run(compiled, {"data": images, "label": labels})
        lr_scheduler.step()
    assert all((variable(name) != value).any() for name, value in before.items())


def test_statistics_of_frozen_layers_are_not_compared(parse):
    """The forward pass writes them, although it does not change them."""
    *_, main = build(parse("--freeze", "stem"))
    assert not {"batch_norm_0.w_1", "batch_norm_0.w_2"} & {*replicas.names(main)}


@pytest.mark.parametrize(
    ("rows", "who"),
    [
        ([[1, 2, 3], [1, 5, 3]], "differ between rank 0 and rank 1 here (b); check"),
        ([[1, 2, 3], [1, 5, 3], [1, 2, 3]], "differ on rank 1 from all other ranks here (b); check"),
        ([[7, 2, 3], [1, 2, 3], [1, 2, 3], [1, 5, 6], [1, 2, 3]], "differ on ranks 0, 3 from all other ranks here (a,"),
        ([[1, 2, 3], [7, 2, 3], [1, 2, 3], [7, 2, 3]], "differ between ranks 0, 2 and ranks 1, 3 here (a); check"),
        ([[rank, 2, 3] for rank in range(7)], "rank 0 and rank 1 and rank 2 and rank 3 and rank 4 and others here (a)"),
    ],
)
def test_message_names_deviating_ranks_and_variables(rows, who):
    assert who in replicas.describe(np.array(rows, np.float64), ["a", "b", "c"], "here")


def test_message_names_three_variables():
    message = replicas.describe(np.array([[1] * 9, [2] * 9]), [*"abcdefghi"], "here")
    assert "here (a, b, c, ...); check" in message
