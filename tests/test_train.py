"""Complete runs of train.py, with real images and programs."""

import importlib
import importlib.util
import pickle
import re
import shutil

import numpy as np
import paddle
import pytest
import yaml

from conftest import NHWC, ROOT, assert_one_error, assert_sparse, frozen, losses, phase
from helpers import NVIDIA_SCRIPTS, build
from paddle_resnet import config, dali, export, models, phases, train
from paddle_resnet.checkpoints import contents, variables
from paddle_resnet.components import stages
from paddle_resnet.data.formats import folder as class_folders
from paddle_resnet.optimizers import schedules
from paddle_resnet.passes import all_reduces
from paddle_resnet.settings import durations
from paddle_resnet.utils.mode import Mode

ON_GPU = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
pytestmark = pytest.mark.usefixtures("one_block")

# The recipes, except those that choose their flags at the start of a run, which tests/test_recipe.py tests.
RECIPES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "choose_recipe" not in path.read_text()]


@pytest.mark.slow
def test_evaluation_of_checkpoint_matches_training_run(run_train, tmp_path):
    code, report = run_train("--epochs", "2")
    assert code == 0
    first, last = (phase(report, [epoch], "val.") for epoch in (0, 1))
    assert first["loss"] != last["loss"]
    assert phase(report, [], "val.")["top1"] == last["top1"]

    for epoch, expected in ((0, first), (1, last)):
        flags = ["--from-checkpoint", tmp_path / "output" / "Tiny", "--last-epoch-of-checkpoint", epoch]
        code, evaluated = run_train("--run-scope", "eval_only", *flags)
        assert code == 0
        for name in ("loss", "top1", "top5", "images"):
            assert phase(evaluated, [], "val.")[name] == phase(evaluated, [epoch], "val.")[name] == expected[name]
    code, evaluated = run_train("--run-scope", "eval_only", "--from-pretrained-params", tmp_path / "output/Tiny/1")
    assert phase(evaluated, [], "val.")["loss"] == phase(evaluated, [1], "val.")["loss"] == last["loss"]


def test_seed_determines_initial_weights(run_train, tmp_path):
    weights = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        paddle.seed(len(weights))  # the run must not depend on earlier random numbers
        flags = ["--lr", "0", "--run-scope", "train_only", "--output-dir", tmp_path / name, "--overwrite"]
        assert run_train(*flags, "--seed", seed)[0] == 0
        weights.append(pickle.loads((tmp_path / name / "Tiny/0/tiny.pdparams").read_bytes())["conv2d_0.w_0"])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert np.any(weights[0] != weights[2])


@pytest.mark.slow
def test_evaluation_is_equal_in_every_format(run_train, converted, checkpoint, capsys):
    expected = contents.read_meta(checkpoint)["evaluated"]
    explicit = [("recordio", ["--data-format", "recordio"])]
    for data_format, flags in [*((name, []) for name in converted), *explicit]:
        root = converted[data_format]
        capsys.readouterr()
        scope = ["--run-scope", "eval_only", "--from-checkpoint", checkpoint]
        code, report = run_train(*scope, "--batch-size", "5", *flags, image_root=root)
        assert code == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if "the val split is" in line]
        assert line.endswith(f"({data_format})")
        actual = phase(report, [], "val.")
        for name in ("loss", "top1", "top5", "images"):
            assert actual[name] == expected[name]


def test_last_epoch_is_saved_and_evaluated_regardless_of_intervals(run_train, tmp_path):
    code, report = run_train("--epochs", "3", "--save-interval", "2", "--eval-interval", "2")
    assert code == 0
    assert sorted(p.name for p in (tmp_path / "output" / "Tiny").glob("[0-9]*")) == ["1", "2"]
    assert [e["step"] for e in report if len(e["step"]) == 1 and "val.loss" in e["data"]] == [[1], [2]]


def test_train_only_requires_no_validation_images(run_train, photos, tmp_path):
    root = tmp_path / "train_alone"
    shutil.copytree(photos / "train", root / "train")
    code, report = run_train("--run-scope", "train_only", image_root=root)
    assert code == 0
    assert not any(key.startswith("val.") for e in report for key in e["data"])


def test_eval_only_requires_no_training_images(run_train, checkpoint, photos, tmp_path):
    root = tmp_path / "val_alone"
    shutil.copytree(photos / "val", root / "val")
    assert run_train("--run-scope", "eval_only", "--from-checkpoint", checkpoint, image_root=root)[0] == 0


@pytest.mark.parametrize("flags", [["--data-layout", "NHWC", "--image-shape", "4,32,32"], ["--dali-output-fp16"]])
def test_training_supports_nhwc_and_fp16_input(run_train, flags):
    code, report = run_train(*flags)
    assert code == 0
    assert phase(report, [], "val.")["images"] == 23


def test_report_starts_with_flags_and_ends_with_summary(run_train):
    _, report = run_train("--model-arch-name", "tINY")  # the name of a network is not case-sensitive
    assert report[0]["step"] == "PARAMETER"
    assert report[0]["data"]["model_arch_name"] == "Tiny"
    assert report[-1]["step"] == []
    assert {"train.loss", "train.ips", "val.loss", "val.top1", "val.top5", "best.epoch"} <= report[-1]["data"].keys()


@pytest.mark.parametrize("scope", ["train_only", "eval_only"])
@pytest.mark.parametrize("data_format", ["folder", "synthetic"])
def test_benchmark_reports_latency_and_writes_no_output(run_train, tmp_path, scope, data_format):
    flags = ["--benchmark", "--benchmark-steps", "7", "--benchmark-warmup-steps", "2", "--data-format", data_format]
    (tmp_path / "output").write_text("")  # a benchmark needs no output folder
    code, report = run_train("--run-scope", scope, *flags)
    assert code == 0
    result = phase(report, [], "train." if scope == "train_only" else "val.")
    assert result["steps"] == 7
    assert result["ips"] > 0
    assert result["latency_p50_ms"] <= result["latency_p99_ms"]
    is_evaluated = scope == "eval_only"  # steps of a training benchmark are not an epoch
    assert any(len(entry["step"]) == 1 for entry in report) == is_evaluated
    assert (tmp_path / "output").is_file()


def test_dry_run_checks_paths_and_writes_nothing(run_train, tmp_path, capsys):
    assert run_train("--dry-run")[0] == 0
    assert not (tmp_path / "output").exists()
    assert run_train("--dry-run", "--from-checkpoint", tmp_path / "nowhere")[0] == 2
    (tmp_path / "output").write_text("in the way")
    assert run_train("--dry-run")[0] == 2
    assert_one_error(
        capsys.readouterr().err.partition("nowhere")[2], ["--output-dir", "output is not a writable folder"]
    )


def test_outputs_without_a_class_log_a_warning(run_train, photos, capsys):
    assert run_train("--dry-run", "--num-of-class", "5")[0] == 0
    assert f"warning: --num-of-class 5: exceeds the 3 classes in {photos}; reduce it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--run-scope train_only --epochs 2", "--epochs 2", "--iter-unit batch --num-iter 2 --eval-interval 1"]
)
def test_bn_statistics_are_averaged_at_each_end_of_an_epoch_and_each_evaluation(run_train, monkeypatch, flags):
    """Several processes need this average also without evaluation, because checkpoints contain it."""
    averaged = []
    monkeypatch.setattr(all_reduces, "average_bn", lambda exe, program: averaged.append(program))
    assert run_train(*flags.split())[0] == 0
    assert len(averaged) == 2


@pytest.mark.slow
def test_sparse_training_keeps_masks(run_train, tmp_path, capsys):
    flags = ["--asp", "--prune-model", "--epochs", "2"]
    code, report = run_train(*flags)
    assert code == 0
    summary = report[-1]["data"]
    assert (summary["asp.sparse_layers"], summary["asp.dense_layers"]) == (2, 2)
    assert "--asp: 2 of 4 layers are 2:4 sparse" in capsys.readouterr().out
    for epoch in (0, 1):
        params = pickle.loads((tmp_path / f"output/Tiny/{epoch}/tiny.pdparams").read_bytes())
        assert_sparse(params)
    # A run inherits --asp from its checkpoint. Only an explicit flag makes sparse weights dense.
    elsewhere = ["--output-dir", tmp_path / "branch", "--epochs", "2"]
    assert run_train("--from-checkpoint", tmp_path / "output/Tiny/1", *elsewhere)[0] == 0
    assert_sparse(pickle.loads((tmp_path / "branch/Tiny/1/tiny.pdparams").read_bytes()))
    shutil.rmtree(tmp_path / "branch")
    capsys.readouterr()
    pretrained = ["--from-pretrained-params", tmp_path / "output/Tiny/1", *elsewhere, "--epochs", "1"]
    assert run_train(*pretrained)[0] == 2
    assert_one_error(capsys.readouterr().err, ["2:4 sparse weights", "use --asp --prune-model", "or --asp false"])
    assert run_train(*pretrained, "--asp", "false")[0] == 0
    assert "has 2:4 sparse weights, which --asp false makes dense" in capsys.readouterr().err
    assert run_train("--run-scope", "eval_only", "--from-checkpoint", tmp_path / "output/Tiny/1")[0] == 0


def test_derived_weights_are_computed_before_an_evaluation(parse, photos, tmp_path):
    """The function `refresh` makes the network predict class 1, which 8 of the 23 images have."""
    args = frozen(parse("--image-root", photos, "--report-file", tmp_path / "report.json"))
    compiled, exe, fetchs, _, main = build(args, is_train=False)

    def refresh():
        variables.set_variable("linear_0.b_0", np.float32([0, 99, 0]), paddle.CPUPlace())

    loader = dali.build_dataloader(args, Mode.EVAL)
    evaluation = phases.Work(args, loader, main, fetchs, compiled=compiled, refresh=refresh)
    result = train._evaluate(phases.Run(args, exe=exe, evaluation=evaluation), durations.Stop(0))
    assert result["top1"] == pytest.approx(8 / 23)


@pytest.mark.parametrize("flag", ["--from-pretrained-params", "--from-checkpoint"])
def test_sparse_training_starts_from_dense_weights(run_train, checkpoint, tmp_path, flag):
    assert run_train(flag, checkpoint, "--asp", "--prune-model")[0] == 0
    params = pickle.loads((tmp_path / "output/Tiny/0/tiny.pdparams").read_bytes())
    assert_sparse(params)
    assert np.mean(params["conv2d_2.w_0"] != 0) == 0.5


def changed_copy(photos, tmp_path, change):
    root = tmp_path / "changed"
    shutil.copytree(photos, root)
    change(root)
    return root


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def keep_one_class(root):
    for name in ("class1", "class2"):
        for mode in Mode:
            shutil.rmtree(root / mode.value / name)


def flatten(split):
    for path in list(split.rglob("*.jpg")):
        path.rename(split / f"{path.parent.name}_{path.name}")
    for folder in [p for p in split.iterdir() if p.is_dir()]:
        folder.rmdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, ["--image-root", "not a folder", "train/ and val/"]),
        (empty, ["--image-root", "has no folder train/", "use the folder that contains train/ and val/"]),
        (lambda root: shutil.rmtree(root / "val"), ["has no folder val/", "--run-scope train_only"]),
        (lambda root: shutil.rmtree(root / "train"), ["has no folder train/", "--run-scope eval_only"]),
        (lambda root: flatten(root / "train"), ["--image-root", "no class folders", "one folder per class"]),
        (lambda root: empty(root / "val"), ["--image-root", "val/ contains no images in class folders; add images"]),
        (
            lambda root: flatten(root / "val"),
            ["val/ contains no images in class folders; ", "put the images into one folder per class"],
        ),
        (lambda root: empty(root / "train/class0"), ["train has no images for 1 of 3", "--allow-empty-classes"]),
        (keep_one_class, ["all train images belong to one class, class0", "--allow-one-class"]),
    ],
    ids=[
        "missing",
        "empty",
        "no val",
        "no train",
        "no class folders",
        "no images",
        "flat",
        "empty class",
        "one class",
    ],
)
def test_invalid_data_set_exits_with_code_2(run_train, photos, tmp_path, capsys, change, message):
    root = changed_copy(photos, tmp_path, change)
    code, report = run_train(image_root=root)
    assert code == 2
    output = capsys.readouterr()
    assert_one_error(output.err, [*message, str(root)])
    assert "the train split in" not in output.out or (root / "train" / "class1").is_dir()
    assert report == []
    if message[-1].startswith("--allow"):
        assert run_train(message[-1], "--dry-run", image_root=root)[0] == 0


@pytest.mark.parametrize(
    ("bad", "label", "flags"),
    [
        (Mode.TRAIN, -1, ["--kernels", "native", *NHWC]),
        (Mode.EVAL, 3, ["--kernels", "native", *NHWC]),
        (Mode.TRAIN, 3, []),
        (Mode.EVAL, -1, ["--label-smoothing", "0"]),
    ],
)
def test_label_outside_classes_stops_the_run(run_train, capsys, monkeypatch, bad, label, flags):
    """Some labels of record files are not read before the first step. If such a label is invalid, the run must stop
    when it reads the label. The label must neither cause NaN gradients nor count as a different class."""

    original = class_folders.index

    def index(image_root, mode, *more):
        listed = original(image_root, mode, *more)
        return listed._replace(labels=[*listed.labels[:-1], label if mode is bad else listed.labels[-1]])

    monkeypatch.setattr(class_folders, "index", index)
    assert run_train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, ["label that is not a class of the network", "--num-of-class"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train/class0/12.jpg", "val/class2/20.jpg"])
def test_undecodable_image_stops_the_run_unless_in_skip_list(run_train, photos, tmp_path, capsys, name):
    root = changed_copy(photos, tmp_path, lambda root: (root / name).write_bytes(b"no image"))
    assert run_train("--batch-size", "2", "--dali-prefetch", "1", image_root=root)[0] == 2
    message = [f"{root}/{name}: cannot be decoded (rank 0)", f"verify {root} --fix-list", "--skip-list"]
    assert_one_error(capsys.readouterr().err, message)
    (tmp_path / "skip.txt").write_text(name)
    code, report = run_train("--skip-list", tmp_path / "skip.txt", "--overwrite", image_root=root)
    assert code == 0
    assert phase(report, [], "val.")["images"] == (22 if name.startswith("val") else 23)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-of-class", "2"], ["--num-of-class 2", "3 class folders", "--num-of-class 3"]),
        (["--image-shape", "2,32,32"], ["--image-shape 2,32,32", "3 or 4 channels"]),
        (["--image-shape", "32,32"], ["--image-shape 32,32", "3 or 4 channels"]),
        (["--batch-size", "31"], ["--batch-size 31", "30 training images", "use 30 or less"]),
        (
            ["--from-checkpoint", "a", "--from-pretrained-params", "b"],
            ["--from-checkpoint a", "--from-pretrained-params b"],
        ),
        (["--lerning-rate", "1"], ["--lerning-rate: unknown flag; see --help"]),
        (["--batchsize", "1"], ["--batchsize", "use --batch-size, or see --help"]),
        (["--run-scope", "eval_only"], ["--run-scope eval_only", "--from-checkpoint"]),
        (["--from-checkpoint", "nowhere"], ["--from-checkpoint nowhere: does not exist"]),
        (["--from-pretrained-params", "nowhere"], ["--from-pretrained-params nowhere"]),
        (["--model-arch-name", "ResNet51"], ["--model-arch-name ResNet51", "ResNet50"]),
        (["--device", "gpu"], ["--device gpu", "--device cpu"]),
        (["--amp"], ["--amp", "GPU"]),
        (["--dali-device", "gpu"], ["--dali-device gpu", "--dali-device cpu"]),
        (["--output-dir", "/proc/no"], ["--output-dir /proc/no", "choose a different path"]),
        (["--from-checkpoint", ""], ["--from-checkpoint", "empty path"]),
        (["--skip-list", "nowhere"], ["--skip-list nowhere: cannot be read"]),
        (["--epochs", "x"], ["--epochs", "'x'", "whole number"]),
        (["--report-file", "/proc/no/report"], ["--report-file /proc/no/report"]),
    ],
    ids=lambda value: " ".join(value) if "--" in value[0] and len(value) < 5 else "",
)
def test_invalid_flags_exit_with_code_2(run_train, capsys, flags, message):
    code, report = run_train(*flags)
    assert code == 2
    assert_one_error(capsys.readouterr().err, message)
    assert report == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NVIDIA_SCRIPTS)
def test_scripts_of_nvidia_example_train_and_their_export_command_works(
    run_train, checkpoint, tmp_path, capsys, work_in, name
):
    """The scripts run with tiny values: a tiny network, one epoch and, on a CPU, float32."""
    words = NVIDIA_SCRIPTS[name].split()
    for flag, count in (("--epochs", 2), ("--lr", 2), ("--model-prefix", 2), ("--from-pretrained-params", 2)):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    for flag, count in () if ON_GPU else (("--amp", 1), ("--scale-loss", 2), ("--use-dynamic-loss-scaling", 1)):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    if "--from-pretrained-params" in NVIDIA_SCRIPTS[name]:
        words += ["--from-pretrained-params", checkpoint]
    work_in(tmp_path)
    code, report = run_train(*words, *(["--device", "gpu"] if ON_GPU else []), "--output-dir", "output")
    assert code == 0
    assert np.isfinite(list(losses(report).values())).all()
    warnings = capsys.readouterr().err
    assert ("--fuse-resunit: has no effect" in warnings) == ("--fuse-resunit" in words)
    if "--inference-dir" in words:
        command = re.search(
            r"--inference-dir (\S+): .*; after training, run \S+ -m paddle_resnet.export (.*)", warnings
        )
        assert export.main(command[2].split()) == 0
        assert (tmp_path / command[1] / "model.json").is_file()


def test_flags_without_effect_do_not_differ_from_checkpoint_on_resume(run_train, capsys):
    flags = ["--fuse-resunit", "--inference-dir", "exported"]
    assert run_train(*flags)[0] == 0
    capsys.readouterr()
    assert run_train(*flags, "--resume", "--epochs", "2")[0] == 0
    error = capsys.readouterr().err
    assert "warning: --fuse-resunit: has no effect" in error
    assert "trained with different flags: --epochs 2 (was 1), so the losses" in error


def test_checkpoint_of_different_model_exits_with_code_2(run_train, checkpoint, capsys):
    code, _ = run_train("--model-arch-name", "TinyMobile", "--from-checkpoint", checkpoint)
    assert code == 2
    assert_one_error(capsys.readouterr().err, ["--from-checkpoint", "does not match the model", "--model-arch-name"])


def test_evaluation_without_val_folder_does_not_suggest_a_split(run_train, checkpoint, photos, tmp_path, capsys):
    """A split would evaluate training images."""
    for root in (photos / "train", shutil.copytree(photos / "train", tmp_path / "photos/train").parent):
        assert run_train("--run-scope", "eval_only", "--from-checkpoint", checkpoint, image_root=root)[0] == 2
        assert_one_error(capsys.readouterr().err, [f"{root}: has no val/; put the class folders into val/, or use"])


def test_checkpoint_of_finished_run_exits_with_code_2(run_train, tmp_path, capsys):
    run_train()
    flags = ["--from-checkpoint", tmp_path / "output/Tiny", "--last-epoch-of-checkpoint", "auto"]
    assert run_train(*flags)[0] == 2
    assert_one_error(capsys.readouterr().err, ["--epochs 1", "more than 1"])


def test_unknown_yaml_key_exits_with_code_2(run_train, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("batchsize: 3\n")
    assert run_train("--config", path)[0] == 2
    assert_one_error(capsys.readouterr().err, [str(path), "batchsize", "batch_size"])


def test_process_exits_with_code_2_on_invalid_flag(train_process):
    assert train_process("--help").returncode == 0
    rejected = train_process("--image-root", "/nowhere", "--data-layout", "HWNC")
    assert rejected.returncode == 2
    assert "Traceback" not in rejected.stderr
    assert_one_error(rejected.stderr, ["--data-layout", "HWNC", "NHWC"])


@pytest.mark.slow
def test_print_config_output_is_a_valid_config_file(tmp_path, capsys):
    def printed(*flags):
        assert train.main([*map(str, flags), "--print-config"]) == 0
        return capsys.readouterr().out

    path = tmp_path / "c.yaml"
    text = printed("--epochs", "7", "--amp")
    path.write_text(text)
    assert yaml.safe_load(text)["epochs"] == 7
    assert yaml.safe_load(printed("--config", path)) == yaml.safe_load(text)
    path.write_text("momentum: 0.9")
    text = printed("--config", path, "--optimizer", "AdamW")
    assert text.startswith(f"# --config {path}: ignoring --momentum 0.9 (not used by --optimizer AdamW)\n")
    assert yaml.safe_load(text)["momentum"] == 0.875


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_schedule_of_recipe_ends_with_its_last_epoch(path):
    args = frozen(config.parse_args(["--config", str(path)]))
    assert args.model_arch_name in models.MODELS
    assert f" {args.epochs} epochs" in path.read_text()  # the header of the recipe
    timeline = stages.timeline(args.part(stages.Options), images=8_000)
    schedule = schedules.build_lr_scheduler(args.part(schedules.Options), timeline)
    end = timeline.steps_before(args.epochs)
    rates = [schedule.step(step) or schedule() for step in range(end + 1)]
    assert max(rates) == pytest.approx(args.lr)
    assert rates[-1] == pytest.approx(args.min_lr, abs=1e-6)
    assert rates[-2] > rates[-1]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_on_tiny_images(run_train, path):
    sizes = config.parse_args(["--config", str(path)]).sizes
    flags = ["--config", path, "--batch-size", 15]
    if sizes:  # one epoch per stage
        flags += ["--sizes", ",".join(f"{24 + 8 * i}:{i}" for i in range(len(sizes))), "--epochs", len(sizes)]
    # The recipes of a family have the same flags with different values. Only the first trains; the others
    # only build their programs.
    flag_names = [yaml.safe_load(recipe.read_text()).keys() for recipe in RECIPES]
    is_first = flag_names.index(yaml.safe_load(path.read_text()).keys()) == RECIPES.index(path)
    code, report = run_train(*flags, *([] if is_first else ["--dry-run"]))
    assert code == 0
    assert not is_first or np.isfinite(list(losses(report).values())).all()


def test_run_resumes_without_values_of_file_that_flags_make_unused(run_train, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text("momentum: 0.9\nrand_crop_scale: [0.5, 1]\namp: true\nscale_loss: 128\n")
    flags = ["--config", path, "--optimizer", "AdamW", "--crop-padding", 4]
    for resume, epoch in ([], 0), (["--resume", "--epochs", "2"], 1):
        code, report = run_train(*flags, *resume)
        output = capsys.readouterr()
        assert code == 0
        assert [entry["step"] for entry in report if entry["step"] == [epoch]]
        for name in ("momentum 0.9", "rand-crop-scale 0.5,1.0", "amp", "scale-loss 128"):
            assert output.out.count(f"--config {path}: ignoring --{name} (") == 1
        warning = "trained with different flags: --epochs 2 (was 1), so the losses"  # only the flag that was changed
        assert (warning in output.err) == bool(resume)
        parameters = report[0]["data"]
        assert [parameters[name] for name in ("momentum", "rand_crop_scale", "amp", "scale_loss", "crop_padding")] == [
            *(0.875, [0.08, 1.0], False, 1.0, 4)
        ]
        explicit = parameters["explicit_flags"]
        assert {"optimizer", "crop_padding"} <= set(explicit)
        assert not {"momentum", "rand_crop_scale", "amp", "scale_loss"} & set(explicit)


@pytest.mark.soak
@pytest.mark.parametrize("kernels", ["paddle", "native"])
def test_mobilenet_v2_trains_resumes_evaluates_and_exports(run_train, photos, tmp_path, capsys, kernels):
    layout = ["--data-layout", "NHWC"] if kernels == "native" else []
    flags = ["--model-arch-name", "TinyMobile", *layout, "--kernels", kernels, "--lr", "0.01"]
    code, report = run_train(*flags, "--epochs", "2", "--print-interval", "1")
    assert code == 0
    expected = losses(report)
    output = capsys.readouterr().out
    for fused in ("10 native_bn_act", "3 native_depthwise_conv", "3 native_depthwise_conv_backward"):
        assert (f", {fused}, " in output) == (kernels == "native")
    shutil.rmtree(tmp_path / "output/TinyMobile/1")
    code, report = run_train(*flags, "--epochs", "2", "--print-interval", "1", "--resume")
    assert code == 0
    actual = losses(report)
    assert actual == {step: loss for step, loss in expected.items() if step in actual}
    assert (1, "val") in actual
    checkpoint = tmp_path / "output/TinyMobile/1"
    code, report = run_train(
        "--run-scope", "eval_only", "--from-checkpoint", checkpoint, "--model-arch-name", "TinyMobile"
    )
    assert code == 0
    assert phase(report, [], "val.")["loss"] == pytest.approx(actual[1, "val"], rel=1e-4)
    has_onnx = importlib.util.find_spec("onnxruntime") is not None
    export.export(checkpoint, tmp_path / "exported", onnx=has_onnx, verify=photos)
