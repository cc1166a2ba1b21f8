"""Open the splits that a run trains on and probes with, and check on resuming that their images have not changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kontrast import distributed
from kontrast.config.recipe import DataSettings, Recipe
from kontrast.data import Changes, ImageSet, LazyImages, file_listing, open_data
from kontrast.data.changes import changes
from kontrast.data.imbalance import imbalance
from kontrast.data.paths import describe_source
from kontrast.data.sources import MENDED, Preview, preview_data
from kontrast.errors import DataError
from kontrast.files import read_bytes, write_atomic
from kontrast.training.progress import ListingLine, PackingBar, tell
from kontrast.training.run_folder import RunFolder


def check_data(folder: RunFolder, parts: Splits, accept: bool) -> None:
    """Refuse to resume a run whose images have changed, unless the user accepts it.

    Older versions recorded only the fingerprint of the training images; of their runs, only that is compared.
    """
    before, today = folder.info().get("data", {}), describe(parts)
    if all(before.get(key) in (None, today[key]) for key in ("fingerprint", "all_fingerprint")):
        return
    if not accept:
        whole = before.get("all_fingerprint") is not None
        count = "all_images" if whole else "images"
        found = find_changes(folder, parts, whole)
        raise DataError(
            f"the images changed since the run began, {before.get(count)} then, {today[count]} now"
            f"{'' if found is None else f': {found}'}; restore them, or resume with --accept-data-change"
        )
    if distributed.is_main():
        folder.update_info(data=today, data_before=before)
        keep_listing(folder, parts)


def find_changes(folder: RunFolder, parts: Splits, whole: bool) -> Changes | None:
    """Which files changed since the run began; None if the images did not come from files.

    whole: compare all images, not only those that are trained on.
    """
    listing, sets = folder / "files.txt.gz", parts.watched if whole else [parts.trained]
    if not listing.is_file() or all(part.stamps is None for part in sets):
        return None
    return changes(read_bytes(listing), *sets, placed=whole)


def keep_listing(folder: RunFolder, parts: Splits) -> None:
    """Write the names and dates of the run's files, so that a resumed run can say which of them changed."""
    listing = file_listing(*parts.watched, placed=True)
    if listing is not None:
        write_atomic(folder / "files.txt.gz", listing)


def describe(parts: Splits) -> dict[str, Any]:
    """What run.json records about the images; all_images and all_fingerprint include those that are not trained on."""
    trained, watched = parts.trained, parts.watched
    mended = sum(part.notes.get(MENDED, 0) for part in (trained, parts.test) if part is not None)
    marks = " ".join(f"{part.split}:{part.fingerprint}" for part in watched)
    return {
        "name": trained.name,
        "images": len(trained),
        "classes": None if trained.classes is None else len(trained.classes),
        "channels": trained.channels,
        **dtype_fact(trained),
        "skipped": len(trained.bad),
        **trained.notes,
        **({MENDED: mended} if mended else {}),
        "fingerprint": trained.fingerprint,
        "all_images": sum(map(len, watched)),
        "all_fingerprint": hashlib.sha256(marks.encode("utf-8", "surrogatepass")).hexdigest(),
    }


def dtype_fact(images: ImageSet) -> dict[str, str]:
    """What run.json records about the type of the values; nothing if it is uint8."""
    return {} if images.dtype == torch.uint8 else {"dtype": str(images.dtype).removeprefix("torch.")}


def preview_split(settings: DataSettings) -> Preview:
    """The number and typical size of the training images, learned without decoding them."""
    return preview_data(settings.source, settings.split, **_options(settings))


def _options(settings: DataSettings) -> dict[str, Any]:
    """The arguments of `open_data` that the data section of a recipe sets."""
    keys = ("test_share", "max_bad", "follow_links", "float_range", "pack", "captions", "depth", "files", "every",
            "layout", "pages")  # fmt: skip
    options = {key: getattr(settings, key) for key in keys}
    options |= {"root": settings.root or None, "say": tell, "listed": ListingLine(settings.source)}
    return {**options, "size": settings.size or None, "longest": settings.longest or None}


def open_split(
    settings: DataSettings,
    split: str,
    seed: int = 0,
    pretraining: bool = False,
    other_bad: Sequence[tuple[str, str]] = (),
    opened: ImageSet | None = None,
    verify: bool = False,
) -> ImageSet:
    """Open one split as the data section of a recipe says.

    Args:
        settings: the data section.
        split: "train" or "test"; for pretraining, `settings.split` instead.
        seed: decides competing features.
        pretraining: whether to apply the recipe's label imbalance; probes read the whole, balanced set.
        other_bad: the bad images of the other split, which count towards `max_bad` too.
        opened: the images of the split, if `preview_split` has opened them already.
        verify: compare all files of a stored list at once, as on resuming.
    """
    from kontrast.data.competing_features import overlay_digits, random_bits

    split, images = settings.split if pretraining else split, opened
    if images is None:
        with PackingBar(f"read {split}") as bar:
            images = open_data(
                settings.source, split, progress=bar, other_bad=other_bad, verify=verify, **_options(settings)
            )
    if pretraining and settings.imbalance != "none":
        images = images.subset(imbalance(images, settings.imbalance))
    if settings.overlay_digits:
        # As in the paper, the number of digits is limited for training images only.
        unique = None if split == "test" else settings.overlay_digits
        images = overlay_digits(images, unique, seed=seed, root=settings.root or None)
    if settings.random_bits:
        images = random_bits(images, settings.random_bits, seed=seed)
    return images


def place_of(source: str) -> dict[str, str] | None:
    """What run.json records so that the data are found from any directory; None for a named set."""
    place = describe_source(source).place
    return None if place is None else {"source": source, "place": place}


def located(settings: DataSettings, info: dict[str, Any]) -> DataSettings:
    """The settings with the absolute path that run.json recorded, if it still exists: a relative path means something
    else in another working directory."""
    known = info.get("data_place") or {}
    if known.get("source") != settings.source or not isinstance(known.get("place"), str):
        return settings
    prefix, pattern, _ = known["place"].partition("{")
    exists = os.path.exists(os.path.dirname(prefix) if pattern else prefix)
    return replace(settings, source=known["place"]) if exists else settings


class Splits(NamedTuple):
    """The images of a run.

    Attributes:
        trained: the images that the run trains on.
        source: the same before label imbalance removes some.
        train: what probes are fitted on.
        test: what probes are evaluated on, or None.
    """

    trained: ImageSet
    source: ImageSet
    train: ImageSet
    test: ImageSet | None

    @property
    def watched(self) -> list[ImageSet]:
        """The splits that together contain every image once."""
        if self.source.split == "all":
            return [self.source]
        parts = {part.split: part for part in (self.source, self.train, self.test) if part is not None}
        return list(parts.values())


def open_splits(recipe: Recipe, data: DataSettings, trained: ImageSet) -> Splits:
    """Open the other splits, on every rank, so that all ranks fail alike if one can't be read.

    Args:
        recipe: the recipe of the run.
        data: its data section, with the path under which the images are found today.
        trained: the images that the run trains on.
    """
    evaluated, seed = bool(recipe.evaluation.every), recipe.seed
    if not (evaluated and distributed.is_main()):
        data = replace(data, overlay_digits=0, random_bits=0)  # nobody uses the pixels
    source = train = trained
    if data.imbalance != "none":
        source = train = open_split(replace(data, imbalance="none"), "train", seed=seed, pretraining=True)
    if evaluated and data.split != "train":  # the split that is trained on may lack labels or have other images
        train = open_split(data, "train", seed=seed)
    test = None
    if trained.has_test and (evaluated or describe_source(data.source).kind != "named"):
        test = open_split(data, "test", seed=seed, other_bad=train.bad)
    return Splits(trained, source, train, test)


def sync_bad_images(trained: ImageSet) -> None:
    """Tell all ranks which images any rank found bad, and stop all of them if there are too many.

    This matters for images that are decoded for every batch, of which each rank sees only its share.
    """
    if isinstance(trained.base, LazyImages) and distributed.world() > 1:
        reader = trained.base.reader
        for text in distributed.gather_texts(json.dumps(reader.bad)):
            reader.add_bad((name, reason) for name, reason in json.loads(text))
        reader.check()
