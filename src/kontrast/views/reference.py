"""The definition of the views in plain torch, vectorized over the batch, for any device; on a CPU it is what runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.views import color
from kontrast.views.blur import blur
from kontrast.views.draws import Draws
from kontrast.views.policies import Policy
from kontrast.views.resample import planes, taps

VALUES_PER_CHUNK = 2**19  # few enough to stay in a core's cache


def render(images: Tensor, sizes: Tensor, draws: Draws, policies: Sequence[Policy], out: Tensor) -> None:
    """Fill out [V, B, C, h, w] from images [B, C, H, W], uint8 or floats from 0 to 1, by the draws [V, B]."""
    views, batch, _, size, _ = out.shape
    step = max(1, VALUES_PER_CHUNK // (views * 3 * size * size)) if images.device.type == "cpu" else batch
    for begin in range(0, batch, step):
        part = slice(begin, min(begin + step, batch))
        chosen = Draws(*(field[:, part] for field in draws))
        render_chunk(images[part], sizes[part], chosen, policies, out[:, part])


def render_chunk(images: Tensor, sizes: Tensor, draws: Draws, policies: Sequence[Policy], out: Tensor) -> None:
    """Fill out [V, B, C, h, w] without dividing the batch."""
    views, batch, channels, size, _ = out.shape
    policy = policies[0]
    colors = policy.picture_channels(channels)
    picture = crop(images[:, :colors], sizes, draws, policy, size)
    flat = Draws(*(field.reshape(views * batch) for field in draws))
    if any(p.jitter_p and any(p.jitter) for p in policies):
        factors = torch.stack([flat.brightness, flat.contrast, flat.saturation], 1)
        factors = torch.where(flat.jitter[:, None], factors, 1.0)
        picture = color.jitter(picture, factors, flat.hue * flat.jitter, flat.operations())
    if colors == 3 and any(p.gray for p in policies):
        picture = color.apply_where(picture, flat.gray, color.to_gray)
    radius = blur_radius(policies, size)
    if radius:
        picture = color.apply_where(picture, flat.blur, lambda ps, sigma: blur(ps, sigma, radius), flat.sigma)
    if any(p.solarize for p in policies):
        picture = color.apply_where(picture, flat.solarize, color.solarize)
    store(picture, policy, out)
    if channels > colors:
        out[:, :, colors:] = images[:, colors:, :1, :1] / 255.0


def blur_radius(policies: Sequence[Policy], size: int) -> int:
    """Return the longest reach of a blur among the views, 0 if none is blurred."""
    return max((p.radius(size) for p in policies if p.blur), default=0)


def crop(images: Tensor, sizes: Tensor, draws: Draws, policy: Policy, size: int) -> list[Tensor]:
    """Resample the drawn boxes [V, B] to `size` and flip them if drawn; return planes [V * B, h, w] in [0, 1]."""
    views = len(draws.top)
    pixels = images if images.is_floating_point() else images.float().mul_(1 / 255)
    high, wide = sizes[:, 0].float(), sizes[:, 1].float()
    parts = []
    for v in range(views):
        top, left, height, width, flip = (field[v] for field in draws[:5])
        if policy.crop_scale is None:  # the whole image is resized first: the filter may reach outside the box
            limits = (torch.zeros_like(high), high, torch.zeros_like(wide), wide)
        else:
            limits = (top, top + height, left, left + width)
        vertical = taps(top, height, limits[0], limits[1], images.shape[2], size, policy.interpolation)
        horizontal = taps(left, width, limits[2], limits[3], images.shape[3], size, policy.interpolation, flip)
        parts.append(planes(pixels, vertical, horizontal))
    joined = [torch.cat(channel) if views > 1 else channel[0] for channel in zip(*parts)]
    if policy.interpolation == "bicubic":  # its lobes exceed the range of a pixel
        joined = [plane.clamp_(0, 1) for plane in joined]
    return joined


def store(picture: list[Tensor], policy: Policy, out: Tensor) -> None:
    """Normalize planes [V * B, h, w] and write them into out [V, B, C, h, w], in its dtype and layout."""
    views, batch, _, size, _ = out.shape
    for c, plane in enumerate(picture):
        mean, std = policy.mean[c % len(policy.mean)], policy.std[c % len(policy.std)]
        out[:, :, c] = plane.sub(mean).mul_(1 / std).view(views, batch, size, size)
