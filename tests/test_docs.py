"""What README, docs and benchmarks name exists: files, tests, flags, modules and figures."""

import ast
import re
import subprocess
import sys

import pytest
import yaml

import config
from conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
COMMANDS = (
    "paddle_resnet/dataset.py",
    "paddle_resnet/export.py",
    "paddle_resnet/predict.py",
    "paddle_resnet/results/comparison.py",
    *map(str, ROOT.glob("benchmarks/*.py")),
)
# Flags of Paddle's launcher and of Slurm.
OTHER_FLAGS = {"--gpus", "--nproc_per_node", "--nnodes", "--master", "--rank", "--host"}
OTHER_FLAGS |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--signal", "--requeue"}
# Of NVIDIA's example, which this project lacks.
OTHER_FLAGS |= {"--inference-dir", "--qat", "--checkpoint-dir", "--precision", "--workspace-size"}
OTHER_FLAGS |= {"--model-repository"}  # of Triton
CORE = ("train.py", "config.py", *(f"paddle_resnet/{name}.py" for name in ("program", "dali", "optimizer", "report")))


def identify(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_somewhere(page):
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
def test_named_tests_exist(page):
    for path, name in re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(test_\w+))?", page.read_text()):
        file = ROOT / path
        assert file.exists(), path
        functions = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{path}::{name}"


@pytest.mark.parametrize("page", [page for page in PAGES if "log" not in page.parts], ids=identify)
def test_named_flags_exist(page):
    known = {option for action in config.build_parser()._actions for option in action.option_strings}
    known |= {flag for path in COMMANDS for flag in re.findall(r'"(--[a-z0-9-]+)"', (ROOT / path).read_text())}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert not named - known - OTHER_FLAGS


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_readme_says_how_large_the_core_is():
    files = [ROOT / path for path in CORE] + list(ROOT.glob("paddle_resnet/models/*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    said = int(re.search(r"about ([\d,]+) lines of Python", (ROOT / "README.md").read_text())[1].replace(",", ""))
    assert abs(lines - said) <= 0.05 * said


def test_drawings_are_those_of_their_sources(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs/drawings/draw.py", tmp_path], check=True)
    for name in ("data_way.svg", "step_timeline.svg"):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


def test_drawings_name_modules_and_figures_that_exist():
    data_way = yaml.safe_load((ROOT / "docs/drawings/data_way.yaml").read_text())
    for row in data_way["rows"]:
        for box in row["boxes"]:
            assert (ROOT / box["module"]).is_file(), box["module"]
    timeline = yaml.safe_load((ROOT / "docs/drawings/step_timeline.yaml").read_text())
    for figure in timeline["figures"].values():
        assert figure["figure"] in (ROOT / figure["page"]).read_text(), figure
