"""Read TOML with one-line errors, and write it so that it reads back the same."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from kontrast.errors import UsageError, printable

LONGEST_TEXT = 1_000_000
"""The most characters that a recipe file or an override may have."""
MOST_DOTS = 2_000
"""tomllib needs time that grows with the square of a dotted key's parts: hours for 100,000 of them."""


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Parse a TOML document; `origin` names it in errors."""
    problem: object = f"it is nested too deeply, or has more than {MOST_DOTS:,} dots or {LONGEST_TEXT:,} characters"
    try:
        if text.count(".") <= MOST_DOTS and len(text) <= LONGEST_TEXT:
            return tomllib.loads(text)
    except ValueError as error:  # also for a number with too many digits
        problem = error
    except RecursionError:
        pass
    raise UsageError(f"{origin} is not valid TOML: {problem}")


def toml_document(tree: Mapping[str, Any], header: str = "") -> str:
    """Write a tree of two levels as TOML: plain values first, then one table per section.

    Args:
        tree: plain values and sections.
        header: text that is written above as comments.
    """
    lines = [f"# {printable(line)}" if line else "#" for line in header.splitlines()]
    lines += [f"{_toml_key(k)} = {toml_value(v)}" for k, v in tree.items() if not isinstance(v, Mapping)]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_toml_key(key)}]"] + [f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    """Write one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are also TOML's, except for DEL and lone surrogates, which TOML can't hold.
        return json.dumps(value.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return str(value)
