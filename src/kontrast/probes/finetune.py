"""Fine-tuning: train a copy of the encoder together with a linear classifier."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kontrast.optim import build_optimizer, cosine_decay
from kontrast.probes.extract import encoder_input, extract_features
from kontrast.probes.result import ProbeResult, check_labels, count_classes, predictions, result


def finetune(
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
    """Train a copy of the encoder and a zero-initialized linear layer with Nesterov SGD; report the last epoch.

    Args:
        encoder: network with the attribute `width`; it is not changed.
        train: train images, uint8 [N,C,H,W] or an image set.
        train_labels: integers [N].
        test: test images, uint8 [T,C,H,W] or an image set.
        test_labels: integers [T].
        epochs: passes over the train images, default 50.
        batch: images per step, default 64. A last batch of one image is skipped, because batch norm needs two.
        lr: peak learning rate, default 0.01; it follows a cosine to zero.
        weight_decay: weight decay of all parameters.
        transform: maps uint8 images to the encoder's input, as in `extract_features`.
        advance: called with the number of images of each step, for progress bars.
        seed: seed of the order of the images.

    Example:
        >>> from kontrast.networks import encoder
        >>> network, y = encoder("small-conv", size=16, width=8), torch.arange(8) % 2
        >>> images = (255 * y).to(torch.uint8)[:, None, None, None].expand(8, 3, 16, 16)
        >>> finetune(network, images, y, images, y, epochs=1).n
        8
    """
    train_labels = check_labels("train", len(train), train_labels)
    test_labels = check_labels("test", len(test), test_labels)
    device = next(encoder.parameters()).device
    network = add_classifier(encoder, count_classes(train_labels, test_labels), device)
    optimizer = build_optimizer(network, "sgd", nesterov=True, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        batches = [r for r in torch.randperm(len(train), generator=generator).split(batch) if len(r) > 1]
        for i, rows in enumerate(batches):
            images, sizes = load_batch(train, rows, device)
            scores = network(encoder_input(transform, rows.to(device), images, sizes))
            optimizer.zero_grad()
            cross_entropy(scores, train_labels[rows].to(device)).backward()
            optimizer.lr = cosine_decay(lr, epoch + i / len(batches), epochs)
            optimizer.step()
            if advance:
                advance(len(rows))
    scores = extract_features(network, test, transform, device=device)
    protocol = {"epochs": epochs, "batch": batch, "lr": lr, "weight_decay": weight_decay, "optimizer": "sgd, nesterov"}
    return result("fine-tune", predictions(scores, test_labels.cpu()), protocol, seed)


def load_batch(images: Any, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return these rows of a tensor or an image set on the device, and their sizes if the images differ in size."""
    if not hasattr(images, "batch"):
        return torch.as_tensor(images[rows]).to(device), None
    pixels, sizes = images.batch(rows)
    return pixels.to(device), None if sizes is None else sizes.to(device)


def add_classifier(encoder: nn.Module, classes: int, device: torch.device) -> nn.Sequential:
    width: Any = encoder.width
    classifier = nn.Linear(width, classes, device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(copy.deepcopy(encoder), classifier).requires_grad_(True).train()
