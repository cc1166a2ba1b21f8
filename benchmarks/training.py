"""Views per second end to end, beside the bare network step (compiled, captured) and beside lightly's loop.

    python benchmarks/training.py [--encoder resnet-18 small-alexnet] [--batch 512] [--steps 100] [--json FILE] [--peer]

Same network, same batch, one run. The bare step is forward, backward and SGD on ready-made views: the most that any
input pipeline could reach. Images are random pixels of CIFAR-10's size and number; lightly reads them from PNG files
through its own transform, PyTorch's DataLoader with all cores, and its own loss.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from kontrast.data import Feeder, ImageSet
from kontrast.settings import read_recipe
from kontrast.training.learner import Learner
from kontrast.training.loop import build_views, precision
from kontrast.training.optimizers import build_optimizer
from kontrast.training.step import Step
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


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(take, warm: int, steps: int, device: torch.device) -> float:
    """Seconds a step, after warm-up."""
    for _ in range(warm):
        take()
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        take()
    synchronise(device)
    return (time.perf_counter() - start) / steps


def end_to_end(recipe, images: ImageSet, device: torch.device, steps: int) -> dict[str, float]:
    """The program's own step: feeding, views, network, objective, optimizer."""
    began = time.perf_counter()
    learner, optimizer = parts(recipe, device)
    dtype = precision("auto", device)
    views = build_views(recipe, dtype)
    step = Step(learner, optimizer, views, device=device, precision=dtype, compile=device.type == "cuda")
    feeder = Feeder(images, batch=recipe.training.batch, seed=0, device=device)
    batches = (b for epoch in range(10_000) for b in feeder.batches(epoch))

    def take() -> None:
        batch = next(batches)
        step(batch.images, keys(0, 0, batch.indices), batch.sizes, 0.06, 1.0)

    learner.train()
    take()
    synchronise(device)
    first = time.perf_counter() - began
    seconds = timed(take, 10, steps, device)
    return {"seconds": seconds, "first_step": first, "captured": step.captured, "bad": step.check() is not None}


def bare(recipe, device: torch.device, steps: int) -> float:
    """Forward, backward and update alone, on views that lie ready; captured where there is CUDA."""
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


def peer(recipe, device: torch.device, steps: int, count: int) -> float:
    """lightly as its examples have it: SimCLRTransform, DataLoader over all cores, NTXentLoss, autocast on CUDA."""
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform
    from PIL import Image

    learner, _ = parts(recipe, device)
    optimizer = torch.optim.SGD(learner.student.parameters(), 0.06, momentum=0.9, weight_decay=5e-4)
    judge, dtype = NTXentLoss(temperature=0.2), precision("auto", device)
    transform = SimCLRTransform(input_size=32, gaussian_blur=0.0)
    pictures = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8).numpy()

    class Pictures(torch.utils.data.Dataset):
        def __init__(self, folder: Path):
            self.paths = [folder / f"{i}.png" for i in range(count)]
            for path, picture in zip(self.paths, pictures):
                Image.fromarray(picture).save(path)

        def __len__(self) -> int:
            return (steps + 2 * (os.cpu_count() or 1) + 4) * recipe.training.batch

        def __getitem__(self, i: int):
            return transform(Image.open(self.paths[i % count]).convert("RGB"))

    with tempfile.TemporaryDirectory() as folder:
        loader = torch.utils.data.DataLoader(
            Pictures(Path(folder)), recipe.training.batch, num_workers=os.cpu_count(), drop_last=True, pin_memory=True
        )
        batches = iter(loader)

        def take() -> None:
            x0, x1 = next(batches)
            x = torch.cat([x0, x1]).to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                z0, z1 = learner.student(x).chunk(2)
            loss = judge(z0.float(), z1.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # Workers run ahead by two batches each: only past those does the loop run at the pace it can keep.
        return timed(take, 2 * (os.cpu_count() or 1) + 3, steps, device)


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
    rows = []
    print(f"{'encoder':<15}{'bare v/s':>12}{'ours v/s':>12}{'share':>8}{'first s':>9}{'peer v/s':>11}{'ratio':>8}")
    for name in arguments.encoder:
        recipe = recipe_for(name, arguments.batch)
        views = 2 * arguments.batch
        limit = views / bare(recipe, device, arguments.steps)
        found = end_to_end(recipe, images, device, arguments.steps)
        ours = views / found["seconds"]
        theirs = views / peer(recipe, device, arguments.steps, 512) if arguments.peer else float("nan")
        rows.append({"encoder": name, "bare": limit, "ours": ours, "share": ours / limit, "peer": theirs, **found})
        print(
            f"{name:<15}{limit:>12,.0f}{ours:>12,.0f}{ours / limit:>8.3f}{found['first_step']:>9.1f}"
            f"{theirs:>11,.0f}{ours / theirs:>8.1f}",
            flush=True,
        )
    if arguments.json:
        facts = {"torch": torch.__version__, "device": str(device), "batch": arguments.batch, "steps": arguments.steps}
        if device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({**facts, "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
