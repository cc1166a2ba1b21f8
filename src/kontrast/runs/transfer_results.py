"""transfer.json: what a run's encoder, and its controls, did in other tasks; as tables for people."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kontrast.errors import CheckpointError
from kontrast.files import read_json, take_lock, write_json
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.runs.result_sequence import ResultSequence

FILE = "transfer.json"
TEXTS = ("task", "data", "method", "amount", "encoder")
"""What the seeds of one row of a table have in common."""


@dataclass(frozen=True)
class TransferResult:
    """One measurement of one encoder in one task.

    Args:
        task: "boxes", "masks", "keypoints" or "classify".
        data: the data as the user wrote it.
        encoder: "trained", "random" or the path of another run.
        method: the protocol of a detector, or how a classifier was trained ("linear", "fine-tuned").
        amount: how much of the training data was labeled: a share, or the images per class.
        seed: the seed.
        metric: the name of the main score.
        score: its value, from 0 to 1.
        scores: all scores by name.
        facts: numbers of images, settings and seconds.
        fingerprint: what decides the result: data, protocol, weights, seed.
        common: the same without the seed, which all results of a row have in common; "" in files of older versions.

    Example:
        >>> TransferResult("boxes", "canvases", "trained", "canvases", "10% of labels", 0, "AP", 0.5).score
        0.5
    """

    task: str
    data: str
    encoder: str
    method: str
    amount: str
    seed: int
    metric: str
    score: float
    scores: dict[str, float] | None = None
    facts: dict[str, Any] | None = None
    fingerprint: str = ""
    common: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return dataclasses.asdict(self)

    @property
    def row(self) -> tuple[str, ...]:
        """The row of a table that the result belongs to."""
        return tuple(getattr(self, key) for key in TEXTS)


@dataclass(frozen=True, repr=False)
class TransferResults(ResultSequence[TransferResult]):
    """The results of one call of `transfer`, printed as a table of means with 95% intervals over seeds."""

    path: Path

    def __str__(self) -> str:
        return "\n".join(line for table in transfer_tables(self.items) for line in table_lines(table))

    def to_dict(self) -> dict[str, Any]:
        return {"transfer": str(self.path), "results": [one.to_dict() for one in self.items]}


def read_results(folder: Path) -> list[TransferResult]:
    """Return the results in a run's transfer.json; none if there is no such file."""
    path = folder / FILE
    tree = read_json(path) if path.exists() else {"results": []}
    entries = tree.get("results") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not all(map(_is_result, entries)):
        raise CheckpointError(f"{path} is damaged: it holds no list of results; remove it and repeat")
    return [TransferResult(**entry) for entry in entries]


def _is_result(entry: Any) -> bool:
    """Whether an entry of transfer.json, which may come from others, has the entries of a result with their types."""
    names = {field.name for field in dataclasses.fields(TransferResult)}
    if not isinstance(entry, dict) or set(entry) | {"common"} != names:
        return False
    texts = all(isinstance(entry.get(key, ""), str) for key in (*TEXTS, "metric", "fingerprint", "common"))
    scores = {"score": entry["score"], **(entry["scores"] or {})} if isinstance(entry["scores"], dict | None) else {}
    numbers = all(isinstance(value, int | float) and 0 <= value <= 1 for value in scores.values())
    return texts and numbers and bool(scores) and isinstance(entry["seed"], int)


def fingerprints(decisive: dict[str, Any], seed: int, **drawn: Any) -> tuple[str, str]:
    """Return the fingerprint of a result, and the one that all seeds have in common.

    Args:
        decisive: what decides the result, as plain values.
        seed: the seed.
        **drawn: what it decides.
    """
    trees = ({**decisive, **drawn, "seed": seed}, decisive)
    one, common = (hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest() for tree in trees)
    return one, common


def find_result(folder: Path, fingerprint: str, common: str) -> TransferResult | None:
    """Return the result that an earlier call found, and save what all seeds have in common if it lacks that."""
    found = next((one for one in read_results(folder) if one.fingerprint == fingerprint), None)
    if found is not None and found.common != common:
        found = dataclasses.replace(found, common=common)
        save_result(folder, found)
    return found


def save_result(folder: Path, result: TransferResult) -> None:
    """Add a result to transfer.json, replacing the one of the same row and seed.

    Results of the row that were found with other settings, data or weights are left out: they can't be averaged. Of
    those of older versions it is not known, and they stay.
    """
    lock = take_lock(folder)  # several processes may measure at once
    try:
        kept = [
            one
            for one in read_results(folder)
            if one.row != result.row or (one.seed != result.seed and one.common in ("", result.common))
        ]
        everything = [*kept, result]
        tree = {"version": 1, "results": [one.to_dict() for one in everything], "tables": transfer_tables(everything)}
        write_json(folder / FILE, tree)
    finally:
        os.close(lock)


def transfer_tables(results: Sequence[TransferResult]) -> list[dict[str, Any]]:
    """Return one table per task, with a row per data, method, amount and encoder; for classification one more, with the
    mean over sets and the mean rank of each encoder."""
    tables = []
    for task in dict.fromkeys(one.task for one in results):
        own = [one for one in results if one.task == task]
        names = list(dict.fromkeys(name for one in own for name in one.scores or {one.metric: one.score}))
        columns = [
            "data",
            "method",
            "labels",
            "encoder",
            "seeds",
            *(names if task != "classify" else ["metric", "score"]),
        ]
        rows = []
        for key in dict.fromkeys(one.row for one in own):
            seeds = [one for one in own if one.row == key]
            lead = [Path(key[1]).name, key[2], key[3], Path(key[4]).name, str(len(seeds))]  # the report is shared
            if task == "classify":
                rows.append([*lead, seeds[0].metric, with_interval([one.score for one in seeds])])
            else:
                found = [[(one.scores or {}).get(name) for one in seeds] for name in names]
                rows.append([*lead, *(with_interval([v for v in values if v is not None]) for values in found)])
        tables.append({"title": f"Transfer: {task}", "task": task, "columns": columns, "rows": rows, "note": NOTE})
        if task == "classify" and len({one.data for one in own}) > 1:
            tables.append(rank_table(own))
    return tables


NOTE = (
    "Percent: the mean over seeds, with its 95% interval (Student's t) if there are several. Last checkpoint or epoch."
)


def rank_table(results: Sequence[TransferResult]) -> dict[str, Any]:
    """Return the mean score over sets, its interval over seeds, and the mean rank of each encoder, by method."""
    rows = []
    for method, amount in dict.fromkeys((one.method, one.amount) for one in results):
        own = [one for one in results if (one.method, one.amount) == (method, amount)]
        encoders = list(dict.fromkeys(one.encoder for one in own))
        sets = [d for d in dict.fromkeys(one.data for one in own) if all(_scores(own, d, e) for e in encoders)]
        if not sets:
            continue
        ranks = {e: fmean(rank_of(own, d, e, encoders) for d in sets) for e in encoders}
        for encoder in encoders:
            by_seed = [_scores(own, d, encoder) for d in sets]
            count = min(map(len, by_seed))
            means = [fmean(values[i] for values in by_seed) for i in range(count)]
            rows.append(
                [method, amount, Path(encoder).name, str(len(sets)), with_interval(means), f"{ranks[encoder]:.2f}"]
            )
    columns = ["method", "labels", "encoder", "sets", "mean score", "mean rank"]
    return {
        "title": "Transfer: all sets",
        "columns": columns,
        "rows": rows,
        "note": "Rank 1 is the best encoder of a set.",
    }


def rank_of(results: Sequence[TransferResult], data: str, encoder: str, encoders: Sequence[str]) -> float:
    """Return the rank of an encoder on a set by its mean score, 1 for the best; equal ones share their mean rank."""
    means = {e: fmean(_scores(results, data, e)) for e in encoders}
    better, equal = (
        sum(compare(v, means[encoder]) for v in means.values()) for compare in (float.__gt__, float.__eq__)
    )
    return better + (equal + 1) / 2


def _scores(results: Sequence[TransferResult], data: str, encoder: str) -> list[float]:
    return [
        one.score for one in sorted(results, key=lambda one: one.seed) if (one.data, one.encoder) == (data, encoder)
    ]


def with_interval(values: Sequence[float]) -> str:
    """Write a mean as percent, with its interval over seeds.

    Example:
        >>> with_interval([0.5]), with_interval([0.5, 0.52])
        ('50.0', '51.0 (38.3 to 63.7)')
    """
    if not values:
        return ""
    span = within_one(over_seeds(list(values)))
    text = f"{100 * fmean(values):.1f}"
    return text if span is None else f"{text} ({100 * span[0]:.1f} to {100 * span[1]:.1f})"


def table_lines(table: dict[str, Any]) -> list[str]:
    """Return a table as aligned lines."""
    rows = [table["columns"], *table["rows"]]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(table["columns"]))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
