import math

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet import distributed, optimizer, program
from test_program import build, variable


def rates(scheduler, steps):
    result = []
    for _ in range(steps):
        result.append(scheduler.last_lr)
        scheduler.step()
    return result


def closed_form(step, peak, start, warmup, total):
    if step < warmup:
        return start + (peak - start) * step / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@pytest.mark.parametrize(("warmup", "start"), [(0, 0), (2, 0), (2, 0.05)])
def test_cosine_after_linear_warmup_per_step(parse, warmup, start):
    args = parse("--lr", "0.4", "--epochs", "10", "--warmup-epochs", warmup, "--warmup-start-lr", start)
    found = rates(optimizer.build_lr_scheduler(args, 7), 70)
    expected = [closed_form(step, 0.4, start, 7 * warmup, 70) for step in range(70)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_peak_is_multiplied_by_the_number_of_processes(parse, monkeypatch):
    args = parse("--lr", "0.1", "--epochs", "4", "--warmup-epochs", "1")
    monkeypatch.setattr(distributed, "world_size", lambda: 8)
    assert max(rates(optimizer.build_lr_scheduler(args, 5), 20)) == pytest.approx(0.8)


def test_warmup_longer_than_the_run_is_cut_with_a_warning(parse, capsys):
    args = parse("--lr", "0.4", "--epochs", "2", "--warmup-epochs", "5")
    found = rates(optimizer.build_lr_scheduler(args, 10), 20)
    np.testing.assert_allclose(found, [0.4 * step / 20 for step in range(20)])
    assert "--warmup-epochs 5" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["mask_1d", "mask_2d_greedy", "mask_2d_best"])
def test_pruning_leaves_two_of_four(parse, algorithm):
    args = parse("--asp", "--prune-model", "--mask-algo", algorithm)
    _, _, _, _, main = build(args)
    before = {p.name: variable(p.name) for p in main.all_parameters()}
    masks = optimizer.prune(args, main, paddle.CPUPlace())
    pruned = [name for name in before if np.any(variable(name) != before[name])]
    assert {name.removesuffix(".asp_mask") for name in pruned} == set(masks)
    assert len(masks) > 10
    for name in masks:
        weight = variable(name)
        groups = weight.transpose(2, 3, 0, 1).reshape(-1, 4)
        assert (np.count_nonzero(groups, axis=1) <= 2).all(), name
        kept = weight != 0
        np.testing.assert_array_equal(weight[kept], before[name][kept])
        # mask_1d keeps the two largest of each group.
        if algorithm == "mask_1d":
            sums = np.sort(np.abs(before[name]).transpose(2, 3, 0, 1).reshape(-1, 4), axis=1)[:, 2:].sum()
            np.testing.assert_allclose(np.abs(weight).sum(), sums, rtol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_train", [True, False])
def test_amp_casts_the_network_and_keeps_the_loss_head_in_float32(parse, monkeypatch, level, is_train):
    """How the program is rewritten; a GPU runs it in test_gpu.py. Paddle's CPU build knows no float16 kernel and
    would cast nothing, so its list of unsupported operators is emptied here."""
    lists = optimizer._amp_lists

    def all_supported(program):
        result = lists(program)
        result.unsupported_list = set()
        return result

    monkeypatch.setattr(optimizer, "_amp_lists", all_supported)
    args = parse("--dali-output-fp16", "--data-layout", "NHWC")
    args.amp, args.use_pure_fp16 = True, level == "O2"  # refused by the parser on a CPU
    args.scale_loss, args.use_dynamic_loss_scaling = 128.0, True
    main = static.Program()
    fetchs, _, _, _ = program.build(args, main, static.Program(), 1, is_train=is_train)
    if not is_train:
        monkeypatch.setattr(optimizer.fp16_utils, "cast_parameters_to_fp16", lambda *_: None)
        optimizer.cast_evaluation_program(args, main, paddle.CPUPlace())
    block = main.global_block()
    by_type = {}
    for op in block.ops:
        by_type.setdefault(op.type, []).append(op)

    def dtypes(op, names):
        return {block.var(name).dtype for name in names if block.var(name).dtype not in (paddle.int64, paddle.int32)}

    for op in by_type["conv2d"]:
        assert dtypes(op, op.input("Input") + op.input("Filter") + op.output("Output")) == {paddle.float16}
    for op_type in optimizer.LOSS_HEAD:
        for op in by_type.get(op_type, []):
            assert dtypes(op, op.input_arg_names + op.output_arg_names) == {paddle.float32}, op_type
    assert {variable.dtype for name, (variable, _) in fetchs.items() if name != "confusion"} == {paddle.float32}
    weights = {p.dtype for p in main.all_parameters() if "batch_norm" not in p.name and "mask" not in p.name}
    assert weights == {paddle.float16 if level == "O2" else paddle.float32}
    assert {p.dtype for p in main.all_parameters() if "batch_norm" in p.name} == {paddle.float32}
