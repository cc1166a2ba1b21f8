"""Probes on a run: the trained encoder beside two controls, raw pixels and the encoder before its first step."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.counters import permutation
from kontrast.data import ImageSet, read_labels
from kontrast.data.bad_images import skipped
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.files import read_json, write_json
from kontrast.lens.gallery import write_gallery
from kontrast.probes import PROTOCOLS, ProbeResult, extract_features, few_shot, fine_tune, knn, linear, logistic
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.registry import nearest
from kontrast.runs.run import Run
from kontrast.training.build import build_views, precision
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress
from kontrast.training.splits import Splits, find_changes, open_split
from kontrast.views import Views, keys

PROBES: dict[str, Callable[..., ProbeResult]] = {
    "knn": knn,
    "linear": logistic,
    "few-shot": few_shot,
    **{name: partial(linear, protocol=name) for name in PROTOCOLS},
}
"""Probes on features by name; `finetune` trains the encoder too and stands apart."""
USUAL = ("knn", "linear")
FINE_TUNING = 50


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which probes, at which seeds, and how."""

    kind: str
    seeds: range
    cached: bool

    @property
    def fits(self) -> list[tuple[str, int]]:
        """Every probe asked for, at every seed; kNN once, since nothing in it is drawn by chance."""
        probes = (self.kind,) if self.kind else USUAL
        return [(probe, seed) for probe in probes for seed in (self.seeds[:1] if probe == "knn" else self.seeds)]

    @property
    def on_crops(self) -> bool:
        return self.kind in PROTOCOLS and not self.cached

    def bar(self, images: int, labelled: bool) -> Progress:
        """Over all features: their extraction and each fit is a pass over the images. Silent where what takes long has
        a bar of its own, since a terminal shows one at a time."""
        passes = len(KINDS) * (1 + len(self.fits)) if labelled else 1
        return Progress("probe", passes * images, silent=self.on_crops or self.kind == "finetune")


def features_of(
    encoder: nn.Module | None,
    images: ImageSet,
    transform: Any,
    device: torch.device,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Features [N,F] float32 on the CPU; without an encoder, the transformed pixels themselves."""
    network = encoder if encoder is not None else nn.Flatten()
    return extract_features(network, images, transform, device=device, advance=advance)


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
    train, test = _labelled_sets(run, data, labels, max_bad, say)
    _tell_skipped(train, test, data, say)
    asked = Asked(kind, range(run.recipe.seed, run.recipe.seed + seeds), cached)
    labelled = test is not None and train.labels is not None and test.labels is not None
    encoders = {"trained": run.encoder(on), "untrained": run.encoder(on, trained=False), "pixels": None}
    results: list[ProbeResult] = []
    with asked.bar(len(train) + len(test or ()), labelled) as bar:
        for name, encoder in encoders.items():
            found: list[ProbeResult] = []
            if kind != "finetune" and (labelled or name == "trained"):
                sets = _featured(run, name, encoder, train, test, on, bar, shown=data is None)
                found = _on_features(run, asked, name, encoder, train, sets, bar, say) if labelled else []
            elif kind == "finetune" and labelled and encoder is not None:
                found = [_fine_tuned(run, name, encoder, train, test, seed, epochs) for seed in asked.seeds]
            results += keep(run, found, data, labels)  # at once: what comes after may take long, and may be stopped
    if not results:
        _tell_missing(run, train, test, data or (run.recipe.data.source if kind else None), say)
    return results


def _tell_skipped(train: ImageSet, test: ImageSet | None, data: str | None, say: Callable[[str], None]) -> None:
    for part in (train, test):
        if part is not None and part.bad and (part is test or data is not None):  # training told of its own
            say(skipped(part.bad, part.total, f"{part.split} images"))


def _tell_missing(
    run: Run, train: ImageSet, test: ImageSet | None, data: str | None, say: Callable[[str], None]
) -> None:
    """What keeps probes from being fitted, test images or labels; of images that were given for them, or where a
    probe was asked for by name, an error."""
    share, shown = run.recipe.data.test_share, shlex.join(["kontrast", "report", str(run.path)])
    shown = f"the map and neighbors are in the report, which `{shown}` writes anew"
    if train.labels is not None and test is None:
        why = f"data.test_share of {share:g} holds none out here" if share else "data.test_share is 0"
        if data is not None:
            raise DataError(
                f"{data} has no test images to probe by: {why}; give folders train and test, or --labels CSV"
            )
        say(f"no test images: {why}; probe with --data, folders train and test, or --labels CSV; {shown}")
        return
    if data is not None:
        raise DataError(
            f"{data} has no labels to probe by: give class sub-folders with two images or more, or --labels CSV"
        )
    say(f"no labels: probes need two class sub-folders or more, or a CSV; {shown}")


def _check(kind: str, seeds: int, epochs: int) -> None:
    if seeds < 1:
        raise UsageError(f"seeds = {seeds}: give at least one seed")
    if epochs < 0:
        raise UsageError(f"epochs = {epochs}: give at least one epoch, or 0 for the usual {FINE_TUNING}")
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
    bar: Progress,
    shown: bool,
) -> Sets:
    """Features and labels of both parts on the device; where `shown`, the trained encoder's make the gallery too."""
    fit = features_of(encoder, train, run.transform(), device, bar.advance)
    held = fit if test is None else features_of(encoder, test, run.transform(), device, bar.advance)
    if shown and name == "trained" and run.recipe.evaluation.gallery:
        _gallery(run, train, test, fit, held)
    return fit.to(device), train.labels, held.to(device), None if test is None else test.labels


def _on_features(
    run: Run, asked: Asked, name: str, encoder: Any, train: ImageSet, sets: Sets, bar: Progress, say: Any
) -> list[ProbeResult]:
    results = []
    for probe, seed in asked.fits:
        crops: AbstractContextManager[dict] = nullcontext({"classes": train.classes} if probe == "few-shot" else {})
        if asked.on_crops:
            crops = _cropped(run, probe, encoder, train, sets[0].device)
        with crops as given:
            results.append(_probed(run, probe, name, sets, seed, say, **given))
        bar.advance(len(sets[0]) + len(sets[2]))
    return results


def _labelled_sets(
    run: Run, data: str | None, labels: Path | None, max_bad: float | None, say: Callable[[str], None]
) -> tuple[ImageSet, ImageSet | None]:
    settings = run.data_settings if data is None else dataclasses.replace(run.recipe.data, source=data)
    if max_bad is not None:
        settings = dataclasses.replace(settings, max_bad=max_bad)
    try:
        train = open_split(settings, "train", seed=run.recipe.seed)
    except DataError as error:
        raise error if data else DataError(f"{error}; are the run's images elsewhere? give them with --data") from None
    run.fitting(train)
    test = open_split(settings, "test", seed=run.recipe.seed, other_bad=train.bad) if train.has_test else None
    if data is None and test is not None and (changed := changed_since(run, train, test)):
        say(changed)
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


def _fine_tuned(run: Run, name: str, encoder: nn.Module, train: Any, test: Any, seed: int, epochs: int) -> ProbeResult:
    """train, test: image sets that have labels."""
    epochs = epochs or FINE_TUNING
    with Progress(f"finetune, {name}", epochs * len(train)) as bar:
        rule: dict[str, Any] = {"epochs": epochs, "transform": run.transform(), "seed": seed, "advance": bar.advance}
        result = fine_tune(encoder, train, train.labels, test, test.labels, **rule)
    return dataclasses.replace(result, probe="finetune", features=name)


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


KINDS = ("trained", "untrained", "pixels")
"""Features that are probed: the encoder's, and those of the two controls."""


def keep(run: Run, results: list[ProbeResult], data: str | None, labels: Path | None = None) -> list[ProbeResult]:
    """Results by probe, features, seed and, where not the run's own, data and labels: new ones replace their like."""
    others = {"data": data, "labels": None if labels is None else str(labels)}
    others = {key: value for key, value in others.items() if value is not None}
    results = [dataclasses.replace(r, protocol={**r.protocol, **others}) for r in results]
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
    others = [protocol.get(key) for key in ("data", "labels")] if isinstance(protocol, dict) else [None, None]
    return entry.get("probe"), entry.get("features"), entry.get("seed"), *others


def result_table(results: list[ProbeResult]) -> list[str]:
    """Accuracy by probe and features, for the terminal; of several seeds the mean, with its interval below."""
    if not results:
        return []
    lines = [f"{'accuracy':<10}" + "".join(f"{kind:>16}" for kind in KINDS)]
    for probe in dict.fromkeys(r.probe for r in results):
        values = {kind: [r.accuracy for r in results if (r.probe, r.features) == (probe, kind)] for kind in KINDS}
        means = {kind: f"{fmean(found):.3f}" if found else "" for kind, found in values.items()}
        lines.append(f"{probe:<10}" + "".join(f"{means[kind]:>16}" for kind in KINDS))
        spans = {kind: within_one(over_seeds(found)) for kind, found in values.items()}
        if any(spans.values()):
            count = max(map(len, values.values()))
            texts = [f"{span[0]:.3f} to {span[1]:.3f}" if span else "" for span in spans.values()]
            lines.append(f"{f'{count} seeds':<10}" + "".join(f"{text:>16}" for text in texts))
    return lines


CROPS = {name: None if name == "cacr" else (0.08, 1.0) for name in PROTOCOLS}
"""Share of the area in the crops on which each protocol trains its classifier; None: as the run's own views have it."""
PROBE_DRAWS = 1 << 41  # epochs of views that no training and no lens draws
CHUNK = 2048


class CroppedFeatures:
    """`features_of_epoch` for a linear protocol: crops of the epoch through the frozen encoder [N,F], flipped where the
    run's own views are, made and kept on the device. advance: told the number of images of each epoch."""

    def __init__(
        self,
        run: Run,
        encoder: nn.Module,
        train: ImageSet,
        crop: tuple[float, float] | None,
        device: torch.device,
        advance: Callable[[int], None] = lambda _: None,
    ):
        self.encoder, self.device, self.seed, self.index = encoder, device, run.recipe.seed, train.index
        self.advance = advance
        self.kind = precision(run.recipe.training.precision, device)
        own = build_views(run.recipe, torch.float32).policies[0]
        policy = dataclasses.replace(run.transform().policies[0], crop_scale=crop or own.crop_scale, flip=own.flip)
        self.views = Views(policy, count=1, size=run.recipe.views.size, dtype=self.kind)
        self.parts = []
        for positions in torch.arange(len(train)).split(CHUNK):
            pixels, sizes = train.batch(positions)
            self.parts.append((positions, pixels.to(device), None if sizes is None else sizes.to(device)))

    @torch.inference_mode()
    def __call__(self, epoch: int) -> Tensor:
        made = []
        with torch.autocast(self.device.type, self.kind, enabled=self.kind != torch.float32):
            for positions, pixels, sizes in self.parts:
                drawn = keys(self.seed, PROBE_DRAWS + epoch, self.index[positions]).to(self.device)  # type: ignore[index]
                made.append(self.encoder(self.views(pixels, drawn, sizes)[0]).float())
        self.advance(len(self.index))  # type: ignore[arg-type]
        return torch.cat(made)


def changed_since(run: Run, train: ImageSet, test: ImageSet) -> str:
    """What a probe by the run's own images must tell where they are others than those it was trained on, since the held
    out part moves with them; empty where they are the same, or where the run trained on another part."""
    settings, before = run.recipe.data, run.info.get("data", {}).get("fingerprint")
    if settings.split != "train" or settings.imbalance != "none" or before in (None, train.fingerprint):
        return ""
    found = None
    with contextlib.suppress(DataError):  # a damaged listing can't tell, and keeps nobody from probing
        found = find_changes(run.folder, Splits(train, train, train, test), whole=True)
    told = "the images changed since the run was trained" + ("" if found is None else f": {found}")
    if found is not None and not found.added and not found.removed:  # who is held out goes by names
        return told
    return f"{told}; it may know some of those it is tested by"
