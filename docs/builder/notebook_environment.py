"""The environment of the kernels that execute the tutorials, for the build and for benchmarks/tutorials.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def notebook_environment() -> dict[str, str]:
    """Return variables for kernels: `!kontrast` is the one of this Python, and a command that fails ends the page."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONSTARTUP": str(Path(__file__).with_name("notebook_startup.py")),
        "PYTHONWARNINGS": "ignore::FutureWarning",  # torch's about its own functions, with paths of this machine
    }
