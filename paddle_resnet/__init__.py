"""Training of image classifiers with PaddlePaddle static graphs and NVIDIA DALI."""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

from paddle_resnet.utils import errors, signals

__version__ = "0.2.0"


def _is_command():
    """Return whether this process runs a command of this package and not a program that imports the package."""
    if sys.argv[:1] == ["-m"]:  # Python is about to run the module whose name precedes sys.argv[1:]
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith(f"{__name__}.")
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return script.name == errors.SCRIPT or script.resolve() == errors.TRAIN.resolve()


# The commands import this module first. Signals are blocked until exit_codes.of can handle them. The threads that NumPy
# starts during its import block the signals forever, so that only the main thread handles signals.
if _is_command():
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)

from paddle_resnet.machine import libraries  # noqa: E402

# Paddle reads its environment variables only when it is imported, so they are set before any module of this package
# imports Paddle.
# Paddle 3 builds PIR programs by default, which do not support Fleet's minimize or ASP. Select legacy programs.
os.environ.setdefault("FLAGS_enable_pir_api", "0")
os.environ.setdefault("GLOG_minloglevel", "2")
# The decoder uses more than 8 streams, but CUDA has only 8 hardware queues by default. If training and the decoder
# share a queue, training waits for the decoder.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# Make the CUDA libraries in installed Python packages available to Paddle.
libraries.prepare()
# Limit the number of pixels in images that OpenCV decodes (PNG, BMP, WebP and others), because decoding a 100 kB file
# can require 7 GB of memory.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**28))

# Suppress Paddle's warning that training programs track global BN statistics, because this is the intended behavior.
warnings.filterwarnings("ignore", message="When training, we now always track global mean and variance")
# Suppress Paddle 3's warning about a missing ccache, because this project does not use ccache.
warnings.filterwarnings("ignore", message="No ccache found")
# Suppress a warning that DALI issues with --balanced-sampling and for Parquet files. The warning is harmless, because
# the loader state contains the position of the external source.
warnings.filterwarnings("ignore", message="Checkpointing enabled in a pipeline with external source")

# Suppress a warning that DALI issues if a loader restores only the image order, for example after the batch size has
# changed (--sizes). The warning is harmless, because data/iterators.py counts the batches itself.
logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("Iterator data was not saved"))

# If Paddle was imported before this package, the environment variables above have no effect, so switch off PIR mode
# explicitly.
if sys.modules.get("paddle") is not None and os.environ["FLAGS_enable_pir_api"] == "0":  # noqa: SIM112
    from paddle_resnet.machine import compat

    compat.leave_pir()
