"""Labels in JSON and .mat files. Each remedy in an error is obeyed literally; labels are compared with the pixels."""

import json

import numpy as np
import pytest
from scipy import io as matlab
from test_downloads import DIVIDED, GIVEN, NAMES, SPLITS, items, put_images

from layouts import color_of, colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import sources
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")
CARS = ["Acura RL Sedan 2012", "BMW 3 Series", "Ram C/V Cargo Van 2012", "smart fortwo 2012"]


def one(content, file="labels.json"):
    """Return a function that writes training images and a JSON file; `content` has the argument [(class, path)]."""

    def build(root):
        put_images(root, "train", lambda k, name: f"images/{name}.jpg")
        put(root / file, json.dumps(content([(k, f"{name}.jpg") for k, name in items("train")])))

    return build


def coco(entries, path="{}", names=NAMES):
    """Return annotations as in COCO; categories have numbers with gaps."""
    return {
        "images": [{"id": 7 + i, "file_name": path.format(name), "width": 28} for i, (_, name) in enumerate(entries)],
        "annotations": [{"id": i, "image_id": 7 + i, "category_id": 3 * k + 1} for i, (k, _) in enumerate(entries)],
        "categories": [{"id": 3 * k + 1, "name": name, "supercategory": "x"} for k, name in enumerate(names)],
        "licenses": [],
    }


def by_split(folder, file, content):
    """Return a function that writes images and a JSON file of each split."""

    def build(root):
        for split in SPLITS:
            put_images(root, split, lambda k, name, split=split: f"{folder.format(split)}/{name}.jpg")
            put(root / file.format(split), json.dumps(content([(k, f"{name}.jpg") for k, name in items(split)])))

    return build


def inaturalist(root):
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"train_val2019/Birds/{k}/{name}.jpg")
        entries = [(k, f"train_val2019/Birds/{k}/{name}.jpg") for k, name in items(split)]
        put(root / f"{split}2019.json", json.dumps(coco(entries)))
    put(root / "test2019.json", json.dumps({"images": [{"id": 1, "file_name": "test2019/x.jpg"}]}))
    put(root / "test2019/x.jpg", image(0, 90))
    put(root / "categories.json", json.dumps([{"id": 0, "name": "x"}]))


def annotations(entries, field, values):
    """Return an array of structs as in Stanford Cars; `values` has the arguments (class, path)."""
    rows = [values(k, name) for k, name in entries]
    structs = np.zeros((1, len(rows)), [(name, object) for name in ("bbox_x1", *field)])
    for i, row in enumerate(rows):
        for name, value in zip(("bbox_x1", *field), (39, *row), strict=True):
            structs[0, i][name] = value
    return structs


def names_of_cars():
    names = np.zeros((1, 4), object)
    names[0] = CARS
    return names


def cars(root):
    for split, name in (("train", "train"), ("val", "test")):
        put_images(root, split, lambda k, file, name=name: f"cars_{name}/cars_{name}/{file}.jpg")
        structs = annotations(items(split), ("class", "fname"), lambda k, file: (k + 1, f"{file}.jpg"))
        put(root / "devkit/README.txt", "x")
        ending = "_withlabels" if name == "test" else ""
        matlab.savemat(root / f"devkit/cars_{name}_annos{ending}.mat", {"annotations": structs})
    structs = annotations(items("val"), ("fname",), lambda k, file: (f"{file}.jpg",))
    matlab.savemat(root / "devkit/cars_test_annos.mat", {"annotations": structs})
    matlab.savemat(root / "devkit/cars_meta.mat", {"class_names": names_of_cars()})


def cars_in_one_file(root):
    entries = []
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"car_ims/{name}.jpg")
        entries += [(k, (f"car_ims/{name}.jpg", int(split == "val"))) for k, name in items(split)]
    structs = annotations(entries, ("relative_im_path", "class", "test"), lambda k, place: (place[0], k + 1, place[1]))
    matlab.savemat(root / "cars_annos.mat", {"annotations": structs, "class_names": names_of_cars()})


def with_names(content):
    """Return a function that writes a table with numbers, as Cassava has, and a JSON file with their names."""

    def build(root):
        put_images(root, "train", lambda k, name: f"train_images/{name}.jpg")
        put(root / "train.csv", "image_id,label\n" + "".join(f"{name}.jpg,{k}\n" for k, name in items("train")))
        put(root / "label_num_to_disease_map.json", json.dumps(content))

    return build


def labeled(entries):
    return [{"file_name": name, "label": NAMES[k], "w": 1} for k, name in entries]


def both_splits(root):
    for split in SPLITS:
        put_images(root, split, lambda k, name: f"images/{name}.jpg")
    content = {split: labeled([(k, f"images/{name}.jpg") for k, name in items(split)]) for split in SPLITS}
    put(root / "all.json", json.dumps(content | {"test": []}))


LAYOUTS = {
    "image: label": (one(lambda entries: {name: NAMES[k] for k, name in entries}), DIVIDED, NAMES),
    "image: number": (one(lambda entries: {name: k for k, name in entries}), DIVIDED, None),
    "image: record": (one(lambda entries: {name: {"class": NAMES[k]} for k, name in entries}), DIVIDED, NAMES),
    "label: images": (
        one(lambda entries: {name: [file for k, file in entries if NAMES[k] == name] for name in NAMES}),
        DIVIDED,
        NAMES,
    ),
    "records": (one(labeled, "data.json"), DIVIDED, NAMES),
    "records in an object": (one(lambda entries: {"version": 1, "data": labeled(entries)}), DIVIDED, NAMES),
    "pairs": (one(lambda entries: {"labels": [[name, k] for k, name in entries]}, "dataset.json"), DIVIDED, None),
    "splits": (both_splits, GIVEN, NAMES),
    "a file per split": (
        by_split("{}", "{}.json", lambda entries: {name: NAMES[k] for k, name in entries}),
        GIVEN,
        NAMES,
    ),
    "COCO": (by_split("{}2017", "annotations/instances_{}2017.json", coco), GIVEN, NAMES),
    "COCO of Roboflow": (by_split("{}", "{}/_annotations.coco.json", coco), GIVEN, NAMES),
    "iNaturalist": (inaturalist, GIVEN, NAMES),
    "Stanford Cars": (cars, GIVEN, CARS),
    "Stanford Cars in one file": (cars_in_one_file, GIVEN, CARS),
    "number: name": (with_names({str(k): name for k, name in enumerate(NAMES)}), DIVIDED, NAMES),
    "name: number": (with_names({name: k for k, name in enumerate(NAMES)}), DIVIDED, NAMES),
    "names of other labels": (with_names({"0": "a", "1": "b"}), DIVIDED, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_training_contains_remedy(tmp_path, name):
    build, counts, names = LAYOUTS[name]
    build(tmp_path / "x")
    imported = obey(error_of_training(tmp_path / "x"))
    for mode, count in zip(Mode, counts, strict=True):
        numbers, images = DataRoot(imported).images(mode)
        assert numbers.classes == names
        assert len(images) == count
        assert colors_match(images)


def changed(change):
    def content(entries):
        found = coco(entries, "images/{}")
        change(found)
        return found

    return one(content)


def several(found):
    found["annotations"].append({"id": 99, "image_id": 7, "category_id": 1})


BAD = {
    "not JSON": (lambda root: put(root / "labels.json", '{"a.jpg": 1,\n'), "labels.json: not JSON (Expecting"),
    "unknown form": (
        one(lambda entries: {"x": {"y": [1]}, "z": 3}),
        "labels.json: a JSON object with the keys x, z, not images with labels; write labels.csv",
    ),
    "missing image": (
        changed(lambda found: found["annotations"][3].update(image_id=99)),
        "labels.json: annotation 3: there is no image 99; download the file again",
    ),
    "missing category": (
        changed(lambda found: found["annotations"][3].update(category_id=99)),
        "labels.json: annotation 3: there is no category 99; download the file again",
    ),
    "key is missing": (
        changed(lambda found: found["annotations"][0].pop("image_id")),
        "labels.json: images, annotations and categories are not as in COCO (KeyError: 'image_id'); correct the file",
    ),
    "several classes": (changed(several), "if images have several classes, train with --multi-label"),
    "image without label": (changed(lambda found: found["annotations"].pop()), "labels.json: record 19: has no label"),
    "missing file": (
        one(lambda entries: {name: k for k, name in [*entries, (0, "x.jpg"), (1, "y.jpg")]}),
        "labels.json: record 20: x.jpg is not in",
    ),
    "label out of range": (
        one(lambda entries: {name: k + 99 * (k == 3) for k, name in entries}),
        "labels.json: record 2: has label 102, but the data set has only 20 images",
    ),
    "damaged .mat": (lambda root: put(root / "labels.mat", b"x" * 200), "labels.mat: damaged ("),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_with_code_2_and_leaves_no_output(tmp_path, capsys, name):
    build, message = BAD[name]
    build(tmp_path / "x")
    put(tmp_path / "x/images/000.jpg", image(0))
    (file,) = (path for path in (tmp_path / "x").iterdir() if path.suffix in (".json", ".mat"))
    error = error_of_import(file, capsys)
    assert message in error


def test_file_of_names_determines_the_order_of_classes(tmp_path):
    with_names({str(i): name for i, name in enumerate(reversed(NAMES))})(tmp_path)
    put(tmp_path / "train.csv", "image_id,label\n" + "".join(f"{name}.jpg,{NAMES[k]}\n" for k, name in items("train")))
    _, splits, names = sources.read(tmp_path)
    assert names == NAMES[::-1]
    assert all(color_of(read_image(image)[0]) == 3 - image.label for images in splits.values() for image in images)


def test_images_at_any_depth_below_a_table(tmp_path):
    """Google Landmarks has three levels of folders."""
    put_images(tmp_path, "train", lambda k, name: f"train/{name[0]}/{name[1]}/{name[2]}/{name}.jpg")
    put(tmp_path / "train.csv", "id,landmark_id\n" + "".join(f"{name},{k}\n" for k, name in items("train")))
    _, splits, _ = sources.read(tmp_path)
    assert tuple(len(splits[split]) for split in SPLITS) == DIVIDED
    assert all(color_of(read_image(image)[0]) == image.label for images in splits.values() for image in images)
