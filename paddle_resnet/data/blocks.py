"""Keep the most recently used blocks of compressed files in memory, such as the row groups of a Parquet file."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

LIMIT_BYTES = 1 << 29


class Blocks:
    """The most recently used blocks, up to a total size.

    Args:
        limit_bytes: maximum total size in bytes. A single block may be larger.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES):
        self._limit, self._total, self._blocks = limit_bytes, 0, OrderedDict()

    def get(self, key: Hashable, load: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Return a block, from memory or by reading it, and keep it in memory.

        Args:
            key: key of the block.
            load: function that reads the block if it is not in memory.
            size: function that returns the size of a block in bytes.
        """
        if key not in self._blocks:
            block = load()
            self._blocks[key] = block, size(block)
            self._total += size(block)
            while len(self._blocks) > 1 and self._total > self._limit:
                _, (_, freed) = self._blocks.popitem(last=False)
                self._total -= freed
        self._blocks.move_to_end(key)
        return self._blocks[key][0]
