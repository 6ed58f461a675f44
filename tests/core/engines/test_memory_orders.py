"""The memory orders of the C++ engine hold on every processor that C++ allows, and are needed.

x86 keeps stores in order, so no test that runs there finds a store that must be a release store.
Here the protocols between threads and processes are programs of tests/support/memory_model.py. A
program takes its orders from the C++ sources. MIRRORED says which operations of the sources it
mirrors: whoever changes these operations must change the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.cpp_orders import METHODS, NATIVE, operations, operations_of_file
from tests.support.memory_model import (
    ACQ_REL,
    ACQUIRE,
    PLAIN,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Body,
    Broken,
    Explorer,
    Fence,
    Read,
    Thread,
    Update,
    Write,
    lock,
    sleep,
    unlock,
    wake,
)

GROUP, DIRECT, ENDS = "shared/group.cpp:", "shared/group_direct.cpp:", "shared/group_ends.cpp:"
RING, RINGS, PEERS = "messages/ring.hpp:", "messages/peer_rings.cpp:", "messages/peers.cpp:"
WAITING, FUTEX = "messages/waiting.cpp:", "core/futex.hpp:"
QUEUE, CALLS, RECORDER = "core/queue.cpp:", "core/queue.hpp:", "core/recorder.hpp:"
REACHED, ENDED_IN, SEEN = (
    "shared/group.hpp:has_reached",
    "shared/group.hpp:has_ended",
    ENDS + "exit_of",
)
WINDOW, PART = "windows/part.cpp:", "windows/part.hpp:"
ENTER, COMPLETE = "mpi/shared_agreement.hpp:enter", "mpi/shared_agreement.hpp:is_complete"
TEAM = "core/team.cpp:"
BELL, TABLE = RINGS + "ring_bell", "shared/process_handle.cpp:table"
ALARM = FUTEX + "change_and_wake word.fetch_add"

# The operations of each function, in the order of its source.
MIRRORED = {
    GROUP + "publish": "flag.store sleepers.load futex_wake_all",
    GROUP + "wait_slowly": "sleepers.fetch_add awaited.load futex_wait sleepers.fetch_sub"
    " flag.load flag.load",
    GROUP + "run": "abandoned_in.compare_exchange_strong full_fence",
    REACHED: "flag.load",
    ENDED_IN: "membership.load ended_in.load",
    DIRECT + "finish_direct": "full_fence abandoned_in.load",
    ENDS + "leave": "membership.compare_exchange_strong futex_wake_all",
    ENDS + "abort": "broken_by_.store has_stopped_.store ended_in.compare_exchange_strong"
    " membership.store",
    SEEN: "membership.load",
    FUTEX + "fence": "atomic_thread_fence",
    FUTEX + "futex_wait": "word.load",
    FUTEX + "change_and_wake": "word.fetch_add futex_wake_all",
    RING + "publish": "tail.store",
    RING + "release": "head.store",
    RING + "room": "head.load",
    RING + "available": "tail.load",
    RING + "before_abort": "aborted_at.load",
    RING + "load_bytes": "bytes.load",
    RING + "ring_pipe": "polls.load",
    "messages/ring.cpp:abort_frame": "aborted_at.store",
    "messages/ring.cpp:choose_bytes": "bytes.store",
    "messages/ring.cpp:write_to_pipe": "polls.exchange pipe.load",
    "messages/wire_poll.cpp:prepare": "pipe.store",
    RINGS + "join": "joined.store joined.fetch_add",
    RINGS + "find_sender": "joined.load",
    RINGS + "leave": "left.store",
    RINGS + "has_left": "left.load",
    BELL: "full_fence sleepers.load change_and_wake server_wants.load server_wants.store"
    " change_and_wake",
    RINGS + "ask_for_room": "wants_room.store ring_bell",
    RINGS + "pull_frames": "full_fence wants.load wants.store ring_bell",
    PEERS + "look_for_senders": "joined.load",
    WAITING + "sleep_until_over": "sleepers.fetch_add sleepers.fetch_sub waiters.load polls.store"
    " full_fence futex_wait",
    WAITING + "is_over": "done.load",
    WAITING + "serve": "server.load server_wants.store full_fence server_wants.store",
    WAITING + "delegate": "polls.store server_wants.store full_fence",
    WAITING + "server_sleep": "server_wants.store polls.store full_fence futex_wait",
    "messages/operations.hpp:finish": "done.store",
    CALLS + "take": "owner_.store",
    CALLS + "give": "owner_.store pending_.load ring end_nap",
    CALLS + "is_free": "owner_.load pending_.load",
    CALLS + "is_over": "ended_.load dropped_from_.load",
    QUEUE + "push": "pending_.fetch_add ring",
    QUEUE + "ring": "bell_.fetch_add listens_.load futex_wake_all",
    QUEUE + "end_nap": "naps_.load futex_wake_all",
    QUEUE + "next": "owner_.load begun_.store",
    QUEUE + "claim": "owner_.load begun_.store",
    QUEUE + "settle": "ring ring end_nap",
    QUEUE
    + "serve": "bell_.load bell_.load naps_.store bell_.load futex_wait naps_.store listens_.store"
    " bell_.load futex_wait listens_.store bell_.load",
    QUEUE + "end": "pending_.fetch_sub ended_.store waiters_.load futex_wake_all ring",
    QUEUE + "close": "pending_.fetch_sub dropped_from_.store ring futex_wake_all",
    QUEUE + "wait": "end_nap waiters_.fetch_add ended_.load futex_wait waiters_.fetch_sub",
    RECORDER + "write": "__atomic_store fence __atomic_store",
    RECORDER + "copy": "__atomic_load __atomic_load fence __atomic_load",
    RECORDER + "end": "__atomic_store",
    ENTER: "flag.store",
    COMPLETE: "flag.load",
    "mpi/blocking_thread.cpp:wait": "ended.load futex_wait",
    "mpi/blocking_thread.hpp:is_busy": "ended.load begun.load",
    "mpi/blocking_thread.cpp:serve": "ended.load begun.load futex_wait change_and_wake",
    WINDOW + "signal": "signals.fetch_add sleepers.load futex_wake_all",
    WINDOW + "wait_signal": "sleepers.fetch_add signals.load futex_wait sleepers.fetch_sub",
    WINDOW + "apply_words": "word.load word.compare_exchange_weak memcpy",
    WINDOW + "swap_word": "memcpy memcpy word.compare_exchange_strong memcpy",
    PART + "signals": "signals.load",
    PART + "close": "closed.store",
    PART + "is_closed": "closed.load",
    TEAM + "run": "done_.store open_.load",
    TEAM + "begin": "use_.compare_exchange_strong",
    TEAM + "give_back": "use_.store",
    TEAM + "do_part": "open_.load open_.compare_exchange_weak",
    TEAM + "finish_part": "done_.fetch_add caller_sleeps_.load futex_wake_all",
    TEAM + "wait_for_parts": "done_.load done_.load caller_sleeps_.store done_.load futex_wait"
    " caller_sleeps_.store",
    TEAM + "change": "open_.store sleepers_.load futex_wake_all",
    TEAM + "sleep": "sleepers_.fetch_add open_.load futex_wait sleepers_.fetch_sub open_.load",
    TEAM + "close": "use_.compare_exchange_strong",
    TABLE: "current.load current.compare_exchange_strong",
}


class Orders:
    """The order of "FILE:FUNCTION OPERATION", and of the second with "#2"; or a weaker order."""

    def __init__(self, **weaker: str) -> None:
        self.used: dict[str, str] = {}
        self._weaker = weaker

    def __call__(self, key: str) -> str:
        place, _, name = key.partition(" ")
        assert place in MIRRORED, key
        name, _, number = name.partition("#")
        same = [operation for operation in operations(place) if operation.name == name]
        assert same, f"{place} has no {name}"
        self.used[key] = same[int(number or 1) - 1].order
        return self._weaker.get(key, self.used[key])


Protocol = Callable[[Orders], list[Thread]]
PROTOCOLS: dict[str, Protocol] = {}


def protocol(body: Protocol) -> Protocol:
    PROTOCOLS[body.__name__] = body
    return body


def more(value: int) -> int:
    return value + 1


def less(value: int) -> int:
    return value - 1


def at_least(least: int) -> Callable[[int], bool]:
    return lambda value: value >= least


# ---- groups in shared memory ------------------------------------------------------------------


@protocol
def slots(order: Orders) -> list[Thread]:
    """A rank writes a slot and a line again only after its peer has read them, two epochs later.

    Each line has a flag of its own. The flag of the epoch before tells what may be written.
    """

    def rank(me: int) -> Thread:
        def body() -> Body:
            reached = order(REACHED + " flag.load")
            for epoch in (1, 2, 3):
                line = epoch % 2
                yield Read(f"flag {1 - me} {1 - line}", reached, at_least(epoch - 1))
                yield Write(f"post {me} {line}", epoch, PLAIN)
                yield Write(f"flag {me} {line}", epoch, order(GROUP + "publish flag.store"))
                yield Read(f"flag {1 - me} {line}", reached, at_least(epoch))
                assert (yield Read(f"post {1 - me} {line}", PLAIN)) == epoch

        return body

    return [rank(0), rank(1)]


@protocol
def two_posts_in_a_line(order: Orders) -> list[Thread]:
    """A rank posts again in a line while its peer reads the first post there."""

    def poster() -> Body:
        for stage in (1, 2):
            yield Write(f"post {stage}", stage, PLAIN)
            yield Write("flag", stage, order(GROUP + "publish flag.store"))

    def reader() -> Body:
        for stage in (1, 2):
            yield Read("flag", order(REACHED + " flag.load"), at_least(stage))
            assert (yield Read(f"post {stage}", PLAIN)) == stage

    return [poster, reader]


@protocol
def sleep_on_a_flag(order: Orders) -> list[Thread]:
    """The rank that raises a flag wakes the rank that sleeps on it, also an epoch ahead."""

    def owner() -> Body:
        for flag in ("flag before", "flag"):
            yield Write(f"post at {flag}", 1, PLAIN)
            yield Write(flag, 1, order(GROUP + "publish flag.store"))
            if (yield Read("sleepers", order(GROUP + "publish sleepers.load"))):
                yield from wake(flag)

    def sleeper() -> Body:
        while True:
            yield Update("sleepers", more, order(GROUP + "wait_slowly sleepers.fetch_add"))
            seen = yield Read("flag", order(GROUP + "wait_slowly awaited.load"))
            if seen < 1:
                yield from sleep("flag", seen)
            yield Update("sleepers", less, order(GROUP + "wait_slowly sleepers.fetch_sub"))
            if (yield Read("flag", order(REACHED + " flag.load"))) >= 1:
                break
        assert (yield Read("post at flag", PLAIN)) == 1

    return [owner, sleeper]


@protocol
def a_rank_leaves(order: Orders) -> list[Thread]:
    """Whoever sees that a rank has left sees its last flag."""

    def leaver() -> Body:
        yield Write("flag", 1, order(GROUP + "publish flag.store"))
        leave = order(ENDS + "leave membership.compare_exchange_strong")
        yield Update("membership", lambda _: 1, leave)

    def waiter() -> Body:
        if (yield Read("flag", order(GROUP + "wait_slowly flag.load"))) >= 1:
            return
        if (yield Read("membership", order(SEEN + " membership.load"))) == 1:
            assert (yield Read("flag", order(GROUP + "wait_slowly flag.load#2"))) >= 1

    return [leaver, waiter]


@protocol
def a_rank_aborts(order: Orders) -> list[Thread]:
    """Whoever sees that a rank has aborted sees in which epoch."""

    def aborter() -> Body:
        begun = order(ENDS + "abort ended_in.compare_exchange_strong")
        yield Update("ended_in", lambda _: 7, begun)
        yield Write("membership", 2, order(ENDS + "abort membership.store"))

    def peer() -> Body:
        if (yield Read("membership", order(ENDED_IN + " membership.load"))) == 2:
            assert (yield Read("ended_in", order(ENDED_IN + " ended_in.load"))) == 7

    return [aborter, peer]


@protocol
def a_rank_abandons_its_posts(order: Orders) -> list[Thread]:
    """Whoever may have read changed memory directly, through the kernel, sees `abandoned_in`."""

    def poster() -> Body:
        abandon = order(GROUP + "run abandoned_in.compare_exchange_strong")
        yield Update("abandoned_in", lambda _: 1, abandon)
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        yield Write("memory", 1, RELAXED)

    def reader() -> Body:
        changed = yield Read("memory", RELAXED)
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        abandoned = yield Read("abandoned_in", order(DIRECT + "finish_direct abandoned_in.load"))
        assert abandoned or not changed

    return [poster, reader]


# ---- windows ----------------------------------------------------------------------------------


@protocol
def sleep_until_a_signal(order: Orders) -> list[Thread]:
    """Whoever is signalled wakes up, and sees what was put before the signal."""

    def source() -> Body:
        yield Write("data", 1, PLAIN)
        yield Update("signals", more, order(WINDOW + "signal signals.fetch_add"))
        if (yield Read("sleepers", order(WINDOW + "signal sleepers.load"))):
            yield from wake("signals")

    def owner() -> Body:
        while True:
            yield Update("sleepers", more, order(WINDOW + "wait_signal sleepers.fetch_add"))
            seen = yield Read("signals", order(WINDOW + "wait_signal signals.load"))
            if seen < 1:
                yield from sleep("signals", seen)
            yield Update("sleepers", less, order(WINDOW + "wait_signal sleepers.fetch_sub"))
            if (yield Read("signals", order(PART + "signals signals.load"))) >= 1:
                break
        assert (yield Read("data", PLAIN)) == 1

    return [source, owner]


@protocol
def a_rank_closes_its_window(order: Orders) -> list[Thread]:
    """Whoever sees that a rank has closed its part sees the last signal of the rank."""

    def closer() -> Body:
        yield Update("signals", more, order(WINDOW + "signal signals.fetch_add"))
        yield Write("closed", 1, order(PART + "close closed.store"))

    def waiter() -> Body:
        if (yield Read("closed", order(PART + "is_closed closed.load"))):
            assert (yield Read("signals", order(PART + "signals signals.load"))) == 1

    return [closer, waiter]


def next_in_line(key: str) -> Protocol:
    def body(order: Orders) -> list[Thread]:
        def rank() -> Body:
            if (yield Update("element", more, order(key))):
                assert (yield Read("data", PLAIN)) == 1

        def first() -> Body:
            yield Write("data", 1, PLAIN)
            yield Update("element", more, order(key))

        return [first, rank]

    return body


PROTOCOLS["the_next_number_of_a_queue"] = next_in_line(
    WINDOW + "apply_words word.compare_exchange_weak"
)
PROTOCOLS["a_lock_of_swaps"] = next_in_line(WINDOW + "swap_word word.compare_exchange_strong")


# ---- rings ------------------------------------------------------------------------------------


@protocol
def bytes_in_a_ring(order: Orders) -> list[Thread]:
    """A ring of two places carries four bytes."""

    def sender() -> Body:
        head = 0
        for at in range(4):
            if at - head >= 2:
                head = yield Read("head", order(RING + "room head.load"), at_least(at - 1))
            yield Write(f"data {at % 2}", at, PLAIN)
            yield Write("tail", at + 1, order(RING + "publish tail.store"))

    def receiver() -> Body:
        for at in range(4):
            yield Read("tail", order(RING + "available tail.load"), at_least(at + 1))
            assert (yield Read(f"data {at % 2}", PLAIN)) == at
            yield Write("head", at + 1, order(RING + "release head.store"))

    return [sender, receiver]


@protocol
def a_frame_is_aborted(order: Orders) -> list[Thread]:
    """Whoever sees the bytes of an aborted frame sees where it ends; a second one comes later."""

    def sender() -> Body:
        for at in (1, 2):
            if at > 1:
                yield Read("head", order(RING + "room head.load"), at_least(at - 1))
            yield Write("aborted_at", at, order("messages/ring.cpp:abort_frame aborted_at.store"))
            yield Write("tail", at, order(RING + "publish tail.store"))

    def receiver() -> Body:
        for at in (1, 2):
            yield Read("tail", order(RING + "available tail.load"), at_least(at))
            cut = yield Read("aborted_at", order(RING + "before_abort aborted_at.load"))
            assert cut == at
            yield Write("head", at, order(RING + "release head.store"))

    return [sender, receiver]


@protocol
def a_sender_joins(order: Orders) -> list[Thread]:
    """An inbox that counts its senders finds all of them, and the size of each ring."""

    def sender(me: int) -> Thread:
        def body() -> Body:
            yield Write(f"bytes {me}", 64, order("messages/ring.cpp:choose_bytes bytes.store"))
            yield Write(f"joined {me}", 1, order(RINGS + "join joined.store"))
            yield Update("joined", more, order(RINGS + "join joined.fetch_add"))

        return body

    def owner() -> Body:
        known: set[int] = set()
        seen = 0
        while len(known) < 2:
            look = order(PEERS + "look_for_senders joined.load")
            seen = yield Read("joined", look, at_least(seen + 1))
            for other in {0, 1} - known:
                if (yield Read(f"joined {other}", order(RINGS + "find_sender joined.load"))):
                    size = yield Read(f"bytes {other}", order(RING + "load_bytes bytes.load"))
                    assert size == 64
                    known.add(other)

    return [sender(0), sender(1), owner]


@protocol
def a_sender_leaves(order: Orders) -> list[Thread]:
    """Whoever sees that a sender has left sees its last bytes."""

    def sender() -> Body:
        yield Write("tail", 1, order(RING + "publish tail.store"))
        yield Write("left", 1, order(RINGS + "leave left.store"))

    def receiver() -> Body:
        if (yield Read("left", order(RINGS + "has_left left.load"))):
            assert (yield Read("tail", order(RING + "available tail.load"))) == 1

    return [sender, receiver]


def rings_bell(order: Orders, who: str, is_full: bool = False, server: bool = False) -> Body:
    """What PeerRings::ring_bell does to the bells of a rank."""
    yield Fence(order(FUTEX + "fence atomic_thread_fence"))
    if not server and (yield Read(f"sleepers {who}", order(BELL + " sleepers.load"))):
        yield Update(f"waiters {who}", more, order(ALARM))
        yield from wake(f"waiters {who}")
    if server:
        wants = yield Read("server_wants", order(BELL + " server_wants.load"))
        if wants == "everything" or (is_full and wants == "full rings"):
            yield Write("server_wants", "nothing", order(BELL + " server_wants.store"))
            yield Update("server", more, order(ALARM))
            yield from wake("server")


def sleeps_until(order: Orders, who: str, looks: Callable[[], Body]) -> Body:
    """What Waiting::sleep_until_over does, until `looks` returns something."""
    sleeper = WAITING + "sleep_until_over "
    while True:
        yield Update(f"sleepers {who}", more, order(sleeper + "sleepers.fetch_add"))
        seen = yield Read(f"waiters {who}", order(sleeper + "waiters.load"))
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        found = yield from looks()
        if not found:
            yield from sleep(f"waiters {who}", seen)
        yield Update(f"sleepers {who}", less, order(sleeper + "sleepers.fetch_sub"))
        if found:
            return


@protocol
def sleep_on_the_bell(order: Orders) -> list[Thread]:
    """A sender wakes the thread that sleeps until a message comes."""

    def sender() -> Body:
        yield Write("data", 1, PLAIN)
        yield Write("tail", 1, order(RING + "publish tail.store"))
        yield from rings_bell(order, "receiver")

    def looks() -> Body:
        return (yield Read("tail", order(RING + "available tail.load")))

    def receiver() -> Body:
        yield from sleeps_until(order, "receiver", looks)
        assert (yield Read("data", PLAIN)) == 1

    return [sender, receiver]


@protocol
def sleep_until_there_is_room(order: Orders) -> list[Thread]:
    """The receiver wakes the sender of a full ring when it has read."""

    def looks() -> Body:
        yield Write("wants_room", 1, order(RINGS + "ask_for_room wants_room.store"))
        yield from rings_bell(order, "receiver")
        return (yield Read("head", order(RING + "room head.load")))

    def sender() -> Body:
        yield from sleeps_until(order, "sender", looks)
        yield Write("data", 1, PLAIN)

    def receiver() -> Body:
        yield Read("data", PLAIN)
        yield Write("head", 1, order(RING + "release head.store"))
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        if (yield Read("wants_room", order(RINGS + "pull_frames wants.load"))):
            yield Write("wants_room", 0, order(RINGS + "pull_frames wants.store"))
            yield from rings_bell(order, "sender")

    return [sender, receiver]


def server_of(order: Orders, wants: str, messages: int) -> Thread:
    """What Waiting::serve does, with `wants`: what to wake it for."""

    def body() -> Body:
        done = 0
        while done < messages:
            seen = yield Read("server", order(WAITING + "serve server.load"))
            rearmed = order(WAITING + "serve server_wants.store")
            yield Write("server_wants", "full rings", rearmed)
            if wants == "everything":
                lowered = order(WAITING + "delegate server_wants.store")
                yield Write("server_wants", wants, lowered)
            yield Fence(order(FUTEX + "fence atomic_thread_fence"))
            done = 0
            for other in range(messages):
                done += yield Read(f"tail {other}", order(RING + "available tail.load"))
            if done < messages:
                yield from sleep("server", seen)
            awake = order(WAITING + "serve server_wants.store#2")
            yield Write("server_wants", "nothing", awake)

    return body


@protocol
def the_server_sleeps(order: Orders) -> list[Thread]:
    """A sender wakes the server thread that handles messages for which nobody waits."""

    def sender() -> Body:
        yield Write("tail 0", 1, order(RING + "publish tail.store"))
        yield from rings_bell(order, "receiver", server=True)

    return [sender, server_of(order, "everything", 1)]


@protocol
def the_server_sleeps_beside_full_rings(order: Orders) -> list[Thread]:
    """A sender without room wakes the server also if nothing else would."""

    def sender() -> Body:
        yield Write("tail 0", 1, order(RING + "publish tail.store"))
        yield Write("wants_room", 1, order(RINGS + "ask_for_room wants_room.store"))
        yield from rings_bell(order, "receiver", is_full=True, server=True)

    return [sender, server_of(order, "full rings", 1)]


@protocol
def sleep_on_a_pipe(order: Orders) -> list[Thread]:
    """A sender writes into the pipe of the thread that sleeps on wires."""

    def sender() -> Body:
        yield Write("tail", 1, order(RING + "publish tail.store"))
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        if (yield Read("polls", order(RING + "ring_pipe polls.load"))):
            taken = order("messages/ring.cpp:write_to_pipe polls.exchange")
            if (yield Update("polls", lambda _: 0, taken)):
                pipe = yield Read("pipe", order("messages/ring.cpp:write_to_pipe pipe.load"))
                assert pipe == 5
                yield Update("written", more, ACQ_REL)

    def receiver() -> Body:
        yield Write("pipe", 5, order("messages/wire_poll.cpp:prepare pipe.store"))
        yield Write("polls", 1, order(WAITING + "sleep_until_over polls.store"))
        yield Fence(order(FUTEX + "fence atomic_thread_fence"))
        if not (yield Read("tail", order(RING + "available tail.load"))):
            yield Read("written", ACQUIRE, at_least(1))

    return [sender, receiver]


@protocol
def the_server_polls_for_a_waiter(order: Orders) -> list[Thread]:
    """As sleep_on_a_pipe, where another thread has the server poll again."""

    def sender() -> Body:
        if (yield Read("polls", order(RING + "ring_pipe polls.load"))):
            taken = order("messages/ring.cpp:write_to_pipe polls.exchange")
            if (yield Update("polls", lambda _: 0, taken)):
                pipe = yield Read("pipe", order("messages/ring.cpp:write_to_pipe pipe.load"))
                assert pipe == 5

    def receiver() -> Body:
        yield Write("pipe", 5, order("messages/wire_poll.cpp:prepare pipe.store"))
        yield Write("polls", 1, order(WAITING + "delegate polls.store"))

    return [sender, receiver]


@protocol
def an_operation_ends(order: Orders) -> list[Thread]:
    """A thread that finds an operation done finds its outcome, without the lock."""

    def server() -> Body:
        yield Write("code", 3, PLAIN)
        yield Write("done", 1, order("messages/operations.hpp:finish done.store"))

    def caller() -> Body:
        if (yield Read("done", order(WAITING + "is_over done.load"))):
            assert (yield Read("code", PLAIN)) == 3

    return [server, caller]


# ---- the queue of calls -----------------------------------------------------------------------


def rings(order: Orders) -> Body:
    yield Update("bell", more, order(QUEUE + "ring bell_.fetch_add"))
    if (yield Read("listens", order(QUEUE + "ring listens_.load"))):
        yield from wake("bell")


def ends_nap(order: Orders) -> Body:
    if (yield Read("naps", order(QUEUE + "end_nap naps_.load"))):
        yield from wake("bell")


# What the lock of the queue guards, as one value: "queued", "settled", "runs".
NOTHING: frozenset[str] = frozenset()


def takes_job(order: Orders, by: str) -> Body:
    """What next() and claim() do; a claim takes no task that was claimed before."""
    yield from lock("queue")
    state = (yield Read("state", PLAIN)) or NOTHING
    found = NOTHING
    if "runs" not in state and (yield Read("owner", order(QUEUE + by))) == 0:
        found = state & {"settled"} or state & {"queued"}
        if by.startswith("claim"):
            found = NOTHING if "settled" in state else found
    if found:
        yield Write("state", state - found | {"runs"}, PLAIN)
    yield from unlock("queue")
    return found


def pushes(order: Orders) -> Body:
    yield from lock("queue")
    state = (yield Read("state", PLAIN)) or NOTHING
    yield Write("state", state | {"queued"}, PLAIN)
    yield Update("pending", more, order(QUEUE + "push pending_.fetch_add"))
    yield from unlock("queue")
    yield from rings(order)


def gives(order: Orders) -> Body:
    yield Write("memory", 1, PLAIN)
    yield Write("owner", 0, order(CALLS + "give owner_.store"))
    if (yield Read("pending", order(CALLS + "give pending_.load"))):
        yield from rings(order)


def settles(order: Orders, is_over: bool) -> Body:
    """End the run of a claimed task, which is over or was postponed."""
    yield Write("memory", 1, PLAIN)
    yield from lock("queue")
    state = (yield Read("state", PLAIN)) - {"runs"}
    if is_over:
        yield Write("state", state, PLAIN)
        if state:
            yield from rings(order)
        yield from unlock("queue")
        return
    yield Write("state", state | {"settled"}, PLAIN)
    yield from unlock("queue")
    yield from rings(order)
    yield from ends_nap(order)


def queue_server(order: Orders, sleeps: str = "listens") -> Thread:
    """`sleeps`: which of its two sleeps the server takes; a nap ends here only if it is woken."""
    again = order(QUEUE + ("serve bell_.load#4" if sleeps == "listens" else "serve bell_.load#3"))

    def body() -> Body:
        while True:
            seen = yield Read("bell", order(QUEUE + "serve bell_.load#2"))
            if (yield from takes_job(order, "next owner_.load")):
                break
            yield Write(sleeps, 1, order(f"{QUEUE}serve {sleeps}_.store"))
            if (yield Read("bell", again)) == seen:
                yield from sleep("bell", seen)
            yield Write(sleeps, 0, order(f"{QUEUE}serve {sleeps}_.store#2"))
        yield Write("memory", 2, PLAIN)

    return body


# Who pushes and who gives hold the same lock, Python's. So they are one thread here.
@protocol
def a_job_behind_a_call(order: Orders) -> list[Thread]:
    """A caller that gives the turn away wakes the server, which runs the task that was queued."""

    def callers() -> Body:
        yield from pushes(order)
        yield from gives(order)

    return [callers, queue_server(order)]


@protocol
def a_job_after_a_call(order: Orders) -> list[Thread]:
    """Whoever queues a task wakes the server, which finds the turn free."""

    def callers() -> Body:
        yield from gives(order)
        yield from pushes(order)

    return [callers, queue_server(order)]


@protocol
def a_nap_ends(order: Orders) -> list[Thread]:
    """A thread that waits for a task wakes the server from a nap."""

    def waiter() -> Body:
        yield from pushes(order)
        yield from ends_nap(order)  # wait()

    return [waiter, queue_server(order, "naps")]


@protocol
def a_nap_ends_with_a_call(order: Orders) -> list[Thread]:
    """As a_job_behind_a_call, where the server naps."""

    def callers() -> Body:
        yield from pushes(order)
        yield from gives(order)
        yield from ends_nap(order)

    return [callers, queue_server(order, "naps")]


@protocol
def a_job_is_claimed(order: Orders) -> list[Thread]:
    """One thread runs a task, the waiting thread or the server, after the call before it."""

    def caller() -> Body:
        yield Write("memory", 1, PLAIN)
        yield Write("owner", 0, order(CALLS + "give owner_.store"))

    def runs(by: str) -> Thread:
        def body() -> Body:
            if (yield from takes_job(order, by)):
                yield Write("memory", 2, PLAIN)

        return body

    return [caller, runs("claim owner_.load"), runs("next owner_.load")]


@protocol
def a_job_behind_a_claimed_job(order: Orders) -> list[Thread]:
    """A thread that has run its task wakes the server, which could not run the next task before."""

    def waiter() -> Body:
        yield from settles(order, is_over=True)

    return [waiter, queue_server(order)]


@protocol
def a_job_is_postponed(order: Orders) -> list[Thread]:
    """A thread that gives its task back wakes the server, which runs it after that thread."""

    def waiter() -> Body:
        yield from settles(order, is_over=False)

    return [waiter, queue_server(order)]


@protocol
def a_job_is_postponed_during_a_nap(order: Orders) -> list[Thread]:
    """As a_job_is_postponed, where the server naps."""

    def waiter() -> Body:
        yield from settles(order, is_over=False)

    return [waiter, queue_server(order, "naps")]


@protocol
def a_job_ends(order: Orders) -> list[Thread]:
    """The server wakes the thread that waits for a task, which then finds the turn free."""

    def server() -> Body:
        yield Write("memory", 1, PLAIN)
        yield Update("pending", less, order(QUEUE + "end pending_.fetch_sub"))
        yield Write("ended", 1, order(QUEUE + "end ended_.store"))
        if (yield Read("waiters", order(QUEUE + "end waiters_.load"))):
            yield from wake("ended")

    def waiter() -> Body:
        yield Update("pending", more, order(QUEUE + "push pending_.fetch_add"))
        yield Write("is queued", 1, RELEASE)
        over = order(CALLS + "is_over ended_.load")
        while (yield Read("ended", over)) < 1:
            yield Update("waiters", more, order(QUEUE + "wait waiters_.fetch_add"))
            seen = yield Read("ended", order(QUEUE + "wait ended_.load"))
            if (yield Read("ended", over)) < 1:
                yield from sleep("ended", seen)
            yield Update("waiters", less, order(QUEUE + "wait waiters_.fetch_sub"))
        assert (yield Read("memory", PLAIN)) == 1
        assert (yield Read("pending", order(CALLS + "is_free pending_.load"))) == 0

    def queued() -> Body:
        yield Read("is queued", ACQUIRE, at_least(1))
        yield from server()

    return [queued, waiter]


@protocol
def the_turn_is_free(order: Orders) -> list[Thread]:
    """A caller that finds no task pending finds what the last task wrote."""

    def server() -> Body:
        yield Write("memory", 1, PLAIN)
        yield Update("pending", less, order(QUEUE + "end pending_.fetch_sub"))

    def caller() -> Body:
        if (yield Read("pending", order(CALLS + "is_free pending_.load"))) == -1:
            assert (yield Read("memory", PLAIN)) == 1

    return [server, caller]


@protocol
def a_job_is_dropped(order: Orders) -> list[Thread]:
    """Whoever finds that a task was dropped may free it."""

    def closer() -> Body:
        yield Write("handed", 1, PLAIN)
        yield Write("dropped_from", 1, order(QUEUE + "close dropped_from_.store"))

    def owner() -> Body:
        if (yield Read("dropped_from", order(CALLS + "is_over dropped_from_.load"))):
            yield Write("handed", 2, PLAIN)

    return [closer, owner]


# ---- records ----------------------------------------------------------------------------------


@protocol
def a_record_is_overwritten(order: Orders) -> list[Thread]:
    """A copy of a record has the columns of its number; columns are words of the machine."""

    def writer() -> Body:
        for number in (1, 2):
            yield Write("number", 0, order(RECORDER + "write __atomic_store"))
            yield Fence(order(RECORDER + "write fence"))
            yield Write("seq", 10 * number, RELAXED)
            yield Write("number", number, order(RECORDER + "write __atomic_store#2"))

    def reader() -> Body:
        number = yield Read("number", order(RECORDER + "copy __atomic_load"))
        seq = yield Read("seq", RELAXED)
        yield Fence(order(RECORDER + "copy fence"))
        still = yield Read("number", order(RECORDER + "copy __atomic_load#3"))
        assert number in (0, seq // 10) or still != number

    return [writer, reader]


@protocol
def a_record_ends(order: Orders) -> list[Thread]:
    """A record with an outcome has the time of its end."""

    def writer() -> Body:
        yield Write("ended", 9, RELAXED)
        yield Write("outcome", 1, order(RECORDER + "end __atomic_store"))

    def reader() -> Body:
        if (yield Read("outcome", order(RECORDER + "copy __atomic_load#2"))):
            assert (yield Read("ended", RELAXED)) == 9

    return [writer, reader]


# ---- threads that share loops -----------------------------------------------------------------

# The word `open_` is a pair here: the number of the loop, and its parts that nobody has taken.


def take_part(order: Orders) -> Body:
    """Take a part as `do_part`; return its loop, None if there is no part."""
    seen = yield Read("open", order(TEAM + "do_part open_.load"))
    while seen and seen[1]:
        taken = order(TEAM + "do_part open_.compare_exchange_weak")
        found = yield Update(
            "open", lambda now, seen=seen: (seen[0], seen[1] - 1) if now == seen else now, taken
        )
        if found == seen:
            return seen
        seen = found
    return None


def help_once(order: Orders, done: Callable[[int, int], Body]) -> Body:
    if (part := (yield from take_part(order))) is not None:
        yield from done(*part)
        yield Update("done", more, order(TEAM + "finish_part done_.fetch_add"))
        if (yield Read("caller sleeps", order(TEAM + "finish_part caller_sleeps_.load"))):
            yield from wake("done")


def do(number: int, left: int) -> Body:
    """Do a part: read the loop, write a result."""
    assert (yield Read("loop", PLAIN)) == number
    yield Write(f"result {number} {left}", number, PLAIN)


def wait_for_parts(order: Orders, parts: int) -> Body:
    place = TEAM + "wait_for_parts "
    if (yield Read("done", order(place + "done_.load"))) == parts:
        return
    if (yield Read("done", order(place + "done_.load#2"))) == parts:
        return
    yield Write("caller sleeps", 1, order(place + "caller_sleeps_.store"))
    while (seen := (yield Read("done", order(place + "done_.load#3")))) != parts:
        yield from sleep("done", seen)
    yield Write("caller sleeps", 0, order(place + "caller_sleeps_.store#2"))


def share(order: Orders, number: int, parts: int) -> Body:
    """Share a loop as `run`, with the team taken."""
    yield Write("loop", number, PLAIN)
    yield Write("done", 0, order(TEAM + "run done_.store"))
    yield Write("open", (number, parts), order(TEAM + "change open_.store"))
    mine = 0
    while (part := (yield from take_part(order))) is not None:
        yield from do(*part)
        mine += 1
    yield from wait_for_parts(order, parts - mine)
    for left in range(1, parts + 1):
        assert (yield Read(f"result {number} {left}", PLAIN)) == number


@protocol
def a_loop_is_shared(order: Orders) -> list[Thread]:
    """The caller sees all results, whoever did the parts, and sleeps until they are there."""

    def caller() -> Body:
        yield from share(order, 1, 2)

    def helper() -> Body:
        yield from help_once(order, do)

    return [caller, helper]


@protocol
def two_loops_are_shared(order: Orders) -> list[Thread]:
    """A helper that comes late does a part of the second loop with the data of that loop."""

    def caller() -> Body:
        for number in (1, 2):
            yield from share(order, number, 1)

    def helper() -> Body:
        yield from help_once(order, do)

    return [caller, helper]


@protocol
def a_helper_sleeps(order: Orders) -> list[Thread]:
    """A loop or the end of the team wakes a helper that sleeps."""

    def caller() -> Body:
        yield Write("loop", 1, PLAIN)
        yield Write("open", (1, 1), order(TEAM + "change open_.store"))
        if (yield Read("sleepers", order(TEAM + "change sleepers_.load"))):
            yield from wake("open")

    def helper() -> Body:
        while True:
            if (part := (yield from take_part(order))) is not None:
                yield from do(*part)
                return
            yield Update("sleepers", more, order(TEAM + "sleep sleepers_.fetch_add"))
            seen = yield Read("open", order(TEAM + "sleep open_.load"))
            if not seen:
                yield from sleep("open", seen)
            yield Update("sleepers", less, order(TEAM + "sleep sleepers_.fetch_sub"))

    return [caller, helper]


@protocol
def two_callers_of_a_team(order: Orders) -> list[Thread]:
    """The second caller has the team after the first, or works alone; the end comes after both."""

    def caller(take: str) -> Thread:
        def body() -> Body:
            if (yield Update("use", lambda use: use or 1, order(take))) == 0:
                yield Write("loop", 1, PLAIN)
                yield Write("use", 0, order(TEAM + "give_back use_.store"))

        return body

    begin, close = (f"{TEAM}{name} use_.compare_exchange_strong" for name in ("begin", "close"))
    return [caller(begin), caller(close)]


# ---- beside MPI, and processes ----------------------------------------------------------------


@protocol
def words_of_two_calls(order: Orders) -> list[Thread]:
    """SharedAgreement writes words again only after the other rank has compared them."""

    def rank(me: int) -> Thread:
        def body() -> Body:
            for epoch in (1, 2, 3):
                yield Write(f"words {me} {epoch % 2}", epoch, PLAIN)
                yield Write(f"flag {me}", epoch, order(ENTER + " flag.store"))
                yield Read(f"flag {1 - me}", order(COMPLETE + " flag.load"), at_least(epoch))
                assert (yield Read(f"words {1 - me} {epoch % 2}", PLAIN)) == epoch

        return body

    return [rank(0), rank(1)]


@protocol
def a_blocking_call(order: Orders) -> list[Thread]:
    """The thread of blocking calls finds its call, and the caller its error code."""

    def caller() -> Body:
        yield Write("call", 1, PLAIN)
        yield Update("begun", more, order(ALARM))
        yield from wake("begun")
        busy = order("mpi/blocking_thread.hpp:is_busy ended.load")
        while (yield Read("ended", busy)) != 1:
            seen = yield Read("ended", order("mpi/blocking_thread.cpp:wait ended.load"))
            if (yield Read("ended", busy)) != 1:
                yield from sleep("ended", seen)
        assert (yield Read("error", PLAIN)) == 4

    def thread() -> Body:
        begun = order("mpi/blocking_thread.cpp:serve begun.load")
        while (yield Read("begun", begun)) == 0:
            yield from sleep("begun", 0)
        assert (yield Read("call", PLAIN)) == 1
        yield Write("error", 4, PLAIN)
        yield Update("ended", more, order(ALARM))
        yield from wake("ended")

    return [caller, thread]


@protocol
def a_child_makes_its_table(order: Orders) -> list[Thread]:
    """Of two threads of a child that make a table, both use the first."""

    def thread(me: int) -> Thread:
        def body() -> Body:
            found = yield Read("current", order(TABLE + " current.load"))
            if found == 0:
                yield Write(f"table {me}", 1, PLAIN)
                swap = order(TABLE + " current.compare_exchange_strong")
                found = yield Update("current", lambda value: value or me, swap)
            assert (yield Read(f"table {found or me}", PLAIN)) == 1

        return body

    return [thread(1), thread(2)]


# ---- the tests --------------------------------------------------------------------------------


# What is not 0 at first.
FIRST = {
    "a_job_behind_a_call": {"owner": 1},
    "a_job_after_a_call": {"owner": 1},
    "a_nap_ends_with_a_call": {"owner": 1},
    "a_job_is_claimed": {"owner": 1, "state": frozenset({"queued"})},
    "a_job_behind_a_claimed_job": {"state": frozenset({"queued", "runs"})},
    "a_job_is_postponed": {"state": frozenset({"runs"})},
    "a_job_is_postponed_during_a_nap": {"state": frozenset({"runs"})},
}


def count_executions(body: Protocol, order: Orders) -> int:
    return Explorer(body(order), FIRST.get(body.__name__)).explore()


@pytest.mark.parametrize("place", MIRRORED)
def test_the_programs_mirror_the_sources(place):
    found = " ".join(operation.name for operation in operations(place))
    assert found == MIRRORED[place], f"{place} has changed: change its programs, too"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_execution_is_right(name):
    assert count_executions(PROTOCOLS[name], Orders()) >= 1


WEAKER = {SEQ_CST: ACQ_REL, ACQ_REL: RELAXED, ACQUIRE: RELAXED, RELEASE: RELAXED}
# What no program needs, and why it stays: without the order a change would have to think of more.
_FENCED = "a fence follows, and the load only says whether the word has changed since"
_COMPARED = "the value is only compared; has_reached() follows"
_STEP = "a read-modify-write costs the same with each order"
STRONGER = {
    FUTEX + "change_and_wake word.fetch_add": _STEP,
    QUEUE + "serve bell_.load#2": "the first of two loads, of which only the second needs it",
    WAITING + "serve server.load": _FENCED,
    WAITING + "sleep_until_over sleepers.fetch_add": _STEP,
    WAITING + "sleep_until_over waiters.load": _FENCED,
    "mpi/blocking_thread.cpp:serve begun.load": "the default order; such a call takes long",
    "mpi/blocking_thread.cpp:wait ended.load": "the default order; such a call takes long",
    GROUP + "run abandoned_in.compare_exchange_strong": _STEP,
    GROUP + "wait_slowly flag.load": _COMPARED,
    GROUP + "wait_slowly flag.load#2": _COMPARED,
    ENDS + "abort ended_in.compare_exchange_strong": _STEP,
}
# Operations with an order, outside MIRRORED.
ELSEWHERE = {
    # CallQueue::runs and wait_until_still, whose wait looks again every 20 ms.
    "core/queue.cpp": {"bell_.load", "owner_.load"},
    "mpi/group.cpp": {"stage_.compare_exchange_strong"},  # a thread claims the group
    "shared/group_ends.cpp": {"broken_by_.compare_exchange_weak"},  # the first reason stays
    "steps/steps_move.cpp": {"done.load"},  # as Waiting::is_over
    "store/server.cpp": {"stopping_.exchange"},  # one caller stops it; an eventfd wakes its thread
}
FILES = sorted(
    path.relative_to(NATIVE).as_posix()
    for folder in ("core", "kernels", "messages", "mpi", "shared", "steps", "store", "windows")
    for path in (NATIVE / folder).glob("*.[ch]pp")
)


def test_every_order_names_its_partner():
    """On its line, or in the six lines above, which may begin a group of operations."""
    for file in FILES:
        lines = (NATIVE / file).read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            if re.search("memory_order_(?!relaxed)|__ATOMIC_(?!RELAXED)", line):
                near = "\n".join(lines[max(at - 6, 0) : at + 1])
                assert re.search("[Pp]airs? with", near), f"{file}:{at + 1}"


def test_every_operation_with_an_order_is_in_a_program():
    method = re.compile(rf"\.({METHODS})$|^__atomic")
    for file in FILES:
        places = [place for place in MIRRORED if place.partition(":")[0] == file]
        mirrored = Counter(operation for place in places for operation in operations(place))
        ordered = Counter(
            operation
            for operation in operations_of_file(file)
            if operation.order != RELAXED and method.search(operation.name)
        )
        assert {name for name, _ in ordered - mirrored} == ELSEWHERE.get(file, set()), file


def test_every_weaker_order_is_found():
    """Also those of seq_cst operations that would be relaxed."""
    needed, not_needed = set(), set()
    for body in PROTOCOLS.values():
        order = Orders()
        count_executions(body, order)
        for key, strong in order.used.items():
            for weak in (WEAKER[strong],) if strong in WEAKER else ():
                try:
                    count_executions(body, Orders(**{key: weak}))
                except Broken:
                    needed.add(key)
                else:
                    not_needed.add(key)
    assert not_needed - needed == set(STRONGER)
