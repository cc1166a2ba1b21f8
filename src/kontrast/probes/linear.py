"""A linear classifier on a frozen encoder, trained as each paper trains it.

N train rows, F width, C classes, B batch; W [C,F], b [C]. The encoder is in evaluation mode when features are made,
so batch norm plays no part here. The accuracy of the last epoch is the result; the best epoch's is kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import UsageError
from kontrast.probes.descent import Descent
from kontrast.probes.result import ProbeResult, checked, checked_part, result
from kontrast.registry import nearest


@dataclass(frozen=True)
class LinearProtocol:
    """How one paper trains its linear classifier. lr is the peak rate; milestones multiply it by `factor`, and without
    milestones it follows a cosine to zero. deviation: of the normal initial weights; None is torch's default."""

    name: str
    optimizer: str
    lr: float
    batch: int
    epochs: int
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    deviation: float | None = 0.01

    def rate(self, epoch: float) -> float:
        if self.milestones:
            return self.lr * self.factor ** sum(epoch >= m for m in self.milestones)
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def descent(self, parameters: list[Tensor]) -> Descent:
        rule: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "betas": self.betas}
        return Descent(parameters, self.optimizer, weight_decay=self.weight_decay, **rule)


PROTOCOLS = {
    p.name: p
    for p in (
        LinearProtocol(
            "cacr", "adam", 1e-3, 128, 100, betas=(0.5, 0.999), milestones=(60, 80), factor=0.2, deviation=None
        ),
        LinearProtocol("moco", "sgd", 30.0, 256, 100, milestones=(60, 80)),
        # DCL's "base lr 1.2" is taken as the rate at batch 4096: SimSiam, whose protocol it is, has 1.6 there.
        LinearProtocol("dcl-lars", "lars", 1.2, 4096, 90),
        LinearProtocol("uniclr", "sgd", 30.0, 256, 100),
        LinearProtocol("uniclr-imagenet", "lars", 0.02 * 1024 / 256, 1024, 90),
        LinearProtocol("simclr", "sgd", 0.1 * 512 / 256, 512, 100, nesterov=True, deviation=0.0),
        LinearProtocol(
            "simclr-imagenet", "sgd", 0.1 * 4096 / 256, 4096, 90, nesterov=True, weight_decay=1e-6, deviation=0.0
        ),
        LinearProtocol("jcl-imagenet100", "sgd", 10.0, 256, 100, milestones=(60, 80)),
        LinearProtocol("hcl", "adam", 1e-3, 512, 100, weight_decay=1e-6, milestones=(100,), factor=1.0, deviation=None),
    )
}


def linear(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    protocol: str | LinearProtocol = "moco",
    *,
    features_of_epoch: Callable[[int], Tensor] | None = None,
    classes: int | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Train by the protocol and report the last epoch.

    features_of_epoch: the train features [N,F] of an epoch's augmentations, rows as in `train`; without it the same
    features serve every epoch, and the note says so. A batch larger than train becomes train.
    """
    protocol = protocol_named(protocol)
    train, y, test, test_labels, classes = checked(train, train_labels, test, test_labels, classes)
    train, test = train.float(), test.float()
    notes = [] if features_of_epoch else ["cached features without augmentation"]
    if protocol.batch > len(train):
        notes.append(f"batch {protocol.batch} exceeds the {len(train)} train images: {len(train)} used")
    generator = torch.Generator().manual_seed(seed)
    weight, bias = initial(train.shape[1], classes, protocol.deviation, generator, train.device)
    descent = protocol.descent([weight, bias])
    right = []
    for epoch in range(protocol.epochs):
        x = train
        if features_of_epoch:
            x = checked_part("augmented train", features_of_epoch(epoch).to(train.device), y)[0].float()
        one_epoch(x, y, weight, bias, descent, protocol, epoch, generator)
        correct = torch.addmm(bias, test, weight.T).argmax(1) == test_labels
        right.append(correct.double().mean())  # read at the end: no epoch waits for the device
    curve = torch.stack(right).tolist()
    best = max(range(len(curve)), key=curve.__getitem__)
    extra = {"best": curve[best], "best_epoch": best, "curve": curve}
    return result(f"linear-{protocol.name}", correct, asdict(protocol), seed, "; ".join(notes), **extra)


def protocol_named(protocol: str | LinearProtocol) -> LinearProtocol:
    if isinstance(protocol, LinearProtocol):
        return protocol
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown linear protocol {protocol!r}: {nearest(protocol, PROTOCOLS)}")
    return PROTOCOLS[protocol]


def initial(width: int, classes: int, deviation: float | None, generator: torch.Generator, device: torch.device):
    if deviation is None:  # nn.Linear's own
        bound = 1 / math.sqrt(width)
        weight = (2 * torch.rand(classes, width, generator=generator) - 1) * bound
        bias = (2 * torch.rand(classes, generator=generator) - 1) * bound
    else:
        weight, bias = deviation * torch.randn(classes, width, generator=generator), torch.zeros(classes)
    return weight.to(device), bias.to(device)


@torch.inference_mode()
def one_epoch(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    descent: Descent,
    protocol: LinearProtocol,
    epoch: int,
    generator: torch.Generator,
) -> None:
    """One pass in a fresh order; the softmax's gradient is written out. The last batch may be smaller."""
    batches = torch.randperm(len(x), generator=generator).to(x.device).split(min(protocol.batch, len(x)))
    for i, rows in enumerate(batches):
        features, labels = x[rows], y[rows, None]
        residual = torch.addmm(bias, features, weight.T).softmax(1)
        residual.scatter_add_(1, labels, torch.full_like(labels, -1.0, dtype=residual.dtype)).div_(len(rows))
        descent.step([residual.T @ features, residual.sum(0)], protocol.rate(epoch + i / len(batches)))
