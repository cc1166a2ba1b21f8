"""What callers rely on: shapes, layouts, channels, draws that depend only on keys, clear errors."""

from __future__ import annotations

import pytest
import torch

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.views import POLICIES, Policy, Views, keys

B = 7


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (B, 3, 26, 31), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def image_keys():
    return keys(0, 0, torch.arange(B))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_makes_views(name, images, image_keys):
    views = Views(name, 3, 20)(images, image_keys)
    assert views.shape == (3, B, 3, 20, 20)
    assert views.dtype == torch.float32
    assert views.isfinite().all()
    chance = POLICIES.build(name)[0].crop_scale is not None
    assert torch.equal(views[0], views[1]) != chance


@pytest.mark.parametrize("name", ["moco-v3", "simclr", "cacr-cifar", "evaluate"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_batch_cannot_change_a_view(name, threads, images, image_keys):
    """Split, permuted or one by one, bit for bit; on one thread and two."""
    torch.set_num_threads(threads)
    try:
        views = Views(name, 2, 24)
        together = views(images, image_keys)
        order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
        assert torch.equal(views(images[order], image_keys[order]), together[:, order])
        halves = [views(images[part], image_keys[part]) for part in (slice(0, 3), slice(3, B))]
        assert torch.equal(torch.cat(halves, 1), together)
        single = [views(images[b : b + 1], image_keys[b : b + 1]) for b in range(B)]
        assert torch.equal(torch.cat(single, 1), together)
        assert torch.equal(Views(name, 1, 24)(images, image_keys), together[:1])
    finally:
        torch.set_num_threads(1)


def test_a_large_lone_view_is_the_same_on_two_threads():
    """The mean that contrast needs is summed in an order that threads can't change."""
    image = torch.randint(0, 256, (2, 3, 60, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views, image_keys = Views("cacr-stl", 1, 200), keys(0, 0, torch.arange(2))
    alone = views(image[:1], image_keys[:1])
    torch.set_num_threads(2)
    try:
        assert torch.equal(views(image[:1], image_keys[:1]), alone)
        assert torch.equal(views(image, image_keys)[:, :1], alone)
    finally:
        torch.set_num_threads(1)


def test_seed_epoch_and_index_each_change_the_views(images):
    views = Views("simclr-cifar", 2, 24)
    base = views(images, keys(0, 0, torch.arange(B)))
    for other in (keys(1, 0, torch.arange(B)), keys(0, 1, torch.arange(B)), keys(0, 0, torch.arange(B) + B)):
        assert not torch.equal(views(images, other), base)
    assert torch.equal(views(images, keys(0, 0, torch.arange(B))), base)


def test_multi_crop(images, image_keys):
    """Adding local views leaves the global ones unchanged; local views are small crops."""
    views = Views("moco-v2", 2, 24, local_count=3, local_size=12, local_scale=(0.05, 0.1))
    whole, local = views(images, image_keys)
    assert torch.equal(whole, Views("moco-v2", 2, 24)(images, image_keys))
    assert local.shape == (3, B, 3, 12, 12)
    assert {p.crop_scale for p in views.local_policies} == {(0.05, 0.1)}
    five = Views("moco-v2", 5, 12, crop_scale=(0.05, 0.1))(images, image_keys)
    assert torch.equal(local, five[2:])


def test_local_views_can_have_a_policy_of_their_own(images, image_keys):
    """DINO blurs half of the local crops and solarizes none; settings of the views hold for both."""
    views = Views("moco-v3", 2, 24, local_count=3, local_size=12, local_policy="dino-local", gray=0.3)
    assert [(p.blur, p.solarize, p.gray) for p in views.policies] == [(1.0, 0.0, 0.3), (0.1, 0.2, 0.3)]
    assert [(p.blur, p.solarize, p.gray) for p in views.local_policies] == [(0.5, 0.0, 0.3)] * 3
    whole, local = views(images, image_keys)
    assert torch.equal(whole, Views("moco-v3", 2, 24, gray=0.3)(images, image_keys))
    alone = Views("dino-local", 5, 12, crop_scale=(0.05, 0.14), gray=0.3)(images, image_keys)
    assert torch.equal(local, alone[2:])
    with pytest.raises(UsageError, match="the same blur_kernel"):
        Views("moco-v3", 2, 24, local_count=1, local_size=12, local_policy="hcl-cifar", mean=(0.5,))


@pytest.mark.parametrize("name", ["simclr", "evaluate", "dcl"])
def test_padding_is_not_visible(name, images, image_keys):
    """In a padded batch, pixels outside an image's size don't change its views."""
    sizes = torch.stack([torch.arange(20, 20 + B), torch.arange(31, 31 - B, -1)], 1)
    views = Views(name, 2, 16)
    padded = views(images, image_keys, sizes)
    garbage = images.clone()
    for b, (height, width) in enumerate(sizes.tolist()):
        garbage[b, :, height:], garbage[b, :, :, width:] = 255, 255
        alone = views(images[b : b + 1, :, :height, :width].contiguous(), image_keys[b : b + 1])
        torch.testing.assert_close(padded[:, b], alone[:, 0], atol=1e-5, rtol=0)
    assert torch.equal(views(garbage, image_keys, sizes), padded)


@pytest.mark.parametrize("channels, picture", [(1, 1), (2, 1), (3, 3), (5, 3)])
def test_channels_after_the_picture_pass_unchanged(channels, picture, image_keys):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (B, channels, 20, 20), dtype=torch.uint8, generator=generator)
    images[:, picture:] = (
        torch.randint(0, 2, (B, channels - picture, 1, 1), dtype=torch.uint8, generator=generator) * 255
    )
    views = Views("cacr-cifar", 2, 16, planes=channels - picture)(images, image_keys)
    assert views.shape == (2, B, channels, 16, 16)
    assert torch.equal(views[:, :, picture:], (images[:, picture:, :16, :16] / 255).expand(2, -1, -1, -1, -1))
    only = Views("cacr-cifar", 2, 16)(images[:, :picture].contiguous(), image_keys)
    assert torch.equal(views[:, :, :picture], only)


def test_randbit_mnist_has_one_picture_channel(image_keys):
    """A digit and two bits have three channels but are not a color picture."""
    images = torch.randint(0, 256, (B, 3, 28, 28), dtype=torch.uint8)
    images[:, 1:] = torch.tensor([0, 255], dtype=torch.uint8)[None, :, None, None]
    views = Views("randbit-mnist", 2, 28)(images, image_keys)
    assert (views[:, :, 1] == 0).all()
    assert (views[:, :, 2] == 1).all()
    assert views[:, :, 0].min() >= 0
    assert views[:, :, 0].max() <= 1


def test_layout_and_dtype(images, image_keys):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        views = Views("moco-v2", 2, 16, dtype=dtype)(images, image_keys)
        flat = views.flatten(0, 1)
        assert views.dtype == dtype
        assert flat.data_ptr() == views.data_ptr()
        assert flat.is_contiguous(memory_format=torch.channels_last)
    plain = Views("moco-v2", 2, 16, channels_last=False)(images, image_keys)
    assert plain.is_contiguous()
    assert torch.equal(plain, Views("moco-v2", 2, 16)(images, image_keys))


def test_per_view_policies(image_keys):
    """MoCo v3: view 1 always blurred and never solarized, view 2 seldom blurred; further views in turn."""
    views = Views("moco-v3", 4, 16)
    assert [p.blur for p in views.policies] == [1.0, 0.1, 1.0, 0.1]
    many = keys(0, 0, torch.arange(500))
    drawn = views.draw(many, torch.full((500, 2), 40))
    assert drawn.blur[0].all()
    assert not drawn.solarize[0].any()
    assert 20 < drawn.blur[1].sum() < 90
    assert 60 < drawn.solarize[1].sum() < 150


def test_overrides(images, image_keys):
    views = Views("simclr-cifar", 1, 24, crop_scale=[0.5, 1.0], flip=0, jitter_p=0.0, gray=0.0, mean=[0.5], std=[0.25])
    assert views.policies[0].crop_scale == (0.5, 1.0)
    plain = Views(Policy(crop_scale=(0.5, 1.0), flip=0.0), 1, 24)(images, image_keys)
    torch.testing.assert_close(views(images, image_keys), (plain - 0.5) / 0.25)


def test_fields_of_old_recipes_have_new_names():
    (policy,) = Views("evaluate", 1, colours=1, centre_fraction=0.5).policies
    assert (policy.colors, policy.center_fraction) == (1, 0.5)


def test_digits_are_never_mirrored():
    for name in ("digits", "randbit-mnist"):
        assert not Views(name).draw(keys(0, 0, torch.arange(500)), torch.full((500, 2), 32)).flip.any()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"policy": "simclr-cifr"}, "'simclr-cifar'"),
        ({"size": 0}, "size is 0"),
        ({"size": 2.5}, "size is 2.5"),
        ({"count": 0}, "count is 0"),
        ({"local_count": 2}, "local_size is None"),
        ({"dtype": torch.int32}, "int32.*bfloat16"),
        ({"crop_scal": (0.2, 1)}, "'crop_scale'"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"crop_scale": (0.5, 0.2)}, "crop_scale"),
        ({"crop_scale": 0.2}, "crop_scale"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"flip": "often"}, "flip is 'often'"),
        ({"crop_scale": 0.5}, "crop_scale is 0.5; .* 2 numbers"),
        ({"cuont": 3}, "'count'"),
        ({"jitter": (0.4, 0.4, 0.4)}, "jitter"),
        ({"jitter": (0.4, 0.4, 0.4, 0.7)}, "hue"),
        ({"std": (0.0,)}, "std"),
        ({"interpolation": "nearest"}, "interpolation is .nearest.*bicubic"),
        ({"implementation": "cuda"}, "implementation is cuda.*triton"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(UsageError, match=message):
        Views(**{"policy": "simclr-cifar", **arguments})


def test_views_of_one_call_must_share_some_fields():
    with pytest.raises(UsageError, match="mean"):
        Views([Policy(), Policy(mean=(0.5,))])
    with pytest.raises(UsageError, match="no policy"):
        Views([])


def test_bad_images(images, image_keys):
    views = Views("simclr-cifar", 2, 16)
    for wrong in (images.float(), images[0], images.numpy(), images[:0], images[:, :, :0]):
        with pytest.raises(UsageError, match="uint8 images"):
            views(wrong, image_keys)
    for wrong in (image_keys[:3], image_keys.int(), image_keys.float(), image_keys[None], [1] * B):
        with pytest.raises(UsageError, match="int64 key"):
            views(images, wrong)
    for wrong in (torch.ones(B, dtype=torch.int64), torch.ones(B, 2)):
        with pytest.raises(UsageError, match="sizes"):
            views(images, image_keys, wrong)


def test_fused_views_need_a_cuda_device(images, image_keys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EnvironmentFault, match="CUDA"):
        Views("simclr-cifar", 2, 16, implementation="triton")(images, image_keys)


def test_one_pixel_images(image_keys):
    images = torch.full((B, 3, 1, 1), 100, dtype=torch.uint8)
    views = Views("crop-flip", 2, 16, mean=(0.0,), std=(1.0,))(images, image_keys)
    torch.testing.assert_close(views, torch.full_like(views, 100 / 255))


@pytest.mark.parametrize("sizes", [[[27, 20]], [[0, 5]], [[5, 32]]])
def test_sizes_larger_than_the_images_are_an_error(sizes, images, image_keys):
    """They would give views of NaN."""
    given = torch.tensor([*sizes, *[[26, 31]] * (B - 1)])
    with pytest.raises(UsageError, match=r"sizes .*\[26, 31\]"):
        Views("moco-v2", 2, 20)(images, image_keys, given)
