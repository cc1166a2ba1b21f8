"""Color jitter, grayscale and solarize on planes, each as in torchvision's functional transforms.

A picture is a list of planes [n, h, w] with values in [0, 1]: one (gray), three (red, green, blue) or any other number,
which have no hue and no saturation. n views, each with its own factors and its own order of the four operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

RED, GREEN, BLUE = 0.2989, 0.587, 0.114
HUE_OPERATION = 3


def luma(planes: list[Tensor]) -> Tensor:
    """Return the grayscale picture [n, h, w]; without colors, the mean of the planes."""
    if len(planes) == 1:
        return planes[0]
    if len(planes) != 3:
        return torch.stack(planes).mean(0)
    return (planes[0] * RED).add_(planes[1], alpha=GREEN).add_(planes[2], alpha=BLUE)


def mean(plane: Tensor) -> Tensor:
    """Return the mean per view, [n], in two steps: torch would split the one sum of a single view among threads, which
    would change its bits."""
    n, height, width = plane.shape
    parts = plane.reshape(n, 2, -1) if height * width % 2 == 0 else plane
    return parts.sum(-1).sum(-1) / (height * width)


def turn_hue(planes: list[Tensor], turn: Tensor) -> list[Tensor]:
    """Turn the hue by `turn` [n] (1 is the whole circle) and keep value and saturation.

    With v the largest channel and c its distance to the smallest, a channel of the color with this hue is
    v - c clamp(2 - 6 d, 0, 1), d the hue's distance on the circle to the channel's complement (red's 1/2, green's 5/6,
    blue's 1/6). This form has no sectors and no branches, because torch's `where`, `eq` and `remainder` are many times
    slower on a CPU.
    """
    red, green, blue = planes
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    inverse = (chroma * 6).clamp_(min=1e-12).reciprocal_()
    hue_red, hue_green = (green - blue).mul_(inverse), (blue - red).mul_(inverse).add_(1 / 3)
    hue_blue = (red - green).mul_(inverse).add_(2 / 3)
    not_red, not_green = ((value - other).mul_(1e30).clamp_(max=1) for other in (red, green))
    hue = torch.lerp(hue_red, torch.lerp(hue_green, hue_blue, not_green), not_red).add_(turn[:, None, None])
    turned = []
    for complement in (1 / 2, 5 / 6, 1 / 6):
        distance = hue - complement
        distance = distance.sub_(distance.round()).abs_()
        turned.append(torch.addcmul(value, chroma, distance.mul_(-6).add_(2).clamp_(0, 1), value=-1))
    return turned


def blend(planes: list[Tensor], operation: Tensor, factors: Tensor) -> list[Tensor]:
    """Change brightness (0), contrast (1) or saturation (2) by `operation` [n]: factor x + (1 - factor) y, clamped.

    y is black, the mean of the grayscale picture, or the grayscale picture. factors: [n, 3], one for each operation.
    Overwrites the planes.
    """
    factor = factors.gather(1, operation[:, None]).squeeze(1)
    gray = luma(planes)
    level = torch.where(operation == 1, (1 - factor) * mean(gray), 0.0)
    share = torch.where(operation == 2, 1 - factor, 0.0)
    if len(planes) != 3:  # saturation does not change a picture without colors
        factor, base = factor + share, level[:, None, None]
    else:
        base = gray.mul_(share[:, None, None]).add_(level[:, None, None])
    return [plane.mul_(factor[:, None, None]).add_(base).clamp_(0, 1) for plane in planes]


def jitter(planes: list[Tensor], factors: Tensor, turn: Tensor, operations: Tensor) -> list[Tensor]:
    """Apply torchvision's ColorJitter.

    factors [n, 3]: brightness, contrast, saturation. turn [n]: hue. operations int64 [n, 4]: the order of each view.
    The three blends of a view run in three rounds; its hue is turned before, between or after them.
    """
    hue_at = (operations == HUE_OPERATION).mul(torch.arange(4, device=operations.device)).sum(1)
    places = torch.arange(3, device=operations.device)
    blends = operations.gather(1, places + (places >= hue_at[:, None]))
    for step in range(4):
        if len(planes) == 3:
            planes = apply_where(planes, (hue_at == step) & (turn != 0), turn_hue, turn)
        if step < 3:
            planes = blend(planes, blends[:, step], factors)
    return planes


def apply_where(planes: list[Tensor], mask: Tensor, change, *parameters: Tensor) -> list[Tensor]:
    """Apply change(planes, *parameters) to the views in `mask` [n].

    On the CPU only those are computed. Other devices compute all views, because selecting some would wait for the mask.
    """
    if mask.device.type != "cpu":
        changed = change(planes, *parameters)
        return [torch.where(mask[:, None, None], new, old) for new, old in zip(changed, planes)]
    chosen = mask.nonzero().squeeze(1)
    if len(chosen) == 0:
        return planes
    changed = change([plane.index_select(0, chosen) for plane in planes], *(p[chosen] for p in parameters))
    if len(chosen) == len(mask):
        return changed
    return [plane.index_copy_(0, chosen, new) for plane, new in zip(planes, changed)]


def to_gray(planes: list[Tensor]) -> list[Tensor]:
    """Return the grayscale picture in every plane."""
    return [luma(planes)] * len(planes)


def solarize(planes: list[Tensor]) -> list[Tensor]:
    """Invert values from one half (128 of 255) upwards."""
    return [torch.where(plane >= 0.5, 1 - plane, plane) for plane in planes]
