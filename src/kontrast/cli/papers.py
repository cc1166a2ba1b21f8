"""The command `reproduce`. Like all commands it imports what it needs when it runs: `--list` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.cli.output import Device, Json, emit, say
from kontrast.errors import UsageError
from kontrast.studies.text_tables import aligned, terminal_width, wrapped


def reproduce(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE] [key=value ...]", help="See --list.", show_default=False)
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables, or TABLE's cells.")] = False,
    cells: Annotated[
        list[str] | None, typer.Option(help="Cells or groups by name; give it again for more.", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many (3), or which ones (1,4; a single one as 2,).")] = "1",
    jobs: Annotated[int, typer.Option(help="Runs at once on the device, each in its own process.")] = 1,
    data: Annotated[str, typer.Option(help="Where the images lie; default: KONTRAST_DATA, data, ../shared/data.")] = "",
    out: Annotated[Path, typer.Option(help="Where TABLE.json and TABLE.md are written.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs/reproduce"),
    merged: Annotated[
        Path | None, typer.Option("--merge", help="Run nothing: add the runs of this TABLE.json.", show_default=False)
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Write docs/results.md and every TABLE.md from --out.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run the grid of recipes behind a paper's table: the paper's numbers beside ours. Give it again to go on."""
    table, named, overrides = split_table(arguments, cells or [], optional=listed or docs)
    if docs:
        from kontrast.papers.claims import write_docs

        written = write_docs(out, Path("docs"))
        emit({"written": [str(path) for path in written]}, [str(path) for path in written], as_json)
    elif merged is not None:
        from kontrast.papers.result_pages import merge
        from kontrast.papers.tables import load_table

        count = merge(out, load_table(table), merged)
        emit({"runs": count}, [f"{count} runs added to {out / load_table(table).name}.json"], as_json)
    elif listed:
        tree, lines = listing(table, out)
        emit(tree, lines, as_json)
    else:
        emit(*ran(table, overrides, named, seeds, jobs, data, out, runs, device), as_json)


def split_table(arguments: list[str] | None, cells: list[str], optional: bool) -> tuple[str, list[str], list[str]]:
    """TABLE, cells and overrides; `--cells a b c` and `--cells a,b,c` are the same."""
    overrides = [text for text in arguments or [] if "=" in text]
    names = [text for text in arguments or [] if "=" not in text]
    if len(names) > 1 and not cells:
        raise UsageError(f"unexpected argument {names[1]!r}: give one TABLE, and --cells for a part of it")
    if not names and not optional:
        raise UsageError("which table? `kontrast reproduce --list` names them")
    named = [part for text in [*cells, *names[1:]] for part in text.split(",") if part]
    return (names or [""])[0], named, overrides


def ran(
    name: str,
    overrides: list[str],
    cells: list[str],
    seeds: str,
    jobs: int,
    data: str,
    out: Path,
    runs: Path,
    device: str,
) -> tuple[dict[str, Any], list[str]]:
    """Run what is left; the stored cells and the two files."""
    from kontrast.papers.tables import load_table, parse_seeds

    table = load_table(name)
    chosen, numbers = table.choose(cells), parse_seeds(seeds)
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: give at least 1")
    from kontrast.papers.reproduce import Reproduction

    asked = Reproduction(table, overrides, data or None, out, runs, device, say)
    tree = asked.run(chosen, numbers, jobs)
    files = [out / f"{table.name}.json", out / f"{table.name}.md"]
    return {"results": str(files[0]), "table": str(files[1]), "cells": tree["cells"]}, [str(path) for path in files]


def listing(name: str, out: Path) -> tuple[dict[str, Any], list[str]]:
    """All tables, or one table's cells with the paper's number and the seeds that are there."""
    from kontrast.papers.result_pages import find, finished, stored
    from kontrast.papers.tables import load_table, table_names

    if not name:
        return all_tables({each: load_table(each) for each in table_names()})
    table = load_table(name)
    tree = stored(out, table)
    entries: dict[str, Any] = {}
    for cell in table.cells:
        seeds = [run["seed"] for run in finished(find(tree, cell, {}))]
        entries[cell.name] = {"paper": cell.paper, "recipe": cell.recipe, "group": cell.group, "seeds": seeds}
    return {"table": table.name, "cells": entries}, cell_lines(entries)


def all_tables(tables: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Names and titles; a title that is too long goes on below itself."""
    longest, width = max(map(len, tables)), terminal_width()
    lines = []
    for name, table in tables.items():
        before = f"{name:<{longest}}  {len(table.cells):>2} cells  "
        lines += wrapped(before + table.title, width, len(before))
    return {name: table.title for name, table in tables.items()}, lines


def cell_lines(entries: dict[str, Any]) -> list[str]:
    """A line for each cell: the paper's number, what was run, the group, and last, being widest, the recipe."""
    rows = []
    for name, entry in entries.items():
        paper = "" if entry["paper"] is None else f"{entry['paper']:g}"
        done = f"seeds {' '.join(map(str, entry['seeds']))}" if entry["seeds"] else "not run"
        rows.append([name, f"{paper:>6}", done, entry["group"], entry["recipe"]])
    return aligned(rows, terminal_width())


def register(app: typer.Typer) -> None:
    """Give the app this command."""
    app.command()(reproduce)
