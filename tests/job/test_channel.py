"""Authentication of ranks. Unauthenticated clients must not affect a job."""

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace

import pytest

from paddle_resnet.job import channel


def run(scenario, **options):
    """Start a server with further arguments of channel.serve, and run the coroutine function `scenario` with the server
    address and the list of received messages. Each item of the list is (rank, message)."""

    async def run():
        received = []

        async def welcome(rank, reader, writer):
            while message := await channel.receive(reader):
                received.append((rank, message))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            await channel.serve(listener, "key", 2, welcome, **options)
            return await asyncio.wait_for(scenario(listener.getsockname(), received), 40)

    return asyncio.run(run())


async def rank_is_served(address, received):
    """Send a message as rank 1 and return whether the server receives exactly this message."""
    reader, writer = await channel.connect(*address, "key", 1)
    writer.write(channel.encode({"at": "home"}))
    while not received:
        await asyncio.sleep(0.01)
    writer.close()
    return received == [(1, {"at": "home"})]


def test_messages_after_end_are_dropped():
    """A task may send its next message after another task has closed the connection."""

    async def scenario(address, received):
        _, writer = await channel.connect(*address, "key", 1)
        channel.send(writer, {"at": "home"})
        channel.end(writer)
        channel.send(writer, {"at": "late"})
        while not received:
            await asyncio.sleep(0.01)
        return received

    assert run(scenario) == [(1, {"at": "home"})]


def test_end_of_a_lost_connection_is_ignored():
    def write_eof():
        raise OSError("not connected")

    channel.end(SimpleNamespace(write_eof=write_eof))


def test_message_of_rank_is_received():
    assert run(rank_is_served)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\x00\n",
        b"[1]\n",
        b"{}\n",
        b"[" * 50000 + b"\n",
        *(
            channel.encode(message)
            for message in (
                {"rank": 1},
                {"rank": [], "key": "key"},
                {"rank": 2, "key": "key"},
                {"rank": -1, "key": "key"},
                {"rank": 1, "key": {}},
                {"rank": 1, "key": "\ud800"},
                {"rank": 1, "key": "ke"},
            )
        ),
    ],
)
def test_invalid_data_of_unauthenticated_client_closes_only_this_connection(line):
    async def scenario(address, received):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(line + channel.encode({"failed": "ha", "code": 1}))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert not received
        return await rank_is_served(address, received)

    assert run(scenario)


def test_overlong_line_closes_connection():
    async def scenario(address, received):
        reader, writer = await asyncio.open_connection(*address)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 26:
                writer.write(b"x" * (1 << 16))
                sent += 1 << 16
                await writer.drain()
        assert sent < 1 << 26
        return await rank_is_served(address, received)

    assert run(scenario)


def test_idle_unauthenticated_clients_do_not_block_ranks():
    async def scenario(address, received):
        idle = [await asyncio.open_connection(*address) for _ in range(252)]
        start = time.monotonic()
        assert await rank_is_served(address, received)
        assert time.monotonic() - start < channel.KEY_S / 2
        closed = [reader for reader, _ in idle[: 252 - channel.MAX_UNAUTHENTICATED]]
        assert [await reader.read() for reader in closed] == [b""] * len(closed)
        for _, writer in idle:
            writer.close()
        return True

    assert run(scenario)


def test_unauthenticated_clients_do_not_disconnect_rank():
    async def scenario(address, received):
        reader, writer = await channel.connect(*address, "key", 0)
        writer.write(channel.encode({"at": "home"}))
        idle = [await asyncio.open_connection(*address) for _ in range(channel.MAX_UNAUTHENTICATED + 1)]
        assert await idle[0][0].read() == b""  # the server has accepted all connections and closed the oldest
        writer.write(channel.encode({"at": "work"}))
        while len(received) < 2:
            assert not reader.at_eof()
            await asyncio.sleep(0.01)
        for other in (writer, *(client for _, client in idle)):
            other.close()
        return received

    assert run(scenario) == [(0, {"at": "home"}), (0, {"at": "work"})]


def test_both_ends_detect_lost_connections():
    async def scenario():
        ends, served = [], asyncio.Event()

        async def welcome(rank, reader, writer):
            ends.append(writer)
            served.set()
            await reader.read()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            await channel.serve(listener, "key", 2, welcome)
            ends.append((await channel.connect(*listener.getsockname(), "key", 1))[1])
            await asyncio.wait_for(served.wait(), 40)
            for end in (end.get_extra_info("socket") for end in ends):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                for name, value in (("USER_TIMEOUT", 30_000), ("KEEPIDLE", 15), ("KEEPINTVL", 5), ("KEEPCNT", 3)):
                    assert end.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) == value
            ends[1].close()
        assert len(ends) == 2

    asyncio.run(scenario())


def test_idle_unauthenticated_client_is_disconnected():
    async def scenario(address, received):
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b""
        writer.close()

    run(scenario, key_s=0.1)


@pytest.mark.parametrize("answer", [b"", b"{}\n", b'{"accepted": 0}\n', b"x" * 2 * channel.LINE_BYTES])
def test_rank_rejects_other_servers(answer):
    async def other(reader, writer):
        writer.write(answer)
        writer.close()

    async def run():
        async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
            with pytest.raises(OSError, match="does not belong to this job"):
                await channel.connect(*server.sockets[0].getsockname(), "key", 1, connect_s=0)

    asyncio.run(run())
