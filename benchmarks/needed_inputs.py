"""What an objective needs besides z, at the size of its paper: a bank, prototypes, labels, indices of images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.objectives import Objective


def needed_inputs(loss: Objective, pairs: int, width: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return the inputs without which a call is refused; nothing for most objectives."""
    given = {}
    if loss.needs_prototypes:
        count = getattr(loss, "prototypes", 3000)  # DINO has its number as an argument, and SwAV uses 3,000
        given["prototypes"] = normalize(torch.randn(count, width, device=device), dim=-1).requires_grad_()
    if loss.needs_bank:
        given["bank"] = normalize(torch.randn(65536, width, device=device), dim=-1)
    if loss.needs_labels:
        given["labels"] = torch.arange(pairs, device=device) % 10
    if loss.needs_indices:
        given["indices"] = torch.arange(pairs, device=device)
    return given
