"""What the results of several verbs have in common: a sequence that prints as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kontrast.notebook import Printed

Item = TypeVar("Item")


@dataclass(frozen=True, repr=False)
class ResultSequence(Printed, Sequence[Item], Generic[Item]):
    """A sequence of results; subclasses add fields and define the table as `__str__`."""

    items: tuple[Item, ...]

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return str(self)
