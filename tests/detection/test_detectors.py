"""Detectors: the encoder's weights arrive, batch norm is as the protocol says, and every combination learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kontrast.detection import build_detector, detection_protocol, fpn_backbone, protocol_names
from kontrast.detection.backbones import freeze_batch_norm
from kontrast.detection.detectors import set_mode
from kontrast.errors import UsageError
from kontrast.networks import encoder

SMALL = {"channels": 16, "head_width": 32, "regions": 16, "mask_layers": 1, "keypoint_layers": 1}


def target(task, points=4):
    one = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    if task == "masks":
        one["masks"] = torch.zeros(1, 64, 64, dtype=torch.uint8)
        one["masks"][:, 8:40, 8:40] = 1
    if task == "keypoints":
        one["keypoints"] = torch.tensor([[[10.0, 10.0, 1.0]] * points])
    return one


@pytest.mark.parametrize("neck", ["fpn", "c4"])
@pytest.mark.parametrize("task", ["boxes", "masks", "keypoints"])
def test_every_detector_steps_and_detects(neck, task):
    torch.manual_seed(0)
    protocol = detection_protocol("canvases", {**SMALL, "neck": neck})
    network = encoder("small-resnet", width=16)
    model = build_detector(network, 2, protocol, task=task, keypoints=4)
    set_mode(model, protocol, training=True)
    losses = model([torch.rand(3, 64, 64), torch.rand(3, 64, 64)], [target(task), target(task)])
    sum(losses.values()).backward()
    grads = [p.grad for p in network.parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads) and any(g.abs().max() > 0 for g in grads)
    set_mode(model, protocol, training=False)
    with torch.no_grad():
        (out,) = model([torch.rand(3, 64, 80)])
    assert out["boxes"].shape[1] == 4 and ("masks" in out) == (task == "masks")
    assert ("keypoints" in out) == (task == "keypoints")


def test_the_encoder_is_the_backbone_itself_and_gives_its_features():
    network = encoder("resnet-18", size=224, stem="imagenet").eval()
    backbone = fpn_backbone(network).eval()
    x = torch.rand(1, 3, 64, 64)
    maps = backbone.body(x)
    assert torch.equal(maps["3"].mean((2, 3)), network(x))
    assert [64 // m.shape[-1] for m in maps.values()] == [4, 8, 16, 32]
    assert backbone.out_channels == 256


def test_frozen_batch_norm_computes_the_same_in_training_and_has_no_parameters():
    network = encoder("small-resnet", width=16)
    network.train()(torch.rand(8, 3, 32, 32))
    x, expected = torch.rand(2, 3, 32, 32), network.eval()(torch.rand(1, 3, 32, 32))
    expected = network.eval()(x)
    frozen = freeze_batch_norm(copy.deepcopy(network)).train()
    assert torch.allclose(frozen(x), expected, atol=1e-6)
    assert all(p.ndim == 4 for p in frozen.parameters())


def test_batch_norm_and_frozen_stages_are_as_the_protocol_says():
    network = encoder("small-resnet", width=16)
    model = build_detector(network, 2, detection_protocol("canvases", {**SMALL, "frozen_stages": 2}))
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert fixed and all(
        name.startswith(("backbone.body.conv1", "backbone.body.bn1", "backbone.body.layer1")) for name in fixed
    )
    assert any("layer1" in name for name in fixed)
    for norm, kind in (("frozen", "FrozenBatchNorm2d"), ("trained", "BatchNorm2d"), ("sync", "JoinedBatchNorm")):
        built = build_detector(
            encoder("small-resnet", width=16), 2, detection_protocol("canvases", {**SMALL, "norm": norm})
        )
        assert type(built.backbone.body.bn1).__name__ == kind
        assert any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in built.backbone.fpn.modules())


def test_the_papers_protocols_have_their_shapes_and_schedules():
    """JCL's section 4.3 and CACR's C.2: 16 images, 0.02, and the papers' steps; nothing is frozen."""
    voc, coco, jcl = (detection_protocol(name) for name in ("cacr-voc", "cacr-coco", "jcl-coco"))
    assert (voc.neck, coco.neck, jcl.neck) == ("c4", "c4", "fpn")
    assert (voc.steps, voc.milestones, voc.warmup) == (24_000, (18_000, 22_000), 100)
    assert (voc.short_sides[0], voc.short_sides[-1], voc.test_side) == (480, 800, 800)
    for one in (coco, jcl):
        assert (one.steps, one.milestones, one.warmup) == (90_000, (60_000, 80_000), 1000)
        assert (one.short_sides[0], one.short_sides[-1], one.longest) == (640, 800, 1333)
    for one in (voc, coco, jcl):
        assert (one.batch, one.lr, one.momentum, one.weight_decay, one.norm_decay) == (16, 0.02, 0.9, 1e-4, 0)
        assert one.norm == "sync" and one.neck_norm and not one.frozen_stages
        assert [one.rate(step) / one.lr for step in (one.warmup, *map(int, one.milestones))] == pytest.approx(
            [1, 0.1, 0.01]
        )
        assert one.rate(0) == pytest.approx(one.lr / one.warmup)


def test_a_c4_detector_of_voc_has_the_papers_parts():
    model = build_detector(encoder("resnet-50", size=224, stem="imagenet"), 20, detection_protocol("cacr-voc"))
    assert 33.1e6 < sum(p.numel() for p in model.parameters()) < 33.3e6
    assert model.rpn.anchor_generator.sizes == ((32, 64, 128, 256, 512),)
    assert model.backbone.out_channels == 1024 and model.roi_heads.box_head.norm.num_features == 2048
    masks = build_detector(
        encoder("resnet-50", size=224, stem="imagenet"), 80, detection_protocol("cacr-coco"), task="masks"
    )
    assert masks.roi_heads.mask_head is masks.roi_heads.box_head.stage


def test_an_fpn_detector_of_coco_has_the_papers_parts():
    model = build_detector(encoder("resnet-50", size=224, stem="imagenet"), 80, detection_protocol("jcl-coco"))
    assert model.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert model.backbone.out_channels == 256 and model.roi_heads.box_head.fc6.out_features == 1024


@pytest.mark.parametrize("name", protocol_names())
def test_protocols_have_a_title_and_refuse_unknown_keys(name):
    assert detection_protocol(name).title
    with pytest.raises(UsageError, match=r"unknown key 'step'.*did you mean 'steps'"):
        detection_protocol(name, ["step=3"])


def test_wrong_protocols_and_encoders_are_one_clear_line():
    with pytest.raises(UsageError, match=r"unknown protocol 'cacr-coc'.*cacr-coco"):
        detection_protocol("cacr-coc")
    with pytest.raises(UsageError, match="must be at least 1"):
        detection_protocol("canvases", ["batch=0"])
    with pytest.raises(UsageError, match="needs a ResNet, not SmallConv"):
        fpn_backbone(encoder("small-conv", width=16))
    with pytest.raises(UsageError, match="color images"):
        fpn_backbone(encoder("small-resnet", width=16, channels=1))
