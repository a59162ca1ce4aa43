"""Write table.csv, the rows of the combination tests: `python tests/combinations/generate.py`.

Each row contains a value for each axis of axes.py, and each pair of values that conflicts.py does not exclude occurs in
a row.
"""

import csv
import itertools
import sys
from pathlib import Path

from axes import AXES
from conflicts import conflicting

TABLE = Path(__file__).parent / "table.csv"


def pairs():
    """Return the pairs of axis values that must occur: {((axis, value), (other axis, other value))}."""
    ends = [[(axis, value) for value in values] for axis, values in AXES.items()]
    every = {pair for a, b in itertools.combinations(ends, 2) for pair in itertools.product(a, b)}
    return every - conflicting().keys()


def covered(rows):
    """Return the pairs of axis values that occur in rows, a list of {axis: value}."""
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def read():
    """Return the rows of table.csv as a list of {axis: value}."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def generate():
    """Return rows that cover all pairs, as a list of {axis: value}."""
    from allpairspy import AllPairs

    # Axes with many values first: the generator then needs fewer rows.
    order = sorted(AXES, key=lambda axis: -len(AXES[axis]))
    excluded = {}
    for a, b in conflicting():
        excluded.setdefault(a, set()).add(b)
        excluded.setdefault(b, set()).add(a)

    def is_valid(values):
        """Return whether the last of `values`, the first values of a row, conflicts with none of the others."""
        row = list(zip(order, values, strict=False))
        return excluded.get(row[-1], set()).isdisjoint(row[:-1])

    rows = [dict(zip(order, row, strict=True)) for row in AllPairs([[*AXES[axis]] for axis in order], is_valid)]
    # allpairspy omits pairs if it begins a row that conflicts prevent it from completing.
    while missing := sorted(pairs() - covered([{axis: row[axis] for axis in AXES} for row in rows])):
        rows.append(_row_with(missing, excluded))
    return [{axis: row[axis] for axis in AXES} for row in rows]


def _row_with(missing, excluded):
    """Return a row that contains the first of the missing pairs, and as many others as possible."""
    row = dict(missing[0])
    for axis in [axis for axis in AXES if axis not in row]:
        valid = [v for v in AXES[axis] if excluded.get((axis, v), set()).isdisjoint(row.items())]
        row[axis] = max(
            valid, key=lambda v: sum((axis, v) in pair and not {*pair} - {*row.items(), (axis, v)} for pair in missing)
        )
    return row


def main():
    rows = generate()
    if missing := pairs() - covered(rows):
        sys.exit(f"{len(missing)} pairs do not occur, such as {next(iter(missing))}")
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, AXES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{TABLE}: {len(rows)} rows, {len(pairs())} pairs")


if __name__ == "__main__":
    main()
