"""Fuzzing with hypothesis, with the same counted cases every time, and seeded mutations of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings


def amounts(short: int, long: int) -> Any:
    """Parametrize `cases`: `@amounts(50, 5_000)` gives 50 by default and 5,000 with the marker `slow`."""
    return pytest.mark.parametrize(
        "cases", [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.slow)]
    )


def fuzz(cases: int, body: Callable[..., None], **strategies: Any) -> int:
    """Call `body` with `cases` drawn cases and return how many there were."""
    tried = 0

    @settings(
        max_examples=cases, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(**strategies)
    def attempt(**drawn: Any) -> None:
        nonlocal tried
        tried += 1
        body(**drawn)

    attempt()
    return tried


def mutated(content: bytes, seed: int) -> bytes:
    """Change some bytes; repeat, remove or fill a range; or cut the end, all depending only on the seed."""
    draw = np.random.default_rng(seed)
    data = bytearray(content)
    for _ in range(int(draw.integers(1, 6))):
        if not data:
            break
        place, kind = int(draw.integers(len(data))), int(draw.integers(6))
        length = int(draw.integers(1, 1 + max(1, len(data) // 8)))
        if kind <= 1:
            data[place] = int(draw.integers(256))
        elif kind == 2:
            data[place] ^= 1 << int(draw.integers(8))
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = data[place : place + length]
        else:
            data[place : place + length] = bytes([int(draw.choice([0, 255, 127, 128]))]) * length
    return bytes(data[: int(draw.integers(len(data) + 1))] if draw.random() < 0.2 else data)
