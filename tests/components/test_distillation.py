"""--teacher: the loss and its gradient, the teacher in the training step, resumed runs, and teachers that do not match
the run."""

import contextlib
import json
import pickle
import re
import shlex
import shutil
from functools import partial
from types import SimpleNamespace

import multi_label_data
import numpy as np
import paddle
import pytest
from paddle import static
from test_weights import tensors

from conftest import NHWC, assert_one_error, frozen, losses, read_report
from helpers import NETWORK_EXAMPLE, random_batches, variable, with_meta
from paddle_resnet import export, predict, program, train, weights
from paddle_resnet.checkpoints import contents, restore, teachers
from paddle_resnet.job import agreement
from paddle_resnet.models import divergence, loss_head
from paddle_resnet.models.resnet import BasicBlock, ResNet
from paddle_resnet.native import build as native
from paddle_resnet.step import cuda_graph
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_block", "small_student")
PLACE = paddle.CPUPlace()
STUDENT = ["--model-arch-name", "Student", "--model-prefix", "student", "--print-interval", "1"]
MULTI_LABEL = ["--multi-label", "--rand-crop-scale", "0.9,1"]
IN_NATIVE = [*NHWC, "--kernels", "native"]
IN_MOBILE = ["--model-arch-name", "TinyMobile"]
needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture
def small_student(register):
    """Register a network with one block that differs from the teacher's."""
    register("Student", partial(ResNet, BasicBlock, (1,), width=12))


@pytest.fixture
def several(run_train, once):
    """Return (data set, checkpoint) of a multi-label network. All tests share it."""

    def make(folder):
        data = multi_label_data.write(folder / "data")
        assert run_train(*MULTI_LABEL, "--output-dir", folder, image_root=data)[0] == 0

    folder = once("multi_label_teacher", make)
    return folder / "data", folder / "Tiny/0"


def arrays(path):
    return pickle.loads(path.read_bytes())


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def soft_loss(x, z):
    """Return (mean over the images of the divergence, its gradient) in float64; x and z are logits."""
    log_q, log_p = log_softmax(x), log_softmax(z)
    terms, gradient = np.exp(log_p) * (log_p - log_q), np.exp(log_q) - np.exp(log_p)
    return terms.sum(1).mean(), gradient / len(x)


def soft_loss_of_classes(x, z):
    """Like soft_loss, with --multi-label."""
    q, p = sigmoid(x), sigmoid(z)
    terms = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    return terms.sum(1).mean(), (q - p) / len(x)


@pytest.mark.parametrize("is_multi_label", [False, True])
@pytest.mark.parametrize("kernels", ["paddle", pytest.param("native", marks=needs_native)])
def test_loss_and_gradient_equal_formula(parse, with_component, checkpoint, request, kernels, is_multi_label):
    """The update of the bias of the last layer is the gradient of the loss with respect to the logits, summed over the
    images. The teacher does not change, and its logits are those of its own evaluation program."""
    steps = []
    spy = SimpleNamespace(add_loss=lambda step: steps.append((step.logits, step.targets["teacher"], step.loss)))
    checkpoint = request.getfixturevalue("several")[1] if is_multi_label else checkpoint
    with_component("INPUTS", spy)
    flags = ["--lr", "1", "--momentum", "0", "--weight-decay", "0", "--label-smoothing", "0", *NHWC, *STUDENT]
    flags += ["--teacher", checkpoint, "--distill-weight", "0.7", "--distill-temperature", "3"]
    args = parse(*flags, *(MULTI_LABEL if is_multi_label else []))
    args.set("Python", kernels=kernels)
    if kernels == "native":
        native.load()
    args = frozen(args)
    main, startup = static.Program(), static.Program()
    fetchs, *_ = program.build(args, main, startup, 1)
    exe = static.Executor(PLACE)
    exe.run(startup)
    teachers.load(main, PLACE)
    names = [v.name for v in main.list_vars() if v.persistable and v.name.startswith("teacher.")]
    saved = arrays(next(checkpoint.glob("*.pdparams")))
    assert {name.removeprefix("teacher.") for name in names} == saved.keys()
    for name in names:  # the fourth channel of the images is zero, and so are its weights
        value = saved[name.removeprefix("teacher.")]
        np.testing.assert_array_equal(variable(name)[tuple(map(slice, value.shape))], value)
    before = {name: variable(name) for name in (*names, "linear_0.b_0")}
    assert not {*names} & {parameter.name for parameter in main.all_parameters()}
    ((images, labels),) = random_batches(1, (32, 32, 4))
    images[..., 3] = 0
    if is_multi_label:
        labels = np.eye(3, dtype="float32")[labels[:, 0]]
    compiled = program.compile_prog(args, main)
    compiled.write_scalars()
    [(logits, target, loss)] = steps
    x, z, actual = exe.run(compiled, {"data": images, "label": labels}, [logits, target, loss])
    x, z = np.float64(x), np.float64(z)
    soft, gradient = (soft_loss_of_classes if is_multi_label else soft_loss)(x / 3, z / 3)
    if is_multi_label:
        q = sigmoid(x)
        hard, of_hard = -np.log(np.where(labels, q, 1 - q)).sum(1).mean(), (q - labels) / len(x)
    else:
        q = np.exp(log_softmax(x))
        hard = -np.log(np.take_along_axis(q, labels, 1)).mean()
        of_hard = (q - np.eye(3)[labels[:, 0]]) / len(x)
    np.testing.assert_allclose(actual, 0.3 * hard + 0.7 * 9 * soft, rtol=1e-5)
    expected = (0.3 * of_hard + 0.7 * 3 * gradient).sum(0)
    change = before["linear_0.b_0"] - variable("linear_0.b_0")
    np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-6)
    for name in names:
        np.testing.assert_array_equal(variable(name), before[name])
    np.testing.assert_allclose(z, logits_of(checkpoint, images, kernels, is_multi_label), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", [[], ["--mixup", "0.4"], ["--cutmix", "1"]])
def test_teacher_and_student_see_the_same_images(parse, checkpoint, flags):
    main = static.Program()
    program.build(frozen(parse(*STUDENT, "--teacher", checkpoint, *flags)), main, static.Program(), 1)
    convolutions = [op for op in main.global_block().ops if op.type == "conv2d"]
    images = {op.input("Filter")[0]: op.input("Input") for op in convolutions}
    assert images["teacher.conv2d_0.w_0"] == images["conv2d_0.w_0"] != [] and (
        images["conv2d_0.w_0"] != ["data"]
    ) == bool(flags)


def logits_of(checkpoint, images, kernels, is_multi_label):
    """Return the logits of an evaluation program for images in NHWC with four channels."""
    from paddle_resnet.serving import networks

    network = networks.load_checkpoint(checkpoint)
    model = network.model(logits=True)
    return model.outputs(np.ascontiguousarray(images[..., :3].transpose(0, 3, 1, 2)))[1]


def test_divergence_of_large_logits_is_finite():
    main = static.Program()
    logits = np.array([[0, 500, -500], [1, 2, 3]], "float32")
    targets = np.array([[500, 0, -500], [1, 2, 3]], "float32")
    with static.program_guard(main):
        x, z = static.data("x", [None, 3]), static.data("z", [None, 3])
        out = [divergence.of_softmax(x, z), divergence.of_sigmoid(x, z)]
    one, several = static.Executor(PLACE).run(main, {"x": logits, "z": targets}, out)
    np.testing.assert_allclose(one, [[500], [0]], atol=1e-5)
    np.testing.assert_allclose(several, [[250], [0]], atol=1e-4)


IMAGES = [
    *("--mixup", "0.4", "--cutmix", "1", "--class-weights", "balanced", "--drop-path", "0.2"),
    *("--sizes", "24:0:8,32:1:6:0.5", "--freeze", "stem", "--unfreeze-at", "1", "--ema", "0.8"),
]
RUNS = {
    "updates": [
        *("--accumulate-steps", "2", "--clip-grad-norm", "1", "--batch-size", "4", "--lookahead", "2,0.5"),
        *("--asp", "--prune-model", "--qat"),
    ],
    # A network with depthwise convolutions uses more kinds of custom kernels.
    **({"native": [*IN_NATIVE, *IN_MOBILE, "--ema", "0.8"]} if native.missing() is None else {}),
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(IMAGES, id="images and stages"),
        *(pytest.param(flags, marks=pytest.mark.slow, id=name) for name, flags in RUNS.items()),
    ],
)
def test_resumed_run_is_bit_identical_and_teacher_is_not_saved(losses_with_a_resume, checkpoint, tmp_path, flags):
    flags = [*STUDENT, "--epochs", "2", "--teacher", checkpoint, *flags]
    newest = "1_2" if "--accumulate-steps" in flags else "1_1"  # the names count batches
    expected, actual = losses_with_a_resume(newest, *flags)
    assert actual == expected
    [resumed] = (tmp_path / "output").glob("*/1")
    saved = [tmp_path / "uninterrupted/1", resumed]
    metas = [json.loads((folder / "meta.json").read_text()) for folder in saved]
    assert metas[0]["teacher"] == metas[1]["teacher"]
    for path in saved[0].glob("*.pd*"):
        one, other = (arrays(folder / path.name) for folder in saved)
        assert one.keys() == other.keys() and not any(name.startswith("teacher.") for name in one)
        for key, value in one.items():
            assert np.ravel(value).tobytes() == np.ravel(other[key]).tobytes(), key
    summary = read_report(tmp_path / "report.json")[-1]["data"]
    assert (summary["teacher.arch"], summary["teacher.top1"]) == ("Tiny", metas[0]["teacher"]["top1"])


def test_initial_weights_do_not_depend_on_teacher(parse, checkpoint):
    found = []
    for flags in ([], ["--teacher", checkpoint]):
        args = frozen(parse(*STUDENT, *flags))
        main, startup = static.Program(), static.Program()
        with static.scope_guard(static.Scope()):
            paddle.seed(3)
            program.build(args, main, startup, 1)
            static.Executor(PLACE).run(startup)
            found.append({p.name: variable(p.name) for p in main.all_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value)


def test_student_learns_from_teacher_without_labels(run_train, checkpoint):
    """With weight 1, the loss falls, because student and teacher have the same network."""
    flags = ["--distill-weight", "1", "--epochs", "12", "--lr", "0.1", "--bn-momentum", "0.5"]
    code, report = run_train("--teacher", checkpoint, *flags)
    assert code == 0
    found = losses(report)
    assert found[11, "train"] < 0.25 * found[0, "train"]


@pytest.mark.slow
def test_multi_label_run(several, run_train, tmp_path):
    data, checkpoint = several
    flags = [*STUDENT, *MULTI_LABEL, "--teacher", checkpoint, "--mixup", "0.4"]
    code, report = run_train(*flags, "--asymmetric-loss", "4,0,0.05", image_root=data)
    assert code == 0
    assert report[-1]["data"]["teacher.map"] == json.loads((checkpoint / "meta.json").read_text())["evaluated"]["map"]


def test_page_shows_teacher_and_checkpoint_needs_no_teacher(run_train, checkpoint, photos, tmp_path):
    flags = ["--teacher", checkpoint, "--distill-temperature", "2.5", "--report-html", tmp_path / "page.html"]
    assert run_train(*STUDENT, *flags)[0] == 0
    card = (tmp_path / "page.html").read_text().partition("<h3>Teacher</h3>")[2].partition("</div>")[0]
    shown = dict(re.findall(r"<th>(\w+)</th><td><code>(.*?)</code>", card))
    top1 = json.loads((checkpoint / "meta.json").read_text())["evaluated"]["top1"]
    assert shown["teacher"] == str(checkpoint) and shown["arch"] == "Tiny" and float(shown["top1"]) == top1
    assert (shown["distill_weight"], shown["distill_temperature"]) == ("0.9", "2.5")
    shutil.rmtree(checkpoint)
    folder = tmp_path / "output/Student/0"
    # --teacher has no effect in an evaluation, even if the folder does not exist.
    flags = ["--run-scope", "eval_only", "--from-checkpoint", folder, "--overwrite", "--teacher", checkpoint]
    assert run_train(*STUDENT, *flags)[0] == 0
    assert export.main([str(folder), str(tmp_path / "exported"), "--verify", str(photos)]) == 0
    image = str(next(photos.glob("val/*/*")))
    assert predict.main([str(tmp_path / "exported"), image, "--device", "cpu"]) == 0
    start = ["--from-pretrained-params", folder, "--output-dir", tmp_path / "fine_tuned"]
    assert run_train(*STUDENT, *start)[0] == 0


def test_run_folder_and_averages_are_used(run_train, tmp_path, capsys):
    places = ["--output-dir", tmp_path / "teachers", "--epochs", "2", "--ema", "0.5"]
    assert run_train(*places)[0] == 0
    best = (tmp_path / "teachers/Tiny/best").resolve()
    capsys.readouterr()
    assert run_train(*STUDENT, "--teacher", tmp_path / "teachers")[0] == 0
    out = capsys.readouterr().out
    assert f"using the checkpoint {tmp_path / 'teachers/Tiny'}" in out and "rounding to INT8" not in out
    meta = json.loads((tmp_path / "output/Student/0/meta.json").read_text())
    assert meta["teacher"]["folder"] == meta["arguments"]["teacher"] == str(best)
    assert meta["teacher"]["sha256"] == contents.read_meta(best)["files"]["tiny.pdema"]["sha256"]


@pytest.mark.slow
def test_teacher_of_other_flags(run_train, tmp_path, capsys):
    flags = ["--asp", "--prune-model", "--qat", "--image-shape", "4,32,32"]
    assert run_train(*flags, "--output-dir", tmp_path / "teachers")[0] == 0
    capsys.readouterr()
    assert run_train(*STUDENT, "--teacher", tmp_path / "teachers/Tiny/0")[0] == 0
    assert "runs without rounding to INT8" in capsys.readouterr().out


def test_weights_of_other_flags_are_loaded(parse, checkpoint, tmp_path):
    """The checkpoint has the masks of --asp, the ranges of --qat and filters for four channels."""
    weights = arrays(checkpoint / "tiny.pdparams")
    first = weights["conv2d_0.w_0"]
    other = {"conv2d_0.w_0": np.pad(first, [(0, 0), (0, 1), (0, 0), (0, 0)]), "conv2d_1.w_0.asp_mask": first}
    files = {"tiny.pdparams": pickle.dumps(weights | other | {"quantization_0.range": np.ones(1, "float32")})}
    teacher = with_meta(checkpoint, tmp_path / "teachers", {"image_shape": [4, 32, 32]}, files)
    main = static.Program()
    program.build(frozen(parse(*STUDENT, "--teacher", teacher)), main, static.Program(), 1)
    teachers.load(main, PLACE)
    np.testing.assert_array_equal(variable("teacher.conv2d_0.w_0"), first)


def test_flags_that_determine_outputs_must_be_those_of_the_teacher(parse, checkpoint):
    flags = parse(*STUDENT, "--teacher", checkpoint).as_dict()
    assert teachers.find(flags | {"image_shape": [4, 32, 32]}).classes == ["class0", "class1", "class2"]
    for other, problem in (
        ({"multi_label": True}, "was trained with --multi-label false"),
        ({"num_of_class": 2}, "has 3 classes, but this run has 2"),
        ({"image_shape": [3, 32, 40]}, "different preprocessing; use --image-shape=3,32,32, or a different teacher"),
    ):
        with pytest.raises(UsageError, match=problem):
            teachers.find(flags | other)


@pytest.mark.parametrize("evaluated", [None, {"loss": 0.1, "top1": 0.75, "top5": 1.0, "ips": 9.0}])
def test_teacher_may_have_no_evaluation(parse, checkpoint, tmp_path, evaluated):
    teacher = with_meta(checkpoint, tmp_path, evaluated=evaluated, best=None)
    found = teachers.find(parse(*STUDENT, "--teacher", teacher).as_dict())
    assert found.metric == ({"top1": 0.75} if evaluated else {})


def test_only_a_resumed_run_requires_the_teacher_of_its_checkpoint(parse, checkpoint):
    teacher = teachers.find(parse(*STUDENT, "--teacher", checkpoint).as_dict())
    other = teacher.record() | {"sha256": "0"}
    for resumes, start, now, problem in (
        (True, None, teacher, "was trained without --teacher; use --teacher None"),
        (True, teacher.record(), None, "was trained with --teacher; use --teacher "),
        (True, other, teacher, "differs from the weights"),
        (True, teacher.record(), teacher, None),
        *((False, start, now, None) for start, now in ((None, teacher), (other, None), (other, teacher))),
    ):
        point = restore.StartCheckpoint("DIR", 1, 0, {"teacher": start}, resumes)
        with pytest.raises(UsageError, match=problem) if problem else contextlib.nullcontext():
            teachers.check_resumed(point, now)


@pytest.mark.slow
def test_converted_weights_are_teachers(run_train, tmp_path, capsys):
    out, source = tmp_path / "converted", tmp_path / "resnet.pdparams"
    source.write_bytes(pickle.dumps(tensors(3, "ResNet18"), 4))
    shape = ["--crop-size", "32", "--resize-short", "36", "--interp", "linear"]
    assert weights.main([str(source), "--arch", "ResNet18", "--output", str(out), *shape]) == 0
    capsys.readouterr()
    code, report = run_train(*STUDENT, "--teacher", out)
    assert code == 0 and report[-1]["data"]["teacher.arch"] == "ResNet18"
    assert "teacher.top1" not in report[-1]["data"]


def test_networks_from_file(run_train, tmp_path, capsys):
    file = tmp_path / "network.py"
    file.write_text(NETWORK_EXAMPLE + "\n\nTeacher = Net\n")
    arch = ["--model-arch-name", f"{file}:Teacher"]
    assert run_train(*arch, "--output-dir", tmp_path / "teachers")[0] == 0
    flags = ["--teacher", tmp_path / "teachers/Teacher/0"]
    capsys.readouterr()
    assert run_train(*STUDENT, *flags)[0] == 2
    assert_one_error(capsys.readouterr().err, ["--teacher ", "define both networks in one file"])
    moved = file.rename(tmp_path / "moved.py")  # the path in the checkpoint is not imported
    assert run_train("--model-arch-name", f"{moved}:Net", *flags)[0] == 0


@pytest.mark.slow
@needs_native
def test_steps_are_captured(fake, run_train, checkpoint):
    flags = [*IN_NATIVE, "--epochs", "2", "--print-interval", "1", "--teacher", checkpoint]
    expected = losses(run_train(*flags)[1])
    code, report = run_train(*flags, "--cuda-graph", "true", "--overwrite")
    assert code == 0 and any(graph.launches for graph in fake.made)
    assert losses(report) == pytest.approx(expected, rel=1e-5)


def test_operators_can_be_captured(parse, checkpoint):
    args = frozen(parse(*NHWC, "--teacher", checkpoint))
    main = static.Program()
    program.build(args, main, static.Program(), 1)
    assert cuda_graph.untested_operators(main, True, True) is not None


@pytest.mark.parametrize(("dtype", "level"), [("float16", "O1"), ("float16", "O2"), ("bfloat16", "O2")])
def test_teacher_is_in_half_precision_with_amp(parse, gpu_lists, checkpoint, dtype, level):
    """Convolutions and weights are in half precision, without casts of weights in each step. BN weights and the loss
    are in float32."""
    args = parse(*STUDENT, *NHWC, "--teacher", checkpoint, *(["--dali-output-fp16"] if level == "O2" else []))
    args.set("Python", amp=True, amp_level=level, amp_dtype=dtype)
    main = static.Program()
    program.build(frozen(args), main, static.Program(), 1)
    teachers.load(main, PLACE)
    block, half = main.global_block(), getattr(paddle, dtype)
    ops = [op for op in block.ops if op.type == "conv2d" and op.output("Output")[0].startswith("teacher.")]
    types = {block.var(name).dtype for op in ops for name in (*op.input_arg_names, *op.output_arg_names)}
    assert len(ops) == 3 and types == {half}
    for name in ("teacher.conv2d_0.w_0", "teacher.linear_0.w_0"):
        assert block.var(name).dtype == static.global_scope().find_var(name).get_tensor()._dtype() == half
    casts = [op.input("X")[0] for op in block.ops if op.type == "cast"]
    assert not [name for name in casts if name.startswith("teacher.") and block.var(name).persistable]
    assert block.var("teacher.batch_norm_0.w_0").dtype == paddle.float32
    for op in block.ops:
        if loss_head.contains(op) and op.type != "cast":
            assert half not in [block.var(name).dtype for name in (*op.input_arg_names, *op.output_arg_names)], op.type
    updated = {op.input("Param")[0] for op in block.ops if op.type == "momentum"}
    assert updated and not any(name.startswith("teacher.") for name in updated)


def edit(folder, **changes):
    """Change entries in the meta.json of a checkpoint, with a correct checksum."""
    meta = contents.read_meta(folder)
    meta |= {name: change(meta[name]) for name, change in changes.items()}
    (folder / "meta.json").write_text(json.dumps({**meta, "checksum": contents._checksum(meta)}))


def flip_last_bit(path):
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def write_nan(folder):
    path = folder / "tiny.pdparams"
    path.write_bytes(pickle.dumps(arrays(path) | {"linear_0.b_0": np.full(3, np.nan, "float32")}))
    written = contents.write_file(path.with_name("again"), lambda f: f.write(path.read_bytes()))
    edit(folder, files=lambda files: files | {"tiny.pdparams": written})


WRONG = {
    "missing": (shutil.rmtree, ["is not a folder", "choose the folder of a run"]),
    "no meta.json": (lambda f: (f / "meta.json").unlink(), ["contains no meta.json"]),
    "damaged meta.json": (lambda f: flip_last_bit(f / "meta.json"), ["damaged"]),
    "damaged weights": (lambda f: flip_last_bit(f / "tiny.pdparams"), ["tiny.pdparams does not match its sha256"]),
    "not finite": (write_nan, ["linear_0.b_0 has values that are not finite"]),
    "other network": (
        lambda f: edit(f, arguments=lambda flags: flags | {"model_arch_name": "ResNet18"}),
        ["does not match ResNet18", "missing, 0 unknown", "use a checkpoint of this network"],
    ),
    "unknown network": (
        lambda f: edit(f, arguments=lambda flags: flags | {"model_arch_name": "Never"}),
        ["invalid flag", "Never"],
    ),
    "number of classes": (
        lambda f: edit(f, arguments=lambda flags: flags | {"num_of_class": 4}),
        ["has 4 classes, but this run has 3"],
    ),
    "order of classes": (
        lambda f: edit(f, classes=lambda classes: classes[::-1]),
        [
            "its classes differ from those of the data set (label 0 was ",
            "use a teacher that was trained on the classes",
        ],
    ),
    "labels": (
        lambda f: edit(
            f,
            arguments=lambda flags: flags | {"multi_label": True},
            **dict.fromkeys(("evaluated", "best"), lambda _: None),
        ),
        ["was trained with --multi-label true"],
    ),
}


@pytest.mark.parametrize(("change", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_teacher_is_an_error(run_train, checkpoint, tmp_path, capsys, change, parts):
    change(checkpoint)
    capsys.readouterr()
    assert run_train(*STUDENT, "--teacher", checkpoint)[0] == 2
    assert_one_error(capsys.readouterr().err, [str(checkpoint), *parts])
    assert not list((tmp_path / "output").glob("*/0"))


PREPROCESSING = {
    "size and filter": ({"image_shape": [3, 24, 24], "crop_size": 24, "interp": "cubic"}, 3),
    "not square": ({"image_shape": [3, 32, 40], "resize_short": 40}, 2),
    "normalization": (
        {"normalize_mean": [0.1, 0.2, 0.3], "normalize_std": [0.5, 0.3, 0.25], "normalize_scale": 1 / 250},
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("recorded", "count"), PREPROCESSING.values(), ids=PREPROCESSING)
def test_different_preprocessing_is_an_error_whose_remedy_works(
    run_train, checkpoint, tmp_path, capsys, recorded, count
):
    teacher = ["--teacher", with_meta(checkpoint, tmp_path / "teachers", recorded)]
    assert run_train(*STUDENT, *teacher)[0] == 2
    error = capsys.readouterr().err
    assert_one_error(error, ["--teacher ", "was trained with different preprocessing"])
    remedy = re.search(r"use (--.*), or a different teacher", error)[1]
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in remedy.split() if "--" in word}
    assert names == recorded.keys()
    assert run_train(*STUDENT, *teacher, *remedy.split())[0] == 0


def test_resumed_run_requires_its_teacher(run_train, stop_before, checkpoint, tmp_path, capsys):
    """The run inherits the teacher, which may be moved, but not replaced or removed."""
    flags = [*STUDENT, "--epochs", "2", "--distill-temperature", "2"]
    stop_before(train_step=4)
    assert run_train(*flags, "--teacher", checkpoint)[0] == 75
    stop_before()
    folder, moved = tmp_path / "output/Student/1_1", tmp_path / "a teacher"
    weights = {name: 2 * value for name, value in arrays(checkpoint / "tiny.pdparams").items()}
    other = with_meta(checkpoint, tmp_path / "others", files={"tiny.pdparams": pickle.dumps(weights)})
    cases = [
        (["--teacher", other], ["tiny.pdparams differs from the weights", str(checkpoint)]),
        (["--teacher", "None", "--distill-temperature", "4"], [str(folder), f"use --teacher {checkpoint}"]),
    ]
    for changed, parts in cases:
        capsys.readouterr()
        assert run_train(*flags, "--resume", *changed)[0] == 2
        assert_one_error(capsys.readouterr().err, parts)
    checkpoint.rename(moved)
    assert run_train(*flags, "--resume")[0] == 2
    assert_one_error(capsys.readouterr().err, [f"--teacher {checkpoint}: is not a folder"])
    assert run_train(*flags, "--resume", "--teacher", moved)[0] == 0
    captured = capsys.readouterr()
    assert f"resumed with --teacher {moved} (was {checkpoint})" in captured.out
    assert "losses will differ" not in captured.err
    assert run_train(*flags, "--resume", "--epochs", "3")[0] == 0  # inherits the new path
    meta = json.loads((tmp_path / "output/Student/2/meta.json").read_text())
    assert meta["teacher"]["folder"] == str(moved)
    capsys.readouterr()
    assert run_train(*flags, "--resume", "--epochs", "4", "--teacher", "None", "--distill-temperature", "4")[0] == 2
    assert_one_error(capsys.readouterr().err, [f"use --teacher {shlex.quote(str(moved))}, or start a new run"])


@pytest.mark.slow
def test_teacher_cannot_be_added_to_run(run_train, checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path / "output/Tiny/0")
    flags = ["--epochs", "2", "--resume"]
    assert run_train(*flags, "--teacher", checkpoint)[0] == 2
    assert_one_error(capsys.readouterr().err, ["was trained without --teacher", "use --teacher None"])
    assert run_train(*flags, "--teacher", "None")[0] == 0


def test_run_does_not_delete_its_teacher(run_train, checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path / "output/Tiny/0")
    assert run_train("--teacher", tmp_path / "output", "--overwrite")[0] == 2
    assert_one_error(capsys.readouterr().err, ["--overwrite: would delete --teacher", "different --output-dir"])
    files = (tmp_path / "output/Tiny/0").iterdir()
    assert run_train("--teacher", tmp_path / "output", "--output-dir", tmp_path / "next")[0] == 0 and [*files]
    report = tmp_path / "output/Tiny/0/tiny.pdparams"
    assert run_train("--teacher", tmp_path / "output", "--report-html", report, "--output-dir", tmp_path / "b")[0] == 2


@pytest.mark.slow
def test_changed_classes_are_learned_as_the_error_says(run_train, checkpoint, photos, tmp_path, capsys):
    """The suggested command fine-tunes without the teacher, which was trained on the old classes."""
    root = shutil.copytree(photos, tmp_path / "root")
    flags = [*STUDENT, "--teacher", checkpoint, "--distill-weight", "0.5"]
    assert run_train(*flags, image_root=root)[0] == 0
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "other")
    capsys.readouterr()
    assert run_train(*flags, "--resume", "--epochs", "2", image_root=root)[0] == 2
    [command] = re.findall("`(.*)`", capsys.readouterr().err)
    assert train.main(shlex.split(command)[2:]) == 0


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--distill-weight", "0.5"], ["--distill-weight 0.5: requires --teacher DIR"]),
        (["--distill-temperature", "3"], ["--distill-temperature 3: requires --teacher DIR"]),
        (["--teacher", "x", "--distill-weight", "0"], ["--distill-weight", "0 is not positive"]),
        (["--teacher", "x", "--distill-temperature", "0.01"], ["--distill-temperature 0.01: out of range"]),
    ],
)
def test_wrong_values_are_errors(run_train, capsys, flags, parts):
    assert run_train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, parts)


@pytest.mark.soak
def test_jobs(launch, tmp_path):
    """Two processes with half of the batch each train like one process. All processes must have the same teacher."""
    synthetic = ["--shares", "--data-format", "synthetic", "--model-arch-name", "Plain"]
    launch(1, *synthetic, "--output-dir", tmp_path / "teachers", "--epochs", "2")
    flags = [*synthetic, "--print-interval", "1", "--teacher", tmp_path / "teachers/Plain/1", "--lr"]
    one, _ = launch(1, *flags, "0.05", "--batch-size", "8")
    two, _ = launch(2, *flags, "0.025", "--batch-size", "4")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    differing = ["--differs", f"1 --teacher {tmp_path / 'teachers/Plain/0'}"]
    _, logs = launch(2, *flags, "0.025", "--batch-size", "4", *differing, succeeds=False)
    assert "the processes differ: --teacher is " in "".join(logs)


def test_ranks_compare_weights_of_teacher(parse, checkpoint, monkeypatch):
    """The file at the same path can differ between machines."""
    compared = {}
    monkeypatch.setattr(agreement, "_compare", compared.update)
    main = static.Program()
    program.build(frozen(parse(*STUDENT, "--teacher", checkpoint)), main, static.Program(), 1)
    agreement.check_work("paddle", None, None, main)
    sha256 = contents.read_meta(checkpoint)["files"]["tiny.pdparams"]["sha256"]
    assert compared["weights of --teacher (hash)"] == sha256[:8]
