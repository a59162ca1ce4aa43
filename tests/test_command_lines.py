"""Order of arguments in the command lines of the tools. Paths may precede, follow and separate options."""

import itertools

import pytest

from paddle_resnet import dataset, doctor, export, lr_find, predict, report, weights
from paddle_resnet.models import __main__ as models
from paddle_resnet.utils.errors import UsageError, python

# {command: (paths, options with their values, flags of train.py)}
TOOLS = {
    "predict": (["model", "a.jpg", "b"], [["--json"], ["--batch-size", "2"]], []),
    "report": (["a", "b", "c"], [["--html", "page.html"]], []),
    "models": (["ResNet18", "ResNet50"], [], []),
    "export": (["checkpoint", "folder"], [["--onnx"], ["--verify", "digits"]], []),
    "weights": (["file.pth"], [["--output", "d"], ["--verbose"]], [["--crop-size", "128"], ["--interp=linear"]]),
    "doctor": ([], [["--json"], ["--output-dir", "d"]], []),
    "lr_find": ([], [["--steps", "50"], ["--device", "cpu"]], []),
    "dataset sample": ([], [["--output", "d"]], []),
    "dataset split": (["digits"], [["--output", "d"], ["--val", "0.1"]], []),
    "dataset import": (["digits"], [["--output", "d"], ["--as", "table"], ["--allow-partial"]], []),
    "dataset convert": ([], [["--from", "digits"], ["--to", "tfrecord"], ["--output", "d"]], []),
    "dataset index": (["digits"], [], []),
    "dataset verify": (["digits"], [["--num-of-class", "3"], ["--allow-outside"]], []),
    "dataset info": (["digits"], [["--output", "a.svg"], ["--label-offset", "1"]], []),
    "dataset preview": (
        ["digits"],
        [["--output", "a.svg"], ["--images", "2"]],
        [["--batch-size", "4"], ["--dali-output-fp16"], ["--balanced-sampling", "true"]],
    ),
    "dataset speed": (["digits"], [["--threads", "1,2"]], [["--rand-crop-scale", "0.5,1"], ["--dali-output-fp16"]]),
}


@pytest.fixture
def parsed(monkeypatch):
    """Return a function that returns what a tool passes on after parsing its command line."""
    calls = []

    def keep(*args, **values):
        calls.append([*args, values])
        return ()

    for module in (predict, export, weights, doctor):
        monkeypatch.setattr(module, "_main", keep)
    monkeypatch.setattr(report, "_compare", keep)
    monkeypatch.setattr(models, "rows", keep)
    for name in [name for name in vars(dataset) if name.startswith("_run_")]:
        monkeypatch.setattr(dataset, name, keep)

    def parse(tool, arguments):
        calls.clear()
        if tool == "lr_find":
            search, args = lr_find.parse(arguments)
            return [vars(search), args.as_dict()]
        name, _, command = tool.partition(" ")
        modules = {"predict": predict, "report": report, "models": models, "export": export}
        modules |= {"weights": weights, "doctor": doctor, "dataset": dataset}
        assert modules[name].main([*filter(None, [command]), *arguments]) == 0
        return [value if isinstance(value, (dict, list)) else vars(value) for value in calls.pop()]

    return parse


@pytest.mark.parametrize("tool", TOOLS)
def test_paths_and_options_may_be_in_any_order(parsed, tool):
    paths, options, flags = TOOLS[tool]
    options = [*flags, *options]
    expected = parsed(tool, [*paths, *itertools.chain(*options)])
    assert all(path in str(expected) for path in paths)
    for count in range(len(paths) + 1):
        before, after = paths[:count], paths[count:]
        assert parsed(tool, [*before, *itertools.chain(*options), *after]) == expected
        for option in range(len(options) + 1):
            first, second = ([*itertools.chain(*part)] for part in (options[:option], options[option:]))
            assert parsed(tool, [*first, *before, *second, *after]) == expected
            assert parsed(tool, [*before, *first, *after, *second]) == expected


def test_paths_may_begin_with_a_dash_after_two_dashes(parsed):
    [args, _] = parsed("predict", ["model", "--json", "--", "-a.jpg", "-"])
    assert (args["model"], args["images"], args["json"]) == ("model", ["-a.jpg", "-"], True)
    [args, _] = parsed("dataset speed", ["--batch-size", "4", "--", "-digits"])
    assert (args["root"], args["train_flags"]) == ("-digits", ["--batch-size", "4"])
    [args, _] = parsed("dataset speed", ["--batch-size", "4", "--", "--lr"])  # a path with the name of a flag
    assert (args["root"], args["train_flags"]) == ("--lr", ["--batch-size", "4"])


def test_flag_without_value_and_unknown_flag_are_errors(capsys, tmp_path):
    for flags, message in (
        (["--batch-size", "--images", "1"], "--batch-size: expected one argument; add a value"),
        (["--batch-sizes", "4"], "--batch-sizes: unknown flag; use --batch-size"),
    ):
        assert dataset.main(["preview", str(tmp_path), "--output", str(tmp_path / "a.svg"), *flags]) == 2
        assert message in capsys.readouterr().err
    assert dataset.main(["index", "--epochs", "3", str(tmp_path)]) == 2
    assert f"--epochs: unknown flag; see `{python()} -m paddle_resnet.dataset index --help`" in capsys.readouterr().err
    assert dataset.main(["verify", str(tmp_path), "more"]) == 2
    message = f"'more': unexpected argument; see `{python()} -m paddle_resnet.dataset verify --help`"
    assert message in capsys.readouterr().err
    assert dataset.main(["verify", str(tmp_path), "--fixlist", "bad.txt"]) == 2
    assert "--fixlist: unknown flag; use --fix-list, or see --help\n" in capsys.readouterr().err
    assert doctor.main(["--jsn"]) == doctor.main(["more"]) == 2
    error = capsys.readouterr().err
    assert "--jsn: unknown flag; use --json, or see --help\n" in error
    assert "'more': unexpected argument; see --help\n" in error
    for typo in ("--stepss", "--setps"):
        with pytest.raises(UsageError, match=f"^{typo}: unknown flag; use --steps, or see --help$"):
            lr_find.parse([typo, "3"])
