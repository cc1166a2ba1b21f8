"""Names to things, and errors that say what was given, what is allowed and what to do.

A room keeps one `Registry`; recipes, the command line, the docs and the contract tests all read names from it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kontrast.errors import UsageError, shorten

LISTED, NEAREST = 50, 8
"""Up to how many names an error lists them all, and how many it lists of more."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for an unknown name: `did you mean 'x'?` and what is allowed; of very many names, the nearest ones."""
    names = [str(a) for a in allowed]
    close = [n for n in names if n.rpartition("/")[2] == str(name)]  # a recipe without its folder
    close += [n for n in difflib.get_close_matches(str(name), names, n=NEAREST, cutoff=0.6) if n not in close]
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) <= LISTED:
        return f"{hint}allowed: {', '.join(names) if names else 'none'}"
    shown = close or names
    more = f", ... ({len(names)} in all)" if len(names) > NEAREST else ""
    return f"{hint}{'nearest' if close else 'allowed'}: {', '.join(shown[:NEAREST])}{more}"


OWN = "a name of your own needs its file: kontrast --import FILE.py COMMAND ..."


def unknown(name: str, allowed: Iterable[str], hint: str = "", general: str = "") -> str:
    """What is said of an unknown name: the hint that there is for it, what is allowed, and where nothing comes near it
    what holds for any."""
    known = nearest(name, allowed)
    found = hint or known.startswith("did you mean")
    return "; ".join(filter(None, [hint, known, *([] if found else [general, OWN])]))


class Registry:
    """One room's names: `@registry.register("dcl")`, `registry["dcl"]`, `registry.build("dcl", temperature=0.1)`.

    `hints` tell of names that others use and what stands for them here; the one of "" is told of any unknown name.
    `given`: arguments that the program gives, so that no error offers them.
    """

    def __init__(self, kind: str, hints: Mapping[str, str] | None = None, given: Sequence[str] = ()):
        self.kind, self.given = kind, given
        self.hints = dict(hints or {})
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        def add(thing: Any) -> Any:
            if name in self._entries:
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
            if not callable(thing):
                raise TypeError(
                    f"{self.kind} {name!r} is {shorten(thing)}: register a class, or a function that makes it"
                )
            self._entries[name] = thing
            return thing

        return add

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._entries:
            raise UsageError(f"unknown {self.kind} {name!r}: {unknown(name, self, self.hint(name), self.hint(''))}")
        return self._entries[name]

    def hint(self, name: str) -> str:
        """What is said of a name that is not here, but known elsewhere."""
        return self.hints.get(str(name).partition(":")[0].lower(), "")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def arguments(self, name: str) -> dict[str, inspect.Parameter]:
        """The named arguments of an entry, in the order of its signature."""
        parameters = inspect.signature(self[name]).parameters
        return {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def build(self, name: str, /, **arguments: Any) -> Any:
        """Call the entry; an unknown argument is an error that names the nearest known one."""
        thing = self[name]
        variadic = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
        known = self.arguments(name)
        for key in arguments:
            if key not in known and not variadic:
                if key in self.given:
                    wanted = " and ".join(repr(k) for k in self.given)
                    raise UsageError(f"{self.kind} {name!r} must take {wanted}, which kontrast gives it: add {key!r}")
                free = [*(k for k in known if k not in self.given), "name"]
                raise UsageError(f"{self.kind} {name!r} has no argument {key!r}: {nearest(key, free)}")
        try:
            return thing(**arguments)
        except TypeError as error:  # a word where a number belongs; with --debug the place shows
            words = ", ".join(f"{key} = {shorten(value)}" for key, value in arguments.items())
            raise UsageError(f"{self.kind} {name!r} can't be built with {words}: {error}") from error
