"""The default process group: init_process_group, find_group, destroy_process_group.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

import contextlib
import platform
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from unisono.core.backends import BackendConfig
from unisono.core.base import config
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.host import reason_of
from unisono.core.base.integers import as_integer
from unisono.core.base.source.tracebacks import hide_own_frames
from unisono.core.groups.membership import Membership, Wishes
from unisono.core.groups.process_group import ProcessGroup, group_timeout_s
from unisono.core.groups.world import (
    Group,
    Reconfigurable,
    World,
    at_exit,
    current,
    process_world,
    require_group,
    resolve,
)
from unisono.core.operations.hooks import PreHookArgs
from unisono.core.rendezvous import rendezvous
from unisono.core.rendezvous.handlers import attempt_prefix
from unisono.core.rendezvous.joining import open_for_newcomer
from unisono.core.rendezvous.launchers import find_place, is_alone
from unisono.core.stores import HashStore, PrefixStore, Store
from unisono.errors import (
    AlreadyInitializedError,
    InvalidArgumentError,
    NotInitializedError,
    RendezvousError,
    UnisonoError,
    UsageError,
)


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
    *,
    enable_reconfigure: bool = False,
) -> None:
    """Make the default process group.

    Every rank calls this function; it returns when all ranks have called it. Without `init_method`
    and `store` the environment gives the rank and the number of ranks. `unisono run` and torchrun
    set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The variables of mpiexec, srun and a
    Kubernetes Indexed Job are read too. Without any of these variables the world has one rank.
    With UNISONO_JOIN=1 this process joins a running job, when its ranks call `reconfigure`.

    Args:
        backend: "unisono" (the default), "gloo" (served by the same engine), "mpi" (collectives of
            an MPI library), "nccl" (arrays of GPUs), or one per device type:
            "cpu:unisono,cuda:nccl".
        init_method: URL: env://, tcp://host:port, file:///path.
        timeout: Of this call, and default of every later one. 1,800 s.
        world_size: Number of ranks; needed with `store`, or if the URL does not give it.
        rank: This process's rank; needed in the same cases.
        store: Used instead of `init_method`.
        group_name: Accepted for torch's sake, and ignored as there.
        pg_options: Passed on to the backend.
        device_id: GPU of this rank: 0, "cuda:0" or a torch.device. The backend for it then
            connects the ranks now, instead of at the first call. CPU ranks need no device.
        enable_reconfigure: Connect no ranks yet: `_reconfigure` makes the group of the processes
            whose handles it gets. Calls before that raise UsageError.

    Raises:
        AlreadyInitializedError: There is a default group.
        InvalidArgumentError: Arguments that contradict each other.
        RendezvousError: A variable is missing or bad, or ranks did not come; names them.
    """
    world = current()
    if world is process_world:
        hide_own_frames()
    if world.default is not None:
        hint = "leave this call out, as in a pool; destroy_process_group() ends the one before"
        if (maker := world.kept.get("maker")) is not None:
            hint = f"{maker} has made it: leave this call out, or make it before that"
        raise AlreadyInitializedError(
            "trying to initialize the default process group twice", hint=hint
        )
    if store is not None and init_method is not None:
        raise InvalidArgumentError("cannot specify both init_method and store")
    BackendConfig(backend)
    timeout_s = group_timeout_s(timeout)
    if config.get_flag("UNISONO_JOIN"):
        _join(world, backend, init_method, timeout_s, store, pg_options)
        return
    owned = store is None
    with _raising_rendezvous_errors():
        store, rank, world_size = _meet(store, init_method, timeout_s, rank, world_size)
    if owned:
        world.on_close.append(store.close)
    if enable_reconfigure:
        _begin_alone(world, Reconfigurable(store, uuid4().hex, backend, timeout_s, pg_options))
        return
    try:
        with _raising_rendezvous_errors(rank, world_size):
            group = ProcessGroup(
                PrefixStore("default_pg/0", store),
                rank,
                world_size,
                backend,
                timeout_s,
                "default",
                options=pg_options,
            )
        bind(group, device_id)
    except BaseException:
        world.close()
        raise
    begin(world, group, Membership.of_founder(store, group, pg_options))
    if world is process_world and world_size > 1 and _mpi4py_is_alone():
        warnings.warn(
            f"mpi4py sees 1 process, and unisono {world_size}: in MPI each rank is alone; "
            "`unisono run --mpi` makes one world for both",
            stacklevel=2,
        )


def _mpi4py_is_alone() -> bool:
    """Whether this process uses mpi4py's own MPI, which found no launcher."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    # The module of the latter name is unisono's, in the place of mpi4py's.
    if mpi is None or mpi.__name__ == "unisono.MPI":
        return False
    return bool(mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() == 1)


def _begin_alone(world: World, wishes: Reconfigurable) -> None:
    """Begin with a group that makes no calls, until `_reconfigure` replaces it."""

    def refuse(call: PreHookArgs) -> None:
        raise UsageError(f"{call.op}: the default group has no members before _reconfigure()")

    group = ProcessGroup(HashStore(), 0, 1, wishes.backend, wishes.timeout_s, "default:no-members")
    group.register_pre_hook(0, refuse)
    world.default = world.groups[group.key] = group
    world.reconfigurable = wishes


def bind(group: ProcessGroup, device: Any) -> None:
    """Connect the ranks of a group for a device; close the group if that fails."""
    try:
        for backend in group.backends.values() if device is not None else ():
            backend.bind(device)
    except BaseException:
        group.close()
        raise


def _join(
    world: World,
    backend: str | None,
    init_method: str | None,
    timeout_s: float,
    store: Store | None,
    options: Any,
) -> None:
    """Wait as a newcomer for the next generation of a running job."""
    if store is None:
        with _raising_rendezvous_errors():
            store = open_for_newcomer(init_method or "env://", timeout_s)
        world.on_close.append(store.close)
    try:
        membership = Membership.of_newcomer(store, options)
        wishes = Wishes(deadline=Deadline(timeout_s))
        with _raising_rendezvous_errors():
            group = membership.next_group(wishes, None, timeout_s, backend)
    except BaseException:
        world.close()
        raise
    begin(world, group, membership)


def begin(world: World, group: ProcessGroup, membership: Membership) -> None:
    """Make a group the default group of a world without groups."""
    world.default = group
    world.groups[group.key] = group
    world.made = 1
    world.membership = membership
    install_hooks(world)


@contextlib.contextmanager
def _raising_rendezvous_errors(rank: int = -1, world_size: int = -1) -> Iterator[None]:
    """Turn an error of the operating system, such as too few descriptors, into RendezvousError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UnisonoError):
            raise
        me = f"rank {rank} of {world_size}" if rank >= 0 else "this process"
        raise RendezvousError(
            f"{me} on {platform.node()} cannot join a group: {reason_of(error)}"
        ) from error


def _meet(
    store: Store | None, init_method: str | None, timeout_s: float, rank: int, world_size: int
) -> tuple[Store, int, int]:
    """Return a store, this rank and the world size."""
    rank, world_size = as_integer(rank, "rank"), as_integer(world_size, "world_size")
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
    # The launcher looks into its own store whether a failed worker had met the others. If they met
    # elsewhere, its replacement would take its rank, and make the file of the others anew.
    founds = attempt_prefix() and config.environ().get("UNISONO_JOIN") == "0"
    if founds and not init_method.startswith(("env:", "tcp:")):
        raise RendezvousError(
            f"rank {config.environ().get('RANK')} cannot meet at {init_method!r}: newcomers of "
            "`unisono run --restart worker` join at env://",
            hint="leave init_method out, or use --restart all",
        )
    return next(iter(rendezvous(init_method, rank, world_size, timeout=timeout_s)))


def find_group(group: Group = None) -> ProcessGroup | None:
    """Return a group, by default the default group; None if this process is alone.

    For functions of libraries, which then compute without a group. A process is alone if it has no
    default group and no launcher has started others with it.

    Raises:
        NotInitializedError: There are other processes, but no default group.
        InvalidArgumentError: This rank is not a member of `group`.
        RendezvousError: As init_process_group, if variables contradict each other.
    """
    try:
        return require_group(group)
    except NotInitializedError:
        env = config.environ()
        place = find_place(env)
        if is_alone(env) if place is None else place.world_size == 1:
            return None
        raise


def destroy_process_group(group: Group = None) -> None:
    """Close a group; without an argument the default group and all groups made from it.

    Asynchronous calls that were made are finished first, each within its time-out. After an
    exception they are cancelled instead: if it is being handled, or has ended the script. The other
    ranks get the reason then. Not a collective: other ranks may go on among themselves. A later
    call in which they wait for this rank raises PeerLostError.

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


def install_hooks(world: World) -> None:
    """Report an uncaught exception to the other ranks, and close the world at the exit; once."""
    group = world.default
    assert group is not None
    # If threads are the ranks, an uncaught exception does not reach sys.excepthook.
    if group.size() == 1 or world is not process_world or world.has_hooks:
        return

    def report(text: str) -> None:
        for each in world.groups.values():
            each.report_failure(text)

    def close() -> None:
        if world.default is not None:
            world.close()

    world.on_close.append(at_exit(report, close))
    world.has_hooks = True
