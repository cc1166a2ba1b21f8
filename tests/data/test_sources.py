"""Folders of images: their classes, splits, names, links and bad files."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.data import ImageSet, open_data, read_labels
from kontrast.data.bad_images import check_bad
from kontrast.data.cache_folder import cache_home
from kontrast.data.labels import labels_of, read_label_sets, unknown_names
from kontrast.errors import DataError, EnvironmentFault, UsageError


def test_sub_folders_are_classes_and_a_share_is_held_out(make_folder):
    root = make_folder(classes=3, each=20)
    train, test = open_data(root, "train"), open_data(root, "test")
    assert train.classes == test.classes == ["class0", "class1", "class2"]
    assert torch.bincount(train.labels).tolist() == [16] * 3 and torch.bincount(test.labels).tolist() == [4] * 3
    assert not set(train.names) & set(test.names) and train.has_test
    assert len(open_data(root, "all")) == 60
    for name, label in zip(test.names, test.labels):
        assert name.startswith(f"class{label}/")


def test_each_image_has_the_pixels_of_its_file(make_folder):
    root = make_folder(classes=2, each=6)
    images = open_data(root, "all")
    for name, pixels in zip(images.names, images.images):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), np.asarray(Image.open(root / name)))


def test_a_new_file_moves_at_most_one_other_between_train_and_test(make_folder):
    root = make_folder(classes=2, each=50)
    before = set(open_data(root, "test").names)
    Image.new("RGB", (16, 16)).save(root / "class0" / "new.png")
    assert len(before - set(open_data(root, "test").names)) <= 1


def test_folders_named_train_and_test_are_the_splits(make_folder, tmp_path):
    make_folder(classes=2, each=5, name="set/train")
    make_folder(classes=2, each=3, name="set/val")
    assert len(open_data(tmp_path / "set", "train")) == 10
    assert len(open_data(tmp_path / "set", "test")) == 6
    with pytest.raises(UsageError, match="did you mean 'train'"):
        open_data(tmp_path / "set", "trian")


def test_folders_without_images_are_not_classes(make_folder):
    train = make_folder(classes=2, each=3, name="set/train")
    make_folder(classes=2, each=2, name="set/test")
    for name in ("class0-none", "__MACOSX", "notes"):
        (train / name).mkdir()
    (train / "notes" / "read.txt").write_text("none")
    (train / "link").symlink_to(train / "class1", target_is_directory=True)
    for part in ("train", "test"):
        images = open_data(train.parent, part)
        assert images.classes == ["class0", "class1"] and images.labels.unique().tolist() == [0, 1]


def test_a_flat_folder_has_no_labels_and_no_test_split(make_folder):
    root = make_folder(classes=1, each=7)
    images = open_data(root)
    assert images.labels is None and images.classes is None and len(images) == 7 and not images.has_test
    with pytest.raises(DataError, match="no test part"):
        open_data(root, "test")


@pytest.mark.parametrize("pack", [True, False])
def test_classes_that_are_too_small_to_divide_have_no_test_split(make_folder, pack):
    root = make_folder(classes=2, each=2)
    assert not open_data(root, pack=pack).has_test
    with pytest.raises(DataError, match=r"test_share of 0.2 .* 4 images"):
        open_data(root, "test", pack=pack)


def test_images_are_found_at_any_depth_and_in_upper_or_lower_case(tmp_path):
    for number, name in enumerate(["a/b/c/x.JPG", "a/y.JpEg", "b/z.PNG", "b/d/w.Tiff", "b/v.bmp", "b/u.WEBP"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        form = {"jpg": "JPEG", "jpeg": "JPEG"}.get(path.suffix[1:].lower(), path.suffix[1:].upper())
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path, form)
    images = open_data(tmp_path, "all")
    assert len(images) == 6 and images.classes == ["a", "b"] and images.labels.tolist() == [0, 0, 1, 1, 1, 1]


def test_a_missing_folder_and_a_folder_without_images_are_errors(tmp_path):
    (tmp_path / "pictures").mkdir()
    with pytest.raises(DataError, match="no images"):
        open_data(tmp_path / "pictures")
    with pytest.raises(DataError, match=r"did you mean .*pictures"):
        open_data(tmp_path / "picturs")
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        open_data("cifar-10")
    (tmp_path / "pictures" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="only 1 other files"):
        open_data(tmp_path / "pictures")


def test_bad_images_of_mixed_kinds_pass_but_as_many_of_one_kind_do_not(make_folder):
    """12 bad images of 112 are allowed if they are of twelve kinds, but not if six are of the same kind."""
    mixed = [(f"{i}.jpg", f"reason {'abcdefghijkl'[i]}") for i in range(12)]
    check_bad(mixed, 112, 0.05, "pictures")
    alike = [(name, f"damaged: {i} bytes left" if i < 6 else reason) for i, (name, reason) in enumerate(mixed)]
    with pytest.raises(
        DataError, match=r"12 of 112 .* \(5 images, or 16 of mixed kinds; 6 are 'damaged: N bytes left'\)"
    ):
        check_bad(alike, 112, 0.05, "pictures")
    check_bad(alike[1:], 112, 0.05, "pictures")
    with pytest.raises(DataError, match="17 of 112"):
        check_bad(mixed + [(f"x{i}", f"other {'abcde'[i]}") for i in range(5)], 112, 0.05, "pictures")


def test_the_fingerprint_changes_with_the_files(make_folder):
    root = make_folder(classes=1, each=5)
    first = open_data(root).fingerprint
    assert open_data(root).fingerprint == first
    os.utime(root / "0000.png", ns=(1, 1))
    touched = open_data(root).fingerprint
    (root / "0001.png").unlink()
    assert len({first, touched, open_data(root).fingerprint}) == 3


def test_labels_are_read_from_a_csv_file(make_folder, tmp_path):
    images = open_data(make_folder(classes=1, each=4))
    table = tmp_path / "labels.csv"
    table.write_text("name,label\n" + "".join(f"{n},{'cat' if i % 2 else 'dog'}\n" for i, n in enumerate(images.names)))
    labelled = read_labels(images, table)
    assert labelled.classes == ["cat", "dog"] and labelled.labels.tolist() == [1, 0, 1, 0]
    table.write_text("0000.png,cat\n0001.png,dog\n")
    with pytest.raises(DataError, match=r"no label for 2 of 4 images, the first '0002.png'"):
        read_labels(images, table)
    table.write_text("0000.png,cat\n0000.png,dog\n")
    with pytest.raises(DataError, match="two labels"):
        read_labels(images, table)


@pytest.mark.parametrize(
    "heading", ["filename,category\n", "file,species\n", "Image , Class\n", "\ufeffname,label\n", "\ufeff", ""]
)
def test_a_heading_and_a_byte_order_mark_in_a_csv_file_are_skipped(make_folder, tmp_path, heading):
    """Spreadsheets write both."""
    images, table = open_data(make_folder(classes=1, each=4)), tmp_path / "labels.csv"
    rows = "".join(f"{n},{'cat' if i % 2 else 'dog'}\n" for i, n in enumerate(images.names))
    table.write_text(heading + rows, encoding="utf-8")
    labelled = read_labels(images, table)
    assert labelled.classes == ["cat", "dog"] and labelled.labels.tolist() == [1, 0, 1, 0]


def in_memory(*names):
    return ImageSet(torch.zeros(len(names), 3, 2, 2, dtype=torch.uint8), list(names))


@pytest.mark.parametrize(
    "text",
    [
        "image,sender_id,label,kids\na,7,cat,1\nb,8,dog,2\nc,9,cat,3\n",
        "label,file\ncat,a\ndog,b\ncat,c\n",
        ",file,label\n0,a,cat\n1,b,dog\n2,c,cat\n",
        ",label\na,cat\nb,dog\nc,cat\n",
        "species,file\ncat,a\ndog,b\ncat,c\n",
        "Image Path,Category Name\na,cat\nb,dog\nc,cat\n",
        "file, label\na, cat\n b,dog \nc,cat\n",
        "a,cat,1\nb,dog,2\nc,cat,3\n",
    ],
)
def test_columns_are_found_by_the_heading(tmp_path, text):
    """Of spreadsheets with more columns, and of what pandas writes; spaces around labels do not count."""
    table = tmp_path / "labels.csv"
    table.write_text(text)
    labelled = read_labels(in_memory("a", "b", "c"), table)
    assert labelled.classes == ["cat", "dog"] and labelled.labels.tolist() == [0, 1, 0]
    assert read_label_sets(in_memory("a", "b", "c"), table)[1] == ["cat", "dog"]


def test_a_heading_without_the_word_label_is_an_error(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("image,sender_id,kids\na,7,1\nb,8,2\n")
    with pytest.raises(DataError, match="has the columns image, sender_id, kids: give that of the labels the heading"):
        read_labels(in_memory("a", "b"), table)
    table.write_text("id,file,label\n0,a,cat\n1,b\n")
    with pytest.raises(DataError, match="row 3: has fewer columns than the heading"):
        read_labels(in_memory("a", "b"), table)


def test_a_heading_of_two_words_for_names_keeps_the_usual_columns(tmp_path):
    (tmp_path / "labels.csv").write_text("image,name\na.png,cat\nb.png,dog\nc.png,cat\n")
    assert labels_of(tmp_path / "labels.csv", {"a.png"}) == {"a.png": "cat", "b.png": "dog", "c.png": "cat"}


def test_a_first_row_of_another_split_is_no_heading(tmp_path):
    (tmp_path / "labels.csv").write_text("t1.png,rare|cat\na.png,cat\nb.png,dog\nt2.png,dog\n")
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    train, test = (ImageSet(pixels, [f"{stem}.png" for stem in stems]) for stems in (("a", "b"), ("t1", "t2")))
    for part, other in ((train, test), (test, train)):
        assert read_label_sets(part, tmp_path / "labels.csv", other.names)[1] == ["cat", "dog", "rare"]


def test_a_mistyped_name_in_the_first_row_is_no_heading(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("aa,cat\nb,dog\nc,cat\n")
    assert unknown_names(table, {"a", "b", "c"}) == f"{table}: 1 of 3 rows name no image, the first 'aa'"


def test_names_in_the_unicode_form_of_another_system(tmp_path):
    """macOS writes an a and two dots, other systems one letter; a file of each form keeps its own label."""
    table = tmp_path / "labels.csv"
    table.write_text("\u00e4.png,cat\no\u0308.png,dog\nu.png,cat\nu\u0308.png,dog\n", encoding="utf-8")
    labelled = read_labels(in_memory("a\u0308.png", "\u00f6.png", "u.png", "u\u0308.png"), table)
    assert labelled.labels.tolist() == [0, 1, 0, 1]


def test_rows_that_name_no_image_are_told_with_the_classes_that_are_lost(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_bytes("a,cat\nb,dog\n\u00e4,newt\n\u00f6,cat\nc,\n".encode("cp1252"))
    line = unknown_names(table, {"a", "b", "c"})
    assert "2 of 4 rows name no image, the first '\\udce4'; no image has the label 'newt'; the file is not" in line
    with pytest.raises(DataError, match="no label for 1 of 3 images, the first 'ä'; the file is not valid UTF-8"):
        table.write_bytes("a,cat\nb,dog\n\u00e4,newt\n".encode("cp1252"))
        read_labels(in_memory("a", "b", "ä"), table)
    table.write_bytes("a,Caf\u00e9\nb,dog\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"label 'Caf\\udce9' is not valid UTF-8: save the file as UTF-8"):
        read_labels(in_memory("a", "b"), table)


@pytest.mark.parametrize("closed", ["class3", "."])
def test_a_folder_that_cannot_be_listed_is_an_error(make_folder, monkeypatch, closed):
    """It may contain a quarter of the images, so it must not count as one bad image."""
    root = make_folder(classes=4, each=10)
    look = os.scandir

    def scandir(path):
        if os.path.abspath(path) == os.path.abspath(root / closed):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"Permission denied \(13\)") as caught:
        open_data(root)
    assert str(root / closed) in str(caught.value)


def test_labels_that_only_look_like_numbers_are_sorted_as_words(make_folder, tmp_path):
    images = open_data(make_folder(classes=1, each=5))
    labels = ["10", "²", "9", "7" * 5000, "٣"]
    table = tmp_path / "labels.csv"
    table.write_text("".join(f"{name},{label}\n" for name, label in zip(images.names, labels)), encoding="utf-8")
    assert read_labels(images, table).classes == ["٣", "9", "10", "7" * 5000, "²"]


def test_a_user_without_a_home_folder_has_a_private_cache(monkeypatch, tmp_path):
    """Some containers run as a user without a home; the cache must not be a folder named ~ in the working directory."""
    for name in ("KONTRAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = cache_home()
    assert place == tmp_path / f"kontrast-{os.getuid()}" and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert cache_home() == place
    (tmp_path / "kontrast-4242").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(EnvironmentFault, match=r"another user.*set KONTRAST_CACHE"):
        cache_home()
