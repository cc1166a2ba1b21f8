"""A small fuzzer that learns: it keeps the inputs that reach new code, and mutates those further.

The same seed gives the same inputs. Coverage is pairs of lines that follow each other in a function of the traced
modules (`sys.settrace`, so that it works with every Python that kontrast supports). An audit hook of the interpreter
watches every input for what no file may cause: opening, creating or removing a file outside of the given folder,
starting a process, connecting to a machine, unpickling, and executing code that is not of an installed package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import random
import resource
import sys
import sysconfig
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import kontrast

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 1 << 16
"""Inputs don't grow beyond this many bytes."""
MOST_SECONDS = 60.0
"""The processor time that one input may take. Measured ones take milliseconds."""
MOST_MEMORY = 1 << 30
"""By how many bytes one input may raise the peak memory of the process."""
SEPARATOR = b"\n%%% "
"""What separates the files of an input that has several; a name follows it."""
INTERESTING = (0, 1, 2, 7, 8, 16, 127, 128, 255, 256, 32_767, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
NUMBERS = [str(n).encode() for n in (*INTERESTING, -1, 2**63, 10**19)] + [b"1e308", b"1e999", b"-0.0", b"NaN", b"0.5"]
JSON = [b"null", b"true", b'""', b"[]", b"{}", b"[[]]", b'{"":1}', b'"\\u0000"', b'"\\ud800"', b"[" * 200, b",", b":"]


@dataclass(frozen=True)
class Target:
    """Something that reads files of others.

    Attributes:
        name: also the folder of its inputs in tests/support/corpus.
        run: reads the input, in an empty folder that it may write to.
        errors: the exceptions that are an answer; all others are finds.
        tokens: pieces that occur in such files.
        traced: parts of file names whose lines count as coverage.
        needs: a package that is an optional dependency.
    """

    name: str
    run: Callable[[bytes, Path], object]
    errors: tuple[type[BaseException], ...]
    tokens: Sequence[bytes] = ()
    traced: tuple[str, ...] = ("/kontrast/",)
    needs: str = "kontrast"

    def can_run(self) -> bool:
        """Return whether the package that it needs is installed."""
        return importlib.util.find_spec(self.needs) is not None

    def seeds(self) -> list[bytes]:
        """Return the inputs that are kept in the tree, in the order of their names."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


@dataclass
class Find:
    """An input that broke the property, what happened, and where."""

    content: bytes
    problem: str
    place: str


@dataclass
class Outcome:
    """What a fuzzing of one target did: executions, seconds, covered pairs of lines, kept inputs and finds."""

    target: str
    executions: int = 0
    seconds: float = 0.0
    covered_by_seeds: int = 0
    covered: int = 0
    kept: list[bytes] = field(default_factory=list)
    finds: dict[str, Find] = field(default_factory=dict)  # by place, so that each bug is listed once
    answers: dict[str, int] = field(default_factory=dict)


def fuzz_target(target: Target, folder: Path, *, seed: int = 0, executions: int = 0, seconds: float = 0.0) -> Outcome:
    """Run the seeds of a target, then mutations of them and of every input that reaches new code.

    Args:
        target: what to fuzz.
        folder: an empty folder for its files.
        seed: decides the mutations.
        executions: stop after this many inputs; 0 for no limit.
        seconds: stop after this time; 0 for no limit.
    """
    outcome, draw, begin = Outcome(target.name), random.Random(seed), time.monotonic()
    coverage = Coverage(target.traced)
    pool = target.seeds()
    for content in pool:  # so that what is imported on first use is imported before anything is watched
        empty(folder)
        with contextlib.suppress(Exception):
            target.run(content, folder)
    for content in pool:
        _execute(target, content, folder, coverage, outcome)
    outcome.covered_by_seeds = len(coverage.pairs)
    while (not executions or outcome.executions < executions) and (not seconds or time.monotonic() - begin < seconds):
        content = mutate(draw, pool, target.tokens)
        before = len(coverage.pairs)
        _execute(target, content, folder, coverage, outcome)
        if len(coverage.pairs) > before:
            pool.append(content)
            outcome.kept.append(content)
    outcome.covered, outcome.seconds = len(coverage.pairs), time.monotonic() - begin
    return outcome


def _execute(target: Target, content: bytes, folder: Path, coverage: Coverage, outcome: Outcome) -> None:
    outcome.executions += 1
    problem, place, answer = attempt(target, content, folder, coverage)
    outcome.answers[answer] = outcome.answers.get(answer, 0) + 1
    if problem and place not in outcome.finds:
        outcome.finds[place] = Find(content, problem, place)


def attempt(target: Target, content: bytes, folder: Path, coverage: Coverage | None = None) -> tuple[str, str, str]:
    """Run one input: what is wrong ("" if nothing is), where, and the kind of answer."""
    empty(folder)
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    problem = place = ""
    failure: Exception | None = None
    with Watch(folder) as watch:
        try:
            with coverage or contextlib.nullcontext(), mock.patch("os.fsync"):  # which takes most of the time
                target.run(content, folder)
            answer = "result"
        except target.errors as error:
            answer = type(error).__name__
        except Exception as error:
            answer, failure = "traceback", error
    if failure is not None:
        problem = "".join(traceback.format_exception(failure))
        place = f"{type(failure).__name__} in {_own_frame(failure)}"
    if watch.violations:
        place, problem = watch.violations[0]
    elif time.process_time() - begin > MOST_SECONDS:
        problem = place = f"took {time.process_time() - begin:.0f} s"
    elif 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) > MOST_MEMORY:
        problem = place = f"peak memory grew by more than {MOST_MEMORY >> 20} MiB"
    return problem, place, answer


def _own_frame(error: BaseException) -> str:
    """Return the innermost frame in kontrast's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(Path(kontrast.__file__).parent))]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}"


def empty(folder: Path) -> None:
    """Remove what an input left in the folder."""
    for root, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(root, name))
        for name in folders:
            path = os.path.join(root, name)
            os.unlink(path) if os.path.islink(path) else os.rmdir(path)


def minimize(target: Target, content: bytes, folder: Path, place: str, tries: int = 2_000) -> bytes:
    """Remove pieces of an input as long as it still fails at the same place."""
    size, used = max(1, len(content) // 2), 0
    while size and used < tries:
        start = 0
        while start < len(content) and used < tries:
            shorter = content[:start] + content[start + size :]
            used += 1
            if attempt(target, shorter, folder)[1] == place:
                content = shorter
            else:
                start += size
        size //= 2
    return content


class Coverage:
    """Record pairs of lines that were executed one after the other in a function of the traced files."""

    def __init__(self, traced: tuple[str, ...]):
        self.pairs: set[tuple[CodeType, int, int]] = set()
        self._is_traced = functools.cache(lambda name: any(part in name for part in traced))

    def __enter__(self) -> Coverage:
        self._old = sys.gettrace()
        threading.settrace(self._enter_function)
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)
        threading.settrace(self._old)  # type: ignore[arg-type]

    def _enter_function(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_traced(frame.f_code.co_filename):
            return None
        code, last, pairs = frame.f_code, 0, self.pairs

        def trace_line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                pairs.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return trace_line

        return trace_line


# What no file may cause


_LIBRARIES = tuple(
    {os.path.realpath(place) + os.sep for place in (*sysconfig.get_paths().values(), Path(kontrast.__file__).parent)}
    | {os.path.realpath(place) + os.sep for place in (sys.prefix, sys.base_prefix)}
)
_DEVICES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/", "/etc/localtime", "/usr/share/zoneinfo")
_NEVER = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn", "pickle.find_class",
    "socket.connect", "socket.getaddrinfo", "urllib.Request", "ctypes.dlopen", "webbrowser.open",
)  # fmt: skip
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_watching: list[Watch] = []


class Watch:
    """Collect what happens meanwhile that no file may cause, in `violations`."""

    def __init__(self, folder: Path):
        self.folder = os.path.realpath(folder)
        self.violations: list[tuple[str, str]] = []  # what, and the stack at that moment

    def __enter__(self) -> Watch:
        _install_hook()
        traceback.format_stack()  # so that torch, which does the same, finds the lines of the test in memory
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NEVER:
            if not _inside_import():
                self._add(f"{event}{arguments!r:.200}")
        elif event == "exec":
            place = os.path.realpath(name := getattr(arguments[0], "co_filename", ""))
            inside = place.startswith(self.folder + os.sep)
            if inside or not (place.startswith(_LIBRARIES) or _inside_import() or _evaluates_annotations()):
                self._add(f"executed code of {name!r}")
        elif event == "open":
            self._note_path("opened", arguments[0], writes=self._writes(arguments))
        elif event in _CHANGES:
            both = event in ("os.rename", "os.link")  # the last arguments are descriptors of folders: two, or one
            for path, inside in zip(arguments, arguments[-2:] if both else arguments[-1:]):
                relative = isinstance(inside, int) and inside >= 0 and event not in ("os.truncate", "os.symlink")
                self._note_path(event, f"/proc/self/fd/{inside}/{os.fsdecode(path)}" if relative else path, writes=True)

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        mode, flags = arguments[1], arguments[2]
        return any(c in mode for c in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    def _note_path(self, what: str, path: Any, writes: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor: its opening was seen
        place = os.path.realpath(os.fsdecode(path))  # follows links: a link out of the folder leads outside
        if (place + os.sep).startswith(self.folder + os.sep) or place.startswith(_DEVICES):
            return
        if writes or not place.startswith((*_LIBRARIES, str(Path(__file__).parent))):  # torch formats stacks of these
            self._add(f"{what} {place!r}, outside of the folder")

    def _add(self, what: str) -> None:
        _watching.remove(self)  # to format a stack, Python opens source files
        self.violations.append((what, "".join(traceback.format_stack())))
        _watching.append(self)


def _inside_import() -> bool:
    """Return whether a module of an installed package is being imported."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _evaluates_annotations() -> bool:
    """Return whether `typing.get_type_hints` evaluates the annotations of our own dataclasses."""
    return sys._getframe(3).f_code.co_filename == typing.__file__


@functools.cache
def _install_hook() -> None:
    """Install the audit hook, which can't be removed again; it does nothing while nobody watches."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for watch in list(_watching):
            watch.note(event, arguments)

    sys.addaudithook(hook)


# Mutations


def mutate(draw: random.Random, pool: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Return one of the inputs with one to eight changes; newer inputs are chosen more often.

    Of an input of several files, one is changed, so that a short one is changed as often as a long one.
    """
    parts = pool[max(draw.randrange(len(pool)), draw.randrange(len(pool)))].split(SEPARATOR)
    chosen = draw.randrange(len(parts))
    content = bytearray(parts[chosen])
    for _ in range(draw.choice((1, 1, 1, 2, 2, 4, 8))):
        draw.choice(MUTATIONS)(draw, content, pool, tokens)
    parts[chosen] = bytes(content)
    return SEPARATOR.join(parts)[:LONGEST]


def _flip_bit(draw: random.Random, content: bytearray, *_: Any) -> None:
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _set_byte(draw: random.Random, content: bytearray, *_: Any) -> None:
    if content:
        content[draw.randrange(len(content))] = draw.randrange(256)


def _set_length(draw: random.Random, content: bytearray, *_: Any) -> None:
    """Write an interesting number of one to eight bytes, in either byte order."""
    size = draw.choice((1, 2, 4, 8))
    if len(content) >= size:
        start, number = draw.randrange(len(content) - size + 1), draw.choice(INTERESTING) % (1 << 8 * size)
        content[start : start + size] = number.to_bytes(size, draw.choice(("big", "little")))


def _insert_token(draw: random.Random, content: bytearray, pool: Any, tokens: Sequence[bytes]) -> None:
    if tokens:
        start = draw.randrange(len(content) + 1)
        content[start:start] = draw.choice(tokens)


def _replace_by_token(draw: random.Random, content: bytearray, pool: Any, tokens: Sequence[bytes]) -> None:
    """Put a token in the place of a word or number of the input."""
    if tokens and content:
        start = end = draw.randrange(len(content))
        while end < len(content) and end - start < 40 and (content[end : end + 1].isalnum() or content[end] in b"_.-"):
            end += 1
        while start and end - start < 80 and (content[start - 1 : start].isalnum() or content[start - 1] in b"_.-"):
            start -= 1
        content[start:end] = draw.choice(tokens)


def _span(draw: random.Random, content: bytes | bytearray) -> tuple[int, int]:
    start = draw.randrange(len(content) + 1)
    return start, min(len(content), start + 1 + int(draw.paretovariate(0.7)))


def _delete(draw: random.Random, content: bytearray, *_: Any) -> None:
    start, end = _span(draw, content)
    del content[start:end]


def _repeat(draw: random.Random, content: bytearray, *_: Any) -> None:
    start, end = _span(draw, content)
    content[start:start] = content[start:end] * draw.choice((1, 1, 2, 50))
    del content[LONGEST:]


def _splice(draw: random.Random, content: bytearray, pool: Sequence[bytes], _: Any) -> None:
    """Put a piece of another input somewhere."""
    other = draw.choice(pool)
    start, end = _span(draw, other)
    into, until = _span(draw, content)
    content[into : until if draw.random() < 0.5 else into] = other[start:end]


def _change_json(draw: random.Random, content: bytearray, *_: Any) -> None:
    """Change one value of a line of JSON, or of the header of a safetensors file: the syntax stays right."""
    places = [at for at in (content.find(b"\n{"), content.find(b"\0{")) if at >= 0]
    lines = [
        at for at in range(len(content)) if content[at : at + 1] == b"\n" and content[at + 1 : at + 2] in (b"{", b"[")
    ]
    start = draw.choice([*places, *lines, -1]) + 1
    header = start >= 8 and content[start - 1 : start] == b"\0"
    end = start + int.from_bytes(content[start - 8 : start], "little") if header else content.find(b"\n", start)
    end = end if start < end <= len(content) else len(content)
    try:
        tree = json.loads(content[start:end])
        changed = json.dumps(_change_tree(draw, tree)).encode()
    except (ValueError, RecursionError):
        return
    if header:
        content[start - 8 : end] = len(changed).to_bytes(8, "little") + changed
    else:
        content[start:end] = changed


def _change_tree(draw: random.Random, tree: Any) -> Any:
    """Return a tree with one of its nodes replaced, removed, repeated or exchanged for another."""
    nodes: list[tuple[Any, Any]] = []  # containers and keys
    stack = [tree]
    while stack:
        node = stack.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in pairs:
            nodes.append((node, key))
            stack.append(value)
    if not nodes or draw.random() < 0.02:
        return draw.choice(VALUES)
    (inside, key), (other, elsewhere) = draw.choice(nodes), draw.choice(nodes)
    kind = draw.randrange(5)
    if kind == 0:
        del inside[key]
    elif kind == 1:
        inside[key] = json.loads(json.dumps(other[elsewhere]))
    elif kind == 2 and isinstance(inside, list):
        inside.insert(key, json.loads(json.dumps(inside[key])))
    elif kind == 3 and isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
        inside[key] = draw.choice((inside[key] + 1, inside[key] - 1, -inside[key], 2 * inside[key], float(inside[key])))
    else:
        inside[key] = draw.choice(VALUES)
    return tree


VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 3, 0.5, 2**31, 2**63, -(2**63), 10**30, 1e308, float("nan"), float("inf"), "", "x",
    "0", "../../x", "/etc/passwd", "\x00", "\ud800", "<b>", "\x1b[31m", [], {}, [[]], [None], {"": 1}, [1, 2, 3], ["x"],
    functools.reduce(lambda inner, _: [inner], range(100), []), "9" * 5000, {"x": {"y": []}},
)  # fmt: skip

MUTATIONS: Sequence[Callable[..., None]] = (
    _flip_bit, _set_byte, _set_length, _insert_token, _replace_by_token, _replace_by_token, _delete, _repeat, _splice,
    _change_json, _change_json, _change_json, _change_json, _change_json, _change_json,
)  # fmt: skip


# Inputs of several files


def join_files(files: dict[str, bytes]) -> bytes:
    """Return several files as one input, in which a mutation can reach all of them."""
    return b"".join(b"%%% " + name.encode() + b"\n" + content + b"\n" for name, content in files.items())


def split_files(content: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Return the files of an input; those whose names are not in `names` are left out."""
    files = {}
    for part in (b"\n" + content).split(SEPARATOR)[1:]:
        name, _, text = part.partition(b"\n")
        if (known := name.decode("latin-1")) in names:
            files[known] = text.removesuffix(b"\n")
    return files


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of an input below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Limit the address space of this process, so that an allocation beyond it fails and not the machine."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
