"""Measures what a frozen encoder retained: the labels, the added feature, and the known factors of the digits.

N train rows, T test rows, F width, n bits.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.data.added_features import ExtraChannels
from kontrast.probes import knn, logistic
from kontrast.probes.extract import extract_features
from kontrast.probes.logistic import fit_logistic, standardize
from kontrast.probes.result import Predictions, result
from kontrast.studies.cells import probe_numbers
from kontrast.training.build import build_views, evaluation_view
from kontrast.views import keys as view_keys

GALLERY = 1_000
UNSEEN_VIEWS = 1_000_003  # a seed whose views no training draws
CONTINUOUS = ("position", "size")
FACTORS = ("background", "hue", *CONTINUOUS)


def measure_features(
    encoder: nn.Module, recipe: Recipe, train: ImageSet, test: ImageSet | None, device: torch.device,
    neighbors: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The accuracy of the labels (or of retrieval without labels), of the added feature, and of each known factor.

    With `neighbors`, the labels are also predicted by the nearest training images, as `knn`.
    """
    transform = evaluation_view(recipe)
    measured: dict[str, Any] = {"injected": None, "factors": {}}
    if test is None or train.labels is None or test.labels is None:
        # Without labels, images are retrieved by augmentations of them that the training never drew.
        return measured | {"target": "retrieval"} | retrieval(encoder, recipe, train if test is None else test, device)
    fit, held = (extract_features(encoder, part, transform, device=device) for part in (train, test))
    measured |= {"target": "labels", **probe_numbers(logistic(fit, train.labels, held, test.labels))}
    if neighbors:
        k, temperature = recipe.evaluation.k, recipe.evaluation.temperature
        measured["knn"] = probe_numbers(knn(fit, train.labels, held, test.labels, k=k, temperature=temperature))
    measured["injected"] = probe_added_feature(fit, train, held, test)
    for name in FACTORS:
        if name in train.factors and name in test.factors:
            measured["factors"][name] = probe_factor(name, fit, train.factors[name], held, test.factors[name])
    return measured


def probe_added_feature(fit: Tensor, train: ImageSet, held: Tensor, test: ImageSet) -> float | None:
    """Accuracy of linear probes of the bits (their mean) or of the overlaid digit; None without an added feature."""
    if "bits" in train.factors and train.factors["bits"].shape[1]:
        return probe_bits(fit, train.factors["bits"], held, test.factors["bits"])
    if "overlay_class" in train.factors:
        y, y_test = train.factors["overlay_class"], test.factors["overlay_class"]
        known = torch.isin(y_test, y.unique())
        if len(y.unique()) > 1:
            return logistic(fit, y, held[known], y_test[known], grid=(1.0,)).accuracy
    return None


def probe_bits(fit: Tensor, bits: Tensor, held: Tensor, y_test: Tensor) -> float:
    """Mean accuracy over the bits [N,n], each with its own linear probe."""
    x, y = standardize(fit, held)
    right = [(fit_logistic(x, b.long(), 2).predict(y) == a.long()).double().mean() for b, a in zip(bits.T, y_test.T)]
    return float(torch.stack(right).mean())


def probe_factor(name: str, fit: Tensor, truth: Tensor, held: Tensor, y_test: Tensor) -> float:
    """Accuracy of a linear probe for a factor with classes; R^2 of least squares, at least 0, for a continuous one."""
    if name not in CONTINUOUS:
        return logistic(fit, truth.long(), held, y_test.long(), grid=(1.0,)).accuracy
    x, y = (torch.nn.functional.pad(part.double(), (0, 1), value=1.0) for part in standardize(fit, held))
    goal, wanted = (t.double().reshape(len(t), -1) for t in (truth, y_test))
    penalty = 1e-3 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    guess = y @ torch.linalg.solve(x.T @ x + penalty, x.T @ goal)
    explained = 1 - (wanted - guess).square().sum() / (wanted - wanted.mean(0)).square().sum()
    return max(0.0, float(explained))


def retrieval(encoder: nn.Module, recipe: Recipe, images: ImageSet, device: torch.device) -> dict[str, Any]:
    """Accuracy of finding an image by another augmentation of it.

    All images get the same bits, so that only the image itself can identify it; an overlaid digit is part of the image.
    """
    some = with_equal_bits(images.first(GALLERY), recipe)
    two = dataclasses.replace(recipe, views=dataclasses.replace(recipe.views, count=2, local_count=0))
    views = build_views(two, torch.float32)

    def draw(side: int, images: Tensor, keys: Tensor, sizes: Tensor | None) -> Tensor:
        """One of two views that no training draws. `keys` are positions in the set, views need stable indices."""
        index = some.numbers(keys.cpu()).to(keys.device)
        return views(images, view_keys(UNSEEN_VIEWS, 0, index), sizes)[side : side + 1]  # type: ignore[return-value]

    sides = [extract_features(encoder, some, partial(draw, side), device=device) for side in (0, 1)]
    a, b = (torch.nn.functional.normalize(x - x.mean(0), dim=1) for x in sides)
    correct = (a @ b.T).argmax(1) == torch.arange(len(a))
    return probe_numbers(result("retrieval", Predictions(correct), {"images": len(a)}))


def with_equal_bits(images: ImageSet, recipe: Recipe) -> ImageSet:
    """The images, all with the bits of the first one."""
    if not recipe.data.random_bits:
        return images
    planes = images.images.planes[:1].expand(len(images), -1)
    return dataclasses.replace(images, images=ExtraChannels(images.images.base, planes))
