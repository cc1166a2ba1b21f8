"""Look at the representation of a run or of an embeddings file: a number and a plot for each question, in lens.json.

N images, n augmentations of each, F width of features, D width of projections.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet, read_labels
from kontrast.errors import DataError, UsageError, printable
from kontrast.files import disk_faults, write_json
from kontrast.lens import summaries
from kontrast.lens.gallery import choose_queries
from kontrast.lens.measures import T_MINUS, conditional_entropy, directions
from kontrast.lens.pair_weights import extremes, image_as_data_url, negative_weights, positive_weights
from kontrast.lens.positive_spread import PositiveStatistics, positive_statistics
from kontrast.lens.summaries import Summary
from kontrast.probes import extract_features
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.run import Run, open_run
from kontrast.runs.snapshots import ENCODER_ALONE, Snapshot, snapshots, spread_evenly
from kontrast.training.augmented_projections import augmented_projections, draw_views
from kontrast.training.build import views_of
from kontrast.training.device import choose_device
from kontrast.training.learner import Student
from kontrast.training.online_probe import IMAGES, LIDAR_VIEWS
from kontrast.training.progress import Progress
from kontrast.training.resolve import temperature_of
from kontrast.views import Views
from kontrast.views.composite import Composite

AUGMENTATIONS = 8
SNAPSHOTS, MAPS, QUERIES = 9, 4, 3
BATCH = 256


@dataclass(frozen=True, repr=False)
class LensResult:
    """What `lens` found, printed as a table. path: lens.json; tree: its content, with all numbers and plots."""

    path: Path
    tree: dict[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        """The value of each number by its name, for example `result.numbers["effective rank"]`."""
        return {number["name"]: number["value"] for number in self.tree["numbers"]}

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines of the table, broken between words if they are longer than `width`."""
        longest = max(map(len, self.numbers), default=0)
        lines = [f"{n['name']:<{longest}}  {n['value']:>9.4g}  {n['note']}" for n in self.tree["numbers"]]
        if width is not None:
            room, indent = max(width, longest + 33), " " * (longest + 13)
            options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
            lines = [part for text in lines for part in textwrap.wrap(text, room, subsequent_indent=indent, **options)]
        return [*lines, f"lens    {self.path}"]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        return {"lens": str(self.path), "numbers": self.numbers}


def lens(
    target: str | os.PathLike[str],
    *,
    images: int = IMAGES,
    augmentations: int = AUGMENTATIONS,
    labels: str | os.PathLike[str] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> LensResult:
    """Measure what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms, weights.

    Writes lens.json, with a plot for each, into the run folder, or into the folder FILE.lens beside an embeddings file.
    What needs augmentations or checkpoints (alignment, for example) is measured only for runs.

    Args:
        target: A run (folder or `kontrast.Run`), or an embeddings file (.npy, .parquet).
        images: How many images, or rows of the file, to measure at most; default: 1024.
        augmentations: How many augmentations of each image to compare; default: 8.
        labels: Only for an embeddings file: a CSV file with the columns name,label.
        device: "auto" (default), "cpu" or "cuda".
        say: Called with each warning; default: print.

    Returns:
        The numbers by name, the content of lens.json and its path.

    Example:
        >>> import kontrast
        >>> result = kontrast.lens("runs/digits", images=30, augmentations=2, device="cpu")
        >>> 1 <= result.numbers["effective rank"] <= 32
        True
    """
    if images < 3 or augmentations < 2:
        raise UsageError(f"--images {images}, --augmentations {augmentations}: give at least 3 images, 2 augmentations")
    path = Path(target)
    if path.is_dir():
        if labels is not None:
            raise UsageError("--labels is for an embeddings file; a run's images have their own labels")
        folder = path
        tree = measure_run(open_run(target), images, augmentations, choose_device(device), say)
    else:
        tree = measure_file(path, None if labels is None else Path(labels), images)
        folder = path.with_name(f"{path.name}.lens")
        with disk_faults(folder):
            folder.mkdir(exist_ok=True)
    write_json(folder / "lens.json", tree)
    return LensResult(folder / "lens.json", tree)


# A run


class EncodedViews(NamedTuple):
    """A student's features of the plain images [N,F], projections of two augmentations [2,N,D], and the statistics of
    all n augmentations."""

    features: Tensor
    projections: Tensor
    positives: PositiveStatistics


def measure_run(
    run: Run, images: int, augmentations: int, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the content of lens.json for a run."""
    history, unit = snapshots(run, SNAPSHOTS, device, say)
    shown = lens_images(run, images)
    if not run.info.get("finished"):
        say(f"{run.path} has not finished: measuring its newest checkpoint, {unit} {history[-1].time:g}")
    views = views_of(run.recipe, augmentations)
    with Progress("lens", len(shown) * (len(history) + augmentations)) as bar:
        encoded = encode_views(run, history[-1].student, shown, views, device, bar)
        curve = []
        for snapshot in history:
            # Of the plain images' projections, like the number that training logs.
            z = extract_features(snapshot.student, shown, run.transform(), device=device)
            curve.append((snapshot.time, *conditional_entropy(z)))
            bar.advance(len(shown))
    z, what = encoded.projections, "features" if unit == ENCODER_ALONE else "projections"
    summary = Summary()
    summaries.spread(summary, z, what)
    summaries.entropy(summary, [(time, value) for time, value, _ in curve], curve[-1][2], what, unit)
    temperature = temperature_of(run.recipe, run.path / "metrics.jsonl")
    summaries.multiplier(summary, z, temperature, run.recipe.training.batch)
    summaries.projections(summary, z[0], what)
    plain = extract_features(history[-1].student, shown, run.transform(), device=device)
    summaries.label_free(summary, plain, encoded.features, what)
    if len(shown) > z.shape[2]:
        views_of_each = augmented_projections(history[-1].student, run.recipe, shown, LIDAR_VIEWS, device)
        summaries.separability(summary, views_of_each, what)
    summaries.dimensions(summary, encoded.features)
    summaries.positives(summary, encoded.positives, augmentations, encoded.features.shape[1])
    if shown.labels is not None:
        summaries.classes(summary, encoded.features, shown.labels)
    return summary.to_dict(weights=_summarize_queries(summary, run, history, shown, views, device, unit))


def lens_images(run: Run, count: int) -> ImageSet:
    """Return at most `count` test images of the run, or train images if it has no others."""
    train = run.data("train")
    shown = (run.data("test") if train.has_test else train).first(count)
    if len(shown) < 3:
        raise DataError(f"the lens compares images: the run's data has {len(shown)}, at least 3 are needed")
    return shown


@torch.inference_mode()
def encode_views(
    run: Run, student: Student, shown: ImageSet, views: Views, device: torch.device, bar: Progress
) -> EncodedViews:
    plain, pairs, spread = [], [], []
    transform = run.transform()
    size = max(1, BATCH // views.count)
    for start in range(0, len(shown), size):
        part = shown.subset(range(start, min(start + size, len(shown))))
        plain.append(extract_features(student.encoder, part, transform, device=device))
        features = apply_to_views(student.encoder, augment(run, part, views, device))
        pairs.append(apply_to_views(student.head, features[:2].to(device)).cpu())
        spread.append(positive_statistics(features.cpu()))
        bar.advance(len(part) * views.count)
    statistics = PositiveStatistics(*(torch.cat(column) for column in zip(*spread)))
    return EncodedViews(torch.cat(plain), torch.cat(pairs, 1), statistics)


@torch.inference_mode()
def project_views(
    run: Run, student: nn.Module, shown: ImageSet, views: Views, device: torch.device, count: int
) -> Tensor:
    """Return projections [count,N,D] of the first `count` augmentations, on the CPU."""
    rows = []
    few = Views(list(views.policies[:count]), count=count, size=views.size)
    for start in range(0, len(shown), BATCH // 2):
        part = shown.subset(range(start, min(start + BATCH // 2, len(shown))))
        rows.append(apply_to_views(student, augment(run, part, few, device)).float().cpu())
    return torch.cat(rows, 1)


def augment(run: Run, images: ImageSet, views: Views, device: torch.device) -> Tensor:
    """Return augmentations [n,B,C,h,w]; those of one image don't depend on the others."""
    return draw_views(run.recipe.seed, images, views, device)


def apply_to_views(network: nn.Module, x: Tensor) -> Tensor:
    """Apply a network to views [V,B,...] in one forward pass: [V,B,D]."""
    return network(x.flatten(0, 1)).float().unflatten(0, x.shape[:2])


def _summarize_queries(
    summary: Summary, run: Run, history: list[Snapshot], shown: ImageSet, views: Views, device: torch.device, unit: str
) -> list[dict[str, Any]]:
    """Add plots for one random query, and return the weights of a few with their pictures."""
    generator = torch.Generator().manual_seed(run.recipe.seed)
    chosen = choose_queries(shown.labels, torch.arange(len(shown)), QUERIES, generator)
    weights = []
    for place in chosen:
        others = summaries.mini_batch_of(place, len(shown))
        query, batch = shown.subset([place]), shown.subset(others)
        z = _project_query(run, history[-1], query, batch, views, device)
        pictures = denormalize(augment(run, query, views, device)[:, 0], run.composite)
        weights.append(_weights_entry(run.shown(shown), place, others, pictures, *z))
        if place != chosen[0]:
            continue
        summaries.weights(summary, *z)
        for number, snapshot in enumerate([*history[:-1][:1], *spread_evenly(history[1:] or history, MAPS - 1)]):
            when = "Before training" if snapshot.time == 0 else f"At {unit} {snapshot.time:.3g}"
            when = "After training" if unit == ENCODER_ALONE else when
            z = _project_query(run, snapshot, query, batch, views, device)
            summaries.neighborhood(summary, *z, when, number, run.recipe.seed)
    return weights


def _project_query(
    run: Run, snapshot: Snapshot, query: ImageSet, batch: ImageSet, views: Views, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one query [D], its positives [n-1,D] and the negatives [J,D] of its mini-batch."""
    positives = project_views(run, snapshot.student, query, views, device, views.count)[:, 0]
    return positives[0], positives[1:], project_views(run, snapshot.student, batch, views, device, 1)[0]


def _weights_entry(
    shown: ImageSet, place: int, others: list[int], views: Tensor, query: Tensor, near: Tensor, far: Tensor
) -> dict[str, Any]:
    """Return pictures and weights of a query's views and of its hardest and easiest negatives."""
    plus, minus = positive_weights(query, near), negative_weights(query, far, T_MINUS)

    def entry(number: int) -> dict[str, Any]:
        label = None if shown.labels is None or int(shown.labels[number]) < 0 else int(shown.labels[number])
        return {"name": str(shown.names[number]), "label": label, "image": image_as_data_url(shown.pictures[number])}

    hardest, easiest = extremes(minus)
    return {
        "query": {**entry(place), "view": image_as_data_url(views[0])},
        "positives": [{"weight": w, "image": image_as_data_url(v)} for w, v in zip(plus.tolist(), views[1:])],
        "hardest": [{"weight": minus[i].item(), **entry(others[i])} for i in hardest],
        "easiest": [{"weight": minus[i].item(), **entry(others[i])} for i in easiest],
    }


def denormalize(view: Tensor, composite: Composite) -> Tensor:
    """Turn normalized views [n,C,h,w] back into pictures: uint8 [n,c,h,w] of the channels that are shown."""
    policy = composite.policy
    shown = composite.chosen(policy.picture_channels(view.shape[1]))
    mean, std = (torch.tensor([v[c % len(v)] for c in shown])[:, None, None] for v in (policy.mean, policy.std))
    return ((view[:, shown].cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


# An embeddings file


def measure_file(path: Path, labels: Path | None, images: int) -> dict[str, Any]:
    """Return the content of lens.json for an embeddings file."""
    file = read_embeddings(path)
    rows, positions = file.sample(images)
    nonzero = rows.any(1)  # zeros have no direction; they would count as vectors at right angles to all others
    zeros = [f"row {i} ({printable(str(file.names[i]))})" for i in positions[~nonzero].tolist()]
    if nonzero.sum() < 3:
        first = f" ({zeros[0]} is zero)" if zeros else ""
        raise DataError(f"{path}: {nonzero.sum()} of {len(rows):,} rows are nonzero{first}; the lens needs at least 3")
    total, rows, positions = len(rows), rows[nonzero], positions[nonzero]
    unit, what = directions(rows), f"{path.name}, {len(rows):,} rows"
    value, maximum = conditional_entropy(unit)
    summary = Summary()
    summaries.spread(summary, unit, what)
    summaries.entropy(summary, [(0.0, value)], maximum, what)
    summaries.label_free(summary, rows, rows, "vectors")
    summaries.dimensions(summary, rows, "vectors")
    summaries.projections(summary, unit, "vectors")
    if zeros:
        note = f"of {total:,}, skipped: no direction; first {zeros[0]}"
        summary.number("rows of length zero", len(zeros), note)
    numbers = file.labels
    if labels is not None:
        numbers = read_labels(ImageSet(torch.empty(len(file), 0), list(file.names)), labels).labels
    if numbers is not None:
        summaries.classes(summary, unit, numbers[positions])
    return summary.to_dict()
