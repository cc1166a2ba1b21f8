"""Two ways to train a classifier on labeled images: a linear layer on frozen features, or the whole network.

N labeled images, n of them, C classes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from kontrast.data import ImageSet
from kontrast.lens.pair_weights import image_as_data_url
from kontrast.probes import FineTuner, FineTuning, extract_features, linear_layer
from kontrast.probes.fine_tuning import HELD_OUT
from kontrast.probes.finetuning_protocols import DECAYS, RATES
from kontrast.runs.classifier import ClassifierNetwork, entropy
from kontrast.runs.cropped_features import FineTuningCrops
from kontrast.runs.labeled_images import LabeledSets
from kontrast.runs.run import Run
from kontrast.training.progress import Progress
from kontrast.views import Views

UNCERTAIN, SEARCHED, GUESSES = 24, 2_000, 3
"""The most uncertain images that are shown, of how many, each with how many guesses."""


class ClassifierTraining:
    """Trains classifiers on some of the labeled images."""

    protocol: dict[str, Any]
    bar: Progress

    def __init__(self, run: Run, sets: LabeledSets, device: torch.device):
        self.run, self.sets, self.device = run, sets, device
        self.view: Views = run.transform()
        self.encoder = run.encoder(device)

    def __enter__(self) -> ClassifierTraining:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def train(self, rows: Tensor) -> ClassifierNetwork:
        """Train on these labeled images."""
        raise NotImplementedError

    def held_out(self, network: ClassifierNetwork, rows: Tensor) -> Tensor:
        """Return the probabilities [n,C] of other labeled images than those that the network was trained on."""
        return self.outputs(network, self.sets.train.subset(rows))

    def outputs(self, network: ClassifierNetwork, images: ImageSet) -> Tensor:
        """Return the probabilities of the classes [N,C]."""
        return extract_features(network, images, self.view, device=self.device)

    def network(self) -> ClassifierNetwork:
        """Train on all labeled images."""
        return self.train(torch.arange(len(self.sets.train))).eval()

    def most_uncertain(self, network: ClassifierNetwork) -> list[dict[str, Any]]:
        """Return the most uncertain of the unlabeled images, or else of the test or train images, as pictures."""
        sets = self.sets
        pool = sets.others if len(sets.others) else sets.train if sets.test is None else sets.test
        pool = pool.first(SEARCHED)
        probabilities = self.outputs(network, pool)
        unsure = entropy(probabilities)
        entries, shown = [], self.run.shown(pool)
        for place in unsure.argsort(descending=True, stable=True)[:UNCERTAIN].tolist():
            best = probabilities[place].topk(min(GUESSES, len(sets.classes)))
            guesses = [[sets.classes[i], round(p, 4)] for p, i in zip(best.values.tolist(), best.indices.tolist())]
            entry = {"file": str(pool.names[place]), "uncertainty": round(float(unsure[place]), 4), "guesses": guesses}
            entries.append({**entry, "image": image_as_data_url(shown.pictures[place])})
        return entries


class LinearTraining(ClassifierTraining):
    """Trains linear layers on frozen features, which are computed once."""

    def __init__(self, run: Run, sets: LabeledSets, device: torch.device):
        super().__init__(run, sets, device)
        self.bar = Progress("finetune", len(sets.train))
        self.protocol = {}

    def __enter__(self) -> ClassifierTraining:
        super().__enter__()
        advance = self.bar.advance
        self.features = extract_features(self.encoder, self.sets.train, self.view, device=self.device, advance=advance)
        return self

    def train(self, rows: Tensor) -> ClassifierNetwork:
        features = self.features[rows].to(self.device)
        layer, self.protocol = linear_layer(features, self.sets.labels[rows], seed=self.run.recipe.seed)
        return ClassifierNetwork(self.encoder, layer)

    def held_out(self, network: ClassifierNetwork, rows: Tensor) -> Tensor:
        with torch.inference_mode():
            return network.layer(self.features[rows].to(self.device)).softmax(1).cpu()


class FullTraining(ClassifierTraining):
    """Trains the whole network."""

    def __init__(
        self,
        run: Run,
        sets: LabeledSets,
        device: torch.device,
        settings: FineTuning,
        cached: bool,
        search: bool,
        folds: int,
    ):
        super().__init__(run, sets, device)
        augment = None if cached else FineTuningCrops(run, run.recipe.seed)
        self.settings, self.searching, seed = settings.suited_to(self.encoder, augment), search, run.recipe.seed
        repeated = 1 + search * len(RATES) * len(DECAYS) * (HELD_OUT - 1) / HELD_OUT
        repeated += (folds - 1) if sets.test is None and folds else 0
        self.bar = Progress("finetune", round(settings.epochs * len(sets.train) * repeated))
        self.tuner = FineTuner(self.encoder, len(sets.classes), self.view, augment, self.bar.advance, seed)
        self.protocol = asdict(self.settings) | {"augmented": not cached}

    def __enter__(self) -> ClassifierTraining:
        super().__enter__()
        if self.searching:
            self.settings, found = self.tuner.search(self.settings, self.sets.train, self.sets.labels, RATES, DECAYS)
            self.protocol |= asdict(self.settings) | {"searched": found}
        return self

    def train(self, rows: Tensor) -> ClassifierNetwork:
        settings = replace(self.settings, batch=min(self.settings.batch, len(rows)))
        encoder, layer = self.tuner.train(settings, self.sets.train.subset(rows), self.sets.labels[rows])
        return ClassifierNetwork(encoder, layer)  # type: ignore[arg-type]
