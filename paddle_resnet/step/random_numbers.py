"""Random numbers for a batch, from a counter-based generator. The numbers depend only on seed, batch, layer and rank,
so neither CUDA graphs nor resuming a run changes them.
"""

import zlib

import numpy as np


def generator(seed: int, step: int, layer: str, rank: int) -> np.random.Generator:
    """Return the random generator for a layer and a batch. The algorithm is Philox by Salmon et al., SC 2011.

    Args:
        seed: value of --seed.
        step: number of the batch in the run.
        layer: name of the layer or operation that uses the numbers.
        rank: rank of the process.
    Returns:
        np.random.Generator.
    """
    # The generator increments the lowest 64 bits of the counter, so step and rank use the higher bits.
    key = np.array([seed, zlib.crc32(layer.encode())], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, step, rank, 0], np.uint64)))
