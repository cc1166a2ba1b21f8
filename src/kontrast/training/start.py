"""From what the user asked for to a running loop: recipe, data, device, run folder; and back from a checkpoint."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kontrast import distributed
from kontrast.data import ImageSet, changes, file_listing
from kontrast.recipes import apply_overrides, load_tree, merge_trees
from kontrast.registry import DataError, EnvironmentFault, UsageError
from kontrast.settings import Recipe, fingerprint, read_recipe, to_toml, to_tree, toml_value
from kontrast.training import checkpoints
from kontrast.training.adapt import adapt, reasons
from kontrast.training.evaluation import OnlineProbe
from kontrast.training.folder import RunFolder, write_atomic
from kontrast.training.loop import Loop
from kontrast.training.run import Run, choose_device, open_split, stored_recipe
from kontrast.training.stopping import StopWatch

MAY_CHANGE = ("training.log_every", "training.max_steps", "training.compile", "data.resident", "checkpoints.")
"""Settings that a resumed run may change without becoming another run."""


def pretrain(
    data: str | os.PathLike[str] | None = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accept_data_change: bool = False,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> Run:
    """Train an encoder by a recipe and return its run; with `resume`, go on with the run in `out`."""
    on = choose_device(device)
    say = say if distributed.is_main() else lambda _: None
    asked = overrides_as_text(overrides)
    with StopWatch() as stop:
        folder, resume = choose_folder(out, resume, recipe, data)
        try:
            if distributed.is_main():
                folder.hold()
            if resume:
                resolved, train = resumed_recipe(folder, data, recipe, asked, on)
            else:
                resolved, train = fresh_recipe(data, recipe, asked, on, say)
            agree(resolved, train)
            command = resume_command(folder, device)
            return _train(resolved, folder, train, on, stop, command, resume, accept_data_change, say)
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(resolved, on) from None
        finally:
            folder.abandon()
            folder.release()


def choose_folder(out: Any, resume: bool, recipe: str | None, data: Any) -> tuple[RunFolder, bool]:
    """The run's folder, which can be written before any image is read, and whether a run goes on in it."""
    # A rank that torchrun starts again goes on with its run by itself, if the run had begun.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the run to go on with")
    folder = RunFolder(out or distributed.broadcast(default_out(recipe, data)))
    holds = distributed.broadcast(str(folder.holds_run)) == "True"
    if resume and not holds:
        raise UsageError(f"--resume: {folder.path} holds no run; start one without --resume")
    resume = resume or (restarted and out is not None and holds)
    if distributed.is_main() and not resume:
        folder.create()
    return folder, resume


def resume_command(folder: RunFolder, device: str) -> str:
    chosen = "" if device == "auto" else f" --device {device}"
    return f"kontrast pretrain --resume --out {shlex.quote(str(folder.path))}{chosen}"


def out_of_memory(recipe: Recipe, device: torch.device) -> EnvironmentFault:
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    batch, parts = recipe.training.batch, recipe.training.accumulate * 2
    return EnvironmentFault(
        f"out of GPU memory (peak {peak:.1f} GiB) at batch {batch} x {recipe.views.count} views: "
        f"halve training.batch, or keep it exact in parts with training.accumulate={parts}"
    )


def _train(
    recipe: Recipe,
    folder: RunFolder,
    train: ImageSet,
    device: torch.device,
    stop: StopWatch,
    command: str,
    resume: bool,
    accept: bool,
    say: Callable[[str], None],
) -> Run:
    main = distributed.is_main()
    if resume:
        check_data(folder, train, accept)
    loop = Loop(recipe, folder, train, device, say)  # refuses impossible recipes before anything is written
    if resume:
        if main:
            checkpoints.sweep(folder / "checkpoints")
        loop.restore()
    if main:
        write_start(folder, loop, recipe, train, command, resume)
    say_skipped(train, say)
    begin, known = time.monotonic(), len(train.bad)
    stop.patient = True
    try:
        loop.run(build_probe(recipe, train, device, loop) if main else None, stop, command)
    finally:
        if len(train.bad) > known:  # images that are decoded as they are needed show only then that they are bad
            say_skipped(train, say)
    if main:
        loop.write_encoder()
        seconds = folder.info().get("seconds", 0.0) + time.monotonic() - begin
        folder.update_info(finished=now(), seconds=seconds, steps=loop.at.step)
    if stop.asked is not None:
        raise stop.error("the end of training", f"kontrast probe {shlex.quote(str(folder.path))}")
    return Run(folder.path)


def write_start(folder: RunFolder, loop: Loop, recipe: Recipe, train: ImageSet, command: str, resume: bool) -> None:
    """run.json and then recipe.toml, by which a folder is known to hold a run; a resumed run notes what may change."""
    argv = shlex.join(["kontrast", *sys.argv[1:]])
    if resume:
        folder.update_info(resume=command, resumed=[*folder.info().get("resumed", []), now()])
        if stored_recipe(folder) == recipe:
            return
    else:
        folder.update_info(
            **checkpoints.versions(),
            command=argv,
            resume=command,
            device=device_words(loop.device),
            world=distributed.world(),
            precision=str(loop.precision).removeprefix("torch."),
            fingerprint=fingerprint(recipe),
            data=describe(train),
            started=now(),
        )
        keep_listing(folder, train)
    write_atomic(folder / "recipe.toml", to_toml(recipe, argv))


def build_probe(recipe: Recipe, train: ImageSet, device: torch.device, loop: Loop) -> Callable[[], dict[str, float]]:
    """kNN and effective rank where the recipe evaluates; else the rank alone, of a few images, once at the end."""
    if recipe.evaluation.every:
        test = open_split(recipe.data, "test", seed=recipe.seed) if train.has_test else None
        probe = OnlineProbe(recipe, train, test, device)
    else:
        probe = OnlineProbe(recipe, train, None, device, limit=512)
    return lambda: probe(loop.learner.student.encoder)


def say_skipped(train: ImageSet, say: Callable[[str], None]) -> None:
    bad = train.bad
    if bad:
        shown = ", ".join(f"{name} ({reason})" for name, reason in bad[:3])
        say(f"skipped {len(bad)} of {train.total} images: {shown}{' ...' if len(bad) > 3 else ''}")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def agree(recipe: Recipe, train: ImageSet) -> None:
    """Refuse to train where a rank has another recipe or other images than the first."""
    said = distributed.everyone_says(f"{fingerprint(recipe)} {train.fingerprint}")
    odd = [rank for rank, text in enumerate(said) if text != said[0]]
    if odd:
        raise DataError(f"rank {odd[0]} has another recipe or other images than rank 0: give all ranks the same")


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


def fresh_recipe(
    data: Any, recipe: str | None, overrides: list[str], device: torch.device, say: Callable[[str], None]
) -> tuple[Recipe, ImageSet]:
    """The recipe as it will run and its training images."""
    name = recipe or ("quickstart" if data is None else "folder")
    tree = load_tree(name)
    if data is not None:
        tree = merge_trees(tree, {"data": {"source": str(data)}})
    origin = f"recipe {name!r}"
    resolved = read_recipe(apply_overrides(tree, overrides), origin)
    train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True)
    if resolved.adapt:
        settings, tree = resolved.data, merge_trees(tree, {**adapt(train, device), "adapt": False})
        resolved = read_recipe(apply_overrides(tree, overrides), origin)
        if resolved.data != settings:  # bounded to another size: what trains is what a resumed run will open
            train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True)
        for line in reasons(resolved, train, device):
            say(line)
    return resolved, train


def resumed_recipe(
    folder: RunFolder, data: Any, recipe: str | None, overrides: list[str], device: torch.device
) -> tuple[Recipe, ImageSet]:
    """The stored recipe with overrides of what may change; any other change is refused, key by key. A recipe named
    again, as torchrun's restarts do, must be the stored one."""
    stored = stored_recipe(folder)
    if recipe is not None:
        wanted = fresh_recipe(data, recipe, overrides, device, lambda _: None)[0]
    else:
        asked = overrides + ([f"data.source={toml_value(str(data))}"] if data is not None else [])
        wanted = read_recipe(apply_overrides(to_tree(stored), asked), str(folder / "recipe.toml"))
    old, new = flat(to_tree(stored)), flat(to_tree(wanted))
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(MAY_CHANGE)]
    if changed:
        words = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in changed)
        raise UsageError(f"--resume can't change {words}: start a new run, or resume without it")
    return wanted, open_split(wanted.data, "train", seed=wanted.seed, pretraining=True)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return leaves


def check_data(folder: RunFolder, train: ImageSet, accept: bool) -> None:
    """Refuse to go on with other images than the run began with."""
    before = folder.info().get("data", {})
    today = describe(train)
    if before.get("fingerprint") in (None, today["fingerprint"]):
        return
    if not accept:
        listing = folder / "files.txt.gz"
        known = listing.is_file() and train.stamps is not None
        which = f": {changes(listing.read_bytes(), train)}" if known else ""
        raise DataError(
            f"the images changed since the run began, {before.get('images')} then, {today['images']} now{which}; "
            "restore them, or go on with --accept-data-change"
        )
    if distributed.is_main():
        folder.update_info(data=today, data_before=before)
        keep_listing(folder, train)


def keep_listing(folder: RunFolder, train: ImageSet) -> None:
    """The names and dates of the run's files, by which a resumed run can say which of them changed."""
    listing = file_listing(train)
    if listing is not None:
        write_atomic(folder / "files.txt.gz", listing)


def describe(train: ImageSet) -> dict[str, Any]:
    return {
        "name": train.name,
        "images": len(train),
        "classes": None if train.classes is None else len(train.classes),
        "channels": train.channels,
        "skipped": len(train.bad),
        "fingerprint": train.fingerprint,
    }


def default_out(recipe: str | None, data: Any) -> str:
    stem = (recipe or "quickstart" if data is None else recipe or Path(str(data)).name or "folder").replace("/", "-")
    stem = stem.removesuffix(".toml") or "run"
    for number in range(1, 100_000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists():
            return str(path)
    raise UsageError("runs/ is full of runs of this name: give --out")


def device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
