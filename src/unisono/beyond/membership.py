"""Ranks that come and go: reconfigure, membership_changed.

`docs/explanation/membership.md` has the protocol and what can be lost.
"""

from __future__ import annotations

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.c10d.lifecycle import install_hooks
from unisono.core.groups.membership import Membership, Wishes
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current, require_group
from unisono.errors import InvalidArgumentError, NotInitializedError


def reconfigure(
    timeout: Timeout | None = None, *, min_size: int = 1, max_size: int | None = None
) -> ProcessGroup:
    """Continue with the living ranks of the job and the processes that wait to join.

    All living ranks call this function, after an error or when `membership_changed` is true. Calls
    of this rank's groups that are under way on other ranks end with CollectiveAbortedError, so that
    these ranks can call it, too. It returns when all ranks have come that are neither lost nor
    blamed by a time-out, and when they and the newcomers are connected. The survivors keep their
    order and come first. All old groups are closed. `sync_state` copies the state to newcomers.

    If the deadline passes, the ranks that came go on without the others. They need more than half
    of the ranks of the generation before, or exactly half with its lowest rank.

    Args:
        timeout: How long to wait for ranks that are not known to be lost; the default group's if
            None.
        min_size: Least number of ranks. With it survivors wait for replacements of lost ranks.
        max_size: Number of ranks from which on no newcomer is admitted. No survivor is excluded.

    Returns:
        The new default group. Its name has the number of the generation.

    Raises:
        NotInitializedError: No default group was made by `init_process_group`.
        InvalidArgumentError: `max_size` is less than `min_size`, or `min_size` less than 1.
        RendezvousError: Too few ranks came, or the others went on without this rank. The default
            group is as before, and this process is in no later generation.
        StoreConnectionError: The store ended with the rank that served it; under `unisono run` the
            store outlives all ranks.
        StoreTimeoutError: The store does not answer.
    """
    least = as_integer(min_size, "min_size")
    most = 0 if max_size is None else as_integer(max_size, "max_size")
    if least < 1 or (max_size is not None and most < least):
        raise InvalidArgumentError(
            f"reconfigure needs 1 <= min_size <= max_size, got min_size={min_size} and "
            f"max_size={max_size}"
        )
    world, membership = current(), membership_of_world()
    old = require_group(None)
    blamed: set[int] = set()
    for group in world.groups.values():
        backends = group.backends.values()
        blamed |= {group.ranks[rank] for each in backends for rank in each.blamed()}
        if all(each.broken() is None for each in backends):
            group.abort("reconfigure() was called")
    wishes = Wishes(
        deadline=Deadline(old.timeout_s if timeout is None else timeout),
        min_size=least,
        max_size=most,
        blamed=tuple(sorted(blamed)),
    )
    membership.settle(old.store, wishes.deadline.remaining())
    before = membership.generation
    made = membership.next_group(wishes, old, old.timeout_s, str(old.config))
    world.replace_default(
        made, f"generation {before}, which generation {membership.generation} succeeded"
    )
    world.membership = membership
    install_hooks(world)
    return made


def membership_changed() -> bool:
    """Return whether a rank of the world is lost, or a process waits to join.

    Cheap enough for each step: the store is read at most every 50 ms. The answer may differ between
    ranks for a moment. In a loop with `step`, use `Step.changed`, which is equal on all ranks.

    Raises:
        NotInitializedError: No default group was made by `init_process_group`.
    """
    return membership_of_world().has_changed(require_group(None))


def membership_of_world() -> Membership:
    """Return the membership of the current world.

    Raises:
        NotInitializedError: There is no default group, or none that `init_process_group` made.
    """
    require_group(None)
    if (found := current().membership) is None:
        raise NotInitializedError(
            "the default group was not made by init_process_group or reconfigure",
            hint="after shrink_group, make it anew: destroy_process_group, init_process_group",
        )
    return found
