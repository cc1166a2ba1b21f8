"""The form of a plot that the report can draw, which the writers of plots must keep to."""

from __future__ import annotations

from typing import Any

from kontrast.reports.run_files import is_finite


def is_plot(plot: Any) -> bool:
    """Return whether a plot has labels, and each series has columns of equal length with numbers in them."""
    columns = [(one["x"], one["y"], one.get("low") or one["y"], one.get("high") or one["y"]) for one in plot["series"]]
    equal = all(len(column) == len(four[0]) > 0 for four in columns for column in four)
    numbers = all(any(map(is_finite, column)) for four in columns for column in four)
    return bool(columns and equal and numbers and plot["title"] and plot["x"]["label"] and plot["y"]["label"])
