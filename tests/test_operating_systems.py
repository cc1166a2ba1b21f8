"""kontrast on macOS and Windows, as far as Linux can show it: what they lack is taken away."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kontrast
from kontrast import operating_system
from kontrast.files import LockHeld, take_lock

ROOT, SUPPORT = Path(kontrast.__file__).parent, Path(__file__).parent / "support"
LACKING = {
    "os": {
        "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "chown", "fchmod", "fork", "forkpty", "geteuid", "getgid",
        "getloadavg", "getpgid", "getuid", "killpg", "mkfifo", "nice", "posix_fadvise", "posix_spawn", "pread",
        "pwrite", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "setsid", "setuid", "statvfs", "sync",
        "sysconf", "sysconf_names", "uname", "wait", "waitid",
    },
    "signal": {
        "SIGALRM", "SIGBUS", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP",
        "SIGUSR1", "SIGUSR2", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK", "alarm", "pause", "pthread_kill",
        "pthread_sigmask", "setitimer", "siginterrupt", "sigwait",
    },
}  # fmt: skip
"""What Windows lacks, by module. macOS lacks some of it too, for example `os.sched_getaffinity`."""
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def used(path: Path) -> list[str]:
    """Return the uses of what Windows lacks in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            found += [node.module] if node.module in MODULES else sorted(names & LACKING.get(node.module, set()))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] * (node.attr in LACKING.get(node.value.id, ()))
    return found


def test_only_one_module_uses_what_windows_lacks():
    by_file = {str(path.relative_to(ROOT)): used(path) for path in ROOT.rglob("*.py")}
    found = {name: uses for name, uses in by_file.items() if uses}
    assert list(found) == ["operating_system.py"], found
    assert {"fcntl", "resource", "os.getuid", "signal.SIG_BLOCK"} <= set(found["operating_system.py"])


def text_without_encoding(tree: ast.AST) -> list[int]:
    """Return the lines that read or write text in the system's encoding, which is not UTF-8 on Windows."""
    lines = []
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
        if name not in ("open", "read_text", "write_text") or not isinstance(node, ast.Call):
            continue
        given = any(word.arg == "encoding" for word in node.keywords)
        of_method = isinstance(node.func, ast.Attribute)
        if name == "open":
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            text = bool(modes) and set(modes[-1]) <= set("rwatx+") and not set(modes[-1]) & {"b"}
            lines += [node.lineno] * (text and not given and (not of_method or len(modes[-1]) <= 2))
        else:
            positional = len(node.args) > (name == "write_text")
            lines += [node.lineno] * (not given and not positional)
    return lines


def test_text_has_an_encoding():
    found = {
        str(p.relative_to(ROOT)): text_without_encoding(ast.parse(p.read_text("utf-8"))) for p in ROOT.rglob("*.py")
    }
    assert not {name: lines for name, lines in found.items() if lines and name != "training/peak_memory.py"}


def test_commands_run_without_what_windows_lacks(tmp_path):
    """All modules are imported, and a run is trained, resumed, probed, embedded, exported and reported."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "without_posix.py"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KONTRAST_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").exists() and "modules" in done.stdout


@pytest.fixture
def windows_locks(monkeypatch):
    """The locks of Windows, made of others."""
    sys.path.insert(0, str(SUPPORT))
    import fcntl
    import types

    def locking(handle: int, mode: int, count: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None

    monkeypatch.setattr(operating_system, "fcntl", None)
    monkeypatch.setattr(operating_system, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))


def test_locks_of_windows(tmp_path, windows_locks):
    """A file and a folder are locked once, and again after the first lock is released."""
    for place in (tmp_path / "lock", tmp_path):
        first = take_lock(place, wait=False)
        with pytest.raises(LockHeld):
            take_lock(place, wait=False)
        os.close(first)
        os.close(take_lock(place))


def test_memory_is_known_on_every_system(monkeypatch):
    """Without /proc, sysconf is asked; without both, Windows; without all, something is assumed."""
    monkeypatch.setattr(operating_system.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    page = 4096
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 100, "SC_PHYS_PAGES": 500, "SC_PAGE_SIZE": page}.__getitem__)
    for names, expected in (
        (["SC_AVPHYS_PAGES", "SC_PHYS_PAGES"], 100 * page),
        (["SC_PHYS_PAGES"], 250 * page),  # macOS
        ([], operating_system.UNKNOWN_MEMORY),
    ):
        monkeypatch.setattr(os, "sysconf_names", dict.fromkeys(names, 0))
        assert operating_system.free_memory() == expected
    assert operating_system.process_age() == 0.0


def test_peak_memory_is_in_bytes_on_macos(monkeypatch):
    linux = operating_system.peak_memory()
    monkeypatch.setattr(operating_system.sys, "platform", "darwin")
    assert 1000 < linux / operating_system.peak_memory() < 1100
    monkeypatch.setattr(operating_system, "resource", None)
    assert operating_system.peak_memory() is None
