"""Find settings that have no effect: unused by the chosen optimizer or schedule, or due after training ends.

An override without effect is an error or a warning; a setting of the recipe itself at most a warning.
"""

from __future__ import annotations

from kontrast.config.overrides import Overrides, override_keys
from kontrast.config.recipe import Recipe, TrainingSettings
from kontrast.errors import UsageError


def schedule_warnings(training: TrainingSettings, epochs: float | None = None) -> dict[str, str]:
    """Return a warning for each schedule setting that has no effect or is due after the last epoch, by its key.

    Args:
        training: the settings to check.
        epochs: how many epochs are trained, if max_steps ends training earlier than `training.epochs`.
    """
    epochs = training.epochs if epochs is None else epochs
    steps, warnings = training.schedule == "steps", {}
    late = ", ".join(f"{m:g}" for m in training.milestones if m >= epochs)
    if 0 < epochs < training.warmup:
        longer = f"training.warmup of {training.warmup:g} epochs is longer than the training of {epochs:g}"
        warnings["training.warmup"] = f"{longer}: the learning rate does not reach its peak"
    if training.milestones and not steps:
        warnings["training.milestones"] = f"the {training.schedule} schedule does not use training.milestones"
    elif steps and not training.milestones:
        warnings["training.schedule"] = "the steps schedule never lowers the learning rate without training.milestones"
    elif late and epochs:
        warnings["training.milestones"] = f"training.milestones {late}: the training of {epochs:g} epochs ends before"
    return warnings


def refuse_ineffective(recipe: Recipe, overrides: Overrides) -> None:
    """Raise if a schedule setting in `overrides` has no effect."""
    warnings = schedule_warnings(recipe.training)
    ineffective = [key for key in override_keys(overrides) if key in warnings]
    if ineffective:
        raise UsageError(f"{warnings[ineffective[0]]}; change {ineffective[0]}, training.epochs or training.schedule")


def unused_settings(recipe: Recipe, overrides: Overrides) -> list[str]:
    """Return a warning for each setting in `overrides` that nothing uses in this recipe."""
    t, lars = recipe.training, recipe.training.optimizer == "lars"
    needed = {
        "training.momentum": "training.optimizer=sgd or lars" if t.optimizer in ("adam", "adamw") else "",
        "training.lr_inside": "training.optimizer=lars" if t.lr_inside and not lars else "",
        "training.trust": "" if lars else "training.optimizer=lars",
        "training.adapt_all": "training.optimizer=lars" if t.adapt_all and not lars else "",
        "training.decay_all": "another training.optimizer than lars" if lars and t.decay_all != t.adapt_all else "",
        "training.clip_each": "training.clip" if t.clip_each and not t.clip else "",
        "training.final_lr": "training.schedule=cosine or linear" if t.schedule in ("steps", "constant") else "",
        "training.gamma": "training.schedule=steps" if t.schedule != "steps" else "",
        "training.lr_per_epoch": "another training.schedule than constant" if t.schedule == "constant" else "",
        "objective.ramp_from": "" if recipe.objective.ramp else "objective.ramp",
        "objective.ramp_epochs": "" if recipe.objective.ramp else "objective.ramp",
        "batch_norm.splits": "batch_norm.kind=split" if recipe.batch_norm.kind != "split" else "",
        "views.local_size": "views.local_count" if not recipe.views.local_count else "",
        "views.local_policy": "views.local_count" if not recipe.views.local_count else "",
    }
    return [f"{key} has no effect here: it needs {needed[key]}" for key in override_keys(overrides) if needed.get(key)]
