"""The commands `compare` and `audit`. Like all commands they import what they need when they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kontrast.cli.output import Device, Json, emit, say, split_arguments, write_page
from kontrast.errors import UsageError

if TYPE_CHECKING:
    from kontrast.studies.study_result import AuditResult, Comparison


def compare(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME NAME ... [DATA] [key=value ...]", help="Recipes or objectives.")
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each recipe, with different seeds.")] = 3,
    sweep: Annotated[
        list[str] | None, typer.Option(help="Values to try: key.path=value,value. Repeat it for a grid.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; give it again to resume.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train several recipes on the same data, views, seeds and budget, and compare their accuracies."""
    from kontrast.studies.compare.compare import compare as run_comparison

    names, data, overrides = split_names(arguments)
    found = run_comparison(
        names, data, seeds=seeds, sweeps=sweep or [], overrides=overrides, out=out, device=device, say=say
    )
    emit_study(found, as_json)


def audit(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[DATA] [key=value ...]")] = None,
    objectives: Annotated[str, typer.Option(help="Names of objectives, separated by commas.")] = "nt-xent",
    temperatures: Annotated[str, typer.Option(help="Temperatures to try, separated by commas.")] = "0.1",
    bits: Annotated[str, typer.Option(help="Numbers of random bits to add (RandBit), such as 0,5,10.")] = "",
    digits: Annotated[str, typer.Option(help="Numbers of different digits to overlay on the images.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of each training; 0: a default.")] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings of each learner, with different seeds.")] = 1,
    saturation: Annotated[
        bool, typer.Option("--saturation", help="Only train the distribution term on k bits of entropy.")
    ] = False,
    batches: Annotated[str, typer.Option(help="Batch sizes of --saturation, separated by commas.")] = "128",
    encoder: Annotated[str, typer.Option(help="Encoder of --saturation: small-conv or resnet-18.")] = "small-conv",
    epochs: Annotated[int, typer.Option(help="Epochs of --saturation, in place of --steps.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The audit's folder; give it again to resume.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find out which features an objective suppresses when easier ones are added to the images."""
    from kontrast.studies.audit.audit import audit as run_audit
    from kontrast.studies.audit.saturation import measure_saturation

    data, overrides = split_arguments(arguments)
    shared: dict[str, Any] = {
        "temperatures": parse_list("--temperatures", temperatures, float),
        "bits": parse_list("--bits", bits, int),
        "steps": steps, "out": out, "device": device, "say": say,
    }  # fmt: skip
    names = [name.strip() for name in objectives.split(",") if name.strip()] or ["nt-xent"]
    numbers = parse_list("--digits", digits, int)
    if saturation:
        if data or overrides or numbers or seeds != 1 or names != ["nt-xent"]:
            raise UsageError(
                "--saturation trains on bits alone: it allows --bits, --temperatures, --batches, --encoder, --epochs "
                "and --steps, but not DATA, key=value, --objectives, --digits or --seeds"
            )
        sizes = parse_list("--batches", batches, int)
        found = measure_saturation(**shared, batches=sizes, encoder=encoder, epochs=epochs)
    elif (batches, encoder, epochs) != ("128", "small-conv", 0):
        raise UsageError("--batches, --encoder and --epochs belong to --saturation: for an audit give key=value")
    else:
        found = run_audit(data, objectives=names, digits=numbers, seeds=seeds, overrides=overrides, **shared)
    emit_study(found, as_json)


def emit_study(found: Comparison | AuditResult, as_json: bool) -> None:
    """Write the HTML report of a study and print its result."""
    page = write_page(found.runs, found.file.with_name("report.html"), found.file)
    emit({**found.to_dict(), "report": str(page)}, [*str(found).splitlines(), f"report  {page}"], as_json)


def split_names(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Split the arguments into recipes or objectives (also unknown ones), at most one DATA, and overrides."""
    from kontrast.data.paths import describe_source
    from kontrast.studies.compare.comparison_plan import is_method

    words = [text for text in arguments if "=" not in text or os.path.exists(text)]
    names = [word for word in words if is_method(word) or describe_source(word).kind == "missing"]
    data, overrides = split_arguments([text for text in arguments if text not in names])
    if not names:
        raise UsageError("compare needs at least one recipe or objective: see `kontrast recipes`")
    return names, data, overrides


def parse_list(option: str, text: str, kind: type) -> list[Any]:
    """Parse `0,5,10` into numbers."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        numbers = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {text!r}: give {numbers} separated by commas, for example 0,5,10") from None


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(compare)
    app.command()(audit)
