"""Files that must never be imported: each one leaves its name in a log and raises."""

from __future__ import annotations

import sys
from pathlib import Path

LIBRARIES = (
    "PIL", "click", "numpy", "onnx", "opt_einsum", "pandas", "rich", "safetensors", "scipy", "sitecustomize", "sklearn",
    "tensorboard", "timm", "torch", "torchvision", "triton", "typer", "typing_extensions", "usercustomize", "yaml",
)  # fmt: skip
BEFORE_MAIN = (
    "__future__", "collections", "contextlib", "functools", "importlib", "keyword", "operator", "reprlib", "types",
    "warnings",
)  # fmt: skip
"""What `python -m` imports itself before it runs a module. Only `python -P` keeps the current folder from these."""


def set_traps(folder: Path, *, standard_library: bool = True) -> Path:
    """Put a trap for every library and module of the standard library into a folder; return the log."""
    log = folder.with_name(f"{folder.name}-sprung.txt")
    code = f"with open({str(log)!r}, 'a') as log:\n    log.write(__name__ + '\\n')\nraise ImportError('a trap')\n"
    names = {*LIBRARIES, *(sys.stdlib_module_names if standard_library else ())} - set(BEFORE_MAIN)
    for number, name in enumerate(sorted(names)):
        place = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        place.parent.mkdir(exist_ok=True)
        place.write_text(code)
    (folder / "trap.pth").write_text("import numpy\n")
    return log


def sprung(log: Path) -> list[str]:
    """Return the names of the traps that were imported."""
    return log.read_text().split() if log.exists() else []
