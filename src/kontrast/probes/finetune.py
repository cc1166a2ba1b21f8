"""Few-shot probes and fine-tuning. N train images, T test images, C classes, n images a class."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kontrast.probes.descent import Descent
from kontrast.probes.extract import extract_features, pictures
from kontrast.probes.few_shot import check_labels
from kontrast.probes.result import ProbeResult, result


def fine_tune(
    encoder: nn.Module,
    train: Any,
    train_labels: Tensor,
    test: Any,
    test_labels: Tensor,
    *,
    epochs: int = 50,
    batch: int = 64,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    transform: Callable[..., Any] | None = None,
    advance: Callable[[int], None] | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Train a copy of the encoder and a zero-initialised linear layer together: Nesterov SGD, cosine, last epoch.

    train, test: uint8 [N,C,H,W] or image sets. transform: uint8 to float, as for `extract_features`. advance: told the
    number of images of each step.
    """
    device = next(encoder.parameters()).device
    network = with_classifier(encoder, check_labels(train, train_labels, test, test_labels), device)
    parameters = list(network.parameters())
    descent = Descent(parameters, nesterov=True, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        batches = [r for r in torch.randperm(len(train), generator=generator).split(batch) if len(r) > 1]
        for i, rows in enumerate(batches):
            images, sizes = batch_of(train, rows, device)
            loss = cross_entropy(
                network(pictures(transform, rows.to(device), images, sizes)), train_labels[rows].to(device)
            )
            rate = lr * (1 + math.cos(math.pi * (epoch + i / len(batches)) / epochs)) / 2
            descent.step(torch.autograd.grad(loss, parameters), rate)
            if advance:
                advance(len(rows))
    scores = extract_features(network, test, transform, device=device)
    protocol = {"epochs": epochs, "batch": batch, "lr": lr, "weight_decay": weight_decay, "optimizer": "sgd, nesterov"}
    return result("fine-tune", scores.argmax(1) == test_labels.cpu(), protocol, seed)


def batch_of(images: Any, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """These rows of a tensor or an image set, whose images may have sizes of their own."""
    if not hasattr(images, "batch"):
        return torch.as_tensor(images[rows]).to(device), None
    pixels, sizes = images.batch(rows)
    return pixels.to(device), None if sizes is None else sizes.to(device)


def with_classifier(encoder: nn.Module, classes: int, device: torch.device) -> nn.Sequential:
    width: Any = encoder.width  # any module with a width will do
    classifier = nn.Linear(width, classes, device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(copy.deepcopy(encoder), classifier).requires_grad_(True).train()
