"""The run folder: the only thing that passes between commands, readable after a crash at any moment.

    recipe.toml  run.json  metrics.jsonl  speed.jsonl  checkpoints/  encoder.safetensors  probes.json  report.html
    bad.jsonl (images that could not be read)

metrics.jsonl holds what the recipe and seed determine, so a resumed run writes the same bytes as an undisturbed one;
what the machine determines (images/s, seconds, memory) goes to speed.jsonl.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kontrast.errors import CheckpointError, EnvironmentFault


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
def atomic_path(path: Path, needed: int = 0) -> Iterator[Path]:
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
    with atomic_path(path, needed=len(data)) as place:
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


class JsonLines:
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
            records = read_json_lines(self.path)
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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole records of a JSON-lines file; anything torn or not a table is left out."""
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
