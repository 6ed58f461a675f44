"""Data-parallel training over unisono groups, at its public place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.beyond import parallel as _training
from unisono.beyond.parallel import ElasticJob, ElasticSampler, Share

if TYPE_CHECKING:
    from unisono.beyond.parallel import (
        Bucket,
        CompressState,
        DistributedDataParallel,
        PowerSGDState,
        all_reduce_hook,
        bf16_compress_hook,
        compress_hook,
        fp16_compress_hook,
        power_sgd_hook,
    )

__all__ = [
    "Bucket",
    "CompressState",
    "DistributedDataParallel",
    "ElasticJob",
    "ElasticSampler",
    "PowerSGDState",
    "Share",
    "all_reduce_hook",
    "bf16_compress_hook",
    "compress_hook",
    "fp16_compress_hook",
    "power_sgd_hook",
]


def __getattr__(name: str) -> object:
    return getattr(_training, name)
