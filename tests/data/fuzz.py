"""Damage small data sets at random, train on them, and verify them: `python fuzz.py DIR FORMAT:N ...`.

The mutations test this project's own parsers of record files, indexes and lists. Image files and LMDBs are not mutated.
DALI reads a mutated data set only if these parsers find nothing but intact images in it, so that mutated bytes reach
neither image decoders nor other libraries.

Mutation N of a format is the same in every run. test_fuzz.py runs this script in a separate process, so that the memory
of DALI's pipelines is freed. The script prints a line `start FORMAT:N` before each mutation and a line `end FORMAT:N
OUTCOME` after the mutation. An outcome that begins with "BAD" indicates a bug in this project. SIGALRM stops the
process if a mutation takes more than LIMIT_S seconds.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import data_files
import numpy as np
from PIL import Image

import paddle_resnet  # noqa: F401  sets environment variables before Paddle is imported
from paddle_resnet import config, dali, resolution
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.tools import verify, workers
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode

LIMIT_S = 60
IMAGES = 12  # number of images in each split
FLAGS = "--num-of-class 3 --image-shape 3,16,16 --crop-size 16 --resize-short 16 --device cpu --batch-size 1 "
FLAGS += "--dali-num-threads 1 --dali-prefetch 1 --show-config false --kernels paddle"
INTEGERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
NUMBERS = ["-1", "0", "3", "511", "512", "2147483648", "9223372036854775807", "9" * 30, "9" * 5000, "1e3", "nan", ""]


def make(root):
    """Write a small data set in each format to ROOT/FORMAT."""
    source = root / "folder"
    random = np.random.RandomState(0)
    for split in ("train", "val"):
        for i in range(IMAGES):
            (source / split / f"c{i % 3}").mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(random.randint(0, 255, (20, 24, 3), np.uint8))
            image.save(source / split / f"c{i % 3}" / f"{i:02d}.{'jpg' if i % 2 else 'png'}")
    filelist = root / "filelist"
    shutil.copytree(source, filelist)
    for split in ("train", "val"):
        names = sorted(str(path.relative_to(filelist)) for path in (filelist / split).glob("*/*"))
        (filelist / f"{split}.txt").write_text("".join(f"{name} {name.split('/')[1][1:]}\n" for name in names))
    for name in data_files.FORMATS:
        data_files.write(source, root / name, name, 2)


def mutate(folder, random):
    """Damage one regular file, never a link, and return (description, mode of the split)."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jpg", ".png", ".mdb"))
    path = files[random.randint(len(files))]
    data = path.read_bytes()
    is_text = path.suffix in (".idx", ".txt", ".json")
    name = random.choice(list(TEXT if is_text and random.rand() < 0.7 else BINARY))
    changed = (TEXT | BINARY)[name](data, random)
    path.write_bytes(changed)
    return f"{name} {path.relative_to(folder)}", Mode.TRAIN if "train" in str(path.relative_to(folder)) else Mode.EVAL


def span(data, random):
    begin, end = sorted(random.randint(0, len(data) + 1, 2).tolist())
    return begin, min(end, begin + int(random.choice([1, 8, 600, 10**6])))


def some_bytes(data, random):
    data = bytearray(data)
    for _ in range(random.randint(1, 5)):
        if data:
            data[random.randint(len(data))] = random.randint(256)
    return bytes(data)


def integer(data, random):
    size = int(random.choice([4, 8]))
    place = random.randint(max(1, len(data) // 4)) * 4
    value = INTEGERS[random.randint(len(INTEGERS))] if random.rand() < 0.8 else random.randint(2**31)
    return data[:place] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[place + size :]


def truncated(data, random):
    return data[: random.randint(len(data) + 1)]


def deleted(data, random):
    begin, end = span(data, random)
    return data[:begin] + data[end:]


def doubled(data, random):
    begin, end = span(data, random)
    return data[:end] + data[begin:]


def zeros(data, random):
    begin, end = span(data, random)
    return data[:begin] + bytes(end - begin) + data[end:]


def exchanged(data, random):
    (a, b), size = random.randint(0, len(data) + 1, 2), int(random.choice([4, 64, 512, 4096]))
    a, b = sorted((int(a), int(b)))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def lines(change):
    def changed(data, random):
        rows = data.split(b"\n")
        change(rows, random)
        return b"\n".join(rows)

    return changed


def line_deleted(rows, random):
    del rows[random.randint(len(rows))]


def line_doubled(rows, random):
    rows.insert(random.randint(len(rows)), rows[random.randint(len(rows))])


def line_replaced(rows, random):
    rows[random.randint(len(rows))] = rows[random.randint(len(rows))]


def lines_exchanged(rows, random):
    a, b = random.randint(0, len(rows), 2)
    rows[a], rows[b] = rows[b], rows[a]


def number_replaced(data, random):
    numbers = list(re.finditer(rb"[0-9]+", data))
    if not numbers:
        return data
    place = numbers[random.randint(len(numbers))]
    value = int(place[0][:18])
    choices = [*NUMBERS, str(-value), str(value + 1), str(value + 4), str(value + 512), str(value * 2), f"+{value}"]
    return data[: place.start()] + choices[random.randint(len(choices))].encode() + data[place.end() :]


BINARY = {f.__name__: f for f in (some_bytes, integer, truncated, deleted, doubled, zeros, exchanged)}
TEXT = {f.__name__: lines(f) for f in (line_deleted, line_doubled, line_replaced, lines_exchanged)}
TEXT["number_replaced"] = number_replaced


def problem(folder, data_format, contents):
    """Read all records with this project's parsers. Return the reason why DALI and its decoders must not read them, or
    None if each record is an image whose content is in the set `contents`. A split whose list of images is invalid is
    not a reason, because then DALI does not read the split."""
    for mode in Mode:
        try:
            images = DataRoot(str(folder), data_format).listed(mode)
        except UsageError as e:
            assert "\n" not in str(e), e
            continue
        for image in images:
            try:
                content, label = read_image(image)
            except UsageError as e:
                assert "\n" not in str(e), e
                return "rejected"
            except OSError:  # a file list may contain the path of a missing file
                continue
            assert isinstance(label, int | float)
            if content not in contents:
                return "different image"
    return None


def train(folder, mode, data_format):
    """Read one epoch of a split and return [(label, digest of the pixels)], or the error message if reading fails."""
    args = config.parse_args([*FLAGS.split(), "--image-root", str(folder), "--data-format", data_format])
    resolution.resolve_device(args)
    args.apply(resolution.Loader)
    try:
        batches = list(dali.build_dataloader(args, mode))
    except UsageError as e:
        assert "\n" not in str(e), e
        return str(e)
    images = [(int(np.array(b[0]["label"])[0, 0]), hashlib.md5(np.array(b[0]["data"])).hexdigest()) for b in batches]
    bad = [label for label, _ in images if not 0 <= label < 3]
    return f"the loss rejects label {bad[0]}" if bad else images


def classify(intact, result, report, lists_images):
    """Return the OUTCOME of a mutation, where `intact` and `result` are the results of train() on the original and the
    damaged data."""
    if isinstance(result, str):
        return "rejected" if report.training_would_fail else f"BAD verify passes but training fails: {result}"
    if lists_images:  # a damaged list may still be a valid list of different images
        return "trained"
    if len(result) != len(intact):
        return f"BAD {len(result)} of {len(intact)} images"
    digests = [digest for _, digest in intact]
    for place, (_, digest) in enumerate(result):
        if digest != digests[place] and digest in digests:
            return f"BAD image {digests.index(digest)} in the place of {place}"
    return "trained, but verify fails" if report.training_would_fail else "trained"


def run(base, work, data_format, number, intact, contents):
    """Apply a mutation and return (description, OUTCOME)."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base / data_format, work)
    random = np.random.RandomState([number, *data_format.encode()])
    done = "nothing"
    for _ in range(random.randint(1, 3)):
        done, mode = mutate(work, random)
    try:
        reason = problem(work, data_format, contents)
        if reason is not None:
            return done, reason
        result = train(work, mode, data_format)
        report = verify.verify(work, num_of_class=3)
        verify.show(report)
        lists_images = data_format == "filelist" or mode is Mode.TRAIN
        if lists_images and data_format != "filelist" and not isinstance(result, str):
            # Training shuffles and augments images, so only their number is compared.
            lists_images = len(result) == IMAGES
        return done, classify(intact, result, report, lists_images)
    except Exception:
        return done, "BAD " + traceback.format_exc().replace("\n", " | ")


def main(folder, *mutations):
    workers.ProcessPoolExecutor = lambda count, _, **options: ThreadPoolExecutor(count, **options)
    workers.signals.die_with_parent = lambda parent: None
    base = Path(folder) / "base"
    if not base.exists():
        make(base)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    verify.ProcessPoolExecutor = lambda *arguments: ThreadPoolExecutor(1)
    verify._in_a_process = lambda function, *arguments: function(*arguments)
    stdout, contents = sys.stdout, {path.read_bytes() for path in (base / "folder").rglob("*.*")}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        intact = {}
        for mutation in mutations:
            print("start", mutation, file=stdout, flush=True)
            signal.alarm(LIMIT_S)
            data_format, _, number = mutation.partition(":")
            if data_format not in intact:
                intact[data_format] = train(base / data_format, Mode.EVAL, data_format)
                assert len(intact[data_format]) == IMAGES, intact[data_format]
            # Use a new folder for each mutation, because a process must not open the same LMDB twice.
            work = Path(folder) / f"{data_format}-{os.getpid()}-{number}"
            done, outcome = run(base, work, data_format, int(number), intact[data_format], contents)
            signal.alarm(0)
            shutil.rmtree(work)
            print("end", mutation, f"{outcome} ({done})", file=stdout, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
