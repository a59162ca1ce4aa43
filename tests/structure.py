"""Measure the structure of the code: python tests/structure.py

The script prints tables: numbers that show how well the features are separated, the number of source lines in each
folder, and the functions that take all settings. It reads the files, but imports none of them.
"""

import ast
import functools
from collections import Counter
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cc", ".j2"}
FLAT = ("args", "settings")  # names of parameters that are the values of all flags


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file, which must not change afterwards. The first node is the module."""
    return [*ast.walk(ast.parse(path.read_text()))]


def functions(path: Path) -> list[ast.FunctionDef]:
    """Return all functions and methods in a file, including nested ones."""
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the named parameters of a function."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def takes_settings(function: ast.FunctionDef, names: Collection[str] = ("values.Settings",)) -> bool:
    """Return whether a parameter with a name in FLAT has no annotation or an annotation in `names`. Otherwise, it is
    taken for the Settings of a single component, which are annotated as `Settings` or, for example, `ema.Settings`."""
    annotations = [p.annotation for p in parameters(function) if p.arg in FLAT]
    return any(node is None or ast.unparse(node).strip("'") in names for node in annotations)


def taking(path: Path) -> list[ast.FunctionDef]:
    """Return the functions of a file that take all settings."""
    names = {"values.Settings"}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == "paddle_resnet.settings.values":
            names |= {alias.name for alias in node.names if alias.name == "Settings"}
    return [function for function in functions(path) if takes_settings(function, names)]


def entered(path: Path, name: str) -> set[Path]:
    """Return the modules that the settings enter from a function: those of the functions that take all settings and
    that it calls, directly or through other such functions. Calls are followed by name, whatever the receiver is."""
    takers = [(module, f) for module in ROOT.glob("paddle_resnet/**/*.py") for f in taking(module)]
    reached, pending = [], [(path, f) for f in taking(path) if f.name == name]
    while pending:
        reached.append(pending.pop())
        calls = [node.func for node in ast.walk(reached[-1][1]) if isinstance(node, ast.Call)]
        names = {getattr(call, "attr", getattr(call, "id", None)) for call in calls}
        pending += [taker for taker in takers if taker[1].name in names and taker not in [*reached, *pending]]
    return {module for module, _ in reached}


def is_typed(function: ast.FunctionDef) -> bool:
    """Return whether all parameters except self and cls, and the result, have annotations."""
    named = [p for p in parameters(function) if p.arg not in ("self", "cls")]
    return function.returns is not None and all(p.annotation is not None for p in named)


def public_functions(path: Path) -> list[ast.FunctionDef]:
    """Return the functions of a file and the methods of its classes whose name, and whose class's name, has no leading
    underscore. Nested functions and classes are not included."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    nodes = [node for scope in (tree, *classes) for node in scope.body]
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def folder(path: Path) -> str:
    """Return the first two levels of a source file's folder, relative to the root of the repository."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:2]) or "."


def measure() -> dict[str, int]:
    """Return {quantity: number}."""
    modules = sorted(ROOT.glob("paddle_resnet/**/*.py"))
    counts = Counter({path: len(taking(path)) for path in modules})
    public = [function for path in modules for function in public_functions(path)]
    tests = [f for path in ROOT.glob("tests/**/test_*.py") for f in functions(path) if f.name.startswith("test_")]
    return {
        "functions": sum(len(functions(path)) for path in modules),
        "functions that take all settings": sum(counts.values()),
        "modules with such a function": sum(count > 0 for count in counts.values()),
        "modules that settings enter from program.build": len(entered(ROOT / "paddle_resnet/program.py", "build")),
        "public functions": len(public),
        "public functions with types": sum(map(is_typed, public)),
        "tests": len(tests),
        "tests with monkeypatch": sum("monkeypatch" in {p.arg for p in parameters(test)} for test in tests),
    }


def source_lines() -> dict[str, int]:
    """Return {folder: source lines} for paddle_resnet/, benchmarks/ and the Python files in the root folder."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("paddle_resnet/**/*"), *ROOT.glob("benchmarks/**/*")]
    counts: Counter = Counter()
    for path in files:
        if path.suffix in SUFFIXES and path.is_file():
            counts[folder(path)] += lines(path)
    return dict(sorted(counts.items()))


def main() -> None:
    of_folders = source_lines()
    rows = measure() | {"source lines": sum(of_folders.values())}
    print("| structure | number |\n|---|---|")
    print(*(f"| {name} | {value:,} |" for name, value in rows.items()), sep="\n")
    print("\n| folder | source lines |\n|---|---|")
    print(*(f"| {name} | {value:,} |" for name, value in of_folders.items()), sep="\n")
    print("\n| functions that take all settings | names |\n|---|---|")
    for path in sorted(ROOT.glob("paddle_resnet/**/*.py")):
        if names := [function.name for function in taking(path)]:
            print(f"| {path.relative_to(ROOT / 'paddle_resnet')} ({len(names)}) | {' '.join(names)} |")


if __name__ == "__main__":
    main()
