"""Messages about archives as downloaded contain the commands that unpack and import them. The tests run them."""

import io
import os
import pickle
import subprocess
import zipfile

import numpy as np
import pytest

from layouts import colors_match, error_of_import, error_of_training, image, obey, put, write_tar
from paddle_resnet import dataset
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
NAMES = ["cock", "goldfish", "ray"]


def pictures(folder, extra=0):
    """Return [(name, content)] of class folders."""
    return [(f"{folder}{NAMES[k]}/{i}.jpg", image(k, i + extra)) for k in range(3) for i in range(6)]


def cifar():
    files = []
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
        files.append((f"cifar-10-batches-py/{name}", pickle.dumps(batch)))
    return files


def food():
    lists = {
        split: [f"{n}/{i}" for n in NAMES for i in numbers]
        for split, numbers in (("train", range(4)), ("test", (4, 5)))
    }
    files = [(f"food-101/meta/{split}.txt", "\n".join(lines).encode()) for split, lines in lists.items()]
    return [("food-101/README.txt", b"x"), *files, *pictures("food-101/images/")]


def cub():
    images = [name.removeprefix("x/") for name, _ in pictures("x/")]
    tables = {
        "images": [f"{i} {name}" for i, name in enumerate(images, 1)],
        "image_class_labels": [f"{i} {NAMES.index(name.split('/')[0]) + 1}" for i, name in enumerate(images, 1)],
        "train_test_split": [f"{i} {int(i % 6 < 4)}" for i in range(1, len(images) + 1)],
        "classes": [f"{k} {name}" for k, name in enumerate(NAMES, 1)],
    }
    files = [(f"CUB_200_2011/{name}.txt", "\n".join(lines).encode()) for name, lines in tables.items()]
    return [("attributes.txt", b"x"), *files, *pictures("CUB_200_2011/images/")]


def pets():
    images = [(f"images/{NAMES[k]}_{i}.jpg", image(k, i)) for k in range(3) for i in range(6)]
    lists = {"trainval": range(4), "test": (4, 5)}
    files = [
        (f"annotations/{name}.txt", "".join(f"{NAMES[k]}_{i} {k + 1} 1 1\n" for k in range(3) for i in of).encode())
        for name, of in lists.items()
    ]
    return {"images.tar.gz": images, "annotations.tar.gz": files}


def kaggle():
    images = [(f"train/{k}{i}.jpg", image(k, i)) for k in range(3) for i in range(6)]
    return [("train.csv", "id,label\n" + "".join(f"{k}{i},{k}\n" for k in range(3) for i in range(6))), *images]


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
    return out.getvalue()


def packed(name, files):
    return zipped(files) if name.endswith(".zip") else write_tar(files, "" if name.endswith(".tar") else "gz")


ARCHIVES = {
    "CIFAR-10": ({"cifar-10-python.tar.gz": cifar()}, (10, 2)),
    "Food-101": ({"food-101.tar.gz": food()}, (12, 6)),
    "CUB-200": ({"CUB_200_2011.tgz": cub()}, (12, 6)),
    "Oxford Pets": (pets(), (12, 6)),
    "Kaggle": ({"birds competition.zip": kaggle()}, (15, 3)),
    "class folders": ({"photos.zip": pictures("")}, (15, 3)),
    "class folders in a folder": ({"photos.tar.xz": pictures("photos/")}, (15, 3)),
    "splits in a folder": ({"photos.zip": [*pictures("photos/train/"), *pictures("photos/valid/", 10)]}, (18, 18)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHIVES)
def test_commands_in_the_error_unpack_and_import_archives(tmp_path, capsys, name):
    archives, counts = ARCHIVES[name]
    for file, content in archives.items():
        put(tmp_path / "x" / file, packed(file, content))
    put(tmp_path / "x/.DS_Store", b"x")
    message = error_of_training(tmp_path / "x")
    assert f"it contains {', '.join(sorted(archives))}: archive" in message or ": an archive; unpack it: `" in message
    assert dataset.main(["info", str(tmp_path / "x")]) == 2
    assert ": archives; " in capsys.readouterr().err.replace("an archive; ", ": archives; ")
    assert dataset.main(["import", str(tmp_path / "x"), "--list"]) == 0
    assert message.partition("it contains ")[2] in capsys.readouterr().out
    imported = obey(message)
    for mode, count in zip(Mode, counts, strict=True):
        images = DataRoot(imported).images(mode)[1]
        assert len(images) == count
        assert name == "CIFAR-10" or colors_match(images)


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar.gz", "photos.tar"])
def test_archive_as_source_of_an_import(tmp_path, capsys, name):
    put(tmp_path / name, packed(name, pictures("photos/")))
    assert dataset.main(["import", str(tmp_path / name), "--list"]) == 0
    listed = capsys.readouterr().out
    message = error_of_import(tmp_path / name, capsys)
    assert f"{tmp_path / name}: an archive; unpack it: `" in message
    assert listed.strip() in message
    assert len(DataRoot(obey(message)).images(Mode.TRAIN)[1]) == 15


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar"])
def test_unpacking_writes_nothing_outside_its_folder(tmp_path, capsys, name):
    put(tmp_path / "x" / name, packed(name, [*pictures("photos/"), ("../outside.jpg", image(0))]))
    message = error_of_import(tmp_path / "x" / name, capsys)
    subprocess.run(message.split("`")[1], shell=True, check=False)  # tar rejects the member, zipfile writes it inside
    assert not (tmp_path / "x/outside.jpg").exists() and not (tmp_path / "outside.jpg").exists()


def test_images_in_a_tar_file_are_not_taken_for_a_shard(tmp_path):
    for split, prefix in (("train", "deep/er/"), ("val", "./")):
        put(tmp_path / f"x/{split}.tar", write_tar(pictures(prefix)))
    (tmp_path / "x/train").mkdir()  # an earlier attempt
    message = error_of_training(tmp_path / "x")
    assert "train.tar, val.tar, whose names differ from the expected names; run `" in message
    obey(message)
    for mode in Mode:
        assert colors_match(DataRoot(tmp_path / "x").images(mode)[1])


def test_compressed_tar_file_of_class_folders_is_unpacked(tmp_path):
    for split in ("train", "val"):
        put(tmp_path / f"x/{split}.tar", write_tar(pictures(f"{split}/"), "gz"))
    obey(error_of_training(tmp_path / "x"))
    for mode in Mode:
        assert colors_match(DataRoot(tmp_path / "x").images(mode)[1])


def test_truncated_archive_fails_without_a_data_set(tmp_path, capsys):
    data = packed("x.tar.gz", pictures("photos/"))
    put(tmp_path / "x.tar.gz", data[: len(data) // 2])
    message = error_of_import(tmp_path / "x.tar.gz", capsys)
    with pytest.raises(subprocess.CalledProcessError):
        obey(message)
    assert not os.path.exists(f"{tmp_path}/x.tar.gz_unpacked_imported")
