"""The order of batches depends on seed and epoch alone, for any number of ranks and any step to resume at."""

from __future__ import annotations

import pytest
import torch

from kontrast.data import Feeder, ImageSet, RaggedImages
from kontrast.data.competing_features import random_bits
from kontrast.errors import DataError, UsageError


def numbered(count: int) -> ImageSet:
    """Image i is filled with i."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 4, 4).contiguous()
    return ImageSet(images=pixels, names=[str(i) for i in range(count)], labels=torch.arange(count) % 10)


def test_an_epoch_has_every_image_once_and_the_next_has_another_order():
    feeder = Feeder(numbered(200), 25, seed=3)
    orders = [torch.cat([b.indices for b in feeder.batches(epoch)]) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(200))
    assert not torch.equal(*orders)
    assert feeder.steps_per_epoch == 8 and Feeder(numbered(200), 32).steps_per_epoch == 6


def test_the_order_is_pinned():
    """A change of this list changes every run of every user."""
    assert Feeder(numbered(10), 5, seed=0).order(0).tolist() == Feeder(numbered(10), 2, seed=0).order(0).tolist()
    assert Feeder(numbered(10), 5, seed=0).order(0).tolist() == [3, 2, 5, 6, 4, 7, 1, 0, 9, 8]


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_an_epoch_resumes_at_step_137_bit_for_bit(resident):
    data = numbered(250)
    whole = list(Feeder(data, 1, seed=5, resident="yes").batches(2))
    rest = list(Feeder(data, 1, seed=5, resident=resident).batches(2, start=137))
    assert [b.step for b in rest] == list(range(137, 250))
    for a, b in zip(whole[137:], rest):
        assert torch.equal(a.images, b.images) and torch.equal(a.indices, b.indices) and torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_together_get_the_batch_of_one_process(world):
    data = numbered(103)
    one = list(Feeder(data, 16, seed=1).batches(0))
    feeders = [Feeder(data, 16, seed=1, rank=r, world=world) for r in range(world)]
    for step, parts in enumerate(zip(*(f.batches(0) for f in feeders), strict=True)):
        assert torch.equal(torch.cat([p.indices for p in parts]), one[step].indices)
        assert torch.equal(torch.cat([p.images for p in parts]), one[step].images)


def test_the_images_of_a_subset_keep_their_indices():
    part = numbered(100).subset(torch.arange(0, 100, 3))
    batch = next(iter(Feeder(part, 8).batches(0)))
    assert torch.equal(batch.images[:, 0, 0, 0].long(), batch.indices)
    assert torch.equal(batch.labels, batch.indices % 10)


def test_ragged_images_are_padded_with_their_sizes():
    sizes = torch.tensor([[2, 3], [4, 1], [3, 3]])
    flat = torch.cat([torch.full((int(3 * h * w),), i + 1, dtype=torch.uint8) for i, (h, w) in enumerate(sizes)])
    data = ImageSet(images=RaggedImages(flat, sizes), names=["a", "b", "c"])
    batch = next(iter(Feeder(data, 3, resident="no").batches(0)))
    assert batch.images.shape == (3, 3, 4, 3)
    for image, (h, w), index in zip(batch.images, batch.sizes.tolist(), batch.indices.tolist()):
        assert [h, w] == sizes[index].tolist()
        assert (image[:, :h, :w] == index + 1).all() and image.sum() == 3 * h * w * (index + 1)


def test_a_batch_has_the_added_channels():
    batch = next(iter(Feeder(random_bits(numbered(50), 4), 8, resident="no").batches(0)))
    assert batch.images.shape == (8, 7, 4, 4)
    assert torch.equal(batch.images[:, 0, 0, 0].long(), batch.indices)


def test_fewer_images_than_a_batch_are_an_error_unless_allowed():
    with pytest.raises(DataError, match=r"5 images .* fewer than one batch of 8"):
        Feeder(numbered(5), 8)
    assert Feeder(numbered(5), 8, allow_small=True).batch == 5
    assert Feeder(numbered(5), 8, allow_small=True, world=2).batch == 4
    with pytest.raises(UsageError, match="multiple of 3"):
        Feeder(numbered(20), 8, world=3)


def test_an_abandoned_epoch_leaves_no_thread_behind():
    import threading

    batches = Feeder(numbered(200), 4, resident="no").batches(0)
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "kontrast-feeder"]


def test_an_error_while_reading_is_raised_in_the_loop():
    data = numbered(20)
    object.__setattr__(data, "images", _Vanished())
    with pytest.raises(OSError, match="storage gone"):
        next(Feeder(data, 4, resident="no").batches(0))


class _Vanished:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        raise OSError("storage gone")


@pytest.mark.gpu
def test_batches_on_the_gpu_equal_those_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = random_bits(numbered(100), 3)
    for resident in ("yes", "no"):
        for a, b in zip(Feeder(data, 8).batches(1), Feeder(data, 8, device="cuda", resident=resident).batches(1)):
            assert torch.equal(a.images, b.images.cpu()) and torch.equal(a.indices, b.indices.cpu())
