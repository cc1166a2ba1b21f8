"""TOML as recipes use it: read with one-line errors, written so that it reads back the same."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from kontrast.errors import UsageError, printable

LONGEST_TEXT = 1_000_000
"""Bytes of a recipe file or an override."""
MOST_DOTS = 2_000
"""tomllib takes the square of a dotted key's parts: 100,000 of them would take hours."""


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    if text.count(".") > MOST_DOTS:
        raise UsageError(f"{origin} has more than {MOST_DOTS:,} dots: it is nested too deeply, or no recipe")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{origin} is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise UsageError(f"{origin} can't be read: {error}") from None


def toml_document(tree: Mapping[str, Any], header: str = "") -> str:
    """A tree of two levels, plain values first, then one table for each section; `header` as comments above."""
    lines = [f"# {printable(line)}" if line else "#" for line in header.splitlines()]
    lines += [f"{_toml_key(k)} = {toml_value(v)}" for k, v in tree.items() if not isinstance(v, Mapping)]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_toml_key(key)}]"] + [f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL and lone surrogates, which TOML can't hold.
        return json.dumps(value.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return str(value)
