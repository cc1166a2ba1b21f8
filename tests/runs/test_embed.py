"""Embedding a folder or a set: what is written, what an interruption costs, and how bad input is reported."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kontrast.data import open_data
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, Stopped, UsageError
from kontrast.probes import extract_features
from kontrast.runs import embed as embed_module
from kontrast.runs.embed import embed, resume_command
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.image_stream import open_stream
from kontrast.runs.neighbors import neighbors
from kontrast.runs.run import Run, open_run
from kontrast.training.run_folder import RunFolder

from support import tiny_run
from support.made_images import encoded, write_tar


def silent(_: str) -> None:
    pass


def embed_in_parts(run, images, out, batches: int = 1, say=silent):
    """Embed with so many batches per part."""
    with mock.patch.object(embed_module, "BATCHES_PER_PART", batches):
        return embed(run, images, out, device="cpu", say=say)


@pytest.fixture(scope="module")
def run():
    return Run(tiny_run.trained())


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", "test").first(1300)


@pytest.fixture(scope="module")
def whole(run, digits, tmp_path_factory):
    """The file of an undisturbed run, one batch per part."""
    out = tmp_path_factory.mktemp("whole") / "v.npy"
    embed_in_parts(run, digits, out)
    return out


class Breaking:
    """Pixels that can no longer be read after some batches, as on a disk that goes away."""

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


def test_vectors_are_the_output_of_the_encoder(run, digits, whole):
    found = read_embeddings(whole)
    expected = extract_features(run.encoder(), digits, run.transform())
    torch.testing.assert_close(found.rows(), expected, rtol=1e-4, atol=1e-5)
    assert list(found.names) == list(digits.names)
    assert not whole.with_name("v.npy.parts").exists()


def test_the_size_of_a_part_changes_no_bit(run, digits, whole, tmp_path):
    embed_in_parts(run, digits, tmp_path / "v.npy", batches=4)
    assert (tmp_path / "v.npy").read_bytes() == whole.read_bytes()


def test_interrupted_and_damaged_parts_end_in_the_same_bytes(run, digits, whole, tmp_path):
    out, parts = tmp_path / "v.npy", tmp_path / "v.npy.parts"
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 3))
    with pytest.raises(OSError, match="disk went away"):
        embed_in_parts(run, breaking, out)
    assert not out.exists() and len(list(parts.glob("part-*.json"))) == 3
    damaged = bytearray((parts / "part-000001.npy").read_bytes())
    damaged[-1] ^= 1
    (parts / "part-000001.npy").write_bytes(damaged)
    (parts / "part-000002.json").unlink()
    said = []
    embed_in_parts(run, digits, out, say=said.append)
    assert len(said) == 1 and "1 of 6 parts" in said[0]
    assert out.read_bytes() == whole.read_bytes()
    assert out.with_suffix(".names.jsonl").read_bytes() == whole.with_suffix(".names.jsonl").read_bytes()


def test_parts_of_other_work_are_not_used(run, digits, tmp_path):
    out = tmp_path / "v.npy"
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 2))
    with pytest.raises(OSError, match="disk went away"):
        embed_in_parts(run, breaking, out)
    fewer, said = digits.first(300), []
    embed_in_parts(run, fewer, out, say=said.append)
    assert "starting over" in said[0] and len(read_embeddings(out)) == 300


def test_a_signal_stops_it_with_the_command_to_continue(run, digits, tmp_path):
    class Signaling(Breaking):
        def select(self, indices):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)
            return self.images[indices]

    out = tmp_path / "v.npy"
    signaling = dataclasses.replace(digits, images=Signaling(digits.images, 2))
    with pytest.raises(Stopped, match=r"part 2 of 6.* kontrast embed .* --out"):
        embed_in_parts(run, signaling, out)
    assert not out.exists()


def test_parquet_has_id_path_and_vector_and_the_same_bytes_each_time(run, digits, whole, tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
    import pyarrow
    import pyarrow.parquet

    names = [f"a/\udcff{i}" if i == 5 else name for i, name in enumerate(digits.names)]
    strange = dataclasses.replace(digits, names=names)
    for name in ("v.parquet", "again.parquet"):
        embed_in_parts(run, strange, tmp_path / name)
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


def test_a_folder_is_decoded_in_batches_and_bad_files_are_skipped(run, tmp_path):
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


def test_too_many_bad_files_keep_the_parts_for_a_call_that_allows_them(run, tmp_path):
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
    assert "1 of 1 parts" in said[0] and "skipped 6 of 12" in said[1]
    assert made.images == 6 and len(made.skipped) == 6


def test_a_failure_before_the_first_part_leaves_nothing(run, digits, tmp_path):
    """Unreadable images, or an error in the first part, leave nothing to continue from."""
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


def test_a_named_set_allows_the_given_share_of_damaged_files(run, tmp_path, monkeypatch):
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


def test_a_bad_image_is_skipped_and_not_replaced_as_in_training(run, digits, tmp_path):
    """In shards that are decoded on the fly, the replacement would show up as a duplicate."""
    members = [(f"{n}.png", encoded(Image.fromarray(digits[n].permute(1, 2, 0).numpy()), "PNG")) for n in range(30)]
    members[7] = ("7.png", members[7][1][:40])
    write_tar(tmp_path / "s.tar", members)
    images = open_data(tmp_path / "s.tar", pack=False)
    done = embed(run, images, tmp_path / "v.npy", device="cpu", say=silent)
    assert [name for name, _ in done.skipped] == ["s.tar/7.png"] and done.images == 29
    embed(run, digits.subset([n for n in range(30) if n != 7]), tmp_path / "w.npy", device="cpu", say=silent)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), np.load(tmp_path / "w.npy"), rtol=1e-5, atol=1e-6)


def test_parts_of_another_float_range_are_not_used(digits, tmp_path):
    """And the command to continue names the range."""
    near, far = (open_run(tiny_run.trained(), span) for span in ((0.0, 1.0), (0.0, 2.0)))
    breaking = dataclasses.replace(digits, images=Breaking(digits.images, 2))
    with pytest.raises(OSError, match="disk went away"):
        embed_in_parts(near, breaking, tmp_path / "v.npy")
    said = []
    embed_in_parts(far, digits, tmp_path / "v.npy", say=said.append)
    assert "starting over" in said[0]
    stream = open_stream(far, digits)
    assert "--float-range=0.0,2.0" in resume_command(far, stream, tmp_path / "v.npy", "all", None, "auto")


def test_images_of_many_sizes_do_not_affect_each_other(run, tmp_path):
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


def test_a_file_is_not_overwritten_and_two_processes_do_not_write_at_once(run, whole, tmp_path):
    with pytest.raises(UsageError, match="already exists"):
        embed(run, tiny_run.images(), whole)
    (tmp_path / "v.npy.parts").mkdir()
    holder = RunFolder(tmp_path / "v.npy.parts")
    holder.hold()
    try:
        with pytest.raises(EnvironmentFault, match="pid"):
            embed(run, tiny_run.images(), tmp_path / "v.npy", device="cpu", say=silent)
    finally:
        holder.release()


def test_bad_arguments_are_errors(run, tmp_path):
    with pytest.raises(UsageError, match=r"\.npy or \.parquet"):
        embed(run, tiny_run.images(), tmp_path / "v.csv")
    with pytest.raises(UsageError, match="no split 'tests'"):
        embed(run, tiny_run.images(), tmp_path / "v.npy", split="tests")
    with pytest.raises(DataError, match="no folder"):
        embed(run, tmp_path / "nowhere", tmp_path / "v.npy")
    few = open_data("digits", "test").first(4)
    two = dataclasses.replace(few, images=few.images[:, :2])
    with pytest.raises(DataError, match=r"2 channels.* takes 3"):
        embed(run, two, tmp_path / "v.npy")


def test_gray_images_get_three_equal_channels(run, tmp_path):
    few = open_data("digits", "test").first(4)
    gray = dataclasses.replace(few, images=few.images[:, :1])
    color = dataclasses.replace(few, images=few.images[:, :1].expand(-1, 3, -1, -1).contiguous())
    for name, images in (("gray", gray), ("color", color)):
        embed(run, images, tmp_path / f"{name}.npy", device="cpu", say=silent)
    np.testing.assert_array_equal(np.load(tmp_path / "gray.npy"), np.load(tmp_path / "color.npy"))
    torch.testing.assert_close(run.prepare(gray[:4]), run.prepare(color[:4]))


def test_runs_that_are_unfinished_damaged_or_newer(tmp_path):
    run = tiny_run.copy(tmp_path)
    weights = run / "encoder.safetensors"
    for content in (b"", b"\x00" * 40, weights.read_bytes()[:200]):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable safetensors"):
            embed(run, tiny_run.images(), tmp_path / "v.npy")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"not finished.*resume"):
        embed(run, tiny_run.images(), tmp_path / "v.npy")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "version": 2}))
    (run / "recipe.toml").write_text("a_key_of_tomorrow = 1\n" + (run / "recipe.toml").read_text())
    with pytest.raises(CheckpointError, match="newer kontrast"):
        embed(run, tiny_run.images(), tmp_path / "v.npy")
    assert not list(tmp_path.glob("v.npy*"))


def test_neighbors_from_a_file_and_from_the_runs_own_images(tmp_path):
    run = Run(tiny_run.copy(tmp_path))
    image = sorted(tiny_run.images().rglob("*.png"))[17]
    embed(run, tiny_run.images(), tmp_path / "v.npy", device="cpu", say=silent)
    found = neighbors(run, image, embeddings=tmp_path / "v.npy", k=5, device="cpu", say=silent)
    assert found[0].name == str(image.relative_to(tiny_run.images())) and found[0].similarity > 0.9999
    rows = torch.nn.functional.normalize(torch.from_numpy(np.load(tmp_path / "v.npy")), dim=1)
    assert [one.row for one in found] == (rows @ rows[17]).topk(5).indices.tolist()
    said = []
    for _ in range(2):
        own = neighbors(run, image, k=3, device="cpu", say=said.append)
    assert len(own) == 3 and len(said) == 1 and "embedding the" in said[0]
    (run.path / "embeddings" / "embeddings.json").write_text('{"version": 1, "encoder": "another"}')
    assert neighbors(run, image, k=3, device="cpu", say=said.append) == own and len(said) == 2


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_neighbors_refuse_the_vectors_of_another_encoder_of_the_same_width(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    run = Run(tiny_run.copy(tmp_path))
    image = next(tiny_run.images().rglob("*.png"))
    embed(run, tiny_run.images(), tmp_path / f"v{suffix}", device="cpu", say=silent)
    weights = load_file(run.path / "encoder.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, run.path / "encoder.safetensors")
    facts = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "encoder_sha256"}))
    with pytest.raises(DataError, match="another encoder"):
        neighbors(run.path, image, embeddings=tmp_path / f"v{suffix}", device="cpu", say=silent)


def test_neighbors_report_what_they_cannot_read(run, tmp_path):
    np.save(tmp_path / "v.npy", np.ones((4, 7), dtype=np.float32))
    image = next(tiny_run.images().rglob("*.png"))
    with pytest.raises(DataError, match=r"width 7.* 32"):
        neighbors(run, image, embeddings=tmp_path / "v.npy", device="cpu")
    (tmp_path / "bad.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"bad\.png.*HTML"):
        neighbors(run, tmp_path / "bad.png", embeddings=tmp_path / "v.npy", device="cpu")
    with pytest.raises(DataError, match="No such file"):
        neighbors(run, Path("nowhere.png"), embeddings=tmp_path / "v.npy", device="cpu")
    np.save(tmp_path / "v.npy", np.ones((4, 32), dtype=np.float32))
    said = []
    assert len(neighbors(run, image, embeddings=tmp_path / "v.npy", device="cpu", say=said.append)) == 4
    assert "4 rows" in said[0]
