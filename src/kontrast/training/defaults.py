"""A recipe with the defaults of its parts written out, so that a stored one says all that its run ran with, also to a
later version that has other defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kontrast.networks import ENCODERS, HEADS, PREDICTORS
from kontrast.objectives import OBJECTIVES
from kontrast.settings import Recipe

PARTS = {"objective": OBJECTIVES, "encoder": ENCODERS, "head": HEADS, "predictor": PREDICTORS}
FROM_THE_RUN = ("inputs", "channels", "size")
"""Arguments that the run gives, whatever their defaults are."""


def spelled_out(recipe: Recipe) -> Recipe:
    """The recipe with every argument of its objective and networks. A default of None stays unsaid: TOML has none."""
    changed: dict[str, Any] = {}
    for key, registry in PARTS.items():
        part = getattr(recipe, key)
        if part is None or part.name not in registry:
            continue
        defaults = {
            name: parameter.default
            for name, parameter in registry.arguments(part.name).items()
            if parameter.default not in (parameter.empty, None) and name not in FROM_THE_RUN
        }
        changed[key] = replace(part, arguments=defaults | part.arguments)
    return replace(recipe, **changed)


def temperature_of(recipe: Recipe) -> float:
    """The objective's temperature; 0.1 for one that has none."""
    return float(spelled_out(recipe).objective.arguments.get("temperature", 0.1))
