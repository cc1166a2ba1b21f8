"""Decoding in many processes: plain children that read tasks from stdin and answer on stdout.

Not multiprocessing: its children import the user's main module again (a script without a guard starts itself for ever),
and a fork of a process with torch's threads may hang. A task is one line of JSON; an answer is one line of JSON and the
pixels, and empty lines before it tell that the work goes on. Children ignore SIGTERM and Ctrl-C, which go to the whole
process group, and end when their stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from kontrast.data.decode import BadImage, Limits, decode_file
from kontrast.data.listing import Item
from kontrast.errors import EnvironmentFault

STOPPING = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 120.0
"""Seconds without an answer or another image after which storage is taken to hang."""
TELLING = 1.0
"""Seconds between two signs that a child is at work: a chunk of large pictures may take it many minutes."""
IN_PROCESS = 512
"""Fewer images than this are decoded here: starting the children would take longer."""


@dataclass
class Chunk:
    """Decoded items in order: pixels end to end, sizes [n,2] of the good ones, and who was bad or noteworthy.

    lost: those of the bad that the system could not read at all.
    """

    pixels: bytes
    sizes: list[tuple[int, int]]
    kept: list[int]
    bad: list[tuple[int, str]]
    notes: dict[str, int]
    lost: list[int] = field(default_factory=list)


def decode_chunk(items: Sequence[Item], limits: Limits, tell: Callable[[], None] = lambda: None) -> Chunk:
    """Decode items one after another; positions in `kept` and `bad` count within the chunk. tell: called before each
    but the first."""
    chunk, parts = Chunk(b"", [], [], [], {}), []
    for position, item in enumerate(items):
        if position:
            tell()
        try:
            pixels, note = decode_file(item.path, item.offset, item.length, limits)
        except BadImage as error:
            chunk.bad.append((position, error.reason))
            if error.errno is not None:
                chunk.lost.append(position)
            continue
        parts.append(pixels.tobytes())
        chunk.sizes.append((pixels.shape[1], pixels.shape[2]))
        chunk.kept.append(position)
        if note:
            chunk.notes[note] = chunk.notes.get(note, 0) + 1
    chunk.pixels = b"".join(parts)
    return chunk


def serve() -> None:
    """The child's life: one task a line until stdin ends."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the protocol
    told = time.monotonic()

    def say(*parts: bytes) -> None:
        nonlocal told
        told = time.monotonic()
        try:
            answers.writelines(parts)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # who asked was killed: nobody is left to tell

    def tell() -> None:
        if time.monotonic() - told > TELLING:
            say(b"\n")

    for line in sys.stdin.buffer:
        task = json.loads(line)
        chunk = decode_chunk([Item(*fields) for fields in task["items"]], Limits.of(task["limits"]), tell)
        head = {
            "bytes": len(chunk.pixels),
            "sizes": chunk.sizes,
            "kept": chunk.kept,
            "bad": chunk.bad,
            "notes": chunk.notes,
            "lost": chunk.lost,
        }
        say(json.dumps(head).encode() + b"\n", chunk.pixels)


class Child:
    """One decoding process, used by one thread at a time."""

    def __init__(self) -> None:
        # sys.path travels with it, so that a source tree that is not installed works too.
        paths = os.pathsep.join(p for p in sys.path if p)
        # A signal to all processes may come while the child still imports: it is born with them blocked.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from kontrast.data.decode_workers import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    def decode(self, items: Sequence[Item], limits: Limits, hear: Callable[[], None]) -> Chunk:
        """What the child makes of the items; hear: called at every sign that it is at work."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        task = {"items": [(i.name, i.path, i.offset, i.length) for i in items], "limits": asdict(limits)}
        try:
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
            while (line := stdout.readline()) == b"\n":
                hear()
            head = json.loads(line) if line else None
            pixels = stdout.read(head["bytes"]) if head else b""
        except OSError:
            head, pixels = None, b""
        if head is None or len(pixels) < head["bytes"]:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise EnvironmentFault(
                f"a decoding process {how} at {items[0].name} .. {items[-1].name}: memory short? use fewer cores, "
                "which are as many workers (taskset -c 0 kontrast ...), or smaller images (data.size)"
            )
        return Chunk(
            pixels,
            [(h, w) for h, w in head["sizes"]],
            head["kept"],
            [(p, r) for p, r in head["bad"]],
            head["notes"],
            head["lost"],
        )

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # a child that was killed left its task unread
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Decoders:
    """Up to `workers` processes that decode chunks side by side, started as they are needed; for one worker, a thread
    of this process."""

    def __init__(self, limits: Limits, workers: int | None = None):
        self.limits, self.workers = limits, workers or usable_cores()
        self.heard = 0.0  # when a worker last told that it is at work
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._pool = ThreadPoolExecutor(self.workers, "kontrast-decoder")
        # Whoever forgets to close leaves no process behind. It may run in a thread of the pool: it must not wait.
        self._abandoned = weakref.finalize(self, _abandon, self._pool, self._children)

    def submit(self, items: Sequence[Item]) -> Future[Chunk]:
        return self._pool.submit(self._work, items)

    def _work(self, items: Sequence[Item]) -> Chunk:
        if self.workers == 1:
            return decode_chunk(items, self.limits, self._hear)
        try:
            child = self._free.get_nowait()
        except queue.Empty:
            child = Child()
            self._children.append(child)
        try:
            return child.decode(items, self.limits, self._hear)
        finally:
            self._free.put(child)

    def _hear(self) -> None:
        self.heard = time.monotonic()

    def close(self) -> None:
        self._abandoned.detach()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.close()

    def abandon(self) -> None:
        """End the processes at once, whatever they wait for."""
        self._abandoned()


def _abandon(pool: ThreadPoolExecutor, children: list[Child]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for child in children:
        child.process.kill()


def answer(future: Future[Chunk], items: Sequence[Item], decoders: Decoders) -> Chunk:
    """What a worker decoded; where none tells of itself, the workers are ended and the files in flight named."""
    began = time.monotonic()
    while (left := max(began, decoders.heard) + PATIENCE - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=left)
    decoders.abandon()
    names = f"{items[0].name} .. {items[-1].name}"
    raise EnvironmentFault(f"no answer in {PATIENCE:g} s while reading {names}: storage hangs?")


def decode_all(
    items: Sequence[Item], limits: Limits, chunk: int, workers: int | None = None, start: int = 0
) -> Iterator[tuple[int, Chunk]]:
    """(number, decoded chunk) in order, from chunk `start` on; at most two chunks a worker are held in memory."""
    numbers = range(start, -(-len(items) // chunk))
    pieces: Callable[[int], Sequence[Item]] = lambda n: items[n * chunk : (n + 1) * chunk]  # noqa: E731
    workers = workers or usable_cores()
    if workers == 1 or len(items) - start * chunk < IN_PROCESS:
        for n in numbers:
            yield n, decode_chunk(pieces(n), limits)
        return
    decoders = Decoders(limits, min(workers, len(numbers)))
    waiting: deque[tuple[int, Future[Chunk]]] = deque()
    try:
        for n in numbers:
            waiting.append((n, decoders.submit(pieces(n))))
            if len(waiting) >= 2 * decoders.workers:
                number, future = waiting.popleft()
                yield number, answer(future, pieces(number), decoders)
        for number, future in waiting:
            yield number, answer(future, pieces(number), decoders)
    finally:
        decoders.close()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
