"""A soak test in one process: train, probe, look, embed, search and report in a loop, and watch what the process holds.

    PYTHONPATH=src:tests python tests/support/soak.py --minutes 60 [--json FILE] [--svg FILE]

After every round, and a garbage collection, it counts resident memory, Python objects, file descriptors, threads, child
processes, segments of shared memory and temporary files. The exit code is 0 if none of them grows: a straight line is
fitted to each curve after a warm-up, and its rise must not be above the noise around it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kontrast
from kontrast.papers.line_chart import Line, line_chart

from support.kill_storm import LAZY, TINY, make_pictures

WARM_UP = 0.2
"""The share of the rounds that is left out of the fit: caches fill, and the allocator finds its size."""
POINTS = 300
"""At most so many points of each curve are written; all rounds are fitted."""
STEPS = [*TINY, "training.max_steps=6", "evaluation.every=1"]
FLOORS = {"memory_mib": 8.0, "objects": 500.0}
"""A smaller rise than this is no leak: memory is given back in pages, and caches hold a few hundred objects. Everything
else is counted in whole pieces, of which half a one is too many."""


@dataclass(frozen=True)
class Trend:
    """A straight line through one curve: its slope per round, its rise over all rounds, and the noise around it."""

    slope: float
    rise: float
    noise: float
    floor: float

    @property
    def grows(self) -> bool:
        return self.rise > max(3 * self.noise, self.floor)


def fit(name: str, values: Sequence[float]) -> Trend:
    """Fit a line to the values after the warm-up; the noise is the standard deviation of what it leaves."""
    kept = np.asarray(values[int(WARM_UP * len(values)) :], dtype=float)
    rounds = np.arange(len(kept))
    slope, start = np.polyfit(rounds, kept, 1)
    noise = float(np.std(kept - start - slope * rounds))
    return Trend(float(slope), float(slope * (len(kept) - 1)), noise, FLOORS.get(name, 0.5))


def hold(temporary: Path) -> dict[str, float]:
    """Count what this process holds now. `temporary` is the folder of its temporary files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "children": len(children),
        "shared_memory": sum(mine(path) for path in Path("/dev/shm").iterdir()),
        "temporary_files": sum(1 for _ in temporary.rglob("*")),
    }


def mine(path: Path) -> bool:
    """Whether this process has the segment of shared memory open, or maps it."""
    return str(path) in Path("/proc/self/maps").read_text() or any(
        os.path.realpath(f"/proc/self/fd/{number}") == str(path) for number in os.listdir("/proc/self/fd")
    )


@dataclass
class Soak:
    """Rounds of work in `folder`, with what the process held after each of them.

    The caller sees to it that temporary files are created in the folder `temporary`, which is created here.
    """

    folder: Path
    temporary: Path
    images: int = 640  # enough that embedding them starts decoding processes
    samples: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pictures, self.shards = make_pictures(self.folder / "data", self.images)
        self.temporary.mkdir()
        self.pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)

    def round(self) -> None:
        """Do everything once, in a folder that is removed afterwards, and take a sample."""
        number, place = len(self.samples), self.folder / "round"
        sources: list[tuple[Any, list[str]]] = [(self.pictures, []), (self.shards, LAZY), (self.pixels, [])]
        source, options = sources[number % len(sources)]  # in memory, decoded by other processes, packed
        quiet: dict[str, Any] = {"device": "cpu", "say": lambda _: None}
        settings = dict(text.split("=") for text in [*STEPS, *options])
        overrides = {key: json.loads(value) for key, value in settings.items()}
        run = kontrast.pretrain(source, "quickstart", out=place / "run", **quiet, **overrides)
        kontrast.probe(run, "knn" if number % 2 else "linear", data=self.pictures, **quiet)
        kontrast.lens(run, images=32, augmentations=2, **quiet)
        kontrast.embed(run, self.pictures, place / "vectors.npy", **quiet)
        image = next(self.pictures.rglob("*.png"))
        kontrast.neighbors(run, image, embeddings=place / "vectors.npy", k=3, **quiet)
        kontrast.report(run)
        shutil.rmtree(place)
        self.samples.append(hold(self.temporary))

    def go_on(self, minutes: float, say: Callable[[str], None]) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < 60 * minutes or len(self.samples) < 3:
            self.round()
            counts = ", ".join(f"{name} {value:g}" for name, value in self.samples[-1].items())
            say(f"{(time.monotonic() - begin) / 60:6.1f} min, round {len(self.samples):>4}: {counts}")

    def trends(self) -> dict[str, Trend]:
        return {name: fit(name, [sample[name] for sample in self.samples]) for name in self.samples[0]}


def chart(samples: Sequence[dict[str, float]], every: int) -> str:
    """Draw each curve in percent of its mean after the warm-up, so that all share an axis; `every` n-th round."""
    start, lines = int(WARM_UP * len(samples)), []
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        mean = float(np.mean(values[start:]))
        label = f"{name.replace('_', ' ')} (mean {mean:,.1f})"
        points = [(n + 1, 100 * value / mean if mean else 100.0) for n, value in enumerate(values)]
        lines.append(Line(label, points[::every]))
    return line_chart("What one process holds, in percent of the mean after the warm-up", "round", lines, unit="%")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything in a loop in one process, and watch for leaks.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
        os.environ["KONTRAST_CACHE"] = str(folder / "cache")
        soak = Soak(folder, Path(tempfile.tempdir))
        soak.go_on(asked.minutes, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trends = soak.trends()
    for name, trend in trends.items():
        facts = f"{trend.slope:+10.4f} per round, {trend.rise:+9.2f} in all, noise {trend.noise:8.2f}"
        print(f"{name:<16} {facts}: {'GROWS' if trend.grows else 'flat'}")
    every = -(-len(soak.samples) // POINTS)
    if asked.json:
        about = {
            "command": f"python tests/support/soak.py --minutes {asked.minutes:g}", "date": time.strftime("%Y-%m-%d"),
            "kontrast": kontrast.__version__, "torch": torch.__version__, "python": platform.python_version(),
            "rounds": len(soak.samples), "warm_up": WARM_UP, "curves_every": every,
        }  # fmt: skip
        fitted = {n: {k: round(v, 6) for k, v in vars(t).items()} | {"grows": t.grows} for n, t in trends.items()}
        curves = {name: [round(sample[name], 3) for sample in soak.samples[::every]] for name in trends}
        lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in curves.items()]
        head = json.dumps({**about, "trends": fitted}, indent=1).removesuffix("\n}")
        asked.json.write_text(head + ',\n "curves": {\n' + ",\n".join(lines) + "\n }\n}\n")
    if asked.svg:
        asked.svg.write_text(chart(soak.samples, every))
    return int(any(trend.grows for trend in trends.values()))


if __name__ == "__main__":
    sys.exit(main())
