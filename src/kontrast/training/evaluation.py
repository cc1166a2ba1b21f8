"""Probes on a run: the trained encoder beside two controls, raw pixels and the encoder before its first step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet, read_labels
from kontrast.data.counters import permutation
from kontrast.kernels import row_statistics
from kontrast.lens.gallery import write_gallery
from kontrast.lens.spectrum import effective_rank
from kontrast.probes import PROTOCOLS, ProbeResult, extract_features, few_shot, fine_tune, knn, linear, logistic
from kontrast.registry import UsageError, nearest
from kontrast.training.folder import read_json, write_json
from kontrast.training.run import Run, choose_device, evaluation_view, open_split

PROBES: dict[str, Callable[..., ProbeResult]] = {
    "knn": knn,
    "linear": logistic,
    "few-shot": few_shot,
    **{name: partial(linear, protocol=name) for name in PROTOCOLS},
}
"""Probes on features by name; `finetune` trains the encoder too and stands apart."""
USUAL = ("knn", "linear")
ENTROPY_IMAGES = 512
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
    say: Callable[[str], None] = print,
) -> list[ProbeResult]:
    """Probe the run, lay the results over probes.json, write the gallery; no results for unlabelled images.

    kind: `knn`, `linear`, `few-shot`, `finetune` or a linear protocol's name; empty for kNN and linear.
    """
    if kind and kind not in (*PROBES, "finetune"):
        raise UsageError(f"unknown probe {kind!r}: {nearest(kind, (*PROBES, 'finetune'))}")
    on = choose_device(device)
    train, test = _labelled_sets(run, data, labels)
    labelled = test is not None and train.labels is not None and test.labels is not None
    encoders = {"trained": run.encoder(on), "untrained": run.encoder(on, trained=False), "pixels": None}
    results: list[ProbeResult] = []
    for name, encoder in encoders.items():
        if kind == "finetune" and labelled and encoder is not None:
            results.append(_fine_tuned(run, name, encoder, train, test))
        if kind == "finetune" or not (labelled or name == "trained"):
            continue
        fit = features_of(encoder, train, run.transform(), on)
        held = fit if test is None else features_of(encoder, test, run.transform(), on)
        if name == "trained" and run.recipe.evaluation.gallery:
            _gallery(run, train, test, fit, held)
        if labelled:
            sets = (fit.to(on), train.labels, held.to(on), test.labels)
            results += [_probed(run, probe, name, sets, say) for probe in ((kind,) if kind else USUAL)]
    if results:
        _keep(run, results)
    else:
        say("no labels: probes need class sub-folders or a CSV; the map and the neighbours are in the report")
    return results


def _labelled_sets(run: Run, data: str | None, labels: Path | None) -> tuple[ImageSet, ImageSet | None]:
    settings = run.recipe.data if data is None else dataclasses.replace(run.recipe.data, source=data)
    train = open_split(settings, "train", seed=run.recipe.seed)
    test = open_split(settings, "test", seed=run.recipe.seed) if train.has_test else None
    if labels is not None:
        train = read_labels(train, labels)
        test = None if test is None else read_labels(test, labels)
        if test is None:  # a flat folder that a CSV has labelled: hold a part out
            order = torch.from_numpy(permutation(len(train), run.recipe.seed))
            held = max(1, int(len(train) * (settings.test_share or 0.2)))
            train, test = train.subset(order[held:]), train.subset(order[:held])
    return train, test


def _probed(run: Run, probe: str, name: str, sets: tuple[Tensor, ...], say: Callable[[str], None]) -> ProbeResult:
    settings = run.recipe.evaluation
    arguments = {"k": settings.k, "temperature": settings.temperature} if probe == "knn" else {}
    result = PROBES[probe](*sets, **arguments)
    if result.note:
        say(f"{probe}, {name}: {result.note}")
    return dataclasses.replace(result, probe=probe, features=name)


def _fine_tuned(run: Run, name: str, encoder: nn.Module, train: ImageSet, test: ImageSet) -> ProbeResult:
    view = run.transform()

    def transform(images: Tensor) -> Tensor:
        return view(images, torch.zeros(len(images), dtype=torch.int64, device=images.device))[0]

    result = fine_tune(encoder, train, train.labels, test, test.labels, transform=transform, seed=run.recipe.seed)
    return dataclasses.replace(result, probe="finetune", features=name)


def _keep(run: Run, results: list[ProbeResult]) -> None:
    """Results by probe and features: new ones replace their like and leave the others."""
    path = run.path / "probes.json"
    before = read_json(path).get("probes", []) if path.exists() else []
    kept = {(r.get("probe"), r.get("features")): r for r in before}
    kept.update({(r.probe, r.features): r.to_dict() for r in results})
    write_json(path, {"version": 1, "probes": list(kept.values())})


def _gallery(run: Run, train: ImageSet, test: ImageSet | None, fit: Tensor, held: Tensor) -> None:
    shown = train if test is None else test
    write_gallery(
        run.path,
        held,
        shown.images,
        shown.labels,
        shown.classes,
        shown.names,
        train_features=None if test is None else fit,
        train_images=None if test is None else train.images,
        train_labels=None if test is None else train.labels,
        train_names=None if test is None else train.names,
        points=run.recipe.evaluation.gallery,
        seed=run.recipe.seed,
    )


def result_table(results: list[ProbeResult]) -> list[str]:
    """Accuracy by probe and features, for the terminal."""
    if not results:
        return []
    lines = [f"{'accuracy':<10}" + "".join(f"{kind:>12}" for kind in KINDS)]
    for probe in dict.fromkeys(r.probe for r in results):
        cells = {r.features: f"{r.accuracy:.3f}" for r in results if r.probe == probe}
        lines.append(f"{probe:<10}" + "".join(f"{cells.get(kind, ''):>12}" for kind in KINDS))
    return lines


def repulsion_entropy(z: Tensor, images: int = ENTROPY_IMAGES, t_minus: float = 2.0) -> dict[str, float]:
    """H(X-|X) of rows z [N,D] beside its greatest value ln(M - 1), at one scale and one M for every method (CACR,
    equation 8). Without collectives, unlike the objectives' metric: the first rank alone evaluates."""
    z = torch.nn.functional.normalize(z[:images].float(), dim=1)
    if len(z) < 3:
        return {}
    rows = row_statistics(z, None, scale=2 * t_minus, query_ids=torch.arange(len(z), device=z.device))
    entropy = (rows.lse - 2 * t_minus * rows.mean).mean()
    return {"conditional_entropy": float(entropy), "conditional_entropy_max": math.log(len(z) - 1)}


class OnlineProbe:
    """kNN, effective rank and H(X-|X) of the encoder as it trains, on at most `limit` images of each part. Given the
    whole student, the entropy is that of its projections, which the objective sees."""

    def __init__(self, recipe: Any, train: ImageSet, test: ImageSet | None, device: torch.device, limit: int = 50_000):
        self.recipe, self.device = recipe, device
        self.train, self.test = train.first(limit), None if test is None else test.first(limit)
        self.transform = evaluation_view(recipe)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        encoder, head = getattr(network, "encoder", network), getattr(network, "head", nn.Identity())
        fit = features_of(encoder, self.train, self.transform, self.device)
        record = {"effective_rank": effective_rank(fit), **repulsion_entropy(self.projections(head, fit))}
        if self.test is not None and self.train.labels is not None and self.test.labels is not None:
            held = features_of(encoder, self.test, self.transform, self.device)
            settings = self.recipe.evaluation
            found = knn(fit, self.train.labels, held, self.test.labels, k=settings.k, temperature=settings.temperature)
            record["knn"] = found.accuracy
        return record

    @torch.no_grad()
    def projections(self, head: nn.Module, features: Tensor) -> Tensor:
        """Of images evenly over the set; the head's batch norm is as in evaluation meanwhile."""
        count = min(ENTROPY_IMAGES, len(features))
        some = features[torch.arange(count) * len(features) // count]
        training = head.training
        z = head.eval()(some.to(self.device))
        head.train(training)
        return z
