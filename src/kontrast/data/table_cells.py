"""Images in the cells of a table: a Parquet file, or an Arrow file that Hugging Face's datasets wrote.

The path of such an image is `KIND NUL file NUL column NUL group`, which no file can have; its offset is its row in the
group. A row group of a Parquet file is read by itself, and an Arrow file is memory-mapped. No torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from kontrast.addresses import is_address
from kontrast.data.byte_source import BadImage, ChangedFile, check_length
from kontrast.data.file_columns import TABLE, Item
from kontrast.data.object_cache import ObjectCache
from kontrast.data.remote_files import Refused, RemoteFile, State, state_of
from kontrast.errors import DataError, EnvironmentFault, StorageFault

RECENT_BYTES = 1 << 28
"""Bytes of row groups that a process keeps, beside the one that it reads."""
_groups: OrderedDict[tuple[str, tuple[int, int]], Any] = OrderedDict()
_lock = threading.RLock()
_cache = ObjectCache()


def cell_path(kind: str, file: str, column: str, group: int) -> str:
    """The path of the images in a group of rows."""
    return TABLE.join((kind, file, column, str(group)))


def state_of_file(file: str) -> State:
    """The size and date of a file, or the version of an object. Raises `Refused`."""
    if is_address(file):
        return state_of(file)
    try:
        status = os.stat(file)
    except OSError as error:
        raise Refused(f"{error.strerror} ({error.errno})", error.errno or 0) from None
    return State(status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def open_parquet(file: str, state: State) -> Iterator[Any]:
    """pyarrow's Parquet file at a path or an address, of which only the parts that are asked for are read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentFault(f"{os.path.basename(file)} needs pyarrow: pip install 'kontrast[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(RemoteFile(file, state) if is_address(file) else file) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as Parquet: {' '.join(str(error).split())[:200]}") from None


def arrow_table(file: str) -> Any:
    """The table of an Arrow file, memory-mapped and checked: it may come from others."""
    try:
        import pyarrow
    except ImportError:
        raise EnvironmentFault(f"{os.path.basename(file)} needs pyarrow: pip install 'kontrast[parquet]'") from None
    try:
        mapped = pyarrow.memory_map(file)
        try:
            table = pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(mapped).read_all()
        table.validate(full=True)
        return table
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as an Arrow file: {' '.join(str(error).split())[:200]}") from None


def read_cell(path: str, row: int, stamp: tuple[int, int] | None = None) -> bytes:
    """The bytes of one image. Raises `BadImage` if there are none, and `ChangedFile`."""
    kind, file, column, group = path.split(TABLE)
    state = _checked_state(file, stamp)
    with _lock:
        cells = _groups.get((path, state))
        if cells is None:
            cells = _groups[path, state] = _read_group(kind, file, column, int(group), state)
        _groups.move_to_end((path, state))
        while len(_groups) > 1 and sum(cells.nbytes for cells in _groups.values()) > RECENT_BYTES:
            _groups.popitem(last=False)
    content = cells[row].as_py() if row < len(cells) else None
    if not isinstance(content, bytes):
        raise BadImage("its cell has no bytes")  # a path that may stand beside it is never opened
    check_length(len(content))
    return content


def read_cells(items: Sequence[Item]) -> Iterator[bytes | Exception]:
    """The bytes of images, or why there are none. Of images that don't follow each other, as in shuffled batches, the
    whole groups are put into the cache, so that the next batches don't decode them again."""
    follows = [b.path != a.path or b.offset == a.offset + 1 for a, b in itertools.pairwise(items)]
    scattered = not (follows and all(follows))
    for item in items:
        key = f"{item.path}\0{item.size}\0{item.mtime}\0"
        try:
            content = _cache.read(f"{key}{item.offset}") if scattered else None
            if content is None:
                content = read_cell(item.path, item.offset, item.stamp)
                if scattered:
                    _keep(item, key)
            yield content
        except (BadImage, ChangedFile, StorageFault) as error:
            yield error


def _keep(item: Item, key: str) -> None:
    """Put the images of the group of an item into the cache."""
    with _lock:
        cells = _groups.get((item.path, item.stamp))
    for row, cell in enumerate(cells if cells is not None else ()):
        content = cell.as_py()
        if isinstance(content, bytes):
            _cache.write(f"{key}{row}", content)


def _checked_state(file: str, stamp: tuple[int, int] | None) -> State:
    """The file's state, which must be the one that was listed; objects are compared when they are read."""
    if stamp is not None and is_address(file):
        return State(*stamp)
    try:
        state = state_of_file(file)
    except Refused as error:
        raise BadImage(error.reason, error.errno) from None
    if stamp is not None and state != State(*stamp):
        raise ChangedFile
    return state


def _read_group(kind: str, file: str, column: str, group: int, state: State) -> Any:
    """The cells of a column in a group of rows."""
    try:
        if kind == "arrow":
            return bytes_in(arrow_table(file), column)
        with open_parquet(file, state) as opened:
            return bytes_in(opened.read_row_group(group, columns=[column]), column)
    except DataError as error:
        raise BadImage(str(error)) from None


def bytes_in(table: Any, column: str) -> Any:
    """The bytes of a column, also of one of structs, whose name is `column.bytes`."""
    name, _, field = column.partition(".")
    if column in table.column_names:
        return table.column(column)
    import pyarrow.compute

    return pyarrow.compute.struct_field(table.column(name), field)
