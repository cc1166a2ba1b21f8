"""The command `reproduce`. Like all commands it imports what it needs when it runs: `--list` does not need torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.cli.output import Device, Json, emit, say
from kontrast.errors import UsageError
from kontrast.studies.text_tables import aligned, terminal_width, wrapped


def reproduce(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE] [key=value ...]", help="See --list.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables, or the cells of TABLE.")] = False,
    cells: Annotated[list[str] | None, typer.Option(help="Names of cells or groups, separated by commas.")] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds (3), or which ones (1,4; a single one as 2,).")] = "1",
    jobs: Annotated[int, typer.Option(help="Runs at once on the device, each in its own process.", min=1)] = 1,
    data: Annotated[
        str, typer.Option(help="The folder with the images; default: KONTRAST_DATA, data, ../shared/data.")
    ] = "",
    out: Annotated[Path, typer.Option(help="The folder for TABLE.json and TABLE.md.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="The folder for run folders.")] = Path("runs/reproduce"),
    merged: Annotated[
        Path | None, typer.Option("--merge", help="Run nothing; add the runs of this TABLE.json.")
    ] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Run nothing; write docs/results.md and every TABLE.md from --out.")
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run the recipes behind a paper's table and put our numbers beside the paper's. Run it again to resume."""
    table, names, overrides = split_table(arguments, cells or [], optional=listed or docs)
    if docs:
        from kontrast.papers.claims import write_docs

        written = [str(path) for path in write_docs(out, Path("docs"))]
        emit({"written": written}, written, as_json)
    elif merged is not None:
        from kontrast.papers.save_results import merge_results
        from kontrast.papers.tables import load_table

        count = merge_results(out, load_table(table), merged)
        emit({"runs": count}, [f"added {count} runs to {out}"], as_json)
    elif listed:
        emit(*(list_cells(table, out) if table else list_tables()), as_json)
    else:
        from kontrast.papers.tables import load_table

        load_table(table).select(names)  # a mistake in a name is reported before torch is imported
        numbers = parse_seeds(seeds)
        from kontrast.papers.reproduce import reproduce as run_table

        found = run_table(
            table, cells=names, seeds=numbers, overrides=overrides, jobs=jobs, data=data or None, out=out, runs=runs,
            device=device, say=say,
        )  # fmt: skip
        emit(found.to_dict(), str(found).splitlines(), as_json)


def split_table(arguments: list[str] | None, cells: list[str], optional: bool) -> tuple[str, list[str], list[str]]:
    """Split the arguments into TABLE, cells and overrides; `--cells a b c` and `--cells a,b,c` are the same."""
    overrides = [text for text in arguments or [] if "=" in text]
    names = [text for text in arguments or [] if "=" not in text]
    if len(names) > 1 and not cells:
        raise UsageError(f"unexpected argument {names[1]!r}: give one TABLE, and --cells for a part of it")
    if not names and not optional:
        raise UsageError("give the name of a table: see `kontrast reproduce --list`")
    selected = [part for text in [*cells, *names[1:]] for part in text.split(",") if part]
    return (names or [""])[0], selected, overrides


def parse_seeds(text: str) -> list[int]:
    """Parse `3` into the seeds 0, 1 and 2, `1,4` into these two, and `2,` into the single seed 2."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise UsageError(f"--seeds {text!r}: give a number (3), or seeds with commas (1,4; a single one as 2,)")
    return list(dict.fromkeys(numbers)) if "," in text else list(range(numbers[0]))


def list_tables() -> tuple[dict[str, Any], list[str]]:
    """Names and titles of all tables."""
    from kontrast.papers.tables import load_table, table_names

    tables = {name: load_table(name) for name in table_names()}
    longest, width, lines = max(map(len, tables)), terminal_width(), []
    for name, table in tables.items():
        prefix = f"{name:<{longest}}  {len(table.cells):>2} cells  "
        lines += wrapped(prefix + table.title, width, len(prefix))
    return {name: table.title for name, table in tables.items()}, lines


def list_cells(name: str, out: Path) -> tuple[dict[str, Any], list[str]]:
    """The cells of a table with the paper's number, the seeds that were run, the group and the recipe."""
    from kontrast.papers.results_file import find_entry, finished_runs, read_results
    from kontrast.papers.tables import load_table

    table = load_table(name)
    tree, entries, rows = read_results(out, table), {}, []
    for cell in table.cells:
        seeds = [run["seed"] for run in finished_runs(find_entry(tree, cell, {}))]
        entries[cell.name] = {"paper": cell.paper, "recipe": cell.recipe, "group": cell.group, "seeds": seeds}
        paper = "" if cell.paper is None else f"{cell.paper:g}"
        done = f"seeds {' '.join(map(str, seeds))}" if seeds else "not run"
        rows.append([cell.name, f"{paper:>6}", done, cell.group, cell.recipe])
    return {"table": table.name, "cells": entries}, aligned(rows, terminal_width())


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command()(reproduce)
