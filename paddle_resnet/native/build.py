"""Builds and loads the custom Paddle operators: compiled at the first start on a machine, then cached.

The machine's C++ compiler compiles `operators.cc` against Paddle's headers. NVRTC compiles the CUDA kernels for the
machine's GPU; it needs neither nvcc nor the CUDA headers.
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
KERNEL_FILES = ("common.h", "activations.h", "vector.cuh", "*.cu")
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
        raise Unavailable("there is no home folder for the cache (set XDG_CACHE_HOME)") from e


class Unavailable(Exception):
    """The custom operators cannot be built or loaded on this machine. The message is a short reason."""


def resolve(args):
    """Resolve --kernels and --cuda-graph in `args`, and load the custom operators if they are chosen.

    Args:
        args: flags with a resolved --device. `kernels` becomes "native" or "paddle", `cuda_graph` whether steps are
            captured.
    Raises:
        UsageError: --kernels native, and they are unavailable or do not support the layout.
    """
    is_given = args.kernels == "native"
    if is_given and args.data_layout != "NHWC":
        raise UsageError("--kernels native supports NHWC only: give --data-layout NHWC, or --kernels paddle")
    if args.kernels == "auto":
        args.kernels = "native" if args.device == "gpu" and args.data_layout == "NHWC" else "paddle"
    # A trace must name each operator's kernels, and capturing NCCL between hosts is untested.
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
            raise UsageError(f"--kernels native: {e}: fix that, or give --kernels paddle") from e
        logger.info(f"--kernels auto: custom kernels are unavailable ({e}); falling back to Paddle's slower ones")
        args.kernels, args.cuda_graph = "paddle", False


def missing(capability=None):
    """What this machine lacks to build the operators.

    Args:
        capability: (major, minor) compute capability of the GPU; None: CPU only.
    Returns:
        a few words that name it; None if nothing is missing or everything is already built.
    Raises:
        Unavailable: CXX is not a command.
    """
    if not cache.is_trusted(_operators_file()) and shutil.which(_compiler()[0]) is None:
        return f"no C++ compiler ({_compiler()[0]})"
    if capability is not None and not cache.is_trusted(_kernels_file(capability)) and _nvrtc() is None:
        return "no NVRTC library (libnvrtc.so)"
    return None


def load(capability=None):
    """Build what is not cached, and register the operators with Paddle.

    Args:
        capability: (major, minor) compute capability of the GPU that will run them; None: CPU.
    Raises:
        Unavailable: a compiler or library is missing, or a compiler reports an error.
    """
    try:
        lack = missing(capability)
        if lack is not None:
            raise Unavailable(lack)
        if capability is None:
            register()
            return
        with ThreadPoolExecutor(1) as beside:  # each compiler takes 5 s
            kernels = beside.submit(_build, _kernels_file(capability), functools.partial(_compile_kernels, capability))
            library = register()
            image = kernels.result().read_bytes()
        library.paddle_resnet_set_image(image, ctypes.c_size_t(len(image)))
    except OSError as e:
        remedy = "set XDG_CACHE_HOME to another folder"
        raise Unavailable(f"{cache_folder()} cannot be used ({e.strerror}; {remedy})") from e


@functools.cache
def register():
    """Register the operators with Paddle, once per process; returns their library (ctypes.CDLL)."""
    path = _build(_operators_file(), _compile_operators)
    try:
        load_op_meta_info_and_register_op(str(path))
        return ctypes.CDLL(str(path))
    except (RuntimeError, OSError) as e:
        # Paddle's message begins with the linker's reason; general advice follows.
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
    """Build a file unless the cache holds one that only its owner can write. One process of a job builds it while the
    others wait."""
    if cache.is_trusted(path):
        return path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(path.parent / f"{path.name.partition('-')[0]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cache.is_trusted(path):
            # Nodes may share the folder without sharing locks, so each writes a file of its own.
            part = path.with_suffix(f".{platform.node()}.{os.getpid()}.part")
            compile_to(part)
            part.chmod(0o755)  # whatever the umask
            part.replace(path)
    return path


def _compiler():
    words = os.environ.get("CXX", "")
    try:
        return shlex.split(words) or ["g++"]
    except ValueError as e:
        raise Unavailable(f"CXX={words} is not a command ({e})") from e


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
    """NVRTC from the Python environment, a CUDA installation or the library path; None if there is none."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    folders = [f"{folder}/nvidia/cuda_nvrtc/lib" for folder in packages]
    folders += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64"]
    installed = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libnvrtc.so*"))]
    for name in (*installed, *NVRTC_NAMES):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _kernel_source():
    """The source of all kernels as one string, without includes."""
    text = "\n".join(path.read_text() for path in _sources(KERNEL_FILES))
    return re.sub(r'^#include ".*"$|^#pragma once$', "", text, flags=re.MULTILINE)


def _compile_kernels(capability, target):
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    program = ctypes.c_void_p()

    def call(name, *arguments):
        function = getattr(nvrtc, f"nvrtc{name}", None)
        if function is None:
            raise Unavailable(f"NVRTC is too old: it lacks nvrtc{name} (new in CUDA 11.1)")
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
