"""Connections between the monitors of a job. A message is a line of JSON.

Rank 0 generates the key of the job, and Paddle's TCP store passes it to the other ranks. A connection begins with the
rank and the key of the client, and the server's answer. Clients without the key, such as port scanners, cannot affect
the job.

A client that reads the store or the network can learn the key. A client that can write to
the store can end the job even without the key, so run jobs on a trusted network.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

# Maximum length of a message between monitors, which limits the memory that a connection can use.
LINE_BYTES = 1 << 16
# Default time limit for sending the key, and maximum number of connections that have not sent the key.
KEY_S, MAX_UNAUTHENTICATED = 10, 64
# Default time during which connect() starts new attempts, and time after which TCP closes the connection to a machine
# that does not respond.
CONNECT_S, SILENCE_S = 30, 30


def new_key() -> str:
    """Generate the key of a job."""
    return secrets.token_hex()


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as bytes: a line of JSON with its newline."""
    return json.dumps(message).encode() + b"\n"


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, a non-empty dictionary, or None if the connection has ended or the line is invalid."""
    try:
        message = json.loads(await reader.readline())
    except (OSError, ValueError, RecursionError):  # asyncio raises ValueError for a line that is too long
        return None
    return message if message and isinstance(message, dict) else None


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message, unless end() has been called for the connection."""
    with contextlib.suppress(RuntimeError):  # asyncio raises RuntimeError after write_eof()
        writer.write(encode(message))


def end(writer: asyncio.StreamWriter) -> None:
    """Stop sending on a connection. The other end closes the connection after reading all messages."""
    with contextlib.suppress(OSError):
        writer.write_eof()


async def connect(
    host: str, port: int, key: str, rank: int, connect_s: float = CONNECT_S
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the coordinator of the job, and start new attempts for connect_s seconds.

    Returns:
        (reader, writer) of the connection.
    Raises:
        OSError: the coordinator does not answer, or does not accept the key.
    """
    deadline = time.monotonic() + connect_s
    while True:
        try:
            return await asyncio.wait_for(_introduce(host, port, key, rank), KEY_S)
        except (OSError, asyncio.TimeoutError) as e:  # the coordinator may be busy with unauthenticated clients
            if time.monotonic() > deadline:
                raise ConnectionError(str(e) or "no answer") from e
        await asyncio.sleep(0.5)


async def _introduce(host, port, key, rank):
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
    try:
        _keep_alive(writer)
        writer.write(encode({"rank": rank, "key": key}))
        if await receive(reader) != {"accepted": rank}:
            raise ConnectionError("the other end does not belong to this job")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def serve(
    listener: socket.socket,
    key: str,
    world_size: int,
    welcome: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    key_s: float = KEY_S,
) -> None:
    """Accept connections. If too many connections are unauthenticated, close the oldest unauthenticated connection.

    Args:
        listener: listening socket.
        key: key of the job.
        world_size: number of ranks.
        welcome: coroutine function with the arguments (rank, reader, writer), called for each authenticated rank. When
            the coroutine returns, the connection is closed.
        key_s: number of seconds after which an unauthenticated connection is closed.
    """
    unauthenticated, meetings = [], set()

    async def meet(reader, writer):
        unauthenticated.append(writer)
        if len(unauthenticated) > MAX_UNAUTHENTICATED:
            unauthenticated.pop(0).close()
        try:
            rank = await asyncio.wait_for(_authenticate(reader, writer, key, world_size), key_s)
        except (OSError, asyncio.TimeoutError):
            rank = None
        if writer in unauthenticated:
            unauthenticated.remove(writer)
        if rank is not None:
            await welcome(rank, reader, writer)
        writer.close()

    def accept(reader, writer):
        meetings.add(task := asyncio.create_task(meet(reader, writer)))
        task.add_done_callback(meetings.discard)

    await asyncio.start_server(accept, sock=listener, limit=LINE_BYTES, backlog=world_size + MAX_UNAUTHENTICATED)


async def _authenticate(reader, writer, key, world_size):
    """Return the rank of the client, or None if the client does not belong to the job."""
    _keep_alive(writer)
    match await receive(reader):
        case {"rank": int(rank), "key": str(sent)} if 0 <= rank < world_size:
            if hmac.compare_digest(sent.encode(errors="replace"), key.encode()):
                writer.write(encode({"accepted": rank}))
                return rank
    return None


def _keep_alive(writer):
    """Set TCP options so that the connection closes if the other machine is down."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    ):
        writer.get_extra_info("socket").setsockopt(level, option, value)
