"""Check that README, docs and benchmarks refer only to existing files, tests, flags, modules and figures."""

import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import yaml

import structure
from conftest import ROOT
from paddle_resnet.settings import parsing
from paddle_resnet.settings.declarations import PARSER

FOLDERS = (".", "configs", "docs", "findings", "tests", "benchmarks/**")
PAGES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))
COMMANDS = (
    "paddle_resnet/dataset.py",
    "paddle_resnet/doctor.py",
    "paddle_resnet/export.py",
    "paddle_resnet/lr_find.py",
    "paddle_resnet/predict.py",
    "paddle_resnet/weights.py",
    "paddle_resnet/results/comparison.py",
    *map(str, ROOT.glob("benchmarks/*.py")),
)
# Flags of Paddle's launcher and Slurm.
OTHER_FLAGS = {"--gpus", "--nproc_per_node", "--nnodes", "--master", "--rank", "--host"}
OTHER_FLAGS |= {"--gpus-per-task", "--requeue"}
# Flags of NVIDIA's example that this project does not have.
OTHER_FLAGS |= {"--checkpoint-dir", "--precision", "--workspace-size"}
OTHER_FLAGS |= {"--model-repository"}  # flag of Triton
OTHER_FLAGS |= {f"--{name}" for name in parsing.REMOVED}  # CHANGELOG.md names removed flags


def identify(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_have_existing_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            lines = [line for line in file.read_text().splitlines() if line.startswith("#")]
            assert heading in [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_referenced_tests_exist(page):
    for path, name in re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(test_\w+))?", page.read_text()):
        file = ROOT / path
        assert file.exists(), path
        assert not name or name in {f.name for f in structure.functions(file)}, f"{path}::{name}"


def test_example_in_readme_of_tests_is_a_test():
    page = (ROOT / "tests/README.md").read_text()
    [(path, code)] = re.findall(r"This test from `(.*?)`.*?^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert code in (ROOT / path).read_text()


def test_every_module_has_tests():
    """A module has a test file with its name or an entry in the table of tests/README.md."""
    rows = (ROOT / "tests/README.md").read_text().partition("## Tests of each fault")[0].splitlines()
    table = [row.split(" | ")[0] for row in rows if row.startswith("|")]
    listed = [name for cell in table for name in re.findall(r"`((?:\w+/)+[\w*]+\.py)`", cell)]
    package = ROOT / "paddle_resnet"
    modules = [path.relative_to(package) for path in package.glob("**/*.py") if path.name != "__init__.py"]
    for module in modules:
        has_file = (ROOT / "tests" / module.parent / f"test_{module.name}").exists()
        assert has_file or any(fnmatch(module, pattern) for pattern in listed), module
    for pattern in listed:
        assert any(fnmatch(module, pattern) for module in modules), pattern


def test_benchmark_pages_are_listed():
    folder = ROOT / "benchmarks"
    listed = re.findall(r"^\| \[\w+\]\((log/\w+\.md)\) \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(folder)) for path in folder.glob("log/*"))


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_referenced_flags_exist(page):
    known = {option for action in PARSER._actions for option in action.option_strings}
    known |= {flag for path in COMMANDS for flag in re.findall(r'"(--[a-z0-9-]+)"', (ROOT / path).read_text())}
    referenced = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert not referenced - known - OTHER_FLAGS


def test_table_of_contents_lists_each_page_once():
    listed = re.findall(r"^- \[\w+\]\((\w+\.md)\): \w", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("docs/*.md") if path.name != "README.md")


def test_readme_is_at_most_130_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_drawings_match_their_sources(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs/drawings/draw.py", tmp_path], check=True)
    for name in ("data_way.svg", "step_timeline.svg"):
        expected, actual = (
            re.findall(r"<text[^>]*>(.+?)</text>", (p / name).read_text()) for p in (tmp_path, ROOT / "docs")
        )
        assert actual == expected != []


def test_drawing_sources_reference_existing_modules_and_figures():
    data_way = yaml.safe_load((ROOT / "docs/drawings/data_way.yaml").read_text())
    for row in data_way["rows"]:
        for box in row["boxes"]:
            assert (ROOT / box["module"]).is_file(), box["module"]
    timeline = yaml.safe_load((ROOT / "docs/drawings/step_timeline.yaml").read_text())
    for figure in timeline["figures"].values():
        assert figure["figure"] in (ROOT / figure["page"]).read_text(), figure
