"""Write the features of images to a NumPy file (`predict --features`)."""

from __future__ import annotations

import contextlib
import csv
from typing import TYPE_CHECKING

import numpy as np

from paddle_resnet.utils import files, logger, outputs
from paddle_resnet.utils.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


def normalized(features: np.ndarray) -> np.ndarray:
    """Divide each row by its L2 norm, so that the scalar product of two rows is their cosine similarity. A row of zeros
    is not changed. `features` and the result are float32 [N, channels]."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(norms > 0, norms, 1)


def table_of(path: str | Path) -> Path:
    """Return the path of the table that contains the image of each row of a file of features."""
    return files.companion(path, "csv")


@contextlib.contextmanager
def writer(path: str | Path) -> Iterator[Callable[[Sequence[str], np.ndarray], None]]:
    """Write normalized features, float32 [images, channels], to `path`, and a table with the columns `row` and `image`
    to table_of(path), when the `with` block ends. Rows are written to disk when they arrive, so that memory does not
    limit the number of rows.

    Yields:
        a function write(paths of N images, features [N, channels]).
    Raises:
        UsageError: a file cannot be written.
        RunError: stdout was closed before the end of the block.
    """
    count = channels = 0

    def header():
        array.seek(0)
        shape = {"descr": "<f4", "fortran_order": False, "shape": (count, channels)}
        np.lib.format.write_array_header_1_0(array, shape)  # the header has the same size for any number of rows

    def write(paths, features):
        nonlocal count, channels
        if not count:
            channels = features.shape[1]
            header()
        array.write(normalized(features).astype("<f4").tobytes())
        rows.writerows(enumerate(paths, count))
        count += len(paths)

    try:
        with (
            outputs.replaced(path) as partial,
            open(partial, "wb") as array,
            outputs.replaced_csv(table_of(path)) as table,
        ):
            rows = csv.writer(table)
            rows.writerow(["row", "image"])
            yield write
            header()
    except logger.ClosedPipe as e:
        raise RunError(
            f"--features {path}: not written, because stdout was closed; read all of stdout, or redirect it to a file"
        ) from e
    except OSError as e:
        raise UsageError(f"--features {path}: cannot be written ({e.strerror}); choose a different file") from e
