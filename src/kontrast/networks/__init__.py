"""Encoders, projection heads, predictors, prototypes, batch norms, momentum teacher and memory bank.

`encoder("resnet-18", channels=3, size=32)`, `head("simclr", width=512)`, `predictor("byol", width=256)`.
"""

from kontrast.networks import convn, heads, resnet, small_alexnet, small_conv, vit  # noqa: F401  (importing registers)
from kontrast.networks.bank import MemoryBank
from kontrast.networks.batch_norm import smallest_batch
from kontrast.networks.catalog import ENCODERS, HEADS, PREDICTORS, Encoder, Head, encoder, head, predictor
from kontrast.networks.prototypes import Prototypes
from kontrast.networks.split_batch_norm import SplitBatchNorm, convert_split_batch_norm, shuffle, unshuffle
from kontrast.networks.sync_batch_norm import synchronize_batch_norm
from kontrast.networks.teacher import Teacher
from kontrast.networks.text_towers import text_tower

__all__ = [
    "ENCODERS", "HEADS", "PREDICTORS", "Encoder", "Head", "MemoryBank", "Prototypes", "SplitBatchNorm", "Teacher",
    "convert_split_batch_norm", "encoder", "head", "predictor", "shuffle", "smallest_batch", "synchronize_batch_norm",
    "text_tower", "unshuffle",
]  # fmt: skip
