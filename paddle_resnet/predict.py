"""Predict the classes of images: `python -m paddle_resnet.predict MODEL IMAGE ...`."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import paddle_resnet  # noqa: F401  imported before Paddle, because it sets environment variables for Paddle
from paddle_resnet.models import registered_name, user_file
from paddle_resnet.results import predictions
from paddle_resnet.settings.values import flag_name, text
from paddle_resnet.tasks import multi_label, single_label
from paddle_resnet.utils import exit_codes, files, locks, logger, numbers, outputs, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import RunError, UsageError, printable, program
from paddle_resnet.utils.meters import latency_percentiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

    from paddle_resnet.serving.model import Model

TOP = 5
BENCHMARK_BATCHES = [1, 4, 16, 64, 256]
BENCHMARK_COLUMNS = ("latency_p50_ms", "latency_p90_ms", "latency_p99_ms", "ips", "memory_mib")
BENCHMARK_S, BENCHMARK_STEPS = 2, 5  # minimum duration and minimum number of steps of a measurement
BENCHMARK_WARMUP_STEPS = 5
MAX_LINE_BYTES = 4098  # one byte more than a path with 4,096 bytes, Linux's limit, and its line break
BATCH_SIZE, THREADS = 32, 4
HOST, MAX_MB, MAX_IMAGES = "127.0.0.1", 20, 16  # defaults of --serve-host, --serve-max-mb and --serve-max-images
SHOWN_REASONS = 8  # maximum number of reasons in the warning about skipped files


def find_images(arguments: Sequence[str], stdin: TextIO | None) -> list[str]:
    """Return the image paths that command-line arguments specify: files, folders (searched at any depth), or `-` (one
    path per line of stdin).

    Raises:
        UsageError: a folder contains no images or cannot be listed, stdin cannot be read or has a line that is too
            long, a path is empty, or there is no path.
    """
    paths = []
    for argument in arguments:
        if argument == "":
            raise UsageError("IMAGE '': an empty path; use files, folders, or - for paths on stdin")
        if argument == "-":
            paths += _paths_on(stdin)
        elif os.path.isdir(argument):
            paths += _images_below(argument)
        else:
            paths.append(argument)
    if not paths and arguments:
        raise UsageError("-: stdin contains no paths; pipe paths into it, one per line")
    if not paths:
        raise UsageError("IMAGE: missing; add files, folders, or - for paths on stdin")
    return paths


def _paths_on(stdin):
    if stdin is None:
        raise UsageError("-: stdin is closed; pipe paths into it, one per line")
    try:
        while line := stdin.buffer.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise UsageError(f"-: a line on stdin exceeds {MAX_LINE_BYTES - 2} bytes; write one path per line")
            if line.strip():
                yield os.fsdecode(line.rstrip(b"\n"))
    except OSError as e:
        raise UsageError(f"-: stdin cannot be read ({e.strerror}); pipe paths into it, one per line") from e


def _images_below(folder):
    """Return the sorted paths of the images in a folder, at any depth. Links to folders are followed, but each folder
    is read only once. A warning states how many files are skipped. Raise UsageError if a folder cannot be listed, or if
    there are no images."""

    from paddle_resnet.data.images import IMAGE_ENDINGS, IMAGE_SUFFIXES, is_system_name

    def stop(error):
        raise UsageError(f"{error.filename}: cannot be listed ({error.strerror}); make it readable or remove it")

    paths, skipped, read = [], Counter(), set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in read:
            skipped["folders already read (links)"] += 1
            folders.clear()
            continue
        read.add((status.st_dev, status.st_ino))
        visible = [name for name in names if not is_system_name(name)]
        skipped["hidden or system files"] += len(names) - len(visible) + sum(map(is_system_name, folders))
        folders[:] = sorted(name for name in folders if not is_system_name(name))
        images = [name for name in visible if name.lower().endswith(IMAGE_SUFFIXES)]
        start = os.path.join(parent, "")
        paths += [start + name for name in images]
        skipped.update(os.path.splitext(name)[1].lower() or "without extension" for name in {*visible} - {*images})
    reasons = sorted((-count, what) for what, count in skipped.items() if count)
    counts = ", ".join(f"{-count} {what}" for count, what in reasons[:SHOWN_REASONS])
    counts += ", ..." if len(reasons) > SHOWN_REASONS else ""
    if not paths:
        skips = f"; skipped: {counts}" if counts else ""
        raise UsageError(f"{folder}: contains no images ({IMAGE_ENDINGS}){skips}; choose a different folder")
    if counts:
        remedy = f"if these include images, rename them so that they end in {IMAGE_ENDINGS}"
        logger.warn(printable(f"{folder}: skipped {counts}; {remedy}"))
    return sorted(paths)


def top(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the TOP most probable classes of each image in descending order: (labels, probabilities), both [N, k].
    Classes with equal probabilities are in label order. `probabilities` is [N, C] without NaN."""
    k = min(TOP, probabilities.shape[1])
    remaining, labels = np.array(probabilities), np.empty((len(probabilities), k), np.int64)
    for i in range(k):  # find the maximum k times instead of sorting all classes
        labels[:, i] = remaining.argmax(axis=1)
        np.put_along_axis(remaining, labels[:, i : i + 1], -np.inf, axis=1)
    return labels, np.take_along_axis(probabilities, labels, axis=1)


def above(probabilities: np.ndarray, thresholds: list[float], names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return [{"label", "class", "probability", "threshold"}] for each image of a multi-label network: all classes
    whose probability is at least the threshold, in descending order of the probability."""
    images = []
    for row in probabilities.astype(float).tolist():
        labels = sorted((i for i, p in enumerate(row) if p >= thresholds[i]), key=lambda i: -row[i])
        images.append(
            [{"label": i, "class": names[i], "probability": row[i], "threshold": thresholds[i]} for i in labels]
        )
    return images


def entries(labels: np.ndarray, probabilities: np.ndarray, names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return [{"label", "class", "probability"}] for each image. `labels` and `probabilities` are the result of top;
    `names` contains the names of all classes."""
    return [
        [{"label": i, "class": names[i], "probability": p} for i, p in zip(*image, strict=True)]
        for image in zip(labels.tolist(), probabilities.tolist(), strict=True)
    ]


def _rows(paths, labels, probabilities, names):
    """Return an iterable with the row of each image for the CSV file: path, label and class of the most probable class,
    then label, class and probability of each class in `labels`."""
    columns = []
    for ranked, values in zip(labels.T.tolist(), probabilities.T.tolist(), strict=True):
        columns += ranked, [names[i] for i in ranked], [f"{p:.7g}" for p in values]
    return zip(paths, *columns[:2], *columns, strict=True)


def benchmark(models: Iterable[Model], batch_sizes: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    """Benchmark each Model of an iterable on random images in host memory. The times include the copies from and to
    host memory. Yield {"engine", "precision", "batch", "ips" (images/s), "latency_{mean,p50,p90,p95,p99}_ms",
    "memory_mib" (peak memory of the engine so far, see memory.Peak)} for each model and batch size.

    Args:
        models: iterable that opens each model when it is requested.
        batch_sizes: images per batch.
        device: "cpu" or "gpu".
    """
    from paddle_resnet.machine import memory

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
            for _ in range(BENCHMARK_WARMUP_STEPS):
                model.run(images)
            while len(times_s) < BENCHMARK_STEPS or sum(times_s) < BENCHMARK_S:
                start = perf_counter()
                model.run(images)
                times_s.append(perf_counter() - start)
            entry = {"engine": model.engine, "precision": model.precision, "batch": batch}
            entry |= {"ips": batch * len(times_s) / sum(times_s), **latency_percentiles(times_s)}
            yield entry | {"memory_mib": peak.mib()}
        del model


def engines(
    path: str,
    device: str,
    model_arch_name: str | None = None,
    precision: str | None = None,
    sizes: Sequence[int] = (32,),
) -> Iterator[Model]:
    """Yield a Model for each engine that can run the network at a path. Each Model is opened when it is requested. For
    Paddle Inference and onnxruntime, a checkpoint is exported to a temporary folder. If the network cannot be exported
    to ONNX or run in onnxruntime, a warning is logged and onnxruntime is omitted. For arguments and exceptions, see
    inference.open_model and export.export."""
    from paddle_resnet import export
    from paddle_resnet.serving import inference, networks

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


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the exit code: 0 if all images are classified, 1 if some are not; for errors, see
    exit_codes.of."""
    parser = Parser(
        prog="predict",
        description="Predict the classes of images.",
        examples=(
            ("print the five most probable classes of each image in a folder", "output/ResNet50 photos/"),
            ("write a table for a spreadsheet", "output/ResNet50 photos/ --csv predictions.csv"),
            ("find similar images with their features", "output/ResNet50 photos/ --features features.npy"),
            ("try the model in a browser", "output/ResNet50 --serve 8000"),
            ("measure the speed", "output/ResNet50 --benchmark"),
        ),
        main={
            "What to predict": ("model", "images", "--model-arch-name"),
            "What to print": ("--csv", "--json", "--heat-map", "--features"),
            "How to predict": ("--device", "--batch-size", "--precision", "--tta"),
            "What else to do with the model": ("--serve", "--benchmark"),
        },
    )
    parser.add_argument(
        "model", type=files.argument, metavar="MODEL", help="folder of a checkpoint, run or export, or an ONNX file"
    )
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE|FOLDER|-", help="image files or folders; -: read paths from stdin"
    )
    parser.add_argument(
        "--model-arch-name",
        metavar="FILE.py:NAME",
        help="your own network; required if the checkpoint's network is defined in your own Python file",
    )
    parser.add_argument(
        "--csv",
        type=files.argument,
        metavar="FILE|-",
        help="CSV file to write instead of printing results; one line per classified image; -: write to stdout",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per classified image")
    parser.add_argument(
        "--heat-map",
        type=files.argument,
        metavar="DIR",
        help="new folder for heat maps, which show the regions that determined the most probable class; one JPEG file "
        "per classified image; requires a checkpoint",
    )
    parser.add_argument(
        "--features",
        type=files.argument,
        metavar="FILE",
        help="NumPy file (.npy) for the input of the network's last layer, float32 [images, channels] with L2 norm 1; "
        "FILE.csv contains the image of each row; requires a checkpoint",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "gpu", "cpu"],
        default="auto",
        help="device to run on; auto: a GPU if Paddle can use one, otherwise the CPU",
    )
    parser.add_argument(
        "--batch-size", type=numbers.batch_size, metavar="N", help=f"images per batch (default: {BATCH_SIZE})"
    )
    parser.add_argument(
        "--dali-num-threads",
        type=numbers.threads,
        metavar="N",
        help=f"number of CPU threads of DALI (default: {THREADS})",
    )
    parser.add_argument(
        "--tta",
        choices=["none", "flip"],
        default="none",
        help="test-time augmentation; flip: average the probabilities of each image and its mirror image",
    )
    parser.add_argument(
        "--precision",
        choices=["float32", "float16", "bfloat16", "int8"],
        help="precision of the network (default for a checkpoint: float16 on a GPU with compute capability 7.0 or "
        "higher, otherwise float32; default for an export: the precision in which it was exported)",
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="measure the speed on random images instead of predicting"
    )
    parser.add_argument(
        "--benchmark-batches",
        type=numbers.list_of(numbers.batch_size),
        metavar="N,...",
        help=f"batch sizes of --benchmark (default: {text(BENCHMARK_BATCHES)})",
    )
    parser.add_argument(
        "--serve",
        type=numbers.integer(0, 65535),
        metavar="PORT",
        help="port of a web server with a page to try the model; POST /predict returns JSON; the server runs until "
        "Control-C or SIGTERM; 0: any free port",
    )
    parser.add_argument("--serve-host", metavar="ADDRESS", help=f"address of the web server (default: {HOST})")
    parser.add_argument(
        "--serve-max-mb",
        type=numbers.integer(1, 256),
        metavar="N",
        help=f"maximum size of a request in MB (default: {MAX_MB})",
    )
    parser.add_argument(
        "--serve-max-images",
        type=numbers.integer(1, 1000),
        metavar="N",
        help=f"maximum number of images per request (default: {MAX_IMAGES})",
    )
    return exit_codes.of(program("predict"), lambda: _main(parser.parse_intermixed_args(argv)))


def _main(args: argparse.Namespace):
    if args.json and args.csv == "-":
        raise UsageError(
            "--json: not supported with '--csv -', which also writes to stdout; remove one of them, or set --csv to a "
            "file"
        )
    if args.benchmark and args.tta != "none":
        raise UsageError(f"--tta {args.tta}: not supported with --benchmark; remove one of them")
    if args.benchmark and (args.images or args.json or args.csv):
        raise UsageError("--benchmark: measures random images; remove images, --csv and --json")
    _check_model_flags(args)
    unused = ("batch_size", "dali_num_threads") if args.benchmark else ("benchmark_batches",)
    for name in unused:
        if (value := getattr(args, name)) is not None:
            condition = "not supported with" if args.benchmark else "requires"
            remedy = "use --benchmark-batches instead" if name == "batch_size" else f"remove {flag_name(name)}"
            raise UsageError(f"{flag_name(name)} {text(value)}: {condition} --benchmark; {remedy}")
    args.dali_num_threads = args.dali_num_threads or THREADS
    listener = _listen(args)
    if args.model_arch_name is not None:
        args.model_arch_name = registered_name(args.model_arch_name)
    paths = [] if args.benchmark or listener else find_images(args.images, sys.stdin)
    _claim_outputs(args, paths)
    with signals.importing_paddle():
        from paddle_resnet.machine import compat  # imported late, because importing Paddle takes seconds

        compat.check_version()
        from paddle_resnet.data import bad_images
        from paddle_resnet.serving import features, heat_maps, image_files, inference

    device = inference.resolve_device(args.device)
    if args.benchmark:
        return _print_benchmark(args, device)
    batch_size = 1 if listener else args.batch_size or BATCH_SIZE
    has_features = args.features is not None
    options = args.precision, [batch_size], args.tta, has_features
    model = inference.open_model(args.model, device, args.model_arch_name, *options)
    logger.write_line(
        printable(f"{args.model}: {model.engine}, {model.precision}, on the {device.upper()}"), sys.stderr
    )
    if listener:
        return _serve(args, model, device, listener)
    draw = None
    if args.heat_map is not None:
        draw = _drawer(args.heat_map, heat_maps.open_model(args.model, device, args.model_arch_name))
    bad = number = 0
    names, thresholds = _class_names(model), _thresholds(model)
    if thresholds is None:
        columns = ["prediction", "predicted_class", *single_label.top_columns(min(TOP, len(names)))]
    else:
        columns = ["prediction", *(multi_label.PROBABILITY + name for name in names)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(bad_images.decoders_silenced())
        write = stack.enter_context(_csv_writer(args.csv, columns))
        if has_features:
            write_features = stack.enter_context(features.writer(args.features))
        for files_read, results in image_files.predict_batches(model, paths, batch_size, device, args.dali_num_threads):
            found, numbers_found = [], []
            for path, problem in files_read:
                number += 1
                if problem is None:
                    found.append(path)
                    numbers_found.append(number)
                else:
                    bad += 1
                    logger.write_line(printable(f"{path} {problem}"), sys.stderr)
            if not found:
                continue
            probabilities = results[0]
            if has_features:
                write_features(found, results[1])
            if thresholds is not None:
                images = above(probabilities, thresholds, names)
                rows = _multi_label_rows(found, images, probabilities)
            else:
                best = *top(probabilities), names
                images, rows = entries(*best), _rows(found, *best)
            drawn = None
            if draw is not None:  # of a multi-label network, some images have no predicted class
                each = zip(numbers_found, found, images, strict=True)
                drawn = [draw(number, path, classes[0]["label"]) if classes else None for number, path, classes in each]
                bad += sum(path is None and classes != [] for path, classes in zip(drawn, images, strict=True))
            if write:
                write(rows)
            if args.json or not write:
                _print(found, images, args.json, "top" if thresholds is None else "classes", drawn)
    return exit_codes.FAILURE if bad else exit_codes.DONE


def _class_names(model):
    return predictions.class_names(model.description["classes"], model.description["output"]["shape"][1])


def _thresholds(model):
    """Return the thresholds of a multi-label network, or None."""
    return model.description.get("multi_label", {}).get("thresholds")


def _multi_label_rows(paths, images, probabilities):
    """Yield the row of each image of a multi-label network for the CSV file: path, names of the predicted classes
    (`images`, the result of `above`), and probability of each class."""
    for path, classes, row in zip(paths, images, probabilities.tolist(), strict=True):
        yield [path, "|".join(entry["class"] for entry in classes), *(f"{p:.7g}" for p in row)]


def _check_model_flags(args: argparse.Namespace):
    """Raise UsageError if --heat-map or --features is combined with --benchmark, --serve or --tta."""
    for flag, value in (("--heat-map", args.heat_map), ("--features", args.features)):
        if value is None:
            continue
        for other, is_set in (("--benchmark", args.benchmark), ("--serve", args.serve is not None)):
            if is_set:
                page = ", whose page shows heat maps without the flag" * (flag == "--heat-map" and other == "--serve")
                raise UsageError(f"{flag} {value}: not supported with {other}{page}; remove {flag}")
        if args.tta != "none":
            raise UsageError(
                f"{flag} {value}: not supported with --tta {args.tta}, which averages two predictions; remove one of "
                "them"
            )


def _drawer(folder, model):
    """Return a function draw(number, path, label) that writes the heat map of an image to the folder. draw() returns
    the path of the heat map, or None if the image cannot be read, and raises UsageError if a file cannot be written."""
    from paddle_resnet.data import bad_images
    from paddle_resnet.serving import heat_maps

    def draw(number, path, label):
        try:
            with files.open_regular(path, bad_images.MAX_BYTES) as file:
                drawn = heat_maps.overlay(model, file.read(), label)
        except (heat_maps.Unreadable, OSError) as e:
            problem = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else e
            logger.write_line(printable(f"{path} {problem}"), sys.stderr)
            return None
        # The number of the image makes file names unique. Only the end of the image's name is kept, because file
        # systems limit a name to 255 bytes.
        name = os.fsdecode(os.fsencode(os.path.basename(path))[-200:])
        target = os.path.join(folder, f"{number:06d}_{name}.jpg")
        try:
            os.makedirs(folder, exist_ok=True)
            with outputs.replaced(target) as partial:
                partial.write_bytes(drawn)
        except OSError as e:
            raise UsageError(f"--heat-map {folder}: cannot be written ({e.strerror}); choose a different folder") from e
        return target

    return draw


def _print(paths, images, as_json, key, drawn=None):
    """Print a line for each image. `images` is the result of entries or of above, and `key` is its key in JSON. `drawn`
    is the path of each heat map, or None without --heat-map."""
    for i, (path, classes) in enumerate(zip(paths, images, strict=True)):
        if as_json:
            line = json.dumps({"image": path, key: classes} | ({} if drawn is None else {"heat_map": drawn[i]}))
        else:
            names = ", ".join("{class} {probability:.4f}".format(**each) for each in classes)
            line = printable(f"{path}: {names or 'none of the classes'}")
        logger.write_line(line, sys.stdout)


def _listen(args: argparse.Namespace):
    """Return the socket of the web server, or None if --serve is not set."""
    if args.serve is None:
        for name in ("serve_host", "serve_max_mb", "serve_max_images"):
            if (value := getattr(args, name)) is not None:
                raise UsageError(f"{flag_name(name)} {value}: requires --serve; add it or remove {flag_name(name)}")
        return None
    if args.images or args.json or args.csv or args.benchmark or args.batch_size:
        others = "images, --csv, --json, --benchmark or --batch-size"
        raise UsageError(f"--serve {args.serve}: not supported with {others}; remove them")
    from paddle_resnet.serving import web

    return web.listen(_host(args), args.serve)


def _host(args: argparse.Namespace):
    return HOST if args.serve_host is None else args.serve_host


def _serve(args: argparse.Namespace, model, device, listener):
    """Answer requests until a signal stops the server, and return the exit code."""
    from paddle_resnet.data import bad_images
    from paddle_resnet.serving import heat_maps, image_files, web

    names, thresholds = _class_names(model), _thresholds(model)

    def classify(upload):
        options = 1, device, args.dali_num_threads, web.Upload.read
        [(_, row, problem)] = image_files.predict(model, [upload], *options)
        if row is None:
            return None, problem
        if thresholds is not None:
            return above(row[None], thresholds, names)[0], None
        return entries(*top(row[None]), names)[0], None

    def heat_map(upload, label):
        try:
            return heat_maps.overlay(maps, upload.content, label)
        except heat_maps.Unreadable as e:
            logger.write_line(printable(f"{upload} {e}"), sys.stderr)
            return None

    maps = None
    try:
        if args.tta != "none":
            raise UsageError(f"--tta {args.tta} averages two predictions")
        maps = heat_maps.open_model(args.model, device, args.model_arch_name)
    except UsageError as e:
        logger.write_line(printable(f"the page shows no heat maps: {e}"), sys.stderr)
    host, worker = _host(args), ThreadPoolExecutor(1)
    blank = web.blank_image()
    worker.submit(classify, blank).result()  # the first image takes longest, so a user should not have to wait for it
    if maps is not None:
        worker.submit(heat_map, blank, 0).result()
    limits = 10**6 * (args.serve_max_mb or MAX_MB), args.serve_max_images or MAX_IMAGES
    hosts = web.allowed_hosts(listener, host)
    app = web.create_app(classify, worker, model.description, *limits, hosts, heat_map=maps and heat_map)
    if not web.is_loopback(listener):
        logger.warn(
            f"--serve-host {host}: other machines can access the model without password or encryption; restrict "
            "access with a firewall"
        )
    line = f"{web.url(listener)}: page to try {args.model}; press Control-C to stop the server"
    with bad_images.decoders_silenced():
        try:
            web.serve(app, listener, lambda: logger.write_line(line, sys.stdout))
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
    return exit_codes.DONE


def _claim_outputs(args: argparse.Namespace, paths):
    """Raise UsageError if --csv, --features or --heat-map would replace an image or a file of the model, or cannot be
    written."""
    if args.heat_map is not None and os.path.isdir(args.heat_map) and os.listdir(args.heat_map):
        raise UsageError(f"--heat-map {args.heat_map}: not empty; choose a new folder")
    tables = {"--csv": None if args.csv == "-" else args.csv, "--features": args.features}
    if args.features is not None:
        from paddle_resnet.serving import features

        tables["the table next to --features"] = features.table_of(args.features)
    tables = {flag: path for flag, path in tables.items() if path is not None}
    if not tables and args.heat_map is None:
        return
    model = Path(args.model)
    read = [("MODEL", path) for path in (model.glob("*") if model.is_dir() else [model])]
    read += [("--model-arch-name", path) for path, _ in filter(None, [user_file.split(args.model_arch_name or "")])]
    if any(map(os.path.exists, tables.values())):  # a new file cannot be one of the images
        read += [("the image", path) for path in paths]
    outputs.claim(tables, {"--heat-map": args.heat_map}, inputs=read)


@contextlib.contextmanager
def _csv_writer(path, columns):
    """Yield a function that writes rows to the CSV file, with the column "image" and `columns`. A regular file is
    written atomically. If path is None, yield None.

    Raises:
        UsageError: the file cannot be written, or another process is writing it.
        RunError: the rows go to a file, and stdout was closed before the end of the block.
        logger.ClosedPipe: the rows go to stdout, and its reader has exited.
    """
    if path is None:
        yield None
        return
    header = ["image", *columns]
    try:
        lock = contextlib.nullcontext()
        if path != "-" and (os.path.isfile(path) or not os.path.exists(path)):
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
            lock = locks.held(locks.file_of(path), f"--csv {path}", logger.warn)
        # With backslashreplace, file names that are not valid UTF-8 can be written.
        options = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock)
            file = sys.stdout
            if path != "-":
                partial = stack.enter_context(outputs.replaced(path))
                file = stack.enter_context(open(partial, "w", **options))

            # With lineterminator="\n", fields that contain \r would not be quoted.
            lines = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
            writer = csv.writer(lines)
            writer.writerow(header)
            yield writer.writerows
    except logger.ClosedPipe as e:
        if path == "-":
            raise
        raise RunError(
            f"--csv {path}: not written, because stdout was closed; read all of stdout, or remove --json"
        ) from e
    except OSError as e:
        raise UsageError(f"--csv {path}: cannot be written ({e.strerror}); choose a different file") from e


def _print_benchmark(args: argparse.Namespace, device):
    logger.info(f"{args.model} on {device}, random images in host memory, latency in ms, peak memory in MiB")
    names = "  ".join(f"{name:>9}" for name in ("p50", "p90", "p99", "images/s", "memory"))
    logger.info(f"{'batch':>5}  {'engine':16}  {'precision':9}  {names}")
    batches = args.benchmark_batches or BENCHMARK_BATCHES
    models = engines(args.model, device, args.model_arch_name, args.precision, batches)
    with contextlib.closing(models):
        for result in benchmark(models, batches, device):
            metrics = "  ".join(f"{result[name]:9.2f}" for name in BENCHMARK_COLUMNS)
            logger.info(f"{result['batch']:5}  {result['engine']:16}  {result['precision']:9}  {metrics}")


if __name__ == "__main__":
    exit_code = main()
    if threading.active_count() > 1:  # sys.exit would wait until the thread of --serve has decoded its image
        with contextlib.suppress(OSError):  # main() has already reported that stdout cannot be written
            sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
