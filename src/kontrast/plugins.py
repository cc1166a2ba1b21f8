"""Python files of the user's own, imported before a command, for the names they register: `kontrast --import FILE.py`.

The option adds to the variable KONTRAST_IMPORT, which every process that the command starts reads too. Both come from
the user alone: no run folder, recipe or data can name a file to import.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from kontrast.errors import UsageError

VARIABLE = "KONTRAST_IMPORT"


def import_files(asked: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Import the files of KONTRAST_IMPORT and those asked for, each once, and note all for processes to come."""
    paths = [*noted(), *(os.path.abspath(path) for path in asked)]
    for path in paths:
        import_file(Path(path))
    if asked:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(paths))


def noted() -> list[str]:
    """The files that KONTRAST_IMPORT names."""
    return [os.path.abspath(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def program() -> list[str]:
    """The first words of a command that finds the same names again."""
    return ["kontrast", *(word for path in dict.fromkeys(noted()) for word in ("--import", path))]


def import_file(path: Path) -> None:
    """Import the file under its own name, so that a neighbour that imports it gets the same module."""
    spec = checked(path)
    known = sys.modules.get(spec.name)
    if known is not None and is_same(known.__spec__, path):
        return
    if known is not None or not is_free(spec.name, path):
        raise UsageError(f"--import {path}: {spec.name} is the name of another module too: rename the file")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a file may import its neighbours; last, so that none of them hides a library
    execute(spec, path)


def checked(path: Path) -> ModuleSpec:
    if os.pathsep in str(path):
        raise UsageError(f"--import {path}: its path holds {os.pathsep!r}, which stands between paths: move the file")
    if path.suffix != ".py" or not path.is_file():
        what = "is not a .py file" if path.exists() else "there is no such file"
        raise UsageError(f"--import {path}: {what}; give a Python file of your own")
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", path.stem), path)
    assert spec is not None
    return spec


def is_free(name: str, path: Path) -> bool:
    """Whether no other module has the name: an own timm.py would stand in the place of timm for all the program."""
    found = importlib.util.find_spec(name)
    return found is None or is_same(found, path)


def is_same(spec: ModuleSpec | None, path: Path) -> bool:
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def execute(spec: ModuleSpec, path: Path) -> None:
    module: ModuleType = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    sys.modules[spec.name] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the command's result
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise UsageError(
            f"--import {path} failed: {type(error).__name__}: {error} (with --debug its place shows)"
        ) from error
