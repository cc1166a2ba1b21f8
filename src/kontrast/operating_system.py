"""What differs between Linux, macOS and Windows, for the whole program: locks, flags, signals and memory.

Nothing else may use names that one of them lacks; tests/test_operating_systems.py looks for such uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]

NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
"""Flag of `os.open`: a named pipe does not wait for a writer. Windows has no named pipes among its files."""
NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
"""Flag of `os.open`: a symbolic link is an error. Windows lacks it; only administrators make links there."""
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that no process can ignore. On Windows every signal ends the process like this."""
LOCKED_BYTE = 2**30
"""Windows locks bytes of a file, which nobody else can then read: this one is beyond what any lock file contains."""
LOCK_RETRY_SECONDS = 0.05


def lock_file(handle: int, wait: bool) -> None:
    """Lock an open file for this process until it is closed. Raises `BlockingIOError` if it is locked and must not
    wait."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    while True:
        os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EDEADLK):
                raise
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "locked by another process") from None
            time.sleep(LOCK_RETRY_SECONDS)
        else:
            return


def open_to_lock(path: Path) -> tuple[int, Path]:
    """Open a file, which is created, or a folder, to lock it, and return what was opened. Windows can't open a folder:
    a file in it is locked.

    No link is followed: in a run folder of others, a lock may lead to a file of this user, which would be emptied.
    """
    if path.is_dir() and fcntl is not None:
        return os.open(path, os.O_RDONLY), path
    place = path / ".folder-lock" if path.is_dir() else path
    return os.open(place, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644), place


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Windows can't wait for folders, and only syncs what it may write."""
    if fcntl is None and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if fcntl is not None else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def blocked_signals(numbers: Sequence[int]) -> Iterator[None]:
    """Let signals wait; a process that is started meanwhile begins with them blocked too. Windows has no such thing."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def ignore_signals(numbers: Sequence[int]) -> None:
    """Ignore signals in a process that was started while they were blocked."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_id() -> int | None:
    """Return the number of the user; None on Windows, where users have none."""
    return os.getuid() if hasattr(os, "getuid") else None


def free_memory() -> int:
    """Return how many bytes are available without swapping. On macOS, which does not say it, half of all."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if "SC_AVPHYS_PAGES" in names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _free_memory_of_windows()


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in ("total", "available", "total_page", "free_page", "total_virtual", "free_virtual", "extended")
    ]


UNKNOWN_MEMORY = 4 * 2**30
"""What is assumed to be free if the system does not say how much is."""


def _free_memory_of_windows() -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    if kernel is None or not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return UNKNOWN_MEMORY
    return int(status.available)


def peak_memory() -> int | None:
    """Return the most bytes that this process had in memory; None on Windows. macOS counts bytes, Linux KiB."""
    if resource is None:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_age() -> float:
    """Return for how many seconds this process has existed; 0 if the system does not say it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks = int(fields[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def c_library() -> ctypes.CDLL:
    """Return the C library that native code prints with."""
    return ctypes.CDLL("ucrtbase" if fcntl is None else None)
