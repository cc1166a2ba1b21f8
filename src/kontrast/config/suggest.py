"""Keys that stand where they can't: without their section (`epochs` is `training.epochs`), in another one, or given by
hand where the program gives them itself."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Sequence

from kontrast.registry import nearest

OFTEN_MEANT = {"temperature": ["objective.temperature"], "width": ["encoder.width"]}
"""Arguments of named things, which no section lists."""
FILLED_IN = {
    "encoder.channels": "the images have",
    "encoder.size": "views.size says",
    "head.inputs": "the encoder gives",
    "head.width": "the encoder gives; its own width is head.outputs",
    "predictor.inputs": "the head gives",
    "predictor.width": "the head gives",
    "views.dtype": "training.precision says",
    "views.planes": "data.random_bits says",
}
"""Arguments that the program gives itself, and whence."""


@functools.cache
def places(kind: type) -> dict[str, list[str]]:
    """The keys of all sections of a dataclass of dataclasses, each with where it stands."""
    found = {key: list(where) for key, where in OFTEN_MEANT.items()}
    for section, hint in typing.get_type_hints(kind).items():
        inner = next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)
        for field in dataclasses.fields(inner) if inner is not None else ():
            found.setdefault(field.name, []).append(f"{section}.{field.name}")
    return {key: where for key, where in found.items() if key != "arguments"}


def nearest_key(key: str, own: Sequence[str], kind: type) -> str:
    """A hint for a key that its section does not have: the nearest of its own, else where it stands, or one like it."""
    known = places(kind)
    if key not in known and difflib.get_close_matches(key, own, n=1):
        return nearest(key, own)
    found = [where for near in difflib.get_close_matches(key, known, n=1, cutoff=0.8) for where in known[near]]
    return f"did you mean {' or '.join(map(repr, found))}? allowed: {', '.join(own)}" if found else nearest(key, own)
