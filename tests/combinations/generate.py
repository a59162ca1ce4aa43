"""Write table.csv, the rows of the combination tests: `python tests/combinations/generate.py`.

Each row contains a value for each axis of axes.py. Each pair of values occurs in a row, except pairs of two INDEPENDENT
axes and pairs that conflicts.py excludes. A value that differs from the default of its axis occurs only where it covers
a pair, because such a value, for example a teacher, lengthens most checks of its row.
"""

import csv
import itertools
import sys
from collections import Counter
from pathlib import Path

from axes import AXES, INDEPENDENT
from conflicts import conflicting

TABLE = Path(__file__).parent / "table.csv"


def pairs():
    """Return the pairs of axis values that must occur: {((axis, value), (other axis, other value))}."""
    ends = [[(axis, value) for value in values] for axis, values in AXES.items()]
    every = {pair for a, b in itertools.combinations(ends, 2) for pair in itertools.product(a, b)}
    return {pair for pair in every if {axis for axis, _ in pair} != INDEPENDENT} - conflicting().keys()


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

    excluded = {}
    for a, b in conflicting():
        excluded.setdefault(a, set()).add(b)
        excluded.setdefault(b, set()).add(a)
    # allpairspy cannot omit the pairs of two axes, so it gets only one of the independent axes. Axes with many values
    # first: it then needs fewer rows.
    order = sorted((axis for axis in AXES if axis != "network"), key=lambda axis: -len(AXES[axis]))

    def is_valid(values):
        """Return whether the last of `values`, the first values of a row, conflicts with none of the others."""
        row = list(zip(order, values, strict=False))
        return excluded.get(row[-1], set()).isdisjoint(row[:-1])

    rows, missing = [], pairs()
    parts = (dict(zip(order, row, strict=True)) for row in AllPairs([[*AXES[axis]] for axis in order], is_valid))
    # allpairspy omits pairs if it begins a row that conflicts prevent it from completing.
    while missing:
        row = _completed(next(parts, None) or dict(min(missing)), missing, excluded)
        rows.append({axis: row[axis] for axis in AXES})
        missing -= covered(rows[-1:])
    return _simplified(rows, excluded)


def _simplified(rows, excluded):
    """Return rows that cover the same pairs, but have the default value of an axis where its value covers no pair that
    occurs in no other row. The last rows are simplified first, because the generator's first rows cover most pairs."""
    needed = pairs()
    occurrences = Counter(pair for row in rows for pair in itertools.combinations(row.items(), 2) if pair in needed)
    place = {axis: i for i, axis in enumerate(AXES)}
    for row in reversed(rows):
        for axis, value in row.items():
            default, others = next(iter(AXES[axis])), [end for end in row.items() if end[0] != axis]

            def with_others(end, others=others):
                ordered = (tuple(sorted((end, other), key=lambda each: place[each[0]])) for other in others)
                return [pair for pair in ordered if pair in needed]

            is_needed = any(occurrences[pair] == 1 for pair in with_others((axis, value)))
            if not is_needed and excluded.get((axis, default), set()).isdisjoint(others):
                occurrences.subtract(with_others((axis, value)))
                occurrences.update(with_others((axis, default)))
                row[axis] = default
    return rows


def _completed(row, missing, excluded):
    """Return a row with the values in `row` and, on the other axes, those that cover most of the missing pairs."""
    for axis in [axis for axis in AXES if axis not in row]:
        valid = [v for v in AXES[axis] if excluded.get((axis, v), set()).isdisjoint(row.items())]
        ends = {*row.items()}
        row[axis] = max(
            valid, key=lambda v: sum((axis, v) in pair and not {*pair} - {*ends, (axis, v)} for pair in missing)
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
