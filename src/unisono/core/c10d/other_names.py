"""Names of torch that are other names of something here.

torch's deprecated names give no warning: they are kept for old scripts.

Source: torch.distributed (2.13).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NewType

from unisono.core.base.deadline import Timeout
from unisono.core.base.types import ReduceOp
from unisono.core.c10d.coalescing import coalescing_manager
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import resolve
from unisono.core.stores import Store
from unisono.errors import CommunicationError, NetworkError, StoreError, UnisonoError

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


class ProcessGroupGloo(ProcessGroup):
    """A group on the backend "gloo", which is unisono's CPU engine.

    Scripts make such groups across jobs: each member calls it with the same store. No default
    group is needed. Also `ProcessGroup(store, rank, size, "gloo", timeout)`.

    Args:
        store: Shared by exactly the members; wrap it in a PrefixStore if it has other users.
        rank: This process's rank in the group.
        size: Number of ranks.
        timeout: As for ProcessGroup.

    Raises:
        InvalidArgumentError: `rank` outside 0..size-1.
        RendezvousError: Some ranks did not come in time; names them.

    Source: torch.distributed.ProcessGroupGloo (2.13).
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: Timeout | None = None) -> None:
        super().__init__(store, rank, size, "gloo", timeout)


class ProcessGroupNCCL(ProcessGroup):
    """A group on the backend "nccl", made like a ProcessGroupGloo.

    Raises:
        UnsupportedError: nccl4py is not installed.

    Source: torch.distributed.ProcessGroupNCCL (2.13).
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: Timeout | None = None) -> None:
        super().__init__(store, rank, size, "nccl", timeout)


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return the name that no other group of the same world has."""
    return pg.group_name


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """Return the reduce op that multiplies by a factor first; every backend here has it."""
    return ReduceOp.PREMUL_SUM(factor)


def _rank_not_in_group(group: Any) -> bool:
    """Whether this process is not a member of a group."""
    return group is not None and resolve(group) is None
