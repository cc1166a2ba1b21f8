"""Decoding in many processes: plain children that read tasks from stdin and answer on stdout.

Not multiprocessing: its children import the user's main module again (a script without a guard starts itself for ever),
and a fork of a process with torch's threads may hang. A task is one line of JSON; an answer is one line of JSON and the
pixels. Children ignore SIGTERM and Ctrl-C, which go to the whole process group, and end when their stdin does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from kontrast.data.decode import BadImage, Limits, decode_file
from kontrast.data.listing import Item
from kontrast.registry import EnvironmentFault

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


def decode_chunk(items: Sequence[Item], limits: Limits) -> Chunk:
    """Decode items one after another; positions in `kept` and `bad` count within the chunk."""
    chunk, parts = Chunk(b"", [], [], [], {}), []
    for position, item in enumerate(items):
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the protocol
    for line in sys.stdin.buffer:
        task = json.loads(line)
        chunk = decode_chunk([Item(*fields) for fields in task["items"]], _limits(task["limits"]))
        head = {
            "bytes": len(chunk.pixels),
            "sizes": chunk.sizes,
            "kept": chunk.kept,
            "bad": chunk.bad,
            "notes": chunk.notes,
            "lost": chunk.lost,
        }
        answers.write(json.dumps(head).encode() + b"\n")
        answers.write(chunk.pixels)
        answers.flush()


def _limits(fields: dict) -> Limits:
    span = fields.pop("float_range")
    return Limits(**fields, float_range=None if span is None else (span[0], span[1]))


class Child:
    """One decoding process, used by one thread at a time."""

    def __init__(self) -> None:
        # sys.path travels with it, so that a source tree that is not installed works too.
        paths = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kontrast.data.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def decode(self, items: Sequence[Item], limits: Limits) -> Chunk:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        task = {"items": [(i.name, i.path, i.offset, i.length) for i in items], "limits": asdict(limits)}
        try:
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
            head = json.loads(line) if line else None
            pixels = stdout.read(head["bytes"]) if head else b""
        except OSError:
            head, pixels = None, b""
        if head is None or len(pixels) < head["bytes"]:
            code = self.process.wait()
            raise EnvironmentFault(
                f"a decoding process ended (status {code}) at {items[0].name} .. {items[-1].name}: "
                "memory short? give fewer workers"
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
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Decoders:
    """Up to `workers` processes that decode chunks side by side, started as they are needed; for one worker, a thread
    of this process."""

    def __init__(self, limits: Limits, workers: int | None = None):
        self.limits, self.workers = limits, workers or usable_cores()
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._pool = ThreadPoolExecutor(self.workers, "kontrast-decoder")
        # Whoever forgets to close leaves no process behind. It may run in a thread of the pool: it must not wait.
        self._abandoned = weakref.finalize(self, _abandon, self._pool, self._children)

    def submit(self, items: Sequence[Item]) -> Future[Chunk]:
        return self._pool.submit(self._work, items)

    def _work(self, items: Sequence[Item]) -> Chunk:
        if self.workers == 1:
            return decode_chunk(items, self.limits)
        try:
            child = self._free.get_nowait()
        except queue.Empty:
            child = Child()
            self._children.append(child)
        try:
            return child.decode(items, self.limits)
        finally:
            self._free.put(child)

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
                yield number, future.result()
        for number, future in waiting:
            yield number, future.result()
    finally:
        decoders.close()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
