"""Compare the whole step of methods, such as SwAV and DINO with local crops, with the bare step of their networks.

    python benchmarks/methods.py [--recipes cifar10/swav-multi-crop cifar10/dino-multi-crop] [--steps 50] [--json FILE]

The bare step is, on existing crops of the same number and sizes, the student's forward and backward pass, the teacher's
forward pass if there is one, and the optimizer's update, compiled and captured. The whole step has feeding, views,
objective, prototypes, queues and the teacher's average besides. Images are random pixels of CIFAR-10's size and number.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from kontrast.config.recipe import Recipe
from kontrast.config.recipe_files import resolve
from kontrast.data import Feeder, ImageSet
from kontrast.training.build import algorithms, build_learner, build_views, facts_of, optimizer_of, precision
from kontrast.training.step import Step
from kontrast.training.step_schedule import Position, schedule_of
from kontrast.views import keys


def timed(take, warm: int, steps: int) -> float:
    """Return the seconds per step after a warm-up."""
    for _ in range(warm):
        take()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        take()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def whole_step(recipe: Recipe, images: ImageSet, device: torch.device, steps: int) -> dict[str, float]:
    """Time kontrast's step, in an epoch in which prototypes are trained and queues are in use."""
    torch.manual_seed(0)
    learner = build_learner(recipe, device=device, **facts_of(images)).train()
    dtype = precision("auto", device)
    t = recipe.training
    step = Step(
        learner, optimizer_of(recipe, learner), build_views(recipe, dtype), device=device, precision=dtype,
        compile=True, clip=t.clip, clip_each=t.clip_each,
    )  # fmt: skip
    feeder = Feeder(images, batch=t.batch, seed=0, device=device)
    batches = (b for epoch in range(10_000) for b in feeder.batches(epoch))
    schedule = schedule_of(recipe, Position(100 * feeder.steps_per_epoch, 200 * feeder.steps_per_epoch, 10))

    def take() -> None:
        batch = next(batches)
        labels = batch.labels if t.labels else None
        step(batch.images, keys(0, 0, batch.indices), schedule, indices=batch.indices, labels=labels)

    seconds = timed(take, 30, steps)
    return {"seconds": seconds, "captured": step.captured, "bad": step.check() is not None}


def bare_step(recipe: Recipe, images: ImageSet, device: torch.device, steps: int) -> float:
    """Return the seconds of the networks' passes and the update on existing crops, compiled and captured."""
    torch.manual_seed(0)
    learner = build_learner(recipe, device=device, **facts_of(images)).train()
    optimizer, dtype, v, batch = optimizer_of(recipe, learner), precision("auto", device), recipe.views, recipe.training
    learner.compile_networks()

    def crops(count: int, size: int) -> torch.Tensor:
        shape = (count * batch.batch, 3, size, size)
        made = torch.rand(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        return made.unflatten(0, (count, -1))

    views, local = crops(v.count, v.size), crops(v.local_count, v.local_size) if v.local_count else None

    def take() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            if learner.teacher is not None:
                learner.teacher_keys(views, None)
            z = learner.predict(learner.projections(views, local))
        z.float().square().mean().backward()
        optimizer.step()

    for _ in range(3):
        take()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    return timed(graph.replay, 10, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["cifar10/swav-multi-crop", "cifar10/dino-multi-crop"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/methods.py needs a CUDA device: its steps are captured in graphs")
    device = torch.device("cuda")
    pixels, labels = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.arange(50_000) % 10
    images = ImageSet(images=pixels, names=[str(i) for i in range(50_000)], name="random", labels=labels)
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    print(f"{'recipe':<32}{'bare ms':>10}{'whole ms':>10}{'share':>8}")
    rows = []
    for name in arguments.recipes:
        recipe = resolve(name)
        with algorithms(deterministic=False):
            bare = bare_step(recipe, images, device, arguments.steps)
            torch.cuda.empty_cache()
            found = whole_step(recipe, images, device, arguments.steps)
        row = {"recipe": name, "bare ms": 1e3 * bare, "whole ms": 1e3 * found.pop("seconds"), **found}
        rows.append(row | {"share": row["bare ms"] / row["whole ms"]})
        print(f"{name:<32}{row['bare ms']:>10.2f}{row['whole ms']:>10.2f}{rows[-1]['share']:>8.3f}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({**facts, "steps": arguments.steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
