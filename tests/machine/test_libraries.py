"""Selection of CUDA libraries. The real dynamic linker loads small fake libraries, which replace those of Paddle and of
the CUDA packages."""

import os
import shutil
import subprocess
import sys

import paddle
import pytest

from conftest import ROOT
from paddle_resnet.machine import libraries
from paddle_resnet.utils.errors import installation

PHI = """
#include <dlfcn.h>
extern "C" const char *open_cudnn() {
  void *cudnn = dlopen("libcudnn.so", RTLD_LAZY);
  return cudnn == nullptr ? "none" : reinterpret_cast<const char *(*)()>(dlsym(cudnn, "origin"))();
}
"""
PADDLE = """
import ctypes, os
phi = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "libs", "libphi.so"))
phi.open_cudnn.restype = ctypes.c_char_p
"""
RUN = """
import sys
import paddle_resnet
assert "paddle" not in sys.modules
import paddle
print(paddle.phi.open_cudnn().decode())
"""


def compile_library(path, source, *flags):
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path, *flags]
    subprocess.run(list(map(str, command)), input=source, text=True, check=True)


def cudnn(origin):
    return f'extern "C" const char *origin() {{ return "{origin}"; }}'


@pytest.fixture
def site(once, tmp_path):
    """Create a site-packages folder that contains a fake Paddle and two versions of a cuDNN package."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")

    def make(root):
        compile_library(root / "paddle/libs/libphi.so", PHI, "-Wl,-rpath,$ORIGIN", "-ldl")
        (root / "paddle/__init__.py").write_text(PADDLE)
        (root / "paddle/version").mkdir()
        (root / "paddle/version/__init__.py").write_text("full_version    = '2.6.2'\ncuda_version     = '11.8'\n")
        for version in "89":
            name = f"libcudnn.so.{version}"
            compile_library(root / "nvidia/cudnn/lib" / name, cudnn(f"package {version}"), f"-Wl,-soname,{name}")

    return shutil.copytree(once("site", make), tmp_path / "site")


def opened(site, **environment):
    """Start Paddle in a new process and return the cuDNN library that it opens."""
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(site.parent / "cache")}
    command = [sys.executable, "-S", "-c", RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_library_of_package_is_opened(site):
    assert opened(site) == "package 8"
    assert opened(site) == "package 8"  # the second process finds the existing links
    (folder,) = (site.parent / "cache/paddle_resnet").iterdir()
    assert {"libcudnn.so", "libcudnn.so.8", "libphi.so"} <= {path.name for path in folder.iterdir()}


def test_library_is_opened_without_cache_folder(site):
    (site.parent / "cache").write_text("no folder")
    assert opened(site) == "package 8"


@pytest.fixture
def links(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {"libcudnn.so": ROOT / "README.md"}


def test_different_packages_have_different_links(links):
    first = libraries._make_folder(links)
    assert (first / "libcudnn.so").resolve() == ROOT / "README.md"
    second = libraries._make_folder({"libcudnn.so": ROOT / "LICENSE"})
    assert (second / "libcudnn.so").resolve() == ROOT / "LICENSE"
    assert libraries._make_folder(links) == first
    links["a"] = ROOT / "LICENSE"
    assert libraries._make_folder(links) == libraries._make_folder(dict(sorted(links.items()))) != first


def test_concurrent_processes_share_links(links, monkeypatch):
    """A second process creates the folder with the links at the same time."""
    real, made = libraries._fill, []

    def fill(folder, links):
        if not made:
            made.append(None)
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", lambda: 0)
                made[0] = libraries._make_folder(links)
        real(folder, links)

    monkeypatch.setattr(libraries, "_fill", fill)
    assert libraries._make_folder(links) == made[0]
    assert list(made[0].parent.iterdir()) == made
    assert (made[0] / "libcudnn.so").exists()


def test_links_without_cache_folder_are_temporary(links, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    folder = libraries._make_folder(links)
    assert (folder / "libcudnn.so").exists()
    assert tmp_path not in folder.parents
    libraries._make_folder.temporary.cleanup()


def test_ld_library_path_takes_precedence(site):
    custom = site.parent / "custom"
    compile_library(custom / "libcudnn.so", cudnn("custom"))
    assert opened(site, LD_LIBRARY_PATH=str(custom)) == "custom"


@pytest.mark.parametrize(("version", "cuda"), [("3.3.1", "11.8"), ("2.6.2", "12.0"), ("2.6.2", "False")])
def test_unsupported_paddle_builds_get_no_links(site, version, cuda):
    text = f"full_version    = '{version}'\ncuda_version     = '{cuda}'\n"
    (site / "paddle/version/__init__.py").write_text(text)
    assert opened(site) == "none"
    assert not (site.parent / "cache").exists()


@pytest.mark.parametrize(
    ("files", "of_system", "expected"),
    [
        (["cudnn", "cublas"], [], True),
        (["cudnn"], [], False),
        (["cudnn"], ["cublas"], True),
        ([], ["cudnn", "cublas"], True),
        ([], ["cudnn"], False),
    ],
)
def test_libraries_may_be_set_up_in_different_folders(monkeypatch, tmp_path, files, of_system, expected):
    for name in files:
        (tmp_path / f"lib{name}.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.setattr(libraries.ctypes.util, "find_library", lambda name: "found" if name in of_system else None)
    assert bool(libraries._are_set_up()) == expected


@pytest.mark.parametrize("missing", ["paddle", "nvidia"])
def test_missing_packages_get_no_links(tmp_path, missing):
    (tmp_path / "cudnn/lib").mkdir(parents=True)
    (tmp_path / "cudnn/lib/libcudnn.so.8").touch()
    folders = {"paddle": [str(tmp_path)], "nvidia": [str(tmp_path)]}
    assert set(libraries._links(*folders.values())) == {"libcudnn.so", "libcudnn.so.8"}
    folders[missing] = libraries._folders("no_such_package")
    assert libraries._links(*folders.values()) == {}


def test_packages_without_libraries_get_no_links(tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs/libphi.so").touch()
    assert libraries._links([str(tmp_path)], [str(tmp_path)]) == {}


@pytest.fixture
def cuda_11(monkeypatch, once, tmp_path):
    """Simulate a build of Paddle for CUDA 11 with all CUDA libraries, and return their folder."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(paddle.version, "full_version", "2.6.2")
    monkeypatch.setattr(paddle.version, "cuda", lambda: "11.8")

    def make(folder):
        for name, (_, major) in (libraries.NEEDED | libraries.NEEDED_BY_SEVERAL_GPUS).items():
            create_library(folder, name, major)

    folder = shutil.copytree(once("cuda_11", make), tmp_path / "cuda_11", symlinks=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return folder


def create_library(folder, name, major):
    """Create a library whose file name has a version. If `name` has no version, also create a link called `name`."""
    file = name if name.endswith(f".{major}") else f"{name}.{major}"
    compile_library(folder / file, f"int is_{major};")
    if file != name:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(file)


def test_complete_libraries_have_no_problem(cuda_11):
    assert libraries.problem() is None
    assert libraries.problem(several_gpus=True) is None


def test_libraries_in_folder_of_links_are_found(cuda_11, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep)
    assert "cannot be opened" in libraries.problem()
    monkeypatch.setattr(libraries, "_folder", cuda_11)
    assert libraries.problem() is None


@pytest.mark.parametrize("name", ["libcublas.so", "libcudnn_cnn_train.so.8"])
def test_missing_library_is_reported(cuda_11, monkeypatch, name):
    (cuda_11 / name).unlink()
    library = "cuBLAS 11" if "cublas" in name else "cuDNN 8"
    remedy = f"install it with {installation('gpu')}"
    assert f"needs {library}, but {name} cannot be opened; {remedy}" in libraries.problem()
    assert "import paddle_resnet before paddle" not in libraries.problem()
    monkeypatch.setattr(libraries, "_is_late", True)
    assert libraries.problem().endswith("; import paddle_resnet before paddle")
    monkeypatch.setattr(paddle.version, "cuda", lambda: "12.0")
    assert libraries.problem() is None


def test_several_gpus_require_nccl(cuda_11):
    (cuda_11 / "libnccl.so").unlink()
    assert libraries.problem() is None
    assert "needs NCCL 2, but libnccl.so cannot" in libraries.problem(several_gpus=True)


@pytest.mark.parametrize("major", [7, 9])
def test_library_of_different_version_is_reported(cuda_11, major):
    create_library(cuda_11, "libcudnn.so", major)
    assert f"needs cuDNN 8, but libcudnn.so is {cuda_11}/libcudnn.so.{major}" in libraries.problem()
    assert (libraries._major("a/libcublas.so.11.2"), libraries._major("a.so.8/libcudnn.so")) == (11, None)
