"""The run folder: the only thing that passes between commands, readable after a crash at any moment.

    recipe.toml  run.json  metrics.jsonl  speed.jsonl  checkpoints/  encoder.safetensors  probes.json  report.html
    bad.jsonl (images that could not be read)

metrics.jsonl holds what the recipe and seed determine, so a resumed run writes the same bytes as an undisturbed one;
what the machine determines (images/s, seconds, memory) goes to speed.jsonl.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from kontrast.config.recipe import Recipe, parse_toml, read_recipe
from kontrast.config.toml import LONGEST_TEXT
from kontrast.errors import CheckpointError, EnvironmentFault, UsageError
from kontrast.files import LockHeld, disk_faults, read_json, take_lock, write_atomic, write_json

VERSION = 1
KINDS: dict[str, Any] = {
    "version": int, "data": dict, "data_before": dict, "seconds": int | float, "steps": int, "resumed": list,
    "recipe_sha256": list, "fingerprint": str,
}  # fmt: skip
"""What run.json's entries must be, where they are there."""
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
        try:
            with disk_faults(self.path):
                self._lock = lock = take_lock(self / ".lock", wait=False)
        except LockHeld:
            holder = (self / ".lock").read_text(errors="replace").strip() or "another process"
            raise EnvironmentFault(f"{self.path} is held by {holder}: wait for it or stop it") from None
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


def stored_recipe(folder: RunFolder) -> Recipe:
    """The recipe a run wrote: the file's very bytes, so that no flipped bit becomes another learning rate."""
    path = folder / "recipe.toml"
    if path.stat().st_size > LONGEST_TEXT:
        raise CheckpointError(f"{path} is larger than {LONGEST_TEXT} bytes: no run wrote it")
    text = path.read_bytes()
    known = folder.info().get("recipe_sha256")  # a list: a resumed run notes its recipe before it writes it
    if isinstance(known, list) and recipe_digest(text) not in known:
        raise CheckpointError(
            f"{path} is damaged or was edited since the run wrote it (its SHA-256 differs): restore it, or, if the "
            "edit is meant, remove recipe_sha256 from run.json"
        )
    try:
        return read_recipe(parse_toml(text.decode("utf-8"), str(path)), str(path))
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is damaged: not text") from None


def recipe_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
