"""Named data sets, read from their official files: nothing is downloaded, unpickled or extracted.

The files are looked for under the data root (an argument, KONTRAST_DATA, else ./data), in their archive or unpacked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch

from kontrast.data.captioned_digits import captioned_digits
from kontrast.data.captions import read_captions, with_captions
from kontrast.data.digits import digits
from kontrast.data.image_set import ImageSet
from kontrast.data.listing import Listing, check_split, scan_folder
from kontrast.errors import DataError
from kontrast.registry import Registry

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


_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVES = {
    "cifar10": ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", _CIFAR_URL),
    "cifar100": ("cifar-100-binary.tar.gz", "cifar-100-binary", _CIFAR_URL),
    "stl10": ("stl10_binary.tar.gz", "stl10_binary", "https://ai.stanford.edu/~acoates/stl10/"),
}
"""The archive of a set, the folder inside it, and where it comes from."""


LARGEST, LARGEST_IDX = 1 << 32, 1 << 28
"""The most bytes that a file of a set has when it is unpacked: a small archive may unpack to any number."""


def _read_member(name: str, root: str | Path | None, file: str) -> bytes:
    """The content of one file of a data set, found under the data root or inside the archive of the set."""
    place, (archive, folder, url) = data_root(root), _ARCHIVES[name]
    for path in (place / folder / file, place / file, place / name / file):
        if path.is_file():
            return path.read_bytes()
    for path in filter(Path.is_file, (place / archive, place / folder / archive, place / name / archive)):
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.isfile() and member.name.rsplit("/", 1)[-1] == file:
                        if member.size > LARGEST:
                            raise tarfile.ReadError(f"{file} has {member.size:,} bytes, more than {LARGEST:,}")
                        return tar.extractfile(member).read()  # type: ignore[union-attr]
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}): fetch it again") from None
    raise _missing(name, place, archive, url + archive)


def _records(content: bytes, width: int, what: str) -> np.ndarray:
    if not content or len(content) % width:
        raise DataError(f"{what} is damaged: {len(content)} bytes are not a multiple of {width}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, width)


def _image_set(
    name: str, split: str, images: np.ndarray, labels: np.ndarray | None, classes: list[str] | None
) -> ImageSet:
    if labels is not None and len(images) != len(labels):
        counts = f"{len(labels)} labels but {len(images)} images"
        raise DataError(f"{name} has {counts} in its {split} files: one is damaged or of another set; fetch both again")
    return ImageSet(
        images=torch.from_numpy(np.require(images, requirements=["C", "W"])),
        names=[f"{split}/{i:06d}" for i in range(len(images))],
        labels=None if labels is None else torch.from_numpy(labels.astype(np.int64)),
        classes=None if labels is None else classes,
        name=name,
        split=split,
        has_test=True,
    )


def _cifar(name: str, split: str, root: str | Path | None, files: list[str], classes: list[str]) -> ImageSet:
    check_split(name, split, ("train", "test"))
    head = 1 if name == "cifar10" else 2  # CIFAR-100 has the coarse label before the fine one
    records = np.concatenate([_records(_read_member(name, root, file), head + 3072, file) for file in files])
    return _image_set(name, split, records[:, head:].reshape(-1, 3, 32, 32), records[:, head - 1], classes)


def cifar10(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """CIFAR-10 in its binary version: 50,000 train and 10,000 test images of 32x32 in ten classes."""
    files = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    return _cifar("cifar10", split, root, files, CIFAR10)


def cifar100(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """CIFAR-100 in its binary version, with its hundred fine classes."""
    classes = [str(i) for i in range(100)]
    with contextlib.suppress(DataError):
        classes = _read_member("cifar100", root, "fine_label_names.txt").decode().split()
    return _cifar("cifar100", split, root, [f"{split}.bin"], classes)


def stl10(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """STL-10: 5,000 train, 8,000 test and 100,000 unlabelled images of 96x96; `train+unlabelled` has no labels."""
    check_split("stl10", split, ("train", "test", "unlabelled", "train+unlabelled"))
    if split == "train+unlabelled":
        both = [stl10(part, root).images for part in ("train", "unlabelled")]
        return _image_set("stl10", split, torch.cat(both).numpy(), None, None)
    file = f"{'unlabeled' if split == 'unlabelled' else split}_X.bin"
    # The files are in column-major order, so height and width are swapped.
    images = _records(_read_member("stl10", root, file), 3 * 96 * 96, file).reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
    labels = None
    if split != "unlabelled":
        labels = np.frombuffer(_read_member("stl10", root, f"{split}_y.bin"), dtype=np.uint8).astype(np.int64) - 1
    return _image_set("stl10", split, images, labels, STL10)


def _mnist(name: str, split: str, root: Path, folders: tuple[str, ...], url: str, classes: list[str]) -> ImageSet:
    check_split(name, split, ("train", "test"))

    def read(file: str, rank: int) -> np.ndarray:
        """An array with `rank` dimensions from an IDX file, compressed or not."""
        places = (root / folder / f"{file}{end}" for folder in (*folders, ".") for end in ("", ".gz"))
        path = next(filter(Path.is_file, places), None)
        if path is None:
            raise _missing(name, root, f"{file}.gz", url)
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as idx:
                content = idx.read(LARGEST_IDX + 1)
            if len(content) > LARGEST_IDX:
                raise ValueError(f"more than {LARGEST_IDX:,} bytes")
            shape = np.frombuffer(content, dtype=">u4", count=rank, offset=4).astype(int)
            return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}): fetch it again") from None

    stem = "train" if split == "train" else "t10k"
    images, labels = read(f"{stem}-images-idx3-ubyte", 3), read(f"{stem}-labels-idx1-ubyte", 1)
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
    check_split(name, split, ("train", "test", "val"))
    place, part = data_root(root), "train" if split == "train" else "val"
    folders = (place / name / part, place / "imagenet" / part, place / "ILSVRC2012" / part, place / part)
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        files = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpacked into one folder per class,"
        url = "https://image-net.org/download-images.php (needs an account)"
        raise _missing(name, place / "imagenet" / part, files, url)
    found = scan_folder(str(folder))
    if not keep:
        return found
    classes = found.classes or []
    missing = [c for c in keep if c not in classes]
    if missing:
        raise DataError(f"{len(missing)} of the 100 classes are not in {folder}, the first {missing[0]}")
    numbers = [classes.index(name) for name in keep]
    return found.take(np.flatnonzero(np.isin(found.labels, numbers))).with_classes(list(keep))  # type: ignore[arg-type]


def imagenet100(split: str = "train", root: str | Path | None = None) -> Listing:
    """ImageNet-100: the 100 classes that the papers CMC, CACR and JCL use."""
    return imagenet(split, root, keep=IMAGENET100)


def flickr8k(split: str = "train", root: str | Path | None = None) -> Listing:
    """Flickr8k with five captions each: ROOT/flickr8k/Images/*.jpg, Flickr8k.token.txt and Flickr_8k.*Images.txt.

    6,000 train, 1,000 validation ("val") and 1,000 test images, as the split files say. The captions may also be in
    captions.txt, and the images in Flicker8k_Dataset/.
    """
    check_split("flickr8k", split, ("train", "val", "test"))
    place = next(filter(Path.is_dir, (data_root(root) / "flickr8k", data_root(root) / "Flickr8k")), data_root(root))
    folders = [place / name for name in ("Images", "images", "Flicker8k_Dataset", "Flickr8k_Dataset")]
    texts = [place / name for name in ("Flickr8k.token.txt", "captions.txt", "captions.csv")]
    part = {"train": "train", "val": "dev", "test": "test"}[split]
    parts = [place / f"Flickr_8k.{part}Images.txt"]
    found = [next((path for path in known if path.exists()), None) for known in (folders, texts, parts)]
    for path, known in zip(found, (folders, texts, parts)):
        if path is None:
            files = f"{' or '.join(p.name for p in known)} of Flickr8k"
            raise _missing("flickr8k", place, files, "https://forms.illinois.edu/sec/1713398 or a copy of it")
    folder, text, listed = (path for path in found if path is not None)
    wanted = set(listed.read_text(encoding="utf-8").split())
    images = scan_folder(str(folder))
    images = images.take(np.array([i for i, item in enumerate(images.items) if item.name in wanted], dtype=np.int64))
    lost = [(name, "it is in the split, and not among the images") for name in sorted(wanted)]
    present = {item.name for item in images.items}
    images = dataclasses.replace(images, bad=[*images.bad, *(one for one in lost if one[0] not in present)])
    if not present:
        raise DataError(f"{listed} names none of the images in {folder}: they are of different data sets")
    return with_captions(images, read_captions(text), whole=False)


def _embedded_digits(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """The embedded digits, which need no files."""
    check_split("digits", split, ("train", "test"))
    return digits(split)


def _embedded_canvases(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """The embedded canvases, which need no files; `kontrast transfer` knows their boxes and masks."""
    from kontrast.data.annotated.canvases import canvases

    check_split("canvases", split, ("train", "test"))
    return canvases(split)


def black(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """4,096 black images of 32x32 without labels, one channel. What there is to learn is what is added to them."""
    check_split("black", split, ("train",))
    pixels = torch.zeros(4096, 1, 32, 32, dtype=torch.uint8)
    return ImageSet(pixels, [f"{i:04d}" for i in range(len(pixels))], name="black", split=split)


SOURCES = Registry("data set")
"""Functions (split, root) -> ImageSet or Listing, by name."""
for _source in (cifar10, cifar100, stl10, mnist, fashion_mnist, imagenet, imagenet100, flickr8k):
    SOURCES.register(_source.__name__.replace("_", "-"))(_source)
SOURCES.register("digits")(_embedded_digits)
SOURCES.register("canvases")(_embedded_canvases)
SOURCES.register("black")(black)


def _captioned_digits(split: str = "train", root: str | Path | None = None) -> ImageSet:
    """The embedded digits with captions made from their factors."""
    check_split("digits", split, ("train", "test"))
    return captioned_digits(split)


CAPTIONED = {"digits": _captioned_digits}
"""Named sets that have other images or captions if captions are wanted."""
