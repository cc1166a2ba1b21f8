"""`Views`: one call makes all views of a batch, uint8 images [B, C, H, W] to floats [V, B, C, h, w].

V views, L local views, B images, C channels of which the first 1 or 3 are the picture, H x W source, h = w = size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.views import reference
from kontrast.views.draws import Draws, draw_rows, table
from kontrast.views.policies import Policy, policies

IMPLEMENTATIONS = ("auto", "torch", "triton")


class Views:
    """Makes `count` views of `size` pixels by a policy of `POLICIES`; fields of the policy can be overridden by name.

    `views(images, keys)` is [V, B, C, size, size]. With local_count > 0 (multi-crop) it is a pair: the global views and
    [L, B, C, local_size, local_size] local views, whose crops take `local_scale` of the area. View numbers go on from
    the global to the local ones, so that adding local views leaves the global ones as they are.

    Every draw is a function of the image's key and the view's number alone: the batch it is in, the device, the rank
    and the order can't change it. Channels past the picture (`colors`, `planes`) hold one value each: they pass as
    value / 255, neither augmented nor normalised. With channels_last, `views.flatten(0, 1)` is channels-last without
    a copy.
    """

    def __init__(
        self,
        policy: str | Policy | Sequence[Policy],
        count: int = 2,
        size: int = 32,
        *,
        local_count: int = 0,
        local_size: int | None = None,
        local_scale: tuple[float, float] = (0.05, 0.14),
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
        implementation: str = "auto",
        **overrides: Any,
    ):
        _at_least("count", count, 1)
        _at_least("size", size, 1)
        _at_least("local_count", local_count, 0)
        if local_count:
            _at_least("local_size", local_size, 1)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"views come as float32, bfloat16 or float16, not {dtype}")
        if implementation not in IMPLEMENTATIONS:
            raise UsageError(f"views: implementation is {implementation!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
        self.count, self.size, self.local_count, self.local_size = count, size, local_count, local_size
        self.dtype, self.channels_last, self.implementation = dtype, channels_last, implementation
        chosen = policies(policy, count + local_count, overrides)
        self.policies = chosen[:count]
        self.local_policies = tuple(p.override({"crop_scale": local_scale}) for p in chosen[count:])
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, images: Tensor, keys: Tensor, sizes: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self._check(images, keys, sizes)
        views = self._make(images, keys, sizes, self.policies, self.size, 0)
        if self.local_size is None or not self.local_count:
            return views
        return views, self._make(images, keys, sizes, self.local_policies, self.local_size, self.count)

    def draw(self, keys: Tensor, sizes: Tensor) -> Draws:
        """What chance decides for the global views of images of `sizes` int64 [B, 2]: boxes, factors, order, ..."""
        return draw_rows(self._table(keys.device)[: self.count], keys, sizes, self.size)

    def __repr__(self) -> str:
        local = f", local_count={self.local_count}, local_size={self.local_size}" if self.local_count else ""
        return f"Views(count={self.count}, size={self.size}{local}, policies={sorted(set(map(repr, self.policies)))})"

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = table(self.policies + self.local_policies, device)
        return self._tables[device]

    def _make(
        self, images: Tensor, keys: Tensor, sizes: Tensor | None, chosen: tuple[Policy, ...], size: int, first: int
    ) -> Tensor:
        rows = self._table(keys.device)[first : first + len(chosen)]
        out = _empty(len(chosen), images, size, self.dtype, self.channels_last)
        if self._fused(images):
            from kontrast.views import triton_views as triton_launch

            parameters = triton_launch.draw(rows, keys, sizes, images.shape[2:], size, first)
            triton_launch.render(images, sizes, parameters, chosen, out)
        else:
            sizes = _whole(images, keys) if sizes is None else sizes
            reference.render(images, sizes, draw_rows(rows, keys, sizes, size, first), chosen, out)
        return out

    def _fused(self, images: Tensor) -> bool:
        if self.implementation == "auto":
            return images.is_cuda and find_spec("triton") is not None
        if self.implementation == "triton" and not images.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise EnvironmentFault(
                f"the fused views need a CUDA device, the images are on {images.device}: use implementation='torch'"
            )
        return self.implementation == "triton"

    def _check(self, images: Tensor, keys: Tensor, sizes: Tensor | None) -> None:
        """Refuses what would give a wrong picture."""
        if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
            given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UsageError(
                f"views need uint8 images [B, C, H, W], got {given}: give pixels from 0 to 255 as they were decoded"
            )
        if not all(images.shape):
            raise UsageError(f"views need at least one image, channel and pixel, got images {list(images.shape)}")
        if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != images.shape[:1]:
            given = f"{keys.dtype} {list(keys.shape)}" if isinstance(keys, Tensor) else type(keys).__name__
            raise UsageError(
                f"views need one int64 key an image, [{len(images)}], got {given}: make them with kontrast.views.keys"
            )
        if keys.device != images.device:
            raise UsageError(f"views need keys on the images' device {images.device}, got {keys.device}")
        if sizes is not None and (sizes.dtype != torch.int64 or sizes.shape != (len(images), 2)):
            raise UsageError(f"views need sizes as int64 [{len(images)}, 2], got {sizes.dtype} {list(sizes.shape)}")
        if sizes is not None and not sizes.is_cuda:  # there they would be waited for
            most = torch.tensor(images.shape[2:])
            if bool((sizes < 1).any()) or bool((sizes > most).any()):
                raise UsageError(f"views need sizes from 1 to the padded {most.tolist()}, got {sizes.tolist()[:4]}")


def _at_least(name: str, given: int | None, least: int) -> None:
    if not isinstance(given, int) or given < least:
        raise UsageError(f"views: {name} is {given}; allowed: whole numbers from {least}")


def _whole(images: Tensor, keys: Tensor) -> Tensor:
    return torch.stack([torch.full_like(keys, length) for length in images.shape[2:]], 1)


def _empty(count: int, images: Tensor, size: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
    batch, channels = images.shape[:2]
    if channels_last:
        return images.new_empty((count, batch, size, size, channels), dtype=dtype).permute(0, 1, 4, 2, 3)
    return images.new_empty((count, batch, channels, size, size), dtype=dtype)
