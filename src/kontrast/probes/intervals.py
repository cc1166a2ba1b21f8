"""95% confidence intervals: over seeds by Student's t, over test images by the bootstrap. T test images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RESAMPLES = 2_000
DRAWS_AT_ONCE = 4_000_000


def over_seeds(values: list[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean by Student's t, or None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    from scipy.stats import t

    v = torch.tensor(values, dtype=torch.float64)
    half = float(t.ppf(0.975, n - 1)) * float(v.std()) / math.sqrt(n)
    return float(v.mean()) - half, float(v.mean()) + half


def within_one(interval: tuple[float, float] | None, least: float = 0.0) -> tuple[float, float] | None:
    """Clip an interval of accuracies to [0, 1], or with least=-1 an interval of their differences: Student's t of few
    seeds is wider than the possible values."""
    return None if interval is None else (max(least, interval[0]), min(1.0, interval[1]))


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share. Unlike the bootstrap's it has a width for 0 or n hits of few images.

    Example:
        >>> [round(end, 3) for end in wilson(8, 8)]
        [0.676, 1.0]
    """
    z = 1.959963984540054  # the 97.5% quantile of the normal distribution
    center, half = hits + z * z / 2, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return max(0.0, (center - half) / (n + z * z)), min(1.0, (center + half) / (n + z * z))


def over_images(scores: Tensor) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean of scores [T]: 0 or 1 per image, or differences."""
    generator = torch.Generator().manual_seed(0)
    scores = scores.double()
    chunk = max(1, DRAWS_AT_ONCE // len(scores))
    means = [
        scores[torch.randint(len(scores), (min(chunk, RESAMPLES - start), len(scores)), generator=generator)].mean(1)
        for start in range(0, RESAMPLES, chunk)
    ]
    low, high = torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def pack_bits(correct: Tensor) -> str:
    """Write booleans [T] as hexadecimal text."""
    import numpy as np

    return np.packbits(correct.numpy().astype(np.uint8)).tobytes().hex()


def unpack_bits(text: str, count: int) -> Tensor:
    """Read booleans [count] that `pack_bits` wrote."""
    import numpy as np

    return torch.from_numpy(np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count)).bool()
