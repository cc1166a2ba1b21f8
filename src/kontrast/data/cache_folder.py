"""Where kontrast keeps what it can make again: packed stores, lists, indexes of shards, blocks of remote objects."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kontrast.errors import EnvironmentFault
from kontrast.operating_system import user_id


def cache_home() -> Path:
    """The folder of the cache: KONTRAST_CACHE, else the user's cache, else (for a user without a
    home folder, as in some containers) a private folder in the temporary directory."""
    if place := os.environ.get("KONTRAST_CACHE"):
        return Path(place)
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not user.startswith("~"):
        return Path(user, "kontrast")
    private = Path(tempfile.gettempdir(), f"kontrast-{user_id()}")
    with contextlib.suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        if user_id() in (None, private.lstat().st_uid):  # another user could put images into theirs
            return private
    reason = "belongs to another user or can't be created"
    raise EnvironmentFault(f"no cache: this user has no home, and {private} {reason}; set KONTRAST_CACHE")
