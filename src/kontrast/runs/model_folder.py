"""An encoder as other libraries and the Hugging Face Hub expect it: weights, a config.json and a card.

model.safetensors  the tensors, under the names of the library
config.json        timm's or torchvision's model, its preprocessing, and kontrast's own facts
README.md          the card
recipe.toml, run.json, probes.json   only for the hub: with them, the folder is a run folder too
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from kontrast.config.recipe import fingerprint, to_toml
from kontrast.errors import UsageError, shorten
from kontrast.files import disk_faults, exchange_folder, remove_folder, sync, write_atomic
from kontrast.networks import Encoder
from kontrast.networks.counterparts import Counterpart, counterpart
from kontrast.runs.encoder_card import UNKNOWN, CardFacts, encoder_card
from kontrast.runs.probe import read_probes
from kontrast.runs.public_facts import public_recipe, without_paths
from kontrast.runs.run import Run
from kontrast.training.hub import FILES
from kontrast.training.run_folder import VERSION, sha256
from kontrast.training.weight_files import safetensors_bytes

FORMATS = ("timm", "torchvision", "hub")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}", re.ASCII)
WEIGHTS, CONFIG, CARD = FILES[0], FILES[3], FILES[4]


def check_license(license: str) -> str:
    """Return an identifier of a license as the hub writes it; "unknown" if none was given."""
    known = license.lower() or UNKNOWN
    if not LICENSE.fullmatch(known):
        raise UsageError(f"--license {shorten(license)}: give an identifier, such as mit, apache-2.0 or cc-by-4.0")
    return known


def model_files(
    run: Run,
    encoder: Encoder,
    described: dict[str, Any],
    format: str,
    *,
    license: str = "",
    allow_paths: bool = False,
    title: str,
    place: str,
    weights: str = WEIGHTS,
) -> dict[str, bytes]:
    """Return the content of each file of a model, by its name in the folder.

    Args:
        run: the run.
        encoder: its encoder.
        described: the facts about both, from `kontrast.runs.export.describe`.
        format: "timm", "torchvision" or "hub".
        license: of the weights.
        allow_paths: keep the paths of this machine.
        title: the first line of the card.
        place: what `kontrast.load` will take: hf://owner/name, or a folder.
        weights: the name of the weights' file.
    """
    license, equals = check_license(license), counterparts(run, encoder, format)
    described = described if allow_paths else without_paths(described)
    card = encoder_card(CardFacts(title, format, license, place, weights, equals, described))
    config = {**library_config(equals, format, encoder, described, license), "kontrast": described}
    state = encoder.state_dict()
    tensors = equals[0].tensors(state) if format != "hub" else dict(state)  # kontrast's names, which are timm's
    content = safetensors_bytes(tensors, described if tensors.keys() == state.keys() else {})
    files = {WEIGHTS: content, CONFIG: to_json(config), CARD: card.encode("utf-8", "backslashreplace")}
    if format == "hub":
        files |= run_files(run, content, described, allow_paths)
    return files


def counterparts(run: Run, encoder: Encoder, format: str) -> tuple[Counterpart, ...]:
    """Return the equal models of the libraries. For the hub there may be none."""
    settings, found = run.recipe.encoder, []
    for library in ("timm", "torchvision") if format == "hub" else (format,):
        try:
            found.append(counterpart(library, settings.name, settings.arguments, encoder))
        except UsageError:
            if format != "hub":
                raise
    return tuple(found)


def library_config(
    equals: tuple[Counterpart, ...], format: str, encoder: Encoder, described: dict[str, Any], license: str
) -> dict[str, Any]:
    """Return the part of config.json that timm reads, or that says how to build torchvision's model."""
    by_library = {one.library: one for one in equals}
    if "timm" in by_library:
        return timm_config(by_library["timm"], encoder, described, license)
    if "torchvision" in by_library:
        one = by_library["torchvision"]
        shown = {"model": one.name, "arguments": one.arguments, "missing": one.classifier}
        return {"torchvision": shown, "num_features": encoder.width, "license": license}
    return {"num_features": encoder.width, "license": license}


def timm_config(one: Counterpart, encoder: Encoder, described: dict[str, Any], license: str) -> dict[str, Any]:
    """Return timm's configuration: the model, what it is built with, and the preprocessing of its input."""
    given, normal = described["input"], described["normalisation"]
    channels = encoder.channels
    mean, std = (normal[key] * channels if len(normal[key]) == 1 else normal[key] for key in ("mean", "std"))
    pretrained = {
        "tag": "kontrast", "custom_load": False, "input_size": [channels, encoder.size, encoder.size],
        "fixed_input_size": one.fixed_size, "interpolation": given["interpolation"],
        "crop_pct": given["center_fraction"], "crop_mode": "center",
        "mean": mean, "std": std, "num_classes": 0, "first_conv": one.first,
        "classifier": one.classifier, "license": license,
    }  # fmt: skip
    named = {"architecture": one.name, "num_classes": 0, "num_features": encoder.width, "global_pool": one.pooling}
    return {**named, "model_args": one.arguments, "pretrained_cfg": pretrained}


def run_files(run: Run, weights: bytes, described: dict[str, Any], allow_paths: bool) -> dict[str, bytes]:
    """Return the files that make the folder a run folder: recipe.toml, run.json and, if it was probed, probes.json."""
    recipe = run.recipe if allow_paths else public_recipe(run.recipe)
    text = to_toml(recipe, f"{recipe.title}\nThe resolved recipe of an exported run.").encode()
    info = {
        "version": VERSION, **described["versions"], **described["trained"], "data": described["data"],
        "fingerprint": fingerprint(recipe), "recipe_sha256": [sha256(text)], "encoder_sha256": sha256(weights),
    }  # fmt: skip
    files = {"recipe.toml": text, "run.json": to_json(info)}
    probes = read_probes(run.path / "probes.json")
    if probes:
        files["probes.json"] = to_json({"version": 1, "probes": probes if allow_paths else without_paths(probes)})
    return files


def to_json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode()


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files at once, in place of an earlier export. Other folders are not touched."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--out {folder} is not a folder: give a new one, or one of an earlier export")
    others = sorted(set(os.listdir(folder)) - set(FILES)) if folder.exists() else []
    if others:
        raise UsageError(f"--out {folder} contains {others[0]}, which no export writes: give another folder")
    temporary = folder.with_name(f".tmp-{os.getpid()}-{folder.name}")
    with disk_faults(folder, needed=sum(map(len, files.values()))):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(temporary)
        try:
            temporary.mkdir()
            for name, content in files.items():
                (temporary / name).write_bytes(content)
                sync(temporary / name)
            exchange_folder(temporary, folder)
        finally:
            remove_folder(temporary)


def write_beside(weights: Path, files: dict[str, bytes]) -> None:
    """Write the weights to a file, with the configuration and the card beside it."""
    with disk_faults(weights):
        weights.parent.mkdir(parents=True, exist_ok=True)
    for name, path in files_beside(weights).items():
        write_atomic(path, files[name])


def files_beside(weights: Path) -> dict[str, Path]:
    """Return where the files of a model go if its weights are a file of their own."""
    return {
        WEIGHTS: weights,
        CONFIG: weights.with_name(f"{weights.name}.json"),
        CARD: weights.with_name(f"{weights.name}.md"),
    }
