"""How an encoder is fine-tuned: optimizer, schedule, layer decay and regularization, as several papers do it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kontrast.errors import UsageError
from kontrast.networks.vit import DropPath
from kontrast.optim import cosine_decay
from kontrast.probes.rand_augment import STRONGEST
from kontrast.registry import nearest


@dataclass(frozen=True)
class FineTuning:
    """The settings of fine-tuning.

    Args:
        name: the protocol's name.
        optimizer: "sgd" (with Nesterov's momentum) or "adamw" (no weight decay of biases and norms).
        lr: peak learning rate, for `batch` images per step.
        weight_decay: weight decay.
        epochs: passes over the train images.
        batch: images per step.
        warmup: epochs in which the rate grows linearly from 0; afterwards it follows a cosine to zero.
        layer_decay: the rate of each layer is this multiple of the next one's; 1 for equal rates.
        mixup: alpha of mixup's Beta distribution; 0 for none.
        cutmix: alpha of cutmix's Beta distribution; 0 for none. With both, each batch takes one of them.
        smoothing: label smoothing.
        drop_path: the share of images for which the last block's branches are left out, growing linearly from 0 at the
            first block. It applies to kontrast's vision transformers; for other encoders `suited_to` sets it to 0.
        erasing: the probability that a box of an image is replaced by noise, after augmentation.
        randaugment: the mean magnitude of RandAugment's operations, from 0 (none) to 10. It changes random crops of
            color images; for others `suited_to` sets it to 0.
        repeats: how many different crops of an image are in one batch; an epoch has so many times fewer images.

    Example:
        >>> FineTuning("mine", lr=0.1, epochs=10, warmup=2).rate(1.0)
        0.05
    """

    name: str = "sgd"
    optimizer: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0
    epochs: int = 50
    batch: int = 64
    warmup: float = 0.0
    layer_decay: float = 1.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    drop_path: float = 0.0
    erasing: float = 0.0
    randaugment: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.randaugment <= STRONGEST or self.repeats < 1:
            given = f"randaugment = {self.randaugment:g}, repeats = {self.repeats}"
            raise UsageError(f"{given}: give a magnitude from 0 to {STRONGEST:g}, and 1 or more")

    def suited_to(self, encoder: nn.Module, augment: Any = None) -> FineTuning:
        """Return the settings without what these images or this encoder can't have.

        Args:
            encoder: without branches that can be left out, it has no drop path.
            augment: what makes random crops; without it there are no repeats, and without its `colors` no RandAugment.
        """
        left = {} if any(isinstance(m, DropPath) for m in encoder.modules()) else {"drop_path": 0.0}
        left |= {} if getattr(augment, "colors", None) else {"randaugment": 0.0}
        return replace(self, **left, **({} if augment else {"repeats": 1}))  # type: ignore[arg-type]

    def rate(self, epoch: float) -> float:
        """Return the learning rate after `epoch` epochs, which may be a fraction."""
        if epoch < self.warmup:
            return self.lr * epoch / self.warmup
        return cosine_decay(self.lr, epoch - self.warmup, self.epochs - self.warmup)


MIXED: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1, "drop_path": 0.1}
STRONG: dict[str, Any] = {**MIXED, "erasing": 0.25, "randaugment": 9.0}
FINE_TUNING = {
    p.name: p
    for p in (
        FineTuning(),
        FineTuning("simclr", lr=0.05, epochs=30, batch=256),
        FineTuning("mae", "adamw", 2e-3, 0.05, 100, 1024, warmup=5, layer_decay=0.65, **STRONG),
        FineTuning("moco-v3", "adamw", 1e-3, 0.05, 150, 1024, warmup=5, repeats=3, **STRONG),
        FineTuning("moco-v3-small", "adamw", 6e-4, 0.1, 100, 1024, warmup=3, **MIXED),
    )
}
"""Protocols by name."""

RATES, DECAYS = (0.1, 1.0, 10.0), (0.0, 1e-4, 0.05)
"""What a search tries: multiples of the protocol's learning rate, and weight decays."""


def fine_tuning_named(protocol: str | FineTuning) -> FineTuning:
    if isinstance(protocol, FineTuning):
        return protocol
    if protocol not in FINE_TUNING:
        raise UsageError(f"unknown fine-tuning protocol {protocol!r}: {nearest(protocol, FINE_TUNING)}")
    return FINE_TUNING[protocol]
