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
import shutil
import site
import subprocess
from pathlib import Path

import paddle
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from paddle_resnet import distributed
from utils import logger
from utils.errors import UsageError

SOURCES = Path(__file__).parent
KERNEL_FILES = ("vector.cuh", "batch_norm.cu", "max_pool.cu")
NVRTC_NAMES = ("libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so.13")


def cache_folder():
    """Where built files are kept: $XDG_CACHE_HOME/paddle_resnet, by default ~/.cache/paddle_resnet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_resnet"


def resolve(args):
    """Settle --kernels, and load the operators if they are this project's.

    Args:
        args: flags with a settled --device; `kernels` becomes "native" or "paddle".
    Raises:
        UsageError: --kernels native, and they cannot be built or do not know the layout.
    """
    capability = None
    if args.device == "gpu":
        capability = paddle.device.cuda.get_device_capability(distributed.local_gpu())
    if args.kernels == "auto":
        why_not = _why_paddles(args, capability)
        if why_not:
            logger.info(f"--kernels auto: Paddle's own kernels, {why_not}")
        wanted = args.device == "gpu" and args.data_layout == "NHWC" and not why_not
        args.kernels = "native" if wanted else "paddle"
    if args.kernels == "native":
        if args.data_layout != "NHWC":
            raise UsageError("--kernels native knows NHWC only: give --data-layout NHWC, or --kernels paddle")
        load(capability)


def _why_paddles(args, capability):
    """Why a run that could take the faster kernels does not; None if it does, or if they are no matter there."""
    if args.device == "cpu" or args.data_layout == "NCHW":
        return None
    if args.run_scope.trains and distributed.world_size() > 1:
        # Tested with two processes on CPUs; the tests on two GPUs have not been run yet.
        return "as training on several GPUs has been tested with; --kernels native takes this project's"
    lack = missing(capability)
    return lack and f"which are slower: {lack}"


def missing(capability=None):
    """What this machine lacks to build the operators.

    Args:
        capability: (major, minor) compute capability of the GPU, None for the CPU alone.
    Returns:
        a few words that name it; None where there is all, or where everything is built already.
    """
    if not _operators_file().exists() and shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()})"
    if capability is not None and not _kernels_file(capability).exists() and _nvrtc() is None:
        return "no NVRTC library (libnvrtc.so)"
    return None


def load(capability=None):
    """Build what is not built yet and register the operators with Paddle.

    Args:
        capability: (major, minor) compute capability of the GPU that will run them, None for the CPU.
    Raises:
        UsageError: something is missing, or a compiler reports an error.
    """
    lack = missing(capability)
    if lack is not None:
        raise UsageError(f"--kernels native: {lack}: install it, or give --kernels paddle")
    library = register()
    if capability is not None:
        image = _build(_kernels_file(capability), functools.partial(_compile_kernels, capability)).read_bytes()
        library.paddle_resnet_set_image(image, ctypes.c_size_t(len(image)))


@functools.cache
def register():
    """Make the operators known to Paddle, once a process; returns their library (ctypes.CDLL)."""
    path = _build(_operators_file(), _compile_operators)
    load_op_meta_info_and_register_op(str(path))
    return ctypes.CDLL(str(path))


def _operators_file():
    key = _key(["operators.cc"], paddle.version.full_version, paddle.version.commit)
    return cache_folder() / f"operators-{key}.so"


def _kernels_file(capability):
    return cache_folder() / f"kernels-sm_{capability[0]}{capability[1]}-{_key(KERNEL_FILES)}.cubin"


def _key(names, *others):
    contents = [(SOURCES / name).read_bytes() for name in names] + [other.encode() for other in others]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _build(path, compile_to):
    """Make a file unless it is there; the processes of a job wait for the first one that does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            compile_to(part)
            part.replace(path)
    return path


def _compiler():
    return os.environ.get("CXX", "g++")


def _compile_operators(target):
    include, libraries = Path(paddle.sysconfig.get_include()), Path(paddle.base.__file__).parent
    words = [_compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", str(SOURCES / "operators.cc")]
    words += [f"-I{include}", f"-I{include / 'third_party'}", f"-L{libraries}", "-l:libpaddle.so", "-ldl"]
    done = subprocess.run([*words, "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise UsageError(f"--kernels native: {words[0]} failed: {errors[0]}: give --kernels paddle to go on without")


@functools.cache
def _nvrtc():
    """NVRTC of the Python environment, of a CUDA installation or of the library path; None if there is none."""
    folders = [f"{packages}/nvidia/cuda_nvrtc/lib" for packages in site.getsitepackages()]
    folders += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64"]
    installed = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libnvrtc.so*"))]
    for name in (*installed, *NVRTC_NAMES):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _compile_kernels(capability, target):
    nvrtc = _nvrtc()
    source = "\n".join((SOURCES / name).read_text() for name in KERNEL_FILES).replace('#include "vector.cuh"', "")
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    what = "ProgramLog" if failed else "CUBIN"
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, result)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        first = next(iter(result.value.decode().strip().splitlines()), "it gives no reason")
        raise UsageError(f"--kernels native: NVRTC failed: {first}: give --kernels paddle to go on without")
    target.write_bytes(result.raw)
