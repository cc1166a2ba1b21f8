"""Augmentation policies by name: what each paper does to an image before the network sees it.

Every policy has the same order: crop, flip, jitter, gray, blur, solarize, normalize. Papers put the flip first or last,
which makes no difference: the other operations act per pixel or with a symmetric kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
        mean: subtracted from the values, which are from 0 to 1; one number, or one per color.
        std: divides the values afterwards; one number, or one per color.
        planes: number of channels after the picture's, such as random bits. They pass unchanged.
        colors: number of channels of the picture, 1 or 3. None: 3 if there are three besides `planes`, else 1.

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
    planes: int = 0
    colors: int | None = None

    def __post_init__(self) -> None:
        scale, jitter = self.crop_scale, self.jitter
        allowed: dict[str, tuple[bool, str]] = {
            **{p: (0 <= getattr(self, p) <= 1, "a probability from 0 to 1") for p in PROBABILITIES},
            "crop_scale": (scale is None or (_ordered(scale) and scale[1] <= 1), "0 < low <= high <= 1"),
            "crop_ratio": (_ordered(self.crop_ratio), "0 < low <= high"),
            "center_fraction": (0 < self.center_fraction <= 1, "0 < fraction <= 1"),
            "interpolation": (self.interpolation in ("bilinear", "bicubic"), "bilinear or bicubic"),
            "jitter": (
                len(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5,
                "four strengths of at least 0, the fourth (hue) at most 0.5",
            ),
            "blur_sigma": (_ordered(self.blur_sigma), "0 < low <= high"),
            "blur_kernel": (self.blur_kernel is None or self.blur_kernel > 0, "a positive size"),
            "mean": (len(self.mean) in (1, 3), "one or three numbers"),
            "std": (len(self.std) in (1, 3) and min(self.std) > 0, "one or three positive numbers"),
            "planes": (type(self.planes) is int and self.planes >= 0, "a whole number from 0"),
            "colors": (type(self.colors) is not float and self.colors in (None, 1, 3), "1 or 3"),
        }
        for name, (fine, values) in allowed.items():
            if not fine:
                raise UsageError(f"views: {name} is {getattr(self, name)}; allowed: {values}")

    def override(self, fields: dict[str, Any]) -> Policy:
        """Return the policy with some fields replaced; an unknown field is an error that names the nearest one."""
        fields = {RENAMED.get(name, name): value for name, value in fields.items()}
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in fields.items():
            if name not in known:
                raise UsageError(f"views have no setting {name!r}: {nearest(name, [*known, *VIEW_SETTINGS])}")
            several = isinstance(getattr(self, name), tuple)
            is_list = value is None or isinstance(value, list | tuple)
            if name != "interpolation" and (not _numbers(value) or (several and not is_list)):
                kind = f"a list of {len(getattr(self, name))} numbers" if several else "numbers"
                raise UsageError(f"views: {name} is {value!r}; allowed: {kind}")
        try:
            lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
            return dataclasses.replace(self, **{**fields, **lists})
        except TypeError as error:
            given = ", ".join(f"{name} = {value!r}" for name, value in fields.items())
            raise UsageError(f"a setting of the views has the wrong type: {given} ({error})") from error

    def picture_channels(self, channels: int) -> int:
        """Return how many of the channels belong to the picture."""
        return min(self.colors or (3 if channels - self.planes >= 3 else 1), channels)

    def radius(self, size: int) -> int:
        """Return the reach of the blur in pixels, at most 4 sigma: less than one part in ten thousand is beyond it."""
        reach = -int(-4 * self.blur_sigma[1] // 1)
        if self.blur_kernel is not None:
            pixels = self.blur_kernel * size if self.blur_kernel < 1 else self.blur_kernel
            reach = min(reach, int(pixels) // 2)
        return min(reach, size - 1)


PROBABILITIES = ("flip", "jitter_p", "gray", "blur", "solarize")


def _ordered(pair: Sequence[float]) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1]


def _numbers(value: Any) -> bool:
    """Whether the value is a finite number, a list of them, or None."""
    parts = value if isinstance(value, list | tuple) else (value,)
    return all(v is None or (type(v) in (int, float) and math.isfinite(v)) for v in parts)


POLICIES = Registry("policy")
VIEW_SETTINGS = ("policy", "count", "size", "local_count", "local_size")
SHARED = ("interpolation", "blur_kernel", "mean", "std", "planes", "colors")


def policies_of_views(
    policy: str | Policy | Sequence[Policy], count: int, overrides: dict[str, Any]
) -> tuple[Policy, ...]:
    """Return one policy per view; a name with two policies (MoCo v3) gives them in turn."""
    given = [p.override(overrides) for p in alternatives(policy)]
    if not given:
        raise UsageError("views need at least one policy, got none")
    for name in SHARED:
        if len(values := {getattr(p, name) for p in given}) > 1:
            raise UsageError(f"all views of one call must have the same {name}, got {values}: use two calls")
    if len({p.crop_scale is None for p in given}) > 1:
        raise UsageError("the views of one call must all be random crops or all center crops: use two calls")
    return tuple(given[v % len(given)] for v in range(count))


def alternatives(policy: str | Policy | Sequence[Policy]) -> tuple[Policy, ...]:
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
_register(
    "dcl", dataclasses.replace(_SIMCLR, blur_kernel=None, **IMAGENET)
)  # the paper states no normalization: ImageNet's
_register("moco-cifar", dataclasses.replace(_CIFAR, **CIFAR10))
_register("hcl-cifar", dataclasses.replace(_CIFAR, blur=0.5, blur_kernel=3, **CIFAR10))
_register("randbit-mnist", Policy(crop_scale=(0.5, 1.0), flip=0.0, colors=1))
_register("digits", Policy(crop_scale=(0.4, 1.0), flip=0.0, jitter=(0.4, 0.4, 0.4, 0.5), gray=0.3))
_register("crop-flip", Policy(crop_scale=(0.2, 1.0), **IMAGENET))
_register("evaluate", Policy(crop_scale=None, flip=0.0, **IMAGENET))
_register("evaluate-imagenet", Policy(crop_scale=None, center_fraction=0.875, flip=0.0, **IMAGENET))
