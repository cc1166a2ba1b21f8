"""What a command left in a folder: its files, what is half-written, and whether two folders are in the same state."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tomllib
from collections.abc import Container
from pathlib import Path


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def is_temporary(path: Path, place: Path) -> bool:
    parts = path.relative_to(place).parts
    return any(part.startswith((".tmp-", ".del-")) or part.endswith((".part", ".parts", ".replaced")) for part in parts)


def leftovers(place: Path) -> list[str]:
    return [str(path.relative_to(place)) for path in place.rglob("*") if is_temporary(path, place)]


def without_process(name: str) -> str:
    """Drop the number of the process from the name of a temporary file."""
    return re.sub(r"\.tmp-\d+-", ".tmp-", name)


def state(place: Path, determined: Container[str]) -> str:
    """Return a digest of the names and contents in a folder.

    Numbers don't count in files that the command does not determine, which have times in them, nor does the process in
    the names of temporary files.
    """
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        content = path.read_bytes() if path.is_file() else b"a folder"
        if name not in determined:
            content = re.sub(rb"[0-9]+", b"0", content)
        for part in (os.fsencode(without_process(name)), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def half_written(place: Path) -> list[str]:
    """Return the files and folders with a final name that are not whole."""
    from kontrast.data.store import is_store, open_store
    from kontrast.training import checkpoints

    problems = []
    for path in sorted(place.rglob("*")):
        if is_temporary(path, place):
            continue
        try:
            if path.is_dir():
                if path.parent.name == "checkpoints":
                    checkpoints.load(path)
                elif is_store(path):
                    open_store(path, full=True)
            else:
                check_file(path)
        except Exception as error:
            problems.append(f"{path.relative_to(place)} ({type(error).__name__}: {error})")
    return problems


def check_file(path: Path) -> None:
    """Raise an exception if a file can't be read as what its name says."""
    content = path.read_bytes()
    if path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".jsonl":  # a line may be cut at the end: readers drop it
        for line in content.split(b"\n")[:-1]:
            json.loads(line)
    elif path.suffix == ".toml":
        tomllib.loads(content.decode())
    elif path.suffix == ".safetensors":
        from safetensors.torch import load

        load(content)
    elif path.suffix == ".npy":
        import numpy as np

        np.load(io.BytesIO(content))
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.read_table(io.BytesIO(content))
    elif path.suffix == ".png":
        from PIL import Image

        Image.open(io.BytesIO(content)).load()
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>")
