"""The conformance suite of transports: every transport that passes it can carry an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unisono.core.transports import Cancelled, Key, MessageMismatch
from unisono.core.transports.messages import ANY_TAG, Purpose
from unisono.core.transports.transfers import ANYTHING, NOTHING, Transfer
from unisono.errors import InvalidArgumentError
from unisono.testing.check_transport_life import LIFE_CHECKS, check_vanishing
from unisono.testing.expect import checks_in, equal, in_threads, opened, raises
from unisono.testing.transport_tools import (
    CONTEXT,
    SIZES,
    MakeTransports,
    fails,
    key,
    pattern,
    room_for,
    wait,
)

__all__ = ["TRANSPORT_CHECKS", "check_transport", "check_vanishing"]


def check_transport(make: MakeTransports) -> None:
    """Run every check of `TRANSPORT_CHECKS`, each on new transports.

    Args:
        make: Function that takes a world size and returns the connected transports of all ranks
            in this process. The suite closes them.

    Raises:
        AssertionError: The transport behaves differently. The text names the difference.
    """
    for check in TRANSPORT_CHECKS:
        check(make)


def _check_sizes(make: MakeTransports) -> None:
    with opened(make, 2) as (a, b):
        for nbytes in SIZES:
            for posted_first in (True, False):
                what = f"{nbytes} bytes, {'receive' if posted_first else 'send'} first"
                room = room_for(nbytes)
                if posted_first:
                    received = b.recv(0, key(), room)
                    sent = a.send(1, key(), pattern(nbytes))
                else:
                    sent = a.send(1, key(), pattern(nbytes))
                    # The arrival of a second message shows that the first has arrived.
                    wait(a.send(1, key(1), pattern(1)), b.recv(0, key(1), room_for(1)))
                    received = b.recv(0, key(), room)
                wait(sent, received)
                equal(what, room == pattern(nbytes), True)


def _check_both_send_first(make: MakeTransports) -> None:
    nbytes = SIZES[-1]
    with opened(make, 2) as (a, b):
        sends = [a.send(1, key(), pattern(nbytes, 1)), b.send(0, key(), pattern(nbytes, 2))]
        rooms = [room_for(nbytes), room_for(nbytes)]
        wait(b.recv(0, key(), rooms[0]), a.recv(1, key(), rooms[1]), *sends)
        equal("from rank 0", rooms[0] == pattern(nbytes, 1), True)
        equal("from rank 1", rooms[1] == pattern(nbytes, 2), True)


def _check_order(make: MakeTransports) -> None:
    sizes = [(i * 7919) % 200_000 if i % 9 == 0 else i % 50 for i in range(200)]
    with opened(make, 2) as (a, b):
        rooms = [room_for(size) for size in sizes]
        half = len(sizes) // 2
        received = [b.recv(0, key(), room) for room in rooms[:half]]
        sent = [a.send(1, key(), pattern(size, i)) for i, size in enumerate(sizes)]
        received += [b.recv(0, key(), room) for room in rooms[half:]]
        wait(*sent, *received)
        wrong = [i for i, room in enumerate(rooms) if room != pattern(sizes[i], i)]
        equal("messages out of order", wrong, [])


def _check_keys(make: MakeTransports) -> None:
    keys = [
        Key(context, kind, tag)
        for context in (0, 1, 2**64 - 1)
        for kind in (Purpose.COLLECTIVE, Purpose.P2P)
        for tag in (0, 1, 2**31, 2**63 - 1)
    ]
    with opened(make, 2) as (a, b):
        for i, each in enumerate(keys):
            wait(a.send(1, each, pattern(9, i)))
        for i, each in reversed(list(enumerate(keys))):
            room = room_for(9)
            wait(b.recv(0, each, room))
            equal(f"message under {each}", room == pattern(9, i), True)


def _check_any_source(make: MakeTransports) -> None:
    with opened(make, 3) as (a, b, c):
        rooms = [room_for(4) for _ in range(4)]
        first = c.recv(None, key(), rooms[0])
        from_b = c.recv(1, key(), rooms[1])
        wait(a.send(2, key(), pattern(4, 1)), first)
        equal("source of a posted receive", first.peer, 0)
        wait(b.send(2, key(), pattern(4, 2)), from_b)
        wait(b.send(2, key(), pattern(4, 3)), b.send(2, key(1), pattern(1)))
        wait(c.recv(1, key(1), room_for(1)))
        kept = c.recv(None, key(), rooms[2])
        wait(kept)
        equal("source of a message that was there", kept.peer, 1)
        wait(c.send(2, key(), pattern(4, 4)), itself := c.recv(None, key(), rooms[3]))
        equal("source of an own message", itself.peer, 2)
        for i, room in enumerate(rooms):
            equal(f"message {i}", room == pattern(4, i + 1), True)


def _check_unknown(make: MakeTransports) -> None:
    """Check receives of any tag and size, and probes."""
    with opened(make, 2) as (a, b):
        any_tag = key(ANY_TAG)
        probe, first = b.recv(0, any_tag, NOTHING), b.recv(None, any_tag, ANYTHING)
        for tag, nbytes in ((2**62, 9), (5, SIZES[-1]), (6, 0), (7, 9)):
            wait(a.send(1, key(tag), pattern(nbytes, tag), 3))
        wait(first, probe)
        equal("first message", (first.peer, first.tag[1], first.info), (0, 5, 3))
        equal("its bytes", bytes(first.into) == bytes(pattern(SIZES[-1], 5)), True)
        equal("message of a probe", (probe.peer, probe.tag[1], probe.nbytes), (0, 6, 0))
        wait(*(rest := [b.recv(0, any_tag, ANYTHING) for _ in range(2)]))
        equal("further messages", [(each.tag[1], each.nbytes) for each in rest], [(6, 0), (7, 9)])
        wait(b.recv(0, key(2**62), room_for(9), 3))


def _check_self(make: MakeTransports) -> None:
    with opened(make, 2) as (a, _):
        rooms = [room_for(1000), room_for(1000)]
        first = a.recv(0, key(), rooms[0])
        wait(a.send(0, key(), pattern(1000, 1)), a.send(0, key(), pattern(1000, 2)), first)
        wait(a.recv(0, key(), rooms[1]))
        equal("first", rooms[0] == pattern(1000, 1), True)
        equal("second", rooms[1] == pattern(1000, 2), True)


def _check_mismatch(make: MakeTransports) -> None:
    big = 200_000
    with opened(make, 2) as (a, b):
        for sender in (a, b):
            for nbytes, room_bytes, info in ((8, 9, 0), (big, big - 1, 0), (0, 1, 0), (8, 8, 5)):
                for posted_first in (True, False):
                    room = room_for(room_bytes)
                    if posted_first:
                        received = b.recv(sender.rank, key(), room)
                    wait(sender.send(1, key(), pattern(nbytes), info))
                    if not posted_first:
                        received = b.recv(sender.rank, key(), room)
                    error = fails(f"{nbytes} bytes into {room_bytes}", received, MessageMismatch)
                    got = (error.source, error.nbytes, error.info)
                    equal("mismatch", got, (sender.rank, nbytes, info))
                    equal("memory is untouched", room == room_for(room_bytes), True)
            room = room_for(8)
            wait(sender.send(1, key(), pattern(8), 3), b.recv(sender.rank, key(), room, 3))
            equal("the next message", room == pattern(8), True)


def _check_arguments(make: MakeTransports) -> None:
    with opened(make, 2) as (a, _):
        calls: list[Callable[[], Transfer]] = [
            lambda: a.recv(1, key(), memoryview(b"abc")),
            lambda: a.recv(1, key(), memoryview(bytearray(8)).cast("I")),
            lambda: a.send(1, key(), memoryview(bytearray(8)).cast("I")),
        ]
        for call in calls:
            raises("memory that is not writable bytes", InvalidArgumentError, call)


def _check_cancel(make: MakeTransports) -> None:
    with opened(make, 2) as (a, b):
        for posted in range(3):
            rooms = [room_for(100_000) for _ in range(3)]
            transfers = [b.recv(0, key(), room) for room in rooms]
            b.cancel(transfers[posted])
            fails("cancelled receive", transfers[posted], Cancelled)
            rest = [i for i in range(3) if i != posted]
            wait(*[a.send(1, key(), pattern(100_000, i)) for i in rest])
            wait(*[transfers[i] for i in rest])
            for i in range(3):
                expected = room_for(100_000) if i == posted else pattern(100_000, i)
                equal(f"receive {i}, {posted} was cancelled", rooms[i] == expected, True)
        b.cancel(transfers[rest[0]])
        equal("a finished transfer stays as it is", transfers[rest[0]].error, None)


def _check_cancel_on_its_way(make: MakeTransports) -> None:
    nbytes = SIZES[-1]
    with opened(make, 2) as (a, b):
        for _ in range(5):
            room = room_for(nbytes)
            data = memoryview(bytearray(pattern(nbytes)))
            received = b.recv(0, key(), room)
            sent = a.send(1, key(), data)
            b.cancel(received)
            equal("done after cancel", received.done(), True)
            before = bytes(room)
            a.cancel(sent)
            equal("done after cancel", sent.done(), True)
            # Neither end may access its memory any longer.
            data[:] = bytes(nbytes)
            small = room_for(8)
            wait(a.send(1, key(1), pattern(8)), b.recv(0, key(1), small))
            equal("the next message", small == pattern(8), True)
            equal("memory is the same as right after cancel", room == before, True)
            if received.error is None:
                equal("a receive that won the race", room == pattern(nbytes), True)
            # A send that was cancelled before its first byte is never sent. Another may arrive
            # later: drop it, so that the next round does not receive it.
            b.messages.forget(CONTEXT, Cancelled())


def _check_many_to_one(make: MakeTransports) -> None:
    senders, count = 5, 60
    with opened(make, senders + 1) as world:
        target = world[senders]

        def send(rank: int) -> None:
            for i in range(count):
                wait(world[rank].send(senders, key(), memoryview(bytes([rank, i]))))

        def receive() -> list[tuple[int, int]]:
            got = []
            for _ in range(senders * count):
                room = memoryview(bytearray(2))
                wait(transfer := target.recv(None, key(), room))
                equal("source", transfer.peer, room[0])
                got.append((room[0], room[1]))
            return got

        got: list[tuple[int, int]] = []
        bodies: list[Callable[[], None]] = [partial(send, rank) for rank in range(senders)]
        in_threads([*bodies, lambda: got.extend(receive())])
        for rank in range(senders):
            order = [i for source, i in got if source == rank]
            equal(f"messages of rank {rank}", order, list(range(count)))


def _check_all_to_all(make: MakeTransports) -> None:
    size, rounds = 4, 12

    with opened(make, size) as world:

        def body(rank: int) -> None:
            me = world[rank]
            for i in range(rounds):
                nbytes = [0, 17, 70_000][i % 3]
                rooms = [room_for(nbytes) for _ in range(size)]
                received = [me.recv(peer, key(i), rooms[peer]) for peer in range(size)]
                sent = [me.send(peer, key(i), pattern(nbytes, rank + peer)) for peer in range(size)]
                wait(*received, *sent)
                wrong = [p for p in range(size) if rooms[p] != pattern(nbytes, rank + p)]
                equal(f"round {i} on rank {rank}: wrong messages from", wrong, [])

        in_threads([partial(body, rank) for rank in range(size)])


TRANSPORT_CHECKS = checks_in(globals()) + LIFE_CHECKS
