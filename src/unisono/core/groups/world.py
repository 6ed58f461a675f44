"""The default group and the groups made from it: the library's only mutable module state.

A process has one world. Threads that act as ranks (see `unisono.testing.run`) have a world each:
`use` installs a world for the current context only. `at_exit` reports the end of the process to
the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from unisono.core.base import log
from unisono.core.base.seam import cpp
from unisono.core.base.threads.streams import stream_variable
from unisono.core.groups.ending import close_groups, close_open_groups, process_exit
from unisono.core.groups.membership import Membership
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.work import Work
from unisono.core.stores import Store
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    NotInitializedError,
    UnisonoError,
)


class Reconfigurable(NamedTuple):
    """What `_reconfigure` needs to make the default group anew.

    Attributes:
        store: Shared by all processes that can be members.
        handle: Name of this process.
        backend: Of the groups.
        timeout_s: Default time-out of their calls.
        options: For the backend.
    """

    store: Store
    handle: str
    backend: str | None
    timeout_s: float
    options: Any


class World:
    """One default group, and the groups made from it, by key.

    Attributes:
        membership: The part of this process in the job. None without `init_process_group`, and
            after `shrink_group` of the default group.
        lender: Lends the default group of torch.distributed if a call needs one; see
            `unisono.adapters.torch.membership`.
        hint: Where a call without a default group should be; None: after `init_process_group`.
        kept: What adapters keep until the default group is closed, by name; "maker" is what has
            made that group, if it was not the program.
    """

    def __init__(self) -> None:
        self._default: ProcessGroup | None = None
        self.groups: dict[str, ProcessGroup] = {}
        self.made = 0
        self.made_local: Counter[tuple[int, ...]] = Counter()
        self.on_close: list[Callable[[], None]] = []
        self.has_hooks = False  # whether `at_exit` was called for this world
        self.passed: Counter[str] = Counter()  # how often each `breakpoint()` was reached
        self.membership: Membership | None = None
        self.lender: Callable[[], None] | None = None
        self.reconfigurable: Reconfigurable | None = None
        self.hint: str | None = None
        self.kept: dict[str, Any] = {}

    @property
    def default(self) -> ProcessGroup | None:
        """The group that a call without a group uses."""
        return self._default

    @default.setter
    def default(self, group: ProcessGroup | None) -> None:
        self._default = group
        if self is process_world:
            cpp.set_default(group)
            log.set_rank(None if group is None else group.rank())

    def close(self, *, only: ProcessGroup | None = None) -> None:
        """Close one sub-group, or everything, newest group first."""
        if only is not None and only is not self.default:
            del self.groups[only.key]
            only.close()
            return
        groups, self.groups, self.default = list(self.groups.values()), {}, None
        try:
            close_groups(groups)
        finally:
            self.made = 0
            self.made_local.clear()
            self.membership = self.reconfigurable = None
            self.kept = {}
            callbacks, self.on_close = self.on_close, []
            self.has_hooks = False
            for callback in callbacks:
                callback()

    def replace_default(self, group: ProcessGroup, why: str = "") -> None:
        """Close every group and use `group` as the default, over the same store.

        Args:
            group: The new default group.
            why: The reason for errors of calls on the closed groups.
        """
        callbacks, self.on_close = self.on_close, []
        has_hooks, reconfigurable = self.has_hooks, self.reconfigurable
        for old in self.groups.values():
            old.name += why and f" ({why})"
        self.close()
        self.on_close, self.has_hooks = callbacks, has_hooks
        self.reconfigurable = reconfigurable
        self.default = self.groups[group.key] = group
        self.made = 1


class _NonMember(int):
    """torch's number in place of a group; its errors name the cause."""

    if not TYPE_CHECKING:  # to type checkers, any other name is a mistake

        def __getattr__(self, name: str) -> object:
            raise AttributeError(
                f"no {name}: this rank is not a member of the group; new_group returned "
                "GroupMember.NON_GROUP_MEMBER"
            )


class _Members(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None."""
        return current().default


class GroupMember(metaclass=_Members):
    """Names of special groups.

    `WORLD` is the default group; `NON_GROUP_MEMBER` is what `new_group` returns on a rank that
    does not belong to the new group.
    """

    NON_GROUP_MEMBER = _NonMember(-100)


group = GroupMember
"""torch's other name of `GroupMember`: `dist.group.WORLD`."""


process_world = World()
"""The world of this process, unless `use` has installed another."""

_context_world: ContextVar[World | None] = ContextVar("unisono_world", default=None)
# A call without a group finds it so. The stream orders calls; None: calls run at once.
cpp.set_world(_context_world, stream_variable, ProcessGroup, Work)


def current() -> World:
    """Return the world of the current thread or task."""
    return _context_world.get() or process_world


@contextlib.contextmanager
def use(world: World) -> Iterator[World]:
    """Make `world` the current one inside the with block."""
    token = _context_world.set(world)
    try:
        yield world
    finally:
        _context_world.reset(token)


class OverGroup(Protocol):
    """torch's group over one of ours, or a communicator of unisono.MPI."""

    @property
    def unisono(self) -> ProcessGroup:
        """The group that it means."""


# Without other integers: a rank in the place of a group is a mistake.
Group: TypeAlias = ProcessGroup | OverGroup | _NonMember | None
"""What the argument `group` takes: a group, one of torch or a communicator over one, or None.

None is the default group.
"""

_MPI_HINT = (
    "unisono.MPI makes it at the first use of COMM_WORLD, such as COMM_WORLD.rank; without "
    "unisono.MPI call unisono.init_process_group() first"
)


def resolve(group: Group = None) -> ProcessGroup | None:
    """Return the group that an argument means; None if this rank is not a member.

    Raises:
        NotInitializedError: `group` is None and there is no default group.
        ArgumentTypeError: Not a group.
    """
    if group is None:
        world = current()
        if world.default is None and world.lender is not None:
            world.lender()
        if (default := world.default) is None:
            hint = world.hint or (_MPI_HINT if "unisono.MPI" in sys.modules else None)
            raise NotInitializedError(
                "the default process group has not been initialized", hint=hint
            )
        return default
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(inner := getattr(group, "unisono", None), ProcessGroup):
        return inner
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return None
    kind = type(group)
    shown = kind.__name__
    if shown == ProcessGroup.__name__:
        shown = f"{kind.__module__}.{shown}, which is not over a group of unisono"
    raise ArgumentTypeError(f"group must be a ProcessGroup, got {shown}")


# Other ranks do not wait for this rank in an agreement.
_WITHOUT_AGREEMENT = {
    *("send", "recv", "isend", "irecv", "sendrecv", "recv_array", "probe"),
    *("send_object_list", "recv_object_list", "monitored_barrier"),
}


def member_group(group: Group, call: str, *, stacklevel: int = 3) -> ProcessGroup | None:
    """Return the group as `resolve` does; warn, as torch does, if this rank is not a member.

    Which group is meant by an argument that is none is unknown. The ranks of the default group get
    the error, if the call is a collective.
    """
    try:
        found = resolve(group)
    except ArgumentTypeError as error:
        if (default := current().default) is not None and call not in _WITHOUT_AGREEMENT:
            default.refuse(call, error)
        raise
    if found is None:
        warnings.warn(
            f"running {call} on a rank that does not belong to the given group does nothing",
            stacklevel=stacklevel,
        )
    return found


def require_group(group: Group) -> ProcessGroup:
    """Return the group that an argument means.

    Raises:
        InvalidArgumentError: This rank is not a member.
    """
    found = resolve(group)
    if found is None:
        default = current().default
        me = "this rank" if default is None else f"rank {default.rank()} of {default.size()}"
        raise InvalidArgumentError(
            "this rank does not belong to the given group",
            hint=f"the call that made the group got ranks without {me}, and returned "
            "GroupMember.NON_GROUP_MEMBER here: leave this call out on such ranks",
        )
    return found


# By hook of `at_exit`: a list with the hook before it.
_befores: weakref.WeakKeyDictionary[Callable[..., object], list[Callable[..., object]]] = (
    weakref.WeakKeyDictionary()
)


def _remove_hook(hook: Callable[..., object], before: Callable[..., object]) -> None:
    """Take a hook out of the chain of hooks, which would grow with each group."""
    at = sys.excepthook
    if at is hook:
        sys.excepthook = before
    while (cell := _befores.get(at)) is not None:
        if cell[0] is hook:
            cell[0] = before
        at = cell[0]


def at_exit(report: Callable[[str], object], close: Callable[[], object]) -> Callable[[], None]:
    """Install hooks that report an uncaught exception to the other ranks, and close at the exit.

    Args:
        report: Called with the text of an uncaught exception; sends it to the other ranks.
        close: Called at the exit, also if the groups are closed already.

    Returns:
        A function that removes the hooks.
    """
    before = [sys.excepthook]
    # A hook installed later may refer to `hook` for ever, as torch's own hook does. `hook` must
    # not keep a closed group alive, so `uninstall` empties this list.
    reporters = [report]

    def report_uncaught(error: BaseException | None) -> None:
        # A UnisonoError usually follows the failure of another rank, which has reported it.
        if error is not None and not isinstance(error, (UnisonoError, SystemExit)):
            for reporter in reporters:
                reporter("".join(traceback.format_exception_only(error)).strip())

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before[0](kind, error, trace)
        report_uncaught(error)

    def end() -> None:
        with process_exit():
            close()

    def end_child() -> None:
        # In a child of multiprocessing sys.excepthook is not called, but the exception is current.
        report_uncaught(sys.exception())
        end()
        close_open_groups()

    sys.excepthook = hook
    _befores[hook] = before
    atexit.register(end)
    # A child of multiprocessing ends without atexit, and would lose messages that isend has queued.
    util = sys.modules.get("multiprocessing.util")
    finalizer = None if util is None else util.Finalize(None, end_child, exitpriority=0)

    def uninstall() -> None:
        reporters.clear()
        _remove_hook(hook, before[0])
        atexit.unregister(end)
        if finalizer is not None:
            finalizer.cancel()

    return uninstall
