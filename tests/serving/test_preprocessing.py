import ast
import sys

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT
from paddle_resnet import dali
from paddle_resnet.serving import preprocessing
from utils.mode import Mode

ORIENTATION = 0x112  # the EXIF tag
PHOTO = (101, 142)  # height and width: odd margins on both axes after the resizes below


def photo(height, width):
    """Blocks of colour under noise: sharp edges, and no plain areas where any filter would do."""
    random = np.random.RandomState(0)
    blocks = random.randint(0, 200, (height // 7 + 1, width // 9 + 1, 3)).repeat(7, axis=0).repeat(9, axis=1)
    return Image.fromarray((blocks[:height, :width] + random.randint(0, 56, (height, width, 3))).astype(np.uint8))


def told(resize_short, crop, interp):
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
    "WebP": ("webp", lambda image: image, {}),
}


@pytest.fixture
def evaluated(parse, tmp_path):
    """The evaluation pixels of image files, by the real pipeline: uint8 [N, H, W, 3]."""

    def evaluated(resize_short, crop, interp):
        identity = ["--normalize-scale", "1", "--normalize-mean", "0,0,0", "--normalize-std", "1,1,1"]
        height, width = crop if isinstance(crop, list) else (crop, crop)
        shape = ["--image-shape", f"3,{height},{width}", "--crop-size", min(height, width)]
        shape += ["--resize-short", resize_short]
        args = parse("--image-root", tmp_path, *identity, *shape, "--interp", interp, "--data-layout", "NHWC")
        return np.concatenate([np.array(batch["data"]) for (batch,) in dali.build_dataloader(args, Mode.EVAL)])

    (tmp_path / "val/class").mkdir(parents=True)
    return evaluated


@pytest.mark.parametrize("interp", dali.INTERPOLATION)
@pytest.mark.parametrize(
    ("resize_short", "crop"),
    [(256, 224), (36, 32), (110, 97), (64, 64), (37, [32, 48]), (256, [320, 224]), (64, [64, 99])],
)
def test_pixels_are_those_of_the_evaluation(evaluated, tmp_path, interp, resize_short, crop):
    sizes = [(101, 142), (300, 401), (257, 375), (311, 256), (33, 47), (640, 480)]
    for i, size in enumerate(sizes):
        photo(*size).save(tmp_path / f"val/class/{i}.png")
    for i, expected in enumerate(evaluated(resize_short, crop, interp)):
        found = preprocessing.pixels(tmp_path / f"val/class/{i}.png", told(resize_short, crop, interp))
        assert found.shape == expected.shape == (*preprocessing.sides(told(resize_short, crop, interp)), 3)
        assert np.abs(found - expected).max() <= 1, sizes[i]
        assert np.mean(found != expected) < 0.15, sizes[i]


def test_the_filters_are_those_of_the_flag():
    assert list(preprocessing.FILTERS) == list(dali.INTERPOLATION)


@pytest.mark.parametrize(("suffix", "change", "options"), VARIANTS.values(), ids=VARIANTS)
def test_pixels_of_other_kinds_of_images(evaluated, tmp_path, suffix, change, options):
    path = tmp_path / f"val/class/0.{suffix}"
    change(photo(*PHOTO)).save(path, **options)
    (expected,) = evaluated(60, 48, "triangular")
    assert np.abs(preprocessing.pixels(path, told(60, 48, "triangular")) - expected).max() <= 1


def test_normalised_images_are_those_of_the_evaluation(parse, photos):
    args = parse("--image-root", photos, "--batch-size", "23", "--interp", "cubic")
    ((batch,),) = list(dali.build_dataloader(args, Mode.EVAL))
    normalisation = {"scale": args.normalize_scale, "mean": args.normalize_mean, "std": args.normalize_std}
    paths = sorted((photos / "val").glob("*/*.jpg"))
    level = args.normalize_scale / min(args.normalize_std)
    for path, expected in zip(paths, np.array(batch["data"]), strict=True):
        found = preprocessing.preprocess(path, told(36, 32, "cubic") | normalisation)
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() <= level + 1e-5


def test_the_file_needs_only_pil_and_numpy():
    tree = ast.parse((ROOT / "paddle_resnet/serving/preprocessing.py").read_text())
    at_the_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in at_the_top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in at_the_top if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names == {"numpy", "PIL"}
