"""The commands from encoder to classifier: finetune, predict, select."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import kontrast
from kontrast.addresses import shown
from kontrast.cli.output import Device, FloatRange, Json, MaxBad, emit, say, two_numbers, write_page
from kontrast.training.signals import StopSignals


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (finetune, predict, select):
        app.command()(function)


def finetune(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str, typer.Argument(help="The images; default: the run's own.")] = "",
    labels: Annotated[
        Path | None, typer.Option(help="A CSV file, file,label; other images are unlabeled. Default: class folders.")
    ] = None,
    linear: Annotated[bool, typer.Option("--linear", help="Train only a linear layer on frozen features.")] = False,
    protocol: Annotated[str, typer.Option(help="How to train the whole network: sgd, simclr, mae, ...")] = "sgd",
    epochs: Annotated[int, typer.Option(help="Epochs of training it; 0: those of its protocol.")] = 0,
    search: Annotated[bool, typer.Option("--search", help="Choose rate and decay on held-out labeled images.")] = False,
    cached: Annotated[
        bool, typer.Option("--cached/--augmented", help="Train it on plain images, or fresh crops.")
    ] = False,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation if no test image has a label.")] = 5,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write classifier.onnx.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder to write; default: RUN-classifier.")] = None,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a classifier from the encoder of RUN and labeled images; save it with its labels, a card and a report."""
    again = shlex.join(["kontrast", *map(shown, sys.argv[1:])])
    with StopSignals(f"stopped before the classifier was saved; start again with: {again}"):
        result = kontrast.finetune(
            run, data or None, labels=labels, linear=linear, protocol=protocol, epochs=epochs, search=search,
            cached=cached, folds=folds, onnx=onnx, out=out, device=device, max_bad=max_bad,
            float_range=two_numbers(float_range), say=say,
        )  # fmt: skip
    page = write_page([result.path], result.path / "report.html")
    emit({**result.to_dict(), "report": str(page)}, [*str(result).splitlines(), f"report  {page}"], as_json)


def predict(
    model: Annotated[Path, typer.Argument(help="A folder that `kontrast finetune` wrote.")],
    images: Annotated[str, typer.Argument(help="An image file, a folder, a named set, shards or a store.")],
    out: Annotated[Path, typer.Option(help="The file to write: .csv, .json or .jsonl.")] = Path("predictions.csv"),
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of every label.")
    ] = False,
    split: Annotated[str, typer.Option(help="all, train or test.")] = "all",
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write the label of each of IMAGES, with its probability; run it again to continue after a kill."""
    result = kontrast.predict(
        model, images, out, probabilities=probabilities, split=split, device=device, max_bad=max_bad,
        float_range=two_numbers(float_range), say=say,
    )  # fmt: skip
    emit(result.to_dict(), str(result).splitlines(), as_json)


def select(
    target: Annotated[Path, typer.Argument(help="A run, a classifier, or an embeddings file.")],
    count: Annotated[int, typer.Option(help="How many images to choose.")] = 200,
    labels: Annotated[Path | None, typer.Option(help="A CSV file, file,label, of images that have a label.")] = None,
    model: Annotated[Path | None, typer.Option(help="For an embeddings file: the classifier.")] = None,
    method: Annotated[str, typer.Option(help="k-means: typical images; k-center: unusual ones.")] = "k-means",
    out: Annotated[Path, typer.Option(help="The CSV file to write, file,label.")] = Path("to-label.csv"),
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Choose the images that are worth labeling first: diverse, and uncertain if TARGET is a classifier."""
    found = kontrast.select(
        target, count, labels=labels, model=model, method=method, out=out, seed=seed, device=device, say=say
    )
    emit(found.to_dict(), str(found).splitlines(), as_json)
