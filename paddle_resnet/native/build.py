"""The project's own Paddle operators: built at the first start on a machine, then taken from a cache.

`operators.cc` goes through the machine's C++ compiler with Paddle's headers. The CUDA kernels go through NVRTC, a
library that needs neither CUDA's compiler nor its headers, for exactly the GPU that is there.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from paddle_resnet.job import processes
from utils import cache, logger
from utils.errors import UsageError

SOURCES = Path(__file__).parent
# Patterns, so that a new file is in the cache's keys. NVRTC compiles the kernels' files as one text in this order.
OPERATOR_FILES = ("operators.cc", "**/*.h")
KERNEL_FILES = ("common.h", "vector.cuh", "*.cu")
NVRTC_NAMES = ("libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")
COMPILER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall")


def cache_folder():
    """utils.cache.folder, as a Path.

    Raises:
        Unavailable: there is none.
    """
    try:
        return cache.folder()
    except UsageError as e:
        raise Unavailable("there is no home folder to keep them in (set XDG_CACHE_HOME)") from e


class Unavailable(Exception):
    """The operators cannot be had on this machine; the message says why in a few words."""


def resolve(args):
    """Settle --kernels and --cuda-graph, and load the operators if they are this project's.

    Args:
        args: flags with a settled --device; `kernels` becomes "native" or "paddle", `cuda_graph` whether
            steps are recorded.
    Raises:
        UsageError: --kernels native, and they cannot be had or do not know the layout.
    """
    is_given = args.kernels == "native"
    if is_given and args.data_layout != "NHWC":
        raise UsageError("--kernels native knows NHWC only: give --data-layout NHWC, or --kernels paddle")
    if args.kernels == "auto":
        args.kernels = "native" if args.device == "gpu" and args.data_layout == "NHWC" else "paddle"
    # A trace is to name each operator's kernels. What NCCL does between hosts has not been recorded yet.
    args.cuda_graph &= args.device == "gpu" and args.profile_steps is None and processes.is_one_host()
    if args.kernels == "paddle":
        args.cuda_graph = False
        return
    capability = None
    if args.device == "gpu":
        capability = paddle.device.cuda.get_device_capability(processes.local_gpu())
    try:
        load(capability)
    except Unavailable as e:
        if is_given:
            raise UsageError(f"--kernels native: {e}: mend that, or give --kernels paddle") from e
        logger.info(f"--kernels auto: Paddle's kernels, which are slower, since ours are not to be had: {e}")
        args.kernels, args.cuda_graph = "paddle", False


def missing(capability=None):
    """What this machine lacks to build the operators.

    Args:
        capability: (major, minor) compute capability of the GPU, None for the CPU alone.
    Returns:
        a few words that name it; None where there is all, or where everything is built already.
    """
    if not _operators_file().exists() and shutil.which(_compiler()[0]) is None:
        return f"no C++ compiler ({_compiler()[0]})"
    if capability is not None and not _kernels_file(capability).exists() and _nvrtc() is None:
        return "no NVRTC library (libnvrtc.so)"
    return None


def load(capability=None):
    """Build what is not built yet and register the operators with Paddle.

    Args:
        capability: (major, minor) compute capability of the GPU that will run them, None for the CPU.
    Raises:
        Unavailable: something is missing, or a compiler reports an error.
    """
    try:
        lack = missing(capability)
        if lack is not None:
            raise Unavailable(lack)
        if capability is None:
            register()
            return
        with ThreadPoolExecutor(1) as beside:  # the two compilers take 5 s each
            kernels = beside.submit(_build, _kernels_file(capability), functools.partial(_compile_kernels, capability))
            library = register()
            image = kernels.result().read_bytes()
        library.paddle_resnet_set_image(image, ctypes.c_size_t(len(image)))
    except OSError as e:
        remedy = "XDG_CACHE_HOME names another place"
        raise Unavailable(f"{cache_folder()} cannot be used ({e.strerror}; {remedy})") from e


@functools.cache
def register():
    """Make the operators known to Paddle, once a process; returns their library (ctypes.CDLL)."""
    path = _build(_operators_file(), _compile_operators)
    try:
        load_op_meta_info_and_register_op(str(path))
        return ctypes.CDLL(str(path))
    except (RuntimeError, OSError) as e:
        # Paddle's first line has the linker's reason; advice for all systems follows it.
        reason = re.search(r"error code is (.*)\)", str(e)) or re.search(r"(.*)", str(e).strip())
        raise Unavailable(f"Paddle cannot load {path} ({reason[1]})") from e


def _operators_file():
    words = [platform.machine(), paddle.version.full_version, paddle.version.commit, *COMPILER_FLAGS]
    return cache_folder() / f"operators-{_key(OPERATOR_FILES, *words)}.so"


def _kernels_file(capability):
    return cache_folder() / f"kernels-sm_{capability[0]}{capability[1]}-{_key(KERNEL_FILES)}.cubin"


def _sources(patterns):
    return [path for pattern in patterns for path in sorted(SOURCES.glob(pattern))]


def _key(patterns, *others):
    contents = [path.read_bytes() for path in _sources(patterns)] + [other.encode() for other in others]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _build(path, compile_to):
    """Make a file unless it is there; the processes of a job wait for the first one that does."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f"{path.name.partition('-')[0]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            # Nodes may share the folder without sharing locks.
            part = path.with_suffix(f".{platform.node()}.{os.getpid()}.part")
            compile_to(part)
            part.replace(path)
    return path


def _compiler():
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _compile_operators(target, source=SOURCES / "operators.cc"):
    include, libraries = Path(paddle.sysconfig.get_include()), Path(paddle.base.__file__).parent
    words = [*_compiler(), *COMPILER_FLAGS, str(source), "-o", str(target)]
    words += [f"-I{include}", f"-I{include / 'third_party'}", f"-L{libraries}", "-l:libpaddle.so", "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise Unavailable(f"{_compiler()[0]} failed: {errors[0]}")


@functools.cache
def _nvrtc():
    """NVRTC of the Python environment, of a CUDA installation or of the library path; None if there is none."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    folders = [f"{folder}/nvidia/cuda_nvrtc/lib" for folder in packages]
    folders += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64"]
    installed = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libnvrtc.so*"))]
    for name in (*installed, *NVRTC_NAMES):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _kernel_source():
    """All kernels as one text, which includes nothing."""
    text = "\n".join(path.read_text() for path in _sources(KERNEL_FILES))
    return re.sub(r'^#include ".*"$|^#pragma once$', "", text, flags=re.MULTILINE)


def _compile_kernels(capability, target):
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    program = ctypes.c_void_p()

    def call(name, *arguments):
        function = getattr(nvrtc, f"nvrtc{name}", None)
        if function is None:
            raise Unavailable(f"NVRTC is too old: it has no nvrtc{name}, which CUDA 11.1 brought")
        error = function(*arguments)
        if error:
            raise Unavailable(f"NVRTC failed: {name} returned {error} for {options[0].decode()}")

    def result(what):
        size = ctypes.c_size_t()
        call(f"Get{what}Size", program, ctypes.byref(size))
        memory = ctypes.create_string_buffer(size.value)
        call(f"Get{what}", program, memory)
        return memory

    call("CreateProgram", ctypes.byref(program), _kernel_source().encode(), b"kernels.cu", 0, None, None)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = result("ProgramLog").value.decode().strip().splitlines()
            raise Unavailable(f"NVRTC failed: {log[0] if log else 'without a reason'} ({options[0].decode()})")
        target.write_bytes(result("CUBIN").raw)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
