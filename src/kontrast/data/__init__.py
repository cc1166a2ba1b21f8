"""Images on disk, in shards or embedded, to uint8 batches; label imbalance; competing features.

`open_data(spec, split)` gives an `ImageSet`; `Feeder` gives its batches, in an order that is a pure function of seed
and epoch; `pack` decodes once into a memory-mapped store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kontrast.data.class_balance import imbalance
    from kontrast.data.feeding import Batch, Feeder
    from kontrast.data.file_changes import Changes, changes, file_listing
    from kontrast.data.imageset import ImageSet, Ragged
    from kontrast.data.labels import read_labels
    from kontrast.data.lazy import Lazy
    from kontrast.data.sources import open_data, pack

_HOMES = {
    "Batch": "feeding",
    "Changes": "file_changes",
    "Feeder": "feeding",
    "ImageSet": "imageset",
    "Lazy": "lazy",
    "Ragged": "imageset",
    "changes": "file_changes",
    "file_listing": "file_changes",
    "imbalance": "class_balance",
    "open_data": "sources",
    "pack": "sources",
    "read_labels": "labels",
}
__all__ = [
    "Batch", "Changes", "Feeder", "ImageSet", "Lazy", "Ragged", "changes", "file_listing", "imbalance", "open_data",
    "pack", "read_labels",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # The decoding processes import this package too; they must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'kontrast.data' has no attribute {name!r}")
    return getattr(import_module(f"kontrast.data.{_HOMES[name]}"), name)
