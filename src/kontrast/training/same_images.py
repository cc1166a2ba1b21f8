"""Whether a run that is resumed sees the images it began with."""

from __future__ import annotations

from typing import Any

from kontrast import distributed
from kontrast.data import ImageSet, changes, file_listing
from kontrast.registry import DataError
from kontrast.training.folder import RunFolder, write_atomic


def check_data(folder: RunFolder, train: ImageSet, accept: bool) -> None:
    """Refuse to go on with other images than the run began with."""
    before = folder.info().get("data", {})
    today = describe(train)
    if before.get("fingerprint") in (None, today["fingerprint"]):
        return
    if not accept:
        listing = folder / "files.txt.gz"
        known = listing.is_file() and train.stamps is not None
        which = f": {changes(listing.read_bytes(), train)}" if known else ""
        raise DataError(
            f"the images changed since the run began, {before.get('images')} then, {today['images']} now{which}; "
            "restore them, or go on with --accept-data-change"
        )
    if distributed.is_main():
        folder.update_info(data=today, data_before=before)
        keep_listing(folder, train)


def keep_listing(folder: RunFolder, train: ImageSet) -> None:
    """The names and dates of the run's files, by which a resumed run can say which of them changed."""
    listing = file_listing(train)
    if listing is not None:
        write_atomic(folder / "files.txt.gz", listing)


def describe(train: ImageSet) -> dict[str, Any]:
    return {
        "name": train.name,
        "images": len(train),
        "classes": None if train.classes is None else len(train.classes),
        "channels": train.channels,
        "skipped": len(train.bad),
        **train.notes,
        "fingerprint": train.fingerprint,
    }
