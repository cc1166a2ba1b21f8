"""Embeddings files that are truncated, of another run, or contain NaN; and `embed`, killed repeatedly."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

from kontrast.data import open_data
from kontrast.runs.embed import embed
from kontrast.runs.embeddings_file import names_path, read_embeddings

from support import tiny_run
from support.command_line import kontrast, one_line
from support.commands import Command, until

WIDTH = 32


@pytest.fixture
def vectors(tmp_path):
    """Write vectors.npy with the run's width, and its names."""
    rows = np.random.default_rng(0).standard_normal((40, WIDTH)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", rows)
    lines = (json.dumps({"id": i, "path": f"{i:02d}.png"}) + "\n" for i in range(40))
    names_path(tmp_path / "vectors.npy").write_text("".join(lines))
    return tmp_path / "vectors.npy"


def neighbors(path):
    image = sorted(tiny_run.images().rglob("*.png"))[0]
    return kontrast("neighbors", str(tiny_run.trained()), str(image), "--embeddings", str(path), "--device", "cpu")


@pytest.mark.fault(38)
@pytest.mark.parametrize("cut", [0, 5, 60, 127, 200, -1])
def test_truncated_embeddings(vectors, cut):
    """Exit 3 names the file, for every command that reads it; the file is unchanged."""
    content = vectors.read_bytes()[:cut]
    vectors.write_bytes(content)
    one_line(neighbors(vectors), 3, "vectors.npy")
    one_line(kontrast("lens", str(vectors)), 3, "vectors.npy")
    assert vectors.read_bytes() == content


@pytest.mark.fault(38, 72)
@pytest.mark.parametrize("about", [b"[]", b'{"encoder": [1]}'])
def test_parquet_with_facts_of_other_types(tmp_path, about):
    """Exit 3 names the file: what its metadata says about the encoder is not text, or not there to be asked for."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"path": ["a.png"], "vector": [[1.0] * WIDTH]})
    parquet.write_table(table.replace_schema_metadata({b"kontrast": about}), tmp_path / "vectors.parquet")
    one_line(kontrast("lens", str(tmp_path / "vectors.parquet")), 3, "vectors.parquet")


@pytest.mark.fault(38)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_row_that_is_not_finite_is_named(vectors, value):
    """Exit 3 with the row's number and name."""
    rows = np.load(vectors)
    rows[17, 3] = value
    np.save(vectors, rows)
    one_line(neighbors(vectors), 3, "row 17", "17.png")
    one_line(kontrast("lens", str(vectors)), 3, "row 17", "17.png")


@pytest.mark.fault(38)
def test_embeddings_of_another_run(vectors):
    """Exit 3 with both widths or both counts."""
    np.save(vectors, np.load(vectors)[:, :7])
    one_line(neighbors(vectors), 3, "7", str(WIDTH))
    names_path(vectors).write_text('{"path": "one.png"}\n')
    one_line(neighbors(vectors), 3, "1 row", "40")


@pytest.mark.fault(38)
def test_memory_layouts_give_the_same_neighbors(vectors):
    """Column order, double precision and big-endian bytes give the same answer."""
    first, rows = neighbors(vectors).stdout, np.load(vectors)
    assert len(first.splitlines()) == 8
    for other in (np.asfortranarray(rows), rows.astype(np.float64), rows.astype(">f4")):
        np.save(vectors, other)
        done = neighbors(vectors)
        assert done.returncode == 0 and done.stdout == first, done.stderr


@pytest.mark.fault(38)
def test_embed_killed_repeatedly_ends_with_the_same_bytes(tmp_path, tally, monkeypatch):
    """Each start continues after the last complete part, and the file equals that of an undisturbed run."""
    digits = open_data("digits", "test").first(1300)
    run = tiny_run.trained()
    monkeypatch.setattr("kontrast.runs.embed.BATCHES_PER_PART", 1)
    whole = embed(run, digits, tmp_path / "whole.npy", device="cpu", say=lambda _: None).path
    out, parts = tmp_path / "v.npy", tmp_path / "v.npy.parts"

    def work() -> int:
        embed(run, digits, out, device="cpu", say=lambda _: None)
        return 0

    for number in range(5):
        child = Command(tmp_path / "log", instead=work)
        until(lambda: (parts / f"part-{number:06d}.npy").exists() or out.exists())  # noqa: B023
        os.kill(child.process, signal.SIGKILL)
        child.wait()
        if out.exists():
            break
    said: list[str] = []
    if not out.exists():
        embed(run, digits, out, device="cpu", say=said.append)
        assert said  # it says that it continues
    assert out.read_bytes() == whole.read_bytes() and read_embeddings(out).names == read_embeddings(whole).names
    assert not parts.exists() or said
    tally("kills", number + 1)
