"""Measure how uniform the training order of record files is, with and without a random order of the shards
(shuffle_after_epoch), whether it resumes exactly, and the speed; print a Markdown table:
`python benchmarks/record_order.py DIR`.

The script writes sorted images to DIR: 20 shards, or a single file for RecordIO. LMDB is left out, because DALI's
reader does not offer shuffle_after_epoch.
"""

import argparse
import io
import os
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
COUNT, SHARDS, BATCH, EPOCHS, SEED = 40_960, 20, 64, 4, 7
COLUMNS = ("format", "order of shards", "distance of neighbors", "correlation", "exact resume", "images/s")
sys.path.insert(0, str(ROOT))


def images():
    """Return 64 JPEG files of 96x96 pixels."""
    from PIL import Image

    files = []
    for i in range(64):
        pixels, file = np.random.RandomState(i).randint(0, 255, (8, 8, 3)).astype(np.uint8), io.BytesIO()
        Image.fromarray(pixels).resize((96, 96)).save(file, "JPEG")
        files.append(file.getvalue())
    return files


def write(root, data_format):
    """Write COUNT images, whose labels are their positions."""
    from paddle_resnet.data.formats import SHARDED, SINGLE_FILE

    files = images()
    os.makedirs(root)
    if data_format in SINGLE_FILE:
        with SINGLE_FILE[data_format](root, "train") as writer:
            writer.write([(files[i % len(files)], i) for i in range(COUNT)])
            writer.finish()
        return
    name = {"tfrecord": f"train-{{:05d}}-of-{SHARDS:05d}", "webdataset": "train-{:06d}.tar"}[data_format]
    for shard in range(SHARDS):
        with SHARDED[data_format](os.path.join(root, name.format(shard))) as append:
            for i in range(shard * COUNT // SHARDS, (shard + 1) * COUNT // SHARDS):
                append(i, files[i % len(files)], "jpg", i)


def pipeline(root, data_format, is_shuffled, checkpoint=None, decodes=True):
    """Build a DALI pipeline of this project's reader with two threads. Without `is_shuffled`, shards are read in stored
    order."""
    from nvidia.dali import fn, pipeline_def

    from paddle_resnet.data import shards
    from paddle_resnet.data.formats import FORMATS
    from paddle_resnet.utils.mode import Mode

    module = FORMATS[data_format]
    records = module.index(root, Mode.TRAIN, module.detect(root, Mode.TRAIN))
    arguments, order = shards.reader_arguments, shards.shard_order
    shards.shard_order = lambda shuffle, seed: order(shuffle and is_shuffled, seed)
    if data_format == "recordio":  # the reader of RecordIO has no order of shards, because it reads one file
        shards.reader_arguments = lambda *given: {**arguments(*given), **shards.shard_order(True, SEED)}

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, enable_checkpointing=True)
    def define():
        encoded, label = module.read(records, "reader", 0, 1, True, SEED)
        return (fn.resize(fn.decoders.image_random_crop(encoded), size=[64, 64]) if decodes else label), label

    try:
        built = define(checkpoint=checkpoint)
        built.build()
    finally:
        shards.reader_arguments, shards.shard_order = arguments, order
    return built


def labels(pipe):
    return np.array(pipe.run()[1].as_tensor()).ravel()


def uniformity(root, data_format, is_shuffled):
    """Return (mean distance of the positions of successive images, as a fraction of all images; mean absolute
    correlation of position and time). A uniformly random order has 1/3 and about 0."""
    pipe = pipeline(root, data_format, is_shuffled, decodes=False)
    orders = [np.concatenate([labels(pipe) for _ in range(COUNT // BATCH)]) for _ in range(EPOCHS)]
    distance = np.mean([np.abs(np.diff(order)).mean() / COUNT for order in orders])
    return distance, np.mean([abs(np.corrcoef(np.arange(COUNT), order)[0, 1]) for order in orders])


def resumes(root, data_format, is_shuffled):
    """Return whether a pipeline from a DALI checkpoint in the second epoch continues with the same images."""
    pipe = pipeline(root, data_format, is_shuffled)
    for _ in range(COUNT // BATCH + 217):
        pipe.run()
    resumed = pipeline(root, data_format, is_shuffled, pipe.checkpoint())
    return all(np.array_equal(labels(pipe), labels(resumed)) for _ in range(COUNT // BATCH + 50))


def speed(root, data_format, is_shuffled):
    pipe = pipeline(root, data_format, is_shuffled)
    for _ in range(100):
        pipe.run()
    start = perf_counter()
    for _ in range(2 * COUNT // BATCH):
        pipe.run()
    return 2 * COUNT / (perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", metavar="DIR", help="folder for the record files")
    root = parser.parse_args().root
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for data_format in ("recordio", "tfrecord", "webdataset"):
        path = os.path.join(root, data_format)
        if not os.path.exists(path):
            write(path, data_format)
        speeds = {False: [], True: []}
        for _ in range(3):
            for is_shuffled in speeds:
                speeds[is_shuffled].append(speed(path, data_format, is_shuffled))
        for is_shuffled, measured in speeds.items():
            distance, correlation = uniformity(path, data_format, is_shuffled)
            exact = "yes" if resumes(path, data_format, is_shuffled) else "no"
            low, middle, high = sorted(measured)
            cells = (f"{distance:.2f}", f"{correlation:.2f}", exact, f"{middle:,.0f} ({low:,.0f} to {high:,.0f})")
            print(f"| {data_format} | {'random' if is_shuffled else 'stored'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
