"""Images through a run's encoder to one embeddings file, part by part, so that a kill loses at most one part.

N images, B images of a batch, F width.  Beside the output lies OUT.parts while the work goes on:

    manifest.json          what the parts were made of; parts of another run or other images are thrown away
    part-000000.npy/.json  vectors [n,F], and their ids, names, the images left out, and the vectors' SHA-256

When all are there they are joined into OUT and removed. What a vector is depends on the images before it in its part
alone, so a run that was killed and resumed gives the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data import ImageSet
from kontrast.data.bad_images import check_bad
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.files import disk_faults, read_json, write_atomic, write_json
from kontrast.networks import Encoder
from kontrast.plugins import program
from kontrast.runs.embeddings_file import check_suffix, join, names_path, parquet
from kontrast.runs.image_stream import BATCH, Stream, StreamBatch, open_stream
from kontrast.runs.run import Run
from kontrast.training.checkpoints import versions
from kontrast.training.device import choose_device
from kontrast.training.progress import Progress
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals

PART = 16
"""Batches in a part: what a kill may cost."""


@dataclass(frozen=True)
class Embedded:
    """What `embed` did."""

    path: Path
    images: int
    width: int
    skipped: list[tuple[str, str]]


class Part(NamedTuple):
    """One finished part on disk."""

    vectors: Path
    ids: list[int]
    names: list[str]
    bad: list[tuple[str, str]]


def open_run(path: str | Path, float_range: tuple[float, float] | None = None) -> Run:
    """The run in a folder; one of a newer version is refused before its recipe is read by this version's rules. With a
    range, float images are read by it, whatever those that the run was trained on have."""
    run = Run(path)
    run.info  # noqa: B018
    if float_range is not None:
        run.recipe = replace(run.recipe, data=replace(run.recipe.data, float_range=float_range))
    return run


def embed(
    run: Run,
    data: str | Path | ImageSet,
    out: str | Path,
    *,
    split: str = "all",
    device: str = "auto",
    max_bad: float | None = None,
    batches: int = PART,
    say: Callable[[str], None] = print,
) -> Embedded:
    """Write the vectors of all images of `data` to `out`, .parquet or .npy; goes on where a killed one was cut."""
    out = Path(out)
    if check_suffix(out) == ".parquet":
        parquet()
    parts = out.with_name(f"{out.name}.parts")
    if out.exists() and not parts.exists():
        raise UsageError(f"{out} exists already: remove it, or give another --out")
    on = choose_device(device)
    encoder = run.encoder(on)
    stream = open_stream(run, data, split, say, max_bad)
    facts = identity(run, encoder, stream, on, batches)
    with held(parts):
        for torn in out.parent.glob(f".tmp-*-{glob.escape(out.name)}"):  # of one that was killed while it joined
            torn.unlink(missing_ok=True)
        begin(parts, facts, say)
        command = go_on(run, stream, out, split, max_bad, device)
        found = _fill(run, encoder, stream, parts, on, batches, command, say)
        bad = left_out(stream, found, run.recipe.data.max_bad if max_bad is None else max_bad)
        join(out, found, facts)
        shutil.rmtree(parts, ignore_errors=True)
    return Embedded(out, sum(len(p.ids) for p in found), facts["width"], bad)


@contextlib.contextmanager
def held(parts: Path) -> Iterator[None]:
    """The parts for this process alone; where no vector came to be, from which another one could go on, none stay."""
    with disk_faults(parts):
        parts.mkdir(parents=True, exist_ok=True)
    holder = RunFolder(parts)
    holder.hold()
    try:
        yield
    finally:
        if not holds_vectors(parts):
            shutil.rmtree(parts, ignore_errors=True)
        holder.release()


def go_on(run: Run, stream: Stream, out: Path, split: str, max_bad: float | None, device: str) -> str:
    """The command that goes on with the same vectors."""
    words = [*program(), "embed", str(run.path), stream.name, "--out", str(out)]
    words += [] if split == "all" else ["--split", split]
    words += [] if max_bad is None else ["--max-bad", str(max_bad)]
    words += [] if device == "auto" else ["--device", device]
    span = run.recipe.data.float_range
    words += [f"--float-range={','.join(map(str, span))}"] if span else []
    return shlex.join(words)


def left_out(stream: Stream, found: list[Part], allowed: float) -> list[tuple[str, str]]:
    """The images that could not be read; refused where they are more than is allowed, or all."""
    bad = [*stream.bad, *(pair for part in found for pair in part.bad)]
    total = stream.total + len(stream.bad)
    if len(bad) == total:
        raise DataError(f"none of the images of {stream.name} could be read: {bad[0][0]} ({bad[0][1]}), ...")
    check_bad(bad, total, allowed, stream.name)
    return bad


def encoder_digest(run: Run) -> str:
    """SHA-256 of the encoder's file: vectors of another encoder are other vectors."""
    path = run.path / "encoder.safetensors"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        raise CheckpointError(f"{path} is missing: the run has not finished; resume it first") from None


def identity(run: Run, encoder: Encoder, stream: Stream, device: torch.device, batches: int) -> dict[str, Any]:
    """All that the vectors are a function of."""
    span = run.recipe.data.float_range
    return ({"float_range": list(span)} if span else {}) | {
        "version": 1,
        "encoder": encoder_digest(run),
        "recipe": run.info.get("fingerprint", ""),
        "view": repr(run.transform()),
        "data": stream.fingerprint,
        "images": stream.total,
        "width": encoder.width,
        "batch": BATCH,
        "batches": batches,
        "device": device.type,
        "torch": versions()["torch"],
    }


def begin(parts: Path, facts: dict[str, Any], say: Callable[[str], None]) -> None:
    """Keep the parts that are there where they are of the same work, else remove them."""
    place = parts / "manifest.json"
    try:
        same = read_json(place) == facts if place.exists() else None
    except CheckpointError:
        same = False
    if same is False:
        say(f"{parts} holds parts of another run, of other images or of another version: starting afresh")
        for old in parts.glob("part-*"):
            old.unlink()
    if not same:
        write_json(place, facts)


def holds_vectors(parts: Path) -> bool:
    """Whether some image's vector is in a finished part."""
    for path in sorted(parts.glob("part-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads(path.read_bytes())["ids"]:
                return True
    return False


def part_path(parts: Path, number: int, suffix: str) -> Path:
    return parts / f"part-{number:06d}.{suffix}"


def read_part(parts: Path, number: int) -> Part | None:
    """A finished part, its vectors verified; None where it is missing, torn or damaged and must be made again."""
    vectors, about = part_path(parts, number, "npy"), part_path(parts, number, "json")
    try:
        facts = json.loads(about.read_bytes())
        if hashlib.sha256(vectors.read_bytes()).hexdigest() != facts["sha256"]:
            return None
        return Part(vectors, facts["ids"], facts["names"], [(n, r) for n, r in facts["bad"]])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_part(parts: Path, number: int, vectors: Tensor, made: list[StreamBatch]) -> Part:
    """The vectors first, then the file that says they are whole."""
    buffer = io.BytesIO()
    np.save(buffer, vectors.numpy())
    path = part_path(parts, number, "npy")
    write_atomic(path, buffer.getvalue())
    facts: dict[str, Any] = {
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "ids": [i for batch in made for i in batch.ids],
        "names": [str(n) for batch in made for n in batch.images.names],
        "bad": [pair for batch in made for pair in batch.bad],
    }
    write_atomic(part_path(parts, number, "json"), json.dumps(facts))
    return Part(path, facts["ids"], facts["names"], facts["bad"])


def _fill(
    run: Run, encoder: Any, stream: Stream, parts: Path, device: torch.device, batches: int, command: str, say: Callable
) -> list[Part]:
    """All parts in order; those that are not there yet are made."""
    found = {n: read_part(parts, n) for n in range(-(-stream.steps // batches))}
    missing = [n for n, part in found.items() if part is None]
    if len(missing) < len(found):
        say(f"going on: {len(found) - len(missing)} of {len(found)} parts are there")
    done = sum(len(part.ids) + len(part.bad) for part in found.values() if part)
    transform = run.transform()
    with StopSignals() as stop, Progress("embed", stream.total, done=done) as bar:
        stop.patient = True
        for first, last in stretches(missing):
            rows: list[Tensor] = []
            made: list[StreamBatch] = []
            for batch in stream.batches(first * batches, min((last + 1) * batches, stream.steps)):
                rows.append(encode(encoder, batch.images, transform, device))
                made.append(batch)
                bar.advance(len(batch.ids) + len(batch.bad))
                if len(made) == batches or batch.number + 1 == stream.steps:
                    number = batch.number // batches
                    found[number] = write_part(parts, number, torch.cat(rows), made)
                    rows, made = [], []
                if stop.asked is not None:
                    raise stop.error(f"part {sum(map(bool, found.values()))} of {len(found)}", command)
    return [part for part in found.values() if part]


def stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """[0, 1, 2, 5] as (0, 2), (5, 5): what can be read in one go."""
    start = None
    for place, number in enumerate(numbers):
        start = number if start is None else start
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield start, number
            start = None


@torch.inference_mode()
def encode(encoder: Encoder, images: ImageSet, transform: Any, device: torch.device) -> Tensor:
    """Vectors float32 [B,F] on the CPU of a batch of images; each picture at its own size, whatever is beside it."""
    if not len(images):
        return torch.empty(0, encoder.width)
    pictures = []
    for positions, pixels, sizes in images.iter_chunks(torch.arange(len(images))):
        sizes = None if sizes is None else sizes.to(device)
        pictures.append(transform(pixels.to(device), positions.to(device), sizes)[0])
    return encoder(torch.cat(pictures)).float().cpu()


def own_embeddings(run: Run, device: str, say: Callable[[str], None]) -> Path:
    """RUN/embeddings/train.npy, made where it is missing or of an encoder or images that have changed since."""
    folder = run.path / "embeddings"
    vectors, about = folder / "train.npy", folder / "embeddings.json"
    train = run.data("train")
    facts = {"version": 1, "encoder": encoder_digest(run), "data": train.fingerprint}
    try:
        if vectors.exists() and read_json(about) == facts:
            return vectors
    except CheckpointError:
        pass
    say(f"embedding the {len(train):,} train images of the run into {vectors}")
    with disk_faults(folder):
        folder.mkdir(exist_ok=True)
        for old in (about, vectors, names_path(vectors)):
            old.unlink(missing_ok=True)
    embed(run, train, vectors, device=device, say=say)
    write_json(about, facts)
    return vectors
