"""The saturation study (GCL, appendix B): how far the distribution term falls with k bits of entropy.

Images are k constant binary channels without augmentation, and nothing but the term is trained.
B images, D width of the projection z [B,D].
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from kontrast import networks
from kontrast.data import Feeder
from kontrast.data.competing_features import binary_channels
from kontrast.errors import NumbersError, UsageError
from kontrast.files import disk_faults, read_json
from kontrast.kernels import row_statistics
from kontrast.objectives import Objective, objective
from kontrast.registry import nearest
from kontrast.studies.cells import Record, Say, group_by
from kontrast.studies.study_result import AuditResult
from kontrast.training.device import choose_device

BITS = (1, 2, 3, 4, 6, 8, 10)
STEPS, IMAGES, BATCH, SIZE, WIDTH = 150, 4096, 128, 32, 64
ENCODERS = ("small-conv", "resnet-18")
MAX_BITS = 64
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # outside, divided similarities are no longer distinct in float32
LAST = 20  # the loss is the mean over this many last steps
Term = Callable[[Tensor], Tensor]


def measure_saturation(
    *,
    out: str | os.PathLike[str] | None = None,
    bits: Sequence[int] | None = None,
    temperatures: Sequence[float] = (0.1, 1.0),
    batches: Sequence[int] = (BATCH,),
    encoder: str = "small-conv",
    epochs: int = 0,
    steps: int = 0,
    device: str = "auto",
    say: Say = print,
) -> AuditResult:
    """Train the distribution terms of NT-Xent and SWD alone on images of k random bits (GCL, appendix B).

    The paper's figure B.1 has encoder="resnet-18", epochs=400 and several batch sizes. Call it again with the same
    encoder and training length to resume: finished trainings are read, not repeated.

    Args:
        out: the folder for audit.json; default: runs/saturation.
        bits: the numbers of bits k; default: 1 to 10.
        temperatures: temperatures of NT-Xent's term; default: 0.1 and 1.
        batches: batch sizes; default: 128.
        encoder: small-conv (default) or resnet-18.
        epochs: passes over 4,096 images per term, k and batch size; default (0): as many as `steps` are.
        steps: training steps instead of epochs; default (0): 150 if `epochs` is 0 too.
        device: auto, cpu or cuda.
        say: receives progress lines; default: print.
    """
    folder = Path(out) if out is not None else Path("runs") / "saturation"
    on, chosen, sizes = choose_device(device), sorted(set(bits or BITS)), sorted(set(batches))
    check_arguments(chosen, temperatures, sizes, encoder, epochs, steps)
    settings: Record = {
        "encoder": encoder,
        "epochs": epochs,
        "steps": 0 if epochs else steps or STEPS,
        "images": IMAGES,
    }
    settings["size"] = SIZE
    terms: dict[str, tuple[Term, float | None]] = {
        f"log-sum-exp, temperature {t:g}": (partial(log_sum_exp, temperature=t), t) for t in temperatures
    }
    terms["sliced Wasserstein, hypersphere"] = (partial(wasserstein, objective("swd", distribution_weight=1.0)), None)
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / "audit.json"
    found = finished_cells(file, settings)
    for (name, (term, temperature)), batch, k in itertools.product(terms.items(), sizes, chosen):
        if (name, batch, k) not in found:
            count = epochs * (IMAGES // batch) if epochs else settings["steps"]
            value = trained_term(term, k, count, on, encoder=encoder, batch=batch)
            best = None if temperature is None else simplex_value(k, temperature, batch)
            found[name, batch, k] = {"term": name, "batch": batch, "bits": k, "loss": value, "equal_clusters": best}
            save(file, found.values(), settings)
            say(f"{name}, batch {batch}, {k} bits: {value:.3f}")
    return save(file, found.values(), settings)


def save(file: Path, found: Iterable[Record], settings: Record) -> AuditResult:
    cells = sorted(found, key=itemgetter("term", "batch", "bits"))
    tree = {"version": 1, "kind": "audit", "title": "When is the distribution term saturated?", "runs": []}
    tree |= {"cells": cells, "verdict": verdict(cells), "plots": plots(cells), "tables": [table(cells)]}
    return AuditResult.save(file, {**tree, "settings": settings})


def finished_cells(file: Path, settings: Record) -> dict[tuple[str, int, int], Record]:
    """The trainings that the folder has already, by term, batch size and bits; none if their settings were others."""
    tree = read_json(file) if file.is_file() else {}
    if not isinstance(tree, dict) or tree.get("settings") != settings:
        return {}
    return {(cell["term"], cell["batch"], cell["bits"]): cell for cell in tree["cells"]}


def check_arguments(
    bits: Sequence[int], temperatures: Sequence[float], batches: Sequence[int], encoder: str, epochs: int, steps: int
) -> None:
    limits: list[tuple[str, float, float, float]] = [("--steps", steps, 0, math.inf), ("--epochs", epochs, 0, math.inf)]
    limits += [("--bits", k, 1, MAX_BITS) for k in bits]
    limits += [("--temperatures", t, MIN_TEMPERATURE, MAX_TEMPERATURE) for t in temperatures]
    limits += [("--batches", batch, 4, IMAGES) for batch in batches]
    for option, value, low, high in limits:
        if not low <= value <= high:  # refuses NaN as well
            raise UsageError(f"{option} {value:g} with --saturation: allowed are {low:g} to {high:g}")
    if encoder not in ENCODERS:
        raise UsageError(f"--encoder {encoder} with --saturation: {nearest(encoder, ENCODERS)}")
    if epochs and steps:
        raise UsageError("--epochs and --steps with --saturation: give one of them")


def wasserstein(swd: Objective, z: Tensor) -> Tensor:
    """SWD's distribution term: the distance of all rows, passed as two views, to as many draws of the prior."""
    return swd.terms(*z.chunk(2))["repulsion"]


def log_sum_exp(z: Tensor, temperature: float) -> Tensor:
    """mean_i log sum_{j != i} exp(<z_i, z_j>/tau): NT-Xent's distribution term."""
    ids = torch.arange(len(z), device=z.device)
    return row_statistics(normalize(z, dim=1), None, scale=1 / temperature, query_ids=ids).lse.mean()


def simplex_value(bits: int, temperature: float, batch: int = BATCH) -> float:
    """The term if the 2^k kinds of images are the corners of a simplex, or orthogonal if D is too small for that.

    It is a reference, not a proven optimum. It is computed in logarithms because exp(1/tau) overflows at low
    temperatures.
    """
    kinds = 2.0**bits
    apart = -1 / (kinds - 1) if kinds <= WIDTH + 1 else 0.0
    same, other = (batch - 1) / kinds, (batch - 1) * (1 - 1 / kinds)
    high, low = math.log(same) + 1 / temperature, math.log(other) + apart / temperature
    return max(high, low) + math.log1p(math.exp(-abs(high - low)))


def trained_term(
    term: Term, bits: int, steps: int, device: torch.device, *, encoder: str = "small-conv", batch: int = BATCH
) -> float:
    """Train the term alone and return its mean over the last steps."""
    torch.manual_seed(0)
    shape = {"stem": "cifar"} if encoder == "resnet-18" else {"width": WIDTH}
    trunk = networks.encoder(encoder, channels=bits, size=SIZE, **shape)
    network = nn.Sequential(trunk, networks.head("simclr", trunk.width, layers=2, outputs=WIDTH)).to(device).train()
    feeder = Feeder(binary_channels(IMAGES, bits, SIZE), batch=batch, device=device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    values: list[Tensor] = []
    batches = itertools.chain.from_iterable(map(feeder.batches, itertools.count()))
    for drawn in itertools.islice(batches, steps):
        value = term(network(drawn.images.float() / 255))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.detach())
    mean = torch.stack(values[-LAST:]).mean().item()  # read at the end, so that no step waits for the device
    if not math.isfinite(mean):
        raise NumbersError(f"the distribution term with {bits} bits became {mean}: try a higher temperature")
    return mean


def saturation_point(cells: list[Record]) -> int:
    """The smallest number of bits that gives 90% of the largest decrease."""
    values = [cell["loss"] for cell in cells]
    decrease = values[0] - min(values)
    return next(cell["bits"] for cell in cells if cell["loss"] - min(values) <= 0.1 * decrease)


def verdict(cells: list[Record]) -> str:
    points = {name: saturation_point(group) for name, group in group_by(cells, "term", "batch").items()}
    reached = "; ".join(f"{term}, batch {batch}: {bits}" for (term, batch), bits in points.items())
    return f"Bits at which each term reaches 90% of its decrease, out of {max(c['bits'] for c in cells)}: {reached}."


def plots(cells: list[Record]) -> list[Record]:
    """One plot per term, with one line per batch size and the reference of each."""
    made: list[Record] = []
    for name, group in group_by(cells, "term").items():
        series = []
        for batch, same in group_by(group, "batch").items():
            x = [cell["bits"] for cell in same]
            series.append({"name": f"trained, batch {batch}", "x": x, "y": [cell["loss"] for cell in same]})
            if same[0]["equal_clusters"] is not None:
                best = [cell["equal_clusters"] for cell in same]
                series.append({"name": f"equal clusters (reference), batch {batch}", "x": x, "y": best})
        made.append(
            {"id": f"saturation-{len(made)}", "title": f"{name} by bits of entropy",
             "note": "The distribution term, trained alone on k binary channels.", "kind": "line",
             "x": {"label": "bits of entropy", "whole": True}, "y": {"label": "loss"}, "series": series}
        )  # fmt: skip
    return made


def table(cells: list[Record]) -> dict[str, Any]:
    bits = sorted({cell["bits"] for cell in cells})
    rows = []
    for (name, batch), group in group_by(cells, "term", "batch").items():
        found = {cell["bits"]: f"{cell['loss']:.3f}" for cell in group}
        rows.append([name, str(batch), *(found.get(k, "") for k in bits)])
    columns = ["term", "batch", *map(str, bits)]
    return {"title": "The distribution term by bits of entropy", "columns": columns, "rows": rows}
