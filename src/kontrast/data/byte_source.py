"""Open the bytes of one encoded image, wherever they are: a file, a part of a file, or an object at an address.

Everything that decodes an image opens it here and gets a seekable file. Decoding processes import this module, which
does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from kontrast.addresses import is_address
from kontrast.operating_system import NO_WAIT

MAX_BYTES = 1 << 29
PATIENCE = 120.0
"""Seconds without any progress, after which the storage is taken to hang. KONTRAST_STORAGE_TIMEOUT overrides it."""


class BadImage(Exception):
    """A file that can't be decoded: the reason, and the errno if the operating system or the storage reported one."""

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.reason, self.errno = reason, number


class ChangedFile(Exception):
    """A file whose size or date is not the one that was listed."""


def patience() -> float:
    """Return after how many seconds without any progress the storage is taken to hang."""
    with contextlib.suppress(KeyError, ValueError):
        return max(1.0, float(os.environ["KONTRAST_STORAGE_TIMEOUT"]))
    return PATIENCE


def check_length(length: int, most: int | None = MAX_BYTES) -> None:
    """Raise `BadImage` about more bytes than an image may have."""
    if most is not None and length > most:
        raise BadImage(f"{length:,} bytes: more than {most:,}")


@contextlib.contextmanager
def open_bytes(
    path: str,
    offset: int = 0,
    length: int = -1,
    stamp: tuple[int, int] | None = None,
    most: int | None = MAX_BYTES,
) -> Iterator[BinaryIO]:
    """Open a file of a reasonable size at `offset`; what the system or the storage refuses becomes `BadImage`.

    Args:
        path: the path of a regular file, an address, or what `table_cells.cell_path` makes.
        offset: where the image begins.
        length: how many bytes it has; -1 for all that follow.
        stamp: the size and date (of an object: a hash of its version) that were listed; `ChangedFile` is raised if
            they are others now.
        most: how many bytes it may have; None for any number, of which only those that are asked for are read.
    """
    if "\0" in path:
        from kontrast.data.table_cells import read_cell

        yield io.BytesIO(read_cell(path, offset, stamp))
        return
    if is_address(path):
        from kontrast.data.remote_files import open_object, read_object

        yield open_object(path, stamp) if most is None else io.BytesIO(read_object(path, offset, length, stamp))
        return
    try:
        # NO_WAIT: a named pipe must not wait for a writer, who may never come.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_WAIT)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadImage("not a regular file")
            if stamp is not None and stamp != (status.st_size, status.st_mtime_ns):
                raise ChangedFile
            size = length if length >= 0 else status.st_size
            check_length(size, most)
            if offset + size > status.st_size:
                raise BadImage("the archive ends before the file does")
            file.seek(offset)
            yield file
    except OSError as error:
        raise BadImage(f"{os.strerror(error.errno or errno.EIO)} ({error.errno})", error.errno) from None
