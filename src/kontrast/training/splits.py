"""Whether a run that is resumed sees the images it began with, those it trains on and those that probes go by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kontrast import distributed
from kontrast.config.recipe import DataSettings, Recipe
from kontrast.data import Changes, ImageSet, Lazy, file_listing, open_data
from kontrast.data.changes import changes
from kontrast.data.imbalance import imbalance
from kontrast.data.sources import MENDED, SOURCES
from kontrast.errors import DataError
from kontrast.files import write_atomic
from kontrast.training.progress import PackingBar, tell
from kontrast.training.run_folder import RunFolder


def check_data(folder: RunFolder, parts: Splits, accept: bool) -> None:
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


def _words(found: Changes | None) -> str:
    return "" if found is None else f": {found}"


def _changes(folder: RunFolder, parts: Splits, whole: bool) -> Changes | None:
    """What changed of the run's files, where that can be told."""
    listing, sets = folder / "files.txt.gz", parts.watched if whole else [parts.trained]
    if not listing.is_file() or all(part.stamps is None for part in sets):
        return None
    return changes(listing.read_bytes(), *sets, placed=whole)


def keep_listing(folder: RunFolder, parts: Splits) -> None:
    """The names and dates of the run's files, by which a resumed run can say which of them changed."""
    listing = file_listing(*parts.watched, placed=True)
    if listing is not None:
        write_atomic(folder / "files.txt.gz", listing)


def describe(parts: Splits) -> dict[str, Any]:
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


def open_split(
    settings: DataSettings,
    split: str,
    seed: int = 0,
    pretraining: bool = False,
    beside: Sequence[tuple[str, str]] = (),
) -> ImageSet:
    """The images of one split as the recipe's data section asks for them. Its own split and label imbalance are for
    pretraining alone: probes read the whole balanced set. beside: what is bad in the other part, to be judged with
    what is bad in this."""
    from kontrast.data.competing_features import overlay_digits, random_bits

    split = settings.split if pretraining else split
    with PackingBar(f"read {split}") as bar:
        images = open_data(
            settings.source,
            split,
            root=settings.root or None,
            size=settings.size or None,
            test_share=settings.test_share,
            max_bad=settings.max_bad,
            follow_links=settings.follow_links,
            float_range=settings.float_range,
            pack=settings.pack,
            progress=bar,
            beside=beside,
            say=tell,
        )
    if pretraining and settings.imbalance != "none":
        images = images.subset(imbalance(images, settings.imbalance))
    if settings.overlay_digits:
        # Test images wear any digit, as in the paper: few digits are what training has, not what there is to tell.
        unique = None if split == "test" else settings.overlay_digits
        images = overlay_digits(images, unique, seed=seed, root=settings.root or None)
    if settings.random_bits:
        images = random_bits(images, settings.random_bits, seed=seed)
    return images


def place_of(source: str) -> dict[str, str] | None:
    """A folder, a store or shards, with its absolute path; None for a named set."""
    return None if source in SOURCES else {"source": source, "place": os.path.abspath(source)}


def located(settings: DataSettings, info: dict[str, Any]) -> DataSettings:
    """The settings with the place where the run's images lay when it began, if it is still there: from another working
    folder a relative path is another folder, or none."""
    known = info.get("data_place")
    place = known.get("place") if isinstance(known, dict) and known.get("source") == settings.source else None
    if not isinstance(place, str):
        return settings
    whole, pattern, _ = place.partition("{")
    there = os.path.exists(os.path.dirname(whole) if pattern else whole)
    return dataclasses.replace(settings, source=place) if there else settings


class Splits(NamedTuple):
    """trained: what is trained on; source: the same before a label imbalance takes from it; train, test: what the
    probes read, where there is any to hold out."""

    trained: ImageSet
    source: ImageSet
    train: ImageSet
    test: ImageSet | None

    @property
    def watched(self) -> list[ImageSet]:
        """Each image once, whichever part it is in today."""
        if self.source.split == "all":
            return [self.source]
        parts = {part.split: part for part in (self.source, self.train, self.test) if part is not None}
        return list(parts.values())


def open_splits(recipe: Recipe, data: DataSettings, trained: ImageSet) -> Splits:
    """The rest of the images, on every rank: all of them must find out alike that a part can't be read.

    data: the recipe's, with the place where its images lie. Of a named set, which comes as one, only what is needed.
    """
    evaluated, seed = bool(recipe.evaluation.every), recipe.seed
    if not (evaluated and distributed.is_main()):
        data = replace(data, overlay_digits=0, random_bits=0)  # nobody looks at the pictures
    source = train = trained
    if data.imbalance != "none":
        source = train = open_split(replace(data, imbalance="none"), "train", seed=seed, pretraining=True)
    if evaluated and data.split != "train":  # its labels may be missing, or it is of other images
        train = open_split(data, "train", seed=seed)
    test = None
    if trained.has_test and (evaluated or data.source not in SOURCES):
        test = open_split(data, "test", seed=seed, beside=train.bad)
    return Splits(trained, source, train, test)


def sync_bad_images(trained: ImageSet) -> None:
    """What any rank found bad counts on all: of images that are decoded as they are needed each sees its share alone.
    Refused on all ranks alike where it is too much."""
    if isinstance(trained.base, Lazy) and distributed.world() > 1:
        reader = trained.base.reader
        for said in distributed.gather_texts(json.dumps(reader.bad)):
            reader.learn((name, reason) for name, reason in json.loads(said))
        reader.check()
