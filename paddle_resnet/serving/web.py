"""Web application of `predict --serve`: a page for trying a model, and predictions in JSON."""

from __future__ import annotations

import asyncio
import base64
import errno
import functools
import io
import ipaddress
import json
import secrets
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from PIL import Image

from paddle_resnet.utils import files, logger
from paddle_resnet.utils.errors import UsageError, installation, printable

try:
    import h11
    import python_multipart  # noqa: F401  Starlette needs it for uploads, but does not report that it is missing
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartParser
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except Exception as e:  # importing a broken package can raise any exception
    reason = " ".join(str(e).split()) or type(e).__name__
    raise UsageError(f"--serve: a required package cannot be imported ({reason}); run {installation('serve')}") from e

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

MAX_REQUESTS = 8  # maximum number of requests to process at the same time
MAX_CONNECTIONS = 100
BODY_S = 60  # maximum time for receiving the images of a request
IDLE_S = 60  # a connection is closed if no request has been in progress for this long
STOP_S = 1  # maximum time for answering the remaining requests after a signal
FORM = "multipart/form-data"
EXAMPLE = "for example with curl -F image=@FILE"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The page loads no external resources, and runs only its own script, even if a file or class name contains markup.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class Upload:
    """An image file that a client has sent. The client chooses the name, which is not a path on this machine."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def read(self) -> tuple[bytes, None]:
        """Return (content, problem), as image_files.predict expects for images that are not files."""
        return self.content, None


def blank_image() -> Upload:
    """Return a small image for testing whether predictions work."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "png")
    return Upload("blank.png", file.getvalue())


def create_app(
    predict: Callable[[Upload], tuple[list[dict[str, Any]] | None, str | None]],
    worker: Executor,
    description: dict[str, Any],
    max_bytes: int,
    max_images: int,
    hosts: Sequence[str] = ("*",),
    heat_map: Callable[[Upload, int], bytes | None] | None = None,
    max_requests: int = MAX_REQUESTS,
    body_s: float = BODY_S,
) -> Starlette:
    """Return the application: the page at /, and predictions at POST /predict.

    Args:
        predict: function that maps an Upload to ([{"label", "class", "probability"}], None), or to (None, problem) if
            the image cannot be decoded.
        worker: ThreadPoolExecutor(1), whose thread makes all calls to predict, one after the other.
        description: content of model.json.
        max_bytes: maximum size of a request body.
        max_images: maximum number of images per request.
        hosts: host names that the Host header of a request may contain; "*" allows any name. Checking the name prevents
            DNS rebinding, in which the domain name of a website resolves to the address of this server; the header then
            contains the name of the website.
        heat_map: function that maps an Upload and a label to the JPEG file of a heat map, or to None if it cannot be
            drawn; called like predict. If heat_map is None, requests for heat maps get status 400.
        max_requests: maximum number of requests to process at the same time.
        body_s: maximum number of seconds for receiving the images of a request.
    """
    MultiPartParser.spool_max_size = max_bytes  # keep uploads in memory, because the disk may be full
    slots, key = asyncio.Semaphore(max_requests), "classes" if "multi_label" in description else "top"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    template = environment.get_template("page.html.j2")

    async def page(request):
        nonce = secrets.token_urlsafe()
        limits = {"max_bytes": max_bytes, "max_images": max_images}
        text = template.render(model=description, **limits, has_heat_maps=heat_map is not None, nonce=nonce)
        return HTMLResponse(
            text.encode(errors="replace"), headers=HEADERS | {"Content-Security-Policy": POLICY.format(nonce=nonce)}
        )

    async def classify(request):
        try:
            uploads = await asyncio.wait_for(_receive_uploads(request, max_bytes, max_images), body_s)
        except asyncio.TimeoutError as e:
            raise HTTPException(
                408, f"POST /predict: not received within {body_s} s; send fewer or smaller images"
            ) from e
        run = asyncio.get_running_loop().run_in_executor
        draws = request.query_params.get("heat_map") == "1"
        if draws and heat_map is None:
            raise HTTPException(400, "heat_map=1: this model has no heat maps; see the server's stderr")
        images = []
        for upload in uploads:
            if await request.is_disconnected():
                raise ClientDisconnect
            top, problem = await run(worker, predict, upload)
            images.append(_entry(upload, key, top, problem))
            if draws and problem is None:
                drawn = await run(worker, heat_map, upload, top[0]["label"]) if top else None
                images[-1]["heat_map"] = drawn and f"data:image/jpeg;base64,{base64.b64encode(drawn).decode()}"
        return images

    async def answer(request):
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise HTTPException(403, "POST /predict: sent by a page of a different site; open the page of this server")
        if slots.locked():
            retry = {"Retry-After": "5"}
            raise HTTPException(503, f"POST /predict: {max_requests} requests are in progress; retry later", retry)
        try:
            async with slots:
                images = await classify(request)
        except asyncio.CancelledError:  # a signal has stopped the server; a raised HTTPException would not be answered
            return _json({"error": "POST /predict: the server is stopping; retry later"}, 503)
        problems = [f"{entry['image']} {entry['error']}" for entry in images if "error" in entry]
        if problems:
            return _json({"error": problems[0], "images": images}, 422)
        return _json({"images": images})

    return Starlette(
        routes=[Route("/", page), Route("/predict", answer, methods=["POST"])],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={
            HTTPException: lambda request, e: _json({"error": _message(request, e)}, e.status_code, e.headers),
            ClientDisconnect: lambda request, e: _json({"error": "the client closed the connection"}, 400),
            Exception: _report_failure,
        },
    )


def _entry(upload, key, found, problem):
    """Return the JSON object for an image. `key` is the key of the predicted classes."""
    return {"image": upload.name} | ({key: found} if problem is None else {"error": problem})


def _json(content, status=200, headers=None):
    """Return a response in ASCII, because class names may contain characters that UTF-8 cannot encode."""
    text = json.dumps(files.finite(content))
    return Response(text, status, headers=HEADERS | dict(headers or {}), media_type="application/json")


def _message(request, error):
    """Return the message of an HTTPException. If the message has no subject, as is the case for Starlette's messages,
    prepend the request's method and path."""
    has_subject = ": " in error.detail
    return error.detail if has_subject else f"{request.method} {request.scope['path']}: {error.detail}"


def _report_failure(request, error):
    if isinstance(error, h11.LocalProtocolError):  # the client violates HTTP, and uvicorn has already answered
        return _json({"error": "not a valid HTTP request"}, 400)
    for line in "".join(traceback.format_exception(error)).splitlines():
        logger.write_line(printable(line), sys.stderr)
    what = f"{request.method} {request.scope['path']}"
    return _json({"error": f"{what}: failed ({type(error).__name__}); see the server's stderr"}, 500)


async def _receive_uploads(request, max_bytes, max_images):
    """Return the uploads in a request as [Upload]. Raise HTTPException if the request is not a form with images or
    exceeds a limit."""
    if not request.headers.get("content-type", "").lower().startswith(FORM):
        raise HTTPException(415, f"POST /predict: not {FORM}; send a form with images, {EXAMPLE}")
    too_large = HTTPException(
        413,
        f"POST /predict: exceeds {max_bytes / 1e6:g} MB; send fewer or smaller images, or start the server with a "
        "larger --serve-max-mb",
    )
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    received, tail = 0, b""

    async def receive():
        nonlocal received, tail
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise too_large
        tail = (tail + message.get("body", b""))[-100:]
        return message

    try:
        async with Request(request.scope, receive).form(max_files=max_images, max_fields=1) as form:
            fields = form.multi_items()
            texts = [name for name, value in fields if isinstance(value, str)]
            if texts:
                raise HTTPException(400, f"{texts[0]}: text instead of a file; send image files, {EXAMPLE}")
            uploads = [Upload(file.filename, await file.read()) for _, file in fields]
    except HTTPException as e:
        if e.detail.startswith("Too many files"):  # Starlette's message
            message = f"POST /predict: more than {max_images} images; send fewer, or start the server with a larger "
            raise HTTPException(413, f"{message}--serve-max-images") from e
        raise
    except ValueError as e:  # the form declares a character set that cannot decode its names
        raise HTTPException(400, f"POST /predict: not a valid form ({e}); send image files, {EXAMPLE}") from e
    if not tail.rstrip().endswith(b"--"):  # Starlette would omit the last image of an incomplete form
        raise HTTPException(400, f"POST /predict: the form is incomplete; send all its images, {EXAMPLE}")
    if not uploads:
        raise HTTPException(400, f"POST /predict: contains no images; send image files, {EXAMPLE}")
    return uploads


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine. If the port is 0, the system chooses a free port.

    Raises:
        UsageError: the address or the port cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a valid name"
        raise UsageError(
            f"--serve-host {host}: unknown address ({reason}); use an address of this machine, such as 127.0.0.1"
        ) from e
    try:
        return socket.create_server(address, family=family)
    except OSError as e:
        if e.errno == errno.EADDRNOTAVAIL:
            remedy = "use an address of this machine, such as 127.0.0.1"
            raise UsageError(f"--serve-host {host}: cannot listen on this address ({_reason(e)}); {remedy}") from e
        remedy = "choose a different port, or 0 for a free one"
        raise UsageError(f"--serve {port}: cannot listen on {host} ({_reason(e)}); {remedy}") from e


def _reason(error):
    """Return the reason for an OSError from create_server, without the address."""
    return error.strerror.partition(" (while attempting")[0]


def url(listener: socket.socket) -> str:
    """Return the URL of the server that listens on a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def allowed_hosts(listener: socket.socket, host: str) -> list[str]:
    """Return the host names that the Host headers of requests to a socket may contain (see create_app): ["*"] unless
    the socket accepts connections from this machine only."""
    address = listener.getsockname()[0]
    if not is_loopback(listener):
        return ["*"]
    return sorted({"localhost", "127.0.0.1", "[::1]", host, f"[{address}]" if ":" in address else address})


def is_loopback(listener: socket.socket) -> bool:
    """Return whether a socket accepts connections from this machine only."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class _Protocol(H11Protocol):
    """A connection that is closed if no request arrives, or if the client does not read the response, so that idle
    clients cannot occupy all MAX_CONNECTIONS connections.

    Args:
        idle_s: number of seconds after which an idle connection is closed.
        arguments: arguments of H11Protocol.
    """

    def __init__(self, *, idle_s, **arguments):
        super().__init__(**arguments)
        self._idle_s = idle_s

    def connection_made(self, transport):
        super().connection_made(transport)
        self._close_if_idle_later()

    def on_response_complete(self):
        super().on_response_complete()
        self._close_if_idle_later()

    def _close_if_idle_later(self):
        self.loop.call_later(self._idle_s, self._close_if_idle, self.cycle)

    def _close_if_idle(self, before):
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.abort()


def create_server(app: Starlette, idle_s: float = IDLE_S) -> uvicorn.Server:
    """Return a server for the result of create_app, with a limit on connections. A connection is closed if no request
    has been in progress for idle_s seconds."""
    config = uvicorn.Config(
        app,
        http=functools.partial(_Protocol, idle_s=idle_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
    )
    return uvicorn.Server(config)


def serve(app: Starlette, listener: socket.socket, announce: Callable[[], object] = lambda: None) -> None:
    """Answer requests until a signal arrives. Return after SIGTERM, and raise KeyboardInterrupt after SIGINT.

    Args:
        app: result of create_app.
        listener: result of listen.
        announce: function to call once the signal handlers are installed.
    """
    server, received = create_server(app), set()

    def stop(number, frame):
        received.add(number)
        server.should_exit = True

    # This handler also stops a server that is still starting. Later, uvicorn replaces the handler; when uvicorn has
    # stopped, it restores the handler and raises the received signals again.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    announce()
    server.run(sockets=[listener])
    if signal.SIGINT in received:
        raise KeyboardInterrupt
