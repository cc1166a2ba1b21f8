"""Networks that are compiled block by block give what they give uncompiled, from fewer compilations than blocks."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from kontrast import networks
from kontrast.training.compiled_blocks import CompiledBlocks, keep_compiled_code, regions
from kontrast.training.learner import Student


def student(name, **arguments):
    torch.manual_seed(0)
    encoder = networks.encoder(name, size=32, **arguments)
    return Student(encoder, networks.head("simclr", encoder.width))


@pytest.mark.parametrize(
    ("name", "count"), [("resnet-18", 10), ("resnet-50", 18), ("vit-tiny", 13), ("small-resnet", 5), ("small-conv", 1)]
)
def test_regions_are_stem_blocks_and_head(name, count):
    found = regions(student(name))
    assert len(found) == count and len({(id(owner), method) for owner, method in found}) == count
    assert found[-1][1] == "forward" and type(found[-1][0]).__name__ != "Student"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch needs g++")
def test_blocks_compute_what_the_network_computes():
    """Values, gradients and statistics agree; twelve equal blocks need one compilation, and nothing stays behind."""
    from torch._dynamo.utils import counters

    plain, other = student("vit-tiny"), student("vit-tiny")
    torch.compiler.reset()
    counters.clear()
    compiled = CompiledBlocks(other)
    x = torch.randn(4, 3, 32, 32)
    for _ in range(2):
        ours, theirs = compiled(x), plain(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        ours.square().mean().backward()
        theirs.square().mean().backward()
    for (name, mine), own in zip(other.named_parameters(), plain.parameters()):
        if own.grad is not None:
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert counters["stats"]["unique_graphs"] == 2  # a block and the head
    assert all("forward" not in vars(module) for module in other.modules())
    assert other.state_dict().keys() == plain.state_dict().keys()


def test_failing_network_is_left_as_it_was():
    network = CompiledBlocks(student("small-resnet"))
    with pytest.raises(RuntimeError), network.in_place():
        raise RuntimeError
    assert all({"forward", "stem"}.isdisjoint(vars(module)) for module in network.network.modules())


def test_compiled_code_is_kept_in_the_cache(tmp_path, monkeypatch):
    """torch's own variables have precedence."""
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    keep_compiled_code(lambda: tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
    assert os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] == "0"
