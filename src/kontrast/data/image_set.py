"""A set of images in memory, whatever it came from.

Legend: N images of C channels, H x W pixels (h, w where they differ from image to image), B images of a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

PIXELS = 64_000_000
"""Bytes of pixels that are prepared at once; pictures of different size are padded to the largest of them."""
GROUP = 64
"""Images that are decoded together."""


class Pictures(Protocol):
    """What gives pixels: a uint8 tensor [N,C,H,W] (also memory-mapped), `Ragged`, `Lazy`, or one with more channels."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class Ragged:
    """Images of different size, end to end in one flat uint8 tensor.

    flat: uint8 [sum C*h*w]; sizes: int64 [N,2], height and width. `ragged[3]` is image 3 as it is, [C,h,w]; a slice or
    index tensor gives [B,C,side,side]: centre squares, resized with antialiasing; `padded` keeps every pixel.
    """

    def __init__(self, flat: Tensor, sizes: Tensor, channels: int = 3, starts: Tensor | None = None):
        self.flat, self.sizes, self.channels = flat, sizes.long(), channels
        if starts is None:
            starts = torch.zeros(len(sizes), dtype=torch.int64)
            starts[1:] = (channels * self.sizes.prod(dim=1)).cumsum(0)[:-1]
        self.starts = starts
        self.side = int(self.sizes.min(dim=1).values.median()) if len(sizes) else 0

    def __len__(self) -> int:
        return len(self.sizes)

    def one(self, index: int) -> Tensor:
        """uint8 [C,h,w], a view of the flat bytes."""
        height, width = self.sizes[index].tolist()
        start = int(self.starts[index])
        return self.flat[start : start + self.channels * height * width].view(self.channels, height, width)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int):
            return self.one(range(len(self))[index])
        return self.squares(torch.arange(len(self))[index], self.side)

    def squares(self, indices: Tensor, side: int) -> Tensor:
        """uint8 [B,C,side,side]: the centre square of each image, resized."""
        out = torch.empty(len(indices), self.channels, side, side, dtype=torch.uint8)
        for row, index in enumerate(indices.tolist()):
            out[row] = square(self.one(index), side)
        return out

    def several(self, indices: Tensor) -> list[Tensor]:
        """Each image as it is, [C,h,w]."""
        return [self.one(index) for index in indices.tolist()]

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B,C,Hmax,Wmax], each image in the upper left corner, zero beyond; and sizes int64 [B,2]."""
        return pad(self.several(indices))

    def select(self, indices: Tensor) -> Ragged:
        return Ragged(self.flat, self.sizes[indices], self.channels, self.starts[indices])


def pad(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Images [C,h,w] -> uint8 [B,C,Hmax,Wmax], each in the upper left corner, zero beyond; and sizes int64 [B,2]."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(dim=0).tolist()
    out = torch.zeros(len(images), images[0].shape[0], height, width, dtype=torch.uint8)
    for row, image in zip(out, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return out, sizes


def square(image: Tensor, side: int) -> Tensor:
    """uint8 [C,h,w] -> [C,side,side]: the centre square, resized with antialiasing."""
    shorter = min(image.shape[1:])
    top, left = (image.shape[1] - shorter) // 2, (image.shape[2] - shorter) // 2
    image = image[:, top : top + shorter, left : left + shorter]
    if shorter == side:
        return image
    resized = torch.nn.functional.interpolate(image[None].float(), (side, side), mode="bilinear", antialias=True)
    return resized[0].round().clamp(0, 255).to(torch.uint8)


class WithPlanes:
    """Pictures with constant channels behind their own: planes uint8 [N,n], made full size only in a batch."""

    def __init__(self, base: Any, planes: Tensor):
        self.base, self.planes = base, planes

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: Any) -> Tensor:
        return self._join(self.base[index], self.planes[index])

    def padded(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, sizes = self.base.padded(indices)
        return self.joined(images, indices), sizes

    def joined(self, images: Tensor, indices: Tensor) -> Tensor:
        """The base's images at these positions, however they were got, with their planes."""
        return self._join(images, self.planes[indices])

    def several(self, indices: Tensor) -> list[Tensor]:
        return [self._join(*pair) for pair in zip(self.base.several(indices), self.planes[indices])]

    def to(self, device: torch.device) -> WithPlanes:
        return WithPlanes(self.base.to(device), self.planes.to(device))

    def select(self, indices: Tensor) -> WithPlanes:
        return WithPlanes(select(self.base, indices), self.planes[indices])

    @staticmethod
    def _join(images: Tensor, planes: Tensor) -> Tensor:
        constant = planes[..., None, None].expand(*planes.shape, *images.shape[-2:])
        return torch.cat([images, constant], dim=-3)


def select(pictures: Any, indices: Tensor) -> Any:
    """The pictures at these positions, in this order."""
    return pictures[indices] if isinstance(pictures, Tensor) else pictures.select(indices)


@dataclass(frozen=True)
class ImageSet:
    """Images with what is known of them.

    images: see `Pictures`. index: int64 [N], the stable number of each image in its source, which survives `subset`;
    views and competing features are drawn from it. factors: tensors [N,...]. bad: (name, reason) of files that were
    skipped. notes: counts of what was done to images that were kept (first frames, links not followed, ...). stamps:
    int64 [N], a hash of each image's file's place, size and date, where it came from a file. place: the folder in the
    source that the names are relative to, "" for the source itself.
    """

    images: Any
    names: Sequence[str]
    labels: Tensor | None = None
    classes: list[str] | None = None
    factors: dict[str, Tensor] = field(default_factory=dict)
    name: str = ""
    split: str = "train"
    has_test: bool = False
    fingerprint: str = ""
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    index: Tensor | None = None
    stamps: Tensor | None = None
    place: str = ""

    def __post_init__(self) -> None:
        if self.index is None:
            object.__setattr__(self, "index", torch.arange(len(self.images)))
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _fingerprint(self))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Tensor:
        return self.images[index]

    @property
    def ragged(self) -> bool:
        """Whether images may differ in size."""
        return hasattr(self.base, "padded")

    @property
    def base(self) -> Any:
        """The pictures without added channels."""
        return self.images.base if isinstance(self.images, WithPlanes) else self.images

    @property
    def total(self) -> int:
        """How many images there were to begin with, good and bad."""
        return getattr(self.base, "total", len(self) + len(self.bad))

    @property
    def channels(self) -> int:
        return int(self.images[0].shape[0])

    @property
    def typical_side(self) -> int:
        """The median of the shorter sides, in pixels."""
        return int(min(self.images[0:1].shape[-2:]))

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """uint8 [B,C,H,W] and, where images differ in size, their sizes int64 [B,2] in the padded batch."""
        if self.ragged:
            return self.images.padded(positions)
        return self.images[positions], None

    def iter_chunks(self, positions: Tensor, limit: int = PIXELS) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """These positions in order, with `batch` of them, as many at once as stay within `limit` bytes of pixels after
        padding; at least one."""
        if not self.ragged:
            for part in positions.split(max(1, limit // self.images[0].numel())):
                yield part, *self.batch(part)
            return
        taken: list[Tensor] = []
        start = tall = wide = 0
        for image in itertools.chain.from_iterable(map(self.images.several, positions.split(GROUP))):
            channels, height, width = image.shape
            higher, wider = max(tall, height), max(wide, width)
            if taken and (len(taken) + 1) * channels * higher * wider > limit:
                yield positions[start : start + len(taken)], *pad(taken)
                start, taken, higher, wider = start + len(taken), [], height, width
            tall, wide = higher, wider
            taken.append(image)
        if taken:
            yield positions[start:], *pad(taken)

    def subset(self, positions: Tensor | Sequence[int]) -> ImageSet:
        """The images at these positions, in this order, with their stable index."""
        positions = torch.as_tensor(positions, dtype=torch.int64)
        return dataclasses.replace(
            self,
            images=select(self.images, positions),
            names=[self.names[i] for i in positions.tolist()],
            labels=None if self.labels is None else self.labels[positions],
            factors={name: values[positions] for name, values in self.factors.items()},
            index=self.index[positions],  # type: ignore[index]
            stamps=None if self.stamps is None else self.stamps[positions],
            fingerprint="",
        )

    def first(self, limit: int) -> ImageSet:
        """At most `limit` images, evenly over the set, so that sorted classes are all met."""
        if len(self) <= limit:
            return self
        return self.subset(torch.arange(limit) * len(self) // limit)


def _fingerprint(images: ImageSet) -> str:
    """Of names and labels; sources that know the bytes or dates of their files give their own."""
    digest = hashlib.sha256("\0".join(images.names).encode("utf-8", "surrogatepass"))
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    return digest.hexdigest()
