"""What is trained and evaluated: an encoder with its projection head, and perhaps a text tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kontrast import networks
from kontrast.config.recipe import Recipe
from kontrast.errors import UsageError
from kontrast.networks.catalog import Encoder, Head
from kontrast.networks.stages import freeze_stages
from kontrast.training.caption_batches import size_of_vocabulary, tokens_per_caption


class Student(nn.Module):
    """An encoder and its projection head, and perhaps a text tower, which has an encoder and a head of its own.

    With `returns_features` it returns, in training, the encoder's features beside the projections: [B,D+F].
    """

    def __init__(self, encoder: Encoder, head: Head, text: Student | None = None, frozen: bool = False):
        super().__init__()
        self.encoder, self.head, self.text = encoder, head, text
        self.returns_features = False
        self.frozen: list[nn.Module] = []
        if frozen:
            encoder.requires_grad_(False)
            self.frozen = [encoder]

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        projections: Tensor = self.head(features)
        if self.returns_features and self.training:
            return torch.cat([projections, features.to(projections.dtype)], dim=-1)
        return projections

    def freeze(self, stages: int) -> None:
        """Stop the training of the encoder's first stages; their batch norm uses its running statistics."""
        self.frozen = freeze_stages(self.encoder, stages)

    def train(self, mode: bool = True) -> Student:
        """Set training mode, except for what is frozen, which has no dropout either."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self


def build_student(recipe: Recipe, channels: int) -> Student:
    """Return the recipe's encoder and head, and its text tower if it has one, newly initialized."""
    given = {"channels": channels, "size": recipe.views.size}
    encoder = networks.encoder(recipe.encoder.name, **given, **recipe.encoder.arguments)
    head = networks.head(recipe.head.name, encoder.width, **recipe.head.arguments)
    if (text := recipe.text) is None:
        return Student(encoder, head)
    known = {"vocabulary": size_of_vocabulary(text), "length": tokens_per_caption(text)}
    tower = networks.text_tower(text.name, **known, **text.arguments)
    projection = networks.head(text.head, tower.width, **({} if text.head == "identity" else {"outputs": head.width}))
    if projection.width != head.width:
        widths = f"it has width {projection.width}, and the head of the images {head.width}"
        raise UsageError(f"text.head = {text.head!r}: {widths}; give 'linear'")
    return Student(encoder, head, Student(tower, projection, frozen=text.frozen))
