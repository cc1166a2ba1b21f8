"""Named data sets, read from their official files: nothing is downloaded, unpickled or extracted.

The files are looked for under the data root (an argument, KONTRAST_DATA, else ./data), in their archive or unpacked.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch

from kontrast.data.digits import digits
from kontrast.data.image_set import ImageSet
from kontrast.data.listing import Listing, scan_folder
from kontrast.errors import DataError, UsageError
from kontrast.registry import Registry, nearest

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
STL10 = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_HUNDRED = """
n02869837 n01749939 n02488291 n02107142 n13037406 n02091831 n04517823 n04589890 n03062245 n01773797 n01735189 n07831146
n07753275 n03085013 n04485082 n02105505 n01983481 n02788148 n03530642 n04435653 n02086910 n02859443 n13040303 n03594734
n02085620 n02099849 n01558993 n04493381 n02109047 n04111531 n02877765 n04429376 n02009229 n01978455 n02106550 n01820546
n01692333 n07714571 n02974003 n02114855 n03785016 n03764736 n03775546 n02087046 n07836838 n04099969 n04592741 n03891251
n02701002 n03379051 n02259212 n07715103 n03947888 n04026417 n02326432 n03637318 n01980166 n02113799 n02086240 n03903868
n02483362 n04127249 n02089973 n03017168 n02093428 n02804414 n02396427 n04418357 n02172182 n01729322 n02113978 n03787032
n02089867 n02119022 n03777754 n04238763 n02231487 n03032252 n02138441 n02104029 n03837869 n03494278 n04136333 n03794056
n03492542 n02018207 n04067472 n03930630 n03584829 n02123045 n04229816 n02100583 n03642806 n04336792 n03259280 n02116738
n02108089 n03424325 n01855672 n02090622
"""
IMAGENET100 = _HUNDRED.split()


def data_root(root: str | Path | None = None) -> Path:
    """The folder that named sets are looked for in."""
    return Path(root or os.environ.get("KONTRAST_DATA") or "data")


def _missing(name: str, root: Path, files: str, url: str) -> DataError:
    return DataError(
        f"{name} is not under {root}: fetch {files} from {url} and put it there, "
        "or name the folder with data.root or KONTRAST_DATA"
    )


def _check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    if split not in splits:
        raise UsageError(f"{name} has no split {split!r}: {nearest(split, splits)}")


def member_bytes(root: Path, archives: tuple[str, ...], folders: tuple[str, ...], file: str) -> bytes | None:
    """The content of one file, found under root or inside an archive; None if it is in neither."""
    for folder in folders:
        for place in (root / folder / file, root / file):
            if place.is_file():
                return place.read_bytes()
    for archive in archives:
        for place in (root / archive, *(root / folder / archive for folder in folders)):
            if not place.is_file():
                continue
            try:
                with tarfile.open(place) as tar:
                    for member in tar:
                        if member.isfile() and member.name.rsplit("/", 1)[-1] == file:
                            content = tar.extractfile(member)
                            return content.read() if content else None
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                raise DataError(f"{place} is damaged ({error}): fetch it again") from None
    return None


def _records(content: bytes, width: int, what: str) -> np.ndarray:
    if not content or len(content) % width:
        raise DataError(f"{what} is damaged: {len(content)} bytes are not a multiple of {width}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, width)


def _check_counts(images: np.ndarray, labels: np.ndarray, image_file: str, label_file: str) -> None:
    if len(images) != len(labels):
        raise DataError(
            f"{label_file} has {len(labels)} labels but {image_file} has {len(images)} images: one is damaged or of "
            "another set; fetch both again"
        )


def _image_set(
    name: str, split: str, images: np.ndarray, labels: np.ndarray | None, classes: list[str] | None
) -> ImageSet:
    return ImageSet(
        images=torch.from_numpy(np.require(images, requirements=["C", "W"])),
        names=[f"{split}/{i:06d}" for i in range(len(images))],
        labels=None if labels is None else torch.from_numpy(labels.astype(np.int64)),
        classes=None if labels is None else classes,
        name=name,
        split=split,
        has_test=True,
    )


def _cifar(name: str, split: str, root: Path, files: list[str], head: int, classes: list[str]) -> ImageSet:
    _check_split(name, split, ("train", "test"))
    number = name.removeprefix("cifar")
    archive = f"cifar-{number}-binary.tar.gz"
    folder = "cifar-10-batches-bin" if number == "10" else "cifar-100-binary"
    parts = []
    for file in files:
        content = member_bytes(root, (archive,), (folder, name), file)
        if content is None:
            raise _missing(name, root, f"{archive} (the binary version)", f"https://www.cs.toronto.edu/~kriz/{archive}")
        parts.append(_records(content, head + 3072, file))
    records = np.concatenate(parts)
    labels = records[:, head - 1]  # CIFAR-100 has the coarse label before the fine one
    return _image_set(name, split, records[:, head:].reshape(-1, 3, 32, 32), labels, classes)


def cifar10(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """CIFAR-10 in its binary version: 50,000 train and 10,000 test images of 32x32 in ten classes."""
    files = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    return _cifar("cifar10", split, data_root(root), files, 1, CIFAR10)


def cifar100(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """CIFAR-100 in its binary version, with its hundred fine classes."""
    place = data_root(root)
    words = member_bytes(place, ("cifar-100-binary.tar.gz",), ("cifar-100-binary", "cifar100"), "fine_label_names.txt")
    classes = words.decode().split() if words else [str(i) for i in range(100)]
    return _cifar("cifar100", split, place, [f"{split}.bin"], 2, classes)


def stl10(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """STL-10: 5,000 train, 8,000 test and 100,000 unlabelled images of 96x96; `train+unlabelled` has no labels."""
    _check_split("stl10", split, ("train", "test", "unlabelled", "train+unlabelled"))
    place = data_root(root)
    if split == "train+unlabelled":
        both = [stl10(part, root).images for part in ("train", "unlabelled")]
        return _image_set("stl10", split, torch.cat(both).numpy(), None, None)

    def read(file: str) -> bytes:
        content = member_bytes(place, ("stl10_binary.tar.gz",), ("stl10_binary", "stl10"), file)
        if content is None:
            url = "https://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz"
            raise _missing("stl10", place, "stl10_binary.tar.gz", url)
        return content

    stem = "unlabeled" if split == "unlabelled" else split
    # The files are in column-major order, so height and width are swapped.
    images = _records(read(f"{stem}_X.bin"), 3 * 96 * 96, f"{stem}_X.bin").reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
    if split == "unlabelled":
        return _image_set("stl10", split, images, None, STL10)
    labels = np.frombuffer(read(f"{stem}_y.bin"), dtype=np.uint8).astype(np.int64) - 1
    _check_counts(images, labels, f"{stem}_X.bin", f"{stem}_y.bin")
    return _image_set("stl10", split, images, labels, STL10)


def _idx(root: Path, folders: tuple[str, ...], file: str, rank: int) -> np.ndarray | None:
    """An array with `rank` dimensions from an IDX file, compressed or not; None if there is no such file."""
    for folder in (*folders, "."):
        for path in (root / folder / file, root / folder / f"{file}.gz"):
            if not path.is_file():
                continue
            try:
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                if content[3] != rank:
                    raise ValueError(f"{content[3]} dimensions instead of {rank}")
                shape = np.frombuffer(content, dtype=">u4", count=rank, offset=4).astype(int)
                return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)
            except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
                raise DataError(f"{path} is damaged ({error}): fetch it again") from None
    return None


def _mnist(name: str, split: str, root: Path, folders: tuple[str, ...], url: str, classes: list[str]) -> ImageSet:
    _check_split(name, split, ("train", "test"))
    stem = "train" if split == "train" else "t10k"
    image_file, label_file = f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"
    images, labels = _idx(root, folders, image_file, 3), _idx(root, folders, label_file, 1)
    if images is None or labels is None:
        raise _missing(name, root, f"{image_file}.gz and {label_file}.gz", url)
    _check_counts(images, labels, image_file, label_file)
    return _image_set(name, split, images[:, None], labels, classes)


def mnist(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """MNIST: 60,000 train and 10,000 test digits, one channel of 28x28."""
    url = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    return _mnist("mnist", split, data_root(root), ("mnist", "MNIST/raw"), url, [str(d) for d in range(10)])


def fashion_mnist(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """Fashion-MNIST: 60,000 train and 10,000 test images of clothes, one channel of 28x28."""
    url = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    return _mnist("fashion-mnist", split, data_root(root), ("fashion-mnist", "FashionMNIST/raw"), url, FASHION)


def imagenet(split: str = "train", root: str | Path | None = None, keep: list[str] | None = None) -> Listing:
    """ImageNet-1K in class folders, ROOT/imagenet/train/n01440764/*.JPEG and val/...; `keep` chooses classes."""
    name = "imagenet100" if keep else "imagenet"
    _check_split(name, split, ("train", "test", "val"))
    place = data_root(root)
    part = "train" if split == "train" else "val"
    for folder in (place / name / part, place / "imagenet" / part, place / "ILSVRC2012" / part, place / part):
        if folder.is_dir():
            found = scan_folder(str(folder))
            break
    else:
        url = "https://image-net.org/download-images.php (needs an account)"
        raise _missing(
            name,
            place / "imagenet" / part,
            "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpacked into one folder per class,",
            url,
        )
    if not keep:
        return found
    classes = found.classes or []
    missing = [c for c in keep if c not in classes]
    if missing:
        raise DataError(f"{len(missing)} of the 100 classes are not in {folder}, the first {missing[0]}")
    number = {classes.index(c): i for i, c in enumerate(keep)}
    assert found.labels is not None
    taken = found.take(np.flatnonzero(np.isin(found.labels, list(number))))
    labels = np.array([number[int(label)] for label in taken.labels], dtype=np.int64)  # type: ignore[union-attr]
    return Listing(taken.root, taken.items, labels, list(keep), taken.bad, taken.notes)


def imagenet100(split: str = "train", root: str | Path | None = None) -> Listing:
    """ImageNet-100: the 100 classes that the papers CMC, CACR and JCL use."""
    return imagenet(split, root, keep=IMAGENET100)


def _embedded_digits(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """The embedded digits, which need no files."""
    _check_split("digits", split, ("train", "test"))
    return digits(split)


SOURCES = Registry("data set")
"""Functions (split, root) -> ImageSet or Listing, by name."""
for _name, _source in {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "stl10": stl10,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "imagenet": imagenet,
    "imagenet100": imagenet100,
    "digits": _embedded_digits,
}.items():
    SOURCES.register(_name)(_source)
