"""Pretrain an encoder: resolve the recipe and the images, open the run folder, train, and write the encoder."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kontrast import distributed
from kontrast.addresses import absolute, bare, shown
from kontrast.config.overrides import Overrides, apply_overrides, override_keys, override_layers
from kontrast.config.recipe import Recipe, fingerprint, read_recipe, to_toml
from kontrast.data import ImageSet
from kontrast.data.bad_images import skipped
from kontrast.data.in_memory import pack_in_memory
from kontrast.errors import EnvironmentFault, UsageError
from kontrast.files import sweep, write_atomic
from kontrast.plugins import command_start
from kontrast.registry import nearest
from kontrast.sharding import whole_state
from kontrast.training import checkpoints
from kontrast.training.auto_recipe import unread_folders
from kontrast.training.build import algorithms
from kontrast.training.caption_batches import VOCABULARY
from kontrast.training.device import MPS_NOTE, choose_device, describe_device
from kontrast.training.failures import is_out_of_memory, lost_rank, out_of_memory
from kontrast.training.ineffective_settings import schedule_warnings
from kontrast.training.loop import Loop
from kontrast.training.online_probe import OnlineProbe
from kontrast.training.resolve import check_ranks_agree, fresh_recipe, recipe_tree, resumed_recipe
from kontrast.training.run_folder import RunFolder, sha256, stored_recipe, timestamp
from kontrast.training.signals import StopSignals
from kontrast.training.splits import Splits, check_data, describe, keep_listing, located, open_splits, place_of
from kontrast.training.starting_weights import write_start_weights
from kontrast.training.student import Student
from kontrast.training.time_budget import AfterTraining, Budget, epochs_text
from kontrast.training.trial import plan_run

NO_OUT = "--out is missing: give the folder of a new run, or with --resume that of the run to resume"


def pretrain(
    data: Any = None,
    *,
    recipe: str | None = None,
    overrides: Overrides = (),
    out: str | os.PathLike[str] | None = None,
    from_: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accept_data_change: bool = False,
    device: str = "auto",
    on_nan: str = "stop",
    minutes: float | None = None,
    began: float | None = None,
    probed: bool = False,
    engine: str = "local",
    say: Callable[[str], None] = print,
) -> Path:
    """Train an encoder on images without labels, and return its run folder.

    Args:
        data: what to train on: the path of a folder of images, of tar shards or of a packed store; the name of a data
            set; a uint8 or uint16 tensor or array [N,C,H,W]; or a map-style dataset of images (with `len` and `[i]`).
            Images in memory are packed into the run folder. Default: the recipe's own, or the embedded digits.
        recipe: the name of a recipe (`kontrast recipes` lists them) or the path of a .toml file. Default: `folder`,
            which adapts to the images and the device, or `quickstart` if there is no data.
        overrides: settings that replace the recipe's: `{"training": {"epochs": 5}}`, `{"training.epochs": 5}` or
            `["training.epochs=5"]`.
        out: the run folder. Default: a new one under runs/.
        from_: weights to start from: an earlier run's folder, a .safetensors, .pt or .pth file, "timm:NAME" or
            "hf://OWNER/NAME". Default: random weights. The recipe keeps it as `start.weights`.
        resume: continue the run in `out` from its newest checkpoint. `data` and `recipe` may be left out.
        accept_data_change: resume even if the images changed since the run began.
        device: "auto" (a GPU if there is one), "cpu", "mps", "cuda" or "cuda:N".
        on_nan: if the loss or a gradient is not finite, "stop", or "skip" the step, up to ten times per run.
        minutes: a budget for everything, by which the epochs of a new run are planned; a resumed run keeps its own.
            Default: the recipe's epochs.
        began: when the budget began, by `time.monotonic`. Default: now.
        probed: whether probes and a report follow, for which the budget and the time left allow.
        engine: what started the ranks, which the command that resumes the run names: "local" for one process or
            torchrun, or "ray".
        say: a function that receives one-line messages for people.

    Returns:
        The path of the run folder, which contains recipe.toml, metrics.jsonl, checkpoints/ and encoder.safetensors.

    Example:
        >>> import tempfile, torch
        >>> images = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8)
        >>> tiny = {"encoder.width": 8, "training": {"batch": 8, "max_steps": 2}}
        >>> run = pretrain(images, overrides=tiny, out=tempfile.mkdtemp(), device="cpu", say=lambda line: None)
        >>> (run / "encoder.safetensors").exists()
        True
    """
    if on_nan not in ("stop", "skip"):
        raise UsageError(f"unknown --on-nan {on_nan!r}: {nearest(on_nan, ['stop', 'skip'])}")
    say = say if distributed.is_main() else lambda _: None
    if from_ is not None:
        overrides = [{"start": {"weights": os.fspath(from_)}}, *override_layers(overrides)]
    budget = None if minutes is None else Budget(float(minutes), time.monotonic() if began is None else began)
    if budget is not None:
        budget.check(overrides)
    job = Pretraining(
        data, recipe, overrides, accept_data_change, device, choose_device(device), on_nan, budget, probed,
        engine, say,
    )  # fmt: skip
    try:
        with StopSignals() as stop:
            return job.run(out, resume, stop)
    except (RuntimeError, MemoryError) as error:
        fault = lost_rank(error)
        if fault is None and not (job.resolved and is_out_of_memory(error)):
            raise
    # The frames of the failed run, and the memory of their tensors, are gone here: the estimate can be true.
    raise fault or out_of_memory(*typing.cast(tuple[Recipe, ImageSet], job.resolved), job.device)


@dataclass
class Pretraining:
    """One call of `pretrain`, with its arguments."""

    data: Any
    recipe_name: str | None
    overrides: Overrides
    accept_data_change: bool
    device_name: str
    device: torch.device
    on_nan: str
    budget: Budget | None
    probed: bool
    engine: str
    say: Callable[[str], None]
    resolved: tuple[Recipe, ImageSet] | None = None

    def run(self, out: str | os.PathLike[str] | None, resume: bool, stop: StopSignals) -> Path:
        """Train, in a folder that only this process writes to, and return the folder's path."""
        folder, resume = choose_folder(out, resume, self.recipe_name, self.data)
        with locked(folder):
            self.resolved = recipe, train = self.resolve(folder, resume)
            check_ranks_agree(recipe, train)
            with algorithms(recipe.training.deterministic):
                splits = open_splits(recipe, located(recipe.data, folder.info()) if resume else recipe.data, train)
                if resume:
                    check_data(folder, splits, self.accept_data_change)
                loop = Loop(recipe, folder, train, self.device, self.say, self.on_nan)
                if resume:
                    loop.restore()
                if recipe.start is not None and not loop.restored:
                    if not resume:
                        write_start_weights(folder, recipe, loop.learner, self.say)
                    loop.start()
                after = AfterTraining(recipe, splits, self.device, self.probed) if distributed.is_main() else None
                if self.budget is not None and not resume:
                    plan = plan_run(loop, self.budget, after, "evaluation.every" in override_keys(self.overrides))
                    recipe = plan.apply(recipe)
                    loop.adopt(plan, fingerprint(recipe))
                elif self.budget is not None:
                    kept = epochs_text(loop.position.epochs)
                    self.say(f"--minutes {self.budget.minutes:g} has no effect: a resumed run keeps its {kept}")
                self.warn(recipe, loop, train)
                command = self.resume_command(folder)
                if distributed.is_main():  # after all that can refuse the recipe, so that a mistake leaves no run
                    write_start(folder, loop, recipe, splits, command, resume, self.budget)
                self.report_skipped(folder, train)
                probe = OnlineProbe(recipe, splits, self.device) if distributed.is_main() else None
                del splits  # frees the images that no probe needs
                self.train(folder, partial(loop.run, probe, stop, command, after), loop, train, stop)
        return folder.path

    def resolve(self, folder: RunFolder, resume: bool) -> tuple[Recipe, ImageSet]:
        """Return the recipe and the training images: those of the folder's run if it is resumed."""
        in_memory = self.data is not None and not is_place(self.data)
        data = self.stored_images(folder, resume) if in_memory else self.data
        if resume:
            return resumed_recipe(folder, data, self.recipe_name, self.overrides, self.device)
        return fresh_recipe(data, self.recipe_name, self.overrides, self.device, self.say)

    def stored_images(self, folder: RunFolder, resume: bool) -> str:
        """Return the path of the store that holds the images in memory, after packing them if the run is new."""
        if resume:
            images = folder.info()["data"]["all_images"]
            if len(self.data) != images:
                raise UsageError(f"--resume: the run has {images} images, not {len(self.data)}; leave out data")
            return stored_recipe(folder).data.source
        place = os.path.abspath(folder / "images")
        tree, origin = recipe_tree(place, self.recipe_name)
        settings = read_recipe(apply_overrides(tree, self.overrides), origin).data
        if distributed.is_main():
            pack_in_memory(self.data, Path(place), test_share=settings.test_share)
        distributed.broadcast(place)  # the other ranks wait until the store is complete
        return place

    def warn(self, recipe: Recipe, loop: Loop, train: ImageSet) -> None:
        """Print warnings last, when training is about to begin, so that they never precede an error."""
        if self.device_name == "auto" and self.device.type == "cpu":
            self.say("no usable GPU of NVIDIA or Apple: training on the CPU")
        if self.device.type == "mps":
            self.say(MPS_NOTE)
        schedule = schedule_warnings(recipe.training, loop.position.epochs).values()
        compared = loop.captions is not None and loop.captions.repeated and loop.learner.objective.takes_labels
        captions = caption_warnings(recipe) if compared else []
        for line in [*unread_folders(recipe), *schedule, *captions, *bank_warnings(recipe, len(train))]:
            self.say(line)

    def resume_command(self, folder: RunFolder) -> str:
        """Return the command that resumes the run in this folder."""
        options = "" if self.device_name == "auto" else f" --device {self.device_name}"
        options += "" if self.on_nan == "stop" else f" --on-nan {self.on_nan}"
        on_ray = self.engine == "ray"
        options += f" --engine ray --workers {distributed.world()}" if on_ray else ""
        start = shlex.join([*([] if on_ray else distributed.launcher()), *command_start()])
        return f"{start} pretrain --resume --out {shlex.quote(str(folder.path))}{options}"

    def report_skipped(self, folder: RunFolder, train: ImageSet) -> None:
        """Write bad.jsonl and print how many images were skipped, if any were."""
        if train.bad and distributed.is_main():
            folder.write_bad(train.bad)
            self.say(skipped(train.bad, train.total))

    def train(
        self, folder: RunFolder, steps: Callable[[], None], loop: Loop, train: ImageSet, stop: StopSignals
    ) -> None:
        """Run the loop to its end and write the encoder."""
        begin, known = time.monotonic(), len(train.bad)
        stop.patient = True
        try:
            steps()
            encoder = whole_state(loop.learner.result.encoder)  # every rank must take part
            if distributed.is_main():
                self.finish(folder, encoder, loop, begin)
            if stop.signal is None:
                loop.finish_trackers()
        finally:
            loop.log.trackers.stop()
            if len(train.bad) > known:  # unpacked images are decoded, and found to be bad, during training
                self.report_skipped(folder, train)
        if stop.signal is not None:
            raise stop.error("the end of training", shlex.join([*command_start(), "probe", str(folder.path)]))

    def finish(self, folder: RunFolder, encoder: dict[str, torch.Tensor], loop: Loop, begin: float) -> None:
        """Write the encoder, and into run.json that the run has finished."""
        digest = checkpoints.write_weights(folder / "encoder.safetensors", encoder)
        texts = write_text_tower(folder, loop.learner.result)
        seconds = folder.info().get("seconds", 0.0) + time.monotonic() - begin
        facts = {"finished": timestamp(), "seconds": seconds, "steps": loop.position.step}
        folder.update_info(**facts, encoder_sha256=digest, **texts)
        if loop.position.stopped:
            reason = loop.stopping.reason()
            folder.update_info(stopped=reason)
            self.say(reason)
        if loop.stopping.automatic and (line := loop.stopping.kept(loop.best, loop.position.per_epoch)):
            self.say(line)


def write_text_tower(folder: RunFolder, student: Student) -> dict[str, str]:
    """Write text.safetensors, the text tower and both heads, if there is one; return what run.json records of it."""
    if student.text is None:
        return {}
    tensors = {
        f"{name}.{key}": tensor
        for name in ("head", "text")
        for key, tensor in getattr(student, name).state_dict().items()
    }
    return {"text_sha256": checkpoints.write_weights(folder / "text.safetensors", tensors)}


def is_place(data: object) -> bool:
    """Return whether data is a path or a name, and not images in memory."""
    return isinstance(data, str | os.PathLike)


def choose_folder(out: Any, resume: bool, recipe: str | None, data: Any) -> tuple[RunFolder, bool]:
    """Return the run folder, created and writable before any image is read, and whether to resume the run in it."""
    # A rank that torchrun restarts resumes its run without --resume, if the run had begun.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    if out == "" or (resume and out is None):
        raise UsageError(NO_OUT)
    if out is not None and is_place(data) and Path(data).is_dir() and Path(out).resolve() == Path(data).resolve():
        raise UsageError(f"--out {out} is the folder of images itself: give another folder, which may be inside it")
    folder = RunFolder(out or distributed.broadcast(default_out(recipe, data)))
    seen = [text == "True" for text in distributed.gather_texts(str(folder.holds_run))]
    holds_run = seen[0]
    if resume and not holds_run:
        raise UsageError(f"--resume: {folder.path} contains no run; start one without --resume")
    resume = resume or (restarted and out is not None and holds_run)
    if resume and not all(seen):
        blind = f"rank {seen.index(False)} does not see the run in {folder.path}"
        raise EnvironmentFault(f"{blind}, which rank 0 sees: all nodes need the same storage for --out")
    if distributed.is_main() and not resume:
        folder.create()
    return folder, resume


def choose_out(
    data: Any, recipe: str | None, overrides: Overrides, out: str | os.PathLike[str] | None, resume: bool
) -> str | os.PathLike[str]:
    """Return the run folder of a run that other processes will train, after checking what needs no images."""
    if out == "" or (resume and out is None):
        raise UsageError(NO_OUT)
    if not resume:
        tree, origin = recipe_tree(data if is_place(data) else None, recipe)
        read_recipe(apply_overrides(tree, overrides), origin)
    return default_out(recipe, data) if out is None else out


def default_out(recipe: str | None, data: Any) -> str:
    """Return a new folder under runs/, named after the recipe, the data or the quick start."""
    if data is None or is_place(data):
        name = "quickstart" if data in (None, "digits") else os.path.basename(absolute(bare(str(data))))
    else:
        name = "in-memory"
    stem = (recipe or name or "folder").replace("/", "-").removesuffix(".toml") or "run"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return str(path)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock, without leftovers of a killed process; remove a new folder if no run began in it."""
    try:
        if distributed.is_main():
            folder.hold()
            for place in (folder.path, folder / "checkpoints"):
                sweep(place)
        yield
    finally:
        if folder.is_held:  # without the lock, they are what another process is writing
            with contextlib.suppress(OSError):  # checkpoints that the file system refused to remove
                sweep(folder / "checkpoints")
        folder.abandon()
        folder.release()


def caption_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if images with equal captions are negatives because keys have no labels."""
    if recipe.teacher is None and not recipe.training.stop_gradient:
        return []
    keys = "a [teacher]" if recipe.teacher is not None else "training.stop_gradient"
    return [f"with {keys}, images that have the same caption are negatives of each other: keys have no labels"]


def bank_warnings(recipe: Recipe, images: int) -> list[str]:
    """Return warnings about stale rows of a bank: those of a student, or an image's own from earlier epochs."""
    if recipe.bank is None:
        return []
    lines = []
    if recipe.teacher is None:
        lines.append("the bank stores the student's own rows, which age as it learns; those of a [teacher] age slowly")
    size, rows = recipe.bank.size, images
    if recipe.bank.contents == "all":
        rows *= recipe.views.count - (recipe.teacher is not None and not recipe.teacher.symmetric)
    if size > rows:
        spans = f"the bank of {size:,} rows spans {size / rows:.1f} epochs of {images:,} images: stale keys of an image"
        lines.append(f"{spans} are among its negatives; set bank.size={max(1, rows // 2)} or fewer to avoid that")
    return lines


def write_start(folder: RunFolder, loop: Loop, recipe: Recipe, splits: Splits, command: str, resume: bool,
    budget: Budget | None = None,
) -> None:  # fmt: skip
    """Write run.json and then recipe.toml, whose presence marks a run; a resumed run updates what changed."""
    argv = shlex.join(["kontrast", *map(shown, sys.argv[1:])])
    text = to_toml(recipe, argv)
    digest = sha256(text.encode("utf-8", "surrogateescape"))
    if resume:
        info = folder.info()
        folder.update_info(resume=command, resumed=[*info.get("resumed", []), timestamp()])
        if stored_recipe(folder) == recipe:
            return
        folder.update_info(recipe_sha256=[*info.get("recipe_sha256", []), digest])
    else:
        machine = {"device": describe_device(loop.device), "world": distributed.world()}
        machine["precision"] = str(loop.precision).removeprefix("torch.")
        facts = {**checkpoints.versions(), "command": argv, "resume": command, **machine}
        facts |= {} if budget is None else {"minutes": budget.minutes}
        facts |= {"fingerprint": fingerprint(recipe), "recipe_sha256": [digest], "data": describe(splits)}
        folder.update_info(**facts, data_place=place_of(recipe.data.source), started=timestamp())
        keep_listing(folder, splits)
        if loop.tokenizer is not None and loop.tokenizer.vocabulary is not None:
            write_atomic(folder / VOCABULARY, loop.tokenizer.vocabulary)
    write_atomic(folder / "recipe.toml", text)
