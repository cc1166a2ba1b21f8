"""Indexes of embeddings files: recall beside exact search, builds that go on, and damage."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch

import kontrast
from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.lens.measures import directions
from kontrast.probes import nearest_rows
from kontrast.runs import duplicates as duplicates_module
from kontrast.runs import index as module
from kontrast.runs.vector_index import CANDIDATES, KINDS, open_index

ROWS, WIDTH = 6000, 24


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A file of clustered vectors of unequal length, with names."""
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("vectors") / "v.npy"
    centers = random.standard_normal((60, WIDTH))
    vectors = centers[random.integers(0, 60, ROWS)] + 0.5 * random.standard_normal((ROWS, WIDTH))
    np.save(path, (vectors * random.uniform(0.5, 3, (ROWS, 1))).astype(np.float32))
    names = path.with_suffix(".names.jsonl")
    names.write_text("".join(json.dumps({"path": f"{n}.png", "encoder": "e"}) + "\n" for n in range(ROWS)))
    return path


@pytest.fixture
def small(monkeypatch):
    """Chunks and shards of 1,000 rows."""
    monkeypatch.setattr(module, "CHUNK", 1000)
    monkeypatch.setattr(module, "SHARD_BYTES", 1)


def brute_force(path, queries, k):
    vectors = np.load(path).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = queries.double().numpy() @ vectors.T
    order = np.argsort(-cosines, axis=1)[:, :k]
    return np.take_along_axis(cosines, order, 1), order


@pytest.mark.parametrize("kind", KINDS)
def test_recall_beside_exact_search(clustered, tmp_path, small, kind):
    pytest.importorskip("faiss")
    lines: list[str] = []
    result = kontrast.index(clustered, tmp_path / "index", kind=kind, say=lines.append)
    found = open_index(tmp_path / "index")
    queries = directions(torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(1)))
    queries = torch.cat([queries[:20], found.file[:80]])
    cosines, rows = found.search(queries, 10)
    exact_cosines, exact_rows = brute_force(clustered, queries, 10)
    recall = np.mean([len(set(a) & set(b)) for a, b in zip(rows.tolist(), exact_rows.tolist())]) / 10
    assert recall >= (1.0 if kind == "flat" else 0.9)
    vectors = directions(torch.from_numpy(np.load(clustered)))
    same = (queries[:, None] * vectors[rows]).sum(-1)
    assert torch.allclose(cosines, same, atol=1e-5), "the cosines are exact, whatever the codes"
    assert (cosines.diff(dim=1) <= 1e-6).all() and (rows[20:, 0] == torch.arange(80)).all()
    assert (exact_cosines - cosines.numpy() > -1e-5).all()
    measured = result.facts["measured"]
    assert measured[-1]["lists"] == 0 and measured[-1]["recall"] == 1.0
    if kind != "flat":
        assert measured[-2]["recall"] >= module.ENOUGH and measured[-2]["lists"] == result.facts["probes"]
        assert "recall@10" in str(result) and "exact" in str(result)
        codes = ROWS * WIDTH // (1 if kind == "ivf-8bit" else 4)
        assert (tmp_path / "index" / "lists.ivfdata").stat().st_size < 2.2 * (codes + 8 * ROWS)
    assert sorted(path.name for path in (tmp_path / "index").iterdir() if path.name != ".lock") == (
        ["index.json"] if kind == "flat" else ["index.faiss", "index.json", "lists.ivfdata"]
    )


def test_the_number_of_lists_and_the_kind_follow_from_the_size():
    assert module.choose_kind(49_999, 128) == "flat" and module.choose_kind(50_000, 128) == "ivf-8bit"
    assert module.choose_kind(10_000_000, 128) == "ivf-8bit" and module.choose_kind(100_000_000, 512) == "ivf-pq"
    assert [module.centroids_for(n) for n in (1, 100, 10_000, 1_000_000, 10_000_000)] == [1, 6, 128, 1024, 4096]


def test_an_interrupted_build_goes_on_and_equals_a_whole_one(clustered, tmp_path, small, monkeypatch):
    pytest.importorskip("faiss")
    kontrast.index(clustered, tmp_path / "whole", kind="ivf-8bit", say=lambda line: None)
    store, stored = module._store, []

    def dies_after_three(faiss, part, path):
        if len(stored) == 3:
            raise KeyboardInterrupt
        stored.append(path.name)
        store(faiss, part, path)

    monkeypatch.setattr(module, "_store", dies_after_three)
    with pytest.raises(KeyboardInterrupt):
        kontrast.index(clustered, tmp_path / "index", kind="ivf-8bit", say=lambda line: None)
    with pytest.raises(DataError, match="no index"):
        open_index(tmp_path / "index")
    monkeypatch.setattr(module, "_store", lambda *given: stored.append(given[2].name) or store(*given))
    place = tmp_path / "index"
    assert (place / "part").is_dir()
    kontrast.index(clustered, place, kind="ivf-8bit", say=lambda line: None)
    assert stored == ["trained", "shard-0", "shard-1000", "shard-2000", "shard-3000", "shard-4000", "shard-5000",
                      "index.faiss"]  # fmt: skip
    first, second = open_index(tmp_path / "whole"), open_index(place)
    queries = first.file[:50]
    for one, other in zip(first.search(queries, 7, probes=3), second.search(queries, 7, probes=3)):
        assert torch.equal(one, other)


def test_bad_places_and_damaged_indexes_are_refused(clustered, tmp_path, small, capfd):
    pytest.importorskip("faiss")
    copy = tmp_path / "v.npy"
    shutil.copy(clustered, copy)
    place = tmp_path / "index"
    kontrast.index(copy, place, kind="ivf-8bit", say=lambda line: None)
    assert capfd.readouterr().out == "", "faiss prints nothing on standard output"
    with pytest.raises(UsageError, match=r"--kind ivf: .*ivf-8bit"):
        kontrast.index(copy, place, kind="ivf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="is no index"):
        kontrast.index(copy, tmp_path / "full")
    head = (place / "index.faiss").read_bytes()
    for content in (head[:-1], head[:50] + b"x" + head[51:]):
        (place / "index.faiss").write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged: index\.faiss or lists\.ivfdata is missing or"):
            open_index(place)
    (place / "index.faiss").write_bytes(head)
    os.rename(tmp_path, tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved")
    assert len(open_index(moved / "index").file) == ROWS, "index and file may be moved together"
    os.utime(moved / "v.npy", ns=(7, 7))
    with pytest.raises(DataError, match=r"v.npy is not the file that .* is the index of"):
        open_index(moved / "index")
    (moved / "v.npy").unlink()
    with pytest.raises(DataError, match="is gone: name it with --embeddings"):
        open_index(moved / "index")
    for text in ("{", "{}", "[]", json.dumps({"version": 1})):
        (moved / "index" / "index.json").write_text(text)
        with pytest.raises(DataError, match="damaged, or no index"):
            open_index(moved / "index")
    with pytest.raises(DataError, match="no index"):
        open_index(moved / "nothing")


def test_without_faiss_the_extra_is_named(clustered, tmp_path, small, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[index\]'"):
        kontrast.index(clustered, tmp_path / "index", kind="ivf-8bit", say=lambda line: None)
    kontrast.index(clustered, tmp_path / "flat", kind="flat")


def test_duplicates_are_found_through_an_index(tmp_path, small, monkeypatch):
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    vectors = random.standard_normal((5000, WIDTH))
    vectors[1000:1050] = vectors[:50] + 0.002 * random.standard_normal((50, WIDTH))
    vectors[2000] = vectors[1000] + 0.002 * random.standard_normal(WIDTH)
    np.save(tmp_path / "v.npy", vectors.astype(np.float32))
    exact, lines = kontrast.duplicates(tmp_path / "v.npy", 0.999, device="cpu"), []
    assert len(exact) == 50
    monkeypatch.setattr(duplicates_module, "INDEXED_FROM", 5000)
    monkeypatch.setattr(module, "FLAT_BELOW", 100)
    for _ in range(2):
        found = kontrast.duplicates(tmp_path / "v.npy", 0.999, device="cpu", say=lines.append)
        of_names = {tuple(group.names): group.similarity for group in exact}
        assert {tuple(group.names): group.similarity for group in found} == pytest.approx(of_names, abs=2e-6)
        built = [line for line in lines if "compared through an index" in line]
        assert len(built) == 1, "the second call uses the index that is there"
    given = kontrast.duplicates(tmp_path / "v.npy", 0.999, index=tmp_path / "v.index", device="cpu")
    assert len(given) == 50
    lines.clear()
    assert len(kontrast.duplicates(tmp_path / "v.npy", 0.999, exact=True, device="cpu", say=lines.append)) == 50
    assert not lines
    with pytest.raises(UsageError, match="--index with --exact"):
        kontrast.duplicates(tmp_path / "v.npy", index=tmp_path / "v.index", exact=True)


def test_neighbors_through_an_index_are_the_exact_ones(tmp_path):
    from support import tiny_run
    from support.made_images import picture

    run = tiny_run.trained()
    picture(3, 32).save(tmp_path / "q.png")
    exact = kontrast.neighbors(run, tmp_path / "q.png", k=5, device="cpu", say=lambda line: None)
    vectors = next((run / "embeddings").glob("train*.npy"))
    kontrast.index(vectors, tmp_path / "index", kind="flat")
    found = kontrast.neighbors(run, tmp_path / "q.png", index=tmp_path / "index", k=5, device="cpu")
    assert found == exact
    np.save(tmp_path / "other.npy", np.ones((4, 3), np.float32))
    kontrast.index(tmp_path / "other.npy", tmp_path / "narrow")
    with pytest.raises(DataError, match="vectors of width 3, the run gives"):
        kontrast.neighbors(run, tmp_path / "q.png", index=tmp_path / "narrow", device="cpu")


def test_more_candidates_than_neighbors_are_compared_exactly():
    assert CANDIDATES["flat"] == 1 < CANDIDATES["ivf-8bit"] < CANDIDATES["ivf-pq"]
    assert module.recall_of(torch.tensor([[1, 2, 3]]), torch.tensor([[3, 1, 9]])) == pytest.approx(2 / 3)
    without = module.without_self(torch.tensor([[5, 1, 2], [7, 8, 9]]), torch.tensor([1, 3]), 2)
    assert without.tolist() == [[5, 2], [7, 8]]
    assert nearest_rows(torch.eye(2), torch.eye(2), 1)[1].flatten().tolist() == [0, 1]
