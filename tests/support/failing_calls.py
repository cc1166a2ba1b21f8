"""What is injected: the kinds of system calls, their errors, and the library that makes one call fail.

failing_calls.c is compiled and loaded with LD_PRELOAD. A process switches it on with `FailingCalls.arm`, through
ctypes; its forks inherit that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
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


class Point(NamedTuple):
    """One call of a command that fails: its kind, its number from 1, and the error."""

    kind: str
    number: int
    error: str


def points_of(counts: Mapping[str, int], limit: int = ALL, more: int = ALL) -> Iterator[Point]:
    """The points of a command with so many calls of each kind: at most `limit` of each kind and error, and `more` of
    the kinds that are not in MAIN."""
    for kind in KINDS:
        numbers = spread(counts[kind], limit if kind in MAIN else more)
        for error in ERRORS_OF.get(kind, ERRORS):
            yield from (Point(kind, number, error) for number in numbers)


def spread(total: int, limit: int) -> Sequence[int]:
    """At most `limit` of the numbers from 1 to `total`, evenly spread, with the first and the last."""
    if total <= limit:
        return range(1, total + 1)
    return sorted({1 + round(n * (total - 1) / max(1, limit - 1)) for n in range(limit)})


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

    def seen(self) -> dict[str, object]:
        """Return the number of calls of each kind, and the path of the one that failed."""
        return {"counts": self.counts, "failed": self.failed}

    @property
    def counts(self) -> dict[str, int]:
        return {kind: self.library.failing_calls_count(number) for number, kind in enumerate(KINDS)}

    @property
    def failed(self) -> str:
        return os.fsdecode(self.library.failing_calls_path())
