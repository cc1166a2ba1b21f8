"""Encoders, heads, momentum teacher and memory bank.

`encoder("resnet-18", channels=3, size=32)`, `head("simclr", width=512)`, `predictor("byol", width=256)`.
"""

from kontrast.networks import convn, heads, resnet, small_alexnet, small_conv, vit  # noqa: F401  (importing registers)
from kontrast.networks.bank import MemoryBank
from kontrast.networks.catalogue import ENCODERS, HEADS, PREDICTORS, Encoder, Head, encoder, head, predictor
from kontrast.networks.sharding import (
    check_shardable,
    copy_whole,
    in_shards,
    is_sharded,
    like,
    load_whole,
    local,
    shard,
    whole,
    whole_state,
)
from kontrast.networks.split_batch_norm import (
    SplitBatchNorm,
    convert_split_batch_norm,
    shuffle,
    smallest_batch,
    unshuffle,
)
from kontrast.networks.sync_batch_norm import synchronise_batch_norm
from kontrast.networks.teacher import Teacher

__all__ = [
    "ENCODERS",
    "HEADS",
    "PREDICTORS",
    "Encoder",
    "Head",
    "MemoryBank",
    "SplitBatchNorm",
    "Teacher",
    "check_shardable",
    "convert_split_batch_norm",
    "copy_whole",
    "encoder",
    "head",
    "in_shards",
    "is_sharded",
    "like",
    "load_whole",
    "local",
    "predictor",
    "shard",
    "shuffle",
    "smallest_batch",
    "synchronise_batch_norm",
    "unshuffle",
    "whole",
    "whole_state",
]
