"""Explain failures of training: out of memory, a lost rank, a loss or gradient that is not finite."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch

from kontrast import distributed
from kontrast.config.recipe import Recipe
from kontrast.data import Feeder, ImageSet
from kontrast.errors import EnvironmentFault, LostRank, NumbersError
from kontrast.operating_system import peak_memory
from kontrast.training.build import build_feeder, build_learner, build_views, facts_of, optimizer_of, precision
from kontrast.training.checkpoints import checkpoints
from kontrast.training.run_folder import RunFolder
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import keys

USABLE = 0.95
"""The share of the device's memory that an estimate may fill: allocators lose some between their blocks."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the device or on the host, where torch raises a plain RuntimeError.

    A convolution on the CPU that gets no memory says only that it could not create or execute a primitive.
    """
    texts = ["DefaultCPUAllocator", "Storage size calculation overflowed", "could not create a primitive"]
    texts += ["could not execute a primitive", "could not create a memory object"]
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or any(t in str(error) for t in texts)


def lost_rank(error: BaseException) -> LostRank | None:
    """Return an error that names the rank whose loss made a collective fail; None if the error is of another kind."""
    missing = distributed.missing_ranks(error)
    if missing is None:
        return None
    names = " and ".join(f"rank {r}" for r in missing) or "a rank"
    advice = "see its output; run again with --resume, or let torchrun restart it with --max-restarts"
    return LostRank(f"{names} of {distributed.world()} ended or does not answer: {advice}")


def out_of_memory(recipe: Recipe, train: ImageSet, device: torch.device) -> EnvironmentFault:
    """Return an error with the peak memory and, on a GPU, the largest batch that would fit.

    Call this after the frames of the failed run, and so its tensors, are gone.
    """
    t, cuda = recipe.training, device.type == "cuda"
    used = torch.cuda.max_memory_allocated(device) if cuda else peak_memory()
    peak = "" if used is None else f" (peak {used / 2**30:.1f} GiB)"
    fits = largest_batch(recipe, train, device) if cuda and distributed.world() == 1 else None
    advice = f"about {fits} would fit: training.batch={fits}" if fits else "halve training.batch"
    return EnvironmentFault(
        f"out of {'GPU memory' if cuda else 'memory'}{peak} at batch {t.batch} x {recipe.views.count} "
        f"views: {advice}, or compute the same batch in parts with training.accumulate={t.accumulate * 2}"
    )


def largest_batch(recipe: Recipe, train: ImageSet, device: torch.device) -> int | None:
    """Estimate the largest batch that fits, from the memory of two small steps; None if even 16 images don't fit."""
    small = max(8, recipe.training.batch // 16 // 8 * 8)
    with contextlib.suppress(RuntimeError, ValueError):  # an estimate that fails must not hide the error
        while True:
            gc.collect()
            torch.cuda.empty_cache()
            try:
                used = [peak_of_step(recipe, train, count, device) for count in (small, 2 * small)]
                break
            except torch.cuda.OutOfMemoryError:
                if small == 8:
                    return None
                small = max(8, small // 4 // 8 * 8)
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        room = USABLE * min(free + torch.cuda.memory_reserved(device), share * total)
        fits = batch_that_fits(small, used[0], used[1], room)
        return min(fits, recipe.training.batch - 8) if fits >= 8 else None
    return None


def batch_that_fits(small: int, used: float, used_by_twice: float, room: float) -> int:
    """Return the batch, a multiple of 8, that fits into `room` bytes, given that memory grows linearly.

    Args:
        small: a batch size.
        used: bytes that a step needs at this size.
        used_by_twice: bytes that a step needs at twice this size.
        room: bytes that are available.

    Returns:
        The batch size; 0 if nothing fits or if memory does not grow.
    """
    slope = (used_by_twice - used) / small
    return max(0, int((room - used) / slope + small) // 8 * 8) if slope > 0 else 0


def peak_of_step(recipe: Recipe, train: ImageSet, count: int, device: torch.device) -> int:
    """Return the peak memory in bytes of one step on `count` images, including images resident on the device."""
    torch.cuda.reset_peak_memory_stats(device)
    feeder = build_feeder(recipe, train, device)  # keeps images on the device
    learner = build_learner(recipe, device=device, **facts_of(train))
    dtype = precision(recipe.training.precision, device)
    step = Step(
        learner, optimizer_of(recipe, learner), build_views(recipe, dtype), device=device, precision=dtype,
        accumulate=1, say=lambda _: None,
    )  # fmt: skip
    rows = torch.arange(count) % len(feeder.data)
    pixels, sizes = train.batch(rows)
    of_images = {"sizes": sizes, "labels": train.labels[rows] if train.labels is not None else None, "indices": rows}
    if not recipe.training.labels:
        del of_images["labels"]
    given = {name: None if x is None else x.to(device) for name, x in of_images.items()}
    step(pixels.to(device), keys(0, 0, rows.to(device)), Schedule(lr=0.0), **given)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


SKIPS = 10
"""The most steps that may be skipped in one run."""


def describe_failure(feeder: Feeder, step: int, lr: float, terms: dict[str, float]) -> dict[str, Any]:
    """Return what is known about a failed step, whose number `step` counts from 0."""
    epoch, inside = divmod(step, feeder.steps_per_epoch)
    rows = feeder.order(epoch)[inside * feeder.batch : (inside + 1) * feeder.batch].tolist()
    images = [{"id": int(feeder.data.numbers(torch.tensor(row))), "name": str(feeder.data.names[row])} for row in rows]
    return {"step": step + 1, "lr": lr, "terms": {k: f"{v:.4g}" for k, v in terms.items()}, "images": images}


def failure_text(failure: dict[str, Any]) -> str:
    """Return one line about a failed step."""
    facts = ", ".join([f"lr {failure['lr']:.3g}", *(f"{k} {v}" for k, v in failure["terms"].items())])
    return f"the loss or a gradient is not finite at step {failure['step']} ({facts}); not-finite.json lists its images"


def not_finite(failure: dict[str, Any], folder: RunFolder) -> NumbersError:
    """Return the error that ends a run after a failed step."""
    saved = checkpoints(folder / "checkpoints")
    last = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint before it"
    return NumbersError(f"{failure_text(failure)}; {last}: lower training.lr or raise objective.temperature")
