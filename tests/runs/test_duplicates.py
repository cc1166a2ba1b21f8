"""Groups of near-duplicates: chains of pairs, in one tile or across several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kontrast.errors import DataError, UsageError
from kontrast.runs import duplicates as module
from kontrast.runs.duplicates import duplicates, group_duplicates
from kontrast.runs.embeddings_file import Embeddings


def made(vectors: np.ndarray) -> Embeddings:
    return Embeddings(Path("v.npy"), vectors.astype(np.float32), [f"{n}.png" for n in range(len(vectors))])


@pytest.mark.parametrize("tile", [7, 64])
def test_groups_are_chains_of_pairs(monkeypatch, tile):
    monkeypatch.setattr(module, "TILE", tile)
    random, compared = np.random.default_rng(0), []
    vectors = random.standard_normal((40, 16))
    for copy, original, noise in ((3, 1, 0.01), (20, 1, 0.01), (33, 20, 0.01), (12, 11, 0.1), (39, 5, 0.05)):
        vectors[copy] = 3 * vectors[original] + noise * random.standard_normal(16)
    groups = group_duplicates(made(vectors), 0.99, advance=compared.append)
    assert [g.names for g in groups] == [
        ["1.png", "3.png", "20.png", "33.png"],
        ["5.png", "39.png"],
        ["11.png", "12.png"],
    ]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert groups[2].similarity == pytest.approx(unit[11] @ unit[12], abs=1e-5)
    assert sum(compared) == 40


def test_copies_are_found_at_a_cosine_of_one():
    """In float32 the product of a unit row with itself is often less than one."""
    vectors = np.random.default_rng(0).standard_normal((50, 64))
    groups = group_duplicates(made(np.concatenate([vectors, vectors])), 1.0)
    assert sorted(g.names for g in groups) == sorted([f"{n}.png", f"{n + 50}.png"] for n in range(50))


def test_different_rows_zero_rows_and_one_row_make_no_group():
    assert group_duplicates(made(np.eye(5))) == []
    assert group_duplicates(made(np.zeros((4, 3)))) == []
    assert group_duplicates(made(np.ones((1, 3)))) == []


def test_a_collapsed_encoder_and_impossible_cosines_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_PAIRS", 100)
    with pytest.raises(DataError, match="raise --above"):
        group_duplicates(made(np.ones((30, 3))))
    with pytest.raises(UsageError, match=r"1\.5.*between -1 and 1"):
        duplicates(tmp_path / "v.npy", 1.5)


def test_the_result_prints_as_a_table_and_escapes_hostile_names(tmp_path):
    np.save(tmp_path / "v.npy", np.array([[1.0, 0], [0, 1], [2, 0]], dtype=np.float32))
    names = ["a\nb.png", "c.png", "d.png"]
    (tmp_path / "v.names.jsonl").write_text("".join(f"{json.dumps({'path': name})}\n" for name in names))
    found = duplicates(tmp_path / "v.npy", 0.9, device="cpu")
    assert len(found) == found.repeated == 1 and found[0].names == ["a\nb.png", "d.png"]
    table, summary = str(found).splitlines()
    assert table.split() == ["1.0000", "a\\nb.png", "d.png"] and summary.startswith("1 groups")
    assert found.to_dict()["groups"] == [{"similarity": 1.0, "names": ["a\nb.png", "d.png"]}]
