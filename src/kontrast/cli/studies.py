"""The commands `compare` and `audit`. Like all commands they import what they need when they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.cli.output import Device, Json, emit, say, split_arguments, write_page
from kontrast.errors import UsageError
from kontrast.studies.text_tables import terminal_width, text_table, wrapped

CUT = "stopped; what is done is kept: give the same command again to go on"


def compare(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME NAME ... [DATA] [key=value ...]", help="Recipes or objectives.")
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each, with different seeds.")] = 3,
    sweep: Annotated[
        list[str] | None, typer.Option(help="key.path=value,value; several make a grid.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; give it again to go on.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train several recipes on the same data, views, seeds and budget: a table with intervals, and one page."""
    from kontrast.studies.compare.compare import compare as run_comparison
    from kontrast.training.signals import StopSignals

    names, data, overrides = split_names(arguments)
    out = out or Path("runs") / "-".join(["compare", *(name.replace("/", "-").removesuffix(".toml") for name in names)])
    with StopSignals(CUT):
        found = run_comparison(
            names, data, out=out, seeds=seeds, sweeps=sweep or [], overrides=overrides, device=device, say=say
        )
    page = write_page([out / run for run in found["runs"]], out / "report.html", out / "comparison.json")
    result = {"comparison": str(out / "comparison.json"), "report": str(page), "verdict": found["verdict"]}
    emit({**result, "rows": found["rows"]}, [*study_lines(found), f"report  {page}"], as_json)


def audit(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[DATA] [key=value ...]", show_default=False)] = None,
    objectives: Annotated[str, typer.Option(help="Objectives, with commas between.")] = "nt-xent",
    temperatures: Annotated[str, typer.Option(help="For those that have one.")] = "0.1",
    bits: Annotated[str, typer.Option(help="Bits of shared noise (RandBit), 0 to 20 or so.")] = "",
    digits: Annotated[str, typer.Option(help="Numbers of unique digits laid over the images.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of every training; 0: the audit's own choice.")] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings of each, with different seeds.")] = 1,
    saturation: Annotated[
        bool, typer.Option("--saturation", help="The distribution term alone against k bits of entropy.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The audit's folder; give it again to go on.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Which features suppress which: easy noise is laid over DATA, and what each objective still learned is probed."""
    from kontrast.studies.audit import audit as room
    from kontrast.studies.audit.saturation import saturate
    from kontrast.training.signals import StopSignals

    data, overrides = split_arguments(arguments)
    chosen = {"temperatures": listed("--temperatures", temperatures, float), "bits": listed("--bits", bits, int)}
    common: dict[str, Any] = {**chosen, "steps": steps, "device": device, "say": say}
    out = out or Path("runs") / ("saturation" if saturation else "audit")
    names = [name.strip() for name in objectives.split(",") if name.strip()]
    unique = listed("--digits", digits, int)
    with StopSignals(CUT):
        if saturation:
            bits_alone(bool(data or overrides or unique) or seeds != 1 or names != ["nt-xent"])
            found = saturate(out=out, **common)
        else:
            common |= {"digits": unique, "seeds": seeds, "overrides": overrides}
            found = room.audit(data, objectives=names, out=out, **common)
    page = write_page([out / run for run in found["runs"]], out / "report.html", out / "audit.json")
    result = {"audit": str(out / "audit.json"), "report": str(page), "verdict": found["verdict"]}
    emit({**result, "cells": found["cells"]}, [*study_lines(found), f"report  {page}"], as_json)


def bits_alone(more: bool) -> None:
    """Refuse what the saturation study would pass over."""
    if more:
        raise UsageError(
            "--saturation trains on bits alone: leave out DATA, key=value, --objectives, --digits and --seeds; "
            "it takes --bits, --temperatures and --steps"
        )


def split_names(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Recipes or objectives, at most one DATA, and overrides."""
    from kontrast.config.recipe_files import recipe_names
    from kontrast.data.paths import describe_source
    from kontrast.objectives import OBJECTIVES
    from kontrast.registry import unknown
    from kontrast.studies.compare.sweep import is_method

    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    words = [text for text in arguments if text not in overrides]
    names = [word for word in words if is_method(word)]
    rest = [word for word in words if word not in names]
    for word in rest:
        if describe_source(word).kind == "missing":
            known = unknown(word, [*OBJECTIVES, *recipe_names()], OBJECTIVES.hint(word))
            raise UsageError(f"{word!r} is neither a recipe, an objective nor data: {known}")
    data, overrides = split_arguments([*rest, *overrides])
    if not names:
        raise UsageError("compare needs at least one recipe or objective: see `kontrast recipes`")
    return names, data, overrides


def listed(option: str, text: str, kind: type) -> list[Any]:
    """`0,5,10` as numbers."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {text!r}: give {word} with commas between, for example 0,5,10") from None


def study_lines(found: dict[str, Any]) -> list[str]:
    """A study's tables, each with what its columns are, and then its verdict, as wide as the terminal."""
    width, lines, tables = terminal_width(), [], found["tables"]
    for place, table in enumerate(tables):
        lines += [*wrapped(table["title"], width), *text_table(table, width), ""]
        note = table.get("note")
        if note and note not in [other.get("note") for other in tables[place + 1 :]]:  # once for tables that share it
            lines += [*wrapped(note, width), ""]
    return [*lines, *wrapped(found["verdict"], width)]


def register(app: typer.Typer) -> None:
    """Give the app these commands."""
    app.command()(compare)
    app.command()(audit)
