"""From a recipe and its images to a running loop: device, run folder; and back from a checkpoint."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kontrast import distributed
from kontrast.config.recipe import Recipe, fingerprint, to_toml
from kontrast.data import ImageSet
from kontrast.data.bad_images import skipped
from kontrast.errors import UsageError
from kontrast.files import sweep, write_atomic
from kontrast.plugins import program
from kontrast.sharding import whole_state
from kontrast.training import checkpoints
from kontrast.training.auto_recipe import unread_folders
from kontrast.training.build import algorithms
from kontrast.training.device import choose_device, device_words
from kontrast.training.failures import check_choice, is_out_of_memory, lost_rank, out_of_memory
from kontrast.training.loop import Evaluate, Loop
from kontrast.training.online_probe import OnlineProbe
from kontrast.training.resolve import (
    agree,
    check_place,
    fresh_recipe,
    out_of_reach,
    overrides_as_text,
    resumed_recipe,
    unread,
)
from kontrast.training.run_folder import RunFolder, recipe_digest, stored_recipe
from kontrast.training.signals import StopSignals
from kontrast.training.splits import Splits, check_data, describe, keep_listing, located, open_splits, place_of


def pretrain(
    data: str | os.PathLike[str] | None = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accept_data_change: bool = False,
    device: str = "auto",
    on_nan: str = "stop",
    say: Callable[[str], None] = print,
) -> Path:
    """Train an encoder by a recipe and return its run; with `resume`, go on with the run in `out`.

    on_nan: "stop" where a loss or gradient is not finite, or "skip" such steps, up to ten in a run.
    """
    check_place(data)
    on = choose_device(device)
    say = say if distributed.is_main() else lambda _: None
    check_choice(on_nan)
    asked = overrides_as_text(overrides)
    opened: list[tuple[Recipe, ImageSet]] = []
    try:
        with StopSignals() as stop:
            folder, resume = choose_folder(out, resume, recipe, data)
            with held(folder):
                opened += [open_recipe(folder, resume, data, recipe, asked, on, say)]
                agree(*opened[0])
                with algorithms(opened[0][0].training.deterministic):
                    return _train(*opened[0], folder, on, stop, device, resume, accept_data_change, on_nan, say)
    except (RuntimeError, MemoryError) as error:
        fault = lost_rank(error)
        if fault is None and not (opened and is_out_of_memory(error)):
            raise
    # Here, past the handler, the failed run's frames are gone, and with them what they held of the memory.
    raise fault or out_of_memory(*opened[0], on)


def open_recipe(
    folder: RunFolder,
    resume: bool,
    data: Any,
    recipe: str | None,
    asked: list[str],
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[Recipe, ImageSet]:
    """What is trained, and on which images: as the folder has it where its run goes on, else as asked for."""
    if resume:
        return resumed_recipe(folder, data, recipe, asked, device)
    return fresh_recipe(data, recipe, asked, device, say)


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """The folder for this process alone, without the leftovers of one that was killed; nothing stays of a run that
    did not begin."""
    try:
        if distributed.is_main():
            folder.hold()
            for place in (folder.path, folder / "checkpoints"):
                sweep(place)
        yield
    finally:
        folder.abandon()
        folder.release()


def choose_folder(out: Any, resume: bool, recipe: str | None, data: Any) -> tuple[RunFolder, bool]:
    """The run's folder, which can be written before any image is read, and whether a run goes on in it."""
    # A rank that torchrun starts again goes on with its run by itself, if the run had begun.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the run to go on with")
    if out is not None and not str(out):
        raise UsageError("--out is empty: give a folder")
    if out is not None and data is not None and Path(data).is_dir() and Path(out).resolve() == Path(data).resolve():
        raise UsageError(f"--out {out} is the folder of images itself: give another, which may lie in it")
    folder = RunFolder(out or distributed.broadcast(default_out(recipe, data)))
    holds = distributed.broadcast(str(folder.holds_run)) == "True"
    if resume and not holds:
        raise UsageError(f"--resume: {folder.path} holds no run; start one without --resume")
    resume = resume or (restarted and out is not None and holds)
    if distributed.is_main() and not resume:
        folder.create()
    return folder, resume


def resume_command(folder: RunFolder, device: str, on_nan: str) -> str:
    chosen = "" if device == "auto" else f" --device {device}"
    chosen += "" if on_nan == "stop" else f" --on-nan {on_nan}"
    return f"{shlex.join(program())} pretrain --resume --out {shlex.quote(str(folder.path))}{chosen}"


def _train(
    recipe: Recipe,
    train: ImageSet,
    folder: RunFolder,
    device: torch.device,
    stop: StopSignals,
    asked: str,
    resume: bool,
    accept: bool,
    on_nan: str,
    say: Callable[[str], None],
) -> Path:
    main, command = distributed.is_main(), resume_command(folder, asked, on_nan)
    parts = open_splits(recipe, located(recipe.data, folder.info()) if resume else recipe.data, train)
    if resume:
        check_data(folder, parts, accept)
    loop = Loop(recipe, folder, train, device, say, on_nan)  # refuses impossible recipes before anything is written
    if resume:
        loop.restore()
    tell(recipe, loop.at.epochs, train, device, asked, say)
    if main:
        write_start(folder, loop, recipe, parts, command, resume)
    tell_skipped(folder, train, say)
    probe = build_probe(recipe, parts, device) if main else None
    del parts  # what no probe reads need not stay in memory
    begin, known = time.monotonic(), len(train.bad)
    stop.patient = True
    try:
        loop.run(probe, stop, command)
    finally:
        if len(train.bad) > known:  # images that are decoded as they are needed show only then that they are bad
            tell_skipped(folder, train, say)
    digest = write_encoder(loop, folder)
    if main:
        seconds = folder.info().get("seconds", 0.0) + time.monotonic() - begin
        folder.update_info(finished=now(), seconds=seconds, steps=loop.at.step, encoder_sha256=digest)
    if stop.asked is not None:
        raise stop.error("the end of training", shlex.join([*program(), "probe", str(folder.path)]))
    return folder.path


def tell(
    recipe: Recipe, epochs: float, train: ImageSet, device: torch.device, asked: str, say: Callable[[str], None]
) -> None:
    """What a person may not expect of the training that is about to begin; not before, lest it stand over an error."""
    if asked == "auto" and device.type == "cpu":
        say("no usable NVIDIA GPU: training on the CPU")
    for line in [*unread_folders(recipe), *(unread(recipe.training) | out_of_reach(recipe.training, epochs)).values()]:
        say(line)
    warn_of_bank(recipe, train, say)


def warn_of_bank(recipe: Recipe, train: ImageSet, say: Callable[[str], None]) -> None:
    """A bank that outlasts an epoch holds an image's own old keys among its negatives, and rows of a student that has
    moved on since are no longer what it would say."""
    if recipe.bank and recipe.teacher is None:
        say("the bank holds the student's own rows, which age as it learns: those of a [teacher] do so slowly")
    size, rows = recipe.bank.size if recipe.bank else 0, len(train)
    if recipe.bank and recipe.bank.contents == "all":
        rows *= recipe.views.count - (recipe.teacher is not None and not recipe.teacher.symmetric)
    if size > rows:
        say(
            f"the bank of {size:,} rows holds {size / rows:.1f} epochs of {len(train):,} images: stale keys of an "
            f"image are among its negatives; bank.size={max(1, rows // 2)} or fewer avoids that"
        )


def write_encoder(loop: Loop, folder: RunFolder) -> str:
    """The result, and its SHA-256; all ranks come here, the first writes."""
    state = whole_state(loop.learner.student.encoder)
    return checkpoints.write_weights(folder / "encoder.safetensors", state) if distributed.is_main() else ""


def write_start(folder: RunFolder, loop: Loop, recipe: Recipe, parts: Splits, command: str, resume: bool) -> None:
    """run.json and then recipe.toml, by which a folder is known to hold a run; a resumed run notes what may change."""
    argv = shlex.join(["kontrast", *sys.argv[1:]])
    text = to_toml(recipe, argv)
    digest = recipe_digest(text.encode("utf-8", "surrogateescape"))
    if resume:
        folder.update_info(resume=command, resumed=[*folder.info().get("resumed", []), now()])
        if stored_recipe(folder) == recipe:
            return
        folder.update_info(recipe_sha256=[*folder.info().get("recipe_sha256", []), digest])
    else:
        folder.update_info(
            **checkpoints.versions(),
            command=argv,
            resume=command,
            device=device_words(loop.device),
            world=distributed.world(),
            precision=str(loop.precision).removeprefix("torch."),
            fingerprint=fingerprint(recipe),
            recipe_sha256=[digest],
            data=describe(parts),
            data_place=place_of(recipe.data.source),
            started=now(),
        )
        keep_listing(folder, parts)
    write_atomic(folder / "recipe.toml", text)


def build_probe(recipe: Recipe, parts: Splits, device: torch.device) -> Evaluate:
    """kNN, rank and entropy where the recipe evaluates; else without kNN, of a few images, once at the end."""
    if recipe.evaluation.every:
        return OnlineProbe(recipe, parts.train, parts.test, device)
    return OnlineProbe(recipe, parts.trained, None, device, limit=512)


def tell_skipped(folder: RunFolder, train: ImageSet, say: Callable[[str], None]) -> None:
    bad = train.bad
    if bad and distributed.is_main():
        folder.write_bad(bad)
        say(skipped(bad, train.total))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def default_out(recipe: str | None, data: Any) -> str:
    shown = "quickstart" if data in (None, "digits") else os.path.basename(os.path.abspath(str(data)))
    stem = (recipe or shown or "folder").replace("/", "-")
    stem = stem.removesuffix(".toml") or "run"
    for number in range(1, 100_000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists():
            return str(path)
    raise UsageError("runs/ is full of runs of this name: give --out")
