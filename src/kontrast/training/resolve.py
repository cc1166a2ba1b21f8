"""Resolve the recipe and the training images of a new or resumed run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kontrast import distributed
from kontrast.config.overrides import Overrides, apply_overrides, flat, merge_trees, override_keys, override_layers
from kontrast.config.recipe import FILLED_IN, DataSettings, Recipe, fingerprint, read_recipe, to_tree
from kontrast.config.recipe_files import load_tree
from kontrast.data import ImageSet
from kontrast.data.paths import describe_source
from kontrast.errors import DataError, UsageError
from kontrast.files import read_json_lines
from kontrast.networks import ENCODERS, HEADS, PREDICTORS
from kontrast.objectives import OBJECTIVES, objective
from kontrast.objectives.cacr import SIGNS
from kontrast.training.auto_recipe import CHOSEN, adapt, bounded, reasons
from kontrast.training.ineffective_settings import refuse_ineffective, unused_settings
from kontrast.training.own_depth import STATISTICS, with_own_depth
from kontrast.training.run_folder import RunFolder, stored_recipe
from kontrast.training.splits import located, open_split, preview_split
from kontrast.training.starting_weights import choices, start_reasons, starting_source

MAY_CHANGE = (
    "title", "training.log_every", "training.track", "training.max_steps", "training.compile", "data.resident",
    "data.max_bad", "checkpoints.",
)  # fmt: skip
"""Settings that a resumed run may change; those that end with a dot are whole sections."""


def fresh_recipe(
    data: Any, recipe: str | None, overrides: Overrides, device: torch.device, say: Callable[[str], None]
) -> tuple[Recipe, ImageSet]:
    """Return the recipe of a new run, with every default written out, and its training images.

    Args:
        data: the path or name of the images, or None for the recipe's own.
        recipe: the name or file of a recipe, or None for the default recipe of the data.
        overrides: settings that replace the recipe's.
        device: the device to train on, which an adaptive recipe is adapted to.
        say: receives notes about what was chosen and what has no effect.
    """
    tree, origin = recipe_tree(data, recipe)
    overrides = override_layers(overrides)
    resolved = unstarted = read_recipe(apply_overrides(tree, overrides), origin)
    unnamed = (recipe is None or resolved.adapt) and "encoder.name" not in override_keys(overrides)
    source = None if resolved.start is None else starting_source(resolved.start, guess=unnamed)
    start: dict[str, Any] = {}
    if source is not None:
        start = choices(source, read_recipe(tree, origin), rate="start" not in tree)
        if recipe is not None and not resolved.adapt:  # the recipe names the encoder and its views
            start = {"training": start["training"]} if "training" in start else {}
        resolved = read_recipe(apply_overrides(merge_trees(tree, start), overrides), origin)
    is_free = not gives_size(tree, overrides)
    preview = preview_split(resolved.data) if resolved.adapt else None

    size_of_views = apply_overrides(start, overrides).get("views", {}).get("size", 0)

    def adapted(count: int, side: int) -> Recipe:
        adaptation = adapt(count, side, device, size_of_views)
        if not is_free or (preview is not None and preview.images is not None):
            del adaptation["data"]  # the user gave a size, or the images are decoded already and can't be reduced
        if gives_objective(tree, overrides):
            adaptation.pop("objective", None)
        chosen = merge_trees(merge_trees(tree, {**adaptation, "adapt": False}), start)
        return read_recipe(apply_overrides(chosen, overrides), origin)

    if preview is not None:
        resolved = adapted(preview.count, preview.side)
    elif is_free:
        resolved = bounded(resolved)
    refuse_ineffective(resolved, overrides)
    opened = None if preview is None else preview.images
    train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True, opened=opened)
    decoded = train.stamps is None or describe_source(resolved.data.source).kind in ("store", "store split")
    if preview is not None:
        resolved = adapted(len(train), preview.side)  # without bad images there may be fewer than in the preview
    if decoded and is_free:
        resolved = replace(resolved, data=replace(resolved.data, size=0, longest=0))  # nothing was reduced
    refuse_size(resolved.data, train)
    resolved, about_depth = with_own_depth(resolved, train, set(override_keys(overrides)))
    if preview is not None:
        for line in reasons(resolved, train, preview.side, device):
            say(line)
    for line in about_depth:
        say(line)
    for line in start_reasons(source, unstarted, resolved) if source is not None else ():
        say(line)
    for line in unused_settings(resolved, overrides):
        say(line)
    return with_defaults(resolved), train


def gives_size(tree: dict[str, Any], overrides: Overrides) -> bool:
    """Return whether a recipe or its overrides say to which size images are reduced."""
    return "data.size" in flat(apply_overrides(tree, overrides))


def gives_objective(tree: dict[str, Any], overrides: Overrides) -> bool:
    """Return whether overrides, or a recipe of the user's that is based on `folder`, set the objective."""
    asked = any(key.startswith("objective.") for key in override_keys(overrides))
    return asked or tree.get("objective") != load_tree("folder")["objective"]


def refuse_size(settings: DataSettings, train: ImageSet) -> None:
    """Raise if data.size would have to reduce images that are decoded already."""
    decoded = describe_source(settings.source).kind in ("named", "store", "store split")
    if settings.size and decoded and train.largest_side > settings.size:
        images = f"the images of {settings.source} are decoded already, with up to {train.largest_side} px"
        advice = f"`kontrast pack` the original files with --size {settings.size}, or leave it out"
        raise UsageError(f"data.size={settings.size} has no effect: {images}; {advice}")


def recipe_tree(data: Any, recipe: str | None) -> tuple[dict[str, Any], str]:
    """Return the tree of a recipe on these data, and how errors name it. Without a name: the default of the data."""
    name = recipe or ("quickstart" if data in (None, "digits") else "folder")
    return merge_trees(load_tree(name), data_source(data)), f"recipe {name!r}"


def data_source(data: Any) -> dict[str, Any]:
    """Return the tree that sets data.source, or an empty one for the recipe's own data."""
    return {} if data is None else {"data": {"source": str(data)}}


def resumed_recipe(
    folder: RunFolder, data: Any, recipe: str | None, overrides: Overrides, device: torch.device
) -> tuple[Recipe, ImageSet]:
    """Return the stored recipe of a run, with overrides of settings that may change, and its training images.

    Any other change is refused before images are opened. If a recipe is named again, as in a command that torchrun
    restarts, it must be the stored one.
    """
    stored = stored_recipe(folder)
    if recipe is not None:
        tree, origin = recipe_tree(data, recipe)
        wanted = with_defaults(read_recipe(apply_overrides(tree, overrides), origin))
        if wanted.adapt:
            refuse_changes(stored, wanted, (*MAY_CHANGE, *CHOSEN))
            wanted = fresh_recipe(data, recipe, overrides, device, lambda _: None)[0]
        else:
            wanted = as_chosen(wanted, stored, gives_size(tree, overrides), set(override_keys(overrides)))
    else:
        tree = merge_trees(apply_overrides(to_tree(stored), overrides), data_source(data))
        wanted = read_recipe(tree, str(folder / "recipe.toml"))
    refuse_changes(stored, wanted, MAY_CHANGE)
    return wanted, open_split(
        located(wanted.data, folder.info()), "train", seed=wanted.seed, pretraining=True, verify=True
    )


def as_chosen(wanted: Recipe, stored: Recipe, sized: bool, given: set[str]) -> Recipe:
    """The recipe of a resumed run with what was chosen by its images when it began, unless the user gives it.

    Args:
        wanted: the recipe that is named again.
        stored: the recipe of the run.
        sized: whether the user gives the size to which images are reduced.
        given: keys that the user sets.
    """
    data = wanted.data if "data.depth" in given else replace(wanted.data, depth=stored.data.depth)
    if not sized:
        data = replace(data, size=stored.data.size, longest=stored.data.longest)
    arguments, chosen = dict(wanted.views.arguments), stored.views.arguments
    if "low" in chosen:
        keys = [key for key in (*STATISTICS, "gray", "jitter") if key in chosen and f"views.{key}" not in given]
        arguments |= {key: chosen[key] for key in keys}
    return replace(wanted, data=data, views=replace(wanted.views, arguments=arguments))


def refuse_changes(stored: Recipe, wanted: Recipe, allowed: tuple[str, ...]) -> None:
    """Raise an error that names every setting that differs, except for those that begin with an `allowed` prefix."""
    old, new = flat(to_tree(with_defaults(stored))), flat(to_tree(with_defaults(wanted)))
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(allowed)]
    if changed:
        changes = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in changed)
        raise UsageError(f"--resume can't change {changes}: start a new run, or resume without this change")


def check_ranks_agree(recipe: Recipe, train: ImageSet) -> None:
    """Raise if a rank has another recipe or other images than rank 0."""
    for difference, own in (("another recipe", fingerprint(recipe)), ("other images", train.fingerprint)):
        prints = distributed.gather_texts(own)
        odd = [rank for rank, text in enumerate(prints) if text != prints[0]]
        if odd:
            raise DataError(f"rank {odd[0]} has {difference} than rank 0: give all ranks the same")


REGISTRIES = {"objective": OBJECTIVES, "encoder": ENCODERS, "head": HEADS, "predictor": PREDICTORS}


def with_defaults(recipe: Recipe) -> Recipe:
    """Return the recipe with every argument of its objective and networks; a default of None can't be written in TOML
    and is left out."""
    changed: dict[str, Any] = {}
    for section, registry in REGISTRIES.items():
        settings = getattr(recipe, section)
        if settings is None or settings.name not in registry:
            continue
        defaults = {
            name: parameter.default
            for name, parameter in registry.arguments(settings.name).items()
            if parameter.default not in (parameter.empty, None) and f"{section}.{name}" not in FILLED_IN
        }
        changed[section] = replace(settings, arguments=defaults | settings.arguments)
    return replace(recipe, **changed)


def temperature_of(recipe: Recipe, metrics: Path) -> float:
    """Return the temperature of the objective, or 0.1 if it has none; if it is learned, the last one in the metrics."""
    given = with_defaults(recipe).objective
    temperature = given.arguments.get("temperature", 0.1)
    if temperature != "learned":
        return float(temperature)
    logged = [line.get("temperature") for line in read_json_lines(metrics)] if metrics.is_file() else []
    good = [value for value in logged if isinstance(value, float) and 0 < value < math.inf]
    return good[-1] if good else objective(given.name, **given.arguments).learned_numbers()["temperature"]


SOFTMAX_OF_NEGATIVES = (
    "nt-xent", "dcl", "dclw", "decoupled-nt-xent", "info-nce", "jcl", "multi-view-nce", "hard-negative", "sogclr",
    "sim-affinity",
)  # fmt: skip
"""Objectives whose weights of negatives are a softmax of their similarities to the anchor, divided by `temperature`.

Those of nnclr are similarities to another image, those of sim-whitening are of whitened rows, swav and dino have the
temperature of prototypes, and isogclr has a temperature for each image."""


def t_minus_of(recipe: Recipe) -> float | None:
    """Return the t- at which exp(-t- ||x - y||^2) are the objective's own weights of negatives; None if it has none.

    CACR has a t-, which is 0 if repulsion is uniform and negative if it is reversed, and align-uniform a t. A softmax
    of similarities at temperature tau has t- = 1/(2 tau), since unit vectors have ||x - y||^2 = 2 - 2 <x, y>; hard
    negatives count (1 + beta) times.
    """
    given = with_defaults(recipe).objective
    if given.name == "cacr":
        return SIGNS[given.arguments["repulsion"]] * float(given.arguments["t_minus"])
    if given.name == "align-uniform":
        return float(given.arguments["t"])
    temperature = given.arguments.get("temperature")
    if given.arguments.get("base", given.name) not in SOFTMAX_OF_NEGATIVES:
        return None
    if not isinstance(temperature, int | float):  # a learned one, which changes during training
        return None
    return (1 + given.arguments.get("beta", 0.0)) / (2 * temperature)
