"""The conformance suite of transports: every transport that passes it can carry an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from unisono.base.deadline import Deadline
from unisono.errors import ClosedError, InvalidArgumentError
from unisono.testing.expect import PATIENCE_S, equal, in_threads, is_a
from unisono.transports import Cancelled, Key, LinkDown, MessageMismatch, Status, Transport
from unisono.transports.api import Failure, Kind, Transfer

__all__ = ["TRANSPORT_CHECKS", "check_transport", "check_vanishing"]

E = TypeVar("E", bound=BaseException)
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
        _wait(c.send(1, _key(5), _bytes(3)))
        mine = b.recv(2, _key(), _room(8))
        anybody = b.recv(None, _key(), _room(8))
        others = b.recv(None, _key(), _room(8), among=[0])
        _wait(c.send(1, _key(6), _bytes(1)), b.recv(2, _key(6), _room(1)))
        vanish(c)
        for transfer in (mine, anybody):
            error = _fails("a receive that waits", transfer, LinkDown)
            equal("rank to blame, left in peace", (error.peer, error.left), (2, False))
        _fails("later send", b.send(2, _key(), _bytes(1)), LinkDown)
        _fails("later receive", b.recv(2, _key(), _room(1)), LinkDown)
        _fails("later receive from any", b.recv(None, _key(), _room(1)), LinkDown)
        _wait(b.recv(2, _key(5), _room(3)))
        equal("a receive that another rank may serve: done", others.done(), False)
        _wait(a.send(1, _key(), _bytes(8)), others)
        answers = b.ask(_CONTEXT, 1, [0, 2], Deadline(PATIENCE_S))
        equal("ranks that answer", list(answers), [0])


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


def _wait(*transfers: Transfer) -> None:
    """Wait for transfers and raise their errors."""
    for transfer in transfers:
        equal("done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
        if transfer.error is not None:
            raise transfer.error


def _fails(what: str, transfer: Transfer, cls: type[E]) -> E:
    equal(f"{what}: done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
    return is_a(what, transfer.error, cls)


# ---- messages -----------------------------------------------------------------------------


def _check_sizes(make: Make) -> None:
    with _world(make, 2) as (a, b):
        for nbytes in _SIZES:
            for posted_first in (True, False):
                what = f"{nbytes} bytes, {'receive' if posted_first else 'send'} first"
                room = _room(nbytes)
                if posted_first:
                    received = b.recv(0, _key(), room)
                    sent = a.send(1, _key(), _bytes(nbytes))
                else:
                    sent = a.send(1, _key(), _bytes(nbytes))
                    # Only the second message's coming shows that the first one is there.
                    _wait(a.send(1, _key(1), _bytes(1)), b.recv(0, _key(1), _room(1)))
                    received = b.recv(0, _key(), room)
                _wait(sent, received)
                equal(what, room == _bytes(nbytes), True)


def _check_both_send_first(make: Make) -> None:
    nbytes = _SIZES[-1]
    with _world(make, 2) as (a, b):
        sends = [a.send(1, _key(), _bytes(nbytes, 1)), b.send(0, _key(), _bytes(nbytes, 2))]
        rooms = [_room(nbytes), _room(nbytes)]
        _wait(b.recv(0, _key(), rooms[0]), a.recv(1, _key(), rooms[1]), *sends)
        equal("from rank 0", rooms[0] == _bytes(nbytes, 1), True)
        equal("from rank 1", rooms[1] == _bytes(nbytes, 2), True)


def _check_order(make: Make) -> None:
    sizes = [(i * 7919) % 200_000 if i % 9 == 0 else i % 50 for i in range(200)]
    with _world(make, 2) as (a, b):
        rooms = [_room(size) for size in sizes]
        half = len(sizes) // 2
        received = [b.recv(0, _key(), room) for room in rooms[:half]]
        sent = [a.send(1, _key(), _bytes(size, i)) for i, size in enumerate(sizes)]
        received += [b.recv(0, _key(), room) for room in rooms[half:]]
        _wait(*sent, *received)
        wrong = [i for i, room in enumerate(rooms) if room != _bytes(sizes[i], i)]
        equal("messages out of order", wrong, [])


def _check_keys(make: Make) -> None:
    keys = [
        Key(context, kind, tag)
        for context in (0, 1, 2**64 - 1)
        for kind in (Kind.COLLECTIVE, Kind.P2P)
        for tag in (0, 1, 2**31, 2**63 - 1)
    ]
    with _world(make, 2) as (a, b):
        for i, key in enumerate(keys):
            _wait(a.send(1, key, _bytes(9, i)))
        for i, key in reversed(list(enumerate(keys))):
            room = _room(9)
            _wait(b.recv(0, key, room))
            equal(f"message under {key}", room == _bytes(9, i), True)


def _check_any_source(make: Make) -> None:
    with _world(make, 3) as (a, b, c):
        rooms = [_room(4) for _ in range(4)]
        first = c.recv(None, _key(), rooms[0])
        from_b = c.recv(1, _key(), rooms[1])
        _wait(a.send(2, _key(), _bytes(4, 1)), first)
        equal("source of a posted receive", first.peer, 0)
        _wait(b.send(2, _key(), _bytes(4, 2)), from_b)
        _wait(b.send(2, _key(), _bytes(4, 3)), b.send(2, _key(1), _bytes(1)))
        _wait(c.recv(1, _key(1), _room(1)))
        kept = c.recv(None, _key(), rooms[2])
        _wait(kept)
        equal("source of a message that was there", kept.peer, 1)
        _wait(c.send(2, _key(), _bytes(4, 4)), itself := c.recv(None, _key(), rooms[3]))
        equal("source of an own message", itself.peer, 2)
        for i, room in enumerate(rooms):
            equal(f"message {i}", room == _bytes(4, i + 1), True)


def _check_self(make: Make) -> None:
    with _world(make, 2) as (a, _):
        rooms = [_room(1000), _room(1000)]
        first = a.recv(0, _key(), rooms[0])
        _wait(a.send(0, _key(), _bytes(1000, 1)), a.send(0, _key(), _bytes(1000, 2)), first)
        _wait(a.recv(0, _key(), rooms[1]))
        equal("first", rooms[0] == _bytes(1000, 1), True)
        equal("second", rooms[1] == _bytes(1000, 2), True)


def _check_mismatch(make: Make) -> None:
    big = 200_000
    with _world(make, 2) as (a, b):
        for sender in (a, b):
            for nbytes, room_bytes, info in ((8, 9, 0), (big, big - 1, 0), (0, 1, 0), (8, 8, 5)):
                for posted_first in (True, False):
                    room = _room(room_bytes)
                    if posted_first:
                        received = b.recv(sender.rank, _key(), room)
                    _wait(sender.send(1, _key(), _bytes(nbytes), info))
                    if not posted_first:
                        received = b.recv(sender.rank, _key(), room)
                    error = _fails(f"{nbytes} bytes into {room_bytes}", received, MessageMismatch)
                    got = (error.source, error.nbytes, error.info)
                    equal("mismatch", got, (sender.rank, nbytes, info))
                    equal("memory is untouched", room == _room(room_bytes), True)
            room = _room(8)
            _wait(sender.send(1, _key(), _bytes(8), 3), b.recv(sender.rank, _key(), room, 3))
            equal("the next message", room == _bytes(8), True)


def _check_arguments(make: Make) -> None:
    with _world(make, 2) as (a, _):
        calls: list[Callable[[], Transfer]] = [
            lambda: a.recv(1, _key(), memoryview(b"abc")),
            lambda: a.recv(1, _key(), memoryview(bytearray(8)).cast("I")),
            lambda: a.send(1, _key(), memoryview(bytearray(8)).cast("I")),
        ]
        for call in calls:
            try:
                call()
            except InvalidArgumentError:
                continue
            raise AssertionError("memory that is not writable bytes was accepted")


def _check_cancel(make: Make) -> None:
    with _world(make, 2) as (a, b):
        for posted in range(3):
            rooms = [_room(100_000) for _ in range(3)]
            transfers = [b.recv(0, _key(), room) for room in rooms]
            b.cancel(transfers[posted])
            _fails("cancelled receive", transfers[posted], Cancelled)
            rest = [i for i in range(3) if i != posted]
            _wait(*[a.send(1, _key(), _bytes(100_000, i)) for i in rest])
            _wait(*[transfers[i] for i in rest])
            for i in range(3):
                expected = _room(100_000) if i == posted else _bytes(100_000, i)
                equal(f"receive {i}, {posted} was cancelled", rooms[i] == expected, True)
        b.cancel(transfers[rest[0]])
        equal("a finished transfer stays as it is", transfers[rest[0]].error, None)


def _check_cancel_on_its_way(make: Make) -> None:
    nbytes = _SIZES[-1]
    with _world(make, 2) as (a, b):
        for _ in range(5):
            room = _room(nbytes)
            data = memoryview(bytearray(_bytes(nbytes)))
            received = b.recv(0, _key(), room)
            sent = a.send(1, _key(), data)
            b.cancel(received)
            equal("done after cancel", received.done(), True)
            before = bytes(room)
            a.cancel(sent)
            equal("done after cancel", sent.done(), True)
            # Neither end may look at its memory any more.
            data[:] = bytes(nbytes)
            small = _room(8)
            _wait(a.send(1, _key(1), _bytes(8)), b.recv(0, _key(1), small))
            equal("the next message", small == _bytes(8), True)
            equal("memory is the same as right after cancel", room == before, True)
            if received.error is None:
                equal("a receive that won the race", room == _bytes(nbytes), True)
            # Cancelled before a byte went out: never sent. Otherwise it may have come too late.
            b.mailbox.forget_context(_CONTEXT, Cancelled())


def _check_many_to_one(make: Make) -> None:
    senders, count = 5, 60
    with _world(make, senders + 1) as world:
        target = world[senders]

        def send(rank: int) -> None:
            for i in range(count):
                _wait(world[rank].send(senders, _key(), memoryview(bytes([rank, i]))))

        def receive() -> list[tuple[int, int]]:
            got = []
            for _ in range(senders * count):
                room = memoryview(bytearray(2))
                _wait(transfer := target.recv(None, _key(), room))
                equal("source", transfer.peer, room[0])
                got.append((room[0], room[1]))
            return got

        got: list[tuple[int, int]] = []
        bodies: list[Callable[[], None]] = [partial(send, rank) for rank in range(senders)]
        in_threads([*bodies, lambda: got.extend(receive())])
        for rank in range(senders):
            order = [i for source, i in got if source == rank]
            equal(f"messages of rank {rank}", order, list(range(count)))


def _check_all_to_all(make: Make) -> None:
    size, rounds = 4, 12

    with _world(make, size) as world:

        def body(rank: int) -> None:
            me = world[rank]
            for i in range(rounds):
                nbytes = [0, 17, 70_000][i % 3]
                rooms = [_room(nbytes) for _ in range(size)]
                received = [me.recv(peer, _key(i), rooms[peer]) for peer in range(size)]
                sent = [me.send(peer, _key(i), _bytes(nbytes, rank + peer)) for peer in range(size)]
                _wait(*received, *sent)
                wrong = [p for p in range(size) if rooms[p] != _bytes(nbytes, rank + p)]
                equal(f"round {i} on rank {rank}: wrong messages from", wrong, [])

        in_threads([partial(body, rank) for rank in range(size)])


# ---- control plane ------------------------------------------------------------------------


def _check_ask(make: Make) -> None:
    with _world(make, 4) as (a, b, c, _):
        for seq in range(1, 20):
            b.enter(_CONTEXT, seq, f"call {seq}")
        c.enter(_CONTEXT, 3, "call 3")
        answers = a.ask(_CONTEXT, 18, range(4), Deadline(PATIENCE_S))
        expected = {1: Status(18, "call 18"), 2: Status(3, "call 3"), 3: Status(0, "")}
        equal("answers", answers, expected)
        later = a.ask(_CONTEXT, 1000, [1], Deadline(PATIENCE_S))
        equal("the last call of a rank behind", later, {1: Status(19, "call 19")})
        elsewhere = a.ask(_CONTEXT + 1, 1, [1], Deadline(PATIENCE_S))
        equal("another context", elsewhere, {1: Status(0, "")})
        equal("nobody asked", a.ask(_CONTEXT, 1, [0], Deadline(PATIENCE_S)), {})


def _check_fail(make: Make) -> None:
    with _world(make, 3) as world:
        a, b, c = world
        waiting = [b.recv(0, _key(), _room(8)), c.recv(None, _key(), _room(8))]
        elsewhere = c.recv(0, _key(context=1), _room(8))
        heard: list[Failure] = []
        b.on_failure(_CONTEXT, heard.append)
        a.fail(_CONTEXT, Failure("failed", "a reason", [0, 2], 0), [0, 1, 2])
        for transfer in waiting:
            failure = _fails("a receive that waits", transfer, Failure)
            got = (failure.kind, failure.reason, failure.peers, failure.by)
            equal("failure", got, ("failed", "a reason", (0, 2), 0))
        # Its own failure comes second and must not hide the first.
        b.fail(_CONTEXT, Failure("timeout", "another", [1], 1), [0, 1, 2])
        equal("the first failure stays", [t.failure(_CONTEXT).by for t in world], [0, 0, 0])  # type: ignore[union-attr]
        equal("callbacks", [failure.by for failure in heard], [0])
        b.on_failure(_CONTEXT, heard.append)
        equal("callbacks that come late", len(heard), 2)
        for transport in world:
            _fails("later send", transport.send(1, _key(), _bytes(8)), Failure)
            _fails("later receive", transport.recv(1, _key(), _room(8)), Failure)
        equal("another context", c.failure(1), None)
        _wait(a.send(2, _key(context=1), _bytes(8)), elsewhere)


def _check_fail_on_its_way(make: Make) -> None:
    nbytes = _SIZES[-1]
    with _world(make, 2) as (a, b):
        data = memoryview(bytearray(_bytes(nbytes)))
        sent = a.send(1, _key(), data)
        a.fail(_CONTEXT, Failure("aborted", "enough", [0], 0), [1])
        equal("a send ends with its context", sent.done(), True)
        data[:] = bytes(nbytes)
        small = _room(8)
        _wait(a.send(1, _key(context=1), _bytes(8)), b.recv(0, _key(context=1), small))
        equal("a message of another context", small == _bytes(8), True)


def _check_forget(make: Make) -> None:
    with _world(make, 2) as (a, b):
        _wait(a.send(1, _key(), _bytes(8)), a.send(1, _key(1, context=1), _bytes(8)))
        _wait(b.recv(0, _key(1, context=1), _room(8)))
        waiting, elsewhere = b.recv(0, _key(1), _room(8)), b.recv(0, _key(context=1), _room(8))
        b.forget(_CONTEXT, ClosedError("gone"))
        equal("its receives", str(_fails("receive", waiting, ClosedError)), "gone")
        equal("another context: done", elsewhere.done(), False)
        fresh = b.recv(0, _key(), _room(8))
        equal("its messages are dropped", fresh.done(), False)
        _wait(a.send(1, _key(), _bytes(8)), fresh)


# ---- life ---------------------------------------------------------------------------------


def _check_leaving(make: Make) -> None:
    with _world(make, 3) as (a, b, c):
        _wait(a.send(1, _key(), _bytes(8)), c.send(1, _key(1), _bytes(1)))
        _wait(b.recv(2, _key(1), _room(1)))
        late = a.send(1, _key(), _bytes(1 << 20))
        waiting, anybody = b.recv(0, _key(9), _room(8)), b.recv(None, _key(9), _room(8))
        a.close()
        error = _fails("a receive from it", waiting, LinkDown)
        equal("rank to blame, left in peace", (error.peer, error.left), (0, True))
        rooms = [_room(8), _room(1 << 20)]
        _wait(late, b.recv(0, _key(), rooms[0]), b.recv(0, _key(), rooms[1]))
        equal("what it sent before", rooms == [_bytes(8), _bytes(1 << 20)], True)
        _fails("later send", b.send(0, _key(), _bytes(8)), LinkDown)
        equal("a receive that another rank may serve: done", anybody.done(), False)
        _wait(c.send(1, _key(9), _bytes(8)), anybody)
        nobody = b.recv(None, _key(9), _room(8))
        c.close()
        _fails("a receive that nobody may serve", nobody, LinkDown)


def _check_strangers_that_left(make: Make) -> None:
    with _world(make, 3) as (a, b, c):
        # These two have never met, so that nobody can tell a good end from a bad one.
        a.close()
        anybody = b.recv(None, _key(), _room(8))
        _wait(c.send(1, _key(), _bytes(8)), anybody)
        _fails("a receive from it", b.recv(0, _key(), _room(8)), LinkDown)
        equal("it does not answer", b.ask(_CONTEXT, 1, [0], Deadline(PATIENCE_S)), {})


def _check_closed(make: Make) -> None:
    with _world(make, 2) as (a, b):
        equal("users may wait", a.may_wait(), True)
        waiting = [a.recv(1, _key(), _room(8)), a.recv(None, _key(), _room(8))]
        a.retain()
        a.close()
        equal("closed with one user left", a.closed, False)
        _wait(a.send(1, _key(), _bytes(8)), b.recv(0, _key(), _room(8)))
        a.close()
        equal("closed", a.closed, True)
        for transfer in waiting:
            _fails("a receive of its own", transfer, ClosedError)
        _fails("later send", a.send(1, _key(), _bytes(8)), ClosedError)
        _fails("later receive", a.recv(1, _key(), _room(8)), ClosedError)
        a.close()


TRANSPORT_CHECKS: tuple[Callable[[Make], None], ...] = (
    _check_sizes,
    _check_both_send_first,
    _check_order,
    _check_keys,
    _check_any_source,
    _check_self,
    _check_mismatch,
    _check_arguments,
    _check_cancel,
    _check_cancel_on_its_way,
    _check_many_to_one,
    _check_all_to_all,
    _check_ask,
    _check_fail,
    _check_fail_on_its_way,
    _check_forget,
    _check_leaving,
    _check_strangers_that_left,
    _check_closed,
)
