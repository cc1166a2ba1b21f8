"""What the user asked for as a recipe and its training images, or what a run stored and may change of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kontrast import distributed
from kontrast.config.overrides import apply_overrides, flat, merge_trees, parse_override
from kontrast.config.recipe import Recipe, TrainingSettings, fingerprint, read_recipe, to_tree, toml_value
from kontrast.config.recipe_files import load_tree
from kontrast.data import ImageSet
from kontrast.errors import DataError, UsageError
from kontrast.networks import ENCODERS, HEADS, PREDICTORS
from kontrast.objectives import OBJECTIVES
from kontrast.training.auto_recipe import CHOSEN, adapt, reasons
from kontrast.training.run_folder import RunFolder, stored_recipe
from kontrast.training.splits import located, open_split, preview_split

MAY_CHANGE = (
    "training.log_every",
    "training.tensorboard",
    "training.max_steps",
    "training.compile",
    "data.resident",
    "data.max_bad",
    "checkpoints.",
)
"""Settings that a resumed run may change without becoming another run."""


def overrides_as_text(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """`{"training.epochs": 5, "seed": 1, "objective": {"name": "dcl"}}` as the command line's key=value."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    lines: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            lines += overrides_as_text({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            lines.append(f"{key}={toml_value(value)}")
    return lines


def check_place(data: object) -> None:
    """Data are a place or a name, by which a run finds its images again when it resumes and probes."""
    if data is not None and not isinstance(data, str | os.PathLike):
        raise UsageError(
            f"data is {type(data).__module__}.{type(data).__qualname__}: give the path of a folder of pictures, shards "
            "or a store, or the name of a set; write pictures in memory to a folder first, or train them in a loop of "
            "your own with kontrast.objective, as examples/own_loop.py does"
        )


def fresh_recipe(
    data: Any, recipe: str | None, overrides: list[str], device: torch.device, say: Callable[[str], None]
) -> tuple[Recipe, ImageSet]:
    """The recipe as it will run and its training images."""
    tree, origin = named_tree(data, recipe)
    resolved = read_recipe(apply_overrides(tree, overrides), origin)
    preview = preview_split(resolved.data) if resolved.adapt else None

    def adapted(count: int, side: int) -> Recipe:
        chosen = merge_trees(tree, {**adapt(count, side, device), "adapt": False})
        return read_recipe(apply_overrides(chosen, overrides), origin)

    if preview is not None:
        resolved = adapted(preview.count, preview.side)
    refuse_out_of_reach(resolved, overrides)
    opened = None if preview is None else preview.images
    train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True, opened=opened)
    if preview is not None:
        resolved = adapted(len(train), preview.side)  # without bad images there may be fewer than in the preview
        for line in reasons(resolved, train, preview.side, device):
            say(line)
    for line in asked_in_vain(resolved, overrides):
        say(line)
    return with_defaults(resolved), train


def named_tree(data: Any, recipe: str | None) -> tuple[dict[str, Any], str]:
    """The tree of a recipe, or of the one that the data have by default, on these data; and how errors name it."""
    name = recipe or ("quickstart" if data in (None, "digits") else "folder")
    source = {} if data is None else {"data": {"source": str(data)}}
    return merge_trees(load_tree(name), source), f"recipe {name!r}"


def refuse_out_of_reach(recipe: Recipe, overrides: list[str]) -> None:
    """A point of the schedule past the training's end is a mistake where it was asked for; a recipe's own is where the
    training was made shorter, and only told."""
    asked = {".".join(parse_override(text)[0]) for text in overrides}
    for key, line in unread(recipe.training).items():
        if key in asked:
            raise UsageError(line)
    for key, line in out_of_reach(recipe.training).items():
        if key in asked:
            raise UsageError(f"{line}; give training.epochs more, or {key} less")


def asked_in_vain(recipe: Recipe, overrides: list[str]) -> list[str]:
    """A line for each setting that was asked for and that nothing looks at, as the others are."""
    t = recipe.training
    needed = {
        "training.momentum": "training.optimizer=sgd or lars" if t.optimizer in ("adam", "adamw") else "",
        "training.lr_inside": "training.optimizer=lars" if t.lr_inside and t.optimizer != "lars" else "",
        "training.decay_all": "another training.optimizer than lars" if t.decay_all and t.optimizer == "lars" else "",
        "training.gamma": "training.schedule=steps" if t.schedule != "steps" else "",
        "training.lr_per_epoch": "another training.schedule than constant" if t.schedule == "constant" else "",
        "batch_norm.splits": "batch_norm.kind=split" if recipe.batch_norm.kind != "split" else "",
        "views.local_size": "views.local_count" if not recipe.views.local_count else "",
    }
    asked = dict.fromkeys(".".join(parse_override(text)[0]) for text in overrides)
    return [f"{key} has no effect here: it needs {needed[key]}" for key in asked if needed.get(key)]


def resumed_recipe(
    folder: RunFolder, data: Any, recipe: str | None, overrides: list[str], device: torch.device
) -> tuple[Recipe, ImageSet]:
    """The stored recipe with overrides of what may change; any other change is refused, key by key, before images are
    looked for. A recipe named again, as torchrun's restarts do, must be the stored one."""
    stored = stored_recipe(folder)
    if recipe is not None:
        tree, origin = named_tree(data, recipe)
        wanted = with_defaults(read_recipe(apply_overrides(tree, overrides), origin))
        if wanted.adapt:
            refuse_changes(stored, wanted, (*MAY_CHANGE, *CHOSEN))
            wanted = fresh_recipe(data, recipe, overrides, device, lambda _: None)[0]
    else:
        asked = overrides + ([f"data.source={toml_value(str(data))}"] if data is not None else [])
        wanted = read_recipe(apply_overrides(to_tree(stored), asked), str(folder / "recipe.toml"))
    refuse_changes(stored, wanted, MAY_CHANGE)
    return wanted, open_split(located(wanted.data, folder.info()), "train", seed=wanted.seed, pretraining=True)


def refuse_changes(stored: Recipe, wanted: Recipe, may: tuple[str, ...]) -> None:
    """Name every setting that differs, but for those that may."""
    old, new = flat(to_tree(with_defaults(stored))), flat(to_tree(with_defaults(wanted)))
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(may)]
    if changed:
        words = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in changed)
        raise UsageError(f"--resume can't change {words}: start a new run, or resume without it")


def agree(recipe: Recipe, train: ImageSet) -> None:
    """Refuse to train where a rank has another recipe or other images than the first."""
    for what, own in (("another recipe", fingerprint(recipe)), ("other images", train.fingerprint)):
        said = distributed.gather_texts(own)
        odd = [rank for rank, text in enumerate(said) if text != said[0]]
        if odd:
            raise DataError(f"rank {odd[0]} has {what} than rank 0: give all ranks the same")


def out_of_reach(training: TrainingSettings, epochs: float | None = None) -> dict[str, str]:
    """Settings whose point lies past the last epoch, each with a line that says so. epochs: how many there are, where
    max_steps may end them sooner."""
    epochs = training.epochs if epochs is None else epochs
    warmup, found = training.warmup, {}
    if 0 < epochs < warmup:
        found["training.warmup"] = (
            f"training.warmup of {warmup:g} epochs is longer than the training of {epochs:g}: the learning rate does "
            "not reach its peak"
        )
    late = [f"{m:g}" for m in training.milestones if m >= epochs]
    if epochs and late and training.schedule == "steps":
        found["training.milestones"] = (
            f"training.milestones {', '.join(late)}: the training of {epochs:g} epochs ends before, without lowering "
            "the learning rate there"
        )
    return found


def unread(training: TrainingSettings) -> dict[str, str]:
    """Settings that the chosen schedule does not look at or misses, each with a line that says so."""
    steps = training.schedule == "steps"
    if training.milestones and not steps:
        line = f"the {training.schedule} schedule does not look at training.milestones: training.schedule=steps does"
        return {"training.milestones": line}
    if steps and not training.milestones:
        line = "training.schedule=steps never lowers the learning rate without training.milestones, for example [60,80]"
        return {"training.schedule": line}
    return {}


PARTS = {"objective": OBJECTIVES, "encoder": ENCODERS, "head": HEADS, "predictor": PREDICTORS}
FROM_THE_RUN = ("inputs", "channels", "size")
"""Arguments that the run gives, whatever their defaults are."""


def with_defaults(recipe: Recipe) -> Recipe:
    """The recipe with every argument of its objective and networks. A default of None stays unsaid: TOML has none."""
    changed: dict[str, Any] = {}
    for key, registry in PARTS.items():
        part = getattr(recipe, key)
        if part is None or part.name not in registry:
            continue
        defaults = {
            name: parameter.default
            for name, parameter in registry.arguments(part.name).items()
            if parameter.default not in (parameter.empty, None) and name not in FROM_THE_RUN
        }
        changed[key] = replace(part, arguments=defaults | part.arguments)
    return replace(recipe, **changed)


def temperature_of(recipe: Recipe) -> float:
    """The objective's temperature; 0.1 for one that has none."""
    return float(with_defaults(recipe).objective.arguments.get("temperature", 0.1))
