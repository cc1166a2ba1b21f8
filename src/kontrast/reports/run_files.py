"""Read a run folder as it is, unfinished or damaged: show what is there, and report what is missing."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

NEWEST_VERSION = 1
MAX_NAME = 200
MAX_RECIPE = 200_000
MOST_DOTS = 2_000
"""tomllib needs time that grows with the square of a dotted key's parts: minutes for 100,000 of them."""
COLLAPSED_RANK = 1.5
FILES = (
    "recipe.toml", "run.json", "metrics.jsonl", "probes.json", "gallery.json", "retrieval.json", "lens.json",
    "classifier.json", "transfer.json",
)  # fmt: skip


class ReportError(ValueError):
    """A report can't be written: there is no such folder, or it contains no run."""


class UnreadableFile(Exception):
    """The system can't read a file of a run."""


@dataclass
class ReportedRun:
    """The contents of one run folder. What is missing is empty; `problems` are sentences for the reader."""

    path: Path
    name: str
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    transfer: list[Any] = field(default_factory=list)
    gallery: dict[str, Any] | None = None
    sprite: bytes = b""
    retrieval: dict[str, Any] | None = None
    retrieval_sprite: bytes = b""
    lens: dict[str, Any] = field(default_factory=dict)
    classifier: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished"))

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe by its path, or None."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(path: Path) -> ReportedRun:
    """Read everything that the page shows of one run."""
    if not path.is_dir():
        raise ReportError(f"there is no run folder {str(path)!r}: give the folder that `kontrast pretrain` printed")
    if not any((path / name).is_file() for name in FILES):
        raise ReportError(f"{str(path)!r} is not a run folder: it contains none of {', '.join(FILES)}")
    run = ReportedRun(path, path.resolve().name or str(path))
    links = [name for name in (*FILES, "speed.jsonl", "gallery.png", "retrieval.png") if (path / name).is_symlink()]
    run.problems += [f"{name} is a link and is not followed, so what it would show is missing." for name in links]
    run.recipe_text = read_bytes(path / "recipe.toml").decode("utf-8", "replace")[:MAX_RECIPE]
    try:
        if run.recipe_text.count(".") > MOST_DOTS:
            raise ValueError(f"more than {MOST_DOTS:,} dots")
        run.recipe = tomllib.loads(run.recipe_text)
    except (ValueError, RecursionError) as error:
        run.problems.append(f"recipe.toml is only shown as text, because it is not valid TOML ({str(error)[:100]}).")
    run.info = _read_table(run, "run.json")
    run.lines = _read_lines(run, "metrics.jsonl")
    run.speed = _read_lines(run, "speed.jsonl")
    _warn_of_collapse(run)
    probes = _read_table(run, "probes.json").get("probes")
    run.probes = [probe for probe in probes if _is_probe(probe)] if isinstance(probes, list) else []
    run.lens = _read_table(run, "lens.json")
    run.classifier = _read_table(run, "classifier.json")
    tables = _read_table(run, "transfer.json").get("tables")
    run.transfer = tables if isinstance(tables, list) else []
    _read_gallery(run)
    _read_retrieval(run)
    return run


def _warn_of_collapse(run: ReportedRun) -> None:
    """Add a problem if the last effective rank is close to 1."""
    ranks = [line for line in run.lines if is_number(line.get("effective_rank"))]
    if ranks and ranks[-1]["effective_rank"] < COLLAPSED_RANK:
        last = ranks[-1]
        run.problems.append(
            f"The features collapsed: effective rank {last['effective_rank']:.1f} at epoch {last.get('epoch')}. "
            "A warm-up (training.warmup, up to 10 epochs) or a smaller training.lr may help."
        )


def make_names_distinct(runs: list[ReportedRun]) -> None:
    """Prefix equal names with parent folders, and number them if that does not make them distinct."""
    for depth in (2, 3):
        for run in _with_equal_names(runs):
            run.name = "/".join(run.path.resolve().parts[-depth:])
    for number, run in enumerate(_with_equal_names(runs), 1):
        run.name = f"{run.name} ({number})"


def _with_equal_names(runs: list[ReportedRun]) -> list[ReportedRun]:
    names = [run.name for run in runs]
    return [run for run in runs if names.count(run.name) > 1]


def shorten(name: Any) -> str:
    """Return the name without its middle if it is too long for the page."""
    name, half = str(name), MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[:half]}…{name[-half:]}"


def without_nan(tree: Any) -> Any:
    """Replace numbers that are not finite by None, since browsers don't read NaN in JSON."""
    if isinstance(tree, dict):
        return {str(key): without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def is_finite(value: Any) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)


def is_number(value: Any) -> bool:
    """Whether a value from JSON fits a float. NaN does; true and integers of 400 digits don't."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e308)


def newer_version(tree: dict[str, Any], name: str) -> list[str]:
    """Return a warning if a newer version of kontrast wrote the file."""
    version = tree.get("version", NEWEST_VERSION)
    if not isinstance(version, int) or version <= NEWEST_VERSION:
        return []
    return [f"{name} was written by a newer version of kontrast; what this version does not know is not shown."]


NEITHER_LINK_NOR_WAIT: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags of `os.open`; Windows has neither."""


def read_bytes(path: Path) -> bytes:
    """Read a regular file of a run folder, which may come from others; b"" if there is none.

    A page is shared, so a link is not followed: it may lead to a private file of this user. A named pipe would never
    end.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NEITHER_LINK_NOR_WAIT)) as file:
            return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except (FileNotFoundError, IsADirectoryError):
        return b""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return b""
        raise UnreadableFile(f"can't read {path}: {error.strerror}") from None


def _read_table(run: ReportedRun, name: str) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing or damaged."""
    content = read_bytes(run.path / name)
    if not content:
        return {}
    try:
        table = without_nan(json.loads(content))
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        run.problems.append(f"{name} is damaged, so what it would show is missing.")
        return {}
    run.problems += newer_version(table, name)
    return table


def _read_lines(run: ReportedRun, name: str) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file. A crash leaves an incomplete last line, which is not a problem."""
    *lines, last = read_bytes(run.path / name).split(b"\n")
    records = [_read_record(line) for line in lines if line.strip()]
    if damaged := records.count(None):
        run.problems.append(f"{name}: skipped {damaged} damaged line{'s' * (damaged > 1)}.")
    return [record for record in [*records, _read_record(last)] if isinstance(record, dict)]


def _read_record(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_probe(entry: Any) -> bool:
    """Whether an entry of probes.json can be shown."""
    if not isinstance(entry, dict) or not isinstance(entry.get("probe"), str):
        return False
    accuracy, bounds = entry.get("accuracy"), (entry.get(key) for key in ("low", "high", "n"))
    known = is_finite(accuracy) and 0 <= accuracy <= 1 and all(bound is None or is_finite(bound) for bound in bounds)
    return known and isinstance(entry.get("seed"), int | str | None)


def _read_gallery(run: ReportedRun) -> None:
    gallery, sprite = _read_table(run, "gallery.json"), read_bytes(run.path / "gallery.png")
    if not gallery:
        return
    if not _is_gallery(gallery):
        run.problems.append("gallery.json is incomplete, so the map and the neighbors can't be shown.")
    elif gallery.get("sprite_sha256", "") not in ("", hashlib.sha256(sprite).hexdigest()):
        run.problems.append("gallery.json and gallery.png don't belong together: run `kontrast probe` again.")
    else:
        run.gallery, run.sprite = gallery, sprite


def _read_retrieval(run: ReportedRun) -> None:
    found, sprite = _read_table(run, "retrieval.json"), read_bytes(run.path / "retrieval.png")
    if not found:
        return
    if not _is_retrieval(found):
        run.problems.append("retrieval.json is incomplete, so what texts find can't be shown.")
    elif found.get("sprite_sha256") != hashlib.sha256(sprite).hexdigest():
        run.problems.append("retrieval.json and retrieval.png don't belong together: run `kontrast probe` again.")
    else:
        run.retrieval, run.retrieval_sprite = found, sprite


def _is_retrieval(found: dict[str, Any]) -> bool:
    """Whether retrieval.json has the entries that the page reads, with their types."""

    def whole(entry: Any, *keys: str) -> bool:
        return isinstance(entry, dict) and all(type(entry.get(k)) is int and 0 <= entry[k] < 1e9 for k in keys)

    queries, curve = found.get("queries"), found.get("curve")
    if not isinstance(queries, list) or not isinstance(curve, list) or not whole(found, "tile", "columns", "count"):
        return False
    asked = all(whole(q, "tile", "rank") and isinstance(q.get("hits"), list) for q in queries)
    hits: list[Any] = [hit for query in queries for hit in query["hits"]] if asked else [None]
    points = all(
        whole(p, "k") and is_finite(p.get("image_to_text")) and is_finite(p.get("text_to_image")) for p in curve
    )
    return points and all(whole(hit, "tile") and is_finite(hit.get("similarity")) for hit in hits)


def _is_gallery(gallery: dict[str, Any]) -> bool:
    """Whether gallery.json has the entries that the page reads, with their types."""
    numbers = [gallery.get(key) for key in ("tile", "columns", "count")]
    classes, present = gallery.get("classes"), gallery.get("classes_present", 1)
    points, queries = gallery.get("points"), gallery.get("queries")
    if not isinstance(points, list) or not isinstance(queries, list) or not isinstance(classes, list | None):
        return False
    neighbors = [query["neighbours"] for query in queries if isinstance(query, dict) and "neighbours" in query]
    if len(neighbors) < len(queries) or not all(isinstance(near, list) for near in neighbors):
        return False
    entries = [*points, *queries, *(one for near in neighbors for one in near)]
    return all(isinstance(entry, dict) for entry in entries) and all(
        isinstance(number, int) and 0 < number < 1e9 for number in (*numbers, present)
    )


def write_atomic(path: Path, content: bytes) -> Path:
    """Write to a temporary file and rename it, so that the page is never half written.

    A resumed run removes `.tmp-*` from its folder, and with it what a killed process leaves here.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # in a folder of others, it may be a link to a file elsewhere
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
