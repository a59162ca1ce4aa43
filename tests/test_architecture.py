"""The direction of imports: a module uses only what stands below it."""

import ast
from pathlib import Path

import pytest

from conftest import ROOT

# From the top to the bottom; a line may import from the lines below it and from itself.
FLOORS = [
    ["train"],
    [f"paddle_resnet.{name}" for name in ("dataset", "doctor", "export", "predict", "weights")],
    ["paddle_resnet.serving"],
    ["paddle_resnet.phases"],
    ["paddle_resnet.program"],
    ["paddle_resnet.checkpoints"],
    ["paddle_resnet.tools"],
    ["paddle_resnet.dali"],
    ["paddle_resnet.resolution"],
    ["paddle_resnet.passes"],
    ["paddle_resnet.steps"],
    ["paddle_resnet.report"],
    ["paddle_resnet.results"],
    ["paddle_resnet.data"],
    ["paddle_resnet.optimizers"],
    ["paddle_resnet.native"],
    ["paddle_resnet.job"],
    ["paddle_resnet.machine"],
    ["config"],
    ["paddle_resnet.settings"],
    ["paddle_resnet.models"],
    ["utils"],
]
LIBRARIES_OF_UTILS = {"paddle", "nvidia"}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules():
    paths = [ROOT / "train.py", ROOT / "config.py", *ROOT.glob("paddle_resnet/**/*.py"), *ROOT.glob("utils/*.py")]
    return {module_of(path): path for path in sorted(paths)}


def imports(path, known):
    """The modules that a file imports, at its top or in a function; of a package, the names that are modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
    return found


def floor(module):
    """The index of a module's line; None for a library's and for `paddle_resnet` itself, which sets the environment."""
    for index, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    return None


def test_every_module_has_a_floor():
    assert [module for module in modules() if floor(module) is None] == ["paddle_resnet"]


def test_imports_run_downwards():
    known = modules()
    upwards = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imports(path, set(known))
        if module != "paddle_resnet" and floor(other) is not None and floor(other) < floor(module)
    ]
    assert not upwards


def test_no_circle():
    known = modules()
    below = {module: imports(path, set(known)) & set(known) for module, path in known.items()}
    while free := [module for module, others in below.items() if not others & set(below)]:
        for module in free:
            del below[module]
    assert not below


LIGHT = ("config", "utils", "paddle_resnet.settings")


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith(LIGHT)])
def test_config_settings_and_utils_need_neither_paddle_nor_dali(module):
    roots = {name.partition(".")[0] for name in imports(modules()[module], set())}
    assert not roots & LIBRARIES_OF_UTILS


def test_the_check_sees_an_import_that_runs_up(tmp_path):
    path = Path(tmp_path / "module.py")
    path.write_text("def f():\n    from paddle_resnet import program\n    from paddle_resnet.job import exchange\n")
    assert imports(path, set(modules())) == {"paddle_resnet.program", "paddle_resnet.job.exchange"}
    assert floor("paddle_resnet.program") < floor("paddle_resnet.job.exchange")


def parameters(path):
    """(function, parameter) of each function in a file."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [(f.name, a.arg) for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]


@pytest.mark.parametrize("folder", ["machine", "models", "native", "passes", "steps", "tools"])
def test_low_modules_take_values_and_not_all_settings(folder):
    paths = [*(ROOT / "paddle_resnet" / folder).glob("*.py")]
    assert paths
    assert not [(path.name, f) for path in paths for f, name in parameters(path) if name in ("args", "settings")]
    assert ("create_strategy", "args") in parameters(ROOT / "paddle_resnet/program.py")  # the check sees one


@pytest.mark.parametrize("name", ["train.py", "paddle_resnet/phases.py", "paddle_resnet/program.py"])
def test_functions_of_the_spine_fit_a_screen(name):
    tree = ast.parse((ROOT / name).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno >= 60]
    assert name != "train.py" or len((ROOT / name).read_text().splitlines()) <= 150
