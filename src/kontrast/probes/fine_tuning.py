"""Fine-tuning: train a copy of the encoder together with a linear classifier.

N train images, T test images, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from kontrast.errors import DataError
from kontrast.networks.vit import DropPath
from kontrast.probes.classification_metrics import accuracy
from kontrast.probes.extract import encoder_input, extract_features
from kontrast.probes.finetuning_protocols import DECAYS, RATES, FineTuning, fine_tuning_named
from kontrast.probes.layer_decay import build_optimizers
from kontrast.probes.mixed_images import mix_images
from kontrast.probes.rand_augment import rand_augment
from kontrast.probes.random_erasing import erase_boxes
from kontrast.probes.result import ProbeResult, check_labels, count_classes, predictions, result

HELD_OUT = 5  # a search holds one in this many train images out
Augment = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
"""augment(epoch, rows [B], uint8 images, their sizes) -> the encoder's input [B,C,h,w], new in every epoch."""


def finetune(
    encoder: nn.Module,
    train: Any,
    train_labels: Tensor,
    test: Any,
    test_labels: Tensor,
    *,
    protocol: str | FineTuning = "sgd",
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    transform: Callable[..., Any] | None = None,
    augment: Augment | None = None,
    search: bool = False,
    rates: Sequence[float] = RATES,
    decays: Sequence[float] = DECAYS,
    advance: Callable[[int], None] | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Train a copy of the encoder and a zero-initialized linear layer; report the last epoch.

    Args:
        encoder: network with the attribute `width`; it is not changed.
        train: train images, uint8 [N,C,H,W] or an image set.
        train_labels: integers [N].
        test: test images, uint8 [T,C,H,W] or an image set.
        test_labels: integers [T].
        protocol: a name in `FINE_TUNING` or a `FineTuning`, default "sgd": Nesterov SGD with a cosine.
        epochs: passes over the train images; default: the protocol's.
        batch: images per step; default: the protocol's, or N if that is less. A last batch of one image is skipped,
            because batch norm needs two.
        lr: peak learning rate; default: the protocol's.
        weight_decay: weight decay; default: the protocol's.
        transform: maps uint8 images to the encoder's input, as in `extract_features`.
        augment: makes the encoder's input for training, new in every epoch. Default: `transform`.
        search: choose learning rate and weight decay on a held-out fifth of train; then train on all of it.
        rates: the multiples of `lr` that a search tries, default 0.1, 1 and 10.
        decays: the weight decays that a search tries, default 0, 1e-4 and 0.05.
        advance: called with the number of images of each step, for progress bars.
        seed: seed of the order of the images, of mixing, erasing, drop path and of the held-out images.

    Example:
        >>> from kontrast.networks import encoder
        >>> network, y = encoder("small-conv", size=16, width=8), torch.arange(8) % 2
        >>> images = (255 * y).to(torch.uint8)[:, None, None, None].expand(8, 3, 16, 16)
        >>> finetune(network, images, y, images, y, epochs=1).n
        8
    """
    train_labels = check_labels("train", len(train), train_labels)
    test_labels = check_labels("test", len(test), test_labels)
    given: dict[str, Any] = {"epochs": epochs, "batch": batch, "lr": lr, "weight_decay": weight_decay}
    settings = replace(fine_tuning_named(protocol), **{key: value for key, value in given.items() if value is not None})
    settings = replace(settings, batch=min(settings.batch, len(train)))
    scores, described = tuned_scores(
        encoder, train, train_labels, test, count_classes(train_labels, test_labels), settings, transform=transform,
        augment=augment, search=search, rates=rates, decays=decays, advance=advance, seed=seed,
    )  # fmt: skip
    return result("fine-tune", predictions(scores, test_labels.cpu()), described, seed)


def tuned_scores(
    encoder: nn.Module,
    train: Any,
    labels: Tensor,
    test: Any,
    classes: int,
    protocol: FineTuning,
    *,
    transform: Callable[..., Any] | None = None,
    augment: Augment | None = None,
    search: bool = False,
    rates: Sequence[float] = RATES,
    decays: Sequence[float] = DECAYS,
    measure: Callable[[Tensor, Tensor], float] = accuracy,
    advance: Callable[[int], None] | None = None,
    seed: int = 0,
) -> tuple[Tensor, dict[str, Any]]:
    """Fine-tune a copy of the encoder; return the scores of the test images [T,C] and the settings that were used.

    Args:
        encoder: network with the attribute `width`. One without parameters trains a linear classifier on its output.
        train: train images, or whatever `transform` turns into the encoder's input.
        labels: integers [N], or 0 and 1 for each class [N,C], if an image may have several: then every class is a
            problem of its own (binary cross-entropy).
        test: test images.
        classes: the number of classes C.
        protocol: the settings.
        transform: as for `finetune`.
        augment: as for `finetune`.
        search: choose learning rate and weight decay on a held-out fifth of train; then train on all of it.
        rates: the multiples of `lr` that a search tries.
        decays: the weight decays that a search tries.
        measure: what a search compares: a function of the scores and labels of the held-out images.
        advance: called with the number of images of each step.
        seed: seed of the order of the images, of mixing, erasing, drop path and of the held-out images.
    """
    protocol = protocol.suited_to(encoder, augment)
    job = FineTuner(encoder, classes, transform, augment, advance, seed, measure)
    found: dict[str, Any] = {}
    if search:
        protocol, found["searched"] = job.search(protocol, train, labels, rates, decays)
    scores = job.scores(protocol, train, labels, test)
    return scores, asdict(protocol) | {"augmented": augment is not None} | found


class FineTuner:
    """Trains copies of one encoder with different settings. The arguments are those of `finetune`.

    Example:
        >>> from kontrast.networks import encoder
        >>> images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
        >>> tuner = FineTuner(encoder("small-conv", size=16, width=8), classes=2)
        >>> tuner.train(FineTuning(epochs=1, batch=8), images, torch.arange(8) % 2)[1]
        Linear(in_features=8, out_features=2, bias=True)
    """

    def __init__(
        self,
        encoder: nn.Module,
        classes: int,
        transform: Callable[..., Any] | None = None,
        augment: Augment | None = None,
        advance: Callable[[int], None] | None = None,
        seed: int = 0,
        measure: Callable[[Tensor, Tensor], float] = accuracy,
    ):
        self.encoder, self.classes, self.transform, self.augment = encoder, classes, transform, augment
        self.advance, self.seed, self.measure = advance, seed, measure
        self.device = next(itertools.chain(encoder.parameters(), encoder.buffers())).device

    def scores(self, settings: FineTuning, train: Any, labels: Tensor, test: Any) -> Tensor:
        """Train with these settings and return the scores of the test images [T,C]."""
        return extract_features(self.train(settings, train, labels), test, self.transform, device=self.device)

    def train(self, settings: FineTuning, train: Any, labels: Tensor) -> nn.Sequential:
        """Train with these settings and return the copy of the encoder and its linear layer."""
        with seeded(self.seed, self.device):
            return self._train(settings, train, labels)

    def _train(self, settings: FineTuning, train: Any, labels: Tensor) -> nn.Sequential:
        network = add_classifier(self.encoder, self.classes, self.device)
        set_drop_path(network, settings.drop_path)
        optimizers = build_optimizers(network, settings)
        generator, draws = torch.Generator().manual_seed(self.seed), np.random.default_rng(self.seed)
        for epoch in range(settings.epochs):
            order = torch.randperm(len(train), generator=generator)
            order = order[: -(-len(train) // settings.repeats)].repeat_interleave(settings.repeats)[: len(train)]
            batches = [rows for rows in order.split(settings.batch) if len(rows) > 1]
            for i, rows in enumerate(batches):
                x = self._train_input(train, rows, epoch, settings.repeats)
                x = erase_boxes(self._rand_augmented(x, settings.randaugment, draws), settings.erasing, draws)
                y = labels[rows].to(self.device)
                if labels.ndim == 2:
                    loss = binary_cross_entropy_with_logits(network(x), y.to(x.dtype))
                else:
                    x, targets = mix_images(x, y, self.classes, settings.mixup, settings.cutmix, draws)
                    loss = cross_entropy(network(x), targets, label_smoothing=settings.smoothing)
                for optimizer, _ in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer, factor in optimizers:
                    optimizer.lr = factor * settings.rate(epoch + i / len(batches))
                    optimizer.step()
                if self.advance:
                    self.advance(len(rows))
        return network

    def _train_input(self, train: Any, rows: Tensor, epoch: int, repeats: int) -> Tensor:
        images, sizes = load_batch(train, rows, self.device)
        if self.augment is None:
            return encoder_input(self.transform, rows.to(self.device), images, sizes)
        rows, x = rows.to(self.device), torch.empty(0)
        for number in range(min(repeats, len(rows))):  # crops depend on image and epoch, so repeats count as epochs
            own = slice(number, None, repeats)
            part = None if sizes is None else sizes[own]
            crops = self.augment(epoch * repeats + number, rows[own], images[own], part)
            x = crops.new_empty(len(rows), *crops.shape[1:]) if not number else x
            x[own] = crops
        return x

    def _rand_augmented(self, x: Tensor, magnitude: float, draws: np.random.Generator) -> Tensor:
        if not magnitude:
            return x
        mean, std = (one.to(x).view(1, 3, 1, 1) for one in self.augment.colors)  # type: ignore[union-attr]
        return (rand_augment(x * std + mean, magnitude, draws, mean.flatten()) - mean) / std

    def search(
        self, settings: FineTuning, train: Any, labels: Tensor, rates: Sequence[float], decays: Sequence[float]
    ) -> tuple[FineTuning, list[dict[str, float]]]:
        """Return the settings that are best on held-out train images, the gentlest of equals, and all accuracies."""
        fitted, held = split_train(labels, self.seed)
        tried = []
        for rate, decay in itertools.product(sorted(rates), sorted(decays, reverse=True)):
            candidate = replace(settings, lr=rate * settings.lr, weight_decay=decay)
            candidate = replace(candidate, batch=min(candidate.batch, len(fitted)))
            scores = self.scores(candidate, rows_of(train, fitted), labels[fitted], rows_of(train, held))
            value = self.measure(scores, labels[held].cpu())
            tried.append({"lr": candidate.lr, "weight_decay": decay, "held_out": value})
        best = max(tried, key=lambda one: one["held_out"])  # the first of equals: the smallest rate, the largest decay
        return replace(settings, lr=best["lr"], weight_decay=best["weight_decay"]), tried


def shuffled_classes(labels: Tensor, seed: int) -> list[Tensor]:
    """Return the rows of each class in a random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(labels.cpu() == label).nonzero()[:, 0] for label in torch.unique(labels).tolist()]
    return [one[torch.randperm(len(one), generator=generator)] for one in rows]


def folds(labels: Tensor, count: int, seed: int = 0) -> list[Tensor]:
    """Return the rows of each fold of a cross-validation; a class is spread over them, its rest over the emptiest.

    A class of one image is in no fold, because nothing could be fitted without it.

    Example:
        >>> [len(fold) for fold in folds(torch.tensor([0, 0, 0, 1, 1, 2]), 2)]
        [3, 2]
    """
    found: list[list[int]] = [[] for _ in range(count)]
    for rows in shuffled_classes(labels, seed):
        for place, row in enumerate(rows.tolist() if len(rows) > 1 else []):
            if place % count == 0:
                order = sorted(range(count), key=lambda fold: len(found[fold]))
            found[order[place % count]].append(row)
    return [torch.tensor(sorted(fold)) for fold in found if fold]


def split_train(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows to fit and a fifth of each class to hold out; classes of one image are fitted only."""
    if labels.ndim == 2:  # an image of several classes: a fifth of all images
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        return order[max(1, len(order) // HELD_OUT) :], order[: max(1, len(order) // HELD_OUT)]
    fitted, held = [], []
    for rows in shuffled_classes(labels, seed):
        count = max(1, len(rows) // HELD_OUT) if len(rows) > 1 else 0
        fitted.append(rows[count:])
        held.append(rows[:count])
    if not sum(map(len, held)):
        raise DataError("a search of the learning rate needs two train images of a class; add images or don't search")
    return torch.cat(fitted), torch.cat(held)


def rows_of(images: Any, rows: Tensor) -> Any:
    """Return these images of a tensor or an image set."""
    return images.subset(rows) if hasattr(images, "subset") else images[rows]


def load_batch(images: Any, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return these rows of a tensor or an image set on the device, and their sizes if the images differ in size."""
    if not hasattr(images, "batch"):
        return torch.as_tensor(images[rows]).to(device), None
    pixels, sizes = images.batch(rows)
    return pixels.to(device), None if sizes is None else sizes.to(device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers, which dropout and drop path draw from; the caller's go on afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def set_drop_path(network: nn.Module, share: float) -> None:
    """Leave out the branches of the last block for this share of images, growing linearly from 0 at the first block."""
    branches = [module for module in network.modules() if isinstance(module, DropPath)]
    for number, branch in enumerate(branches):
        branch.drop_prob = share * number / max(1, len(branches) - 1)


def add_classifier(encoder: nn.Module, classes: int, device: torch.device) -> nn.Sequential:
    width: Any = encoder.width
    classifier = nn.Linear(width, classes, device=device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(copy.deepcopy(encoder), classifier).requires_grad_(True).train()
