"""Run every race, each in its own process; write the numbers to results/races/ and the table to results/races.md.

    python benchmarks/all.py [--only kernels views] [--full] [--table] [--results DIR]

--table runs nothing and writes results/races.md from the existing files. Files from a machine without CUDA end in -cpu.
A race that can't run here (no such device, a library that is not installed, too long) is reported and skipped, and the
file that was measured before stays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
SECONDS = 1800
Record = dict[str, Any]

TITLES = {
    "kernels": "NT-Xent, forward and backward, compared with other libraries",
    "family": "The other objectives compared with NT-Xent",
    "eager": "Every objective at a small batch, called from Python and captured",
    "image_text": "Losses of images and texts compared with open_clip's, and their training with the bare step",
    "methods": "The whole step of methods with local crops compared with the bare step of their networks",
    "links": "Several views at small batches: all pairs of views at once, or pair by pair",
    "views": "Views compared with torchvision and kornia",
    "data": "Reading images compared with torchvision's ImageFolder",
    "training": "Training end to end compared with the bare network step and with lightly",
    "probes": "Complete probes on the features of a run",
}
NEEDS_CUDA = {"family", "eager", "image_text", "methods"}
PEERS = {"kernels": ("lightly", "pytorch-metric-learning"), "image_text": ("open_clip",)}
UNITS = {
    "ms": "ms",
    "captured ms": "captured, ms",
    "share": "share of the limit",
    "per_entry": "per entry, NT-Xent = 1",
    "bare": "bare step, views/s",
    "ours": "end to end, views/s",
    "peer": "lightly's loop as documented, views/s",
    "helped_peer": "lightly's loop, optimized, views/s",
    "first_step": "first step, s",
    "type": "type",
}
HIDDEN = {"bad", "within"}


def options(race: str, cuda: bool, full: bool) -> list[str]:
    """Return a race's command-line arguments: short timings unless `full`."""
    quick = [] if full else ["--quick"]
    if race == "kernels":
        pairs = ("64", "256", "1024", "4096", "16384", "32768", "65536") if cuda else ("256", "512", "1024", "4096")
        widths = ("64", "128", "256", "512", "1024", "2048") if cuda else ("128",)
        return [*quick, "--pairs", *pairs, "--widths", *widths]
    if race == "training":
        peer = ["--peer"] if find_spec("lightly") else []
        if cuda:
            return ["--encoder", "resnet-18", "small-alexnet", "resnet-50", "--steps", "100" if full else "60", *peer]
        return ["--encoder", "small-alexnet", "--batch", "64", "--steps", "3", "--images", "1024", *peer]
    if race == "views":
        return [*quick, "--device", "cuda" if cuda else "cpu"]
    return {"family": [], "eager": [], "image_text": [], "methods": [], "probes": ["--cached"]}.get(race, quick)


def run_race(race: str, place: Path, cuda: bool, full: bool) -> str:
    """Run a race and store its numbers; return why it could not run, or an empty string."""
    script = ROOT / "benchmarks" / f"{race}.py"
    if not script.is_file():
        return f"no {script.name}"
    if race in NEEDS_CUDA and not cuda:
        return "it needs a CUDA device and there is none"
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as aside:
        made = Path(aside) / "numbers.json"
        command = [sys.executable, str(script), *options(race, cuda, full), "--json", str(made)]
        try:
            ended = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=SECONDS,
                stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it took more than {SECONDS} s"
        if ended.returncode or not made.is_file():
            return (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1]
        (place / f"{race}{'' if cuda else '-cpu'}.json").write_text(made.read_text())
    return ""


def rows_of(tree: Record) -> list[Record]:
    """Return the rows of a race's file, which holds a list of records or records by name."""
    if "cases" in tree:
        return [{"case": name, **case} for name, case in tree["cases"].items()]
    return tree.get("lines") or tree.get("rows") or []


def with_ratios(race: str, rows: list[Record]) -> list[Record]:
    """Add how much longer each contender took than we did, called the same way and in a captured CUDA graph."""
    if race == "training":
        peers = {"peer": "speedup", "helped_peer": "speedup, optimized"}
        kept = [{key: value for key, value in r.items() if key != "seconds"} for r in rows]
        return [{**r, **{name: r["ours"] / r[p] for p, name in peers.items() if p in r}} for r in kept]
    if race not in ("kernels", "image_text"):
        return rows
    same = ("type", "width", "pairs") if race == "kernels" else ("loss",)
    ours = {tuple(map(r.get, same)): r for r in rows if "kontrast" in (r["loss"], r.get("library"))}
    made = []
    for r in rows:
        mine = ours[tuple(map(r.get, same))]
        both = "captured ms" in mine and "captured ms" in r
        captured = {"times ours, captured": r["captured ms"] / mine["captured ms"]} if both else {}
        memory = {"MiB, times ours": r["MiB"] / mine["MiB"]} if race == "image_text" and "MiB" in r else {}
        made.append({**r, "times ours": r["ms"] / mine["ms"], **captured, **memory})
    return made


def flat(row: Record) -> Record:
    """Flatten nested records into columns."""
    return {
        (f"{key} {inner}" if inner else key): v
        for key, value in row.items()
        if key not in HIDDEN
        for inner, v in (value.items() if isinstance(value, dict) else [("", value)])
    }


def words(value: Any) -> str:
    """Format a cell: numbers with about three digits, `absent` for a library that was not installed."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "absent"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float | int):
        return str(value).removeprefix("torch.")
    size = abs(value)
    if isinstance(value, int) or size >= 1000 or not value:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size >= 0.01 else f"{value:.1e}"


def section(race: str, path: Path) -> list[str]:
    """Format one file as Markdown: where it was measured, then its table."""
    tree = json.loads(path.read_text())
    rows = [flat(row) for row in with_ratios(race, rows_of(tree))]
    known = {key: value for key, value in tree.items() if not isinstance(value, list | dict) and value is not None}
    facts = [f"{key.replace('_', ' ')} {words(value)}" for key, value in known.items()]
    lines = [f"**[{path.name}](races/{path.name})**: {', '.join(facts)}.", ""]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = [UNITS.get(key, key.replace("_", " ")) for key in columns]
    lines += ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    lines += ["| " + " | ".join(words(row[key]) if key in row else "" for key in columns) + " |" for row in rows]
    missing = [
        peer
        for peer in PEERS.get(race, ())
        if peer not in {row.get(key) for row in rows for key in ("loss", "library")}
    ]
    note = f"Not in this race: {', '.join(missing)} (not installed, or every size needs too much memory)."
    return [*lines, "", *([note, ""] if missing else [])]


def document(results: Path) -> str:
    """Return the text of results/races.md, made from results/races/*.json."""
    lines = ["# Races", ""]
    lines += [
        "`python benchmarks/all.py` writes this page (`--table` writes it from existing files); don't edit it by hand. "
        "The top of each script in [benchmarks/](../benchmarks/) says what the race measures. *absent* means that a "
        "library was not installed.",
        "",
    ]
    for race, title in TITLES.items():
        lines += [f"## {title}", "", f"`python benchmarks/{race}.py`", ""]
        for suffix, device in (("", "a CUDA device"), ("-cpu", "a CPU")):
            path = results / "races" / f"{race}{suffix}.json"
            if path.is_file():
                lines += section(race, path)
            elif suffix and race in NEEDS_CUDA:
                lines += ["On a CPU: not run, since it needs a CUDA device.", ""]
            else:
                lines += [f"On {device}: not yet run.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--full", action="store_true", help="long timings")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    place = arguments.results / "races"
    place.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        import torch

        cuda = torch.cuda.is_available()
        for race in arguments.only:
            print(f"== {race}", flush=True)
            why = run_race(race, place, cuda, arguments.full)
            print(f"{race} was not run: {why}" if why else f"{race} is done", flush=True)
    (arguments.results / "races.md").write_text(document(arguments.results), encoding="utf-8")
    print(arguments.results / "races.md")


if __name__ == "__main__":
    main()
