import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, frozen, phase, read_report
from helpers import build, random_batches, variable
from paddle_resnet import dali, program
from paddle_resnet.checkpoints import replicas
from paddle_resnet.checkpoints.variables import LOSS_SCALE
from paddle_resnet.data import iterators
from paddle_resnet.job import exchange, processes, watchdog
from paddle_resnet.models import loss_head
from paddle_resnet.optimizers import schedules
from paddle_resnet.settings import durations
from paddle_resnet.step import build as building
from paddle_resnet.step import compile as compilation
from paddle_resnet.step import facts, loop, scalars
from paddle_resnet.step import metrics as step_metrics
from paddle_resnet.step.dispatch import Dispatcher
from paddle_resnet.tasks import single_label
from paddle_resnet.utils import confidence, logger, progress
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.meters import AverageMeter, ConfusionMeter
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.signals import Preempted

pytestmark = pytest.mark.usefixtures("one_block")

GOLDEN = Path(__file__).parent / "goldens" / "tiny_losses.json"


class Batches:
    """A loader that returns fixed batches [(images, labels)]."""

    step = 0

    def __init__(self, batches):
        self.batches = [
            [{name: tensor(array) for name, array in zip(("data", "label"), batch, strict=True)}] for batch in batches
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def reset(self):
        pass

    def write_into(self, targets):
        assert not targets  # no targets, because steps are not captured on a CPU


def tensor(array):
    t = paddle.framework.core.LoDTensor()
    t.set(array, paddle.CPUPlace())
    return t


def losses(args, batches, **options):
    compiled, exe, fetchs, lr_scheduler, _ = build(args, **options)
    result = []
    for images, labels in batches:
        feed = {"data": images, "label": labels}
        result.append(float(exe.run(compiled, feed, [fetchs["loss"][0]])[0]))
        lr_scheduler.step()
    return result


def test_first_losses_match_golden_values(parse, four_stages):
    """CPUs with different vector instructions sum in different orders, and each step amplifies the difference by a
    factor of up to ten. On a CPU without AVX-512, the last three losses had relative differences of 4e-5, 1.5e-4 and
    1.5e-3."""
    actual = losses(parse(), random_batches(5, batch=32))
    for step, (loss, golden) in enumerate(zip(actual, json.loads(GOLDEN.read_text()), strict=True)):
        assert loss == pytest.approx(golden, rel=(1e-6, 1e-5, 2e-4, 5e-4, 5e-3)[step]), (
            f"losses of the first 5 steps changed to {actual}: if the change is intended (network, initialization, "
            f"loss, optimizer, schedule), write them to {GOLDEN.name} and explain the change in the commit message"
        )


def test_losses_are_bit_identical_when_repeated(parse):
    assert losses(parse(), random_batches(3)) == losses(parse(), random_batches(3))


def gradients(args, batch, **options):
    """Run one step and return the decrease of each parameter, which is proportional to its gradient."""
    compiled, exe, _, _, main = build(args, **options)
    before = {p.name: variable(p.name) for p in main.all_parameters() if p.trainable}
    exe.run(compiled, {"data": batch[0], "label": batch[1]})
    return {name: before[name] - variable(name) for name in before}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, atol=2e-4 * np.abs(gradient).max(), err_msg=name)


def test_nhwc_gradients_and_losses_match_nchw(parse):
    batches = random_batches(4, batch=32)
    nhwc = [(images.transpose(0, 2, 3, 1).copy(), labels) for images, labels in batches]
    one_step = ["--lr", "16", "--weight-decay", "0"]
    assert_same_gradients(
        gradients(parse("--data-layout", "NHWC", *one_step), nhwc[0]), gradients(parse(*one_step), batches[0])
    )
    np.testing.assert_allclose(losses(parse("--data-layout", "NHWC"), nhwc), losses(parse(), batches), rtol=1e-3)


def test_one_dnn_gradients_and_losses_match_paddle_kernels(parse):
    batches, one_step = random_batches(4, batch=32), ["--lr", "16", "--weight-decay", "0"]
    gradients_one_dnn = gradients(parse(*one_step), batches[0])
    losses_one_dnn = losses(parse(), batches)
    assert_same_gradients(gradients_one_dnn, gradients(parse(*one_step), batches[0], is_plain=True))
    np.testing.assert_allclose(losses_one_dnn, losses(parse(), batches, is_plain=True), rtol=1e-3)


def test_feeds_have_default_dtype():
    with static.program_guard(static.Program()):
        feeds = program.create_feeds([4, 224, 224])
    assert feeds["data"].shape == (-1, 4, 224, 224)
    assert feeds["data"].dtype == paddle.float32
    assert feeds["label"].shape == (-1, 1)
    assert feeds["label"].dtype == paddle.int64


@pytest.mark.parametrize(
    ("kernels", "start", "remedy"),
    [
        (
            "native",
            "depthwise convolution (7x7, stride 2, 12 channels): not supported by the custom kernels",
            "use --data-layout NCHW",
        ),
        ("paddle", "--kernels paddle: the network has depthwise convolutions", "use --kernels native"),
    ],
)
def test_depthwise_convolution_of_paddle_triggers_one_warning(capsys, kernels, start, remedy):
    for _ in range(2):
        compilation._warn_of_depthwise(kernels, ("7x7, stride 2, 12 channels",))
        compilation._warn_of_depthwise(kernels, ())
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"warning: {start}") and error.rstrip().endswith(remedy)


@pytest.mark.parametrize(
    ("amp", "is_cast"), [({}, True), ({"amp": True}, False), ({"amp": True, "amp_dtype": "bfloat16"}, True)]
)
def test_dali_output_fp16_declares_half_precision_feed(parse, amp, is_cast):
    """Without float16 AMP, the images are cast to float32."""
    args, main = parse("--dali-output-fp16"), static.Program()
    for name, value in amp.items():  # the parser rejects --amp on a CPU
        setattr(args, name, value)
    _, _, feeds, _ = program.build(frozen(args), main, static.Program(), 1, is_train=False)
    assert feeds["data"].dtype == paddle.float16
    assert paddle.get_default_dtype() == "float32"
    assert main.global_block().ops[0].type == ("cast" if is_cast else "conv2d")


def metrics(logits, labels, mode, smoothing=0.0):
    main = static.Program()
    with static.program_guard(main):
        out = static.data("out", [None, logits.shape[1]], "float32")
        label = static.data("label", [None, 1], "int64")
        fetchs = program.create_fetchs(out, {"label": label}, logits.shape[1], smoothing, mode)
    assert [fetchs[name][1].is_ratio for name in ("loss", "top1", "top5")] == [False, True, True]
    exe = static.Executor(paddle.CPUPlace())
    values = exe.run(main, {"out": logits, "label": labels}, [v for v, _ in fetchs.values()])
    return dict(zip(fetchs, values, strict=True))


def reference_loss(logits, labels, smoothing):
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.eye(logits.shape[1])[labels[:, 0]] * (1 - smoothing) + smoothing / logits.shape[1]
    return -(target * log_p).sum(axis=1)


@pytest.mark.parametrize("classes", [2, 4, 7, 20])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_metrics_match_numpy(classes, smoothing):
    random = np.random.RandomState(classes)
    logits = random.randn(50, classes).astype("float32")
    labels = random.randint(0, classes, (50, 1))
    rank = (logits > np.take_along_axis(logits, labels, axis=1)).sum(axis=1)

    trained = metrics(logits, labels, Mode.TRAIN, smoothing)
    np.testing.assert_allclose(trained["loss"], reference_loss(logits, labels, smoothing).mean(), rtol=1e-5)
    evaluated = metrics(logits, labels, Mode.EVAL, smoothing)
    assert evaluated["loss"].shape == (50, 1)
    np.testing.assert_allclose(evaluated["loss"][:, 0], reference_loss(logits, labels, 0.0), rtol=1e-4, atol=1e-6)
    for result in (trained, evaluated):
        np.testing.assert_allclose(result["top1"], (rank < 1).mean(), rtol=1e-6)
        np.testing.assert_allclose(result["top5"], (rank < 5).mean(), rtol=1e-6)


def test_momentum_step_excludes_bn_from_weight_decay_by_default(parse):
    """The update rule is v = m v + g + wd p; p -= lr v."""
    batch = random_batches(1)[0]
    updates = {}
    for flags in (["--weight-decay", "0"], ["--weight-decay", "0.5"], ["--weight-decay", "0.5", "--bn-weight-decay"]):
        compiled, exe, _, _, main = build(parse("--lr", "0.1", *flags))
        before = {p.name: variable(p.name) for p in main.all_parameters() if p.trainable}
        exe.run(compiled, {"data": batch[0], "label": batch[1]})
        updates[len(updates)] = {name: (before[name] - variable(name)) / 0.1 for name in before}
    plain, decayed, all_decayed = updates[0], updates[1], updates[2]
    assert any("batch_norm" in name for name in before)
    for name, parameter in before.items():
        extra = 0.5 * parameter
        expected = plain[name] + (0 if "batch_norm" in name else extra)
        np.testing.assert_allclose(decayed[name], expected, atol=2e-4)
        np.testing.assert_allclose(all_decayed[name], plain[name] + extra, atol=2e-4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", []),
        ("--dropout 0.2", ["dropout.seed"]),
        ("--drop-path 0.2", ["drop_path.1.seed"]),
        ("--mixup 0.2", ["mix.columns", "mix.fraction", "mix.rows"]),
        ("--cutmix 1", ["mix.columns", "mix.fraction", "mix.rows"]),
        ("--class-weights balanced", ["class_weights"]),
        ("--qat", ["range_weight"]),
        ("--ema 0.9", ["ema_weight"]),
        ("--lookahead 5,0.5", ["lookahead"]),
        ("--optimizer RAdam --lr 0.001", ["radam_Beta1Pow", "radam_Beta2Pow"]),
    ],
)
def test_flags_determine_the_scalars_that_the_host_writes(parse, flags, expected):
    args, names = frozen(parse(*flags.split())), []
    for is_train in (True, False):
        main = static.Program()
        program.build(args, main, static.Program(), 10, is_train, class_images=np.array([1, 2, 3]))
        names.append(sorted(name.removeprefix(scalars.PREFIX) for name in facts.of(main).inputs))
    assert names == [sorted([*expected, "learning_rate_0"]), []]


def test_averages_and_slow_weights_of_frozen_parameters_use_master_weights(one_block, parse, gpu_lists):
    args = parse("--freeze", "stem", "--ema", "0.9", "--lookahead", "5,0.5")
    main, startup = static.Program(), static.Program()
    args.amp, args.amp_dtype, args.amp_level = True, "bfloat16", "O2"  # the parser rejects --amp on a CPU
    program.build(frozen(args), main, startup, 10)
    initial = {op.output("Out")[0]: op.input("X")[0] for op in startup.global_block().ops if op.type == "assign"}
    for suffix in (".ema", ".slow"):
        assert initial[f"conv2d_0.w_0{suffix}"] == "conv2d_0.w_0_fp32_master_0"
        assert initial[f"batch_norm_0.w_0{suffix}"] == "batch_norm_0.w_0"  # float32 in level O2
    block = main.global_block()
    values = [block.var(op.input("Y")[0]) for op in block.ops if op.type == "lerp"]
    assert {value.dtype for value in values} == {paddle.float32}


def test_evaluation_program_shares_parameters_and_uses_running_statistics(parse):
    args = parse()
    compiled, exe, _, _, main = build(args)
    assert compiled.accumulating is None  # because --accumulate-steps is 1
    images, labels = random_batches(1)[0]
    for _ in range(3):
        exe.run(compiled, {"data": images, "label": labels})
    eval_main, unused_startup = static.Program(), static.Program()
    fetchs, lr_scheduler, _, optimizer = program.build(frozen(args), eval_main, unused_startup, 0, is_train=False)
    assert lr_scheduler is None
    assert optimizer is None
    with pytest.raises(UsageError, match="run: the program is not compiled"):
        program.run(args, [], exe, eval_main, fetchs, 0, Mode.EVAL)
    assert {p.name for p in eval_main.all_parameters()} == {p.name for p in main.all_parameters()}
    compiled_eval = program.compile_prog(args, eval_main, is_train=False)

    before = {p.name: variable(p.name) for p in main.all_parameters()}
    whole = exe.run(compiled_eval, {"data": images, "label": labels}, [fetchs["loss"][0]])[0]
    one_by_one = [
        exe.run(compiled_eval, {"data": images[i : i + 1], "label": labels[i : i + 1]}, [fetchs["loss"][0]])[0]
        for i in range(len(images))
    ]
    # If the evaluation used batch statistics, the loss of an image would depend on the other images of the batch.
    np.testing.assert_allclose(whole, np.concatenate(one_by_one), rtol=1e-4)
    for name, value in before.items():
        np.testing.assert_array_equal(variable(name), value)


def test_evaluation_does_not_depend_on_batch_size(parse, photos):
    results = []
    for batch_size in (7, 32, 64):
        args = parse("--image-root", photos, "--batch-size", batch_size)
        compiled, exe, fetchs, _, _ = build(args, is_train=False)
        loader = dali.build_dataloader(args, Mode.EVAL)
        results.append(program.run(args, loader, exe, compiled, fetchs, 0, Mode.EVAL))
    for result in results:
        assert result["images"] == 23
        assert result["top1"] == results[0]["top1"]
        assert result["top5"] == results[0]["top5"] == 1
        # The float32 loss of an image may depend on the size of the matrix product, but summing the losses adds no
        # error.
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)


def test_confusion_matrix_matches_numpy(parse):
    args = parse("--num-of-class", "7")
    compiled, exe, fetchs, _, main = build(args, is_train=False)
    network = [op for op in main.global_block().ops if not loss_head.contains(op)]
    logits = next(op for op in reversed(network) if op.type == "elementwise_add").output("Out")[0]
    batches = random_batches(4, classes=6)  # no image has the label 6
    expected, largest, hits = np.zeros((7, 7), int), [], []
    for images, labels in batches:
        [out] = exe.run(main, {"data": images, "label": labels}, [logits])
        np.add.at(expected, (labels[:, 0], out.argmax(axis=1)), 1)
        exponentials = np.exp(out.astype(np.float64))
        largest.append((exponentials / exponentials.sum(axis=1, keepdims=True)).max(axis=1))
        hits.append(out.argmax(axis=1) == labels[:, 0])
    for _ in range(2):  # each evaluation starts with zero counts
        result = program.run(args, Batches(batches), exe, compiled, fetchs, 0, Mode.EVAL)
        pairs = expected.nonzero()
        np.testing.assert_array_equal(result["confusion"], np.column_stack([*pairs, expected[pairs]]))
        np.testing.assert_array_equal(result["class_top1"][:6], expected.diagonal()[:6] / expected.sum(axis=1)[:6])
        assert np.isnan(result["class_top1"][6])
        assert result["top1"] == pytest.approx(expected.trace() / 32, abs=1e-15)
        assert 0 <= result["f1_macro"] <= 1
        is_correct, confidences = np.concatenate(hits), np.concatenate(largest)
        sums = confidence.bin_sums(confidences, is_correct)
        np.testing.assert_allclose(result["reliability"], confidence.reliability(sums), atol=1e-6)
        assert result["ece"] == pytest.approx(confidence.expected_error(sums), abs=1e-6)
        assert result["reliability"][:, 0].sum() == 32
    args.set("Python", benchmark=True, benchmark_steps=1, benchmark_warmup_steps=0)
    result = program.run(args, Batches(batches), exe, compiled, fetchs, 0, Mode.EVAL)
    assert result["confusion"][:, 2].sum() == 8 and "f1_macro" not in result and "ece" not in result


@pytest.mark.parametrize("flags", [[], ["--predictions", "f"], ["--report-html", "f"]], ids=str)
def test_predictions_are_computed_only_if_they_are_written(parse, flags):
    args = parse(*flags)
    compiled, exe, fetchs, _, _ = build(args, is_train=False)
    result = program.run(args, Batches(random_batches(2)), exe, compiled, fetchs, 0, Mode.EVAL)
    assert ("predictions" in result) == bool(flags)
    assert not flags or result["predictions"].shape == (16, 1 + 2 * 3)  # the network has three classes


def test_training_has_neither_confusion_matrix_nor_predictions(parse):
    assert set(build(parse("--predictions", "f"))[2]) == {"loss", "top1", "top5"}


def test_log_omits_arrays(capsys, tmp_path):
    logger.setup(tmp_path / "report.json")
    logger.begin({})
    program.log_info((3,), {"top1": 0.5, "confusion": np.zeros((2, 2))}, Mode.EVAL)
    logger.close()
    assert capsys.readouterr().out == "epoch 3 val  top1 0.5\n"
    assert phase(read_report(tmp_path / "report.json"), [3], "val.") == {"top1": 0.5}


def test_evaluation_accuracy_is_a_multiple_of_one_image(parse, photos):
    args = parse("--image-root", photos)
    compiled, exe, fetchs, _, _ = build(args, is_train=False)
    result = program.run(args, dali.build_dataloader(args, Mode.EVAL), exe, compiled, fetchs, 0, Mode.EVAL)
    assert result["top1"] * 23 == pytest.approx(round(result["top1"] * 23), abs=1e-12)


def test_run_returns_epoch_metrics_and_steps_schedule(parse):
    args = parse("--lr", "0.1", "--epochs", "2")
    compiled, exe, fetchs, lr_scheduler, _ = build(args, steps=4)
    result = program.run(args, Batches(random_batches(4)), exe, compiled, fetchs, 0, Mode.TRAIN, lr_scheduler)
    assert set(result) == {
        *("loss", "top1", "top5", "images", "steps", "epoch_time", "ips"),
        *("data_time", "compute_time", "batch_time"),
    }
    assert (result["images"], result["steps"]) == (32, 4)
    assert [type(result[name]) for name in ("images", "steps", "ips", "loss")] == [int, int, float, float]
    assert result["ips"] == pytest.approx(32 / result["epoch_time"])
    assert result["batch_time"] == pytest.approx(result["data_time"] + result["compute_time"])
    assert lr_scheduler.last_epoch == 4
    assert lr_scheduler.last_lr == pytest.approx(0.05)


def test_epoch_loss_is_mean_over_images(parse):
    batches = random_batches(4)
    expected = np.mean(losses(parse(), batches))
    args = parse()
    compiled, exe, fetchs, lr_scheduler, _ = build(args)
    result = program.run(args, Batches(batches), exe, compiled, fetchs, 0, Mode.TRAIN, lr_scheduler)
    assert result["loss"] == pytest.approx(expected, rel=1e-7)


# An empty program that is passed to fake Executors, which do not execute programs.
COMPILED = SimpleNamespace(
    **{"_program": static.Program(), "write_scalars": lambda: None, "captured": None, "trace": None},
    step=lambda exe, variables: partial(exe.run, None, fetch_list=variables),
    accumulating=None,
)


class Trace:
    """A fake Executor that records when steps are dispatched and when their metrics are read."""

    def __init__(self):
        self.events = []
        self.steps = 0

    def run(self, program, feed, fetch_list, return_numpy):
        assert return_numpy is False
        step = self.steps
        self.steps += 1
        self.events.append(("dispatch", step))
        return [Metric(self, step) for _ in fetch_list]


class Metric:
    def __init__(self, trace, step):
        self.trace, self.step = trace, step

    def __array__(self, dtype=None, copy=None):
        self.trace.events.append(("read", self.step))
        return np.array([0.5], dtype=dtype or "float32")


def fake_fetchs():
    return {name: (name, AverageMeter(name)) for name in ("loss", "top1", "top5")}


def test_host_reads_only_step_n_minus_1_after_dispatching_step_n(parse):
    args, trace = parse("--print-interval", "1"), Trace()
    program.run(args, Batches(random_batches(4)), trace, COMPILED, fake_fetchs(), 0)
    reads = {n: [("read", n)] * 3 for n in range(4)}
    expected = [("dispatch", 0)]
    for n in range(1, 4):
        expected += [("dispatch", n), *reads[n - 1]]
    assert trace.events == expected + reads[3]


def test_benchmark_waits_for_gpu_before_and_after_measured_steps(parse, monkeypatch):
    """Labels on a GPU cannot be checked, and a loader on the CPU does not write to inputs on the GPU."""
    args, trace, options = parse("--benchmark", "--benchmark-warmup-steps", "1", "--benchmark-steps", "2"), Trace(), []
    args.device = "gpu"
    monkeypatch.setattr(loop, "Dispatcher", lambda *args: options.append(args[-2:]) or Dispatcher(*args))
    monkeypatch.setattr(processes, "place", lambda device: device)
    monkeypatch.setattr(paddle.device.cuda, "synchronize", trace.events.append)
    program.run(args, Batches(random_batches(3)), trace, COMPILED, fake_fetchs(), 0)
    steps = [[("dispatch", n), *[("read", n)] * 3] for n in range(3)]
    assert trace.events == [*steps[0], "gpu", steps[1][0], steps[2][0], *steps[1][1:], *steps[2][1:], "gpu"]
    assert options == [(None, False)]


@pytest.mark.parametrize(("accumulate_steps", "polls"), [(1, [False, False, True]), (2, [False, True])])
def test_stopped_training_logs_all_its_steps(parse, monkeypatch, accumulate_steps, polls):
    """Training stops only before the first batch of a step."""
    logged, answers = [], iter(polls)

    class Log:
        def __init__(self, log):
            self.add, self.finish = lambda step, *_: logged.append(step), lambda: logged.append("finish")

    monkeypatch.setattr(loop, "StepLog", Log)
    monkeypatch.setattr(exchange, "stop_agreed", lambda: next(answers))
    args = parse("--accumulate-steps", accumulate_steps, "--print-interval", "1")
    compiled = SimpleNamespace(**{**vars(COMPILED), "accumulating": COMPILED})
    with pytest.raises(Preempted):
        program.run(args, Batches(random_batches(4)), Trace(), compiled, fake_fetchs(), 0)
    assert logged == [0, 1, "finish"]


def test_evaluation_polls_for_a_stop_every_few_steps(parse, monkeypatch):
    trace, answers, loader = Trace(), iter([False, True]), Batches(random_batches(9))
    monkeypatch.setattr(exchange, "stop_asked", lambda: next(answers))
    loader.reset = lambda: trace.events.append("reset")
    with pytest.raises(Preempted):
        program.run(parse(), loader, trace, COMPILED, fake_fetchs(), 0, Mode.EVAL)
    assert trace.steps == exchange.STOP_POLL_STEPS
    assert "reset" not in trace.events


def test_late_read_returns_metrics_of_its_own_step(parse):
    """If the host reads metrics late, Paddle must not overwrite the metrics of step n-1 with those of step n."""
    args = parse("--lr", "0.1")
    compiled, exe, fetchs, lr_scheduler, _ = build(args)
    handles, immediate = [], []
    for images, labels in random_batches(3):
        handle = exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]], return_numpy=False)[0]
        handles.append(handle)
        immediate.append(float(np.array(handle)))
    assert [float(np.array(handle)) for handle in handles] == immediate
    assert len(set(immediate)) == 3


class FakeTime:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class TimedLoader:
    """A fake loader of batches of 4 images. Each batch takes 20 ms, and each restart takes 5 ms."""

    def __init__(self, time, batches):
        self.time, self.batches = time, batches
        self.restarts = 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.left = self.batches
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.time.now += 0.020
        return [{"label": tensor(np.zeros((4, 1), "int64"))}]

    def write_into(self, targets):
        assert not targets

    def reset(self):
        self.restarts += 1
        self.time.now += 0.005


class TimedExecutor:
    """A fake Executor. Step i takes i + 1 ms, except for the two warm-up steps, which take 1 s each. The metrics of
    step i are i + 1, i + 2 and i + 3."""

    def __init__(self, time):
        self.time = time
        self.steps = 0

    def run(self, *args, **kwargs):
        self.time.now += 1.0 if self.steps < 2 else 0.001 * (self.steps + 1)
        self.steps += 1
        return [np.array([float(self.steps + i)]) for i in range(3)]


@pytest.mark.parametrize("batches", [1, 2, 3, 100])
def test_benchmark_includes_loader_restarts_in_time(parse, monkeypatch, batches):
    time = FakeTime()
    monkeypatch.setattr("paddle_resnet.utils.meters.perf_counter", time)
    args = parse("--benchmark", "--benchmark-warmup-steps", "2", "--benchmark-steps", "10", "--print-interval", "1")
    logged = []
    monkeypatch.setattr(loop, "log_metrics", lambda step, metrics, mode: logged.append(step))
    loader, exe = TimedLoader(time, batches), TimedExecutor(time)
    monkeypatch.setattr(logger, "elapsed_s", time)
    result = program.run(args, loader, exe, COMPILED, fake_fetchs(), 0)
    # The host has the metrics of the first step after it has dispatched the second step, or before the measurement.
    assert result["first_step_s"] == pytest.approx(100 + 2 * 1.02 + 0.005 * (batches == 1))
    assert logged == [(0, step) for step in range(2, 12)]

    assert exe.steps == 12
    assert loader.restarts == 11 // batches
    # Steps 2, 3, ..., 11 take 3, 4, ..., 12 ms. In addition, each step waits for its batch, and some steps wait until
    # the loader has restarted.
    compute = np.arange(3, 13)
    data = 20 + 5 * np.array([step % batches == 0 for step in range(2, 12)])
    batch = compute + data
    assert result["images"] == 40
    assert result["steps"] == 10
    assert result["epoch_time"] == pytest.approx(batch.sum() / 1e3)
    assert result["ips"] == pytest.approx(40 / (batch.sum() / 1e3))
    assert result["compute_time"] == pytest.approx(compute.mean() / 1e3)
    assert result["data_time"] == pytest.approx(data.mean() / 1e3)
    assert result["batch_time"] == pytest.approx(batch.mean() / 1e3)
    assert result["latency_mean_ms"] == pytest.approx(batch.mean())
    for q in (50, 90, 95, 99):
        assert result[f"latency_p{q}_ms"] == pytest.approx(np.percentile(batch, q))
    assert result["loss"] == pytest.approx(np.arange(3, 13).mean())


class Rest(Batches):
    """A loader that resumes within an epoch, after two batches."""

    step = 2

    def __iter__(self):
        return iter(self.batches[2:])


def test_resumed_epoch_averages_all_images_but_times_only_its_steps(parse):
    fetchs = fake_fetchs()
    for _, meter in fetchs.values():
        meter.restore({"value": 2.0, "sum": 32.0, "count": 16})
    result = program.run(parse(), Rest(random_batches(3)), Trace(), COMPILED, fetchs, 0)
    assert (result["images"], result["steps"], result["loss"]) == (24, 1, 1.5)
    assert result["ips"] == pytest.approx(8 / result["epoch_time"])


def test_epoch_time_excludes_checkpoints(parse, monkeypatch):
    """A checkpoint contains the metrics of all previous steps. After a checkpoint is saved, the rank
    reports that it is in the phase of the epoch again."""
    time, events, fetchs = FakeTime(), [], fake_fetchs()
    monkeypatch.setattr("paddle_resnet.utils.meters.perf_counter", time)
    monkeypatch.setattr(watchdog, "phase", events.append)
    monkeypatch.setattr(watchdog, "step", lambda step, waits=False: events.append((step, waits)))
    loader = TimedLoader(time, 3)
    loader.step = 0

    def save(*position):
        events.append((*position, fetchs["loss"][1].count))
        time.now += 60

    args = parse("--save-interval-steps", "1")
    result = loop.run_and_save(
        *(args.part(loop.Options), loader, TimedExecutor(time), COMPILED, fetchs, 5, Mode.TRAIN),
        lr_scheduler=None,
        save=save,
    )
    steps = [[(step, True), (step, False)] for step in range(3)]
    phase = "epoch 5 train"
    expected = [phase, *steps[0], (5, 1, 4), phase, *steps[1], (5, 2, 8), phase, *steps[2], "metric reduction"]
    assert events == expected
    assert loader.restarts == 1
    assert result["epoch_time"] == pytest.approx(3 * 0.020 + 1 + 1 + 0.003)


def test_accumulation_affects_checkpoints_but_not_evaluation(parse):
    """A checkpoint is saved only after complete steps of two batches, but not before the first step of a resumed run.
    The evaluation uses all batches one by one."""
    args, saved = parse("--accumulate-steps", "2", "--save-interval-steps", "1"), []
    compiled = SimpleNamespace(**{**vars(COMPILED), "accumulating": COMPILED})
    batches = random_batches(7)
    options = compiled, fake_fetchs(), 0, Mode.TRAIN, None, lambda *position: saved.append(position)
    result = loop.run_and_save(args.part(loop.Options), Batches(batches), Trace(), *options)
    assert saved == [(0, 2), (0, 4)] and result["images"] == 48
    loop.run_and_save(args.part(loop.Options), Rest(batches), Trace(), *options)
    assert saved[2:] == [(0, 4)]
    loader = Batches(batches)
    loader.reset = lambda: pytest.fail("the next call continues the epoch")
    assert loop.run_and_save(args.part(loop.Options), loader, Trace(), *options, end_step=4)["steps"] == 4
    result = program.run(args, Batches(batches), Trace(), COMPILED, fake_fetchs(), 0, Mode.EVAL)
    assert (result["images"], result["steps"]) == (56, 7)


@pytest.mark.parametrize(
    ("flags", "done", "expected"),
    [
        ([], 0, [2, 4]),
        ([], 4, [0, 2, 4]),  # a run that resumes after step 4 compares the loaded state
        (["--accumulate-steps", "2"], 1, [2]),
        (["--save-interval-steps", "1"], 1, []),  # saving includes the comparison
        (["--benchmark", "--benchmark-warmup-steps", "0", "--benchmark-steps", "5"], 1, []),
    ],
)
def test_ranks_are_compared_after_every_interval(parse, monkeypatch, flags, done, expected):
    """The interval is two steps, and `done` steps were completed before this epoch. Evaluations and runs with a single
    process do not compare anything."""
    checks, phases = [], []
    compiled = SimpleNamespace(**{**vars(COMPILED), "accumulating": COMPILED, "source": "the program"})
    monkeypatch.setattr(replicas, "INTERVAL_STEPS", 2)
    monkeypatch.setattr(replicas, "check", lambda *call: checks.append(call))
    monkeypatch.setattr(watchdog, "phase", phases.append)
    for count in (1, 2):
        several = SimpleNamespace(**{**vars(processes), "world_size": lambda count=count: count})
        monkeypatch.setattr(loop, "processes", several)
        for mode in (Mode.EVAL, Mode.TRAIN):
            assert not checks
            schedule = paddle.optimizer.lr.StepDecay(0.1, 10)
            schedule.last_epoch = done
            options = compiled, fake_fetchs(), 3, mode, schedule, lambda *position: None
            loop.run_and_save(parse(*flags).part(loop.Options), Batches(random_batches(5)), Trace(), *options)
    assert checks == [("the program", f"before step {step} of epoch 3") for step in expected]
    assert phases.count("comparison of parameters") == len(checks)


def test_metrics_are_combined_over_ranks(on_two_ranks):
    """Losses are summed over all images, and times are those of the slower rank. Rank 1 runs one step fewer than rank
    0."""
    ranks = []
    for losses, times in (([2.0, 4.0], [1.0, 3.0]), ([9.0], [8.0])):
        meter = AverageMeter("loss")
        for loss in losses:
            meter.update(loss, 2)
        data_times = [time / 4 for time in times]
        clock = SimpleNamespace(images=2 * len(times), batch_times=times, data_times=data_times)
        ranks.append(({"loss": meter}, clock, False))
    first, second = on_two_ranks(step_metrics.over_all_processes, *ranks)
    assert first == second
    assert (first["loss"], first["images"], first["steps"]) == (5, 6, 2)
    assert (first["epoch_time"], first["ips"]) == (8, 6 / 8)
    assert (first["batch_time"], first["data_time"], first["compute_time"]) == (4, 1, 3)


def test_confusion_matrices_are_summed_over_ranks(on_two_ranks):
    ranks = []
    for pairs in ([[0, 1], [0, 2], [2, 2]], [[0, 1]]):
        meter = ConfusionMeter(3)
        meter.update(np.array(pairs), len(pairs))
        ranks.append((meter,))
    for actual in on_two_ranks(single_label.confusion_over_all_processes, *ranks):
        np.testing.assert_array_equal(actual["confusion"], [[0, 1, 2], [0, 2, 1], [2, 2, 1]])
        np.testing.assert_array_equal(actual["class_top1"], [0, np.nan, 1])


def test_calibration_is_exact_over_ranks(on_two_ranks):
    random = np.random.RandomState(0)
    confidences, is_correct = random.rand(101), random.rand(101) < 0.5
    expected = single_label.calibration_over_all_processes(confidences, is_correct)
    ranks = [(confidences[part], is_correct[part]) for part in (slice(0, 40), slice(40, None))]
    for actual in on_two_ranks(single_label.calibration_over_all_processes, *ranks):
        np.testing.assert_array_equal(actual["reliability"], expected["reliability"])
        assert actual["ece"] == expected["ece"]
    assert expected["reliability"][:, 0].sum() == 101


def test_confusion_counts_need_no_matrix():
    """As a matrix, the counts of 2^20 classes would need 8 TiB."""
    meter = ConfusionMeter(2**20)
    meter.update(np.array([[2**20 - 1, 2**20 - 1], [2**20 - 1, 0]]), 2)
    actual = single_label.confusion_over_all_processes(meter)
    np.testing.assert_array_equal(actual["confusion"], [[2**20 - 1, 0, 1], [2**20 - 1, 2**20 - 1, 1]])
    assert actual["class_top1"][-1] == 0.5


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_progress_estimates_remaining_time(parse, monkeypatch, capsys, accumulate_steps):
    time, shown = FakeTime(), []
    monkeypatch.setattr("paddle_resnet.utils.meters.perf_counter", time)
    monkeypatch.setattr(progress, "is_due", lambda: True)
    monkeypatch.setattr(progress, "show", lambda *line: shown.append(line))
    loader = TimedLoader(time, 4)
    loader.step = 0
    args = parse("--epochs", "4", "--accumulate-steps", accumulate_steps)
    parts = durations.Part(0, 12 // accumulate_steps), durations.Part(1, 4 // accumulate_steps)
    schedule = schedules.build_lr_scheduler(args.part(schedules.Options), durations.Timeline(accumulate_steps, parts))
    compiled = SimpleNamespace(**{**vars(COMPILED), "accumulating": COMPILED})
    program.run(args, loader, TimedExecutor(time), compiled, fake_fetchs(), 1, lr_scheduler=schedule)
    assert [line[:2] for line in shown] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    times = f"ips 3.922  data_time 0.02  compute_time 1  batch_time 1.02  lr {0.05 * accumulate_steps}"
    assert capsys.readouterr().out.splitlines()[-1] == f"epoch 1 step 0 train  loss 1  top1 2  top5 3  {times}"
    # Steps 0 and 1 take 20 ms for the batch and 1 s for the computation, and have the losses 1 and 2.
    for loss, (*_, fields, more) in zip((1, 1.5), shown, strict=False):
        assert fields == [f"loss {loss:.3f}", f"top1 {loss + 1:.3f}", "4 images/s", f"lr {0.05 * accumulate_steps}"]
        assert more == ["waiting for data 2%"]
    ratios = [run_left_s / left_s for _, _, left_s, run_left_s, *_ in shown[:3]]
    assert ratios == pytest.approx([(3 + 8) / 3, (2 + 8) / 2, 1 + 8])
    shown.clear()
    args = parse("--benchmark", "--benchmark-warmup-steps", "0", "--benchmark-steps", "2")
    program.run(args, loader, TimedExecutor(time), COMPILED, fake_fetchs(), 0, lr_scheduler=schedule)
    assert [line[3] for line in shown] == [None, None]  # a benchmark has no other epochs


def test_progress_shows_memory_of_the_gpu(parse, monkeypatch, environment):
    args, shown = parse(), []
    args.device = "gpu"
    monkeypatch.setattr(progress, "is_due", lambda: True)
    monkeypatch.setattr(progress, "show", lambda *line: shown.append(line[-1]))
    environment(FLAGS_selected_gpus=2)
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda gpu: 3 * 2**29 if gpu == 2 else 0)
    monkeypatch.setattr(processes, "place", lambda device: device)
    monkeypatch.setattr(paddle.device.cuda, "synchronize", lambda place: None)
    program.run(args, Batches(random_batches(1)), Trace(), COMPILED, fake_fetchs(), 0)
    assert shown[0][1:] == ["GPU memory 1.5 GiB"]


def test_loader_with_wrong_length_is_an_error(parse):
    args = parse()
    batches = Batches(random_batches(3))
    batches.__class__ = type("Short", (Batches,), {"__len__": lambda self: 4})
    with pytest.raises(RuntimeError, match="ended after 3 of 4 batches"):
        program.run(args, batches, Trace(), COMPILED, fake_fetchs(), 0)
    batches.__class__ = type("Long", (Batches,), {"__len__": lambda self: 2})
    with pytest.raises(RuntimeError, match="more batches than its length 2"):
        program.run(args, batches, Trace(), COMPILED, fake_fetchs(), 0)


def test_accumulation_requires_loader_with_length(parse):
    batches = Batches(random_batches(3))
    batches.__class__ = type("Endless", (Batches,), {"__len__": lambda self: iterators.UNKNOWN_LENGTH})
    compiled = SimpleNamespace(**{**vars(COMPILED), "accumulating": COMPILED})
    with pytest.raises(UsageError, match="--accumulate-steps 2: requires a loader with a length"):
        program.run(parse("--accumulate-steps", "2"), batches, Trace(), compiled, fake_fetchs(), 0)


def test_strategy_fuses_operators_only_in_training_on_gpu(parse):
    def fused(args, **options):
        strategy, execution_strategy = program.create_strategy(args, **options)
        assert execution_strategy is None
        assert not strategy.fuse_elewise_add_act_ops  # changes results
        return [getattr(strategy, name) for name in compilation.FUSED_OPERATORS]

    args, default = parse(), static.BuildStrategy()
    unchanged = [getattr(default, name) for name in compilation.FUSED_OPERATORS]
    assert fused(args) == unchanged
    args.device = "gpu"
    assert all(fused(args))
    assert fused(args, is_train=False) == unchanged


def test_all_programs_of_a_training_step_use_options_for_training(parse, monkeypatch):
    modes, create = [], compilation.build_strategy
    monkeypatch.setattr(compilation, "build_strategy", lambda args, mode: modes.append(mode) or create(args, mode))
    for is_train in (True, False):
        build(parse("--accumulate-steps", "2"), is_train)
    assert modes == [True, True, False]


def test_slow_depthwise_convolutions_are_reported_only_on_gpu(parse, monkeypatch):
    warnings = []
    args = parse(*NHWC, "--model-arch-name", "TinyMobile", "--kernels", "paddle", "--cuda-graph", "false")
    main = build(args, is_train=False)[-1]
    monkeypatch.setattr(compilation, "_warn_of_depthwise", lambda *arguments: warnings.append(arguments))
    monkeypatch.setattr(processes, "place", lambda device: device)
    for device in ("cpu", "gpu"):
        program.compile_prog(frozen(args.copy(device=device)), main, is_train=False)
    [(kernels, layers)] = warnings
    assert kernels == "paddle" and "3x3, stride 1, 32 channels" in layers


def test_fuse_resunit_has_no_effect(parse, capsys):
    args = parse("--fuse-resunit")
    assert not args.fuse_resunit
    assert "warning: --fuse-resunit: has no effect; remove the flag" in capsys.readouterr().err


class Losses:
    """A fake Executor that returns fixed losses."""

    def __init__(self, values):
        self.values = iter(values)

    def run(self, program, feed, fetch_list, return_numpy):
        return [np.float32([next(self.values) if name == "loss" else 0.5]) for name in fetch_list]


NAN, INF = float("nan"), float("inf")


def test_consecutive_non_finite_losses_stop_the_run(parse):
    args = parse("--max-bad-steps", "3")
    good = [1, NAN, INF, 1, -INF, NAN, 1]
    program.run(args, Batches(random_batches(7)), Losses(good), COMPILED, fake_fetchs(), 0)
    bad = [1, NAN, INF, NAN, 1, 1, 1]
    message = "--max-bad-steps 3: 3 consecutive losses were not finite, up to step 3 of epoch 5"
    with pytest.raises(RunError, match=message):
        program.run(args, Batches(random_batches(7)), Losses(bad), COMPILED, fake_fetchs(), 5)


def test_non_finite_losses_are_counted_across_epochs(parse):
    args, fetchs = parse("--max-bad-steps", "4"), fake_fetchs()
    program.run(args, Batches(random_batches(2)), Losses([NAN, NAN]), COMPILED, fetchs, 0)
    with pytest.raises(RunError, match="up to step 1 of epoch 1"):
        program.run(args, Batches(random_batches(2)), Losses([NAN, NAN]), COMPILED, fetchs, 1)


def test_non_finite_losses_do_not_stop_evaluation(parse):
    args = parse("--max-bad-steps", "1")
    result = program.run(args, Batches(random_batches(2)), Losses([NAN, NAN]), COMPILED, fake_fetchs(), 0, Mode.EVAL)
    assert np.isnan(result["loss"])
    assert (result["not_finite"], result["images"], result["top1"]) == (16, 16, 0.5)


def test_mean_loss_omits_non_finite_losses_of_all_ranks(parse, monkeypatch):
    """The losses are 1 and infinity on rank 0, and 4 and 4 on rank 1."""
    sent_values = []

    def all_gather(own):
        sent_values.append(own)
        other = [8 * 8, 16, 8.0, 16, 8.0, 16, 16, 0, *own[8:]]
        return np.array([own, other])

    monkeypatch.setattr(exchange, "all_gather", all_gather)
    result = program.run(parse(), Batches(random_batches(2)), Losses([1, INF]), COMPILED, fake_fetchs(), 0)
    assert sent_values[0][:8] == [8, 8, 8, 16, 8, 16, 16, 8]
    assert (result["loss"], result["not_finite"], result["images"]) == (3, 8, 32)


@pytest.mark.parametrize(("scale", "stops"), [(2.0, False), (1.0, True)])
def test_steps_skipped_by_loss_scaling_do_not_count_as_non_finite(parse, scale, stops):
    """Dynamic loss scaling handles overflows until the loss scale has reached its minimum."""
    args = parse("--max-bad-steps", "3")
    args.use_dynamic_loss_scaling = True  # the test sets the value directly, because --amp requires a GPU
    static.global_scope().var(LOSS_SCALE).get_tensor().set(np.float32([scale]), paddle.CPUPlace())
    if stops:
        with pytest.raises(RunError, match="up to step 2 of epoch 0"):
            program.run(args, Batches(random_batches(6)), Losses([INF] * 6), COMPILED, fake_fetchs(), 0)
    else:
        result = program.run(args, Batches(random_batches(6)), Losses([INF] * 6), COMPILED, fake_fetchs(), 0)
        assert result["loss_scale"] == scale
        evaluation = program.run(args, Batches(random_batches(1)), Losses([1]), COMPILED, fake_fetchs(), 0, Mode.EVAL)
        assert "loss_scale" not in evaluation


def test_fused_operators_are_counted(parse, monkeypatch):
    """This test enables a fusion that this project does not use, because Paddle's CPU build supports no other fusion
    of a training step."""
    strategy = compilation.build_strategy

    def fusing(args, is_train=True):
        result = strategy(args, is_train)
        result.fuse_elewise_add_act_ops = True
        return result

    args = parse()
    compiled, *_ = build(args)
    assert compilation.fused_operators("cpu", compiled) == {}
    monkeypatch.setattr(compilation, "build_strategy", fusing)
    compiled, exe, fetchs, *_ = build(args)
    # The residual unit ends with relu(a + b), which is fused in the forward and backward passes.
    counts = {"fused_elemwise_add_activation": 1, "fused_elemwise_add_activation_grad": 1}
    assert compilation.fused_operators("cpu", compiled) == counts
    images, labels = random_batches(1)[0]
    loss = exe.run(compiled, {"data": images, "label": labels}, [fetchs["loss"][0]])[0]
    assert np.isfinite(loss)


@pytest.mark.slow
def test_batch_may_contain_additional_feeds(parse, monkeypatch):
    """The additional feed contains target probabilities (soft labels), which replace the labels in the loss
    function."""
    args, [(images, labels)] = parse("--lr", "0"), random_batches(1)
    expected = [losses(args, [(images, (labels + k) % 3)])[0] for k in (0, 1)]
    feeds = building.feeds_of
    monkeypatch.setattr(
        building, "feeds_of", lambda *arguments: feeds(*arguments) | {"weights": static.data("weights", [None, 3])}
    )
    compiled, exe, fetchs, _, _ = build(args)
    for k in (0, 1):
        weights = np.eye(3, dtype="float32")[(labels[:, 0] + k) % 3]
        batch = [{"data": images, "label": labels, "weights": weights}]
        actual = program.run(args, [batch], exe, compiled, fetchs, 0)["loss"]
        assert actual == pytest.approx(expected[k], rel=1e-5)
    with pytest.raises(UsageError, match='unexpected format; yield .*"data": ..., "label": ..., "weights": ...'):
        program.run(args, [[{"data": images, "label": labels}]], exe, compiled, fetchs, 0)
