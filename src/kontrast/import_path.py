"""Keep what lies beside the data off Python's import path: a `numpy.py` in a folder of images must never run.

Python itself puts the current folder on the path for `-m` and `-c`, and for every empty entry of PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def drop_current_folder() -> None:
    """Remove the current folder from the import path of this process and of every Python process that it starts.

    It stays if PYTHONPATH names it (`PYTHONPATH=.`), or if kontrast itself was imported from it.
    """
    named = _named_folders()
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    os.environ["PYTHONSAFEPATH"] = "1"
    kept = {os.path.dirname(PACKAGE), *map(os.path.abspath, named)}
    here = os.path.abspath(os.curdir)
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here or here in kept]


def python_environment(*packages: str) -> dict[str, str]:
    """Return the environment of a Python process that imports kontrast and these packages from where this process did,
    and nothing from the current folder or the folder of the user's script.

    Args:
        packages: names of packages that are imported already. They come before kontrast on the path, so that nothing
            beside a source tree of kontrast hides them.
    """
    places = [os.path.dirname(os.path.dirname(os.path.abspath(str(sys.modules[name].__file__)))) for name in packages]
    paths = dict.fromkeys([*_named_folders(), *places, os.path.dirname(PACKAGE)])
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _named_folders() -> list[str]:
    """Return PYTHONPATH without its empty entries, which mean the current folder and are mostly an accident: a leading
    or trailing colon."""
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
