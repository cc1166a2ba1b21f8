"""The table of injected faults: for each command, call and error, how many points were tried and how many held."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """Write injected.json and injected.md."""
    facts = {"tried": found.tried, "held": found.held, "states": found.states, "whole_processes": found.compared}
    head = json.dumps({**about, **facts, "broken": found.broken, "unlike": found.unlike}, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found.table)
    (folder / "injected.json").write_text(f'{head},\n "table": [\n{rows}\n ]\n}}\n')
    commands = list(dict.fromkeys(row["command"] for row in found.table))
    cells = {(row["command"], row["call"], row["error"]): row for row in found.table}
    exits = sum((Counter(row["exits"]) for row in found.table), Counter())
    lines = [
        f"# Every system call fails once, measured {about['date']}", "",
        f"`{about['command']}` with {', '.join(f'{k} {about[k]}' for k in ('kontrast', 'torch', 'python'))}, "
        f"{about['minutes']:.0f} minutes.", "",
        f"{found.held:,} of {found.tried:,} points held. Each cell has the points that held / were tried: the command "
        "ended with a documented exit code and one line, left nothing half-written, and the same command then ended "
        "with the bytes of an undisturbed run. `SHORT` moves half of the bytes. Exit codes: "
        f"{', '.join(f'{code} at {exits[code]:,} points' for code in sorted(exits))}.", "",
        f"The commands were left in {found.states:,} different states; each state was examined and continued once. "
        f"Commands run in forks of one process. {found.compared:,} points were also run as whole processes, and "
        f"{found.compared - len(found.unlike):,} of them ended with the same exit code, line, path and state.", "",
        "| call | error | " + " | ".join(commands) + " |", "| --- | --- |" + " --- |" * len(commands),
    ]  # fmt: skip
    for kind, error in dict.fromkeys((row["call"], row["error"]) for row in found.table):
        here = [cells.get((command, kind, error)) for command in commands]
        texts = [f"{row['held']:,}/{row['tried']:,}" if row else "-" for row in here]
        lines.append(f"| {kind} | {error} | " + " | ".join(texts) + " |")
    (folder / "injected.md").write_text("\n".join(lines) + "\n")
