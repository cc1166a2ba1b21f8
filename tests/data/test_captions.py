"""Captions of images: where they come from, which are bad, and how they stay with their images."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kontrast.data import open_data
from kontrast.data.captioned_digits import COMBINATIONS, captioned_digits, color_names, held_out_combinations
from kontrast.data.captions import Captions, clean, read_captions
from kontrast.data.pack import pack
from kontrast.data.sources import preview_data
from kontrast.errors import DataError, EnvironmentFault

from support.made_images import encoded, folder_of, picture, write_tar

ROWS = [(f"{i:04d}.png", f"picture {i}") for i in range(20)] + [("0003.png", "another of  three")]
EXPECTED = [[f"picture {i}"] for i in range(20)]
EXPECTED[3] = ["picture 3", "another of three"]


def write_rows(path, rows, columns=("file", "caption")) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row))) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps({name: [t for n, t in rows if n == name] for name, _ in rows}))
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        tables = {key: [row[i] for row in rows] for i, key in enumerate(columns)}
        parquet.write_table(pyarrow.table(tables), path)
    else:
        split = "\t" if path.suffix == ".tsv" else ","
        path.write_text("\n".join(split.join(row) for row in [columns, *rows]) + "\n")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_a_file_beside_the_images_gives_each_its_captions(tmp_path, suffix):
    folder_of(tmp_path, 20)
    write_rows(tmp_path / f"captions{suffix}", ROWS)
    images = open_data(tmp_path, "all", captions="auto")
    assert images.captions.per_image() == EXPECTED
    assert open_data(tmp_path, "all").captions is None


def test_images_with_captions_are_divided_like_labeled_ones(tmp_path):
    folder_of(tmp_path, 20)
    write_rows(tmp_path / "captions.csv", ROWS)
    train, test = (open_data(tmp_path, split, captions="auto") for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4) and not set(train.names) & set(test.names)
    for part in (train, test):
        assert part.captions.per_image() == [EXPECTED[int(name[:4])] for name in part.names]
    assert preview_data(tmp_path, "train", captions="auto").count == 16


def test_names_may_be_those_of_files_in_sub_folders(tmp_path):
    folder_of(tmp_path / "Images", 4)
    write_rows(tmp_path / "captions.txt", ROWS[:4], columns=("image", "caption"))
    assert open_data(tmp_path, "all", captions="auto").captions.per_image() == [[f"picture {i}"] for i in range(4)]


def test_split_folders_share_one_file_of_captions(tmp_path):
    for part, places in (("train", range(6)), ("test", range(6, 9))):
        (tmp_path / part).mkdir()
        for i in places:
            picture(i).save(tmp_path / part / f"{i:04d}.png")
    write_rows(
        tmp_path / "captions.csv", [(f"{'train' if i < 6 else 'test'}/{i:04d}.png", f"number {i}") for i in range(9)]
    )
    test = open_data(tmp_path, "test", captions="auto")
    assert test.captions.per_image() == [["number 6"], ["number 7"], ["number 8"]] and not test.bad


def split_folders(place, parts=("train", "test"), count=2) -> None:
    for part in parts:
        folder_of(place / part, count)


def test_splits_with_the_same_file_names_keep_their_own_captions(tmp_path):
    split_folders(tmp_path)
    rows = [(f"{part}/{i:04d}.png", f"{part} {i}") for part in ("train", "test") for i in range(2)]
    write_rows(tmp_path / "captions.csv", rows)
    for part in ("train", "test"):
        assert open_data(tmp_path, part, captions="auto").captions.per_image() == [[f"{part} 0"], [f"{part} 1"]]


def test_a_name_that_may_be_of_either_split_is_bad(tmp_path):
    split_folders(tmp_path)
    picture(2).save(tmp_path / "train" / "0002.png")
    rows = [("0000.png", "whose?"), ("test/0000.png", "a"), ("0002.png", "train's alone"), ("test/0001.png", "b")]
    write_rows(tmp_path / "captions.csv", rows)
    train = open_data(tmp_path, "train", captions="auto", max_bad=1)
    assert train.names == ["0002.png"] and train.captions.per_image() == [["train's alone"]]
    assert dict(train.bad)["0000.png"] == "an image of another split has the same name: write train/0000.png"
    test = open_data(tmp_path, "test", captions="auto", max_bad=1)
    assert test.captions.per_image() == [["a"], ["b"]] and len(test.bad) == 1


def test_the_whole_name_is_proposed_if_there_are_class_folders(tmp_path):
    for part in ("train", "test"):
        folder_of(tmp_path / part, 2, classes=2)
    name = "class0/0000.png"
    write_rows(
        tmp_path / "captions.csv", [("0000.png", "whose?"), (f"train/{name}", "a"), ("train/class1/0001.png", "b")]
    )
    train = open_data(tmp_path, "train", captions="auto", max_bad=1)
    assert dict(train.bad)["0000.png"].endswith(f"write train/{name}")


def test_a_name_with_a_folder_is_not_taken_for_a_file_of_another_folder(tmp_path):
    folder_of(tmp_path / "a", 2)
    write_rows(tmp_path / "captions.csv", [("a/0000.png", "own"), ("a/0001.png", "own"), ("b/0000.png", "another's")])
    images = open_data(tmp_path, "all", captions="auto", max_bad=1)
    assert images.captions.per_image() == [["own"], ["own"]] and [name for name, _ in images.bad] == ["b/0000.png"]


def test_a_caption_with_an_unquoted_comma_is_bad(tmp_path):
    (tmp_path / "captions.csv").write_text('file,caption\na.png,red, green\nb.png,"red, green"\n')
    assert list(read_captions(tmp_path / "captions.csv")) == [
        ("a.png", None, "it has more cells than the header: quote the caption"),
        ("b.png", "red, green", ""),
    ]


def test_json_lines_end_at_newlines_alone(tmp_path):
    rows = [{"file": "a.png", "caption": "one\u2028two\x85three"}, {"file": "b.png", "caption": "four"}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "captions.jsonl").write_bytes(lines.encode())
    found = list(read_captions(tmp_path / "captions.jsonl"))
    assert found == [("a.png", "one two three", ""), ("b.png", "four", "")]


def test_cocos_captions_are_read(tmp_path):
    tree = {"info": {}, "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}]}
    said = [(8, "first"), (7, "second"), (8, "third"), (9, "of no image"), ([8], "of a list")]
    tree["annotations"] = [{"id": i, "image_id": image, "caption": text} for i, (image, text) in enumerate(said)]
    (tmp_path / "captions.json").write_text(json.dumps(tree))
    assert list(read_captions(tmp_path / "captions.json")) == [
        ("b.png", "first", ""),
        ("a.png", "second", ""),
        ("b.png", "third", ""),
        ("captions.json, row 4", None, "the row names no file"),
        ("captions.json, row 5", None, "the row names no file"),
    ]


def test_missing_and_bad_captions_are_counted_and_listed(tmp_path):
    folder_of(tmp_path, 20)
    lines = [json.dumps({"file": n, "caption": t}) for n, t in ROWS[:18]]
    lines += [
        "{not json",
        json.dumps({"file": "0018.png", "caption": "  "}),
        json.dumps({"file": "lost.png", "caption": "x"}),
    ]
    lines += [json.dumps({"file": "0019.png", "caption": 7}), json.dumps({"caption": "of nothing"})]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match="are bad, over the 5% allowed"):
        open_data(tmp_path, "all", captions="auto")
    images = open_data(tmp_path, "all", captions="auto", max_bad=0.5)
    assert len(images) == 18 and len(images.captions) == 18
    assert dict(images.bad) == {
        "captions.jsonl, row 19": "the row can't be read",
        "0018.png": "its caption is empty",
        "lost.png": "it has a caption, and is not among the images",
        "0019.png": "its caption is no text but int",
        "captions.jsonl, row 23": "the row names no file",
    }


def test_an_image_that_cannot_be_read_takes_its_captions_with_it(tmp_path):
    folder_of(tmp_path, 20)
    (tmp_path / "0002.png").write_bytes(b"no picture")
    write_rows(tmp_path / "captions.csv", ROWS)
    images = open_data(tmp_path, "all", captions="auto")
    assert images.captions.per_image() == EXPECTED[:2] + EXPECTED[3:] and [name for name, _ in images.bad] == [
        "0002.png"
    ]


def test_no_captions_and_unknown_columns_are_one_clear_line(tmp_path):
    folder_of(tmp_path, 3)
    with pytest.raises(DataError, match=r"has no captions: put captions.csv with the columns file,caption"):
        open_data(tmp_path, "all", captions="auto")
    with pytest.raises(DataError, match="there is no file"):
        open_data(tmp_path, "all", captions="texts.csv")
    (tmp_path / "captions.csv").write_text("a,b\n0000.png,x\n")
    with pytest.raises(DataError, match="has the columns a, b: it needs one of file names"):
        open_data(tmp_path, "all", captions="auto")
    (tmp_path / "captions.csv").write_text("file,caption\nother.png,x\n")
    with pytest.raises(DataError, match=r"none of the 3 images in .* has a caption"):
        open_data(tmp_path, "all", captions="auto")


def test_text_files_in_shards_are_captions_if_they_are_wanted_and_labels_otherwise(tmp_path):
    members = []
    for i in range(6):
        members += [(f"{i}.png", encoded(picture(i), "PNG")), (f"{i}.cls", str(i % 2).encode())]
        members += [(f"{i}.txt", f"text {i}\nsecond {i}".encode())] if i < 3 else []
        members += [(f"{i}.json", json.dumps({"caption": f"text {i}"}).encode())] if 3 <= i < 5 else []
    write_tar(tmp_path / "a.tar", [*members, ("5.json", b"{broken")])
    images = open_data(tmp_path / "a.tar", "all", captions="auto", max_bad=0.5)
    assert images.captions.per_image() == [*([f"text {i}", f"second {i}"] for i in range(3)), ["text 3"], ["text 4"]]
    assert images.labels.tolist() == [0, 1, 0, 1, 0] and images.bad == [("a.tar/5.png", "its .json can't be read")]
    again = open_data(tmp_path / "a.tar", "all", captions="auto", max_bad=0.5)  # from the cached index
    assert again.captions.per_image() == images.captions.per_image() and again.bad == images.bad
    assert open_data(tmp_path / "a.tar", "all").captions is None


def test_a_packed_store_keeps_captions_and_notices_damage(tmp_path):
    folder_of(tmp_path / "images", 20)
    write_rows(tmp_path / "images" / "captions.csv", ROWS)
    pack(tmp_path / "images", tmp_path / "store", captions="auto")
    train = open_data(tmp_path / "store", "train", captions="auto")
    assert train.captions.per_image() == [EXPECTED[int(name[:4])] for name in train.names]
    assert train.subset([2, 0]).captions.per_image() == [train.captions.of_image(2), train.captions.of_image(0)]
    place = tmp_path / "store" / "train" / "captions.json"
    place.write_text(place.read_text().replace("picture", "pikture"))
    (tmp_path / "images" / "captions.csv").unlink()  # so that it can't be packed again
    with pytest.raises(DataError, match=r"captions.json has a wrong checksum"):
        open_data(tmp_path / "store", "train")


def test_a_changed_caption_changes_the_fingerprint(tmp_path):
    folder_of(tmp_path, 20)
    write_rows(tmp_path / "captions.csv", ROWS)
    before = open_data(tmp_path, "train", captions="auto").fingerprint
    write_rows(tmp_path / "captions.csv", [(name, text.replace("picture", "photo")) for name, text in ROWS])
    assert open_data(tmp_path, "train", captions="auto").fingerprint != before


def test_equal_captions_have_one_id():
    captions = Captions.of([["a", "b"], ["b"], ["c"]])
    assert captions.ids.tolist() == [0, 1, 1, 2] and captions.owners.tolist() == [0, 0, 1, 2] and captions.repeated
    assert not Captions.of([["a", "a"], ["b"]]).repeated  # twice at one image: no two images share it
    assert captions.take([2, 1]).texts == ["c", "b"]
    assert clean(" two\n words ") == ("two words", "") and clean(None)[0] is None


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    folder_of(tmp_path, 3)
    (tmp_path / "captions.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'kontrast\[parquet\]'"):
        open_data(tmp_path, "all", captions="auto")


def test_flickr8k_is_read_in_its_own_layout(tmp_path):
    root = tmp_path / "flickr8k"
    folder_of(root / "Images", 8)
    names = [f"{i:04d}.png" for i in range(8)]
    (root / "Flickr8k.token.txt").write_text(
        "".join(f"{n}#{k}\tCaption {k} of {n} .\n" for n in names for k in range(5))
    )
    for part, chosen in (("train", names[:5]), ("dev", names[5:6]), ("test", [*names[6:], "gone.png"])):
        (root / f"Flickr_8k.{part}Images.txt").write_text("\n".join(chosen))
    train, val = (open_data("flickr8k", split, root=tmp_path) for split in ("train", "val"))
    assert (len(train), len(val)) == (5, 1) and val.names == ["0005.png"]
    assert train.captions.of_image(1) == [f"Caption {k} of 0001.png ." for k in range(5)]
    with pytest.raises(DataError, match=r"gone.png \(it is in the split, and not among the images\)"):
        open_data("flickr8k", "test", root=tmp_path)
    assert len(open_data("flickr8k", "test", root=tmp_path, max_bad=0.5)) == 2


def test_captioned_digits_say_what_is_drawn_and_hold_out_combinations():
    train, test = captioned_digits("train"), captioned_digits("test")
    first, second = test.captions.of_image(0)
    assert f" {COMBINATIONS[int(test.factors['combination'][0])]} " in first and second.split(": ")[0] in first
    seen, unseen = set(train.factors["combination"].tolist()), test.factors["unseen"]
    assert 0.08 < unseen.float().mean() < 0.2 and not train.factors["unseen"].any()
    assert not seen & set(test.factors["combination"][unseen].tolist())
    assert set(test.factors["combination"][~unseen].tolist()) <= seen
    pairs = [COMBINATIONS[i].split() for i in test.factors["combination"][unseen].tolist()]
    assert {digit for _, digit in pairs} == set("0123456789")
    assert held_out_combinations(np.array([0, 1]), ["white", "white"]).tolist() == [True, False]


def test_colors_have_their_names():
    given = torch.tensor(
        [[250, 10, 10], [10, 250, 10], [10, 10, 250], [250, 250, 10], [240, 240, 240], [9, 9, 9], [128] * 3]
    )
    assert color_names(given.numpy()) == ["red", "green", "blue", "yellow", "white", "black", "gray"]
