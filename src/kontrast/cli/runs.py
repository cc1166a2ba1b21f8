"""The commands on a finished run: probe, lens, embed, index, neighbors, duplicates, export, push, report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import kontrast
from kontrast.cli.output import Device, Engine, FloatRange, Json, MaxBad, Workers, emit, say, two_numbers, write_page
from kontrast.errors import UsageError, refuse_pickle
from kontrast.training.signals import StopSignals

RunFolder = Annotated[Path, typer.Argument(help="A run folder, or a model on the hub: hf://OWNER/NAME.")]
License = Annotated[str, typer.Option(help="Of the weights (timm, torchvision, hub): mit, cc-by-4.0, ...")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (probe, lens, embed, index, neighbors, duplicates, export, push, report):
        app.command()(function)


def probe(
    run: RunFolder,
    kind: Annotated[str, typer.Argument(help="knn, linear, few-shot, finetune, zero-shot or retrieval.")] = "",
    protocol: Annotated[
        str, typer.Option(help="Protocol of linear (cacr, simclr, ...) or finetune (sgd, mae, ...).")
    ] = "",
    cached: Annotated[
        bool, typer.Option("--cached/--augmented", help="Protocols and finetune: plain images, or fresh crops.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="How many times to probe, each time with another seed.")] = 1,
    epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning; 0: those of its protocol.")] = 0,
    search: Annotated[
        bool, typer.Option("--search", help="finetune: choose rate and decay on held-out train images.")
    ] = False,
    shots: Annotated[int, typer.Option(help="Train images per class of few-shot (default 5) or finetune.")] = 0,
    templates: Annotated[str, typer.Option(help="zero-shot: a set of templates, or one with {} for the class.")] = "",
    data: Annotated[str, typer.Option(help="Labeled images; default: the run's own data.")] = "",
    labels: Annotated[Path | None, typer.Option(help="A CSV file with the columns name,label.")] = None,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what the frozen encoder of RUN can do, next to raw pixels and the untrained encoder."""
    again = shlex.join(["kontrast", *sys.argv[1:]])
    with StopSignals(f"stopped before the probe was done; finished probes are saved; continue with: {again}"):
        results = kontrast.probe(
            run, linear_protocol(kind, protocol), data=data or None, labels=labels, device=device, seeds=seeds,
            cached=cached, epochs=epochs, protocol=protocol if kind == "finetune" else "", search=search, shots=shots,
            templates=templates, max_bad=max_bad, float_range=two_numbers(float_range), say=say,
        )  # fmt: skip
    emit(results.to_dict(), str(results).splitlines(), as_json)


def linear_protocol(kind: str, protocol: str) -> str:
    """Return the kind of probe: `linear --protocol cacr` means `cacr`."""
    if not protocol or kind == "finetune":
        return kind
    if kind not in ("", "linear"):
        raise UsageError(f"--protocol {protocol} is for the probes linear and finetune, not for {kind!r}")
    from kontrast.probes.linear import protocol_named

    return protocol_named(protocol).name


def lens(
    target: Annotated[Path, typer.Argument(help="A run folder, or an embeddings file (.npy, .parquet).")],
    images: Annotated[int, typer.Option(help="How many images (or rows) to measure.")] = 1024,
    augmentations: Annotated[int, typer.Option(help="Augmentations per image.")] = 8,
    labels: Annotated[Path | None, typer.Option(help="For an embeddings file: a CSV file, name,label.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what a representation is like: alignment, uniformity, entropy, multiplier, rank, histograms, weights."""
    from kontrast.studies.text_tables import terminal_width

    result = kontrast.lens(target, images=images, augmentations=augmentations, labels=labels, device=device, say=say)
    page = write_page([result.path.parent], result.path.with_name("report.html"))
    emit({**result.to_dict(), "report": str(page)}, [*result.lines(terminal_width()), f"report  {page}"], as_json)


def embed(
    run: RunFolder,
    data: Annotated[str, typer.Argument(help="A folder, a named set, shards or a store.")],
    out: Annotated[Path, typer.Option(help="The file to write: .parquet or .npy.")],
    split: Annotated[str, typer.Option(help="all, train or test.")] = "all",
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    engine: Engine = "local",
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write the vectors of all images of DATA, with id and path; run it again to continue after a kill."""
    result = kontrast.embed(
        run, data, out, split=split, device=device, max_bad=max_bad, float_range=two_numbers(float_range),
        engine=engine, workers=workers, say=say,
    )  # fmt: skip
    emit(result.to_dict(), str(result).splitlines(), as_json)


def index(
    embeddings: Annotated[Path, typer.Argument(help="An embeddings file that `kontrast embed` wrote.")],
    out: Annotated[Path, typer.Option(help="The folder of the index.")],
    kind: Annotated[str, typer.Option(help="auto, flat, ivf-8bit or ivf-pq.")] = "auto",
    as_json: Json = False,
) -> None:
    """Index EMBEDDINGS, so that the nearest of millions of vectors are found in milliseconds."""
    result = kontrast.index(embeddings, out, kind=kind, say=say)
    emit(result.to_dict(), str(result).splitlines(), as_json)


def neighbors(
    run: RunFolder,
    image: Annotated[str, typer.Argument(help='An image file, or with a text tower a text: "a dog in the snow".')],
    embeddings: Annotated[Path | None, typer.Option(help="The file to search; default: the train images.")] = None,
    index: Annotated[Path | None, typer.Option(help="Its index, made by `kontrast index`; default: exact.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many neighbors.")] = 8,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the images most similar to IMAGE, a file or a text, in an embeddings file."""
    span = two_numbers(float_range)
    found = kontrast.neighbors(
        run, image, embeddings=embeddings, index=index, k=k, float_range=span, device=device, say=say
    )
    emit(found.to_dict(), str(found).splitlines(), as_json)


def duplicates(
    target: Annotated[Path, typer.Argument(help="An embeddings file, or a run folder for its train images.")],
    above: Annotated[float, typer.Option(help="The least cosine of two images that count as the same.")] = 0.99,
    index: Annotated[Path | None, typer.Option(help="An index of the file; from 500,000 rows on, it is made.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare all pairs, however many.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find groups of images that are nearly the same to the encoder: copies, bursts, other sizes of one picture."""
    found = kontrast.duplicates(target, above, index=index, exact=exact, device=device, say=say)
    emit(found.to_dict(), str(found).splitlines(), as_json)


def export(
    run: RunFolder,
    format: Annotated[
        str, typer.Option(help="safetensors, onnx, detectron2, timm, torchvision or hub.")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file or folder; default: export/ in the run.")] = None,
    data: Annotated[str, typer.Option(help="Images to check ONNX on; default: the run's own.")] = "",
    with_head: Annotated[bool, typer.Option("--with-head", help="Add the head, predictor and prototypes.")] = False,
    license: License = "",
    allow_paths: Annotated[bool, typer.Option("--allow-paths", help="Keep absolute paths of this machine.")] = False,
    as_json: Json = False,
) -> None:
    """Write the encoder for other programs, with a card; ONNX is compared with torch on real images."""
    result = kontrast.export(
        run, format, out, data=data or None, with_head=with_head, license=license, allow_paths=allow_paths
    )
    emit(result.to_dict(), str(result).splitlines(), as_json)


def push(
    run: RunFolder,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The name of the model on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new model private.")] = False,
    license: License = "",
    message: Annotated[str, typer.Option(help="The message of the commit.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be uploaded.")] = False,
    as_json: Json = False,
) -> None:
    """Publish the encoder of RUN, or a folder of `export --format hub`, on the Hugging Face Hub (HF_TOKEN)."""
    result = kontrast.push(run, name, private=private, license=license, message=message, dry_run=dry_run)
    emit(result.to_dict(), str(result).splitlines(), as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the run's folder.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    for path in runs:
        refuse_pickle(path)
    page = write_page(runs, out)
    emit({"report": str(page)}, [f"report  {page}"], as_json)
