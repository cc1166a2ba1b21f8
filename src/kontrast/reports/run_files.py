"""Reading a run folder as it is: unfinished, torn or incomplete, whatever is there is shown and what is not is said."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEWEST = 1
LONGEST_NAME = 200
LONGEST_RECIPE = 200_000
COLLAPSED = 1.5


class ReportError(ValueError):
    """What was asked for can't be shown: no such folder, or no run in it."""


@dataclass
class ReportedRun:
    """One run folder's contents; what is missing is empty, and `problems` says what a reader should know."""

    path: Path
    name: str
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    gallery: dict[str, Any] | None = None
    sprite: bytes = b""
    lens: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished")) or self.info.get("status") == "finished"

    def setting(self, *keys: str) -> Any:
        """A value of the recipe by its path, or None."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(path: Path) -> ReportedRun:
    """Everything the page shows of one run."""
    path = Path(path)
    if not path.is_dir():
        raise ReportError(f"there is no run folder {str(path)!r}: give the folder that `kontrast pretrain` printed")
    known = ("recipe.toml", "run.json", "metrics.jsonl", "probes.json", "gallery.json", "lens.json")
    if not any((path / name).is_file() for name in known):
        raise ReportError(f"{str(path)!r} holds no run: none of {', '.join(known)} is in it")
    run = ReportedRun(path, path.resolve().name or str(path))
    run.recipe_text = _text(path / "recipe.toml")[:LONGEST_RECIPE]
    try:
        if run.recipe_text.count(".") > LONGEST_RECIPE // 100:
            raise ValueError("too many dots: tomllib would take hours")
        run.recipe = tomllib.loads(run.recipe_text)
    except (ValueError, RecursionError) as error:
        run.problems.append(f"recipe.toml is shown as text only: it is not valid TOML ({str(error)[:100]}).")
    run.info = _table(run, "run.json")
    run.lines = _lines(run, "metrics.jsonl")
    run.speed = _lines(run, "speed.jsonl")
    _warn_of_collapse(run)
    found = _table(run, "probes.json").get("probes")
    run.probes = [p for p in found if _is_probe(p)] if isinstance(found, list) else []
    run.lens = _table(run, "lens.json")
    _read_gallery(run)
    return run


def _warn_of_collapse(run: ReportedRun) -> None:
    """The last word on the effective rank, where it is all but one direction."""
    ranks = [line for line in run.lines if is_number(line.get("effective_rank"))]
    if ranks and ranks[-1]["effective_rank"] < COLLAPSED:
        last = ranks[-1]
        run.problems.append(
            f"collapsed: effective rank {last['effective_rank']:.1f} at epoch {last.get('epoch')}. "
            "A warm-up (training.warmup, of up to 10 epochs) or a smaller training.lr may prevent it."
        )


def distinct_names(runs: list[ReportedRun]) -> None:
    """Runs of one name take as many parent folders before it as tell them apart; after that, a number."""
    for depth in (2, 3):
        for run in _repeated(runs):
            run.name = "/".join(run.path.resolve().parts[-depth:])
    for number, run in enumerate(_repeated(runs), 1):
        run.name = f"{run.name} ({number})"


def shorten(name: Any) -> str:
    """A name that fits a page: the middle of a very long one is left out."""
    name, half = str(name), LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def plain(tree: Any) -> Any:
    """The tree with null for every number that is not finite: JSON proper, as browsers read it, knows no NaN."""
    if isinstance(tree, dict):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [plain(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def real(value: Any) -> bool:
    """A finite number; JSON's true and false are none."""
    return is_number(value) and math.isfinite(value)


def is_number(value: Any) -> bool:
    """Whether it is one that a float can be, NaN among them: JSON has true and whole numbers without end too."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e308)


def _repeated(runs: list[ReportedRun]) -> list[ReportedRun]:
    names = [run.name for run in runs]
    return [run for run in runs if names.count(run.name) > 1]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _table(run: ReportedRun, name: str) -> dict[str, Any]:
    content = _bytes(run.path / name)
    if not content:
        return {}
    try:
        table = plain(json.loads(content))
    except (ValueError, RecursionError):
        run.problems.append(f"{name} could not be read: it is not JSON. What it would show is missing.")
        return {}
    if not isinstance(table, dict):
        run.problems.append(f"{name} could not be read: it is no table. What it would show is missing.")
        return {}
    version = table.get("version", NEWEST)
    if isinstance(version, int) and version > NEWEST:
        run.problems.append(f"{name} was written by a newer kontrast and is shown as far as this one knows it.")
    return table


def _lines(run: ReportedRun, name: str) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file. A torn last line is what a crash leaves, and nothing to speak of."""
    content = _bytes(run.path / name)
    records, bad = [], 0
    parts = content.split(b"\n")
    for number, line in enumerate(parts, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            bad += number < len(parts)
            continue
        if isinstance(record, dict):
            records.append(record)
    if bad:
        run.problems.append(f"{name}: {bad} damaged line{'s' * (bad > 1)} left out.")
    return records


def _is_probe(entry: Any) -> bool:
    number = entry.get("accuracy") if isinstance(entry, dict) else None
    return isinstance(number, int | float) and 0 <= number <= 1 and isinstance(entry.get("probe"), str)


def _read_gallery(run: ReportedRun) -> None:
    gallery = _table(run, "gallery.json")
    if not gallery:
        return
    sprite = _bytes(run.path / "gallery.png")
    if not sprite:
        run.problems.append("gallery.png is missing, so the map and the neighbours can't be shown.")
    elif gallery.get("sprite_sha256", "") not in ("", hashlib.sha256(sprite).hexdigest()):
        run.problems.append("gallery.json and gallery.png are of different moments: run `kontrast probe` again.")
    elif not _whole(gallery):
        run.problems.append("gallery.json is incomplete, so the map and the neighbours can't be shown.")
    else:
        run.gallery, run.sprite = gallery, sprite


def _whole(gallery: dict[str, Any]) -> bool:
    """Every tile that is spoken of is on the sprite, and every point has its place."""
    try:
        count = int(gallery["count"])
        entries = [*gallery["points"], *gallery["queries"], *(n for q in gallery["queries"] for n in q["neighbours"])]
        placed = all(isinstance(p[axis], int | float) for p in gallery["points"] for axis in "xy")
        return (
            placed and gallery["tile"] > 0 and gallery["columns"] > 0 and all(0 <= e["tile"] < count for e in entries)
        )
    except (KeyError, TypeError, ValueError):
        return False


def write_atomic(path: Path, content: bytes) -> Path:
    """Write beside the place, then rename: the page is the old one or the new one, never half of one.

    A resumed run sweeps `.tmp-*` out of its folder, so that is the name of what a kill leaves.
    """
    path = Path(path)
    beside = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
