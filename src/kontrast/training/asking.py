"""What the user asked for as a recipe and its training images, or what a run stored and may change of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kontrast import distributed
from kontrast.data import ImageSet
from kontrast.data.sources import MENDED
from kontrast.recipes import apply_overrides, flat, load_tree, merge_trees, parse_override
from kontrast.registry import DataError, UsageError
from kontrast.settings import Recipe, fingerprint, read_recipe, to_tree, toml_value
from kontrast.training.adapt import CHOSEN, adapt, reasons
from kontrast.training.defaults import spelled_out
from kontrast.training.folder import RunFolder
from kontrast.training.run import located, open_split, stored_recipe
from kontrast.training.schedules import out_of_reach, unread

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
    seen = None
    if resolved.adapt:
        plain = replace(resolved.data, pack=False)  # looked at, not packed: at what size is about to be decided
        seen = open_split(plain, "train", seed=resolved.seed, pretraining=True)
        tree = merge_trees(tree, {**adapt(seen, device), "adapt": False})
        resolved = read_recipe(apply_overrides(tree, overrides), origin)
        for line in reasons(resolved, seen, device):
            say(line)
    refuse_out_of_reach(resolved, overrides)
    for line in asked_in_vain(resolved, overrides):
        say(line)
    train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True)
    if seen is not None and MENDED in seen.notes:  # the first look mended it, the second found it whole
        train = replace(train, notes={**train.notes, MENDED: seen.notes[MENDED]})
    return spelled_out(resolved), train


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
        wanted = spelled_out(read_recipe(apply_overrides(tree, overrides), origin))
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
    old, new = flat(to_tree(spelled_out(stored))), flat(to_tree(spelled_out(wanted)))
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(may)]
    if changed:
        words = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in changed)
        raise UsageError(f"--resume can't change {words}: start a new run, or resume without it")


def agree(recipe: Recipe, train: ImageSet) -> None:
    """Refuse to train where a rank has another recipe or other images than the first."""
    for what, own in (("another recipe", fingerprint(recipe)), ("other images", train.fingerprint)):
        said = distributed.everyone_says(own)
        odd = [rank for rank, text in enumerate(said) if text != said[0]]
        if odd:
            raise DataError(f"rank {odd[0]} has {what} than rank 0: give all ranks the same")
