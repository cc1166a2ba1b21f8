"""Compare the time left that a run prints with the time that it really takes.

    python benchmarks/time_left.py [--runs quickstart evaluations moco unlabeled wide] [--epochs N] [--out FILE]

Each run is the whole command, `kontrast pretrain`, with its probes and its report. The time left is what its bar has
at 25, 50 and 75% of the steps; the truth is when the command ends. The images are the embedded digits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kontrast.cli.main import run as command
from kontrast.training import loop
from kontrast.training.checkpoints import versions
from kontrast.training.device import choose_device, describe_device
from kontrast.training.progress import Progress

MOCO = ["objective.name=info-nce", "teacher.momentum=0.99", "bank.size=2048"]
RUNS: dict[str, list[str]] = {
    "quickstart": [],
    "evaluations": ["evaluation.every=1"],
    "moco": MOCO,
    "unlabeled": ["--no-probes", "evaluation.every=0"],
    "wide": ["encoder.width=256", "training.batch=128"],
    "minutes": [],
}


def observe(arguments: list[str]) -> tuple[list[tuple[float, float, float]], float]:
    """Run the command; return share, time and time left at each quarter, and the time of its end."""
    seen: dict[int, tuple[float, float, float]] = {}

    class Watched(Progress):
        def advance(self, amount: float, measured: bool = True, **facts: Any) -> None:
            super().advance(amount, measured, **facts)
            quarter = int(4 * self.done / self.total)
            left = self.left
            if 1 <= quarter <= 3 and quarter not in seen and left is not None:
                seen[quarter] = (self.done / self.total, time.monotonic(), left)

    loop.Progress = Watched  # type: ignore[misc, attr-defined]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = command(arguments)
    if code:
        raise SystemExit(errors.getvalue())
    return [seen[quarter] for quarter in sorted(seen)], time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=[name for name in RUNS if name != "minutes"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=2.0, help="the budget of the run called minutes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", default="digits", help="the images of all runs")
    parser.add_argument("--out", type=Path)
    given, rows = parser.parse_args(), []
    for name in given.runs:
        with tempfile.TemporaryDirectory() as place:
            begin = time.monotonic()
            length = [f"training.epochs={given.epochs}"] if name != "minutes" else ["--minutes", str(given.minutes)]
            words = ["pretrain", given.data, "--out", f"{place}/run", "--device", given.device, *length, *RUNS[name]]
            quarters, end = observe(words)
        row: dict[str, Any] = {"run": name, "seconds": round(end - begin, 1), "quarters": []}
        for share, now, left in quarters:
            real = end - now
            row["quarters"].append({"share": round(share, 3), "left": round(left, 1), "real": round(real, 1)})
        row["worst"] = round(max(abs(q["left"] / q["real"] - 1) for q in row["quarters"]), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    device = describe_device(choose_device(given.device))
    arguments = {k: str(v) for k, v in vars(given).items() if k != "out"}
    facts = {"arguments": arguments, "device": device, **versions()}
    facts |= {"threads": torch.get_num_threads(), "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
