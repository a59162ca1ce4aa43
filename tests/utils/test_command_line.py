"""The short --help of train.py and of the tools, and `--help all`, `--help TOPIC` and `--help FLAG`."""

import argparse
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from paddle_resnet import config, dataset, doctor, export, predict, train, weights
from paddle_resnet import report as report_command
from paddle_resnet.models import __main__ as models
from paddle_resnet.settings import declarations, parsing
from paddle_resnet.settings.declarations import ACTIONS, DEFAULTS, EXAMPLES, FLAGS, MAIN, PARSER, TOPICS
from paddle_resnet.utils import command_line
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import UsageError, python

TOOLS = {
    "train": train.main,
    "predict": predict.main,
    "export": export.main,
    "dataset": dataset.main,
    "doctor": doctor.main,
    "weights": weights.main,
    "models": models.main,
    "report": report_command.main,
}


@pytest.fixture
def shown(capsys, monkeypatch):
    """Return a function that returns the output of a tool, which must exit with code 0."""
    monkeypatch.setenv("COLUMNS", "100")

    def show(name, *arguments):
        with pytest.raises(SystemExit, match="^0$"):
            TOOLS[name](list(arguments))
        return capsys.readouterr().out

    return show


def flags_in(text):
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def test_help_of_train_is_short(shown):
    text = shown("train", "--help")
    assert 40 <= text.count("\n") <= 60
    # The examples contain the path of the interpreter, which may be long.
    assert max(len(line) for line in text.splitlines() if " train.py " not in line) <= 120
    assert shown("train", "-h") == text
    assert flags_in(text) == [name for names in MAIN.values() for name in names]
    assert 18 <= len(flags_in(text)) <= 20
    assert "usage:" not in text and "None)" not in text and "{true,false}" not in text
    assert all(f"\n  {topic} " in text for topic in TOPICS)
    assert f"all {len(FLAGS)} flags" in text


@pytest.mark.parametrize(("purpose", "arguments"), EXAMPLES, ids=[purpose.partition(" ")[0] for purpose, _ in EXAMPLES])
def test_examples_of_train_parse(work_in, shown, purpose, arguments):
    work_in(ROOT)
    config.parse_args(arguments.split())
    assert f"  {purpose}:\n    {python()} train.py {arguments}\n" in shown("train", "--help")


def test_number_of_flags_does_not_grow():
    """A new feature needs a recipe, not a flag."""
    assert len(FLAGS) <= 126


def test_every_flag_has_one_topic(shown):
    of_topics = {topic: flags_in(shown("train", "--help", topic)) for topic in TOPICS}
    assert sorted(name for names in of_topics.values() for name in names) == sorted(
        action.option_strings[0] for action in ACTIONS.values()
    )
    assert flags_in(shown("train", "--help", "all")) == [name for names in of_topics.values() for name in names]
    assert all(3 <= len(names) <= 16 for names in of_topics.values())


@pytest.mark.parametrize("name", ["--lr", "lr", "num-of-class", "num_of_class", "--num_of_class"])
def test_help_on_a_flag(shown, name):
    text = shown("train", "--help", name)
    assert flags_in(text) == ["--" + name.lstrip("-").replace("_", "-")]
    assert shown("train", f"--help={name}") == text


def test_topic_takes_precedence_over_flag_of_the_same_name(shown):
    assert "--momentum" in flags_in(shown("train", "--help", "optimizer"))
    assert flags_in(shown("train", "--help", "--optimizer")) == ["--optimizer"]


def test_unknown_topic_is_an_error_with_the_topics(capsys):
    assert train.main(["--help", "tuning"]) == 2
    message = f"train.py: error: --help tuning: unknown topic; use a flag, or one of all, {', '.join(TOPICS)}\n"
    assert capsys.readouterr().err == message
    assert train.main(["--help", "batchsize"]) == 2
    assert "unknown topic; use --batch-size, or one of all" in capsys.readouterr().err
    assert dataset.main(["--help", "spilt"]) == 2
    assert "one of all, sample, split, import, convert" in capsys.readouterr().err


def test_defaults_are_printed_as_typed(shown):
    for flag, default in (
        ("--normalize-scale X", "1/255"),
        ("--normalize-mean R,G,B", "0.485,0.456,0.406"),
        ("--rand-crop-ratio MIN,MAX", "0.75,4/3"),
        ("--weight-decay X", "2^-15"),
        ("--opt-epsilon X", "1e-8"),
        ("--cuda-graph [false]", "true"),
        ("--lr-decay-epochs E,...", "30,60,80"),
        ("--num-of-class N", "chosen from the data"),
        ("--bn-momentum M", "chosen from the network"),
        ("--dropout P", "0"),
    ):
        text = " ".join(shown("train", "--help", flag.split()[0]).split())
        assert text.startswith(f"{flag} ") and f"(default: {default})" in text


@pytest.mark.parametrize("name", ACTIONS)
def test_printed_default_is_a_valid_value(name):
    """A default that is printed as typed parses to the same value."""
    value, action = DEFAULTS[name], ACTIONS[name]
    if value is None or value is False:
        return
    assert parsing.parse([f"{action.option_strings[0]}={command_line.typed(value)}"]) == {name: value}


def test_flags_of_nvidia_example_are_marked(shown):
    text = shown("train", "--help")
    assert re.search(r"--epochs N .*\(default: 90\) \(N\)\n", text)
    assert re.search(r"--budget-minutes N .*[^)]\n", text)
    assert "(N): flag of NVIDIA's" in text


def test_values_of_the_printed_forms():
    values = [1 / 255, 2**-15, [3, 224, 224], [0.08, 1.0], True, 4 / 3, 1e-8, 0.9999999, 7, "auto", 0.1 + 0.2]
    texts = ["1/255", "2^-15", "3,224,224", "0.08,1", "true", "4/3", "1e-8", "0.9999999", "7", "auto"]
    assert [*map(command_line.typed, values)] == [*texts, "0.30000000000000004"]
    assert config.parse_args(["--weight-decay", "2^-15"]).weight_decay == 2**-15
    for text in ("2^x", "2^", "^2", "0^-1", "-8^1/3", "9^999999"):
        with pytest.raises(UsageError, match="--weight-decay: "):
            config.parse_args([f"--weight-decay={text}"])


@pytest.mark.parametrize("name", ["predict", "export", "dataset", "doctor", "weights", "models", "report"])
def test_help_of_tools_is_short_and_has_no_usage_dump(shown, capsys, name):
    text = shown(name, "--help")
    assert text.count("\n") <= 40
    assert "usage:" not in text and "whether to" not in text
    assert "--help all" in text or len(flags_in(shown(name, "--help", "all"))) == len(flags_in(text))
    if name != "models":
        assert TOOLS[name](["--no-such-flag"]) == 2
        assert re.fullmatch(rf"(python -m )?paddle_resnet.{name}: error: .*\n", capsys.readouterr().err)


def test_help_on_commands_and_flags_of_tools(shown):
    text = shown("dataset", "split", "--help")
    assert flags_in(text) == ["--output", "--val", "--seed", "--group-duplicates"]
    assert shown("dataset", "--help", "split") == text
    assert "(default: 0.2)" in shown("dataset", "split", "--help", "--val")
    assert flags_in(shown("dataset", "speed", "--help", "--batch-size")) == ["--batch-size"]  # a flag of train.py
    assert flags_in(shown("weights", "--help", "--crop-size")) == ["--crop-size"]
    assert set(flags_in(shown("predict", "--help", "all"))) > set(flags_in(shown("predict", "--help")))


def test_help_after_two_dashes_is_a_value(capsys):
    assert predict.main(["model", "--", "--help"]) == 2
    assert "--help" not in capsys.readouterr().out


@pytest.mark.slow
def test_train_without_flags_prints_help_with_exit_code_2(train_process, capsys):
    done = train_process()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == PARSER.format_help()


def test_default_image_root_is_used_if_it_exists(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(DEFAULTS, "image_root", str(tmp_path))
    monkeypatch.setattr(train, "_run", lambda args, argv: print("trains on", args.image_root))
    assert train.main([]) == 0
    assert capsys.readouterr().out == f"trains on {tmp_path}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "train.py --help all",
        "train.py --print-config",
        "-m paddle_resnet.predict --help",
        "-m paddle_resnet.dataset split --help",
        "-m paddle_resnet.models --help",
    ],
)
def test_closed_pipe_ends_silently(command):
    """As with `... | head`, after head has exited: no message, and the exit code that a shell reports after SIGPIPE."""
    with subprocess.Popen(
        [sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.slow
def test_help_imports_neither_paddle_nor_dali():
    code = "import sys, train; sys.modules |= dict.fromkeys(('paddle', 'nvidia.dali')); train.main(['--help', 'all'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert flags_in(done.stdout)


def test_help_texts_do_not_repeat_the_default_of_the_argument(monkeypatch):
    """The parser adds the default, so a help text states only a default that depends on other values."""
    repeated, add = {}, Parser.add_argument

    def record(self, *names, **options):
        if "(default: " in (options.get("help") or "") and options.get("default") not in (None, argparse.SUPPRESS):
            repeated[names[-1]] = options["default"]
        return add(self, *names, **options)

    monkeypatch.setattr(Parser, "add_argument", record)
    for main in TOOLS.values():
        with pytest.raises(SystemExit, match="^0$"):
            main(["--help"])
    declarations._build_parser()
    assert repeated.keys() == {"--image-shape", "--resize-short", "--show-config"}  # derived from other flags
