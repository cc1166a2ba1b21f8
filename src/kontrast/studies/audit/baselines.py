"""The audit's baselines: supervised training, variational autoencoders and an untrained encoder.

N images, C channels, F width of the representation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kontrast.config.recipe import Recipe
from kontrast.data import Feeder, ImageSet
from kontrast.errors import NumbersError
from kontrast.studies.audit.autoencoder import VariationalAutoencoder
from kontrast.training.build import build_views
from kontrast.training.learner import build_student
from kontrast.training.progress import Progress
from kontrast.views import keys

SUPERVISED, VAE, UNTRAINED = "supervised", "VAE", "untrained"
VAE_PIXELS = "VAE-pixels"  # its likelihood counts a random bit at every pixel, not once
AUTOENCODERS = (VAE, VAE_PIXELS)
BASELINES = (SUPERVISED, *AUTOENCODERS, UNTRAINED)
AUTOENCODER_BATCH = 64
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)  # the first gradients of added channels are huge, and a longer memory would stall the rest
Loss = Callable[[Tensor, Tensor | None], Tensor]


def train_baseline(learner: str, recipe: Recipe, train: ImageSet, device: torch.device, title: str) -> nn.Module:
    """Train a baseline with the recipe's encoder, views and steps, and return the encoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if learner == UNTRAINED:
            return build_student(recipe, train.channels).encoder.to(device).eval()
        if learner in AUTOENCODERS:
            vae = VariationalAutoencoder(recipe, train.channels, each_pixel=learner == VAE_PIXELS)
            fit(vae, vae.loss, with_small_batches(recipe), train, device, title)
            return vae.encoder
        assert train.labels is not None
        supervised = Supervised(recipe, train.channels, int(train.labels.max()) + 1)
        fit(supervised, supervised.loss, recipe, train, device, title)
        return supervised.encoder


class Supervised(nn.Module):
    """The recipe's encoder [N,C,h,w] -> [N,F] with a linear classifier, trained by cross-entropy."""

    def __init__(self, recipe: Recipe, channels: int, classes: int):
        super().__init__()
        self.encoder = build_student(recipe, channels).encoder
        self.classifier = nn.Linear(self.encoder.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))

    def loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return cross_entropy(self(x), labels.to(torch.int64))


def with_small_batches(recipe: Recipe) -> Recipe:
    """The recipe with smaller batches and more steps for the autoencoder, so that it shows as many images."""
    t = recipe.training
    batch = min(t.batch, AUTOENCODER_BATCH)
    t = dataclasses.replace(t, batch=batch, max_steps=t.max_steps * t.batch // batch)
    return dataclasses.replace(recipe, training=t)


def fit(module: nn.Module, loss: Loss, recipe: Recipe, train: ImageSet, device: torch.device, title: str) -> None:
    """Minimize `loss(view [B,C,h,w], labels [B])` with Adam for as many steps as the recipe has.

    The images come in the same order, and with the same augmentations, as the first view of a contrastive run.
    """
    t = recipe.training
    feeder = Feeder(
        train, batch=t.batch, seed=recipe.seed, device=device,
        allow_small=recipe.data.allow_small, resident=recipe.data.resident,
    )  # fmt: skip
    views = build_views(dataclasses.replace(recipe, views=dataclasses.replace(recipe.views, count=1)), torch.float32)
    steps = t.epochs * feeder.steps_per_epoch
    total = min(steps, t.max_steps) if t.max_steps else steps
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE, betas=BETAS)
    module.to(device).train()
    batches = ((epoch, batch) for epoch in itertools.count() for batch in feeder.batches(epoch))
    with Progress(title, total * t.batch) as bar:
        for step, (epoch, batch) in enumerate(itertools.islice(batches, total), 1):
            made = views(batch.images, keys(recipe.seed, epoch, batch.indices), batch.sizes)
            value = loss(made[0], batch.labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if step % 10 == 0 or step == total:
                number = value.item()
                if not math.isfinite(number):
                    raise NumbersError(f"{title}: the loss is {number} at step {step}")
                bar.advance(0, loss=number)
            bar.advance(t.batch)
    module.eval()
