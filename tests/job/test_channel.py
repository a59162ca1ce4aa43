"""Authentication of ranks. Unauthenticated clients must not affect a job."""

import asyncio
import contextlib
import json
import socket
import time
from types import SimpleNamespace

import pytest

from paddle_resnet.job import channel

KEYS = [(0, "key 0"), (1, "key 1")]


def run(scenario):
    """Start a server and run the coroutine function `scenario` with the server address and the list of received
    messages. Each item of the list is (rank, message)."""

    async def run():
        received = []

        async def welcome(rank, reader, writer):
            while message := await channel.receive(reader):
                received.append((rank, message))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            await channel.serve(listener, KEYS, welcome)
            return await asyncio.wait_for(scenario(listener.getsockname(), received), 40)

    return asyncio.run(run())


async def rank_is_served(address, received):
    """Send a message as rank 1 and return whether the server receives exactly this message."""
    reader, writer = await channel.connect(*address, "key 1", 1)
    writer.write(channel.encode({"at": "home"}))
    while not received:
        await asyncio.sleep(0.01)
    writer.close()
    return received == [(1, {"at": "home"})]


def test_both_ends_derive_the_same_key():
    (mine, my_public), (theirs, their_public), (other, _) = (channel.key_pair() for _ in range(3))
    assert mine.bit_length() > 200  # the probability of a shorter random number is below 1e-16
    key = channel.shared_key(mine, their_public)
    assert key == channel.shared_key(theirs, my_public)
    assert key != channel.shared_key(other, my_public)
    assert key != channel.shared_key(other, their_public)


@pytest.mark.parametrize("public", [0, 1, channel._PRIME - 1, channel._PRIME, -5])
def test_weak_public_key_is_rejected(public):
    with pytest.raises(ValueError, match="public key"):
        channel.shared_key(channel.key_pair()[0], public)


def test_prime_is_safe():
    for number in (channel._PRIME, channel._PRIME // 2):
        assert number.bit_length() in (2048, 2047)
        assert pow(3, number - 1, number) == 1
    # The generator has order q, so a public key does not reveal any bit of the secret exponent.
    assert pow(2, channel._PRIME // 2, channel._PRIME) == 1


def test_messages_after_end_are_dropped():
    """A task may send its next message after another task has closed the connection."""

    async def scenario(address, received):
        _, writer = await channel.connect(*address, "key 1", 1)
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
        json.dumps({"rank": 1}).encode() + b"\n",
        json.dumps({"rank": [], "challenge": {}, "proof": ""}).encode() + b"\n",
        json.dumps({"rank": 1, "challenge": {}, "proof": "\ud800"}).encode() + b"\n",
        json.dumps({"rank": 1, "challenge": "", "proof": None}).encode() + b"\n",
        json.dumps({"rank": 1, "challenge": "", "proof": "0" * 64}).encode() + b"\n",
    ],
)
def test_invalid_data_of_unauthenticated_client_closes_only_this_connection(line):
    async def scenario(address, received):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(line + channel.encode({"failed": "ha", "code": 1}))
        await reader.readline()  # skip the challenge
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
        assert time.monotonic() - start < channel.PROOF_S / 2
        challenged = [await reader.readline() for reader, _ in idle]
        assert all(challenged)
        closed = [reader for reader, _ in idle if reader.at_eof()]
        assert len(closed) >= 252 - channel.MAX_UNAUTHENTICATED
        for _, writer in idle:
            writer.close()
        return True

    assert run(scenario)


def test_unauthenticated_clients_do_not_disconnect_rank():
    async def scenario(address, received):
        reader, writer = await channel.connect(*address, "key 0", 0)
        writer.write(channel.encode({"at": "home"}))
        idle = [await asyncio.open_connection(*address) for _ in range(channel.MAX_UNAUTHENTICATED + 1)]
        for client, _ in idle:
            await client.readline()  # the server has accepted this connection
        writer.write(channel.encode({"at": "work"}))
        while len(received) < 2:
            assert not reader.at_eof()
            await asyncio.sleep(0.01)
        for other in (writer, *(client for _, client in idle)):
            other.close()
        return received

    assert run(scenario) == [(0, {"at": "home"}), (0, {"at": "work"})]


def test_both_ends_detect_lost_connections(monkeypatch):
    kept, keep = [], channel._keep_alive

    def keep_alive(writer):
        keep(writer)
        kept.append(writer.get_extra_info("socket"))
        assert kept[-1].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name, value in (("USER_TIMEOUT", 30_000), ("KEEPIDLE", 15), ("KEEPINTVL", 5), ("KEEPCNT", 3)):
            assert kept[-1].getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) == value

    monkeypatch.setattr(channel, "_keep_alive", keep_alive)
    assert run(rank_is_served)
    assert len(kept) == 2


def test_idle_unauthenticated_client_is_disconnected(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_S", 0.1)

    async def scenario(address, received):
        reader, writer = await asyncio.open_connection(*address)
        assert json.loads(await reader.readline()).keys() == {"challenge"}
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_replayed_proof_is_rejected():
    async def scenario(address, received):
        sent = []
        write = asyncio.StreamWriter.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.StreamWriter, "write", lambda self, data: sent.append(data) or write(self, data))
            _, writer = await channel.connect(*address, "key 1", 1)
            writer.close()
        (proof,) = [line for line in sent if b"rank" in line]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(proof)
        await reader.readline()
        assert await reader.read() == b""
        writer.close()
        return await rank_is_served(address, received)

    assert run(scenario)


@pytest.mark.parametrize("answer", ["no proof", "wrong key", "reflected proof", "long line"])
def test_rank_rejects_unauthenticated_server(monkeypatch, answer):
    messages, is_proof = [], channel._is_proof
    monkeypatch.setattr(channel, "CONNECT_S", 0)
    monkeypatch.setattr(channel, "_is_proof", lambda *message: messages.append(message[0]) or is_proof(*message))

    async def impostor(reader, writer):
        writer.write(channel.encode({"challenge": "mine"}))
        message = await channel.receive(reader)
        if answer == "wrong key":
            proof = channel._proof("guess", "coordinator", "mine", message["challenge"])
            writer.write(channel.encode({"proof": proof}))
        elif answer == "reflected proof":
            writer.write(channel.encode({"proof": message["proof"]}))
        elif answer == "long line":
            writer.write(channel.encode({"proof": 2 * channel.LINE_BYTES * "x"}))
        writer.close()

    async def run():
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        async with server:
            with pytest.raises(OSError, match="does not belong to this job"):
                await channel.connect(*server.sockets[0].getsockname(), "key 1", 1)

    asyncio.run(run())
    assert (messages == [None]) == (answer in ("no proof", "long line"))
