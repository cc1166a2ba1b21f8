"""Folders of small images for the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.made_images import picture


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Put packed stores into a temporary folder, never into the user's cache."""
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def make_folder(tmp_path):
    """Return a function that writes PNGs into class sub-folders and returns the path of the folder."""

    def make(classes: int = 2, each: int = 10, ragged: bool = False, name: str = "pictures") -> Path:
        root = tmp_path / name
        for c in range(classes):
            place = root / f"class{c}" if classes > 1 else root
            place.mkdir(parents=True, exist_ok=True)
            for i in range(each):
                seed = c * each + i
                size = (10 + seed % 7, 12 + seed % 5) if ragged else (16, 16)
                picture(seed, *size).save(place / f"{i:04d}.png")
        return root

    return make
