"""Compare how long the same training takes to start, and to end, under torchrun and under Ray.

    python benchmarks/engines.py [--rounds 3] [--workers 2]

The command trains the embedded digits with a tiny encoder for a few steps. Every round runs both engines, one after
the other, each with a cluster or rendezvous of its own, and prints the seconds from the command to its first step and
to its end. The last line has the medians and their ratios: only these say something on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = [
    "training.epochs=1", "training.batch=16", "training.max_steps=5", "training.log_every=1", "evaluation.every=0",
    "encoder.name=small-conv", "encoder.width=16", "--no-probes", "--device", "cpu",
]  # fmt: skip


def started(engine: str, workers: int, out: Path) -> list[str]:
    """Return the command that trains with an engine."""
    train = ["-m", "kontrast", "pretrain", *OPTIONS, "--out", str(out)]
    if engine == "ray":
        return [sys.executable, *train, "--engine", "ray", "--workers", str(workers)]
    ranks = ["--nproc-per-node", str(workers), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *train]


def measure(engine: str, workers: int, out: Path) -> tuple[float, float]:
    """Return the seconds to the first step and to the end of the command."""
    begin = time.time()
    subprocess.run(
        started(engine, workers, out), check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = time.time()
    first = json.loads((out / "speed.jsonl").read_text().splitlines()[0])
    return first["time"] - begin, end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {"torchrun": [], "ray": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for engine, found in seconds.items():
                found.append(measure(engine, options.workers, Path(folder) / f"{engine}-{number}"))
                print(f"{engine:8}  first step {found[-1][0]:6.1f} s  end {found[-1][1]:6.1f} s", flush=True)
    facts: dict[str, object] = {"cpu_count": os.cpu_count(), "python": platform.python_version()}
    for place, what in enumerate(("first_step", "end")):
        medians = {engine: statistics.median(pair[place] for pair in found) for engine, found in seconds.items()}
        facts |= {f"{engine}_{what}_s": round(value, 1) for engine, value in medians.items()}
        facts[f"{what}_ratio"] = round(medians["ray"] / medians["torchrun"], 2)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
