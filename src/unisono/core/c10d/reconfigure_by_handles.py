"""c10d's way to change the members of the default group: the caller names them by handles.

    dist.init_process_group(store=store, rank=rank, world_size=size, enable_reconfigure=True)
    handles = exchange(dist._get_reconfigure_handle())      # by the store, or a coordinator
    dist._reconfigure(uuid, handles)                        # the members, in the order of ranks

`unisono.reconfigure` lets the members agree instead.

Source: torch.distributed.distributed_c10d of torch's main line (2026).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unisono.core.backends import GroupSpec, Pending
from unisono.core.base.deadline import Timeout
from unisono.core.c10d.lifecycle import install_hooks
from unisono.core.groups.process_group import ProcessGroup, group_timeout_s
from unisono.core.groups.world import Group, Reconfigurable, current, require_group
from unisono.core.operations.work import Work
from unisono.core.stores import PrefixStore
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError


def _supports_reconfigure(group: Group = None) -> bool:
    """Whether `_reconfigure` can change the group: the default one with `enable_reconfigure`."""
    world = current()
    return world.reconfigurable is not None and require_group(group) is world.default


def _get_reconfigure_handle(group: Group = None) -> str:
    """Return a text that names this process to the others.

    Raises:
        UnsupportedError: See `_supports_reconfigure`.
    """
    return _wishes(group).handle


def _reconfigure(
    uuid: int,
    handles: Collection[str],
    group: Group = None,
    timeout: Timeout | None = None,
    hints: dict[str, str] | None = None,
) -> Work:
    """Replace the default group by one of the processes with these handles; they all call.

    Calls of the old group end with CollectiveAbortedError, also on processes that are left out.

    Args:
        uuid: Equal on all members, and new.
        handles: Of all members, in the order of ranks; a set is sorted.
        group: The default group.
        timeout: How long to wait for the members; the default of the group's calls if None.
        hints: Accepted for torch's sake.

    Raises:
        UnsupportedError: See `_supports_reconfigure`.
        ArgumentTypeError: Handles that are no texts.
        InvalidArgumentError: This process is not among the members, a handle is there twice, or
            the uuid was used before. The old group can still be used.
        RendezvousError: Some members did not come in time; names them.
    """
    known, world, old = _wishes(group), current(), require_group(group)
    if not all(isinstance(handle, str) for handle in handles):
        raise ArgumentTypeError(f"handles must be texts, got {handles!r}")
    members = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
    if members.count(known.handle) != 1:
        raise InvalidArgumentError(f"this process must be once among the {len(members)} handles")
    if len(set(members)) < len(members):
        raise InvalidArgumentError(f"each handle must be there once, got {members}")
    store, key = known.store, f"reconfigure/{uuid}"
    if store.add(f"{key}/used/{known.handle}", 1) > 1:
        raise InvalidArgumentError(f"uuid {uuid} was already used by this process")
    old.abort("_reconfigure() was called")
    spec = GroupSpec(
        PrefixStore(key, store), members.index(known.handle), len(members),
        tuple(range(len(members))), f"default:reconfigured-{uuid}", key,
        group_timeout_s(known.timeout_s if timeout is None else timeout), known.options,
    )  # fmt: skip
    made = ProcessGroup.from_spec(spec, known.backend)
    made.set_timeout(known.timeout_s)
    world.replace_default(made)
    install_hooks(world)
    return Work(Pending([], done=True), "_reconfigure", made)


def _wishes(group: Any) -> Reconfigurable:
    found = current().reconfigurable
    if found is None or not _supports_reconfigure(group):
        raise UnsupportedError(
            f"group '{require_group(group).name}' cannot be reconfigured by handles",
            hint="init_process_group(enable_reconfigure=True); or see unisono.reconfigure",
        )
    return found
