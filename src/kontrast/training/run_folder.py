"""The run folder: the only thing that passes between commands, readable after a crash at any moment.

    recipe.toml  run.json  metrics.jsonl  speed.jsonl  checkpoints/  encoder.safetensors  probes.json  report.html
    bad.jsonl (images that could not be read)  images/ (a store, if the images came from memory)
    start.safetensors (the weights of step 0, if training started from existing ones)

metrics.jsonl contains only what the recipe and the seed determine, so that a resumed run writes the same bytes as one
that was not interrupted. What depends on the machine (images/s, seconds, memory) goes to speed.jsonl.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from kontrast.config.recipe import Recipe, parse_toml, read_recipe
from kontrast.config.recipe_files import recipe_text
from kontrast.errors import CheckpointError, EnvironmentFault, UsageError
from kontrast.files import LockHeld, disk_faults, read_json, take_lock, write_atomic, write_json

VERSION = 1
KINDS: dict[str, Any] = {
    "version": int, "data": dict, "data_before": dict, "seconds": int | float, "steps": int, "resumed": list,
    "recipe_sha256": list, "fingerprint": str, "data_place": dict | None, "start": dict, "tracker_id": str,
}  # fmt: skip
"""The types of entries of run.json."""
WRITTEN = (
    "recipe.toml", "metrics.jsonl", "speed.jsonl", "start.safetensors", "encoder.safetensors", "probes.json",
    "gallery.json", "gallery.png", "text.safetensors", "retrieval.json", "retrieval.png",
    "lens.json", "report.html",
)  # fmt: skip
"""Files that a run writes. If any exists without recipe.toml, the first one, it belongs to something else."""


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder, which need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: int | None = None
        self._made: list[Path] = []  # the folders that `create` made, innermost first
        self._is_new = False  # whether `create` made this the folder of a new run

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here: recipe.toml is the last file that a new run writes before it trains."""
        return (self / "recipe.toml").exists()

    def create(self) -> None:
        """Create the folder and check that it can be written to, before any data is read."""
        self._is_new = True
        self.refuse_content()
        with disk_faults(self.path):
            self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
            (self / "checkpoints").mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path, prefix=".tmp-").close()

    def refuse_content(self) -> None:
        """Raise if the folder contains a run, or files that a run would overwrite."""
        present = [name for name in WRITTEN if (self / name).exists()]
        if present:
            other = f"{present[0]} but no kontrast run: choose"
            content = "a run: use --resume to continue it, or choose" if self.holds_run else other
            raise UsageError(f"--out {self.path} already contains {content} another folder")

    def abandon(self) -> None:
        """Remove the folders that `create` made if no run began in them, for example because the recipe is wrong.

        Only the process that has the lock may do this: without it, the files may be those of another process. The lock
        is removed last, because another process can take a new one from then on.
        """
        if self.is_held and self._made and not self.holds_run:
            with contextlib.suppress(OSError):
                for name in ("run.json", "start.safetensors"):
                    (self / name).unlink(missing_ok=True)
                shutil.rmtree(self / "images", ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    (self / "checkpoints").rmdir()
                (self / ".lock").unlink(missing_ok=True)
                for place in self._made:
                    place.rmdir()

    def hold(self) -> None:
        """Lock the folder, so that this process is its only writer. The lock of a dead process ends with it (flock)."""
        try:
            with disk_faults(self / ".lock"):
                self._lock = take_lock(self / ".lock", wait=False)
                os.ftruncate(self._lock, 0)
                os.lseek(self._lock, 0, os.SEEK_SET)
                os.write(self._lock, f"pid {os.getpid()} on {socket.gethostname()} since {timestamp()}\n".encode())
            if self._is_new:  # another process may have begun a run since `create`
                self.refuse_content()
        except LockHeld:
            holder = ""
            with contextlib.suppress(OSError):  # the other process may remove the folder that it gives up
                holder = (self / ".lock").read_text(encoding="utf-8", errors="replace").strip()
            holder = holder or "another process"
            raise EnvironmentFault(f"{self.path} is in use by {holder}: wait for it to finish, or stop it") from None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock."""
        return self._lock is not None

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # it is closed even if an error is reported
                os.close(self._lock)
            self._lock = None

    def update_info(self, **facts: Any) -> None:
        """Set entries of run.json."""
        path = self / "run.json"
        old = read_json(path) if path.exists() else {"version": VERSION}
        write_json(path, {**old, **facts})

    def write_bad(self, bad: list[tuple[str, str]]) -> None:
        """Write bad.jsonl: one line per image that could not be read, with the reason."""
        lines = (json.dumps({"name": name, "reason": reason}) + "\n" for name, reason in bad)
        write_atomic(self / "bad.jsonl", "".join(lines))

    def info(self) -> dict[str, Any]:
        """Return run.json."""
        facts = read_json(self / "run.json")
        known = facts if isinstance(facts, dict) else {}
        wrong = [key for key, kind in KINDS.items() if key in known and not isinstance(known[key], kind)]
        problem = f"is damaged: {', '.join(wrong) or 'it'} has the wrong type" if wrong or known is not facts else ""
        if not problem and known.get("version", 0) > VERSION:
            problem = "was written by a newer kontrast: upgrade to read it"
        if problem:
            raise CheckpointError(f"{self / 'run.json'} {problem}")
        return known


def stored_recipe(folder: RunFolder) -> Recipe:
    """Return the recipe that a run wrote. Its SHA-256 is checked, so that no flipped bit changes a setting."""
    path = folder / "recipe.toml"
    text = recipe_text(path)
    known = folder.info().get("recipe_sha256")  # a list: a resumed run adds the digest before it writes the recipe
    if known is not None and sha256(text.encode()) not in known:
        advice = "restore it, or, if the edit is intended, remove recipe_sha256 from run.json"
        raise CheckpointError(f"{path} is damaged or was edited since the run wrote it (its SHA-256 differs): {advice}")
    tree = parse_toml(text, str(path))
    if isinstance(tree.get("data"), dict):  # runs of earlier versions converted all images to 8 bits
        tree["data"].setdefault("depth", "8-bit")
    return read_recipe(tree, str(path))


def result_prefix(recipe: Recipe) -> str:
    """Return how the names of the network that a run is evaluated by begin in its checkpoints."""
    return "learner.teacher.module" if recipe.teacher is not None and recipe.teacher.result else "learner.student"


def weights_path(folder: Path) -> Path:
    """Return the file of a run's trained encoder, which `kontrast export --format hub` calls model.safetensors."""
    of_hub, own = folder / "model.safetensors", folder / "encoder.safetensors"
    return of_hub if of_hub.is_file() and not own.is_file() else own


def timestamp() -> str:
    """Return the local time with its offset, for example 2026-01-31T12:00:00+0000."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
