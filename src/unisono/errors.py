"""The whole error vocabulary of unisono.

    UnisonoError(RuntimeError)
    ├── UsageError                      this process made a call that is not possible
    │   ├── InvalidArgumentError(ValueError)
    │   │   └── UnknownNameError(KeyError)
    │   ├── ArgumentTypeError(TypeError)
    │   ├── NotInitializedError(ValueError)
    │   ├── AlreadyInitializedError(ValueError)
    │   ├── NotInGroupError(ValueError)
    │   ├── ClosedError                 the object was closed, or belongs to the parent of a fork
    │   └── UnsupportedError            the backend lacks an op, dtype or device
    │       ├── RefusedNameError(AttributeError)
    │       └── RefusedModuleError(ModuleNotFoundError)
    ├── CommunicationError
    │   ├── CollectiveError             the ranks together
    │   │   ├── CollectiveMismatchError ranks made different calls; shows both sides
    │   │   ├── CollectiveTimeoutError(TimeoutError)
    │   │   ├── CollectiveAbortedError  a rank called abort()
    │   │   └── StepAborted             a rank was lost in a step; it counts on no rank
    │   └── PeerError                   another process, or the network to it
    │       ├── PeerLostError(ConnectionError)
    │       └── PeerFailedError         the peer reported its error before it ended
    ├── NetworkError(ConnectionError)
    │   ├── StoreConnectionError        a StoreError as well
    │   └── TransportError
    │       └── HandshakeError
    ├── StoreError
    │   ├── StoreTimeoutError(TimeoutError)
    │   ├── StoreKeyError(KeyError)
    │   └── QueueEmptyError
    ├── RendezvousError(ValueError)
    ├── ScheduleError                   the verifier found a wrong schedule
    ├── LaunchError
    │   └── WorkerFailedError
    └── InternalError                   a bug in unisono

Three questions determine the class. Which process caused the error? Can the caller act on it? Does
the standard library have a class for it? That class is then a base class, too. The root is a
RuntimeError because scripts written for torch.distributed catch RuntimeError.

Every error can be pickled with its context, so that it can be sent between ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

__all__ = [
    "AlreadyInitializedError",
    "ArgumentTypeError",
    "ClosedError",
    "CollectiveAbortedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "Context",
    "HandshakeError",
    "InternalError",
    "InvalidArgumentError",
    "LaunchError",
    "NetworkError",
    "NotInGroupError",
    "NotInitializedError",
    "PeerError",
    "PeerFailedError",
    "PeerLostError",
    "QueueEmptyError",
    "RefusedModuleError",
    "RefusedNameError",
    "RendezvousError",
    "ScheduleError",
    "StepAborted",
    "StoreConnectionError",
    "StoreError",
    "StoreKeyError",
    "StoreTimeoutError",
    "TransportError",
    "UnisonoError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
    "WorkerFailedError",
]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The position of an error; the text has only the fields that are known.

    `rank` and `peers` are global ranks. `usable` is whether the group accepts further calls after
    this error. `group` is the group's name in errors; `group_key`, which the text has not, is its
    own among all groups.
    """

    rank: int | None = None
    world_size: int | None = None
    group: str | None = None
    op: str | None = None
    seq: int | None = None
    step: int | None = None
    peers: tuple[int, ...] = ()
    nbytes: int | None = None
    usable: bool | None = None
    group_key: str | None = None

    def __str__(self) -> str:
        """Return space-separated key=value pairs in a fixed order, for grep."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or value == () or field.name == "group_key":
                continue
            if field.name == "peers":
                value = ",".join(map(str, value))
            elif field.name == "usable":
                parts.append(f"group_usable={'yes' if value else 'no'}")
                continue
            parts.append(f"{field.name}={value}")
        return " ".join(parts)


class UnisonoError(RuntimeError):
    """Root of every error raised by unisono.

    Attributes:
        what: The first line, complete in itself: what happened, where, and the ranks to blame.
        context: Machine-readable position of the error.
        hint: Advice for the next step, or None.
    """

    default_hint: str | None = None

    def __init__(self, what: str, *, context: Context | None = None, hint: str | None = None):
        super().__init__(what)
        self.what = what
        self.context = context or Context()
        self.hint = hint if hint is not None else self.default_hint

    def __str__(self) -> str:
        lines = [self.what]
        if where := str(self.context):
            lines.append(f"  where: {where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.context, self.hint)


def _rebuild(
    cls: type[UnisonoError], what: str, context: Context, hint: str | None
) -> UnisonoError:
    return cls(what, context=context, hint=hint)


class UsageError(UnisonoError):
    """This process made a call that is not possible; the group is unchanged.

    Attributes:
        called: Name of the call; "" if it is not known yet.
        told: Whether the error was reported to the other ranks of a collective call.
        misplaced: Whether this thread cannot make the call here, as in a callback, in a signal
            handler or beside another thread. The call then does not count, and no rank waits in it.
    """

    called = ""
    told = False
    misplaced = False

    def name_call(self, call: str) -> None:
        """Put the name of the call before the text, unless the text has it already."""
        if not self.called:
            self.called = call
            if not re.search(rf"(?<!\w){re.escape(call)}(?!\w)", self.what):
                self.what = f"{call}: {self.what}"
                self.args = (self.what,)


class InvalidArgumentError(UsageError, ValueError):
    """An argument has a value that the call cannot accept."""


class UnknownNameError(InvalidArgumentError, KeyError):
    """An argument is a name that does not exist; the text lists the names that exist."""

    # KeyError prints repr(args[0]), which would escape the line breaks of the text.
    __str__ = UnisonoError.__str__


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that the call cannot accept."""


class NotInitializedError(UsageError, ValueError):
    """There is no default process group yet."""

    default_hint = "call unisono.init_process_group() first"


class AlreadyInitializedError(UsageError, ValueError):
    """The default process group exists already."""


class NotInGroupError(UsageError, ValueError):
    """A rank called a method of a group that it is not a member of."""


class ClosedError(UsageError):
    """The object was closed, destroyed, or belongs to the parent of a fork."""


class UnsupportedError(UsageError, NotImplementedError):
    """The backend has no such op, dtype, reduce op or device; the text lists what it has."""


class RefusedNameError(UnsupportedError, AttributeError):
    """A name of torch.distributed that unisono does not have; the text gives the reason.

    It is an AttributeError, too, so that hasattr() is False.
    """


class RefusedModuleError(UnsupportedError, ModuleNotFoundError):
    """A module of torch.distributed that unisono does not have; the text gives the reason."""


class CommunicationError(UnisonoError):
    """Communication between ranks failed: torch's DistBackendError."""


class CollectiveError(CommunicationError):
    """A collective failed for a reason that concerns several ranks."""


class CollectiveMismatchError(CollectiveError):
    """Ranks made different calls at the same place in the group's order."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """The deadline passed; the text names the ranks that did not arrive."""


class CollectiveAbortedError(CollectiveError):
    """The group was aborted, here or on another rank."""


class StepAborted(CollectiveError):
    """A rank was lost inside `with step()`: the step counts on no rank, see the cause."""


class PeerError(CommunicationError):
    """Another rank, or the network to it, failed."""


class PeerLostError(PeerError, ConnectionError):
    """The connection to a rank ended without a report: the process died or left."""


class PeerFailedError(PeerError):
    """A rank reported its own exception before it ended."""


class NetworkError(UnisonoError, ConnectionError):
    """A connection cannot be made or was lost: torch's DistNetworkError."""


class StoreError(UnisonoError):
    """A key-value store refused or failed a request."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear in time."""


class StoreConnectionError(StoreError, NetworkError):
    """The store's server cannot be reached, or has ended."""


class StoreKeyError(StoreError, KeyError):
    """A key is absent, or its value is not of the kind that the request needs."""

    # KeyError prints repr(args[0]), which would escape the line breaks of the text.
    __str__ = UnisonoError.__str__


class QueueEmptyError(StoreError):
    """A non-blocking pop found an empty queue."""


class RendezvousError(UnisonoError, ValueError):
    """The ranks could not agree on the members of the world."""


class TransportError(NetworkError):
    """Bytes could not be moved between two ranks."""


class HandshakeError(TransportError):
    """Two ends of a connection disagree about protocol, world or token."""


class ScheduleError(UnisonoError):
    """A schedule is wrong: it loses data, deadlocks, or sends a message that no rank receives."""


class LaunchError(UnisonoError):
    """The launcher could not start or keep its workers."""


class WorkerFailedError(LaunchError):
    """A worker ended with an error; the first failure's traceback ends the text."""

    def __str__(self) -> str:
        head, newline, rest = self.what.partition("\n")
        details = super().__str__().removeprefix(self.what)
        return head + details + newline + rest


class InternalError(UnisonoError):
    """unisono broke one of its own rules."""

    default_hint = "this is a bug in unisono: please report it with this traceback"
