"""`iter_chunks` divides images into chunks that fit into memory and keeps the size of each image."""

from __future__ import annotations

import pytest
import torch

from kontrast.config.recipe_files import resolve
from kontrast.data import ImageSet
from kontrast.data.added_features import ExtraChannels
from kontrast.data.image_set import RaggedImages
from kontrast.probes import extract_features
from kontrast.training.build import evaluation_view


def ragged_set(sizes: list[tuple[int, int]], planes: int = 0) -> ImageSet:
    made = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=made) for size in sizes]
    pictures = RaggedImages(torch.cat([image.flatten() for image in images]), torch.tensor(sizes))
    if planes:
        pictures = ExtraChannels(
            pictures, torch.randint(0, 256, (len(sizes), planes), dtype=torch.uint8, generator=made)
        )
    return ImageSet(pictures, [str(n) for n in range(len(sizes))])


def test_a_chunk_never_exceeds_its_limit():
    uniform = ImageSet(torch.zeros(100, 3, 32, 32, dtype=torch.uint8), [str(n) for n in range(100)])
    for images in (uniform, ragged_set([(32, 32)] * 100)):
        taken = [part for part, _, _ in images.iter_chunks(torch.arange(100), limit=10 * 3 * 32 * 32)]
        assert [len(part) for part in taken] == [10] * 10 and torch.cat(taken).tolist() == list(range(100))
        assert [len(part) for part, _, _ in images.iter_chunks(torch.arange(3), limit=1)] == [1, 1, 1]
        assert list(images.iter_chunks(torch.arange(0))) == [] or images is uniform


@pytest.mark.parametrize("planes", [0, 2])
def test_chunks_together_are_the_images(planes):
    images = ragged_set([(8, 8), (20, 9), (7, 30), (3, 3), (40, 40)] * 30, planes)
    asked, seen = torch.arange(150).flip(0), []
    for positions, pixels, sizes in images.iter_chunks(asked, limit=20_000):
        assert pixels.numel() <= 20_000 and len(positions) == len(pixels) == len(sizes)
        for position, image, (height, width) in zip(positions.tolist(), pixels, sizes.tolist()):
            assert torch.equal(image[:, :height, :width], images.images[position])
        seen.append(positions)
    assert torch.equal(torch.cat(seen), asked) and len(seen) > 2


def test_the_features_of_an_image_do_not_depend_on_its_chunk():
    """Probes see what `embed` sees: each image with its own size, not a square of the median side."""
    view, flat = evaluation_view(resolve("cifar10/simclr")), torch.nn.Flatten()
    small, large = ragged_set([(90, 60), *[(12, 12)] * 6]), ragged_set([(90, 60), *[(200, 220)] * 6])
    found = [extract_features(flat, images, view, device="cpu")[0] for images in (small, large)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    one = extract_features(flat, small.subset([0]), view, device="cpu")[0]
    torch.testing.assert_close(found[0], one, rtol=1e-5, atol=1e-5)
