"""The conformance suite of transports: every transport that passes it can carry an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from unisono.base.deadline import Deadline
from unisono.errors import ClosedError, InvalidArgumentError
from unisono.testing.expect import PATIENCE_S, equal, in_threads, is_a
from unisono.transports import Cancelled, Key, LinkDown, MessageMismatch, Status, Transport
from unisono.transports.api import Failure, Kind, Transfer

__all__ = ["TRANSPORT_CHECKS", "check_transport", "check_vanishing"]

Make = Callable[[int], Sequence[Transport]]

_SIZES = (0, 1, 8, 4 << 10, 1 << 20, 20 << 20)
_CONTEXT = 7


def check_transport(make: Make) -> None:
    """Run every check of `TRANSPORT_CHECKS`, each on new transports.

    Args:
        make: Given a world size, returns the connected transports of all ranks in this process.
            They are closed afterwards.

    Raises:
        AssertionError: The transport behaves differently; the text says in what.
    """
    for check in TRANSPORT_CHECKS:
        check(make)


def check_vanishing(make: Make, vanish: Callable[[Transport], None]) -> None:
    """Check what the others see when a rank goes away without a good-bye.

    Args:
        make: As for `check_transport`.
        vanish: Makes a transport end as if its process had been killed.
    """
    with _world(make, 3) as (a, b, c):
        _wait(a.send(1, _key(), _bytes(1)), b.recv(0, _key(), _room(1)))
        _wait(c.send(1, _key(), _bytes(1)), b.recv(2, _key(), _room(1)))
        # B looks for it only once C is gone.
        _wait(c.send(1, _key(5), _bytes(3)), b.recv(2, _key(4), _room(3)), only_first=True)
        waits = b.recv(2, _key(), _room(8))
        anybody = b.recv(None, _key(), _room(8))
        others = b.recv(None, _key(), _room(8), among=[0])
        vanish(c)
        for transfer in (waits, anybody):
            equal("peer to blame", _fails("receive", transfer, LinkDown).peer, 2)
        equal("left in peace", is_a("error", waits.error, LinkDown).left, False)
        _fails("later send", b.send(2, _key(), _bytes(1)), LinkDown)
        _fails("later receive", b.recv(2, _key(), _room(1)), LinkDown)
        _fails("later receive from any", b.recv(None, _key(), _room(1)), LinkDown)
        equal("a receive that another rank may serve", others.done(), False)
        _wait(a.send(1, _key(), _bytes(8)), others)
        equal("asked", list(b.ask(_CONTEXT, 1, [0, 2], Deadline(PATIENCE_S))), [0])


# ---- helpers ------------------------------------------------------------------------------


@contextmanager
def _world(make: Make, size: int) -> Iterator[Sequence[Transport]]:
    transports = make(size)
    try:
        yield transports
    finally:
        in_threads([transport.close for transport in transports])


def _key(tag: int = 0, context: int = _CONTEXT, kind: Kind = Kind.P2P) -> Key:
    return Key(context, kind, tag)


def _bytes(nbytes: int, seed: int = 1) -> memoryview:
    pattern = bytes((seed * 31 + i * 7) % 251 for i in range(251))
    return memoryview((pattern * (nbytes // 251 + 1))[:nbytes])


def _room(nbytes: int) -> memoryview:
    return memoryview(bytearray(b"\xee" * nbytes))


def _wait(*transfers: Transfer, only_first: bool = False) -> None:
    """Wait for transfers and raise their errors."""
    for transfer in transfers[:1] if only_first else transfers:
        equal("done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
        if transfer.error is not None:
            raise transfer.error


def _fails[E: BaseException](what: str, transfer: Transfer, cls: type[E]) -> E:
    equal(f"{what}: done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
    return is_a(what, transfer.error, cls)
