"""`Views`: one call makes all views of a batch, images [B, C, H, W] to floats [V, B, C, h, w].

V views, L local views, B images, C channels (the picture's come first), H x W source, h = w = size.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.float64 import where_float64_is
from kontrast.views import reference
from kontrast.views.draws import Draws, draw_rows, table
from kontrast.views.policies import Policies, Policy, policies_of_views

IMPLEMENTATIONS = ("auto", "torch", "triton")
DEEP_TYPES = (torch.uint8, torch.uint16, torch.float32)
UINT8_IMAGES = "uint8 images [B, C, H, W] with values from 0 to 255 (views.low and views.high allow others)"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Views:
    """Makes all augmented views of a batch in one call, on the images' device.

    Every random draw depends only on the image's key and the view's number: the rest of the batch, the device, the rank
    and the order can't change a view. Local views are numbered after the global ones, so that adding local views leaves
    the global ones unchanged. Channels after the picture's (see `Policy.planes` and `Policy.colors`) have one value
    each; they become value / 255 and are neither augmented nor normalized.

    Args:
        policy: a name in `POLICIES`, a `Policy`, or several policies that the views take in turn.
        count: number of views V, default 2.
        size: height and width of a view in pixels, default 32.
        local_count: number of additional small views L (multi-crop), default 0.
        local_size: height and width of a local view in pixels.
        local_scale: smallest and largest share of the area that a local view covers.
        local_policy: policy of the local views, or several. Default: that of the others.
        dtype: float32, bfloat16 or float16.
        channels_last: memory layout; `views.flatten(0, 1)` is then channels-last without a copy.
        implementation: "torch", "triton" (CUDA only; 8-bit pictures of one or three channels) or "auto": Triton where
            it can be used, else torch.
        **overrides: fields of the policies to replace, such as `flip=0.0`.

    Shape:
        - images: uint8 [B, C, H, W]; with a policy that has `low` and `high`, also uint16 or float32
        - keys: int64 [B], from `keys`
        - sizes: int64 [B, 2], height and width of each image if the batch is padded
        - output: [V, B, C, size, size]; with local views a pair with [L, B, C, local_size, local_size]

    Example:
        >>> from kontrast.views import Views, keys
        >>> images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
        >>> Views("simclr-cifar", count=2, size=24)(images, keys(seed=0, epoch=0, indices=torch.arange(4))).shape
        torch.Size([2, 4, 3, 24, 24])
    """

    def __init__(
        self,
        policy: Policies,
        count: int = 2,
        size: int = 32,
        *,
        local_count: int = 0,
        local_size: int | None = None,
        local_scale: tuple[float, float] = (0.05, 0.14),
        local_policy: Policies | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
        implementation: str = "auto",
        **overrides: Any,
    ):
        numbers = {"count": (count, 1), "size": (size, 1), "local_count": (local_count, 0)}
        for name, (number, least) in (numbers | ({"local_size": (local_size, 1)} if local_count else {})).items():
            if not isinstance(number, int) or number < least:
                raise UsageError(f"views: {name} is {number}; allowed: whole numbers from {least}")
        for name, value, allowed in (("dtype", dtype, DTYPES), ("implementation", implementation, IMPLEMENTATIONS)):
            if value not in allowed:
                raise UsageError(f"views: {name} is {value}; allowed: {', '.join(map(str, allowed))}")
        self.count, self.size, self.local_count, self.local_size = count, size, local_count, local_size
        self.dtype, self.channels_last, self.implementation = dtype, channels_last, implementation
        chosen = policies_of_views(policy, count, overrides, local_policy, local_count)
        self.policies = chosen[:count]
        self.local_policies = tuple(p.override({"crop_scale": local_scale}) for p in chosen[count:])
        self._tables: dict[torch.device, Tensor] = {}
        self._ranges: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor, keys: Tensor, sizes: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if problem := find_problem(images, keys, sizes, deep=self.policies[0].low is not None):
            raise UsageError(f"views need {problem}")
        triton = self._use_triton(images)
        if self.policies[0].low is not None:
            images = self._scale(images)
        views = self._make(images, keys, sizes, self.policies, self.size, 0, triton)
        if self.local_size is None or not self.local_count:
            return views
        return views, self._make(images, keys, sizes, self.local_policies, self.local_size, self.count, triton)

    def draw(self, keys: Tensor, sizes: Tensor) -> Draws:
        """Return the random draws of the global views of images with `sizes` int64 [B, 2]."""
        return self._draw(keys, sizes, 0, self.count, self.size)

    def _draw(self, keys: Tensor, sizes: Tensor, first: int, count: int, size: int) -> Draws:
        """Return the draws of some views, on the device of the keys; they are the same bits on every device."""
        device, keys = keys.device, where_float64_is(keys)
        rows = self._table(keys.device)[first : first + count]
        drawn = draw_rows(rows, keys, sizes.to(keys.device), size, first)
        return Draws._make(field.to(device) for field in drawn)

    def __repr__(self) -> str:
        local = f", local_count={self.local_count}, local_size={self.local_size}" if self.local_count else ""
        return f"Views(count={self.count}, size={self.size}{local}, policies={sorted(set(map(repr, self.policies)))})"

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = table(self.policies + self.local_policies, device)
        return self._tables[device]

    def _scale(self, images: Tensor) -> Tensor:
        """Map the values from `low` to `high` of each channel to 0 to 1, float32, and clamp those outside."""
        policy, channels, device = self.policies[0], images.shape[1], images.device
        assert policy.low is not None and policy.high is not None
        for name, values in (("low", policy.low), ("high", policy.high)):
            if len(values) not in (1, channels):
                raise UsageError(f"views: {name} has {len(values)} numbers, the images have {channels} channels")
        if device not in self._ranges:
            low, high = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (policy.low, policy.high))
            self._ranges[device] = low.float().to(device), (1 / (high - low)).float().to(device)
        low, factor = self._ranges[device]
        return images.float().sub(low).mul_(factor).clamp_(0, 1)

    def _make(
        self, images: Tensor, keys: Tensor, sizes: Tensor | None, chosen: tuple[Policy, ...], size: int, first: int,
        triton: bool,
    ) -> Tensor:  # fmt: skip
        batch, channels = images.shape[:2]
        shape = (size, size, channels) if self.channels_last else (channels, size, size)
        out = images.new_empty((len(chosen), batch, *shape), dtype=self.dtype)
        out = out.permute(0, 1, 4, 2, 3) if self.channels_last else out
        if triton:
            from kontrast.views import triton_views

            rows = self._table(keys.device)[first : first + len(chosen)]
            with torch.cuda.device_of(images):
                parameters = triton_views.draw(rows, keys, sizes, images.shape[2:], size, first)
                triton_views.render(images, sizes, parameters, chosen, out)
        else:
            if sizes is None:
                sizes = torch.stack([torch.full_like(keys, side) for side in images.shape[2:]], 1)
            reference.render(images, sizes, self._draw(keys, sizes, first, len(chosen), size), chosen, out)
        return out

    def _use_triton(self, images: Tensor) -> bool:
        policy = self.policies[0]
        fits = images.dtype == torch.uint8 and policy.low is None and policy.picture_channels(images.shape[1]) in (1, 3)
        if self.implementation == "auto":
            return images.is_cuda and fits and find_spec("triton") is not None
        if self.implementation == "triton" and not fits:
            raise UsageError(
                f"the fused views make 8-bit pictures of one or three channels, not {describe(images)}: "
                "use implementation='auto', which makes others with torch"
            )
        if self.implementation == "triton" and not images.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise EnvironmentFault(
                f"the fused views need a CUDA device, the images are on {images.device}: use implementation='torch'"
            )
        return self.implementation == "triton"


def find_problem(images: Tensor, keys: Tensor, sizes: Tensor | None, deep: bool = False) -> str:
    """Return what is wrong with the arguments of a call, or an empty string.

    deep: whether the policy has a range of values, without which the images must be uint8.
    """
    allowed = DEEP_TYPES if deep else (torch.uint8,)
    if not isinstance(images, Tensor) or images.dtype not in allowed or images.dim() != 4 or not all(images.shape):
        wanted = "uint8, uint16 or float32 images [B, C, H, W]" if deep else UINT8_IMAGES
        return f"{wanted}, got {describe(images)}"
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != images.shape[:1]:
        return f"one int64 key per image, [{len(images)}], got {describe(keys)}: make them with kontrast.views.keys"
    if keys.device != images.device:
        return f"keys on the images' device {images.device}, got {keys.device}"
    if sizes is None:
        return ""
    if sizes.dtype != torch.int64 or sizes.shape != (len(images), 2):
        return f"sizes as int64 [{len(images)}, 2], got {describe(sizes)}"
    if not sizes.is_cuda:  # on a GPU, looking at them would wait for the device
        most = torch.tensor(images.shape[2:], device=sizes.device)
        if bool((sizes < 1).any()) or bool((sizes > most).any()):
            return f"sizes from 1 to the padded {most.tolist()}, got {sizes.tolist()[:4]}"
    return ""


def describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
