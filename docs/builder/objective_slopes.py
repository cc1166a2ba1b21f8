"""How hard an objective pulls a positive and pushes a negative, by their cosine to the anchor, computed by autograd.

V views, B images, D width, K prototypes, classes or rows of a bank.  z [V,B,D], others [K,D]. The anchor is the first
view of the first image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.objectives import OBJECTIVES, Objective, objective

V, K = 2, 16
COSINES = [n / 10 for n in range(-9, 10)]
DRAWS = 2
WITHIN_A_VIEW = {"koleo", "align-uniform"}
"""Objectives that compare a view of an image with the same view of other images only."""
REPELLED_IN_OTHER_ROWS = {"nnclr"}
"""Objectives whose anchor is repelled by the rows of other images, so that its own row is not enough."""

WHITENED = {"sim-trace", "w-mse"}
"""Objectives whose loss per anchor depends on the statistics of the whole batch."""


def slopes(name: str, which: str) -> list[float]:
    """Return d loss / d cosine of a pair at each of COSINES, the mean over draws of the other rows.

    A loss per anchor is that of the anchor: its gradient is a sum of the other rows, and the slope is the factor of one
    of them. A loss of the whole batch is multiplied by the number of anchors, and the row itself is turned.

    Args:
        name: A registered objective.
        which: `positive`, the anchor's other view, or `negative`: another image, prototype or class.
    """
    one = slope_per_anchor if has_rows(name) else slope_of_batch
    return [sum(one(name, which, cosine, seed) for seed in range(DRAWS)) / DRAWS for cosine in COSINES]


def has_rows(name: str) -> bool:
    """Tell whether an objective has a loss per anchor that is a function of the anchor's similarities."""
    if name in WHITENED:
        return False
    z, others = draw_rows(8, 16, 0)
    try:
        build(name, 8, others).rows(z, **extra_inputs(name, z, others))
    except ValueError:
        return False
    return True


def slope_per_anchor(name: str, which: str, cosine: float, seed: int) -> float:
    """Return the factor of a row in the gradient of the anchor's loss; there are fewer rows than dimensions."""
    kind = OBJECTIVES[name]
    z, others = draw_rows(32, 128, seed)
    given = extra_inputs(name, z, others.clone())
    anchor = z[0, 0]
    learned = kind.needs_prototypes or kind.needs_labels
    if learned or (name in REPELLED_IN_OTHER_ROWS) or (kind.needs_bank and which == "negative"):
        rows, place = others, (int(which == "negative"),)
    else:
        rows, place = z, ((1, 0) if which == "positive" else (1 - (name in WITHIN_A_VIEW), 1))
    rows[place] = turned(anchor, rows[place], cosine)
    moved = rows[place].clone()
    inputs = given | ({"prototypes": others} if kind.needs_prototypes else {})
    if kind.needs_bank or name in REPELLED_IN_OTHER_ROWS:
        inputs["bank"] = others
    z.requires_grad_()
    built = build(name, 32, others)
    losses = built.rows(z, **inputs)
    loss = losses.sum() if name in REPELLED_IN_OTHER_ROWS else losses[0, 0]
    gradient = torch.autograd.grad(loss, z)[0][0, 0]
    everything = torch.cat([z.detach().flatten(0, 1), others])
    return float(gradient @ dual(everything, moved))


def dual(rows: Tensor, row: Tensor) -> Tensor:
    """Return the direction whose inner product is 1 with this row and 0 with all others."""
    is_row = (rows == row).all(-1).to(rows)
    return torch.linalg.lstsq(rows, is_row[:, None], driver="gelsd").solution[:, 0]


def slope_of_batch(name: str, which: str, cosine: float, seed: int) -> float:
    """Return the slope of the loss of the batch as a row turns; rows turn both ways, so that their own pairs cancel."""
    place = (1, 0) if which == "positive" else (1 - (name in WITHIN_A_VIEW), 1)
    total = 0.0
    for way in (1.0, -1.0):
        z, others = draw_rows(64, 16, seed)
        s = torch.tensor(cosine, dtype=torch.float64, requires_grad=True)
        changed = z.clone()
        changed[place] = turned(z[0, 0], z[place], s, way)
        if not hasattr(built := build(name, 64, others), "normalize") or not built.normalize:
            changed = changed * changed.shape[-1] ** 0.5  # coordinates of variance one
        loss = built(changed, **extra_inputs(name, z, others)) * V * 64
        total += float(torch.autograd.grad(loss, s)[0]) / 2
    return total


def draw_rows(images: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return unit rows of the views, and of the prototypes, classes or bank."""
    drawn = torch.randn(V * images + K, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = normalize(drawn, dim=-1)
    return rows[: V * images].view(V, images, width).clone(), rows[V * images :].clone()


def turned(anchor: Tensor, row: Tensor, cosine: float | Tensor, way: float = 1.0) -> Tensor:
    """Turn a row in its plane with the anchor until they have this cosine."""
    across = normalize(row - (row @ anchor) * anchor, dim=-1)
    return cosine * anchor + way * (1 - cosine**2) ** 0.5 * across


def build(name: str, images: int, others: Tensor) -> Objective:
    """Build an objective at its defaults, with the sizes that fit the rows; its classes are `others`."""
    sizes = {"prototypes": K, "images": images, "classes": K, "width": others.shape[-1]}
    arguments = {key: size for key, size in sizes.items() if key in OBJECTIVES.arguments(name)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = objective(name, **arguments).to(torch.float64)
    if OBJECTIVES[name].needs_labels:
        built.classifier.load_state_dict({"weight": others, "bias": others.new_zeros(K)})
    return built


def extra_inputs(name: str, z: Tensor, others: Tensor) -> dict[str, Any]:
    """Return what an objective needs besides z.

    The keys of the first image are assigned to the first prototype or row of the bank and those of the second image to
    the second, and no others are.
    """
    kind, images = OBJECTIVES[name], z.shape[1]
    given: dict[str, Any] = {}
    if kind.needs_prototypes or name in REPELLED_IN_OTHER_ROWS:
        nearest = [0, 1, *(2 + image % (K - 2) for image in range(images - 2))]
        given["keys"] = others[nearest].expand(V, -1, -1).clone()
    if kind.needs_prototypes:
        given |= {"prototypes": others, "key_prototypes": others.clone()}
    if kind.needs_indices:
        given["indices"] = torch.arange(images)
    if kind.needs_bank:
        given["bank"] = others
    if kind.needs_labels:
        given["labels"] = torch.arange(images) % K
    return given
