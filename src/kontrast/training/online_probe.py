"""Evaluate the encoder during training."""

from __future__ import annotations

import torch
from torch import nn

from kontrast.config.recipe import Recipe
from kontrast.data import ImageSet
from kontrast.errors import NumbersError
from kontrast.lens.measures import conditional_entropy
from kontrast.lens.rank import effective_rank
from kontrast.probes import extract_features, knn
from kontrast.training.build import evaluation_view

IMAGES = 1024


class OnlineProbe:
    """Measure kNN accuracy, effective rank and conditional entropy H(X-|X) of the encoder during training.

    The entropy is that of the projections, which the objective sees, on the images that the lens uses.

    Args:
        recipe: the run's recipe, for its evaluation section and its view without augmentation.
        train: images to fit on.
        test: held-out images, or None for no kNN.
        device: where features are computed.
        limit: the most images of each split.
    """

    def __init__(
        self, recipe: Recipe, train: ImageSet, test: ImageSet | None, device: torch.device, limit: int = 50_000
    ):
        self.recipe, self.device = recipe, device
        self.train, self.test = train.first(limit), None if test is None else test.first(limit)
        self.shown = (train if test is None else test).first(IMAGES)
        self.transform = evaluation_view(recipe)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        encoder = getattr(network, "encoder", network)
        fit = extract_features(encoder, self.train, self.transform, device=self.device).to(self.device)
        if not bool(torch.isfinite(fit).all()):  # the loss of the last step was finite, the weights after it are not
            raise NumbersError("the encoder's features are not finite after the last step: lower training.lr")
        record = {"effective_rank": effective_rank(fit)}
        if len(self.shown) > 2:
            entropy = conditional_entropy(extract_features(network, self.shown, self.transform, device=self.device))
            record |= dict(zip(("conditional_entropy", "conditional_entropy_max"), entropy))
        if self.test is not None and self.train.labels is not None and self.test.labels is not None:
            test = extract_features(encoder, self.test, self.transform, device=self.device)
            settings = self.recipe.evaluation
            sets = (fit, self.train.labels, test, self.test.labels)
            record["knn"] = knn(*sets, k=settings.k, temperature=settings.temperature).accuracy
        return record
