"""Data-parallel training over unisono groups: torch modules without torch.distributed, NumPy jobs.

Only this package, `unisono.torch` and `unisono.nn.functional` import torch. `ElasticJob` and
`ElasticSampler` do without it.
Programs that use torch.distributed have torch's own DistributedDataParallel, which runs on the
plug-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.beyond.parallel.elastic import ElasticJob, ElasticSampler, Share

if TYPE_CHECKING:
    from unisono.beyond.parallel.buckets import Bucket as Bucket
    from unisono.beyond.parallel.compress import CompressState as CompressState
    from unisono.beyond.parallel.compress import compress_hook as compress_hook
    from unisono.beyond.parallel.data_parallel import (
        DistributedDataParallel as DistributedDataParallel,
    )
    from unisono.beyond.parallel.hooks import all_reduce_hook as all_reduce_hook
    from unisono.beyond.parallel.hooks import bf16_compress_hook as bf16_compress_hook
    from unisono.beyond.parallel.hooks import fp16_compress_hook as fp16_compress_hook
    from unisono.beyond.parallel.power_sgd import PowerSGDState as PowerSGDState
    from unisono.beyond.parallel.power_sgd import power_sgd_hook as power_sgd_hook

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

_HOMES = {
    "Bucket": "buckets",
    "CompressState": "compress",
    "DistributedDataParallel": "data_parallel",
    "PowerSGDState": "power_sgd",
    "all_reduce_hook": "hooks",
    "bf16_compress_hook": "hooks",
    "compress_hook": "compress",
    "fp16_compress_hook": "hooks",
    "power_sgd_hook": "power_sgd",
}


def __getattr__(name: str) -> object:
    # Loaded on first use, because a job without torch imports this package, too.
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono.parallel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"unisono.beyond.parallel.{_HOMES[name]}"), name)
