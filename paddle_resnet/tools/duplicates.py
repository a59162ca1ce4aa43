"""`python -m paddle_resnet.dataset duplicates`: find validation images that are also, or nearly, in train.

Images are compared by a perceptual hash, or by features that the caller computes with a network. With hashes and with
features, the required memory grows with the number of images, not with the number of pairs. Worker processes import
this module instead of dataset.py, because this module imports neither Paddle nor DALI.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from paddle_resnet.data.formats import read_image
from paddle_resnet.data.images import Image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.data.skip_list import skip_list_line
from paddle_resnet.serving import preprocessing
from paddle_resnet.utils import outputs, signals
from paddle_resnet.utils.errors import UsageError, core, counted, printable
from paddle_resnet.utils.mode import Mode
from paddle_resnet.utils.numbers import AUTO

# Defaults of --distance and --similarity, from the 6.7 million pairs of 3,670 photographs of 5 flowers. The hashes of
# 23 pairs had at most the distance DISTANCE, and all of these pairs show the same photograph or scene; of the 10 pairs
# with distance 8, 4 do not. The features of EfficientNet-Lite0 of 17 pairs had at least the similarity SIMILARITY, and
# all of these pairs show the same scene.
DISTANCE, SIMILARITY = 6, 0.95
MAX_DISTANCE = 15  # maximum value of --distance; at larger distances, most pairs are unrelated
SIDE, FREQUENCIES = 32, 8  # pixels and frequencies per direction of the perceptual hash
FILE, PIXELS, SIMILAR = "same file", "same pixels", "similar"
SHOWN = 50  # maximum number of pairs to print
_BANDS, _BAND_BITS = 4, 16  # number of parts of a hash, and bits per part; see neighbors
_BLOCK = 1 << 16  # hashes to look up at once
_SETS = np.array([i.bit_count() for i in range(1 << _BAND_BITS)], np.uint8)  # [i]: number of bits of i that are 1
_DCT = np.cos(np.pi * (2 * np.arange(SIDE) + 1) * np.arange(FREQUENCIES)[:, None] / (2 * SIDE))
_CONTEXT = multiprocessing.get_context("spawn")
_PER_WORKER = 256  # minimum number of images per worker process, because starting a process takes a second


@dataclass(frozen=True)
class Pair:
    """A validation image and the training image that is most similar to it.

    Attributes:
        kind: FILE, PIXELS or SIMILAR.
        distance: number of differing bits of the perceptual hashes; or 1 minus the cosine similarity of the features.
        val, train: names of the images (Image.name).
        val_label, train_label: their labels; None if unknown (--multi-label).
        matches: number of training images that are similar to the validation image.
    """

    kind: str
    distance: float
    val: str
    val_label: int | None
    train: str
    train_label: int | None
    matches: int


@dataclass
class Report:
    """The result of a search for duplicates.

    Attributes:
        images: {"train": number of compared images, "val": ...}.
        pairs: Pair of each validation image with a duplicate, the closest first.
        unreadable: {name of an image that could not be compared: reason}.
    """

    images: dict[str, int]
    pairs: list[Pair]
    unreadable: dict[str, str] = field(default_factory=dict)


def list_images(
    root: str | Path,
    allow_outside: bool = False,
    label_offset: int | str = AUTO,
    is_multi_label: bool = False,
    skip_list: str | None = None,
) -> dict[Mode, list[Image]]:
    """Return the images of both splits of a data set in any format, without those of the skip list.

    Raises:
        UsageError: root is not a folder, lacks a split, or a split has no images or cannot be used; or the skip list
            cannot be used.
    """
    data = DataRoot(root, AUTO, allow_outside, label_offset, skip_list, is_multi_label=is_multi_label)
    images = {mode: data.kept(data.listed(mode) if is_multi_label else data.images(mode)[1]) for mode in Mode}
    for mode, listed in images.items():
        if not listed:
            raise UsageError(f"{root}: the {mode.value} split is empty; add images, or use a different folder")
    return images


def perceptual_hash(picture: Pillow.Image) -> int:
    """Return the perceptual hash of an opened image file, 64 bits. As in pHash and the package imagehash, bit i is 1 if
    the i-th of the lowest frequencies of the grayscale image, reduced to 32 x 32 pixels, is above their median. The
    hash does not depend on size, compression, or moderate changes of brightness and contrast.

    Raises:
        Exception: see preprocessing.upright_rgb.
    """
    upright = Pillow.fromarray(preprocessing.upright_rgb(picture))
    gray = np.asarray(upright.convert("L").resize((SIDE, SIDE), Pillow.Resampling.BOX), np.float64)
    # Rounding errors would determine the bits of frequencies that are 0, for example in an image of a single color.
    frequencies = np.round(_DCT @ gray @ _DCT.T, 6)
    bits = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def read(image: Image) -> tuple[bytes | None, str | None]:
    """Return (content of an image file, None), or (None, problem) if it cannot be read."""
    try:
        return read_image(image)[0], None
    except (OSError, UsageError) as e:
        return None, f"cannot be read ({e.strerror if isinstance(e, OSError) else e})"


def describe(image: Image) -> tuple[int | None, str | None]:
    """Return (perceptual hash, None) of an image, or (None, reason) if it cannot be read."""
    data, problem = read(image)
    if data is None:
        return None, problem
    try:
        with warnings.catch_warnings():  # Pillow warns about transparency and large images, which do not matter here
            warnings.simplefilter("ignore")
            return perceptual_hash(Pillow.open(io.BytesIO(data))), None
    except UnidentifiedImageError:  # the message of this exception contains a memory address
        return None, "is not in an image format that Pillow supports"
    except Exception as e:  # the errors of Pillow have no common base class
        return None, f"cannot be decoded by Pillow ({core(e)})"


def describe_all(images: Sequence[Image], workers: int | None = None, per_worker: int = _PER_WORKER) -> Iterator[tuple]:
    """Yield the results of describe() in order. `workers` is the maximum number of processes, by default the number of
    cores, and `per_worker` is the minimum number of images per process."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(images) // per_worker)
    if workers < 2:
        yield from map(describe, images)
        return
    with ProcessPoolExecutor(workers, _CONTEXT, signals.die_with_parent, (os.getpid(),)) as pool:
        with signals.deferred():
            results = pool.map(describe, images, chunksize=64)
        yield from results


def by_hash(
    images: dict[Mode, list[Image]],
    distance: int = DISTANCE,
    workers: int | None = None,
    per_worker: int = _PER_WORKER,
) -> Report:
    """Find the validation images whose perceptual hash differs by at most `distance` bits from that of a training
    image. For `images`, see list_images; for `workers` and `per_worker`, see describe_all."""
    results = describe_all([image for mode in Mode for image in images[mode]], workers, per_worker)
    kept, hashes = ({mode: [] for mode in Mode} for _ in range(2))
    unreadable = {}
    for mode in Mode:
        for image, (value, problem) in zip(images[mode], results, strict=False):
            if problem is None:
                kept[mode].append(image)
                hashes[mode].append(value)
            else:
                unreadable[image.name] = problem
    hashes = {mode: np.array(values, np.uint64) for mode, values in hashes.items()}
    closest = closest_hashes(hashes[Mode.EVAL], hashes[Mode.TRAIN], distance)
    return _report(kept, closest, unreadable)


def closest_hashes(
    queries: np.ndarray, references: np.ndarray, distance: int, block: int = _BLOCK
) -> list[tuple[int, int, int, int]]:
    """Return (index of the query, index of the closest reference, distance, number of references within the distance)
    for each query, uint64 [N], that has a reference, uint64 [M], within the distance. For `block`, see neighbors."""
    unique, first, counts = np.unique(references, return_index=True, return_counts=True)
    asked, which = np.unique(queries, return_inverse=True)
    best = np.full(len(asked), MAX_DISTANCE + 1)
    found, matches = np.zeros(len(asked), np.int64), np.zeros(len(asked), np.int64)
    for query, reference, differing in neighbors(asked, unique, distance, block):
        matches += np.bincount(query, counts[reference], len(asked)).astype(np.int64)
        order = np.argsort(-differing, kind="stable")  # of several assignments to an element, the last one counts
        query, reference, differing = (each[order] for each in (query, reference, differing))
        closer = differing < best[query]
        best[query[closer]], found[query[closer]] = differing[closer], reference[closer]
    return [(i, int(first[found[k]]), int(best[k]), int(matches[k])) for i, k in enumerate(which) if matches[k]]


def neighbors(
    queries: np.ndarray, references: np.ndarray, distance: int, block: int = _BLOCK
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (indexes of queries, indexes of references, distances) for all pairs of hashes that differ by at most
    `distance` bits, each pair once. `queries` and `references` are uint64; `block` queries are looked up at once.

    If two hashes differ by at most d bits, one of their four parts differs by at most d / 4 bits (multi-index hashing:
    Norouzi et al., arXiv:1307.2982), so each query is compared only with the references that have such a part."""
    radius = distance // _BANDS
    masks = [mask for mask, bits in enumerate(_SETS) if bits <= radius]
    for band in range(_BANDS):
        keys = _part(references, band)
        order = np.argsort(keys, kind="stable")
        starts = np.searchsorted(keys[order], np.arange((1 << _BAND_BITS) + 1))
        for at in range(0, len(queries), block):
            own = _part(queries[at : at + block], band)
            for mask in masks:
                first, after = starts[own ^ mask], starts[(own ^ mask) + 1]
                counts = after - first
                query = np.repeat(np.arange(at, at + len(own)), counts)
                places = np.arange(len(query)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
                reference = order[places]
                differing = queries[query] ^ references[reference]
                parts = np.array([_SETS[_part(differing, each)] for each in range(_BANDS)])
                total = parts.sum(axis=0, dtype=np.int64)
                is_new = (parts[:band] > radius).all(axis=0)  # an earlier part has not found the pair
                kept = (total <= distance) & is_new
                if kept.any():
                    yield query[kept], reference[kept], total[kept]


def _part(hashes, band):
    return ((hashes >> np.uint64(band * _BAND_BITS)) & np.uint64((1 << _BAND_BITS) - 1)).astype(np.int64)


def groups(hashes: Sequence[int], distance: int = DISTANCE) -> list[int]:
    """Return a group number for each perceptual hash. Two hashes that differ by at most `distance` bits are in the same
    group, and so are hashes that a chain of such pairs connects."""
    unique, inverse = np.unique(np.array(hashes, np.uint64), return_inverse=True)
    parent = list(range(len(unique)))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for first, second, _ in neighbors(unique, unique, distance):
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if a < b:
                parent[root(b)] = root(a)
    return [root(i) for i in inverse.tolist()]


def by_features(
    images: dict[Mode, list[Image]],
    features_of: Callable[[list[Image]], Iterable[tuple[list[tuple[Image, str | None]], np.ndarray]]],
    similarity: float = SIMILARITY,
) -> Report:
    """Find the validation images whose features have at least the cosine similarity `similarity` with those of a
    training image. Only the features of the validation images are kept in memory.

    Args:
        images: see list_images.
        features_of: function that yields ([(image, problem or None)], features of the images without a problem, float32
            [N, channels] with L2 norm 1) for batches of images.
        similarity: minimum cosine similarity.
    """
    unreadable, kept = {}, {mode: [] for mode in Mode}

    def batches(mode):
        for checked, features in features_of(images[mode]):
            unreadable.update({image.name: problem for image, problem in checked if problem is not None})
            found = [image for image, problem in checked if problem is None]
            if found:
                yield len(kept[mode]), features
                kept[mode] += found

    rows = [features for _, features in batches(Mode.EVAL)]
    val = np.concatenate(rows) if rows else None
    count = 0 if val is None else len(val)
    best, found, matches = np.full(count, -np.inf), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for start, features in batches(Mode.TRAIN):
        if val is None:
            continue
        cosines = val @ features.T
        matches += (cosines >= similarity).sum(axis=1)
        place = cosines.argmax(axis=1)
        value = np.take_along_axis(cosines, place[:, None], axis=1)[:, 0]
        closer = value > best
        best[closer], found[closer] = value[closer], start + place[closer]
    closest = [
        (i, int(found[i]), max(0.0, 1 - float(best[i])), int(matches[i])) for i in np.flatnonzero(matches).tolist()
    ]
    return _report(kept, closest, unreadable)


def _report(images, closest, unreadable):
    pairs = []
    copies = _copies(images, [i for i, *_, matches in closest if matches > 1])
    for i, k, distance, matches in closest:
        val, train = images[Mode.EVAL][i], images[Mode.TRAIN][copies.get(i, k)]
        kind, val_label, train_label = _compare(val, train)
        pairs.append(Pair(kind, distance, val.name, val_label, train.name, train_label, matches))
    pairs.sort(key=lambda pair: ((FILE, PIXELS, SIMILAR).index(pair.kind), pair.distance, pair.val))
    return Report({mode.value: len(images[mode]) for mode in Mode}, pairs, unreadable)


def _copies(images, indexes):
    """Return {index of a validation image: index of the first training image with the same content} for those of the
    validation images `indexes` that have such a copy. It is as close as the closest image, but may come later."""
    wanted, sizes, copies = {}, set(), {}
    for i in indexes:
        if (data := _content(images[Mode.EVAL][i])) is not None:
            wanted.setdefault(hashlib.sha256(data).digest(), []).append(i)
            sizes.add(len(data))
    for k, image in enumerate(images[Mode.TRAIN]):
        if not wanted:
            break
        with contextlib.suppress(OSError):  # the file may have been removed
            if image.kind is None and os.path.getsize(image.path) not in sizes:
                continue
        if (data := _content(image)) is not None and len(data) in sizes:
            copies.update(dict.fromkeys(wanted.pop(hashlib.sha256(data).digest(), []), k))
    return copies


def _content(image):
    """Return the content of an image file, or None if it can no longer be read."""
    with contextlib.suppress(OSError, UsageError):
        return read_image(image)[0]


def _compare(first, second):
    """Return how two similar images agree (FILE, PIXELS or SIMILAR), and their labels."""
    labels = first.label, second.label
    try:
        contents, labels = zip(*map(read_image, (first, second)), strict=True)  # the labels of records are in the files
        labels = [None if label is None else int(label) for label in labels]
        if contents[0] == contents[1]:
            return FILE, *labels
        pixels = [preprocessing.upright_rgb(Pillow.open(io.BytesIO(data))) for data in contents]
    except Exception:  # DALI can read images that Pillow cannot read, and the files may change
        return SIMILAR, *labels
    return PIXELS if np.array_equal(*pixels) else SIMILAR, *labels


def write_csv(report: Report, file: Any) -> None:
    """Write a line per Pair to an opened text file, after a line with the names of the attributes of Pair."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(each.name for each in fields(Pair))
    writer.writerows([_cell(value) for value in asdict(pair).values()] for pair in report.pairs)


def _cell(value):
    return f"{value:.6g}" if isinstance(value, float) else value


def write_fix_list(report: Report, path: str | Path) -> None:
    """Write the names of the validation images with a duplicate in train, one per line, in the format of --skip-list.
    Raise OSError if the file cannot be written."""
    with outputs.replaced(path) as partial:
        partial.write_text("".join(skip_list_line(pair.val) for pair in report.pairs), encoding="utf-8")


def lines(report: Report) -> Iterator[str]:
    """Yield the lines that describe a report: up to SHOWN pairs, and a summary."""
    for pair in report.pairs[:SHOWN]:
        more = f" and {pair.matches - 1} more" if pair.matches > 1 else ""
        labels = "" if pair.val_label == pair.train_label else f" (labels {pair.val_label} and {pair.train_label})"
        distance = "" if pair.kind != SIMILAR else f" {_cell(pair.distance)}"
        yield printable(f"{pair.kind}{distance}: {pair.val} = {pair.train}{more}{labels}")
    if len(report.pairs) > SHOWN:
        yield f"{counted(len(report.pairs) - SHOWN, 'more pair')}; use --csv FILE to list all"
    kinds = Counter(pair.kind for pair in report.pairs)
    found = ", ".join(f"{kinds[kind]} {kind}" for kind in (FILE, PIXELS, SIMILAR) if kinds[kind])
    val, train = (
        counted(report.images[mode], f"{name} image") for mode, name in (("val", "validation"), ("train", "training"))
    )
    yield f"{len(report.pairs)} of {val} have a duplicate among {train}" + (f": {found}" if found else "")
