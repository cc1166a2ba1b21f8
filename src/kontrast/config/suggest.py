"""Suggest the key that was probably meant: one spelled alike, or one of another section (`training.epochs`)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Sequence

from kontrast.registry import nearest

ARGUMENTS = {"temperature": ["objective.temperature"], "width": ["encoder.width"]}
"""Arguments that are often looked for; no section lists its arguments."""
FILLED_IN = {
    "objective.images": "the number of training images",
    "objective.classes": "the number of classes of the training images",
    "objective.prototypes": "prototypes.count",
    "objective.width": "the width of the head",
    "encoder.channels": "the number of channels of the images",
    "encoder.size": "views.size",
    "head.inputs": "the width of the encoder",
    "head.width": "the width of the encoder; set the head's own width with head.outputs",
    "predictor.inputs": "the width of the head",
    "predictor.width": "the width of the head",
    "views.dtype": "given by training.precision",
    "views.planes": "data.random_bits",
}
"""Arguments that kontrast fills in itself, and with what."""


@functools.cache
def key_paths(kind: type) -> dict[str, list[str]]:
    """Return the keys of all sections of a dataclass of dataclasses, each with its dotted paths."""
    paths = {key: list(known) for key, known in ARGUMENTS.items()}
    for section, hint in typing.get_type_hints(kind).items():
        inner = next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)
        for field in dataclasses.fields(inner) if inner is not None else ():
            paths.setdefault(field.name, []).append(f"{section}.{field.name}")
    paths.pop("arguments", None)
    return paths


def nearest_key(key: str, own: Sequence[str], kind: type) -> str:
    """Return a hint for a key that a section doesn't have: the nearest key of its own, else one of another section."""
    known = key_paths(kind)
    if key not in known and difflib.get_close_matches(key, own, n=1):
        return nearest(key, own)
    paths = [path for near in difflib.get_close_matches(key, known, n=1, cutoff=0.8) for path in known[near]]
    return f"did you mean {' or '.join(map(repr, paths))}? allowed: {', '.join(own)}" if paths else nearest(key, own)
