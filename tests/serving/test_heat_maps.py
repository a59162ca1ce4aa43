import functools
import http.client
import io
import json
import re
import shutil
import threading
from base64 import b64decode
from contextlib import closing

import numpy as np
import paddle
import pytest
from paddle import nn
from PIL import Image

from few_blocks import QUICK, with_few_blocks
from paddle_resnet import models, predict
from paddle_resnet import report as report_command
from paddle_resnet.results import page
from paddle_resnet.serving import heat_maps, inference, networks
from paddle_resnet.utils.errors import UsageError

RED, BLUE = (230, 30, 30), (30, 30, 230)


class Corner(nn.Layer):
    """A network whose logits are the mean redness, 0 and the mean blueness of 8x8 patches."""

    def __init__(self, num_classes, in_channels, data_format):
        super().__init__()
        weights = np.zeros([3, in_channels, 8, 8], np.float32)
        for i, row in enumerate(([1, -0.5, -0.5], [0, 0, 0], [-0.5, -0.5, 1])):
            weights[i, :3] = np.array(row)[:, None, None] / 64
        options = {"stride": 8, "bias_attr": False, "data_format": data_format}
        self.first = nn.Conv2D(in_channels, 3, 8, weight_attr=assigned(weights), **options)
        self.pool = nn.AdaptiveAvgPool2D(1, data_format=data_format)
        self.last = nn.Linear(3, num_classes, weight_attr=assigned(np.eye(3, num_classes, dtype=np.float32)))

    def forward(self, images):
        return self.last(paddle.flatten(self.pool(nn.functional.relu(self.first(images))), 1))


class Hidden(Corner):
    """Corner with a hidden layer between pooling and classifier, like MobileNetV3, and with BN and dropout there."""

    def __init__(self, num_classes, in_channels, data_format):
        super().__init__(num_classes, in_channels, data_format)
        weights = np.array([[2, 0, 0], [0, 2, 0], [0, 0, 2]], np.float32)
        self.hidden = nn.Linear(3, 3, weight_attr=assigned(weights))
        self.bn, self.dropout = nn.BatchNorm1D(3), nn.Dropout(0.5)

    def forward(self, images):
        x = paddle.flatten(self.pool(nn.functional.relu(self.first(images))), 1)
        return self.last(nn.functional.hardswish(self.dropout(self.bn(self.hidden(x)))))


class Flat(Corner):
    """Corner whose classifier reads all positions of the feature map."""

    def __init__(self, num_classes, in_channels, data_format):
        super().__init__(num_classes, in_channels, data_format)
        weights = np.repeat(np.eye(3, num_classes, dtype=np.float32), 16, axis=0) / 16
        self.last = nn.Linear(48, num_classes, weight_attr=assigned(weights))

    def forward(self, images):
        return self.last(paddle.flatten(nn.functional.relu(self.first(images)), 1))


class TwoPaths(Corner):
    """A network without a feature map with several positions through which all paths lead."""

    def forward(self, images):
        maps = self.first(images), self.first(paddle.flip(images, [2]))
        red, blue = (paddle.flatten(self.pool(nn.functional.relu(each)), 1) for each in maps)
        return self.last(red + blue)


def assigned(value):
    return paddle.ParamAttr(initializer=nn.initializer.Assign(value))


@pytest.fixture
def checkpoint_of(monkeypatch, once, run_train):
    """Return a function that returns a checkpoint of a network class. The learning rate is too low to change the
    weights."""

    def checkpoint_of(network):
        name = network.__name__
        monkeypatch.setitem(models.MODELS, name, network)

        def make(folder):
            assert run_train("--model-arch-name", name, "--lr", "1e-12", "--output-dir", folder)[0] == 0

        return once(name, make) / name / "0"

    return checkpoint_of


@pytest.fixture
def corner(checkpoint_of):
    return checkpoint_of(Corner)


@functools.cache
def opened(path):
    """Return (model for heat maps, model for predictions) of a checkpoint. All tests share them."""
    return heat_maps.open_model(path), networks.load_checkpoint(path).model()


def image(size, corner, color=RED, orientation=1, suffix="png", square=24):
    """Return an image file: nearly gray, with a square of a color in a corner of the upright image."""
    width, height = size
    pixels = np.full([height, width, 3], (124, 116, 104), np.uint8)  # nearly 0 if normalized
    x = 0 if "left" in corner else width - square
    y = 0 if "top" in corner else height - square
    pixels[y : y + square, x : x + square] = color
    stored = {1: pixels, 6: np.rot90(pixels), 8: np.rot90(pixels, -1), 2: pixels[:, ::-1]}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(file, suffix, exif=exif)
    return file.getvalue()


def hottest(heat):
    """Return the corner that contains the center of the hottest pixels."""
    y, x = (places.mean() for places in np.nonzero(heat == np.nanmax(heat)))
    return f"{'top' if y < heat.shape[0] / 2 else 'bottom'} {'left' if x < heat.shape[1] / 2 else 'right'}"


NETWORKS, SIZES = (Corner, Hidden, Flat), [((48, 48), 1), ((64, 40), 1), ((64, 40), 6), ((40, 64), 8)]


@pytest.mark.parametrize(
    ("network", "corner_name", "size", "orientation"),
    [
        (network, corner_name, *SIZES[(i + j) % 4])
        for i, network in enumerate(NETWORKS)
        for j, corner_name in enumerate(["top left", "top right", "bottom left", "bottom right"])
    ],
)
def test_maximum_is_in_the_corner_that_determines_the_class(checkpoint_of, network, corner_name, size, orientation):
    model, predictor = opened(checkpoint_of(network))
    for color, label in ((RED, 0), (BLUE, 2)):
        data = image(size, corner_name, color, orientation)
        images = heat_maps.preprocessing.model_input(io.BytesIO(data), model.description)
        assert predictor.run(images).argmax() == label
        heat = heat_maps.heat_map(model, data, label)
        assert heat.shape == size[::-1]
        assert hottest(heat) == corner_name
        assert (np.nanmin(heat), np.nanmax(heat)) == (0, pytest.approx(1, abs=0.2))
        overlay = np.asarray(Image.open(io.BytesIO(heat_maps.overlay(model, data, label)))).astype(int)
        assert overlay.shape == (*size[::-1], 3)
        # The longer side has margins, which the network does not see.
        width, height = size
        is_margin = np.isnan(heat)
        if width != height:
            middle = is_margin[height // 2] if width > height else is_margin[:, width // 2]
            assert middle[0] and middle[-1] and not middle[len(middle) // 2]
            np.testing.assert_array_equal(np.flatnonzero(middle), np.flatnonzero(middle[::-1]))


@pytest.mark.parametrize("network", NETWORKS)
def test_mean_of_the_map_is_the_derivative_of_the_logit(checkpoint_of, network):
    """If the gradient is the same at all positions, the mean of the map is the derivative of the logit with respect to
    a factor of the feature map. For a linear head, it is the logit without the bias (Zhou et al., section 2)."""
    path = checkpoint_of(network)
    model, loaded = heat_maps.open_model(path), networks.load_checkpoint(path)
    data, filters = image((52, 36), "top left"), models.ends(loaded.program).first
    images = heat_maps.preprocessing.model_input(io.BytesIO(data), model.description)
    predictor, before, logits = loaded.model(logits=True), loaded.parameter(filters), {}
    for factor in (0.99, 1, 1.01):
        loaded.scope.find_var(filters).get_tensor().set(before * np.float32(factor), paddle.CPUPlace())
        _, [logits[factor]] = predictor.outputs(images)
    derivatives, bias = (logits[1.01] - logits[0.99]) / 0.02, loaded.parameter(models.ends(loaded.program).last[0])
    for label in range(3):
        cam = model(data, label)
        assert cam.shape == (4, 4)
        assert cam.mean() == pytest.approx(derivatives[label], rel=1e-3, abs=1e-4)
        if network is not Hidden:
            assert cam.mean() + bias[label] == pytest.approx(logits[1][label], abs=1e-5)
    assert np.ptp(derivatives) > 0.01


def test_regions_that_speak_against_the_class_are_as_cold_as_neutral_ones(corner):
    description = opened(corner)[0].description["preprocessing"]
    for corners, highest in (([[-3, 0], [-1, -2]], 0), ([[-3, 0], [-1, 2]], 1)):
        heat = heat_maps._on_image(np.float32(corners), (32, 32), description)
        assert (np.nanmin(heat), np.nanmax(heat)) == (0, highest)
        assert np.nanmax(heat[: len(heat) // 4]) == 0  # -3 and 0 are equally cold


def test_heat_map_of_a_large_image_is_reduced(corner):
    model, _ = opened(corner)
    data = image((2600, 1300), "bottom right", suffix="jpeg", square=900)
    overlay = Image.open(io.BytesIO(heat_maps.overlay(model, data, 0)))
    assert overlay.size == (1024, 512)
    heat = heat_maps.heat_map(model, data, 0)
    assert hottest(heat) == "bottom right"
    seen = np.isfinite(heat)  # the crop is a square in the center
    for axis in (0, 1):
        np.testing.assert_array_equal(seen, np.flip(seen, axis))
    assert seen.any(axis=0).sum() == seen.any(axis=1).sum() < 512


def test_map_of_a_rectangular_crop_covers_the_crop():
    description = {"resize_short": 16, "center_crop": [32, 16]}
    heat = heat_maps._on_image(np.float32([[0, 1], [2, 3]]), (64, 64), description)
    rows, columns = np.nonzero(np.isfinite(heat))
    assert (heat.shape, heat.size / 2, len(rows)) == ((64, 64), 64 * 32, 64 * 32)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 63, 16, 47)
    assert (heat[0, 16], heat[0, 47], heat[63, 47]) == (0, pytest.approx(1 / 3), 1)
    # The reduced side of a narrow image has at least one pixel.
    assert heat_maps._on_image(np.float32([[0, 1], [2, 3]]), (4000, 1), description).shape == (1024, 1)


def test_map_without_differences_is_cold(corner):
    description = opened(corner)[0].description["preprocessing"]
    assert np.nanmax(heat_maps._on_image(np.full([4, 4], 3.0), (40, 40), description)) == 0


def test_network_without_a_common_feature_map_is_an_error(checkpoint_of):
    message = "^TwoPaths: heat maps require a feature map .* with several positions on all paths from"
    with pytest.raises(UsageError, match=message):
        heat_maps.open_model(checkpoint_of(TwoPaths))


# A network of each module, and together all kinds of layers.
REGISTERED = {*{network.module: name for name, network in models.MODELS.items()}.values(), *QUICK}


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_map_of_networks_of_the_registry_is_the_last_one(name, register, parse):
    """The channels of the last feature map are those of the layer after the global pooling."""
    register(name, with_few_blocks(models.MODELS[name]))
    args = parse("--model-arch-name", name, "--image-shape", "3,64,64", "--crop-size", "64", "--resize-short", "64")
    program, _, images, _, logits, _ = networks._build(args.part(networks.Options))
    network = networks.Network(args, {}, program, images, logits, logits, {})
    features = heat_maps._last_feature_map(network)
    poolings = [op for op in program.global_block().ops if op.type in ("pool2d", "reduce_mean")]
    assert poolings[-1].input("X") == [features.name]
    heat_maps.GradCam(network)


def test_exports_have_no_heat_maps(corner, tmp_path):
    (tmp_path / "model.json").touch()
    for path in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(UsageError, match="heat maps require a gradient, which exported networks do not have"):
            heat_maps.open_model(path)
    assert inference.is_export(tmp_path)


def test_command_writes_a_heat_map_per_image(corner, tmp_path, capsys):
    photos, maps = tmp_path / "photos", tmp_path / "maps"
    photos.mkdir()
    maps.mkdir()  # the folder may exist if it is empty
    (photos / "a.png").write_bytes(image((64, 40), "bottom right", BLUE, 6))
    (photos / "b.jpg").write_bytes(b"not an image")
    (photos / "c.jpg").write_bytes(image((40, 40), "top left", RED, suffix="jpeg"))
    flags = ["--device", "cpu", "--batch-size", "2", "--json"]
    assert predict.main([str(corner), str(photos), *flags, "--heat-map", str(maps)]) == 1  # because of b.jpg
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["000001_a.png.jpg", "000003_c.jpg.jpg"]
    assert [line["heat_map"] for line in lines] == [str(maps / name) for name in names]
    assert [line["top"][0]["label"] for line in lines] == [2, 0]
    assert sorted(path.name for path in maps.iterdir()) == names
    model, _ = opened(corner)
    assert (maps / names[0]).read_bytes() == heat_maps.overlay(model, (photos / "a.png").read_bytes(), 2)
    # Without the flag, the predictions are the same.
    assert predict.main([str(corner), str(photos), *flags]) == 1
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert plain == [{name: line[name] for name in ("image", "top")} for line in lines]
    assert predict.main([str(corner), str(photos), *flags, "--heat-map", str(maps)]) == 2  # not empty


def test_name_of_a_heat_map_ends_like_the_name_of_the_image(corner, tmp_path, capsys):
    """File systems limit the name to 255 bytes. The image may have been removed since its prediction."""
    path = tmp_path / f"{'a' * 100}{'b' * 146}.png"
    path.write_bytes(image((40, 40), "top left"))
    draw = heat_maps.drawer(str(tmp_path / "maps"), opened(corner)[0])
    assert draw(7, str(path), 0) == f"{tmp_path}/maps/000007_{path.name[-200:]}.jpg"
    path.unlink()
    assert draw(8, str(path), 0) is None
    assert capsys.readouterr().err == f"{path} cannot be read (No such file or directory)\n"


def test_image_that_pillow_cannot_read_has_no_heat_map(corner, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.png").write_bytes(image((40, 40), "top left"))
    monkeypatch.setattr(heat_maps.preprocessing, "upright_rgb", lambda image: 1 / 0)
    flags = ["--device", "cpu", "--heat-map", str(tmp_path / "maps")]
    assert predict.main([str(corner), str(tmp_path / "a.png"), *flags]) == 1
    captured = capsys.readouterr()
    assert "a.png has no heat map, because Pillow cannot read it (division by zero)" in captured.err
    assert "a.png: " in captured.out


def test_command_needs_a_suitable_network(checkpoint_of, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(image((40, 40), "top left"))
    flags = ["--device", "cpu", "--heat-map", str(tmp_path / "maps")]
    assert predict.main([str(checkpoint_of(TwoPaths)), str(tmp_path / "a.png"), *flags]) == 2
    assert "TwoPaths: heat maps require a feature map" in capsys.readouterr().err
    assert not (tmp_path / "maps").exists()


@pytest.mark.slow
def test_page_of_server_shows_heat_maps(checkpoint_of, monkeypatch, capsys):
    pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
    from paddle_resnet.serving import web

    def ask(port, path, body=None):
        headers = {"Content-Type": "multipart/form-data; boundary=B"} if body else {}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("POST" if body else "GET", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def serve(app, listener, announce):
        server, port = web.create_server(app), listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        head = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        body = head + data + b"\r\n--B--\r\n"
        answers.append([ask(port, "/"), ask(port, "/predict", body), ask(port, "/predict?heat_map=1", body)])
        server.should_exit = True
        thread.join()

    answers, data = [], image((40, 40), "bottom left", BLUE)
    monkeypatch.setattr(web, "serve", serve)
    path = checkpoint_of(Hidden)
    assert predict.main([str(path), "--serve", "0", "--device", "cpu"]) == 0
    [((_, page), *texts)] = answers
    assert 'fetch("predict?heat_map=1"' in page
    [plain], [drawn] = (json.loads(text)["images"] for _, text in texts)
    url = drawn.pop("heat_map")
    assert drawn == plain and drawn["top"][0]["label"] == 2
    head, _, encoded = url.partition(",")
    assert head == "data:image/jpeg;base64"
    assert b64decode(encoded) == heat_maps.overlay(heat_maps.open_model(path), data, 2)
    capsys.readouterr()
    assert predict.main([str(checkpoint_of(TwoPaths)), "--serve", "0", "--device", "cpu"]) == 0
    assert "the page shows no heat maps: TwoPaths: heat maps require a feature map" in capsys.readouterr().err
    (_, page), (plain_status, _), (drawn_status, text) = answers[1]
    assert 'fetch("predict"' in page
    assert (plain_status, drawn_status) == (200, 400)
    assert json.loads(text)["error"].startswith("heat_map=1: this model has no heat maps")


@pytest.fixture
def squares(tmp_path):
    """Return a data set with wrong labels: blue squares in class 0, gray images in class 1, red squares in class 2."""
    for split in ("train", "val"):
        for label, color in enumerate((BLUE, (124, 116, 104), RED)):
            for i, corner_name in enumerate(("top left", "bottom right", "top right") * 3):
                path = tmp_path / f"squares/{split}/class{label}/{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image((40, 40), corner_name, color))
    return tmp_path / "squares"


@pytest.mark.parametrize(
    ("network", "scope"),
    [
        (Corner, "train_eval"),
        pytest.param(Hidden, "eval_only", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((Corner, "eval_only"), (Hidden, "train_eval"))),
    ],
)
def test_page_of_a_run_shows_what_speaks_for_the_predicted_class(
    checkpoint_of, network, run_train, squares, tmp_path, scope
):
    html, checkpoint = tmp_path / "page.html", checkpoint_of(network)
    flags = ["--model-arch-name", network.__name__, "--lr", "1e-12", "--report-html", html]
    if scope == "eval_only":
        flags += ["--run-scope", scope, "--from-checkpoint", checkpoint]
    assert run_train(*flags, image_root=squares)[0] == 0
    text = html.read_text()
    assert "Below it: which regions speak for the predicted class (red)." in text
    shown = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="heat map of ([^"]+)"', text)
    assert {name.split("/")[-2] for _, name in shown} >= {"class0", "class2"}
    evaluated = checkpoint if scope == "eval_only" else tmp_path / "output" / network.__name__ / "0"
    model = heat_maps.open_model(evaluated)
    for encoded, name in shown:
        path = next(path for path in (squares / "val").glob("*/*") if str(path).endswith(name))
        if path.parent.name == "class1":
            continue
        drawn = heat_maps.overlay(model, path.read_bytes(), {"class0": 2, "class2": 0}[path.parent.name])
        assert f"data:image/jpeg;base64,{encoded}" == page._small(Image.open(io.BytesIO(drawn)))
    again = tmp_path / "again.html"
    assert report_command.main([str(tmp_path / "report.json"), "--html", str(again)]) == 0
    assert again.read_text() == text
    shutil.rmtree(evaluated)
    assert report_command.main([str(tmp_path / "report.json"), "--html", str(again)]) == 0
    assert "No heat maps: the evaluated checkpoint was not found." in again.read_text()


def test_page_states_why_a_network_has_no_heat_maps(run_train, squares, tmp_path, register):
    register("TwoPaths", TwoPaths)
    html = tmp_path / "page.html"
    assert run_train("--model-arch-name", "TwoPaths", "--report-html", html, image_root=squares)[0] == 0
    assert "No heat maps: TwoPaths: heat maps require a feature map" in html.read_text()
