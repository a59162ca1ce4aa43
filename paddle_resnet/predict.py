"""Predict the classes of images: `python -m paddle_resnet.predict MODEL IMAGE ...`."""

import argparse
import contextlib
import csv
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import paddle_resnet  # noqa: F401  imported before Paddle, because it sets environment variables for Paddle
from paddle_resnet.models import registered_name, user_file
from paddle_resnet.serving import features
from paddle_resnet.serving.model import TOP
from paddle_resnet.settings.values import flag_name, text
from paddle_resnet.tasks import multi_label, single_label
from paddle_resnet.utils import exit_codes, files, locks, logger, numbers, outputs, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import RunError, UsageError, printable, program

BENCHMARK_BATCHES = [1, 4, 16, 64, 256]  # default of --benchmark-batches
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
        from paddle_resnet.serving import heat_maps, image_files, inference

    device = inference.resolve_device(args.device)
    if args.benchmark:
        from paddle_resnet.serving import benchmark

        batches = args.benchmark_batches or BENCHMARK_BATCHES
        benchmark.print_table(args.model, device, args.model_arch_name, args.precision, batches)
        return exit_codes.DONE
    batch_size = 1 if listener else args.batch_size or BATCH_SIZE
    has_features = args.features is not None
    options = args.precision, [batch_size], args.tta, has_features
    model = inference.open_model(args.model, device, args.model_arch_name, *options)
    logger.write_line(
        printable(f"{args.model}: {model.engine}, {model.precision}, on the {device.upper()}"), sys.stderr
    )
    if listener:
        from paddle_resnet.serving import server

        server.serve(args, model, device, listener)
        return exit_codes.DONE
    draw = None
    if args.heat_map is not None:
        draw = heat_maps.drawer(args.heat_map, heat_maps.open_model(args.model, device, args.model_arch_name))
    bad = number = 0
    names, is_multi_label = model.class_names, model.thresholds is not None
    if is_multi_label:
        columns = ["prediction", *(multi_label.PROBABILITY + name for name in names)]
    else:
        columns = ["prediction", "predicted_class", *single_label.top_columns(min(TOP, len(names)))]
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
            images = model.predicted_classes(probabilities)
            drawn = None
            if draw is not None:  # of a multi-label network, some images have no predicted class
                each = zip(numbers_found, found, images, strict=True)
                drawn = [draw(number, path, classes[0]["label"]) if classes else None for number, path, classes in each]
                bad += sum(path is None and classes != [] for path, classes in zip(drawn, images, strict=True))
            if write:
                write(_multi_label_rows(found, images, probabilities) if is_multi_label else _rows(found, images))
            if args.json or not write:
                _print(found, images, args.json, "classes" if is_multi_label else "top", drawn)
    return exit_codes.FAILURE if bad else exit_codes.DONE


def _rows(paths, images):
    """Yield the row of each image for the CSV file: path, label and class of the most probable class, then label, class
    and probability of each class in `images`, the result of Model.predicted_classes."""
    for path, classes in zip(paths, images, strict=True):
        cells = single_label.top_cells(entry.values() for entry in classes)
        yield [path, *cells[:2], *cells]


def _multi_label_rows(paths, images, probabilities):
    """Yield the row of each image of a multi-label network for the CSV file: path, names of the predicted classes
    (`images`, the result of Model.predicted_classes), and probability of each class."""
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


def _print(paths, images, as_json, key, drawn):
    """Print a line for each image. `images` is the result of Model.predicted_classes, and `key` is its key in JSON.
    `drawn` is the path of each heat map, or None without --heat-map."""
    for i, (path, classes) in enumerate(zip(paths, images, strict=True)):
        if as_json:
            line = json.dumps({"image": path, key: classes} | ({} if drawn is None else {"heat_map": drawn[i]}))
        else:
            names = ", ".join("{class} {probability:.4f}".format(**each) for each in classes)
            line = printable(f"{path}: {names or 'none of the classes'}")
        logger.write_line(line, sys.stdout)


def _listen(args: argparse.Namespace):
    """Return the socket of the web server, and set the defaults of the other flags of the server; or return None if
    --serve is not set."""
    if args.serve is None:
        for name in ("serve_host", "serve_max_mb", "serve_max_images"):
            if (value := getattr(args, name)) is not None:
                raise UsageError(f"{flag_name(name)} {value}: requires --serve; add it or remove {flag_name(name)}")
        return None
    if args.images or args.json or args.csv or args.benchmark or args.batch_size:
        others = "images, --csv, --json, --benchmark or --batch-size"
        raise UsageError(f"--serve {args.serve}: not supported with {others}; remove them")
    from paddle_resnet.serving import web

    args.serve_host = HOST if args.serve_host is None else args.serve_host
    args.serve_max_mb, args.serve_max_images = args.serve_max_mb or MAX_MB, args.serve_max_images or MAX_IMAGES
    return web.listen(args.serve_host, args.serve)


def _claim_outputs(args: argparse.Namespace, paths):
    """Raise UsageError if --csv, --features or --heat-map would replace an image or a file of the model, or cannot be
    written."""
    if args.heat_map is not None and os.path.isdir(args.heat_map) and os.listdir(args.heat_map):
        raise UsageError(f"--heat-map {args.heat_map}: not empty; choose a new folder")
    tables = {"--csv": None if args.csv == "-" else args.csv, "--features": args.features}
    if args.features is not None:
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
        with lock, contextlib.nullcontext(sys.stdout) if path == "-" else outputs.replaced_csv(path) as file:
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


if __name__ == "__main__":
    exit_code = main()
    if threading.active_count() > 1:  # sys.exit would wait until the thread of --serve has decoded its image
        with contextlib.suppress(OSError):  # main() has already reported that stdout cannot be written
            sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
