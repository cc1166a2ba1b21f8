"""What a run may say about itself to strangers: paths of this machine become the name of their last folder or file."""

from __future__ import annotations

import re
from typing import Any

from kontrast.config.recipe import Recipe, read_recipe, to_tree

PUBLIC = ("hf://", "timm:", "torchvision:")
"""How names of public models begin, which are no paths."""
PATH = re.compile(r"(?<![\w./~-])(?:file://|~[\w.-]*)?/(?:[^\s/'\":,;]+/)*([^\s/'\":,;]+)/?")
"""An absolute path, or one below a home folder, within a text."""


def without_paths(value: Any) -> Any:
    """Return plain values, as JSON has them, without absolute paths and addresses in any text.

    Example:
        >>> without_paths({"source": "/home/ada/photos", "note": "see /home/ada/x.csv", "share": 0.5})
        {'source': 'photos', 'note': 'see x.csv', 'share': 0.5}
    """
    if isinstance(value, dict):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    if not isinstance(value, str) or value.startswith(PUBLIC):
        return value
    if (
        value.startswith(("/", "~")) or "://" in value
    ):  # all of it is a path or an address, with spaces if there are any
        return value.rstrip("/").rpartition("/")[2]
    return PATH.sub(lambda match: match[1], value)


def public_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe without paths of this machine."""
    return read_recipe(without_paths(to_tree(recipe)))
