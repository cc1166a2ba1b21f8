"""Runs to one HTML file: everything the page shows is one JSON payload; the template, style and scripts are fixed text.

Nothing of a run enters the markup but the escaped title: names, labels and recipes travel as data and reach the page
through textContent. The content security policy forbids every request and every script but ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import io
import json
import re
from pathlib import Path
from typing import Any

from kontrast.reports.curves import curve_plots
from kontrast.reports.facts import differences, facts, summary, title
from kontrast.reports.lens_plots import lens_numbers, lens_plots, lens_weights
from kontrast.reports.probe_results import references, result_groups, verdict
from kontrast.reports.run_files import ReportedRun, ReportError, distinct_names, read_run, shorten, write_atomic
from kontrast.reports.study_tables import read_study

SCRIPTS = ("draw.js", "plot.js", "results.js", "gallery.js", "weights.js", "page.js")
PICTURE_BYTES = 3_000_000
MOST_GALLERIES = 8
ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_report(runs: list[Path], out: Path, study: Path | None = None) -> Path:
    """Write one self-contained page about one or several run folders; returns its path.

    study: a comparison.json or audit.json, whose sentence, tables and plots lead the page; it needs no runs.
    """
    if not runs and study is None:
        raise ReportError("a report needs at least one run folder")
    read = [read_run(path) for path in runs]
    distinct_names(read)
    return write_atomic(Path(out), render(payload(read, read_study(study) if study else None)))


def payload(runs: list[ReportedRun], study: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything the page shows, as plain tables."""
    shown = [run for run in runs if run.gallery][:MOST_GALLERIES]
    budget = PICTURE_BYTES // max(1, len(shown))
    return {
        "version": 1,
        "title": (study or {}).get("title") or title(runs),
        "verdict": (study or {}).get("verdict") or verdict(runs),
        "study": study,
        "results": [] if study else result_groups(runs),
        "curves": curve_plots(runs, references(runs[0])) if runs else [],
        "lens": lens_plots(runs),
        "numbers": [entry for place, run in enumerate(runs) for entry in lens_numbers(run, place)],
        "weights": lens_weights(runs),
        "differences": differences(runs) if len(runs) > 1 else [],
        "runs": [
            {
                "gallery": _gallery(run, budget) if run in shown else None,
                "name": shorten(run.name),
                "summary": summary(run),
                "finished": run.finished or not run.info,
                "facts": facts(run),
                "recipe": run.recipe_text,
                "problems": run.problems,
            }
            for run in runs
        ],
    }


def render(data: dict[str, Any]) -> bytes:
    """The page's bytes: template, style, scripts and the payload as a block that no text in it can close."""
    template = importlib.resources.files("kontrast.reports") / "template"
    script = "\n".join((template / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "@TITLE@": html.escape(data["title"]),
        "@POLICY@": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "@STYLE@": (template / "style.css").read_text(encoding="utf-8"),
        "@DATA@": json.dumps(data, allow_nan=False, separators=(",", ":")).translate(ESCAPES),
        "@SCRIPT@": script,
    }
    page = (template / "page.html").read_text(encoding="utf-8")
    # Split once, never replace in what was put in: a name may well be "@SCRIPT@".
    return "".join(parts.get(piece, piece) for piece in re.split("(@[A-Z]+@)", page)).encode("utf-8", "replace")


def _gallery(run: ReportedRun, budget: int) -> dict[str, Any] | None:
    gallery = dict(run.gallery or {})
    picture = _fitting(run.sprite, budget)
    if picture is None:
        run.problems.append("gallery.png could not be read as a picture, so the map and the neighbours are missing.")
        return None
    for key in ("points", "queries"):
        gallery[key] = [_named(entry) for entry in gallery[key]]
    classes = gallery.get("classes")
    gallery["classes"] = [shorten(name) for name in classes] if isinstance(classes, list) else None
    return {**gallery, "sprite": picture}


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    named = {**entry, "name": shorten(entry.get("name", ""))}
    if "neighbours" in entry:
        named["neighbours"] = [_named(neighbour) for neighbour in entry["neighbours"]]
    return named


def _fitting(sprite: bytes, budget: int) -> str | None:
    """The sprite as a data address within the budget: as it is, or as WebP, coarser and coarser."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(sprite), formats=["PNG"]) as opened:
            picture = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        return None
    kind, content = "png", sprite
    for quality in (90, 75, 50, 25, 5):
        if len(content) * 4 / 3 <= budget:
            break
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=quality)
        kind, content = "webp", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
