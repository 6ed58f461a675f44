"""Groups made from groups: new_group and its variants, split_group, shrink_group.

Each function makes a group in four steps:

    1. check the arguments; report a failure to the other ranks (`reporting_bad_arguments`)
    2. agree with all ranks that call on the ranks of the new group
    3. count the new group
    4. make it over the links of the old group (`_make_group`)

The count is the prefix of the group's keys in the store, so it must be equal on all members. Two
functions make no agreement, because not all ranks call them. The keys of new_group with
`use_local_synchronization` hold the members' ranks instead. The missing ranks of shrink_group are
lost.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

from unisono.core.backends import BackendConfig, GroupSpec
from unisono.core.base import config
from unisono.core.base.deadline import Timeout, to_seconds
from unisono.core.base.grouping import grouped
from unisono.core.base.integers import as_integer, as_integers
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.c10d.lifecycle import bind
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.c10d.queries import get_process_group_ranks
from unisono.core.groups.process_group import ProcessGroup, group_timeout_s
from unisono.core.groups.world import Group, GroupMember, current, require_group
from unisono.core.stores import PrefixStore
from unisono.errors import ArgumentTypeError, InvalidArgumentError

SHRINK_DEFAULT = 0
"""For `shrink_group`: the old group's calls of this rank end when that group is closed."""
SHRINK_ABORT = 1
"""For `shrink_group`: end the old group's calls on all ranks first."""


# On other ranks the result is a number; Any spares each caller a check of the type.
@overload
def new_group(
    ranks: None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup: ...


@overload
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | Any: ...


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of some ranks of the world.

    All ranks of the world must make the same groups in the same order, members or not. The call
    checks that, and returns when all ranks have called it. With `use_local_synchronization` only
    the members call, and no rank waits. The links of the world are shared.

    Args:
        ranks: Global ranks; all if None.
        timeout: Default of the group's calls; the default group's if None.
        backend: As for init_process_group; the default group's if None.
        pg_options: Passed on to the backend.
        use_local_synchronization: Other ranks neither call this nor count the group.
        group_desc: Name shown in errors.
        device_id: As for init_process_group.
        sort_ranks: False keeps the order of `ranks`.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER on other ranks (None with local
        synchronization).

    Raises:
        InvalidArgumentError: Duplicates, or ranks outside the world.
        CollectiveMismatchError: Ranks make different groups; no group is made.
        CollectiveTimeoutError: A rank did not call.
    """
    default = require_group(None)
    settings = _Settings(timeout, backend, pg_options, group_desc, device_id)
    if not use_local_synchronization:
        with reporting_bad_arguments(default, "new_group"):
            _check_timeout(timeout)
            members = _check_members(ranks, default, sort_ranks)
            kind = "" if backend is None else f", backend={str(BackendConfig(backend))!r}"
        default.agree(f"new_group({list(members)}{kind}{_engine_of(pg_options)})", timeout=timeout)
        return _make_counted_group(default, members, settings)
    members = _check_members(ranks, default, sort_ranks)
    if default.rank() not in members:
        return None
    # Ranks outside do not count this group, so its key must not depend on the count of groups.
    # A key is never used again: another member may not have destroyed an older group yet.
    world = current()
    count = world.made_local[members]
    world.made_local[members] += 1
    key = f"local/{'-'.join(map(str, members))}/{count}"
    return _make_group(default, members, key, settings)


class _Settings(NamedTuple):
    """Settings of a new group; None: those of the parent."""

    timeout: Timeout | None
    backend: str | None
    pg_options: Any
    group_desc: str | None
    device_id: Any = None


def _engine_of(pg_options: Any) -> str:
    """Return the engine of a new group for the agreement, in which ranks must not differ."""
    wish = getattr(pg_options, "engine", None)
    return "" if wish is None else f", engine={wish!r}"


def _make_counted_group(
    default: ProcessGroup, members: tuple[int, ...], settings: _Settings
) -> Any:
    """Count a group on all ranks of the world, and make it on its members."""
    world = current()
    key = str(world.made)
    world.made += 1
    if default.rank() not in members:
        return GroupMember.NON_GROUP_MEMBER
    return _make_group(default, members, key, settings)


def _make_group(
    parent: ProcessGroup, members: tuple[int, ...], key: str, settings: _Settings
) -> ProcessGroup:
    """Make a group of some global ranks, this rank included, over the links of `parent`."""
    timeout = parent.timeout_s if settings.timeout is None else settings.timeout
    spec = GroupSpec(
        store=PrefixStore(key, parent.store),
        rank=members.index(parent.ranks[parent.rank()]),
        size=len(members),
        ranks=members,
        name=settings.group_desc or key,
        key=key,
        timeout_s=group_timeout_s(timeout),
        options=settings.pg_options,
    )
    group = ProcessGroup.from_spec(spec, settings.backend or str(parent.config), parent)
    bind(group, settings.device_id)
    current().groups[key] = group
    return group


def _check_timeout(timeout: Timeout | None) -> None:
    """Check a time-out before the agreement, which would be blamed for it."""
    if timeout is not None:
        to_seconds(timeout)


def _check_members(
    ranks: Any, parent: ProcessGroup, sort_ranks: bool = True, what: str = "ranks"
) -> tuple[int, ...]:
    """Return ranks of `parent`; check that there is at least one, and each once."""
    size = parent.size()
    if ranks is None:
        return tuple(range(size))
    given = as_integers(list(ranks) if isinstance(ranks, (set, frozenset)) else ranks, what)
    members = tuple(sorted(given)) if sort_ranks else given
    if not members or len(set(members)) != len(members):
        raise InvalidArgumentError(f"{what} {[*given]} must be distinct, and at least one")
    if outside := [r for r in members if not 0 <= r < size]:
        where = "the world" if parent is current().default else f"group '{parent.name}'"
        raise InvalidArgumentError(f"{what} {outside} are outside {where} (0..{size - 1})")
    return members


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[Any]]:
    """Split the world, or a group, into groups of consecutive ranks.

    With `group`, only its members call; otherwise all ranks do.

    Args:
        group_size: Ranks in each group, a divisor of the number of ranks. If None, the number of
            ranks of a host (LOCAL_WORLD_SIZE); torch takes the number of GPUs.
        group: Group to split; the world if None.
        timeout: As for new_group.
        backend: As for new_group.
        pg_options: As for new_group.
        group_desc: As for new_group.

    Returns:
        This rank's group, and the list of all groups (GroupMember.NON_GROUP_MEMBER for the other
        groups).

    Raises:
        InvalidArgumentError: No size is known, or it does not divide the number of ranks.
    """
    pg, ranks = require_group(group), get_process_group_ranks(group)
    with reporting_bad_arguments(pg, "new_subgroups"):
        _check_timeout(timeout)
        size = as_integer(_local_world_size() if group_size is None else group_size, "group_size")
        if size < 1 or len(ranks) % size:
            raise InvalidArgumentError(
                f"group_size={size} must be positive and divide the number of ranks, {len(ranks)}"
            )
    lists = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    if pg is current().default:
        return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)
    pg.agree(f"new_subgroups({size}{_engine_of(pg_options)})", timeout=timeout)
    mine = next(part for part in lists if ranks[pg.rank()] in part)
    made = new_group(
        mine, timeout, backend, pg_options, use_local_synchronization=True, group_desc=group_desc
    )
    return made, [made if part is mine else GroupMember.NON_GROUP_MEMBER for part in lists]


def _local_world_size() -> int:
    text = config.environ().get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal():
        raise InvalidArgumentError(
            "group_size is not given, and LOCAL_WORLD_SIZE is not the number of ranks per host",
            hint="pass group_size, or start the script with `unisono run`",
        )
    return int(text)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[Any]]:
    """Make one group per list of global ranks; all ranks of the world call.

    Args:
        ranks_per_subgroup_list: Lists that have no rank in common.
        timeout: As for new_group.
        backend: As for new_group.
        pg_options: As for new_group.
        group_desc: As for new_group.

    Returns:
        This rank's group (None if it is in no list), and the list of all groups
        (GroupMember.NON_GROUP_MEMBER for the other groups).

    Raises:
        InvalidArgumentError: No list, lists that overlap, or ranks outside the world. No group
            is made then.
        CollectiveMismatchError: Ranks gave different lists. No group is made then.
    """
    default = require_group(None)
    call = "new_subgroups_by_enumeration"
    with reporting_bad_arguments(default, call):
        _check_timeout(timeout)
        lists = _check_lists(ranks_per_subgroup_list, default, "ranks_per_subgroup_list")
    parts = f"{[list(part) for part in lists]}{_engine_of(pg_options)}"
    default.agree(f"{call}({parts})", timeout=timeout)
    settings = _Settings(timeout, backend, pg_options, group_desc)
    groups = [_make_counted_group(default, part, settings) for part in lists]
    mine = (made for made, part in zip(groups, lists, strict=True) if default.rank() in part)
    return next(mine, None), groups


def _check_lists(lists: Any, parent: ProcessGroup, what: str) -> list[tuple[int, ...]]:
    """Return lists of ranks of `parent`, each sorted; check that they are disjoint."""
    if hasattr(lists, "tolist"):
        lists = lists.tolist()
    if lists is None or not isinstance(lists, Iterable):
        raise InvalidArgumentError(f"{what} must be a list of lists of ranks, got {lists!r}")
    checked = [_check_members(part, parent, what=f"{what}[{at}]") for at, part in enumerate(lists)]
    if not checked:
        raise InvalidArgumentError(f"{what} is empty")
    home: dict[int, int] = {}
    for at, part in enumerate(checked):
        for rank in part:
            if rank in home:
                raise InvalidArgumentError(
                    f"rank {rank} is in {what}[{home[rank]}] and again in {what}[{at}]"
                )
            home[rank] = at
    return checked


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
    *,
    color: int | None = None,
    key: int = 0,
) -> ProcessGroup | None:
    """Split a group into disjoint groups; exactly its ranks call.

    All ranks give the same lists (`split_ranks`), or each rank gives its own `color` and `key`, as
    for MPI_Comm_split. Works on every device that the parent has a backend for, the CPU included.
    The links of the parent are shared. The call returns when all ranks of the parent have called
    it.

    Args:
        parent_pg: Group to split; the default group if None.
        split_ranks: Lists of ranks *of the parent*; each group has its ranks in ascending order.
        timeout: Default of the group's calls; the parent's if None.
        pg_options: Passed on to the backend.
        group_desc: Name shown in errors.
        backend: The parent's backends to keep: "cpu:unisono"; all if None.
        color: In place of `split_ranks`: ranks of one color make a group; negative: no group.
        key: Ranks of one color are ordered by their keys, then by their ranks in the parent.

    Returns:
        This rank's group; None if it is in no list, or has a negative color.

    Raises:
        InvalidArgumentError: No list, lists that overlap, ranks outside the parent, lists and a
            color, or a backend that the parent does not have. No group is made then.
        CollectiveMismatchError: Ranks gave different lists. No group is made then.

    Examples: On rank 1 of 2
        >>> pg = dist.split_group(color=0, key=-rank)
        >>> dist.get_process_group_ranks(pg)
        [1, 0]
    """
    parent = require_group(parent_pg)
    with reporting_bad_arguments(parent, "split_group"):
        _check_timeout(timeout)
        if backend is not None:
            _check_kept(BackendConfig(backend), parent)
        if color is None:
            lists = _check_lists(split_ranks, parent, "split_ranks")
        elif split_ranks is None:
            mine = as_integer(color, "color"), as_integer(key, "key")
        else:
            raise InvalidArgumentError("split_ranks and color are both given; expected one")
    if color is None:
        parts = f"{[list(part) for part in lists]}{_engine_of(pg_options)}"
        parent.agree(f"split_group({parts})", timeout=timeout)
    else:
        lists = _lists_by_color(parent, mine, timeout)
    number = parent.counts["split"]
    parent.counts["split"] += 1
    for at, part in enumerate(lists):
        if parent.rank() in part:
            name = f"{parent.key}/split/{number}/{at}"
            members = tuple(parent.ranks[rank] for rank in part)
            settings = _Settings(timeout, backend, pg_options, group_desc)
            return _make_group(parent, members, name, settings)
    return None


def _lists_by_color(
    parent: ProcessGroup, mine: tuple[int, int], timeout: Timeout | None
) -> list[tuple[int, ...]]:
    """Return the ranks of each color, in the order of their keys; all ranks get the same."""
    with ObjectCall(parent, "split_group", timeout, None) as call:
        rows = call.loads_all(call.all_gather(call.pack(lambda: mine)))
    parts = grouped((color, (key, at)) for at, (color, key) in enumerate(rows) if color >= 0)
    return [tuple(rank for _, rank in sorted(parts[color])) for color in sorted(parts)]


def _check_kept(kept: BackendConfig, parent: ProcessGroup) -> None:
    has = parent.config.device_backend_map
    for device, name in kept.device_backend_map.items():
        if has.get(device) != name:
            raise InvalidArgumentError(
                f"backend {str(kept)!r}: the parent group '{parent.name}' has "
                f"{str(parent.config)!r}"
            )


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
    *,
    timeout: Timeout | None = None,
) -> ProcessGroup:
    """Replace a group by a group without some of its ranks; only the remaining ranks call.

    Used after ranks were lost: the old group may be broken. The old group is closed. If it is the
    default group, the new group gets its own links and new global ranks 0, 1, .... All other groups
    of this world are then closed too, because their ranks have no meaning any more.

    Args:
        ranks_to_exclude: Ranks *of the group*.
        group: The default group if None.
        shrink_flags: SHRINK_ABORT (1) first aborts the group's calls on all ranks. With
            SHRINK_DEFAULT (0) the calls of this rank are finished, each within its time-out.
        pg_options: Passed on to the backend.
        timeout: Of this call, and default of the new group's; the old group's if None.

    Returns:
        The new group.

    Raises:
        ArgumentTypeError: Not a list of integers.
        InvalidArgumentError: `ranks_to_exclude` is empty, or has all ranks, a rank twice or this
            rank.
        RendezvousError: (default group) The other ranks did not come.
        StoreConnectionError: (default group) The store ended with the rank that served it. Groups
            made by new_group can still be shrunk; under a launcher the store outlives all ranks.
    """
    old = require_group(group)
    if not isinstance(ranks_to_exclude, (list, tuple)):
        raise ArgumentTypeError(f"ranks_to_exclude must be a list, got {ranks_to_exclude!r}")
    excluded = _check_members(ranks_to_exclude, old, what="ranks_to_exclude")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidArgumentError(
            f"shrink_flags={shrink_flags!r} is neither SHRINK_DEFAULT (0) nor SHRINK_ABORT (1)"
        )
    if old.rank() in excluded:
        raise InvalidArgumentError(
            f"rank {old.rank()} is to be excluded, so it must not call shrink_group"
        )
    if shrink_flags == SHRINK_ABORT:
        old.abort("shrink_group with SHRINK_ABORT was called")
    left = tuple(rank for rank in range(old.size()) if rank not in excluded)
    key = f"{old.key}/without/{'-'.join(map(str, excluded))}"
    if old is current().default:
        return _shrink_default(old, left, key, pg_options, timeout)
    members = tuple(old.ranks[rank] for rank in left)
    settings = _Settings(timeout, None, pg_options, f"{old.name}:shrunk")
    made = _make_group(old, members, key, settings)
    current().close(only=old)
    return made


def _shrink_default(
    old: ProcessGroup,
    left: tuple[int, ...],
    key: str,
    pg_options: Any,
    timeout: Timeout | None,
) -> ProcessGroup:
    if pg_options is None:
        pg_options = next(iter(old.backends.values())).spec.options
    spec = GroupSpec(
        store=PrefixStore(key, old.store),
        rank=left.index(old.rank()),
        size=len(left),
        ranks=tuple(range(len(left))),
        name="default:shrunk",
        key=key,
        timeout_s=group_timeout_s(old.timeout_s if timeout is None else timeout),
        options=pg_options,
    )
    made = ProcessGroup.from_spec(spec, str(old.config))
    current().replace_default(made)
    return made
