"""The commands that look at a run and take from it: lens, embed, neighbors, duplicates, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.terminal import Device, FloatRange, Json, MaxBad, emit, say, two_numbers, write_page

RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (lens, embed, neighbors, duplicates, export):
        app.command()(function)


def lens(
    target: Annotated[Path, typer.Argument(help="A run folder, or an embeddings file (.npy, .parquet).")],
    images: Annotated[int, typer.Option(help="Images (or rows) to look at.")] = 1024,
    augmentations: Annotated[int, typer.Option(help="Augmentations of each image.")] = 8,
    labels: Annotated[Path | None, typer.Option(help="For a file: a CSV with columns name,label.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms, weights."""
    from kontrast.registry import UsageError
    from kontrast.training.looking import look, look_at_file, write_lens

    if target.is_dir():
        from kontrast.training.embedding import opened

        if labels is not None:
            raise UsageError("--labels is for an embeddings file; a run's images carry their own")
        folder = target
        tree = look(opened(target), images=images, augmentations=augmentations, device=device, say=say)
    else:
        tree = look_at_file(target, labels, images)
        folder = write_lens(target, tree)
    page = write_page([folder], folder / "report.html")
    lines = [*number_table(tree["numbers"]), f"lens    {folder / 'lens.json'}", f"report  {page}"]
    facts = {"lens": str(folder / "lens.json"), "report": str(page)}
    emit({**facts, "numbers": {n["name"]: n["value"] for n in tree["numbers"]}}, lines, as_json)


def embed(
    run: RunFolder,
    data: Annotated[str, typer.Argument(help="A folder, a named set, shards or a store.")],
    out: Annotated[Path, typer.Option(help="The file to write: .parquet or .npy.")],
    split: Annotated[str, typer.Option(help="all, train or test.")] = "all",
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write the vectors of all images of DATA, with id and path; run it again to go on after a kill."""
    from kontrast.data.packing import skipped
    from kontrast.training.embedding import embed as work
    from kontrast.training.embedding import opened

    loaded = opened(run, two_numbers(float_range))
    made = work(loaded, data, out, split=split, device=device, max_bad=max_bad, say=say)
    if made.skipped:
        say(skipped(made.skipped, made.images + len(made.skipped)))
    tree = {"out": str(made.path), "images": made.images, "width": made.width, "skipped": len(made.skipped)}
    emit(tree, [f"{made.images:,} vectors of width {made.width}", f"out     {made.path}"], as_json)


def neighbors(
    run: RunFolder,
    image: Annotated[Path, typer.Argument(help="An image file.")],
    embeddings: Annotated[Path | None, typer.Option(help="Where to look; default: the run's train images.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many.")] = 8,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the images most like IMAGE in an embeddings file."""
    from kontrast.training.embedding import opened
    from kontrast.training.neighbours import neighbours

    span = two_numbers(float_range)
    found = neighbours(opened(run), image, embeddings=embeddings, k=k, float_range=span, device=device, say=say)
    lines = [f"{one['similarity']:7.4f}  {one['name']}" for one in found]
    emit({"image": str(image), "neighbors": found}, lines, as_json)


def duplicates(
    target: Annotated[Path, typer.Argument(help="A run folder, for its train images, or an embeddings file.")],
    above: Annotated[float, typer.Option(help="The least cosine of two images that count as one.")] = 0.99,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find groups of images that are all but the same to the encoder: copies, bursts, other sizes of one picture."""
    from kontrast.training.neighbours import alike

    found = alike(target, above, device=device, say=say)
    lines = [f"{group['similarity']:7.4f}  {'  '.join(group['names'])}" for group in found]
    extra = sum(len(group["names"]) - 1 for group in found)
    lines.append(f"{len(found):,} groups at a cosine of {above:g} or more; {extra:,} images repeat another")
    emit({"target": str(target), "above": above, "repeated": extra, "groups": found}, lines, as_json)


def export(
    run: RunFolder,
    format: Annotated[str, typer.Option(help="safetensors or onnx.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file; default: export/encoder.FORMAT in the run.")] = None,
    data: Annotated[str, typer.Option(help="Images to check ONNX on; default: the run's own.")] = "",
    as_json: Json = False,
) -> None:
    """Write the encoder for other programs, with a JSON card; ONNX is checked against torch on real images."""
    from kontrast.training.embedding import opened
    from kontrast.training.exporting import export as work

    made = work(opened(run), format, out, data=data or None)
    tree = {"out": str(made.path), "card": str(made.card), "width": made.width, "max_difference": made.difference}
    checked = [] if made.difference is None else [f"largest difference from torch: {made.difference:.3g}"]
    emit(tree, [*checked, f"out     {made.path}", f"card    {made.card}"], as_json)


def number_table(numbers: list[dict[str, Any]]) -> list[str]:
    """Name, value and what it means, for the terminal."""
    from kontrast.studies.text_tables import terminal_width, wrapped

    width, room = max((len(n["name"]) for n in numbers), default=0), terminal_width()
    lines = [f"{n['name']:<{width}}  {n['value']:>9.4g}  {n['note']}" for n in numbers]
    return [part for line in lines for part in wrapped(line, room, hang=width + 13)]
