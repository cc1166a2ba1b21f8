"""Weights to start from that are hostile, damaged or of another network: one line, exit 4, and nothing ran."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from support import tiny_run
from support.command_line import TINY, kontrast, one_line

WIDTH = "encoder.width=32"


class Trap:
    """Create a folder, if anything ever unpickles this."""

    def __init__(self, canary: Path):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def start(tmp_path, weights, *more):
    """Run `kontrast pretrain --from WEIGHTS` with an encoder that tiny_run's weights fit."""
    out = ["--out", str(tmp_path / "out"), "--device", "cpu", "--no-probes"]
    return kontrast("pretrain", str(tiny_run.images()), "--from", str(weights), *out, *TINY, WIDTH, *more)


@pytest.mark.fault(32)
@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.pt2", "x.ckpt", "x.bin", "x.pkl", "x.safetensors"])
@pytest.mark.parametrize("how", ["pickle", "torch", "legacy"])
def test_pickles_to_start_from(tmp_path, name, how):
    """`--from` a pickle under any name is exit 4 with one line; the payload did not run, and no run folder is left."""
    canary, path = tmp_path / "canary", tmp_path / name
    tree = {"layers.0.weight": torch.ones(2), "evil": Trap(canary)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(tree))
    else:
        torch.save(tree, path, _use_new_zipfile_serialization=how == "torch")
    one_line(start(tmp_path, path), 4, name, "execute code")
    assert not canary.exists() and not (tmp_path / "out").exists()


@pytest.mark.fault(32)
def test_distributed_checkpoint_to_start_from(tmp_path):
    """A folder of torch's distributed checkpoints is refused: its metadata is a pickle."""
    canary = tmp_path / "canary"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Trap(canary)))
    one_line(start(tmp_path, tmp_path / "dcp"), 4, "execute code")
    assert not canary.exists()


@pytest.mark.fault(33)
@pytest.mark.parametrize("kind", ["empty", "truncated", "huge header", "bad json", "compressed"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_file_to_start_from(tmp_path, kind, suffix):
    """A damaged weight file is exit 4 and named, whatever is wrong with it."""
    path = tmp_path / f"weights{suffix}"
    tensors = {"layers.0.weight": torch.ones(4, 3, 3, 3)}
    if suffix == ".pt":
        torch.save(tensors, path)
    else:
        path.write_bytes(save(tensors))
    whole = path.read_bytes()
    if kind == "compressed":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\0" * 1_000_000)
    else:
        damaged = {
            "empty": b"",
            "truncated": whole[: len(whole) // 2],
            "huge header": struct.pack("<Q", 2**62) + whole[8:],
            "bad json": struct.pack("<Q", 4) + b"nope" + whole,
        }
        path.write_bytes(damaged[kind])
    one_line(start(tmp_path, path), 4, path.name)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(33)
@pytest.mark.parametrize("problem", ["shape", "missing", "NaN"])
def test_weights_of_another_network_to_start_from(tmp_path, problem):
    """The first tensor that does not fit is named with both shapes; NaN is refused. No run folder is left."""
    from safetensors.torch import load_file

    tensors = load_file(tiny_run.trained() / "encoder.safetensors")
    if problem == "shape":
        tensors["layers.3.weight"] = torch.zeros(8, 4, 5, 5)
        words = ["layers.3.weight has shape [8, 4, 5, 5] there and [8, 4, 3, 3] in small-conv"]
    elif problem == "missing":
        del tensors["layers.3.weight"]
        words = ["it has no layers.3.weight", "[8, 4, 3, 3]"]
    else:
        tensors["layers.3.weight"][0] = float("nan")
        words = ["layers.3.weight holds NaN"]
    save_file(tensors, tmp_path / "other.safetensors")
    one_line(start(tmp_path, tmp_path / "other.safetensors"), 4, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(33)
def test_tensor_that_claims_more_memory_than_its_file(tmp_path):
    """A tensor of 2^40 values that all share one is refused by its shape, without being copied."""
    torch.save({"layers.0.weight": torch.zeros(1).expand(2**40)}, tmp_path / "wide.pt")
    one_line(start(tmp_path, tmp_path / "wide.pt"), 4, "layers.0.weight has shape [1099511627776] there")


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("encoder", "code"), [({"name": "os:system"}, 2), ({"name": "timm:resnet10t", "pretrained": True}, 2), ([1], 4)]
)
def test_card_that_names_code(tmp_path, encoder, code):
    """The card of an exported file can only name registered encoders, and loads nothing else."""
    card = {"encoder": encoder, "input": {"size": 32}}
    save_file({"x": torch.ones(1)}, tmp_path / "e.safetensors", metadata={"kontrast": json.dumps(card)})
    out = ["--out", str(tmp_path / "out"), "--device", "cpu", "--no-probes"]
    done = kontrast("pretrain", str(tiny_run.images()), "--from", str(tmp_path / "e.safetensors"), *out)
    one_line(done, code)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(33)
def test_changed_starting_weights_of_a_run(tmp_path):
    """A flipped bit in start.safetensors is exit 4 when the run is probed or resumed."""
    done = start(tmp_path, tiny_run.trained())
    assert done.returncode == 0, done.stderr
    path = tmp_path / "out" / "start.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    one_line(kontrast("probe", str(tmp_path / "out"), "knn", "--device", "cpu"), 4, "start.safetensors")


@pytest.mark.fault(34)
def test_timm_weights_without_a_network(tmp_path, monkeypatch):
    """`--from timm:NAME` without a network is exit 6 with one line; an unknown model is exit 2."""
    timm = pytest.importorskip("timm")

    def offline(name, **arguments):
        if arguments.get("pretrained"):
            raise OSError("no route to host")
        return created(name, **arguments)

    created = timm.create_model
    monkeypatch.setattr(timm, "create_model", offline)
    out = ["--out", str(tmp_path / "out"), "--device", "cpu", "--no-probes", *TINY[:3]]
    done = kontrast("pretrain", str(tiny_run.images()), "--from", "timm:resnet10t", *out)
    one_line(done, 6, "timm:resnet10t", "no route to host")
    assert not (tmp_path / "out").exists()
    one_line(kontrast("pretrain", str(tiny_run.images()), "--from", "timm:resnet-10t", *out), 2, "resnet10t")
    one_line(kontrast("pretrain", str(tiny_run.images()), "--from", "timm:../x", *out), 2, "timm:NAME")
