"""Write the vectors of many images to one embeddings file, part by part, so that a kill loses at most one part.

N images, B images of a batch, F width.  While the work goes on, the folder OUT.parts beside the output holds:

    manifest.json          what the vectors depend on; parts of another run or of other images are discarded
    part-000000.npy/.json  vectors [n,F], and their ids, names, skipped images and SHA-256

When all parts exist they are joined into OUT and removed. A vector depends only on the images before it in its part, so
an interrupted and resumed command writes the same bytes as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data import ImageSet
from kontrast.data.bad_images import check_bad, skipped
from kontrast.engines.ray_cluster import Cluster, check_engine
from kontrast.engines.ray_pool import Pool
from kontrast.errors import CheckpointError, DataError, UsageError, printable
from kontrast.files import disk_faults, read_json, remove_folder, write_atomic, write_json
from kontrast.plugins import command_start
from kontrast.probes import extract_features
from kontrast.runs.embeddings_file import Part, check_suffix, import_parquet, names_path, write_embeddings
from kontrast.runs.image_stream import BATCH, Stream, StreamBatch, open_stream
from kontrast.runs.run import Run, open_run
from kontrast.training.checkpoints import versions
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals

BATCHES_PER_PART = 16
"""A kill loses at most the work on so many batches."""


class PartContent(NamedTuple):
    """What a part consists of: the bytes of its .npy file, and the facts of its JSON file."""

    vectors: bytes
    facts: dict[str, Any]


Progressed = tuple[int, tuple[int, PartContent] | None]
"""How many images were read since the last time, and the number and content of a part that is complete now."""
Compute = Callable[[list[int]], Generator[Progressed, None, None]]
"""Computes the parts with these numbers, in any order."""


@dataclass(frozen=True)
class EmbedResult:
    """The embeddings file that `embed` wrote: `images` vectors of `width` numbers; skipped: (name, reason) pairs."""

    path: Path
    images: int
    width: int
    skipped: list[tuple[str, str]]

    def __str__(self) -> str:
        return f"{self.images:,} vectors of width {self.width}\nout     {printable(str(self.path))}"

    def to_dict(self) -> dict[str, Any]:
        return {"out": str(self.path), "images": self.images, "width": self.width, "skipped": len(self.skipped)}


def embed(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | ImageSet,
    out: str | os.PathLike[str],
    *,
    split: str = "all",
    device: str = "auto",
    max_bad: float | None = None,
    float_range: tuple[float, float] | None = None,
    engine: str = "local",
    workers: int | None = None,
    say: Callable[[str], None] = print,
) -> EmbedResult:
    """Write the encoder's vector of every image of `data` to a file. Call it again to continue after a kill.

    Args:
        run: A run folder or a `kontrast.Run`.
        data: A folder, a named set, shards, or a packed store.
        out: The file to write, .npy or .parquet; it must not exist yet.
        split: "all" (default), "train" or "test".
        device: "auto" (default), "cpu" or "cuda".
        max_bad: The share of unreadable images that is allowed; default: the recipe's.
        float_range: The values of black and white in float images; default: the recipe's.
        engine: "local" (default) for this process, or "ray" for the workers of a Ray cluster: the one that RAY_ADDRESS
            names, or one on this machine for the time of the call.
        workers: With Ray, the number of processes; default: one per GPU, or as many as the cores allow.
        say: Called with each line of progress and each warning; default: print.

    Returns:
        The path, the number of vectors, their width and the images that were skipped.

    Example:
        >>> import kontrast
        >>> result = kontrast.embed("runs/digits", "photos", "vectors.npy", device="cpu")
        >>> print(result)
        240 vectors of width 32
        out     vectors.npy
    """
    on_ray = check_engine(engine, workers)
    run, out = open_run(run, float_range), Path(out)
    check_suffix(out)
    if out.suffix == ".parquet":
        import_parquet()
    refuse_existing(out)
    if on_ray and isinstance(data, ImageSet):
        raise UsageError("engine='ray' needs a place of images that the workers can read, not images in memory")
    on = torch.device("cpu") if on_ray else choose_device(device)
    encoder = run.encoder(on)
    place = data if isinstance(data, ImageSet) else os.fspath(data)
    stream = open_stream(run, place, split, say, max_bad)
    command = resume_command(run, stream, out, split, max_bad, device)
    compute: Compute = partial(compute_parts, run, encoder, stream, on)
    facts = dependencies(run, encoder, stream, on)
    with contextlib.ExitStack() as stack:
        if on_ray:
            from kontrast.runs.embed_on_ray import parts_on_ray

            pool = Pool(stack.enter_context(Cluster(workers)), workers, device, say)
            command += f" --engine ray --workers {pool.workers}"
            facts["device"] = pool.device
            compute = partial(parts_on_ray, pool, run, str(place), split, max_bad, facts)
        images, bad = write_in_parts(run, stream, out, write_embeddings, facts, command, max_bad, compute, say)
    return EmbedResult(out, images, encoder.width, bad)


def refuse_existing(out: Path) -> None:
    """Raise if the output exists, unless its parts do too: then it was interrupted while they were joined."""
    if out.exists() and not parts_of(out).exists():
        raise UsageError(f"{out} already exists: remove it, or give another --out")


def parts_of(out: Path) -> Path:
    """Return the folder of parts beside an output."""
    return out.with_name(f"{out.name}.parts")


def write_in_parts(
    run: Run,
    stream: Stream,
    out: Path,
    write: Callable[[Path, Sequence[Part], dict[str, Any]], None],
    facts: dict[str, Any],
    command: str,
    max_bad: float | None,
    compute: Compute,
    say: Callable[[str], None],
) -> tuple[int, list[tuple[str, str]]]:
    """Compute the vectors of all images of a stream, part by part, and join the parts into `out`.

    Args:
        run: The run, whose recipe says which share of the images may be unreadable.
        stream: The images.
        out: The file to write.
        write: `write(out, parts, facts)` joins the parts.
        facts: Everything that determines the vectors; parts with other facts are discarded.
        command: The command that continues after an interruption.
        max_bad: The share of unreadable images that is allowed; None: the recipe's.
        compute: Computes parts by their numbers.
        say: Called with each line of progress and each warning.

    Returns:
        The number of vectors, and (name, reason) of the images that were skipped.
    """
    parts = parts_of(out)
    with lock_parts(parts):
        for torn in out.parent.glob(f".tmp-*-{glob.escape(out.name)}"):  # left by a kill while the parts were joined
            torn.unlink(missing_ok=True)
        discard_outdated(parts, facts, say)
        done = _finish_parts(stream, parts, compute, command, say)
        bad = _check_skipped(stream, done, run.recipe.data.max_bad if max_bad is None else max_bad)
        write(out, done, facts)
        remove_folder(parts)
    images = sum(len(part.ids) for part in done)
    if bad:
        say(skipped(bad, images + len(bad)))
    return images, bad


def dependencies(run: Run, network: Any, stream: Stream, device: torch.device) -> dict[str, Any]:
    """Everything that determines the vectors, as manifest.json stores it."""
    float_range = run.recipe.data.float_range
    return ({"float_range": list(float_range)} if float_range else {}) | {
        "version": 1,
        "encoder": run.encoder_digest(),
        "recipe": run.info.get("fingerprint", ""),
        "view": repr(run.transform()),
        "data": stream.fingerprint,
        "images": stream.total,
        "width": network.width,
        "batch": BATCH,
        "batches": BATCHES_PER_PART,
        "device": device.type,
        "torch": versions()["torch"],
    }


@contextlib.contextmanager
def lock_parts(parts: Path) -> Iterator[None]:
    """Create and lock the folder of parts; remove it at the end if it holds no vector to continue from."""
    with disk_faults(parts):
        parts.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(parts)
    folder.hold()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the vectors may be complete, and parts that stay do no harm
            finished = (read_part(path) for path in sorted(parts.glob("part-*.json")))
            if not any(part and part.ids for part in finished):
                remove_folder(parts)
        folder.release()


def discard_outdated(parts: Path, facts: dict[str, Any], say: Callable[[str], None]) -> None:
    """Remove parts that depend on other facts than these, and write the manifest."""
    manifest = parts / "manifest.json"
    with contextlib.suppress(CheckpointError):  # missing or damaged
        if read_json(manifest) == facts:
            return
    if manifest.exists():
        say(f"{parts} holds parts of another run, other images or another version: starting over")
    for old in parts.glob("part-*"):
        old.unlink()
    write_json(manifest, facts)


def resume_command(
    run: Run, stream: Stream, out: Path, split: str, max_bad: float | None, device: str, verb: str = "embed"
) -> str:
    words = [*command_start(), verb, str(run.path), stream.name, "--out", str(out)]
    words += [] if split == "all" else ["--split", split]
    words += [] if max_bad is None else ["--max-bad", str(max_bad)]
    words += [] if device == "auto" else ["--device", device]
    float_range = run.recipe.data.float_range
    words += [f"--float-range={','.join(map(str, float_range))}"] if float_range else []
    return shlex.join(words)


def _finish_parts(stream: Stream, parts: Path, compute: Compute, command: str, say: Callable) -> list[Part]:
    """Return all parts in order, computing those that can't be read."""
    count = -(-stream.steps // BATCHES_PER_PART)
    done = {number: part for number in range(count) if (part := read_part(part_path(parts, number)))}
    if done:
        say(f"continuing: {len(done)} of {count} parts are done")
    embedded = sum(len(part.ids) + len(part.bad) for part in done.values())
    missing = [number for number in range(count) if number not in done]
    with StopSignals() as stop, Progress("embed", stream.total, done=embedded) as bar:
        stop.patient = True
        with contextlib.closing(compute(missing)) as progress:
            for images, finished in progress:
                if images:
                    bar.advance(images)
                if finished is not None:
                    number, content = finished
                    done[number] = write_part(part_path(parts, number), content)
                if stop.signal is not None:
                    raise stop.error(f"part {len(done)} of {count}", command)
    return [done[number] for number in range(count)]


def compute_parts(
    run: Run, network: Any, stream: Stream, device: torch.device, numbers: list[int]
) -> Generator[Progressed, None, None]:
    """Apply a network to the images of some parts of a stream, and yield each part after its last batch.

    Args:
        run: The run, whose view prepares the images.
        network: A module with the attribute `width`, the length of its vectors.
        stream: The images.
        device: Where the network is.
        numbers: The numbers of the parts, in ascending order.
    """
    size, transform = BATCHES_PER_PART, run.transform()
    for first, last in spans(numbers):
        rows: list[Tensor] = []
        batches: list[StreamBatch] = []
        for batch in stream.batches(first * size, min(last * size, stream.steps)):
            if batch.ids:
                rows.append(extract_features(network, batch.images, transform, device=device))
            batches.append(batch)
            finished = None
            if len(batches) == size or batch.number + 1 == stream.steps:
                vectors = torch.cat(rows) if rows else torch.empty(0, network.width)
                finished = batch.number // size, part_content(vectors, batches)
                rows, batches = [], []
            yield len(batch.ids) + len(batch.bad), finished


def spans(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive numbers begins, and the number after its end: [1, 2, 5] is (1, 3), (5, 6)."""
    starts = [number for place, number in enumerate(numbers) if place == 0 or numbers[place - 1] + 1 != number]
    ends = [number + 1 for place, number in enumerate(numbers) if numbers[place + 1 : place + 2] != [number + 1]]
    yield from zip(starts, ends)


def _check_skipped(stream: Stream, parts: list[Part], allowed: float) -> list[tuple[str, str]]:
    """Return the images that could not be read; more than the allowed share, or all, is an error."""
    bad = [*stream.bad, *(pair for part in parts for pair in part.bad)]
    total = stream.total + len(stream.bad)
    if len(bad) == total:
        raise DataError(f"none of the images of {stream.name} could be read: {bad[0][0]} ({bad[0][1]}), ...")
    check_bad(bad, total, allowed, stream.name)
    return bad


def part_path(parts: Path, number: int) -> Path:
    """Return the path of a part's JSON file; its vectors have the same name with .npy."""
    return parts / f"part-{number:06d}.json"


def read_part(path: Path) -> Part | None:
    """Read a finished part and verify its vectors; None if it is missing or damaged and must be computed again."""
    vectors = path.with_suffix(".npy")
    try:
        facts = json.loads(path.read_bytes())
        if hashlib.sha256(vectors.read_bytes()).hexdigest() != facts["sha256"]:
            return None
        return Part(vectors, facts["ids"], facts["names"], [(n, r) for n, r in facts["bad"]])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def part_content(vectors: Tensor, batches: list[StreamBatch]) -> PartContent:
    """Return what is written for a part: its vectors, and their ids, names and skipped images."""
    buffer = io.BytesIO()
    np.save(buffer, vectors.numpy())
    return PartContent(buffer.getvalue(), {
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "ids": [i for batch in batches for i in batch.ids],
        "names": [str(n) for batch in batches for n in batch.images.names],
        "bad": [pair for batch in batches for pair in batch.bad],
    })  # fmt: skip


def write_part(path: Path, content: PartContent) -> Part:
    """Write the vectors first, then the JSON file that marks them as complete."""
    vectors, facts = path.with_suffix(".npy"), content.facts
    write_atomic(vectors, content.vectors)
    write_atomic(path, json.dumps(facts))
    return Part(vectors, facts["ids"], facts["names"], facts["bad"])


def train_embeddings(run: Run, device: str, say: Callable[[str], None]) -> Path:
    """Return RUN/embeddings/train.npy, computed if it is missing or if the encoder or the images have changed."""
    folder = run.path / "embeddings"
    vectors, about = folder / "train.npy", folder / "embeddings.json"
    train = run.data("train")
    facts = {"version": 1, "encoder": run.encoder_digest(), "data": train.fingerprint}
    with contextlib.suppress(CheckpointError):
        if vectors.exists() and read_json(about) == facts:
            return vectors
    say(f"embedding the {len(train):,} train images of the run into {vectors}")
    with disk_faults(folder):
        folder.mkdir(exist_ok=True)
        for old in (about, vectors, names_path(vectors)):
            old.unlink(missing_ok=True)
    embed(run, train, vectors, device=device, say=say)
    write_json(about, facts)
    return vectors
