"""The monitors of a job, tested in a single event loop and as separate processes. test_jobs.py tests complete jobs."""

import asyncio
import contextlib
import functools
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT, wait_until
from paddle_resnet.job import channel, monitor
from paddle_resnet.job.position import Position

NO_ROOM = {"failed": "no room", "code": 2}
LOGS = "; see the logs of the ranks, or use a larger value"


class Signals(list):
    def __init__(self):
        self.parent = os.getppid()


@pytest.fixture(autouse=True)
def killed(monkeypatch):
    """Record the signals that the monitors under test would send. Each simulated rank has the PID of the test process's
    parent. Tests change the attribute `parent`, the PID of the monitors' parent."""
    killed = Signals()
    system = {"kill": lambda *args: killed.append(args), "getppid": lambda: killed.parent}
    monkeypatch.setattr(monitor, "os", SimpleNamespace(**vars(os) | system))
    return killed


@pytest.fixture
def short_grace(monkeypatch):
    """Shorten the time in which ranks and monitors must exit, GRACE_S, to 0.1 s."""
    monkeypatch.setattr(monitor, "GRACE_S", 0.1)


class Job:
    """Several ranks with one monitor each. The monitor of rank 0 contains the coordinator."""

    def __init__(self, world_size=3, timeout_s=600):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.coordinator = monitor._Coordinator(world_size, timeout_s, self._listener)
        self.address = dict(zip(("host", "port"), self._listener.getsockname(), strict=True))
        self.world_size, self._timeout_s, self._ends = world_size, timeout_s, [self._listener]

    async def start(self, rank, has_address=True, pid=None, launcher=None):
        """Start a simulated rank: a connection to its monitor, a position, and a task that runs the monitor."""
        near, far = socket.socketpair()
        position = Position()
        self._ends += [near, far]
        coordinator = self.coordinator if rank == 0 else None
        pid = pid or os.getppid()
        common = (rank, self._timeout_s, 0.02, "master:1", pid, launcher or monitor._parent(pid))
        one = monitor.Monitor(*common, far, Position(os.dup(position.descriptor)), coordinator)

        async def run():
            await one.run()
            if coordinator:
                await coordinator.finish()

        reader, writer = await asyncio.open_unix_connection(sock=near)
        this = SimpleNamespace(reader=reader, writer=writer, position=position, monitor=asyncio.create_task(run()))
        if has_address:
            send(this, {"address": {**self.address, "key": "key"}})
        return this

    async def start_all(self):
        ranks = [await self.start(rank) for rank in range(self.world_size)]
        await until(lambda: len(self.coordinator._writers) == len(ranks))
        return ranks


def run(scenario, *args, **kwargs):
    """Run the coroutine function `scenario`, passing a Job(**kwargs) and *args. Check that no task raises an unexpected
    exception."""
    problems = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        job = Job(**kwargs)
        try:
            return await asyncio.wait_for(scenario(job, *args), 60)
        finally:
            for end in job._ends:
                end.close()

    result = asyncio.run(run())
    gc.collect(1)  # asyncio reports the exception of a task when the task is deleted
    assert not problems
    return result


def send(rank, message):
    rank.writer.write(channel.encode(message))


async def exit_code(rank, has_ended=True):
    """Return the exit code that the monitor sends to a rank, which then exits. The code 0 means a normal exit."""
    code = await rank.reader.read(1)
    if has_ended:
        rank.writer.close()
        await rank.monitor
    return code[0]


async def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_first_failure_is_sent_to_all_ranks(capsys, killed):
    """A rank that exits within GRACE_S is not killed."""

    async def scenario(job):
        ranks = await job.start_all()
        send(ranks[2], NO_ROOM)
        assert await asyncio.gather(*(exit_code(rank, has_ended=False) for rank in ranks)) == [2, 2, 0]
        await asyncio.sleep(0.3)
        for rank in ranks:
            rank.writer.close()
        for rank in ranks:
            await rank.monitor

    run(scenario)
    assert capsys.readouterr().err == "train.py: error: rank 2 failed first: no room\n" * 2
    assert killed == []


@pytest.mark.parametrize("code", [1, 255])
def test_failure_of_rank_0_is_sent_to_other_ranks(capsys, code):
    async def scenario(job):
        ranks = await job.start_all()
        send(ranks[0], NO_ROOM | {"code": code})
        assert await asyncio.gather(*map(exit_code, ranks)) == [0, code, code]

    run(scenario)
    assert capsys.readouterr().err == "train.py: error: rank 0 failed first: no room\n" * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_lost_rank_is_reported_with_position(capsys, rank):
    async def scenario(job):
        ranks = await job.start_all()
        ranks[rank].position.phase("epoch 7 train")
        ranks[rank].position.step(2, waits=True)
        ranks[rank].writer.close()
        others = [other for other in ranks if other is not ranks[rank]]
        assert await asyncio.gather(*map(exit_code, others)) == [1, 1]

    run(scenario)
    message = f"rank {rank} failed first: its process was killed (out of memory?) or crashed in epoch 7 train, step 2, "
    assert capsys.readouterr().err.count(f"train.py: error: {message}") == 2


@pytest.mark.parametrize("is_connected", [True, False])
def test_late_rank_receives_first_failure(capsys, is_connected):
    async def scenario(job):
        ranks = [await job.start(rank) for rank in (0, 1)]
        if is_connected:
            ranks.append(await job.start(2))
        send(ranks[0], NO_ROOM)
        await ranks[0].reader.read(1)
        await until(lambda: job.coordinator._end)
        codes = [await exit_code(ranks[1])]
        if not is_connected:
            ranks[0].writer.close()
            await asyncio.sleep(0.1)
            assert not ranks[0].monitor.done()
            ranks.append(await job.start(2))
        codes.append(await exit_code(ranks[2]))
        assert codes == [2, 2]
        await ranks[0].monitor

    run(scenario)
    assert capsys.readouterr().err.count("rank 0 failed first: no room") == 2


def test_coordinator_waits_until_all_ranks_have_closed_their_connections():
    async def scenario(job):
        ended, writers = [], job.coordinator._writers
        writers[1] = SimpleNamespace(write_eof=lambda: ended.append(1))
        asyncio.get_running_loop().call_later(0.1, writers.clear)
        await job.coordinator.finish()
        assert ended == [1] and not writers

    run(scenario)


def test_normal_exit_of_ranks_is_not_failure(capsys):
    async def scenario(job):
        ranks = await job.start_all()
        for rank in (1, 2, 0):
            send(ranks[rank], {"bye": True})
            assert await exit_code(ranks[rank]) == 0
        assert job.coordinator._end is None

    run(scenario)
    assert capsys.readouterr().err == ""


def test_stalled_rank_is_reported_after_timeout(capsys, killed):
    """In this test, no rank executes Python code, as if C code held the GIL. The monitors read the positions of the
    ranks from shared memory."""

    async def scenario(job):
        ranks = await job.start_all()
        for rank, place in enumerate([8, 8, 7]):
            ranks[rank].position.phase("epoch 0 train")
            ranks[rank].position.step(place, waits=place == 7)
        start = time.monotonic()
        while time.monotonic() < start + 0.5:
            ranks[0].position.step(9, waits=False)
            assert job.coordinator._end is None
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*map(exit_code, ranks)) == [1, 1, 1]

    run(scenario, timeout_s=1)
    message = "--comm-timeout-s 1: no progress for 1 s; rank 2 is in epoch 0 train, step 7, waiting for images"
    message += f", other ranks are waiting in epoch 0 train, step 9{LOGS}"
    assert capsys.readouterr().err == f"train.py: error: {message}\n" * 3
    assert not killed


def test_progress_of_other_ranks_does_not_reset_timeout():
    coordinator, now = monitor._Coordinator(2, 50, None), time.monotonic()
    coordinator._seen = {0: ([1, 8, "epoch 0 train"], now), 1: ([1, 2, "epoch 0 train"], now - 49)}
    coordinator.check_progress()
    assert coordinator._end is None
    coordinator._seen[1] = ([1, 2, "epoch 0 train"], now - 50)
    coordinator.check_progress()
    assert (
        "rank 1 is in epoch 0 train, step 0, other ranks are waiting in epoch 0 train, step 3"
        in coordinator._end["end"]
    )


def test_stopped_rank_is_reported_at_any_position_of_others(capsys, monkeypatch):
    # The test process simulates both ranks, and a stopped child process only provides the PID of rank 1. The test
    # therefore replaces the function that checks whether the rank has exited.
    monkeypatch.setattr(monitor.Monitor, "_has_rank_ended", lambda self: self._is_rank_gone)

    async def scenario(job, pid):
        ranks = [await job.start(0), await job.start(1, pid=pid)]
        for rank in ranks:
            rank.position.phase("epoch 0 train")
            rank.position.step(7, waits=False)
        assert await asyncio.gather(*map(exit_code, ranks)) == [1, 1]

    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        run(scenario, process.pid, world_size=2, timeout_s=0.2)
        process.kill()
    message = "no progress for 0.2 s; rank 1 stopped by SIGSTOP or a debugger in epoch 0 train, step 7"
    assert capsys.readouterr().err == f"train.py: error: --comm-timeout-s 0.2: {message}{LOGS}\n" * 2


def test_rank_that_continues_or_exits_is_no_longer_stopped():
    coordinator = monitor._Coordinator(2, 50, None)
    coordinator._seen = {rank: ([0, 0, "startup"], time.monotonic()) for rank in (0, 1)}
    position = [1, 8, "epoch 0 train"]
    for message in ({"at": position, "stopped": False}, {"bye": True}):
        coordinator._receive(1, {"at": position, "stopped": True})
        assert coordinator._stopped == {1}
        coordinator._receive(1, message)
        assert coordinator._stopped == set()


def test_unconnected_ranks_exit_after_timeout(capsys):
    async def scenario(job):
        ranks = [await job.start(rank, has_address=False) for rank in (0, 1)]
        assert await asyncio.gather(*map(exit_code, ranks)) == [1, 1]

    run(scenario, timeout_s=0.2)
    message = (
        "--comm-timeout-s 0.2: not all ranks have connected after 0 s; check PADDLE_MASTER master:1 and the network"
    )
    assert capsys.readouterr().err == f"train.py: error: {message}\n" * 2


@pytest.mark.slow
def test_rank_exits_if_rank_0_is_silent(capsys):
    """If the machine of rank 0 stalls, neither rank 0 nor its monitor sends messages."""

    async def scenario(job):
        async def welcome(rank, reader, writer):
            await asyncio.sleep(60)

        await channel.serve(job._listener, "key", job.world_size, welcome)
        assert await exit_code(await job.start(1)) == 1

    run(scenario, timeout_s=0.2)
    assert (
        "0.2: no message from rank 0 after 0 s; check PADDLE_MASTER master:1 and the network" in capsys.readouterr().err
    )


def test_rank_exits_if_rank_0_is_lost(capsys):
    async def scenario(job):
        async def welcome(rank, reader, writer):
            pass

        await channel.serve(job._listener, "key", job.world_size, welcome)
        assert await exit_code(await job.start(1)) == 1

    run(scenario)
    assert "rank 0 failed first: its process was killed (out of memory?) or crashed, or its" in capsys.readouterr().err


def test_invalid_messages_of_coordinator_are_ignored(capsys):
    async def scenario(job):
        async def welcome(rank, reader, writer):
            for message in ({"end": "a", "code": 0}, {"end": "b", "code": 256}, {"end": 3, "code": 3}, {"end": "d"}):
                channel.send(writer, message)
            channel.send(writer, {"end": "the cause", "code": 255})
            await reader.read()

        await channel.serve(job._listener, "key", job.world_size, welcome)
        assert await exit_code(await job.start(1)) == 255

    run(scenario)
    assert capsys.readouterr().err == "train.py: error: the cause\n"


def test_unreachable_rank_0_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(channel, "connect", functools.partial(channel.connect, connect_s=0.1))

    async def scenario(job):
        job._listener.close()
        assert await exit_code(await job.start(1)) == 1
        return job.address["port"]

    port = run(scenario)
    assert f"monitor of rank 0 at 127.0.0.1:{port}: cannot be reached (" in capsys.readouterr().err


@pytest.mark.parametrize("is_pid_reused", [False, True])
@pytest.mark.usefixtures("short_grace")
def test_rank_that_does_not_exit_is_killed(capsys, killed, is_pid_reused):
    """A rank cannot exit while C code holds the GIL, so the monitor kills the rank. If another process has reused
    the PID, the monitor does not kill that process."""

    async def scenario(job):
        ranks = await job.start_all()
        send(ranks[2], NO_ROOM)
        assert await exit_code(ranks[1], has_ended=False) == 2
        if is_pid_reused:
            killed.parent = 1
        await asyncio.gather(*(rank.monitor for rank in ranks))

    run(scenario)
    assert set(killed) == (set() if is_pid_reused else {(os.getppid(), signal.SIGKILL)})
    assert "train.py: error: rank 2 failed first: no room\n" in capsys.readouterr().err


@pytest.mark.usefixtures("short_grace")
def test_rank_that_leaves_normally_may_take_any_time_to_exit(killed):
    async def scenario(job):
        ranks = await job.start_all()
        for rank in (1, 2, 0):
            send(ranks[rank], {"bye": True})
            assert await exit_code(ranks[rank], has_ended=False) == 0
            await ranks[rank].monitor

    run(scenario)
    assert not killed


@pytest.mark.parametrize(
    ("world_size", "timeout_s", "period_s"), [(2, 600, 1), (400, 600, 4), (2, 5, 0.5), (400, 5, 0.5)]
)
def test_period_of_positions_depends_on_number_of_ranks_and_timeout(world_size, timeout_s, period_s):
    assert monitor._period_s(world_size, timeout_s) == period_s


@pytest.mark.parametrize(("parents", "last"), [([10, 10], 1), ([], 1), ([10], None)])
def test_rank_receives_sigterm_if_launcher_is_killed(monkeypatch, killed, parents, last):
    """The launcher (process 10) is killed before or after the monitor starts, or the rank has exited."""
    asked, parents = [], iter(parents)
    monkeypatch.setattr(monitor, "_parent", lambda pid: asked.append(pid) or next(parents, last))

    async def scenario(job):
        rank = await job.start(1, launcher=10)
        await until(lambda: killed or len(asked) > 3 or rank.monitor.done())
        await asyncio.sleep(0.2)

    run(scenario)
    assert killed == ([(os.getppid(), signal.SIGTERM)] if last else [])


def test_parent_process_id():
    assert monitor._parent(os.getpid()) == os.getppid()
    assert monitor._parent(2**22 + 1) is None
    assert monitor._is_stopped(2**22 + 1) is False


TRACED = """
import ctypes, os, signal
ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME: the parent is the debugger of this process
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_signals_and_debuggers_stop_processes():
    """The processes sleep, are stopped by a signal and by a debugger, and run."""
    commands = (["sleep", "60"], ["sleep", "60"], [sys.executable, "-S", "-c", TRACED])
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command)) for command in commands]
        for process in processes:
            stack.callback(process.kill)
        processes[1].send_signal(signal.SIGSTOP)
        pids = [*(process.pid for process in processes), os.getpid()]
        deadline = time.monotonic() + 30
        while (states := [monitor._stat(pid)[0] for pid in pids]) != ["S", "T", "t", "R"]:
            assert time.monotonic() < deadline, states
            time.sleep(0.01)
        assert [monitor._is_stopped(pid) for pid in pids] == [False, True, True, False]


@pytest.mark.parametrize("kind", ["full disk", "broken pipe", "blocked pipe", "closed"])
@pytest.mark.usefixtures("short_grace")
def test_ranks_exit_if_log_is_not_writable(kind):
    read, write = os.pipe()
    if kind == "blocked pipe":
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(write, bytes(1 << 16)):
                pass
        os.set_blocking(write, True)
        timer = threading.Timer(10, os.close, [read])  # ends a monitor that would wait for the pipe
        timer.start()
    else:
        os.close(read)
    stream = open("/dev/full" if kind == "full disk" else write, "w")  # noqa: SIM115
    if kind == "closed":
        stream.close()

    async def scenario(job):
        ranks = await job.start_all()
        send(ranks[2], NO_ROOM)
        assert await asyncio.gather(*map(exit_code, ranks)) == [2, 2, 0]

    with contextlib.redirect_stderr(stream):
        run(scenario)
    if kind == "blocked pipe":
        assert timer.is_alive()
        blocked = [thread for thread in threading.enumerate() if "(write)" in thread.name]
        assert blocked and all(thread.daemon for thread in blocked)  # the monitor can exit
        timer.cancel()
        os.close(read)
        for thread in blocked:  # redirects the descriptor of `stream`, whose number another test could have by then
            thread.join(60)
    with contextlib.suppress(OSError):
        stream.close()


def test_invalid_messages_of_rank_are_ignored(capsys):
    invalid = [
        {"failed": "ha", "code": 0},
        {"failed": "ha", "code": 256},
        {"failed": "ha", "code": "1"},
        {"failed": None, "code": 1},
        {"failed": "ha"},
        {"at": "here"},
        {"at": [1, 2]},
        {"at": ["1", 2, "epoch"]},
        {"bye": 0},
        {"end": "ha", "code": 1},
        {"rank": 2, "failed": 1, "code": 1},
        {"another": "word"},
    ]

    async def scenario(job):
        ranks = [await job.start(rank) for rank in (0, 1)]
        _, writer = await channel.connect(**job.address, key="key", rank=2)
        for message in invalid:
            writer.write(channel.encode(message))
        writer.write(channel.encode({"at": [1, 4, "epoch 0 train"]}))
        await until(lambda: job.coordinator._seen and job.coordinator._seen[2][0] == [1, 4, "epoch 0 train"])
        assert job.coordinator._end is None
        assert len(job.coordinator._writers) == 3
        for one in ranks:
            assert not one.monitor.done()
            one.monitor.cancel()

    run(scenario)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["key", "unknown key"])
def test_coordinator_accepts_each_authenticated_rank_once(key):
    async def scenario(job):
        ranks = await job.start_all()
        # The coordinator reads no messages from a second client that claims to be rank 2.
        with contextlib.suppress(ConnectionError):
            reader, writer = await channel._introduce(**job.address, key=key, rank=2)
            writer.write(channel.encode(NO_ROOM))
            assert await channel.receive(reader) is None
        assert job.coordinator._end is None
        assert len(job.coordinator._writers) == 3
        for one in ranks:
            one.monitor.cancel()

    run(scenario)


def start(listener):
    """Start the monitor process of rank 0 and return the process and the rank's end of their connection."""
    near, far = socket.socketpair()
    with far:
        return monitor.start(0, 1, 600, "master:1", far, Position(), listener), near


@pytest.mark.parametrize("sends_bye", [False, True])
def test_monitor_exits_with_its_rank(capfd, tmp_path, work_in, sends_bye):
    """The monitor ignores signals, and can open as many files as the system allows. The monitor also ignores modules in
    the working directory that have the same names as its imports, such as socket.py."""
    (tmp_path / "socket.py").write_text("raise SystemExit(9)")
    work_in(tmp_path)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        try:
            process, rank = start(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        with rank:
            assert os.getsid(process.pid) == process.pid  # the monitor survives if the rank's session is killed
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(process.pid, number)
            wait_until(lambda: resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard), 60)
            assert process.poll() is None
            if sends_bye:
                rank.sendall(channel.encode({"bye": True}))
                assert rank.recv(2) == b"\0"
        assert process.wait(60) == 0
    assert capfd.readouterr() == ("", "")


def test_monitor_does_not_wait_for_forked_processes_of_rank():
    """A process that the rank has forked inherits the rank's end of the connection to the monitor."""
    program = (
        "import os, socket, time; from paddle_resnet.job import position, monitor; "
        "near, far = socket.socketpair(); listener = socket.create_server(('127.0.0.1', 0)); "
        "process = monitor.start(0, 2, 10, 'master:1', far, position.Position(), listener); far.close(); "
        "child = os.fork(); child or time.sleep(1000); print(process.pid, child, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as rank:
        pid, child = map(int, rank.stdout.readline().split())
        assert is_alive(pid)
        rank.kill()
        rank.wait()
        assert is_alive(child)
        wait_until(lambda: not is_alive(pid), 60)
        os.kill(child, signal.SIGKILL)


def test_state_of_process_whose_name_contains_parentheses():
    comm = Path("/proc/self/comm")
    name = comm.read_text()
    try:
        comm.write_text("a) T 1 (b")
        assert monitor._parent(os.getpid()) == os.getppid()
        assert not monitor._is_stopped(os.getpid())
    finally:
        comm.write_text(name)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
