import pytest

from paddle_resnet.data.image_search import ImageSearch, walk

FILES = ("0.jpg", "train/0.jpg", "test/0.jpg", "a/b/c/cat/1.PNG", "a/b/c/dog/1.PNG", "a/x.txt", "a/2.ppm")


@pytest.fixture
def search(tmp_path):
    for name in (*FILES, "__MACOSX/a/2.jpg", ".hidden/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a/loop").symlink_to(tmp_path / "a")
    return ImageSearch(str(tmp_path))


@pytest.mark.parametrize(
    ("cell", "folder", "split", "expected"),
    [
        ("0", "", None, ["0.jpg"]),
        ("0.jpg", "test", None, ["test/0.jpg"]),
        ("./train/0.jpg", "a", None, ["train/0.jpg"]),
        ("1", "", None, ["a/b/c/cat/1.PNG", "a/b/c/dog/1.PNG"]),
        ("cat/1.PNG", "", None, ["a/b/c/cat/1.PNG"]),
        ("b/c/dog/1", "train", "val", ["a/b/c/dog/1.PNG"]),
        ("at/1.PNG", "", None, []),
        ("c\\cat\\1.PNG", "", None, ["a/b/c/cat/1.PNG"]),
        ("C:\\data\\cat\\1.PNG", "", None, ["a/b/c/cat/1.PNG"]),
        ("https://host/data/cat/1.PNG", "", None, ["a/b/c/cat/1.PNG"]),
        ("/data/../cat/1.PNG", "", None, []),
        ("../0.jpg", "", None, []),
        ("../0.jpg", "train", None, ["0.jpg"]),
        ("../../test/0.jpg", "a/b", "train", ["test/0.jpg"]),
        ("..\\test\\0", "train", "train", ["test/0.jpg"]),
        ("../../0.jpg", "train", None, []),
        ("2", "", None, ["a/2.ppm"]),
        ("3", "", None, []),
    ],
)
def test_files_that_a_cell_means(search, cell, folder, split, expected):
    assert search.find(cell, folder, split) == expected


@pytest.mark.parametrize("image", ["0", "test_0"])
def test_folders_of_the_split_come_first(tmp_path, image):
    for name in (f"x/train/{image}.jpg", f"x/test/{image}.jpg", f"x/y/{image}.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    search = ImageSearch(str(tmp_path))
    for split, folder in (("train", "x/train"), ("test", "x/test"), (None, "x/y")):
        assert search.find(image, "", split) == [f"{folder}/{image}.jpg"]
    assert search.find(image, "", "val") == [f"x/{folder}/{image}.jpg" for folder in ("test", "train", "y")]
    assert ImageSearch(str(tmp_path), most=0).find(image) == []


def test_only_images_are_images(search):
    assert search.is_image("a/b/c/cat/1.PNG")
    assert search.is_image(" 2 ")
    assert not search.is_image("x.txt")
    assert not search.is_image("")


def test_hidden_and_system_folders_and_loops_are_not_walked(search):
    assert sorted(walk(search._root)) == sorted(FILES)
