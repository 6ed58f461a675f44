"""The state of the control plane: begun calls, open questions, and what has failed."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from unisono.core.base.threads.completion import Completion
from unisono.core.transports.messages import ANY_TAG, CallStatus, Failure, LastCall, LinkDown

if TYPE_CHECKING:
    from unisono.core.recorder import GroupTrace, TraceRecord

# For how long a failure counts as the cause of the next one. A rank needs seconds to end if it has
# to close files. A longer time would blame a failure that the ranks have survived.
_FOLLOWS_S = 10.0

# How many failures a control message carries. The first one and some after a survived one matter.
_MOST_CAUSES = 8

# How many past calls a rank keeps per context, so that a slower rank can still ask for the call on
# which the ranks disagree. 2 are enough for one such call, 8 for several in a row.
_HISTORY = 8

# How many closed contexts a rank keeps. A job may make and close groups for weeks. If the rank has
# forgotten a context, a call that waits for it there ends by its time-out.
_MOST_CLOSED = 1000

# Ranks that are asked why another rank has left.
_MOST_ASKED = 8


class Watched(Protocol):
    """A group as the log of calls sees it."""

    def last_call(self) -> CallStatus | None:
        """Return the last call that this rank has begun, or None if it is unknown."""

    def describe(self) -> dict[str, Any]:
        """Return the name, the members and the state of the group, for JSON."""

    def recorded(self) -> GroupTrace | None:
        """Return the records of its calls; None if they are not recorded."""


class CallLog:
    """The last calls that this rank has begun, by context.

    Attributes:
        thread: The thread that made the transport; it usually makes the calls.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._calls: dict[int, deque[CallStatus]] = {}
        self._groups: dict[int, Watched] = {}

    def add(self, context: int, call: CallStatus) -> None:
        """Record a call."""
        calls = self._calls.get(context)
        if calls is None:
            calls = self._calls.setdefault(context, deque(maxlen=_HISTORY))
        calls.append(call)

    def watch(self, context: int, group: Watched) -> None:
        """Include the last call of a group when the log is read."""
        self._groups[context] = group

    def find(self, context: int, seq: int) -> CallStatus:
        """Return call `seq` if the log still has it, else the last call."""
        calls = list(self._calls.get(context, ()))
        group = self._groups.get(context)
        if group is not None and (call := group.last_call()) is not None:
            calls.append(call)
        wanted = [call for call in calls if call.seq == seq]
        last_one = max(calls, key=lambda call: call.seq, default=CallStatus(0, ""))
        return wanted[-1] if wanted else last_one

    def groups(self) -> list[dict[str, Any]]:
        """Return the state of each group with its last call, for JSON."""
        found = []
        for context, group in list(self._groups.items()):
            last = self.find(context, 0)
            found.append({"seq": last.seq, "call": last.text, **group.describe()})
        return found

    def recorded(self, context: int, *, messages: bool) -> list[LastCall]:
        """Return the last recorded call of a group, then a collective that runs in another group.

        Args:
            context: Of the group.
            messages: Whether a message counts as its last call.
        """
        found = []
        for each, group in sorted(self._groups.items(), key=lambda item: item[0] != context):
            if (trace := group.recorded()) is None:
                continue
            mine = each == context
            records = trace.newest(only_open=not mine)
            wanted = (r for r in records if not r.is_message or (messages and mine))
            if (record := next(wanted, None)) is not None:
                found.append(_last_call(record, "" if mine else trace.name))
        return found[:2]

    def site(self, context: int, seq: int) -> str:
        """Return file and line of the caller of collective `seq`; "" if they are unknown."""
        group = self._groups.get(context)
        trace = None if group is None else group.recorded()
        return "" if trace is None else trace.site(seq)

    def forget(self, context: int) -> None:
        """Release the calls of a destroyed context."""
        self._calls.pop(context, None)
        self._groups.pop(context, None)


def _last_call(record: TraceRecord, group: str) -> LastCall:
    of = f" of group '{group}'" if group else ""
    if record.is_message:
        peer = "any rank" if record.peer is None else f"rank {record.peer}"
        of = f" ({peer}, {'any tag' if record.tag == ANY_TAG else f'tag {record.tag}'})"
    at_ns = record.ended_ns or record.started_ns or record.enqueued_ns
    age_s = (time.time_ns() - at_ns) / 1e9
    return LastCall(f"{record.op} #{record.seq}{of}", record.ended_ns is None, age_s)


class Question(Completion):
    """A question to other ranks for their last calls. Done when all have answered, or cannot.

    Attributes:
        number: Distinguishes it from other questions.
        asked_s: When it was sent, on the monotonic clock.
        open: Ranks that have not answered.
        answers: By rank.
    """

    __slots__ = ("answers", "asked_s", "number", "open")

    def __init__(self, number: int, peers: set[int]) -> None:
        super().__init__()
        self.number = number
        self.asked_s = time.monotonic()
        self.open = peers
        self.answers: dict[int, CallStatus] = {}

    def answer(self, peer: int, status: CallStatus) -> None:
        self.answers[peer] = status
        self.drop(peer)

    def drop(self, peer: int) -> None:
        self.open.discard(peer)
        if not self.open:
            self.finish()


class Questions:
    """The open questions of this rank.

    Attributes:
        about_ends: Questions about the end of a rank, by that rank.
    """

    def __init__(self) -> None:
        self.about_ends: dict[int, Question] = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}

    def new(self, peers: set[int]) -> Question:
        """Return a new open question to these ranks."""
        question = Question(next(self._numbers), peers)
        with self._lock:
            self._open[question.number] = question
        return question

    def answer(self, number: int, peer: int, status: CallStatus) -> None:
        """Add an answer, if the question is still open."""
        # Under the lock, so that no answer is added after `close`, when the caller reads them.
        with self._lock:
            if (question := self._open.get(number)) is not None:
                question.answer(peer, status)

    def drop(self, peer: int) -> None:
        """Expect no answer from a rank any more."""
        with self._lock:
            questions = list(self._open.values())
        for question in questions:
            question.drop(peer)

    def close(self, question: Question) -> None:
        """Accept no more answers."""
        with self._lock:
            self._open.pop(question.number, None)


class FirstCause:
    """The first of the failures that follow one another, as far as this rank knows.

    A rank that has an error usually ends, and its end is an error on the next rank. Every control
    message about a failure carries the fresh failures that its sender knows. The first of them is
    no cause if the ranks have survived it, so the later failures count, too.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: list[tuple[float, Failure]] = []
        self._followers: dict[int, float] = {}

    def add_follower(self, peer: int) -> None:
        """Record that a call of a rank failed, so that its end may follow from that."""
        self._followers[peer] = time.monotonic()

    def add(self, failure: Failure, age_s: float = 0.0) -> None:
        """Take a failure that is so old into account."""
        at_s, peers = time.monotonic() - age_s, failure.peers
        with self._lock:
            fresh = {entry[1].peers: entry for entry in self._fresh()}
            if peers in fresh:
                # The exception of a rank replaces the end of its connection.
                known_s, known = fresh[peers]
                if known.kind != "lost" or failure.kind == "lost":
                    failure = known
                at_s = min(at_s, known_s)
            fresh[peers] = at_s, failure
            self._known = sorted(fresh.values(), key=lambda entry: entry[0])

    def find(self, since_s: float, ended: int, members: Collection[int]) -> Failure | None:
        """Return the first fresh cause of the end of a rank, not older than `since_s`.

        A failure of ranks that are no `members` is a cause only if a call of the ended rank failed.
        Otherwise that rank ended for a reason of its own.
        """
        failed_s = self._followers.get(ended, -math.inf)
        follows = failed_s >= time.monotonic() - _FOLLOWS_S
        for at_s, failure in self._fresh():
            if at_s >= since_s and (follows or not set(members).isdisjoint(failure.peers)):
                return failure
        return None

    @property
    def words(self) -> list[list[Any]]:
        """The age in seconds and the words of each fresh failure, for a control message."""
        now_s = time.monotonic()
        return [[now_s - at_s, failure.words] for at_s, failure in self._fresh()[:_MOST_CAUSES]]

    def learn(self, words: list[list[Any]] | None) -> None:
        """Take the failures that another rank knows into account."""
        for age_s, arguments in words or ():
            self.add(Failure(*arguments), max(0.0, age_s))

    def _fresh(self) -> list[tuple[float, Failure]]:
        since_s = time.monotonic() - _FOLLOWS_S
        return [entry for entry in self._known if entry[0] >= since_s]


class Failures:
    """Ranks that are gone, broken contexts, and the callbacks that wait for these.

    Attributes:
        closed: By context, the ends of the last contexts that this rank has closed.
    """

    def __init__(self) -> None:
        self.first = FirstCause()
        self.closed: dict[int, Failure] = {}
        self._lock = threading.RLock()
        self._down: dict[int, LinkDown] = {}
        self._reported: set[tuple[int, ...]] = set()
        self._failures: dict[int, Failure] = {}
        self._callbacks: dict[int, list[Callable[[Failure], None]]] = {}
        self._deferred: dict[int, Failure] = {}

    def down(self, peer: int) -> LinkDown | None:
        """Return why a rank is gone, or None."""
        return self._down.get(peer)

    def to_ask(self, ranks: Collection[int], linked: Collection[int]) -> list[int]:
        """Return the ranks that are asked why another rank has left: linked ranks first.

        A question to any other rank makes a connection, and that rank may have ended, too.
        """
        present = [rank for rank in ranks if self.down(rank) is None]
        return sorted(present, key=lambda rank: (rank not in linked, rank))[:_MOST_ASKED]

    def add_down(self, error: LinkDown) -> bool:
        """Record that a rank is gone; return whether this was unknown.

        The crash of a rank that seemed to have left counts as unknown: without a link to the rank,
        the two look alike.
        """
        with self._lock:
            known = self._down.get(error.peer)
            if known is not None and (error.left or not known.left):
                return False
            self._down[error.peer] = error
        return True

    def is_reported(self, failure: Failure) -> bool:
        """Whether a call failed because of these lost ranks before."""
        return failure.peers in self._reported

    def report(self, failure: Failure) -> bool:
        """Record that a call failed because of lost ranks; return whether it is the first call."""
        with self._lock:
            known = failure.peers in self._reported
            self._reported.add(failure.peers)
        if not known:
            self.first.add(failure)
        return not known

    def get(self, context: int) -> Failure | None:
        """Return why a context is broken, or None."""
        return self._failures.get(context)

    def is_new(self, context: int, failure: Failure) -> bool:
        """Whether a context is not broken, or this failure ends further calls."""
        known = self._failures.get(context)
        return known is None or known.after > failure.after

    def defer(self, context: int, failure: Failure) -> bool:
        """Keep a failure until the rank that detected it ends; return whether it is the first."""
        with self._lock:
            return self._deferred.setdefault(context, failure) is failure

    def is_own(self, context: int, failure: Failure, rank: int) -> bool:
        """Whether this rank reports a failure itself that ends no fewer calls than `failure`."""
        known = self._deferred.get(context)
        return known is not None and known.by == rank and known.after <= failure.after

    def take_deferred(self, rank: int) -> list[tuple[int, Failure]]:
        """Remove and return the contexts and failures that are kept until this rank ends."""
        with self._lock:
            taken = [item for item in self._deferred.items() if item[1].by == rank]
            for context, _ in taken:
                del self._deferred[context]
        return taken

    def add(self, context: int, failure: Failure) -> bool:
        """Break a context and call its callback.

        Returns:
            Whether the failure is new.
        """
        with self._lock:
            if not self.is_new(context, failure):
                return False
            self._failures[context] = failure
            callbacks = [*self._callbacks.get(context, ())]
        for callback in callbacks:
            callback(failure)
        return True

    def watch(self, context: int, callback: Callable[[Failure], None]) -> None:
        """Call `callback` when this context breaks; at once if it is broken already.

        The callback that was added last is called first.
        """
        with self._lock:
            self._callbacks.setdefault(context, []).insert(0, callback)
            failure = self._failures.get(context)
        if failure is not None:
            callback(failure)

    def forget(self, context: int, end: Failure) -> None:
        """Release the failure and the callback of a destroyed context, and keep its end."""
        with self._lock:
            self.closed[context] = self._failures.get(context, end)
            if len(self.closed) > _MOST_CLOSED:
                del self.closed[next(iter(self.closed))]
            self._failures.pop(context, None)
            self._deferred.pop(context, None)
            self._callbacks.pop(context, None)
