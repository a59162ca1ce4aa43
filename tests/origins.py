"""Miniatures of data sets in the first section of docs/data.md. Each class has a color, see layouts.py; in cifar(), the
color is (200, class, 0), and in pixel_table() the brightness is the class."""

import json
import pickle

import numpy as np
from tfrecord import TFRecordWriter

from layouts import image, put, write_tar

WNIDS = ["n01440764", "n01443537", "n01484850"]
NAMES = ["apple", "beet", "carrot"]
SPLITS = {"train": range(4), "val": range(10, 12)}


def each(split):
    return [(k, i) for i in SPLITS[split] for k in (2, 0, 1)]


def kaggle_imagenet(root):
    rows = ["ImageId,PredictionString"]
    for k, i in each("train"):
        put(root / f"ILSVRC/Data/CLS-LOC/train/{WNIDS[k]}/{WNIDS[k]}_{i}.JPEG", image(k, i))
    for number, (k, i) in enumerate(each("val"), 1):
        put(root / f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_{number:08}.JPEG", image(k, i))
        rows.append(f"ILSVRC2012_val_{number:08},{WNIDS[k]} 1 2 3 4")
    put(root / "LOC_val_solution.csv", "\n".join(rows) + "\n")


def hub(root):
    import pyarrow
    from pyarrow import parquet

    label = {"_type": "ClassLabel", "names": NAMES}
    metadata = {"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, "label": label}}})}
    (root / "data").mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        images = [{"bytes": image(k, i), "path": f"{i}.jpg"} for k, i in each(split)]
        table = pyarrow.table({"image": images, "label": [k for k, _ in each(split)]})
        parquet.write_table(table.replace_schema_metadata(metadata), root / f"data/{name}-00000-of-00001.parquet")


def timm(root):
    for split, name in (("train", "imagenet1k-train-0000.tar"), ("val", "imagenet1k-validation-00.tar")):
        samples = [
            (f"{i}_{k}.{end}", data) for k, i in each(split) for end, data in (("jpg", image(k, i)), ("cls", b"%d" % k))
        ]
        put(root / name, write_tar(samples))


def tfrecords(root, name, features):
    root.mkdir(parents=True)
    for split, prefix in (("train", "train"), ("val", "validation")):
        writer = TFRecordWriter(str(root / name.format(prefix)))
        for k, i in each(split):
            writer.write(features(k, image(k, i)))
        writer.close()


def csv(root):
    for split in SPLITS:
        for k, i in each(split):
            put(root / f"train_images/{k}_{i}.jpg", image(k, i))
    rows = [f"{k}_{i}.jpg,{k}" for split in SPLITS for k, i in each(split)]
    put(root / "train.csv", "\n".join(["image_id,label", *rows]) + "\n")


def paddleclas(root):
    for split in SPLITS:
        for k, i in each(split):
            put(root / f"jpg/{k}_{i}.jpg", image(k, i))
        put(root / f"{split}_list.txt", "".join(f"jpg/{k}_{i}.jpg {k}\n" for k, i in each(split)))


def cifar(root):
    def batch(pairs):
        pixels = np.array([np.full((3, 1024), np.array([[200], [k], [0]])) for k, _ in pairs], np.uint8)
        return pickle.dumps({"labels": [k for k, _ in pairs], "data": pixels.reshape(-1, 3072)}, 4)

    for number in range(1, 6):
        put(root / f"data_batch_{number}", batch(each("train")))
    put(root / "test_batch", batch(each("val")))


def pixel_table(path):
    """The brightness of each image is its class."""
    usage = {"train": "Training", "val": "PublicTest"}
    rows = [f"{k},{' '.join([str(k)] * 48**2)},{usage[split]}" for split in SPLITS for k, _ in each(split)]
    put(path, "\n".join(["emotion,pixels,Usage", *rows]) + "\n")


def pets(root):
    for k, i in each("train"):
        put(root / f"train/{NAMES[k]}.{i}.jpg", image(k, i))
    put(root / "test1/1.jpg", image(0, 20))


def write(root):
    """Write all data sets. Those in Parquet files are omitted if pyarrow is not installed."""
    kaggle_imagenet(root / "kaggle_imagenet")
    timm(root / "imagenet-1k-wds")
    tfrecords(
        root / "imagenet2012/5.1.0",
        "imagenet2012-{}.tfrecord-00000-of-00001",
        lambda k, data: {"image": (data, "byte"), "label": (k, "int"), "file_name": (b"x", "byte")},
    )
    tfrecords(
        root / "imagenet_tfrecord",
        "{}-00000-of-00001",
        lambda k, data: {"image/encoded": (data, "byte"), "image/class/label": (k + 1, "int")},
    )
    csv(root / "cassava")
    paddleclas(root / "flowers102")
    cifar(root / "cifar-10-batches-py")
    pixel_table(root / "fer2013.csv")
    pets(root / "dogs-vs-cats")
    try:
        hub(root / "imagenet-1k")
        hub(root / "beans")
    except ModuleNotFoundError:
        return
