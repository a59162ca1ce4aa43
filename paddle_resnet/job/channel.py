"""Connections between the monitors of a job. A message is a line of JSON. No message is sent before both ends of a
connection have proved that they belong to the job; earlier, they exchange only challenges and proofs.

Each rank generates a Diffie-Hellman key pair and publishes its public key in Paddle's TCP store. Rank 0 derives a
shared key with each other rank: both ranks combine their own private key with the public key of the other rank. The
shared key never leaves these two ranks and their monitors, which receive it over a socket pair. Over TCP, each end
proves that it has the shared key by sending an HMAC of a random challenge.

A client that reads the store, the process list or the network, or connects to the port, cannot impersonate a rank. But
Paddle does not protect the store against writes, so a client can replace public keys in the store. A client that can
alter packets can alter messages, because messages are neither encrypted nor signed. A client with this much access
could end a job even if there were no monitors, so run jobs on a trusted network.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time

# Maximum length of a message between monitors, which limits the memory that a connection can use.
LINE_BYTES = 1 << 16
# Time limit for proving that a connection belongs to the job, and maximum number of connections without this proof.
PROOF_S, MAX_UNAUTHENTICATED = 10, 64
# Time during which connect() starts new attempts, and time after which TCP closes the connection to a machine that does
# not respond.
CONNECT_S, SILENCE_S = 30, 30
# Prime of the 2048-bit group in RFC 3526, whose generator is 2.
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B"
    "302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE6"
    "49286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D"
    "670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
    "3995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)


def key_pair():
    """Generate a key pair, and return it as the numbers (private, public)."""
    private = secrets.randbits(256)
    return private, pow(2, private, _PRIME)


def shared_key(private, public):
    """Return the shared key, a hexadecimal string derived from this end's private key and the other end's public key.

    Raises:
        ValueError: `public` is not a public key.
    """
    if not 1 < public < _PRIME - 1:
        raise ValueError("not a public key")
    return hashlib.sha256(str(pow(public, private, _PRIME)).encode()).hexdigest()


def encode(message):
    """Return a message as bytes: a line of JSON with its newline."""
    return json.dumps(message).encode() + b"\n"


async def receive(reader):
    """Return the next message, a non-empty dictionary, or None if the connection has ended or the line is invalid."""
    try:
        message = json.loads(await reader.readline())
    except (OSError, ValueError, RecursionError):  # asyncio raises ValueError for a line that is too long
        return None
    return message if message and isinstance(message, dict) else None


def send(writer, message):
    """Send a message, unless end() has been called for the connection."""
    with contextlib.suppress(RuntimeError):  # asyncio raises RuntimeError after write_eof()
        writer.write(encode(message))


def end(writer):
    """Stop sending on a connection. The other end closes the connection after reading all messages."""
    with contextlib.suppress(OSError):
        writer.write_eof()


async def connect(host, port, key, rank):
    """Connect to the coordinator of the job.

    Returns:
        reader, writer.
    Raises:
        OSError: the coordinator does not answer, or does not prove that it belongs to the job.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return await asyncio.wait_for(_prove(host, port, key, rank), PROOF_S)
        except (OSError, asyncio.TimeoutError) as e:  # the coordinator may be busy with unauthenticated clients
            if time.monotonic() > deadline:
                raise ConnectionError(str(e) or "no answer") from e
        await asyncio.sleep(0.5)


async def _prove(host, port, key, rank):
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
    try:
        _keep_alive(writer)
        theirs, mine = (await receive(reader) or {}).get("challenge"), secrets.token_hex()
        writer.write(encode({"rank": rank, "challenge": mine, "proof": _proof(key, rank, theirs, mine)}))
        if not _is_proof(await receive(reader), key, "coordinator", theirs, mine):
            raise ConnectionError("the other end does not belong to this job")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def serve(listener, keys, welcome):
    """Accept connections. If too many connections are unauthenticated, close the oldest unauthenticated connection.

    Args:
        listener: listening socket.
        keys: [(rank, key)].
        welcome: coroutine function with the arguments (rank, reader, writer), called for each authenticated rank. When
            the coroutine returns, the connection is closed.
    """
    unauthenticated, meetings = [], set()

    async def meet(reader, writer):
        unauthenticated.append(writer)
        if len(unauthenticated) > MAX_UNAUTHENTICATED:
            unauthenticated.pop(0).close()
        try:
            rank = await asyncio.wait_for(_verify(reader, writer, keys), PROOF_S)
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

    await asyncio.start_server(accept, sock=listener, limit=LINE_BYTES, backlog=len(keys) + MAX_UNAUTHENTICATED)


async def _verify(reader, writer, keys):
    """Return the rank of the client, or None if the client cannot prove that it belongs to the job."""
    _keep_alive(writer)
    mine = secrets.token_hex()
    writer.write(encode({"challenge": mine}))
    answer = await receive(reader) or {}
    theirs = answer.get("challenge")
    for rank, key in keys:
        if answer.get("rank") == rank and _is_proof(answer, key, rank, mine, theirs):
            writer.write(encode({"proof": _proof(key, "coordinator", mine, theirs)}))
            return rank
    return None


def _proof(key, prover, *challenges):
    """Return a proof. The proof depends on the name of its sender, so that the receiver cannot send the same proof back
    as its own."""
    return hmac.new(key.encode(), json.dumps([prover, *challenges]).encode(), "sha256").hexdigest()


def _is_proof(message, key, *facts):
    proof = str((message or {}).get("proof")).encode(errors="replace")
    return hmac.compare_digest(proof, _proof(key, *facts).encode())


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
