"""The inputs that an objective needs or takes besides z, from a fixed seed and in z's type.

V views, B images, W views of keys, M rows of the bank, K prototypes, D width.  z [V,B,D] or [B,D], keys [W,B,D], bank
[M,D] or [W,M,D], prototypes [K,D], indices and labels [B].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.objectives import OBJECTIVES, Objective, objective

K, M, W = 7, 9, 2
CLASSES = 4
SIZES = {"prototypes": K, "images": 4096, "classes": CLASSES}
"""Arguments of objectives that must fit the inputs below."""
DETACHED_KEYS = {"swav", "dino", "nnclr"}
"""Objectives that use their own projections, detached, if no keys are given: only with keys is their gradient the
derivative of the value. `possible_inputs(name, z)[name in DETACHED_KEYS :]` are the calls for which it is."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_objective(name: str, z: Tensor | None = None, **arguments: Any) -> Objective:
    """Return the objective for rows like z and of the size of the inputs below, with the same parameters each time."""
    known = SIZES | ({} if z is None else {"width": z.shape[-1]})
    sizes = {key: size for key, size in known.items() if key in OBJECTIVES.arguments(name)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return objective(name, **sizes | arguments)


def extra_inputs(name: str, z: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return what the objective needs besides z; nothing for most of them."""
    given: dict[str, Any] = {}
    if OBJECTIVES[name].needs_prototypes:
        given["prototypes"] = draw_prototypes(z, seed + 20)
    if OBJECTIVES[name].needs_bank:
        given["bank"] = draw_bank(name, z, seed + 9)
    if OBJECTIVES[name].needs_indices:
        order = torch.randperm(3 * z.shape[-2], generator=torch.Generator().manual_seed(seed))
        given["indices"] = order[: z.shape[-2]].to(z.device)
    if OBJECTIVES[name].needs_labels:
        given["labels"] = (torch.arange(z.shape[-2], device=z.device) + seed) % CLASSES
    return given


def possible_inputs(name: str, z: Tensor, seed: int = 0) -> list[dict[str, Any]]:
    """Return the ways to call an objective: with what it needs, with keys, and with keys and a bank if it takes one."""
    needed = extra_inputs(name, z, seed)
    if "labels" in needed:  # which don't go with keys
        return [needed]
    with_keys = needed | {"keys": draw(W, *z.shape[-2:], seed=seed + 8).to(z)}
    if "prototypes" in needed:
        with_keys["key_prototypes"] = draw_prototypes(z, seed + 21)
    calls = [needed, with_keys]
    return [*calls, with_keys | {"bank": draw_bank(name, z, seed + 9)}] if OBJECTIVES[name].takes_bank else calls


def draw_prototypes(z: Tensor, seed: int) -> Tensor:
    """Return nearly unit rows. They are rounded to bfloat16, so that they are the same numbers in every type."""
    return normalize(draw(K, z.shape[-1], seed=seed), dim=-1).bfloat16().to(z)


def draw_bank(name: str, z: Tensor, seed: int) -> Tensor:
    """Return unit rows [M,D], or [W,M,D] for an objective with one queue per view."""
    rows = normalize(draw(M, z.shape[-1], seed=seed), dim=-1)
    if OBJECTIVES[name].bank_per_view:
        rows = torch.stack([rows, *(rows.roll(n, 0).roll(n, 1) for n in range(1, W))])
    return rows.to(z)


def change_rows(given: dict[str, Any], change: Any, *names: str) -> dict[str, Any]:
    """Return the inputs with these names, or all floating point tensors, changed by a function."""
    chosen = names or [k for k, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()]
    return {k: change(x) if k in chosen else x for k, x in given.items()}
