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
from kontrast.data import ImageSet
from kontrast.recipes import apply_overrides, load_tree, merge_trees
from kontrast.registry import DataError, EnvironmentFault, UsageError
from kontrast.settings import Recipe, fingerprint, read_recipe, to_toml, to_tree, toml_value
from kontrast.training import checkpoints
from kontrast.training.adapt import adapt
from kontrast.training.evaluation import OnlineProbe
from kontrast.training.folder import RunFolder, write_atomic
from kontrast.training.loop import Loop
from kontrast.training.run import Run, choose_device, open_split, stored_recipe

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
    # A rank that torchrun starts again goes on with its run by itself.
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    asked = overrides_as_text(overrides)
    if resume:
        if out is None:
            raise UsageError("--resume needs --out DIR, the run to go on with")
        folder = RunFolder(out)
        if not folder.holds_run:
            raise UsageError(f"--resume: {out} holds no run")
        resolved = resumed_recipe(folder, data, asked)
        train = open_split(resolved.data, "train", seed=resolved.seed, pretraining=True)
    else:
        resolved, train = fresh_recipe(data, recipe, asked, on, say)
        folder = RunFolder(out or distributed.broadcast(default_out(recipe, data)))
    if distributed.is_main():
        if not resume:
            folder.create()
        folder.hold()
    try:
        agree(resolved, train)
        return _train(resolved, folder, train, on, resume, accept_data_change, say)
    except torch.cuda.OutOfMemoryError:
        peak = torch.cuda.max_memory_allocated(on) / 2**30
        batch, parts = resolved.training.batch, resolved.training.accumulate * 2
        raise EnvironmentFault(
            f"out of GPU memory (peak {peak:.1f} GiB) at batch {batch} x {resolved.views.count} views: "
            f"halve training.batch, or keep it exact in parts with training.accumulate={parts}"
        ) from None
    finally:
        folder.release()


def _train(
    recipe: Recipe, folder: RunFolder, train: ImageSet, device: torch.device, resume: bool, accept: bool, say: Callable
) -> Run:
    loop = Loop(recipe, folder, train, device, say)  # refuses impossible recipes before anything is written
    command = f"kontrast pretrain --resume --out {shlex.quote(str(folder.path))}"
    main = distributed.is_main()
    if resume:
        check_data(folder, train, accept)
        if main:
            checkpoints.sweep(folder / "checkpoints")
        loop.restore({"torch": torch.__version__, **loop.world()})
    elif main:
        write_atomic(folder / "recipe.toml", to_toml(recipe, f"kontrast {' '.join(map(shlex.quote, sys.argv[1:]))}"))
        folder.update_info(
            **checkpoints.versions(),
            command=shlex.join(["kontrast", *sys.argv[1:]]),
            device=device_words(device),
            world=distributed.world(),
            precision=str(loop.precision).removeprefix("torch."),
            fingerprint=fingerprint(recipe),
            data=describe(train),
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
    bad = train.bad
    if bad:
        shown = ", ".join(f"{name} ({reason})" for name, reason in bad[:3])
        say(f"skipped {len(bad)} of {len(train) + len(bad)} images: {shown}{' ...' if len(bad) > 3 else ''}")
    start = time.monotonic()
    evaluate = None
    if recipe.evaluation.every and main:
        test = open_split(recipe.data, "test", seed=recipe.seed) if train.has_test else None
        probe = OnlineProbe(recipe, train, test, device)
        evaluate = lambda epoch: probe(loop.learner.student.encoder)  # noqa: E731
    loop.run(evaluate, command)
    if main:
        loop.write_encoder()
        seconds = folder.info().get("seconds", 0.0) + time.monotonic() - start
        folder.update_info(finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"), seconds=seconds, steps=loop.at.step)
    return Run(folder.path)


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
        picks, reasons = adapt(train, device)
        resolved = read_recipe(apply_overrides(merge_trees(tree, {**picks, "adapt": False}), overrides), origin)
        for line in reasons:
            say(line)
    return resolved, train


def resumed_recipe(folder: RunFolder, data: Any, overrides: list[str]) -> Recipe:
    """The stored recipe with overrides of what may change; any other change is refused, key by key."""
    stored = stored_recipe(folder)
    wanted = overrides + ([f"data.source={data}"] if data is not None else [])
    resolved = read_recipe(apply_overrides(to_tree(stored), wanted), str(folder / "recipe.toml"))
    old, new = flat(to_tree(stored)), flat(to_tree(resolved))
    changed = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(MAY_CHANGE)]
    if changed:
        words = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in changed)
        raise UsageError(f"--resume can't change {words}: start a new run, or resume without it")
    return resolved


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return leaves


def check_data(folder: RunFolder, train: ImageSet, accept: bool) -> None:
    """Refuse to go on with other images than the run began with."""
    before = folder.info().get("data", {})
    now = describe(train)
    if before.get("fingerprint") in (None, now["fingerprint"]):
        return
    if not accept:
        raise DataError(
            f"the images changed since the run began: {before.get('images')} then, {now['images']} now; "
            "restore them, or go on with --accept-data-change"
        )
    if distributed.is_main():
        folder.update_info(data=now, data_before=before)


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
