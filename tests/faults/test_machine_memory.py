"""Memory that is too small, and devices that are not there."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch

from kontrast.cli import main as cli
from kontrast.errors import EnvironmentFault
from kontrast.training.build import precision
from kontrast.training.failures import batch_that_fits, is_out_of_memory

from support.commands import TINY, Command


def within(argv: list[str], extra: int) -> int:
    """Run with at most so many more bytes of address space than the process has."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))
    return cli.run(argv)


@pytest.mark.fault(30)
def test_a_batch_too_large_for_the_hosts_memory(tmp_path):
    """Seen: exit 6 with peak memory, batch, views and what to lower. Remains: the recipe, no partial checkpoint."""
    run = tmp_path / "run"
    large = ["encoder.width=256", "views.size=64", "training.batch=1024", "training.epochs=1", "evaluation.every=0"]
    argv = ["pretrain", *large, "--device", "cpu", "--no-probes", "--out", str(run)]
    said = Command(tmp_path / "log", instead=partial(within, argv, 700 << 20)).ended(6)
    assert "out of memory (peak " in said and "at batch 1024 x 2 views: halve training.batch" in said
    assert "training.accumulate=2" in said
    assert not list((run / "checkpoints").iterdir())


@pytest.mark.fault(30)
def test_the_largest_batch_lies_on_the_line_through_two_measured_steps():
    """Seen: a batch that fits. 1 GB fixed and 10 MB an image leave room for 300 images in 4 GB."""
    small, twice = 1e9 + 32 * 1e7, 1e9 + 64 * 1e7
    assert batch_that_fits(32, small, twice, 4e9) == 296
    assert batch_that_fits(32, small, twice, 1e8) == 0 and batch_that_fits(32, small, small, 4e9) == 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.fault(30)
def test_out_of_gpu_memory_names_a_batch_that_fits(tmp_path, capsys):
    """Seen: exit 6 with peak, batch and the largest batch that fits. Remains: no checkpoint; that batch then trains."""
    import re

    wide = ["encoder.name=resnet-50", "views.size=224", "training.max_steps=6", "training.compile=no"]
    wide += ["evaluation.every=0", "data.allow_small=true", "--recipe", "quickstart", "--no-probes", "--device", "cuda"]
    # Digits are few: the memory is made small instead of the batch large.
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        argv = ["pretrain", *wide, "training.batch=1024", "--out", str(tmp_path / "run")]
        assert cli.run(argv) == 6
        said = capsys.readouterr().err
        fits = int(re.search(r"about (\d+) would fit", said)[1])
        assert "out of GPU memory (peak" in said and not list((tmp_path / "run" / "checkpoints").iterdir())
        assert cli.run(["pretrain", *wide, f"training.batch={fits}", "--out", str(tmp_path / "fits")]) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.fault(31)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none(tmp_path, capsys):
    """Seen: exit 6 in one line; with auto, that it trains on the CPU. Remains: no folder."""
    assert cli.run(["pretrain", "--device", "cuda", "--out", str(tmp_path / "run")]) == 6
    assert "no usable NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    argv = ["pretrain", *TINY, "training.max_steps=2", "--no-probes", "--out", str(tmp_path / "run")]
    said = Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)
    assert said.count("no usable NVIDIA GPU: training on the CPU") == 1


@pytest.mark.fault(31)
def test_bfloat16_on_a_gpu_without_it(monkeypatch):
    """Seen: exit 6 in one line; auto takes float32. The GPU's own answer is replaced: none without it is at hand."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: False)
    with pytest.raises(EnvironmentFault, match=r"bfloat16.*use float32 or auto"):
        precision("bfloat16", torch.device("cuda"))
    assert precision("auto", torch.device("cuda")) == torch.float32


@pytest.mark.fault(30)
def test_a_size_that_no_memory_has_is_out_of_memory():
    """Seen: `bank.size=9223372036854775807` and its like end as memory that is too small, exit 6."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, 2**62)
    assert is_out_of_memory(caught.value)
