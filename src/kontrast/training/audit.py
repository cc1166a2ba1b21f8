"""Which features suppress which (GCL, section 3): easy information is laid over the images, each learner is trained on
them, and what its frozen encoder kept is probed. Contrastive objectives stand beside supervised training of the same
encoder and a variational autoencoder.

An audit's folder: runs/<cell>/ (run folders of the contrastive cells), cells/<cell>.json, audit.json, report.html.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kontrast.objectives import OBJECTIVES, objective
from kontrast.recipes import apply_overrides
from kontrast.registry import DataError, KontrastError, NumbersError, Stopped, UsageError
from kontrast.settings import Recipe, fingerprint, read_recipe, to_toml, to_tree
from kontrast.training.autoencoder import VariationalAutoencoder
from kontrast.training.baseline import fit
from kontrast.training.findings import findings
from kontrast.training.folder import RunFolder, disk_faults, read_json, write_atomic, write_json
from kontrast.training.kept import what_was_kept
from kontrast.training.learner import check_options
from kontrast.training.run import Run, choose_device, open_split
from kontrast.training.start import fresh_recipe, pretrain
from kontrast.training.stopping import Interrupted
from kontrast.training.supervised import Supervised

BITS = (0, 5, 10)
STEPS = 300
AUTOENCODER = {"batch": 64, "steps": 4}  # smaller batches, and as many more steps: the same images shown
SUPERVISED, VAE = "supervised", "VAE"
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
        return f"{self.learner}-{self.feature}{self.amount}".replace(" ", "-").lower()


def audit(
    data: str | None = None,
    *,
    objectives: Sequence[str] = ("nt-xent",),
    temperatures: Sequence[float] = (0.1,),
    bits: Sequence[int] = (),
    digits: Sequence[int] = (),
    steps: int = 0,
    overrides: Sequence[str] = (),
    out: Path,
    device: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Run every cell that is not done, write audit.json and return what is in it."""
    out, on = Path(out), choose_device(device)
    amounts = {"bits": list(bits) if bits or digits else list(BITS), "digits": list(digits)}
    base, images = base_recipe(data, steps, overrides, on, say)
    cells = plan(base, objectives, temperatures, amounts, labelled=images.labels is not None and images.has_test)
    with disk_faults(out):
        (out / "cells").mkdir(parents=True, exist_ok=True)
    records, errors = [], []
    for number, cell in enumerate(cells, 1):
        record, error = run_cell(cell, out, device, say, f"[{number}/{len(cells)}] {cell.name}")
        records.append(record)
        errors += [error] if error else []
        tree = {"version": 1, "kind": "audit", "finished": number == len(cells), "data": images.name}
        classes = len(images.classes) if images.classes else None
        tree |= {"runs": [r["run"] for r in records if r.get("run")], **findings(records, images.name, classes)}
        write_json(out / "audit.json", {**tree, "cells": records})
    if len(errors) == len(cells):
        raise type(errors[0])(f"every training of the audit failed; the first: {errors[0]}")
    return read_json(out / "audit.json")


def base_recipe(data: str | None, steps: int, overrides: Sequence[str], device: torch.device, say: Say) -> Any:
    """The recipe that all cells share, and its images; probes and galleries of the runs themselves are left out."""
    own = ["evaluation.every=0", "evaluation.gallery=0", "checkpoints.keep=1"]
    if data is None or steps:
        own.append(f"training.max_steps={steps or STEPS}")
    return fresh_recipe(data, None, [*own, *overrides], device, say)


def plan(
    base: Recipe,
    objectives: Sequence[str],
    temperatures: Sequence[float],
    amounts: dict[str, list[int]],
    labelled: bool,
) -> list[AuditCell]:
    """Every cell, checked before the first one trains: baselines last, since they explain and do not answer."""
    if not objectives:
        raise UsageError(f"--objectives needs at least one name; allowed: {', '.join(OBJECTIVES)}")
    learners: dict[str, list[str]] = {}
    for name in objectives:
        if "temperature" in OBJECTIVES.arguments(name):
            for t in temperatures:
                learners[f"{name} {t:g}"] = [f"objective.name={name}", f"objective.temperature={t}"]
        else:
            learners[name] = [f"objective.name={name}"]
    learners |= {SUPERVISED: [], VAE: []} if labelled else {VAE: []}
    cells = []
    for learner, texts in learners.items():
        for feature, values in amounts.items():
            key = {"bits": "data.random_bits", "digits": "data.overlay_digits"}[feature]
            for amount in sorted(set(values)):
                tree = apply_overrides(to_tree(base), [*texts, f"{key}={amount}"])
                cells.append(AuditCell(learner, feature, amount, read_recipe(tree, "audit")))
        recipe = cells[-1].recipe
        check_options(recipe, objective(recipe.objective.name, **recipe.objective.arguments))
    return cells


def run_cell(cell: AuditCell, out: Path, device: str, say: Say, title: str) -> tuple[dict[str, Any], Any]:
    """One cell's record, and its error where it failed; what is done with the same settings is only read."""
    place, mark = out / "cells" / f"{cell.name}.json", fingerprint(cell.recipe)
    if place.is_file():
        record = read_json(place)
        if record.get("fingerprint") != mark:
            raise UsageError(
                f"{place} is of an audit with other settings: give the same ones to go on, or another --out"
            )
        say(f"{title}: {record['status']} already")
        return record, NumbersError(record["reason"]) if record["status"] == "failed" else None
    say(title)
    facts = {"learner": cell.learner, "feature": cell.feature, "amount": cell.amount, "fingerprint": mark}
    start = time.monotonic()
    try:
        kept = train_and_probe(cell, out, device, say)
    except (Stopped, Interrupted) as error:
        raise type(error)(f"stopped in {cell.name}; give the same command again to go on") from None
    except DataError:
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


def train_and_probe(cell: AuditCell, out: Path, device: str, say: Say) -> dict[str, Any]:
    on, recipe = choose_device(device), cell.recipe
    train = open_split(recipe.data, "train", seed=recipe.seed)
    test = open_split(recipe.data, "test", seed=recipe.seed) if train.has_test else None
    if cell.learner not in (SUPERVISED, VAE):
        run = contrastive(cell, out, device, say)
        return {"run": f"runs/{cell.name}", **what_was_kept(run.encoder(on), recipe, train, test, on)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if cell.learner == VAE:
            recipe = for_autoencoder(recipe)
            module: Any = VariationalAutoencoder(train.channels, recipe.views.size)
        else:
            module = Supervised(recipe, train.channels, int(train.labels.max()) + 1)  # type: ignore[union-attr]
        fit(module, module.loss, recipe, train, on, cell.name)
    return what_was_kept(module.encoder, recipe, train, test, on)


def for_autoencoder(recipe: Recipe) -> Recipe:
    """Pixels in [0,1], as the Bernoulli likelihood needs them."""
    views = dataclasses.replace(recipe.views, arguments={**recipe.views.arguments, "mean": [0.0], "std": [1.0]})
    batch, factor = AUTOENCODER["batch"], AUTOENCODER["steps"]
    t = recipe.training
    if t.batch > batch:
        t = dataclasses.replace(t, batch=batch, max_steps=factor * t.max_steps)
    return dataclasses.replace(recipe, views=views, training=t)


def contrastive(cell: AuditCell, out: Path, device: str, say: Say) -> Run:
    """The cell's run, finished: read, gone on with, or trained."""
    folder = out / "runs" / cell.name
    quiet: Say = lambda _: None  # noqa: E731
    if (folder / "recipe.toml").is_file():
        if fingerprint(Run(folder).recipe) != fingerprint(cell.recipe):
            raise UsageError(
                f"{folder} is of an audit with other settings: give the same ones to go on, or another --out"
            )
        if RunFolder(folder).info().get("finished") and (folder / "encoder.safetensors").is_file():
            return Run(folder)
        return pretrain(out=folder, resume=True, device=device, say=quiet)
    recipe = out / "cells" / f"{cell.name}.toml"
    write_atomic(recipe, to_toml(cell.recipe, f"one training of an audit: {cell.name}"))
    return pretrain(recipe=str(recipe), out=folder, device=device, say=quiet)
