"""Compare two ways to compute losses of several views at small batches: from one stored matrix, or pair by pair.

    python benchmarks/links.py [--quick] [--json FILE]

Times are of a forward and a backward pass called from Python, and on a CUDA device also captured in a graph. Rows are
views times images; the library switches at `kontrast.kernels.links.SMALL` pairs of rows per pair of views.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from family import replay_time

from kontrast.kernels import links
from kontrast.objectives import objective

WIDTH = 128
CASES = [  # objective, views, batches
    ("cacr", 5, (32, 64, 128, 256)),
    ("multi-view-nce", 5, (32, 64, 128, 256)),
    ("align-uniform", 2, (64, 256, 512)),
]
WAYS = {"one matrix": 2**62, "pair by pair": 0}


def call_time(take: Callable[[], None], device: str, seconds: float) -> float:
    """Return the median milliseconds of one call."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        take()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def case(name: str, views: int, batch: int, device: str, seconds: float) -> dict[str, float | str]:
    torch.manual_seed(0)
    loss = objective(name).to(device)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    z = torch.randn(views, batch, WIDTH, device=device, dtype=kind).requires_grad_()

    def take() -> None:
        z.grad = None
        loss(z).backward()

    found = {}
    usual = links.SMALL
    for way, small in WAYS.items():
        links.SMALL = {device: small}
        found[f"{way}, ms"] = call_time(take, device, seconds)
        if device == "cuda":
            found[f"{way}, captured, ms"] = replay_time(take, 15)
    links.SMALL = usual
    called: list[int] = []
    one = links.from_one_matrix
    links.from_one_matrix = lambda *given: called.append(1) or one(*given)
    take()
    links.from_one_matrix = one
    return {**found, "used": "one matrix" if called else "pair by pair"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short timings")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, views, batches in CASES:
        for batch in batches:
            found = case(name, views, batch, device, 0.3 if arguments.quick else 2.0)
            ratio = found["pair by pair, ms"] / found["one matrix, ms"]
            rows.append({"objective": name, "views": views, "images": batch, **found, "pair by pair / one": ratio})
            print(rows[-1], flush=True)
    if arguments.json:
        where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        facts = {"device": where, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
