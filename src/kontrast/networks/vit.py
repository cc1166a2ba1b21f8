"""Vision transformers (Dosovitskiy et al. 2021), pre-norm, with timm's parameter names.

N images, C channels, P pixels per side of a patch, L = (size/P)^2 patches and a class token, F width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from kontrast.errors import UsageError
from kontrast.networks.catalog import register_sizes
from kontrast.networks.checks import check_choice, check_whole


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(seen.transpose(1, 2).reshape(n, length, width))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class DropPath(nn.Module):
    """Leave out a residual branch for random images in training, and scale up those that stay (stochastic depth)."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        kept = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= self.drop_prob
        return x * (kept / (1 - self.drop_prob)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop_path: float = 0.0, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), MLP(width)
        self.drop_path = nn.Dropout(dropout) if dropout else DropPath(drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), mask))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Patches(nn.Module):
    """Map each of the patches, which don't overlap, by one linear layer: [N,C,h,w] -> [N,L,F]."""

    def __init__(self, channels: int, patch: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """A vision transformer; the representation is the class token after the last norm.

    vit-tiny, vit-small and vit-base have 12 blocks of width 192, 384 and 768 with 3, 6 and 12 heads; vit-small-moco is
    MoCo v3's vit-small with 12 heads. Images of another size than the one it was built for (the local views of
    multi-crop) get interpolated positions.

    Args:
        patch: pixels per side of a patch, which must divide the size. Default: 4 up to 64 pixels, else 16.
        positions: "sin-cos" (fixed, MoCo v3) or "learned".
        frozen_patches: keep the random patch projection, which stabilizes training (MoCo v3, section 4.2).
        drop_path: the share of images for which the last block's branches are left out in training; it grows linearly
            from 0 at the first block. A teacher leaves nothing out.
    """

    def __init__(
        self, width: int, depth: int, heads: int, *, channels: int = 3, size: int = 32,
        patch: int | None = None, positions: str = "sin-cos", frozen_patches: bool = False,
        drop_path: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        patch = check_whole("patch", patch) if patch is not None else (4 if size <= 64 else 16)
        check_whole("size", size, multiple=patch)
        check_choice("positions", positions, ("sin-cos", "learned"))
        if isinstance(drop_path, bool) or not isinstance(drop_path, int | float) or not 0 <= drop_path < 1:
            raise UsageError(f"drop_path = {drop_path!r}: give a number from 0 to below 1")
        self.width, self.patch = width, patch
        self.patch_embed = Patches(channels, patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        place = torch.cat([torch.zeros(1, width), sine_cosine(size // patch, width)])[None]
        if positions == "learned":
            place = 0.02 * torch.randn_like(place)
        self.pos_embed = nn.Parameter(place, requires_grad=positions == "learned")
        shares = [drop_path * number / max(depth - 1, 1) for number in range(depth)]
        self.blocks = nn.Sequential(*[Block(width, heads, share) for share in shares])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.initialize()
        if frozen_patches:
            self.patch_embed.requires_grad_(False)

    def initialize(self) -> None:
        """Draw Xavier's uniform weights as MoCo v3 does: q, k and v are three matrices, the patch projection is one."""
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)
        bound = math.sqrt(6 / (2 * self.width))
        for m in self.modules():
            if isinstance(m, Attention):
                nn.init.uniform_(m.qkv.weight, -bound, bound)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))
        nn.init.zeros_(self.patch_embed.get_parameter("proj.bias"))
        nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] // self.patch, x.shape[3] // self.patch
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions(height, width)
        return self.norm(self.blocks(x)[:, 0])

    def positions(self, height: int, width: int) -> Tensor:
        """Return the positions of a grid of patches, interpolated if it is not the grid of the built size."""
        side = math.isqrt(self.pos_embed.shape[1] - 1)
        if (height, width) == (side, side):
            return self.pos_embed
        grid = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, (height, width), mode="bicubic", align_corners=False)
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)


def sine_cosine(side: int, width: int) -> Tensor:
    """Return fixed positions [side^2, width]: a quarter each of sin and cos of the column, sin and cos of the row."""
    assert width % 4 == 0, width
    rates = 10_000.0 ** -(torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * rates  # [side, width/4]
    columns, rows = angles.repeat(side, 1), angles.repeat_interleave(side, 0)
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1)


SIZES = {"vit-tiny": (192, 12, 3), "vit-small": (384, 12, 6), "vit-base": (768, 12, 12)}
register_sizes(ViT, SIZES | {"vit-small-moco": (384, 12, 12)})
