"""`pool` and `Executor`: processes that stay, for the cells of a notebook and for tasks."""

from unisono.beyond.pool.executor import Executor
from unisono.beyond.pool.pool import Pool, PoolRank, pool

__all__ = ["Executor", "Pool", "PoolRank", "pool"]
