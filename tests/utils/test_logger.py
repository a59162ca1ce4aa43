import io
import json
import math
import os
import socket
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest

from conftest import ROOT, read_report
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import RunError, UsageError


@pytest.fixture(autouse=True)
def own_log(monkeypatch):
    """Give each test an open logger of rank 0 without a report, and restore the previous logger after the test."""
    monkeypatch.setattr(logger, "_quiet", False)
    yield
    logger.close()


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "logs" / "report.json"
    begin(path)
    return path


def begin(path, rank=0, append=False):
    logger.setup(path, rank)
    logger.begin({"lr": 0.1}, append)


def entries(path):
    """Return the entries of a report without the PARAMETER entries."""
    lines = path.read_text().splitlines()
    assert all(line.startswith("DLLL ") for line in lines)
    parsed = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    assert parsed[0]["step"] == "PARAMETER"
    return [entry for entry in parsed if entry["step"] != "PARAMETER"]


def test_lines_are_flushed(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        logger.write_line("a", stream)
        assert (tmp_path / "log").read_text() == "a\n"


@pytest.mark.parametrize(
    ("step", "reported", "printed"),
    [((2, 30), [2, 30], "epoch 2 step 30"), ((2,), [2], "epoch 2"), ((), [], "summary")],
)
def test_metrics_are_reported_and_printed(report, capsys, step, reported, printed):
    logger.log(step, {"train.loss": 0.123456789, "train.images": 40, "train.arch": "ResNet18"})
    [entry] = entries(report)
    assert entry["step"] == reported
    assert entry["data"] == {"train.loss": 0.123456789, "train.images": 40, "train.arch": "ResNet18"}
    assert capsys.readouterr().out == f"{printed} train  loss 0.1235  images 40  arch ResNet18\n"
    logger.log(step, {"train.loss": 0.5, "val.loss": 0.25})
    assert capsys.readouterr().out == f"{printed}  train.loss 0.5  val.loss 0.25\n"


def test_averages_over_classes_are_reported_but_not_printed(report, capsys):
    data = {"val.top1": 0.5, "val.f1_macro": 0.25, "val.f1_weighted": 0.25}
    logger.log((3,), data)
    assert capsys.readouterr().out == "epoch 3 val  top1 0.5\n"
    assert entries(report)[0]["data"] == data


def test_numbers_have_at_least_four_digits():
    numbers = {999.96: "1000", -12345.6: "-12346", 999999.0: "999999", 1e6: "1e+06", 0.00012345: "0.0001234"}
    assert {number: logger._number(number) for number in numbers} == numbers
    assert logger._number(1234567) == "1234567"


@pytest.mark.parametrize(
    ("block", "out", "warnings", "count"),
    [(logger.only_warnings, "", 2, 0), (logger.without_repeats, "x\nsummary train  loss 1\n", 1, 1)],
    ids=["only warnings", "without repeats"],
)
def test_output_is_limited_only_inside_block(report, capsys, block, out, warnings, count):
    """The block also ends if it raises an exception."""
    with pytest.raises(KeyError), block():
        logger.info("x")
        logger.info("x")
        logger.warn("y")
        logger.warn("y")
        logger.log((), {"train.loss": 1.0})
        raise KeyError
    assert capsys.readouterr() == (out, "warning: y\n" * warnings)
    assert len(entries(report)) == count
    logger.info("x")
    logger.info("x")
    logger.log((), {"train.loss": 2.0})
    assert capsys.readouterr().out == "x\nx\nsummary train  loss 2\n"
    assert len(entries(report)) == count + 1


def test_progress_line_replaces_lines_of_steps(report, monkeypatch, capsys):
    monkeypatch.setattr(logger.progress, "is_shown", lambda: True)
    logger.log((0, 1), {"train.loss": 1.0})
    assert capsys.readouterr().out == "" and len(entries(report)) == 1
    logger.log((0,), {"train.loss": 1.0})
    assert capsys.readouterr().out == "epoch 0 train  loss 1\n"
    monkeypatch.setattr(logger.progress, "write_above", lambda text, stream: True)
    logger.log((0,), {"train.loss": 1.0})
    assert capsys.readouterr().out == ""


def test_non_finite_numbers_are_null_in_the_report(report):
    logger.log((0, 1), {"train.loss": math.nan})
    assert '"train.loss": null' in report.read_text()


def test_expendable_output_is_discarded_on_full_disk():
    with open("/dev/full", "w") as full:
        stream = logger.Expendable(full)
        stream.write("x")
        stream.flush()


def test_result_stream_that_a_library_keeps_is_direct_after_the_block(monkeypatch, capsys):
    with logger.result_on_stdout():
        kept = sys.stdout
    monkeypatch.setattr(logger, "_is_stdout_closed", True)
    kept.write("late")
    assert capsys.readouterr().out == "late"


def test_report_line_has_keys_of_dllogger(report):
    begin_s = logger.elapsed_s()
    logger.log((0, 1), {"train.loss": 1.0})
    logger.log((0, 2), {"train.loss": 1.0})
    first, second = entries(report)
    assert list(first) == ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
    assert first["type"] == "LOG"
    assert datetime.fromisoformat(first["datetime"]).timestamp() == pytest.approx(float(first["timestamp"]), abs=1e-3)
    assert 0 < begin_s - 1e-6 <= float(first["elapsedtime"])
    assert float(first["elapsedtime"]) <= float(second["elapsedtime"]) <= logger.elapsed_s() + 1e-6


@pytest.mark.parametrize("kind", [logger.Expendable, logger._Result])
def test_wrapped_stream_behaves_like_the_stream(kind):
    stream = io.StringIO()
    wrapped = kind(stream)
    assert wrapped.write("four") == 4
    wrapped.flush()
    assert wrapped.getvalue() == "four" and not wrapped.isatty()


def test_result_on_closed_stdout_is_an_error(monkeypatch):
    monkeypatch.setattr(logger, "_is_stdout_closed", True)
    with pytest.raises(RunError, match=r"^stdout: cannot be written \(closed\); "), logger.result_on_stdout():
        print("result")


def test_parameters_are_reported_but_not_printed(tmp_path, capsys):
    parameters = {"lr": 0.1, "image_shape": [3, 32, 32], "from_checkpoint": None, "amp": False}
    logger.setup(tmp_path / "report.json")
    logger.begin(parameters)
    [entry] = read_report(tmp_path / "report.json")
    assert entry["step"] == "PARAMETER"
    assert entry["data"] == parameters
    assert capsys.readouterr().out == ""


def test_existing_report_is_kept_until_begin(report, capsys):
    logger.log((), {"train.loss": 1.0})
    before = report.read_bytes()
    logger.setup(report)
    logger.log((0, 1), {"train.loss": 2.0})
    assert "loss 2" in capsys.readouterr().out
    logger.close()
    logger.begin({"lr": 0.2})  # no report is written, because none has been set up
    assert report.read_bytes() == before


def test_report_lines_are_flushed_immediately(report):
    for step in range(3):
        logger.log((0, step), {"train.loss": 1.0})
        assert len(entries(report)) == step + 1


def test_info_and_warnings_are_not_in_the_report(report, capsys):
    logger.info("for the user")
    logger.warn("take care")
    captured = capsys.readouterr()
    assert captured.out == "for the user\n"
    assert captured.err == "warning: take care\n"
    assert entries(report) == []


def test_control_characters_are_escaped(capsys):
    logger.warn("a\x1b[31m\tb\nc")
    assert capsys.readouterr().err == "warning: a\\x1b[31m\\tb\nc\n"


def test_each_line_is_one_write():
    """A datagram socket preserves the boundaries between writes, which matter if several processes share a log file."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    program = "from utils import logger; logger.info('a'); logger.warn('b'); logger.log((0,), {'train.loss': 1.0})"
    with receiver, sender:
        receiver.settimeout(30)
        subprocess.run([sys.executable, "-u", "-c", program], cwd=ROOT, stdout=sender, stderr=sender, check=True)
        assert [receiver.recv(100) for _ in range(3)] == [b"a\n", b"warning: b\n", b"epoch 0 train  loss 1\n"]


def test_begin_replaces_existing_report(report):
    logger.log((), {"train.loss": 1.0})
    begin(report)
    logger.log((), {"train.loss": 2.0})
    assert [entry["data"] for entry in entries(report)] == [{"train.loss": 2.0}]


def test_append_keeps_existing_report_entries(tmp_path):
    report = tmp_path / "report.json"
    for loss in (1.0, 2.0):
        begin(report, append=True)
        logger.log((), {"train.loss": loss})
    assert [entry["data"]["train.loss"] for entry in entries(report)] == [1.0, 2.0]


@pytest.mark.parametrize("partial_line", ["", "DLLL ", 'DLLL {"timestamp": "17'])
@pytest.mark.parametrize("complete_lines", [0, 2])
def test_incomplete_last_line_is_removed_on_append(report, partial_line, complete_lines):
    for _ in range(complete_lines):
        logger.log((), {"train.loss": 1.0})
    logger.close()
    report.write_text(report.read_text() + partial_line)
    begin(report, append=True)
    logger.log((), {"train.loss": 2.0})
    assert [entry["data"]["train.loss"] for entry in entries(report)] == [1.0] * complete_lines + [2.0]


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    report = tmp_path / "logs" / "report.json"
    begin(report, rank=1)
    logger.log((0, 1), {"train.loss": 1.0})
    logger.info("for the user")
    logger.warn("take care")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_other_ranks_do_not_change_report_of_rank_0(report):
    logger.log((), {"train.loss": 1.0})
    begin(report, rank=1)
    logger.log((), {"train.loss": 2.0})
    assert [entry["data"] for entry in entries(report)] == [{"train.loss": 1.0}]


def test_metrics_are_only_printed_without_report(capsys):
    logger.log((), {"train.loss": 1.0})
    assert capsys.readouterr().out == "summary train  loss 1\n"


def test_full_disk_raises_run_error():
    """/dev/full can be opened, but all writes to it fail."""
    logger.setup("/dev/full")
    try:
        with pytest.raises(
            RunError,
            match=r"^--report-file /dev/full: can no longer be written \(No space left.*; free disk space.*--resume\)$",
        ):
            logger.begin({"lr": 0.1})
        logger.report((), {})  # without a report, entries are ignored
    finally:
        logger.close()


def test_followers_receive_entries_of_the_report(report):
    received = []
    for name in "ab":
        add, close = lambda *entry, name=name: received.append((name, *entry)), lambda name=name: received.append(name)
        logger.follow(SimpleNamespace(add=add, close=close))
    logger.report((1,), {"lr": 1})
    logger.close()
    assert received == [("a", (1,), {"lr": 1}), ("b", (1,), {"lr": 1}), "b", "a"]
    begin(report)
    logger.close()
    assert len(received) == 4


def test_close_may_be_called_twice(report):
    logger.log((), {"train.loss": 1.0})
    file = logger._report
    logger.close()
    logger.close()
    assert file.closed
    logger.log((), {"train.loss": 2.0})
    assert len(entries(report)) == 1


@pytest.mark.parametrize("name", ["", "file/report.json"], ids=["path is a folder", "parent is a file"])
def test_unwritable_report_is_an_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    logger.setup(tmp_path / name)
    with pytest.raises(UsageError, match=f"^--report-file {tmp_path / name}: cannot be written .*; choose a diff"):
        logger.begin({"lr": 0.1})


HOLDER = """
import sys
from paddle_resnet.utils import logger
logger.setup(sys.argv[1])
logger.begin({})
print("begun", flush=True)
sys.stdin.read()
"""


def test_second_run_with_same_report_is_rejected(tmp_path):
    """`setup` raises the error if the first run has begun its report; otherwise, `begin` raises it. The path may be a
    link."""
    report, link = tmp_path / "report.json", tmp_path / "link.json"
    link.symlink_to(report)
    logger.setup(report)
    command = [sys.executable, "-c", HOLDER, str(link)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == "begun\n"
        message = (
            rf"^--report-file {report}: in use by another run \(process {holder.pid} on .*\); wait until that run ends"
        )
        with pytest.raises(UsageError, match=message):
            logger.begin({"lr": 0.1})
        with pytest.raises(UsageError, match=message):
            logger.setup(report)
        assert len(read_report(report)) == 1
        holder.communicate("")
    lock = tmp_path / ".report.json.lock"
    lock.write_text("process 1 on a machine that lost its power\n")
    logger.setup(report)
    assert not lock.exists()
    lock.write_text("process 1 on a machine that lost its power\n")
    begin(report)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".report.json.lock", "link.json", "report.json"]
    logger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "report.json"]


LOGGING_PROGRAM = r"""
from paddle_resnet.utils import logger
logger.setup({report!r})
logger.begin(dict(lr=0.1))
for step in range(3):
    logger.log((0, step), {{"train.loss": 1.0}})
    logger.info("\u00fcber \u2192 \udcff")
"""


def run_logging_program(tmp_path, **options):
    """Run a process that logs three steps and non-ASCII names, check its report, and return the finished process."""
    report = tmp_path / "report.json"
    code = LOGGING_PROGRAM.format(report=str(report))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(entries(report)) == 3
    return done


@pytest.mark.parametrize("fault", ["full", "broken pipe", "closed", "both closed"])
def test_unwritable_output_does_not_stop_the_run(tmp_path, fault):
    if fault == "full":
        with open("/dev/full", "w") as full:
            stderr = run_logging_program(tmp_path, stdout=full).stderr
        assert stderr.count("stdout: can no longer be written (No space left on device), so the run continues") == 1
    elif fault == "broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
        stderr = run_logging_program(tmp_path, stdout=writer).stderr
        os.close(writer)
        assert stderr.count("stdout: can no longer be written (Broken pipe), so the run continues") == 1
    else:
        numbers = (1,) if fault == "closed" else (1, 2)
        stderr = run_logging_program(tmp_path, preexec_fn=lambda: [os.close(number) for number in numbers]).stderr
        assert stderr == ""


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "LC_ALL": "C"}], ids=str)
def test_ascii_output_escapes_names(tmp_path, environment):
    done = run_logging_program(tmp_path, stdout=subprocess.PIPE, env={**os.environ, **environment})
    assert done.stdout.count("ber ") == 3
    assert r"\udcff" in done.stdout


@pytest.mark.parametrize("change", ["delete", "replace", "move the folder"])
def test_deleted_report_triggers_one_warning(report, capsys, change):
    logger.log((0,), {"train.loss": 1.0})
    assert capsys.readouterr().err == ""
    if change == "move the folder":
        report.parent.rename(report.parent.with_name("moved"))
    else:
        report.unlink()
    if change == "replace":
        report.touch()
    logger.log((1, 0), {"train.loss": 1.0})
    assert capsys.readouterr().err == ""  # not checked in each step
    logger.log((1,), {"train.loss": 1.0})
    logger.log((), {"train.loss": 1.0})
    [warning] = capsys.readouterr().err.splitlines()
    assert f"warning: --report-file {report}: was deleted or replaced during the run" in warning


def test_report_behind_link_is_not_misplaced(tmp_path, capsys):
    (tmp_path / "link.json").symlink_to("target.json")
    begin(tmp_path / "link.json")
    logger.log((0,), {"train.loss": 1.0})
    assert capsys.readouterr().err == ""


def test_close_succeeds_if_the_folder_became_a_file(report):
    folder = report.parent
    folder.rename(folder.with_name("moved"))
    folder.touch()
    logger.close()
