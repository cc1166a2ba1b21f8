"""Captions to numbers: bytes, or byte pairs that are learned from captions. N captions, L tokens of each at most.

A token of -1 is padding, so that a tower needs to know nothing about the tokenizer that made its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kontrast.errors import DataError, EnvironmentFault

PADDING = -1
START, END, FIRST_BYTE = 0, 1, 2
BYTES = 258
"""Tokens of `ByteTokenizer`: start, end and 256 bytes."""


class ByteTokenizer:
    """The bytes of a caption in UTF-8, between a start and an end: needs no vocabulary and knows every language.

    Args:
        length: L, tokens that are read; the end of a longer caption is left out.

    Example:
        >>> ByteTokenizer(6)(["ab", ""]).tolist()
        [[0, 99, 100, 1, -1, -1], [0, 1, -1, -1, -1, -1]]
    """

    vocabulary: str | None = None

    def __init__(self, length: int = 128):
        self.length = length

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return tokens int32 [N,L]."""
        rows = (text.encode("utf-8", "replace")[: self.length - 2] for text in texts)
        return padded(([START, *(FIRST_BYTE + byte for byte in row), END] for row in rows), len(texts), self.length)

    def cut(self, texts: Iterable[str]) -> int:
        """Return how many captions are longer than L."""
        return sum(len(text.encode("utf-8", "replace")) + 2 > self.length for text in texts)


class VocabularyTokenizer:
    """Byte pairs or another vocabulary in the JSON format of the package tokenizers.

    Args:
        vocabulary: the content of a tokenizer.json.
        length: L, tokens that are read; the end of a longer caption is left out.
    """

    def __init__(self, vocabulary: str, length: int = 32):
        self.vocabulary, self.length = vocabulary, length
        try:
            self.tokenizer = tokenizers().Tokenizer.from_str(vocabulary)
        except Exception as error:  # the package raises plain Exceptions
            reason = " ".join(str(error).split())
            raise DataError(f"the vocabulary of the text tower is damaged or of another format: {reason}") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    @classmethod
    def learned(cls, texts: Iterable[str], size: int, length: int = 32) -> VocabularyTokenizer:
        """Learn byte pairs from captions: the same captions give the same vocabulary.

        Args:
            texts: the captions.
            size: the most tokens; rare pairs of bytes make none.
            length: L.
        """
        package = tokenizers()
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.normalizer = package.normalizers.Sequence(
            [package.normalizers.NFC(), package.normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel()
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, special_tokens=["<start>", "<end>"], show_progress=False,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        )  # fmt: skip
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = package.processors.TemplateProcessing(
            single="<start> $A <end>", special_tokens=[("<start>", START), ("<end>", END)]
        )
        return cls(tokenizer.to_str(), length)

    @property
    def size(self) -> int:
        """The number of tokens that it knows."""
        return int(self.tokenizer.get_vocab_size())

    def _rows(self, texts: Iterable[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch(list(texts))]

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return tokens int32 [N,L]. A longer caption keeps its last token, which marks the end."""
        rows = self._rows(texts)
        cut = ((row if len(row) <= self.length else [*row[: self.length - 1], row[-1]]) for row in rows)
        return padded(cut, len(texts), self.length)

    def cut(self, texts: Iterable[str]) -> int:
        """Return how many captions are longer than L."""
        return sum(len(row) > self.length for row in self._rows(texts))


Tokenizer = ByteTokenizer | VocabularyTokenizer


def padded(rows: Iterable[Sequence[int]], count: int, length: int) -> Tensor:
    """Return rows of tokens as int32 [N,L]."""
    out = torch.full((count, length), PADDING, dtype=torch.int32)
    for line, row in zip(out, rows):
        line[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return out


def tokenizers() -> Any:
    """Import the package tokenizers, or raise an error that says how to install it."""
    try:
        import tokenizers as package
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError:
        raise EnvironmentFault(
            "this text tower needs tokenizers: pip install 'kontrast[text]', or use text.tokens=bytes"
        ) from None
    return package
