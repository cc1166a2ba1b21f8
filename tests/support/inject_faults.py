"""Let every system call of a command fail once, run the command again, and compare what it ends with.

    PYTHONPATH=src:tests python tests/support/inject_faults.py [--commands pretrain] [--limit 20] [--results FOLDER]

A first run of each command counts its calls of each kind (open, write, fsync, ...) on files below its folder. Then the
command is run once per call and error, in a fork of this process, which imports torch once and loads failing_calls.c
with LD_PRELOAD. Every such point must end with a documented exit code, one line and no traceback, nothing half-written
under its final name; and the same command (with --resume, if a run has begun) must then end with the same bytes as an
undisturbed one. Points that leave the folder in the same state are continued once. The exit code is 0 if all points
hold.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from support.failing_calls import ALL, LIBRARY, MAIN, Point, compile_library, environment_with, points_of
from support.faulty_commands import CHUNK, Ended, run_as_process, run_in_fork
from support.folder_checks import contents, half_written, leftovers, state, without_process
from support.injected_commands import Case, cases
from support.injected_table import Findings, join, save

DOCUMENTED = (0, 2, 3, 4, 5, 6, 75, 130)


class Injection:
    """Runs commands in `folder`, with and without a failing call, and keeps what it finds."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print):
        self.folder, self.say = folder, say
        self.place, self.log = folder / "place", folder / "log"
        self.broken: list[dict[str, Any]] = []
        self.unlike: list[dict[str, Any]] = []
        self.states = self.compared = 0
        self.tried: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def fill(self, case: Case) -> None:
        """Put the folder into the state before the command."""
        template = self.folder / f"template-{case.name}"
        shutil.rmtree(self.place, ignore_errors=True)
        if not template.exists():
            self.place.mkdir()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                case.prepare(self.place)
            os.rename(self.place, template)
        shutil.copytree(template, self.place)

    def run(self, argv: list[str], point: Point | None = None) -> Ended:
        return run_in_fork(argv, self.place, point, self.log)

    def count(self, case: Case) -> None:
        """Run the command twice without a fault: count its calls, and find the files that it determines."""
        from kontrast.cli import main as cli

        ends = []
        for number in range(3):
            self.fill(case)
            if number == 0:  # here, so that what a command imports lazily is imported once
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    assert cli.run(case.argv(self.place)) == 0
                continue
            ended = self.run(case.argv(self.place))
            assert ended.code == 0, ended.said
            ends.append(contents(self.place))
            time.sleep(1.1)  # so that files with a time in them differ
        case.counts, case.names = ended.counts, set(ends[0])
        case.whole = {name: content for name, content in ends[0].items() if ends[1].get(name) == content}
        self.say(f"{case.name}: {sum(case.counts.values())} calls {case.counts}, {len(case.whole)} files determined")

    def inject(self, case: Case, point: Point) -> list[str]:
        """Run the command with a failing call, then again without; return what is wrong."""
        self.fill(case)
        first = self.run(case.argv(self.place), point)
        problems = judge_end(first, self.place) + ([] if first.failed else ["no call failed: there are fewer of them"])
        left = state(self.place, case.whole), first.code == 0
        if left not in case.judged:
            case.judged[left] = self.judge_state(case, succeeded=first.code == 0)
            self.states += 1
        problems += case.judged[left]
        entry = self.tried[case.name, point.kind, point.error]
        entry.update({"tried": 1, "held": int(not problems), f"exit {first.code}": 1})
        if problems:
            self.broken.append(
                {"command": case.name, **point._asdict(), "path": self.relative(first.failed), "problems": problems}
                | {"exit": first.code, "line": self.relative(first.line)}
            )
            self.say(f"BROKEN {case.name} {point} {self.relative(first.failed)}: {'; '.join(problems)[:600]}")
        return problems

    def judge_state(self, case: Case, succeeded: bool) -> list[str]:
        """Examine what a command left, run it again if it failed or left too much, and return what is wrong."""
        problems = [f"half-written: {problem}" for problem in half_written(self.place)]
        if not succeeded or leftovers(self.place) or set(contents(self.place)) - case.names:
            last = self.run((case.again or case.argv)(self.place))
            if last.code and not (succeeded and last.code == 2):  # 2: the output is there already
                problems.append(f"the second run ends with {last.code}: {last.line or last.said[-300:]}")
        return problems or self.differences(case)

    def differences(self, case: Case) -> list[str]:
        """Compare the folder with what the undisturbed command left."""
        found = contents(self.place)
        problems = [f"{name} is missing" for name in sorted(case.names - set(found))]
        problems += [f"{name} is left" for name in sorted(set(found) - case.names)]
        return problems + [
            f"{name} differs" for name, content in case.whole.items() if found.get(name, content) != content
        ]

    def compare(self, case: Case, point: Point) -> None:
        """Run a point in a fork and as a whole process, and compare how they end and what they leave."""
        ends = []
        for run in (run_in_fork, run_as_process):
            self.fill(case)
            ended = run(case.argv(self.place), self.place, point, self.log)
            left = {without_process(name): content for name, content in contents(self.place).items()}
            same = {name: content if name in case.whole else b"" for name, content in left.items()}
            ends.append({"exit": ended.code, "line": ended.line, "path": without_process(ended.failed), "left": same})
        self.compared += 1
        if differ := [key for key in ends[0] if ends[0][key] != ends[1][key]]:
            both = [{key: self.relative(str(end[key])[:1000]) for key in differ} for end in ends]
            self.unlike.append({"command": case.name, **point._asdict(), "fork": both[0], "process": both[1]})
            self.say(f"UNLIKE {case.name} {point}: {both[0]} in a fork, {both[1]} as a process")

    def relative(self, text: str) -> str:
        return text.replace(str(self.place), "PLACE")

    def findings(self) -> Findings:
        """Return what was found so far, with one row per command, call and error."""
        table = [
            {"command": command, "call": kind, "error": error, "tried": seen["tried"], "held": seen["held"]}
            | {"exits": {k.removeprefix("exit "): n for k, n in sorted(seen.items()) if k.startswith("exit")}}
            for (command, kind, error), seen in self.tried.items()
        ]
        return Findings(table, self.broken, self.states, self.compared, self.unlike)


def judge_end(ended: Ended, place: Path) -> list[str]:
    """Say what is wrong with the way a command ended: its exit code and what it printed."""
    lines = [line for line in ended.said.splitlines() if line.startswith("kontrast: ")]
    problems = []
    if ended.code not in DOCUMENTED:
        problems.append(f"exit {ended.code}: {ended.line or ended.said[-300:]}")
    if any(word in ended.said for word in ("Traceback", "Exception ignored", "Warning:")):
        problems.append(f"a traceback or warning: {ended.said[-300:]}")
    if len(lines) != (ended.code != 0):
        problems.append(f"exit {ended.code} with {len(lines)} lines: {ended.said[-300:]}")
    if ended.code == 6 and str(place) not in ended.line:
        problems.append(f"the line names no path: {ended.line}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Let every system call of a command fail once.")
    parser.add_argument("--commands", nargs="*", help="default: all")
    parser.add_argument("--limit", type=int, default=ALL, help=f"the most calls of {', '.join(MAIN)}, evenly spread")
    parser.add_argument("--more", type=int, default=ALL, help="the most calls of each other kind")
    parser.add_argument("--points", type=int, default=ALL, help="stop after so many; every kind gets its share")
    parser.add_argument("--processes", type=int, default=0, help="run so many points as whole processes too")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the points")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the points")
    parser.add_argument("--results", type=Path, help="where injected.json and injected.md are written")
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = parser.parse_args(words)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing there waits for a disk
    folder = Path(tempfile.mkdtemp(prefix="inject-faults-", dir=memory))
    try:
        if LIBRARY not in os.environ:
            library = compile_library(folder)
            if library is None:
                print("needs Linux and a C compiler (cc)", file=sys.stderr)
                return 2
            return subprocess.run([sys.executable, __file__, *words], env=environment_with(library)).returncode
        return run_jobs(folder, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_jobs(folder: Path, asked: argparse.Namespace) -> int:
    """Inject the faults in forks of this process, which has loaded the library; join and print what they find."""
    import torch

    from kontrast import __version__
    from kontrast.data import store_writer

    torch.set_num_threads(1)
    store_writer.CHUNK = CHUNK
    children, failures, begin = set(), 0, time.monotonic()
    for number in range(asked.jobs):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_job(folder / f"job-{number}", number, asked)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.add(child)
    given = {name: value for name, value in vars(asked).items() if value not in (None, 0, ALL, math.inf)}
    options = [
        word
        for name, value in given.items()
        if name not in ("jobs", "results")
        for word in (f"--{name}", *(value if isinstance(value, list) else [str(value)]))
    ]
    about = {
        "command": shlex.join(["python", "tests/support/inject_faults.py", *options]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "kontrast": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }  # fmt: skip
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        children.discard(child)
        failures += bool(status)
        time.sleep(1)
        found = join(sorted(folder.glob("job-*/found.json")))
        if asked.results:
            save(asked.results, found, about | {"minutes": round((time.monotonic() - begin) / 60, 1)})
    found.print()
    return int(bool(found.broken or found.unlike or failures))


def run_job(folder: Path, job: int, asked: argparse.Namespace) -> None:
    """Inject this job's share of the faults, and write what was found so far after every 20 points."""
    from support.kill_storm import make_pictures

    os.environ["KONTRAST_CACHE"] = str(folder / "cache")
    pictures, _ = make_pictures(folder / "data", images=48)
    found = [case for case in cases(pictures) if case.name in (asked.commands or [case.name])]
    injection, begin = Injection(folder, lambda line: print(line, flush=True)), time.monotonic()
    ranked = []
    for case in found:
        injection.count(case)
        ranked += rank_points(case, points_of(case.counts, asked.limit, asked.more), asked.seed)
    ranked.sort(key=lambda one: one[0])
    points = ranked[: asked.points][job :: asked.jobs]
    gc.freeze()  # a collection in a fork would copy every page that has an object
    for number, (_, case, point) in enumerate(points, 1):
        injection.inject(case, point)
        minutes = (time.monotonic() - begin) / 60
        ending = minutes > asked.minutes or number == len(points)
        if number % 20 == 0 or ending:
            states = f"{injection.states} states, {len(injection.broken)} broken"
            print(f"{minutes:6.1f} min  {number} of {len(points)} points, {states}", flush=True)
            injection.findings().write(folder / "found.json")
        if ending:
            break
    draw = random.Random(asked.seed)
    for number in range(job, asked.processes, asked.jobs):
        case = found[number % len(found)]
        injection.compare(case, draw.choice(list(points_of(case.counts))))
        injection.findings().write(folder / "found.json")


def rank_points(case: Case, points: Iterable[Point], seed: int) -> list[tuple[tuple[int, float], Case, Point]]:
    """Give every point a rank, so that in the order of ranks each kind and error gets one point before any gets two."""
    draw, cells = random.Random(seed), defaultdict(list)
    for point in points:
        cells[point.kind, point.error].append(point)
    for cell in cells.values():
        draw.shuffle(cell)
    return [((rank, draw.random()), case, point) for cell in cells.values() for rank, point in enumerate(cell)]


if __name__ == "__main__":
    sys.exit(main())
