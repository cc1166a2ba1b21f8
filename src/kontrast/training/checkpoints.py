"""Checkpoints: folders with tensors, state and a SHA-256 manifest, written under another name, synced and renamed.

    checkpoints/.tmp-<pid>-step-00001234/{state.safetensors, state.json, manifest.json}  ->  checkpoints/step-00001234/

Loading goes from the newest to the oldest, verifies every hash, and reports what it skipped and why. Nothing is ever
pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import CheckpointError, StorageFault
from kontrast.files import (
    atomic_folder,
    disk_faults,
    read_bytes,
    read_faults,
    remove_folder,
    replaced_folder,
    sweep,
    write_atomic,
)

SCHEMA = 1
FILES = ("state.safetensors", "state.json")
Checkpoint = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]
"""Tensors, state and manifest."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write a checkpoint and return its folder. A crash at any moment leaves the older ones untouched.

    A checkpoint of the same step, which a resumed run reached again, has the same tensors. It is replaced if its state
    differs, because the evaluation of this step was repeated.
    """
    final = folder / name_of(step)
    if final.exists():
        try:
            if load(final)[1] == json.loads(json.dumps(state)):
                return final
        except (CheckpointError, StorageFault):
            discard(final)
    with disk_faults(final):
        folder.mkdir(exist_ok=True)  # without parents, so that a removed run folder is not partly created again
    replaced = replaced_folder(final)
    try:
        with atomic_folder(final, needed=sum(t.numel() * t.element_size() for t in tensors.values())) as aside:
            content = dict(zip(FILES, (to_safetensors(tensors), json.dumps(state).encode())))
            for name, data in content.items():
                (aside / name).write_bytes(data)
            files = {name: describe_file(data) for name, data in content.items()}
            manifest = {"schema": SCHEMA, "step": step, "files": files, **facts}
            (aside / "manifest.json").write_text(json.dumps(manifest | {"self": _digest(manifest)}, indent=1), "ascii")
            if final.exists():
                os.rename(final, replaced)
    finally:
        _finish_replacing(replaced)
    return final


def to_safetensors(tensors: dict[str, Tensor]) -> bytes:
    """Return the content of a .safetensors file."""
    from safetensors.torch import save as as_bytes

    return as_bytes({k: t.detach().cpu().contiguous() for k, t in tensors.items()})


def prune(folder: Path, keep: int, best: int | None = None, step: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the one of step `best`.

    Checkpoints after `step` don't count towards `keep`: they are damaged, and the run rolled back past them.
    """
    reached = [path for path in checkpoints(folder) if step is None or path.name <= name_of(step)]
    for path in reached[:-keep]:
        if best is None or path.name != name_of(best):
            with contextlib.suppress(OSError):
                discard(path)
    sweep(folder)  # what could not be removed before, or the disk would fill up


def discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that half of one is never taken for a checkpoint."""
    doomed = path.with_name(f".del-{os.getpid()}-{path.name}")
    os.rename(path, doomed)
    remove_folder(doomed)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first."""
    return [path for path in _folders(folder) if not _is_replaced(path)]


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints, and those that were being replaced when a process was killed."""
    try:
        with read_faults(folder):  # glob takes a folder that it may not list for an empty one
            paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if path.name.startswith("step-") and path.is_dir()]


def _is_replaced(path: Path) -> bool:
    return path == replaced_folder(path.with_suffix(""))


def _finish_replacing(old: Path) -> None:
    """Remove a replaced checkpoint; if no new one has its name, because of a kill or an error, it gets it back."""
    final = old.with_suffix("")
    if final.exists():
        with contextlib.suppress(OSError):
            discard(old)
    elif old.exists():
        with disk_faults(final):
            os.rename(old, final)


def newest(folder: Path, say: Callable[[str], object] = str, recipe: str | None = None) -> Checkpoint | None:
    """Return tensors, state and manifest of the newest valid checkpoint; None if there are no checkpoints at all.

    Args:
        folder: the folder of checkpoints.
        say: receives a line about each checkpoint that is skipped; by default, nobody does.
        recipe: the fingerprint of the run's recipe, if it is known; checkpoints of other recipes are skipped.
    """
    for old in filter(_is_replaced, _folders(folder)):
        _finish_replacing(old)
    reasons = []
    for path in reversed(checkpoints(folder)):
        try:
            return load(path, recipe)
        except (CheckpointError, StorageFault) as error:
            reasons.append(str(error))
            say(f"skipped {error}")
    if reasons:
        raise CheckpointError(f"no valid checkpoint in {folder}: {'; '.join(reasons)}")
    return None


def load(path: Path, recipe: str | None = None) -> Checkpoint:
    """Read one checkpoint and verify every byte against its manifest, and its recipe if the fingerprint is given.

    Raises `CheckpointError` if it is damaged, and `StorageFault` if the system can't read it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        manifest = json.loads(read_bytes(path / "manifest.json"))
        content = {name: read_bytes(path / name) for name in FILES}
        problem = _damage(path.name, manifest, content)
        if not problem and recipe is not None and manifest.get("recipe") not in (None, recipe):
            problem = "it belongs to another recipe"
        if not problem:
            return load_tensors(content["state.safetensors"]), json.loads(content["state.json"]), manifest
    except FileNotFoundError as error:
        problem = f"{Path(error.filename).name} is missing"
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"unreadable ({type(error).__name__})"
    raise CheckpointError(f"checkpoint {path.name}: {problem}")


def _damage(name: str, manifest: dict[str, Any], content: dict[str, bytes]) -> str:
    """Say what is wrong with a checkpoint, given its manifest and the content of its files; "" if nothing is."""
    if manifest.pop("self", None) not in (None, _digest(manifest)):  # None: written before manifests had a digest
        return "manifest.json is damaged (its SHA-256 differs)"
    if manifest["schema"] > SCHEMA:
        return "written by a newer kontrast; upgrade to read it"
    if name_of(manifest["step"]) != name:
        return f"it belongs to step {manifest['step']}"
    damaged = [n for n in FILES if hashlib.sha256(content[n]).hexdigest() != manifest["files"][n]["sha256"]]
    return f"{damaged[0]} is damaged (its SHA-256 differs)" if damaged else ""


def write_weights(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to a .safetensors file and return its SHA-256."""
    content = to_safetensors(tensors)
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file, sorted by name. Nothing is ever unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        return dict(sorted(load_tensors(read_bytes(path)).items()))  # the library's order is random
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run has not finished; resume it first") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        raise CheckpointError(f"{path} is not a readable safetensors file; other formats can execute code") from None


def under(prefix: str, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {k[len(prefix) + 1 :]: t for k, t in flat.items() if k.startswith(prefix + ".")}


def versions() -> dict[str, str]:
    """Return the versions of kontrast, torch and Python."""
    import platform

    from kontrast import __version__

    return {"kontrast": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def describe_file(data: bytes) -> dict[str, Any]:
    """Return what a manifest records about a file."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
