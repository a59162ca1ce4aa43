"""Build, cache and load the custom Paddle operators. Operators that the cache does not contain are compiled.

The machine's C++ compiler compiles `operators.cc` with Paddle's headers and, in parallel, `reference.cc`, which
contains the loops that run on the CPU. NVRTC compiles the CUDA kernels for the machine's GPU, and requires neither nvcc
nor the CUDA headers.
"""

import contextlib
import ctypes
import fcntl
import functools
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from paddle_resnet.machine import cpu
from paddle_resnet.utils import cache, files
from paddle_resnet.utils.errors import UsageError

SOURCES = Path(__file__).parent
# Patterns of the source files, so that new files become part of the cache key automatically. NVRTC compiles the kernel
# files as one string, in this order.
OPERATOR_FILES = ("*.cc", "**/*.h")
KERNEL_FILES = ("common.h", "activations.h", "optimizers.h", "*.cuh", "*.cu")
NVRTC_NAMES = ("libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")
COMPILER_FLAGS = (
    *("-std=c++17", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fPIC", "-Wall"),
)
# operators.cc consists mostly of Paddle's templates and contains no loops over elements. With -O2, its compilation
# would take about twice as long.
OPTIMIZATION = {SOURCES / "operators.cc": "-Og", SOURCES / "reference.cc": "-O2"}


def cache_folder() -> Path:
    """Return the folder for the compiled operators and kernels.

    Raises:
        Unavailable: the home folder cannot be determined.
    """
    try:
        return cache.folder()
    except UsageError as e:
        raise Unavailable("there is no home folder for the cache (set XDG_CACHE_HOME)") from e


class Unavailable(Exception):
    """Raised if the custom operators cannot be built or loaded on this machine. The message states the reason."""


def missing(capability: tuple[int, int] | None = None) -> str | None:
    """Return what this machine lacks for building the operators.

    Args:
        capability: (major, minor) compute capability of the GPU; None without a GPU.
    Returns:
        a short description of what is missing, or None if nothing is missing or the cache contains the operators.
    Raises:
        Unavailable: the environment variable CXX does not contain a command, or there is no home folder for the cache.
        OSError: the cache cannot be read.
    """
    if not cache.is_trusted(_operators_file()) and shutil.which(_compiler()[0]) is None:
        return f"no C++ compiler ({_compiler()[0]})"
    if capability is not None and not cache.is_trusted(_kernels_file(capability)) and _nvrtc() is None:
        return "no NVRTC library (libnvrtc.so)"
    return None


def has_onednn() -> bool:
    """Return whether Paddle contains the version of oneDNN whose functions onednn.h declares. Paddle's wheels for x86
    contain the required version."""
    return Path(paddle.__file__).with_name("libs").joinpath("libdnnl.so.3").exists()


def load(capability: tuple[int, int] | None = None) -> None:
    """Build the libraries that are not in the cache, and register the operators with Paddle.

    Args:
        capability: (major, minor) compute capability of this process's GPU; None without a GPU.
    Raises:
        Unavailable: a compiler or library is missing, a compiler reports an error, the cache folder cannot be used, or
            Paddle cannot load the operators.
    """
    try:
        reason = missing(capability)
        if reason is not None:
            raise Unavailable(reason)
        if capability is None:
            register()
            return
        with ThreadPoolExecutor(1) as executor:  # run both compilers in parallel
            kernels = executor.submit(
                _build,
                _kernels_file(capability),
                lambda target: _compile_kernels(_nvrtc(), _kernel_source(), capability, target),
            )
            library = register()
            image = kernels.result().read_bytes()
        library.paddle_resnet_set_image(image, ctypes.c_size_t(len(image)))
    except OSError as e:
        remedy = "set XDG_CACHE_HOME to a different folder"
        raise Unavailable(f"{cache_folder()} cannot be used ({e.strerror}; {remedy})") from e


@functools.cache
def register() -> ctypes.CDLL:
    """Build the operators if necessary, register them with Paddle once per process, and return their library.

    Raises:
        Unavailable: the operators cannot be built, or Paddle cannot load the library.
        OSError: the cache folder cannot be used.
    """
    path = _build(_operators_file(), _compile_operators)
    try:
        load_op_meta_info_and_register_op(str(path))
        return ctypes.CDLL(str(path))
    except (RuntimeError, OSError) as e:
        # Paddle's message contains the linker's reason, followed by general advice.
        reason = re.search(r"error code is (.*)\)", str(e)) or re.search(r"(.*)", str(e).strip())
        raise Unavailable(f"Paddle cannot load {path} ({reason[1]})") from e


def _operators_file(sources=SOURCES):
    versions = [
        platform.machine(),
        cpu.arithmetic()["instructions"],
        paddle.version.full_version,
        paddle.version.commit,
        *COMPILER_FLAGS,
        *OPTIMIZATION.values(),
    ]
    return cache_folder() / f"operators-{_key(_files(sources, OPERATOR_FILES), *versions)}.so"


def _kernels_file(capability, sources=SOURCES):
    key = _key(_files(sources, KERNEL_FILES))
    return cache_folder() / f"kernels-sm_{capability[0]}{capability[1]}-{key}.cubin"


def _files(folder, patterns):
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _key(paths, *others):
    contents = [path.read_bytes() for path in paths] + [other.encode() for other in others]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _build(path, compile_to):
    """Build a file unless the cache already contains a trusted copy (cache.is_trusted), and return its path. If several
    processes need the file, one of them builds it while the others wait.

    Raises:
        OSError: the cache cannot be read or written.
        Unavailable: the compiler fails.
    """
    if cache.is_trusted(path):
        return path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(path.parent / f"{path.name.partition('-')[0]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cache.is_trusted(path):
            with files.written(path) as partial:
                compile_to(partial)
                partial.chmod(0o755)  # set the mode regardless of the umask
    return path


def _compiler():
    command = os.environ.get("CXX", "")
    try:
        return shlex.split(command) or ["g++"]
    except ValueError as e:
        raise Unavailable(f"CXX={command} is not a command ({e})") from e


def _compile_operators(target, optimization=OPTIMIZATION):
    include, libraries = Path(paddle.sysconfig.get_include()), Path(paddle.base.__file__).parent
    headers = [f"-I{include}", f"-I{include / 'third_party'}"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(optimization)) as executor:
        objects = [f"{folder}/{source.stem}.o" for source in optimization]
        commands = [
            [level, "-c", str(source), "-o", compiled, *headers]
            for (source, level), compiled in zip(optimization.items(), objects, strict=True)
        ]
        list(executor.map(_run_compiler, commands))
        command = ["-shared", *objects, "-o", str(target), f"-L{libraries}", "-l:libpaddle.so", "-ldl"]
        # Link to the OpenMP runtime of Paddle and oneDNN instead of the compiler's. With two runtimes, the idle threads
        # of each would spin on the cores that the other needs. Paddle's wheels for ARM use the compiler's runtime.
        runtime = libraries.parent / "libs/libiomp5.so"
        command += [str(runtime)] if runtime.exists() else []
        _run_compiler(command)


def _run_compiler(arguments):
    command = [*_compiler(), *COMPILER_FLAGS, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise Unavailable(f"{command[0]} cannot be run ({e.strerror})") from e
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise Unavailable(f"{_compiler()[0]} failed: {errors[0]}")


@functools.cache
def _nvrtc():
    """Load NVRTC from the Python environment, a CUDA installation or the library path. Return None if NVRTC is not
    installed."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    for name in _nvrtc_names(packages, os.environ.get("CUDA_HOME", "/usr/local/cuda")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _nvrtc_names(packages, cuda_home):
    """Return the names under which NVRTC may be found, in the order in which to try them: the files in the folders of
    Python packages, the files of the CUDA installation, and the names on the library path."""
    folders = [*(f"{folder}/nvidia/cuda_nvrtc/lib" for folder in packages), f"{cuda_home}/lib64"]
    installed = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libnvrtc.so*"))]
    return [*installed, *NVRTC_NAMES]


def _kernel_source():
    """Return the source code of all kernels as one string, without the #include and #pragma once lines."""
    text = "\n".join(path.read_text() for path in _files(SOURCES, KERNEL_FILES))
    return re.sub(r'^#include ".*"$|^#pragma once$', "", text, flags=re.MULTILINE)


def _compile_kernels(nvrtc, source, capability, target):
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    major, minor = ctypes.c_int(), ctypes.c_int()
    program = ctypes.c_void_p()

    def call(name, *arguments):
        function = getattr(nvrtc, f"nvrtc{name}", None)
        if function is None:
            raise Unavailable(f"NVRTC is too old: nvrtc{name} requires CUDA 11.1 or higher")
        error = function(*arguments)
        if error:
            raise Unavailable(f"NVRTC failed: {name} returned {error} for {options[0].decode()}")

    def result(what):
        size = ctypes.c_size_t()
        call(f"Get{what}Size", program, ctypes.byref(size))
        memory = ctypes.create_string_buffer(size.value)
        call(f"Get{what}", program, memory)
        return memory

    call("CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    try:
        call("Version", ctypes.byref(major), ctypes.byref(minor))
        if (major.value, minor.value) >= (12, 4):  # --split-compile is untested with older versions
            options.append(b"--split-compile=0")  # compile on all CPU cores
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = result("ProgramLog").value.decode().strip().splitlines()
            raise Unavailable(f"NVRTC failed: {log[0] if log else 'no error message'} ({options[0].decode()})")
        target.write_bytes(result("CUBIN").raw)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
