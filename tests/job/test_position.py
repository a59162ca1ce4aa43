"""Positions of ranks, as their monitors read them, and as text."""

import multiprocessing
import os

from paddle_resnet.job import position
from paddle_resnet.job.position import Position


def test_monitor_reads_what_the_rank_writes():
    mine = Position()
    theirs = Position(os.dup(mine.descriptor))
    assert theirs.read() == [0, 0, "startup"]
    mine.step(3, waits=True)
    assert theirs.read() == [0, 7, "startup"]
    mine.phase("epoch 0 train")
    assert theirs.read() == [1, 0, "epoch 0 train"]
    mine.step(2**38, waits=False)
    assert theirs.read() == [1, 2**39 + 2, "epoch 0 train"]
    mine.phase("x" * 300)
    assert theirs.read() == [2, 0, "x" * 256]


def change(mine, numbers):
    for number in range(numbers):
        mine.phase(f"phase {number}" * (1 + number % 9))
        mine.step(number, waits=number % 2)


def test_no_change_is_read_by_halves():
    """While another process writes as fast as it can."""
    mine = Position()
    theirs = Position(os.dup(mine.descriptor))
    rank = multiprocessing.get_context("fork").Process(target=change, args=(mine, 100_000))
    rank.start()
    seen = 0
    while rank.is_alive():
        phase, place, name = theirs.read()
        if phase:
            seen += 1
            assert name == f"phase {phase - 1}" * (1 + (phase - 1) % 9)
            assert place in (0, 2 * phase - (phase - 1) % 2)
    rank.join()
    assert seen > 100
    assert theirs.read()[0] == 100_000


def test_positions_as_text():
    assert position.where_is([1, 0, "epoch 0 train"]) == "epoch 0 train"
    assert position.where_is([1, 1, "epoch 0 train"]) == "epoch 0 train, step 0, waiting for images"
    assert position.where_is([1, 2, "epoch 0 train"]) == "epoch 0 train, step 0"
    assert position.where_is([1, 17, "epoch 0 train"]) == "epoch 0 train, step 8, waiting for images"


def test_ranks_in_the_same_place_are_not_blamed():
    positions = {rank: [2, 6, "epoch 0 val"] for rank in range(3)}
    assert position.describe_stall(positions) == "all ranks are in epoch 0 val, step 2"


def test_ranks_that_are_behind_are_named():
    positions = {0: [2, 0, "the sums"], 1: [1, 4, "epoch 0 val"], 2: [1, 4, "epoch 0 val"], 3: [1, 6, "epoch 0 val"]}
    says = "ranks 1, 2 are in epoch 0 val, step 1, others wait in the sums"
    assert position.describe_stall(positions) == says


def test_stopped_ranks_are_named_first():
    positions = {rank: [1, 5, "epoch 0 val"] for rank in range(4)}
    says = "ranks 2, 3 stopped by SIGSTOP or a debugger in epoch 0 val, step 2, waiting for images"
    assert position.describe_stall(positions, [2, 3]) == says


def test_many_ranks_are_not_listed():
    assert position.ranks([3]) == "rank 3"
    assert position.ranks(list(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."
