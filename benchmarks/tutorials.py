"""How long each tutorial takes: execute the pages of docs/tutorials and write results/tutorials.md.

    uv run --group docs python benchmarks/tutorials.py                     # all pages
    uv run --group docs python benchmarks/tutorials.py detection a-cluster # some; the rows of the others stay
    uv run --group docs python benchmarks/tutorials.py --out executed      # also the executed notebooks, as .ipynb

Each page runs alone, in a new kernel and an empty folder, as when the site is built. The seconds include the start of
the kernel and the import of torch. Processor seconds are those of the kernel and of all commands that its cells ran,
over all cores; they depend less on other work of the machine than the seconds on the clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from builder.notebook_environment import notebook_environment  # noqa: E402

PAGES = ROOT / "docs" / "tutorials"
RESULTS = ROOT / "results" / "tutorials.json"
HEAD = """# How long the tutorials take

`python benchmarks/tutorials.py` executes each page of [the tutorials](../docs/tutorials/index.md) alone, in a new
kernel. Processor seconds are those of the kernel and of all commands of the page, over all cores; seconds on the clock
also depend on what else the machine did, which the load says: the mean number of processes that wanted to run, on so
many cores. The aim is less than 20 s on two idle cores.

| page | processor seconds | seconds on the clock | load, cores | torch threads | measured |
| --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the tutorials and write results/tutorials.md.")
    parser.add_argument("pages", nargs="*", help="names of pages (default: all)")
    parser.add_argument("--out", type=Path, help="a folder for the executed notebooks")
    arguments = parser.parse_args()
    known = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")
    if unknown := set(arguments.pages) - set(known):
        sys.exit(f"no such tutorial: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    os.environ.update(notebook_environment())
    for name in arguments.pages or known:
        row = measure(name, arguments.out)
        print(f"{name}: {row['processor_seconds']} s of the processors, {row['seconds']} s on the clock", flush=True)
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        rows = {page: one for page, one in {**rows, name: row}.items() if page in known}
        RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        RESULTS.with_suffix(".md").write_text(HEAD + "".join(table_line(page, rows[page]) for page in sorted(rows)))


def measure(name: str, out: Path | None) -> dict[str, Any]:
    """Execute a page and return its times; a cell that fails raises."""
    from myst_nb.core.read import read_myst_markdown_notebook
    from nbclient import NotebookClient
    from nbformat import write

    notebook = read_myst_markdown_notebook((PAGES / f"{name}.md").read_text(encoding="utf-8"))
    start, before, load = time.perf_counter(), processor_seconds(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        try:
            client = NotebookClient(
                notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
            )
            client.execute()
        finally:
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                write(notebook, out / f"{name}.ipynb")
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(processor_seconds() - before, 1),
        "load": round(max(load, os.getloadavg()[0]), 1),
        "cores": os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}",
    }


def processor_seconds() -> float:
    """Return the seconds of all finished child processes and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table_line(name: str, row: dict[str, Any]) -> str:
    link, load = f"[{name}](../docs/tutorials/{name}.md)", f"{row['load']} on {row['cores']}"
    measured = f"{row['date']}, {row['versions']}"
    cells = [link, row["processor_seconds"], row["seconds"], load, row["threads"], measured]
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    main()
