"""Make process groups for torch, and its default group over ranks that come and go.

If unisono has no default group when a call needs one, it borrows torch's. So `step`, `sync_state`
and `membership_changed` of unisono work in a program for torch.distributed.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist
import torch.distributed.distributed_c10d as c10d

from unisono.adapters.torch.errors import for_torch
from unisono.adapters.torch.name import answer_libraries
from unisono.adapters.torch.process_group import (
    ProcessGroup,
    given_timeout_s,
    name_of,
    sort_options,
)
from unisono.adapters.torch.store import TorchStore
from unisono.beyond import membership
from unisono.core.base import config
from unisono.core.base.deadline import Timeout
from unisono.core.c10d.lifecycle import begin, init_process_group
from unisono.core.groups.membership import Membership
from unisono.core.groups.process_group import ProcessGroup as UnisonoGroup
from unisono.core.groups.world import World, at_exit, current, require_group
from unisono.errors import NotInitializedError, UnisonoError

__all__ = ["create", "reconfigure"]

# More groups than a program makes in one generation: torch numbers them.
_GROUPS = 1_000_000


@dataclass(frozen=True)
class _Successor:
    """The `pg_options` with which `reconfigure` makes torch's default group.

    Attributes:
        group: The unisono group.
        options: The user's `pg_options` for other devices.
    """

    group: UnisonoGroup
    options: Any


def create(options: Any, pg_options: Any) -> ProcessGroup:
    """Return this rank's process group for torch's description of a new group.

    A sub-group shares the links of torch's default group if that is a unisono group. No message is
    sent then.
    """
    ranks = tuple(options.global_ranks_in_group)
    answer_libraries()
    try:
        parent = c10d._get_default_group() if ranks else None
        if isinstance(parent, ProcessGroup):
            return parent.child(ranks, options.store, options.timeout, pg_options)
        if isinstance(pg_options, _Successor):
            group, ours, theirs = pg_options.group, None, pg_options.options
        else:
            ours, theirs = sort_options(pg_options)
            group = _first_group(options, ranks, ours)
    except UnisonoError as error:
        raise for_torch(error) from error.__cause__
    made = ProcessGroup(group, options.store, theirs)
    if not ranks:
        _lend(made, ours)
        _rename(made, group)
    return made


def _rename(made: ProcessGroup, group: UnisonoGroup) -> None:
    """Give torch's later groups other keys than those of the generations before.

    The store of a newcomer is that of its `init_process_group`, so survivors cannot have another.
    """
    found = current().membership
    if found is not None and found.generation > 1 and current().default is group:
        made._store = torch_dist.PrefixStore(group.key, made._root)
        c10d._world.group_count = found.generation * _GROUPS


def _first_group(options: Any, ranks: tuple[int, ...], ours: Any) -> UnisonoGroup:
    """Return a group that shares no links; with UNISONO_JOIN=1 the default group of a job."""
    store, timeout_s = TorchStore(options.store), given_timeout_s(options.timeout)
    store.set_timeout(timeout_s)
    if not ranks and config.get_flag("UNISONO_JOIN"):
        init_process_group(store=store, timeout=timeout_s, pg_options=ours)
        return require_group(None)
    return UnisonoGroup(
        store,
        options.group_rank,
        options.group_size,
        timeout=timeout_s,
        name=name_of(ranks) if ranks else "default",
        options=ours,
    )


def _lend(made: ProcessGroup, options: Any) -> None:
    """Let unisono's world borrow torch's default group; close both together.

    Args:
        made: torch's default group on this rank.
        options: The user's `pg_options` for unisono.
    """
    world, group = current(), made.unisono
    if world.default is group:
        made._forget_exit = lambda: _return(world, group)
        return
    # Weak, because a group that the program drops must end.
    alive = weakref.ref(made)

    def borrow() -> None:
        if (lent := alive()) is None:
            world.lender = None
            return
        lent._forget_exit()
        group = lent.unisono
        begin(world, group, Membership.of_founder(TorchStore(lent._root), group, options))
        lent._forget_exit = lambda: _return(world, group)
        world.lender = None

    def report(text: str) -> None:
        if (lent := alive()) is not None:
            lent.unisono.report_failure(text)

    def close() -> None:
        if (lent := alive()) is not None:
            lent.shutdown()

    uninstall = at_exit(report, close) if made.size() > 1 else lambda: None

    def forget() -> None:
        if world.lender is borrow:
            world.lender = None
        uninstall()

    made._forget_exit, world.lender = forget, borrow
    # Without a shutdown: the hooks would stay for ever.
    weakref.finalize(made, forget).atexit = False


def _return(world: World, group: UnisonoGroup) -> None:
    if world.default is group:
        world.close()


def reconfigure(
    timeout: Timeout | None = None, *, min_size: int = 1, max_size: int | None = None
) -> ProcessGroup:
    """Make torch's default group anew over the living ranks and the processes that wait to join.

    Like `unisono.reconfigure`, for a program with `torch.distributed.init_process_group("unisono")`
    on all ranks. With UNISONO_JOIN=1 that call joins a running job. All groups of torch are
    destroyed, so make groups, meshes and wrapped modules anew on all ranks.
    `torch.nn.parallel.DistributedDataParallel` copies the parameters of rank 0 then.

    Args:
        timeout: See `unisono.reconfigure`, as also for `min_size` and `max_size`.
        min_size: Least number of ranks.
        max_size: Number of ranks from which on no newcomer is admitted.

    Returns:
        torch's new default group, `torch.distributed.group.WORLD`.

    Raises:
        NotInitializedError: torch has no default group, or that of another backend.
        RendezvousError: Too few ranks came, or the others went on without this rank.
        StoreConnectionError: The store ended with the rank that served it.
    """
    old = torch_dist.group.WORLD
    if not isinstance(old, ProcessGroup) or require_group(None) is not old.unisono:
        raise NotInitializedError(
            f"reconfigure needs torch's default group on unisono, got {old!r}",
            hint='call torch.distributed.init_process_group("unisono") first, and '
            "unisono.init_process_group() not at all",
        )
    world, (backend, store) = current(), c10d._world.pg_map[old]
    # torch puts the same prefix before it again.
    store = store.underlying_store
    # Calls of other groups that are under way on other ranks must end, too.
    for each in c10d._world.pg_map:
        if isinstance(each, ProcessGroup):
            world.groups.setdefault(each.unisono.key, each.unisono)
    try:
        group = membership.reconfigure(timeout, min_size=min_size, max_size=max_size)
    except UnisonoError as error:
        raise for_torch(error) from error.__cause__
    torch_dist.destroy_process_group()
    hook = sys.excepthook
    torch_dist.init_process_group(
        backend,
        store=store,
        rank=group.rank(),
        world_size=group.size(),
        timeout=timedelta(seconds=group.timeout_s),
        pg_options=_Successor(group, old._options),
    )
    # torch adds a hook in each call, so each line of a traceback would get one more prefix.
    sys.excepthook = hook
    made = torch_dist.group.WORLD
    assert isinstance(made, ProcessGroup)
    return made
