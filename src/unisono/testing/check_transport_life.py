"""Part of the conformance suite of transports: questions, failures, leaving, closing."""

from __future__ import annotations

from collections.abc import Callable

from unisono.core.base.deadline import Deadline
from unisono.core.transports import CallStatus, LinkDown, Transport
from unisono.core.transports.messages import Failure
from unisono.errors import ClosedError
from unisono.testing.expect import PATIENCE_S, checks_in, equal, opened
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

__all__ = ["LIFE_CHECKS", "check_vanishing"]


def check_vanishing(make: MakeTransports, vanish: Callable[[Transport], None]) -> None:
    """Check the errors on the other ranks when a rank ends without closing its transport.

    Args:
        make: As for `check_transport`.
        vanish: Makes a transport end as if its process had been killed.
    """
    with opened(make, 3) as (a, b, c):
        wait(c.send(1, key(5), pattern(3)))
        mine = b.recv(2, key(), room_for(8))
        any_rank = b.recv(None, key(), room_for(8))
        others = b.recv(None, key(), room_for(8), among=[0])
        wait(c.send(1, key(6), pattern(1)), b.recv(2, key(6), room_for(1)))
        # Otherwise b may still connect to c, which accepts it after its end.
        wait(b.send(2, key(7), pattern(1)), c.recv(1, key(7), room_for(1)))
        vanish(c)
        for transfer in (mine, any_rank):
            error = fails("a receive that waits", transfer, LinkDown)
            equal("rank to blame, closed its transport", (error.peer, error.left), (2, False))
        fails("later send", b.send(2, key(), pattern(1)), LinkDown)
        fails("later receive", b.recv(2, key(), room_for(1)), LinkDown)
        fails("later receive from any", b.recv(None, key(), room_for(1)), LinkDown)
        wait(b.recv(2, key(5), room_for(3)))
        equal("a receive that another rank may serve: done", others.done(), False)
        wait(a.send(1, key(), pattern(8)), others)
        answers = b.ask(CONTEXT, 1, [0, 2], Deadline(PATIENCE_S))
        equal("ranks that answer", list(answers), [0])


def _check_ask(make: MakeTransports) -> None:
    with opened(make, 4) as (a, b, c, _):
        for seq in range(1, 20):
            b.enter(CONTEXT, seq, f"call {seq}")
        c.enter(CONTEXT, 3, "call 3")
        answers = a.ask(CONTEXT, 18, range(4), Deadline(PATIENCE_S))
        expected = {1: CallStatus(18, "call 18"), 2: CallStatus(3, "call 3"), 3: CallStatus(0, "")}
        equal("answers", answers, expected)
        later = a.ask(CONTEXT, 1000, [1], Deadline(PATIENCE_S))
        equal("the last call of a rank behind", later, {1: CallStatus(19, "call 19")})
        elsewhere = a.ask(CONTEXT + 1, 1, [1], Deadline(PATIENCE_S))
        equal("another context", elsewhere, {1: CallStatus(0, "")})
        question = a.inquire(CONTEXT, 0, [1, 3])
        equal("their last calls come in", question.wait_until(Deadline(PATIENCE_S)), True)
        equal(
            "the last calls", question.answers, {1: CallStatus(19, "call 19"), 3: CallStatus(0, "")}
        )
        a.close_question(question)
        equal("a question to no other rank", a.ask(CONTEXT, 1, [0], Deadline(PATIENCE_S)), {})


def _check_fail(make: MakeTransports) -> None:
    with opened(make, 3) as world:
        a, b, c = world
        waiting = [b.recv(0, key(), room_for(8)), c.recv(None, key(), room_for(8))]
        elsewhere = c.recv(0, key(context=1), room_for(8))
        reported: list[Failure] = []
        b.on_failure(CONTEXT, reported.append)
        a.fail(CONTEXT, Failure("failed", "a reason", [0, 2], 0), [0, 1, 2])
        for transfer in waiting:
            failure = fails("a receive that waits", transfer, Failure)
            got = (failure.kind, failure.reason, failure.peers, failure.by)
            equal("failure", got, ("failed", "a reason", (0, 2), 0))
        # Rank 1's own failure is the second and must not hide the first.
        b.fail(CONTEXT, Failure("timeout", "another", [1], 1), [0, 1, 2])
        equal("the first failure stays", [t.failure(CONTEXT).by for t in world], [0, 0, 0])  # type: ignore[union-attr]
        equal("callbacks", [failure.by for failure in reported], [0])
        b.on_failure(CONTEXT, reported.append)
        equal("callbacks after a late registration", len(reported), 2)
        for transport in world:
            fails("later send", transport.send(1, key(), pattern(8)), Failure)
            fails("later receive", transport.recv(1, key(), room_for(8)), Failure)
        equal("another context", c.failure(1), None)
        local = Failure("lost", "rank 2 was lost", [2], 0, ["rank 0 -> rank 2 at ::1:7: refused"])
        a.fail(2, local, [])
        equal("a failure that was sent to no rank", b.failure(2), None)
        b.ask(2, 0, [0], Deadline(PATIENCE_S))
        answered = b.failure(2)
        equal("the failure in an answer", answered and answered.words, local.words)
        wait(a.send(2, key(context=1), pattern(8)), elsewhere)


def _check_fail_on_its_way(make: MakeTransports) -> None:
    nbytes = SIZES[-1]
    with opened(make, 2) as (a, b):
        data = memoryview(bytearray(pattern(nbytes)))
        sent = a.send(1, key(), data)
        a.fail(CONTEXT, Failure("aborted", "enough", [0], 0), [1])
        equal("a send ends with its context", sent.done(), True)
        data[:] = bytes(nbytes)
        small = room_for(8)
        wait(a.send(1, key(context=1), pattern(8)), b.recv(0, key(context=1), small))
        equal("a message of another context", small == pattern(8), True)


def _check_forget(make: MakeTransports) -> None:
    with opened(make, 2) as (a, b):
        wait(a.send(1, key(), pattern(8)), a.send(1, key(1, context=1), pattern(8)))
        wait(b.recv(0, key(1, context=1), room_for(8)))
        waiting, elsewhere = b.recv(0, key(1), room_for(8)), b.recv(0, key(context=1), room_for(8))
        b.forget(CONTEXT, ClosedError("gone"))
        equal("its receives", str(fails("receive", waiting, ClosedError)), "gone")
        equal("another context: done", elsewhere.done(), False)
        fresh = b.recv(0, key(), room_for(8))
        equal("its messages are dropped", fresh.done(), False)
        wait(a.send(1, key(), pattern(8)), fresh)


# ---- life ---------------------------------------------------------------------------------


def _check_leaving(make: MakeTransports) -> None:
    with opened(make, 3) as (a, b, c):
        wait(a.send(1, key(), pattern(8)), c.send(1, key(1), pattern(1)))
        wait(b.recv(2, key(1), room_for(1)))
        late = a.send(1, key(), pattern(1 << 20))
        waiting, any_rank = b.recv(0, key(9), room_for(8)), b.recv(None, key(9), room_for(8))
        a.close()
        error = fails("a receive from it", waiting, LinkDown)
        equal("rank to blame, closed its transport", (error.peer, error.left), (0, True))
        rooms = [room_for(8), room_for(1 << 20)]
        wait(late, b.recv(0, key(), rooms[0]), b.recv(0, key(), rooms[1]))
        equal("messages sent before", rooms == [pattern(8), pattern(1 << 20)], True)
        fails("later send", b.send(0, key(), pattern(8)), LinkDown)
        equal("a receive that another rank may serve: done", any_rank.done(), False)
        wait(c.send(1, key(9), pattern(8)), any_rank)
        unserved = b.recv(None, key(9), room_for(8))
        c.close()
        fails("a receive that no rank may serve", unserved, LinkDown)


def _check_strangers_that_left(make: MakeTransports) -> None:
    with opened(make, 3) as (a, b, c):
        # Ranks 0 and 1 never had a link, so rank 1 cannot detect how rank 0 ended.
        a.close()
        any_rank = b.recv(None, key(), room_for(8))
        wait(c.send(1, key(), pattern(8)), any_rank)
        fails("a receive from it", b.recv(0, key(), room_for(8)), LinkDown)
        equal("it does not answer", b.ask(CONTEXT, 1, [0], Deadline(PATIENCE_S)), {})


def _check_closed(make: MakeTransports) -> None:
    with opened(make, 2) as (a, b):
        equal("users may wait", a.may_wait(), True)
        waiting = [a.recv(1, key(), room_for(8)), a.recv(None, key(), room_for(8))]
        a.retain()
        a.close()
        equal("closed with one user left", a.closed, False)
        wait(a.send(1, key(), pattern(8)), b.recv(0, key(), room_for(8)))
        a.close()
        equal("closed", a.closed, True)
        for transfer in waiting:
            fails("a receive of its own", transfer, ClosedError)
        fails("later send", a.send(1, key(), pattern(8)), ClosedError)
        fails("later receive", a.recv(1, key(), room_for(8)), ClosedError)
        a.close()


LIFE_CHECKS = checks_in(globals())
