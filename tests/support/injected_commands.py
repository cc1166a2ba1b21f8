"""The commands whose calls fail: each on a tiny store or a tiny run, in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support.commands import Command, after_step
from support.kill_storm import TINY

SHORT = [*TINY, "training.batch=16", "training.max_steps=4", "training.epochs=4", "evaluation.every=1"]
SHORTEST = [*SHORT, "training.max_steps=2"]
CPU = ("--device", "cpu")


@dataclass
class Case:
    """A command in a folder of its own.

    Attributes:
        argv: its arguments, given the folder.
        prepare: fills the folder with what the command needs; it is called once and the folder is copied.
        again: the arguments after a failure; default: the same.
        counts: the calls of each kind of the undisturbed command.
        whole: the files that it determines, with their contents.
        names: all files that it leaves.
        judged: the states in which a failing call left the folder, with what is wrong with each.
    """

    name: str
    argv: Callable[[Path], list[str]]
    prepare: Callable[[Path], object] = lambda place: None
    again: Callable[[Path], list[str]] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    whole: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    judged: dict[tuple[str, bool], list[str]] = field(default_factory=dict)


def stop_after_a_step(argv: list[str]) -> int:
    """Train until SIGTERM comes after the first step, and save the second."""
    from kontrast.cli import main as cli

    after_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return cli.run(argv)


def cases(pictures: Path) -> list[Case]:
    """The commands, on a tiny store and a tiny run."""
    from kontrast.cli import main as cli

    quiet = [*CPU, "--no-probes"]

    def train(place: Path) -> list[str]:
        return ["pretrain", f"{place}/store", "--recipe", "quickstart", *SHORT, "--out", f"{place}/run", *quiet]

    def resume(place: Path) -> list[str]:
        begun = (place / "run" / "recipe.toml").exists()
        return ["pretrain", "--resume", "--out", f"{place}/run", *quiet] if begun else train(place)

    def stop(place: Path) -> None:
        after(pack)(place)
        log = place.with_name("stopped")
        Command(log, instead=partial(stop_after_a_step, train(place))).ended(75)

    def compare(place: Path) -> list[str]:
        options = [*SHORTEST, "--seeds", "1", *CPU, "--out", f"{place}/study"]
        return ["compare", "nt-xent", f"{place}/store", *options]

    def pack(place: Path, *more: str) -> list[str]:
        return ["pack", str(pictures), f"{place}/store", *more]

    def on_run(verb: str, *more: str) -> Callable[[Path], list[str]]:
        return lambda place: [verb, f"{place}/run", *(text.replace("PLACE", str(place)) for text in more)]

    def after(*commands: Callable[[Path], list[str]]) -> Callable[[Path], None]:
        def prepare(place: Path) -> None:
            for command in commands:
                assert cli.run(command(place)) == 0

        return prepare

    def embed(name: str) -> Callable[[Path], list[str]]:
        return on_run("embed", str(pictures), "--out", f"PLACE/{name}", *CPU)

    trained, embedded = after(pack, train), after(pack, train, embed("v.npy"))
    query = str(next(pictures.rglob("*.png")))
    found = [
        Case("pretrain", train, after(pack), resume),
        Case("resume", resume, stop),
        Case("compare", compare, after(pack)),
        Case("pack", pack),
        Case("pack again", pack, after(lambda place: pack(place, "--size", "10"))),
        Case("lens", on_run("lens", "--images", "16", "--augmentations", "2", *CPU), trained),
        Case("probe", on_run("probe", *CPU), trained),
        Case("embed", embed("vectors.npy"), trained),
        Case("embed parquet", embed("vectors.parquet"), trained),
        Case("neighbors", on_run("neighbors", query, "--embeddings", "PLACE/v.npy", *CPU), embedded),
        Case("export", on_run("export"), trained),
        Case("export hub", on_run("export", "--format", "hub"), trained),
        Case("report", on_run("report"), trained),
    ]  # fmt: skip
    without = {"embed parquet"} if importlib.util.find_spec("pyarrow") is None else set()
    return [case for case in found if case.name not in without]
