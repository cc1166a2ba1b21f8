"""What follows from images that keep their own depth and channels: statistics of their values, and the augmentations.

The statistics are computed once, when a run begins, from a fixed sample of its training images. They become the
settings views.low, views.high, views.mean and views.std of its recipe, so that every command prepares images alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.data.limits import Form
from kontrast.errors import UsageError
from kontrast.views.policies import alternatives

IMAGES = 512
"""At most this many images are sampled, evenly spaced over the training images."""
PIXELS = 4096
"""About this many pixels of each of them."""
PERCENTILES = (0.1, 99.9)
"""The values at these percentiles become 0 and 1."""
STATISTICS = ("low", "high", "mean", "std")
COLOR_ONLY = "saturation, hue and grayscale"


class ValueStatistics(NamedTuple):
    """Of each channel: the values that become 0 and 1, and mean and standard deviation of what they become."""

    low: list[float]
    high: list[float]
    mean: list[float]
    std: list[float]


def keeps_depth(train: ImageSet) -> bool:
    """Whether images have other values or channels than ordinary pictures, which are 8-bit gray or colors."""
    return train.dtype != torch.uint8 or train.channels not in (1, 3)


def value_statistics(train: ImageSet) -> ValueStatistics:
    """The statistics of a sample of the images; the same images always give the same numbers."""
    sample = train.first(IMAGES)
    parts = []
    for position in range(len(sample)):
        values = sample.images[position].flatten(1).numpy()
        parts.append(values[:, :: max(1, values.shape[1] // PIXELS)])
    columns: list[list[float]] = [[], [], [], []]
    for channel in np.concatenate(parts, axis=1).astype(np.float64):
        low, high = (_rounded(value) for value in np.percentile(channel, PERCENTILES))
        if not low < high:  # a channel of one value, or with rare others
            low, high = _rounded(channel.min()), _rounded(channel.max())
            high = high if low < high else low + 1
        unit = np.clip((channel - low) / (high - low), 0, 1)
        spread = _rounded(unit.std())
        for column, value in zip(columns, (low, high, _rounded(unit.mean()), spread if spread > 0 else 1.0)):
            column.append(value)
    return ValueStatistics(*columns)


def _rounded(value: Any) -> float:
    return float(f"{value:.6g}")


def with_own_depth(recipe: Recipe, train: ImageSet, given: set[str]) -> tuple[Recipe, list[str]]:
    """The recipe with what follows from the form of its training images, and lines that explain it.

    Args:
        recipe: the recipe as the user gave it.
        train: its training images.
        given: keys that the user set, which are left alone.
    """
    pictures = replace(train, images=train.pictures)
    own = keeps_depth(pictures) or (recipe.data.depth == "own" and pictures.channels == 1)
    recipe = replace(recipe, data=replace(recipe.data, depth="own" if own else "8-bit"))
    check_lengths(recipe, pictures.channels)
    if not keeps_depth(pictures):
        return recipe, []
    if recipe.data.random_bits or recipe.data.overlay_digits:
        raise UsageError("data.random_bits and data.overlay_digits need ordinary pictures: set data.depth=8-bit")
    channels, arguments = pictures.channels, dict(recipe.views.arguments)
    if recipe.data.bands and max(recipe.data.bands) > channels:
        raise UsageError(f"data.bands has {max(recipe.data.bands)}: the channels are counted from 1 to {channels}")
    form = Form(str(train.dtype).removeprefix("torch."), channels)
    convert = "; data.depth=8-bit would convert them" if channels in (1, 3) else ""
    lines = [f"depth: {form} are kept as they are{convert}"]
    if len(arguments.get("low", ())) not in (1, channels):  # those of --from's run are kept, if they fit
        found = value_statistics(pictures)._asdict()
        arguments |= {key: values for key, values in found.items() if f"views.{key}" not in given}
        ends = "; ".join(f"{low:g} to {high:g}" for low, high in zip(arguments["low"][:8], arguments["high"][:8]))
        lines.append(f"values: {ends}{'; ...' * (channels > 8)} become 0 to 1, by percentiles of each channel")
    if channels != 3 or not train.color:
        left_out = without_colors(recipe.views.policy, arguments, given)
        arguments |= left_out
        why = f"the {channels} channels are not red, green and blue" if channels > 1 else "the images are gray"
        lines += [f"left out of the views: {COLOR_ONLY}, because {why}"] if left_out else []
    return replace(recipe, views=replace(recipe.views, arguments=arguments)), lines


def check_lengths(recipe: Recipe, channels: int) -> None:
    """Raise if the views normalize another number of channels than images have; gray ones may have those of colors."""
    for key in STATISTICS:
        length = len(recipe.views.arguments.get(key, (0,)))
        if length not in (1, channels) and not (length == 3 and channels == 1):
            each = f"one for each of the {channels} channels" if channels > 1 else "no more"
            raise UsageError(f"views.{key} has {length} numbers: give one, or {each}")


def without_colors(policy: str, arguments: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The settings of views that leave out what only changes colors, if the policy does it and the user doesn't ask."""
    policies = [p.override(arguments) for p in alternatives(policy)]
    changes: dict[str, Any] = {}
    if "views.gray" not in given and any(p.gray for p in policies):
        changes["gray"] = 0.0
    if "views.jitter" not in given and any(any(p.jitter[2:]) for p in policies):
        changes["jitter"] = [*policies[0].jitter[:2], 0.0, 0.0]
    return changes
