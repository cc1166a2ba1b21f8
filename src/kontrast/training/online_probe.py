"""The probe that a run goes by while it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kontrast.data import ImageSet
from kontrast.errors import NumbersError
from kontrast.lens.measures import conditional_entropy
from kontrast.lens.rank import effective_rank
from kontrast.probes import extract_features, knn
from kontrast.training.build import evaluation_view

IMAGES = 1024


class OnlineProbe:
    """kNN, effective rank and H(X-|X) of the encoder as it trains, on at most `limit` images of each part. Given the
    whole student, the entropy is that of its projections, which the objective sees, on the lens's own images."""

    def __init__(self, recipe: Any, train: ImageSet, test: ImageSet | None, device: torch.device, limit: int = 50_000):
        self.recipe, self.device = recipe, device
        self.train, self.test = train.first(limit), None if test is None else test.first(limit)
        self.shown = (train if test is None else test).first(IMAGES)
        self.transform = evaluation_view(recipe)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        encoder = getattr(network, "encoder", network)
        fit = extract_features(encoder, self.train, self.transform, device=self.device).to(self.device)
        if not bool(torch.isfinite(fit).all()):  # the last step's loss was good, and what it made of the weights is not
            raise NumbersError("the encoder's features are not finite after the last step: lower training.lr")
        record = {"effective_rank": effective_rank(fit)}
        if len(self.shown) > 2:
            found = conditional_entropy(extract_features(network, self.shown, self.transform, device=self.device))
            record |= dict(zip(("conditional_entropy", "conditional_entropy_max"), found))
        if self.test is not None and self.train.labels is not None and self.test.labels is not None:
            held = extract_features(encoder, self.test, self.transform, device=self.device)
            settings = self.recipe.evaluation
            sets = (fit, self.train.labels, held, self.test.labels)
            record["knn"] = knn(*sets, k=settings.k, temperature=settings.temperature).accuracy
        return record
