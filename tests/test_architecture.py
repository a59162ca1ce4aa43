"""Import layers. A module may import only from its own layer and from lower layers."""

import ast
from pathlib import Path

import pytest

from conftest import ROOT

# Layers from top to bottom. A layer may import from itself and from the layers below it.
LAYERS = [
    ["paddle_resnet.train"],
    [f"paddle_resnet.{name}" for name in ("dataset", "doctor", "export", "lr_find", "predict", "weights")],
    ["paddle_resnet.serving"],
    ["paddle_resnet.phases"],
    ["paddle_resnet.budget"],
    ["paddle_resnet.recipe"],
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
    ["paddle_resnet.config"],
    ["paddle_resnet.settings"],
    ["paddle_resnet.models", "paddle_resnet.optimizers.table", "paddle_resnet.serving.preprocessing"],
    ["paddle_resnet.utils"],
]
LIBRARIES_OF_UTILS = {"paddle", "nvidia"}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules():
    return {module_of(path): path for path in sorted(ROOT.glob("paddle_resnet/**/*.py"))}


def imports(path, known):
    """Return the modules that a file imports, both at module level and in functions, including submodules of a
    package."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & known or {node.module}
    return imported


def layer(module):
    """Return the index of a module's layer, or None for a library and for `paddle_resnet`, which only sets environment
    variables. The longest matching name in LAYERS determines the layer."""
    indexes = {name: index for index, names in enumerate(LAYERS) for name in names}
    matches = [name for name in indexes if module == name or module.startswith(f"{name}.")]
    return indexes[max(matches, key=len)] if matches else None


def test_every_module_belongs_to_one_layer():
    assert [module for module in modules() if layer(module) is None] == ["paddle_resnet"]


def test_modules_import_only_from_lower_layers():
    known = modules()
    violations = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imports(path, set(known))
        if module != "paddle_resnet" and layer(other) is not None and layer(other) < layer(module)
    ]
    assert not violations


def test_imports_have_no_cycle():
    known = modules()
    remaining = {module: imports(path, set(known)) & set(known) for module, path in known.items()}
    while leaves := [module for module, dependencies in remaining.items() if not dependencies & set(remaining)]:
        for module in leaves:
            del remaining[module]
    assert not remaining


LIGHT = ("paddle_resnet.config", "paddle_resnet.utils", "paddle_resnet.settings")


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith(LIGHT)])
def test_config_settings_and_utils_import_neither_paddle_nor_dali(module):
    roots = {name.partition(".")[0] for name in imports(modules()[module], set())}
    assert not roots & LIBRARIES_OF_UTILS


def test_layer_check_detects_import_from_higher_layer(tmp_path):
    path = Path(tmp_path / "module.py")
    path.write_text("def f():\n    from paddle_resnet import program\n    from paddle_resnet.job import exchange\n")
    assert imports(path, set(modules())) == {"paddle_resnet.program", "paddle_resnet.job.exchange"}
    assert layer("paddle_resnet.program") < layer("paddle_resnet.job.exchange")


def parameters(path):
    """Return all (function, parameter) pairs in a file."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [(f.name, a.arg) for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]


# Functions in the layers below program.py and dali.py that take all settings: these functions set flags, compare or
# save all flags, or read the flags that an entry of a table names.
TAKE_SETTINGS = {
    "checkpoints": ["__init__", "_search", "find", "inherit_flags", "of", "resolve_network"],
    "data": ["of"],
    "job": ["check_start"],
    "optimizers": ["build_lr_scheduler", "build_optimizer"],
}
FOLDERS = ["checkpoints", "data", "job", "machine", "models", "native", "optimizers", "passes", "results", "steps"]


@pytest.mark.parametrize("folder", [*FOLDERS, "tools"])
def test_low_level_functions_take_no_settings_object(folder):
    paths = [*(ROOT / "paddle_resnet" / folder).glob("*.py")]
    assert paths
    found = [f for path in paths for f, name in parameters(path) if name in ("args", "settings")]
    assert sorted(found) == sorted(TAKE_SETTINGS.get(folder, []))
    # Check that the search can find a parameter called "args".
    assert ("create_strategy", "args") in parameters(ROOT / "paddle_resnet/program.py")


@pytest.mark.parametrize("name", ["paddle_resnet/train.py", "paddle_resnet/phases.py", "paddle_resnet/program.py"])
def test_spine_functions_are_shorter_than_60_lines(name):
    tree = ast.parse((ROOT / name).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno >= 60]
    assert name != "paddle_resnet/train.py" or len((ROOT / name).read_text().splitlines()) <= 150
