"""List the objects under an address, once for all that a command wants to know of them.

Names are relative to the address and sorted as those of a folder are, so that the same images have the same order
wherever they are.
"""

from __future__ import annotations

import posixpath
import time
from collections import Counter
from typing import Any, NamedTuple

from kontrast.addresses import protocol_of
from kontrast.data.byte_source import BadImage
from kontrast.data.decode import SUFFIXES, list_frames
from kontrast.data.file_columns import Columns, ColumnWriter, to_bytes
from kontrast.data.file_kinds import ALL_SUFFIXES
from kontrast.data.remote_files import Refused, State, ask, readers, state_in, state_of
from kontrast.data.video_frames import frame_name
from kontrast.errors import DataError

LISTING_LIMIT = 3600.0
"""Seconds that a listing may take: it is many requests, each of which the file system limits."""
LONG_LISTING, REUSED = 1.0, 20
"""A listing that took longer than this many seconds is used again for so many times as long."""


class ObjectList(NamedTuple):
    """Objects under an address: their names relative to it, and the size and version of each (size -1: not known)."""

    names: list[str]
    states: list[State]


_long_lists: dict[str, tuple[float, float, ObjectList]] = {}


def list_objects(root: str) -> ObjectList:
    """All objects under an address, without hidden ones and run folders; none if there is nothing.

    A listing of a million objects is a thousand requests, and a command asks for it several times: a long one is
    used again for a while.
    """
    until, _, found = _long_lists.get(root, (0.0, 0.0, None))
    if found is None or time.monotonic() > until:
        _long_lists.pop(root, None)
        began = time.monotonic()
        found = _list(root)
        took = time.monotonic() - began
        if took > LONG_LISTING:
            _long_lists[root] = (began + (1 + REUSED) * took, took, found)
    return found


def _list(root: str) -> ObjectList:
    def find(files: Any, path: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return path, files.find(path, detail=True, **options)

    try:
        top, facts = ask(root, find, limit=LISTING_LIMIT)
    except Refused as error:
        if "404" in error.reason:
            return ObjectList([], [])
        raise DataError(f"can't list {root}: {error.reason}") from None
    top = top.partition("?")[0].strip("/") if protocol_of(root) in ("http", "https") else top.strip("/")
    found = []
    for path, about in facts.items():
        name = path.strip("/")[len(top) :].lstrip("/")
        if about.get("type", "file") == "file" and name and not path.endswith("/"):
            found.append((to_bytes(name), name, state_in(about)))
    found.sort(key=lambda one: one[0])
    runs = _run_folders(name for _, name, _ in found)
    kept = [(name, state) for _, name, state in found if not _is_hidden(name) and not _is_inside(name, runs)]
    return ObjectList([name for name, _ in kept], [state for _, state in kept])


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _run_folders(names: Any) -> set[str]:
    """The folders of runs, whose pictures are not data."""
    marks = Counter(posixpath.dirname(n) for n in names if posixpath.basename(n) in ("recipe.toml", "run.json"))
    return {folder for folder, count in marks.items() if count == 2}


def _is_inside(name: str, folders: set[str]) -> bool:
    while folders and name:
        name = posixpath.dirname(name)
        if name in folders:
            return True
    return False


def is_image(name: str, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Whether a name is that of a picture, or ends in another of these ways."""
    return name.lower().endswith(suffixes)


def list_images(
    root: str, suffixes: tuple[str, ...], every: float | None = None
) -> tuple[Columns, list[tuple[str, str]], Counter[str]]:
    """Columns of the images under an address, (name, reason) of bad ones, and how many other objects were left out.

    Args:
        root: the address.
        suffixes: how the names of images end.
        every: seconds between two frames of a video, each of which is an image; None: every file is one.
    """
    objects = list_objects(root)
    images = [(name, state) for name, state in zip(*objects) if is_image(name, suffixes)]
    notes = (
        Counter({"other files": len(objects.names) - len(images)}) if len(images) < len(objects.names) else Counter()
    )
    bad: list[tuple[str, str]] = []
    writer, folders = ColumnWriter(), dict[str, int]()
    for (name, _), state in zip(images, known_states(root, images)):
        if isinstance(state, Refused):
            bad.append((name, state.reason))
            continue
        try:
            times = [] if every is None else list_frames(f"{root}/{name}", every)
        except BadImage as error:
            bad.append((name, error.reason))
            continue
        head, slash, base = name.rpartition("/")
        if head + slash not in folders:
            folders[head + slash] = writer.add_folder(head + slash, (0, 0, 0))
        for one in [base] if every is None else [frame_name(base, at) for at in times]:
            writer.add(to_bytes(one), folders[head + slash], *state)
    return writer.columns(root), bad, notes


def known_states(root: str, found: list[tuple[str, State]]) -> list[State | Refused]:
    """The size and version of objects; those of which the listing did not say it are asked for, many at once."""

    def look(one: tuple[str, State]) -> State | Refused:
        try:
            return state_of(f"{root}/{one[0]}") if one[1].size < 0 else one[1]
        except Refused as error:
            return error

    if all(state.size >= 0 for _, state in found):
        return [state for _, state in found]
    return list(readers().map(look, found))


def image_folders(root: str, suffixes: tuple[str, ...] = ALL_SUFFIXES) -> list[str]:
    """The names of the sub-folders that contain an image."""
    images = (name for name in list_objects(root).names if "/" in name and is_image(name, suffixes))
    return sorted({name.partition("/")[0] for name in images}, key=to_bytes)
