import threading
from contextlib import nullcontext

import pytest

from conftest import wait_until
from paddle_resnet import predict
from paddle_resnet.data import bad_images
from paddle_resnet.serving import heat_maps, image_files, inference
from paddle_resnet.serving.model import Model

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
from paddle_resnet.serving import web


@pytest.mark.parametrize(
    ("flags", "limits", "threads", "maps"),
    [
        ([], (20 * 10**6, 16, ["127.0.0.1", "[::1]", "localhost"]), 4, ("model", "cpu", None)),
        (
            [
                *("--serve-max-mb", "3", "--serve-max-images", "7", "--serve-host", "0.0.0.0"),
                *("--dali-num-threads", "2", "--tta", "flip"),
            ],
            (3 * 10**6, 7, ["*"]),
            2,
            None,
        ),
        (
            ["--serve-host", "127.1", "--model-arch-name", "resnet18"],
            (20 * 10**6, 16, ["127.0.0.1", "127.1", "[::1]", "localhost"]),
            4,
            ("model", "cpu", "ResNet18"),
        ),
    ],
    ids=["defaults", "flags", "other name of this machine"],
)
def test_server_has_the_limits_of_its_flags(monkeypatch, capsys, flags, limits, threads, maps):
    actual, model = [], Model("Executor", {"output": {"shape": [None, 3]}, "classes": []}, None)
    futures, end, opened, open_maps = [], threading.Event(), [], heat_maps.open_model

    def create_app(classify, worker, description, *limits, heat_map):
        assert heat_map is None  # the folder "model" does not exist
        futures.extend([worker.submit(end.wait, 60), worker.submit(end.wait, 60)])
        wait_until(futures[0].running, 60)
        return actual.append(limits)

    monkeypatch.setattr(heat_maps, "open_model", lambda *arguments: opened.append(arguments) or open_maps(*arguments))
    monkeypatch.setattr(inference, "open_model", lambda *arguments: actual.append(arguments[4]) or model)
    monkeypatch.setattr(image_files, "predict", lambda *arguments: [actual.append(arguments[2:5]) or (None, None, "")])
    monkeypatch.setattr(web, "create_app", create_app)
    monkeypatch.setattr(bad_images, "decoders_silenced", lambda: nullcontext(actual.append("silenced")))
    monkeypatch.setattr(web, "serve", lambda app, listener, announce: announce())
    assert predict.main(["model", "--serve", "0", "--device", "cpu", *flags]) == 0
    assert [future.cancelled() for future in futures] == [False, True]  # one image at a time
    end.set()
    assert actual == [[1], (1, "cpu", threads), limits, "silenced"]
    assert opened == ([] if maps is None else [maps])  # --tta averages two predictions, so it has no heat maps
    monkeypatch.setattr(image_files, "predict", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the server must not start if it cannot predict
        predict.main(["model", "--serve", "0", "--device", "cpu", *flags])
    assert ("other machines can access the model without password" in capsys.readouterr().err) == ("0.0.0.0" in flags)
