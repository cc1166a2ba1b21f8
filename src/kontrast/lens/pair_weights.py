"""The weights that a query gives its positives and its negatives (CACR, figure 6).

K positives, J negatives, D width.  Unit rows; the cost of a pair is c = ||x - y||^2 = 2 - 2 s.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.lens.gallery import encode_png, thumbnail

EXTREMES = 4


def positive_weights(query: Tensor, positives: Tensor, t_plus: float = 1.0) -> Tensor:
    """Return w+ = softmax_k(+t+ c_k): the farther a positive, the more strongly it is pulled.

    Args:
        query: The anchor; it and the positives are normalized first.
        positives: Other views of the same image.
        t_plus: The temperature t+; 0 weights all positives equally.

    Shape:
        query: [D], positives: [K,D] -> [K].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.positive_weights(torch.eye(3)[0], torch.eye(3)[1:])
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return torch.softmax(t_plus * costs(query, positives), dim=0)


def negative_weights(query: Tensor, negatives: Tensor, t_minus: float = 2.0) -> Tensor:
    """Return w- = softmax_j(-t- c_j): the nearer a negative, the more strongly it is pushed.

    Args:
        query: The anchor; it and the negatives are normalized first.
        negatives: Views of other images.
        t_minus: The temperature t-; 0 weights all negatives equally.

    Shape:
        query: [D], negatives: [J,D] -> [J].

    Example:
        >>> import torch, kontrast
        >>> kontrast.lens.negative_weights(torch.eye(3)[0], torch.eye(3)[1:])
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return torch.softmax(-t_minus * costs(query, negatives), dim=0)


def costs(query: Tensor, others: Tensor) -> Tensor:
    return 2 - 2 * normalize(others.double(), dim=1) @ normalize(query.double(), dim=0)


def image_as_data_url(image: Any) -> str:
    """Encode an image uint8 [C,H,W] as a small PNG in a data URL, which a page shows without a request."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(thumbnail(image), optimize=True)).decode()}"


def extremes(weights: Tensor) -> tuple[list[int], list[int]]:
    """Return the indices of the four largest weights, largest first, and of the four smallest, smallest first.

    With fewer than eight weights there are fewer of each; no index is in both lists.
    """
    order = weights.argsort(descending=True, stable=True).tolist()
    kept = min(EXTREMES, len(order) // 2) or len(order)
    return order[:kept], order[kept:][::-1][:kept]
