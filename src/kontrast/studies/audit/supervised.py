"""The supervised baseline of the audit: the recipe's encoder with a linear layer, trained on the true labels.

N images, C channels, F width of the representation that probes read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kontrast.config.recipe import Recipe
from kontrast.training.learner import build_student


class Supervised(nn.Module):
    """Encoder [N,C,h,w] -> [N,F] and a linear layer to the classes; cross-entropy."""

    def __init__(self, recipe: Recipe, channels: int, classes: int):
        super().__init__()
        self.encoder = build_student(recipe, channels).encoder
        self.classifier = nn.Linear(self.encoder.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))

    def loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return cross_entropy(self(x), labels.to(torch.int64))
