"""Decode a data source once into a packed store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from kontrast.data.depth import with_form
from kontrast.data.limits import Limits
from kontrast.data.listing import Listing
from kontrast.data.paths import describe_source
from kontrast.data.source_files import Options, ProgressCallback, find_images, names_folder, origin_of
from kontrast.data.store import check_destination, read_bad
from kontrast.data.store_writer import pack_split, remove_split


def pack(
    data: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    size: int | None = None,
    root: str | Path | None = None,
    test_share: float = 0.2,
    max_bad: float = 0.05,
    follow_links: bool = False,
    float_range: Sequence[float] | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
    captions: str = "",
    depth: str = "auto",
    files: str = "auto",
    every: float = 1.0,
    layout: str = "auto",
    pages: str = "first",
) -> list[Path]:
    """Decode a data source once into a packed store, from which any run starts at once.

    An interrupted packing continues where it stopped; a complete store of the same images is left as it is.

    Args:
        data: a named set, a folder or shards, as for `open_data`; None for the embedded digits.
        out: the store's folder, which gets a sub-folder for each split. It must not lie inside a folder of images.
        size: larger images are reduced until their shorter side has this many pixels; default: not reduced.
        root: where named sets are looked for; default KONTRAST_DATA, then ./data.
        test_share: share of each class that becomes the test split, if a labelled source has none of its own.
        max_bad: share of images that may be unreadable, from 0 to 1.
        follow_links: whether symbolic links are followed.
        float_range: (low, high), the values that become 0 and 255, for images of floats or 32-bit integers.
        workers: decoding processes; default: one per core.
        progress: called with the number of decoded images and of all images.
        captions: "auto" or a file of captions, which the store then has too; default: none.
        depth: "own" keeps the type and channels of the images, "8-bit" makes ordinary pictures of them; "auto" keeps
            them if none of a sample is an ordinary picture.
        files: the kind of files that are images: "auto", "pictures", "arrays", "dicom" or "video".
        every: seconds between two frames of a video.
        layout: the order of the axes of arrays: "auto", "HWC" or "CHW".
        pages: "channels" makes each page of a TIFF file a channel, "first" reads only the first.

    Returns:
        The folders of the splits: train, and test if there is one.

    Example:
        >>> import tempfile
        >>> [split.name for split in pack("digits", tempfile.mkdtemp() + "/digits")]
        ['train', 'test']
    """
    source, out = describe_source(data), Path(out)
    check_destination(source.spec, out)
    limits = Limits(size, float_range=float_range, layout=layout, pages=pages)
    options = Options(
        root, test_share, max_bad, follow_links, progress=progress, workers=workers, limits=limits, captions=captions,
        depth=depth, files=files, every=every,
    )  # fmt: skip
    folders: list[Path] = []
    for split in ("train", "test"):
        found, has_test = find_images(source, split, options)
        if isinstance(found, Listing) and not folders:  # both splits have the form of the first
            options = with_form(found, options)
        facts = {"name": source.spec, "split": split, "has_test": has_test}
        origin = {**origin_of(source, options), "place": names_folder(source, split, found)}
        folders.append(pack_split(found, out / split, facts, origin, options))
        if not has_test:
            remove_split(out / "test")  # of an earlier packing, with another test_share for instance
            break
        options = dataclasses.replace(options, other_bad=read_bad(folders[0]))
    return folders
