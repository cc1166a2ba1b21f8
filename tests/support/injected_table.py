"""The table of injected faults: for each command, call and error, how many points were tried and how many held."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.failing_calls import ERRORS, ERRORS_OF, KINDS

Row = dict[str, Any]


@dataclass
class Findings:
    """What one process, or several, found.

    Attributes:
        table: one row per command, call and error, with the points that were tried and held, and the exit codes.
        broken: the points that did not hold.
        states: in how many different states the commands left their folders.
        compared: points that were also run as whole processes.
        unlike: those of them that ended in another way than in a fork.
    """

    table: list[Row] = field(default_factory=list)
    broken: list[Row] = field(default_factory=list)
    states: int = 0
    compared: int = 0
    unlike: list[Row] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(row["tried"] for row in self.table)

    @property
    def held(self) -> int:
        return sum(row["held"] for row in self.table)

    def write(self, path: Path) -> None:
        """Write a file that is never half-written."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)

    def print(self) -> None:
        print(f"{'command':<14} {'call':<9} {'error':<7} {'tried':>6} {'held':>6}  exit codes")
        for row in self.table:
            exits = ", ".join(f"{code}: {count}" for code, count in row["exits"].items())
            what = f"{row['command']:<14} {row['call']:<9} {row['error']:<7}"
            print(f"{what} {row['tried']:>6} {row['held']:>6}  {exits}")
        print(
            f"{self.states} states; {self.compared - len(self.unlike)} of {self.compared} whole processes ended alike"
        )
        print(f"{self.held} of {self.tried} points held")


def join(paths: list[Path]) -> Findings:
    """Join what several processes wrote."""
    found = [Findings(**json.loads(path.read_bytes())) for path in paths]
    rows: dict[tuple[str, str, str], Row] = {}
    exits: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in (row for one in found for row in one.table):
        cell = row["command"], row["call"], row["error"]
        exits[cell].update(row["exits"])
        sums = {key: row[key] + rows.get(cell, {key: 0})[key] for key in ("tried", "held")}
        rows[cell] = row | sums | {"exits": dict(sorted(exits[cell].items()))}
    return Findings(
        list(rows.values()),
        [point for one in found for point in one.broken],
        sum(one.states for one in found),
        sum(one.compared for one in found),
        [point for one in found for point in one.unlike],
    )


def save(folder: Path, found: Findings, about: Row) -> None:
    """Write injected.json and injected.md. Rows of commands that this run did not try are kept from earlier runs."""
    path = folder / "injected.json"
    old = json.loads(path.read_bytes()) if path.exists() else {"runs": [], "broken": [], "unlike": [], "table": []}
    mine = {row["command"] for row in found.table}
    run = about | {"tried": found.tried, "states": found.states, "whole_processes": found.compared, "replaced": []}
    earlier = [one for one in old["runs"] if one["started"] != about["started"]]
    for one in earlier:
        one["replaced"] = sorted({*one["replaced"], *mine})
    tree = {
        "runs": [*earlier, run],
        **{
            key: [one for one in old[key] if one["command"] not in mine] + getattr(found, key)
            for key in ("broken", "unlike", "table")
        },
    }
    head = json.dumps({key: tree[key] for key in ("runs", "broken", "unlike")}, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in tree["table"])
    path.write_text(f'{head},\n "table": [\n{rows}\n ]\n}}\n')
    (folder / "injected.md").write_text(page(tree))


def page(tree: Row) -> str:
    """Return the table of injected faults as Markdown."""
    table, joined = tree["table"], Findings(tree["table"])
    commands = list(dict.fromkeys(row["command"] for row in table))
    cells = {(row["command"], row["call"], row["error"]): row for row in table}
    exits: Counter[str] = sum((Counter(row["exits"]) for row in table), Counter())
    lines = [
        "# Every system call fails once", "",
        f"{joined.held:,} of {joined.tried:,} points held. Each cell has the points that held / were tried: the "
        "command ended with a documented exit code and one line, left nothing half-written, and the same command then "
        "ended with the bytes of an undisturbed run. `SHORT` moves half of the bytes. Exit codes: "
        f"{', '.join(f'{code} at {exits[code]:,} points' for code in sorted(exits))}.", "",
        "Commands run in forks of one process. If two points leave a command's folder in the same state, it is "
        "examined and continued once. A sample of points is also run as whole processes, and compared by exit code, "
        f"line, path and what they leave; {len(tree['unlike'])} of them ended in another way.", "",
        "| run | version | minutes | points | states | whole processes | replaced by a later run |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for run in tree["runs"]:
        version = f"kontrast {run['kontrast']}, torch {run['torch']}, Python {run['python']}"
        counts = f"{run['minutes']:.0f} | {run['tried']:,} | {run['states']:,} | {run['whole_processes']}"
        lines.append(f"| {run['started']}: `{run['command']}` | {version} | {counts} | {', '.join(run['replaced'])} |")
    lines += ["", "| call | error | " + " | ".join(commands) + " |", "| --- | --- |" + " --- |" * len(commands)]
    errors = [(kind, error) for kind in KINDS for error in ERRORS_OF.get(kind, ERRORS)]
    for kind, error in (one for one in errors if any((command, *one) in cells for command in commands)):
        here = [cells.get((command, kind, error)) for command in commands]
        texts = [f"{row['held']:,}/{row['tried']:,}" if row else "-" for row in here]
        lines.append(f"| {kind} | {error} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
