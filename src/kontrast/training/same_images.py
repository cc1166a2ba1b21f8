"""Whether a run that is resumed sees the images it began with, those it trains on and those that probes go by."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from kontrast import distributed
from kontrast.data import Changes, ImageSet, changes, file_listing
from kontrast.data.sources import MENDED
from kontrast.registry import DataError
from kontrast.training.folder import RunFolder, write_atomic
from kontrast.training.parts import Parts
from kontrast.training.run import Run


def check_data(folder: RunFolder, parts: Parts, accept: bool) -> None:
    """Refuse to go on with other images than the run began with. One that an older version began, which noted those it
    trains on alone, is held to these."""
    before, today = folder.info().get("data", {}), describe(parts)
    if all(before.get(key) in (None, today[key]) for key in ("fingerprint", "all_fingerprint")):
        return
    if not accept:
        whole = before.get("all_fingerprint") is not None
        count = "all_images" if whole else "images"
        raise DataError(
            f"the images changed since the run began, {before.get(count)} then, {today[count]} now"
            f"{_words(_changes(folder, parts, whole))}; restore them, or go on with --accept-data-change"
        )
    if distributed.is_main():
        folder.update_info(data=today, data_before=before)
        keep_listing(folder, parts)


def changed_since(run: Run, train: ImageSet, test: ImageSet) -> str:
    """What a probe by the run's own images must tell where they are others than those it was trained on, since the held
    out part moves with them; empty where they are the same, or where the run trained on another part."""
    settings, before = run.recipe.data, run.info.get("data", {}).get("fingerprint")
    if settings.split != "train" or settings.imbalance != "none" or before in (None, train.fingerprint):
        return ""
    found = None
    with contextlib.suppress(DataError):  # a damaged listing can't tell, and keeps nobody from probing
        found = _changes(run.folder, Parts(train, train, train, test), whole=True)
    told = "the images changed since the run was trained" + _words(found)
    if found is not None and not found.added and not found.removed:  # who is held out goes by names
        return told
    return f"{told}; it may know some of those it is tested by"


def _words(found: Changes | None) -> str:
    return "" if found is None else f": {found}"


def _changes(folder: RunFolder, parts: Parts, whole: bool) -> Changes | None:
    """What changed of the run's files, where that can be told."""
    listing, sets = folder / "files.txt.gz", parts.watched if whole else [parts.trained]
    if not listing.is_file() or all(part.stamps is None for part in sets):
        return None
    return changes(listing.read_bytes(), *sets, placed=whole)


def keep_listing(folder: RunFolder, parts: Parts) -> None:
    """The names and dates of the run's files, by which a resumed run can say which of them changed."""
    listing = file_listing(*parts.watched, placed=True)
    if listing is not None:
        write_atomic(folder / "files.txt.gz", listing)


def describe(parts: Parts) -> dict[str, Any]:
    """What run.json keeps. fingerprint: of the images that are trained on; all_fingerprint: of all."""
    trained, watched = parts.trained, parts.watched
    mended = sum(part.notes.get(MENDED, 0) for part in (trained, parts.test) if part is not None)
    marks = " ".join(f"{part.split}:{part.fingerprint}" for part in watched)
    return {
        "name": trained.name,
        "images": len(trained),
        "classes": None if trained.classes is None else len(trained.classes),
        "channels": trained.channels,
        "skipped": len(trained.bad),
        **trained.notes,
        **({MENDED: mended} if mended else {}),
        "fingerprint": trained.fingerprint,
        "all_images": sum(map(len, watched)),
        "all_fingerprint": hashlib.sha256(marks.encode("utf-8", "surrogatepass")).hexdigest(),
    }
