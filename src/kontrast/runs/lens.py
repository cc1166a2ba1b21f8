"""The lens on a run or on an embeddings file: lens.json, with a number and a plot for each study.

N images, n augmentations of each, F width of features, D width of projections.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet, read_labels
from kontrast.errors import DataError, UsageError, printable
from kontrast.files import disk_faults, write_json
from kontrast.lens import summaries as findings
from kontrast.lens.gallery import choose_queries
from kontrast.lens.measures import T_MINUS, conditional_entropy, directions
from kontrast.lens.pair_weights import data_address, extremes, negative_weights, positive_weights
from kontrast.lens.positive_spread import PositiveStatistics, positive_statistics
from kontrast.lens.summaries import Summary, record
from kontrast.probes import extract_features
from kontrast.runs.embed import encode
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.runs.run import Run
from kontrast.runs.snapshots import ENCODER_ALONE, Snapshot, evenly, snapshots
from kontrast.training.build import views_of
from kontrast.training.device import choose_device
from kontrast.training.learner import Student
from kontrast.training.online_probe import IMAGES
from kontrast.training.progress import Progress
from kontrast.training.resolve import temperature_of
from kontrast.views import Views, keys

AUGMENTATIONS = 8
MOMENTS, MAPS, QUERIES = 9, 4, 3
ROWS = 256
"""Pictures through a network at once."""
DRAWS = 1 << 40
"""The epoch whose draws the lens takes: augmentations that no training has seen."""


class Seen(NamedTuple):
    """What a student makes of the images: features of the plain pictures [N,F], projections of two augmentations
    [2,N,D], and the statistics of all n augmentations."""

    features: Tensor
    projections: Tensor
    positives: PositiveStatistics


def look(
    run: Run,
    *,
    images: int = IMAGES,
    augmentations: int = AUGMENTATIONS,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Look at a run, write its lens.json and return it."""
    if images < 3 or augmentations < 2:
        raise UsageError(f"--images {images}, --augmentations {augmentations}: at least 3 images and 2 augmentations")
    on = choose_device(device)
    steps, word = snapshots(run, MOMENTS, on, say)
    shown = pictures(run, images)
    if not run.info.get("finished"):
        say(f"{run.path} has not finished: this is its newest checkpoint, {word} {steps[-1].at:g}")
    views = views_of(run.recipe, augmentations)
    with Progress("lens", len(shown) * (len(steps) + augmentations)) as bar:
        seen = see(run, steps[-1].student, shown, views, on, bar)
        curve = [(m.at, *_entropy(run, m, shown, on, bar)) for m in steps]
    found = [*_of_projections(run, seen, curve, word), *_of_features(seen, shown, augmentations)]
    drawn, illustrated = _queries(run, steps, shown, views, on, word)
    tree = record([*found, *drawn], weights=illustrated)
    write_json(run.path / "lens.json", tree)
    return tree


def look_at_file(path: Path, labels: Path | None = None, images: int = IMAGES) -> dict[str, Any]:
    """What the vectors of an embeddings file are like; what needs augmentations (alignment, ...) needs a run."""
    if images < 3:
        raise UsageError(f"--images {images}: the lens compares images, give at least 3")
    file = read_embeddings(path)
    if len(file) < 3:
        raise DataError(f"{path} has {len(file)} rows: the lens compares images, give at least 3")
    rows, kept, left_out = _directed(file, images)
    unit, what = directions(rows), f"{path.name}, {len(rows):,} rows"
    value, maximum = conditional_entropy(unit)
    found = [
        findings.spread(unit, what),
        findings.entropy([(0.0, value)], maximum, what),
        findings.dimensions(rows, "vectors"),
        findings.projections(unit, "vectors"),
        left_out,
    ]
    numbers = _labels(file, labels)
    if numbers is not None:
        found.append(findings.classes(unit, numbers[kept]))
    return record(found)


def _directed(file: Embeddings, images: int) -> tuple[Tensor, Tensor, Summary]:
    """A sample's rows and positions, less the rows of length zero, which are counted: they have no direction, and would
    pass for vectors spread perfectly, at right angles to all others."""
    rows, kept = file.sample(images)
    directed = rows.any(1)
    if directed.all():
        return rows, kept, Summary([], [])
    first = int(kept[~directed][0])
    named = f"row {first} ({printable(str(file.names[first]))})"
    if directed.sum() < 3:
        few = f"{int(directed.sum())} of {len(rows):,} rows are not all zeros"
        raise DataError(f"{file.path}: {few}, and zeros have no direction, {named} first; give at least 3 others")
    return rows[directed], kept[directed], findings.without_direction(int((~directed).sum()), len(rows), named)


def write_lens(path: Path, tree: dict[str, Any]) -> Path:
    """The folder vectors.npy.lens beside an embeddings file, with the tree as its lens.json: a page can read it."""
    folder = path.with_name(f"{path.name}.lens")
    with disk_faults(folder):
        folder.mkdir(exist_ok=True)
    write_json(folder / "lens.json", tree)
    return folder


def pictures(run: Run, count: int) -> ImageSet:
    """At most `count` images of the run's test part, or of the train part where there is no other."""
    train = run.data("train")
    shown = (run.data("test") if train.has_test else train).first(count)
    if len(shown) < 3:
        raise DataError(f"the lens compares images: the run's data has {len(shown)}, at least 3 are needed")
    return shown


@torch.inference_mode()
def see(run: Run, student: Student, shown: ImageSet, views: Views, device: torch.device, bar: Progress) -> Seen:
    plain, pairs, spread = [], [], []
    transform = run.transform()
    per = max(1, ROWS // views.count)
    for start in range(0, len(shown), per):
        part = shown.subset(range(start, min(start + per, len(shown))))
        plain.append(encode(student.encoder, part, transform, device))
        features = through(student.encoder, augmented(run, part, views, device))
        pairs.append(through(student.head, features[:2].to(device)).cpu())
        spread.append(positive_statistics(features.cpu()))
        bar.advance(len(part) * views.count)
    joined = PositiveStatistics(*(torch.cat(column) for column in zip(*spread)))
    return Seen(torch.cat(plain), torch.cat(pairs, 1), joined)


@torch.inference_mode()
def projected(run: Run, student: nn.Module, shown: ImageSet, views: Views, device: torch.device, count: int) -> Tensor:
    """Projections [count,N,D] on the CPU of the first `count` augmentations."""
    rows = []
    few = Views(list(views.policies[:count]), count=count, size=views.size)
    for start in range(0, len(shown), ROWS // 2):
        part = shown.subset(range(start, min(start + ROWS // 2, len(shown))))
        rows.append(through(student, augmented(run, part, few, device)).float().cpu())
    return torch.cat(rows, 1)


def augmented(run: Run, part: ImageSet, views: Views, device: torch.device) -> Tensor:
    """Augmentations [n,B,C,h,w], the same for an image whatever stands beside it."""
    made: list[Any] = []  # tensors: these views have no local crops
    for positions, pixels, sizes in part.iter_chunks(torch.arange(len(part))):
        drawn = keys(run.recipe.seed, DRAWS, part.index[positions])  # type: ignore[index]
        sizes = None if sizes is None else sizes.to(device)
        made.append(views(pixels.to(device), drawn.to(device), sizes))
    return torch.cat(made, 1)


def through(network: nn.Module, x: Tensor) -> Tensor:
    """[V,B,...] through a network in one forward: [V,B,D]."""
    return network(x.flatten(0, 1)).float().unflatten(0, x.shape[:2])


def _entropy(run: Run, moment: Snapshot, shown: ImageSet, device: Any, bar: Progress) -> tuple[float, float]:
    """Of the plain pictures' projections, as the online probe has it."""
    found = conditional_entropy(extract_features(moment.student, shown, run.transform(), device=device))
    bar.advance(len(shown))
    return found


def _of_projections(run: Run, seen: Seen, curve: list[tuple[float, float, float]], word: str) -> list[Summary]:
    z, what = seen.projections, "features" if word == ENCODER_ALONE else "projections"
    return [
        findings.spread(z, what),
        findings.entropy([(at, value) for at, value, _ in curve], curve[-1][2], what, word),
        findings.multiplier(z, temperature_of(run.recipe), run.recipe.training.batch),
        findings.projections(z[0], what),
    ]


def _of_features(seen: Seen, shown: ImageSet, augmentations: int) -> list[Summary]:
    found = [
        findings.dimensions(seen.features),
        findings.positives(seen.positives, augmentations, seen.features.shape[1]),
    ]
    if shown.labels is not None:
        found.append(findings.classes(seen.features, shown.labels))
    return found


def _queries(
    run: Run, steps: list[Snapshot], shown: ImageSet, views: Views, device: torch.device, word: str
) -> tuple[list[Summary], list[dict[str, Any]]]:
    """Weights and neighborhood of a few queries, drawn by chance and never by how well they did."""
    generator = torch.Generator().manual_seed(run.recipe.seed)
    chosen = choose_queries(shown.labels, torch.arange(len(shown)), QUERIES, generator)
    drawn: list[Summary] = []
    told = []
    for order, place in enumerate(chosen):
        others = findings.batch_of(place, len(shown))
        asked, batch = shown.subset([place]), shown.subset(others)
        z = _around(run, steps[-1], asked, batch, views, device)
        pictured = picture(augmented(run, asked, views, device)[:, 0], views)
        told.append(_told(shown, place, others, pictured, *z))
        if order:
            continue
        drawn.append(findings.weights(*z))
        for number, moment in enumerate([*steps[:-1][:1], *evenly(steps[1:] or steps, MAPS - 1)]):
            when = "Before training" if moment.at == 0 else f"At {word} {moment.at:.3g}"
            when = "After training" if word == ENCODER_ALONE else when
            z = _around(run, moment, asked, batch, views, device)
            drawn.append(findings.neighborhood(*z, when, number, run.recipe.seed))
    return drawn, told


def _around(
    run: Run, moment: Snapshot, asked: ImageSet, batch: ImageSet, views: Views, device: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """One query [D], its positives [n-1,D] and the negatives [J,D] of its mini-batch, at one moment."""
    own = projected(run, moment.student, asked, views, device, views.count)[:, 0]
    return own[0], own[1:], projected(run, moment.student, batch, views, device, 1)[0]


def _told(
    shown: ImageSet, place: int, others: list[int], views: Tensor, query: Tensor, near: Tensor, far: Tensor
) -> dict[str, Any]:
    """A query with pictures: its views and their weights, the hardest and the easiest negatives and theirs."""
    plus, minus = positive_weights(query, near), negative_weights(query, far, T_MINUS)

    def entry(number: int) -> dict[str, Any]:
        label = None if shown.labels is None or int(shown.labels[number]) < 0 else int(shown.labels[number])
        return {"name": str(shown.names[number]), "label": label, "image": data_address(shown.base[number])}

    hardest, easiest = extremes(minus)
    return {
        "query": {**entry(place), "view": data_address(views[0])},
        "positives": [{"weight": w, "image": data_address(v)} for w, v in zip(plus.tolist(), views[1:])],
        "hardest": [{"weight": minus[i].item(), **entry(others[i])} for i in hardest],
        "easiest": [{"weight": minus[i].item(), **entry(others[i])} for i in easiest],
    }


def picture(view: Tensor, views: Views) -> Tensor:
    """Normalised views [n,C,h,w] as pictures again, uint8 [n,c,h,w] of the colour channels."""
    policy = views.policies[0]
    colors = policy.picture_channels(view.shape[1])
    mean, std = (torch.tensor(v)[:colors, None, None] for v in (policy.mean, policy.std))
    return ((view[:, :colors].cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _labels(file: Embeddings, path: Path | None) -> Tensor | None:
    """The rows' labels: the file's own, or of a CSV of name,label."""
    if path is None:
        return file.labels
    return read_labels(ImageSet(torch.empty(len(file), 0), list(file.names)), path).labels
