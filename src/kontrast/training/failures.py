"""What torch's own errors mean for the person who trains: memory that was too small, a rank that is gone."""

from __future__ import annotations

import contextlib
import gc
import resource
from typing import Any

import torch

from kontrast import distributed
from kontrast.config.recipe import Recipe
from kontrast.data import Feeder, ImageSet
from kontrast.errors import EnvironmentFault, NumbersError, UsageError
from kontrast.files import write_json
from kontrast.registry import nearest
from kontrast.training.build import build_feeder, build_learner, build_views, optimizer_of, precision
from kontrast.training.checkpoints import checkpoints
from kontrast.training.run_folder import RunFolder
from kontrast.training.step import Step
from kontrast.views import keys

SPARE = 0.95
"""The share of the device's memory that an estimate fills: allocators lose some between their blocks."""


def is_out_of_memory(error: BaseException) -> bool:
    """On the device, or on the host: torch's CPU allocator raises a plain RuntimeError, and so do sizes that no memory
    has."""
    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(w in str(error) for w in words)


def lost_rank(error: BaseException) -> EnvironmentFault | None:
    """The fault behind a collective that failed, by the rank that is missing; None for an error of another kind."""
    missing = distributed.missing_ranks(error)
    if missing is None:
        return None
    names = " and ".join(f"rank {r}" for r in missing) or "a rank"
    return EnvironmentFault(
        f"{names} of {distributed.world()} ended or does not answer: see what it said; run again with --resume, or let "
        "torchrun start it again with --max-restarts"
    )


def out_of_memory(recipe: Recipe, train: ImageSet, device: torch.device) -> EnvironmentFault:
    """Call it when the failed run's frames are gone: its tensors have to be, for the estimate to be true."""
    t = recipe.training
    peak, batch = _peak(device) / 2**30, f"batch {t.batch} x {recipe.views.count} views"
    alone = device.type == "cuda" and distributed.world() == 1
    fits = largest_batch(recipe, train, device) if alone else None
    advice = f"about {fits} would fit: training.batch={fits}" if fits else "halve training.batch"
    what = "GPU memory" if device.type == "cuda" else "memory"
    parts = t.accumulate * 2
    return EnvironmentFault(
        f"out of {what} (peak {peak:.1f} GiB) at {batch}: {advice}, or keep it exact in parts with "
        f"training.accumulate={parts}"
    )


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def largest_batch(recipe: Recipe, train: ImageSet, device: torch.device) -> int | None:
    """Two small steps, measured, and the line through them: the whole batch that fills the device. None where even
    those do not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    small = max(8, recipe.training.batch // 16 // 8 * 8)
    with contextlib.suppress(RuntimeError, ValueError):  # an estimate that fails must not hide what it is about
        used = [peak_of_step(recipe, train, count, device) for count in (small, 2 * small)]
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        room = SPARE * min(free + torch.cuda.memory_reserved(device), share * total)
        fits = on_line(small, used[0], used[1], room)
        return min(fits, recipe.training.batch - 8) if fits >= 8 else None
    return None


def on_line(small: int, used: float, used_by_twice: float, room: float) -> int:
    """Where memory grows by a line through (small, used) and (2 small, used_by_twice): the batch, a multiple of 8, that
    fits into `room`; 0 where it does not grow or nothing fits."""
    slope = (used_by_twice - used) / small
    if slope <= 0:
        return 0
    return max(0, int((room - used) / slope + small) // 8 * 8)


def peak_of_step(recipe: Recipe, train: ImageSet, count: int, device: torch.device) -> int:
    """Bytes at the height of one step on `count` images, with those that the feeder keeps on the device."""
    torch.cuda.reset_peak_memory_stats(device)
    feeder = build_feeder(recipe, train, device)  # holds images
    learner = build_learner(recipe, train.channels, device)
    dtype = precision(recipe.training.precision, device)
    step = Step(
        learner, optimizer_of(recipe, learner), build_views(recipe, dtype), device=device, precision=dtype,
        accumulate=1, say=lambda _: None,
    )  # fmt: skip
    rows = torch.arange(count) % len(feeder.data)
    pixels, sizes = train.batch(rows)
    step(pixels.to(device), keys(0, 0, rows.to(device)), None if sizes is None else sizes.to(device), 0.0, 1.0)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


ON_NAN = ("stop", "skip")
SKIPS = 10
"""As many steps may be skipped in one run; a run that needs more is going wrong."""


def check_choice(name: str) -> str:
    if name not in ON_NAN:
        raise UsageError(f"unknown --on-nan {name!r}: {nearest(name, ON_NAN)}")
    return name


def write_down(folder: RunFolder, failures: list[dict[str, Any]]) -> None:
    """not-finite.json: each such step, its learning rate and terms, and the images of its batch on all ranks."""
    write_json(folder / "not-finite.json", {"version": 1, "steps": failures})


def failure(feeder: Feeder, step: int, lr: float, terms: dict[str, float]) -> dict[str, Any]:
    """What is known of step number `step`, counted from 0."""
    epoch, inside = divmod(step, feeder.steps_per_epoch)
    rows = feeder.order(epoch)[inside * feeder.batch : (inside + 1) * feeder.batch].tolist()
    images = [{"id": int(feeder.data.index[row]), "name": str(feeder.data.names[row])} for row in rows]  # type: ignore[index]
    return {"step": step + 1, "lr": lr, "terms": {k: f"{v:.4g}" for k, v in terms.items()}, "images": images}


def words(found: dict[str, Any]) -> str:
    facts = ", ".join([f"lr {found['lr']:.3g}", *(f"{k} {v}" for k, v in found["terms"].items())])
    return f"the loss or a gradient is not finite at step {found['step']} ({facts}), its images are in not-finite.json"


def stopped(found: dict[str, Any], folder: RunFolder) -> NumbersError:
    saved = checkpoints(folder / "checkpoints")
    kept = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint before it"
    return NumbersError(f"{words(found)}; {kept}: lower training.lr or raise objective.temperature")
