"""Race the losses of images and texts against open_clip's, and training against the bare step of both towers.

    python benchmarks/image_text.py [--pairs 32768] [--width 512] [--batch 256] [--parts losses training] [--json FILE]

Losses: forward and backward of normalization and loss, both directions, from bf16 features on a GPU (float32 on a CPU),
called from Python and, on a GPU, captured in a CUDA graph; memory is the peak beyond the features and their gradient.
The peer is open_clip's loss if it is installed, and beside it the same formula in plain torch: all logits in the type
of the features, once per direction, and cross-entropy (CLIP), or log-sigmoids of all pairs (SigLIP).

Training: images per second of kontrast's whole step (feeding, captions, views, towers, loss, update) beside forward,
backward and update of the same two towers on existing views and tokens, with a trivial loss.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from training import synchronize, timed  # benchmarks/training.py

from kontrast.config.overrides import apply_overrides
from kontrast.config.recipe import Recipe, read_recipe
from kontrast.config.recipe_files import load_tree
from kontrast.data import ImageSet
from kontrast.data.captions import Captions
from kontrast.networks.tokenizers import ByteTokenizer
from kontrast.objectives import objective
from kontrast.training.build import algorithms, build_feeder, build_learner, build_views, facts_of, optimizer_of
from kontrast.training.build import precision as precision_of
from kontrast.training.caption_batches import CaptionBatches, tokens_per_caption
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule
from kontrast.views import keys

SCALE, BIAS = 1 / 0.07, -10.0
OURS = {
    "CLIP": ("info-nce", {"symmetric": True, "temperature": "learned", "initial_temperature": 0.07}),
    "SigLIP": ("siglip", {}),
    "InfoLOOB": ("dcl", {"negatives": "cross-view", "temperature": 0.07}),
    "CACR": ("cacr", {"symmetric": True, "t_minus": 7.0}),
}


def plain_clip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """CLIP's loss by its formula."""
    labels = torch.arange(len(images), device=images.device)
    logits = scale * images @ texts.T
    return (cross_entropy(logits, labels) + cross_entropy(scale * texts @ images.T, labels)) / 2


def plain_siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP's loss by its formula."""
    logits = scale * images @ texts.T + bias
    signs = 2 * torch.eye(len(images), device=images.device, dtype=images.dtype) - 1
    return -logsigmoid(signs * logits).sum() / len(images)


def peers() -> dict[str, dict]:
    """Return the peers of each loss, by the name of the library."""
    found: dict[str, dict] = {"CLIP": {"plain torch": plain_clip}, "SigLIP": {"plain torch": plain_siglip}}
    try:
        import open_clip
    except ImportError:
        return found
    clip, siglip = open_clip.loss.ClipLoss(), open_clip.loss.SigLipLoss()
    found["CLIP"]["open_clip"] = lambda x, y, scale, bias: clip(x, y, scale)
    found["SigLIP"]["open_clip"] = lambda x, y, scale, bias: siglip(x, y, scale, bias)
    return found


def measure(take, device: torch.device, repeats: int) -> dict[str, float]:
    """Return milliseconds called from Python and captured, and the peak of memory in MiB, of a pass."""
    take()
    synchronize(device)
    found = {}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take()
        synchronize(device)
        found["MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    found["ms"] = 1000 * timed(take, 2, repeats, device)
    if device.type == "cuda":
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take()
            found["captured ms"] = 1000 * timed(graph.replay, 2, repeats, device)
            del graph
        except RuntimeError as error:
            print(f"not captured: {str(error).splitlines()[0]}")
        torch.cuda.empty_cache()
    return found


def race_losses(pairs: int, width: int, device: torch.device, repeats: int) -> list[dict]:
    """Time every loss of ours and of the peers on the same features."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    images, texts = (torch.randn(pairs, width, device=device).to(kind).requires_grad_() for _ in range(2))
    scale, bias = (torch.tensor(x, device=device, dtype=kind, requires_grad=True) for x in (SCALE, BIAS))
    rows = []

    def add(loss: str, library: str, compute) -> None:
        inputs = (images, texts, scale, bias)

        def take() -> None:
            for x in inputs:
                x.grad = None
            compute().backward()

        try:
            rows.append({"loss": loss, "library": library, **measure(take, device, repeats)})
        except torch.OutOfMemoryError:
            rows.append({"loss": loss, "library": library, "failed": "out of memory"})
            torch.cuda.empty_cache()
        print(
            "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v:<12}" for k, v in rows[-1].items()), flush=True
        )

    for name, (registered, arguments) in OURS.items():
        loss = objective(registered, **arguments).to(device)
        add(name, "kontrast", lambda loss=loss: loss(images, texts))
        for library, peer in peers().get(name, {}).items():
            add(name, library, lambda peer=peer: peer(normalize(images, dim=-1), normalize(texts, dim=-1), scale, bias))
    return rows


def made_pairs(count: int, side: int) -> ImageSet:
    """Return random pixels with five captions each, like Flickr8k in number and size."""
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    texts = (
        [f"a picture with the number {i} that has caption {k} of five in all" for k in range(5)] for i in range(count)
    )
    return ImageSet(pixels, [str(i) for i in range(count)], name="random", captions=Captions.of(texts))


def towers(recipe: Recipe, images: ImageSet, device: torch.device):
    torch.manual_seed(0)
    learner = build_learner(recipe, device=device, **facts_of(images))
    return learner.train(), optimizer_of(recipe, learner)


def bare_step(recipe: Recipe, images: ImageSet, device: torch.device, steps: int) -> float:
    """Return the seconds of forward, backward and update of both towers, captured on a GPU."""
    learner, optimizer = towers(recipe, images, device)
    dtype, size = precision_of("auto", device), recipe.views.size
    views = torch.rand(recipe.training.batch, 3, size, size, device=device, dtype=dtype)
    views = views.contiguous(memory_format=torch.channels_last)
    tokens = ByteTokenizer(tokens_per_caption(recipe.text))(images.captions.texts[: len(views)]).to(device)
    image_tower, text_tower = learner.student, learner.student.text
    if device.type == "cuda":
        image_tower, text_tower = (torch.compile(one, dynamic=False) for one in (image_tower, text_tower))

    def take() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            z = torch.cat([image_tower(views), text_tower(tokens)])
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


def whole_step(recipe: Recipe, images: ImageSet, device: torch.device, steps: int) -> dict:
    """Return the seconds of kontrast's whole step."""
    learner, optimizer = towers(recipe, images, device)
    dtype = precision_of("auto", device)
    step = Step(
        learner, optimizer, build_views(recipe, dtype), device=device, precision=dtype, compile=device.type == "cuda"
    )
    feeder = build_feeder(recipe, images, device)
    captions = CaptionBatches(images, ByteTokenizer(tokens_per_caption(recipe.text)), 0, device)
    batches = ((epoch, batch) for epoch in range(10_000) for batch in feeder.batches(epoch))

    def take() -> None:
        epoch, batch = next(batches)
        drawn = captions(epoch, batch.indices)
        view_keys = keys(0, epoch, batch.indices)
        step(batch.images, view_keys, Schedule(lr=1e-4), sizes=batch.sizes, tokens=drawn.tokens, labels=drawn.ids)

    return {"seconds": timed(take, 10, steps, device), "captured": step.captured, "bad": step.check() is not None}


def race_training(batch: int, count: int, steps: int, device: torch.device, overrides: list[str]) -> dict:
    """Return images per second of the bare step and of ours, for the recipe of Flickr8k."""
    changes = [f"training.batch={batch}", "data.source=digits", *overrides]
    recipe = read_recipe(apply_overrides(load_tree("flickr8k/clip"), changes))
    images = made_pairs(count, recipe.data.size)
    with algorithms(deterministic=False):
        bare = bare_step(recipe, images, device, steps)
        found = whole_step(recipe, images, device, steps)
    row = {
        "encoder": recipe.encoder.name,
        "batch": batch,
        "bare": batch / bare,
        "ours": batch / found["seconds"],
        **found,
    }
    row["share"] = row["ours"] / row["bare"]
    print(f"training: {row['ours']:,.0f} of {row['bare']:,.0f} images/s, share {row['share']:.3f}, {found}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=6_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--parts", nargs="+", choices=["losses", "training"], default=["losses", "training"])
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipe flickr8k/clip")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"torch": torch.__version__, "device": str(device), "pairs": arguments.pairs, "width": arguments.width}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    facts["date"] = time.strftime("%Y-%m-%d")
    if "training" in arguments.parts:
        found = race_training(arguments.batch, arguments.images, arguments.steps, device, arguments.set)
        facts |= {"encoder": found["encoder"], "batch": found["batch"]}
        facts |= {"images_per_second_of_the_bare_step": found["bare"], "of_the_whole_step": found["ours"]}
        facts["share_of_the_bare_step"] = found["share"]
    if "losses" in arguments.parts:
        facts["rows"] = race_losses(arguments.pairs, arguments.width, device, arguments.repeats)
    if arguments.json:
        arguments.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
