"""A run opened again: how it prints, how it prepares images, and the examples of the public functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import kontrast
from kontrast.errors import DataError, UsageError
from kontrast.runs.duplicates import duplicates
from kontrast.runs.embed import embed
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.export import export
from kontrast.runs.lens import lens
from kontrast.runs.neighbors import neighbors
from kontrast.runs.probe import probe
from kontrast.runs.push import push
from kontrast.runs.run import Run, load

from support import tiny_run
from support.doctests import run_examples

VERBS = (probe, lens, embed, neighbors, duplicates, export, push)


@pytest.mark.parametrize("thing", [Run, load, *VERBS], ids=lambda thing: thing.__name__)
def test_examples_run(thing, tmp_path, monkeypatch):
    tiny_run.example_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for verb in VERBS:
        monkeypatch.setattr(kontrast, verb.__name__, verb, raising=False)
    if thing is embed:
        (tmp_path / "vectors.npy").unlink()
    run_examples(thing)


def test_a_run_is_a_path_and_prints_what_it_is(tmp_path):
    run = Run(tiny_run.copy(tmp_path))
    assert repr(run) == f"Run({str(run.path)!r})" and Run(run).path == run.path
    assert "nt-xent" in str(run) and "192 images" in str(run) and "12 steps" in str(run)
    del run.info["finished"]
    assert "not finished" in str(run)
    with pytest.raises(UsageError, match="nowhere"):
        Run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"'gpu'.*cuda"):
        load(run, "gpu")


@pytest.fixture(scope="module")
def run():
    return kontrast.Run(tiny_run.trained())


def test_prepared_images_get_the_vectors_that_embed_writes(run, tmp_path):
    """Files of several sizes, normalized as in training, in one batch."""
    for number, side in enumerate((20, 32, 51)):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, 40, 3), np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    files = sorted(tmp_path.glob("*.png"))
    embed(run, tmp_path, tmp_path / "v.npy", device="cpu", say=lambda _: None)
    encoder = kontrast.load(run.path)
    with torch.no_grad():
        vectors = encoder(run.prepare(files))
        alone = encoder(run.prepare(str(files[1])))
    torch.testing.assert_close(vectors, read_embeddings(tmp_path / "v.npy").rows(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, vectors[1:2], rtol=1e-4, atol=1e-5)


def test_pixels_are_prepared_like_files(run, tmp_path):
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    expected = run.prepare([tmp_path / "0.png", tmp_path / "1.png"])
    for given in (pixels, pixels.numpy()):
        torch.testing.assert_close(run.prepare(given), expected)
    torch.testing.assert_close(run.prepare(pixels[0]), expected[:1])


@pytest.mark.parametrize(
    ("images", "error", "reason"),
    [
        ([], UsageError, "no images"),
        (torch.rand(2, 3, 32, 32), UsageError, "from 0 to 255"),
        (torch.zeros(2, 4, 32, 32, dtype=torch.uint8), DataError, "4 channels"),
        ("missing.png", DataError, "missing.png"),
        (Image.new("RGB", (32, 32)), UsageError, "Image: give image files"),
        ([torch.zeros(3, 32, 32, dtype=torch.uint8)], UsageError, "Tensor"),
        (iter(["cat.png"]), UsageError, "list_iterator"),
    ],
)
def test_other_input_to_prepare_is_an_error(run, images, error, reason):
    with pytest.raises(error, match=reason):
        run.prepare(images)
