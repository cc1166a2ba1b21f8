"""Augmentation policies by name: what each paper does to an image before the network sees it.

Every policy has the same order: crop, flip, jitter, gray, blur, solarize, normalize. Papers put the flip first or last,
which makes no difference: the other operations act per pixel or with a symmetric kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kontrast.errors import UsageError
from kontrast.registry import Registry, nearest

Pair = tuple[float, float]


class Normalization(TypedDict):
    """Mean and standard deviation per color channel of an image set."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10: Normalization = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
CIFAR100: Normalization = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}
STL10: Normalization = {"mean": (0.4409, 0.4279, 0.3868), "std": (0.2683, 0.2610, 0.2687)}
IMAGENET: Normalization = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

RENAMED = {"colours": "colors", "centre_fraction": "center_fraction"}
"""Names of fields in recipes of old runs."""


@dataclass(frozen=True)
class Policy:
    """How one view is made from an image. Each field can be set in a recipe, for example `views.flip=0`.

    Args:
        crop_scale: smallest and largest share of the image's area that a random crop covers. None: no random crop, but
            the center of the image.
        crop_ratio: smallest and largest width / height of a random crop.
        center_fraction: without `crop_scale`, side of the center crop divided by the shorter side of the resized image.
        interpolation: "bilinear" or "bicubic", both antialiased as in PIL.
        flip: probability of a horizontal flip.
        jitter: strengths of brightness, contrast, saturation and hue, as in torchvision's ColorJitter. The hue's is at
            most 0.5.
        jitter_p: probability of the color jitter.
        gray: probability of a conversion to grayscale.
        blur: probability of a Gaussian blur.
        blur_sigma: smallest and largest standard deviation of the blur, in pixels of the view.
        blur_kernel: size of the blur kernel: an odd number of pixels, or below 1 a share of the view's size. None: four
            standard deviations to each side.
        solarize: probability of inverting all values from one half upwards.
        mean: subtracted from the values, which are from 0 to 1; one number, or one per channel.
        std: divides the values afterwards; one number, or one per channel.
        low: the value of each channel that becomes 0, one number or one per channel, for images of 16-bit values, of
            floats or of other channels than gray or red, green and blue. None: 0, for 8-bit images alone.
        high: the value that becomes 1, likewise. None: 255.
        planes: number of channels after the picture's, such as random bits. They pass unchanged.
        colors: number of channels of the picture. None: all besides `planes`. Hue, saturation and grayscale only change
            pictures of three channels.

    Example:
        >>> Policy(crop_scale=(0.2, 1.0), flip=0.0).crop_ratio
        (0.75, 1.3333333333333333)
    """

    crop_scale: Pair | None = (0.08, 1.0)
    crop_ratio: Pair = (3 / 4, 4 / 3)
    center_fraction: float = 1.0
    interpolation: str = "bilinear"
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_p: float = 1.0
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: Pair = (0.1, 2.0)
    blur_kernel: float | None = None
    solarize: float = 0.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    planes: int = 0
    colors: int | None = None

    def __post_init__(self) -> None:
        for name, (is_allowed, values) in ALLOWED.items():
            value = getattr(self, name)
            try:
                fine = (name == "interpolation" or _finite(value)) and is_allowed(value)
            except TypeError:  # a list instead of a number, or the reverse
                fine = False
            if not fine:
                raise UsageError(f"views: {name} is {value!r}; allowed: {values}")
        if (self.low is None) != (self.high is None):
            raise UsageError(f"views: low is {self.low} and high is {self.high}: give both, or neither")
        if self.low and self.high and not all(low < high for low, high in zip(self.low, self.high)):
            raise UsageError(f"views: low {list(self.low)} must be below high {list(self.high)} in every channel")

    def override(self, fields: dict[str, Any]) -> Policy:
        """Return the policy with some fields replaced; an unknown field is an error that names the nearest one."""
        fields = {RENAMED.get(k, k): tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        for name in fields:
            if name not in ALLOWED:
                raise UsageError(f"views have no setting {name!r}: {nearest(name, [*ALLOWED, *VIEW_SETTINGS])}")
        return dataclasses.replace(self, **fields)

    def picture_channels(self, channels: int) -> int:
        """Return how many of the channels belong to the picture."""
        return min(self.colors or max(1, channels - self.planes), channels)

    def radius(self, size: int) -> int:
        """Return the reach of the blur in pixels, at most 4 sigma: less than one part in ten thousand is beyond it."""
        reach = -int(-4 * self.blur_sigma[1] // 1)
        if self.blur_kernel is not None:
            pixels = self.blur_kernel * size if self.blur_kernel < 1 else self.blur_kernel
            reach = min(reach, int(pixels) // 2)
        return min(reach, size - 1)


def _finite(value: Any) -> bool:
    """Whether the value is a finite number, a list of them, or None."""
    parts = value if isinstance(value, tuple) else () if value is None else (value,)
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in parts)


def _is_pair(pair: Sequence[float], most: float = math.inf) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1] <= most


_PROBABILITY = (lambda p: 0 <= p <= 1, "a probability from 0 to 1")
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "crop_scale": (lambda scale: scale is None or _is_pair(scale, most=1), "2 numbers, 0 < low <= high <= 1"),
    "crop_ratio": (_is_pair, "2 numbers, 0 < low <= high"),
    "center_fraction": (lambda fraction: 0 < fraction <= 1, "0 < fraction <= 1"),
    "interpolation": (lambda name: name in ("bilinear", "bicubic"), "bilinear or bicubic"),
    "flip": _PROBABILITY,
    "jitter": (lambda j: len(j) == 4 and min(j) >= 0 and j[3] <= 0.5, "4 numbers from 0, the last (hue) up to 0.5"),
    "jitter_p": _PROBABILITY,
    "gray": _PROBABILITY,
    "blur": _PROBABILITY,
    "blur_sigma": (_is_pair, "2 numbers, 0 < low <= high"),
    "blur_kernel": (lambda size: size is None or size > 0, "a positive size"),
    "solarize": _PROBABILITY,
    "mean": (lambda mean: len(mean) > 0, "a list of numbers, one or one per channel"),
    "std": (lambda std: min(std, default=0) > 0, "a list of positive numbers, one or one per channel"),
    "low": (lambda low: low is None or len(low) > 0, "a list of numbers, one or one per channel"),
    "high": (lambda high: high is None or len(high) > 0, "a list of numbers, one or one per channel"),
    "planes": (lambda planes: planes >= 0 and type(planes) is int, "a whole number from 0"),
    "colors": (lambda colors: colors is None or (type(colors) is int and colors > 0), "a whole number from 1"),
}
"""For each field of a policy, a function that returns whether a value is allowed, and the allowed values in words."""

POLICIES = Registry("policy")
VIEW_SETTINGS = ("policy", "count", "size", "local_count", "local_size", "local_policy")
SHARED = ("interpolation", "blur_kernel", "mean", "std", "low", "high", "planes", "colors")
Policies = str | Policy | Sequence[Policy]
"""A name in `POLICIES`, a policy, or several that views take in turn."""


def policies_of_views(
    policy: Policies, count: int, overrides: dict[str, Any], local_policy: Policies | None = None, local_count: int = 0
) -> tuple[Policy, ...]:
    """Return one policy per view, and then one per local view; a name with two policies (MoCo v3) gives them in turn.

    Without a policy of their own, local views take further turns of the others.
    """
    given = [p.override(overrides) for p in alternatives(policy)]
    local = given
    if local_policy is not None and local_count:
        local = [p.override(overrides) for p in alternatives(local_policy)]
    shared = {name: {getattr(p, name) for p in given + local} for name in SHARED}
    shared["kind of crop"] = {"center" if p.crop_scale is None else "random" for p in given + local}
    for name, values in shared.items():
        if len(values) != 1:
            found = f"got {values}: use two calls" if values else "got no policy"
            raise UsageError(f"all views of one call must have the same {name}, {found}")
    turns = [given] * count + [local] * local_count
    return tuple(policies[v % len(policies)] for v, policies in enumerate(turns))


def alternatives(policy: Policies) -> tuple[Policy, ...]:
    """Return the policies of a name, or the given policy or policies, as a tuple."""
    found = POLICIES.build(policy) if isinstance(policy, str) else policy
    return (found,) if isinstance(found, Policy) else tuple(found)


def _register(name: str, *alternatives: Policy) -> None:
    POLICIES.register(name)(lambda: alternatives)


# CACR's hue strength is 0.4, always, as published.
_CACR = Policy(crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), gray=0.2)
_SIMCLR = Policy(jitter=(0.8, 0.8, 0.8, 0.2), jitter_p=0.8, gray=0.2, blur=0.5, blur_kernel=0.1)
_MOCO = Policy(crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2, blur=0.5, **IMAGENET)
_MOCO3 = dataclasses.replace(_MOCO, crop_scale=(0.08, 1.0), jitter=(0.4, 0.4, 0.2, 0.1))
_CIFAR = Policy(jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2)

_register("cacr-cifar", dataclasses.replace(_CACR, **CIFAR10))
_register("cacr-cifar100", dataclasses.replace(_CACR, **CIFAR100))
_register("cacr-stl", dataclasses.replace(_CACR, crop_scale=(0.08, 1.0), **STL10))
_register("moco-v2", _MOCO)
_register("moco-v3", dataclasses.replace(_MOCO3, blur=1.0), dataclasses.replace(_MOCO3, blur=0.1, solarize=0.2))
_register("simclr", dataclasses.replace(_SIMCLR, interpolation="bicubic"))
_register("simclr-cifar", _CIFAR)
_register("uniclr", _MOCO)  # the paper does not state strengths and normalization: MoCo v2's
# DCL's paper states no normalization: ImageNet's.
_register("dino-local", dataclasses.replace(_MOCO3, blur=0.5))
_register("dcl", dataclasses.replace(_SIMCLR, blur_kernel=None, **IMAGENET))
_register("moco-cifar", dataclasses.replace(_CIFAR, **CIFAR10))
_register("hcl-cifar", dataclasses.replace(_CIFAR, blur=0.5, blur_kernel=3, **CIFAR10))
_register("randbit-mnist", Policy(crop_scale=(0.5, 1.0), flip=0.0, colors=1))
_register("digits", Policy(crop_scale=(0.4, 1.0), flip=0.0, jitter=(0.4, 0.4, 0.4, 0.5), gray=0.3))
_register("crop-flip", Policy(crop_scale=(0.2, 1.0), **IMAGENET))
_register("evaluate", Policy(crop_scale=None, flip=0.0, **IMAGENET))
_register("evaluate-imagenet", Policy(crop_scale=None, center_fraction=0.875, flip=0.0, **IMAGENET))
