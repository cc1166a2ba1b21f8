"""Finds the images of a table: the original files of a named set, or the same set as a folder of image files.

They are searched in the given folder, or in KONTRAST_DATA (default: ./data) and ../shared/data.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from kontrast.config.recipe import toml_value
from kontrast.data import ImageSet
from kontrast.data.cache_folder import cache_home
from kontrast.data.named_sets import data_root
from kontrast.data.paths import describe_source
from kontrast.errors import DataError
from kontrast.files import atomic_folder, disk_faults

SHARED_DATA = Path("../shared/data")
ORIGINALS = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar10/data_batch_1.bin", "data_batch_1.bin"),
    "mnist": ("mnist/train-images*", "MNIST/raw/train-images*", "train-images*"),
}
TITLES = {"cifar10": "CIFAR-10", "mnist": "MNIST", "digits": "the embedded digits"}


def find_data(source: str, root: str | None, digits: bool = False) -> list[str]:
    """Overrides with the place of a recipe's named set; none for data that need not be found.

    With `digits`, MNIST is drawn over the images and must be found too.
    """
    if digits:
        found = find_data(source, root)
        return (
            found if any(text.startswith("data.root=") for text in found) else [*found, *find_data("mnist", root)[1:]]
        )
    if source not in ORIGINALS:
        named = root and describe_source(source).kind == "named"
        return [f"data.root={toml_value(root)}"] if named else []
    places = [Path(root)] if root else [data_root(), SHARED_DATA]
    for place in places:
        if any(next(place.glob(pattern), None) for pattern in ORIGINALS[source]):
            return [f"data.source={source}", f"data.root={toml_value(str(place))}"]
        folder = find_image_folder(place, source)
        if folder is not None:
            return [f"data.source={toml_value(str(folder))}"]
    where = " or ".join(map(str, places))
    raise DataError(
        f"{source} was not found in {where}: give --data DIR with its original files, a folder {source}/ with train "
        f"and test, or {source}-jpeg.tar.xz"
    )


def find_image_folder(place: Path, source: str) -> Path | None:
    """The set as a folder with train and test, unpacked from its archive if necessary."""
    for folder in (place / source, place):
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return folder
    archive = place / f"{source}-jpeg.tar.xz"
    return unpack(archive, source) if archive.is_file() else None


def unpack(archive: Path, source: str) -> Path:
    """Unpack the archive into the cache, once, and return its folder."""
    home = cache_home() / "unpacked" / archive.name
    if not (home / source).is_dir():
        with disk_faults(home):
            home.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(home, synced=False) as temporary:
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
            except (tarfile.TarError, EOFError) as error:
                raise DataError(f"{archive} is damaged ({error}): download it again") from None
    return home / source


def describe_data(source: str, train: ImageSet) -> str:
    """The name of the set, with the format of its images if they are not the original ones."""
    title = TITLES.get(source, Path(source).name)
    kind = Path(str(train.names[0])).suffix.lower().lstrip(".")
    if source not in ORIGINALS or not kind:
        return title
    return f"{title} ({'JPEG' if kind in ('jpg', 'jpeg') else kind.upper()})"
