"""Send images through a frozen encoder in batches: uint8 [N,C,H,W] -> float32 [N,F]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import DataError


def extract_features(
    encoder: nn.Module,
    images: Any,
    transform: Callable[..., Any] | None = None,
    batch: int = 512,
    device: str | torch.device | None = None,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the encoder's features of every image, in evaluation mode and in float32 even under autocast.

    Args:
        encoder: the network; its training mode is restored afterwards.
        images: uint8 tensor or array that can be sliced (also memory-mapped), or an image set, whose images may differ
            in size.
        transform: maps uint8 [B,C,H,W] on the device to float [B,C,h,w]. `Views` work too: they are called with the
            images' indices as keys, and the first view is used. Default: divide by 255.
        batch: images per forward pass.
        device: where the encoder is. Default: the device of its first parameter.
        advance: called with the number of images of each batch, for progress bars.

    Returns:
        Features [N,F] on the CPU.

    Shape:
        - images: [N,C,H,W]
        - output: [N,F]

    Example:
        >>> images = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
        >>> extract_features(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), images, batch=4).shape
        torch.Size([6, 5])
    """
    if len(images) == 0:
        raise DataError("no images to encode")
    device = torch.device(device) if device is not None else next(encoder.parameters()).device
    features = []
    with evaluation_mode(encoder), torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for start in range(0, len(images), batch):
            stop = min(start + batch, len(images))
            parts = []
            for keys, pixels, sizes in iter_pixels(images, start, stop):
                keys, pixels = keys.to(device, non_blocking=True), pixels.to(device, non_blocking=True)
                sizes = None if sizes is None else sizes.to(device, non_blocking=True)
                parts.append(encoder_input(transform, keys, pixels, sizes))
            features.append(encoder(torch.cat(parts) if len(parts) > 1 else parts[0]).float().cpu())
            if advance:
                advance(stop - start)
    # A tensor made in inference mode can't be saved for a later backward pass; a copy made outside of it can.
    return torch.cat(features).clone()


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put the network in evaluation mode and restore the mode of each of its modules afterwards."""
    modes = {m: m.training for m in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def iter_pixels(images: Any, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield indices, pixels and sizes of the images from `start` to `stop`, in small chunks if they are large."""
    indices = torch.arange(start, stop)
    if hasattr(images, "iter_chunks"):
        yield from images.iter_chunks(indices)
    else:
        yield indices, torch.as_tensor(images[start:stop]), None


def encoder_input(transform: Callable[..., Any] | None, keys: Tensor, images: Tensor, sizes: Tensor | None) -> Tensor:
    """Transform a batch of uint8 images into what the encoder takes; views get the image indices as keys."""
    if transform is None:
        return images.float() / 255
    if "keys" not in inspect.signature(transform).parameters:
        return transform(images)
    return transform(images, keys, sizes)[0]
