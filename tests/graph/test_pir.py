"""--program-representation pir: PIR programs compute what legacy programs compute. In NHWC, their default layout, both
use Paddle's own kernels, so the results are equal; in NCHW, legacy programs use oneDNN's convolutions."""

import pickle

import multi_label_data
import numpy as np
import paddle
import pytest
from paddle import static

from conftest import assert_one_error, losses
from paddle_resnet import export, graph
from paddle_resnet.machine import compat, gpus
from paddle_resnet.utils.errors import UsageError

only_paddle_2 = pytest.mark.skipif(compat.IS_PADDLE_3, reason="tests Paddle 2.6 only")
only_paddle_3 = pytest.mark.skipif(not compat.IS_PADDLE_3, reason="Paddle 2.6 has no PIR programs")
PIR, NHWC = ("--program-representation", "pir"), ("--data-layout", "NHWC", "--kernels", "paddle")
SHORT = ("--iter-unit", "batch", "--num-iter", 20, "--print-interval", 1)
REGULARIZED = (
    *("--clip-grad-norm", 0.5, "--ema", 0.8, "--lookahead", "2,0.5", "--class-weights", "balanced", "--mixup", 0.4),
    *("--cutmix", 1, "--dropout", 0.3, "--drop-path", 0.2, "--bn-momentum", 0.7, "--bn-weight-decay", "--tta", "flip"),
)
SLOW = pytest.mark.slow
STAGES = (
    "--epochs",
    4,
    "--print-interval",
    1,
    "--sizes",
    "24:0:4:0.5,32:2",
    "--freeze",
    "stem",
    "--unfreeze-at",
    1,
)
STAGES += ("--accumulate-steps", 2, "--lr-decay-by-layer", 0.7, "--optimizer", "Nesterov")


def assert_equal_checkpoints(one, other, atol=0.0):
    names = {path.name for path in one.glob("*.pd*")}
    assert names == {path.name for path in other.glob("*.pd*")} != set()
    for name in names:
        expected, actual = (pickle.loads((folder / name).read_bytes()) for folder in (one, other))
        assert expected.keys() == actual.keys()
        for variable, value in expected.items():
            # The learning rate of a resumed run has the shape (1,).
            np.testing.assert_allclose(np.ravel(actual[variable]), np.ravel(value), rtol=0, atol=atol, err_msg=variable)


def metrics(report):
    """Return the losses and accuracies of each step, epoch and evaluation."""
    kinds = ("loss", "top1", "top5")
    entries = [(entry["step"], entry["data"]) for entry in report if isinstance(entry["step"], list)]
    return [(step, k, v) for step, data in entries for k, v in data.items() if k.partition(".")[2] in kinds]


@only_paddle_3
@pytest.mark.parametrize(
    "flags",
    [
        SHORT,
        (*SHORT, "--optimizer", "AdamW", "--lr", 0.002),
        pytest.param((*SHORT, "--optimizer", "RAdam", *REGULARIZED), id="RAdam and regularization", marks=SLOW),
        pytest.param(STAGES, id="Nesterov and stages", marks=SLOW),
    ],
)
def test_losses_evaluations_and_checkpoints_equal_those_of_legacy_programs(run_train, tmp_path, flags):
    reports = {}
    for name, representation in (("legacy", NHWC), ("pir", PIR)):
        code, reports[name] = run_train(*flags, *representation, "--output-dir", tmp_path / name)
        assert code == 0
    assert len(losses(reports["pir"])) >= 20
    for expected, actual in zip(metrics(reports["legacy"]), metrics(reports["pir"]), strict=True):
        assert actual[:2] == expected[:2]
        assert actual[2] == pytest.approx(expected[2], rel=0, abs=1e-6)
    newest = [next((tmp_path / name / "Tiny").glob("latest")).resolve() for name in reports]
    assert_equal_checkpoints(*newest, atol=2e-6)


@only_paddle_3
@pytest.mark.parametrize("flags", [(), ("--asymmetric-loss", "4,1,0.05"), ("--asymmetric-loss", "4,0,0")])
def test_multi_label_losses_equal_those_of_legacy_programs(run_train, tmp_path, flags):
    root, reports = multi_label_data.write(tmp_path / "data"), []
    for name, representation in (("legacy", NHWC), ("pir", PIR)):
        options = ("--multi-label", "--tta", "flip", *flags, *representation)
        code, report = run_train(*options, "--output-dir", tmp_path / name, image_root=root)
        assert code == 0
        reports.append(losses(report))
    assert reports[1] == pytest.approx(reports[0], rel=0, abs=1e-6)


@only_paddle_3
def test_losses_in_nchw_are_close_to_those_with_onednn(run_train, tmp_path):
    of = {}
    for name, representation in (("legacy", ()), ("pir", PIR)):
        flags = ("--lr", 0, "--data-layout", "NCHW", "--kernels", "paddle", *representation)
        _, of[name] = run_train(*flags, "--output-dir", tmp_path / name)
    np.testing.assert_allclose([*losses(of["pir"]).values()], [*losses(of["legacy"]).values()], rtol=1e-5)


@only_paddle_3
@pytest.mark.slow
def test_resumed_run_is_bit_identical(run_train, losses_with_a_stop, tmp_path):
    flags = (*PIR, "--epochs", 3, "--ema", 0.8, "--optimizer", "AdamW", "--accumulate-steps", 2)
    code, report = run_train(*flags)
    assert code == 0
    assert losses_with_a_stop(2, *flags, "--resume") == losses(report)
    assert_equal_checkpoints(tmp_path / "output/Tiny/2", tmp_path / "stopped/Tiny/2")


@only_paddle_3
@pytest.mark.slow
@pytest.mark.parametrize("representations", [((), PIR), (PIR, ())], ids=["legacy to PIR", "PIR to legacy"])
def test_run_resumes_with_other_representation(run_train, tmp_path, representations):
    """Checkpoints do not depend on the representation."""
    first, second = representations
    assert run_train(*NHWC, "--epochs", 3, "--ema", 0.8, "--output-dir", tmp_path / "expected")[0] == 0
    flags = (*NHWC, "--epochs", 3, "--ema", 0.8)
    assert run_train(*flags, *first, "--save-interval-steps", 4)[0] == 0
    for folder in (tmp_path / "output/Tiny").glob("[12]*"):
        folder.rename(tmp_path / folder.name)
    assert run_train(*flags, *second, "--resume")[0] == 0
    assert_equal_checkpoints(tmp_path / "expected/Tiny/2", tmp_path / "output/Tiny/2")


@only_paddle_3
def test_checkpoint_is_evaluated_and_exported_with_legacy_programs(run_train, photos, tmp_path):
    _, report = run_train(*PIR, "--ema", 0.8)
    checkpoint = tmp_path / "output/Tiny/0"
    evaluation = ("--run-scope", "eval_only", "--from-checkpoint", checkpoint)
    for representation in (PIR, ()):
        _, evaluated = run_train(*evaluation, *NHWC, *representation)
        assert metrics(evaluated)[-3:] == metrics(report)[-3:]
    assert export.main([str(checkpoint), str(tmp_path / "exported"), "--verify", str(photos)]) == 0


@only_paddle_3
@pytest.mark.parametrize("flags", ["--amp", "--asp --prune-model", "--qat", "--kernels native --data-layout NHWC"])
def test_flags_that_pir_programs_do_not_support_conflict(run_train, capsys, flags):
    assert run_train(*PIR, *flags.split())[0] == 2
    name = " ".join(flags.split()[: 2 if "native" in flags else 1])
    problem = f"--program-representation pir: not supported with {name}; remove one of them"
    assert_one_error(capsys.readouterr().err, [problem])


@only_paddle_3
def test_gpu_conflicts(run_train, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(gpus, "resolve", lambda *arguments: "gpu")
        assert run_train(*PIR, "--device", "gpu")[0] == 2
    problem = "--program-representation pir: requires a CPU, but this run is on a GPU; use --device cpu"
    assert_one_error(capsys.readouterr().err, [problem])
    assert run_train(*PIR, "--device", "cpu", "--dry-run")[0] == 0


@only_paddle_3
def test_several_processes_conflict(parse, shard):
    shard(0, 2)
    with pytest.raises(UsageError, match="^--program-representation pir: requires a single process, .* has 2; "):
        parse(*PIR)


@only_paddle_2
def test_paddle_2_is_rejected(run_train, capsys):
    assert run_train(*PIR)[0] == 2
    problem = "--program-representation pir: requires Paddle 3.3.1 or newer, but this is Paddle 2.6"
    assert_one_error(capsys.readouterr().err, [problem, "use --program-representation legacy"])
    assert run_train("--program-representation", "legacy", "--dry-run")[0] == 0


@only_paddle_3
def test_command_after_pir_run_builds_legacy_programs(run_train):
    assert run_train(*PIR, "--dry-run")[0] == 0
    assert compat.builds_pir()
    compat.check_version()
    assert not compat.builds_pir()


@pytest.fixture
def program():
    """A PIR program that computes y = 2 x, and (x, y)."""
    compat.use_pir()
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = static.data("x", [3])
        y = graph.operator("y", "scale", {"X": x}, scale=2.0)
        graph.operator("z", "elementwise_add", {"X": x, "Y": y})
    return main, startup, x, y


def run(main, startup, *names):
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    variables = [graph.block(main).var(name) for name in names]
    return exe.run(main, feed={"x": np.float32([1, 2, 3])}, fetch_list=variables)


@only_paddle_3
def test_sums_are_cumulative_from_the_end_if_reversed(program):
    main, startup, x, _ = program
    with static.program_guard(main, startup):
        for is_reversed in (False, True):
            graph.operator("sums", "cumsum", {"X": x}, axis=0, reverse=is_reversed)
    names = [op.output("Out")[0] for op in graph.block(main).ops if op.type == "cumsum"]
    np.testing.assert_array_equal(run(main, startup, *names), [[1, 3, 6], [6, 5, 3]])


@only_paddle_3
def test_operator_that_overwrites_a_variable_changes_later_readers(program):
    """z = x + y is computed after y has been overwritten with -y."""
    main, startup, *_ = program
    block = graph.block(main)
    [z] = [op.output("Out")[0] for op in block.ops if op.type == "elementwise_add"]
    y = block.ops[0].output("Out")[0]
    graph.insert(block, 1, "scale", {"X": y}, {"Out": y}, scale=-1.0)
    assert [op.type for op in block.ops] == ["scale", "scale", "elementwise_add"]
    np.testing.assert_array_equal(run(main, startup, z, y), [[-1, -2, -3], [-2, -4, -6]])


@only_paddle_3
def test_variable_created_in_both_programs_is_initialized_and_written_in_place(program):
    main, startup, *_ = program
    with static.program_guard(main, startup):
        start = graph.global_variable("start", [3], "float32")
    for current in (main, startup):
        graph.float32(graph.block(current), "total", [3], persistable=True)
    graph.block(startup).append_op(type="assign", inputs={"X": "start"}, outputs={"Out": "total"})
    block = graph.block(main)
    graph.append(block, "elementwise_add", {"X": "total", "Y": "x"}, {"Out": "total"})
    assert block.ops[-1].output("Out") == ["total"] and start.persistable
    run(main, startup)
    static.Executor(paddle.CPUPlace()).run(main, feed={"x": np.float32([1, 2, 3])}, fetch_list=[])
    np.testing.assert_array_equal(static.global_scope().find_var("total").get_tensor(), [2, 4, 6])


@only_paddle_3
def test_removed_operator_is_removed_with_its_write(program):
    main, startup, *_ = program
    total = graph.block(main).create_var("total", [3], "float32", persistable=True)
    block, count = graph.block(main), main.num_ops()
    graph.append(block, "elementwise_add", {"X": total, "Y": "x"}, {"Out": total})
    assert main.num_ops() == count + 2
    graph.remove(block, block.ops[-1:])
    assert main.num_ops() == count


@only_paddle_3
def test_renamed_variable_is_read_under_its_new_name(program):
    main, startup, *_ = program
    [total] = [graph.block(main)._rename_var("x", "w")]
    assert total.name == "w" and [op.input("X") for op in graph.block(main).ops] == [["w"], ["w"]]
