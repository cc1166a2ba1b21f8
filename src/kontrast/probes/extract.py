"""Images through a frozen encoder, in batches: uint8 [N,C,H,W] -> float32 [N,F]."""

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
    """Features [N,F] in float32 on the CPU, whatever autocast is around.

    images: uint8 tensor or array that can be sliced, also memory-mapped, or an image set, in which pictures of
    different size come at their own, padded. transform: uint8 [B,C,H,W] on the device to float [B,C,h,w], or
    views(images, keys, sizes) whose first view is taken; scaled to [0,1] where none is given. advance: told the
    number of images of each batch.
    """
    if len(images) == 0:
        raise DataError("no images to encode")
    device = torch.device(device) if device is not None else next(encoder.parameters()).device
    features = []
    with measuring(encoder), torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for start in range(0, len(images), batch):
            stop = min(start + batch, len(images))
            parts = []
            for keys, pixels, sizes in pixels_of(images, start, stop):
                keys, pixels = keys.to(device, non_blocking=True), pixels.to(device, non_blocking=True)
                sizes = None if sizes is None else sizes.to(device, non_blocking=True)
                parts.append(pictures(transform, keys, pixels, sizes))
            features.append(encoder(torch.cat(parts) if len(parts) > 1 else parts[0]).float().cpu())
            if advance:
                advance(stop - start)
    # A tensor born in inference mode can't be saved for a later backward pass; a copy outside of it can.
    return torch.cat(features).clone()


@contextmanager
def measuring(network: nn.Module) -> Iterator[None]:
    """The network in evaluation mode, and in the mode it came in, module by module, afterwards."""
    modes = {m: m.training for m in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def pixels_of(images: Any, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Images from `start` to `stop`, few at once where they are large: their numbers, pixels, and sizes."""
    positions = torch.arange(start, stop)
    if hasattr(images, "iter_chunks"):
        yield from images.iter_chunks(positions)
    else:
        yield positions, torch.as_tensor(images[start:stop]), None


def pictures(transform: Callable[..., Any] | None, keys: Tensor, images: Tensor, sizes: Tensor | None) -> Tensor:
    """The batch as the encoder takes it; views get the images' numbers as keys."""
    if transform is None:
        return images.float() / 255
    if "keys" not in inspect.signature(transform).parameters:
        return transform(images)
    return transform(images, keys, sizes)[0]
