"""Tools for data sets: `python -m paddle_resnet.dataset COMMAND`."""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from PIL import Image

from paddle_resnet.data import layout
from paddle_resnet.models import registered_name
from paddle_resnet.settings import parsing
from paddle_resnet.settings.values import flag_name
from paddle_resnet.tools import convert, duplicates, sources
from paddle_resnet.utils import exit_codes, files, locks, logger, numbers, outputs, signals
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import UsageError, command, counted, printable, program
from paddle_resnet.utils.mode import RunScope

SIDE = 64  # width and height of a sample image in pixels
FEATURE_BATCH, FEATURE_THREADS = 32, 4  # batch size and DALI's CPU threads of `duplicates --checkpoint`


def write_sample(output: str | Path) -> tuple[int, int]:
    """Write scikit-learn's 1,797 handwritten digits as JPEG files in class folders.

    The images are those of the test set of UCI's "Optical Recognition of Handwritten Digits" (8x8 pixels, 17 gray
    levels), enlarged to 64x64 pixels. Every fifth image goes to val/ (359 images), and the others go to train/ (1,438
    images). The folder is written atomically. If the folder is already complete, it is not changed.

    Args:
        output: folder to create, with train/0 ... train/9 and val/0 ... val/9.
    Returns:
        (number of training images, number of validation images).
    Raises:
        UsageError: the folder exists and does not contain exactly the files of the sample, or another process is
            writing the folder.
        OSError: the folder cannot be written.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    names = [f"{'val' if i % 5 == 4 else 'train'}/{label}/{i:04d}.jpg" for i, label in enumerate(digits.target)]
    n_val = sum(name.startswith("val/") for name in names)

    output = Path(output)
    if output.exists():
        if sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()) != sorted(names):
            raise UsageError(
                f"--output {output}: exists and is not the sample data set; remove it or choose a different folder"
            )
        return len(names) - n_val, n_val
    output.parent.mkdir(parents=True, exist_ok=True)
    with locks.held(output.with_name(f".{output.name}.lock"), f"--output {output}", logger.warn):
        _write_images(output, names, digits)
    return len(names) - n_val, n_val


def _write_images(output, names, digits):
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with files.written(output, partial):
        for name, pixels in zip(names, digits.images, strict=True):
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            gray = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
            gray.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(path, quality=convert.QUALITY)


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        exit code: 0 for success, 1 if training would fail (verify), or if a validation image has a duplicate or an
        image cannot be compared (duplicates); for errors, see exit_codes.of.
    """
    parser = Parser(
        prog="dataset",
        description="Prepare and check data sets.",
        examples=(
            ("divide class folders into train/ and val/, for --image-root DIR", "split PHOTOS --output DIR"),
            ("read ImageNet's archives, or a table of labels, as downloaded", "import DOWNLOADED --output DIR"),
            ("check every image before a long run", "verify DIR --fix-list bad.txt"),
            ("find validation images that are also in train", "duplicates DIR --csv duplicates.csv"),
            ("show the effect of augmentation", "preview DIR --output preview.png"),
        ),
        epilog=f"{command('dataset', 'COMMAND', '--help')} lists the flags of a command.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=parsing.ToolParser)
    for add in (
        _add_sample,
        _add_split,
        _add_import,
        _add_convert,
        _add_index,
        _add_verify,
        _add_duplicates,
        _add_info,
        _add_preview,
        _add_speed,
    ):
        add(commands)
    return exit_codes.of(program("dataset"), lambda: _run(parser, argv))


def _run(parser, argv):
    args, flags = parser.parse_known_args(argv)
    args.train_flags = flags
    if args.train_flags and not args.takes_train_flags:
        help = f"`{command('dataset', args.command, '--help')}`"
        raise UsageError(parser.commands()[args.command].unknown_argument(args.train_flags[0], help))
    return args.run(args)


def _add(commands, name, run, help, takes_train_flags=False):
    epilog = f"The flags of {program('train')} are also supported." if takes_train_flags else None
    description = f"{help[0].upper()}{help[1:]}."
    command = commands.add_parser(name, help=help, description=description, epilog=epilog)
    command.set_defaults(run=run, takes_train_flags=takes_train_flags)
    return command


def _add_sample(commands):
    sample = _add(commands, "sample", _run_sample, "write scikit-learn's handwritten digits as JPEG class folders")
    sample.add_argument("--output", required=True, metavar="DIR", help="folder to create, with train/ and val/")


def _run_sample(args: argparse.Namespace):
    outputs.claim(folders={"--output": args.output})
    try:
        n_train, n_val = write_sample(args.output)
    except OSError as e:
        raise UsageError(f"--output {args.output}: cannot be written ({e.strerror}); choose a different folder") from e
    print(f"{args.output}: {n_train} training and {n_val} validation images in 10 classes")


def _add_split(commands):
    command = _add(commands, "split", _run_split, "divide class folders into train/ and val/, using links")
    command.add_argument("source", metavar="DIR", help="folder of class folders; not modified")
    command.add_argument("--output", required=True, metavar="DIR", help="folder to create, for --image-root of a run")
    command.add_argument(
        "--val",
        type=_fraction,
        default=0.2,
        metavar="F",
        help="fraction of each class that goes to val/",
    )
    command.add_argument("--seed", type=numbers.seed, default=0, metavar="N", help="seed of the random selection")
    command.add_argument(
        "--group-duplicates",
        action="store_true",
        help="put images that `duplicates` would find similar into the same split; decodes all images",
    )


def _run_split(args: argparse.Namespace):
    from paddle_resnet.tools import split

    _claim_folder(args)
    try:
        with _workers("--group-duplicates", "; free memory, and repeat the command"):
            counts, n_classes = split.split(args.source, args.output, args.val, args.seed, args.group_duplicates)
    except OSError as e:
        name = f" {e.filename}" if e.filename else ""
        raise UsageError(
            f"--output {args.output}: cannot be written ({e.strerror}{name}); choose a different folder"
        ) from e
    print(
        f"{args.output}: {counts['train']} training and {counts['val']} validation images in "
        f"{counted(n_classes, 'class', 'classes')}"
    )


def _add_workers(command):
    command.add_argument(
        "--workers", type=numbers.threads, metavar="N", help="number of worker processes (default: one per core)"
    )


def _add_shards(command):
    command.add_argument(
        "--shards",
        type=numbers.positive,
        metavar="N",
        help="number of training shards for tfrecord and webdataset (default: one per "
        f"{convert.IMAGES_PER_SHARD} images)",
    )


def _add_convert(commands):
    command = _add(
        commands,
        "convert",
        _run_convert,
        "convert a data set to a record format; repeat the command to resume",
    )
    command.add_argument("--from", required=True, metavar="DIR", dest="source", help="folder of the data set")
    to = {"type": convert.parse_format, "choices": convert.RECORD_FORMATS}
    command.add_argument("--to", required=True, **to, help="record format to write")
    command.add_argument("--output", required=True, metavar="DIR", help="folder to create, for --image-root of a run")
    _add_shards(command)
    command.add_argument(
        "--resize-short",
        type=numbers.side,
        metavar="N",
        help="maximum shorter side in pixels; larger images are shrunk (default: no limit)",
    )
    command.add_argument(
        "--quality",
        type=numbers.integer(1, 100),
        metavar="Q",
        help=f"JPEG quality of images that are shrunk (default: {convert.QUALITY})",
    )
    _add_workers(command)
    _add_skip_list(command)
    command.add_argument(
        "--unchecked",
        action="store_true",
        help="skip the initial check of all images; use only after `verify`",
    )
    _add_label_flags(command)


def _run_convert(args: argparse.Namespace):
    if args.quality is not None and args.resize_short is None:
        raise UsageError(f"--quality {args.quality}: requires --resize-short; add it, or remove --quality")
    _claim_folder(args)

    def write(check, progress):
        return convert.convert(
            args.source,
            args.output,
            args.to,
            shards=args.shards,
            resize_short=args.resize_short,
            quality=args.quality or convert.QUALITY,
            workers=args.workers,
            progress=progress,
            skip_list=args.skip_list,
            allow_outside=args.allow_outside,
            check=check,
            label_offset=args.label_offset,
        )

    counts = _with_progress(args, write)
    print(f"{args.output}: {' and '.join(f'{count} {split}' for split, count in counts.items())} images as {args.to}")


def _with_progress(args: argparse.Namespace, write):
    """Lock the output folder, and return the result of write(progress function of the check or None, progress function
    of the conversion)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=logger.Expendable(sys.stderr)))
    with contextlib.ExitStack() as stack, convert.locked(args.output):

        def progress(what):
            task = None

            def show(done, total):
                nonlocal task
                if not bar.live.is_started:  # start late, so that an error in listing the source leaves no empty bar
                    with signals.blocked():  # the thread that rich starts must not handle signals
                        stack.enter_context(bar)
                if task is None:
                    task = bar.add_task(what)
                bar.update(task, completed=done, total=total)

            return show

        check = None if args.unchecked else progress("check")
        try:
            with _workers():
                return write(check, progress(args.to))
        except OSError as e:
            name = f": {e.filename}" if e.filename else ""
            raise UsageError(
                f"--output {args.output}: cannot be written ({e.strerror}{name}); fix the cause and repeat the command"
            ) from e


@contextlib.contextmanager
def _workers(subject="--workers", remedy="; repeat the command with fewer workers"):
    """If a worker process is killed while the `with` block runs, raise UsageError."""
    try:
        yield
    except BrokenProcessPool as e:
        raise UsageError(f"{subject}: a worker process was killed, possibly because memory ran out{remedy}") from e


def _add_import(commands):
    command = _add(
        commands,
        "import",
        _run_import,
        "import a data set as downloaded: archives, tables, Parquet, arrays; repeat the command to resume",
    )
    command.add_argument("source", metavar="SOURCE", help="folder as downloaded, or a file; not modified")
    command.add_argument("--list", action="store_true", help="print only what the source contains")
    command.add_argument("--output", metavar="DIR", help="folder to create, for --image-root of a run")
    to = {"type": convert.parse_format, "choices": convert.FORMATS}
    command.add_argument("--to", **to, default="webdataset", help="format to write")
    command.add_argument(
        "--as", choices=[*sources.KINDS], dest="kind", help="kind of the source (default: detected from file names)"
    )
    command.add_argument(
        "--val",
        type=_fraction,
        metavar="F",
        help="fraction of each class that goes to val/ if the source has no validation images (default: "
        f"{sources.DEFAULT_VAL}, none for ImageNet)",
    )
    command.add_argument("--allow-partial", action="store_true", help="warn about missing images instead of stopping")
    columns = (("--image-column", "paths or ids of the images"), ("--label-column", "labels"))
    for flag, content in (*columns, ("--split-column", "splits")):
        command.add_argument(flag, metavar="NAME", help=f"column or feature with the {content} (default: detected)")
    command.add_argument("--delimiter", metavar="TEXT", help="text between the columns of a table (default: detected)")
    command.add_argument(
        "--label-index",
        type=numbers.integer(0, 999),
        metavar="N",
        help="index of the label in records with several labels",
    )
    command.add_argument(
        "--class-depth",
        type=_class_depth,
        metavar="N",
        help="number of nested folders that form a class, counted from the split or, if negative, from the image; all: "
        "all folders (default: detected)",
    )
    _add_shards(command)
    _add_workers(command)
    command.add_argument("--unchecked", action="store_true", help="skip the initial check of all images")


def _run_import(args: argparse.Namespace):
    options = sources.Options(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(sources.Options)}
    )
    if args.list:
        for line in sources.describe(args.source):
            print(line)
        return
    if args.output is None:
        raise UsageError("--output: missing; choose a folder to create, or use --list")
    _claim_folder(args)
    kind, counts, classes = _with_progress(
        args,
        lambda check, progress: sources.import_(
            args.source, args.output, args.to, args.kind, options, args.shards, args.workers, progress, check
        ),
    )
    images = " and ".join(f"{count} {split}" for split, count in counts.items())
    named = "" if classes is None else f" in {counted(classes, 'class', 'classes')}"
    print(f"{args.output}: {images} images{named} from {kind} as {args.to}")


def _add_index(commands):
    command = _add(commands, "index", _run_index, "create the missing index files of TFRecord, RecordIO and tar shards")
    command.add_argument("root", metavar="DIR", help="folder of the shards")


def _run_index(args: argparse.Namespace):
    created, existing = convert.build_indexes(args.root)
    print(f"{args.root}: {counted(created, 'index file')} created, {existing} already existed")


def _inspection():
    """Return the inspection module, which is imported only when needed, because it imports Paddle."""
    with signals.importing_paddle():
        from paddle_resnet.tools import inspection
    return inspection


def _add_preview(commands):
    command = _add(commands, "preview", _run_preview, "draw training images next to their augmented versions", True)
    command.add_argument("root", metavar="DIR", help="folder of the data set")
    command.add_argument("--output", required=True, metavar="FILE", help="figure to write: .png, .pdf or .svg")
    command.add_argument(
        "--images",
        type=numbers.integer(1, 1000),
        default=12,
        metavar="N",
        help="maximum number of images",
    )


def _run_preview(args: argparse.Namespace):
    _claim_file("--output", args.output, args.root)
    inspection = _inspection()
    images = inspection.preview(args.root, args.output, args.images, args.train_flags)
    print(f"{args.output}: {counted(images, 'training image')}, each with {inspection.VERSIONS} augmented versions")


def _add_verify(commands):
    command = _add(commands, "verify", _run_verify, "decode every image; exit code 1 if training would fail")
    command.add_argument("root", metavar="DIR", help="folder of the data set")
    command.add_argument(
        "--fix-list", metavar="FILE", help="file for the list of failing images, for --skip-list of a run"
    )
    command.add_argument(
        "--num-of-class",
        type=numbers.num_of_class,
        metavar="N",
        help="number of network outputs, which limits the labels (default: no limit)",
    )
    command.add_argument(
        "--run-scope",
        choices=[scope.value for scope in RunScope],
        default=RunScope.TRAIN_EVAL.value,
        help="scope of the training run, which determines the required splits",
    )
    command.add_argument("--allow-empty-classes", action="store_true", help="accept empty class folders in train/")
    command.add_argument("--allow-one-class", action="store_true", help="accept training images of only one class")
    _add_label_flags(command)


def _run_verify(args: argparse.Namespace):
    from paddle_resnet.tools import verify

    _claim_file("--fix-list", args.fix_list, args.root)
    options = args.allow_outside, RunScope(args.run_scope), args.allow_empty_classes, args.label_offset
    with _workers("verify", ", before all images were checked; free memory, and repeat the command"):
        report = verify.verify(args.root, args.num_of_class, *options, args.allow_one_class)
    verify.show(report)
    if args.fix_list is not None:
        with outputs.writing("--fix-list", args.fix_list):
            verify.write_fix_list(report, args.fix_list)
        print(f"{args.fix_list}: {counted(len(report.failing), 'image')} for --skip-list")
    return 1 if report.training_would_fail else 0


def _add_duplicates(commands):
    command = _add(
        commands,
        "duplicates",
        _run_duplicates,
        "find validation images that are also, or nearly, in train; exit code 1 if there are any, or some images "
        "cannot be compared",
    )
    command.add_argument("root", metavar="DIR", help="folder of the data set")
    command.add_argument(
        "--distance",
        type=numbers.integer(0, duplicates.MAX_DISTANCE),
        metavar="BITS",
        help=f"maximum number of differing bits of 64-bit perceptual hashes (default: {duplicates.DISTANCE})",
    )
    command.add_argument(
        "--checkpoint",
        type=files.argument,
        metavar="DIR",
        help="checkpoint whose network compares the images, instead of perceptual hashes",
    )
    command.add_argument(
        "--similarity",
        type=numbers.ratio,
        metavar="S",
        help="minimum cosine similarity of the features of the network of --checkpoint (default: "
        f"{duplicates.SIMILARITY})",
    )
    command.add_argument(
        "--model-arch-name",
        metavar="FILE.py:NAME",
        help="your own network, if --checkpoint contains one",
    )
    command.add_argument("--device", choices=["auto", "gpu", "cpu"], help="device of --checkpoint (default: auto)")
    command.add_argument("--csv", type=files.argument, metavar="FILE|-", help="CSV file of all pairs; -: stdout")
    command.add_argument("--json", action="store_true", help="print one JSON object per pair")
    command.add_argument(
        "--fix-list",
        type=files.argument,
        metavar="FILE",
        help="file for the list of validation images with a duplicate, for --skip-list of a run",
    )
    _add_skip_list(command)
    command.add_argument(
        "--multi-label", action="store_true", help=f"read a multi-label data set, as for {program('train')}"
    )
    _add_workers(command)
    _add_label_flags(command)


def _run_duplicates(args: argparse.Namespace):
    if args.json and args.csv == "-":
        raise UsageError("--json: not supported with '--csv -', which also writes to stdout; remove one of them")
    excluded = ("distance", "workers") if args.checkpoint else ("similarity", "model_arch_name", "device")
    for name in excluded:
        if (value := getattr(args, name)) is not None:
            condition = "not supported with" if args.checkpoint else "requires"
            remedy = f"remove {flag_name(name)}" + (" or add --checkpoint" if not args.checkpoint else "")
            raise UsageError(f"{flag_name(name)} {value}: {condition} --checkpoint; {remedy}")
    csv_file = None if args.csv == "-" else args.csv
    protected = [("the data set's", place) for place in layout.occupied(args.root)]
    outputs.claim({"--csv": csv_file, "--fix-list": args.fix_list}, protected=protected)
    images = duplicates.list_images(args.root, args.allow_outside, args.label_offset, args.multi_label, args.skip_list)
    if args.checkpoint:
        similarity = duplicates.SIMILARITY if args.similarity is None else args.similarity
        with _features_of(args) as features_of:
            report = duplicates.by_features(images, features_of, similarity)
    else:
        distance = duplicates.DISTANCE if args.distance is None else args.distance
        with _workers():
            report = duplicates.by_hash(images, distance, args.workers)
    for name, problem in [*report.unreadable.items()][: duplicates.SHOWN]:
        logger.write_line(printable(f"{name} {problem}"), sys.stderr)
    if (more := len(report.unreadable) - duplicates.SHOWN) > 0:
        logger.write_line(f"{counted(more, 'more image')} cannot be compared", sys.stderr)
    if args.csv == "-":
        duplicates.write_csv(report, sys.stdout)
    elif args.json:
        for pair in report.pairs:
            print(json.dumps(dataclasses.asdict(pair)))
    else:
        print(*duplicates.lines(report), sep="\n")
    if csv_file is not None:
        with outputs.writing("--csv", csv_file), outputs.replaced_csv(csv_file) as file:
            duplicates.write_csv(report, file)
    if args.fix_list is not None:
        with outputs.writing("--fix-list", args.fix_list):
            duplicates.write_fix_list(report, args.fix_list)
    return 1 if report.pairs or report.unreadable else 0


@contextlib.contextmanager
def _features_of(args: argparse.Namespace):
    """Yield the function that duplicates.by_features requires, for the network of --checkpoint."""
    with signals.importing_paddle():
        from paddle_resnet.machine import compat

        compat.check_version()
        from paddle_resnet.data import bad_images
        from paddle_resnet.serving import features, image_files, inference

    arch = args.model_arch_name and registered_name(args.model_arch_name)
    device = inference.resolve_device(args.device or "auto")
    model = inference.open_model(args.checkpoint, device, arch, None, [FEATURE_BATCH], features=True)

    def features_of(images):
        options = FEATURE_BATCH, device, FEATURE_THREADS, duplicates.read
        for files_read, results in image_files.predict_batches(model, images, *options):
            yield files_read, features.normalized(results[1]) if results else np.zeros([0, 0], np.float32)

    with bad_images.decoders_silenced():
        yield features_of


def _claim_folder(args: argparse.Namespace):
    """Raise UsageError if the output folder of a command would replace the data set that the command reads."""
    outputs.claim(folders={"--output": args.output}, protected=[("the data set", args.source)])


def _add_skip_list(command):
    command.add_argument(
        "--skip-list", metavar="FILE", help=f"file that lists the images to omit, as for {program('train')}"
    )


def _claim_file(flag, path, root):
    """Raise UsageError if an output file of a command would replace a file of the data set in `root`."""
    outputs.claim({flag: path}, protected=[("the data set's", place) for place in layout.occupied(root)])


def _add_info(commands):
    command = _add(commands, "info", _run_info, "count images and classes, and measure image sizes")
    command.add_argument("root", metavar="DIR", help="folder of the data set")
    command.add_argument(
        "--output", metavar="FILE", help="figure to write, with class balance and image sizes: .png, .pdf or .svg"
    )
    _add_label_flags(command)


def _run_info(args: argparse.Namespace):
    _claim_file("--output", args.output, args.root)
    _inspection().info(args.root, args.output, args.allow_outside, args.label_offset)


def _add_speed(commands):
    command = _add(commands, "speed", _run_speed, "measure the speed of the loader without training", True)
    command.add_argument("root", metavar="DIR", help="folder of the data set")
    command.add_argument(
        "--threads",
        type=numbers.list_of(numbers.threads),
        metavar="N,...",
        help="values of --dali-num-threads to measure (default: the value of --dali-num-threads)",
    )
    command.add_argument(
        "--loads",
        type=numbers.list_of(numbers.ratio),
        metavar="L,...",
        help="values of --hw-decoder-load to measure (default: the value of --hw-decoder-load)",
    )
    command.add_argument(
        "--batches", type=numbers.positive, default=20, metavar="N", help="number of batches per measurement"
    )
    command.add_argument(
        "--repeats", type=numbers.positive, default=3, metavar="N", help="number of measurements per setting"
    )


def _run_speed(args: argparse.Namespace):
    _inspection().speed(args.root, args.threads, args.loads, args.batches, args.repeats, args.train_flags)


def _add_label_flags(command):
    command.add_argument("--allow-outside", action="store_true", help="accept files outside DIR in file lists")
    command.add_argument(
        "--label-offset",
        type=numbers.label_offset,
        default=numbers.AUTO,
        metavar="{auto,N}",
        help=f"first label in file lists and records, as for {program('train')}",
    )


def _fraction(text):
    value = numbers.ratio(text)
    if value in (0, 1):
        raise argparse.ArgumentTypeError(f"{text} leaves one split empty; use a fraction between 0 and 1, such as 0.2")
    return value


def _class_depth(text):
    if text == "all":
        return 0
    value = numbers.integer(-9, 9)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 folders form no class; use a number such as 1 or -1, or all")
    return value


if __name__ == "__main__":
    sys.exit(main())
