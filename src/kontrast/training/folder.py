"""The run folder: the only thing that passes between commands, readable after a crash at any moment.

    recipe.toml  run.json  metrics.jsonl  speed.jsonl  checkpoints/  encoder.safetensors  probes.json  report.html
    bad.jsonl (images that could not be read)

metrics.jsonl holds what the recipe and seed determine, so a resumed run writes the same bytes as an undisturbed one;
what the machine determines (images/s, seconds, memory) goes to speed.jsonl.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kontrast.registry import CheckpointError, EnvironmentFault, UsageError

VERSION = 1
KINDS: dict[str, Any] = {
    "version": int, "data": dict, "data_before": dict, "seconds": int | float, "steps": int, "resumed": list,
    "recipe_sha256": list, "fingerprint": str,
}  # fmt: skip
"""What run.json's entries must be, where they are there."""


@contextlib.contextmanager
def disk_faults(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn the disk's refusals into one line that names the path, and where they are known the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            size = f" ({needed:,} bytes needed)" if needed else ""
            text = f"no space left to write {path}{size}: free some, then go on (pretrain: --resume)"
            raise EnvironmentFault(text) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EnvironmentFault(f"can't write {path}: {error.strerror}; choose another place") from None
        raise EnvironmentFault(f"can't write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def aside(path: Path, needed: int = 0) -> Iterator[Path]:
    """A place beside `path` to write to, which is synced and takes its name when all went well: under its name a file
    is whole or absent."""
    place = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with disk_faults(path, needed):
        try:
            yield place
            with open(place, "rb") as file:
                os.fsync(file.fileno())
            os.replace(place, path)
        finally:
            place.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with aside(path, needed=len(data)) as place:
        place.write_bytes(data)


def write_json(path: Path, tree: Any) -> None:
    write_atomic(path, json.dumps(tree, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is {path.parent} a finished run?") from None
    except OSError as error:
        raise EnvironmentFault(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: not JSON") from None


WRITTEN = (
    "metrics.jsonl", "speed.jsonl", "encoder.safetensors", "probes.json", "gallery.json", "gallery.png", "lens.json",
    "report.html",
)  # fmt: skip
"""What a run writes after recipe.toml: there without it, they are somebody else's, and are not written over."""


class RunFolder:
    """One run's folder on disk; `hold` makes this process its only writer."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: int | None = None
        self._made: list[Path] = []  # it and the folders above it, innermost first, as far as `create` made them

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def holds_run(self) -> bool:
        """recipe.toml is the last thing that a new run writes before it trains."""
        return (self / "recipe.toml").exists()

    def create(self) -> None:
        """Make the folder and prove that it can be written, before any data is read."""
        if self.path.exists() and not self.path.is_dir():
            raise EnvironmentFault(f"--out {self.path} is a file; give a folder that does not exist yet")
        if self.holds_run:
            raise UsageError(f"--out {self.path} already holds a run: use --resume to go on with it, or another folder")
        for name in WRITTEN:
            if (self / name).exists():
                raise UsageError(f"--out {self.path} holds a {name} that is of no run here: give another folder")
        with disk_faults(self.path):
            self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
            (self / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = self / f".tmp-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove the folders that `create` made if no run came to be there: a mistake in the recipe leaves nothing."""
        if self._made and not self.holds_run:
            with contextlib.suppress(OSError):
                for name in (".lock", "run.json"):
                    (self / name).unlink(missing_ok=True)
                (self / "checkpoints").rmdir()
                for place in self._made:
                    place.rmdir()

    def hold(self) -> None:
        """Take the folder's lock; a dead process's lock falls by itself (flock)."""
        with disk_faults(self.path):
            lock = os.open(self / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 200).decode(errors="replace").strip() or "another process"
            os.close(lock)
            raise EnvironmentFault(f"{self.path} is held by {holder}: wait for it or stop it") from None
        self._lock = lock
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with disk_faults(self / ".lock"):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def update_info(self, **facts: Any) -> None:
        """Lay facts over run.json."""
        path = self / "run.json"
        old = read_json(path) if path.exists() else {"version": VERSION}
        write_json(path, {**old, **facts})

    def write_bad(self, bad: list[tuple[str, str]]) -> None:
        """bad.jsonl: a line for each image that could not be read, with the reason."""
        lines = (json.dumps({"name": name, "reason": reason}) + "\n" for name, reason in bad)
        write_atomic(self / "bad.jsonl", "".join(lines))

    def info(self) -> dict[str, Any]:
        facts = read_json(self / "run.json")
        if not isinstance(facts, dict):
            raise CheckpointError(f"{self / 'run.json'} is damaged: not a table")
        for key, kind in KINDS.items():
            if key in facts and not isinstance(facts[key], kind):
                raise CheckpointError(f"{self / 'run.json'} is damaged: its {key} can't be {facts[key]!r}")
        version = facts.get("version", 0)
        if version > VERSION:
            raise CheckpointError(f"{self.path} was written by a newer kontrast: upgrade to read it")
        return facts


class Lines:
    """An append-only JSON-lines file whose torn last line, after a crash, is dropped on opening."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def open(self, keep_until_step: int | None = None, owed: bool = False) -> int:
        """Open for appending; with a step, lines of later steps (written after the checkpoint) are dropped, and where
        its evaluation is owed, what an earlier resumption wrote of it. How many lines were damaged and are left out:
        any but the last, which a crash may have cut."""
        damaged = 0
        if self.path.exists():
            records = read_lines(self.path)
            damaged = max(0, self.path.read_bytes().count(b"\n") - len(records))
            kept = [r for r in records if keep_until_step is None or _step(r) <= keep_until_step]
            kept = [r for r in kept if not owed or "loss" in r or _step(r) != keep_until_step]
            write_atomic(self.path, "".join(_line(r) for r in kept))
        with disk_faults(self.path):
            self._file = open(self.path, "a", encoding="ascii")  # noqa: SIM115
        return damaged

    def write(self, **record: Any) -> None:
        with disk_faults(self.path):
            self._file.write(_line(record))
            self._file.flush()

    def sync(self) -> None:
        with disk_faults(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            with disk_faults(self.path):
                self._file.close()
            self._file = None


def _step(record: dict[str, Any]) -> float:
    """Where a record stands; one whose step is no number is of no step that was kept."""
    step = record.get("step", 0)
    return step if isinstance(step, int | float) else float("inf")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole records of a JSON-lines file; anything torn or not a table is left out."""
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
