"""Augmentation policies by name: what each paper does to an image before the network sees it.

One order serves every policy: crop, flip, jitter, gray, blur, solarize, normalise. Papers place the flip first or last;
it commutes with all the others (they act per pixel or with a symmetric kernel), so its place can't be seen.
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


class Normalisation(TypedDict):
    """What an image set's colors are brought to mean 0 and deviation 1 by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10: Normalisation = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
CIFAR100: Normalisation = {"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}
STL10: Normalisation = {"mean": (0.4409, 0.4279, 0.3868), "std": (0.2683, 0.2610, 0.2687)}
IMAGENET: Normalisation = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True)
class Policy:
    """What happens to one view: probabilities of operations, and strengths as torchvision's ColorJitter takes them."""

    crop_scale: Pair | None = (0.08, 1.0)  # share of the area; None: the center, without chance
    crop_ratio: Pair = (3 / 4, 4 / 3)
    center_fraction: float = 1.0  # without crop_scale: the side of the center crop over the resized shorter side
    interpolation: str = "bilinear"  # or "bicubic"; both antialiased as PIL's
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue
    jitter_p: float = 1.0
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: Pair = (0.1, 2.0)  # pixels of the view
    blur_kernel: float | None = None  # odd number of pixels, or a share of the view's size; None: 4 sigma each side
    solarize: float = 0.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    planes: int = 0  # channels behind the picture, which pass untouched
    colors: int | None = None  # channels that are picture, 1 or 3. None: 3 of 3 or more that are no planes, else 1

    def __post_init__(self) -> None:
        for name in ("flip", "jitter_p", "gray", "blur", "solarize"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a probability from 0 to 1")
        if self.crop_scale is not None:
            _check(
                _ordered(self.crop_scale) and self.crop_scale[1] <= 1,
                "crop_scale",
                self.crop_scale,
                "0 < low <= high <= 1",
            )
        _check(_ordered(self.crop_ratio), "crop_ratio", self.crop_ratio, "0 < low <= high")
        _check(0 < self.center_fraction <= 1, "center_fraction", self.center_fraction, "0 < fraction <= 1")
        _check(
            self.interpolation in ("bilinear", "bicubic"), "interpolation", self.interpolation, "bilinear or bicubic"
        )
        _check(len(self.jitter) == 4 and min(self.jitter) >= 0, "jitter", self.jitter, "four strengths of at least 0")
        _check(self.jitter[3] <= 0.5, "jitter", self.jitter, "a hue (the fourth) of at most 0.5")
        _check(_ordered(self.blur_sigma), "blur_sigma", self.blur_sigma, "0 < low <= high")
        _check(self.blur_kernel is None or self.blur_kernel > 0, "blur_kernel", self.blur_kernel, "a positive size")
        _check(len(self.mean) in (1, 3), "mean", self.mean, "one or three numbers")
        _check(len(self.std) in (1, 3) and min(self.std) > 0, "std", self.std, "one or three positive numbers")
        _check(type(self.planes) is int and self.planes >= 0, "planes", self.planes, "whole numbers from 0")
        _check(type(self.colors) is not float and self.colors in (None, 1, 3), "colors", self.colors, "1 or 3")

    def override(self, fields: dict[str, Any]) -> Policy:
        """The policy with some fields replaced; an unknown field is an error that names the nearest."""
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in fields.items():
            if name not in known:
                raise UsageError(f"views have no setting {name!r}: {nearest(name, [*known, *OF_VIEWS])}")
            several = isinstance(getattr(self, name), tuple)
            if name != "interpolation" and not _numbers(value):
                raise UsageError(f"views: {name} is {value!r}; allowed: {'lists of ' * several}numbers")
            if several and value is not None and not isinstance(value, list | tuple):
                raise UsageError(f"views: {name} is {value!r}; allowed: a list of {len(getattr(self, name))} numbers")
        try:
            return dataclasses.replace(self, **{k: _frozen(v) for k, v in fields.items()})
        except TypeError as error:
            given = ", ".join(f"{name} = {value!r}" for name, value in fields.items())
            raise UsageError(f"a setting of the views has the wrong type: {given} ({error})") from error

    def picture_channels(self, channels: int) -> int:
        """How many of the channels are picture."""
        return min(self.colors or (3 if channels - self.planes >= 3 else 1), channels)

    def radius(self, size: int) -> int:
        """Reach of the blur in pixels. Past 4 sigma a Gaussian holds less than one part in ten thousand: left out."""
        reach = -int(-4 * self.blur_sigma[1] // 1)
        if self.blur_kernel is not None:
            pixels = self.blur_kernel * size if self.blur_kernel < 1 else self.blur_kernel
            reach = min(reach, int(pixels) // 2)
        return min(reach, size - 1)


def _ordered(pair: Sequence[float]) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1]


def _numbers(value: Any) -> bool:
    """A finite number, a list of them, or nothing."""
    parts = value if isinstance(value, list | tuple) else (value,)
    return all(v is None or (type(v) in (int, float) and math.isfinite(v)) for v in parts)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(fine: bool, name: str, given: Any, allowed: str) -> None:
    if not fine:
        raise UsageError(f"views: {name} is {given}; allowed: {allowed}")


POLICIES = Registry("policy")
OF_VIEWS = ("policy", "count", "size", "local_count", "local_size")
SHARED = ("interpolation", "blur_kernel", "mean", "std", "planes", "colors")


def policies(policy: str | Policy | Sequence[Policy], count: int, overrides: dict[str, Any]) -> tuple[Policy, ...]:
    """One policy for each of `count` views; a name with two policies (MoCo v3) gives them in turn."""
    given = [p.override(overrides) for p in alternatives(policy)]
    if not given:
        raise UsageError("views need at least one policy, got none")
    for name in SHARED:
        if len({getattr(p, name) for p in given}) > 1:
            raise UsageError(
                f"views of one call share {name}, got {[getattr(p, name) for p in given]}: make them by two calls"
            )
    if len({p.crop_scale is None for p in given}) > 1:
        raise UsageError("views of one call are all cropped by chance or all central: make them by two calls")
    return tuple(given[v % len(given)] for v in range(count))


def alternatives(policy: str | Policy | Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies of a name, or those given, which may be one."""
    found = POLICIES.build(policy) if isinstance(policy, str) else policy
    return (found,) if isinstance(found, Policy) else tuple(found)


def _named(name: str, *alternatives: Policy) -> None:
    POLICIES.register(name)(lambda: alternatives)


_CACR = Policy(
    crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), gray=0.2
)  # hue 0.4, always: as published, not a slip
_SIMCLR = Policy(jitter=(0.8, 0.8, 0.8, 0.2), jitter_p=0.8, gray=0.2, blur=0.5, blur_kernel=0.1)
_MOCO = Policy(crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2, blur=0.5, **IMAGENET)
_MOCO3 = dataclasses.replace(_MOCO, crop_scale=(0.08, 1.0), jitter=(0.4, 0.4, 0.2, 0.1))
_CIFAR = Policy(jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8, gray=0.2)

_named("cacr-cifar", dataclasses.replace(_CACR, **CIFAR10))
_named("cacr-cifar100", dataclasses.replace(_CACR, **CIFAR100))
_named("cacr-stl", dataclasses.replace(_CACR, crop_scale=(0.08, 1.0), **STL10))
_named("moco-v2", _MOCO)
_named("moco-v3", dataclasses.replace(_MOCO3, blur=1.0), dataclasses.replace(_MOCO3, blur=0.1, solarize=0.2))
_named("simclr", dataclasses.replace(_SIMCLR, interpolation="bicubic"))
_named("simclr-cifar", _CIFAR)
_named("uniclr", _MOCO)  # strengths and normalisation are not stated in the paper: MoCo v2's
_named("dcl", dataclasses.replace(_SIMCLR, blur_kernel=None, **IMAGENET))  # normalisation not stated: ImageNet's
_named("moco-cifar", dataclasses.replace(_CIFAR, **CIFAR10))
_named("hcl-cifar", dataclasses.replace(_CIFAR, blur=0.5, blur_kernel=3, **CIFAR10))
_named("randbit-mnist", Policy(crop_scale=(0.5, 1.0), flip=0.0, colors=1))
_named("digits", Policy(crop_scale=(0.4, 1.0), flip=0.0, jitter=(0.4, 0.4, 0.4, 0.5), gray=0.3))
_named("crop-flip", Policy(crop_scale=(0.2, 1.0), **IMAGENET))
_named("evaluate", Policy(crop_scale=None, flip=0.0, **IMAGENET))
_named("evaluate-imagenet", Policy(crop_scale=None, center_fraction=0.875, flip=0.0, **IMAGENET))
