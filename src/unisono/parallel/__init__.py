"""Data-parallel training of torch modules over unisono groups, without torch.distributed.

Only this package and `unisono.torch` import torch. Programs that use torch.distributed have torch's
own DistributedDataParallel, which runs on the plug-in.
"""

from unisono.parallel.buckets import Bucket
from unisono.parallel.data_parallel import DistributedDataParallel
from unisono.parallel.hooks import all_reduce_hook, bf16_compress_hook, fp16_compress_hook
from unisono.parallel.power_sgd import PowerSGDState, power_sgd_hook

__all__ = [
    "Bucket",
    "DistributedDataParallel",
    "PowerSGDState",
    "all_reduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "power_sgd_hook",
]
