"""The weights that a query gives its positives and its negatives (CACR, figure 6).

K positives, J negatives, D width.  Unit rows; the cost of a pair is c = ||x - y||^2 = 2 - 2 s.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.lens.gallery import thumbnail

EXTREMES = 4


def positive_weights(query: Tensor, positives: Tensor, t_plus: float = 1.0) -> Tensor:
    """w+ [K] = softmax_k(+t+ c_k): the farther a positive, the stronger it is pulled."""
    return torch.softmax(t_plus * costs(query, positives), dim=0)


def negative_weights(query: Tensor, negatives: Tensor, t_minus: float = 2.0) -> Tensor:
    """w- [J] = softmax_j(-t- c_j): the nearer a negative, the stronger it is pushed."""
    return torch.softmax(-t_minus * costs(query, negatives), dim=0)


def costs(query: Tensor, others: Tensor) -> Tensor:
    return 2 - 2 * normalize(others.double(), dim=1) @ normalize(query.double(), dim=0)


def data_address(image: Any) -> str:
    """A picture uint8 [C,H,W] as a small PNG inside an address, which a page shows without a request."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(thumbnail(image).permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def extremes(weights: Tensor) -> tuple[list[int], list[int]]:
    """Positions of the four greatest weights, greatest first, and of as many least, least first; none in both."""
    order = weights.argsort(descending=True, stable=True).tolist()
    kept = min(EXTREMES, len(order) // 2) or len(order)
    return order[:kept], order[kept:][::-1][:kept]
