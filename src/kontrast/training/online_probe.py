"""Evaluate the encoder during training."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kontrast.config.recipe import Recipe
from kontrast.errors import NumbersError
from kontrast.float64 import float64_device
from kontrast.lens.label_free import alpha_req, lidar, rankme
from kontrast.lens.measures import conditional_entropy
from kontrast.lens.rank import effective_rank
from kontrast.probes import extract_features, knn
from kontrast.training.augmented_projections import augmented_projections
from kontrast.training.build import evaluation_view
from kontrast.training.resolve import t_minus_of
from kontrast.training.splits import Splits

IMAGES = 1024
LIDAR_VIEWS = 10
FITTED, FITTED_AT_END = 50_000, 512
"""The most images of a split that features are computed of, with evaluations during training and without them."""


class OnlineProbe:
    """Measure kNN accuracy, effective rank, conditional entropy H(X-|X) and label-free measures during training.

    The entropy is that of the projections, which the objective sees, on the images that the lens uses. It is measured
    at a t- that is the same for every run, so that runs compare, and at the objective's own if it has one.

    Args:
        recipe: the run's recipe, for its evaluation section and its view without augmentation.
        splits: the images. If the recipe has no evaluations, a few training images are measured, without kNN.
        device: where features are computed.
    """

    def __init__(self, recipe: Recipe, splits: Splits, device: torch.device):
        self.recipe, self.device = recipe, device
        evaluated = bool(recipe.evaluation.every)
        train, test = (splits.train, splits.test) if evaluated else (splits.trained, None)
        limit = FITTED if evaluated else FITTED_AT_END
        self.train, self.test = train.first(limit), None if test is None else test.first(limit)
        self.shown = (train if test is None else test).first(IMAGES)
        self.transform = evaluation_view(recipe)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        encoder = getattr(network, "encoder", network)
        fit = extract_features(encoder, self.train, self.transform, device=self.device).to(float64_device(self.device))
        if not bool(torch.isfinite(fit).all()):  # the loss of the last step was finite, the weights after it are not
            raise NumbersError("the encoder's features are not finite after the last step: lower training.lr")
        record = {"effective_rank": effective_rank(fit)}
        if len(self.shown) > 2:
            z, own = extract_features(network, self.shown, self.transform, device=self.device), t_minus_of(self.recipe)
            record["conditional_entropy"], record["conditional_entropy_max"] = conditional_entropy(z)
            if own is not None:
                record["conditional_entropy_own"] = conditional_entropy(z, own)[0]
            record |= self.label_free(network, encoder, z)
        if self.test is not None and self.train.labels is not None and self.test.labels is not None:
            test = extract_features(encoder, self.test, self.transform, device=self.device)
            settings = self.recipe.evaluation
            sets = (fit, self.train.labels, test, self.test.labels)
            record["knn"] = knn(*sets, k=settings.k, temperature=settings.temperature).accuracy
        return record

    def label_free(self, network: nn.Module, encoder: nn.Module, z: Tensor) -> dict[str, float]:
        """Return RankMe and LiDAR of the projections and alpha-ReQ of the features, as far as there are enough images.

        LiDAR takes ten views of each image and more images than the projections are wide, so it is only measured if
        the recipe has evaluations.
        """
        features = extract_features(encoder, self.shown, self.transform, device=self.device)
        record = {"rankme": rankme(z), "rankme_uncentered": rankme(z, centered=False), "alpha_req": alpha_req(features)}
        if self.recipe.evaluation.every and len(self.shown) > z.shape[1]:
            views = augmented_projections(network, self.recipe, self.shown, LIDAR_VIEWS, self.device)
            found = lidar(views)
            record |= {"lidar": found.value, "lidar_above_noise": found.above_noise, "lidar_signal": found.signal}
        return {name: value for name, value in record.items() if math.isfinite(value)}
