"""Probes on a run: the trained encoder beside two controls, raw pixels and the encoder before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet, read_labels
from kontrast.data.counters import permutation
from kontrast.data.packing import skipped
from kontrast.lens.gallery import write_gallery
from kontrast.lens.numbers import conditional_entropy
from kontrast.lens.spectrum import effective_rank
from kontrast.probes import PROTOCOLS, ProbeResult, extract_features, few_shot, fine_tune, knn, linear, logistic
from kontrast.probes.intervals import over_seeds
from kontrast.registry import CheckpointError, DataError, UsageError, nearest
from kontrast.training.cropped import CROPS, CroppedFeatures
from kontrast.training.folder import read_json, write_json
from kontrast.training.progress import Progress
from kontrast.training.run import Run, choose_device, evaluation_view, open_split

PROBES: dict[str, Callable[..., ProbeResult]] = {
    "knn": knn,
    "linear": logistic,
    "few-shot": few_shot,
    **{name: partial(linear, protocol=name) for name in PROTOCOLS},
}
"""Probes on features by name; `finetune` trains the encoder too and stands apart."""
USUAL = ("knn", "linear")
FINE_TUNING = 50
IMAGES = 1024
KINDS = ("trained", "untrained", "pixels")


def features_of(encoder: nn.Module | None, images: ImageSet, transform: Any, device: torch.device) -> Tensor:
    """Features [N,F] float32 on the CPU; without an encoder, the transformed pixels themselves."""
    return extract_features(encoder if encoder is not None else nn.Flatten(), images, transform, device=device)


def evaluate(
    run: Run,
    kind: str = "",
    data: str | None = None,
    labels: Path | None = None,
    device: str = "auto",
    seeds: int = 1,
    cached: bool = False,
    epochs: int = 0,
    max_bad: float | None = None,
    say: Callable[[str], None] = print,
) -> list[ProbeResult]:
    """Probe the run, lay the results over probes.json, write the gallery; no results for unlabelled images.

    kind: `knn`, `linear`, `few-shot`, `finetune` or a linear protocol's name; empty for kNN and linear. seeds: how many
    times, from the recipe's seed on. Protocols see fresh crops in every epoch, or, cached, the plain pictures' features
    alone. epochs: of fine-tuning, where not its own. max_bad: the share of damaged images to go on with, where not the
    recipe's.
    """
    _check(kind, seeds, epochs)
    on = choose_device(device)
    train, test = _labelled_sets(run, data, labels, max_bad)
    for part in (train, test):
        if part is not None and part.bad and (part is test or data is not None):  # training told of its own
            say(skipped(part.bad, part.total, f"{part.split} images"))
    labelled = test is not None and train.labels is not None and test.labels is not None
    encoders = {"trained": run.encoder(on), "untrained": run.encoder(on, trained=False), "pixels": None}
    results: list[ProbeResult] = []
    for name, encoder in encoders.items():
        found: list[ProbeResult] = []
        numbers = range(run.recipe.seed, run.recipe.seed + seeds)
        if kind != "finetune" and (labelled or name == "trained"):
            sets = _featured(run, name, encoder, train, test, on, shown=data is None)
            found = _on_features(run, kind, name, encoder, train, sets, numbers, cached, say) if labelled else []
        elif kind == "finetune" and labelled and encoder is not None:
            found = [_fine_tuned(run, name, encoder, train, test, seed, epochs) for seed in numbers]  # type: ignore[arg-type]
        results += _keep(run, found, data)  # at once: what comes after may take long, and may be stopped
    if not results:
        _without_labels(data, say)
    return results


def _without_labels(data: str | None, say: Callable[[str], None]) -> None:
    if data is not None:
        raise DataError(
            f"{data} has no labels to probe by: give class sub-folders with two images or more, or --labels CSV"
        )
    say("no labels: probes need two class sub-folders or more, or a CSV; the map and neighbours are in the report")


def _check(kind: str, seeds: int, epochs: int) -> None:
    if seeds < 1 or epochs < 0:
        raise UsageError(f"seeds = {seeds}, epochs = {epochs}: give at least one seed")
    if kind and kind not in (*PROBES, "finetune"):
        raise UsageError(f"unknown probe {kind!r}: {nearest(kind, (*PROBES, 'finetune'))}")


Sets = tuple[Tensor, Any, Tensor, Any]


def _featured(
    run: Run,
    name: str,
    encoder: nn.Module | None,
    train: ImageSet,
    test: ImageSet | None,
    device: torch.device,
    shown: bool,
) -> Sets:
    """Features and labels of both parts on the device; where `shown`, the trained encoder's make the gallery too."""
    fit = features_of(encoder, train, run.transform(), device)
    held = fit if test is None else features_of(encoder, test, run.transform(), device)
    if shown and name == "trained" and run.recipe.evaluation.gallery:
        _gallery(run, train, test, fit, held)
    return fit.to(device), train.labels, held.to(device), None if test is None else test.labels


def _on_features(
    run: Run, kind: str, name: str, encoder: Any, train: ImageSet, sets: Sets, seeds: range, cached: bool, say: Any
) -> list[ProbeResult]:
    """Every probe asked for, at every seed; kNN once, since nothing in it is drawn by chance."""
    results = []
    for probe in (kind,) if kind else USUAL:
        for seed in seeds[:1] if probe == "knn" else seeds:
            on_crops = probe in PROTOCOLS and not cached
            with _cropped(run, probe, encoder, train, sets[0].device) if on_crops else nullcontext({}) as given:
                results.append(_probed(run, probe, name, sets, seed, say, **given))
    return results


def _labelled_sets(
    run: Run, data: str | None, labels: Path | None, max_bad: float | None
) -> tuple[ImageSet, ImageSet | None]:
    settings = run.data_settings if data is None else dataclasses.replace(run.recipe.data, source=data)
    if max_bad is not None:
        settings = dataclasses.replace(settings, max_bad=max_bad)
    try:
        train = open_split(settings, "train", seed=run.recipe.seed)
    except DataError as error:
        raise error if data else DataError(f"{error}; are the run's images elsewhere? give them with --data") from None
    run.fitting(train)
    test = open_split(settings, "test", seed=run.recipe.seed) if train.has_test else None
    if labels is not None:
        train = read_labels(train, labels)
        test = None if test is None else read_labels(test, labels)
        if test is None:  # a flat folder that a CSV has labelled: hold a part out
            order = torch.from_numpy(permutation(len(train), run.recipe.seed))
            held = max(1, int(len(train) * (settings.test_share or 0.2)))
            train, test = train.subset(order[held:]), train.subset(order[:held])
    return train, test


@contextmanager
def _cropped(run: Run, probe: str, encoder: nn.Module | None, train: ImageSet, device: torch.device) -> Iterator[dict]:
    """Fresh crops for every epoch of a linear protocol, with a bar."""
    network = nn.Flatten() if encoder is None else encoder.to(memory_format=torch.channels_last)
    with Progress(f"{probe} on crops", PROTOCOLS[probe].epochs * len(train)) as bar:
        yield {"features_of_epoch": CroppedFeatures(run, network, train, CROPS[probe], device, bar.advance)}


def _probed(
    run: Run, probe: str, name: str, sets: Sets, seed: int, say: Callable[[str], None], **given: Any
) -> ProbeResult:
    settings = run.recipe.evaluation
    arguments = {"k": settings.k, "temperature": settings.temperature} if probe == "knn" else given
    arguments |= {"seeds": range(3 * seed, 3 * seed + 3)} if probe == "few-shot" else {"seed": seed}
    result = PROBES[probe](*sets, **arguments)
    if result.note:
        say(f"{probe}, {name}: {result.note}")
    return dataclasses.replace(result, probe=probe, features=name)


def _fine_tuned(
    run: Run, name: str, encoder: nn.Module, train: ImageSet, test: ImageSet, seed: int, epochs: int
) -> ProbeResult:
    epochs = epochs or FINE_TUNING
    with Progress(f"finetune, {name}", epochs * len(train)) as bar:
        rule: dict[str, Any] = {"epochs": epochs, "transform": run.transform(), "seed": seed, "advance": bar.advance}
        result = fine_tune(encoder, train, train.labels, test, test.labels, **rule)
    return dataclasses.replace(result, probe="finetune", features=name)


def _keep(run: Run, results: list[ProbeResult], data: str | None) -> list[ProbeResult]:
    """Results by probe, features, seed and, where not the run's own, data: new ones replace their like."""
    if data is not None:
        results = [dataclasses.replace(r, protocol={**r.protocol, "data": data}) for r in results]
    path = run.path / "probes.json"
    before = read_probes(path) if path.exists() else []
    kept = {_place(r): r for r in [*before, *(r.to_dict() for r in results)]}
    if results:
        write_json(path, {"version": 1, "probes": list(kept.values())})
    return results


def read_probes(path: Path) -> list[dict[str, Any]]:
    """The results that a run's probes.json holds."""
    tree = read_json(path)
    found = tree.get("probes", []) if isinstance(tree, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise CheckpointError(f"{path} is damaged: it holds no list of probes; remove it and probe again")
    return found


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    protocol = entry.get("protocol")
    data = protocol.get("data") if isinstance(protocol, dict) else None
    return entry.get("probe"), entry.get("features"), entry.get("seed"), data


def _gallery(run: Run, train: ImageSet, test: ImageSet | None, fit: Tensor, held: Tensor) -> None:
    shown = train if test is None else test
    write_gallery(
        run.path,
        held,
        shown.base,
        shown.labels,
        shown.classes,
        shown.names,
        train_features=None if test is None else fit,
        train_images=None if test is None else train.base,
        train_labels=None if test is None else train.labels,
        train_names=None if test is None else train.names,
        points=run.recipe.evaluation.gallery,
        seed=run.recipe.seed,
    )


def result_table(results: list[ProbeResult]) -> list[str]:
    """Accuracy by probe and features, for the terminal; of several seeds the mean, with its interval below."""
    if not results:
        return []
    lines = [f"{'accuracy':<10}" + "".join(f"{kind:>16}" for kind in KINDS)]
    for probe in dict.fromkeys(r.probe for r in results):
        values = {kind: [r.accuracy for r in results if (r.probe, r.features) == (probe, kind)] for kind in KINDS}
        means = {kind: f"{fmean(found):.3f}" if found else "" for kind, found in values.items()}
        lines.append(f"{probe:<10}" + "".join(f"{means[kind]:>16}" for kind in KINDS))
        spans = {kind: over_seeds(found) for kind, found in values.items()}
        if any(spans.values()):
            count = max(map(len, values.values()))
            texts = [f"{span[0]:.3f} to {span[1]:.3f}" if span else "" for span in spans.values()]
            lines.append(f"{f'{count} seeds':<10}" + "".join(f"{text:>16}" for text in texts))
    return lines


class OnlineProbe:
    """kNN, effective rank and H(X-|X) of the encoder as it trains, on at most `limit` images of each part. Given the
    whole student, the entropy is that of its projections, which the objective sees, on the lens's own images."""

    def __init__(self, recipe: Any, train: ImageSet, test: ImageSet | None, device: torch.device, limit: int = 50_000):
        self.recipe, self.device = recipe, device
        self.train, self.test = train.first(limit), None if test is None else test.first(limit)
        self.shown = (train if test is None else test).first(IMAGES)
        self.transform = evaluation_view(recipe)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        encoder = getattr(network, "encoder", network)
        fit = features_of(encoder, self.train, self.transform, self.device).to(self.device)
        record = {"effective_rank": effective_rank(fit)}
        if len(self.shown) > 2:
            found = conditional_entropy(features_of(network, self.shown, self.transform, self.device))
            record |= dict(zip(("conditional_entropy", "conditional_entropy_max"), found))
        if self.test is not None and self.train.labels is not None and self.test.labels is not None:
            held = features_of(encoder, self.test, self.transform, self.device)
            settings = self.recipe.evaluation
            sets = (fit, self.train.labels, held, self.test.labels)
            record["knn"] = knn(*sets, k=settings.k, temperature=settings.temperature).accuracy
        return record
