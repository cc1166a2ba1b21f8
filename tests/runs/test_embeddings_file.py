"""Embeddings files: what is read, and that every error names its row."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.runs.embeddings_file import names_path, read_embeddings


@pytest.fixture
def vectors():
    return np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)


def named(path, vectors, names):
    np.save(path, vectors)
    names_path(path).write_text("".join(json.dumps({"id": i, "path": n}) + "\n" for i, n in enumerate(names)))
    return path


def test_npy_with_and_without_names(tmp_path, vectors):
    path = tmp_path / "v.npy"
    np.save(path, vectors)
    assert read_embeddings(path).names[3] == "row 3"
    strange = [f"a/\udcff{i}.png" for i in range(20)]
    found = read_embeddings(named(path, vectors, strange), width=6)
    assert found.names == strange and (found.vectors == vectors).all()
    rows, kept = found.sample(5)
    assert kept.tolist() == [0, 4, 8, 12, 16] and torch.equal(rows, torch.from_numpy(vectors[::4]))


def test_other_layouts_and_types_read_the_same(tmp_path, vectors):
    for number, other in enumerate([np.asfortranarray(vectors), vectors.astype(np.float64), vectors[:, :]]):
        np.save(tmp_path / f"{number}.npy", other)
        assert torch.equal(read_embeddings(tmp_path / f"{number}.npy").rows(), torch.from_numpy(vectors))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_an_error_with_its_name(tmp_path, vectors, bad):
    vectors[13, 2] = bad
    with pytest.raises(DataError, match=r"row 13 \(cat-13.png\): NaN or infinity"):
        read_embeddings(named(tmp_path / "v.npy", vectors, [f"cat-{i}.png" for i in range(20)]))


@pytest.mark.filterwarnings("error")
def test_a_value_too_large_for_float32_is_an_error_without_a_warning(tmp_path, vectors):
    large = vectors.astype(np.float64)
    large[7, 1] = -1e300
    with pytest.raises(DataError, match=r"row 7 \(cat-7.png\): NaN or infinity as float32"):
        read_embeddings(named(tmp_path / "v.npy", large, [f"cat-{i}.png" for i in range(20)]))


def test_wrong_shapes_are_refused(tmp_path, vectors):
    path = tmp_path / "v.npy"
    np.save(path, vectors)
    with pytest.raises(DataError, match=r"width 6.* 8"):
        read_embeddings(path, width=8)
    for shape in [(20,), (0, 6), (4, 5, 6)]:
        np.save(path, np.resize(vectors, shape))
        with pytest.raises(DataError):
            read_embeddings(path)
    np.save(path, np.array([["a", "b"]]))
    with pytest.raises(DataError, match="give numbers"):
        read_embeddings(path)


def test_damaged_files_are_refused_and_never_unpickled(tmp_path, vectors):
    path = tmp_path / "v.npy"
    np.save(path, vectors)
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:60], whole[:-3], b"\x93NUMPY" + b"\xff" * 40, b"PK\x03\x04 no archive"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="damaged or cut short"):
            read_embeddings(path)
    np.save(path, np.array([{"x": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="damaged or cut short"):
        read_embeddings(path)


def test_the_number_of_names_must_match(tmp_path, vectors):
    with pytest.raises(DataError, match="19 rows"):
        read_embeddings(named(tmp_path / "v.npy", vectors, ["x"] * 19))
    names_path(tmp_path / "v.npy").write_text('{"id": 0}\n')
    with pytest.raises(DataError, match="line 1"):
        read_embeddings(tmp_path / "v.npy")


def test_no_file_and_other_kinds_of_file(tmp_path):
    with pytest.raises(DataError, match="kontrast embed"):
        read_embeddings(tmp_path / "v.npy")
    with pytest.raises(UsageError, match=r"\.npy or \.parquet"):
        read_embeddings(tmp_path / "v.csv")


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "v.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(EnvironmentFault, match="pip install pyarrow"):
        read_embeddings(tmp_path / "v.parquet")


class TestParquet:
    @pytest.fixture(autouse=True)
    def arrow(self):
        self.arrow = pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
        import pyarrow.parquet

        self.parquet = pyarrow.parquet

    def write(self, path, columns):
        self.parquet.write_table(self.arrow.table(columns), path, row_group_size=7)
        return path

    def test_plain_and_fixed_lists_with_labels(self, tmp_path, vectors):
        fixed = self.arrow.FixedSizeListArray.from_arrays(self.arrow.array(vectors.ravel()), 6)
        labels = [["cat", "dog"][i % 2] for i in range(20)]
        for column in (fixed, vectors.tolist(), vectors.astype(float).tolist()):
            found = read_embeddings(self.write(tmp_path / "v.parquet", {"vector": column, "label": labels}))
            assert torch.equal(found.rows(), torch.from_numpy(vectors))
            assert found.labels.tolist() == [0, 1] * 10
            assert found.names[19] == "row 19"

    def test_rows_of_another_width_are_errors(self, tmp_path, vectors):
        lists = vectors.tolist()
        lists[17] = lists[17][:3]
        with pytest.raises(DataError, match=r"row 17: .*width 6"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"vector": lists}))
        lists[17] = None
        with pytest.raises(DataError, match="row 17"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"vector": lists}))

    def test_a_nan_and_a_missing_column_are_errors(self, tmp_path, vectors):
        vectors[9, 0] = np.nan
        names = [f"{i}.png" for i in range(20)]
        with pytest.raises(DataError, match=r"row 9 \(9.png\)"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"vector": vectors.tolist(), "path": names}))
        with pytest.raises(DataError, match="`vector`"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"path": names}))
        with pytest.raises(DataError, match="lists of numbers"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"vector": names}))

    @pytest.mark.filterwarnings("error")
    def test_a_value_too_large_for_float32_is_an_error(self, tmp_path, vectors):
        large = vectors.astype(np.float64)
        large[7, 1] = 1e300
        with pytest.raises(DataError, match=r"row 7 \(row 7\): NaN or infinity as float32"):
            read_embeddings(self.write(tmp_path / "v.parquet", {"vector": large.tolist()}))

    def test_a_torn_file(self, tmp_path, vectors):
        path = self.write(tmp_path / "v.parquet", {"vector": vectors.tolist()})
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="damaged or cut short"):
            read_embeddings(path)
