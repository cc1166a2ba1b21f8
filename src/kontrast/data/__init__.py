"""Data sources to uint8 batches: named sets, folders, shards, packed stores and images in memory.

`open_data(spec, split)` gives an `ImageSet`; a `Feeder` makes its batches; `pack.pack` decodes a source once into a
memory-mapped store; `in_memory.pack_in_memory` does so with a tensor or a dataset.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kontrast.data.changes import Changes, file_listing
    from kontrast.data.feeder import Batch, Feeder
    from kontrast.data.image_set import ImageSet, RaggedImages
    from kontrast.data.labels import read_labels
    from kontrast.data.lazy_images import LazyImages
    from kontrast.data.sources import open_data

_HOMES = {
    "Batch": "feeder", "Changes": "changes", "Feeder": "feeder", "ImageSet": "image_set", "LazyImages": "lazy_images",
    "RaggedImages": "image_set", "file_listing": "changes", "open_data": "sources", "read_labels": "labels",
}  # fmt: skip
__all__ = [
    "Batch", "Changes", "Feeder", "ImageSet", "LazyImages", "RaggedImages", "file_listing", "open_data", "read_labels",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Decoding processes import this package too, and must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'kontrast.data' has no attribute {name!r}")
    return getattr(import_module(f"kontrast.data.{_HOMES[name]}"), name)
