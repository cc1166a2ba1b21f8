"""Images in Parquet files and in data sets of Hugging Face are those of the folder that they were made of."""

from __future__ import annotations

import sys

import pytest
import torch

from kontrast.data import open_data
from kontrast.data.paths import describe_source
from kontrast.data.table_listing import split_of_file
from kontrast.errors import DataError, EnvironmentFault, UsageError

from support.places import COUNT, contents, train, upload, write_folder, write_parquet


@pytest.fixture
def pyarrow():
    return pytest.importorskip("pyarrow", reason="needs the extra parquet")


def test_what_names_tables(tmp_path):
    """A folder of images with a Parquet file beside them stays a folder of images."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "train-00000-of-00001.parquet").touch()
    (write_folder(tmp_path / "photos", contents(4)) / "captions.parquet").touch()
    assert describe_source(tmp_path / "tables").kind == "tables"
    assert describe_source(tmp_path / "photos").kind == "folder"
    assert describe_source("train-{00..09}.parquet").kind == describe_source("data/*.parquet").kind == "tables"
    assert describe_source("hf-dataset:owner/name:train").kind == "dataset"
    assert split_of_file("a/train-00000-of-00002.parquet") == split_of_file("a/train/0.parquet") == "train"
    assert split_of_file("validation.parquet") == "validation" and split_of_file("a/training-0.parquet") == ""


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[parquet\]'"):
        open_data(tmp_path / "x.parquet")
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[datasets\]'"):
        open_data("hf-dataset:owner/name")


def test_the_same_training_from_parquet(pyarrow, tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    folder, tables = write_folder(tmp_path / "folder"), write_parquet(tmp_path / "tables")
    upload(files, tables, "/tables-of-this-test")
    expected = train(folder, tmp_path / "run")
    places = [tables, f"{tables}/{{000..001}}.parquet", f"{tables}/*.parquet", "memory://tables-of-this-test"]
    for number, place in enumerate(places):
        assert train(place, tmp_path / f"run{number}") == expected, place
    streamed = train(tables, tmp_path / "streamed", "data.pack=false")
    assert train("memory://tables-of-this-test", tmp_path / "remote", "data.pack=false") == streamed


def test_a_run_on_parquet_resumes_exactly(pyarrow, tmp_path):
    from kontrast.training.pretrain import pretrain

    tables = write_parquet(tmp_path / "tables")
    expected = train(tables, tmp_path / "whole", "data.pack=false")
    train(tables, tmp_path / "half", "data.pack=false", "training.max_steps=3")
    more = ["training.max_steps=6"]
    again = pretrain(out=tmp_path / "half", resume=True, overrides=more, device="cpu", say=lambda line: None)
    assert (again / "encoder.safetensors").read_bytes() == expected


def test_labels_captions_and_splits_of_parquet(pyarrow, tmp_path):
    tables = write_parquet(tmp_path / "tables")
    images = open_data(tables, "all", captions="auto")
    assert images.classes == ["a", "b"] and images.labels.tolist() == [i * 2 // COUNT for i in range(COUNT)]
    assert images.names[0] == "000.parquet/00000000" and images.captions.of_image(COUNT - 1) == ["picture b/0047.png"]
    (tables / "000.parquet").rename(tables / "train-0.parquet")
    (tables / "001.parquet").rename(tables / "test-0.parquet")
    assert len(open_data(tables, "train")) == len(open_data(tables, "test")) == COUNT // 2


def test_cells_without_an_image_are_bad_and_paths_in_them_are_never_opened(pyarrow, tmp_path):
    import pyarrow.parquet

    (tmp_path / "private.png").write_bytes(contents()["a/0000.png"])
    cells = [{"bytes": content, "path": None} for content in list(contents().values())[:38]]
    cells += [{"bytes": None, "path": str(tmp_path / "private.png")}, {"bytes": b"no image", "path": ""}]
    pyarrow.parquet.write_table(pyarrow.table({"img": cells}), tmp_path / "x.parquet")
    images = open_data(tmp_path / "x.parquet")
    assert len(images) == 38
    assert [reason for _, reason in images.bad] == ["its cell has no bytes", "not an image: text"]


def test_damaged_and_unsuitable_parquet(pyarrow, tmp_path):
    import pyarrow.parquet

    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing else")
    with pytest.raises(DataError, match=r"x.parquet can't be read as Parquet"):
        open_data(tmp_path / "x.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError, match="has the columns a, b: it needs one of encoded images, named 'image'"):
        open_data(tmp_path / "y.parquet")
    with pytest.raises(DataError, match=r"z\.parquet"):
        open_data(tmp_path / "z.parquet")


@pytest.mark.integration
def test_the_same_training_from_a_data_set_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
    folder = write_folder(tmp_path / "folder")
    rows = {"image": [{"bytes": c, "path": None} for c in contents().values()], "label": [0] * 24 + [1] * 24}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    whole = datasets.Dataset.from_dict(rows, features=features)
    whole.save_to_disk(tmp_path / "set")
    expected = train(folder, tmp_path / "run")
    assert train(f"hf-dataset:{tmp_path}/set", tmp_path / "run1") == expected
    lazy = train(f"hf-dataset:{tmp_path}/set", tmp_path / "run2", "data.pack=false")
    assert len(lazy) == len(expected)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(20, 30))}).save_to_disk(tmp_path / "sets")
    images = open_data(f"hf-dataset:{tmp_path}/sets", "test")
    assert len(images) == 10 and images.classes == ["a", "b"] and images.labels.tolist() == [0] * 4 + [1] * 6
    assert torch.equal(images[0], open_data(folder, "all")[20])
    assert len(open_data(f"hf-dataset:{tmp_path}/sets:test", "all")) == 10
    with pytest.raises(DataError, match="has no split 'tests': did you mean 'test'"):
        open_data(f"hf-dataset:{tmp_path}/sets:tests")
    with pytest.raises(UsageError, match="needs a name"):
        open_data("hf-dataset:")
