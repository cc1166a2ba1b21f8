"""Probe a run: the trained encoder next to two controls, the encoder before its first step and raw pixels."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.counters import permutation
from kontrast.data import ImageSet, read_labels
from kontrast.data.bad_images import skipped
from kontrast.data.captions import NoCaptions
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.files import read_json, write_json
from kontrast.float64 import float64_device
from kontrast.lens.gallery import GallerySplit, write_gallery
from kontrast.probes import PROTOCOLS, ProbeResult, extract_features, few_shot, finetune, knn, linear, logistic
from kontrast.probes.fine_tuning import HELD_OUT
from kontrast.probes.finetuning_protocols import DECAYS, RATES, fine_tuning_named
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.registry import nearest
from kontrast.runs.cropped_features import CROPS, CroppedFeatures, FineTuningCrops
from kontrast.runs.result_sequence import ResultSequence
from kontrast.runs.run import Run, open_run
from kontrast.runs.text_probes import RETRIEVAL, TEXT_PROBES, ZERO_SHOT, probe_towers
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress
from kontrast.training.splits import Splits, find_changes, open_split
from kontrast.training.trackers import track_results

PROBES: dict[str, Callable[..., ProbeResult]] = {
    "knn": knn,
    "linear": logistic,
    "few-shot": few_shot,
    **{name: partial(linear, protocol=name) for name in PROTOCOLS},
}
"""The probes on frozen features, by name; `finetune` is not among them because it trains the encoder too."""
DEFAULT_PROBES = ("knn", "linear")
FEATURES = ("trained", "starting weights", "untrained", "pixels")
"""The features that are probed: the encoder's, and those of the controls. Only some runs have starting weights."""
Sets = tuple[Tensor, Any, Tensor, Any]  # train features, train labels, test features, test labels


@dataclass(frozen=True, repr=False)
class ProbeResults(ResultSequence[ProbeResult]):
    """The results of one call of `probe`, printed as a table of accuracies."""

    run: Path

    def __str__(self) -> str:
        return "\n".join(result_table(self))

    def to_dict(self) -> dict[str, Any]:
        return {"run": str(self.run), "probes": [result.to_dict() for result in self.items]}


def probe(
    run: str | os.PathLike[str],
    kind: str = "",
    *,
    data: str | os.PathLike[str] | None = None,
    labels: str | os.PathLike[str] | None = None,
    device: str = "auto",
    seeds: int = 1,
    cached: bool = False,
    epochs: int = 0,
    protocol: str = "",
    search: bool = False,
    shots: int = 0,
    templates: str | Sequence[str] = "",
    max_bad: float | None = None,
    float_range: tuple[float, float] | None = None,
    say: Callable[[str], None] = print,
) -> ProbeResults:
    """Measure what a run's frozen encoder can do, next to raw pixels, the untrained encoder and its starting weights.

    The results are saved in the run's probes.json, and the map and neighbors of its report are updated.

    Args:
        run: A run folder or a `kontrast.Run`.
        kind: "knn", "linear", "few-shot", "finetune" or the name of a linear protocol such as "simclr"; of a run with a
            text tower also "zero-shot" or "retrieval". Default: kNN, linear unless the recipe has
            evaluation.linear=false, and those two if there is such a tower.
        data: Labeled images; default: the run's own data.
        labels: A CSV file with the columns name,label; default: the labels of the data.
        device: "auto" (default), "cpu" or "cuda".
        seeds: How many times to probe, each time with the next seed; default: 1.
        cached: Train a linear protocol, or fine-tune, on uncropped images instead of fresh crops in every epoch.
        epochs: Epochs of fine-tuning; 0 (default): those of its protocol.
        protocol: How to fine-tune, a name in `kontrast.probes.FINE_TUNING`; default: "sgd".
        search: Fine-tune with the learning rate and weight decay that are best on held-out train images.
        shots: Train images per class of "few-shot" (default: 5), and of "finetune" if given.
        templates: Of "zero-shot": the name of a set in `probes.zero_shot.TEMPLATES`, or texts with {} in place of the
            name of the class; default: those of the recipe.
        max_bad: The share of unreadable images that is allowed; default: the recipe's.
        float_range: The values of black and white in the float images of `data`; default: the recipe's.
        say: Called with each warning; default: print.

    Returns:
        A sequence with one result per probe, features and seed; empty if the run's images have no labels.

    Example:
        >>> import kontrast
        >>> results = kontrast.probe("runs/digits", "knn", device="cpu")
        >>> [result.features for result in results]
        ['trained', 'untrained', 'pixels']
        >>> print(results)  # doctest: +ELLIPSIS
        accuracy           trained       untrained          pixels
        knn                  0...            0...            0...
    """
    check_arguments(kind, seeds, epochs, range_alone=bool(float_range) and not data)
    refuse_options(kind, protocol, search, shots)
    run, on = open_run(run, float_range), choose_device(device)
    data, labels = (None if path is None else os.fspath(path) for path in (data, labels))
    try:
        train, test = open_images(run, data, labels, max_bad, say, captions=kind in ("", RETRIEVAL))
    except NoCaptions:
        if kind:
            raise
        train, test = open_images(run, data, labels, max_bad, say)
    texts, pixels = _text_probes(run, kind, train, test, data), not kind or kind not in TEXT_PROBES
    seed_range = range(run.recipe.seed, run.recipe.seed + seeds)
    job = _Job(run, kind, seed_range, cached, epochs, protocol or "sgd", search, shots, train, test, on, say)
    encoders = encoders_of(run, on)
    results: list[ProbeResult] = []
    with job.progress() as bar:
        for name, encoder in encoders.items() if pixels else ():
            found = job.probe_encoder(name, encoder, bar, gallery=data is None)
            results += save_results(run, found, data, labels)  # at once: the next ones may take long and be interrupted
    if texts and test is not None:
        found = probe_towers(run, texts, test, templates, on, shown=data is None)
        results += save_results(run, found, data, labels)
    if not results:
        _report_missing(run, train, test, data or (run.recipe.data.source if kind else None), say)
    if data is None:
        track_results(run.folder, run.recipe, tracked_numbers(results), say)
    return ProbeResults(tuple(results), run.path)


def tracked_numbers(results: Sequence[ProbeResult]) -> dict[str, float]:
    """Return the accuracies as a run's trackers show them, averaged over seeds: `probe/knn/trained`."""
    found: dict[str, list[float]] = {}
    for r in results:
        found.setdefault(f"probe/{r.probe}/{r.features}".replace(" ", "-"), []).append(r.accuracy)
    return {name: fmean(values) for name, values in found.items()}


def encoders_of(run: Run, device: torch.device) -> dict[str, nn.Module]:
    """Return what is probed, by the names of its features."""
    found: dict[str, nn.Module] = {"trained": run.encoder(device)}
    if run.recipe.start is not None:
        found["starting weights"] = run.before_training().encoder.to(device).eval()
    return found | {"untrained": run.encoder(device, trained=False), "pixels": nn.Flatten()}


def _text_probes(run: Run, kind: str, train: ImageSet, test: ImageSet | None, data: str | None) -> tuple[str, ...]:
    """Return the probes of the text tower that are asked for and possible; an error if one is named and is not."""
    if kind in TEXT_PROBES:
        if test is None:
            raise DataError(f"{data or train.name} has no test images: give data.test_share, or folders train and test")
        return (kind,)
    if kind or run.recipe.text is None or test is None:
        return ()
    return (ZERO_SHOT,) * (test.labels is not None) + (RETRIEVAL,) * (test.captions is not None)


def with_names(result: ProbeResult, probe: str, features: str, train: ImageSet) -> ProbeResult:
    """Return the result with the names of the probe, its features and the classes."""
    names = train.classes
    named = [{"class": names[row["label"]] if names else str(row["label"]), **row} for row in result.per_class]
    return dataclasses.replace(result, probe=probe, features=features, per_class=named)


def check_arguments(kind: str, seeds: int, epochs: int, range_alone: bool) -> None:
    if seeds < 1 or epochs < 0:
        raise UsageError(f"seeds = {seeds}, epochs = {epochs}: give at least one seed, and 0 or more epochs")
    known = (*PROBES, "finetune", *TEXT_PROBES)
    if kind and kind not in known:
        raise UsageError(f"unknown probe {kind!r}: {nearest(kind, known)}")
    if range_alone:
        raise UsageError("--float-range is for the images of --data; the run's own images are read as in training")


def refuse_options(kind: str, protocol: str, search: bool, shots: int) -> None:
    """Refuse options that the probe does not have."""
    if shots < 0:
        raise UsageError(f"shots = {shots}: give at least one train image per class")
    if kind != "finetune" and (protocol or search):
        raise UsageError(f"protocol and search are for the probe 'finetune', not for {kind!r}")
    if shots and kind not in ("finetune", "few-shot"):
        raise UsageError(f"shots are for the probes 'few-shot' and 'finetune', not for {kind!r}")
    if protocol:
        fine_tuning_named(protocol)


def probe_arguments(probe: str, run: Run, train: ImageSet, seed: int) -> dict[str, Any]:
    """Return the arguments of a probe on frozen features that come from the run and the seed."""
    settings = run.recipe.evaluation
    if probe == "few-shot":
        return {"classes": train.classes, "seeds": range(3 * seed, 3 * seed + 3)}
    return {"seed": seed} | ({"k": settings.k, "temperature": settings.temperature} if probe == "knn" else {})


@dataclass(frozen=True)
class _Job:
    """The probes to run, on which images and device."""

    run: Run
    kind: str
    seeds: range
    cached: bool
    epochs: int
    protocol: str
    search: bool
    shots: int
    train: ImageSet
    test: ImageSet | None
    device: torch.device
    say: Callable[[str], None]

    @property
    def labeled(self) -> bool:
        return self.test is not None and self.train.labels is not None and self.test.labels is not None

    @property
    def on_crops(self) -> bool:
        return self.kind in PROTOCOLS and not self.cached

    @property
    def fits(self) -> list[tuple[str, int]]:
        """Each probe at each seed; kNN only once, because nothing in it is random."""
        default = DEFAULT_PROBES if self.run.recipe.evaluation.linear else ("knn",)
        probes = (self.kind,) if self.kind else default
        return [(probe, seed) for probe in probes for seed in (self.seeds[:1] if probe == "knn" else self.seeds)]

    def progress(self) -> Progress:
        """Return the bar over all features; extracting them and each fit count as one pass over the images.

        It is silent if the slow part has a bar of its own, because a terminal shows one at a time.
        """
        passes = (len(FEATURES) - (self.run.recipe.start is None)) * (1 + len(self.fits)) if self.labeled else 1
        images = len(self.train) + len(self.test or ())
        return Progress("probe", passes * images, silent=self.on_crops or self.kind == "finetune")

    def probe_encoder(self, name: str, encoder: nn.Module, bar: Progress, gallery: bool) -> list[ProbeResult]:
        """Run all probes on one kind of features."""
        if self.kind == "finetune":
            return [self._fine_tune(name, encoder, s) for s in self.seeds] if self.labeled and name != "pixels" else []
        if not self.labeled and name != "trained":
            return []
        features = [
            extract_features(encoder, part, self.run.transform(), device=self.device, advance=bar.advance)
            for part in (self.train, self.test)
            if part is not None
        ]
        where = float64_device(self.device)
        fit, held = features[0].to(where), features[-1].to(where)
        if gallery and name == "trained" and self.run.recipe.evaluation.gallery:
            self._write_gallery(fit, held)
        results = []
        for probe, seed in self.fits if self.labeled else ():
            sets: Sets = (fit, self.train.labels, held, self.test.labels)  # type: ignore[union-attr]
            results.append(self._fit(probe, name, encoder, sets, seed))
            bar.advance(len(fit) + len(held))
        return results

    def _fit(self, probe: str, name: str, encoder: nn.Module, sets: Sets, seed: int) -> ProbeResult:
        arguments = probe_arguments(probe, self.run, self.train, seed) | ({"shots": self.shots} if self.shots else {})
        with contextlib.ExitStack() as stack:
            if self.on_crops:  # fresh crops in every epoch, with a progress bar
                bar = stack.enter_context(Progress(f"{probe} on crops", PROTOCOLS[probe].epochs * len(self.train)))
                network = encoder.to(memory_format=torch.channels_last)
                crops = CroppedFeatures(self.run, network, self.train, CROPS[probe], self.device, bar.advance)
                arguments["features_of_epoch"] = crops
            result = PROBES[probe](*sets, **arguments)
        if result.note:
            self.say(f"{probe}, {name}: {result.note}")
        return with_names(result, probe, name, self.train)

    def _fine_tune(self, name: str, encoder: nn.Module, seed: int) -> ProbeResult:
        train, test = self.train, self.test
        assert test is not None
        settings = fine_tuning_named(self.protocol)
        settings = dataclasses.replace(settings, epochs=self.epochs or settings.epochs)
        with Progress(f"finetune, {name}", self._images_of_fine_tuning(settings.epochs)) as bar:
            options: dict[str, Any] = {"protocol": settings, "transform": self.run.transform(), "search": self.search}
            options |= {"augment": None if self.cached else FineTuningCrops(self.run, seed), "advance": bar.advance}
            tune = partial(finetune, encoder, **options)
            sets: Any = (train, train.labels, test, test.labels)
            if not self.shots:
                return with_names(tune(*sets, seed=seed), "finetune", name, train)
            arguments = probe_arguments("few-shot", self.run, train, seed)
            found = few_shot(*sets, shots=self.shots, probe=tune, **arguments)
        return with_names(dataclasses.replace(found, seed=seed), f"finetune-{self.shots}-shot", name, train)

    def _images_of_fine_tuning(self, epochs: int) -> int:
        """Return how many images all trainings of one fine-tuning show, for the progress bar."""
        labels = self.train.labels
        assert labels is not None
        images = len(labels.unique()) * self.shots * 3 if self.shots else len(labels)
        return round(epochs * images * (1 + self.search * len(RATES) * len(DECAYS) * (HELD_OUT - 1) / HELD_OUT))

    def _write_gallery(self, fit: Tensor, held: Tensor) -> None:
        recipe, shown = self.run.recipe, self.train if self.test is None else self.test
        train = None if self.test is None else GallerySplit("train", fit, self.run.shown(self.train))
        test = GallerySplit("test", held, self.run.shown(shown))
        write_gallery(self.run.path, test, train, points=recipe.evaluation.gallery, seed=recipe.seed)


def open_images(
    run: Run,
    data: str | None,
    labels: str | None,
    max_bad: float | None,
    say: Callable[[str], None],
    captions: bool = False,
) -> tuple[ImageSet, ImageSet | None]:
    """Open the train and test images to probe with, and warn of changed and skipped ones; `captions` is for `data`."""
    settings = run.settings_for(data, captions)
    if max_bad is not None:
        settings = dataclasses.replace(settings, max_bad=max_bad)
    try:
        train = open_split(settings, "train", seed=run.recipe.seed)
    except DataError as error:
        raise error if data else DataError(f"{error}; if the run's images have moved, give --data") from None
    train, test = run.check_channels(train), None
    if train.has_test:
        test = run.check_channels(open_split(settings, "test", seed=run.recipe.seed, other_bad=train.bad))
    if data is None and test is not None and (warning := data_change_warning(run, train, test)):
        say(warning)
    if labels is not None:
        train = read_labels(train, Path(labels))
        if test is not None:
            test = read_labels(test, Path(labels))
        else:  # a flat folder with labels from a CSV: hold out a share
            order = torch.from_numpy(permutation(len(train), run.recipe.seed))
            count = max(1, int(len(train) * (settings.test_share or 0.2)))
            train, test = train.subset(order[count:]), train.subset(order[:count])
    for split in (train, test):
        if split is not None and split.bad and (split is test or data is not None):  # pretrain reported its own
            say(skipped(split.bad, split.total, f"{split.split} images"))
    return train, test


def data_change_warning(run: Run, train: ImageSet, test: ImageSet) -> str:
    """Return a warning if the run's images have changed since it was trained, because the held-out part changes too.

    Empty if they are the same, or if the run was trained on another split.
    """
    settings, before = run.recipe.data, run.info.get("data", {}).get("fingerprint")
    if settings.split != "train" or settings.imbalance != "none" or before in (None, train.fingerprint):
        return ""
    try:
        found = find_changes(run.folder, Splits(train, train, train, test), whole=True)
    except DataError:  # a damaged listing must not prevent a probe
        found = None
    moved = found is None or found.added or found.removed  # names decide which images are held out
    details = ("" if found is None else f": {found}") + ("; some test images may have been trained on" if moved else "")
    return f"the images changed since the run was trained{details}"


def _report_missing(
    run: Run, train: ImageSet, test: ImageSet | None, data: str | None, say: Callable[[str], None]
) -> None:
    """Say why there was nothing to probe: no test images or no labels. An error if the user named data or a probe."""
    share = run.recipe.data.test_share
    if train.labels is None or test is not None:
        why = "no labels: give class sub-folders with two images or more"
    elif share:
        why = f"no test images: data.test_share of {share:g} is too small to hold any out; give folders train and test"
    else:
        why = "no test images: data.test_share is 0; give folders train and test"
    if data is not None:
        raise DataError(f"{data} has {why}, or --labels CSV")
    command = shlex.join(["kontrast", "report", str(run.path)])
    say(f"{why} with --data, or --labels CSV; to see the map and neighbors, write the report with `{command}`")


def save_results(
    run: Run, results: list[ProbeResult], data: str | None, labels: str | None = None
) -> list[ProbeResult]:
    """Add results to probes.json, replacing those of the same probe, features, seed, data and labels.

    Returns them with `data` and `labels` in their protocol, unless they are the run's own.
    """
    others = {key: value for key, value in (("data", data), ("labels", labels)) if value is not None}
    results = [dataclasses.replace(r, protocol={**r.protocol, **others}) for r in results]
    path = run.path / "probes.json"
    merged = {_identity(entry): entry for entry in [*read_probes(path), *(r.to_dict() for r in results)]}
    if results:
        write_json(path, {"version": 1, "probes": list(merged.values())})
    return results


def read_probes(path: Path) -> list[dict[str, Any]]:
    """Return the results in a run's probes.json; none if it does not exist."""
    tree = read_json(path) if path.exists() else {}
    found = tree.get("probes", []) if isinstance(tree, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise CheckpointError(f"{path} is damaged: it holds no list of probes; remove it and probe again")
    return found


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    protocol = entry["protocol"] if isinstance(entry.get("protocol"), dict) else {}
    return *(entry.get(key) for key in ("probe", "features", "seed")), protocol.get("data"), protocol.get("labels")


def result_table(results: Sequence[ProbeResult]) -> list[str]:
    """Return lines of accuracy by probe and features; for several seeds the mean, and its interval below.

    Below an accuracy is that of the best five classes, if there are more, and the mean over classes if their numbers of
    test images differ.
    """
    if not results:
        return []
    started = any(r.features == "starting weights" for r in results)
    features = [name for name in FEATURES if started or name != "starting weights"]
    first, width = max(10, *(len(r.probe) + 2 for r in results)), 18 if started else 16
    lines = [f"{'accuracy':<{first}}" + "".join(f"{name:>{width}}" for name in features)]
    for probe in dict.fromkeys(r.probe for r in results):
        values = {name: [r.accuracy for r in results if (r.probe, r.features) == (probe, name)] for name in features}
        means = [f"{fmean(found):.3f}" if found else "" for found in values.values()]
        lines.append(f"{probe:<{first}}" + "".join(f"{mean:>{width}}" for mean in means))
        intervals = [within_one(over_seeds(found)) for found in values.values()]
        if any(intervals):
            count = max(map(len, values.values()))
            texts = [f"{span[0]:.3f} to {span[1]:.3f}" if span else "" for span in intervals]
            lines.append(f"{f'{count} seeds':<{first}}" + "".join(f"{text:>{width}}" for text in texts))
        for title, key in (("  top-5", "top5"), ("  by class", "mean_per_class")):
            own = [[getattr(r, key) for r in results if (r.probe, r.features) == (probe, name)] for name in features]
            texts = [f"{fmean(found):.3f}" if found and None not in found else "" for found in own]
            if any(texts) and texts != means:
                lines.append(f"{title:<{first}}" + "".join(f"{text:>{width}}" for text in texts))
    return lines
