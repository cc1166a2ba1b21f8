"""Kill real runs at random moments, resume them, and compare what they end with.

    PYTHONPATH=src:tests python tests/support/kill_storm.py --kills 500 --log FILE

Torch is imported once. Every run is a fork of this process that is killed (SIGKILL) at a random moment, or during a
save, an evaluation or packing, and forked again to resume, until it ends. Each end is compared byte for byte with that
of an undisturbed run. The log has one line per kill and one verdict per variant; the exit code is 0 if all are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import platform
import random
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kontrast import __version__
from kontrast.data import store_writer as packing
from kontrast.data.pack import pack
from kontrast.objectives import OBJECTIVES
from kontrast.training import checkpoints, loop
from kontrast.training import online_probe as online
from kontrast.training.pretrain import pretrain

STEPS, IMAGES, SIDE = 20, 96, 20
TINY = [
    "encoder.width=8",
    "views.size=12",
    "head.outputs=8",
    "training.batch=16",
    "training.epochs=10",
    f"training.max_steps={STEPS}",
    "training.log_every=1",
    "evaluation.every=0",
    "checkpoints.every=0.2",
]
PHASES = ("between", "step", "save", "evaluation")
TEACHER = ["teacher.momentum=0.9", "teacher.schedule=cosine"]
BANK = [*TEACHER, "teacher.symmetric=false", "bank.size=50"]
LAZY = ["data.pack=false"]
"""Shards that are decoded as needed, by one process per core."""
OPTIONS: dict[str, list[str]] = {
    "plain": [],
    "teacher, bank, split batch norm": [
        "objective.name=info-nce", *BANK, "batch_norm.kind=split", "batch_norm.splits=4"
    ],
    "adamw, evaluation": ["training.optimizer=adamw", "training.lr=0.001", "evaluation.every=1"],
    "lars, predictor": ["objective.name=alignment", "training.optimizer=lars", *TEACHER, "predictor.name=byol"],
    "multi-crop": ["objective.name=info-nce", *TEACHER, "views.local_count=2", "views.local_size=8"],
    "accumulation": ["training.accumulate=2"],
    "shards, no workers": LAZY,
    "shards, two workers": LAZY,
    "pack": [],
}  # fmt: skip
KEYED = {"jcl": [*BANK, "bank.contents=means", "views.count=4"], "cacr": ["views.count=3"]}


def variants() -> dict[str, list[str]]:
    """Return the sets of options by name, and one for every registered objective."""
    return OPTIONS | {name: [f"objective.name={name}", *KEYED.get(name, [])] for name in OBJECTIVES}


class ChildStatus:
    """A child's phase, its step and its first step, in memory that its parent shares."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 12)

    def write(self, phase: int | None = None, step: int | None = None, first: int | None = None) -> None:
        old = self.read()
        new = [o if n is None else n for o, n in zip(old, (phase, step, first))]
        self.memory[:] = struct.pack("iii", *new)

    def read(self) -> tuple[int, int, int]:
        return struct.unpack("iii", self.memory[:])

    def during(self, owner: object, name: str, phase: str) -> None:
        """Record the phase while `owner.name` runs; called in a child."""
        inner = getattr(owner, name)

        def outer(*arguments: object, **named: object) -> object:
            before = self.read()[0]
            self.write(phase=PHASES.index(phase))
            try:
                return inner(*arguments, **named)
            finally:
                self.write(phase=before)

        setattr(owner, name, outer)

    def watch(self) -> None:
        """Record phases and steps; called in a child before it runs."""
        self.during(checkpoints, "save", "save")
        self.during(loop.Loop, "take_step", "step")
        self.during(online.OnlineProbe, "__call__", "evaluation")
        inner_run, inner_take = loop.Loop.run, loop.Loop.take_step

        def run(self_: loop.Loop, *arguments: object) -> None:
            self.write(first=self_.position.step, step=self_.position.step)
            inner_run(self_, *arguments)  # type: ignore[arg-type]

        def take(self_: loop.Loop, batch: object) -> None:
            self.write(step=self_.position.step + 1)
            inner_take(self_, batch)

        loop.Loop.run, loop.Loop.take_step = run, take  # type: ignore[method-assign,assignment]


def make_pictures(folder: Path, images: int = IMAGES) -> tuple[Path, Path]:
    """Write small images in two classes as a folder and as shards; return both paths."""
    pictures, shards = folder / "pictures", folder / "shards"
    shards.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(images):
        place = pictures / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(place / f"{number:03d}.png")
    for shard in range(3):
        with tarfile.open(shards / f"{shard:06d}.tar", "w") as tar:
            for path in sorted(pictures.rglob("*.png"))[shard::3]:
                tar.add(path, path.name)
    return pictures, shards


@dataclass
class Storm:
    """Kills runs in `folder` and compares what they end with; `say` receives the lines of the log."""

    folder: Path
    seed: int = 0
    say: Callable[[str], None] = print
    kills: int = 0
    wheres: Counter = field(default_factory=Counter)
    unequal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance, self.board = random.Random(self.seed), ChildStatus()
        self.pictures, self.shards = make_pictures(self.folder)

    def work(self, name: str, out: Path) -> None:
        """Train, resume or pack; called in a child."""
        if name == "pack":
            packing.CHUNK = 1
            pack(self.pictures, out, workers=1)
            return
        begun = (out / "recipe.toml").exists()
        pretrain(
            None if begun else (self.shards if name.startswith("shards") else self.pictures),
            recipe=None if begun else "quickstart",
            overrides=[] if begun else [*TINY, *variants()[name]],
            out=out,
            resume=begun,
            device="cpu",
            say=lambda _: None,
        )

    def fork(self, name: str, out: Path) -> int:
        self.board.memory[:] = struct.pack("iii", 0, 0, 0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                torch.set_num_threads(1)
                if name == "shards, no workers":
                    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
                self.board.watch()
                self.work(name, out)
                code = 0
            finally:
                os._exit(code)
        return child

    def finish(self, name: str, out: Path) -> float:
        """Run to the end without a kill and return the seconds."""
        begin = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(self.fork(name, out), 0)[1])
        assert code == 0, f"{name}: a run ended with {code}"
        return time.monotonic() - begin

    def kill(self, child: int, out: Path, delay: float, aim: str | None) -> bool:
        """Kill after `delay` seconds, or later in the phase `aim`; return False if the child ended before."""
        due = time.monotonic() + delay
        while time.monotonic() < due or (aim is not None and not self.is_at(out, aim)):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                assert status == 0, f"a run ended with {os.waitstatus_to_exitcode(status)}"
                return False
            time.sleep(0.0002)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True

    def is_at(self, out: Path, aim: str) -> bool:
        if aim == "pack":
            return (out / "train.part").is_dir()
        return torn(out) if aim == "save" else PHASES[self.board.read()[0]] == aim

    def where(self, out: Path) -> str:
        """Return the phase of a killed child; `save` only if it left a partial checkpoint."""
        phase, step, _ = self.board.read()
        if torn(out) or (out / "train.part").is_dir():
            return "save" if torn(out) else "pack"
        return "start" if not step else "between" if PHASES[phase] == "save" else PHASES[phase]

    def storm(self, name: str, kills: int) -> None:
        place = self.folder / name.replace(" ", "-").replace(",", "")
        seconds = self.finish(name, place / "whole")
        whole = ends(place / "whole")
        self.say(f"variant {name}: undisturbed {' '.join(f'{k} {v}' for k, v in whole.items())}")
        aims = {"pack": [None, "pack"], "adamw, evaluation": [None, "save", "evaluation"]}.get(name, [None, "save"])
        done, runs, counts = 0, 0, Counter()
        while done < kills:
            out, runs, alive = place / f"killed-{runs}", runs + 1, True
            while alive and done < kills:
                child = self.fork(name, out)
                alive = self.kill(child, out, self.chance.uniform(0, 0.6) * seconds, aims[done % len(aims)])
                if alive:
                    done += 1
                    where, (_, step, first) = self.where(out), self.board.read()
                    counts[where] += 1
                    at = "packing" if name == "pack" else f"step {step:>2} of {STEPS}, resumed from {first:>2}"
                    self.say(f"{self.kills + done:>4}  {name:<32} {where:<10}  {at}")
            if alive:
                self.finish(name, out)
            self.judge(f"{name}, run {runs}", out, whole)
        self.kills += done
        self.wheres += counts
        found = ", ".join(f"{n} in {w}" for w, n in sorted(counts.items()))
        self.say(f"verdict {name}: {done} kills ({found}) over {runs} runs; {self.verdict(name)}")
        shutil.rmtree(place)

    def judge(self, name: str, out: Path, whole: dict[str, str]) -> None:
        mine = ends(out)
        self.unequal += [f"{name}: {what} differs" for what in whole if mine.get(what) != whole[what]]
        self.unequal += [f"{name}: {p.name} was left" for p in out.rglob(".*") if p.name.startswith((".tmp-", ".del-"))]

    def verdict(self, name: str) -> str:
        wrong = [line for line in self.unequal if line.startswith(f"{name},")]
        return "; ".join(wrong) if wrong else "every end bit-equal, nothing half-written left"


def torn(out: Path) -> bool:
    return any((out / "checkpoints").glob(".tmp-*"))


def ends(out: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that the recipe determines."""
    if (out / "train").is_dir():
        return {name: sha(out / "train" / name) for name in ("images.u8", "names.json", "labels.i64", "store.json")}
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    paths = {"encoder": out / "encoder.safetensors", "checkpoint": last / "state.safetensors"}
    return {name: sha(p) for name, p in {**paths, "metrics": out / "metrics.jsonl"}.items()}


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs at random moments, resume them, compare bits.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--variants", nargs="*", default=list(variants()))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    file = asked.log.open("w") if asked.log else None

    def say(line: str) -> None:
        print(line, flush=True)
        if file:
            file.write(line + "\n")

    say(f"# {time.strftime('%Y-%m-%d')}: python tests/support/kill_storm.py --kills {asked.kills} --seed {asked.seed}")
    say(f"# kontrast {__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU, one thread")
    begin, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="kill-storm-"))
    os.environ["KONTRAST_CACHE"] = str(folder / "cache")
    storm = Storm(folder, asked.seed, say)
    storm.work("plain", folder / "imports")  # imports what a run imports lazily, once
    try:
        for number, name in enumerate(asked.variants):
            share = (number + 1) * asked.kills // len(asked.variants) - storm.kills
            storm.storm(name, share)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    saves, seconds = storm.wheres["save"], time.monotonic() - begin
    share = f"{saves} ({100 * saves / storm.kills:.0f}%) inside a save"
    say(f"{storm.kills} kills in {seconds:.0f} s, {share}: {dict(storm.wheres)}")
    say("all ends bit-equal" if not storm.unequal else "NOT EQUAL: " + "; ".join(storm.unequal))
    return int(bool(storm.unequal))


if __name__ == "__main__":
    sys.exit(main())
