"""The captions of a run as tokens: its tokenizer, and one caption of each image of a batch, drawn anew in every step.

N images, M captions, T distinct texts, B images of a batch, L tokens of a caption.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.config.recipe import TextSettings
from kontrast.counters import mix_tensor
from kontrast.data import ImageSet
from kontrast.data.captions import Captions
from kontrast.errors import CheckpointError, DataError
from kontrast.files import read_bytes
from kontrast.networks.text_towers import HUGGING_FACE
from kontrast.networks.tokenizers import BYTES, ByteTokenizer, Tokenizer, VocabularyTokenizer
from kontrast.training.run_folder import RunFolder
from kontrast.views import keys

VOCABULARY = "vocabulary.json"
LONGEST_VOCABULARY = 1 << 26
DRAW = 0x0CA9710
"""Sets the draws of captions apart from those of the views, which come from the same keys."""


def tokens_per_caption(text: TextSettings) -> int:
    """Return L, the tokens of a caption that are read."""
    by_bytes = text.tokens == "bytes" and not is_hugging_face(text)
    return text.length or (128 if by_bytes else 32)


def size_of_vocabulary(text: TextSettings) -> int:
    """Return the number of tokens that the tower embeds: all that the tokenizer may come to know."""
    return BYTES if text.tokens == "bytes" else text.vocabulary


def is_hugging_face(text: TextSettings) -> bool:
    return text.name.startswith(f"{HUGGING_FACE}:")


def tokenizer_of(text: TextSettings, folder: RunFolder, captions: Captions | None = None) -> Tokenizer:
    """Return the tokenizer of a run: that of its folder, or of a new run one that learns from the captions.

    Args:
        text: the recipe's section.
        folder: the run folder, whose vocabulary.json is read if it is there.
        captions: of the training images, for a new run; the first rank learns from them.
    """
    length, path = tokens_per_caption(text), folder / VOCABULARY
    if text.tokens == "bytes" and not is_hugging_face(text):
        return ByteTokenizer(length)
    if path.is_file():
        return VocabularyTokenizer(read_vocabulary(path), length)
    if is_hugging_face(text):
        return VocabularyTokenizer(read_vocabulary(place_of_tokenizer(text)), length)
    if captions is None:
        raise CheckpointError(f"{path} is missing: restore it")
    learned = ""
    if distributed.is_main():
        learned = VocabularyTokenizer.learned(captions.texts, text.vocabulary, length).vocabulary or ""
    return VocabularyTokenizer(distributed.broadcast(learned), length)


def place_of_tokenizer(text: TextSettings) -> Path:
    """Return the path of the tokenizer.json of a tower of Hugging Face."""
    path = Path(text.name.partition(":")[2], "tokenizer.json")
    if not path.is_file():
        raise DataError(f"{text.name}: there is no {path}; save the tokenizer as tokenizer.json into the folder")
    return path


def read_vocabulary(path: Path) -> str:
    content = read_bytes(path)
    if len(content) > LONGEST_VOCABULARY:
        raise DataError(f"{path} has {len(content):,} bytes: it is no vocabulary")
    return content.decode("utf-8", "replace")


class DrawnCaptions(NamedTuple):
    """The captions of a batch.

    Attributes:
        tokens: int32 [B,L].
        ids: int64 [B], equal for captions with the same text; None if no two images have a caption in common.
    """

    tokens: Tensor
    ids: Tensor | None


class CaptionBatches:
    """Draw one caption of each image: a pure function of (seed, epoch, image), for any rank and after any restart.

    All captions are tokenized once and stay on the device.

    Args:
        images: the training images, which have captions.
        tokenizer: turns them into tokens.
        seed: of the run.
        device: of the batches.
        say: called with a line if captions are cut.

    Example:
        >>> pixels, captions = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), Captions.of([["x"], ["y"]])
        >>> images = ImageSet(pixels, ["a.png", "b.png"], captions=captions)
        >>> CaptionBatches(images, ByteTokenizer(4))(0, torch.tensor([1])).tokens.tolist()
        [[0, 123, 1, -1]]
    """

    def __init__(
        self, images: ImageSet, tokenizer: Tokenizer, seed: int = 0, device: torch.device | str = "cpu",
        say: Callable[[str], None] = lambda _: None,
    ):  # fmt: skip
        captions, index = images.captions, images.numbers()
        assert captions is not None
        self.seed = seed
        self.tokens = tokenizer(captions.texts).to(device)
        self.ids = torch.from_numpy(captions.ids).to(device)
        self.repeated = captions.repeated
        starts, size = torch.from_numpy(captions.starts), int(index.max()) + 1
        self.starts, self.counts = (torch.zeros(size, dtype=torch.int64).to(device) for _ in range(2))
        self.starts[index.to(device)] = starts[:-1].to(device)
        self.counts[index.to(device)] = starts.diff().to(device)
        if cut := tokenizer.cut(captions.texts):
            say(f"{cut:,} of {len(captions.texts):,} captions are cut at {tokenizer.length} tokens (text.length)")

    def __call__(self, epoch: int, indices: Tensor) -> DrawnCaptions:
        """Return the captions of the images with these numbers in their source, int64 [B], in this epoch."""
        drawn = mix_tensor(keys(self.seed, epoch, indices) ^ DRAW) & (2**63 - 1)
        ids = self.ids[self.starts[indices] + drawn % self.counts[indices]]
        return DrawnCaptions(self.tokens[ids], ids if self.repeated else None)
