"""Arrays of CIFAR, MNIST, STL-10, SVHN and MedMNIST, written as their authors describe the formats."""

import gzip
import io
import pickle
import struct

import numpy as np
import pytest
from PIL import Image
from scipy import io as matlab

from layouts import color_of, error_of_import, image, obeyed_remedy, put
from paddle_resnet import dataset
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.tools.sources import Options, arrays
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray", "tench"]
COUNTS = {"train": 20, "val": 8}
ORDER = (2, 0, 3, 1)


def pixels(split, side, gray=False):
    """Return (uint8 [n, side, side, 3], labels [n]) of a split, with the colors of layouts.image. Gray images [n, side,
    side] have the brightness 40 * label + 20."""
    first, count = {"train": (0, 5), "test": (100, 2), "val": (200, 2)}[split]
    labels = np.array([k for _ in range(count) for k in ORDER], np.uint8)
    if gray:
        noise = np.random.RandomState(first).randint(0, 10, (len(labels), side, side))
        return (40 * labels[:, None, None] + 15 + noise).astype(np.uint8), labels
    files = [image(int(k), first + i // 4) for i, k in enumerate(labels)]
    return np.stack([np.asarray(Image.open(io.BytesIO(data)).resize((side, side))) for data in files]), labels


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


class Python2Pickler(pickle._Pickler):
    """Writes all strings as Python 2 did when CIFAR was published."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, text):
        data = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string


def save_pickle(path, content):
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(content)
    put(path, out.getvalue())


def cifar10(root, folder="cifar-10-batches-py/"):
    images, labels = pixels("train", 32)
    for i in range(5):
        part = slice(4 * i, 4 * i + 4)
        content = {b"batch_label": b"x", b"labels": labels[part].tolist(), b"data": planes(images[part])}
        save_pickle(root / f"{folder}data_batch_{i + 1}", content)
    images, labels = pixels("test", 32)
    save_pickle(root / f"{folder}test_batch", {b"labels": labels.tolist(), b"data": planes(images)})
    save_pickle(root / f"{folder}batches.meta", {b"label_names": [name.encode() for name in NAMES]})


def cifar100(root):
    for split in ("train", "test"):
        images, labels = pixels(split, 32)
        labels = {b"fine_labels": labels.tolist(), b"coarse_labels": (labels // 2).tolist()}
        save_pickle(root / "cifar-100-python" / split, {b"data": planes(images), **labels})
    names = {b"fine_label_names": [name.encode() for name in NAMES], b"coarse_label_names": [b"bird", b"fish"]}
    save_pickle(root / "cifar-100-python/meta", names)


def cifar10_binary(root):
    images, labels = pixels("train", 32)
    rows = np.concatenate([labels[:, None], planes(images)], 1)
    for i in range(5):
        put(root / f"data_batch_{i + 1}.bin", rows[4 * i : 4 * i + 4].tobytes())
    images, labels = pixels("test", 32)
    put(root / "test_batch.bin", np.concatenate([labels[:, None], planes(images)], 1).tobytes())
    put(root / "batches.meta.txt", "".join(f"{name}\n" for name in NAMES) + "\n")


def cifar100_binary(root):
    for split in ("train", "test"):
        images, labels = pixels(split, 32)
        put(root / f"{split}.bin", np.concatenate([labels[:, None] // 2, labels[:, None], planes(images)], 1).tobytes())
    put(root / "fine_label_names.txt", "".join(f"{name}\n" for name in NAMES))
    put(root / "coarse_label_names.txt", "bird\nfish\n")


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(compress, separator="-", both=False, folder="", prefix="", transpose=False, held_out="t10k"):
    """If `both` is set, the compressed files are incomplete."""

    def build(root):
        for split, name in (("train", "train"), ("test", held_out)):
            images, labels = pixels(split, 28, gray=True)
            images = images.transpose(0, 2, 1) if transpose else images
            for content, kind in ((idx(images), "images-idx3"), (idx(labels), "labels-idx1")):
                path = root / f"{folder}{prefix}{name}-{kind.replace('-', separator)}-ubyte"
                if compress or both:
                    data = gzip.compress(content)
                    put(path.with_name(f"{path.name}.gz"), half(data) if both else data)
                if not compress or both:
                    put(path, content)

    return build


def mnist_with_packed_labels(root):
    mnist(True)(root)
    for path in root.glob("*-images-*.gz"):
        put(path.with_suffix(""), gzip.decompress(path.read_bytes()))
        path.unlink()


def stl10(root):
    for split in ("train", "test"):
        images, labels = pixels(split, 96)
        put(root / f"stl10_binary/{split}_X.bin", images.transpose(0, 3, 2, 1).tobytes())
        put(root / f"stl10_binary/{split}_y.bin", (labels + 1).tobytes())
    put(root / "stl10_binary/unlabeled_X.bin", b"x")
    put(root / ".cache/train_X.bin", b"x")
    put(root / "stl10_binary/class_names.txt", "\n".join([*NAMES, "unused"]))  # the largest label has no images


def svhn(root):
    for split in ("train", "test"):
        images, labels = pixels(split, 32)
        content = {"X": images.transpose(1, 2, 3, 0), "y": np.where(labels == 0, 10, labels)[:, None]}
        matlab.savemat(root / f"{split}_32x32.mat", content, do_compression=True)


def medmnist(splits=("train", "val", "test"), gray=False, form="{}_{}"):
    def build(root):
        content = {}
        for split in splits:
            images, labels = pixels(split, 28, gray)
            names = (form.format(split, "images"), form.format(split, "labels"))
            if form == "keras":
                names = (f"x_{split}", f"y_{split}")
            content |= dict(zip(names, (images, labels[:, None]), strict=True))
        np.savez_compressed(root / "pathmnist.npz", **content)

    return build


# {name: (function that writes the files, description, class names, side and whether images are gray)}
LAYOUTS = {
    "CIFAR-10": (cifar10, "arrays of CIFAR-10", NAMES, 32, False),
    "CIFAR-100": (cifar100, "arrays of CIFAR-100", NAMES, 32, False),
    "CIFAR-10 binary": (cifar10_binary, "arrays of CIFAR-10", NAMES, 32, False),
    "CIFAR-100 binary": (cifar100_binary, "arrays of CIFAR-100", NAMES, 32, False),
    "MNIST": (mnist(True), "arrays of MNIST", None, 28, True),
    "MNIST, torchvision": (mnist(True, both=True, folder="MNIST/raw/"), None, None, 28, True),
    "MNIST, Kaggle": (mnist(False, "."), "arrays of MNIST", None, 28, True),
    "MNIST, labels packed": (mnist_with_packed_labels, "arrays of MNIST", None, 28, True),
    "EMNIST": (
        mnist(True, prefix="emnist-letters-", transpose=True, held_out="test"),
        "arrays of MNIST",
        None,
        28,
        True,
    ),
    "STL-10": (stl10, "arrays of STL-10", [*NAMES, "unused"], 96, False),
    "SVHN": (svhn, "arrays of SVHN", None, 32, False),
    "MedMNIST": (medmnist(), "pathmnist.npz: arrays", None, 28, False),
    "MedMNIST, gray": (medmnist(gray=True), "pathmnist.npz: arrays", None, 28, True),
    "Keras": (medmnist(("train", "test"), form="keras"), "pathmnist.npz: arrays", None, 28, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pixels_and_labels_are_those_of_the_arrays(tmp_path, name):
    build, _, names, side, gray = LAYOUTS[name]
    build(tmp_path)
    kind, splits, classes = sources.read(tmp_path, "array" if name == "MNIST, torchvision" else None)
    assert (kind, classes) == ("array", names)
    for split in COUNTS:
        held_out = "val" if name.startswith("MedMNIST") else "test"
        images, labels = pixels("train" if split == "train" else held_out, side, gray)
        assert [listed.label for listed in splits[split]] == labels.tolist()
        for listed, expected in zip(splits[split], images, strict=True):
            with Image.open(io.BytesIO(read_image(listed)[0])) as picture:
                assert picture.format == "PNG"
                np.testing.assert_array_equal(np.asarray(picture), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, what, _, _, gray) in LAYOUTS.items() if what and not gray])
def test_error_of_training_contains_remedy(tmp_path, capsys, name):
    build, what, names, *_ = LAYOUTS[name]
    (tmp_path / "x").mkdir()
    build(tmp_path / "x")
    assert obeyed_remedy(tmp_path / "x", what, COUNTS, capsys)[0] == names


def test_class_folders_of_arrays(tmp_path, capsys):
    cifar10(tmp_path / "source")
    command = ["import", str(tmp_path / "source"), "--output", str(tmp_path / "x"), "--to", "folder", "--workers", "1"]
    for _ in range(2):
        (tmp_path / "x/val/ray/000004.png").unlink(missing_ok=True)  # repeating the command adds it
        assert dataset.main(command) == 0
        assert f"{tmp_path}/x: 20 train and 8 val images in 4 classes from array as folder" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "x/val/ray").iterdir()) == ["000000.png", "000004.png"]
    assert color_of((tmp_path / "x/val/ray/000004.png").read_bytes()) == 2
    assert DataRoot(tmp_path / "x").images(Mode.TRAIN)[0].classes == NAMES


def test_coarse_labels(tmp_path):
    for build in (cifar100, cifar100_binary):
        root = tmp_path / build.__name__
        build(root)
        _, splits, names = sources.read(root, options=Options(label_column="coarse_labels"))
        assert names == ["bird", "fish"]
        assert [listed.label for listed in splits["val"]] == [k // 2 for k in ORDER] * 2


def test_single_npz_file(tmp_path, capsys):
    medmnist()(tmp_path)
    (tmp_path / "pathmnist.npz").rename(tmp_path / "a.npz")
    medmnist(("train",))(tmp_path)
    message = error_of_import(tmp_path, capsys)
    assert "contains several data sets (a.npz, pathmnist.npz); import one data set, such as" in message
    assert {split: len(images) for split, images in sources.read(tmp_path / "a.npz")[1].items()} == COUNTS
    assert dataset.main(["import", str(tmp_path / "a.npz"), "--list"]) == 0
    assert "a.npz: imported as array" in capsys.readouterr().out
    _, splits, _ = sources.read(tmp_path / "pathmnist.npz")
    assert {split: len(images) for split, images in splits.items()} == {"train": 16, "val": 4}


class Reference:
    """Is pickled as a reference to a harmless function, which the reader must not call."""

    called = False

    def __reduce__(self):
        return (_call, ())


def _call():
    Reference.called = True
    return {}


@pytest.mark.parametrize(
    "content", [Reference(), {b"labels": [0], b"data": Reference()}, [1], {b"labels": complex(1, 2)}]
)
def test_pickle_that_refers_to_other_types_is_rejected(tmp_path, capsys, content):
    cifar10(tmp_path / "x", "")
    save_pickle(tmp_path / "x/data_batch_3", content)
    message = error_of_import(tmp_path / "x", capsys)
    assert "data_batch_3: not a data set of CIFAR, or damaged (" in message
    assert not Reference.called


def test_pickle_of_another_protocol(tmp_path):
    """Python 3 and NumPy 2 write different references for the same arrays."""
    cifar10(tmp_path, "")
    images, labels = pixels("test", 32)
    put(tmp_path / "test_batch", pickle.dumps({"labels": labels.tolist(), "data": planes(images)}, 4))
    assert [listed.label for listed in sources.read(tmp_path)[1]["val"]] == labels.tolist()


def test_object_array_in_npz_is_rejected(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    np.savez(tmp_path / "x/a.npz", train_images=np.array([Reference()], object), train_labels=np.zeros(1, np.uint8))
    assert "a.npz: damaged (ValueError: Object arrays cannot be loaded" in error_of_import(tmp_path / "x", capsys)
    assert not Reference.called


def changed(build, name, change):
    def built(root):
        root.mkdir(parents=True)
        build(root)
        put(root / name, change((root / name).read_bytes()))

    return built


def removed(build, name):
    def built(root):
        root.mkdir(parents=True)
        build(root)
        (root / name).unlink()

    return built


def half(data):
    return data[: len(data) // 2]


def npz(**content):
    def built(root):
        root.mkdir(parents=True)
        np.savez(root / "a.npz", **content)

    return built


FLAT = lambda root: cifar10(root, "")  # noqa: E731
BYTES = np.zeros((2, 4, 4), np.uint8)
BAD = {
    "pickle cut": (changed(FLAT, "test_batch", half), "test_batch: not a data set of CIFAR, or damaged ("),
    "pickle of text": (changed(FLAT, "test_batch", lambda _: b"<html>"), "test_batch: not a data set of CIFAR, or"),
    "pickle without data": (
        changed(FLAT, "test_batch", lambda _: pickle.dumps({b"labels": [0]}, 4)),
        "test_batch: damaged (KeyError: 'data'); download it again",
    ),
    "pickle without labels": (
        changed(FLAT, "test_batch", lambda _: pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}, 4)),
        "test_batch: damaged (KeyError: 'labels'); download it again",
    ),
    "batch missing": (removed(FLAT, "data_batch_3"), "has no data_batch_3; download the data set again"),
    "binary batch missing": (removed(cifar10_binary, "data_batch_3.bin"), "has no data_batch_3.bin; download the data"),
    "no names": (
        changed(FLAT, "batches.meta", lambda _: pickle.dumps({b"x": 1}, 4)),
        "batches.meta: contains no class names; download it again",
    ),
    "label out of range": (
        changed(FLAT, "batches.meta", lambda _: pickle.dumps({b"label_names": [b"a", b"b", b"c"]}, 4)),
        "data_batch_1: image 2: has label 3, but the data set has only 3 class names",
    ),
    "binary cut": (
        changed(cifar10_binary, "test_batch.bin", lambda data: data[:-1]),
        "test_batch.bin: damaged (ValueError: 24583 bytes are not a multiple of 3073); download it again",
    ),
    "binary empty": (changed(cifar10_binary, "test_batch.bin", lambda _: b""), "0 bytes are not a multiple of 3073)"),
    "idx cut": (
        changed(mnist(False), "train-images-idx3-ubyte", half),
        "train-images-idx3-ubyte: damaged (ValueError: does not contain 15680 bytes after the header); download",
    ),
    "idx with more bytes": (
        changed(mnist(False), "t10k-images-idx3-ubyte", lambda data: data + b"\0"),
        "t10k-images-idx3-ubyte: damaged (ValueError: does not contain 6272 bytes after the header); download",
    ),
    "gzip cut": (
        changed(mnist(True), "t10k-images-idx3-ubyte.gz", half),
        "t10k-images-idx3-ubyte.gz: damaged (EOFError",
    ),
    "idx of floats": (
        changed(mnist(False), "train-images-idx3-ubyte", lambda data: b"\0\0\x0d" + data[3:]),
        "train-images-idx3-ubyte: damaged (ValueError: not an idx file of bytes)",
    ),
    "idx too large": (
        changed(mnist(False), "train-images-idx3-ubyte", lambda data: data[:4] + b"\xff" * 12),
        "train-images-idx3-ubyte: damaged (ValueError: has the shape [4294967295, ",
    ),
    "labels missing": (
        removed(mnist(True), "train-labels-idx1-ubyte.gz"),
        "has no train-labels-idx1-ubyte; add the file",
    ),
    "fewer labels": (
        changed(mnist(False), "train-labels-idx1-ubyte", lambda _: idx(np.zeros(3, np.uint8))),
        "train-images-idx3-ubyte: has 20 images, but 3 labels; use matching files",
    ),
    "training images missing": (
        removed(mnist(True), "train-images-idx3-ubyte.gz"),
        "contains no training images; import the folder that contains them",
    ),
    "STL-10 without labels": (
        removed(stl10, "stl10_binary/train_y.bin"),
        "train_X.bin: has no train_y.bin; add the file",
    ),
    "SVHN cut": (changed(svhn, "train_32x32.mat", half), "train_32x32.mat: damaged ("),
    "npz cut": (changed(medmnist(), "pathmnist.npz", half), "pathmnist.npz: damaged ("),
    "npz of other arrays": (npz(a=BYTES, b=BYTES), "contains the arrays a, b, but not train_images and train_labels"),
    "several labels": (
        npz(train_images=BYTES, train_labels=np.zeros((2, 14), np.uint8)),
        "a.npz: has 14 labels per image; the import writes one label per image",
    ),
    "volumes": (
        npz(train_images=np.zeros((2, 8, 8, 8), np.uint8), train_labels=np.zeros(2, np.uint8)),
        "a.npz: contains uint8 values of shape 2 x 8 x 8 x 8, not images of 8 bits with 1, 3 or 4 channels",
    ),
    "floats": (
        npz(train_images=BYTES.astype(np.float32), train_labels=np.zeros(2, np.uint8)),
        "a.npz: contains float32 values of shape 2 x 4 x 4, not images of 8 bits with 1, 3 or 4 channels",
    ),
    "labels are floats": (
        npz(train_images=BYTES, train_labels=np.zeros(2, np.float32)),
        "a.npz: its labels have the type float32; use whole numbers",
    ),
    "two data sets": (
        lambda root: [mnist(True, prefix=prefix)(root) for prefix in ("emnist-letters-", "emnist-digits-")],
        "emnist-letters-train-images-idx3-ubyte.gz); move the files of each data set to a folder of its own",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "x")
    assert message in error_of_import(tmp_path / "x", capsys, "--as", "array")


def test_array_above_the_limit_is_rejected(tmp_path, monkeypatch):
    medmnist()(tmp_path)
    monkeypatch.setattr(arrays, "LIMIT", 10_000)
    with pytest.raises(UsageError, match="pathmnist.npz: train_images has 0.0 GB, more than the limit of 0.0 GB"):
        sources.read(tmp_path)


def test_unknown_labels_are_rejected(tmp_path):
    cifar100(tmp_path)
    with pytest.raises(UsageError, match="--label-column x: .*train has the labels fine_labels, coarse_labels; choose"):
        sources.read(tmp_path, options=Options(label_column="x"))


def test_remedy_for_arrays_of_other_types(tmp_path, capsys):
    arrays = {"train_images": np.zeros((4, 8, 8, 8), np.float32), "train_labels": np.array([0, 1, 0, 1])}
    npz(**arrays)(tmp_path / "x")
    error = error_of_import(tmp_path / "x", capsys)
    assert "; write uint8 values of shape N x HEIGHT x WIDTH x CHANNELS" in error
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):  # obey the message
        root = tmp_path / mode
        npz(**arrays | {"train_images": np.zeros((4, 8, 8, channels), np.uint8)})(root)
        _, splits, _ = sources.read(root)
        assert len(splits["train"]) == 2
        with Image.open(io.BytesIO(read_image(splits["train"][0])[0])) as picture:
            assert picture.mode == mode
