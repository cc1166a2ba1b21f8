"""The models of timm and torchvision that are equal to an encoder: same tensors, same features."""

from __future__ import annotations

import pytest
import torch
from torchvision import models

from kontrast import networks
from kontrast.errors import UsageError
from kontrast.networks.counterparts import TORCHVISION_VITS, counterpart, torchvision_name


def shifted(name: str, size: int = 64, channels: int = 3, **arguments) -> networks.Encoder:
    """Return an encoder in eval mode whose normalization layers differ from their initial state."""
    torch.manual_seed(0)
    encoder = networks.encoder(name, size=size, channels=channels, **arguments)
    for tensor in encoder.state_dict().values():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.add_(0.1 * torch.rand_like(tensor))
    return encoder.eval()


def torchvision_features(found, encoder, x):
    model = models.get_model(found.name, weights=None, **found.arguments).eval()
    loaded = model.load_state_dict(found.tensors(encoder.state_dict()), strict=False)
    assert loaded.unexpected_keys == []
    assert sorted(loaded.missing_keys) == [f"{found.classifier}.bias", f"{found.classifier}.weight"]
    model.set_submodule(found.classifier, torch.nn.Identity())
    return model(x)


@pytest.mark.parametrize("name", ["resnet-18", pytest.param("resnet-50", marks=pytest.mark.slow)])
def test_a_resnet_is_torchvisions(name):
    encoder, x = shifted(name, stem="imagenet"), torch.rand(2, 3, 64, 64)
    found = counterpart("torchvision", name, {"stem": "imagenet"}, encoder)
    torch.testing.assert_close(torchvision_features(found, encoder, x), encoder(x), rtol=0, atol=1e-5)


def test_a_vit_is_torchvisions_under_other_names(monkeypatch):
    """A small ViT in place of vit-base, which has the same names and takes seconds."""
    from kontrast.networks import counterparts

    encoder, x = shifted("vit-tiny", size=32, patch=16), torch.rand(2, 3, 32, 32)
    monkeypatch.setitem(counterparts.TORCHVISION_VITS, ("vit-tiny", 16), "vit_b_16")
    found = counterpart("torchvision", "vit-tiny", {"patch": 16}, encoder)
    assert found.arguments == {"image_size": 32} and found.name == "vit_b_16"
    theirs = models.VisionTransformer(32, 16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768).eval()
    loaded = theirs.load_state_dict(found.tensors(encoder.state_dict()), strict=False)
    assert loaded.unexpected_keys == [] and sorted(loaded.missing_keys) == ["heads.head.bias", "heads.head.weight"]
    theirs.heads = torch.nn.Identity()
    torch.testing.assert_close(theirs(x), encoder(x), rtol=0, atol=1e-5)


def test_every_vit_that_torchvision_has_by_its_shapes():
    for (name, patch), theirs in TORCHVISION_VITS.items():
        with torch.device("meta"):
            encoder = networks.encoder(name, size=224, patch=patch)
            model = models.get_model(theirs, weights=None)
        ours = {torchvision_name(key): tensor.shape for key, tensor in encoder.state_dict().items()}
        assert ours == {k: t.shape for k, t in model.state_dict().items() if not k.startswith("heads.")}


TIMM = [
    ("resnet-18", {"stem": "imagenet"}, 3),
    ("resnet-18", {"stem": "imagenet"}, 1),
    ("vit-tiny", {}, 3),
    ("vit-small-moco", {"patch": 16}, 3),
    ("timm:resnet10t", {}, 4),
    ("timm:vit_tiny_patch16_224", {"patch_size": 8}, 3),
]


@pytest.mark.parametrize(("name", "arguments", "channels"), TIMM)
def test_encoders_that_are_timms(name, arguments, channels):
    timm = pytest.importorskip("timm", reason="needs the extra kontrast[timm]")
    encoder, x = shifted(name, channels=channels, **arguments), torch.rand(2, channels, 64, 64)
    found = counterpart("timm", name, arguments, encoder)
    model = timm.create_model(found.name, num_classes=0, **found.arguments).eval()
    model.load_state_dict(found.tensors(encoder.state_dict()))
    torch.testing.assert_close(model(x), encoder(x), rtol=0, atol=1e-5)
    whole = timm.create_model(found.name, num_classes=5, **found.arguments)
    assert f"{found.classifier}.weight" in whole.state_dict() and f"{found.first}.weight" in whole.state_dict()


@pytest.mark.parametrize(
    ("library", "name", "arguments", "reason"),
    [
        ("timm", "small-conv", {}, "timm has no model like it; formats for it: hub, safetensors or onnx"),
        ("timm", "resnet-18", {"stem": "cifar"}, "train with encoder.stem=imagenet"),
        ("torchvision", "resnet-18", {"stem": "small"}, "train with encoder.stem=imagenet"),
        ("torchvision", "vit-tiny", {}, "only has vit-base .*formats for it: timm, hub"),
        ("timm", "torchvision:resnet18", {}, "formats for it: torchvision, hub"),
    ],
)
def test_an_encoder_without_an_equal_model_is_refused(library, name, arguments, reason):
    encoder = networks.encoder(name, size=32, **arguments)
    with pytest.raises(UsageError, match=reason):
        counterpart(library, name, arguments, encoder)


def test_torchvision_takes_three_channels():
    for name in ("resnet-18", "torchvision:resnet18"):
        encoder = networks.encoder(name, size=64, channels=1, **({"stem": "imagenet"} if name == "resnet-18" else {}))
        with pytest.raises(UsageError, match="3 channels, not 1"):
            counterpart("torchvision", name, {}, encoder)
