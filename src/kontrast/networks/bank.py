"""The memory bank of MoCo and JCL: the last M keys, first in, first out.

M rows, B keys of one batch, D width. Writing takes no look at the device, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from kontrast.networks.catalog import whole


class MemoryBank(nn.Module):
    """Starts as random unit rows. `rows` [M,D] and `pointer`, the next row to be written, are saved with the state.

    normalise: keys are put on the unit sphere when they enter (MoCo); False keeps them as they are (JCL's means).
    """

    rows: Tensor
    pointer: Tensor

    def __init__(self, size: int, width: int, normalise: bool = True, seed: int = 0):
        super().__init__()
        noise = torch.randn(
            whole("bank size", size), whole("bank width", width), generator=torch.Generator().manual_seed(seed)
        )
        self.register_buffer("rows", normalize(noise, dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.normalise = normalise

    def forward(self) -> Tensor:
        """A copy of the rows [M,D], safe to differentiate against when keys are added before the backward pass."""
        return self.rows.clone()

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Write keys [B,D] over the oldest rows, round the end; of more than M keys the last M stay."""
        size, count = len(self.rows), len(keys)
        if keys.ndim != 2 or keys.shape[1] != self.rows.shape[1]:
            raise ValueError(f"keys are {list(keys.shape)}, the bank holds rows of {self.rows.shape[1]}")
        late = max(0, count - size)
        keys = keys[late:].detach().to(self.rows.dtype)
        keys = normalize(keys, dim=1) if self.normalise else keys
        places = (self.pointer + late + torch.arange(count - late, device=self.rows.device)) % size
        self.rows.index_copy_(0, places, keys)
        self.pointer.add_(count).remainder_(size)
