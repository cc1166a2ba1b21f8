"""Text towers: captions to features, by name. N captions, L tokens of each, F width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.networks.catalog import Encoder, build_named
from kontrast.networks.checks import check_whole
from kontrast.networks.vit import Block
from kontrast.registry import Registry

HUGGING_FACE = "hf"
EMBEDDING = 0.3
"""Standard deviation of the embedded tokens before training."""
TEXT_TOWERS = Registry(
    "text tower",
    hints={HUGGING_FACE: "hf:FOLDER is a text encoder in the layout of Hugging Face"},
    given=("vocabulary", "length"),
)  # tokens [N,L] -> [N,F]


def text_tower(name: str, *, vocabulary: int, length: int, **arguments: Any) -> Encoder:
    """Build a text tower by name, with random weights, or with those of a folder.

    Args:
        name: a name in `TEXT_TOWERS`, or "hf:FOLDER".
        vocabulary: the number of tokens.
        length: L, tokens of a caption.
        **arguments: further arguments of the tower, such as `depth`.

    Returns:
        A module with the attribute `width` (F).

    Shape:
        - input: tokens int [N,L], -1 for padding
        - output: [N,F]

    Example:
        >>> tower = text_tower("transformer", vocabulary=258, length=16, width=32, depth=1)
        >>> tower(torch.zeros(2, 16, dtype=torch.int32)).shape
        torch.Size([2, 32])
    """
    library, colon, folder = name.partition(":")
    if colon and library == HUGGING_FACE:
        tower: Any = HuggingFaceText(folder, **arguments)
        return tower
    return build_named(TEXT_TOWERS, name, arguments, vocabulary=vocabulary, length=length)


@TEXT_TOWERS.register("transformer")
class TextTransformer(nn.Module):
    """A small transformer; the representation is the mean over the tokens after the last norm.

    Every token sees all others (there is nothing to predict), and padding is seen by none.

    Args:
        width: F.
        depth: blocks.
        heads: attention heads, which must divide the width.
        dropout: the share of values that the branches of a block leave out in training.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int = 256, depth: int = 4, heads: int = 4, dropout: float = 0.1
    ):
        super().__init__()
        for name, value in (("width", width), ("depth", depth), ("heads", heads), ("length", length)):
            check_whole(name, value)
        check_whole("text.width", width, multiple=heads)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise UsageError(f"dropout = {dropout!r}: give a number from 0 to below 1")
        self.width = width
        self.token_embed = nn.Embedding(vocabulary, width)
        # Not 0.02, as in large models: the branches would drown the tokens, and bytes take twice as long to learn.
        self.pos_embed = nn.Parameter(EMBEDDING / 3 * torch.randn(length, width))
        nn.init.normal_(self.token_embed.weight, std=EMBEDDING)
        self.blocks = nn.ModuleList(Block(width, heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens >= 0
        x = self.token_embed(tokens.clamp(min=0)) + self.pos_embed[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        return mean_of_tokens(self.norm(x), real)


class HuggingFaceText(nn.Module):
    """A text encoder in a folder in the layout of Hugging Face: config.json, model.safetensors and tokenizer.json.

    The representation is the mean over the tokens of the last hidden state. Nothing is downloaded or unpickled, and no
    code of the folder is run.

    Args:
        folder: the folder. Without model.safetensors the weights are random.
    """

    def __init__(self, folder: str):
        super().__init__()
        package = transformers()
        place = Path(folder)
        if not (place / "config.json").is_file():
            raise DataError(f"hf:{folder}: there is no {place / 'config.json'}; give the folder of a text encoder")
        try:
            tree = json.loads((place / "config.json").read_text(encoding="utf-8"))
            kind = tree["model_type"]
            config = package.AutoConfig.for_model(**tree)
            if text := getattr(config, "text_config", None):  # of a model of images and texts
                config, kind = text, text.model_type
            if (place / "model.safetensors").is_file():
                self.model = package.AutoModel.from_pretrained(
                    folder, config=config, local_files_only=True, use_safetensors=True, trust_remote_code=False
                )
            else:
                self.model = package.AutoModel.from_config(config, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"hf:{folder} can't be read as a text encoder: {reason}") from None
        self.model = getattr(self.model, "encoder", self.model) if config.is_encoder_decoder else self.model
        self.kind, self.width = kind, int(config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens >= 0
        found = self.model(input_ids=tokens.clamp(min=0).long(), attention_mask=real.long())
        return mean_of_tokens(found.last_hidden_state, real)


def mean_of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean [N,F] of the rows of x [N,L,F] that are not padding, according to real [N,L]."""
    weights = real[..., None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def transformers() -> Any:
    """Import the package transformers, or raise an error that says how to install it."""
    try:
        import transformers as package
    except ImportError:
        raise EnvironmentFault("a tower of Hugging Face needs transformers: pip install 'kontrast[text]'") from None
    return package
