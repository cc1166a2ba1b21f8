"""Which features suppress which (GCL, section 3): easy information is laid over the images, each learner is trained on
them, and what its frozen encoder kept is probed. Contrastive objectives stand beside supervised training, a variational
autoencoder and no training at all. All of them have the same encoder, which starts from the same weights and sees the
same views, so that what differs is the objective.

An audit's folder: runs/<cell>/ (run folders of the contrastive cells), cells/<cell>.json, audit.json, report.html.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kontrast.config.overrides import apply_overrides
from kontrast.config.recipe import Recipe, fingerprint, read_recipe, to_tree
from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, DataError, KontrastError, NumbersError, Stopped, UsageError
from kontrast.files import disk_faults, read_json, write_json
from kontrast.objectives import OBJECTIVES, objective
from kontrast.runs.run import Run
from kontrast.studies.audit.autoencoder import VariationalAutoencoder
from kontrast.studies.audit.baseline_training import fit
from kontrast.studies.audit.retained_features import what_was_kept
from kontrast.studies.audit.summary import CELL_FACTS, CELL_NUMBERS, findings
from kontrast.studies.audit.supervised import Supervised
from kontrast.studies.cells import (
    Marks,
    finished_run,
    images_at_hand,
    marks_of,
    refuse_other_cell,
    refuse_other_images,
    stored_cell,
)
from kontrast.training.build import build_views
from kontrast.training.device import choose_device
from kontrast.training.learner import build_student, check_options
from kontrast.training.resolve import fresh_recipe
from kontrast.training.signals import Interrupted
from kontrast.training.splits import open_split

BITS = (0, 5, 10)
STEPS = 300
SMALL = 64
SUPERVISED, VAE, UNTRAINED = "supervised", "VAE", "untrained"
VAE_PIXELS = "VAE-pixels"  # a bit counts at each of its pixels
AUTOENCODERS = (VAE, VAE_PIXELS)
ENCODER = 'encoder={name="convn"}'
"""Of the embedded set: the encoder of the RandBit study."""
MEASURED = 256
Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditCell:
    """One training: a learner on images with `amount` bits or unique digits laid over them."""

    learner: str
    feature: str  # bits or digits
    amount: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.learner}-{self.feature}{self.amount}-seed{self.recipe.seed}".replace(" ", "-").lower()


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
    out: Path,
    device: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Run every cell that is not done, write audit.json and return what is in it."""
    out, on = Path(out), choose_device(device)
    amounts = {"bits": list(bits) if bits or digits else list(BITS), "digits": list(digits)}
    base, images = base_recipe(data, steps, overrides, on, say)
    labelled = images.labels is not None and images.has_test
    cells = plan(base, objectives, temperatures, amounts, labelled=labelled, seeds=seeds)
    with disk_faults(out):
        (out / "cells").mkdir(parents=True, exist_ok=True)
    marks = images_at_hand([cell.recipe for cell in cells])
    for cell, now in zip(cells, marks):
        refuse_other(cell, out, now)
    records, errors = [], []
    for number, (cell, now) in enumerate(zip(cells, marks), 1):
        record, error = run_cell(cell, now, out, device, say, f"[{number}/{len(cells)}] {cell.name}")
        records.append(record)
        errors += [error] if error else []
        tree = {"version": 1, "kind": "audit", "finished": number == len(cells), "data": images.name}
        classes = None if images.labels is None else len(images.labels[images.labels >= 0].unique()) or None
        tree |= {"runs": [r["run"] for r in records if r.get("run")], **findings(records, images.name, classes)}
        write_json(out / "audit.json", {**tree, "cells": records})
    if len(errors) == len(cells):
        raise type(errors[0])(f"every training of the audit failed; the first: {errors[0]}")
    return read_json(out / "audit.json")


def base_recipe(data: str | None, steps: int, overrides: Sequence[str], device: torch.device, say: Say) -> Any:
    """The recipe that all cells share, and its images; probes and galleries of the runs themselves are left out."""
    own = ["evaluation.every=0", "evaluation.gallery=0", "checkpoints.keep=1"]
    own += [ENCODER] if data is None else []
    if data is None or steps:
        own.append(f"training.max_steps={steps or STEPS}")
    recipe, images = fresh_recipe(data, None, [*own, *overrides], device, say)
    return standardized(lasting(recipe, images, steps), images), images


def lasting(recipe: Recipe, images: ImageSet, steps: int) -> Recipe:
    """The recipe with epochs enough for as many steps: its max_steps alone are a most."""
    t = recipe.training
    epochs = max(t.epochs, -(-steps // max(1, len(images) // t.batch)))
    return dataclasses.replace(recipe, training=dataclasses.replace(t, epochs=epochs))


def standardized(recipe: Recipe, images: ImageSet) -> Recipe:
    """The recipe with the images' own mean and deviation, where its views leave pixels in [0,1].

    The variance of a pixel as it is is about a sixteenth, of a bit a quarter: ten bits would be fourteen times the
    picture in the first layer, and no learner of few steps, a supervised one neither, would see past them.
    """
    policy = build_views(recipe, torch.float32).policies[0]
    if any(value != 1 for value in policy.std):
        return recipe
    some = [images.images[int(i)] for i in torch.arange(MEASURED) * len(images) // MEASURED]
    colours = policy.picture_channels(images.channels)
    pixels = torch.cat([torch.as_tensor(one)[:colours].flatten(1) for one in some], 1).double() / 255
    measured = {"mean": pixels.mean(1), "std": pixels.std(1).clamp_min(1e-3)}
    arguments = {name: [round(float(v), 4) for v in values] for name, values in measured.items()}
    return dataclasses.replace(
        recipe, views=dataclasses.replace(recipe.views, arguments={**recipe.views.arguments, **arguments})
    )


def plan(
    base: Recipe,
    objectives: Sequence[str],
    temperatures: Sequence[float],
    amounts: dict[str, list[int]],
    labelled: bool,
    seeds: int = 1,
) -> list[AuditCell]:
    """Every cell, checked before the first one trains: seed by seed, so that an audit cut short is whole for some, and
    baselines last, since they explain and do not answer."""
    if seeds < 1:
        raise UsageError(f"--seeds {seeds}: give at least 1")
    if not objectives:
        raise UsageError(f"--objectives needs at least one name; allowed: {', '.join(OBJECTIVES)}")
    learners: dict[str, list[str]] = {}
    for name in objectives:
        if "temperature" in OBJECTIVES.arguments(name):
            for t in temperatures:
                learners[f"{name} {t:g}"] = [f"objective.name={name}", f"objective.temperature={t}"]
        else:
            learners[name] = [f"objective.name={name}"]
    learners |= ({SUPERVISED: []} if labelled else {}) | {VAE: [], UNTRAINED: []}
    keys = {"bits": "data.random_bits", "digits": "data.overlay_digits"}
    laid = [(feature, amount) for feature, values in amounts.items() for amount in sorted(set(values))]
    cells = []
    for seed, (learner, texts) in itertools.product(range(base.seed, base.seed + seeds), learners.items()):
        for feature, amount in laid:
            tree = apply_overrides(to_tree(base), [*texts, f"{keys[feature]}={amount}", f"seed={seed}"])
            cells.append(AuditCell(learner, feature, amount, read_recipe(tree, "audit")))
        recipe = cells[-1].recipe
        check_options(recipe, objective(recipe.objective.name, **recipe.objective.arguments))
    return cells


def done_cell(cell: AuditCell, out: Path) -> dict[str, Any] | None:
    return stored_cell(out / "cells" / f"{cell.name}.json", CELL_FACTS, CELL_NUMBERS)


def refuse_other(cell: AuditCell, out: Path, now: Marks) -> None:
    """Refuse a cell that is done, or begun, with other settings or on other images."""
    record = done_cell(cell, out)
    refuse_other_cell(out / "runs" / cell.name, cell.recipe, record, now)
    if record is not None and record["fingerprint"] != fingerprint(cell.recipe):
        place = out / "cells" / f"{cell.name}.json"
        raise UsageError(f"{place} is of an audit with other settings: give the same ones to go on, or another --out")


def run_cell(
    cell: AuditCell, images: Marks, out: Path, device: str, say: Say, title: str
) -> tuple[dict[str, Any], KontrastError | None]:
    """One cell's record, and its error where it failed; what is done is only read. A refusal is no failure: it ends
    the audit. images: fingerprints of the images that the cell is to see."""
    place, record = out / "cells" / f"{cell.name}.json", done_cell(cell, out)
    if record is not None:
        say(f"{title}: {record['status']} already")
        return record, NumbersError(record["reason"]) if record["status"] == "failed" else None
    say(title)
    facts = {"learner": cell.learner, "feature": cell.feature, "amount": cell.amount, "seed": cell.recipe.seed}
    facts |= {"fingerprint": fingerprint(cell.recipe), "images": images}
    start = time.monotonic()
    try:
        kept = train_and_probe(cell, out, device)
        refuse_other_images(out / "runs" / cell.name, kept, images)  # they may have changed as it trained
    except (Stopped, Interrupted) as error:
        raise type(error)(f"stopped in {cell.name}; give the same command again to go on") from None
    except (UsageError, DataError, CheckpointError):
        raise
    except KontrastError as error:
        say(f"{title}: failed: {error}")
        record = {**facts, "status": "failed", "reason": str(error), "exit_code": error.exit_code}
        if isinstance(error, NumbersError):
            write_json(place, record)
        return record, error
    record = {**facts, "status": "finished", "seconds": time.monotonic() - start, **kept}
    say(f"{title}: {record['target']} {record['accuracy']:.3f}")
    write_json(place, record)
    return record, None


def train_and_probe(cell: AuditCell, out: Path, device: str) -> dict[str, Any]:
    """What the cell's encoder kept, and the fingerprints of the images that it was probed on."""
    on, recipe = choose_device(device), cell.recipe
    train = open_split(recipe.data, "train", seed=recipe.seed)
    test = open_split(recipe.data, "test", seed=recipe.seed) if train.has_test else None
    if cell.learner in (SUPERVISED, *AUTOENCODERS, UNTRAINED):
        encoder, made = baseline(cell, open_split(recipe.data, "train", seed=recipe.seed, pretraining=True), on), {}
    else:
        encoder, made = contrastive(cell, out, device).encoder(on), {"run": f"runs/{cell.name}"}
    return {**made, "images": marks_of(train, test), **what_was_kept(encoder, recipe, train, test, on)}


def baseline(cell: AuditCell, train: ImageSet, device: torch.device) -> nn.Module:
    """The encoder that a learner without contrast trained, or nobody did."""
    recipe = cell.recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if cell.learner == UNTRAINED:
            return build_student(recipe, train.channels).encoder.to(device).eval()
        if cell.learner in AUTOENCODERS:
            vae = VariationalAutoencoder(recipe, train.channels, each_pixel=cell.learner == VAE_PIXELS)
            fit(vae, vae.loss, in_small_batches(recipe), train, device, cell.name)
            return vae.encoder
        supervised = Supervised(recipe, train.channels, int(train.labels.max()) + 1)  # type: ignore[union-attr]
        fit(supervised, supervised.loss, recipe, train, device, cell.name)
        return supervised.encoder


def in_small_batches(recipe: Recipe) -> Recipe:
    """Smaller batches and as many more steps, for the autoencoder: as many images shown."""
    t, batch = recipe.training, SMALL
    if t.batch <= batch:
        return recipe
    t = dataclasses.replace(t, batch=batch, max_steps=t.max_steps * t.batch // batch)
    return dataclasses.replace(recipe, training=t)


def contrastive(cell: AuditCell, out: Path, device: str) -> Run:
    """The cell's run, finished: read, gone on with, or trained."""
    folder, file = out / "runs" / cell.name, out / "cells" / f"{cell.name}.toml"
    return finished_run(cell.recipe, folder, file, device, lambda _: None)
