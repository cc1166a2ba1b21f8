"""Decode a data source once into a packed store."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from kontrast.data.decode import MAX_PIXELS, Limits, checked_range
from kontrast.data.sources import Options, _origin, _packed, _place, find
from kontrast.data.store import read_bad, refuse_place
from kontrast.data.store_writer import ProgressCallback
from kontrast.errors import UsageError
from kontrast.registry import nearest


def pack(spec: str | Path | None, out: str | Path, *, size: int | None = None, progress: ProgressCallback | None = None,
         workers: int | None = None, **options: Any) -> list[Path]:  # fmt: skip
    """Decode a source once into the packed store OUT, a folder for each of its splits; goes on where it was cut."""
    spec = "digits" if spec is None else os.fspath(spec)
    refuse_place(spec, Path(out))
    limits = Limits(size, options.pop("max_pixels", MAX_PIXELS), checked_range(options.pop("float_range", None)))
    known = {f.name for f in dataclasses.fields(Options)} - {"limits", "progress", "workers", "beside", "say"}
    for key in options:
        if key not in known:
            raise UsageError(f"pack has no option {key!r}: {nearest(key, known)}")
    chosen = Options(**options, progress=progress, workers=workers, limits=limits)
    made, split = [], "train"
    while True:
        found, has_test = find(spec, split, chosen)
        facts = {"name": spec, "split": split, "has_test": has_test}
        origin = {**_origin(spec, chosen), "place": _place(spec, split, found)}
        made.append(_packed(found, Path(out) / split, facts, origin, chosen))
        if not has_test or split == "test":
            return made
        split, chosen = "test", dataclasses.replace(chosen, beside=read_bad(made[0]))
