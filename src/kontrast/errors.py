"""Names to things, and errors that say what was given, what is allowed and what to do.

A room keeps one `Registry`; recipes, the command line, the docs and the contract tests all read names from it.
"""

from __future__ import annotations

from pathlib import Path


class KontrastError(Exception):
    """An error with one clear line for the user and the exit code of the command."""

    exit_code = 1


class UsageError(KontrastError, ValueError):
    """The command line or the recipe asks for something that does not exist or can't be."""

    exit_code = 2


class DataError(KontrastError, ValueError):
    """The images or labels are missing, unreadable or too few."""

    exit_code = 3


class CheckpointError(KontrastError):
    """A checkpoint or run folder is damaged, unsafe or from another recipe."""

    exit_code = 4


class NumbersError(KontrastError):
    """The loss or a gradient became NaN or infinite."""

    exit_code = 5


class EnvironmentFault(KontrastError):
    """The machine can't do it: no such device, no memory, no space, no permission."""

    exit_code = 6


class Stopped(KontrastError):
    """Asked to stop (SIGTERM); the work is saved and can be resumed."""

    exit_code = 75


PICKLED = (".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".pickle", ".bin")


def refuse_pickle(path: Path) -> None:
    """What another program pickled is never read."""
    if path.suffix in PICKLED or (path / ".metadata").exists():
        raise CheckpointError(
            f"{path} is a checkpoint of another program, unsupported: it can execute code when it is read; "
            "give a run folder that `kontrast pretrain` made"
        )


def printable(text: str) -> str:
    """A name as one line that does nothing to a terminal: control, direction and other invisible characters and bytes
    that are no UTF-8 are written as their escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shorten(value: object, longest: int = 200) -> str:
    """A value as it was given, quoted, its middle left out where it is very long."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
