r"""Empirical characteristic functions of projected rows, and their distance to that of a normal distribution.

V views, n rows of this rank, D width, S directions, K knots t_k = k dt, N rows of all ranks.  rows [V,n,D], directions
[S,D], x = <row, direction> [V,n,S], sums of cos(t x) and sin(t x) [V,S,K].

The definition stores V n S K numbers. The operation computes x for a chunk of rows at a time, in the forward pass and
again in the backward pass, and steps from one knot to the next by a multiplication: exp(i t_k x) = exp(i dt x)^k.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import accumulation_type, in_torch_func
from kontrast.kernels.row_statistics import as_constant

CHUNK = {"cpu": 2**16, "cuda": 2**24}
"""How many numbers x are held at a time: few on a CPU, where they stay in its cache."""


def characteristic_sums(
    rows: Tensor, directions: Tensor, *, knots: int, largest: float, implementation: str = "auto"
) -> Tensor:
    r"""Sum the cosines and sines of each view's projections at equally spaced knots, with exact gradients to the rows.

        sums_vsk = (sum_i cos(t_k x_vis), sum_i sin(t_k x_vis)),   x_vis = <rows_vi, directions_s>,   t_0 = 0

    Divided by the number of rows, they are the real and imaginary part of the empirical characteristic function. The
    directions get no gradient.

    Args:
        rows: rows of each view, float64 or float32.
        directions: rows of the same type, usually of length one.
        knots: K, at least 2.
        largest: the last knot.
        implementation: `dense` (the definition), `tiled` (chunks of rows), or `auto`.

    Shape:
        rows [V,n,D], directions [S,D]; the sums [2,V,S,K], cosines first.

    Example:
        >>> characteristic_sums(torch.zeros(1, 3, 2), torch.eye(2), knots=2, largest=1.0)[:, 0, 0]
        tensor([[3., 3.],
                [0., 0.]])
    """
    step = as_constant("largest", largest) / (knots - 1)
    if implementation == "dense" or (implementation == "auto" and in_torch_func()):
        return dense_sums(rows, directions.detach(), knots, step)[0]
    return operation(rows, directions.detach(), knots, step)[0]


def dense_sums(rows: Tensor, directions: Tensor, knots: int, step: float) -> tuple[Tensor]:
    """Return the sums [2,V,S,K] by definition."""
    angles = (rows @ directions.T)[..., None] * (step * torch.arange(knots, dtype=rows.dtype, device=rows.device))
    return (torch.stack([angles.cos().sum(1), angles.sin().sum(1)]),)


def phases(rows: Tensor, directions: Tensor, step: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield exp(i dt x) of each chunk of rows, complex [V,rows,S]."""
    held = CHUNK["cpu" if rows.device.type == "cpu" else "cuda"]
    size = max(1, held // (rows.shape[0] * directions.shape[0]))
    scaled = step * directions.T
    for start in range(0, rows.shape[1], size):
        chunk = slice(start, min(start + size, rows.shape[1]))
        angles = rows[:, chunk] @ scaled
        yield chunk, torch.polar(torch.ones_like(angles), angles)


def forward(rows: Tensor, directions: Tensor, knots: int, step: float) -> tuple[Tensor]:
    """Return the sums [2,V,S,K], chunk by chunk."""
    V, n, _ = rows.shape
    sums = torch.zeros(knots, V, directions.shape[0], dtype=rows.dtype.to_complex(), device=rows.device)
    for _, phase in phases(rows, directions, step):
        power = phase.clone()
        for k in range(1, knots):
            sums[k] += power.sum(1)
            if k < knots - 1:
                power *= phase
    sums[0] = n
    return (torch.view_as_real(sums).permute(3, 1, 2, 0).contiguous(),)


def backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    rows: Tensor, directions: Tensor, knots: int, step: float,
) -> list[Tensor]:  # fmt: skip
    r"""Return the gradient of the rows, for gradients c and s of the sums of cosines and sines.

    dx_i = sum_k t_k (s_k cos(t_k x_i) - c_k sin(t_k x_i)) = Re sum_k t_k (s_k + i c_k) exp(i dt x_i)^k

    The polynomial is computed by Horner's rule.
    """
    incoming = grads[0]
    assert incoming is not None
    steps = step * torch.arange(knots, dtype=rows.dtype, device=rows.device)
    cosines, sines = (incoming * steps).unbind()
    factors = torch.complex(sines, cosines)[:, None].unbind(-1)  # K times [V,1,S]
    found = torch.empty_like(rows)
    for chunk, phase in phases(rows, directions, step):
        total = phase * factors[-1]
        for k in range(knots - 2, 0, -1):
            total.add_(factors[k]).mul_(phase)
        found[:, chunk] = total.real @ directions
    return [found]


def shapes(rows: Tensor, directions: Tensor, knots: int, step: float) -> tuple[Tensor]:
    return (rows.new_empty(2, rows.shape[0], directions.shape[0], knots, dtype=accumulation_type(rows)),)


operation = Operation(
    "characteristic_sums", "Tensor rows, Tensor directions, int knots, float step", 1,
    forward=forward, backward=backward, definition=dense_sums, shapes=shapes,
)  # fmt: skip


def distance_to_normal(sums: Tensor, count: int, largest: float) -> Tensor:
    r"""Return the Epps-Pulley statistic of each direction [V,S], from the sums over all `count` rows.

        T = N sum_k w_k ((mean cos(t_k x) - phi(t_k))^2 + (mean sin(t_k x))^2),   phi(t) = exp(-t^2/2)

    The weights w are twice phi times those of the trapezoidal rule on [0, largest], because the integrand is even.
    """
    knots = sums.shape[-1]
    t = torch.linspace(0, largest, knots, dtype=sums.dtype, device=sums.device)
    phi = torch.exp(-t.square() / 2)
    weights = 2 * largest / (knots - 1) * torch.cat([phi[:1] / 2, phi[1:-1], phi[-1:] / 2])
    cosines, sines = (sums / count).unbind()
    return count * ((cosines - phi).square() + sines.square()) @ weights
