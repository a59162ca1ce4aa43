"""Predict the classes of images: `python -m paddle_resnet.predict --help`."""

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

import paddle_resnet  # noqa: F401  sets Paddle's environment, so before any import of Paddle
from utils import exit_codes, files, logger, signals
from utils.errors import RunError, UsageError, printable
from utils.meters import latency_percentiles

TOP = 5
FIGURES = ("latency_p50_ms", "latency_p90_ms", "latency_p99_ms", "ips")  # of a line of --benchmark
BENCHMARK_S, BENCHMARK_STEPS = 2, 5  # a measurement lasts at least so long and so many steps


def predict(model, paths, batch_size=32, device="cpu", threads=4):
    """Yield (path, probabilities, why not) of each image file in order.

    Images are decoded, resized and normalised as in an evaluation: dali.py, Mode.EVAL.

    Args:
        model: inference.Model.
        paths: image files.
        batch_size: images a batch.
        device, threads: "cpu" or "gpu", and CPU threads, of DALI.
    Returns:
        iterator; probabilities are float32 [classes], or None with the reason for a file that cannot be decoded.
    """
    for batch, images, reason in _images(model.description, paths, batch_size, device, threads):
        probabilities = [None] if images is None else model.run(images)
        for path, row in zip(batch, probabilities, strict=True):
            yield path, row, reason


def _images(description, paths, batch_size, device, threads):
    """Yield (paths, images, None) of each batch, and ([path], None, reason) of each file that cannot be decoded. A DALI
    pipeline ends with the first such file; the images that it was about to deliver are then decoded one by one."""
    done = 0
    while done < len(paths):
        try:
            for images in _decoded(description, paths[done:], batch_size, device, threads):
                batch = paths[done : done + len(images)]
                done += len(images)
                yield batch, images, None
        except (RuntimeError, UnicodeEncodeError) as error:
            for path in paths[done : done + batch_size]:
                done += 1
                try:
                    (images,) = _decoded(description, [path], 1, device, threads)
                except (RuntimeError, UnicodeEncodeError):
                    yield [path], None, _why_not(path, error)
                else:
                    yield [path], images, None


def _decoded(description, paths, batch_size, device, threads):
    """Yield the images of each batch as the network takes them; DALI raises RuntimeError for a file that it cannot
    decode."""
    from paddle_resnet import dali, inference
    from paddle_resnet.data import readers
    from utils.mode import Mode

    batch_size = min(batch_size, len(paths))
    args = inference.loader_args(description, batch_size, device, threads)
    pipeline = dali.create_dali_pipeline(args, readers.single_files(paths), Mode.EVAL, 0, 1)
    pipeline.build()
    for start in range(0, len(paths), batch_size):
        images, _ = pipeline.run()
        images = np.array(images.as_cpu().as_tensor())[: len(paths) - start]  # the last batch is padded
        yield images.astype(description["input"]["dtype"])


def _why_not(path, error):
    from paddle_resnet.data import bad_images

    try:
        path.encode()
        reason = bad_images.decode(Path(path).read_bytes())
    except UnicodeEncodeError:
        return "has a name that is not valid UTF-8: rename it"
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    if reason is None:
        raise RunError(f"{path} cannot be loaded by this pipeline: {str(error).strip().splitlines()[-1]}") from error
    return reason


def find_images(words, stdin):
    """The image files that words name: files, folders (searched at any depth; hidden ones and those of the system are
    passed over), `-` (paths on stdin, one a line). Raises UsageError where a folder holds no images, or nothing is
    named."""
    from paddle_resnet.data.listing import is_of_the_system
    from paddle_resnet.data.records import IMAGE_SUFFIXES

    paths = []
    for word in words:
        if word == "-":
            paths += [line.rstrip("\n") for line in stdin if line.strip()]
        elif os.path.isdir(word):
            below = (p for p in Path(word).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            found = sorted(str(p) for p in below if not any(map(is_of_the_system, p.relative_to(word).parts)))
            paths += found
            if not found:
                raise UsageError(f"{word} holds no images ({', '.join(IMAGE_SUFFIXES)}): name another folder")
        else:
            paths.append(word)
    if not paths:
        raise UsageError("no images are named: give files, folders, or - for paths on stdin")
    return paths


def top(probabilities, classes):
    """[(label, class name, probability)], the likeliest first; of equal ones the lower label."""
    names = classes + [str(i) for i in range(len(classes), len(probabilities))]
    return [(i, names[i], float(probabilities[i])) for i in np.argsort(-probabilities, kind="stable")[:TOP].tolist()]


def benchmark(models, batch_sizes):
    """Measure networks, [inference.Model], from random images in host memory to probabilities there. Yields for each
    batch size and model {"engine", "batch", "ips" (images/s), "latency_{mean,p50,p90,p95,p99}_ms"}.
    """
    random = np.random.RandomState(0)
    for batch in batch_sizes:
        for model in models:
            taken = model.description["input"]
            images = random.uniform(0, 2, (batch, *taken["shape"][1:])).astype(taken["dtype"])
            model.run(images)
            times_s = []
            while len(times_s) < BENCHMARK_STEPS or sum(times_s) < BENCHMARK_S:
                start = perf_counter()
                model.run(images)
                times_s.append(perf_counter() - start)
            ips = batch * len(times_s) / sum(times_s)
            yield {"engine": model.engine, "batch": batch, "ips": ips, **latency_percentiles(times_s)}


@contextlib.contextmanager
def engines(path, device):
    """All ways to run a model, [inference.Model]; a checkpoint is exported to a temporary folder first."""
    from paddle_resnet import export, inference, onnx_writer

    models = [inference.open_model(path, device)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(path)
        if models[0].engine == "Executor":
            folder = Path(temporary) / "export"
            export.export(path, folder, onnx=all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))))
            models.append(inference.open_paddle(folder, device))
        if (file := folder / f"{inference.NAME}.onnx").is_file() and importlib.util.find_spec("onnxruntime"):
            models.append(inference.open_onnx(file, device))
        elif models[0].engine != "onnxruntime":
            logger.info(f"without onnxruntime: it takes an export with --onnx, and {onnx_writer.INSTALL}")
        yield models


def main(argv=None):
    """Run and return the exit code: 0 done, 1 some files are no images, 2 usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m paddle_resnet.predict", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="folder of a checkpoint or of an export, or an ONNX file")
    parser.add_argument("images", nargs="*", metavar="IMAGE|FOLDER|-", help="images; - reads paths from stdin")
    parser.add_argument("--csv", metavar="FILE|-", help="write a table with one line an image; - is stdout")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each image")
    parser.add_argument("--device", choices=["auto", "gpu", "cpu"], default="auto", help="(default: auto)")
    parser.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="images a batch (default: 32)")
    parser.add_argument("--dali-num-threads", type=_positive, default=4, metavar="N", help="CPU threads (default: 4)")
    parser.add_argument("--benchmark", action="store_true", help="measure the network alone, on random images")
    parser.add_argument(
        "--benchmark-batches",
        type=lambda text: [_positive(part) for part in text.split(",")],
        default=[1, 4, 16, 64, 256],
        metavar="N,...",
        help="batch sizes of --benchmark (default: 1,4,16,64,256)",
    )
    return exit_codes.of("paddle_resnet.predict", lambda: _main(parser.parse_args(argv)))


def _main(args):
    if args.json and args.csv == "-":
        raise UsageError("--json and --csv - both write to stdout: drop one, or give --csv a file")
    if args.benchmark and (args.images or args.json or args.csv):
        raise UsageError("--benchmark measures the network on random images: drop images, --csv and --json")
    paths = [] if args.benchmark else find_images(args.images, sys.stdin)
    with signals.postponed():
        from paddle_resnet import compat  # imports Paddle, which takes seconds

        compat.check_version()
        from paddle_resnet import inference

    device = inference.resolve_device(args.device)
    if args.benchmark:
        return _print_benchmark(args, device)
    model = inference.open_model(args.model, device)
    bad = 0
    with _csv_writer(args.csv) as write:
        for path, row, reason in predict(model, paths, args.batch_size, device, args.dali_num_threads):
            if row is None:
                bad += 1
                logger.write_line(printable(f"{path} {reason}"), sys.stderr)
                continue
            found = top(row, model.description["classes"])
            if write:
                write([path, *(value for _, name, p in found for value in (name, f"{p:.7f}"))])
            if args.json:
                best = [{"label": label, "class": name, "probability": p} for label, name, p in found]
                logger.write_line(json.dumps({"image": path, "top": best}), sys.stdout)
            elif args.csv != "-":
                line = f"{path}: " + ", ".join(f"{name} {p:.4f}" for _, name, p in found)
                logger.write_line(printable(line), sys.stdout)
    return exit_codes.FAILURE if bad else exit_codes.DONE


@contextlib.contextmanager
def _csv_writer(path):
    """A function that writes a line, or None without a path."""
    if path is None:
        yield None
        return
    header = ["image", *(f"{name}{i + 1}" for i in range(TOP) for name in ("class", "probability"))]
    try:
        if path != "-":
            files.touch(path)
        with contextlib.nullcontext(sys.stdout) if path == "-" else open(path, "w", newline="") as file:
            write = csv.writer(file, lineterminator="\n").writerow
            write(header)
            yield write
    except OSError as e:
        raise UsageError(f"--csv {path} cannot be written ({e.strerror}): name another file") from e


def _print_benchmark(args, device):
    logger.info(f"{args.model} on {device}, random images in host memory, latency in ms")
    logger.info(f"{'batch':>5}  {'engine':16}  {'p50':>9}  {'p90':>9}  {'p99':>9}  {'images/s':>9}")
    with engines(args.model, device) as models:
        for found in benchmark(models, args.benchmark_batches):
            figures = "  ".join(f"{found[name]:9.2f}" for name in FIGURES)
            logger.info(f"{found['batch']:5}  {found['engine']:16}  {figures}")


def _positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pipe to `head` ends it silently
    sys.exit(main())
