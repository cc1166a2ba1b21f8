"""Embed on a Ray cluster: each worker computes whole parts, and the command writes and joins them.

The parts are those of `embed` in one process, of the same images and batches, so the file is the same to the bit.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from kontrast.engines.ray_pool import Pool
from kontrast.errors import DataError
from kontrast.runs.embed import PartContent, Progressed, compute_parts, dependencies
from kontrast.runs.image_stream import open_stream
from kontrast.runs.run import Run, open_run
from kontrast.training.device import choose_device


def parts_on_ray(
    pool: Pool, run: Run, data: str, split: str, max_bad: float | None, facts: dict[str, Any], numbers: list[int]
) -> Generator[Progressed, None, None]:
    """Compute parts in the workers of a pool.

    Args:
        pool: The connected pool.
        run: The run.
        data: The place of the images, which the workers can read too.
        split: Which split of them.
        max_bad: The share of unreadable images that is allowed; None: the recipe's.
        facts: What the vectors depend on, here; that of every worker has to be the same.
        numbers: The numbers of the parts.
    """
    part_maker = PartMaker(
        str(run.path), run.recipe.data.float_range, data, split, max_bad, pool.device, pool.threads,
        pool.cores, facts,
    )  # fmt: skip
    for finished in pool.apply(part_maker, numbers) if numbers else ():
        if finished is None:
            yield 0, None
            continue
        number, result = finished
        content = PartContent(result["vectors"], json.loads(result["facts"]))
        yield len(content.facts["ids"]) + len(content.facts["bad"]), (number, content)


@dataclass
class PartMaker:
    """Opens the run and the images in a worker: `make = PartMaker(...)(); make(number)` is one part, as bytes."""

    run: str
    float_range: Any
    data: str
    split: str
    max_bad: float | None
    device: str
    threads: int
    decoders: int
    facts: dict[str, Any]

    def __call__(self) -> Callable[[int], dict[str, bytes]]:
        torch.set_num_threads(self.threads)  # with another number of threads, sums may differ in their last bits
        device, run = choose_device(self.device), open_run(self.run, self.float_range)
        network = run.encoder(device)
        stream = open_stream(run, self.data, self.split, lambda line: None, self.max_bad, self.decoders)
        own = dependencies(run, network, stream, device)
        if wrong := [name for name, fact in self.facts.items() if own.get(name) != fact]:
            here = f"{socket.gethostname()} has another {wrong[0]} than the command ({own.get(wrong[0])})"
            raise DataError(f"{here}: the workers need the same images, run and packages at the same places")

        def make(number: int) -> dict[str, bytes]:
            progress = compute_parts(run, network, stream, device, [number])
            [content] = [finished[1] for _, finished in progress if finished]
            return {"vectors": content.vectors, "facts": json.dumps(content.facts).encode()}

        return make
