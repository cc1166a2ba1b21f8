"""The saturation study (GCL, appendix B): how far the distribution term falls with k bits of entropy.

Images are k constant binary channels without augmentation, and nothing but the term is trained.
B images, D width of the projection z [B,D].
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from kontrast import networks
from kontrast.data import Feeder
from kontrast.data.competing_features import binary_channels
from kontrast.errors import NumbersError, UsageError
from kontrast.files import disk_faults
from kontrast.kernels import row_statistics
from kontrast.objectives import Objective, objective
from kontrast.studies.cells import Record, Say, group_by
from kontrast.studies.study_result import AuditResult
from kontrast.training.device import choose_device

BITS = (1, 2, 3, 4, 6, 8, 10)
STEPS, IMAGES, BATCH, SIZE, WIDTH = 150, 4096, 128, 32, 64
MAX_BITS = 64
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # outside, divided similarities are no longer distinct in float32
LAST = 20  # the loss is the mean over this many last steps


def measure_saturation(
    *,
    out: str | os.PathLike[str] | None = None,
    bits: Sequence[int] | None = None,
    temperatures: Sequence[float] = (0.1, 1.0),
    steps: int = 0,
    device: str = "auto",
    say: Say = print,
) -> AuditResult:
    """Train the distribution terms of NT-Xent and SWD alone on images of k random bits (GCL, appendix B).

    Args:
        out: the folder for audit.json; default: runs/saturation.
        bits: the numbers of bits k; default: 1 to 10.
        temperatures: temperatures of NT-Xent's term; default: 0.1 and 1.
        steps: training steps per term and k; default (0): 150.
        device: auto, cpu or cuda.
        say: receives progress lines; default: print.
    """
    folder = Path(out) if out is not None else Path("runs") / "saturation"
    on, chosen = choose_device(device), sorted(set(bits or BITS))
    check_arguments(chosen, temperatures, steps)
    terms: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
        f"log-sum-exp, temperature {t:g}": (partial(log_sum_exp, temperature=t), t) for t in temperatures
    }
    terms["sliced Wasserstein, hypersphere"] = (partial(wasserstein, objective("swd", distribution_weight=1.0)), None)
    cells = []
    for name, (term, temperature) in terms.items():
        for k in chosen:
            value = trained_term(term, k, steps or STEPS, on)
            best = None if temperature is None else simplex_value(k, temperature)
            cells.append({"term": name, "bits": k, "loss": value, "equal_clusters": best})
            say(f"{name}, {k} bits: {value:.3f}")
    tree = {"version": 1, "kind": "audit", "title": "When is the distribution term saturated?", "runs": []}
    tree |= {"cells": cells, "verdict": verdict(cells), "plots": plots(cells), "tables": [table(cells)]}
    settings = {"steps": steps or STEPS, "images": IMAGES, "batch": BATCH, "size": SIZE, "encoder": "small-conv"}
    tree["settings"] = settings
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return AuditResult.save(folder / "audit.json", tree)


def check_arguments(bits: Sequence[int], temperatures: Sequence[float], steps: int) -> None:
    limits: list[tuple[str, float, float, float]] = [("--steps", steps, 0, math.inf)]
    limits += [("--bits", k, 1, MAX_BITS) for k in bits]
    limits += [("--temperatures", t, MIN_TEMPERATURE, MAX_TEMPERATURE) for t in temperatures]
    for option, value, low, high in limits:
        if not low <= value <= high:  # refuses NaN as well
            raise UsageError(f"{option} {value:g} with --saturation: allowed are {low:g} to {high:g}")


def wasserstein(swd: Objective, z: Tensor) -> Tensor:
    """SWD's distribution term: the distance of all rows, passed as two views, to as many draws of the prior."""
    return swd.terms(*z.chunk(2))["repulsion"]


def log_sum_exp(z: Tensor, temperature: float) -> Tensor:
    """mean_i log sum_{j != i} exp(<z_i, z_j>/tau): NT-Xent's distribution term."""
    ids = torch.arange(len(z), device=z.device)
    return row_statistics(normalize(z, dim=1), None, scale=1 / temperature, query_ids=ids).lse.mean()


def simplex_value(bits: int, temperature: float) -> float:
    """The term if the 2^k kinds of images are the corners of a simplex, or orthogonal if D is too small for that.

    It is a reference, not a proven optimum. It is computed in logarithms because exp(1/tau) overflows at low
    temperatures.
    """
    kinds = 2.0**bits
    apart = -1 / (kinds - 1) if kinds <= WIDTH + 1 else 0.0
    same, other = (BATCH - 1) / kinds, (BATCH - 1) * (1 - 1 / kinds)
    high, low = math.log(same) + 1 / temperature, math.log(other) + apart / temperature
    return max(high, low) + math.log1p(math.exp(-abs(high - low)))


def trained_term(term: Callable[[Tensor], Tensor], bits: int, steps: int, device: torch.device) -> float:
    """Train the term alone and return its mean over the last steps."""
    torch.manual_seed(0)
    encoder = networks.encoder("small-conv", channels=bits, size=SIZE, width=WIDTH)
    network = nn.Sequential(encoder, networks.head("simclr", encoder.width, outputs=WIDTH)).to(device).train()
    feeder = Feeder(binary_channels(IMAGES, bits, SIZE), batch=BATCH, device=device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    values: list[float] = []
    batches = (batch for epoch in itertools.count() for batch in feeder.batches(epoch))
    for batch in itertools.islice(batches, steps):
        value = term(network(batch.images.float() / 255))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    mean = statistics.fmean(values[-LAST:])
    if not math.isfinite(mean):
        raise NumbersError(f"the distribution term with {bits} bits became {mean}: try a higher temperature")
    return mean


def saturation_point(cells: list[Record]) -> int:
    """The smallest number of bits that gives 90% of the largest decrease."""
    values = [cell["loss"] for cell in cells]
    decrease = values[0] - min(values)
    return next(cell["bits"] for cell in cells if cell["loss"] - min(values) <= 0.1 * decrease)


def verdict(cells: list[Record]) -> str:
    points = {name: saturation_point(group) for name, group in group_by(cells, "term").items()}
    reached = "; ".join(f"{name}: {bits}" for name, bits in points.items())
    return f"Bits at which each term reaches 90% of its decrease, out of {max(c['bits'] for c in cells)}: {reached}."


def plots(cells: list[Record]) -> list[Record]:
    made: list[Record] = []
    for name, group in group_by(cells, "term").items():
        x = [cell["bits"] for cell in group]
        series = [{"name": "trained", "x": x, "y": [cell["loss"] for cell in group]}]
        if group[0]["equal_clusters"] is not None:
            series.append({"name": "equal clusters (reference)", "x": x, "y": [c["equal_clusters"] for c in group]})
        made.append(
            {"id": f"saturation-{len(made)}", "title": f"{name}: 90% of the decrease at {saturation_point(group)} bits",
             "note": "The distribution term, trained alone on k binary channels.", "kind": "line",
             "x": {"label": "bits of entropy", "whole": True}, "y": {"label": "loss"}, "series": series}
        )  # fmt: skip
    return made


def table(cells: list[Record]) -> dict[str, Any]:
    groups = group_by(cells, "term")
    bits = sorted({cell["bits"] for cell in cells})
    found = {(cell["term"], cell["bits"]): f"{cell['loss']:.3f}" for cell in cells}
    rows = [[name, *(found[name, k] for k in bits)] for name in groups]
    return {"title": "The distribution term by bits of entropy", "columns": ["term", *map(str, bits)], "rows": rows}
