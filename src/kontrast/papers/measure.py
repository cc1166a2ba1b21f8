"""Measures a finished run for a table: the paper's probes, curves over epochs, and numbers of the lens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kontrast.files import read_json_lines
from kontrast.lens import plots
from kontrast.lens.measures import coupling
from kontrast.probes import PROTOCOLS, extract_features
from kontrast.runs.cropped_features import CROPS, CroppedFeatures
from kontrast.runs.lens import encode_views, lens_images, project_views
from kontrast.runs.probe import PROBES, Sets, probe_arguments
from kontrast.runs.run import Run
from kontrast.runs.snapshots import snapshots
from kontrast.studies.cells import probe_numbers
from kontrast.training.build import views_of
from kontrast.training.progress import Progress
from kontrast.training.resolve import temperature_of

IMAGES, AUGMENTATIONS, BINS, MOMENTS = 2048, 32, 40, 32
CURVES = ("knn", "effective_rank", "conditional_entropy")


def probe_run(run: Run, names: tuple[str, ...], device: torch.device) -> dict[str, dict[str, Any]]:
    """Accuracy of each probe on the whole, balanced set; linear protocols draw new crops in every epoch."""
    train, test = run.data("train"), run.data("test")
    encoder, transform = run.encoder(device).to(memory_format=torch.channels_last), run.transform()
    fit, held = (extract_features(encoder, part, transform, device=device).to(device) for part in (train, test))
    found = {}
    for name in names:
        sets: Sets = (fit, train.labels, held, test.labels)
        arguments = probe_arguments(name, run, train, run.recipe.seed)
        if name in PROTOCOLS:
            arguments["features_of_epoch"] = CroppedFeatures(run, encoder, train, CROPS[name], device)
        result = PROBES[name](*sets, **arguments)
        found[name] = probe_numbers(result) | {key: result.extra[key] for key in ("best",) if key in result.extra}
    return found


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
    """Cosine and variance of the augmentations of each image, with their histograms (JCL, figure 3)."""
    shown, views = lens_images(run, IMAGES), views_of(run.recipe, AUGMENTATIONS)
    student = snapshots(run, 2, device, say)[0][-1].student
    with Progress("augmentations", len(shown) * AUGMENTATIONS) as bar:
        found = encode_views(run, student, shown, views, device, bar).positives
    drawn = {"cosine_histogram": histogram(found.cosine), "variance_histogram": histogram(found.variance)}
    return {"positive_cosine": found.cosine, "positive_variance": found.variance}, drawn


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean over images and its standard error."""
    return values.mean().item(), (values.double().std() / len(values) ** 0.5).item()


def histogram(values: Tensor) -> list[tuple[float, float]]:
    """The center of each bin and its share of the values."""
    middles, shares = plots.histogram(values, BINS)
    return list(zip(middles.tolist(), shares.tolist()))


MEASURES: dict[str, Callable[..., Measured]] = {"multiplier": multiplier, "positives": positives}
