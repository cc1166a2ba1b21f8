"""Import Python files of the user before a command, for the names that they register: `kontrast --import FILE.py`.

The option adds to the environment variable KONTRAST_IMPORT, which every process that the command starts reads too.
Both come from the user alone: no run folder, recipe or data can name a file to import. Only the named file is loaded; a
file beside it is found only by a relative import (`from . import helper`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from kontrast.errors import EnvironmentFault, KontrastError, UsageError

VARIABLE = "KONTRAST_IMPORT"


def import_files(files: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Import the files in KONTRAST_IMPORT and then `files`, each once, and add `files` to the variable."""
    paths = [*files_in_variable(), *(os.path.abspath(path) for path in files)]
    for path in paths:
        import_file(Path(path))
    if files:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(paths))


def files_in_variable() -> list[str]:
    """Return the files in KONTRAST_IMPORT, as absolute paths."""
    return [os.path.abspath(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def command_start() -> list[str]:
    """Return how a command starts that knows the same names: `kontrast --import FILE.py ...`."""
    return ["kontrast", *(word for path in dict.fromkeys(files_in_variable()) for word in ("--import", path))]


def own_line(error: BaseException) -> str:
    """Return the last line of an imported file, or of a file beside it, that an error passed through; "" if none."""
    folders = {os.path.dirname(path) for path in files_in_variable()}
    calls = traceback.extract_tb(error.__traceback__)
    own = [call for call in calls if os.path.dirname(os.path.abspath(call.filename)) in folders]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def explain_error(error: BaseException) -> KontrastError:
    """Return an error of any kind as one with a line for the user and an exit code."""
    if isinstance(error, KontrastError):
        return error
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return EnvironmentFault(f"{name}{error.strerror or error}")
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the GPU's memory has its own error
        return EnvironmentFault(f"out of memory ({error}): use a smaller encoder, batch or image size")
    text = f"{type(error).__name__}: {error}"
    if line := own_line(error):
        return UsageError(f"{line}: {text} (in a file that was named with --import)")
    return KontrastError(f"unexpected {text} (run again with --debug and report it)")


def import_file(path: Path) -> None:
    """Import a file under its own name, as a package whose modules are the files beside it."""
    name, problem = re.sub(r"\W", "_", path.stem) or "_", ""
    imported = sys.modules.get(name)
    known = importlib.util.find_spec(name) if imported is None else imported.__spec__
    same = known is not None and os.path.realpath(known.origin or "") == os.path.realpath(path)
    if os.pathsep in str(path):
        problem = f"{os.pathsep!r} in the path separates paths: rename or move the file"
    elif path.suffix != ".py" or not path.is_file():
        problem = "is not a .py file" if path.exists() else "there is no such file"
    elif (imported is not None or known is not None) and not same:  # timm.py would replace timm in the whole program
        problem = f"{name} is also the name of another module: rename the file"
    if problem:
        raise UsageError(f"--import {path}: {problem}")
    if imported is not None:
        return
    # The folder is not added to sys.path, where every optional `import timm` of any library would find it.
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the command's result
            spec.loader.exec_module(sys.modules[name])
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        advice = "--debug shows the line"
        if isinstance(error, ModuleNotFoundError) and path.with_name(f"{error.name}.py").is_file():
            advice = f"to import the file beside it, write `from . import {error.name}`"
        raise UsageError(f"--import {path} failed: {type(error).__name__}: {error} ({advice})") from error
