"""Finds out which features suppress which (GCL, section 3).

Easy features (random bits or overlaid digits) are added to the images, each learner is trained on them, and probes of
its frozen encoder show what it still learned. Contrastive objectives are compared with supervised training, a
variational autoencoder and an untrained encoder. All learners have the same encoder, with the same initial weights, and
see the same views, so that only the objective differs.

The folder of an audit: runs/<cell>/ (run folders of the contrastive cells), cells/<cell>.json, audit.json, report.html.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kontrast.config.overrides import apply_overrides
from kontrast.config.recipe import Recipe, fingerprint, read_recipe, to_tree
from kontrast.data import ImageSet
from kontrast.files import disk_faults
from kontrast.objectives import OBJECTIVES
from kontrast.studies.audit.audit_summary import summarize
from kontrast.studies.audit.baselines import BASELINES, SUPERVISED, UNTRAINED, VAE, train_baseline
from kontrast.studies.audit.retained_features import measure_features
from kontrast.studies.cells import Cell, CellRunner, Record, Say, finish_run, probe_fingerprints, seeds_from
from kontrast.studies.study_result import AuditResult
from kontrast.training.build import build_views
from kontrast.training.device import choose_device
from kontrast.training.learner import build_objective
from kontrast.training.option_checks import check_options
from kontrast.training.resolve import fresh_recipe
from kontrast.training.splits import open_split

BITS = (0, 5, 10)
STEPS = 300
DIGITS_ENCODER = 'encoder={name="convn"}'  # the encoder of GCL's RandBit study, for the embedded digits
SAMPLE = 256  # images whose mean and deviation standardize the pixels
FEATURE_KEYS = {"bits": "data.random_bits", "digits": "data.overlay_digits"}


def audit(
    data: str | None = None,
    *,
    objectives: Sequence[str] = ("nt-xent",),
    temperatures: Sequence[float] = (0.1,),
    bits: Sequence[int] = (),
    digits: Sequence[int] = (),
    steps: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    say: Say = print,
) -> AuditResult:
    """Measure which features an objective suppresses if easier ones are added to the images (GCL, section 3).

    Call it again with the same arguments to resume: finished trainings are read, not repeated. A training that fails is
    reported in the result, and the others continue.

    Args:
        data: a folder, a file or a named set; default: the embedded digits.
        objectives: names of objectives to train; default: nt-xent.
        temperatures: values to try for objectives that have a temperature; default: 0.1.
        bits: numbers of random bits to add as extra channels; default: 0, 5 and 10 if no digits are given.
        digits: numbers of different digits to overlay on the images; default: none.
        steps: training steps per learner; default (0): 300 for the embedded digits, else what the recipe says.
        seeds: the number of trainings of each learner, with consecutive seeds; default 1.
        overrides: settings for all trainings, each as "key.path=value".
        out: the folder of the audit; default: runs/audit.
        device: auto, cpu or cuda.
        say: receives progress lines; default: print.

    Returns:
        The result. `print(result)` shows its tables and verdict, and `result.cells` has the numbers.

    Example:
        >>> import kontrast
        >>> result = kontrast.audit("digits", bits=[0, 10])  # doctest: +SKIP
        >>> print(result.verdict)  # doctest: +SKIP
    """
    folder = Path(out) if out is not None else Path("runs") / "audit"
    amounts = {"bits": list(bits) if bits or digits else list(BITS), "digits": list(digits)}
    base, images = base_recipe(data, steps, overrides, choose_device(device), say)
    labeled = images.labels is not None and images.has_test
    cells = plan(base, choose_learners(objectives, temperatures, labeled), amounts, folder, seeds)
    with disk_faults(folder):
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    classes = None if images.labels is None else len(images.labels[images.labels >= 0].unique()) or None

    def save(records: list[Record]) -> AuditResult:
        tree = {"version": 1, "kind": "audit", "finished": len(records) == len(cells), "data": images.name}
        tree |= {"runs": [r["run"] for r in records if r.get("run")], **summarize(records, images.name, classes)}
        return AuditResult.save(folder / "audit.json", {**tree, "cells": records})

    runner = AuditRunner(device, say)
    runner.check(cells)
    records = runner.run(cells, save)
    runner.raise_if_all_failed(len(cells))
    return save(records)


def base_recipe(
    data: str | None, steps: int, overrides: Sequence[str], device: torch.device, say: Say
) -> tuple[Recipe, ImageSet]:
    """The recipe that all cells share and its images. Probes and galleries during the training are switched off."""
    own = ["evaluation.every=0", "evaluation.gallery=0", "checkpoints.keep=1"]
    own += [DIGITS_ENCODER] if data is None else []
    if data is None or steps:
        own.append(f"training.max_steps={steps or STEPS}")
    recipe, images = fresh_recipe(data, None, [*own, *overrides], device, say)
    return standardize_pixels(with_enough_epochs(recipe, images, steps), images), images


def with_enough_epochs(recipe: Recipe, images: ImageSet, steps: int) -> Recipe:
    """The recipe with enough epochs for this many steps, because `training.max_steps` is only an upper limit."""
    t = recipe.training
    epochs = max(t.epochs, -(-steps // max(1, len(images) // t.batch)))
    return dataclasses.replace(recipe, training=dataclasses.replace(t, epochs=epochs))


def standardize_pixels(recipe: Recipe, images: ImageSet) -> Recipe:
    """The recipe with the images' mean and deviation, if its views leave pixels in [0,1].

    The variance of a raw pixel is about 1/16, that of a random bit 1/4. In the first layer ten bits would weigh
    fourteen times as much as the picture, and in a few steps no learner, not even a supervised one, would learn
    anything else.
    """
    policy = build_views(recipe, torch.float32).policies[0]
    if any(value != 1 for value in policy.std):
        return recipe
    sample = [images.images[int(i)] for i in torch.arange(SAMPLE) * len(images) // SAMPLE]
    channels = policy.picture_channels(images.channels)
    pixels = torch.cat([torch.as_tensor(one)[:channels].flatten(1) for one in sample], 1).double() / 255
    measured = {"mean": pixels.mean(1), "std": pixels.std(1).clamp_min(1e-3)}
    arguments = {name: [round(float(v), 4) for v in values] for name, values in measured.items()}
    return dataclasses.replace(
        recipe, views=dataclasses.replace(recipe.views, arguments={**recipe.views.arguments, **arguments})
    )


def choose_learners(objectives: Sequence[str], temperatures: Sequence[float], labeled: bool) -> dict[str, list[str]]:
    """The overrides of each learner by its name: objectives at each temperature, if they have one, and baselines."""
    learners: dict[str, list[str]] = {}
    for name in objectives:
        tempered = "temperature" in OBJECTIVES.arguments(name)
        for t in temperatures if tempered else ():
            learners[f"{name} {t:g}"] = [f"objective.name={name}", f"objective.temperature={t}"]
        if not tempered:
            learners[name] = [f"objective.name={name}"]
    return learners | ({SUPERVISED: []} if labeled else {}) | {VAE: [], UNTRAINED: []}


def plan(
    base: Recipe, learners: dict[str, list[str]], amounts: dict[str, list[int]], out: Path, seeds: int = 1
) -> list[Cell]:
    """All cells, checked before the first one trains.

    They are ordered by seed, so that an interrupted audit is complete for some seeds, and within a seed baselines come
    last.
    """
    injected = [(feature, amount) for feature, values in amounts.items() for amount in sorted(set(values))]
    cells = []
    for seed, (learner, texts) in itertools.product(seeds_from(base.seed, seeds), learners.items()):
        for feature, amount in injected:
            tree = apply_overrides(to_tree(base), [*texts, f"{FEATURE_KEYS[feature]}={amount}", f"seed={seed}"])
            cells.append(make_cell(out, learner, feature, amount, read_recipe(tree, "audit")))
        recipe = cells[-1].recipe
        check_options(recipe, build_objective(recipe))
    return cells


def make_cell(out: Path, learner: str, feature: str, amount: int, recipe: Recipe) -> Cell:
    """A learner trained on images with `amount` bits or digits added to them."""
    name = f"{learner}-{feature}{amount}-seed{recipe.seed}".replace(" ", "-").lower()
    facts = {"learner": learner, "feature": feature, "amount": amount, "seed": recipe.seed}
    facts["fingerprint"] = fingerprint(recipe)
    files = out / "cells"
    return Cell(name, recipe, out / "runs" / name, files / f"{name}.toml", files / f"{name}.json", facts)


class AuditRunner(CellRunner):
    """Trains a learner and probes what its encoder learned."""

    def measure(self, cell: Cell) -> Record:
        start = time.monotonic()
        numbers = train_and_probe(cell, cell.facts["learner"], self.device)
        return {"seconds": time.monotonic() - start, **numbers}

    def describe(self, record: Record) -> str:
        return f"{record['target']} {record['accuracy']:.3f}"


def train_and_probe(cell: Cell, learner: str, device: str, neighbors: bool = False) -> Record:
    """Train a contrastive learner or a baseline and measure which features its encoder retained.

    With `neighbors`, the labels are probed by nearest neighbors too.
    """
    on, recipe = choose_device(device), cell.recipe
    train = open_split(recipe.data, "train", seed=recipe.seed)
    test = open_split(recipe.data, "test", seed=recipe.seed) if train.has_test else None
    if learner in BASELINES:
        images = open_split(recipe.data, "train", seed=recipe.seed, pretraining=True)
        encoder, run = train_baseline(learner, recipe, images, on, cell.name), {}
    else:
        encoder, run = finish_run(cell, device, lambda _: None)[0].encoder(on), {"run": f"runs/{cell.name}"}
    return {
        **run,
        "fingerprints": probe_fingerprints(train, test),
        **measure_features(encoder, recipe, train, test, on, neighbors),
    }
