"""The memory bank of MoCo, JCL and SwAV: the last M keys, first in, first out. B keys per batch, D width, Q queues."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kontrast.networks.checks import check_whole


class MemoryBank(nn.Module):
    """A queue of earlier keys that serve as negatives; calling it returns its rows.

    It starts with random unit rows; separate queues start with zeros, which SwAV leaves out. `rows` [M,D] or [Q,M,D]
    and `pointer`, the next row to overwrite, are saved in the state dict. No operation waits for the device, so that
    `enqueue` can be captured in a CUDA graph.

    Args:
        size: number of rows M.
        width: width D of a key.
        normalize: scale keys to unit length when they are added (MoCo); False keeps them as they are (JCL's means).
        seed: seed of the random rows.
        queues: a number Q of separate queues of M rows each, for example one per view; 0 for a plain bank.

    Shape:
        - output: [M,D], or [Q,M,D] with queues

    Example:
        >>> bank = MemoryBank(size=4, width=3)
        >>> bank.enqueue(torch.ones(2, 3))
        >>> bank().shape, int(bank.pointer)
        (torch.Size([4, 3]), 2)
    """

    rows: Tensor
    pointer: Tensor

    def __init__(self, size: int, width: int, normalize: bool = True, seed: int = 0, queues: int = 0):
        super().__init__()
        shape = check_whole("bank size", size), check_whole("bank width", width)
        if queues:
            rows = torch.zeros(queues, *shape)
        else:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            rows = functional.normalize(noise, dim=1)
        self.register_buffer("rows", rows)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.normalize = normalize

    def forward(self) -> Tensor:
        """Return a copy of the rows, so that keys may be added before the backward pass."""
        return self.rows.clone()

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest rows with keys [B,D] or [Q,B,D]. If there are more than M keys, the last M remain."""
        size, count = self.rows.shape[-2], keys.shape[-2]
        skipped = max(0, count - size)
        keys = keys[..., skipped:, :].detach().to(self.rows.dtype)
        keys = functional.normalize(keys, dim=-1) if self.normalize else keys
        places = (self.pointer + skipped + torch.arange(count - skipped, device=self.rows.device)) % size
        self.rows.index_copy_(-2, places, keys)
        self.pointer.add_(count).remainder_(size)
