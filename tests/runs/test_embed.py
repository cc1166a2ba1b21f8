"""Embedding a folder or a set: what is written, what a broken-off one costs, and what bad input gets."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kontrast.data import open_data
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, Stopped, UsageError
from kontrast.probes import extract_features
from kontrast.runs.embed import embed, go_on, open_run, stretches
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.image_stream import open_stream
from kontrast.runs.neighbors import neighbors
from kontrast.training.run_folder import RunFolder

from support import tiny_run
from support.made_images import encoded, write_tar


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def run():
    return open_run(tiny_run.trained())


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", "test").first(1300)


@pytest.fixture(scope="module")
def whole(run, digits, tmp_path_factory):
    """The file of a run that nothing disturbed, a batch a part."""
    out = tmp_path_factory.mktemp("whole") / "v.npy"
    embed(run, digits, out, batches=1, device="cpu", say=silent)
    return out


class Breaking:
    """Pixels that can't be read any more after some batches, as on a disk that goes away."""

    def __init__(self, images, batches):
        self.images, self.left = images, batches

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]

    def select(self, indices):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk went away")
        return self.images[indices]


def test_vectors_are_the_encoders_own(run, digits, whole):
    found = read_embeddings(whole)
    expected = extract_features(run.encoder(), digits, run.transform())
    torch.testing.assert_close(found.rows(), expected, rtol=1e-4, atol=1e-5)
    assert list(found.names) == list(digits.names)
    assert not whole.with_name("v.npy.parts").exists()


def test_what_a_part_holds_changes_no_bit(run, digits, whole, tmp_path):
    embed(run, digits, tmp_path / "v.npy", batches=4, device="cpu", say=silent)
    assert (tmp_path / "v.npy").read_bytes() == whole.read_bytes()


def test_broken_off_and_damaged_parts_end_in_the_same_bytes(run, digits, whole, tmp_path):
    out, parts = tmp_path / "v.npy", tmp_path / "v.npy.parts"
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 3))
    with pytest.raises(OSError, match="disk went away"):
        embed(run, breaking, out, batches=1, device="cpu", say=silent)
    assert not out.exists() and len(list(parts.glob("part-*.json"))) == 3
    damaged = bytearray((parts / "part-000001.npy").read_bytes())
    damaged[-1] ^= 1
    (parts / "part-000001.npy").write_bytes(damaged)
    (parts / "part-000002.json").unlink()
    said = []
    embed(run, digits, out, batches=1, device="cpu", say=said.append)
    assert said == ["going on: 1 of 6 parts are there"]
    assert out.read_bytes() == whole.read_bytes()
    assert out.with_suffix(".names.jsonl").read_bytes() == whole.with_suffix(".names.jsonl").read_bytes()


def test_parts_of_other_work_are_not_used(run, digits, tmp_path):
    out = tmp_path / "v.npy"
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 2))
    with pytest.raises(OSError, match="disk went away"):
        embed(run, breaking, out, batches=1, device="cpu", say=silent)
    fewer, said = digits.first(300), []
    embed(run, fewer, out, batches=1, device="cpu", say=said.append)
    assert "starting afresh" in said[0] and len(read_embeddings(out)) == 300


def test_asked_to_stop_it_says_how_to_go_on(run, digits, tmp_path):
    class Asking(Breaking):
        def select(self, indices):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)
            return self.images[indices]

    out = tmp_path / "v.npy"
    asking = dataclasses.replace(digits, images=Asking(digits.images, 2))
    with pytest.raises(Stopped, match=r"stopped and saved at part 2 of 6; .*with: kontrast embed .* --out"):
        embed(run, asking, out, batches=1, device="cpu", say=silent)
    assert not out.exists()


def test_parquet_has_id_path_and_vector_and_the_same_bytes_each_time(run, digits, whole, tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
    import pyarrow
    import pyarrow.parquet

    names = [f"a/\udcff{i}" if i == 5 else name for i, name in enumerate(digits.names)]
    strange = dataclasses.replace(digits, names=names)
    for name in ("v.parquet", "again.parquet"):
        embed(run, strange, tmp_path / name, batches=1, device="cpu", say=silent)
    assert (tmp_path / "v.parquet").read_bytes() == (tmp_path / "again.parquet").read_bytes()
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    assert table.column_names == ["id", "path", "vector", "path_bytes"]  # the last since a name is no UTF-8
    assert read_embeddings(tmp_path / "v.parquet").names[5] == "a/\udcff5"
    embed(run, digits, tmp_path / "plain.parquet", device="cpu", say=silent)
    assert pyarrow.parquet.read_schema(tmp_path / "plain.parquet").names == ["id", "path", "vector"]
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), 32)
    assert table["id"].to_pylist() == list(range(1300)) and table["path"][5].as_py() == "a/\\udcff5"
    assert (read_embeddings(tmp_path / "v.parquet").vectors == read_embeddings(whole).vectors).all()


def test_without_pyarrow_parquet_is_refused_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentFault, match="pip install pyarrow"):
        embed(run, tiny_run.images(), tmp_path / "v.parquet")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_decoded_as_it_is_needed_and_bad_files_are_left_out(run, tmp_path):
    folder = tmp_path / "pictures"
    shutil.copytree(tiny_run.images(), folder)
    (folder / "0" / "000-broken.png").write_bytes(b"no picture")
    made = embed(run, folder, tmp_path / "v.npy", device="cpu", say=silent)
    assert made.images == tiny_run.IMAGES and made.skipped == [("0/000-broken.png", "not an image: text")]
    lines = [json.loads(line) for line in (tmp_path / "v.names.jsonl").read_text().splitlines()]
    assert [line["path"] for line in lines] == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.png"))[1:]
    assert [line["id"] for line in lines] == list(range(1, tiny_run.IMAGES + 1))
    pixels = open_data(tiny_run.images(), "all")
    expected = extract_features(run.encoder(), pixels, run.transform())
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "v.npy")), expected, rtol=1e-4, atol=1e-5)


def test_too_many_bad_files_keep_the_parts_until_they_are_allowed(run, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, path in enumerate(sorted(tiny_run.images().rglob("*.png"))[:6]):
        shutil.copy(path, folder / f"{number}.png")
    for number in range(6):
        (folder / f"bad-{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="6 of 12 images"):
        embed(run, folder, tmp_path / "v.npy", device="cpu", say=silent)
    said = []
    made = embed(run, folder, tmp_path / "v.npy", device="cpu", max_bad=1.0, say=said.append)
    assert said == ["going on: 1 of 1 parts are there"] and made.images == 6 and len(made.skipped) == 6


def test_an_embedding_without_a_vector_leaves_nothing(run, digits, tmp_path):
    """Nothing can go on from images that could not be read, or from work that broke before its first part."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(6):
        (folder / f"bad-{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="none of the images"):
        embed(run, folder, tmp_path / "v.npy", device="cpu", say=silent)
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 1))
    with pytest.raises(OSError, match="disk went away"):
        embed(run, breaking, tmp_path / "v.npy", device="cpu", say=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


def test_a_named_set_of_files_goes_on_with_the_share_of_damaged_ones_that_is_given(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KONTRAST_DATA", str(tmp_path))
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "cache"))
    originals = sorted(tiny_run.images().rglob("*.png"))[:8]
    for part in ("train", "val"):
        folder = tmp_path / "imagenet" / part / "n01440764"
        folder.mkdir(parents=True)
        for number, path in enumerate(originals):
            (folder / f"{number}.png").write_bytes(path.read_bytes()[: 20 if number < 2 else None])
    with pytest.raises(DataError, match="max_bad"):
        embed(run, "imagenet", tmp_path / "v.npy", device="cpu", say=silent)
    assert embed(run, "imagenet", tmp_path / "v.npy", device="cpu", max_bad=0.5, say=silent).images == 12


def test_what_stands_in_for_a_bad_image_in_training_is_not_its_vector(run, digits, tmp_path):
    """Of shards that are decoded as needed, which a run's own embeddings read: the two would be duplicates."""
    members = [(f"{n}.png", encoded(Image.fromarray(digits[n].permute(1, 2, 0).numpy()), "PNG")) for n in range(30)]
    members[7] = ("7.png", members[7][1][:40])
    write_tar(tmp_path / "s.tar", members)
    images = open_data(tmp_path / "s.tar", pack=False)
    done = embed(run, images, tmp_path / "v.npy", device="cpu", say=silent)
    assert [name for name, _ in done.skipped] == ["s.tar/7.png"] and done.images == 29
    embed(run, digits.subset([n for n in range(30) if n != 7]), tmp_path / "w.npy", device="cpu", say=silent)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), np.load(tmp_path / "w.npy"), rtol=1e-5, atol=1e-6)


def test_vectors_of_another_range_are_other_vectors(digits, tmp_path):
    """Splits of float images read by one range are not gone on with by another, and the command to go on names it."""
    near, far = (open_run(tiny_run.trained(), span) for span in ((0.0, 1.0), (0.0, 2.0)))
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 2))
    with pytest.raises(OSError, match="disk went away"):
        embed(near, breaking, tmp_path / "v.npy", batches=1, device="cpu", say=silent)
    said = []
    embed(far, digits, tmp_path / "v.npy", batches=1, device="cpu", say=said.append)
    assert "starting afresh" in said[0]
    stream = open_stream(far, digits)
    assert "--float-range=0.0,2.0" in go_on(far, stream, tmp_path / "v.npy", "all", None, "auto")


def test_pictures_of_many_sizes_do_not_change_each_other(run, tmp_path):
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    originals = sorted(tiny_run.images().rglob("*.png"))[:3]
    for number, (path, size) in enumerate(zip(originals, [(32, 32), (90, 41), (17, 64)])):
        Image.open(path).resize(size).save(folder / f"{number}.png")
    embed(run, folder, tmp_path / "all.npy", device="cpu", say=silent)
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        shutil.copy(folder / f"{number}.png", tmp_path / f"{number}")
        embed(run, tmp_path / f"{number}", tmp_path / f"{number}.npy", device="cpu", say=silent)
        alone = np.load(tmp_path / f"{number}.npy")[0]
        np.testing.assert_allclose(np.load(tmp_path / "all.npy")[number], alone, rtol=1e-4, atol=1e-5)


def test_stretches():
    assert list(stretches([0, 1, 2, 5, 7, 8])) == [(0, 2), (5, 5), (7, 8)]


def test_what_is_there_is_not_overwritten_and_two_do_not_write_at_once(run, whole, tmp_path):
    with pytest.raises(UsageError, match="exists already"):
        embed(run, tiny_run.images(), whole)
    (tmp_path / "v.npy.parts").mkdir()
    holder = RunFolder(tmp_path / "v.npy.parts")
    holder.hold()
    try:
        with pytest.raises(EnvironmentFault, match="by pid"):
            embed(run, tiny_run.images(), tmp_path / "v.npy", device="cpu", say=silent)
    finally:
        holder.release()


def test_bad_requests_get_a_line(run, tmp_path):
    with pytest.raises(UsageError, match=r"\.npy or \.parquet"):
        embed(run, tiny_run.images(), tmp_path / "v.csv")
    with pytest.raises(UsageError, match="unknown split"):
        embed(run, tiny_run.images(), tmp_path / "v.npy", split="tests")
    with pytest.raises(DataError, match="no folder"):
        embed(run, tmp_path / "nowhere", tmp_path / "v.npy")
    grey = dataclasses.replace(open_data("digits", "test").first(4))
    grey = dataclasses.replace(grey, images=grey.images[:, :1])
    with pytest.raises(DataError, match="1 channels, the run's encoder takes 3"):
        embed(run, grey, tmp_path / "v.npy")


def test_runs_that_are_unfinished_damaged_or_newer(tmp_path):
    run = tiny_run.copy(tmp_path)
    weights = run / "encoder.safetensors"
    for content in (b"", b"\x00" * 40, weights.read_bytes()[:200]):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable safetensors"):
            embed(open_run(run), tiny_run.images(), tmp_path / "v.npy")
    weights.unlink()
    with pytest.raises(CheckpointError, match="has not finished; resume it first"):
        embed(open_run(run), tiny_run.images(), tmp_path / "v.npy")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "version": 2}))
    (run / "recipe.toml").write_text("a_key_of_tomorrow = 1\n" + (run / "recipe.toml").read_text())
    with pytest.raises(CheckpointError, match="newer kontrast: upgrade"):
        open_run(run)
    assert not list(tmp_path.glob("v.npy*"))


def test_neighbours_from_a_file_and_from_the_runs_own_images(tmp_path):
    run = open_run(tiny_run.copy(tmp_path))
    image = sorted(tiny_run.images().rglob("*.png"))[17]
    embed(run, tiny_run.images(), tmp_path / "v.npy", device="cpu", say=silent)
    found = neighbors(run, image, embeddings=tmp_path / "v.npy", k=5, device="cpu", say=silent)
    assert found[0]["name"] == str(image.relative_to(tiny_run.images())) and found[0]["similarity"] > 0.9999
    rows = torch.nn.functional.normalize(torch.from_numpy(np.load(tmp_path / "v.npy")), dim=1)
    assert [one["row"] for one in found] == (rows @ rows[17]).topk(5).indices.tolist()
    said = []
    for _ in range(2):
        own = neighbors(run, image, k=3, device="cpu", say=said.append)
    assert len(own) == 3 and len(said) == 1 and "embedding the" in said[0]
    (run.path / "embeddings" / "embeddings.json").write_text('{"version": 1, "encoder": "another"}')
    assert neighbors(run, image, k=3, device="cpu", say=said.append) == own and len(said) == 2


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_neighbours_refuse_the_vectors_of_another_encoder_of_the_same_width(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    run = open_run(tiny_run.copy(tmp_path))
    image = next(tiny_run.images().rglob("*.png"))
    embed(run, tiny_run.images(), tmp_path / f"v{suffix}", device="cpu", say=silent)
    weights = load_file(run.path / "encoder.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, run.path / "encoder.safetensors")
    facts = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "encoder_sha256"}))
    with pytest.raises(DataError, match="another encoder"):
        neighbors(open_run(run.path), image, embeddings=tmp_path / f"v{suffix}", device="cpu", say=silent)


def test_neighbours_refuse_what_they_cannot_read(run, tmp_path):
    np.save(tmp_path / "v.npy", np.ones((4, 7), dtype=np.float32))
    image = next(tiny_run.images().rglob("*.png"))
    with pytest.raises(DataError, match="width 7, the run gives 32"):
        neighbors(run, image, embeddings=tmp_path / "v.npy", device="cpu")
    (tmp_path / "bad.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"can't read the image .*bad.png: not an image: an HTML page"):
        neighbors(run, tmp_path / "bad.png", embeddings=tmp_path / "v.npy", device="cpu")
    with pytest.raises(DataError, match="No such file"):
        neighbors(run, Path("nowhere.png"), embeddings=tmp_path / "v.npy", device="cpu")
    np.save(tmp_path / "v.npy", np.ones((4, 32), dtype=np.float32))
    said = []
    assert len(neighbors(run, image, embeddings=tmp_path / "v.npy", device="cpu", say=said.append)) == 4
    assert "has 4 rows, all are given" in said[0]
