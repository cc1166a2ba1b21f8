"""Start training from existing weights: where they come from, what follows for the recipe, and what was loaded.

The weights of step 0 are kept in the run folder, in start.safetensors: a run that is resumed, probed or received from
others needs nothing besides its folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast import distributed, networks
from kontrast.config.recipe import Recipe, StartSettings
from kontrast.errors import CheckpointError, UsageError, printable, refuse_pickle, shorten
from kontrast.files import read_bytes
from kontrast.networks import ENCODERS
from kontrast.networks.external import timm_normalization, timm_weights
from kontrast.networks.resnet import automatic_stem
from kontrast.sharding import load_whole, whole_state
from kontrast.training import checkpoints
from kontrast.training.build import evaluation_view
from kontrast.training.hub import fetch, is_hub
from kontrast.training.learner import Learner, Student
from kontrast.training.run_folder import RunFolder, result_prefix, sha256, stored_recipe, weights_path
from kontrast.training.weight_channels import with_channels
from kontrast.training.weight_files import read_card, read_tensors
from kontrast.training.weight_matching import first_of, fits, match_weights

FILE = "start.safetensors"
LR_SHARE = 0.3
"""The learning rate from existing weights, as a share of the one from random weights; results/starting-weights.md."""
WARMUP_SHARE = 0.5
SIZES, STEMS = (32, 64, 96, 128, 224), ("cifar", "imagenet")
LISTED = 8
NORMALIZATION = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""ImageNet's, with which nearly all published weights were trained."""


@dataclass(frozen=True)
class WeightSource:
    """Where starting weights come from.

    Attributes:
        place: the run folder, file, timm:NAME or hf://OWNER/NAME, as the user gave it.
        about: what it is, for people.
        encoder: the settings of its encoder, as in a recipe; {} if they are not known.
        views: settings of the views that its encoder was trained on.
        folder: the run folder, or that of a downloaded model; empty if it is neither.
    """

    place: str
    about: str
    encoder: dict[str, Any] = field(default_factory=dict)
    views: dict[str, Any] = field(default_factory=dict)
    folder: str = ""

    @property
    def is_timm(self) -> bool:
        return self.place.startswith("timm:")

    @cached_property
    def run(self) -> RunFolder | None:
        return RunFolder(self.folder) if self.folder else None

    def tensors(self, channels: int, size: int) -> dict[str, Tensor]:
        """Return the tensors of the encoder, and what else the file holds."""
        if self.is_timm:
            return timm_weights(self.place.removeprefix("timm:"), channels, size)
        return read_tensors(Path(self.place) if self.run is None else encoder_file(self.run))


def open_source(place: str, guess: bool = True) -> WeightSource:
    """Say what the weights of `--from` are. Those of timm are not downloaded yet, a model on the hub is.

    Args:
        place: a run folder, a file, timm:NAME or hf://OWNER/NAME.
        guess: find the encoder of a file that doesn't name it.
    """
    library, colon, name = place.partition(":")
    if colon and library == "timm":
        return WeightSource(place, "timm's pretrained weights", {"name": place}, timm_normalization(name))
    if is_hub(place):
        return run_source(place, str(fetch(place)))
    if os.path.isfile(place):
        return file_source(Path(place), guess)
    if os.path.isdir(place):
        refuse_pickle(Path(place))
        if RunFolder(place).holds_run:
            return run_source(place, place)
    problem = "is not a run folder: it has no recipe.toml" if os.path.isdir(place) else "is neither file nor folder"
    allowed = "give a run folder, a .safetensors, .pt or .pth file, timm:NAME or hf://OWNER/NAME"
    raise UsageError(f"--from {shorten(place)} {problem}; {allowed}")


def run_source(place: str, folder: str) -> WeightSource:
    """Describe an earlier run: its encoder with the stem that it had, and the size and normalization of its views."""
    recipe = stored_recipe(RunFolder(folder))
    encoder = {"name": recipe.encoder.name, **recipe.encoder.arguments}
    if encoder.get("stem") == "auto":
        encoder["stem"] = automatic_stem(recipe.views.size)
    policy = evaluation_view(recipe).policies[0]
    views = {"size": recipe.views.size, "mean": list(policy.mean), "std": list(policy.std)}
    if policy.low is not None and policy.high is not None:
        views |= {"low": list(policy.low), "high": list(policy.high)}
    steps = RunFolder(folder).info().get("steps")
    return WeightSource(place, f"a run of {recipe.objective.name}, {steps} steps", encoder, views, folder)


def file_source(path: Path, guess: bool) -> WeightSource:
    """Describe a weight file by the card that `kontrast export` wrote, or else by the shapes of its tensors."""
    tensors, card = read_tensors(path), read_card(path)
    named, given, normal = card.get("encoder"), card.get("input"), card.get("normalisation")
    if isinstance(named, dict) and isinstance(named.get("name"), str) and isinstance(given, dict):
        views = {"size": given.get("size"), **(normal if isinstance(normal, dict) else {})}
        return WeightSource(str(path), "an exported encoder", named, views)
    encoder, size = guess_encoder(tensors) if guess else ({}, 0)
    if guess and not encoder:
        raise CheckpointError(f"{path} fits no encoder of kontrast{first_of(tensors)}: name one with encoder.name")
    views = {**NORMALIZATION, **({"size": size} if size else {})}
    return WeightSource(str(path), f"a file of {len(tensors)} tensors", encoder, views)


def guess_encoder(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Return the settings of the encoder that the tensors fit, and its view size if it takes only one; {} if none."""
    for name in ENCODERS:
        stem = ENCODERS.arguments(name).get("stem")
        if stem is None:
            sizes = [size for size in SIZES if fits_at({"name": name}, size, tensors)]
            if sizes:
                return {"name": name}, 0 if len(sizes) == len(SIZES) else sizes[-1]
            continue
        own = () if stem.default == "auto" else (stem.default,)  # its tensors have the shapes of others
        for known in (*own, *STEMS):
            settings = {"name": name, "stem": known}
            if fits_at(settings, SIZES[0], tensors):
                return settings, 0
    return {}, 0


def fits_at(settings: dict[str, Any], size: int, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors fit the encoder, which is built without memory for its weights."""
    try:
        with torch.device("meta"):
            encoder = networks.encoder(size=size, **settings)
    except (RuntimeError, NotImplementedError, UsageError):  # an encoder of the user that can't be built like this
        return False
    return fits(encoder, with_channels(tensors, encoder)[0])


def encoder_file(folder: RunFolder) -> Path:
    """Return the path of a run's trained encoder, whose digest must be the one in run.json."""
    path = weights_path(folder.path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the run has not finished; resume it first")
    if folder.info().get("encoder_sha256") not in (None, sha256(read_bytes(path))):
        raise CheckpointError(f"{path} is damaged or was changed: restore it, or start from another run")
    return path


def choices(source: WeightSource, recipe: Recipe, rate: bool) -> dict[str, Any]:
    """Return the settings that follow from starting with these weights.

    Args:
        source: the weights.
        recipe: the recipe as it would train from random weights.
        rate: whether to lower the learning rate and the warm-up.
    """
    t = recipe.training
    smaller = {"lr": float(f"{LR_SHARE * t.lr:.3g}"), "warmup": float(f"{WARMUP_SHARE * t.warmup:.3g}")}
    return {
        **({"encoder": dict(source.encoder)} if source.encoder else {}),
        **({"views": dict(source.views)} if source.views else {}),
        **({"training": smaller} if rate else {}),
    }


def start_reasons(source: WeightSource, before: Recipe, recipe: Recipe) -> list[str]:
    """Lines that explain what follows from the starting weights."""
    arguments = "".join(f", {key} {value}" for key, value in recipe.encoder.arguments.items())
    encoder = f"encoder {recipe.encoder.name}{arguments}, views of {recipe.views.size} px"
    lines = [f"start: {source.place} ({source.about}) -> {encoder}"]
    old, new = before.training, recipe.training
    if (old.lr, old.warmup) != (new.lr, new.warmup):
        change = f"learning rate {old.lr:g} -> {new.lr:g}, warm-up {old.warmup:g} -> {new.warmup:g} epochs"
        lines.append(f"start: {change}, since the weights are trained already; set training.lr and training.warmup")
    return lines


def starting_source(start: StartSettings, guess: bool) -> WeightSource:
    """Open the weights of a recipe's [start], or raise if its settings do not fit them."""
    if not start.weights:
        raise UsageError("[start] has no weights: give start.weights, or --from on the command line")
    source = open_source(start.weights, guess)
    if start.head and source.run is None:
        raise UsageError(f"start.head needs a run folder as --from: {source.place} has no checkpoints of a head")
    return source


def write_start_weights(folder: RunFolder, recipe: Recipe, learner: Learner, say: Callable[[str], None]) -> None:
    """Match the weights to the learner's networks, write start.safetensors and say what is loaded, left out and new.

    Only the first rank writes; the others wait for it. If it fails, the run does not begin.
    """
    assert recipe.start is not None
    source = open_source(recipe.start.weights, guess=False)
    known = whole_state(learner.student.encoder)
    if distributed.is_main():
        encoder = learner.student.encoder
        if source.is_timm:
            say(f"start: reading {source.place}, which timm downloads unless it is in its cache")
        tensors, adapted = with_channels(source.tensors(encoder.channels, encoder.size), encoder)
        found = match_weights(encoder, tensors, source.place, recipe.encoder.name)
        kept = {f"encoder.{name}": tensor for name, tensor in (known | found.loaded).items()}
        new = ["encoder." + name for name in found.new]
        parts = parts_of(learner)
        if recipe.start.head and source.run is not None:
            kept |= beside_encoder(source.run, parts)
        new += [name for name in parts if not any(key.startswith(name + ".") for key in kept)]
        digest = checkpoints.write_weights(folder / FILE, kept)
        numbers = sum(t.numel() for t in found.loaded.values())
        after = f" after {found.prefix!r}" if found.prefix else ""
        copies = ", ".join(map(repr, found.copies))
        lines = {
            "loaded": f"{len(found.loaded)} tensors, {numbers:,} numbers, of {recipe.encoder.name}{printable(after)}",
            "left out": listed(found.left_out),
            "new": listed(new),
        }
        lines |= {"copies": printable(f"took the one after {found.prefix!r}, not after {copies}")} if copies else {}
        lines |= {"channels": adapted} if adapted else {}
        folder.update_info(start={"weights": source.place, "sha256": digest, **lines})
        for title, text in lines.items():
            say(f"start: {title}: {text}")
    distributed.broadcast(FILE)  # the other ranks wait until the file is there


def beside_encoder(folder: RunFolder, parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the head of a run's newest checkpoint, and its predictor and prototypes if the learner has them too."""
    newest = checkpoints.newest(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"start.head: {folder.path} has no checkpoint left, and its encoder file has no head")
    prefixes = {"head": f"{result_prefix(stored_recipe(folder))}.head", "predictor": "learner.predictor"}
    prefixes["prototypes"] = "learner.prototypes"
    kept: dict[str, Tensor] = {}
    for name, network in parts.items():
        tensors = checkpoints.under(prefixes[name], newest[0])
        if tensors or name == "head":
            found = match_weights(network, tensors, f"the checkpoint of {folder.path}", f"the {name}")
            kept |= {f"{name}.{key}": tensor for key, tensor in found.loaded.items()}
    return kept


def parts_of(learner: Learner) -> dict[str, nn.Module]:
    """Return the learner's trained networks besides the encoder, by name."""
    parts = {"head": learner.student.head, "predictor": learner.predictor, "prototypes": learner.prototypes}
    return {name: part for name, part in parts.items() if part is not None}


def load_start(folder: RunFolder, learner: Learner) -> None:
    """Load the run's start.safetensors into the student and its copies: a momentum teacher starts there too."""
    tensors = read_start(folder)
    targets: list[tuple[str, nn.Module]] = [("encoder", learner.student.encoder), *parts_of(learner).items()]
    if learner.teacher is not None:
        teacher: Any = learner.teacher.module
        assert isinstance(teacher, Student)
        targets += [("encoder", teacher.encoder), ("head", teacher.head)]
    if learner.teacher_prototypes is not None:
        targets.append(("prototypes", learner.teacher_prototypes.module))
    for name, network in targets:
        own = checkpoints.under(name, tensors)
        if own:
            load_named(network, own, folder / FILE)


def load_named(network: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load a state dict that must be the network's."""
    try:
        load_whole(network, tensors)
    except (RuntimeError, KeyError):
        raise CheckpointError(f"{path} does not fit the run's recipe: it has other tensors") from None


def read_start(folder: RunFolder) -> dict[str, Tensor]:
    """Return the tensors of start.safetensors, whose digest must be the one in run.json."""
    path, known = folder / FILE, folder.info().get("start", {})
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: restore it, or start a new run")
    if known.get("sha256") not in (None, sha256(read_bytes(path))):
        raise CheckpointError(f"{path} is damaged or was changed: restore it, or start a new run")
    return checkpoints.read_weights(path)


def listed(names: list[str]) -> str:
    """Return the first names as text that is safe to print."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(printable(name)[:80] for name in names[:LISTED]) + more) or "nothing"
