"""Settings that a run inherits from the meta.json of its start checkpoint, and settings that are derived from the
data."""

import json
import shutil
from types import SimpleNamespace

import pytest

from conftest import TINY, assert_one_error, phase
from paddle_resnet import config, dali, export, resolution
from paddle_resnet.checkpoints import contents, folders, foreign_files, restore
from paddle_resnet.job import exchange
from paddle_resnet.tools import convert
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("one_block")

PREPROCESSING = ["--interp", "cubic", "--resize-short", "40", "--normalize-mean", "0.5,0.4,0.3"]
RESULTS = ("loss", "top1", "top5", "images")


@pytest.fixture
def preprocessed(once, run_train, tmp_path):
    """Return a copy of a checkpoint that was trained with PREPROCESSING."""

    def make(folder):
        assert run_train(*PREPROCESSING, "--output-dir", folder)[0] == 0

    return shutil.copytree(once("preprocessed", make) / "Tiny/0", tmp_path / "output/Tiny/0")


def evaluation(report):
    return {name: phase(report, [], "val.")[name] for name in RESULTS}


def recorded(folder):
    return {name: contents.verify(folder)["evaluated"][name] for name in RESULTS}


def rewrite(folder, change, root):
    """Copy a checkpoint, apply `change` to its meta.json, and return the new folder."""
    meta = contents.verify(folder)
    files = {name: lambda f, name=name: f.write((folder / name).read_bytes()) for name in meta["files"]}
    change(meta)
    return folders.commit(root, folder.name, files, {k: v for k, v in meta.items() if k not in ("format", "files")})


def test_resume_rejects_default_network_next_to_other_run(checkpoint, run_bare, tmp_path, capsys):
    (tmp_path / "bare/Tiny").mkdir(parents=True)
    for root in (tmp_path / "bare", tmp_path / "missing"):  # without other runs, the run starts from scratch
        restore._check_default_network(root / "ResNet50")
    checkpoint.rename(tmp_path / "bare/Tiny/0")
    assert run_bare("--resume")[0] == 2
    problem = f"{tmp_path}/bare/ResNet50 contains no checkpoint, but {tmp_path}/bare contains runs of Tiny; set "
    assert_one_error(capsys.readouterr().err, [f"--resume: {problem}", "set --model-arch-name to the network to train"])
    assert run_bare("--resume", "--model-arch-name", "Tiny")[0] == 0


@pytest.mark.parametrize(
    "flag", ["--from-checkpoint", pytest.param("--from-pretrained-params", marks=pytest.mark.slow)]
)
def test_evaluation_inherits_flags_of_training_run(run_bare, preprocessed, capsys, flag):
    folder = preprocessed
    capsys.readouterr()
    code, report = run_bare("--run-scope", "eval_only", flag, folder)
    assert code == 0
    assert evaluation(report) == recorded(folder)
    output = capsys.readouterr()
    [line] = [line for line in output.out.splitlines() if line.startswith(f"from {folder}/meta.json: ")]
    for flag_and_value in (
        "--model-arch-name Tiny",
        "--num-of-class 3",
        "--crop-size 32",
        "--interp cubic",
        "--resize-short 40",
    ):
        assert flag_and_value in line
    assert "trained with different flags" not in output.err

    code, report = run_bare("--run-scope", "eval_only", flag, folder, "--interp", "triangular", "--num-of-class", "3")
    assert code == 0
    assert evaluation(report)["loss"] != recorded(folder)["loss"]
    warning = f"warning: {folder}: trained with different flags: --interp triangular (was cubic); remove the flags"
    assert warning in capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_inherits_preprocessing(run_bare, preprocessed, tmp_path, capsys):
    folder = preprocessed
    capsys.readouterr()
    assert run_bare("--from-pretrained-params", folder, "--normalize-mean", "0,0,0")[0] == 0
    arguments = contents.verify(tmp_path / "bare/Tiny/0")["arguments"]
    expected = {"interp": "cubic", "resize_short": 40, "crop_size": 32, "image_shape": [3, 32, 32], "lr": 0.01}
    assert expected.items() <= arguments.items()
    output = capsys.readouterr()
    assert "--crop-size 32, --resize-short 40, --interp cubic" in output.out
    assert (
        f"{folder}: trained with different flags: --normalize-mean 0.0,0.0,0.0 (was 0.5,0.4,0.3); remove" in output.err
    )


@pytest.mark.slow
def test_rectangular_images_are_inherited(run_train, run_bare, tmp_path):
    assert run_train("--image-shape", "3,32,48")[0] == 0
    folder = tmp_path / "output/Tiny/0"
    code, report = run_bare("--run-scope", "eval_only", "--from-checkpoint", folder)
    assert code == 0
    assert evaluation(report) == recorded(folder)
    assert run_bare("--from-pretrained-params", folder)[0] == 0
    assert run_bare("--resume", "--epochs", "2", "--model-arch-name", "Tiny")[0] == 0
    for epoch in (0, 1):
        arguments = contents.verify(tmp_path / f"bare/Tiny/{epoch}")["arguments"]
        assert {"image_shape": [3, 32, 48], "crop_size": 32, "resize_short": 36}.items() <= arguments.items()


@pytest.mark.parametrize("scope", ["eval_only", "train_eval"])
def test_different_crop_size_keeps_channels_of_checkpoint(checkpoint, scope):
    """A new run on a GPU with NHWC would use four channels by default."""
    flags = ["--run-scope", scope, "--from-pretrained-params", checkpoint, "--crop-size", "64", "--device", "gpu"]
    args = config.parse_args([*map(str, flags), "--data-layout", "NHWC"])
    restore.inherit_flags(args, None)
    args.apply(resolution.Loader)
    assert args.image_shape == [3, 64, 64]
    args = config.parse_args([*map(str, flags[:4])])
    args.choose("test", crop_size=64, resize_short=80)
    restore.inherit_flags(args, None)
    # Training keeps the choices of --choose-recipe.
    assert (args.crop_size, args.resize_short) == ((64, 80) if scope == "train_eval" else (32, 36))


def test_checkpoint_without_meta_json_has_four_channels(checkpoint, tmp_path):
    """NVIDIA's example writes no meta.json, and its networks have four input channels."""
    shutil.copy(checkpoint / "tiny.pdparams", tmp_path)
    start = ["--from-pretrained-params", tmp_path, "--model-prefix", "tiny", "--model-arch-name", "Tiny"]
    for flags, shape in (([], [4, 64, 64]), (["--image-shape", "3,64,64"], [3, 64, 64])):
        args = config.parse_args([*map(str, start), "--crop-size", "64", *flags])
        restore.inherit_flags(args, None)
        assert args.image_shape == shape
    args = config.parse_args([*map(str, start[:4]), "--resume"])
    args.apply(restore.Network)
    assert args.model_arch_name == "ResNet50"


def test_evaluation_rejects_skip_classifier(run_bare, checkpoint, capsys):
    flags = ["--pretrained-mismatch", "skip-classifier", "--num-of-class", "12"]
    assert run_bare("--run-scope", "eval_only", "--from-pretrained-params", checkpoint, *flags)[0] == 2
    assert_one_error(capsys.readouterr().err, ["skip-classifier: leaves the classifier untrained"])


def test_checkpoint_without_interp_is_evaluated_with_linear_filter(run_bare, checkpoint, tmp_path):
    folder = checkpoint  # was trained with --interp linear
    old = rewrite(folder, lambda meta: meta["arguments"].pop("interp"), tmp_path / "old")
    code, report = run_bare("--run-scope", "eval_only", "--from-checkpoint", old)
    assert code == 0
    assert evaluation(report) == recorded(folder)


def test_incompatible_image_sizes_are_rejected(run_bare, checkpoint, capsys):
    assert (
        run_bare(
            "--run-scope", "eval_only", "--from-checkpoint", checkpoint, "--crop-size", "64", "--resize-short", "36"
        )[0]
        == 2
    )
    assert_one_error(capsys.readouterr().err, ["--resize-short 36: smaller than --crop-size 64"])


@pytest.mark.parametrize(
    "change", [{"model_arch_name": "../elsewhere"}, {"normalize_std": [0, 1]}, {"crop_size": 0}, {"image_shape": [3]}]
)
@pytest.mark.parametrize("flags", [["--run-scope", "eval_only", "--from-checkpoint"], ["--from-pretrained-params"]])
def test_invalid_flags_in_checkpoint_are_rejected(run_bare, checkpoint, tmp_path, capsys, change, flags):
    changed = rewrite(checkpoint, lambda meta: meta["arguments"].update(change), tmp_path / "changed")
    assert run_bare(*flags, changed, "--dry-run")[0] == 2
    assert_one_error(capsys.readouterr().err, [f"--{next(iter(change)).replace('_', '-')}"])


def without(flag):
    place = TINY.index(flag)
    return TINY[:place] + TINY[place + 2 :]


def test_default_model_prefix_contains_network(run_bare, tmp_path):
    flags = [*without("--model-prefix"), "--epochs", "1"]
    assert run_bare(*flags)[0] == 0
    assert contents.verify(tmp_path / "bare/Tiny/0")["files"].keys() == {"tiny_paddle.pdparams", "tiny_paddle.pdopt"}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["resume", "checkpoint", "without meta.json"])
def test_checkpoint_with_old_default_prefix_is_continued(run_train, run_bare, tmp_path, start):
    """NVIDIA's example writes no meta.json and uses the same file name for every network."""
    assert run_train("--model-prefix", "resnet_50_paddle", "--output-dir", tmp_path / "bare")[0] == 0
    folder = tmp_path / "bare/Tiny"
    flags = [*without("--model-prefix"), "--epochs", "2"]
    if start == "resume":
        flags += ["--resume"]
    else:
        flags += ["--from-checkpoint", folder, "--last-epoch-of-checkpoint", "auto"]
    if start == "without meta.json":
        (folder / "0/meta.json").unlink()
    assert run_bare(*flags)[0] == 0
    prefix = "tiny_paddle" if start == "without meta.json" else "resnet_50_paddle"
    assert contents.verify(folder / "1")["files"].keys() == {f"{prefix}.pdparams", f"{prefix}.pdopt"}


def test_resume_inherits_preprocessing(run_train, run_bare, tmp_path):
    assert run_train("--interp", "cubic", "--output-dir", tmp_path / "bare")[0] == 0
    flags = [*without("--interp"), "--epochs", "2", "--resume"]
    assert run_bare(*flags)[0] == 0
    assert contents.verify(tmp_path / "bare/Tiny/1")["arguments"]["interp"] == "cubic"


@pytest.mark.slow
@pytest.mark.parametrize("start", ["--from-pretrained-params", "--from-checkpoint"])
def test_resume_finds_run_that_inherited_its_network(run_bare, checkpoint, tmp_path, start):
    """The run folder is named after the network, but the command does not specify the network."""
    flags = [start, checkpoint, "--crop-size", "32", "--resize-short", "36", "--resume"]
    assert run_bare(*flags)[0] == 0
    meta = contents.verify(tmp_path / "bare/Tiny/0")
    assert run_bare(*flags, "--epochs", "2")[0] == 0
    assert contents.verify(tmp_path / "bare/Tiny/0") == meta
    assert contents.verify(tmp_path / "bare/Tiny/1")["run"] == meta["run"]


def output_count(folder):
    return contents.verify(folder)["arguments"]["num_of_class"]


@pytest.fixture
def four_classes(photos, tmp_path):
    root = tmp_path / "four"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        shutil.copytree(root / split / "class2", root / split / "class3")
    return root


def test_fine_tuning_accepts_different_number_of_classes(run_bare, checkpoint, four_classes, tmp_path, capsys):
    flags = ["--from-pretrained-params", checkpoint, "--crop-size", "32", "--resize-short", "36"]
    assert run_bare(*flags, image_root=four_classes)[0] == 2
    message = ["has 3 classes, but this run has 4; add --pretrained-mismatch skip-classifier", "--num-of-class 3"]
    assert_one_error(capsys.readouterr().err, message)
    assert run_bare(*flags, "--pretrained-mismatch", "skip-classifier", image_root=four_classes)[0] == 0
    assert output_count(tmp_path / "bare/Tiny/0") == 4
    assert "trained on different classes" not in capsys.readouterr().err


def test_different_class_names_trigger_warning(run_bare, checkpoint, photos, tmp_path, capsys):
    root = tmp_path / "renamed"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        (root / split / "class1").rename(root / split / "cats")
    flags = ["--from-pretrained-params", checkpoint, "--crop-size", "32", "--resize-short", "36", "--dry-run"]
    assert run_bare(*flags, image_root=root)[0] == 0
    assert (
        "trained on different classes (label 0 was class0 and is cats); check --image-root" in capsys.readouterr().err
    )
    for before, now in ((None, "ab"), (["a", "b"], ""), (["a", "b"], "ab")):
        restore.compare_classes("DIR", {"classes": before}, SimpleNamespace(classes=now), False)
    assert not capsys.readouterr().err
    restore.compare_classes("DIR", {"classes": ["a"]}, SimpleNamespace(classes="ab"), False)
    assert "DIR: trained on different classes (label 1 was unused and is b)" in capsys.readouterr().err


@pytest.mark.slow
def test_error_counts_or_lists_mismatched_parameters(run_bare, checkpoint, capsys):
    flags = ["--from-checkpoint", checkpoint, "--model-arch-name", "ResNet18", "--run-scope", "eval_only"]
    assert run_bare(*flags)[0] == 2
    stderr = capsys.readouterr().err
    assert "trained with different flags: --model-arch-name ResNet18 (was Tiny)" in stderr
    assert_one_error(stderr, ["does not match the model (", " missing, ", "use the --model-arch-name", "--verbose"])
    assert "conv2d_" not in stderr
    assert run_bare(*flags, "--verbose")[0] == 2
    message, *lists = capsys.readouterr().err.partition("train.py: error: ")[2].splitlines()
    assert "conv2d_" not in message
    assert [line.split(": ")[0] for line in lists] == ["missing", "with a different shape"]
    assert "conv2d_19.w_0" in lists[0]


@pytest.mark.parametrize("data_format", ["folder", "filelist", "recordio", "unnamed", "synthetic"])
def test_number_of_classes_comes_from_data(parse, converted, tmp_path, data_format):
    root, flags = converted.get(data_format), []
    if data_format == "unnamed":
        root = tmp_path / "unnamed"
        convert.convert(converted["folder"], root, "recordio")
        (root / "classes.txt").unlink()
    elif data_format == "synthetic":
        root, flags = "/nowhere", ["--data-format", "synthetic"]
    args = parse("--image-root", root, *flags)
    args.num_of_class = None
    args.apply(resolution.Classes, Mode.EVAL)
    assert args.num_of_class == (1000 if data_format in ("unnamed", "synthetic") else 3)
    assert len(dali.build_dataloader(args, Mode.EVAL).classes) == args.num_of_class


def test_all_ranks_use_number_of_classes_of_rank_0(parse, photos, as_rank):
    """Fleet's startup program broadcasts the parameters, so all ranks must have parameters of the same shape."""
    args = parse("--image-root", photos)
    args.num_of_class = None
    as_rank(0)
    exchange.from_rank_0(lambda: 7)
    as_rank(1)
    args.apply(resolution.Classes, Mode.TRAIN)
    assert args.num_of_class == 7


def test_training_counts_classes_and_warns_about_unused_outputs(run_bare, four_classes, tmp_path, capsys):
    flags = [*without("--num-of-class"), "--epochs", "1"]
    assert run_bare(*flags, image_root=four_classes)[0] == 0
    assert output_count(tmp_path / "bare/Tiny/0") == 4
    assert "--num-of-class" not in capsys.readouterr().err
    assert run_bare(*flags, "--dry-run", "--overwrite", "--num-of-class", "5", image_root=four_classes)[0] == 0
    assert "--num-of-class 5: exceeds the 4 classes in " in capsys.readouterr().err
    assert run_bare(*flags, "--dry-run", "--overwrite", "--num-of-class", "3", image_root=four_classes)[0] == 2
    assert_one_error(capsys.readouterr().err, ["--num-of-class 3: fewer than the 4 class folders"])


def test_flags_are_printed_after_checks(run_bare, capsys):
    """By default, only flags that differ from their defaults are printed. With --show-config, all flags are printed."""
    flags = [*without("--show-config"), "--dry-run"]
    assert run_bare(*flags, "--from-checkpoint", "nowhere")[0] == 2
    assert "model_arch_name" not in capsys.readouterr().out
    assert run_bare(*flags)[0] == 0
    out = capsys.readouterr().out
    assert "model_arch_name: Tiny  # command line\n" in out and "optimizer:" not in out
    assert run_bare(*flags, "--show-config")[0] == 0
    assert "optimizer: Momentum  # default\n" in capsys.readouterr().out


def test_export_reports_outputs_and_class_names(run_train, photos, tmp_path, capsys):
    assert run_train("--num-of-class", "7")[0] == 0
    capsys.readouterr()
    files = ["--safetensors", "--triton"]
    assert export.main([str(tmp_path / "output/Tiny/0"), str(tmp_path / "exported"), *files]) == 0
    assert "Tiny, 7 classes, 3 with names, images [None, 3, 32, 32]" in capsys.readouterr().out
    assert foreign_files.read(tmp_path / "exported/model.safetensors")["classifier.bias"].shape == (7,)
    assert "NumPy (`model.safetensors`, float32):" in (tmp_path / "exported/README.md").read_text()
    config = (tmp_path / "exported/triton/tiny_paddle/config.pbtxt").read_text()
    assert 'name: "probabilities" data_type: TYPE_FP32 dims: [7]' in config
    assert json.loads((tmp_path / "exported/model.json").read_text())["output"]["shape"] == [None, 7]
