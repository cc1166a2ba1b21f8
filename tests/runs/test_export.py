"""Export: the file computes what the run's encoder computes, and its card describes the input."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from kontrast import networks
from kontrast.config.recipe import read_recipe
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, NumbersError, UsageError
from kontrast.runs import export as exporting
from kontrast.runs.export import export
from kontrast.runs.run import Run

from support import tiny_run


@pytest.fixture(scope="module")
def run():
    return Run(tiny_run.trained())


@pytest.fixture(scope="module")
def onnx_file(run, tmp_path_factory):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs the extra kontrast[onnx]")
    return export(run, "onnx", tmp_path_factory.mktemp("onnx") / "encoder.onnx")


def test_safetensors_hold_the_encoder_and_its_card(run, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file

    probes = [{"probe": "knn", "accuracy": 0.5}]
    copied = Run(tiny_run.copy(tmp_path))
    (copied.path / "probes.json").write_text(json.dumps({"version": 1, "probes": probes}))
    made = export(copied, "safetensors", tmp_path / "new" / "e.safetensors")
    card = json.loads(made.card.read_text())
    assert card["probes"] == probes and card["width"] == made.width == 32
    assert card["input"]["size"] == 32 and card["input"]["channels"] == 3 and card["data"]["images"] == 192
    assert read_recipe(card["recipe"]) == run.recipe
    with safe_open(made.path, "pt") as file:
        inside = json.loads(file.metadata()["kontrast"])
    assert inside.items() <= card.items()
    encoder = networks.encoder(**card["encoder"], channels=3, size=32).eval()
    encoder.load_state_dict(load_file(made.path))
    x = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(encoder(x), run.encoder()(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("longest", "window", "said"),
    [
        (0, Image.Resampling.BICUBIC, "bicubic"),
        (
            60,
            Image.Resampling.HAMMING,
            "and a longer side that is then over 60 px to 60, in one step with Pillow's Hamming",
        ),
    ],
)
def test_the_steps_on_the_card_make_the_input_of_the_run(tmp_path, longest, window, said):
    """Followed with only Pillow and torchvision, including the first resizing of a large picture."""
    run = Run(tiny_run.copy(tmp_path))
    run.recipe = replace(run.recipe, data=replace(run.recipe.data, size=40, longest=longest))
    card = exporting.describe(run, run.encoder())
    assert card["input"]["read"].startswith(f"a shorter side over 40 px is first resized to 40, {said}")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    picture.save(tmp_path / "large.png")
    small = torch.from_numpy(np.array(picture.resize((53, 40), window))).permute(2, 0, 1)
    size, norm = card["input"]["size"], card["normalisation"]
    x = functional.center_crop(functional.resize(small.float(), [size], antialias=True), [size, size]) / 255
    mean, std = (torch.tensor(norm[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close(run.prepare([tmp_path / "large.png"])[0], (x - mean) / std, rtol=0, atol=1e-4)


def test_the_default_place_is_in_the_run(tmp_path):
    copied = Run(tiny_run.copy(tmp_path))
    made = export(copied, "safetensors")
    assert made.path == copied.path / "export" / "encoder.safetensors" and made.difference is None


def test_onnx_agrees_with_torch_for_any_batch_size(run, onnx_file):
    import onnxruntime

    assert onnx_file.difference <= 1e-5
    assert json.loads(onnx_file.card.read_text())["onnx"]["max_difference"] == onnx_file.difference
    session = onnxruntime.InferenceSession(str(onnx_file.path), providers=["CPUExecutionProvider"])
    for count in (1, 5):
        x = torch.rand(count, 3, 32, 32)
        (given,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(given), run.encoder()(x).detach(), rtol=1e-4, atol=1e-5)
    assert [p.name for p in onnx_file.path.parent.iterdir() if p.name.startswith(".")] == []


def test_onnx_that_differs_from_torch_is_not_written(run, onnx_file, monkeypatch):
    """A file with other weights than the encoder's, compared by the real check."""
    monkeypatch.setattr(exporting, "onnx_bytes", lambda encoder, x: onnx_file.path.read_bytes())
    untrained = run.encoder(trained=False)
    with pytest.raises(NumbersError, match="differs from torch by"):
        exporting.checked_onnx(run, untrained, exporting.real_images(run, None))
    with torch.no_grad():
        for parameter in untrained.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(NumbersError, match="by nan"):
        exporting.checked_onnx(run, untrained, exporting.real_images(run, None))


def test_onnx_that_cannot_be_run_is_not_written(run, onnx_file, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "onnx_bytes", lambda encoder, x: b"no graph")
    with pytest.raises(NumbersError, match=r"onnxruntime .*not written"):
        export(run, "onnx", tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet-18", "small-alexnet", "vit-tiny"])
def test_onnx_takes_any_batch_size_with_every_kind_of_encoder(name, onnx_file):
    encoder, x = networks.encoder(name, channels=3, size=32).eval(), torch.rand(5, 3, 32, 32)
    content = exporting.onnx_bytes(encoder, x[:2])
    for batch in (x, x[:1]):
        assert exporting.onnx_difference(encoder, content, batch) < 1e-4


def test_onnx_can_be_compared_on_other_images(run, tmp_path):
    assert len(exporting.real_images(run, str(tiny_run.images()))) == exporting.MOST_IMAGES
    with pytest.raises(DataError, match=r"real images.*/nowhere/at/all"):
        exporting.real_images(run, "/nowhere/at/all")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"real images.* 0\.png \(empty file\)"):
        exporting.real_images(run, str(tmp_path / "broken"))


def test_the_card_has_the_number_of_images_that_onnx_was_compared_on(run, onnx_file, tmp_path):
    assert json.loads(onnx_file.card.read_text())["onnx"]["images"] == exporting.MOST_IMAGES
    for image in sorted(tiny_run.images().rglob("*.png"))[:3]:
        shutil.copy(image, tmp_path)
    made = export(run, "onnx", tmp_path / "e.onnx", data=str(tmp_path))
    assert json.loads(made.card.read_text())["onnx"]["images"] == 3


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_without_the_extra_the_error_says_how_to_install_it(run, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in {"onnx", "onnxruntime", "onnxscript"} - {missing}:
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    with pytest.raises(EnvironmentFault, match=f"{missing}: pip install onnx onnxscript onnxruntime"):
        export(run, "onnx", tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())


def test_bad_arguments_are_errors(run, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'onnx'"):
        export(run, "onx")
    with pytest.raises(UsageError, match=r"ends in \.onnx"):
        export(run, "onnx", tmp_path / "e.safetensors")
    with pytest.raises(UsageError, match="the run's own file"):
        export(run, "safetensors", run.path / "encoder.safetensors")


def test_an_unfinished_run_is_an_error(tmp_path):
    run = tiny_run.copy(tmp_path)
    (run / "encoder.safetensors").unlink()
    with pytest.raises(CheckpointError, match="resume"):
        export(Run(run), "safetensors", tmp_path / "e.safetensors")
    assert not (tmp_path / "e.safetensors").exists()
