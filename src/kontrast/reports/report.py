"""Write report.html: the page's data are one JSON block, and its template, style and scripts are fixed text.

Only the escaped title of a run enters the markup. Names, labels and recipes are data, which the scripts show through
textContent. The content security policy forbids every request, and every script but ours, which it knows by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import io
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kontrast.reports.classifier_tables import classifier_verdict, classifier_view, drop_damaged_classifier
from kontrast.reports.curves import curve_plots
from kontrast.reports.facts import differences, facts, summary, title
from kontrast.reports.lens_plots import drop_damaged_lens, lens_numbers, lens_plots, lens_weights
from kontrast.reports.probe_results import references, result_groups, verdict
from kontrast.reports.retrieval_panel import retrieval_panel
from kontrast.reports.run_files import ReportedRun, ReportError, make_names_distinct, read_run, shorten, write_atomic
from kontrast.reports.study_tables import read_study
from kontrast.reports.transfer_tables import transfer_sections

SCRIPTS = ("draw.js", "plot.js", "results.js", "gallery.js", "texts.js", "weights.js", "classifier.js", "page.js")
PICTURE_BYTES = 3_000_000
MAX_GALLERIES = 8
MAX_SPRITE_PIXELS = 64_000_000
"""As for every image that kontrast decodes: a file of a few kilobytes may claim to have many more."""
ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class ReportPage(type(Path())):  # type: ignore[misc]
    """The path of a report, which appears as the page itself at the end of a cell in Jupyter."""

    def _repr_html_(self) -> str:
        from kontrast.notebook import html_of_page  # only Jupyter needs it: this room imports nothing of ours

        return html_of_page(self)


def report(
    runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    study: str | os.PathLike[str] | None = None,
) -> ReportPage:
    """Write one self-contained HTML page about one or several runs.

    Args:
        runs: A run folder or `Run`, or several of them. Unfinished and damaged folders are shown as far as possible.
        out: The page to write. Default: report.html in the folder of a single run.
        study: A comparison.json or audit.json, whose verdict, tables and plots come first. It needs no runs.

    Returns:
        The path of the page. At the end of a cell in Jupyter, the page itself appears.

    Example:
        >>> import kontrast, pathlib, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "loss": 5.0}')
        >>> kontrast.report(run).name
        'report.html'
    """
    folders = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    if (not folders and study is None) or (out is None and len(folders) != 1):
        raise ReportError(f"got {len(folders)} runs: give at least one run, and --out PAGE.html for several")
    read = [read_run(folder) for folder in folders]
    make_names_distinct(read)
    page = render(payload(read, read_study(Path(study)) if study else None))
    return ReportPage(write_atomic(folders[0] / "report.html" if out is None else Path(out), page))


def payload(runs: list[ReportedRun], study: dict[str, Any] | None = None) -> dict[str, Any]:
    """Collect everything that the page shows."""
    for run in runs:
        drop_damaged_lens(run)
        drop_damaged_classifier(run)
    with_gallery = [run for run in runs if run.gallery][:MAX_GALLERIES]
    budget = PICTURE_BYTES // max(1, len(with_gallery))
    return {
        "version": 1,
        "title": (study or {}).get("title") or title(runs),
        "verdict": (study or {}).get("verdict") or (len(runs) == 1 and classifier_verdict(runs[0])) or verdict(runs),
        "study": study,
        "results": [] if study else result_groups(runs),
        "curves": curve_plots(runs, references(runs[0])) if runs else [],
        "lens": lens_plots(runs),
        "numbers": [entry for index, run in enumerate(runs) for entry in lens_numbers(run, index)],
        "weights": lens_weights(runs),
        "classifier": classifier_view(runs[0]) if len(runs) == 1 else None,
        "differences": differences(runs) if len(runs) > 1 else [],
        "runs": [
            {
                "gallery": _gallery(run, budget) if run in with_gallery else None,
                "retrieval": _retrieval(run, budget),
                "transfer": _transfers(run, PICTURE_BYTES // max(1, len(runs))),
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
    """Fill the template with the style, the scripts and the data, escaped so that no text in it can end its block."""
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
    # One split instead of repeated replacing: a name in the data may itself be "@SCRIPT@".
    return "".join(parts.get(piece, piece) for piece in re.split("(@[A-Z]+@)", page)).encode("utf-8", "replace")


def _gallery(run: ReportedRun, budget: int) -> dict[str, Any] | None:
    """Return the run's map and neighbors with short names and the sprite as a data address."""
    gallery, sprite = run.gallery or {}, _sprite_address(run.sprite, budget)
    if sprite is None:
        run.problems.append("gallery.png is damaged, so the map and the neighbors can't be shown.")
        return None
    entries = {key: [_with_short_names(entry) for entry in gallery[key]] for key in ("points", "queries")}
    classes = gallery.get("classes")
    return {**gallery, **entries, "classes": classes and [shorten(name) for name in classes], "sprite": sprite}


def _retrieval(run: ReportedRun, budget: int) -> dict[str, Any] | None:
    """Return the run's texts and the images that they find, with the sprite as a data address."""
    if run.retrieval is None:
        return None
    sprite = _sprite_address(run.retrieval_sprite, budget)
    if sprite is None:
        run.problems.append("retrieval.png is damaged, so what texts find can't be shown.")
    return None if sprite is None else retrieval_panel(run, sprite)


def _transfers(run: ReportedRun, budget: int) -> list[dict[str, Any]]:
    """Return the tables of a run's transfers, with their pictures as data addresses."""
    sections = transfer_sections(run)
    for section in sections:
        content = section["picture"]
        section["picture"] = _sprite_address(content, budget // len(sections)) if content else None
    return sections


def _with_short_names(entry: dict[str, Any]) -> dict[str, Any]:
    short = {**entry, "name": shorten(entry.get("name", ""))}
    if "neighbours" in entry:
        short["neighbours"] = [_with_short_names(neighbor) for neighbor in entry["neighbours"]]
    return short


def _sprite_address(sprite: bytes, budget: int) -> str | None:
    """Return the sprite as a data address within the budget: as it is, or as WebP of lower and lower quality."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(sprite), formats=["PNG"]) as opened:
            if opened.width * opened.height > MAX_SPRITE_PIXELS:
                return None
            picture = opened.convert("RGB")
    except Exception:  # Pillow's decoders raise nearly every built-in exception on damaged files
        return None
    kind, content = "png", sprite
    for quality in (90, 75, 50, 25, 5):
        if len(content) * 4 / 3 <= budget:
            break
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=quality)
        kind, content = "webp", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
