"""kontrast: learn image representations without labels by contrast, and see what they learned."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would have to be imported, before the command can answer a signal
if TYPE_CHECKING:
    from typing import Any

    from kontrast.objectives import objective
    from kontrast.runs.run import Run, load

__version__ = "0.2.0"
__all__ = ["Run", "load", "objective", "pretrain"]


def pretrain(data: Any = None, recipe: str | None = None, *, out: Any = None, **overrides: Any) -> Run:
    """Train by a recipe: `pretrain("photos", recipe="folder", training={"epochs": 5}, seed=1)`.

    `out`, `resume`, `accept_data_change`, `device`, `on_nan` and `say` are as on the command line; every other keyword
    lays over the recipe, as a table (`training={"epochs": 5}`) or as a dotted key (`**{"training.epochs": 5}`).
    Returns the `Run`.
    """
    from kontrast.training.pretrain import pretrain as start

    own = {k: overrides.pop(k) for k in ("resume", "accept_data_change", "device", "on_nan", "say") if k in overrides}
    from kontrast.runs.run import Run

    return Run(start(data, recipe=recipe, out=out, overrides=overrides, **own))


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: `kontrast --help` and reading a recipe must not wait for it.
    if name == "objective":
        from kontrast.objectives import objective

        return objective
    if name in ("Run", "load"):
        from kontrast.runs import run

        return getattr(run, name)
    raise AttributeError(f"module 'kontrast' has no attribute {name!r}")
