"""The contract of read() in data/formats/__init__.py, which every storage format must meet."""

import subprocess
import sys

import data_files
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from conftest import ROOT
from paddle_resnet.data.formats import FORMATS, read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("cache")


def batches(data_set, count, batch_size, **shard):
    """Return `count` batches as [[(image file, label, source_info)]]."""

    @pipeline_def(batch_size=batch_size, num_threads=1, device_id=None)
    def pipeline():
        outputs = data_set.read("Reader", **{"shard_id": 0, "num_shards": 1, "shuffle": False, **shard})
        assert isinstance(outputs, tuple)
        encoded, labels = outputs
        return encoded, labels, fn.get_property(encoded, key="source_info")

    pipe = pipeline()
    pipe.build()
    found = []
    for _ in range(count):
        encoded, labels, sources = pipe.run()
        assert np.asarray(encoded.at(0)).dtype == np.uint8 and np.asarray(encoded.at(0)).ndim == 1
        assert labels.as_array().dtype == np.int64 and labels.as_array().shape == (batch_size, 1)
        found.append(
            [
                (bytes(np.asarray(encoded.at(i))), int(labels.at(i)[0]), bytes(np.asarray(sources.at(i))).decode())
                for i in range(batch_size)
            ]
        )
    return found


@pytest.fixture(params=data_files.ALL)
def data_format(request):
    return request.param


@pytest.fixture
def root(converted, data_format):
    return DataRoot(converted[data_format], data_format)


def test_images_are_read_in_stored_order_and_the_last_one_fills_the_batch(root):
    data_set, images = root.open(Mode.EVAL, 3, 0), root.images(Mode.EVAL)[1]
    expected = [read_image(image) for image in images]
    assert len(expected) == data_set.size == 23
    for rank in range(2):
        first, end = (n * 23 // 2 for n in (rank, rank + 1))
        shard = expected[first:end] + [expected[end - 1]] * (16 - (end - first))
        read = [image[:2] for batch in batches(data_set, 4, 8, shard_id=rank, num_shards=2) for image in batch]
        assert read == shard + shard  # two epochs


def test_source_info_is_empty_or_identifies_the_image(root, data_format):
    from paddle_resnet.data import bad_images

    images = root.images(Mode.EVAL)[1]
    [read] = batches(root.open(Mode.EVAL, 3, 0), 1, 23)
    for image, (*_, source) in zip(images, read, strict=True):
        assert source == "" or bad_images._whole_name(source, root.image_root) == image.full_name
    assert (read[0][2] == "") == (not getattr(FORMATS[data_format], "HAS_READER", True))


def test_training_order_depends_on_seed_and_epoch(root):
    expected = sorted(read_image(image) for image in root.images(Mode.TRAIN)[1])
    orders = []
    for seed in (1, 1, 2):
        read = batches(root.open(Mode.TRAIN, 3, seed), 6, 10, shuffle=True)
        epochs = [[image[:2] for batch in read[i : i + 3] for image in batch] for i in (0, 3)]
        assert [sorted(epoch) for epoch in epochs] == [expected, expected]
        assert epochs[0] != epochs[1]
        orders.append(epochs)
    assert orders[0] == orders[1] != orders[2]


def test_processes_read_different_images_of_an_epoch(root):
    data_set = root.open(Mode.TRAIN, 3, 1)
    read = [batches(data_set, 3, 5, shard_id=rank, num_shards=2, shuffle=True) for rank in range(2)]
    images = sorted(image[:2] for batches in read for batch in batches for image in batch)
    assert images == sorted(read_image(image) for image in root.images(Mode.TRAIN)[1])


def test_formats_import_neither_dali_nor_paddle():
    code = "import sys; from paddle_resnet.data import root; print({*sys.modules} & {*sys.argv[1:]})"
    command = [sys.executable, "-c", code, "paddle", "nvidia.dali", "pyarrow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
