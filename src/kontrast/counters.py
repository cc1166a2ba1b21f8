"""Random numbers that are pure functions of counters: equal on every machine, library version, rank and restart.

numpy's and torch's generators may change between versions and depend on how many numbers were drawn before. Here draw
number i of the stream (seed, *path) is a hash of exactly these integers, so that order, restarts and ranks can't change
it. The hash is SplitMix64, once for numpy and once for torch; the Triton kernels of the views have their own copy,
because they are compiled from their own source. This module does not import torch: the processes that decode images
use it too.

N items. Words are uint64 [N], and all 2^64 values are equally likely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2^64 divided by the golden ratio."""
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def mix(values: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for the states `values`: a bijection of uint64 that spreads each bit over all bits."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
        return values ^ (values >> np.uint64(31))


def mix_tensor(values: Tensor) -> Tensor:
    """Do the same as `mix`, bit for bit, for an int64 tensor."""
    return finalize_tensor(values + signed(GOLDEN))


def finalize_tensor(state: Tensor) -> Tensor:
    """Return SplitMix64's output for a state to which the caller has added a multiple of GOLDEN, int64."""
    # torch has no arithmetic on uint64. The masks turn its signed right shifts into logical ones.
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * signed(FIRST_FACTOR)
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * signed(SECOND_FACTOR)
    return state ^ (state >> 31 & (1 << 33) - 1)


def signed(word: int) -> int:
    """Return the int64 that has the same lowest 64 bits as `word`."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def words(count_or_indices: int | np.ndarray, seed: int, *path: int) -> np.ndarray:
    """Return one word per index of the stream (seed, *path), uint64 [N]; an integer N means the indices 0..N-1."""
    if isinstance(count_or_indices, (int, np.integer)):
        indices = np.arange(count_or_indices, dtype=np.uint64)
    else:
        indices = np.asarray(count_or_indices).astype(np.uint64)
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, *path):
        key = mix(key ^ np.array([part & (2**64 - 1)], dtype=np.uint64))
    return mix(mix(indices) ^ key)


def uniform(count_or_indices: int | np.ndarray, seed: int, *path: int) -> np.ndarray:
    """Return float64 numbers [N] in [0, 1): the upper 53 bits of the words."""
    return (words(count_or_indices, seed, *path) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(count_or_indices: int | np.ndarray, bound: int, seed: int, *path: int) -> np.ndarray:
    """Return int64 numbers [N], uniform in 0..bound-1."""
    return (uniform(count_or_indices, seed, *path) * bound).astype(np.int64)


def permutation(count: int, seed: int, *path: int) -> np.ndarray:
    """Return the numbers 0..N-1 sorted by their words, int64 [N]."""
    return np.argsort(words(count, seed, *path), kind="stable")


def block_permutation(blocks: np.ndarray, window: int, seed: int, *path: int) -> np.ndarray:
    """Shuffle the blocks, then shuffle the items within each group of `window` consecutive blocks: int64 [N].

    A reader of this order needs only the blocks of one window at a time. If all blocks fit into one window, this is
    `permutation` exactly.

    Args:
        blocks: the block of each item, int [N].
        window: number of blocks that are shuffled together.
        seed: seed of the stream; `path` are further integers that select it.
    """
    present, block = np.unique(blocks, return_inverse=True)
    turn = np.empty(len(present), dtype=np.int64)
    turn[permutation(len(present), seed, *path, 1)] = np.arange(len(present))
    return np.lexsort((words(len(blocks), seed, *path), turn[block] // window))
