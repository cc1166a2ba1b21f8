"""The command `transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import kontrast
from kontrast.cli.output import Device, Json, emit, say, split_overrides, write_page


def transfer(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA]... [key=value]...",
            help="canvases (default), a folder in COCO's or VOC's layout, or class folders; settings of the protocol.",
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="boxes, masks, keypoints or classify.")] = "boxes",
    labels: Annotated[float, typer.Option(help="The share of the training images that is used.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="How many times to train, each time with another seed.")] = 3,
    against: Annotated[list[Path] | None, typer.Option(help="Another run to compare with; can be repeated.")] = None,
    control: Annotated[bool, typer.Option("--control/--no-control", help="Compare with random weights.")] = True,
    protocol: Annotated[
        str, typer.Option(help="cacr-voc, cacr-coco, jcl-coco, canvases, folder, or a .toml file.")
    ] = "",
    metric: Annotated[str, typer.Option(help="classify: accuracy, mean-per-class, map or roc-auc.")] = "",
    shots: Annotated[
        list[int] | None, typer.Option(help="classify: training images per class, 0 for all; can be repeated.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="classify: linear or fine-tuned (default: both); can be repeated.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="classify: choose rate and decay on held-out images.")
    ] = True,
    jobs: Annotated[int, typer.Option(help="Measurements at once on the device, each in its own process.")] = 1,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what the encoder of RUN does after transfer: detection, masks, keypoints, classification.

    Repeat the command after a kill: it continues, and what was measured is not measured again.
    """
    data, overrides = split_overrides(arguments)
    results = kontrast.transfer(
        run, data or ["canvases"], task, labels=labels, seeds=seeds, against=against or [], control=control,
        protocol=protocol, overrides=overrides, metric=metric, shots=shots or [0, 5],
        methods=method or ["linear", "fine-tuned"], search=search, jobs=jobs, device=device,
        say=say,
    )  # fmt: skip
    page = write_page([run])
    emit({**results.to_dict(), "report": str(page)}, [*str(results).splitlines(), f"report  {page}"], as_json)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(transfer)
