"""A linear classifier on frozen features, trained with each paper's protocol.

N train rows, T test rows, F width, C classes, B batch. The encoder is in evaluation mode when features are made, so
batch norm plays no part here. The result is the accuracy of the last epoch; the best epoch's is in `extra`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import UsageError
from kontrast.optim import Optimizer, build_optimizer, cosine_decay
from kontrast.probes.result import ProbeResult, check_features, check_split, predictions, result
from kontrast.registry import nearest


@dataclass(frozen=True)
class LinearProtocol:
    """How one paper trains its linear classifier.

    Args:
        name: the protocol's name.
        optimizer: "sgd", "lars" or "adam".
        lr: peak learning rate.
        batch: images per step.
        epochs: passes over the train features.
        momentum: momentum of "sgd" and "lars".
        nesterov: Nesterov's form of "sgd".
        weight_decay: weight decay.
        betas: the averages of "adam".
        milestones: epochs at which the rate is multiplied by `factor`. Without milestones it follows a cosine to zero.
        factor: multiplier at each milestone.
        deviation: standard deviation of the initial weights. None is nn.Linear's initialization.

    Example:
        >>> [LinearProtocol("mine", "sgd", 30.0, 256, 100, milestones=(60, 80)).rate(epoch) for epoch in (0, 60)]
        [30.0, 3.0]
    """

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
        """Return the learning rate after `epoch` epochs, which may be a fraction."""
        if self.milestones:
            return self.lr * self.factor ** sum(epoch >= m for m in self.milestones)
        return cosine_decay(self.lr, epoch, self.epochs)

    def build_optimizer(self, classifier: nn.Module) -> Optimizer:
        rules = {"sgd": ("momentum", "nesterov"), "lars": ("momentum",), "adam": ("betas",)}
        rule: Any = {name: getattr(self, name) for name in rules.get(self.optimizer, ())}
        return build_optimizer(classifier, self.optimizer, self.lr, weight_decay=self.weight_decay, **rule)


PROTOCOLS = {
    p.name: p
    for p in (
        LinearProtocol(
            "cacr", "adam", 1e-3, 128, 100, betas=(0.5, 0.999), milestones=(60, 80), factor=0.2, deviation=None
        ),
        LinearProtocol("moco", "sgd", 30.0, 256, 100, milestones=(60, 80)),
        # DCL's "base lr 1.2" is read as the rate at batch 4096: SimSiam, whose protocol it uses, has 1.6 there.
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
    seed: int = 0,
) -> ProbeResult:
    """Train a linear classifier by a paper's protocol and report the accuracy of its last epoch.

    Args:
        train: train features [N,F].
        train_labels: integers [N].
        test: test features [T,F].
        test_labels: integers [T].
        protocol: a name in `PROTOCOLS` or a `LinearProtocol`, default "moco". A batch larger than N becomes N.
        features_of_epoch: returns the train features [N,F] of an epoch's augmentations, rows as in `train`. Default:
            the same features in every epoch, which `note` reports.
        seed: seed of the initial weights and of the order of the images.

    Returns:
        The result; `extra` has the accuracy per epoch ("curve") and the best one ("best", "best_epoch").

    Example:
        >>> y = torch.arange(40) % 2
        >>> linear(torch.eye(2)[y], y, torch.eye(2)[y], y, "simclr").accuracy
        1.0
    """
    protocol = protocol_named(protocol)
    train, y, test, test_labels, classes = check_features(train, train_labels, test, test_labels)
    train, test = train.float(), test.float()
    notes = [] if features_of_epoch else ["cached features without augmentation"]
    if protocol.batch > len(train):
        notes.append(f"batch {protocol.batch} exceeds the {len(train)} train images: {len(train)} used")
    generator = torch.Generator().manual_seed(seed)
    classifier = initial_classifier(train.shape[1], classes, protocol.deviation, generator).to(train.device)
    optimizer = protocol.build_optimizer(classifier)
    accuracies = []
    for epoch in range(protocol.epochs):
        x = train
        if features_of_epoch:
            x = check_split("augmented train", features_of_epoch(epoch).to(train.device), y)[0].float()
        train_epoch(x, y, classifier, optimizer, protocol, epoch, generator)
        scores = classify(classifier, test)
        accuracies.append(
            (scores.argmax(1) == test_labels).double().mean()
        )  # read at the end, so that no epoch waits for the device
    curve = torch.stack(accuracies).tolist()
    best = max(range(len(curve)), key=curve.__getitem__)
    extra = {"best": curve[best], "best_epoch": best, "curve": curve}
    found = predictions(scores, test_labels)
    return result(f"linear-{protocol.name}", found, asdict(protocol), seed, "; ".join(notes), **extra)


def protocol_named(protocol: str | LinearProtocol) -> LinearProtocol:
    if isinstance(protocol, LinearProtocol):
        return protocol
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown linear protocol {protocol!r}: {nearest(protocol, PROTOCOLS)}")
    return PROTOCOLS[protocol]


def initial_classifier(width: int, classes: int, deviation: float | None, generator: torch.Generator) -> nn.Linear:
    """Build a linear layer whose weights come from the generator, not from torch's global one."""
    if deviation is None:  # nn.Linear's initialization
        bound = 1 / math.sqrt(width)
        weight = (2 * torch.rand(classes, width, generator=generator) - 1) * bound
        bias = (2 * torch.rand(classes, generator=generator) - 1) * bound
    else:
        weight, bias = deviation * torch.randn(classes, width, generator=generator), torch.zeros(classes)
    layer = nn.Linear(width, classes, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


@torch.inference_mode()
def classify(classifier: nn.Linear, x: Tensor) -> Tensor:
    """Return the scores [T,C]."""
    return torch.addmm(classifier.bias, x, classifier.weight.T)


@torch.no_grad()
def train_epoch(
    x: Tensor,
    y: Tensor,
    classifier: nn.Linear,
    optimizer: Optimizer,
    protocol: LinearProtocol,
    epoch: int,
    generator: torch.Generator,
) -> None:
    """Train on all rows once in a new order, with the gradient of the softmax written out."""
    weight, bias = classifier.weight, classifier.bias
    batches = torch.randperm(len(x), generator=generator).to(x.device).split(min(protocol.batch, len(x)))
    for i, rows in enumerate(batches):
        features, labels = x[rows], y[rows, None]
        residual = torch.addmm(bias, features, weight.T).softmax(1)
        residual.scatter_add_(1, labels, torch.full_like(labels, -1.0, dtype=residual.dtype)).div_(len(rows))
        weight.grad, bias.grad = residual.T @ features, residual.sum(0)
        optimizer.lr = protocol.rate(epoch + i / len(batches))
        optimizer.step()
