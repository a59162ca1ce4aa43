"""Measure the speed of inference engines for `predict --benchmark`."""

import contextlib
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from paddle_resnet import export
from paddle_resnet.machine import memory
from paddle_resnet.serving import inference, networks
from paddle_resnet.serving.model import Model
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import RunError, UsageError
from paddle_resnet.utils.meters import latency_percentiles

MIN_S, MIN_STEPS = 2, 5  # minimum duration and minimum number of steps of a measurement
WARMUP_STEPS = 5
_COLUMNS = ("latency_p50_ms", "latency_p90_ms", "latency_p99_ms", "ips", "memory_mib")


def print_table(
    path: str, device: str, model_arch_name: str | None, precision: str | None, batches: Sequence[int]
) -> None:
    """Print the results of each engine that can run the network at a path, see `engines`, for each batch size."""
    logger.info(f"{path} on {device}, random images in host memory, latency in ms, peak memory in MiB")
    names = "  ".join(f"{name:>9}" for name in ("p50", "p90", "p99", "images/s", "memory"))
    logger.info(f"{'batch':>5}  {'engine':16}  {'precision':9}  {names}")
    with contextlib.closing(engines(path, device, model_arch_name, precision, batches)) as models:
        for result in measure(models, batches, device):
            metrics = "  ".join(f"{result[name]:9.2f}" for name in _COLUMNS)
            logger.info(f"{result['batch']:5}  {result['engine']:16}  {result['precision']:9}  {metrics}")


def measure(models: Iterable[Model], batch_sizes: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    """Measure each Model of an iterable on random images in host memory. The times include the copies from and to
    host memory. Yield {"engine", "precision", "batch", "ips" (images/s), "latency_{mean,p50,p90,p95,p99}_ms",
    "memory_mib" (peak memory of the engine so far, see memory.Peak)} for each model and batch size.

    Args:
        models: iterable that opens each model when it is requested.
        batch_sizes: images per batch.
        device: "cpu" or "gpu".
    """
    random, models = np.random.default_rng(0), iter(models)
    while True:
        peak = memory.Peak(device)
        if (model := next(models, None)) is None:
            return
        for batch in batch_sizes:
            images = model.host_images(batch)
            images[:] = 2 * random.random(images.shape, dtype=np.float32)
            times_s = []
            # The first runs are not measured, because an engine may select algorithms or capture a CUDA graph.
            for _ in range(WARMUP_STEPS):
                model.run(images)
            while len(times_s) < MIN_STEPS or sum(times_s) < MIN_S:
                start = perf_counter()
                model.run(images)
                times_s.append(perf_counter() - start)
            entry = {"engine": model.engine, "precision": model.precision, "batch": batch}
            entry |= {"ips": batch * len(times_s) / sum(times_s), **latency_percentiles(times_s)}
            yield entry | {"memory_mib": peak.mib()}
        del model


def engines(
    path: str, device: str, model_arch_name: str | None, precision: str | None, sizes: Sequence[int]
) -> Generator[Model, None, None]:
    """Yield a Model for each engine that can run the network at a path. Each Model is opened when it is requested. For
    Paddle Inference and onnxruntime, a checkpoint is exported to a temporary folder. If the network cannot be exported
    to ONNX or run in onnxruntime, a warning is logged and onnxruntime is omitted. For arguments and exceptions, see
    inference.open_model and export.export."""
    folder = Path(path)
    onnx_file = folder / f"{inference.NAME}.onnx"
    problem = f"{path}: contains no {onnx_file.name}; export the checkpoint with --onnx"
    with tempfile.TemporaryDirectory() as temporary:
        if inference.is_export(folder):
            model = inference.open_model(path, device, model_arch_name, precision, sizes)
            yield model
            if model.engine == "onnxruntime":
                return
            del model
        else:
            precisions = [precision] if precision else ["float32", inference.resolve_precision(None, device)]
            for each in dict.fromkeys(precisions):
                yield inference.open_checkpoint(path, device, model_arch_name, each, sizes, engine="Paddle")
            if device == "gpu":
                yield networks.load_checkpoint(path, device, model_arch_name=model_arch_name).model()
            folder = Path(temporary) / "export"
            onnx_file = folder / onnx_file.name
            try:
                export.export(path, folder, onnx=True, model_arch_name=model_arch_name)
            except (UsageError, RunError) as e:
                problem = e
                export.export(path, folder, model_arch_name=model_arch_name)
            yield inference.open_paddle(folder, device)
            if "float16" in precisions:
                half = Path(temporary) / "float16"
                export.export(path, half, model_arch_name=model_arch_name, precision="float16")
                yield inference.open_paddle(half, device)
        try:
            if not onnx_file.is_file():
                raise UsageError(problem)
            model = inference.open_onnx(onnx_file, device)
        except UsageError as e:
            logger.warn(f"onnxruntime: not measured: {e}")
        else:
            yield model
