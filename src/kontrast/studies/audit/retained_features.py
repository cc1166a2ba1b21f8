"""What a frozen encoder kept: the true labels, the injected feature, and the known factors of the embedded set.

N train rows, T test rows, F width, n bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.data.image_set import ExtraChannels
from kontrast.probes import logistic
from kontrast.probes.extract import extract_features
from kontrast.probes.logistic import fit_logistic, standardize
from kontrast.probes.result import result
from kontrast.runs.probe import features_of
from kontrast.training.build import build_views, evaluation_view
from kontrast.views import keys

GALLERY = 1_000
HELD_OUT = 1_000_003  # a seed of views that no training draws
CONTINUOUS = ("position", "size")
FACTORS = ("background", "hue", *CONTINUOUS)


def what_was_kept(
    encoder: nn.Module, recipe: Recipe, train: ImageSet, test: ImageSet | None, device: torch.device
) -> dict[str, Any]:
    """The headline under `target` (`labels` or `retrieval`), `injected`, and `factors`."""
    transform = evaluation_view(recipe)
    kept: dict[str, Any] = {"injected": None, "factors": {}}
    if test is None or train.labels is None or test.labels is None:
        # One index serves both views: retrieval is on images of the set itself, under augmentations it never saw.
        return {**kept, "target": "retrieval", **retrieval(encoder, recipe, train if test is None else test, device)}
    fit, held = (features_of(encoder, part, transform, device) for part in (train, test))
    found = logistic(fit, train.labels, held, test.labels)
    kept |= {"target": "labels", "accuracy": found.accuracy, "low": found.low, "high": found.high, "n": found.n}
    kept["injected"] = injected(fit, train, held, test)
    for name in FACTORS:
        if name in train.factors and name in test.factors:
            kept["factors"][name] = factor(name, fit, train.factors[name], held, test.factors[name])
    return kept


def injected(fit: Tensor, train: ImageSet, held: Tensor, test: ImageSet) -> float | None:
    """Share of the injected feature that a line reads: the mean over bits, or the class of the overlaid digit."""
    if "bits" in train.factors and train.factors["bits"].shape[1]:
        return bits_read(fit, train.factors["bits"], held, test.factors["bits"])
    if "overlay_class" in train.factors:
        y, asked = train.factors["overlay_class"], test.factors["overlay_class"]
        known = torch.isin(asked, y.unique())
        if len(y.unique()) > 1:
            return logistic(fit, y, held[known], asked[known], grid=(1.0,)).accuracy
    return None


def bits_read(fit: Tensor, bits: Tensor, held: Tensor, asked: Tensor) -> float:
    """Mean accuracy over the bits [N,n], each by its own linear probe."""
    x, y = standardize(fit, held)
    right = [(fit_logistic(x, b.long(), 2).predict(y) == a.long()).double().mean() for b, a in zip(bits.T, asked.T)]
    return float(torch.stack(right).mean())


def factor(name: str, fit: Tensor, truth: Tensor, held: Tensor, asked: Tensor) -> float:
    """Accuracy of a linear probe for a factor of classes; R^2 of least squares, at least 0, for a continuous one."""
    if name not in CONTINUOUS:
        return logistic(fit, truth.long(), held, asked.long(), grid=(1.0,)).accuracy
    x, y = (torch.nn.functional.pad(part.double(), (0, 1), value=1.0) for part in standardize(fit, held))
    goal, wanted = (t.double().reshape(len(t), -1) for t in (truth, asked))
    penalty = 1e-3 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    guess = y @ torch.linalg.solve(x.T @ x + penalty, x.T @ goal)
    explained = 1 - (wanted - guess).square().sum() / (wanted - wanted.mean(0)).square().sum()
    return max(0.0, float(explained))


def retrieval(encoder: nn.Module, recipe: Recipe, images: ImageSet, device: torch.device) -> dict[str, Any]:
    """Is the nearest of all images, under another augmentation, the same image? Bits are made the same for all, so that
    only what was kept of the image itself can tell; an overlaid digit is part of the picture and stays."""
    some = same_feature(images.first(GALLERY), recipe)
    two = dataclasses.replace(recipe, views=dataclasses.replace(recipe.views, count=2, local_count=0))
    views = build_views(two, torch.float32)
    sides = []
    for side in (0, 1):
        draw = _OneView(views, some, side)
        sides.append(extract_features(encoder, some, draw, device=device))
    a, b = (torch.nn.functional.normalize(x - x.mean(0), dim=1) for x in sides)
    correct = (a @ b.T).argmax(1) == torch.arange(len(a))
    found = result("retrieval", correct, {"images": len(a)})
    return {"accuracy": found.accuracy, "low": found.low, "high": found.high, "n": found.n}


class _OneView:
    """One side of a pair of views, drawn from the images' own stable numbers."""

    def __init__(self, views: Any, images: ImageSet, side: int):
        self.views, self.images, self.side = views, images, side

    def __call__(self, images: Tensor, keys: Tensor, sizes: Tensor | None) -> Tensor:  # keys: positions in the set
        index = self.images.index[keys.cpu()].to(keys.device)  # type: ignore[index]
        made = self.views(images, held_out_keys(index), sizes)
        return made[self.side : self.side + 1]


def held_out_keys(index: Tensor) -> Tensor:
    return keys(HELD_OUT, 0, index)


def same_feature(images: ImageSet, recipe: Recipe) -> ImageSet:
    """The images with the first image's bits laid over all of them."""
    if not recipe.data.random_bits:
        return images
    planes = images.images.planes[:1].expand(len(images), -1)
    return dataclasses.replace(images, images=ExtraChannels(images.images.base, planes))
