"""Weight files that go between programs: safetensors with a card, and .pt files without unpickling anything else."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import CheckpointError, refuse_pickle
from kontrast.files import read_bytes
from kontrast.training.checkpoints import read_weights

TORCH_FILES = (".pt", ".pth")
DEEPEST = 8


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file by name.

    Tensors in nested dictionaries, as in `{"state_dict": {...}}`, get dotted names. Only files of plain tensors are
    read: torch refuses all else under `weights_only=True`.
    """
    if path.suffix in TORCH_FILES:
        return dict(_tensors(_read_torch(path)))
    if path.suffix != ".safetensors":
        refuse_pickle(path)
        raise CheckpointError(f"{path} is no weight file: give a .safetensors, .pt or .pth file, or a run folder")
    return read_weights(path)


def read_card(path: Path) -> dict[str, Any]:
    """Return the card that `kontrast export` writes into the header of a safetensors file; {} if there is none."""
    if path.suffix != ".safetensors":
        return {}
    content = read_bytes(path)
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        card = json.loads(header["__metadata__"]["kontrast"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return card if isinstance(card, dict) else {}


def safetensors_bytes(named: dict[str, Tensor], card: dict[str, Any]) -> bytes:
    """Return the content of a safetensors file with a card in its header, which `read_card` reads."""
    from safetensors.torch import save

    tensors = {name: t.detach().cpu().contiguous() for name, t in named.items()}
    return sort_header(save(tensors, metadata={"format": "pt", "kontrast": json.dumps(card)}))


def sort_header(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file: the library writes it in a random order, so the bytes would differ."""
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[length:]


def _read_torch(path: Path) -> Any:
    file = io.BytesIO(read_bytes(path))
    if zipfile.is_zipfile(file):
        try:
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            packed = True
        if packed:  # torch.save never compresses; what does may unpack to more memory than there is
            raise CheckpointError(f"{path} is damaged, or torch.save did not write it: save its tensors again")
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # the reader and the restricted unpickler raise nearly every built-in exception
        advice = "save the state dict alone, or as safetensors"
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, which can execute code: {advice}"
        ) from None


def _tensors(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors of nested dictionaries by their dotted names."""
    for key, value in tree.items() if isinstance(tree, Mapping) and depth < DEEPEST else ():
        if isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu":
                yield f"{prefix}{key}", value
        else:
            yield from _tensors(value, f"{prefix}{key}.", depth + 1)
