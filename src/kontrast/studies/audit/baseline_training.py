"""Training without contrast, for the audit's baselines: one augmented view an image, Adam, the recipe's own steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kontrast.config.recipe import Recipe
from kontrast.data import Feeder, ImageSet
from kontrast.errors import NumbersError
from kontrast.training.build import build_views
from kontrast.training.progress import Progress
from kontrast.views import keys

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)  # the first gradients of injected channels are huge: a long memory of them would stall the rest
Loss = Callable[[Tensor, Tensor | None], Tensor]


def fit(module: nn.Module, loss: Loss, recipe: Recipe, train: ImageSet, device: torch.device, title: str) -> None:
    """Minimise `loss(view [B,C,h,w], labels [B])` over the module's parameters for as many steps as the recipe has.

    Images come in the order, and under the augmentations, in which the recipe's contrastive run sees its first view.
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
    step = 0
    with Progress(title, total * t.batch) as bar:
        while step < total:
            epoch = step // feeder.steps_per_epoch
            for batch in feeder.batches(epoch):
                made = views(batch.images, keys(recipe.seed, epoch, batch.indices), batch.sizes)
                value = loss(made[0], batch.labels)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                step += 1
                if step % 10 == 0 or step == total:
                    number = value.item()
                    if number != number or number in (float("inf"), -float("inf")):
                        raise NumbersError(f"{title}: the loss is {number} at step {step}")
                    bar.advance(0, loss=number)
                bar.advance(t.batch)
                if step == total:
                    break
    module.eval()
