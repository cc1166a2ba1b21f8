"""Random numbers as pure functions of counters: the same on every machine, library version, rank and restart.

Legend: N items. `words` are uint64 [N], all 2^64 values equally likely.

numpy's generators may change their streams between versions and depend on how many numbers were drawn before; here draw
number i of stream (seed, *path) is a hash of exactly these integers, so order, restarts and ranks can't change it.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 in which every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * _MIX_1
        values = (values ^ (values >> np.uint64(27))) * _MIX_2
        return values ^ (values >> np.uint64(31))


def words(count_or_indices: int | np.ndarray, seed: int, *path: int) -> np.ndarray:
    """uint64 [N]: one word per index of the stream (seed, *path); an integer N stands for the indices 0..N-1."""
    if isinstance(count_or_indices, (int, np.integer)):
        indices = np.arange(count_or_indices, dtype=np.uint64)
    else:
        indices = np.asarray(count_or_indices).astype(np.uint64)
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, *path):
        key = mix(key ^ np.array([part & (2**64 - 1)], dtype=np.uint64))
    return mix(mix(indices) ^ key)


def uniform(count_or_indices: int | np.ndarray, seed: int, *path: int) -> np.ndarray:
    """float64 [N] in [0, 1): the upper 53 bits of the words."""
    return (words(count_or_indices, seed, *path) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(count_or_indices: int | np.ndarray, bound: int, seed: int, *path: int) -> np.ndarray:
    """int64 [N], uniform in 0..bound-1."""
    return (uniform(count_or_indices, seed, *path) * bound).astype(np.int64)


def permutation(count: int, seed: int, *path: int) -> np.ndarray:
    """int64 [N]: 0..N-1 in the order of their words."""
    return np.argsort(words(count, seed, *path), kind="stable")


def block_permutation(blocks: np.ndarray, window: int, seed: int, *path: int) -> np.ndarray:
    """int64 [N]: blocks in random order, items in random order within each `window` consecutive ones of them.

    blocks: int [N], the block of each item. While a window is read nothing outside of it is. Where all blocks fit into
    one window this is `permutation` exactly.
    """
    present, block = np.unique(blocks, return_inverse=True)
    turn = np.empty(len(present), dtype=np.int64)
    turn[permutation(len(present), seed, *path, 1)] = np.arange(len(present))
    return np.lexsort((words(len(blocks), seed, *path), turn[block] // window))
