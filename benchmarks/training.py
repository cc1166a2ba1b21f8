"""Compare training end to end with the bare network step (compiled, captured) and with lightly's loop.

    python benchmarks/training.py [--encoder resnet-18 small-alexnet] [--batch 512] [--steps 100] [--json FILE] [--peer]

All numbers are views per second with the same network and batch. The bare step is forward, backward and SGD on existing
views: the most that any input pipeline could reach. Images are random pixels of CIFAR-10's size and number. lightly
reads them from PNG files with its own transform, PyTorch's DataLoader and its own loss, in two loops: as in its
documentation (8 workers, float32, one forward pass per view), and with everything that helps it (all cores, bf16,
channels-last, one forward pass, and cuDNN's benchmark mode, which the bare step and ours have too).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from kontrast.config.recipe import read_recipe
from kontrast.data import Feeder, ImageSet
from kontrast.optim.optimizers import build_optimizer
from kontrast.training.build import algorithms, build_views, precision
from kontrast.training.learner import Learner
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import keys

HEADS = {"small-alexnet": {"name": "fc8"}}


def recipe_for(encoder: str, batch: int):
    stem = {"stem": "cifar"} if encoder.startswith("resnet") else {}
    return read_recipe(
        {
            "encoder": {"name": encoder, **stem},
            "head": HEADS.get(encoder, {"name": "simclr"}),
            "views": {"policy": "simclr-cifar", "count": 2, "size": 32},
            "training": {"batch": batch},
        }
    )


def parts(recipe, device):
    torch.manual_seed(0)
    learner = Learner(recipe).to(device).to(memory_format=torch.channels_last)
    return learner, build_optimizer(learner, "sgd", 0.06, momentum=0.9, weight_decay=5e-4)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(take, warm: int, steps: int, device: torch.device) -> float:
    """Return the seconds per step after a warm-up."""
    for _ in range(warm):
        take()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        take()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def end_to_end(recipe, images: ImageSet, device: torch.device, steps: int) -> dict[str, float]:
    """Time kontrast's whole step: feeding, views, network, objective, optimizer."""
    began = time.perf_counter()
    learner, optimizer = parts(recipe, device)
    dtype = precision("auto", device)
    views = build_views(recipe, dtype)
    step = Step(learner, optimizer, views, device=device, precision=dtype, compile=device.type == "cuda")
    feeder = Feeder(images, batch=recipe.training.batch, seed=0, device=device)
    batches = (b for epoch in range(10_000) for b in feeder.batches(epoch))

    def take() -> None:
        batch = next(batches)
        step(batch.images, keys(0, 0, batch.indices), Schedule(lr=0.06), sizes=batch.sizes)

    learner.train()
    take()
    synchronize(device)
    first = time.perf_counter() - began
    seconds = timed(take, 10, steps, device)
    return {"seconds": seconds, "first_step": first, "captured": step.captured, "bad": step.check() is not None}


def bare(recipe, device: torch.device, steps: int) -> float:
    """Return the seconds of forward, backward and update on existing views, captured on CUDA."""
    learner, optimizer = parts(recipe, device)
    dtype = precision("auto", device)
    learner.train()
    shape = (2 * recipe.training.batch, 3, 32, 32)
    views = torch.rand(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    network = torch.compile(learner.student) if device.type == "cuda" else learner.student

    def take() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            z = network(views)
        z.float().square().mean().backward()
        optimizer.step()

    for _ in range(3):
        take()
    if device.type != "cuda":
        return timed(take, 1, steps, device)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    return timed(graph.replay, 10, steps, device)


class PNGFiles(torch.utils.data.Dataset):
    """PNG files with lightly's transform, repeated up to `length`."""

    def __init__(self, folder: Path, count: int, length: int):
        from lightly.transforms import SimCLRTransform
        from PIL import Image

        self.transform, self.length = SimCLRTransform(input_size=32, gaussian_blur=0.0), length
        self.paths = [folder / f"{i}.png" for i in range(count)]
        for path, picture in zip(self.paths, torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8).numpy()):
            Image.fromarray(picture).save(path)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int):
        from PIL import Image

        return self.transform(Image.open(self.paths[i % len(self.paths)]).convert("RGB"))


def peer(recipe, device: torch.device, steps: int, helped: bool, count: int = 512) -> float:
    """Return the seconds per step of lightly's loop, as documented or helped by all cores, bf16 and so on."""
    from lightly.loss import NTXentLoss

    batch, workers = recipe.training.batch, (os.cpu_count() or 1) if helped else 8
    learner, _ = parts(recipe, device)
    student = learner.student if helped else learner.student.to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.SGD(student.parameters(), 0.06, momentum=0.9, weight_decay=5e-4)
    torch.backends.cudnn.benchmark = helped
    loss_function, dtype = NTXentLoss(temperature=0.2), precision("auto", device) if helped else torch.float32
    warm = 2 * workers + 3  # each worker prefetches two batches: only later steps show the loop's own pace
    with tempfile.TemporaryDirectory() as folder:
        pictures = PNGFiles(Path(folder), count, (steps + warm + 1) * batch)
        loader = torch.utils.data.DataLoader(pictures, batch, num_workers=workers, drop_last=True, pin_memory=helped)
        batches = iter(loader)

        def take() -> None:
            views = [x.to(device, non_blocking=True) for x in next(batches)]
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                z0, z1 = student(torch.cat(views)).chunk(2) if helped else [student(x) for x in views]
            loss = loss_function(z0.float(), z1.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return timed(take, warm, steps, device)


def race(name: str, images: ImageSet, device: torch.device, batch: int, steps: int, peers: bool) -> dict[str, object]:
    """Return the views per second of one encoder: the bare step, ours and, with `peers`, lightly's two loops."""
    recipe, views = recipe_for(name, batch), 2 * batch
    with algorithms(deterministic=False):
        limit = views / bare(recipe, device, steps)
        found = end_to_end(recipe, images, device, steps)
    ours = views / found["seconds"]
    row: dict[str, object] = {"encoder": name, "bare": limit, "ours": ours, "share": ours / limit, **found}
    if peers:
        row["peer"], row["helped_peer"] = (views / peer(recipe, device, steps, helped) for helped in (False, True))
    return row


def line_of(row: dict) -> str:
    peers = "".join(f"{row[p]:>10,.0f}{row['ours'] / row[p]:>10.1f}" for p in ("peer", "helped_peer") if p in row)
    start = f"{row['encoder']:<15}{row['bare']:>10,.0f}{row['ours']:>10,.0f}{row['share']:>10.3f}"
    return f"{start}{row['first_step']:>10.1f}{peers}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--encoder", nargs="+", default=["resnet-18", "small-alexnet"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--peer", action="store_true", help="race lightly too (it must be installed)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels = torch.randint(0, 256, (arguments.images, 3, 32, 32), dtype=torch.uint8)
    images = ImageSet(images=pixels, names=[str(i) for i in range(arguments.images)], name="random")
    facts = {"torch": torch.__version__, "device": str(device), "batch": arguments.batch, "steps": arguments.steps}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    facts["date"] = time.strftime("%Y-%m-%d")
    heads = ("bare v/s", "ours v/s", "share", "first s", "lightly", "ratio", "helped", "ratio")
    print(f"{'encoder':<15}" + "".join(f"{head:>10}" for head in heads))
    rows = []
    for name in arguments.encoder:
        rows.append(race(name, images, device, arguments.batch, arguments.steps, arguments.peer))
        print(line_of(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
