"""The results of `kontrast.compare` and `kontrast.audit`, which print as the commands print them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kontrast.files import write_json
from kontrast.studies.text_tables import terminal_width, text_table, wrapped

Record = dict[str, Any]


@dataclass(frozen=True)
class StudyResult:
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

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))

    def lines(self, width: int | None = None) -> list[str]:
        """The tables, each followed by its note, and the verdict, wrapped to the width of a terminal."""
        lines = []
        for number, table in enumerate(self.tables):
            lines += [*wrapped(table["title"], width), *text_table(table, width), ""]
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


def save_comparison(file: Path, tree: Record) -> Comparison:
    """Write comparison.json and return it as a result."""
    write_json(file, tree)
    return Comparison(**result_fields(file, tree), rows=tree["rows"])


def save_audit(file: Path, tree: Record) -> AuditResult:
    """Write audit.json and return it as a result."""
    write_json(file, tree)
    return AuditResult(**result_fields(file, tree))


def result_fields(file: Path, tree: Record) -> Record:
    runs = [file.parent / run for run in tree["runs"]]
    return {"file": file, "runs": runs, **{key: tree[key] for key in ("verdict", "tables", "plots", "cells")}}
