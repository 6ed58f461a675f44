"""Names of torch that are other names of something here.

torch's deprecated names give no warning: they are kept for old scripts.

Source: torch.distributed (2.13).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NewType

from unisono.base.types import ReduceOp
from unisono.c10d.coalescing import coalescing_manager
from unisono.errors import CommunicationError, NetworkError, StoreError, UnisonoError
from unisono.groups.process_group import ProcessGroup
from unisono.groups.world import resolve

_coalescing_manager = coalescing_manager

reduce_op = ReduceOp
"""Another name of `ReduceOp`."""

DistError = UnisonoError
"""Another name of `UnisonoError`."""
DistBackendError = CommunicationError
"""Another name of `CommunicationError`."""
DistNetworkError = NetworkError
"""Another name of `NetworkError`."""
DistStoreError = StoreError
"""Another name of `StoreError`."""

default_pg_timeout = timedelta(minutes=30)
"""Time-out of a group when neither the script nor UNISONO_TIMEOUT gives one."""

GroupName = NewType("GroupName", str)
"""Type of a group's name, for type checkers."""
RankType = int
"""Type of a rank, for type checkers."""


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return the name that no other group of the same world has."""
    return pg.group_name


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """Return the reduce op that multiplies by a factor first; every backend here has it."""
    return ReduceOp.PREMUL_SUM(factor)


def _rank_not_in_group(group: Any) -> bool:
    """Whether this process is not a member of a group."""
    return group is not None and resolve(group) is None
