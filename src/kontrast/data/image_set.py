"""A set of images with names and labels, whatever source it came from.

Legend: N images of C channels and H x W pixels (h, w if they differ from image to image), B images of a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kontrast.data.added_features import DigitOverlay, ExtraChannels, select
from kontrast.data.captions import Captions
from kontrast.data.file_columns import Names, Stamps

PIXELS = 64_000_000
"""Bytes of pixels that `iter_chunks` prepares at once, after padding to the largest image."""
GROUP = 64
"""Images that `iter_chunks` decodes together."""


class VariedImages:
    """Base of images whose sizes differ. Subclasses provide `image_at`, `images_at`, `side` and `__len__`.

    An integer gives one image with its own size, [C,h,w]. A slice or an index tensor gives center squares, resized to
    the typical side, [B,C,side,side]; `padded` keeps every pixel.
    """

    def __getitem__(self: Any, index: Any) -> Tensor:
        if isinstance(index, int):
            return self.image_at(range(len(self))[index])
        side = self.side
        return torch.stack([square(image, side) for image in self.images_at(torch.arange(len(self))[index])])

    def padded(self: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
        """[B,C,Hmax,Wmax] with each image in the upper left corner and zeros elsewhere, and sizes int64 [B,2]."""
        return pad(self.images_at(indices))


class RaggedImages(VariedImages):
    """Images of different sizes, stored end to end in one flat tensor.

    Args:
        flat: [sum of C*h*w], the pixels of all images.
        sizes: int64 [N,2], height and width of each image.
        channels: C, the same for all images.
        starts: int64 [N], where each image begins in `flat`; default: one after another.
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

    def image_at(self, index: int) -> Tensor:
        """[C,h,w], a view of the flat tensor."""
        height, width = self.sizes[index].tolist()
        start = int(self.starts[index])
        return self.flat[start : start + self.channels * height * width].view(self.channels, height, width)

    def images_at(self, indices: Tensor) -> list[Tensor]:
        """Each image with its own size, [C,h,w]."""
        return [self.image_at(index) for index in indices.tolist()]

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def select(self, indices: Tensor) -> RaggedImages:
        return RaggedImages(self.flat, self.sizes[indices], self.channels, self.starts[indices])


def pad(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad images [C,h,w] with zeros, below and to the right: [B,C,Hmax,Wmax], and their sizes int64 [B,2]."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(dim=0).tolist()
    out = torch.zeros(len(images), images[0].shape[0], height, width, dtype=images[0].dtype)
    for row, image in zip(out, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return out, sizes


def square(image: Tensor, side: int) -> Tensor:
    """[C,h,w] -> [C,side,side]: the center square, resized with antialiasing."""
    shorter = min(image.shape[1:])
    top, left = (image.shape[1] - shorter) // 2, (image.shape[2] - shorter) // 2
    image = image[:, top : top + shorter, left : left + shorter]
    if shorter == side:
        return image
    resized = torch.nn.functional.interpolate(image[None].float(), (side, side), mode="bilinear", antialias=True)
    if image.is_floating_point():
        return resized[0]
    return resized[0].round().clamp(0, torch.iinfo(image.dtype).max).to(image.dtype)


@dataclass(frozen=True)
class ImageSet:
    """A split of a data source: images, names, labels and where they came from.

    Attributes:
        images: [N,C,H,W] (perhaps memory-mapped), `RaggedImages` or `LazyImages`, with values of type uint8, uint16 or
            float32; `ExtraChannels` and `DigitOverlay` add to them.
        names: N names; of files, paths relative to `place`.
        labels: int64 [N], or None.
        classes: the names of the labels, or None.
        factors: tensors [N,...] that describe how synthetic images were made.
        name: the source as the user wrote it.
        split: "train", "test" or "all".
        has_test: whether the source has a test split.
        fingerprint: SHA-256 that changes if an image is added, removed, modified or gets another label.
        bad: (name, reason) of the files that were skipped.
        notes: how often something noteworthy was done or left out (first frames, links not followed, ...).
        index: int64 [N], the number of each image in its source, from which views are drawn; None if that is its
            position. `subset` keeps the numbers; `numbers` gives them.
        stamps: int64 [N], a hash of the position, size and date of each image's file, as a tensor or as `Stamps` that
            are computed when they are asked for; None if there are no files.
        place: the folder inside the source that `names` are relative to; "" for the source itself.
        captions: of each image, or None.
        color: whether three channels are red, green and blue, which color augmentations need.

    Example:
        >>> images = ImageSet(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), ["a", "b", "c", "d"])
        >>> len(images), images.channels, images.typical_side
        (4, 3, 8)
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
    stamps: Tensor | Stamps | None = None
    place: str = ""
    captions: Captions | None = None
    color: bool = True

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _fingerprint(self))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Tensor:
        return self.images[index]

    @property
    def ragged(self) -> bool:
        """Whether the images may have different sizes."""
        return hasattr(self.base, "padded")

    @property
    def base(self) -> Any:
        """The images as they are stored, without anything that is added to them when they are read."""
        return self.pictures.base if isinstance(self.pictures, DigitOverlay) else self.pictures

    @property
    def pictures(self) -> Any:
        """The images without extra channels."""
        return self.images.base if isinstance(self.images, ExtraChannels) else self.images

    @property
    def total(self) -> int:
        """How many images the split has, including the bad ones."""
        return getattr(self.base, "total", len(self) + len(self.bad))

    @property
    def channels(self) -> int:
        return int(self.images[0].shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values: uint8, or uint16 or float32 of sets that keep their depth."""
        return self.images[0].dtype

    @property
    def typical_side(self) -> int:
        """The median of the shorter sides, in pixels."""
        return int(min(self.images[0:1].shape[-2:]))

    @property
    def largest_side(self) -> int:
        """The largest of the shorter sides, in pixels, of images that are decoded."""
        if isinstance(self.base, RaggedImages):
            return int(self.base.sizes.min(dim=1).values.max())
        return self.typical_side

    def numbers(self, positions: Tensor | None = None) -> Tensor:
        """int64: the number in its source of the images at these positions; default: of all."""
        if self.index is None:
            return torch.arange(len(self)) if positions is None else positions
        return self.index if positions is None else self.index[positions]

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B,C,H,W]; for images of different sizes it is padded, and their sizes int64 [B,2] come with it."""
        if self.ragged:
            return self.images.padded(positions)
        return self.images[positions], None

    def iter_chunks(self, positions: Tensor, limit: int = PIXELS) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Iterate over images in chunks of at most `limit` bytes after padding (but at least one image): yields their
        positions and their `batch`."""
        if not self.ragged:
            for part in positions.split(max(1, limit // self.images[0].nbytes)):
                yield part, *self.batch(part)
            return
        taken: list[Tensor] = []
        start = tall = wide = 0
        for image in itertools.chain.from_iterable(map(self.images.images_at, positions.split(GROUP))):
            channels, height, width = image.shape
            higher, wider = max(tall, height), max(wide, width)
            if taken and (len(taken) + 1) * channels * higher * wider * image.element_size() > limit:
                yield positions[start : start + len(taken)], *pad(taken)
                start, taken, higher, wider = start + len(taken), [], height, width
            tall, wide = higher, wider
            taken.append(image)
        if taken:
            yield positions[start:], *pad(taken)

    def subset(self, positions: Tensor | Sequence[int]) -> ImageSet:
        """The images at these positions, in this order. They keep their `index`."""
        positions = torch.as_tensor(positions, dtype=torch.int64)
        return dataclasses.replace(
            self,
            images=select(self.images, positions),
            names=_strings(self.names, positions),
            labels=None if self.labels is None else self.labels[positions],
            factors={name: values[positions] for name, values in self.factors.items()},
            index=self.numbers(positions),
            stamps=_stamps(self.stamps, positions),
            captions=None if self.captions is None else self.captions.take(positions.tolist()),
            fingerprint="",
        )

    def first(self, limit: int) -> ImageSet:
        """At most `limit` images, evenly spaced, so that a set that is sorted by class gives all of its classes."""
        if len(self) <= limit:
            return self
        return self.subset(torch.arange(limit) * len(self) // limit)


def _strings(texts: Sequence[str], positions: Tensor) -> Sequence[str]:
    return texts[positions.numpy()] if isinstance(texts, Names) else [texts[i] for i in positions.tolist()]  # type: ignore[call-overload]


def _stamps(stamps: Tensor | Stamps | None, positions: Tensor) -> Tensor | Stamps | None:
    if isinstance(stamps, Stamps):
        return stamps.select(positions.numpy())
    return None if stamps is None else stamps[positions]


def _fingerprint(images: ImageSet) -> str:
    """A hash of names and labels, for sources without files; listings and stores bring their own fingerprint."""
    digest = hashlib.sha256("\0".join(images.names).encode("utf-8", "surrogatepass"))
    if images.labels is not None:
        digest.update(images.labels.numpy().tobytes())
    if images.captions is not None:
        digest.update(images.captions.digest.encode())
    return digest.hexdigest()
