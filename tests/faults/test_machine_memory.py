"""Too little memory, and devices that don't exist."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from kontrast.cli import main as cli
from kontrast.config.recipe_files import resolve
from kontrast.errors import EnvironmentFault
from kontrast.training import failures
from kontrast.training.build import precision
from kontrast.training.failures import batch_that_fits, is_out_of_memory

from support.commands import TINY, Command

LIMITED = """
import resource, sys
from kontrast.cli import main
import kontrast.training.pretrain
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1000 << 20),) * 2)
sys.exit(main.run(sys.argv[1:]))
"""
"""Run a command with 1,000 MiB more address space than a new process has. A fork of a test's process would not do: what
earlier tests have freed would be left to it."""


@pytest.mark.fault(30)
def test_out_of_memory(tmp_path):
    """Exit 6 with peak memory, batch, views and what to lower; there is no partial checkpoint."""
    run = tmp_path / "run"
    large = ["encoder.width=256", "views.size=64", "training.batch=1024", "training.epochs=1", "evaluation.every=0"]
    argv = ["pretrain", *large, "--device", "cpu", "--no-probes", "--out", str(run)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *argv], capture_output=True, text=True)
    said = done.stderr
    assert done.returncode == 6 and "Traceback" not in said, said
    assert "out of memory" in said and "1024" in said and "3 views" in said and "training.batch" in said
    assert "training.accumulate=2" in said
    assert not list((run / "checkpoints").iterdir())


@pytest.mark.fault(30)
def test_largest_batch_is_extrapolated_from_two_steps():
    """1 GB fixed and 10 MB per image leave room for 300 images in 4 GB."""
    small, twice = 1e9 + 32 * 1e7, 1e9 + 64 * 1e7
    assert batch_that_fits(32, small, twice, 4e9) == 296
    assert batch_that_fits(32, small, twice, 1e8) == 0 and batch_that_fits(32, small, small, 4e9) == 0


def test_the_largest_batch_is_estimated_even_if_a_sixteenth_does_not_fit(monkeypatch):
    """Steps of 8 and 16 images fit, those of 64 and 128 don't."""
    tried = []

    def peak_of_step(recipe, train, count, device):
        tried.append(count)
        if count > 16:
            raise torch.cuda.OutOfMemoryError("too much")
        return 1e9 + count * 1e7

    monkeypatch.setattr(failures, "peak_of_step", peak_of_step)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4e9, 4e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    recipe = resolve("quickstart", ["training.batch=1024"])
    assert failures.largest_batch(recipe, None, torch.device("cuda")) == 280
    assert tried == [64, 16, 32, 8, 16]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.fault(30)
def test_out_of_gpu_memory(tmp_path, capsys):
    """Exit 6 with peak memory and the largest batch that fits, which then trains; there is no checkpoint."""
    import re

    wide = ["encoder.name=resnet-50", "views.size=224", "training.max_steps=6", "training.compile=no"]
    wide += ["evaluation.every=0", "data.allow_small=true", "--recipe", "quickstart", "--no-probes", "--device", "cuda"]
    # There are few digits, so the memory is limited instead of making the batch larger.
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        argv = ["pretrain", *wide, "training.batch=1024", "--out", str(tmp_path / "run")]
        assert cli.run(argv) == 6
        said = capsys.readouterr().err
        fits = int(re.search(r"about (\d+)", said)[1])
        assert "out of GPU memory" in said and not list((tmp_path / "run" / "checkpoints").iterdir())
        assert cli.run(["pretrain", *wide, f"training.batch={fits}", "--out", str(tmp_path / "fits")]) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.fault(31)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(tmp_path, capsys):
    """Exit 6 and no folder; `auto` trains on the CPU and says so once."""
    assert cli.run(["pretrain", "--device", "cuda", "--out", str(tmp_path / "run")]) == 6
    assert "GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    argv = ["pretrain", *TINY, "training.max_steps=2", "--no-probes", "--out", str(tmp_path / "run")]
    said = Command(tmp_path / "log", instead=partial(cli.run, argv)).ended(0)
    assert len([line for line in said.splitlines() if "GPU" in line and "CPU" in line]) == 1


@pytest.mark.fault(31)
def test_bfloat16_on_a_gpu_without_it(monkeypatch):
    """Exit 6; `auto` uses float32. The GPU's answer is faked, since every GPU at hand supports bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: False)
    with pytest.raises(EnvironmentFault, match=r"bfloat16.*float32"):
        precision("bfloat16", torch.device("cuda"))
    assert precision("auto", torch.device("cuda")) == torch.float32


@pytest.mark.fault(30)
def test_impossible_size_is_out_of_memory():
    """`bank.size=9223372036854775807` and the like are treated as out of memory, exit 6."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, 2**62)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
