"""Copies of remote files that have to be on this machine's disk: packed stores, and files of captions."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from kontrast.data.cache_folder import cache_home
from kontrast.data.file_columns import to_bytes
from kontrast.data.remote_files import LARGEST_RANGE, Refused, State, read_range, readers, state_of
from kontrast.data.store import MANIFEST, DamagedStore, is_store, read_manifest, verify
from kontrast.data.stored_list import locked
from kontrast.errors import DataError, EnvironmentFault
from kontrast.files import disk_faults, exchange_folder, remove_folder, write_atomic

LARGEST_FILE = 1 << 31
"""Bytes of a file of captions."""


def copy_file(address: str) -> Path:
    """A copy of a small file in the cache, under its own name; it is fetched again if it has changed."""
    state = _state(address)
    if state.size > LARGEST_FILE:
        raise DataError(f"{address} has {state.size:,} bytes, more than {LARGEST_FILE:,}")
    place = cache_home() / "copies" / _digest(f"{address}\0{state}") / os.path.basename(address)
    if not place.is_file() or place.stat().st_size != state.size:
        with disk_faults(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, read_range(address, 0, state.size))
    return place


def copy_store(address: str) -> Path:
    """A copy of one split of a packed store in the cache. An interrupted copy goes on where it stopped, and a store
    that changes at its address is copied anew."""
    manifest = read_range(f"{address}/{MANIFEST}", 0, _state(f"{address}/{MANIFEST}").size)
    stem = "".join(c if c.isalnum() else "-" for c in os.path.basename(os.path.dirname(address)))[:40]
    place = cache_home() / "stores" / f"{stem}-{_digest(address + hashlib.sha256(manifest).hexdigest())}"
    if is_store(place):
        return place
    with disk_faults(place, advice="set KONTRAST_CACHE to another disk"), locked(place):
        if not is_store(place):
            _copy_store(address, manifest, place)
    return place


def _copy_store(address: str, manifest: bytes, place: Path) -> None:
    work = place.with_name(place.name + ".part")
    work.mkdir(exist_ok=True)
    (work / MANIFEST).write_bytes(manifest)
    known = read_manifest(work)  # only files of a store are named there
    files = {name: facts["bytes"] for name, facts in known["files"].items()}
    room = shutil.disk_usage(work).free + sum(f.stat().st_size for f in work.iterdir())
    if sum(files.values()) > room:
        raise EnvironmentFault(
            f"the packed store {address} has {sum(files.values()) / 1e9:,.1f} GB, but {room / 1e9:,.1f} GB are free at "
            f"{place.parent}: set KONTRAST_CACHE to a larger disk"
        )
    for name, size in files.items():
        if _state(f"{address}/{name}").size != size:
            raise DamagedStore(f"{address}/{name} is not as long as the store says: pack again, and upload it whole")
        _append(f"{address}/{name}", work / name, size)
    try:
        verify(work, known, full=True)
    except DamagedStore as error:
        remove_folder(work)
        raise DamagedStore(str(error).replace(str(work), address)) from None
    exchange_folder(work, place)


def _append(address: str, path: Path, size: int) -> None:
    """Fetch what a file does not have yet; several parts at once, which are written in order."""
    with open(path, "ab") as file:
        starts = range(min(file.tell(), size), size, LARGEST_RANGE)
        for number in range(0, len(starts), 4):  # a few parts at once, so that no more than these are in memory
            some = starts[number : number + 4]
            ends = (min(size, start + LARGEST_RANGE) for start in some)
            for part in readers().map(lambda bounds: read_range(address, *bounds), zip(some, ends)):
                file.write(part)


def _state(address: str) -> State:
    try:
        return state_of(address)
    except Refused as error:
        raise DataError(f"can't read {address}: {error.reason}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(to_bytes(text)).hexdigest()[:16]
