"""Import layers: a module may import only from its own layer and from lower layers. Also other rules for the structure
of the code."""

import ast
from pathlib import Path

import pytest

import structure
from conftest import ROOT

# Layers from top to bottom. A layer may import from itself and from the layers below it.
LAYERS = [
    ["paddle_resnet.cli"],
    ["paddle_resnet.train"],
    [
        f"paddle_resnet.{name}"
        for name in (
            *("dataset", "doctor", "export", "lr_find", "predict", "report", "self_test", "weights"),
            "serving.benchmark",
        )
    ],
    ["paddle_resnet.serving"],
    ["paddle_resnet.startup"],
    ["paddle_resnet.phases"],
    ["paddle_resnet.budget"],
    ["paddle_resnet.recipe"],
    ["paddle_resnet.program"],
    [f"paddle_resnet.step.{name}" for name in ("build", "compile", "loop", "metrics")],
    ["paddle_resnet.checkpoints"],
    ["paddle_resnet.tools"],
    ["paddle_resnet.dali"],
    ["paddle_resnet.resolution"],
    ["paddle_resnet.run_report"],
    ["paddle_resnet.results"],
    ["paddle_resnet.job.agreement"],
    ["paddle_resnet.config"],
    ["paddle_resnet.settings"],
    ["paddle_resnet.passes"],
    ["paddle_resnet.step"],
    ["paddle_resnet.data"],
    ["paddle_resnet.optimizers.schedules"],
    ["paddle_resnet.components"],
    ["paddle_resnet.tasks"],
    [f"paddle_resnet.step.{name}" for name in ("averages", "builder", "facts", "random_numbers", "scalars")],
    ["paddle_resnet.native"],
    ["paddle_resnet.job"],
    ["paddle_resnet.machine"],
    [f"paddle_resnet.settings.{name}" for name in ("durations", "field", "values")],
    ["paddle_resnet.models", "paddle_resnet.serving.preprocessing"],
    ["paddle_resnet.optimizers"],
    ["paddle_resnet.graph"],
    ["paddle_resnet.utils"],
]
LIBRARIES_OF_UTILS = {"paddle", "nvidia"}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules():
    return {module_of(path): path for path in sorted(ROOT.glob("paddle_resnet/**/*.py"))}


def imports(path, known, only_at_module_level=False):
    """Return the modules that a file imports, at module level and, unless only_at_module_level is set, in functions,
    including submodules of a package."""
    imported, nodes = set(), structure.nodes(path)
    for node in nodes[0].body if only_at_module_level else nodes:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & known or {node.module}
    return imported


def layer(module):
    """Return the index of a module's layer, or None for a library and for `paddle_resnet`, which only prepares the
    process. The longest matching name in LAYERS determines the layer."""
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


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("paddle_resnet.components")])
def test_components_import_neither_paddle_nor_dali_at_module_level(module):
    """Parsing the command line imports all components."""
    roots = {name.partition(".")[0] for name in imports(modules()[module], set(), only_at_module_level=True)}
    assert not roots & LIBRARIES_OF_UTILS


def test_components_do_not_import_each_other():
    known = set(modules())
    components = {name for name in known if name.startswith("paddle_resnet.components.")}
    assert components
    assert not [name for name in components if imports(modules()[name], known) & components]


def test_layer_check_detects_import_from_higher_layer(tmp_path):
    path = Path(tmp_path / "module.py")
    path.write_text("def f():\n    from paddle_resnet import program\n    from paddle_resnet.job import exchange\n")
    assert imports(path, set(modules())) == {"paddle_resnet.program", "paddle_resnet.job.exchange"}
    assert not imports(path, set(modules()), only_at_module_level=True)
    assert layer("paddle_resnet.program") < layer("paddle_resnet.job.exchange")


# Functions in FOLDERS and tools/ that take all settings: __init__ (of Saver) saves all flags, inherit_flags compares
# and sets all flags.
TAKE_SETTINGS = {
    "checkpoints": ["__init__", "inherit_flags"],
}
MAX_TAKE_SETTINGS = 30  # python tests/structure.py lists the functions; reduce this number when it falls
FOLDERS = [
    "checkpoints",
    "components",
    "data",
    "job",
    "machine",
    "models",
    "native",
    "optimizers",
    "passes",
    "graph",
    "results",
]


@pytest.mark.parametrize("folder", [*FOLDERS, "tools"])
def test_low_level_functions_take_no_settings_object(folder):
    paths = [*(ROOT / "paddle_resnet" / folder).glob("*.py")]
    assert paths
    found = [f.name for path in paths for f in structure.taking(path)]
    assert sorted(found) == sorted(TAKE_SETTINGS.get(folder, []))


def test_number_of_functions_that_take_all_settings_does_not_grow():
    count = sum(len(structure.taking(path)) for path in (ROOT / "paddle_resnet").rglob("*.py"))
    assert 0 < count <= MAX_TAKE_SETTINGS


def test_settings_enter_few_modules_when_a_program_is_built():
    """build resolves the settings, and gives each component only its own."""
    modules = structure.entered(ROOT / "paddle_resnet/program.py", "build")
    assert {path.stem for path in modules} == {"program", "resolution", "inheritance", "validation"}


def test_parameters_that_contain_all_settings_are_found():
    code = "def f(args): ...\ndef g(settings: Settings): ...\ndef h(x, settings: values.Settings): ...\ndef i(x): ..."
    functions = ast.parse(code).body
    assert [f.name for f in functions if structure.takes_settings(f)] == ["f", "h"]


@pytest.mark.parametrize("name", ["paddle_resnet/train.py", "paddle_resnet/phases.py", "paddle_resnet/program.py"])
def test_spine_functions_are_shorter_than_60_lines(name):
    assert not [f.name for f in structure.functions(ROOT / name) if f.end_lineno - f.lineno >= 60]
    assert name != "paddle_resnet/train.py" or len((ROOT / name).read_text().splitlines()) <= 150


# Internal interfaces of Paddle's programs, blocks and operators.
INTERNAL = {
    "desc",
    "global_block",
    "_insert_op",
    "_insert_op_without_sync",
    "_remove_op",
    "_set_attr",
    "_sync_with_cpp",
}
INTERNAL |= {"_rename_input", "_rename_output", "_rename_var", "_update_desc_attr"}


def internal_uses(nodes):
    """Return [(line, attribute)] for all uses of INTERNAL in the nodes of a syntax tree."""
    used = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in INTERNAL]
    return sorted((node.lineno, node.attr) for node in used)


def test_only_graph_uses_internal_interfaces_of_programs():
    found = {module: uses for module, path in modules().items() if (uses := internal_uses(structure.nodes(path)))}
    assert set(found) == {"paddle_resnet.graph", "paddle_resnet.graph.pir"}


def test_internal_uses_are_found():
    code = "f(op.desc.id())\nx = program.global_block().ops\ny.block()"
    assert internal_uses(ast.walk(ast.parse(code))) == [
        (1, "desc"),
        (2, "global_block"),
    ]
