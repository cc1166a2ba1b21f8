"""Encoders: sizes by the papers, torchvision's and timm's numbers with their weights, and errors."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context

import pytest
import torch

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.networks import ENCODERS, Teacher, encoder, head
from kontrast.networks.resnet import ShortcutConvolution
from kontrast.networks.vit import DropPath

QUICK = [n for n in ENCODERS if n not in ("resnet-101", "vit-base")]


def count(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())


@pytest.mark.parametrize("name", QUICK)
def test_every_encoder_has_its_width_and_takes_extra_channels(name):
    module = encoder(name, channels=5, size=32).eval()
    with torch.no_grad():
        features = module(torch.rand(2, 5, 32, 32))
    assert features.shape == (2, module.width)
    assert (module.size, module.channels) == (32, 5)
    assert torch.isfinite(features).all() and features.std() > 0


@pytest.mark.parametrize(("size", "millions"), [(64, 58.68), (32, 27.22)])
def test_small_alexnet_has_the_papers_parameters(size, millions):
    alexnet = encoder("small-alexnet", size=size)
    assert round(count(alexnet, head("fc8", alexnet.width)) / 1e6, 2) == millions
    weights = torch.cat([p.flatten() for n, p in alexnet.named_parameters() if p.ndim > 1])
    assert abs(weights.std() - 0.02) < 1e-4


def test_convn_shrinks_28_pixels_to_256_features():
    convn = encoder("convn", size=28, channels=3)
    assert convn.dense[0].in_features == 256 and convn.width == 128
    assert (convn.dense[1].eps, round(convn.dense[1].momentum, 6)) == (1e-3, 0.01)
    wide = encoder("convn", size=28, multiplier=2.0)
    assert wide.dense[0].in_features == 512 and wide.width == 256
    projector = head("convn", convn.width)
    assert [m.out_features for m in projector if isinstance(m, torch.nn.Linear)] == [256, 64]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_equals_torchvision_with_its_weights(name):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    theirs = getattr(models, name)(weights=None)
    for m in theirs.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(m.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(m.running_var, 0.5, 2.0)
    theirs.fc = torch.nn.Identity()
    ours = encoder(f"resnet-{name[6:]}", size=64, stem="imagenet")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
        torch.testing.assert_close(ours.train()(x), theirs.train()(x))


def train_a_narrow_shortcut() -> None:
    torch.manual_seed(0)
    layer, x = ShortcutConvolution(8, 16, 2), torch.randn(16, 8, 64, 64)
    layer.to(memory_format=torch.channels_last)
    for _ in range(5):
        layer.zero_grad()
        layer(x.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    weight = layer.weight.detach().double().requires_grad_()
    torch.nn.functional.conv2d(x.double(), weight, stride=2).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-2)


def test_a_narrow_shortcut_keeps_to_its_memory():
    """The check is a process of its own, because torch's own convolution ends it with a segmentation fault."""
    process = get_context("fork").Process(target=train_a_narrow_shortcut)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_the_stem_follows_the_size():
    small, large = encoder("resnet-18", size=32), encoder("resnet-18", size=224)
    assert small.conv1.kernel_size == (3, 3) and small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, torch.nn.Identity)
    assert large.conv1.kernel_size == (7, 7) and isinstance(large.maxpool, torch.nn.MaxPool2d)


def test_zero_init_makes_every_block_its_shortcut():
    resnet = encoder("resnet-50", zero_init=True)
    assert all(block.bn3.weight.abs().sum() == 0 for block in resnet.layer2)


def test_vit_equals_timm_with_its_weights():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, patch_size=4)
    ours = encoder("vit-tiny", size=32)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_vit_depends_on_positions_and_takes_local_crops():
    vit = encoder("vit-tiny", size=32).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert (vit(x) - vit(x.flip(3))).abs().max() > 1e-4
        assert vit(torch.rand(2, 3, 16, 16)).shape == (2, 192)
        wide = torch.rand(1, 3, 16, 32)
        tall = encoder("vit-tiny", size=32).eval()
        tall.load_state_dict(vit.state_dict())
        grid = vit.pos_embed[:, 1:].reshape(1, 8, 8, -1).transpose(1, 2).flatten(1, 2)
        tall.pos_embed.copy_(torch.cat([vit.pos_embed[:, :1], grid], 1))
        tall.patch_embed.proj.weight.copy_(vit.patch_embed.proj.weight.transpose(2, 3))
        torch.testing.assert_close(vit(wide), tall(wide.transpose(2, 3)))  # transposed in all three: the same
    assert not vit.pos_embed.requires_grad
    assert encoder("vit-tiny", positions="learned").pos_embed.requires_grad


def test_frozen_patches_get_no_gradient():
    vit = encoder("vit-tiny", frozen_patches=True)
    vit(torch.rand(2, 3, 32, 32)).sum().backward()
    assert vit.patch_embed.proj.weight.grad is None
    assert vit.blocks[0].attn.qkv.weight.grad is not None


def test_sin_cos_positions_are_distinct_and_equivariant():
    from kontrast.networks.vit import sine_cosine

    grid = sine_cosine(8, 32).reshape(8, 8, 32)
    assert torch.unique(grid.reshape(64, 32), dim=0).shape[0] == 64
    inner = (grid[0, 0] * grid[2, 3]).sum(), (grid[4, 1] * grid[6, 4]).sum()
    torch.testing.assert_close(*inner)  # the product depends on the distance alone


@pytest.mark.parametrize("name", ["torchvision:resnet18", "torchvision:convnext_tiny"])
def test_torchvision_models_by_name(name):
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    module = encoder(name, channels=4, size=64)
    assert module.eval()(torch.rand(2, 4, 64, 64)).shape == (2, module.width)


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 96)])
def test_models_with_auxiliary_classifiers_have_one_output_in_training(name, size):
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    module = encoder(f"torchvision:{name}", size=size)
    assert module.train()(torch.rand(2, 3, size, size)).shape == (2, module.width)


def test_images_too_small_for_an_external_model_are_an_error():
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    with pytest.raises(UsageError, match=r"torchvision:alexnet.* 32 pixels") as caught:
        encoder("torchvision:alexnet", size=32)
    assert "\n" not in str(caught.value)


def test_timm_models_by_name():
    try:
        import timm  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentFault, match="pip install timm"):
            encoder("timm:resnet18")
        return
    module = encoder("timm:resnet18", channels=4, size=64)
    assert module.eval()(torch.rand(2, 4, 64, 64)).shape == (2, module.width)


@pytest.mark.parametrize(
    ("name", "arguments", "hint"),
    [
        ("resnet-81", {}, "'resnet-18'"),
        ("resnet-18", {"stm": "cifar"}, "'stem'"),
        ("resnet-18", {"stem": "cifr"}, "'cifar'"),
        ("resnet-18", {"channels": 0}, "channels = 0"),
        ("torchvison:resnet18", {}, "torchvision:NAME"),
        ("vit-tiny", {"size": 30}, "size = 30.* 4"),
        ("small-alexnet", {"size": 8}, "size = 8.* 15"),
        ("small-conv", {"width": 12}, "width = 12.* 8"),
        ("convn", {"multiplier": 0.0}, "multiplier = 0.0"),
        ("convn", {"multiplier": 1e308}, "multiplier = 1e.308.* 1000"),
        ("convn", {"multiplier": 2**63 - 1}, "multiplier.* 1000"),
        ("small-resnet", {"depth": 2**63 - 1}, "depth = 9223372036854775807.* 1000"),
        ("resnet-18", {"zero_init": "false"}, "zero_init = 'false'"),
    ],
)
def test_bad_arguments_are_errors_of_one_line(name, arguments, hint):
    with pytest.raises(UsageError, match=hint) as caught:
        encoder(name, **arguments)
    assert "\n" not in str(caught.value)


def test_networks_and_probes_import_neither_torchvision_nor_torch_compiler():
    """Importing either takes seconds, so embedding and probing must start without them."""
    program = (
        "import sys, torch; from kontrast.networks import encoder; from kontrast.probes import *;"
        "x = torch.randint(0, 255, (40, 3, 32, 32), dtype=torch.uint8); y = torch.arange(40) % 2;"
        "f = extract_features(encoder('small-conv', width=16), x);"
        "[p(f, y, f, y) for p in (knn, logistic)]; linear(f, y, f, y, 'cacr');"
        "print([m for m in ('torchvision', 'torch._dynamo', 'sympy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_drop_path_leaves_out_branches_of_random_images_and_keeps_their_mean():
    """The teacher leaves nothing out, and evaluation neither."""
    torch.manual_seed(0)
    dropping = DropPath(0.25)
    y = dropping(torch.ones(4000, 2))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75]) and torch.equal(y[:, 0], y[:, 1])
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(dropping.eval()(torch.ones(4, 2)), torch.ones(4, 2))
    vit = encoder("vit-tiny", size=16, drop_path=0.5)
    assert [block.drop_path.drop_prob for block in vit.blocks][::11] == [0.0, 0.5]
    x = torch.randn(6, 3, 16, 16)
    assert not torch.equal(vit(x), vit(x))
    teacher = Teacher(vit)
    assert torch.equal(teacher(x), teacher(x))
    with pytest.raises(UsageError, match="drop_path = 1"):
        encoder("vit-tiny", size=16, drop_path=1)
