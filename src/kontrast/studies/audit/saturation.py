"""The saturation study (GCL, appendix B): the distribution term alone against k bits of entropy.

Images are k binary channels, constant over space, without augmentation. B images, D width of the projection z [B,D].
"""

from __future__ import annotations

import math
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
from kontrast.files import disk_faults, write_json
from kontrast.kernels import row_statistics
from kontrast.objectives import Objective, objective
from kontrast.training.device import choose_device

BITS = (1, 2, 3, 4, 6, 8, 10)
STEPS, IMAGES, BATCH, SIZE, WIDTH = 150, 4096, 128, 32, 64
MOST_BITS = 64
COLDEST, HOTTEST = 1e-6, 1e6  # beyond, float32 tells no two similarities apart once they are divided
LAST = 20  # the loss is the mean over this many last steps
Say = Callable[[str], None]


def saturate(
    *,
    out: Path,
    bits: Sequence[int] | None = None,
    temperatures: Sequence[float] = (0.1, 1.0),
    steps: int = 0,
    device: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Train each term for each k, write audit.json and return what is in it."""
    on, chosen = choose_device(device), sorted(set(bits or BITS))
    check(chosen, temperatures, steps)
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
    tree = {"version": 1, "kind": "audit", "title": "When does the distribution term have enough?", "runs": []}
    tree |= {"cells": cells, "verdict": sentence(cells), "plots": plots(cells), "tables": [table(cells)]}
    tree["settings"] = {
        "steps": steps or STEPS,
        "images": IMAGES,
        "batch": BATCH,
        "size": SIZE,
        "encoder": "small-conv",
    }
    with disk_faults(out):
        Path(out).mkdir(parents=True, exist_ok=True)
    write_json(Path(out) / "audit.json", tree)
    return tree


def check(bits: Sequence[int], temperatures: Sequence[float], steps: int) -> None:
    """Refuse what can't be trained, before anything is."""
    for k in bits:
        if k < 1:
            raise UsageError(f"--bits {k} with --saturation: at least 1 bit, since images need a channel")
        if k > MOST_BITS:
            raise UsageError(f"--bits {k} with --saturation: at most {MOST_BITS} bits")
    for t in temperatures:
        if not COLDEST <= t <= HOTTEST:  # nor is NaN
            raise UsageError(f"--temperatures {t:g} with --saturation: allowed are {COLDEST:g} to {HOTTEST:g}")
    if steps < 0:
        raise UsageError(f"--steps {steps}: give at least 1, or 0 for {STEPS}")


def wasserstein(swd: Objective, z: Tensor) -> Tensor:
    """To as many draws of the prior as there are rows, which the loss takes as two views."""
    return swd.terms(*z.chunk(2))["repulsion"]


def log_sum_exp(z: Tensor, temperature: float) -> Tensor:
    """mean_i log sum_{j != i} exp(<z_i, z_j>/tau): NT-Xent's distribution term."""
    ids = torch.arange(len(z), device=z.device)
    return row_statistics(normalize(z, dim=1), None, scale=1 / temperature, query_ids=ids).lse.mean()


def simplex_value(bits: int, temperature: float) -> float:
    """The term where the 2^k kinds of image sit on the corners of a simplex, or orthogonal where D has no room for it;
    a reference, not a proven optimum. In logarithms, since exp(1/tau) of a low temperature is past all numbers."""
    kinds = 2.0**bits
    apart = -1 / (kinds - 1) if kinds <= WIDTH + 1 else 0.0
    same, other = (BATCH - 1) / kinds, (BATCH - 1) * (1 - 1 / kinds)
    high, low = math.log(same) + 1 / temperature, math.log(other) + apart / temperature
    return max(high, low) + math.log1p(math.exp(-abs(high - low)))


def trained_term(term: Callable[[Tensor], Tensor], bits: int, steps: int, device: torch.device) -> float:
    """The term's mean over the last steps of training nothing else."""
    torch.manual_seed(0)
    encoder = networks.encoder("small-conv", channels=bits, size=SIZE, width=WIDTH)
    network = nn.Sequential(encoder, networks.head("simclr", encoder.width, outputs=WIDTH)).to(device).train()
    feeder = Feeder(binary_channels(IMAGES, bits, SIZE), batch=BATCH, device=device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    values: list[float] = []
    epoch = 0
    while len(values) < steps:
        for batch in feeder.batches(epoch):
            value = term(network(batch.images.float() / 255))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item())
            if len(values) == steps:
                break
        epoch += 1
    mean = statistics.fmean(values[-LAST:])
    if not math.isfinite(mean):
        raise NumbersError(f"the distribution term of {bits} bits became {mean}: try a higher temperature")
    return mean


def enough(cells: list[dict[str, Any]]) -> int:
    """The fewest bits after which less than a tenth of the term's whole fall is left."""
    values = [cell["loss"] for cell in cells]
    whole = values[0] - min(values)
    return next(cell["bits"] for cell in cells if cell["loss"] - min(values) <= 0.1 * whole)


def grouped(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell["term"], []).append(cell)
    return groups


def sentence(cells: list[dict[str, Any]]) -> str:
    parts = [f"{name} has nine tenths of its fall by {enough(group)} bits" for name, group in grouped(cells).items()]
    return "; ".join(parts) + f", of {max(cell['bits'] for cell in cells)} offered."


def plots(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for name, group in grouped(cells).items():
        x = [cell["bits"] for cell in group]
        series = [{"name": "trained", "x": x, "y": [cell["loss"] for cell in group]}]
        if group[0]["equal_clusters"] is not None:
            series.append({"name": "equal clusters (reference)", "x": x, "y": [c["equal_clusters"] for c in group]})
        made.append(
            {"id": f"saturation-{len(made)}", "title": f"{name}: nine tenths of the fall by {enough(group)} bits",
             "note": "The distribution term alone, trained on k binary channels.", "kind": "line",
             "x": {"label": "bits of entropy", "whole": True}, "y": {"label": "loss"}, "series": series}
        )  # fmt: skip
    return made


def table(cells: list[dict[str, Any]]) -> dict[str, Any]:
    groups = grouped(cells)
    bits = sorted({cell["bits"] for cell in cells})
    found = {(cell["term"], cell["bits"]): f"{cell['loss']:.3f}" for cell in cells}
    rows = [[name, *(found[name, k] for k in bits)] for name in groups]
    return {"title": "The distribution term by bits of entropy", "columns": ["term", *map(str, bits)], "rows": rows}
