"""Images on disk, in shards or embedded, to uint8 batches; label imbalance; competing features.

`open_data(spec, split)` gives an `ImageSet`; `Feeder` gives its batches, in an order that is a pure function of seed
and epoch; `pack` decodes once into a memory-mapped store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kontrast.data.changes import Changes, file_listing
    from kontrast.data.feeder import Batch, Feeder
    from kontrast.data.image_set import ImageSet, Ragged
    from kontrast.data.labels import read_labels
    from kontrast.data.lazy_images import Lazy
    from kontrast.data.sources import open_data

_HOMES = {
    "Batch": "feeder",
    "Changes": "changes",
    "Feeder": "feeder",
    "ImageSet": "image_set",
    "Lazy": "lazy_images",
    "Ragged": "image_set",
    "file_listing": "changes",
    "open_data": "sources",
    "read_labels": "labels",
}
__all__ = ["Batch", "Changes", "Feeder", "ImageSet", "Lazy", "Ragged", "file_listing", "open_data", "read_labels"]


def __getattr__(name: str) -> Any:
    # The decoding processes import this package too; they must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'kontrast.data' has no attribute {name!r}")
    return getattr(import_module(f"kontrast.data.{_HOMES[name]}"), name)
