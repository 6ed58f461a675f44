"""Making and ending process groups: init_process_group, new_group, destroy_process_group.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unisono.backends import BackendConfig
from unisono.base import config
from unisono.base.deadline import Timeout, to_seconds
from unisono.errors import (
    AlreadyInitializedError,
    ArgumentTypeError,
    InvalidArgumentError,
    RendezvousError,
)
from unisono.groups.checks import as_integer
from unisono.groups.exits import at_exit
from unisono.groups.process_group import ProcessGroup
from unisono.groups.world import GroupMember, World, current, process_world, resolve
from unisono.rendezvous import rendezvous
from unisono.rendezvous.launchers import find_place, is_alone
from unisono.stores import HashStore, PrefixStore, Store

__all__ = [
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
]


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Make the default process group.

    Every rank calls it; it returns when all have. Without `init_method` and `store` the
    environment says who takes part: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as `unisono run`
    and torchrun set them, or the variables of mpiexec, srun or a Kubernetes Indexed Job. Without
    any of these the world has one rank.

    Args:
        backend: "unisono" (the default), "gloo" (served by the same engine), or one per device
            type: "cpu:unisono,cuda:nccl".
        init_method: URL: env://, tcp://host:port, file:///path.
        timeout: Of this call, and default of every later one. 1,800 s.
        world_size: Number of ranks; needed with `store` and where the URL does not say.
        rank: This process's rank; likewise.
        store: Used instead of `init_method`.
        group_name: Accepted for torch's sake, and ignored as there.
        pg_options: Passed on to the backend.
        device_id: Accepted for torch's sake; CPU ranks are bound to no device.

    Raises:
        AlreadyInitializedError: There is a default group.
        InvalidArgumentError: Arguments that contradict each other.
        RendezvousError: A variable is missing or bad, or ranks did not come; names them.
    """
    world = current()
    if world.default is not None:
        raise AlreadyInitializedError(
            "trying to initialize the default process group twice",
            hint="call destroy_process_group() first, or make a ProcessGroup of your own",
        )
    if store is not None and init_method is not None:
        raise InvalidArgumentError("cannot specify both init_method and store")
    BackendConfig(backend)
    timeout_s = config.get_float("UNISONO_TIMEOUT") if timeout is None else to_seconds(timeout)
    owned = store is None
    store, rank, world_size = _meet(store, init_method, timeout_s, rank, world_size)
    if owned:
        world.on_close.append(store.close)
    try:
        group = ProcessGroup(
            PrefixStore("default_pg/0", store),
            rank,
            world_size,
            backend,
            timeout_s,
            "default",
            options=pg_options,
        )
    except BaseException:
        world.close()
        raise
    world.default = group
    world.groups[group.key] = group
    world.made = 1
    _install_hooks(world)


def _meet(
    store: Store | None, init_method: str | None, timeout_s: float, rank: int, world_size: int
) -> tuple[Store, int, int]:
    """Return a store, this rank and the world size."""
    if store is not None:
        if world_size < 1 or rank < 0:
            raise InvalidArgumentError(
                f"with store=, rank and world_size are required, got rank={rank} and "
                f"world_size={world_size}"
            )
        return store, rank, world_size
    if init_method is None:
        if is_alone(config.environ(), rank, world_size):
            return HashStore(), 0, 1
        init_method = "env://"
    return next(iter(rendezvous(init_method, rank, world_size, timeout=timeout_s)))


def destroy_process_group(group: Any = None) -> None:
    """Close a group; without argument the default group and everything made from it.

    Not a collective: other ranks may go on among themselves. Ranks that wait for this one get
    PeerLostError.

    Raises:
        InvalidArgumentError: The group is not one of this world, or is closed already.
    """
    pg = resolve(group)
    world = current()
    if pg is None:
        return
    if world.groups.get(pg.key) is not pg:
        raise InvalidArgumentError(f"group {pg!r} is not a group of this world")
    world.close(only=pg)


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

    All ranks of the world must make the same groups in the same order, members or not; with
    `use_local_synchronization` only the members call. The links of the world are shared, so
    nothing is sent and nobody waits.

    Args:
        ranks: Global ranks; all if None.
        timeout: Default of the group's calls; the default group's if None.
        backend: As for init_process_group; the default group's if None.
        pg_options: Passed on to the backend.
        use_local_synchronization: Non-members neither call nor count the group.
        group_desc: Name shown in errors.
        device_id: Accepted for torch's sake.
        sort_ranks: False keeps the order of `ranks`.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER on other ranks (None with local
        synchronization).

    Raises:
        InvalidArgumentError: Duplicates, or ranks outside the world.
    """
    default = resolve(None)
    assert default is not None
    world = current()
    members = _check_members(ranks, default, sort_ranks)
    if use_local_synchronization:
        # Ranks outside do not count this group, so its key must not depend on the count of all.
        # It is never used again: another member may not have destroyed an older group yet.
        count = world.made_local[members]
        world.made_local[members] += 1
        key = f"local/{'-'.join(map(str, members))}/{count}"
    else:
        key = str(world.made)
        world.made += 1
    me = default.rank()
    if me not in members:
        return None if use_local_synchronization else GroupMember.NON_GROUP_MEMBER
    group = ProcessGroup(
        PrefixStore(key, default.store),
        members.index(me),
        len(members),
        backend or str(default.config),
        default.timeout_s if timeout is None else timeout,
        group_desc or key,
        options=pg_options,
        _ranks=members,
        _parent=default,
        _key=key,
    )
    world.groups[key] = group
    return group


def _check_members(
    ranks: Sequence[int] | None, default: ProcessGroup, sort_ranks: bool
) -> tuple[int, ...]:
    size = default.size()
    if ranks is None:
        return tuple(range(size))
    if not isinstance(ranks, Iterable):
        raise ArgumentTypeError(f"ranks must be a list of integers, got {ranks!r}")
    given = [as_integer(rank, "each of ranks") for rank in ranks]
    members = tuple(sorted(given) if sort_ranks else given)
    if not members or len(set(members)) != len(members):
        raise InvalidArgumentError(f"ranks {given} must be distinct, and at least one")
    if outside := [r for r in members if not 0 <= r < size]:
        raise InvalidArgumentError(f"ranks {outside} are outside the world (0..{size - 1})")
    return members


def is_available() -> bool:
    """Whether the package can be used: always, once it is imported."""
    return True


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
    return _required(group).group_rank(global_rank)


def get_global_rank(group: Any, group_rank: int) -> int:
    """Return the global rank of a rank in `group`.

    Raises:
        InvalidArgumentError: This rank is not a member, or there is no such rank.
    """
    pg = _required(group)
    group_rank = as_integer(group_rank, "group_rank")
    if not 0 <= group_rank < pg.size():
        raise InvalidArgumentError(
            f"group rank {group_rank} is not in group '{pg.name}' (0..{pg.size() - 1})"
        )
    return pg.ranks[group_rank]


def get_process_group_ranks(group: Any = None) -> list[int]:
    """Return the global ranks of a group, in group order."""
    return list(_required(group).ranks)


def get_backend(group: Any = None) -> str:
    """Return the name of the group's backend (the first one, if it has several)."""
    return next(iter(_required(group).config.device_backend_map.values()))


def get_backend_config(group: Any = None) -> str:
    """Return the backends of a group by device: "cpu:unisono"."""
    return str(_required(group).config)


def _required(group: Any) -> ProcessGroup:
    pg = resolve(group)
    if pg is None:
        raise InvalidArgumentError("this rank does not belong to the given group")
    return pg


def _install_hooks(world: World) -> None:
    """See to it that the other ranks hear of an uncaught exception, and of the exit."""
    group = world.default
    assert group is not None
    # An uncaught exception in a thread that is a rank never comes to sys.excepthook.
    if group.size() == 1 or world is not process_world:
        return

    def leave() -> None:
        if world.default is group:
            world.close()

    world.on_close.append(at_exit(group, leave))
