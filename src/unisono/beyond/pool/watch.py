"""What the ranks of a pool do: a thread of each rank tells it, also while its call waits."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import threading
from collections.abc import Collection, Iterator
from multiprocessing import Pipe
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from unisono.core.backends.p2p import Message
from unisono.core.base.deadline import Deadline
from unisono.core.base.source.tracebacks import is_own
from unisono.core.base.source.where import is_of_user
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current
from unisono.core.operations.work import Future, Work, wait_all

_LOOK_S = 1.0
"""How often to ask what the ranks do."""

_CALLED = ("unisono", "torch.distributed")
"""How the names of modules begin whose functions call groups."""

# Of more values it is unknown what a thread may call.
_MOST_VALUES = 10_000

_RECEIVES = ("recv", "recv_array", "probe")


class WaitingCall(NamedTuple):
    """A collective call or a receive in which a rank waits.

    Attributes:
        key: Of the group.
        seq: Number among the collectives of the group, or among the messages of the rank.
        op: Its name.
        members: Ranks of the group; for a receive, those that may send.
    """

    key: str
    seq: int
    op: str
    members: tuple[int, ...]

    @property
    def is_receive(self) -> bool:
        """Whether it waits for a message."""
        return self.op in _RECEIVES

    def __str__(self) -> str:
        return f"send for this {self.op}" if self.is_receive else f"{self.op} #{self.seq}"


class RankActivity(NamedTuple):
    """What a rank does.

    Attributes:
        number: Of the question.
        waits: Collective calls and receives in which it waits.
        calls: The number of its last call, by the key of the group.
        sends: Keys of groups in which it sends.
        place: Line of the program; "" if unknown.
        is_alone: Whether no other thread may make calls.
    """

    number: int
    waits: list[WaitingCall]
    calls: dict[str, int]
    sends: list[str]
    place: str
    is_alone: bool


def open_backends() -> list[tuple[ProcessGroup, Any]]:
    """Return the groups of this process, with their backends."""
    groups = list(current().groups.values())
    return [(group, backend) for group in groups for backend in group.backends.values()]


def answer_on_thread(link: Any) -> None:
    """Answer the questions that come over a link, on a thread."""

    def serve() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number = link.recv()
                answer = RankActivity(number, [], {}, [], "", False)
                with contextlib.suppress(Exception):  # a group may be closed meanwhile
                    answer = _activity(number)
                link.send(answer)

    threading.Thread(target=serve, name="unisono-watch", daemon=True).start()


def _activity(number: int) -> RankActivity:
    waits: list[WaitingCall] = []
    calls: dict[str, int] = {}
    sends: list[str] = []
    main = threading.main_thread()
    frame = _frame_of(main)
    here = frame and (frame.f_code.co_filename, frame.f_lineno)
    works = _waited_by(main)
    for group, backend in open_backends():
        calls[group.key] = max(calls.get(group.key, 0), backend.last_number())
        if backend.trace is None:
            continue
        waited = {_peer_and_tag(work) for work in works if work._group is group}
        for record in backend.trace.records(only_open=True):
            if record.op in _RECEIVES:
                # An asynchronous receive is no wait before its `wait`. The thread has then left its
                # line, as a rule.
                if (record.file, record.line) == here or (record.peer, record.tag) in waited:
                    me = group.ranks[group.rank()]
                    others = (each for each in group.ranks if each != me)
                    peers = tuple(others) if record.peer is None else (record.peer,)
                    waits.append(WaitingCall(group.key, record.seq, record.op, peers))
            elif record.is_message:
                sends.append(group.key)
            elif record.wait_begun_ns is not None:
                waits.append(WaitingCall(group.key, record.seq, record.op, tuple(group.ranks)))
    is_alone = not any(_may_call(each) for each in threading.enumerate() if each is not main)
    return RankActivity(number, waits, calls, sends, _place_of(frame), is_alone)


def _waited_by(thread: threading.Thread) -> list[Work]:
    """Return the works whose ends a thread waits for."""
    works: list[Work] = []
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and is_own(frame.f_code.co_filename):
        names = frame.f_locals
        me = names.get("self")
        if isinstance(me, (Work, Future)):
            found = me._calls if isinstance(me, Future) else (me,)
            works += [work for work in found if isinstance(work, Work)]
        elif frame.f_code is wait_all.__code__:
            works += [work for work in names["works"] if work is not None]
        frame = frame.f_back
    return works


def _peer_and_tag(work: Work) -> tuple[int | None, int | None]:
    """Return the global rank and the tag of a message."""
    end: Any = work._end
    if isinstance(end, Message):
        return end._words[2:]
    return getattr(end, "peer", None), getattr(end, "tag", None)


def _may_call(thread: threading.Thread) -> bool:
    """Return whether a thread may make calls: not, if it is a daemon whose code names no group.

    tqdm leaves such a thread behind, and a program may have one that shows how far it is.
    """
    if thread.name.startswith("unisono"):
        return False
    frame, values = sys._current_frames().get(thread.ident or 0), []
    while thread.daemon and frame is not None:
        if is_of_user(frame.f_code.co_filename):
            values += _named_by(frame.f_code, frame.f_globals)
        values += frame.f_locals.values()
        frame = frame.f_back
    return not thread.daemon or _reaches_calls(values)


def _reaches_calls(values: list[Any]) -> bool:
    """Whether code that has these values may call a group, as far as functions name one another."""
    seen: set[int] = set()
    while values:
        each = values.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        is_code = isinstance(each, (FunctionType, type))
        of = (
            each.__name__
            if isinstance(each, ModuleType)
            else (each if is_code else type(each)).__module__
        )
        if str(of).startswith(_CALLED) or len(seen) > _MOST_VALUES:
            return True
        if isinstance(each, MethodType):
            values += [each.__func__, each.__self__]
        elif isinstance(each, FunctionType):
            if is_of_user(each.__code__.co_filename):
                values += _named_by(each.__code__, each.__globals__)
                values += [getattr(cell, "cell_contents", None) for cell in each.__closure__ or ()]
        elif isinstance(each, (list, tuple, set, frozenset, dict)):
            values += each.values() if isinstance(each, dict) else each
        elif not isinstance(each, ModuleType) or is_of_user(each.__file__ or ""):
            kinds = (each if isinstance(each, type) else type(each)).__mro__
            values += [found for kind in kinds for found in vars(kind).values()]
            values += getattr(each, "__dict__", {}).values()
    return False


def _named_by(code: CodeType, space: dict[str, Any]) -> list[Any]:
    """Return the global values whose names code has, and the modules that it imports."""
    found = [space.get(name, sys.modules.get(name)) for name in code.co_names]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += _named_by(inner, space)
    return found


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the frame of the program in which a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _place_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"line {frame.f_lineno} of {frame.f_code.co_name}" + (text and f": {text}")


class RankWatch:
    """Asks the ranks what they do.

    Attributes:
        activities: The last answers, by rank.
        called: What ranks have been called with, by rank.
        busy: Ranks that were in a call at an interrupt.
    """

    def __init__(self) -> None:
        self.activities: dict[int, RankActivity] = {}
        self.called: dict[int, str] = {}
        self.busy: list[int] = []
        self._due = Deadline(_LOOK_S)
        self._links: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._asked: dict[int, int] = {}
        self._first = 0
        self._suspects: dict[tuple[int, int, WaitingCall], tuple[int, int]] = {}

    @contextlib.contextmanager
    def opened(self, rank: int) -> Iterator[Any]:
        """Yield the end for a new process of a rank."""
        ours, theirs = Pipe()
        if rank in self._links:
            self._links[rank].close()
        self._links[rank] = ours
        self._asked.pop(rank, None)
        with theirs:
            yield theirs

    def close(self) -> None:
        """Close the links."""
        for link in self._links.values():
            link.close()

    def begin(self) -> None:
        """Forget what the ranks did in earlier calls."""
        for each in (self.activities, self.called, self.busy, self._suspects):
            each.clear()
        self._due = Deadline(_LOOK_S)
        self._first = next(self._numbers)

    def looks(self) -> bool:
        """Take the answers that have come, and ask again, if it is time; return whether it is."""
        if not self._due.expired():
            return False
        self._due = Deadline(_LOOK_S)
        for rank, link in self._links.items():
            with contextlib.suppress(EOFError, OSError):
                while link.poll(0):
                    answer = link.recv()
                    del self._asked[rank]
                    if answer.number > self._first:
                        self.activities[rank] = answer
                if rank not in self._asked:
                    self._asked[rank] = next(self._numbers)
                    link.send(self._asked[rank])
        return True

    def missing(self, busy: Collection[int]) -> list[tuple[int, WaitingCall]]:
        """Return ranks that make no call, and the calls of others that wait for them for ever.

        A rank that has no thread and makes no call makes no collective, so a call that it has not
        begun cannot end. Nor can a receive if no rank sends. The ranks are asked again before that
        counts.
        """
        suspects = {}
        for rank in busy:
            for call in self._of(rank).waits:
                left = [
                    each for each in call.members if each not in busy and self._left(each, call)
                ]
                if call.is_receive and len(left) < len(call.members):
                    continue
                for member in left:
                    numbers = self._of(rank).number, self._of(member).number
                    suspects[rank, member, call] = self._suspects.get((rank, member, call), numbers)
        self._suspects = suspects
        return [
            (member, call)
            for (rank, member, call), (asked, asked_other) in suspects.items()
            if self._of(rank).number > asked and self._of(member).number > asked_other
        ]

    def _left(self, rank: int, call: WaitingCall) -> bool:
        """Return whether a rank that makes no call takes no part in a call of another."""
        activity = self._of(rank)
        if call.is_receive:
            return activity.is_alone and call.key not in activity.sends
        return activity.is_alone and activity.calls.get(call.key, 0) < call.seq

    def _of(self, rank: int) -> RankActivity:
        return self.activities.get(rank, RankActivity(-1, [], {}, [], "", False))

    def described(self) -> str:
        """Return what each rank did before an interrupt, or "" if the call was short."""
        lines = []
        for rank, activity in sorted(self.activities.items()):
            if rank not in self.busy:
                lines.append(f"rank {rank} made no call, or had returned")
                continue
            ops = "".join(f"in {call.op}, " for call in activity.waits[:1])
            lines.append(f"rank {rank} was {ops}at {activity.place or 'an unknown line'}")
        return "\n".join(lines)
