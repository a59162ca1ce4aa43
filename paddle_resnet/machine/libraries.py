"""Enable Paddle to find CUDA libraries in Python packages without LD_LIBRARY_PATH.

Paddle 2.6 opens its CUDA libraries when it first needs them, by names without a version (libcudnn.so). In the
nvidia-*-cu11 packages, the file names include a version (libcudnn.so.8), and the folders are not on any search path.
libphi.so opens the libraries, and the dynamic linker searches for them in this order: LD_LIBRARY_PATH, the folder from
which libphi.so was loaded, the system's folders (ldconfig), /usr/local/cuda/lib64. Therefore, this module creates a
folder of links to libphi.so and to the packages' libraries, and loads libphi.so from the folder of links before Paddle
is imported. The user's setup takes precedence: if cuDNN and cuBLAS are on LD_LIBRARY_PATH, in the system's folders or
in /usr/local/cuda/lib64, the module does nothing. Paddle 3 and the CUDA 12 builds of Paddle find their packages without
this module.
"""

import contextlib
import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

from paddle_resnet.utils import cache, files
from paddle_resnet.utils.errors import UsageError, installation

# {package folder: version suffix of the library files that CUDA 11.8 and Paddle 2.6 need}. The folders of the packages
# may also contain other versions, installed by other packages. Paddle opens cuSOLVER when the capture of a CUDA graph
# begins.
PACKAGES = {"cudnn": "8", "cublas": "11", "cusolver": "11", "nccl": "2", "cuda_cupti": "11.8"}
PACKAGES |= {"cuda_nvrtc": "11.2", "nvtx": "1"}
# Libraries that Paddle 2.6 needs for training: {name: (library, major version)}. cuDNN 8 opens sub-libraries, and
# aborts the process if a sub-library is missing.
NEEDED = {"libcudnn.so": ("cuDNN", 8), "libcublas.so": ("cuBLAS", 11), "libcublasLt.so": ("cuBLAS", 11)}
NEEDED |= {f"libcudnn_{part}.so.8": ("cuDNN", 8) for part in ("ops_infer", "ops_train", "cnn_infer", "cnn_train")}
NEEDED_BY_SEVERAL_GPUS = {"libnccl.so": ("NCCL", 2)}

_folder: Path | None = None  # folder of links, or None if Paddle is not imported yet or needs no links
_is_late = False  # whether Paddle was imported before this module


class _BeforePaddle:
    """An import hook that finds no modules, but runs code before Paddle is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "paddle":
            sys.meta_path.remove(self)
            _load_phi()


def prepare() -> None:
    """Make a later import of Paddle load libphi.so from the folder of links, if this build of Paddle needs the links.
    Call this function before Paddle is imported; otherwise, it has no effect."""
    global _is_late
    _is_late = "paddle" in sys.modules
    if not _is_late:
        sys.meta_path.insert(0, _BeforePaddle())


def _load_phi():
    global _folder
    links = {} if _are_set_up() else _links(_folders("paddle"), _folders("nvidia"))
    if links:
        _folder = _make_folder(links)
        with contextlib.suppress(OSError):  # the import of Paddle then reports the problem
            ctypes.CDLL(str(_folder / "libphi.so"))


def _are_set_up():
    """Return whether LD_LIBRARY_PATH, the system's folders or /usr/local/cuda/lib64 contain cuDNN and cuBLAS."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders.append("/usr/local/cuda/lib64")
    return all(
        any(Path(folder, f"lib{name}.so").exists() for folder in folders) or ctypes.util.find_library(name)
        for name in ("cudnn", "cublas")
    )


def _folders(package):
    """Return the folders of a package without importing it, or [] if it is not installed."""
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations) if spec else []


def _links(of_paddle, of_nvidia):
    """Return {name: target} of the links to create, or {} if this build of Paddle needs no links, or if Paddle or the
    packages with CUDA libraries are not installed. The parameters are the folders of the packages."""
    if not of_paddle:
        return {}
    paddle = Path(of_paddle[0])
    with contextlib.suppress(OSError):
        text = (paddle / "version/__init__.py").read_text()
        values = dict(re.findall(r"^(\w+) *= *'(.*)'", text, re.M))
        if not _is_served(values["full_version"], values["cuda_version"]):
            return {}
    links = {}
    for root in of_nvidia:
        for package, version in PACKAGES.items():
            for library in Path(root, package, "lib").glob(f"lib*.so.{version}"):
                links[library.name] = links[library.name.removesuffix(f".{version}")] = library
    return links and {path.name: path for path in (paddle / "libs").glob("*.so*")} | links


def is_served() -> bool:
    """Return whether this module prepares the libraries of the imported Paddle: a build of version 2.6 for CUDA 11."""
    import paddle

    return _is_served(paddle.version.full_version, str(paddle.version.cuda()))


def _is_served(version, cuda):
    return version.startswith("2.6") and cuda.startswith("11.")


def _make_folder(links):
    key = hashlib.sha256("\0".join(f"{name}\0{target}" for name, target in sorted(links.items())).encode())
    try:
        folder = cache.folder() / f"libraries-{key.hexdigest()[:16]}"
        if not folder.exists():
            try:
                with files.written(folder) as part:
                    part.mkdir(mode=0o700)
                    _fill(part, links)
            except OSError:
                if not folder.exists():  # otherwise, another process has created the folder
                    raise
        return folder
    except (OSError, UsageError):  # without a cache folder, create the links for this process only
        _make_folder.temporary = tempfile.TemporaryDirectory(prefix="paddle_resnet_libraries.")
        _fill(Path(_make_folder.temporary.name), links)
        return Path(_make_folder.temporary.name)


def _fill(folder, links):
    for name, target in links.items():
        (folder / name).symlink_to(target)


def problem(several_gpus: bool = False) -> str | None:
    """Check whether Paddle can open CUDA libraries of the required versions. Call this function after importing Paddle.

    Args:
        several_gpus: whether to check NCCL, which is needed for several GPUs.
    Returns:
        description of the problem and its remedy, or None if there is no problem or this build is not checked (see
        is_served).
    """
    import paddle

    if not is_served():
        return None
    needed = NEEDED | (NEEDED_BY_SEVERAL_GPUS if several_gpus else {})
    for name, (library, major) in needed.items():
        path = find(name)
        if path is None:
            state = "cannot be opened"
        elif _major(path) != major:
            state = f"is {path}"
        else:
            continue
        return (
            f"Paddle {paddle.__version__} needs {library} {major}, but {name} {state}; install it with "
            f"{installation('gpu')}, and remove other versions from LD_LIBRARY_PATH and the system's folders, which "
            "take precedence" + ("; import paddle_resnet before paddle" if _is_late else "")
        )
    return None


def find(name: str) -> str | None:
    """Open a library the way Paddle does. Return the path of the library file, or None if it cannot be opened."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders += [str(_folder)] if _folder else []
    for candidate in (*[f"{folder}/{name}" for folder in folders], name, f"/usr/local/cuda/lib64/{name}"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(candidate)
            return _path(library)
    return None


class _LinkMap(ctypes.Structure):
    """The first fields of struct link_map (link.h), to which a handle from glibc's dlopen points."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _path(library):
    return os.path.realpath(_LinkMap.from_address(library._handle).name.decode())


def _major(path):
    match = re.search(r"\.so\.(\d+)", Path(path).name)
    return match and int(match[1])
