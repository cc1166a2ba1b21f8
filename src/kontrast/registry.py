"""Registries map names to classes and functions, with errors that name the nearest known one.

Each room has one `Registry`. Recipes, the command line, the documentation and the contract tests read names from it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kontrast.errors import UsageError, shorten

LISTED, NEAREST = 50, 8
"""An error lists all allowed names if there are at most LISTED, else the NEAREST nearest ones."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint for an unknown name: `did you mean 'x'?` and the allowed names, or the nearest ones of very many.

    Example:
        >>> nearest("cosin", ["cosine", "steps"])
        "did you mean 'cosine'? allowed: cosine, steps"
    """
    names = [str(a) for a in allowed]
    close = [n for n in names if n.rpartition("/")[2] == str(name)]  # a recipe without its folder
    close += [n for n in difflib.get_close_matches(str(name), names, n=NEAREST, cutoff=0.6) if n not in close]
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) <= LISTED:
        return f"{hint}allowed: {', '.join(names) if names else 'none'}"
    shown = close or names
    return f"{hint}{'nearest' if close else 'allowed'}: {', '.join(shown[:NEAREST])}, ... ({len(names)} in all)"


IMPORT_HINT = "a name of your own needs its file: kontrast --import FILE.py COMMAND ..."


def unknown(name: str, allowed: Iterable[str], hint: str = "", general: str = "") -> str:
    """Return what an error says about an unknown name.

    Args:
        name: the unknown name.
        allowed: the known names.
        hint: advice about this very name, if there is any.
        general: advice about any unknown name, given if no known name is near.
    """
    known = nearest(name, allowed)
    helped = hint or known.startswith("did you mean")
    return "; ".join(filter(None, [hint, known, *([] if helped else [general, IMPORT_HINT])]))


class Registry(dict[str, Callable[..., Any]]):
    """The names of one kind of thing, for example objectives, with the class or function that makes each.

    Args:
        kind: what the names stand for, as errors call it.
        hints: advice by name, for names that other libraries use; the entry "" is advice about any unknown name.
        given: arguments that kontrast itself passes, so that no error suggests them.

    Example:
        >>> losses = Registry("loss")
        >>> losses.register("double")(lambda x=1: 2 * x)(3), losses.build("double", x=4)
        (6, 8)
    """

    def __init__(self, kind: str, hints: Mapping[str, str] | None = None, given: Sequence[str] = ()):
        super().__init__()
        self.kind, self.given, self.hints = kind, given, dict(hints or {})

    def register(self, name: str) -> Callable[[Any], Any]:
        """Return a decorator that adds a class, or a function that makes the thing, under this name."""

        def add(thing: Any) -> Any:
            problem = "is registered twice" if name in self else f"is {shorten(thing)}"
            if name in self or not callable(thing):
                raise UsageError(f"{self.kind} {name!r} {problem}: register a class, or a function that makes it, once")
            self[name] = thing
            return thing

        return add

    def __missing__(self, name: str) -> Callable[..., Any]:
        raise UsageError(f"unknown {self.kind} {name!r}: {unknown(name, self, self.hint(name), self.hint(''))}")

    def hint(self, name: str) -> str:
        """Return the advice about a name that other libraries use; "" if there is none."""
        return self.hints.get(str(name).partition(":")[0].lower(), "")

    def arguments(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the named arguments of an entry, in the order of its signature."""
        parameters = inspect.signature(self[name]).parameters
        return {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def build(self, name: str, /, **arguments: Any) -> Any:
        """Call the entry with these arguments; an unknown argument is an error that names the nearest known one."""
        thing = self[name]
        variadic = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
        known = self.arguments(name)
        unused = next((key for key in arguments if key not in known and not variadic), None)
        if unused is not None:
            free = [*(k for k in known if k not in self.given), "name"]
            problem = f"has no argument {unused!r}: {nearest(unused, free)}"
            if unused in self.given:
                problem = f"must accept {' and '.join(map(repr, self.given))}, which kontrast passes: add {unused!r}"
            raise UsageError(f"{self.kind} {name!r} {problem}")
        try:
            return thing(**arguments)
        except TypeError as error:  # for example text instead of a number; --debug shows the line
            given = ", ".join(f"{key} = {shorten(value)}" for key, value in arguments.items())
            raise UsageError(f"{self.kind} {name!r} can't be built with {given}: {error}") from error
