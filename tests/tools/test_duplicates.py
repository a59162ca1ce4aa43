import csv
import io
import json
import re
import shutil

import data_files
import multi_label_data
import numpy as np
import pytest
from PIL import Image

from layouts import put, write_tar
from paddle_resnet import dataset, predict
from paddle_resnet.data.root import DataRoot
from paddle_resnet.serving import features
from paddle_resnet.tools import duplicates, split
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


def picture(seed, size=(64, 48)):
    """Return an image of random low frequencies, so that images with different seeds have different hashes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def root(tmp_path):
    """Return a data set with four images per class and split. Validation images 0 to 2 of class a are also in train:
    the same file, the same pixels, and a smaller image with a different compression."""
    root = tmp_path / "set"
    for s, name in enumerate(("train", "val")):
        for c, label in enumerate("ab"):
            for i in range(4):
                save(root / name / label / f"{i}.png", picture(100 * s + 10 * c + i))
    shutil.copy(root / "train/b/0.png", root / "val/a/0.png")
    save(root / "val/a/1.bmp", Image.open(root / "train/a/1.png"))
    save(root / "val/a/2.jpg", Image.open(root / "train/a/2.png").resize((40, 30)), quality=60)
    for i in (1, 2):
        (root / f"val/a/{i}.png").unlink()
    return root


def found(report):
    return [(pair.kind, pair.val.rpartition("/")[2], pair.val_label, pair.train_label) for pair in report.pairs]


EXPECTED = [("same file", "0.png", 0, 1), ("same pixels", "1.bmp", 0, 0), ("similar", "2.jpg", 0, 0)]


@pytest.mark.parametrize("workers", [None, 2])
def test_exact_duplicates_come_first(root, workers):
    options = {"workers": workers, "per_worker": 4} if workers else {}
    report = duplicates.by_hash(duplicates.list_images(root), **options)
    assert found(report) == EXPECTED
    assert [pair.matches for pair in report.pairs] == [1, 1, 1]
    assert (report.images, report.unreadable) == ({"train": 8, "val": 8}, {})


@pytest.mark.slow
@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("data_format", data_files.FORMATS)
def test_all_record_formats_can_be_compared(root, tmp_path, data_format):
    data_files.write(root, tmp_path / data_format, data_format, 2)
    report = duplicates.by_hash(duplicates.list_images(tmp_path / data_format))
    assert [(pair.kind, pair.val_label, pair.train_label) for pair in report.pairs] == [
        (kind, *labels) for kind, _, *labels in EXPECTED
    ]


@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("others", [1, 6])
def test_the_same_file_comes_before_other_images_of_the_same_distance(root, tmp_path, capsys, others):
    """The hash of a gray image equals that of the colored image."""
    (root / "train/b/9.png").write_bytes((root / "train/a/3.png").read_bytes())
    gray = Image.open(root / "train/a/3.png").convert("L")
    for i in range(3, 3 + others):  # the order of records is random
        save(root / f"train/a/{i}.png", gray)
    for label in "ab":
        shutil.copy(root / "train/b/9.png", root / f"val/{label}/9.png")
    assert dataset.main(["duplicates", str(root)]) == 1
    printed = capsys.readouterr().out
    assert f"same file: val/a/9.png = train/b/9.png and {others} more (labels 0 and 1)\n" in printed
    assert f"same file: val/b/9.png = train/b/9.png and {others} more\n" in printed
    data_files.write(root, tmp_path / "records", "tfrecord", 2)
    report = duplicates.by_hash(duplicates.list_images(tmp_path / "records"))
    assert [pair.kind for pair in report.pairs if pair.matches == others + 1] == ["same file"] * 2


@pytest.mark.usefixtures("convert_here")
def test_labels_of_records_are_known_after_a_comparison_of_features(root, tmp_path):
    data_files.write(root, tmp_path / "records", "tfrecord", 2)

    def features_of(images):
        pictures = [Image.open(io.BytesIO(duplicates.read_image(image)[0])) for image in images]
        pixels = [np.asarray(each.convert("L").resize((8, 8)), np.float32).ravel() for each in pictures]
        yield [(image, None) for image in images], features.normalized(np.array(pixels) - 128)

    report = duplicates.by_features(duplicates.list_images(tmp_path / "records"), features_of, 0.9999)
    assert [(pair.kind, pair.val_label, pair.train_label) for pair in report.pairs[:2]] == [
        (kind, *labels) for kind, _, *labels in EXPECTED[:2]
    ]


def test_file_lists_can_be_compared(root, tmp_path, capsys):
    (tmp_path / "lists").mkdir()
    for name in ("train", "val"):
        paths = sorted((root / name).glob("*/*"))
        lines = [f"{path.relative_to(root)} {'ab'.index(path.parent.name)}\n" for path in paths]
        (root / f"{name}.txt").write_text("".join(lines))
        lines = [f"{path} {'ab'.index(path.parent.name) + 1}\n" for path in paths]
        (tmp_path / "lists" / f"{name}.txt").write_text("".join(lines))
    command = ["duplicates", str(tmp_path / "lists"), "--json"]
    assert dataset.main(command) == 2
    assert "--allow-outside" in capsys.readouterr().err
    assert dataset.main([*command, "--allow-outside", "--label-offset", "1"]) == 1
    pairs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(pair["kind"], pair["val_label"], pair["train_label"]) for pair in pairs] == [
        (kind, *labels) for kind, _, *labels in EXPECTED
    ]
    images = duplicates.list_images(root)
    assert found(duplicates.by_hash(images)) == EXPECTED
    (root / "val/b/3.png").unlink()
    assert duplicates.by_hash(images).unreadable == {"val/b/3.png": "cannot be read (No such file or directory)"}


def test_multi_label_data_sets_can_be_compared(tmp_path, capsys):
    multi_label_data.write(tmp_path)
    images = duplicates.list_images(tmp_path, is_multi_label=True)
    shutil.copy(images[Mode.TRAIN][1].path, images[Mode.EVAL][0].path)
    assert dataset.main(["duplicates", str(tmp_path), "--multi-label", "--distance", "0", "--json"]) == 1
    first, *_ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = images[Mode.EVAL][0].name, images[Mode.TRAIN][1].name
    assert (first["kind"], first["val"], first["train"], first["val_label"]) == ("same file", *names, None)


def test_hash_does_not_depend_on_size_compression_brightness_and_orientation():
    image = picture(0, (200, 150))
    expected = duplicates.perceptual_hash(image)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by 90 degrees
    variants = [(image, {"quality": 40}), (image.resize((80, 60)), {}), (image.point(lambda v: 0.8 * v), {})]
    variants += [(image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}), (image.convert("L"), {})]
    for variant, options in variants:
        file = io.BytesIO()
        variant.save(file, "jpeg", **options)
        assert (duplicates.perceptual_hash(Image.open(file)) ^ expected).bit_count() <= 4
    assert (duplicates.perceptual_hash(picture(1, (200, 150))) ^ expected).bit_count() > duplicates.MAX_DISTANCE


def test_rounding_errors_do_not_change_the_hash():
    """All frequencies except the mean are 0 in an image of a single color."""
    blank = {duplicates.perceptual_hash(Image.new("L", (40, 30), level)) for level in (1, 7, 128, 254, 255)}
    assert len(blank) == 1


@pytest.mark.parametrize("distance", [0, 3, 4, 7, duplicates.MAX_DISTANCE])
def test_search_finds_the_same_pairs_as_a_comparison_of_all(distance):
    random = np.random.default_rng(0)
    bases = random.integers(0, 2**63, 40, np.uint64)

    def near(count):
        flips = [sum(1 << int(bit) for bit in random.choice(64, random.integers(0, 9), False)) for _ in range(count)]
        return bases[random.integers(0, len(bases), count)] ^ np.array(flips, np.uint64)

    queries, references = near(110), near(150)
    differing_bits = queries[:, None] ^ references
    all_pairs = np.unpackbits(differing_bits[..., None].view(np.uint8), axis=2).sum(axis=2, dtype=int)
    pairs = [
        pair
        for arrays in duplicates.neighbors(queries, references, distance, block=60)
        for pair in zip(*arrays, strict=True)
    ]
    rows, columns = np.nonzero(all_pairs <= distance)
    assert sorted(map(tuple, np.array(pairs).tolist())) == sorted(
        zip(rows.tolist(), columns.tolist(), all_pairs[rows, columns].tolist(), strict=True)
    )
    closest = duplicates.closest_hashes(queries, references, distance, block=60)
    assert [i for i, *_ in closest] == np.flatnonzero((all_pairs <= distance).any(axis=1)).tolist()
    for i, k, differing, matches in closest:
        assert (all_pairs[i, k], differing) == (all_pairs[i].min(), all_pairs[i].min())
        assert matches == (all_pairs[i] <= distance).sum()


def test_groups_are_connected_by_chains():
    assert duplicates.groups([0, 0b111111, 1 << 63, 0b1111111111, 0, 1 << 63 | 0xFFFF << 40], 6) in (
        [0, 0, 0, 0, 0, 5],
        [0, 0, 0, 0, 0, 4],
    )
    assert duplicates.groups([], 6) == []
    # The first two differ by 12 bits, and the last one differs from each of them by 6 bits.
    assert len({*duplicates.groups([0b111111, 0b111111 << 6, 0xFFF], 6)}) == 1


def test_command_prints_pairs_and_writes_lists(root, tmp_path, capsys):
    (root / "val/a/2.jpg").rename(root / "val/a/2\n.jpg")
    table, fix_list = tmp_path / "pairs.csv", tmp_path / "skip.txt"
    assert dataset.main(["duplicates", str(root), "--csv", str(table), "--fix-list", str(fix_list)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "same file: val/a/0.png = train/b/0.png (labels 0 and 1)"
    assert out[1] == "same pixels: val/a/1.bmp = train/a/1.png"
    assert out[2].startswith("similar ") and out[2].endswith(": val/a/2\\n.jpg = train/a/2.png")
    assert out[3:] == [
        "3 of 8 validation images have a duplicate among 8 training images: 1 same file, 1 same pixels, 1 similar"
    ]
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0].values()] == ["same file", "0", "val/a/0.png", "0", "train/b/0.png", "1", "1"]
    assert dataset.main(["duplicates", str(root), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{name: str(value) for name, value in line.items()} for line in lines] == rows
    assert dataset.main(["duplicates", str(root), "--csv", "-"]) == 1
    assert capsys.readouterr().out == table.read_text()
    # Without the images of the fix list, no duplicates remain.
    none = "0 of 5 validation images have a duplicate among 8 training images\n"
    assert dataset.main(["duplicates", str(root), "--skip-list", str(fix_list)]) == 0
    assert capsys.readouterr().out == none
    skip = DataRoot(root, skip_list=fix_list).skip
    assert skip == {"val/a/0.png", "val/a/1.bmp", "val/a/2\n.jpg"}
    for name in skip:
        (root / name).unlink()
    assert dataset.main(["duplicates", str(root)]) == 0
    assert capsys.readouterr().out == none


def test_distance_0_finds_equal_hashes_only(root, capsys):
    save(root / "val/a/4.png", picture(2).point(lambda v: 0.6 * v + 90))
    most = duplicates.by_hash(duplicates.list_images(root), duplicates.MAX_DISTANCE)
    equal = duplicates.by_hash(duplicates.list_images(root), 0)
    assert {pair.val for pair in equal.pairs} <= {pair.val for pair in most.pairs}
    assert {pair.distance for pair in equal.pairs} == {0}
    distances = [pair.distance for pair in most.pairs if pair.kind == "similar"]
    assert distances == sorted(distances) and len({*distances}) > 1
    save(root / "val/a/5.png", picture(3).rotate(1))  # at a distance of 4
    for flags, is_found in (([], True), (["--distance", "0"], False)):
        capsys.readouterr()
        assert dataset.main(["duplicates", str(root), *flags]) == 1
        assert ("val/a/5.png" in capsys.readouterr().out) == is_found


@pytest.mark.parametrize(("count", "more"), [(50, []), (51, ["1 more pair; use --csv FILE to list all"])])
def test_only_many_pairs_require_a_table(count, more):
    pairs = [duplicates.Pair("similar", 1, f"val/{i}", 0, f"train/{i}", 0, 1) for i in range(count)]
    *shown, summary = duplicates.lines(duplicates.Report({"train": 60, "val": 60}, pairs))
    assert shown == [*(f"similar 1: val/{i} = train/{i}" for i in range(50)), *more]
    assert summary == f"{count} of 60 validation images have a duplicate among 60 training images: {count} similar"


def test_unreadable_images_are_reported(root, capsys):
    (root / "val/b/0.png").write_bytes(b"not an image")
    (root / "train/b/1.png").write_bytes(b"")
    whole = (root / "train/b/2.png").read_bytes()
    (root / "train/b/2.png").write_bytes(whole[: len(whole) // 2])
    shutil.rmtree(root / "val/a")
    save(root / "val/a/0.png", picture(7))  # a class with a single image
    assert dataset.main(["duplicates", str(root)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "0 of 4 validation images have a duplicate among 6 training images\n"
    reason = "is not in an image format that Pillow supports"
    truncated, *others = sorted(captured.err.splitlines(), key=lambda line: reason in line)
    assert truncated.startswith("train/b/2.png cannot be decoded by Pillow (")
    assert others == [f"train/b/1.png {reason}", f"val/b/0.png {reason}"]


@pytest.mark.usefixtures("cache")
def test_records_without_a_label_are_reported(root, tmp_path, capsys):
    data = (root / "val/b/0.png").read_bytes()
    for name, label in (("train", b"0"), ("val", b"b")):
        put(tmp_path / f"x/{name}-000000.tar", write_tar([("0.png", data), ("0.cls", label)]))
    assert dataset.main(["duplicates", str(tmp_path / "x")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "0 of 0 validation images have a duplicate among 1 training image\n"
    assert re.match(r"val-000000.tar@\d+ cannot be read \(.*the label 'b' is not a number", captured.err)


@pytest.mark.parametrize("name", ["train", "val"])
def test_missing_or_empty_split_is_an_error(root, name, capsys):
    for folder in (root / name).iterdir():
        shutil.rmtree(folder)
    assert dataset.main(["duplicates", str(root)]) == 2
    assert f"{root}: " in capsys.readouterr().err
    (root / name).rmdir()
    assert dataset.main(["duplicates", str(root)]) == 2
    assert str(root) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--similarity", "0.9"], "--similarity 0.9: requires --checkpoint; remove --similarity or add --checkpoint"),
        (["--device", "cpu"], "--device cpu: requires --checkpoint; remove --device or add --checkpoint"),
        (["--checkpoint", "c", "--distance", "3"], "--distance 3: not supported with --checkpoint; remove --distance"),
        (["--checkpoint", "c", "--workers", "3"], "--workers 3: not supported with --checkpoint; remove --workers"),
        (["--json", "--csv", "-"], "--json: not supported with '--csv -'"),
        (["--distance", "16"], "--distance"),
        (["--csv", "{root}/val/a/0.png"], "--csv"),
        (["--fix-list", "{root}/train/x"], "--fix-list"),
        (["--checkpoint", "{root}/missing"], "missing"),
    ],
)
def test_unusable_flags_are_errors(root, flags, message, capsys):
    before = sorted(root.rglob("*"))
    assert dataset.main(["duplicates", str(root), *(flag.format(root=root) for flag in flags)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_checkpoint_finds_the_same_pairs(root, checkpoint, tmp_path, capsys):
    (root / "val/b/0.png").write_bytes(b"not an image")
    flags = ["--checkpoint", str(checkpoint), "--device", "cpu", "--similarity", "0.9999", "--json"]
    assert dataset.main(["duplicates", str(root), *flags]) == 1
    captured = capsys.readouterr()
    pairs = [json.loads(line) for line in captured.out.splitlines()]
    assert [pair["kind"] for pair in pairs[:2]] == ["same file", "same pixels"]
    assert "val/b/0.png is not in an image format" in captured.err
    # The distances are those of the features that predict writes.
    path = tmp_path / "features.npy"
    images = [str(root / pairs[0][name]) for name in ("val", "train")]
    assert predict.main([str(checkpoint), *images, "--device", "cpu", "--features", str(path)]) == 0
    val, train = np.load(path)
    assert pairs[0]["distance"] == pytest.approx(1 - val @ train, abs=1e-6)


def test_features_are_compared_batch_by_batch():
    """The closest training image may be in any batch, and images of a batch may be unreadable."""
    random = np.random.default_rng(0)
    train, val = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in random.normal(size=(2, 25, 4)))
    listed = {mode: [duplicates.Image(f"{mode.value}{i}", "/missing", i) for i in range(25)] for mode in Mode}
    rows = dict(zip([image.name for mode in Mode for image in listed[mode]], [*train, *val], strict=True))

    def features_of(images):
        for at in range(0, len(images), 10):
            checked = [(image, "bad" if image.name == "train3" else None) for image in images[at : at + 10]]
            kept = [rows[image.name] for image, problem in checked if problem is None]
            yield checked, np.array(kept, np.float32)
        yield [], np.zeros([0, 0], np.float32)

    report = duplicates.by_features(listed, features_of, 0.6)
    cosines = val @ train.T
    cosines[:, 3] = -1
    expected = {f"val{i}": f"train{row.argmax()}" for i, row in enumerate(cosines) if row.max() >= 0.6}
    assert {pair.val: pair.train for pair in report.pairs} == expected
    assert [pair.matches for pair in sorted(report.pairs, key=lambda pair: pair.val_label)] == [
        int(count) for count in (cosines >= 0.6).sum(axis=1) if count
    ]
    assert (report.images, report.unreadable) == ({"train": 24, "val": 25}, {"train3": "bad"})


def test_validation_images_that_cannot_be_read_have_no_duplicates():
    listed = {mode: [duplicates.Image(mode.value, "/missing", 0)] for mode in Mode}

    def features_of(images):
        is_read = images == listed[Mode.TRAIN]
        yield [(images[0], None if is_read else "bad")], np.ones((1, 1) if is_read else (0, 0), np.float32)

    report = duplicates.by_features(listed, features_of)
    assert report == duplicates.Report({"train": 1, "val": 0}, [], {"val": "bad"})


def test_distance_of_equal_features_is_not_negative():
    """A dot product of rounded features can exceed 1."""
    listed = {mode: [duplicates.Image(mode.value, "/missing", 0)] for mode in Mode}
    report = duplicates.by_features(listed, lambda images: [([(images[0], None)], np.float32([[1.000001]]))])
    assert [pair.distance for pair in report.pairs] == [0]


@pytest.fixture
def photos_of_two_classes(tmp_path):
    """Return class folders in which each image has a smaller copy with a similar name, and one image is in both."""
    source = tmp_path / "source"
    for c, label in enumerate("ab"):
        for i in range(10):
            save(source / label / f"{i}.png", picture(10 * c + i))
            save(source / label / f"{i}_small.jpg", picture(10 * c + i).resize((32, 24)))
    save(source / "b/of_a.png", picture(3))
    return source


def test_split_keeps_duplicates_together(photos_of_two_classes, tmp_path, capsys):
    source, output = photos_of_two_classes, tmp_path / "grouped"
    assert dataset.main(["split", str(source), "--output", str(tmp_path / "plain"), "--val", "0.3"]) == 0
    assert dataset.main(["duplicates", str(tmp_path / "plain")]) == 1
    flags = ["--val", "0.3", "--group-duplicates"]
    assert dataset.main(["split", str(source), "--output", str(output), *flags]) == 0
    capsys.readouterr()
    assert dataset.main(["duplicates", str(output)]) == 0
    images = {mode: DataRoot(output).images(mode)[1] for mode in Mode}
    assert {mode: len(listed) for mode, listed in images.items()} == {Mode.TRAIN: 29, Mode.EVAL: 12}
    train = {image.name for image in images[Mode.TRAIN]}
    assert {"train/a/3.png", "train/a/3_small.jpg", "train/b/of_a.png"} <= train  # in both classes


def test_split_without_duplicates_is_the_same_with_grouping(root, tmp_path):
    for i, groups in enumerate((False, True)):
        split.split(root / "train", tmp_path / f"{i}", 0.3, groups_duplicates=groups)
    names = [sorted(str(path.relative_to(tmp_path / f"{i}")) for path in tmp_path.glob(f"{i}/*/*/*")) for i in (0, 1)]
    assert names[0] == names[1]


def test_unreadable_image_is_a_group_of_its_own(photos_of_two_classes, tmp_path):
    (photos_of_two_classes / "a/0.png").write_bytes(b"not an image")
    counts, _ = split.split(photos_of_two_classes, tmp_path / "x", 0.3, groups_duplicates=True)
    assert sum(counts.values()) == 41
    report = duplicates.by_hash(duplicates.list_images(tmp_path / "x"))
    assert len(report.unreadable) == 1 and not report.pairs


def test_class_of_one_group_cannot_be_split(tmp_path):
    for label, seeds in (("a", (1, 1)), ("b", (2, 3))):
        for i, seed in enumerate(seeds):
            save(tmp_path / "source" / label / f"{i}.png", picture(seed))
    with pytest.raises(UsageError, match=r"source/a: all images are duplicates .*; remove duplicates, or --group-dup"):
        split.split(tmp_path / "source", tmp_path / "x", 0.5, groups_duplicates=True)
    assert not (tmp_path / "x").exists()
    split.split(tmp_path / "source", tmp_path / "x", 0.5)  # the remedy


@pytest.mark.parametrize(
    ("groups", "val"),
    [
        ({}, 2),
        ({f"x/{i}": 0 for i in range(3)}, 2),
        ({f"x/{i}": i // 5 for i in range(10)}, 5),  # no group fits, so one of the smallest goes to val
        ({f"x/{i}": None for i in range(9)}, 1),
        ({f"x/{i}": None for i in range(10)}, 0),
    ],
)
def test_groups_are_divided_as_a_whole(groups, val):
    names = [str(i) for i in range(10)]
    train, chosen = split.divide("x", names, 0.2, 0, groups)
    assert (len(train), len(chosen)) == (10 - val, val)
    sides = {}
    for name in names:
        sides.setdefault(groups.get(f"x/{name}", name), set()).add(name in chosen)
    assert all(len(side) == 1 for side in sides.values())
    assert sides.get(None, {False}) == {False}
