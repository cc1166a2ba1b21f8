"""Exceptions with one clear line for the user and an exit code, and text that is safe to print in them."""

from __future__ import annotations

from pathlib import Path


class KontrastError(Exception):
    """An error with one clear line for the user and the exit code of the command."""

    exit_code = 1


class UsageError(KontrastError, ValueError):
    """The command line or the recipe is wrong: an unknown name, or a value that is not allowed."""

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
    """The machine can't do it: there is no such device, or not enough memory, disk space or permission."""

    exit_code = 6


class StorageFault(EnvironmentFault):
    """A file or folder can't be read or written; once it can, the same command goes on."""


class LostRank(EnvironmentFault):
    """Another rank ended or does not answer; if all ranks are started again, they resume."""


class Stopped(KontrastError):
    """The process received SIGTERM; the work is saved and can be resumed."""

    exit_code = 75


PICKLED = (".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".pickle", ".bin")


def refuse_pickle(path: Path) -> None:
    """Raise if the path is a pickled checkpoint of another program: reading it could execute code."""
    if path.suffix in PICKLED or (path / ".metadata").exists():
        unsafe = f"{path} is a checkpoint of another program, and reading it can execute code"
        raise CheckpointError(f"{unsafe}: give a run folder that `kontrast pretrain` made")


def printable(text: str) -> str:
    """Return text as one line that is safe to print: control and other invisible characters become their escapes.

    Example:
        >>> printable("a\\nb")
        'a\\\\nb'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shorten(value: object, longest: int = 200) -> str:
    """Return the repr of a value, without its middle if it is very long."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
