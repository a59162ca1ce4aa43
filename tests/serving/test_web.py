"""The web application of `predict --serve`."""

import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT, strict_json, wait_until
from paddle_resnet import export, predict, serving
from paddle_resnet.serving import image_files, inference
from paddle_resnet.utils.errors import UsageError, python

for package in ("starlette", "uvicorn", "python_multipart"):
    pytest.importorskip(package, reason="requirements-serve.txt is not installed")
from paddle_resnet.serving import web  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESCRIPTION = {"arch": "Net<b>", "output": {"shape": [None, 3]}, "epoch": 4, "evaluated": {"top1": 0.75}}
BOUNDARY = "boundary"
HEAD = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"


HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def entries(*classes):
    return [{"label": label, "class": name, "probability": p} for label, name, p in classes]


def classify(upload):
    if not upload.content:
        return None, "is empty"
    return entries((2, "c\udcff", 0.75), (0, "<i>a</i>", 0.25), (1, "b", float("nan"))), None


@pytest.fixture
def start():
    """Return a function that starts a server in a thread and returns its port. `limits` are further arguments of
    create_app."""
    running = []

    def start(classify=classify, max_bytes=10**4, max_images=3, host="127.0.0.1", idle_s=60, **limits):
        listener = web.listen(host, 0)
        limits |= {"hosts": web.allowed_hosts(listener, host)}
        app = web.create_app(classify, ThreadPoolExecutor(1), DESCRIPTION, max_bytes, max_images, **limits)
        server = web.create_server(app, idle_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread))
        return listener.getsockname()[1]

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def form(*files, boundary=BOUNDARY):
    """Return the body of a form with the given (file name, content) pairs. The file name of a text field is None."""
    parts = []
    for name, content in files:
        file = "" if name is None else f'; filename="{name}"'
        parts += [
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"{file}\r\n\r\n'.encode(),
            content,
            b"\r\n",
        ]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()])


def request(port, method="POST", path="/predict", body=None, headers=(), host="127.0.0.1"):
    """Send a request and return (status, headers, content) of the response."""
    with closing(http.client.HTTPConnection(host, port, timeout=30)) as connection:
        form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"} if body is not None else {}
        connection.request(method, path, body, form | dict(headers), encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, answer.headers, strict_json(content) if is_json else content.decode()


def test_predictions_of_all_images_are_answered_in_order(start):
    top = [
        {"label": 2, "class": "c\udcff", "probability": 0.75},
        {"label": 0, "class": "<i>a</i>", "probability": 0.25},
    ]
    top += [{"label": 1, "class": "b", "probability": None}]
    status, headers, content = request(start(), body=form(("ä b.jpg", b"x"), ("../2.jpg", b"y")))
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, None)
    assert HEADERS.items() <= dict(headers).items() and "server" not in headers
    assert content == {"images": [{"image": "ä b.jpg", "top": top}, {"image": "../2.jpg", "top": top}]}


def test_images_that_cannot_be_decoded_are_answered_with_422(start):
    status, _, content = request(start(), body=form(("a.jpg", b"x"), ("b.jpg", b"")))
    assert (status, content["error"]) == (422, "b.jpg is empty")
    assert "top" in content["images"][0]
    assert content["images"][1] == {"image": "b.jpg", "error": "is empty"}


def test_requests_above_limits_are_answered_with_413(start):
    def endless():  # without Content-Length, so the limit applies to the received bytes
        yield form(("a.jpg", b"")).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        for _ in range(100):
            sleep(0.002)  # the server receives several parts, each of which is within the limit
            yield b"x" * 1000

    port = start()
    message = (
        "POST /predict: exceeds 0.01 MB; send fewer or smaller images, or start the server with a larger --serve-max-mb"
    )
    slightly = form(("a.jpg", b"x" * 10**4))
    for body in (slightly, iter([slightly]), endless(), b"x" * 10**7):
        status, _, content = request(port, body=body)
        assert (status, content) == (413, {"error": message})
    largest = form(("a.jpg", b"x" * (10**4 - len(form(("a.jpg", b""))))))
    for body in (largest, iter([largest])):
        assert request(port, body=body)[0] == 200
    status, _, content = request(port, body=form(*[("a.jpg", b"x")] * 4))
    message = "POST /predict: more than 3 images; send fewer, or start the server with a larger --serve-max-images"
    assert (status, content) == (413, {"error": message})
    assert request(port, body=form(*[("a.jpg", b"x")] * 3))[0] == 200
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
        connection.putheader("Content-Length", str(10**9))
        connection.endheaders()
        assert connection.getresponse().status == 413  # the response arrives before the body is sent


@pytest.mark.parametrize(
    ("body", "content_type", "status", "message"),
    [
        (form((None, b"a.jpg")), None, 400, "image: text instead of a file; send image files, for example with"),
        (form(), None, 400, "POST /predict: contains no images"),
        (b"no form", None, 400, "POST /predict: "),
        (form(("a.jpg", b"x"), ("b.jpg", b"x"))[:-20], None, 400, "POST /predict: the form is incomplete; send all"),
        (form(("a.jpg", b"x")), "multipart/form-data", 400, "POST /predict: Missing boundary"),
        (
            form(("a.jpg", b"x")),
            f"multipart/form-data; boundary={BOUNDARY}; charset=undefined",
            400,
            "POST /predict: not a",
        ),
        (b"a=b", "application/x-www-form-urlencoded", 415, "POST /predict: not multipart/form-data"),
        (form(), f"Multipart/Form-Data; boundary={BOUNDARY}", 400, "POST /predict: contains no images"),
        (b"x", "image/jpeg", 415, "POST /predict: not multipart/form-data"),
    ],
)
def test_body_without_images_is_an_error(start, body, content_type, status, message):
    headers = {} if content_type is None else {"Content-Type": content_type}
    actual, _, content = request(start(), body=body, headers=headers)
    assert actual == status
    assert content["error"].startswith(message) and len(content["error"]) > len("POST /predict: ")


def test_uploads_do_not_need_a_temporary_folder(start, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert request(start(max_bytes=10**7), body=form(("a.jpg", b"x" * 2 * 10**6)))[0] == 200


def test_unknown_paths_and_methods_are_errors(start):
    port = start()
    assert request(port, "GET")[0] == 405
    assert request(port, "GET", "/page.html.j2")[::2] == (404, {"error": "GET /page.html.j2: Not Found"})
    assert request(port, "GET", "/../web.py")[0] == 404


def test_server_does_not_log_and_limits_connections_and_the_time_to_stop():
    config = web.create_server(None).config
    assert (config.log_config, config.log_level, config.access_log, config.proxy_headers) == (
        *(None, "critical", False, False),
    )
    assert (config.limit_concurrency, config.timeout_graceful_shutdown) == (100, 1)
    assert (web.MAX_REQUESTS, web.BODY_S, web.IDLE_S) == (8, 60, 60)


def test_requests_beyond_queue_are_answered_with_503(start):
    is_running, is_released = threading.Event(), threading.Event()

    def wait(upload):
        is_running.set()
        assert is_released.wait(30)
        return classify(upload)

    port, body = start(wait, max_requests=1), form(("a.jpg", b"x"))
    with ThreadPoolExecutor(1) as client:
        first = client.submit(request, port, body=body)
        assert is_running.wait(30)
        status, headers, content = request(port, body=body)
        assert (status, headers["Retry-After"]) == (503, "5")
        assert content == {"error": "POST /predict: 1 requests are in progress; retry later"}
        assert request(port, "GET", "/")[0] == 200
        is_released.set()
        assert first.result()[0] == 200
    assert request(port, body=body)[0] == 200


def test_one_image_is_predicted_at_a_time(start):
    running, threads = threading.Lock(), set()

    def wait(upload):
        assert running.acquire(blocking=False)
        sleep(0.01)
        running.release()
        threads.add(threading.get_ident())
        return classify(upload)

    port, body = start(wait), form(("a.jpg", b"x"), ("b.jpg", b"x"))
    with ThreadPoolExecutor(4) as clients:
        assert [answer[0] for answer in clients.map(lambda _: request(port, body=body), range(8))] == [200] * 8
    assert len(threads) == 1


def test_prediction_stops_if_client_has_closed_the_connection(start, capsys):
    names, is_running, is_released = [], threading.Event(), threading.Event()

    def wait(upload):
        names.append(upload.name)
        is_running.set()
        assert is_released.wait(30)
        return classify(upload)

    port, body = start(wait), form(*[(f"{i}.jpg", b"x") for i in range(3)])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert is_running.wait(30)
    assert request(port, "GET", "/")[0] == 200  # now the server also knows that the first client disconnected
    is_released.set()
    assert request(port, body=form(("last.jpg", b"x")))[0] == 200
    assert names == ["0.jpg", "last.jpg"]
    assert capsys.readouterr().err == ""


def test_slow_body_is_answered_with_408(start):
    def slow():
        yield form(("a.jpg", b"x"))[:50]
        sleep(1)
        yield b"x"

    status, _, content = request(start(body_s=0.2), body=slow())
    assert status == 408
    assert content == {"error": "POST /predict: not received within 0.2 s; send fewer or smaller images"}


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1"]
)
def test_connection_without_complete_request_is_closed(start, sent):
    with socket.create_connection(("127.0.0.1", start(idle_s=0.2)), timeout=4) as client:
        client.sendall(sent)
        with suppress(ConnectionResetError):
            while client.recv(10**5):
                pass


def test_connection_is_kept_while_its_second_request_is_in_progress(start):
    def slow(upload):
        sleep(0.4 if upload.name == "slow.jpg" else 0)
        return classify(upload)

    sent = []
    for name in ("fast.jpg", "slow.jpg"):
        body = form((name, b"x"))
        sent += [f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode(), body]
    received = b""
    with socket.create_connection(("127.0.0.1", start(slow, idle_s=0.3)), timeout=10) as client:
        client.sendall(b"".join(sent))
        with suppress(ConnectionResetError):
            while data := client.recv(10**5):
                received += data
    assert received.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_server_that_is_still_starting(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    app = web.create_app(classify, ThreadPoolExecutor(1), DESCRIPTION, 10**4, 3)
    try:
        with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
            web.serve(app, web.listen("127.0.0.1", 0), lambda: signal.raise_signal(number))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_other_host_names_and_other_sites_are_rejected(start):
    port = start()
    body = form(("a.jpg", b"x"))
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000"):
        assert request(port, body=body, headers={"Host": host})[0] == 200
    for host in ("example.com", f"example.com:{port}", "localhost.example.com", "127.0.0.1.example.com", "", "[::2]"):
        assert request(port, body=body, headers={"Host": host})[0] == 400
        assert request(port, "GET", "/", headers={"Host": host})[0] == 400
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        actual, _, content = request(port, body=body, headers={"Sec-Fetch-Site": site})
        assert actual == status and ("a different site" in content.get("error", "")) == (status == 403)
        assert request(port, "GET", "/", headers={"Sec-Fetch-Site": site})[0] == 200


def test_all_host_names_are_accepted_unless_address_is_loopback():
    with web.listen("127.0.0.2", 0) as listener:
        assert web.allowed_hosts(listener, "name") == ["127.0.0.1", "127.0.0.2", "[::1]", "localhost", "name"]
    with web.listen("0.0.0.0", 0) as listener:
        assert web.allowed_hosts(listener, "0.0.0.0") == ["*"]
        assert not web.is_loopback(listener)
    for address, hosts in (
        ("fe80::1%eth0", ["*"]),
        ("::1%lo", ["127.0.0.1", "[::1%lo]", "[::1]", "localhost", "name"]),
    ):
        listener = SimpleNamespace(getsockname=lambda address=address: (address, 80, 0, 2))
        assert web.allowed_hosts(listener, "name") == hosts


def test_server_listens_on_ipv6_address(start):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    port = start(host="::1")
    assert request(port, "GET", "/", host="::1")[0] == 200
    with web.listen("::1", 0) as listener:
        assert re.fullmatch(r"http://\[::1\]:\d+/", web.url(listener))


def test_failed_prediction_is_answered_with_500_and_server_continues(start, capsys):
    def fail(upload):
        if upload.name == "a.jpg":
            raise RuntimeError("no memory")
        return classify(upload)

    port = start(fail)
    status, _, content = request(port, body=form(("a.jpg", b"x")))
    assert status == 500
    assert content == {"error": "POST /predict: failed (RuntimeError); see the server's stderr"}
    assert "RuntimeError: no memory" in capsys.readouterr().err
    assert request(port, body=form(("b.jpg", b"x")))[0] == 200


def test_invalid_http_request_is_answered_without_a_traceback(start, capsys):
    port = start()
    for path in (b"/", b"/none", b"/predict"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert request(port, body=form(("a.jpg", b"1")))[0] == 200
    assert capsys.readouterr().err == ""


def test_page_loads_no_resources_and_escapes_names(start):
    status, headers, page = request(start(), "GET", "/")
    assert status == 200
    assert "<h1>Net&lt;b&gt;</h1>" in page and "3 classes · epoch 4 · top1 75.0%" in page
    assert not re.search(r"""https?://|@import|url\(|<(script|img|iframe)[^>]* src=""", page)
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
    assert re.findall(r' nonce="([^"]*)"', page) == [nonce, nonce]
    assert headers["Content-Security-Policy"].replace(nonce, "N") == (
        "default-src 'none'; script-src 'nonce-N'; style-src 'nonce-N'; img-src blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert HEADERS.items() <= dict(headers).items()


def test_unusable_addresses_are_errors():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError,
            match=rf"--serve {port}: cannot listen on 127.0.0.1 \(Address already in use\); choose .* free one$",
        ):
            web.listen("127.0.0.1", port)
    with pytest.raises(
        UsageError,
        match=r"--serve-host 192.0.2.1: cannot listen on this address \(Cannot assign .* address\); use an address of",
    ):
        web.listen("192.0.2.1", 0)
    for name, reason in (("x" * 100, "not a valid name"), ("", "Name or service not known")):
        with pytest.raises(UsageError, match=rf"--serve-host {name}: unknown address \({reason}\)"):
            web.listen(name, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.jpg", "--serve-host", "::1"], "--serve-host ::1: requires --serve; add it or remove --serve-host"),
        (["x.jpg", "--serve-max-mb", "3"], "--serve-max-mb 3: requires --serve"),
        (["x.jpg", "--serve-max-images", "3"], "--serve-max-images 3: requires --serve"),
        (["x.jpg", "--serve", "0"], "--serve 0: not supported with images, --csv, --json"),
        (["--serve", "0", "--batch-size", "4"], "--serve 0: not supported with"),
        (["--serve", "0", "--benchmark"], "--serve 0: not supported with"),
        (["--serve", "0", "--json"], "--serve 0: not supported with"),
        (["--serve", "0", "--csv", "x.csv"], "--serve 0: not supported with"),
        (["--serve", "0", "--serve-host", "192.0.2.1"], "--serve-host 192.0.2.1: cannot listen on this"),
        (["--serve", "0"], "model: does not exist"),
    ],
)
def test_invalid_command_exits_with_code_2_and_an_error(tmp_path, capsys, arguments, message):
    assert predict.main([str(tmp_path / "model"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "python_multipart"])
def test_missing_package_is_an_error(capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "starlette":
        monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "paddle_resnet.serving.web")
    monkeypatch.delattr(serving, "web")
    assert predict.main(["model", "--serve", "0"]) == 2
    error = capsys.readouterr().err
    assert "error: --serve: a required package cannot be imported (" in error
    assert error.endswith(f"; run {python()} -m pip install -r requirements-serve.txt\n")


SERVER = """
from concurrent.futures import ThreadPoolExecutor
from paddle_resnet.serving import web

listener = web.listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
description = {"arch": "Net", "output": {"shape": [None, 3]}}
web.serve(web.create_app(None, ThreadPoolExecutor(1), description, 10**4, 3), listener)
"""


@pytest.mark.slow
def test_clients_that_reset_the_connection_do_not_stop_the_server():
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            for _ in range(300):
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    client.shutdown(socket.SHUT_WR)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # The server answers 503 until it has processed all connections.
            wait_until(lambda: request(port, "GET", "/none")[0] == 404, 60)
        finally:
            server.terminate()
        assert server.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_server_predicts_like_the_command_and_stops_on_signal(checkpoint, photos, capfd, number, code):
    paths = sorted(map(str, (photos / "val").glob("*/*.jpg")))[:2]
    rows = [row for _, row, _ in image_files.predict(inference.open_model(checkpoint, "cpu"), paths)]
    contents = [open(path, "rb").read() for path in paths]  # noqa: SIM115
    answers = []

    def client():
        try:
            wait_until(lambda: "Control-C" in output(), 60)
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/: page to try", output())[1])
            answers.append(request(port, body=form(("a.jpg", contents[0]), ("b.jpg", contents[1]))))
            damaged = contents[0][: len(contents[0]) // 2]
            answers.append(request(port, body=form(("cut.jpg", damaged), ("a.jpg", contents[0]), ("c.txt", b"text"))))
            answers.append(request(port, body=form(*[("a.jpg", contents[0])] * 4)))
        finally:
            os.kill(os.getpid(), number)

    seen = []

    def output():
        seen.append(capfd.readouterr().out)
        return "".join(seen)

    previous = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=client)
    thread.start()
    try:
        assert predict.main([str(checkpoint), "--serve", "0", "--serve-max-images", "3", "--device", "cpu"]) == code
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
        thread.join()
    (status, _, content), (bad_status, _, bad), (many_status, _, many) = answers
    assert (many_status, many["error"][:39]) == (413, "POST /predict: more than 3 images; send")
    assert (status, [entry["image"] for entry in content["images"]]) == (200, ["a.jpg", "b.jpg"])
    for row, entry in zip(rows, content["images"], strict=True):
        assert [e["label"] for e in entry["top"]] == np.argsort(-row, kind="stable").tolist()
        np.testing.assert_allclose([e["probability"] for e in entry["top"]], -np.sort(-row), atol=1e-6)
        assert entry["top"][0]["class"] == f"class{entry['top'][0]['label']}"
    cut = "has damaged image data, or a variant of its format that DALI cannot decode"
    assert (bad_status, bad["error"]) == (422, f"cut.jpg {cut}")
    assert bad["images"][0]["error"] == cut
    assert bad["images"][1] == content["images"][0]
    assert bad["images"][2]["error"] == "is not in an image format that DALI supports"


class Browser:
    """A headless Chromium, controlled with the DevTools protocol over pipes."""

    def __init__(self, folder):
        (commands, to_browser), (from_browser, answers) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{commands} 4>&{answers}'
        arguments = ["bash", "-c", command, CHROMIUM, folder]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(arguments, pass_fds=(commands, answers), stdout=null, stderr=null)
        os.close(commands)
        os.close(answers)
        self._commands, self._answers = open(to_browser, "wb"), open(from_browser, "rb")  # noqa: SIM115
        self._session, self._buffer, self._count, self.events = {}, b"", 0, []

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._commands.close()
        self._answers.close()

    def call(self, method, **parameters):
        """Send a command and return its result. Events that arrive before the result are appended to self.events."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            while b"\0" not in self._buffer:
                data = self._answers.read1()
                assert data, "the browser has exited"
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def text(self):
        return self.evaluate("document.body.innerText")

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_page_shows_predictions_in_chromium(start, tmp_path):
    def classify(upload):
        if upload.content[:2] != b"\xff\xd8":
            return None, "is not in an image format that DALI supports"
        return entries((3, "<b>tench</b>", 0.875), (1, "cat", 0.1)), None

    names = ["a.jpg", "<img src=x onerror=alert(1)>.jpg", "b.txt", "large.jpg", "fifth.jpg"]
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        Image.new("RGB", (60, 40), "red").save(path, "jpeg")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "large.jpg").write_bytes(b"x" * 10**5)
    (tmp_path / "profile").mkdir()
    port = start(classify, max_images=4)
    with Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
        wait_until(lambda: browser.evaluate("document.readyState === 'complete' && !!document.forms"), 30)
        wait_until(lambda: "Drop photographs here" in browser.text(), 30)
        document = browser.call("DOM.getDocument")["root"]["nodeId"]
        field = browser.call("DOM.querySelector", nodeId=document, selector="input")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=field, files=paths[:1])
        wait_until(lambda: "1 predicted" in browser.text(), 30)
        assert "<b>tench</b>\n87.5%\ncat\n10.0%" in browser.text()
        assert browser.evaluate("document.images[0].naturalWidth") == 60
        data = {"items": [], "files": paths, "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            browser.call("Input.dispatchDragEvent", type=kind, x=300, y=200, data=data)
        wait_until(lambda: "2 predicted, 2 failed, 1 skipped" in browser.text(), 30)
        text = browser.text()
        assert text.count("87.5%") == 2 and names[1] in text
        assert "b.txt\n\nThis file is not in an image format that DALI supports" in text
        assert "large.jpg\n\nThis file exceeds the server's size limit" in text
        browser.screenshot(tmp_path / "page.png")
        bars = "getComputedStyle(document.querySelector('li i'), '::before').width"
        assert float(browser.evaluate(bars).removesuffix("px")) > 100
        # Apart from the expected status 422, there is neither a script error nor a violation of the security policy.
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        (failure,) = [event["params"] for event in browser.events if event["method"] in kinds]
        assert "the server responded with a status of 422" in failure["entry"]["text"]


# The image of the request, unlike that of the warm-up, takes longer to decode than any test.
SLOW_DECODER = """
import runpy
import sys
import time

from paddle_resnet.data import bad_images

header_problem = bad_images.header_problem
bad_images.header_problem = lambda data, *rest: time.sleep(600) if data == b"slow" else header_problem(data, *rest)
runpy.run_module("paddle_resnet.predict", run_name="__main__")
"""


@pytest.mark.slow
def test_signal_stops_server_that_decodes_a_large_image(checkpoint, tmp_path):
    """test_server_predicts_like_the_command_and_stops_on_signal tests SIGINT, too."""
    export.export(checkpoint, tmp_path / "export")
    command = [sys.executable, "-c", SLOW_DECODER, str(tmp_path / "export"), "--serve", "0", "--device", "cpu"]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
        ThreadPoolExecutor(1) as client,
    ):
        port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
        answer = client.submit(request, port, body=form(("slow.jpg", b"slow")))
        sleep(0.5)
        server.send_signal(signal.SIGTERM)
        start = monotonic()
        assert server.wait(60) == 0
        assert monotonic() - start < 5  # about 1 s on an idle machine
        status, _, content = answer.result()
    assert (status, content["error"]) == (503, "POST /predict: the server is stopping; retry later")
