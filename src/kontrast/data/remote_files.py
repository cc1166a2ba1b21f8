"""Read objects at addresses (`s3://`, `gs://`, `hf://`, `https://`, ...) through fsspec, in ranges and with retries.

Storage that stalls, answers with an error of its own, or cuts a range in the middle is asked again, with growing
pauses, until nothing has come for `patience()` seconds. No torch: decoding processes import this module.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from kontrast.addresses import protocol_of, user_of, with_credentials, without_secrets
from kontrast.data.byte_source import BadImage, ChangedFile, check_length, patience
from kontrast.data.object_cache import BLOCK, ObjectCache
from kontrast.errors import EnvironmentFault, KontrastError, StorageFault

T = TypeVar("T")
LARGEST_RANGE, SMALLEST_RANGE = 1 << 24, 1 << 16
"""Bytes of one request. After each that failed, the next asks for half as many: a connection may always be cut after
some number of bytes."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
LONGEST_REQUEST = 30.0
"""Seconds after which a request is given up and repeated."""
READERS = 16
"""Objects that a process reads at once: a request mostly waits."""
VERSION_KEYS = (
    "ETag", "etag", "checksum", "blob_id", "md5Hash", "content_md5", "generation", "mtime", "LastModified",
    "last_modified", "modified", "updated", "created",
)  # fmt: skip
"""The entries of fsspec's facts about an object that change if its content does, best first."""
WEB = ("http", "https")
"""Protocols of which each request has the credentials in its address."""
EXTRAS = {"s3": "remote", "s3a": "remote", "hf": "hub"}


class Refused(Exception):
    """What the storage does not give, however often it is asked: there is no such object, or it may not be read."""

    def __init__(self, reason: str, number: int):
        super().__init__(reason)
        self.reason, self.errno = reason, number


class State(NamedTuple):
    """An object's size, and a hash of its version as a number; 0 if the storage doesn't tell versions apart."""

    size: int
    mtime: int


class _System(NamedTuple):
    files: Any
    is_async: bool


_systems: dict[tuple[int, str], _System] = {}
_starting = threading.Lock()
_cache = ObjectCache()
_fetching = threading.Lock()
_pending: dict[tuple[str, int], Future[bytes]] = {}
"""The blocks that this process is fetching."""


def file_system(address: str) -> tuple[_System, str]:
    """fsspec's file system for an address, and the path in it. Each process makes its own: after a fork, the thread
    that talks to the storage would be missing."""
    key = os.getpid(), "/".join(address.split("/")[:3])
    with _starting:
        if key not in _systems:
            _systems[key] = _start(address)
    whole = with_credentials(address) if protocol_of(address) in WEB else address
    return _systems[key], str(_systems[key].files._strip_protocol(whole))


def _start(address: str) -> _System:
    protocol = protocol_of(address)
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError:
        raise EnvironmentFault(f"{protocol}:// needs fsspec: pip install 'kontrast[remote]'") from None
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "abfs", "hf", "https", "sftp", "memory"))
        raise EnvironmentFault(f"unknown protocol {protocol}:// of {address}; some that are known: {known}") from None
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        advice = f"pip install 'kontrast[{extra}]'" if extra else known_implementations[protocol].get("err", str(error))
        raise EnvironmentFault(f"{protocol}:// needs a package that is not installed: {advice}") from None
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    options |= kind._get_kwargs_from_urls(with_credentials(address))
    user, password = user_of(address)
    if user and protocol in ("s3", "s3a"):
        options |= {"key": user, "secret": password}
    files = kind(**options)
    files.retries = 1  # requests are repeated here
    return _System(files, bool(kind.async_impl))


def ask(address: str, question: Callable[..., T], limit: float | None = None) -> T:
    """Call `question(files, path, **options)` until it succeeds.

    limit: seconds of one attempt; default: enough for one request, and for four attempts within `patience()`.

    Raises `Refused` if asking again is useless, and `StorageFault` if nothing has come for `patience()` seconds. The
    time is counted per attempt, so that the time in which this process was stopped does not count.
    """
    waited, attempt = 0.0, 0
    while True:
        began, seconds = time.monotonic(), limit or min(LONGEST_REQUEST, patience() / 4)
        try:
            return _ask_once(address, question, seconds)
        except (KontrastError, Refused, ChangedFile, TypeError, AttributeError, NotImplementedError, AssertionError):
            raise
        except Exception as error:
            if refusal := _refusal(error):
                raise refusal from None
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
            waited, attempt = waited + min(time.monotonic() - began, seconds) + pause, attempt + 1
            if waited >= patience():
                raise _gone(address, error) from None
            time.sleep(pause)


def _ask_once(address: str, question: Callable[..., T], seconds: float) -> T:
    system, path = file_system(address)
    if system.is_async:
        return question(system.files, path, timeout=seconds)
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(question(system.files, path))
        except BaseException as error:
            answer.set_exception(error)

    # A thread that nobody waits for at the end: it may hang as long as the storage does.
    threading.Thread(target=work, daemon=True, name="kontrast-request").start()
    return answer.result(timeout=seconds)


def _gone(address: str, error: Exception) -> StorageFault:
    why = without_secrets(" ".join(str(error).split())[:200]) or "no answer"
    return StorageFault(
        f"{address} could not be read for {patience():g} s ({type(error).__name__}: {why}): storage gone? Repeat the "
        "command when it is back (pretrain: with --resume); KONTRAST_STORAGE_TIMEOUT sets how long to wait"
    )


def _refusal(error: BaseException) -> Refused | None:
    """What an error means on which asking again has no influence; None for all others."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and not hasattr(cause, "response"):
        return _refusal(cause)  # fsspec's web client says so of every error
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return Refused("no credentials: see docs/where-data-live.md", errno.EACCES)
    if isinstance(error, PermissionError) or status in (401, 403):
        return Refused(f"no permission ({status or 403})", errno.EACCES)
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) or status in (404, 410):
        return Refused(f"not found ({status or 404})", errno.ENOENT)
    if isinstance(error, ValueError) or (isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)):
        return Refused(without_secrets(" ".join(str(error).split())[:200]), errno.EIO)
    return None


def state_of(address: str) -> State:
    """The size and version of an object, by one request. Raises `Refused`."""
    facts = ask(address, lambda files, path, **options: files.info(path, **options))
    if facts.get("type") == "directory":
        raise Refused("a folder, not an object", errno.ENOENT)
    return state_in(facts)


def state_in(facts: dict[str, Any]) -> State:
    """The size and version in fsspec's facts about an object."""
    size, version = facts.get("size"), next((facts[key] for key in VERSION_KEYS if facts.get(key) is not None), None)
    if isinstance(version, datetime):  # some file systems list seconds
        version = version.timestamp()
    digest = hashlib.sha256(str(version).encode("utf-8", "surrogatepass")).digest()
    number = 0 if version is None else int.from_bytes(digest[:8], "little", signed=True)
    return State(-1 if size is None else int(size), number)


def read_range(address: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of an object, in as many requests as it takes; what has come is not asked for again."""
    content, piece = bytearray(), LARGEST_RANGE
    while (begin := start + len(content)) < stop:

        def read(files: Any, path: str, begin: int = begin, **options: Any) -> bytes:
            nonlocal piece
            end, piece = min(stop, begin + piece), max(SMALLEST_RANGE, piece // 2)  # the next is shorter if this fails
            part: bytes = files.cat_file(path, start=begin, end=end, **options)
            if not part:
                raise OSError(errno.EIO, "the storage sent nothing")
            if len(part) > end - begin:  # a web server that does not know ranges sends the whole object
                part = part[begin:end]
            return part

        content += ask(address, read)
        piece = min(LARGEST_RANGE, 2 * piece)
    return bytes(content)


def read_object(path: str, offset: int = 0, length: int = -1, stamp: tuple[int, int] | None = None) -> bytes:
    """`length` bytes of an object from `offset`, from the cache if they are there.

    Args:
        path: its address.
        offset: where they begin.
        length: how many they are; -1 for all that follow.
        stamp: the size and version that were listed. `ChangedFile` is raised if they are others when bytes are fetched.
    """
    try:
        known = state_of(path) if stamp is None else State(*stamp)
        length = known.size - offset if length < 0 else length
        check_length(length)
        if offset + length > known.size:
            raise BadImage("the archive ends before the file does")
        return read_blocks(path, known, offset, offset + length)
    except Refused as error:
        raise BadImage(error.reason, error.errno) from None


def read_blocks(address: str, state: State, start: int, stop: int) -> bytes:
    """Bytes of an object whose blocks are cached; neighboring blocks that are missing are fetched together.

    A block that another thread of this process is fetching is awaited: images next to each other share one.
    """
    numbers = range(start // BLOCK, -(-stop // BLOCK))
    key = f"{address}\0{state.size}\0{state.mtime}"
    own: dict[int, Future[bytes]] = {}
    with _fetching:
        awaited = {number: _pending[key, number] for number in numbers if (key, number) in _pending}
        for number in numbers:
            if number not in awaited:
                own[number] = _pending[key, number] = Future()
    try:
        found = _own_blocks(address, state, key, list(own))
        for number, future in own.items():
            future.set_result(found[number])
    except BaseException as error:
        for future in own.values():
            if not future.done():
                future.set_exception(error)
        raise
    finally:
        with _fetching:
            for number in own:
                del _pending[key, number]
    whole = b"".join((own.get(number) or awaited[number]).result() for number in numbers)
    return whole[start - numbers.start * BLOCK : stop - numbers.start * BLOCK]


def _own_blocks(address: str, state: State, key: str, numbers: Sequence[int]) -> dict[int, bytes]:
    """These blocks of an object, from the cache or from the storage."""
    known = {n: _cache.read(f"{key}\0{n}", min(BLOCK, state.size - n * BLOCK)) for n in numbers}
    blocks = {number: block for number, block in known.items() if block is not None}
    for first, last in _runs([number for number in numbers if number not in blocks]):
        content = read_range(address, first * BLOCK, min(state.size, (last + 1) * BLOCK))
        now = state_of(address)
        if now.size != state.size or (state.mtime and now.mtime != state.mtime):
            raise ChangedFile
        for number in range(first, last + 1):
            blocks[number] = content[(number - first) * BLOCK : (number + 1 - first) * BLOCK]
            _cache.write(f"{key}\0{number}", blocks[number])
    return blocks


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers, at most as long as one request."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1 and number - runs[-1][0] < LARGEST_RANGE // BLOCK:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


_pools: dict[int, ThreadPoolExecutor] = {}


def readers() -> ThreadPoolExecutor:
    """The threads of this process that read objects."""
    return _pools.setdefault(os.getpid(), ThreadPoolExecutor(READERS, "kontrast-reader"))


class RemoteFile(io.RawIOBase):
    """An object as a file that can be read and sought; its blocks are cached.

    Args:
        address: the object.
        state: its size and version.
    """

    def __init__(self, address: str, state: State):
        super().__init__()
        self.address, self.state, self.place = address, state, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.state.size}[whence]
        return self.place

    def fetch(self, start: int, stop: int) -> bytes:
        return read_blocks(self.address, self.state, start, stop)

    def read(self, size: int | None = -1) -> bytes:
        stop = self.state.size if size is None or size < 0 else min(self.state.size, self.place + size)
        content = self.fetch(self.place, stop) if self.place < stop else b""
        self.place += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def open_object(path: str, stamp: tuple[int, int] | None = None) -> BinaryIO:
    """An object of any size as a file, of which only the bytes that are asked for are read.

    Args:
        path: its address.
        stamp: the size and version that were listed.
    """
    try:
        return cast(BinaryIO, RemoteFile(path, state_of(path) if stamp is None else State(*stamp)))
    except Refused as error:
        raise BadImage(error.reason, error.errno) from None


class HeaderFile(RemoteFile):
    """An object of which few bytes in many places are read, such as the headers in an archive: nothing is cached, and
    a request covers the next headers too if they follow closely."""

    FIRST, MOST = 1 << 14, 1 << 22

    def __init__(self, address: str, state: State):
        super().__init__(address, state)
        self.window, self.begin, self.content = self.FIRST, 0, b""

    def fetch(self, start: int, stop: int) -> bytes:
        end = self.begin + len(self.content)
        if not self.begin <= start <= stop <= end:
            follows = self.begin <= start <= end + self.window
            self.window = min(self.MOST, 2 * self.window) if follows else self.FIRST
            last = min(self.state.size, max(stop, start + self.window))
            self.begin, self.content = start, read_range(self.address, start, last)
        return self.content[start - self.begin : stop - self.begin]
