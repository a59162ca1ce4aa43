"""Host scalars, and the random numbers of a step."""

import gc
import weakref

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import frozen
from paddle_resnet import program
from paddle_resnet.step import facts, random_numbers, scalars


def test_host_scalars_are_written_before_each_step():
    main, startup, exe = static.Program(), static.Program(), static.Executor(paddle.CPUPlace())
    values = iter([(1.5, [[1, 2]]), (2.5, np.array([3, 4]))])
    with static.program_guard(main, startup):
        first = scalars.declare("first", lambda: current[0])
        second = scalars.declare("second", lambda: current[1], (2,), "int64")
        out = first * 2
    assert [v.name for v in (first, second)] == ["host_scalar.first", "host_scalar.second"]
    assert all(v.stop_gradient and v.persistable for v in (first, second))
    assert list(facts.of(main).inputs) == [first.name, second.name] and facts.of(static.Program()).inputs == {}
    exe.run(startup)
    write = scalars.Writer(main, paddle.CPUPlace())
    for current in values:
        write()
        results = exe.run(main, fetch_list=[out, second])
        assert (results[0].tolist(), results[1].tolist()) == ([2 * current[0]], np.ravel(current[1]).tolist())
        assert [result.dtype for result in results] == [np.float32, np.int64]


def test_only_the_seed_of_dropout_stays_on_the_host():
    main, place = static.Program(), object()
    with static.program_guard(main):
        seed, other = scalars.declare("seed", int, dtype="int32"), scalars.declare("other", int)
        x, block = static.data("x", [2]), main.global_block()
        outputs = {name: block.create_var(name=name, shape=[2], dtype="float32") for name in ("Out", "Mask")}
        for inputs in ({"X": x, "Seed": seed}, {"X": x}):
            block.append_op(type="dropout", inputs=inputs, outputs=outputs)
    places = scalars.Writer(main, place)._places
    assert isinstance(places[seed.name], paddle.CPUPlace) and places[other.name] is place


def test_facts_of_a_copy_are_shared_and_end_with_the_program():
    first, other = static.Program(), static.Program()
    facts.of(first).inputs["a"] = int
    facts.share(first, second := first.clone())
    assert facts.of(second).inputs == {"a": int} and facts.of(other).inputs == {}
    program = weakref.ref(first)
    del first
    gc.collect()
    assert program() is None and facts.of(second).inputs == {"a": int}


FLAGS = "--optimizer RAdam --lr 0.001 --ema 0.9 --lookahead 5,0.5 --mixup 0.2 --class-weights balanced --qat"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--dropout 0.2 --accumulate-steps 2 --clip-grad-norm 1"])
def test_programs_of_build_are_not_kept(parse, one_block, more):
    """Fleet itself keeps the first and the last program, and ASP keeps all."""
    args, programs = frozen(parse(*FLAGS.split(), *more.split())), []
    for _ in range(3):
        main = static.Program()
        program.build(args, main, static.Program(), 10, class_images=[5, 4, 3])
        program.compile_prog(args, main)
        programs.append(weakref.ref(main))
    gc.collect()
    assert programs[1]() is None


@pytest.mark.parametrize("changed", ["seed", "step", "layer", "rank"])
def test_random_numbers_depend_on_seed_step_layer_and_rank(changed):
    """Consecutive steps and ranks do not share numbers, even if a step draws many numbers."""
    facts = {"seed": 3, "step": 5, "layer": "mixup", "rank": 1}
    draw = [random_numbers.generator(**facts).random(4000).tolist() for _ in range(2)]
    assert draw[0] == draw[1]
    other = facts | {changed: "cutmix" if changed == "layer" else facts[changed] + 1}
    assert not set(draw[0]) & set(random_numbers.generator(**other).random(4000).tolist())
    # If a new version drew different numbers, a resumed run would differ from an uninterrupted run.
    golden = [12692076959477897724, 4807976707811868638]
    assert random_numbers.generator(**facts).bit_generator.random_raw(2).tolist() == golden
