"""The kinds of files that a folder's images can be, and how their names end.

A folder is read as one kind: pictures if it has any, else arrays, else DICOM files, else videos, so that videos among
photos, or arrays of labels beside them, don't become images. data.files names another kind.
"""

from __future__ import annotations

from kontrast.data import decode, video_frames
from kontrast.errors import UsageError
from kontrast.registry import nearest

FILE_KINDS: dict[str, tuple[str, ...]] = {
    "pictures": decode.SUFFIXES,
    "arrays": (".npy", ".npz"),
    "dicom": (".dcm", ".dicom"),
    "video": video_frames.SUFFIXES,
}
"""Suffixes by kind, in the order in which a folder is searched for them."""
ALL_SUFFIXES = tuple(suffix for suffixes in FILE_KINDS.values() for suffix in suffixes)


def kinds_to_try(files: str) -> list[str]:
    """The kinds of files that the setting data.files allows, in the order in which they are looked for."""
    if files != "auto" and files not in FILE_KINDS:
        raise UsageError(f"unknown kind of files {files!r}: {nearest(files, ['auto', *FILE_KINDS])}")
    return list(FILE_KINDS) if files == "auto" else [files]
