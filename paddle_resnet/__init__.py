"""ImageNet-class training on PaddlePaddle static graphs, fed by NVIDIA DALI."""

import logging
import os
import signal
import sys
import warnings

from paddle_resnet.machine import libraries

# `python -m paddle_resnet.NAME` imports this module first. SIGINT (Control-C) is blocked until exit_codes.of can report
# it.
if sys.argv[:1] == ["-m"]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

# Paddle reads its environment variables only at import, so they are set before any module of this package imports
# Paddle.
# This project builds legacy Programs; Paddle 3 would otherwise build PIR programs, which do not support Fleet's
# minimize or ASP.
os.environ.setdefault("FLAGS_enable_pir_api", "0")
os.environ.setdefault("GLOG_minloglevel", "2")
# The decoder uses more streams than CUDA's 8 default queues. In a shared queue, training would wait for the decoder.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# Enable Paddle to find CUDA libraries in installed Python packages.
libraries.prepare()
# Limit the number of pixels in images that OpenCV decodes (PNG, BMP, WebP and others), because decoding a 100 kB file
# can require 7 GB of memory.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**28))

# Paddle issues this warning for each training program; it describes the expected behavior of batch normalization.
warnings.filterwarnings("ignore", message="When training, we now always track global mean and variance")
# Paddle 3 issues this warning at import; it concerns a tool that this project does not use.
warnings.filterwarnings("ignore", message="No ccache found")
# The state of a loader with --balanced-sampling contains the position of its external source.
warnings.filterwarnings("ignore", message="Checkpointing enabled in a pipeline with external source")

# DALI issues this warning if a loader continues only the order of the images, for example after the batch size has
# changed (--sizes). data/iterators.py counts the batches itself.
logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("Iterator data was not saved"))

# If Paddle was imported before this package, Paddle has already read its environment variables, so change its state.
if sys.modules.get("paddle") is not None and os.environ["FLAGS_enable_pir_api"] == "0":  # noqa: SIM112
    from paddle_resnet.machine import compat

    compat.leave_pir()
