"""Files that are whole or absent: atomic writes, locks and JSON lines, for the whole program.

What is being written is called `.tmp-<pid>-<name>`, in the folder of its final name, so that `sweep` can remove what a
killed process left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kontrast.errors import CheckpointError, StorageFault, printable
from kontrast.operating_system import NO_LINKS, NO_WAIT, lock_file, open_to_lock
from kontrast.operating_system import sync as sync


@contextlib.contextmanager
def disk_faults(path: Path, needed: int = 0, advice: str = "choose another place") -> Iterator[None]:
    """Turn an `OSError` into one line that names the path and the number of bytes needed, if known, or says what to do
    if the path can't be written."""
    try:
        yield
    except OSError as error:
        text = f"can't write {path}: {error.strerror or error}; {advice}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            size = f" ({needed:,} bytes needed)" if needed else ""
            text = f"no space left to write {path}{size}: free some, then repeat the command (pretrain: add --resume)"
        raise StorageFault(text) from None


@contextlib.contextmanager
def read_faults(path: Path) -> Iterator[None]:
    """Turn an `OSError` while a file or folder is read into one line that names it; the system's own error names it
    only if it can't be opened. A missing one stays a `FileNotFoundError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageFault(f"can't read {path}: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """Read a whole regular file, with an error that names it.

    In a folder of others there may be a named pipe, which would never end, or a link to a device, which would fill the
    memory.
    """
    with (
        read_faults(path),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_WAIT)) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


@contextlib.contextmanager
def atomic_path(path: Path, needed: int = 0) -> Iterator[Path]:
    """Yield a temporary path; if no error occurs, sync the file that was written there and rename it to `path`."""
    temporary = _temporary(path)
    with disk_faults(path, needed):
        try:
            temporary.unlink(missing_ok=True)  # in a folder of others, it may be a link to a file elsewhere
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(path: Path, needed: int = 0, synced: bool = True) -> Iterator[Path]:
    """Yield a temporary folder; if no error occurs, sync its files (unless `synced` is false) and rename it to `path`.

    If another process has meanwhile made `path`, that folder stays and this one is dropped.
    """
    temporary = _temporary(path)
    with disk_faults(path, needed):
        try:
            remove_folder(temporary)
            temporary.mkdir()
            yield temporary
            for inside in (*temporary.rglob("*"), temporary) if synced else ():
                sync(inside)
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            sync(path.parent)
        finally:
            remove_folder(temporary)


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{os.getpid()}-{path.name}")


def sweep(folder: Path) -> None:
    """Remove what is half-written (`.tmp-*`) or half-deleted (`.del-*`), by a killed process or because the system did
    not allow it (EBUSY, as on network storage while another process reads). Call it under a lock.

    What still can't be removed is left for the next call: it is in nobody's way.
    """
    for path in folder.glob(".*"):
        if path.name.startswith((".tmp-", ".del-")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def exchange_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`. A folder that is there is removed only after the new one has its name."""
    old = replaced_folder(path)
    remove_folder(old)
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    remove_folder(old)


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there, as far as the file system allows."""
    with contextlib.suppress(OSError):  # rmtree raises some errors although they are to be ignored
        shutil.rmtree(path, ignore_errors=True)


def replaced_folder(path: Path) -> Path:
    """Where `exchange_folder` keeps the old folder in between: a kill between its two renames leaves it there."""
    return path.with_name(path.name + ".replaced")


class LockHeld(Exception):
    """Another process has the lock."""


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""How file systems without locks answer, as some network mounts do."""
_unlocked: set[int] = set()
"""The devices without locks that the user was warned about."""


def take_lock(path: Path, wait: bool = True) -> int:
    """Lock a file, which is created, or a folder; returns the descriptor, whose closing releases the lock.

    The system releases the lock of a process that dies. If the file was removed while this process waited, a new one is
    created: a lock on a removed file excludes nobody. Raises `LockHeld` if it may not wait and another process has the
    lock. A file system without locks is used without, after one warning.
    """
    while True:
        handle, place = open_to_lock(path)
        try:
            try:
                lock_file(handle, wait)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                _warn_of_no_locks(path, os.fstat(handle).st_dev, error)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(place)):
                    return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            raise LockHeld from None


def _warn_of_no_locks(path: Path, device: int, error: OSError) -> None:
    """Say once per file system that it has no locks."""
    if device not in _unlocked:
        _unlocked.add(device)
        problem = f"{path.parent} is on a file system without locks ({error.strerror})"
        with contextlib.suppress(OSError):  # nobody reads it, which is no reason to stop
            advice = "nothing keeps two processes apart that write there at once"
            print(printable(f"warning: {problem}: {advice}"), file=sys.stderr, flush=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with atomic_path(path, needed=len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, tree: Any) -> None:
    """Write JSON atomically; NaN and infinity are refused."""
    write_atomic(path, json.dumps(tree, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder."""
    try:
        return json.loads(read_bytes(path))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = f"missing: is {path.parent} a finished run?" if missing else "damaged: not JSON"
        raise CheckpointError(f"{path} is {why}") from None


class JsonLines:
    """An append-only JSON-lines file. Opening it drops a last line that a crash cut short."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def open(self, keep_until_step: int | None = None, owed: bool = False) -> int:
        """Open for appending and return how many damaged lines were dropped, not counting a last one that was cut.

        Args:
            keep_until_step: drop the records of later steps, which were written after the checkpoint; None keeps all.
            owed: the evaluation of that step is about to be repeated, so also drop its records without a loss.
        """
        damaged = 0
        if self.path.exists():
            records = read_json_lines(self.path)
            damaged = max(0, read_bytes(self.path).count(b"\n") - len(records))
            kept = [r for r in records if keep_until_step is None or _step(r) <= keep_until_step]
            kept = [r for r in kept if not owed or "loss" in r or _step(r) != keep_until_step]
            write_atomic(self.path, "".join(map(_line, kept)))
        with disk_faults(self.path):
            self._file = open(self.path, "a", encoding="ascii", newline="\n", opener=open_without_links)  # noqa: SIM115
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


def open_without_links(name: str, flags: int) -> int:
    """Open a file that is written to. A link, in a folder of others, may lead to a file of this user."""
    return os.open(name, flags | NO_LINKS, 0o666)


def _step(record: dict[str, Any]) -> float:
    """The step of a record; infinity, so that it is dropped, if it is not a number."""
    step = record.get("step", 0)
    return step if isinstance(step, int | float) else float("inf")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON-lines file; lines that are cut or not objects are skipped."""
    records = []
    for line in read_bytes(path).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
