"""Positions of ranks in shared memory, and the text in which they are reported."""

import multiprocessing
import os

from paddle_resnet.job import position
from paddle_resnet.job.position import Position


def test_monitor_reads_position_of_rank():
    writer = Position()
    reader = Position(os.dup(writer.descriptor))
    assert reader.read() == [0, 0, "startup"]
    writer.step(3, waits=True)
    assert reader.read() == [0, 7, "startup"]
    writer.phase("epoch 0 train")
    assert reader.read() == [1, 0, "epoch 0 train"]
    writer.step(2**38, waits=False)
    assert reader.read() == [1, 2**39 + 2, "epoch 0 train"]
    writer.phase("x" * 300)
    assert reader.read() == [2, 0, "x" * 256]


def change(writer, numbers):
    for number in range(numbers):
        writer.phase(f"phase {number}" * (1 + number % 9))
        writer.step(number, waits=number % 2)


def test_concurrent_reads_are_consistent():
    """A second process writes positions as fast as possible while the test reads them."""
    writer = Position()
    reader = Position(os.dup(writer.descriptor))
    rank = multiprocessing.get_context("fork").Process(target=change, args=(writer, 100_000))
    rank.start()
    seen = 0
    while rank.is_alive():
        phase, place, name = reader.read()
        if phase:
            seen += 1
            assert name == f"phase {phase - 1}" * (1 + (phase - 1) % 9)
            assert place in (0, 2 * phase - (phase - 1) % 2)
    rank.join()
    assert seen > 100
    assert reader.read()[0] == 100_000


def test_positions_are_formatted_as_text():
    assert position.where_is([1, 0, "epoch 0 train"]) == "epoch 0 train"
    assert position.where_is([1, 1, "epoch 0 train"]) == "epoch 0 train, step 0, waiting for images"
    assert position.where_is([1, 2, "epoch 0 train"]) == "epoch 0 train, step 0"
    assert position.where_is([1, 17, "epoch 0 train"]) == "epoch 0 train, step 8, waiting for images"


def test_stall_at_equal_positions_lists_no_rank():
    positions = {rank: [2, 6, "epoch 0 val"] for rank in range(3)}
    assert position.describe_stall(positions) == "all ranks are in epoch 0 val, step 2"


def test_stall_lists_ranks_that_are_behind():
    positions = {0: [1, 6, "epoch 0 val"], 1: [1, 4, "epoch 0 val"], 2: [1, 4, "epoch 0 val"], 3: [2, 0, "the sums"]}
    message = "ranks 1, 2 are in epoch 0 val, step 1, other ranks are waiting in the sums"
    assert position.describe_stall(positions) == message


def test_stall_lists_only_stopped_ranks_if_there_are_any():
    positions = {rank: [1, 5, "epoch 0 val"] for rank in range(4)}
    message = "ranks 2, 3 stopped by SIGSTOP or a debugger in epoch 0 val, step 2, waiting for images"
    assert position.describe_stall(positions, [2, 3]) == message


def test_long_list_of_ranks_is_shortened():
    assert position.ranks([3]) == "rank 3"
    assert position.ranks(list(range(8))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert position.ranks(list(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."
