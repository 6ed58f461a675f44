"""What there is to know about groups: ranks, sizes, members, backends.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from typing import Any

from unisono.base import config
from unisono.errors import InvalidArgumentError, RendezvousError
from unisono.groups.operations import as_integer
from unisono.groups.process_group import ProcessGroup
from unisono.groups.world import current, resolve
from unisono.rendezvous.launchers import find_place

__all__ = [
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_initialized",
    "require_group",
]


def is_initialized() -> bool:
    """Whether there is a default group."""
    return current().default is not None


def get_rank(group: Any = None) -> int:
    """Return this process's rank in a group, -1 if it is not a member."""
    pg = resolve(group)
    return -1 if pg is None else pg.rank()


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of a group, -1 if this process is not a member."""
    pg = resolve(group)
    return -1 if pg is None else pg.size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number on its host, as its launcher says.

    Args:
        fallback_rank: Returned where no launcher says.

    Raises:
        RendezvousError: No launcher says, and there is no `fallback_rank`.

    Source: torch.distributed.get_node_local_rank, torch 2.13.
    """
    environment = config.environ()
    if text := environment.get("LOCAL_RANK"):
        return int(text)
    place = find_place(environment)
    if place is not None and place.local_rank is not None:
        return place.local_rank
    if fallback_rank is None:
        raise RendezvousError(
            "the local rank is not known: neither LOCAL_RANK nor a launcher's own variable is set",
            hint="pass fallback_rank, for example fallback_rank=0",
        )
    return int(fallback_rank)


def get_group_rank(group: Any, global_rank: int) -> int:
    """Return the rank in `group` of a global rank.

    Raises:
        InvalidArgumentError: This rank, or that one, is not a member.
    """
    return require_group(group).group_rank(global_rank)


def get_global_rank(group: Any, group_rank: int) -> int:
    """Return the global rank of a rank in `group`.

    Raises:
        InvalidArgumentError: This rank is not a member, or there is no such rank.
    """
    pg = require_group(group)
    group_rank = as_integer(group_rank, "group_rank")
    if not 0 <= group_rank < pg.size():
        raise InvalidArgumentError(
            f"group rank {group_rank} is not in group '{pg.name}' (0..{pg.size() - 1})"
        )
    return pg.ranks[group_rank]


def get_process_group_ranks(group: Any = None) -> list[int]:
    """Return the global ranks of a group, in group order."""
    return list(require_group(group).ranks)


def get_backend(group: Any = None) -> str:
    """Return the name of the group's backend (the first one, if it has several)."""
    return next(iter(require_group(group).config.device_backend_map.values()))


def get_backend_config(group: Any = None) -> str:
    """Return the backends of a group by device: "cpu:unisono"."""
    return str(require_group(group).config)


def get_pg_count() -> int:
    """Return how many groups were made in this world, the default one included."""
    return current().made


def require_group(group: Any) -> ProcessGroup:
    """Return the group meant by an argument.

    Raises:
        InvalidArgumentError: This rank is not a member.
    """
    pg = resolve(group)
    if pg is None:
        raise InvalidArgumentError("this rank does not belong to the given group")
    return pg
