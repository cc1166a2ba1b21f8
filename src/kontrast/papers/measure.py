"""Measures a finished run for a table: the paper's probes, curves over epochs, and numbers of the lens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kontrast.files import read_json_lines
from kontrast.lens import plots
from kontrast.lens.measures import coupling
from kontrast.lens.normality import normality, random_projections
from kontrast.probes import PROTOCOLS, extract_features
from kontrast.runs.cropped_features import CROPS, CroppedFeatures
from kontrast.runs.lens import encode_views, lens_images, project_views
from kontrast.runs.probe import PROBES, Sets, probe_arguments
from kontrast.runs.run import Run
from kontrast.runs.snapshots import snapshots
from kontrast.runs.text_probes import TEXT_RESULTS, text_results
from kontrast.runs.towers import Towers
from kontrast.studies.audit.retained_features import probe_added_feature
from kontrast.studies.cells import probe_numbers
from kontrast.training.build import views_of
from kontrast.training.progress import Progress
from kontrast.training.resolve import temperature_of

IMAGES, AUGMENTATIONS, BINS, MOMENTS = 2048, 32, 40, 32
POSITIVE_IMAGES = 32_768  # JCL, appendix E
CURVES = ("knn", "effective_rank", "conditional_entropy", "conditional_entropy_own")


TABLE_PROBES = (*PROBES, *(name for names in TEXT_RESULTS.values() for name in names))
"""The probes that a table may have: those of frozen features, and the results of a text tower's."""


def probe_run(run: Run, names: tuple[str, ...], device: torch.device) -> dict[str, dict[str, Any]]:
    """Accuracy of each probe on the whole, balanced set; linear protocols draw new crops in every epoch. Those of the
    text tower are recall and zero-shot accuracy on the test images."""
    found = probe_texts(run, names, device)
    names = tuple(name for name in names if name not in found)
    if not names:
        return found
    train, test = run.data("train"), run.data("test")
    encoder, transform = run.encoder(device).to(memory_format=torch.channels_last), run.transform()
    fit, held = (extract_features(encoder, part, transform, device=device).to(device) for part in (train, test))
    for name in names:
        sets: Sets = (fit, train.labels, held, test.labels)
        arguments = probe_arguments(name, run, train, run.recipe.seed)
        if name in PROTOCOLS:
            arguments["features_of_epoch"] = CroppedFeatures(run, encoder, train, CROPS[name], device)
        result = PROBES[name](*sets, **arguments)
        found[name] = probe_numbers(result) | {key: result.extra[key] for key in ("best",) if key in result.extra}
    return found


def probe_texts(run: Run, names: tuple[str, ...], device: torch.device) -> dict[str, dict[str, Any]]:
    """Those of the numbers that come from the text tower."""
    kinds = [kind for kind, own in TEXT_RESULTS.items() if set(own) & set(names)]
    if not kinds:
        return {}
    results, _ = text_results(Towers(run, device), kinds, run.data("test"), seed=run.recipe.seed)
    return {result.probe: probe_numbers(result) for result in results if result.probe in names}


def logged_curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """Curves over epochs that the run logged during its training."""
    lines = read_json_lines(run.path / "metrics.jsonl")
    found = {name: [(line["epoch"], line[name]) for line in lines if name in line] for name in CURVES}
    return {name: points for name, points in found.items() if points}


Measured = tuple[dict[str, Tensor], dict[str, Any]]  # numbers with one value per image; curves and histograms


def multiplier(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """The coupling multiplier (DCL, proposition 1) before training, at every saved checkpoint and at the end.

    It is computed with the run's batch size and temperature.
    """
    shown, views = lens_images(run, IMAGES), views_of(run.recipe, 2)
    temperature, batch = temperature_of(run.recipe, run.path / "metrics.jsonl"), run.recipe.training.batch
    found, curve = torch.empty(0), []
    for moment in snapshots(run, MOMENTS, device, say)[0]:
        z = project_views(run, moment.student, shown, views, device, 2)
        found = coupling(z, temperature, batch).mean(0)
        curve.append((moment.time, found.mean().item()))
    return {"multiplier": found}, {"multiplier": curve}


def positives(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """Cosine and variance of the augmentations of each training image, with their histograms (JCL, figure 3)."""
    shown, views = run.data("train").first(POSITIVE_IMAGES), views_of(run.recipe, AUGMENTATIONS)
    student = snapshots(run, 2, device, say)[0][-1].student
    with Progress("augmentations", len(shown) * AUGMENTATIONS) as bar:
        found = encode_views(run, student, shown, views, device, bar).positives
    drawn = {"cosine_histogram": histogram(found.cosine), "variance_histogram": histogram(found.variance)}
    numbers = {"positive_cosine": found.cosine, "positive_variance": found.variance}
    return numbers | {"positive_images": torch.tensor([float(len(shown))])}, drawn


def added_feature(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """Accuracy of linear probes of the added bits, or of the overlaid digit (GCL, figures 5 and 6)."""
    encoder, transform, parts = run.encoder(device), run.transform(), (run.data("train"), run.data("test"))
    fit, held = (extract_features(encoder, part, transform, device=device) for part in parts)
    found = probe_added_feature(fit, parts[0], held, parts[1])
    return {} if found is None else {"added_feature": torch.tensor([found])}, {}


def projections(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """Distance of random projections of the test images to a normal distribution, and the first's histogram (GCL,
    figure 3)."""
    student = snapshots(run, 2, device, say)[0][-1].student
    z = extract_features(student, lens_images(run, POSITIVE_IMAGES), run.transform(), device=device)
    projected = random_projections(z)
    return {"projection_distance": normality(projected).distance}, {"projection_histogram": histogram(projected[:, 0])}


def linear_by_epoch(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """Linear accuracy at every saved checkpoint (CACR, figure 10)."""
    (train, test), transform, curve = (run.data("train"), run.data("test")), run.transform(), []
    for moment in snapshots(run, MOMENTS, device, say)[0]:
        encoder = moment.student.encoder
        fit, held = (extract_features(encoder, part, transform, device=device).to(device) for part in (train, test))
        curve.append((moment.time, PROBES["linear"](fit, train.labels, held, test.labels).accuracy))
    return {}, {"linear": curve}


def training_loss(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """The mean loss over the last tenth of the training (GCL, figure C.2)."""
    losses = [line["loss"] for line in read_json_lines(run.path / "metrics.jsonl") if "loss" in line]
    return {"training_loss": torch.tensor(losses[-max(1, len(losses) // 10) :])}, {}


def repulsion(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """The mean repulsion over the last twentieth of the training (GCL, figure B.1)."""
    values = [line["repulsion"] for line in read_json_lines(run.path / "metrics.jsonl") if "repulsion" in line]
    return {"repulsion": torch.tensor(values[-max(1, len(values) // 20) :])}, {}


def step_time(run: Run, device: torch.device, say: Callable[[str], None]) -> Measured:
    """The median time of a training step in milliseconds (CACR, tables 14 and 17)."""
    rates = [line["images_per_second"] for line in read_json_lines(run.path / "speed.jsonl")]
    known = [run.recipe.training.batch / rate for rate in rates if rate]
    return {"step_time": 1000 * torch.tensor(known).median()[None]} if known else {}, {}


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """The mean over images and its standard error; None if there is one value."""
    error = (values.double().std() / len(values) ** 0.5).item() if len(values) > 1 else None
    return values.mean().item(), error


def histogram(values: Tensor) -> list[tuple[float, float]]:
    """The center of each bin and its share of the values."""
    middles, shares = plots.histogram(values, BINS)
    return list(zip(middles.tolist(), shares.tolist()))


MEASURES: dict[str, Callable[..., Measured]] = {
    "multiplier": multiplier,
    "positives": positives,
    "added_feature": added_feature,
    "projections": projections,
    "linear_by_epoch": linear_by_epoch,
    "training_loss": training_loss,
    "repulsion": repulsion,
    "step_time": step_time,
}
