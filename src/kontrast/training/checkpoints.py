"""Checkpoints: a folder with tensors, state and a SHA-256 manifest, written aside, synced, renamed; never pickle.

    checkpoints/.tmp-<pid>-step-00001234/{state.safetensors, state.json, manifest.json}  ->  checkpoints/step-00001234/

The loader walks from newest to oldest, verifies every hash, and says what it skipped and why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import CheckpointError, EnvironmentFault
from kontrast.files import atomic_folder, disk_faults, write_atomic

SCHEMA = 1


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write one checkpoint whole; a crash at any moment leaves the older ones untouched."""
    final = folder / name_of(step)
    if final.exists():
        try:
            load(final)
            return final  # the same step reached again after a resume: the same bits
        except CheckpointError:
            discard(final)
    with disk_faults(final):
        folder.mkdir(exist_ok=True)  # without its parents: a removed run folder must not come back in part
    with atomic_folder(final, needed=sum(t.numel() * t.element_size() for t in tensors.values())) as aside:
        _write_tensors(aside / "state.safetensors", tensors)
        (aside / "state.json").write_text(json.dumps(state))
        files = {name: _describe(aside / name) for name in ("state.safetensors", "state.json")}
        manifest = {"schema": SCHEMA, "step": step, "files": files, **facts}
        (aside / "manifest.json").write_text(json.dumps(manifest | {"self": _digest(manifest)}, indent=1))
    return final


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    try:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, path)
    except Exception as error:  # safetensors reports a full disk as its own error
        full = "No space" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None


def prune(folder: Path, keep: int, best: int | None = None, step: int | None = None) -> None:
    """Keep the newest `keep`, and the one of step `best`. Those past the run's `step` are in nobody's place: it came
    back from before them, since they are damaged."""
    reached = [path for path in checkpoints(folder) if step is None or path.name <= name_of(step)]
    for path in reached[:-keep]:
        if best is None or path.name != name_of(best):
            with contextlib.suppress(OSError):
                discard(path)


def discard(path: Path) -> None:
    """Remove one; renamed first, so that a half-deleted one is never taken for a checkpoint."""
    doomed = path.with_name(f".del-{os.getpid()}-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def newest(
    folder: Path, say: Any = None, recipe: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]] | None:
    """Tensors, state and manifest of the newest valid checkpoint of this recipe (its fingerprint, where it is known);
    None where there is none at all."""
    found = checkpoints(folder)
    reasons = []
    for path in reversed(found):
        try:
            tensors, state, manifest = load(path)
            if recipe is not None and manifest.get("recipe") not in (None, recipe):
                raise CheckpointError(f"checkpoint {path.name}: of a run by another recipe")
            return tensors, state, manifest
        except CheckpointError as error:
            reasons.append(str(error))
            if say:
                say(f"skipped {error}")
    if found:
        raise CheckpointError(f"no valid checkpoint in {folder}: {'; '.join(reasons)}")
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """One checkpoint, every byte verified against its manifest."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest.pop("self", None) not in (None, _digest(manifest)):  # None: written before manifests had one
            raise CheckpointError(f"checkpoint {path.name}: manifest.json is damaged (its SHA-256 differs)")
        files = manifest["files"]
        if manifest["schema"] > SCHEMA:
            raise CheckpointError(f"checkpoint {path.name}: written by a newer kontrast; upgrade to read it")
        if name_of(manifest["step"]) != path.name:
            raise CheckpointError(f"checkpoint {path.name}: it is of step {manifest['step']}")
        content = {}
        for name in ("state.safetensors", "state.json"):
            content[name] = (path / name).read_bytes()
            if hashlib.sha256(content[name]).hexdigest() != files[name]["sha256"]:
                raise CheckpointError(f"checkpoint {path.name}: {name} is damaged (its SHA-256 differs)")
        return load_tensors(content["state.safetensors"]), json.loads(content["state.json"]), manifest
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path.name}: {Path(error.filename).name} is missing") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path.name}: unreadable ({type(error).__name__})") from None


def write_weights(path: Path, tensors: dict[str, Tensor]) -> str:
    """A .safetensors file of the tensors, and its SHA-256."""
    from safetensors.torch import save as as_bytes

    content = as_bytes({k: t.detach().cpu().contiguous() for k, t in tensors.items()})
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file; anything else is refused, never unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        return load_tensors(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run has not finished; resume it first") from None
    except OSError as error:
        raise EnvironmentFault(f"can't read {path}: {error.strerror}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        raise CheckpointError(f"{path} is not a readable safetensors file; other formats can execute code") from None


def flatten(prefix: str, tree: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a nested state under dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            flat[f"{prefix}.{key}"] = value
        elif isinstance(value, dict):
            flat.update(flatten(f"{prefix}.{key}", value))
    return flat


def under(prefix: str, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {k[len(prefix) + 1 :]: t for k, t in flat.items() if k.startswith(prefix + ".")}


def versions() -> dict[str, str]:
    import platform

    from kontrast import __version__

    return {"kontrast": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _describe(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
