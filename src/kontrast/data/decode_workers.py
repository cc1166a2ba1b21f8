"""Decode images in many processes, which read tasks from stdin and answer on stdout.

They do not use multiprocessing: its children import the user's main module again (a script without a guard would start
itself forever), and a fork of a process with torch's threads may hang. A task is one line of JSON. An answer is one
line of JSON and the pixels; empty lines before it are signs of life. The processes ignore SIGTERM and Ctrl-C, which go
to the whole process group, and end when their stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from kontrast.data.decode import ChangedFile, decode_file
from kontrast.data.file_columns import Item
from kontrast.data.limits import BadImage, Form, Limits
from kontrast.errors import EnvironmentFault
from kontrast.import_path import python_environment
from kontrast.operating_system import blocked_signals, ignore_signals, usable_cores

T = TypeVar("T")
STOPPING = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 120.0
"""Seconds in which no worker reads or computes anything, after which the storage is taken to hang.
KONTRAST_STORAGE_TIMEOUT overrides it."""
SIGN_EVERY = 1.0
"""Seconds between two signs of life: a chunk of large images may take minutes."""
IN_PROCESS = 512
"""Fewer images than this are decoded in this process: starting others would take longer."""


@dataclass
class Chunk:
    """Decoded images.

    Attributes:
        pixels: the images end to end, each [C,h,w].
        sizes: (height, width) of each image.
        kept: which items of the chunk were decoded.
        bad: (position, reason) of the items that could not be.
        notes: how often something noteworthy was done.
        lost: positions of the bad items that the operating system could not read.
        changed: positions of the items whose file is not the one that was listed.
    """

    pixels: bytes = b""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)

    def arrays(self, form: Form) -> Iterator[np.ndarray]:
        """The images one by one, [C,h,w] each."""
        flat, start = np.frombuffer(bytearray(self.pixels), form.dtype), 0
        for height, width in self.sizes:
            end = start + form.channels * height * width
            yield flat[start:end].reshape(form.channels, height, width)
            start = end


def decode_chunk(
    items: Sequence[Item], limits: Limits, show_life: Callable[[], None] = lambda: None, compare: bool = False
) -> Chunk:
    """Decode items one after another; `show_life` is called between them.

    compare: check that each file still has the size and date that were listed.
    """
    chunk, parts = Chunk(), []
    for position, item in enumerate(items):
        if position:
            show_life()
        try:
            stamp = (item.size, item.mtime) if compare else None
            pixels, note = decode_file(item.path, item.offset, item.length, limits, stamp)
        except ChangedFile:
            chunk.changed.append(position)
            continue
        except BadImage as error:
            chunk.bad.append((position, error.reason))
            if error.errno is not None:
                chunk.lost.append(position)
            continue
        parts.append(pixels.tobytes())
        chunk.sizes.append((pixels.shape[1], pixels.shape[2]))
        chunk.kept.append(position)
        if note:
            chunk.notes[note] += 1
    chunk.pixels = b"".join(parts)
    return chunk


def serve() -> None:
    """Decode one task per line until stdin ends: the main function of a decoding process."""
    ignore_signals(STOPPING)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the protocol
    last = time.monotonic()

    def send(*parts: bytes) -> None:
        nonlocal last
        last = time.monotonic()
        try:
            answers.writelines(parts)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent was killed

    def show_life() -> None:
        if time.monotonic() - last > SIGN_EVERY:
            send(b"\n")

    for line in sys.stdin.buffer:
        task = json.loads(line)
        items = [Item(*fields) for fields in task["items"]]
        chunk = decode_chunk(items, Limits(**task["limits"]), show_life, task.get("compare", False))
        head = {**vars(chunk), "pixels": len(chunk.pixels)}
        send(json.dumps(head).encode() + b"\n", chunk.pixels)


class Worker:
    """One decoding process, used by one thread at a time."""

    def __init__(self) -> None:
        with blocked_signals(STOPPING):  # until the worker ignores them: one may arrive while it still imports
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from kontrast.data.decode_workers import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**python_environment("numpy", "PIL"), "OMP_NUM_THREADS": "1"},
            )

    def decode(
        self, items: Sequence[Item], limits: Limits, note_life: Callable[[], None], compare: bool = False
    ) -> Chunk:
        """Let the process decode the items; `note_life` is called at every sign of life."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        fields = [(i.name, i.path, i.offset, i.length, i.size, i.mtime) for i in items]
        task = {"items": fields, "limits": asdict(limits), "compare": compare}
        head, pixels = {"pixels": 1}, b""  # stays so if the process has died
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
            while (line := stdout.readline()) == b"\n":
                note_life()
            if line:
                head = json.loads(line)
                pixels = stdout.read(head["pixels"])
        if len(pixels) < head["pixels"]:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise EnvironmentFault(
                f"a decoding process {how} at {items[0].name} .. {items[-1].name}: out of memory? use fewer cores, "
                "each of which has a process (taskset -c 0 kontrast ...), or smaller images (data.size)"
            )
        return Chunk(**{**head, "pixels": pixels})  # type: ignore[arg-type]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # a worker that was killed left its task unread
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Decoders:
    """A pool of up to `workers` decoding processes, started when needed; a single worker is a thread instead."""

    def __init__(self, limits: Limits, workers: int | None = None, compare: bool = False):
        self.limits, self.workers, self.compare = limits, workers or usable_cores(), compare
        self.signs = 0  # how often a worker showed a sign of life
        self.tasks: list[str] = []  # the folders of the workers in /proc
        self._thread = threading.local()  # each thread of the pool has a worker
        self._started: list[Worker] = []
        self._pool = ThreadPoolExecutor(self.workers, "kontrast-decoder")
        # If nobody calls close, no process stays behind. This may run in a thread of the pool, so it must not wait.
        self._finalizer = weakref.finalize(self, _kill, self._pool, self._started)

    def submit(self, items: Sequence[Item]) -> Future[Chunk]:
        return self._pool.submit(self._work, items)

    def _work(self, items: Sequence[Item]) -> Chunk:
        if self.workers == 1:
            self.tasks = [f"self/task/{threading.get_native_id()}"]
            return decode_chunk(items, self.limits, self._note_life, self.compare)
        if not hasattr(self._thread, "worker"):
            self._thread.worker = Worker()
            self._started.append(self._thread.worker)
            self.tasks.append(str(self._thread.worker.process.pid))
        return self._thread.worker.decode(items, self.limits, self._note_life, self.compare)

    def _note_life(self) -> None:
        self.signs += 1

    def progress(self) -> tuple[object, ...]:
        """Return something that differs from the last call if any worker did anything in between."""
        return self.signs, *(activity(task) for task in self.tasks)

    def close(self) -> None:
        self._finalizer.detach()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._started:
            worker.close()

    def kill(self) -> None:
        """End the processes at once, whatever they are waiting for."""
        self._finalizer()


def _kill(pool: ThreadPoolExecutor, workers: list[Worker]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.process.kill()
    for worker in workers:  # or they stay as zombies, with their pipes; one that waits for dead storage is left
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=1)


def wait_for(future: Future[Chunk], items: Sequence[Item], decoders: Decoders) -> Chunk:
    """Wait for a decoded chunk. If no worker reads or computes anything for long, kill them and name the files.

    Silence is counted in short waits and not by the clock, so that the time in which this process itself was stopped
    (Ctrl-Z) or got no CPU doesn't count.
    """
    silence, before = 0.0, decoders.progress()
    while silence < patience():
        wait = min(1.0, patience() / 10)
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=wait)
        now = decoders.progress()
        silence, before = silence + wait if now == before else 0.0, now
    decoders.kill()
    names = f"{items[0].name} .. {items[-1].name}"
    advice = "KONTRAST_STORAGE_TIMEOUT sets how long to wait"
    raise EnvironmentFault(f"nothing was read in {patience():g} s at {names}: storage hangs? ({advice})")


def patience() -> float:
    """Return after how many seconds without any progress the storage is taken to hang."""
    with contextlib.suppress(KeyError, ValueError):
        return max(1.0, float(os.environ["KONTRAST_STORAGE_TIMEOUT"]))
    return PATIENCE


def activity(task: str) -> tuple[object, ...]:
    """Return what changes if a process or thread runs, reads or writes; () if the system has no /proc.

    A task that waits for a CPU on a busy machine never equals itself: it does not hang.

    Args:
        task: its folder in /proc.
    """
    found: list[object] = []
    for name in ("schedstat", "io"):  # nanoseconds of CPU time; bytes that were read and written
        with contextlib.suppress(OSError), open(f"/proc/{task}/{name}", "rb") as file:
            found.append(file.read())
    with contextlib.suppress(OSError), open(f"/proc/{task}/stat", "rb") as file:
        state, *numbers = file.read().rpartition(b")")[2].split()
        found += [object()] if state == b"R" else numbers[6:12]  # page faults and ticks of CPU time
    return tuple(found)


def decode_all(
    items: Sequence[Item], limits: Limits, chunk: int, workers: int | None = None, start: int = 0
) -> Iterator[tuple[int, Chunk]]:
    """Iterate over (number, decoded chunk) in order, from number `start`; at most two chunks per worker wait."""
    numbers = range(start, -(-len(items) // chunk))
    pieces: Callable[[int], Sequence[Item]] = lambda n: items[n * chunk : (n + 1) * chunk]  # noqa: E731
    workers = workers or usable_cores()
    if workers == 1 or len(items) - start * chunk < IN_PROCESS:
        for n in numbers:
            yield n, decode_chunk(pieces(n), limits)
        return
    decoders = Decoders(limits, min(workers, len(numbers)))
    try:
        for n, future in run_ahead(((n, decoders.submit(pieces(n))) for n in numbers), 2 * decoders.workers - 1):
            yield n, wait_for(future, pieces(n), decoders)
    finally:
        decoders.close()


def run_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Iterate over items that start some work, always `count` items behind: their work runs meanwhile."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting
