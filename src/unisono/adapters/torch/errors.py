"""Error classes that are both unisono's and torch's, with unisono's text.

A script for torch.distributed catches DistBackendError, DistNetworkError or DistStoreError. A
script for unisono catches PeerLostError. Errors that are a ValueError, TypeError or
NotImplementedError are the same for both and are not translated.
"""

from __future__ import annotations

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from unisono import errors
from unisono.errors import UnisonoError

__all__ = ["for_torch"]


class CollectiveMismatchError(errors.CollectiveMismatchError, DistBackendError):
    """Ranks made different calls at the same place in the group's order."""


class CollectiveTimeoutError(errors.CollectiveTimeoutError, DistBackendError):
    """The deadline passed; the text names the ranks that did not arrive."""


class CollectiveAbortedError(errors.CollectiveAbortedError, DistBackendError):
    """The group was aborted, here or on another rank."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """The connection to a rank ended without a report: the process died or left."""


class PeerFailedError(errors.PeerFailedError, DistBackendError):
    """A rank reported its own exception before it ended."""


class InternalError(errors.InternalError, DistBackendError):
    """unisono broke one of its own rules."""


class TransportError(errors.TransportError, DistNetworkError):
    """Bytes could not be moved between two ranks."""


class HandshakeError(errors.HandshakeError, DistNetworkError):
    """Two ends of a connection disagree about protocol, world or token."""


class RendezvousError(errors.RendezvousError, DistNetworkError):
    """The ranks could not agree on the members of the world."""


class StoreTimeoutError(errors.StoreTimeoutError, DistStoreError):
    """A key did not appear in time."""


class StoreConnectionError(errors.StoreConnectionError, DistStoreError):
    """The store's server cannot be reached, or has ended."""


class StoreError(errors.StoreError, DistStoreError):
    """A key-value store refused or failed a request."""


class UsageError(errors.UsageError, DistBackendError):
    """This thread cannot make the call now, as when it overlaps a call of another thread."""


class ClosedError(errors.ClosedError, DistBackendError):
    """The group was closed, destroyed, or belongs to the parent of a fork."""


_CLASSES: dict[type[UnisonoError], type[UnisonoError]] = {
    ours.__mro__[1]: ours
    for ours in tuple(globals().values())
    if isinstance(ours, type) and ours.__module__ == __name__
}


def for_torch(error: BaseException) -> BaseException:
    """Return the error for users of torch: the same text, in a class that is also torch's."""
    if not isinstance(error, UnisonoError) or (found := _CLASSES.get(type(error))) is None:
        return error
    translated = found(error.what, context=error.context, hint=error.hint)
    translated.__cause__ = error.__cause__
    return translated.with_traceback(error.__traceback__)
