import os
import threading

import pytest

from paddle_resnet.data.images import Image
from paddle_resnet.tools import workers
from paddle_resnet.utils.errors import UsageError


@pytest.mark.parametrize(
    ("path", "kind", "data", "expected"),
    [
        *[("a.JPEG", None, b"BM", "jpeg"), ("a.png", None, b"\xff\xd8", "png"), ("a.jfif", None, b"\xff\xd8", "jpg")],
        *[("a", None, b"\x89PNG\r\n", "png"), ("x.png", "tfrecord", b"BM", "bmp"), ("a.dat", None, b"II*\0", "tif")],
        *[("a", None, b"MM\0*", "tif"), ("a", None, b"RIFF", "webp"), ("a", None, b"", "jpg")],
    ],
)
def test_extension_in_tar_file(path, kind, data, expected):
    assert workers._extension(Image("name", path, 0, kind), data) == expected


def test_record_with_invalid_label_is_rejected_and_interrupted_worker_stops(monkeypatch):
    image, stop = Image("val.rec@4", "d/val.rec", None, "recordio"), threading.Event()
    monkeypatch.setattr(workers, "_stop", stop, raising=False)
    monkeypatch.setattr(workers, "read_image", lambda image: (b"x", 0.5))
    with pytest.raises(UsageError, match="^d/val.rec@4: label 0.5 is not a whole number .*; correct the label or, "):
        workers.prepare(image)
    monkeypatch.setattr(workers, "read_image", lambda image: os.stat(f"{os.devnull}/x"))
    with pytest.raises(UsageError, match=r"^d/val.rec: cannot be read \(Not a directory\); make it readable or, "):
        workers.prepare(image)
    stop.set()
    with pytest.raises(InterruptedError):
        workers.prepare(image)
