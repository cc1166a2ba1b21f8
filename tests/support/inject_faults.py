"""Let every system call of a command fail once, run the command again, and compare what it ends with.

    python tests/support/inject_faults.py [--commands pretrain pack] [--limit 20] [--jobs 2] [--results FOLDER]

A first run of each command counts its calls of each kind (open, write, fsync, ...) on files below its folder. Then the
command is run once per call and error, in a fork of this process, which imports torch once and loads failing_calls.c
with LD_PRELOAD. Every such point must end with a documented exit code, one line and no traceback, nothing half-written
under its final name; and the same command (with --resume, if a run has begun) must then end with the same bytes as an
undisturbed one. The exit code is 0 if all points hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import importlib.util
import io
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("failing_calls.c")
LIBRARY = "KONTRAST_TEST_FAILING_CALLS"
"""The environment variable with the path of the compiled library."""
KINDS = (
    "open", "read", "write", "fsync", "rename", "mkdir", "mmap", "unlink", "truncate", "close", "list", "stat",
)  # fmt: skip
"""The kinds of calls, in the order of failing_calls.c."""
SHORT = "SHORT"
"""In place of an error: a read or write that moves only half of its bytes."""
MAIN = ("open", "write", "fsync", "rename", "mkdir", "mmap")
ERRORS = ("ENOSPC", "EIO", "EINTR", "EACCES")
ERRORS_OF = {"read": ("EIO", "EINTR", SHORT), "write": (*ERRORS, SHORT)} | dict.fromkeys(KINDS[7:], ("EIO", "EACCES"))
"""The errors of the kinds of calls that have others."""
ALL = 10**9
DOCUMENTED = (0, 2, 3, 4, 5, 6, 75, 130)
LIMIT = 600
"""Seconds after which a command is taken to hang."""


def compile_library(folder: Path) -> Path | None:
    """Compile failing_calls.c; None if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def environment() -> dict[str, str]:
    """Return an environment in which a Python process can import kontrast and the tests, and uses one thread."""
    paths = os.pathsep.join(str(Path(__file__).resolve().parents[n] / name) for n, name in ((1, ""), (2, "src")))
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, **single, "PYTHONPATH": paths}


def environment_with(library: Path) -> dict[str, str]:
    """Return the same environment, in which the process also loads the library."""
    return {**environment(), "LD_PRELOAD": str(library), LIBRARY: str(library)}


class FailingCalls:
    """The library that this process has loaded."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ[LIBRARY])
        self.library.failing_calls_path.restype = ctypes.c_char_p

    def arm(self, folder: Path, kind: str = KINDS[0], number: int = 0, error: str = "EIO") -> None:
        """Let call `number` (from 1) of a kind below the folder fail; with number 0, only count."""
        code = -1 if error == SHORT else getattr(errno, error)
        self.library.failing_calls_arm(os.fsencode(folder.resolve()), KINDS.index(kind), number, code)

    def disarm(self) -> None:
        self.library.failing_calls_arm(b"", len(KINDS), 0, 0)

    @property
    def counts(self) -> dict[str, int]:
        return {kind: self.library.failing_calls_count(number) for number, kind in enumerate(KINDS)}

    @property
    def failed(self) -> str:
        return os.fsdecode(self.library.failing_calls_path())


class Point(NamedTuple):
    """One call of a command that fails: its kind, its number from 1, and the error."""

    kind: str
    number: int
    error: str


class Ended(NamedTuple):
    """How a command ended: its exit code, what it printed, its calls by kind, and the path of the one that failed."""

    code: int
    said: str
    counts: dict[str, int]
    failed: str

    @property
    def line(self) -> str:
        return next((line for line in self.said.splitlines() if line.startswith("kontrast: ")), "")


@dataclass
class Case:
    """A command in a folder of its own.

    Attributes:
        argv: its arguments, given the folder.
        prepare: fills the folder with what the command needs; it is called once and the folder is copied.
        again: the arguments after a failure; default: the same.
    """

    name: str
    argv: Callable[[Path], list[str]]
    prepare: Callable[[Path], object] = lambda place: None
    again: Callable[[Path], list[str]] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    whole: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class Injection:
    """Runs commands in forks of this process, with and without a failing call, in `folder`."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print):
        self.folder, self.say, self.calls = folder, say, FailingCalls()
        self.place, self.log = folder / "place", folder / "log"
        self.broken: list[dict[str, Any]] = []
        self.tried: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def run(self, argv: list[str], point: Point | None = None) -> Ended:
        """Run a command in a fork, with one failing call if a point is given."""
        from kontrast.cli import main as cli

        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                signal.alarm(LIMIT)
                self.calls.arm(self.place, *(point or ()))
                code = cli.run(argv)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                seen = {"counts": self.calls.counts, "failed": self.calls.failed}
                self.calls.disarm()
                os.write(writer, json.dumps(seen).encode())
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            seen = json.loads(answer.read() or b'{"counts": {}, "failed": ""}')
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, self.log.read_text(errors="replace"), seen["counts"], seen["failed"])

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

    def points(self, case: Case, limit: int = ALL, more: int = ALL) -> Iterator[Point]:
        """The points of a command: at most `limit` of each kind and error, and `more` of the other kinds."""
        for kind in KINDS:
            numbers = spread(case.counts[kind], limit if kind in MAIN else more)
            for error in ERRORS_OF.get(kind, ERRORS):
                yield from (Point(kind, number, error) for number in numbers)

    def inject(self, case: Case, point: Point) -> list[str]:
        """Run the command with a failing call, then again without; return what is wrong."""
        self.fill(case)
        first = self.run(case.argv(self.place), point)
        problems = judge_end(first, self.place) + ([] if first.failed else ["no call failed: there are fewer of them"])
        problems += [f"half-written: {problem}" for problem in half_written(self.place)]
        last = first
        if first.code or leftovers(self.place) or set(contents(self.place)) - case.names:
            last = self.run((case.again or case.argv)(self.place))
            if last.code and not (first.code == 0 and last.code == 2):  # 2: the output is there already
                problems.append(f"the second run ends with {last.code}: {last.line or last.said[-300:]}")
        if not problems:
            problems += self.differences(case)
        entry = self.tried[case.name, point.kind, point.error]
        entry.update({"tried": 1, "held": int(not problems), f"exit {first.code}": 1})
        if problems:
            self.broken.append(
                {"command": case.name, **point._asdict(), "path": self.relative(first.failed), "problems": problems}
                | {"exit": first.code, "line": self.relative(first.line)}
            )
            self.say(f"BROKEN {case.name} {point} {self.relative(first.failed)}: {'; '.join(problems)[:600]}")
        return problems

    def relative(self, text: str) -> str:
        return text.replace(str(self.place), "PLACE")

    def differences(self, case: Case) -> list[str]:
        """Compare the folder with what the undisturbed command left."""
        found = contents(self.place)
        problems = [f"{name} is missing" for name in sorted(case.names - set(found))]
        problems += [f"{name} is left" for name in sorted(set(found) - case.names)]
        return problems + [
            f"{name} differs" for name, content in case.whole.items() if found.get(name, content) != content
        ]

    def table(self) -> list[dict[str, Any]]:
        """One row per command, call and error."""
        return [
            {"command": command, "call": kind, "error": error, "tried": seen["tried"], "held": seen["held"]}
            | {"exits": {k.removeprefix("exit "): n for k, n in sorted(seen.items()) if k.startswith("exit")}}
            for (command, kind, error), seen in self.tried.items()
        ]


def spread(total: int, limit: int) -> Sequence[int]:
    """At most `limit` of the numbers from 1 to `total`, evenly spread, with the first and the last."""
    if total <= limit:
        return range(1, total + 1)
    return sorted({1 + round(n * (total - 1) / max(1, limit - 1)) for n in range(limit)})


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


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


def is_temporary(path: Path, place: Path) -> bool:
    parts = path.relative_to(place).parts
    return any(part.startswith((".tmp-", ".del-")) or part.endswith((".part", ".parts", ".replaced")) for part in parts)


def leftovers(place: Path) -> list[str]:
    return [str(path.relative_to(place)) for path in place.rglob("*") if is_temporary(path, place)]


def half_written(place: Path) -> list[str]:
    """Return the files and folders with a final name that are not whole."""
    from kontrast.data.store import is_store, open_store
    from kontrast.training import checkpoints

    problems = []
    for path in sorted(place.rglob("*")):
        if is_temporary(path, place):
            continue
        try:
            if path.is_dir():
                if path.parent.name == "checkpoints":
                    checkpoints.load(path)
                elif is_store(path):
                    open_store(path, full=True)
            else:
                check_file(path)
        except Exception as error:
            problems.append(f"{path.relative_to(place)} ({type(error).__name__}: {error})")
    return problems


def check_file(path: Path) -> None:
    """Raise an exception if a file can't be read as what its name says."""
    content = path.read_bytes()
    if path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".jsonl":  # a line may be cut at the end: readers drop it
        for line in content.split(b"\n")[:-1]:
            json.loads(line)
    elif path.suffix == ".toml":
        tomllib.loads(content.decode())
    elif path.suffix == ".safetensors":
        from safetensors.torch import load

        load(content)
    elif path.suffix == ".npy":
        import numpy as np

        np.load(io.BytesIO(content))
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.read_table(io.BytesIO(content))
    elif path.suffix == ".png":
        from PIL import Image

        Image.open(io.BytesIO(content)).load()
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>")


def cases(pictures: Path) -> list[Case]:
    """The commands, on a tiny store and a tiny run."""
    from kontrast.cli import main as cli
    from kontrast.data import store_writer

    from support.kill_storm import TINY

    store_writer.CHUNK = 16
    short = [*TINY, "training.batch=16", "training.max_steps=4", "training.epochs=4", "evaluation.every=1"]
    quiet = ["--device", "cpu", "--no-probes"]

    def train(place: Path, *more: str) -> list[str]:
        return ["pretrain", f"{place}/store", "--recipe", "quickstart", *short, *more, "--out", f"{place}/run", *quiet]

    def resume(place: Path, *more: str) -> list[str]:
        begun = (place / "run" / "recipe.toml").exists()
        return ["pretrain", "--resume", *more, "--out", f"{place}/run", *quiet] if begun else train(place)

    def with_store(place: Path) -> None:
        assert cli.run(["pack", str(pictures), f"{place}/store"]) == 0

    def with_run(place: Path) -> None:
        with_store(place)
        assert cli.run(train(place)) == 0

    def with_vectors(place: Path) -> None:
        with_run(place)
        assert cli.run(["embed", f"{place}/run", str(pictures), "--out", f"{place}/v.npy", "--device", "cpu"]) == 0

    def on_run(verb: str, *more: str) -> Callable[[Path], list[str]]:
        return lambda place: [verb, f"{place}/run", *(text.replace("PLACE", str(place)) for text in more)]

    def with_smaller_store(place: Path) -> None:
        assert cli.run(["pack", str(pictures), f"{place}/store", "--size", "10"]) == 0

    cpu = ("--device", "cpu")
    query = str(next(pictures.rglob("*.png")))
    return [
        Case("pretrain", train, with_store, resume),
        Case("resume", lambda place: resume(place, "training.max_steps=8"), with_run),
        Case(
            "compare",
            lambda place: [
                "compare", "nt-xent", "dcl", f"{place}/store", *short, "--seeds", "1", *cpu, "--out", f"{place}/study"
            ],
            with_store,
        ),
        Case("pack", lambda place: ["pack", str(pictures), f"{place}/store"]),
        Case("pack again", lambda place: ["pack", str(pictures), f"{place}/store"], with_smaller_store),
        Case("lens", on_run("lens", "--images", "16", "--augmentations", "2", *cpu), with_run),
        Case("probe", on_run("probe", *cpu), with_run),
        Case("embed", on_run("embed", str(pictures), "--out", "PLACE/vectors.npy", *cpu), with_run),
        Case("embed parquet", on_run("embed", str(pictures), "--out", "PLACE/vectors.parquet", *cpu), with_run),
        Case("neighbors", on_run("neighbors", query, "--embeddings", "PLACE/v.npy", *cpu), with_vectors),
        Case("export", on_run("export"), with_run),
        Case("report", on_run("report"), with_run),
    ]  # fmt: skip


def save(results: Path, table: list[dict[str, Any]], broken: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write injected.json and injected.md."""
    tried, held = (sum(row[key] for row in table) for key in ("tried", "held"))
    tree = {**about, "tried": tried, "held": held, "table": table, "broken": broken}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table)
    head = json.dumps({k: v for k, v in tree.items() if k != "table"}, indent=1).removesuffix("\n}")
    (results / "injected.json").write_text(f'{head},\n "table": [\n{rows}\n ]\n}}\n')
    commands = list(dict.fromkeys(row["command"] for row in table))
    columns = list(dict.fromkeys((row["call"], row["error"]) for row in table))
    cells = {(row["command"], row["call"], row["error"]): row for row in table}
    lines = [
        f"# Every system call fails once, measured {about['date']}", "",
        f"`{about['command']}` with {', '.join(f'{k} {about[k]}' for k in ('kontrast', 'torch', 'python'))}.", "",
        f"{held:,} of {tried:,} points held. Each cell has the points that held / were tried: the command ended with a "
        "documented exit code and one line, left nothing half-written, and the same command then ended with the bytes "
        "of an undisturbed run. `SHORT` moves half of the bytes.", "",
        "| call | error | " + " | ".join(commands) + " |", "| --- | --- |" + " --- |" * len(commands),
    ]  # fmt: skip
    for kind, error in columns:
        found = [cells.get((command, kind, error)) for command in commands]
        texts = [f"{row['held']}/{row['tried']}" if row else "-" for row in found]
        lines.append(f"| {kind} | {error} | " + " | ".join(texts) + " |")
    (results / "injected.md").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Let every system call of a command fail once.")
    parser.add_argument("--commands", nargs="*", help="default: all")
    parser.add_argument("--limit", type=int, default=ALL, help=f"the most calls of {', '.join(MAIN)}, evenly spread")
    parser.add_argument("--more", type=int, default=ALL, help="the most calls of each other kind")
    parser.add_argument("--points", type=int, default=ALL, help="stop after so many; every kind gets its share")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the points")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which takes some of the commands")
    parser.add_argument("--serve", action="store_true", help="run commands that stdin asks for, as FaultyCommands does")
    parser.add_argument("--results", type=Path, help="where injected.json and injected.md are written")
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="inject-faults-"))
    try:
        if LIBRARY not in os.environ:
            library = compile_library(folder)
            if library is None:
                print("needs Linux and a C compiler (cc)", file=sys.stderr)
                return 2
            return subprocess.run([sys.executable, __file__, *words], env=environment_with(library)).returncode
        return serve(folder) if asked.serve else run_jobs(folder, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(folder: Path) -> int:
    """Run a command, with a failing call, for every line of standard input: the other end of `FaultyCommands`."""
    import torch

    torch.set_num_threads(1)
    injection = Injection(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        injection.place = Path(asked["below"])
        ended = injection.run(asked["argv"], Point(*asked["point"]) if asked["point"] else None)
        print(json.dumps(ended._asdict()), flush=True)
    return 0


class FaultyCommands:
    """A process that runs commands in which one call fails. It imports torch once and forks for every command."""

    def __init__(self, library: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_with(library),
        )  # fmt: skip

    def run(self, argv: Sequence[object], below: Path, point: Point | None = None) -> Ended:
        """Run a command; the call of `point` is counted among those on files below a folder, or on one file."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"argv": [str(word) for word in argv], "below": str(below), "point": point}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate()


def run_jobs(folder: Path, asked: argparse.Namespace) -> int:
    """Inject the faults in forks of this process, which has loaded the library; join and print what they find."""
    import torch

    from kontrast import __version__

    torch.set_num_threads(1)
    children = {}
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
        children[child] = number
    options = [
        f"--{name} {getattr(asked, name)}"
        for name in ("limit", "more", "points", "minutes")
        if getattr(asked, name) < ALL
    ]
    about = {
        "command": " ".join(["python tests/support/inject_faults.py", *options]), "date": time.strftime("%Y-%m-%d"),
        "kontrast": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }  # fmt: skip
    failures = 0
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        children.pop(child, None)
        failures += bool(status)
        time.sleep(1)
        table, broken = join_jobs(folder)
        if asked.results:
            save(asked.results, table, broken, about)
    print(f"{'command':<14} {'call':<9} {'error':<7} {'tried':>6} {'held':>6}  exit codes")
    for row in table:
        exits = ", ".join(f"{code}: {count}" for code, count in row["exits"].items())
        print(f"{row['command']:<14} {row['call']:<9} {row['error']:<7} {row['tried']:>6} {row['held']:>6}  {exits}")
    tried, held = (sum(row[key] for row in table) for key in ("tried", "held"))
    print(f"{held} of {tried} points held")
    return int(held < tried or bool(failures))


def run_job(folder: Path, job: int, asked: argparse.Namespace) -> None:
    """Inject the faults of some of the commands, and write what was found so far after every 20 points."""
    from support.kill_storm import make_pictures

    os.environ["KONTRAST_CACHE"] = str(folder / "cache")
    pictures, _ = make_pictures(folder / "data", images=48)
    found = [case for case in cases(pictures) if case.name in (asked.commands or [case.name])]
    if importlib.util.find_spec("pyarrow") is None:
        found = [case for case in found if case.name != "embed parquet"]
    injection, begin = Injection(folder, lambda line: print(line, flush=True)), time.monotonic()
    ranked = []
    for case in found[job :: asked.jobs]:
        injection.count(case)
        ranked += rank_points(case, injection.points(case, asked.limit, asked.more), asked.seed)
    points = sorted(ranked, key=lambda one: one[0])
    gc.freeze()  # a collection in a fork would copy every page that has an object
    for number, (_, case, point) in enumerate(points, 1):
        injection.inject(case, point)
        minutes = (time.monotonic() - begin) / 60
        ending = minutes > asked.minutes or number == min(len(points), asked.points)
        if number % 20 == 0 or ending:
            print(f"{minutes:6.1f} min  {number} of {len(points)} points, {len(injection.broken)} broken", flush=True)
            found_so_far = {"table": injection.table(), "broken": injection.broken}
            (folder / "found.tmp").write_text(json.dumps(found_so_far))
            os.replace(folder / "found.tmp", folder / "found.json")
        if ending:
            break


def rank_points(case: Case, points: Iterable[Point], seed: int) -> list[tuple[tuple[int, float], Case, Point]]:
    """Give every point a rank, so that in the order of ranks each kind and error gets one point before any gets two."""
    draw, cells = random.Random(seed), defaultdict(list)
    for point in points:
        cells[point.kind, point.error].append(point)
    for cell in cells.values():
        draw.shuffle(cell)
    return [((rank, draw.random()), case, point) for cell in cells.values() for rank, point in enumerate(cell)]


def join_jobs(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tables and the broken points of all jobs."""
    found = [json.loads(path.read_bytes()) for path in sorted(folder.glob("job-*/found.json"))]
    return [row for one in found for row in one["table"]], [point for one in found for point in one["broken"]]


if __name__ == "__main__":
    sys.exit(main())
