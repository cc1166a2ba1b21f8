"""Where the images of a table lie: the original files if they are there, else the same set as a folder of pictures.

Looked for under the given folder, else under KONTRAST_DATA or ./data, else under ../shared/data beside the checkout.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from kontrast.config.recipe import toml_value
from kontrast.data import ImageSet
from kontrast.data.listing import cache_home
from kontrast.data.named_sets import data_root
from kontrast.errors import DataError
from kontrast.files import atomic_folder, disk_faults

BESIDE = Path("../shared/data")
ORIGINALS = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar10/data_batch_1.bin", "data_batch_1.bin"),
    "mnist": ("mnist/train-images*", "MNIST/raw/train-images*", "train-images*"),
}
TITLES = {"cifar10": "CIFAR-10", "mnist": "MNIST", "digits": "the embedded digits"}


def locate(source: str, root: str | None) -> list[str]:
    """Overrides that let a recipe find its named set; none for what needs no finding."""
    if source not in ORIGINALS:
        return []
    places = [Path(root)] if root else [data_root(), BESIDE]
    for place in places:
        if any(next(place.glob(pattern), None) for pattern in ORIGINALS[source]):
            return [f"data.source={source}", f"data.root={toml_value(str(place))}"]
        folder = pictures(place, source)
        if folder is not None:
            return [f"data.source={toml_value(str(folder))}"]
    where = " or ".join(map(str, places))
    raise DataError(
        f"{source} is not under {where}: give --data DIR with its original files, a folder {source}/ with train and "
        f"test, or {source}-jpeg.tar.xz"
    )


def pictures(place: Path, source: str) -> Path | None:
    """The set as a folder with train and test, unpacked from its archive where there is only that."""
    for folder in (place / source, place):
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return folder
    archive = place / f"{source}-jpeg.tar.xz"
    return unpacked(archive, source) if archive.is_file() else None


def unpacked(archive: Path, source: str) -> Path:
    """The archive's folder in the cache, unpacked once and whole."""
    home = cache_home() / "unpacked" / archive.name
    if not (home / source).is_dir():
        with disk_faults(home):
            home.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(home, synced=False) as temporary:
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
            except (tarfile.TarError, EOFError) as error:
                raise DataError(f"{archive} is damaged ({error}): fetch it again") from None
    if not (home / source / "train").is_dir():
        raise DataError(f"{archive} has no folder {source}/train: is it the right archive?")
    return home / source


def data_words(source: str, train: ImageSet) -> str:
    """The set as a reader must know it: recoded pictures are not the original ones."""
    title = TITLES.get(source, Path(source).name)
    kind = Path(str(train.names[0])).suffix.lower().lstrip(".")
    if source not in ORIGINALS or not kind:
        return title
    return f"{title} ({'JPEG' if kind in ('jpg', 'jpeg') else kind.upper()})"
