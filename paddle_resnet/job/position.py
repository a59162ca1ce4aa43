"""Store the position of a rank without a lock, and describe positions in messages."""

import mmap
import os
from collections.abc import Sequence


class Position:
    """The position of a rank in the run, in a page of memory that the rank writes and its monitor reads without a lock.

    A single aligned integer contains the phase (upper 24 bits) and the place in the phase (lower 40 bits), so that a
    reader never sees a partial update. The place is 0 before the first step, 2 n + 1 while step n waits for images, and
    2 n + 2 in the rest of step n. The names of phases are written alternately to two slots, so that a new name never
    overwrites the name of the current phase.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("position") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._number = memoryview(self._page).cast("Q")

    def phase(self, name: str) -> None:
        """Begin a phase."""
        phase = (self._number[0] >> 40) + 1
        self._page[self._slot(phase)] = name.encode()[:256].ljust(256)
        self._number[0] = phase << 40

    def step(self, number: int, waits: bool) -> None:
        """Store the number of a step, and whether it is waiting for images."""
        self._number[0] = self._number[0] >> 40 << 40 | 2 * number + 2 - waits

    def read(self) -> list:
        """Return [number of the phase, place, name of the phase]."""
        while True:
            phase, place = divmod(self._number[0], 1 << 40)
            name = self._page[self._slot(phase)].decode(errors="replace").rstrip("\0 ") or "startup"
            if self._number[0] >> 40 == phase:
                return [phase, place, name]

    def _slot(self, phase):
        return slice(1024 + phase % 2 * 256, 1280 + phase % 2 * 256)


def describe_stall(positions: dict[int, list], stopped: Sequence[int] = ()) -> str:
    """Return a text that states which ranks block the job.

    Args:
        positions: {rank: [number of the phase, place, name of the phase]}.
        stopped: sorted list of the ranks that SIGSTOP or a debugger has stopped. If the list is not empty, these ranks
            block the job, regardless of the positions.
    """
    if stopped:
        return f"{ranks(stopped)} stopped by SIGSTOP or a debugger in {where_is(positions[stopped[0]])}"
    first, last = min(p[:2] for p in positions.values()), max(p[:2] for p in positions.values())
    behind = [rank for rank in sorted(positions) if positions[rank][:2] == first]
    where = where_is(positions[behind[0]])
    if first == last:
        return f"all ranks are in {where}"
    ahead = next(p for p in positions.values() if p[:2] == last)
    verb = "is" if len(behind) == 1 else "are"
    return f"{ranks(behind)} {verb} in {where}, other ranks are waiting in {where_is(ahead)}"


def ranks(numbers: Sequence[int]) -> str:
    """Return a list of ranks as text. If there are more than 8 ranks, the text contains the first 8 and "..."."""
    text = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def where_is(position: list) -> str:
    """Return a position as text: the phase and, after its first step has begun, the number of the step."""
    _, place, name = position
    if place == 0:
        return name
    return f"{name}, step {(place - 1) // 2}" + (", waiting for images" if place % 2 else "")
