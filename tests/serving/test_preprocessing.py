import ast
import copy
import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT
from paddle_resnet import dali, export
from paddle_resnet.data import loader as loader_module
from paddle_resnet.serving import inference, networks, preprocessing
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

ORIENTATION = 0x112  # EXIF orientation tag
PHOTO = (101, 142)  # height and width that lead to odd crop margins


def photo(height, width):
    """Create an image of noisy color blocks. Their sharp edges reveal the resize filter, and the noise ensures that no
    area is uniform."""
    random = np.random.RandomState(0)
    blocks = random.randint(0, 200, (height // 7 + 1, width // 9 + 1, 3)).repeat(7, axis=0).repeat(9, axis=1)
    return Image.fromarray((blocks[:height, :width] + random.randint(0, 56, (height, width, 3))).astype(np.uint8))


def description(resize_short, crop, interp):
    return {"resize_short": resize_short, "center_crop": crop, "interp": interp}


def oriented(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return {"exif": exif}


def with_alpha(image):
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def sixteen_bits(image):
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 256 + 131)


VARIANTS = {
    "JPEG": ("jpg", lambda image: image, {}),
    "progressive": ("jpg", lambda image: image, {"progressive": True, "quality": 50}),
    "gray": ("jpg", lambda image: image.convert("L"), {}),
    "CMYK": ("jpg", lambda image: image.convert("CMYK"), {}),
    **{f"EXIF {i}": ("jpg", lambda image: image, oriented(i)) for i in range(1, 9)},
    "PNG with EXIF": ("png", lambda image: image, oriented(6)),
    "alpha": ("png", with_alpha, {}),
    "gray with alpha": ("png", lambda image: with_alpha(image.convert("L")), {}),
    "palette": ("png", lambda image: image.convert("P"), {}),
    "two levels": ("png", lambda image: image.convert("1"), {}),
    "16 bits": ("png", sixteen_bits, {}),
    "BMP": ("bmp", lambda image: image, {}),
    "TIFF": ("tif", lambda image: image, {}),
    "gray TIFF with EXIF": ("tif", lambda image: image.convert("L"), oriented(6)),
    "16-bit TIFF with EXIF": ("tif", sixteen_bits, oriented(8)),
    "WebP": ("webp", lambda image: image, {}),
}


@pytest.fixture
def evaluated(parse, tmp_path):
    """Return a function that decodes image files with the evaluation pipeline and returns uint8 pixels [N, H, W, 3]."""

    def evaluated(resize_short, crop, interp):
        identity = ["--normalize-scale", "1", "--normalize-mean", "0,0,0", "--normalize-std", "1,1,1"]
        height, width = crop if isinstance(crop, list) else (crop, crop)
        shape = ["--image-shape", f"3,{height},{width}", "--crop-size", min(height, width)]
        shape += ["--resize-short", resize_short]
        args = parse("--image-root", tmp_path, *identity, *shape, "--interp", interp, "--data-layout", "NHWC")
        return np.concatenate([np.array(batch["data"]) for (batch,) in dali.build_dataloader(args, Mode.EVAL)])

    (tmp_path / "val/class").mkdir(parents=True)
    return evaluated


SIZES = [(256, 224), (36, 32), (110, 97), (64, 64), (37, [32, 48]), (256, [320, 224]), (64, [64, 99])]


@pytest.mark.parametrize(
    ("interp", "resize_short", "crop"),
    [  # every other combination, which includes each filter and each size
        pytest.param(interp, *size, marks=[pytest.mark.soak] * ((i + j) % 2))
        for i, interp in enumerate(loader_module.INTERPOLATION)
        for j, size in enumerate(SIZES)
    ],
)
def test_pixels_match_evaluation_pipeline(evaluated, tmp_path, interp, resize_short, crop):
    sizes = [(101, 142), (300, 401), (257, 375), (311, 256), (33, 47), (640, 480)]
    for i, size in enumerate(sizes):
        photo(*size).save(tmp_path / f"val/class/{i}.bmp")  # quicker to write than a PNG file
    for i, expected in enumerate(evaluated(resize_short, crop, interp)):
        actual = preprocessing.pixels(tmp_path / f"val/class/{i}.bmp", description(resize_short, crop, interp))
        assert actual.shape == expected.shape == (*preprocessing.sides(description(resize_short, crop, interp)), 3)
        assert np.abs(actual - expected).max() <= 1, sizes[i]
        assert np.mean(actual != expected) < 0.15, sizes[i]


def test_filters_match_interp_flag():
    assert list(preprocessing.FILTERS) == list(loader_module.INTERPOLATION)


@pytest.mark.parametrize(("suffix", "change", "options"), VARIANTS.values(), ids=VARIANTS)
def test_pixels_of_unusual_images_match_evaluation_pipeline(evaluated, tmp_path, suffix, change, options):
    path = tmp_path / f"val/class/0.{suffix}"
    change(photo(*PHOTO)).save(path, **options)
    (expected,) = evaluated(60, 48, "triangular")
    assert np.abs(preprocessing.pixels(path, description(60, 48, "triangular")) - expected).max() <= 1
    model = {"input": {"dtype": "uint8", "layout": "NHWC"}, "preprocessing": description(60, 48, "triangular")}
    assert np.abs(preprocessing._checked_input(path, model)[0] - expected).max() <= 1


def test_16_bit_levels_are_scaled_to_8_bits():
    levels = np.random.RandomState(0).randint(0, 65536, (8, 8)).astype(np.uint16)
    levels[0, :2] = 0, 65535
    pixels = preprocessing.pixels(Image.fromarray(levels), description(8, 8, "linear"))
    np.testing.assert_array_equal(pixels, np.rint(levels[..., None] * (255 / 65535)).repeat(3, axis=2))


@pytest.mark.parametrize(
    ("values", "kind"), [([0, 65536], np.int32), ([-1, 65535], np.int32), ([0, 1], np.float32), ([0, 65535], np.int32)]
)
def test_images_with_more_than_16_bits_are_not_clipped(values, kind):
    picture = Image.fromarray(np.array([values], kind))
    if values == [0, 65535]:
        assert preprocessing.upright_rgb(picture).tolist() == [[[0] * 3, [255] * 3]]
    else:
        with pytest.raises(ValueError, match="outside 0 to 65535|floating-point"):
            preprocessing.upright_rgb(picture)


def test_normalized_images_match_evaluation_pipeline(parse, photos):
    args = parse("--image-root", photos, "--batch-size", "23", "--interp", "cubic")
    ((batch,),) = list(dali.build_dataloader(args, Mode.EVAL))
    normalization = {"scale": args.normalize_scale, "mean": args.normalize_mean, "std": args.normalize_std}
    paths = sorted((photos / "val").glob("*/*.jpg"))
    level = args.normalize_scale / min(args.normalize_std)
    for path, expected in zip(paths, np.array(batch["data"]), strict=True):
        actual = preprocessing.preprocess(path, description(36, 32, "cubic") | normalization)
        assert actual.dtype == np.float32
        assert np.abs(actual - expected).max() <= level + 1e-5


def test_module_imports_only_pil_and_numpy():
    tree = ast.parse((ROOT / "paddle_resnet/serving/preprocessing.py").read_text())
    top_level = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top_level if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in top_level if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names == {"numpy", "PIL"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_loader_flags_follow_description(dtype):
    shape, layout = ([None, 32, 48, 3], "NHWC") if dtype == "uint8" else ([None, 3, 32, 48], "NCHW")
    normalization = {"scale": 0.5, "mean": [1, 2, 3], "std": [4, 5, 6]}
    recorded = {"resize_short": 36, "center_crop": [32, 48], "interp": "cubic", **normalization}
    description = {"preprocessing": recorded, "input": {"dtype": dtype, "layout": layout, "shape": shape}}
    args = inference.loader_args(description, 7, threads=3)
    assert (args.image_shape, args.crop_size, args.resize_short, args.interp) == ([3, 32, 48], 32, 36, "cubic")
    assert (args.batch_size, args.dali_num_threads, args.device, args.data_layout) == (7, 3, "cpu", layout)
    assert args.dali_output_fp16 == (dtype == "float16")
    expected = (1, [0] * 3, [1] * 3) if dtype == "uint8" else tuple(normalization.values())
    assert (args.normalize_scale, args.normalize_mean, args.normalize_std) == expected


@pytest.mark.usefixtures("one_block")
def test_path_of_model_json_may_be_str_or_path(checkpoint, tmp_path):
    description = networks.load_checkpoint(checkpoint).description
    path = tmp_path / "model.json"
    path.write_text(json.dumps(description))
    assert preprocessing.read_model(str(path)) == preprocessing.read_model(path) == json.loads(path.read_text())
    with pytest.raises(ValueError, match="none: cannot be read"):
        preprocessing.read_model("none")


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("uint8", [False, True], ids=["float32", "uint8"])
def test_every_field_of_description_is_checked(checkpoint, tmp_path, uint8):
    description = networks.load_checkpoint(checkpoint, uint8=uint8).description
    assert preprocessing.problem(description) is None
    hostile = [None, True, -1, 0, 10**400, float("nan"), "object", "x" * 10**5, [], [[]], [None] * 4, {}, [10**400] * 3]
    for path in preprocessing.SCHEMA:
        *table, name = path.split(".")
        for value in [*hostile, "missing"]:
            changed = copy.deepcopy(description)
            parent = changed[table[0]] if table else changed
            if value == parent[name] or (value == "missing" and path == "input.name"):
                continue
            parent[name] = value
            if value == "missing":
                del parent[name]
            problem = preprocessing.problem(changed)
            is_free = (path == "input.name" and isinstance(value, str)) or (path == "classes" and value == [])
            assert problem is None if is_free else problem.startswith(path) and len(problem) < 300, (path, value)
    for crop, message in (
        ([32], "preprocessing.center_crop is [32]"),
        ([32, 0], "preprocessing.center_crop is [32, 0]"),
        ([32, 48], f"input.shape is {description['input']['shape']} in "),
    ):
        changed = copy.deepcopy(description)
        changed["preprocessing"]["center_crop"] = crop
        assert preprocessing.problem(changed).startswith(message)
    changed = copy.deepcopy(description)
    changed["preprocessing"]["std"] = [1.0, 0, 1.0]
    assert preprocessing.problem(changed) == "preprocessing.std is [1.0, 0, 1.0]"
    changed = copy.deepcopy(description)
    for side, message in ((32, None), (31, "preprocessing.resize_short is less than center_crop 32")):
        changed["preprocessing"] |= {"center_crop": 32, "resize_short": side}
        assert preprocessing.problem(changed) == message
    changed["preprocessing"] |= {"center_crop": [1, 3], "resize_short": 4000}
    changed["input"]["shape"] = [None, 1, 3, 3] if uint8 else [None, 3, 1, 3]
    assert preprocessing.problem(changed) == "preprocessing.resize_short is too large for center_crop [1, 3]"
    changed["preprocessing"] |= {"center_crop": [1, 2], "resize_short": preprocessing.MAX_SIDE // 2}
    changed["input"]["shape"] = [None, 1, 2, 3] if uint8 else [None, 3, 1, 2]
    assert preprocessing.problem(changed) is None
    for thresholds in ([0, 1, 0.5], [0, 1], [0, 1, 0.5, 0.5]):
        problem = preprocessing.problem(changed | {"multi_label": {"thresholds": thresholds}})
        assert problem == (None if len(thresholds) == 3 else f"multi_label.thresholds is {thresholds}")
    changed["output"]["shape"] = [None, None]
    assert preprocessing.problem(changed) == "classes has 3 names, and output.shape is [None, None]"
    for other in ([], None, {"preprocessing": 1}):
        assert preprocessing.problem(other) == "preprocessing.resize_short is missing"
    inconsistent = [json.dumps(description | change) for change in ({"classes": ["a"] * 4}, {"precision": "int4"})]
    for text in ("[" * 100000, "{", "[]", *inconsistent, b"\xff"):
        with pytest.raises(UsageError, match="^model.json: not a valid description of a network "):
            inference._checked_description(text, "model.json")


def test_script_prints_predictions_of_onnxruntime(tmp_path, monkeypatch, capsys):
    class Options(dict):
        add_session_config_entry = dict.__setitem__

    def session(path, options, providers):
        assert providers == ["CPUExecutionProvider"]  # onnxruntime 1.16 requires the providers
        assert (path, options) == (tmp_path / "model.onnx", {"session.x64quantprecision": "1"})
        return SimpleNamespace(run=run)

    def run(names, inputs):
        assert names is None and inputs["pixels"].shape == (1, 2, 3, 3)
        return [np.array([[0.25, 0.5, 0.0, 0.125, 0.125, 0.0]], np.float32)]

    def broken(path, options, providers):
        raise RuntimeError("not\na model")

    recorded = description(4, [2, 3], "cubic") | {"scale": 1, "mean": [0, 0, 0], "std": [1, 1, 1]}
    shapes = {"input": {"name": "pixels", "dtype": "uint8", "layout": "NHWC", "shape": [None, 2, 3, 3]}}
    shapes |= {"output": {"shape": [None, 6]}, "classes": ["a", "b\x1b"], "preprocessing": recorded}
    (tmp_path / "model.onnx").touch()
    Image.new("RGB", (9, 9), (0, 7, 9)).save(tmp_path / "x.png")
    monkeypatch.setattr(preprocessing, "__file__", str(tmp_path / "preprocess.py"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)  # the script uses the limit of training instead
    line = f"{tmp_path}/x.png: uint8 [1, 2, 3, 3], from 0 to 9\n"
    predictions = "  0.500000  b\\x1b\n  0.250000  a\n  0.125000  3\n  0.125000  4\n  0.000000  2\n"
    problem = f"{tmp_path}/model.onnx: cannot be used for predictions (not a model); export it again\n"
    # Each class has its own threshold, and a probability equal to the threshold is sufficient.
    several = {"multi_label": {"thresholds": [0.25, 0.51, 0.0, 0.2, 0.1, 0.01]}}
    above = "  0.250000  a\n  0.125000  4\n  0.000000  2\n"
    for labels, function, expected in (
        ({}, session, (line + predictions, "")),
        ({}, broken, (line, problem)),
        (several, session, (line + above, "")),
    ):
        (tmp_path / "model.json").write_text(json.dumps(shapes | labels))
        runtime = SimpleNamespace(SessionOptions=Options, InferenceSession=function)
        monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
        assert preprocessing.main([str(tmp_path / "x.png")]) == 0
        assert capsys.readouterr() == expected


def test_preprocess_script_reports_unusable_files(checkpoint, photos, tmp_path, capsys, monkeypatch):
    export.export(checkpoint, tmp_path / "exported")
    model = tmp_path / "exported/model.json"
    monkeypatch.setattr(preprocessing, "__file__", str(model.with_name("preprocess.py")))
    (image, *_) = sorted((photos / "val").glob("*/*.jpg"))
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "cut.jpg").write_bytes(image.read_bytes()[:500])
    (tmp_path / "device.jpg").symlink_to("/dev/null")
    monkeypatch.setattr(preprocessing, "MAX_PIXELS", 70 * 70)
    Image.new("1", (80, 80)).save(tmp_path / "large.png")
    Image.new("1", (70, 70)).save(tmp_path / "largest.png")
    bad = [
        str(photos),
        *(str(tmp_path / name) for name in ("text.jpg", "cut.jpg", "device.jpg", "large.png", "gone.jpg")),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30 * 30)
        assert preprocessing.main([*bad, str(image), str(tmp_path / "largest.png")]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{image}: float32 [1, 3, 32, 32], from -")
    assert [line.split(": cannot be used (")[0] for line in err.splitlines()] == bad
    assert "device.jpg: cannot be used (not a regular file)" in err
    assert "large.png: cannot be used (80 x 80 pixels, more than the limit of 4,900)" in err
    assert preprocessing.main([f"{tmp_path}/\x1b\n.jpg"]) == 1
    reason = "cannot be used (not a regular file); choose a different image"
    assert capsys.readouterr().err == f"{tmp_path}/\\x1b\\n.jpg: {reason}\n"
    assert preprocessing._reason(ValueError()) == "ValueError"
    assert preprocessing.main([]) == 2
    assert capsys.readouterr().err == "usage: python preprocess.py IMAGE...\n"
    size = model.stat().st_size
    monkeypatch.setattr(preprocessing, "MAX_JSON_BYTES", size)
    assert preprocessing.main([str(image)]) == 0
    capsys.readouterr()
    for damage, message in (
        (
            lambda: monkeypatch.setattr(preprocessing, "MAX_JSON_BYTES", size - 1),
            "not a regular file, or larger than",
        ),
        (
            lambda: monkeypatch.setattr(preprocessing, "MAX_JSON_BYTES", 2**24) or model.write_text("[" * 100000),
            "cannot be read (maximum recursion depth exceeded",
        ),
        (lambda: model.write_text('{"preprocessing": {"resize_short": 0}}'), "(preprocessing.resize_short is 0)"),
        (lambda: model.write_bytes(b"\xff"), "cannot be read ('utf-8' codec can't decode"),
        (model.unlink, "cannot be read (not a regular file, or larger than 16 MiB)"),
    ):
        damage()
        assert preprocessing.main([str(image)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"{model}: ") and message in err and err.count("\n") == 1


def test_preprocess_script_predicts_with_onnx_model(checkpoint, photos, tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    export.export(checkpoint, tmp_path / "exported", onnx=True, uint8=True)
    (image, *_) = sorted((photos / "val").glob("*/*.jpg"))
    command = [sys.executable, tmp_path / "exported/preprocess.py", image]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{image}: uint8 [1, 32, 32, 3], from ")
    assert len(lines) == 5 and lines[4].startswith("recorded top1 ")
    assert sum(float(line.split()[0]) for line in lines[1:4]) == pytest.approx(1, abs=1e-5)
    # The module prints the same result as its copy in the export. Without onnxruntime, the module prints only the shape
    # of the image.
    monkeypatch.setattr(preprocessing, "__file__", str(tmp_path / "exported/preprocess.py"))
    capsys.readouterr()
    preprocessing.main([str(image)])
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    preprocessing.main([str(image)])
    output = capsys.readouterr()
    assert output.out.splitlines() == [lines[0], lines[4]]
    assert output.err == "onnxruntime: cannot be imported; to print predictions, run `pip install onnxruntime`\n"
