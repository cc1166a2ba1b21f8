"""A bounded cache of blocks of remote objects, on this machine's disk.

    CACHE/objects/ab/abcdef...      one block and, in its last four bytes, its checksum

Any number of processes may use it. A block that is damaged or has another length counts as missing, and what can't be
written is not cached. The blocks that were not used for longest are removed if there are too many bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path

from kontrast.data.cache_folder import cache_home
from kontrast.errors import EnvironmentFault, UsageError
from kontrast.files import LockHeld, take_lock, write_atomic

BLOCK = 1 << 20
"""Bytes of a block. One that is used for a single image is read whole."""
DEFAULT, FREE_SHARE = 50e9, 0.3
"""Without KONTRAST_CACHE_GB: at most so many bytes, and this share of what is free on the disk."""
UNCOUNTED = 100
"""A process counts the bytes of the cache again after it has written a hundredth of the limit."""
KEPT_SHARE = 0.9
"""What is kept when the limit is passed."""
RECENT = 32
"""Blocks that a process keeps in memory."""
TOUCHED_AFTER = 60.0
"""Seconds for which a use of a block is not recorded again."""


class ObjectCache:
    """The blocks of all remote objects that were read last. It is opened when it is first used."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.limit = 0.0
        self.fresh = 0.0  # bytes that this process has written since it counted
        self.recent: OrderedDict[str, bytes] = OrderedDict()
        self._home = ""
        self._lock = threading.Lock()

    def read(self, key: str, size: int | None = None) -> bytes | None:
        """The block if it is there and whole, else None. `size`: how long it must be."""
        path = self._place(key)
        with self._lock:
            if key in self.recent:
                self.recent.move_to_end(key)
                return self.recent[key]
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                content = file.read(-1 if size is None else size + 5)
                if time.time() - os.fstat(file.fileno()).st_mtime > TOUCHED_AFTER:
                    os.utime(path)
        except OSError:
            return None
        block, check = content[:-4], content[-4:]
        if size not in (None, len(block)) or check != _check(block):
            return None
        self._remember(key, block)
        return block

    def _remember(self, key: str, block: bytes) -> None:
        """Keep a block in memory: images that are read one after another share it."""
        with self._lock:
            self.recent[key] = block
            while len(self.recent) > RECENT:
                self.recent.popitem(last=False)

    def write(self, key: str, block: bytes) -> None:
        """Keep a block. It gets its name when it is whole; nothing is said if the disk is full or can't be written."""
        self._remember(key, block)
        if (path := self._place(key)) is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, block + _check(block), synced=False)  # after a crash, the checksum reveals what is lost
        except (OSError, EnvironmentFault):
            return
        with self._lock:
            self.fresh += len(block)
            due = self.fresh >= self.limit / UNCOUNTED
            self.fresh = 0.0 if due else self.fresh
        if due:
            self.shrink()

    def shrink(self) -> None:
        """Remove the blocks that were not used for longest, if there are too many bytes."""
        assert self.folder is not None
        with contextlib.suppress(OSError, LockHeld):  # another process is doing it
            handle = take_lock(self.folder / "lock", wait=False)
            try:
                self._remove_oldest()
            finally:
                os.close(handle)

    def _remove_oldest(self) -> None:
        assert self.folder is not None
        known: list[tuple[float, int, str]] = []
        for folder in filter(os.DirEntry.is_dir, os.scandir(self.folder)):
            for entry in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    known.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in known)
        if total <= self.limit:
            return
        for _, size, path in sorted(known):
            if total <= KEPT_SHARE * self.limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _place(self, key: str) -> Path | None:
        """Where a block is kept; None if there is no cache."""
        home = f"{os.environ.get('KONTRAST_CACHE')} {os.environ.get('KONTRAST_CACHE_GB')}"
        with self._lock:
            if home != self._home:
                self._open()
                self._home = home
        if self.folder is None:
            return None
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:40]
        return self.folder / digest[:2] / digest

    def _open(self) -> None:
        self.folder, self.fresh, self.limit = None, 0.0, chosen_limit()
        self.recent.clear()
        if self.limit == 0:
            return
        with contextlib.suppress(OSError, EnvironmentFault):
            folder = cache_home() / "objects"
            folder.mkdir(parents=True, exist_ok=True)
            if self.limit < 0:
                self.limit = min(DEFAULT, FREE_SHARE * shutil.disk_usage(folder).free)
            self.folder = folder


def chosen_limit() -> float:
    """Bytes that KONTRAST_CACHE_GB allows, 0 for no cache; -1 if it is not set."""
    text = os.environ.get("KONTRAST_CACHE_GB")
    if text is None:
        return -1.0
    with contextlib.suppress(ValueError):
        if 0 <= (limit := float(text)) < 1e9:
            return 1e9 * limit
    raise UsageError(f"KONTRAST_CACHE_GB is {text!r}: give the gigabytes that the cache may fill, or 0 for none")


def _check(block: bytes) -> bytes:
    return zlib.crc32(block).to_bytes(4, "little")
