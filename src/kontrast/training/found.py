"""What the probes of a run found: kept in its probes.json, and told in a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

from kontrast.probes import ProbeResult
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.registry import CheckpointError
from kontrast.training.folder import read_json, write_json
from kontrast.training.run import Run

KINDS = ("trained", "untrained", "pixels")
"""Features that are probed: the encoder's, and those of the two controls."""


def keep(run: Run, results: list[ProbeResult], data: str | None, labels: Path | None = None) -> list[ProbeResult]:
    """Results by probe, features, seed and, where not the run's own, data and labels: new ones replace their like."""
    others = {"data": data, "labels": None if labels is None else str(labels)}
    others = {key: value for key, value in others.items() if value is not None}
    results = [dataclasses.replace(r, protocol={**r.protocol, **others}) for r in results]
    path = run.path / "probes.json"
    before = read_probes(path) if path.exists() else []
    kept = {_place(r): r for r in [*before, *(r.to_dict() for r in results)]}
    if results:
        write_json(path, {"version": 1, "probes": list(kept.values())})
    return results


def read_probes(path: Path) -> list[dict[str, Any]]:
    """The results that a run's probes.json holds."""
    tree = read_json(path)
    found = tree.get("probes", []) if isinstance(tree, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise CheckpointError(f"{path} is damaged: it holds no list of probes; remove it and probe again")
    return found


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    protocol = entry.get("protocol")
    others = [protocol.get(key) for key in ("data", "labels")] if isinstance(protocol, dict) else [None, None]
    return entry.get("probe"), entry.get("features"), entry.get("seed"), *others


def result_table(results: list[ProbeResult]) -> list[str]:
    """Accuracy by probe and features, for the terminal; of several seeds the mean, with its interval below."""
    if not results:
        return []
    lines = [f"{'accuracy':<10}" + "".join(f"{kind:>16}" for kind in KINDS)]
    for probe in dict.fromkeys(r.probe for r in results):
        values = {kind: [r.accuracy for r in results if (r.probe, r.features) == (probe, kind)] for kind in KINDS}
        means = {kind: f"{fmean(found):.3f}" if found else "" for kind, found in values.items()}
        lines.append(f"{probe:<10}" + "".join(f"{means[kind]:>16}" for kind in KINDS))
        spans = {kind: within_one(over_seeds(found)) for kind, found in values.items()}
        if any(spans.values()):
            count = max(map(len, values.values()))
            texts = [f"{span[0]:.3f} to {span[1]:.3f}" if span else "" for span in spans.values()]
            lines.append(f"{f'{count} seeds':<10}" + "".join(f"{text:>16}" for text in texts))
    return lines
