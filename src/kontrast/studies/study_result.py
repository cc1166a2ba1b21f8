"""The results of `kontrast.compare` and `kontrast.audit`, which print as the commands print them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from kontrast.files import write_json
from kontrast.notebook import Printed
from kontrast.studies.text_tables import aligned, terminal_width, wrapped

Record = dict[str, Any]


@dataclass(frozen=True)
class StudyResult(Printed):
    """What a study found. `print(result)` shows its tables and its verdict.

    Args:
        file: the JSON file that contains everything below; the study's other files are beside it.
        verdict: the result in one sentence.
        tables: tables of text, each with a `title`, `columns`, `rows` and a `note`.
        plots: curves in the form that the HTML report draws.
        runs: the run folders of the cells, for `kontrast.report`.
        cells: one record per cell, with its settings and its numbers.
    """

    file: Path
    verdict: str
    tables: list[Record]
    plots: list[Record]
    runs: list[Path]
    cells: list[Record]

    @classmethod
    def save(cls, file: Path, tree: Record) -> Self:
        """Write the study's JSON file and return its content as a result."""
        write_json(file, tree)
        names = {field.name for field in fields(cls)} - {"file", "runs"}
        runs = [file.parent / run for run in tree["runs"]]
        return cls(file=file, runs=runs, **{name: tree[name] for name in names})

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))

    def printed(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int | None = None) -> list[str]:
        """The tables, each followed by its note, and the verdict, wrapped to the width of a terminal."""
        lines = []
        for number, table in enumerate(self.tables):
            lines += [*wrapped(table["title"], width), *aligned([table["columns"], *table["rows"]], width), ""]
            note = table.get("note")
            if note and note not in [other.get("note") for other in self.tables[number + 1 :]]:  # print a note once
                lines += [*wrapped(note, width), ""]
        return [*lines, *wrapped(self.verdict, width)]


@dataclass(frozen=True)
class Comparison(StudyResult):
    """The result of `kontrast.compare`.

    Args:
        rows: one summary per recipe and swept value: accuracies and paired differences with their intervals.
    """

    rows: list[Record]

    def to_dict(self) -> Record:
        return {"comparison": str(self.file), "verdict": self.verdict, "rows": self.rows}


@dataclass(frozen=True)
class AuditResult(StudyResult):
    """The result of `kontrast.audit`."""

    def to_dict(self) -> Record:
        return {"audit": str(self.file), "verdict": self.verdict, "cells": self.cells}
