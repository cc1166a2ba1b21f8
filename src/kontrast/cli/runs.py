"""The commands that look at a run and take from it: lens, embed, neighbors, duplicates, export."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kontrast.cli.output import (
    Device,
    FloatRange,
    Json,
    MaxBad,
    emit,
    say,
    two_numbers,
    write_page,
)
from kontrast.errors import UsageError, refuse_pickle
from kontrast.training.signals import StopSignals

if TYPE_CHECKING:
    pass


RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (probe, lens, embed, neighbors, duplicates, export, report):
        app.command()(function)


def probe(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    kind: Annotated[
        str, typer.Argument(help="knn, linear, few-shot, finetune or a protocol; default: knn and linear.")
    ] = "",
    protocol: Annotated[str, typer.Option(help="Of linear: cacr, moco, simclr, ...; a wrong one lists all.")] = "",
    cached: Annotated[
        bool, typer.Option("--cached/--augmented", help="Protocols: plain pictures once, or fresh crops every epoch.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Times to probe, with different seeds.")] = 1,
    epochs: Annotated[int, typer.Option(help="Of fine-tuning; 0: 50.")] = 0,
    data: Annotated[str, typer.Option(help="Labelled images; default: the run's own data.")] = "",
    labels: Annotated[Path | None, typer.Option(help="A CSV with columns name,label.")] = None,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what the frozen encoder of RUN can do, beside raw pixels and the untrained encoder."""
    from kontrast.runs.embed import open_run
    from kontrast.runs.probe import evaluate, result_table

    if float_range and not data:
        raise UsageError("--float-range is for the images of --data; the run's own are read as it was trained on them")
    again = shlex.join(["kontrast", *sys.argv[1:]])
    with StopSignals(f"stopped before the probe was done; what was done is kept; go on with: {again}"):
        loaded = open_run(run, two_numbers(float_range))
        results = evaluate(
            loaded, kind=probe_named(kind, protocol), data=data or None, labels=labels, device=device, seeds=seeds,
            cached=cached, epochs=epochs, max_bad=max_bad, say=say,
        )  # fmt: skip
    emit({"run": str(run), "probes": [r.to_dict() for r in results]}, result_table(results), as_json)


def probe_named(kind: str, protocol: str) -> str:
    """`linear --protocol cacr` is `cacr`."""
    if not protocol:
        return kind
    if kind not in ("", "linear"):
        raise UsageError(f"--protocol {protocol} is for the linear probe, not for {kind!r}")
    from kontrast.probes.linear import protocol_named

    return protocol_named(protocol).name


def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the run's folder.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    for path in runs:
        refuse_pickle(path)
        if not (path / "recipe.toml").is_file():
            raise UsageError(f"{path} is not a run folder: it has no recipe.toml")
    if out is None and len(runs) > 1:
        raise UsageError("several runs need --out PAGE.html")
    page = write_page(runs, out or runs[0] / "report.html")
    emit({"report": str(page)}, [f"report  {page}"], as_json)


def lens(
    target: Annotated[Path, typer.Argument(help="A run folder, or an embeddings file (.npy, .parquet).")],
    images: Annotated[int, typer.Option(help="Images (or rows) to look at.")] = 1024,
    augmentations: Annotated[int, typer.Option(help="Augmentations of each image.")] = 8,
    labels: Annotated[Path | None, typer.Option(help="For a file: a CSV with columns name,label.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms, weights."""
    from kontrast.errors import UsageError
    from kontrast.runs.lens import look, look_at_file, write_lens

    if target.is_dir():
        from kontrast.runs.embed import open_run

        if labels is not None:
            raise UsageError("--labels is for an embeddings file; a run's images carry their own")
        folder = target
        tree = look(open_run(target), images=images, augmentations=augmentations, device=device, say=say)
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
    from kontrast.data.bad_images import skipped
    from kontrast.runs.embed import embed as work
    from kontrast.runs.embed import open_run

    loaded = open_run(run, two_numbers(float_range))
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
    from kontrast.runs.embed import open_run
    from kontrast.runs.neighbors import neighbors

    span = two_numbers(float_range)
    found = neighbors(open_run(run), image, embeddings=embeddings, k=k, float_range=span, device=device, say=say)
    lines = [f"{one['similarity']:7.4f}  {one['name']}" for one in found]
    emit({"image": str(image), "neighbors": found}, lines, as_json)


def duplicates(
    target: Annotated[Path, typer.Argument(help="A run folder, for its train images, or an embeddings file.")],
    above: Annotated[float, typer.Option(help="The least cosine of two images that count as one.")] = 0.99,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find groups of images that are all but the same to the encoder: copies, bursts, other sizes of one picture."""
    from kontrast.runs.duplicates import alike

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
    from kontrast.runs.embed import open_run
    from kontrast.runs.export import export as work

    made = work(open_run(run), format, out, data=data or None)
    tree = {"out": str(made.path), "card": str(made.card), "width": made.width, "max_difference": made.difference}
    checked = [] if made.difference is None else [f"largest difference from torch: {made.difference:.3g}"]
    emit(tree, [*checked, f"out     {made.path}", f"card    {made.card}"], as_json)


def number_table(numbers: list[dict[str, Any]]) -> list[str]:
    """Name, value and what it means, for the terminal."""
    from kontrast.studies.text_tables import terminal_width, wrapped

    width, room = max((len(n["name"]) for n in numbers), default=0), terminal_width()
    lines = [f"{n['name']:<{width}}  {n['value']:>9.4g}  {n['note']}" for n in numbers]
    return [part for line in lines for part in wrapped(line, room, hang=width + 13)]
