"""Views beside torchvision and kornia: first the same draws give the same picture, then views per second.

    python benchmarks/views.py [--quick] [--json FILE] [--workers N] [--device cpu|cuda]
"""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast.views import Draws, Policy


def through_torchvision(image: Tensor, draws: Draws, policy: Policy, size: int) -> Tensor:
    """One view of one uint8 image [C, H, W], C 1 or 3, by torchvision's functional transforms on a float tensor.

    `draws` are of this view and image alone (0-d tensors).
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    mode = InterpolationMode(policy.interpolation)
    box = [round(float(x)) for x in draws[:4]]
    x = tv.resized_crop(image.float() / 255, *box, [size, size], mode, antialias=True).clamp(0, 1)
    if draws.flip:
        x = tv.hflip(x)
    if draws.jitter:
        steps = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        factors = (draws.brightness, draws.contrast, draws.saturation, draws.hue)
        for operation in draws.operations().tolist():
            x = steps[operation](x, float(factors[operation]))
    if draws.gray and len(x) == 3:
        x = tv.rgb_to_grayscale(x, 3)
    if draws.blur and policy.radius(size):
        kernel = 2 * policy.radius(size) + 1
        x = tv.gaussian_blur(x, [kernel, kernel], [float(draws.sigma)] * 2)
    if draws.solarize:
        x = tv.solarize(x, 0.5)
    return tv.normalize(x, list(policy.mean) * (len(x) // len(policy.mean)), list(policy.std) * (len(x) // len(policy.std)))
