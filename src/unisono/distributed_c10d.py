"""torch.distributed.distributed_c10d's path: all public names, and the getters that libraries use.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unisono import *  # noqa: F403
from unisono import __all__ as _PUBLIC
from unisono.beyond.estimates import _time_estimator
from unisono.core.backends import GroupSpec
from unisono.core.base.deadline import Timeout
from unisono.core.c10d.backend_names import Backend
from unisono.core.c10d.coalescing import CoalescingManager as _CoalescingManager
from unisono.core.c10d.collectives import _all_gather_base, _reduce_scatter_base
from unisono.core.c10d.other_names import (
    _coalescing_manager,
    _get_process_group_name,
    _make_nccl_premul_sum,
    _rank_not_in_group,
    default_pg_timeout,
)
from unisono.core.c10d.queries import get_backend, get_global_rank, get_world_size
from unisono.core.groups.process_group import ProcessGroup, group_timeout_s
from unisono.core.groups.world import Group, GroupMember, current, require_group
from unisono.core.stores import PrefixStore, Store
from unisono.errors import InvalidArgumentError, UnsupportedError

__all__ = [*_PUBLIC]
__all__ += [
    "_CoalescingManager",
    "_all_gather_base",
    "_coalescing_manager",
    "_get_process_group_name",
    "_make_nccl_premul_sum",
    "_rank_not_in_group",
    "_reduce_scatter_base",
    "_time_estimator",
]

_DEFAULT_PG_TIMEOUT = default_pg_timeout
_get_global_rank = get_global_rank


class _WorldTables:
    """What torch's libraries ask of the world; changes of its tables change nothing."""

    @property
    def default_pg(self) -> ProcessGroup | None:
        return current().default

    @property
    def group_count(self) -> int:
        return current().made

    @property
    def pg_map(self) -> dict[ProcessGroup, tuple[str, Store]]:
        return {pg: (get_backend(pg), pg.store) for pg in current().groups.values()}

    @property
    def pg_names(self) -> dict[ProcessGroup, str]:
        return {pg: pg.key for pg in current().groups.values()}

    @property
    def pg_group_ranks(self) -> _GroupRanks:
        return _GroupRanks({pg: _numbered(pg) for pg in current().groups.values()})

    @property
    def pg_backend_config(self) -> dict[ProcessGroup, str]:
        return {pg: str(pg.config) for pg in current().groups.values()}


class _GroupRanks(dict[ProcessGroup, dict[int, int]]):
    """Group -> {global rank: rank in the group}; the groups themselves have these numbers."""

    def __setitem__(self, pg: ProcessGroup, ranks: dict[int, int]) -> None:
        if ranks != _numbered(pg):
            raise UnsupportedError(
                f"the global ranks of group '{pg.name}' are {list(pg.ranks)}, not {list(ranks)}",
                hint="give global_ranks_in_group to _new_process_group_helper",
            )


def _numbered(pg: ProcessGroup) -> dict[int, int]:
    return {rank: number for number, rank in enumerate(pg.ranks)}


_world = _WorldTables()


def _get_default_group() -> ProcessGroup:
    """Return the default group.

    Raises:
        NotInitializedError: There is none.
    """
    return require_group(None)


def _group_or_default_group(group: Group = None) -> ProcessGroup:
    """Return a group, by default the default group."""
    return require_group(group)


def _get_default_store() -> Store:
    """Return the store of the default group."""
    return require_group(None).store


def _get_process_group_store(pg: ProcessGroup) -> Store:
    """Return the store that the members of a group share."""
    return pg.store


def _get_group_size(group: Group) -> int:
    """Return the number of ranks of a group."""
    return get_world_size(group)


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """Return the group whose `group_name` is given.

    Raises:
        InvalidArgumentError: This world has none.
    """
    try:
        return current().groups[group_name]
    except KeyError:
        raise InvalidArgumentError(f"this world has no group named {group_name!r}") from None


def _device_capability(group: Group = None) -> list[str]:
    """Return the device types of a group's backends."""
    return list(require_group(group).backends)


def _get_object_coll_device(group: Group = None) -> str:
    """Return the device type that objects travel through: "cpu" if the group serves it."""
    types = _device_capability(group)
    return "cpu" if "cpu" in types else types[0]


def _get_pg_default_device(group: Group = None) -> Any:
    """Return the device for arrays of a group: a torch.device if torch is loaded, else its type."""
    device, torch = _get_object_coll_device(group), sys.modules.get("torch")
    return device if torch is None else torch.device(device)


def _get_default_timeout(backend: Any = None) -> timedelta:
    """Return the time-out of groups that are made without one."""
    return timedelta(seconds=group_timeout_s(None))


def _set_pg_timeout(timeout: Timeout, group: Group = None) -> None:
    """Change the time-out of a group's later calls."""
    require_group(group).set_timeout(timeout)


def _abort_process_group(group: Group = None) -> None:
    """End every call of a group with CollectiveAbortedError, on all ranks."""
    require_group(group).abort()


def _update_default_pg(pg: ProcessGroup | None) -> None:
    """Use another group as the default group."""
    current().default = pg


def _new_process_group_helper(
    group_size: int,
    group_rank: int,
    global_ranks_in_group: Sequence[int],
    backend: Backend | str | None,
    store: Store,
    group_name: str,
    backend_options: Any = None,
    timeout: Timeout | None = None,
    pg_tag: str | None = None,
    device_id: Any = None,
    group_desc: str | None = None,
    *,
    pg_options: Any = None,
) -> tuple[ProcessGroup | int, Store | None]:
    """Make a group whose members meet at a store of their own, as RL frameworks do.

    Args:
        group_size: Number of ranks.
        group_rank: This process's rank in the group.
        global_ranks_in_group: Global ranks of the members; empty: 0, 1, ...
        backend: As for `init_process_group`.
        store: Shared by the members; keys have the group's name before them.
        group_name: No other group of this process has it.
        backend_options: Passed on to the backend, as `pg_options`.
        timeout: Default of later calls.
        pg_tag: Accepted for torch's sake, as `device_id`.
        device_id: See `pg_tag`.
        group_desc: Name of the group in errors, instead of `group_name`.
        pg_options: See `backend_options`.

    Returns:
        The group and its store; a rank that is no member gets NON_GROUP_MEMBER and None.

    Raises:
        InvalidArgumentError: There is a group of this name.
        RendezvousError: Some ranks did not come in time; names them.
    """
    world = current()
    if group_name in world.groups:
        raise InvalidArgumentError(f"this world has a group named {group_name!r} already")
    ranks = tuple(global_ranks_in_group) or tuple(range(group_size))
    if world.default is not None and global_ranks_in_group:
        if world.default.rank() not in ranks:
            return GroupMember.NON_GROUP_MEMBER, None
        group_rank = ranks.index(world.default.rank())
    store, options = PrefixStore(f"{group_name}/", store), backend_options or pg_options
    timeout_s, name = group_timeout_s(timeout), group_desc or group_name
    spec = GroupSpec(store, group_rank, group_size, ranks, name, group_name, timeout_s, options)
    pg = ProcessGroup.from_spec(spec, None if backend is None else str(backend))
    world.groups[group_name] = pg
    return pg, store
