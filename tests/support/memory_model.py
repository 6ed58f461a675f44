"""Every execution of a small program that the memory model of C++ allows.

A thread is a generator function. It yields a Read, a Write, an Update or a Fence, and is sent the
value that a Read or an Update has read. `explore` builds each execution graph once: each read may
read each write that coherence allows, and each write may take each place in the order of its
location. The axioms are those of RC11 (Lahav et al., Repairing Sequential Consistency in C/C++11,
2017): coherence, atomicity, the order of seq_cst, and no cycle of program order and reads-from. So
what a relaxed load reads never comes from a store that depends on it. A release sequence is that
of C++20.

An execution is wrong if two accesses race, if a thread raises AssertionError, or if a thread waits
for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

PLAIN, RELAXED, ACQUIRE, RELEASE = "plain", "relaxed", "acquire", "release"
ACQ_REL, SEQ_CST = "acq_rel", "seq_cst"
_ACQUIRES = (ACQUIRE, ACQ_REL, SEQ_CST)
_RELEASES = (RELEASE, ACQ_REL, SEQ_CST)


class Read(NamedTuple):
    """Read a location; `wanted`: wait for a value for which it is true."""

    place: str
    order: str
    wanted: Callable[[Any], bool] | None = None


class Write(NamedTuple):
    """Write a location."""

    place: str
    value: Any
    order: str


class Update(NamedTuple):
    """Read a location and write `change` of its value, as one step."""

    place: str
    change: Callable[[Any], Any]
    order: str
    wanted: Callable[[Any], bool] | None = None


class Fence(NamedTuple):
    """An atomic_thread_fence."""

    order: str


Action = Read | Write | Update | Fence
Body = Generator[Action, Any, None]
Thread = Callable[[], Body]


class Broken(Exception):
    """A program has a wrong execution; the text names it and shows its events."""


class Event(NamedTuple):
    """One step of a thread in an execution."""

    action: Action
    read: Any
    written: Any
    source: int  # the write that is read; INITIAL: the first value

    @property
    def place(self) -> str:
        return "" if isinstance(self.action, Fence) else self.action.place

    @property
    def writes(self) -> bool:
        return isinstance(self.action, Write | Update)

    @property
    def reads(self) -> bool:
        return isinstance(self.action, Read | Update)


INITIAL = -1
_STRIDE = 64  # events of a thread have the numbers thread * _STRIDE + index


class Graph(NamedTuple):
    """A part of an execution that is an execution itself."""

    sent: tuple[tuple[Any, ...], ...]  # by thread: what its generator was sent
    events: dict[int, Event]
    order: dict[str, tuple[int, ...]]  # by location: its writes, after the first value
    before: dict[int, int]  # by event: the events that happen before it and itself, as bits

    def key(self) -> Any:
        sources = tuple(sorted((number, event.source) for number, event in self.events.items()))
        return sources, tuple(sorted(self.order.items()))


# What a kernel does for a futex: the comparison and the entry into the queue are one step for those
# who wake, because both hold the lock of the queue. A thread that is woken returns after the wake.
def sleep(place: str, seen: Any) -> Body:
    """Sleep while a location has a value, until a wake."""
    wakes = yield Update(f"futex {place}", lambda count: count, ACQ_REL)
    if (yield Read(place, RELAXED)) == seen:
        yield Read(f"futex {place}", ACQUIRE, lambda count: count > wakes)


def wake(place: str) -> Body:
    """Wake the threads that sleep at a location."""
    yield Update(f"futex {place}", lambda count: count + 1, ACQ_REL)


def lock(name: str) -> Body:
    """Take a mutex."""
    yield Update(f"mutex {name}", lambda _: 1, ACQUIRE, lambda held: held == 0)


def unlock(name: str) -> Body:
    """Give a mutex back."""
    yield Write(f"mutex {name}", 0, RELEASE)


class Explorer:
    """The executions of a program; a location without an entry in `first` begins with 0."""

    def __init__(self, threads: list[Thread], first: dict[str, Any] | None = None) -> None:
        self._threads = threads
        self._first = first or {}
        self._next: dict[tuple[int, tuple[Any, ...]], Action | AssertionError | None] = {}

    def explore(self) -> int:
        """Return the number of complete executions.

        Raises:
            Broken: One of them is wrong.
        """
        empty = Graph(tuple(() for _ in self._threads), {}, {}, {})
        todo, seen, complete = [empty], {empty.key()}, 0
        while todo:
            graph = todo.pop()
            following = []
            waits = False
            for thread in range(len(self._threads)):
                action = self._action(graph, thread)
                if isinstance(action, AssertionError):
                    self._complain(graph, f"thread {thread}: {action}")
                    break  # not an execution of seq_cst
                if action is not None:
                    waits = True
                    following += self._extensions(graph, thread, action)
            else:
                if not following and waits:
                    self._complain(graph, "a thread waits for ever")
                complete += not waits and _is_consistent(graph)
                for more in following:
                    key = more.key()
                    if key not in seen:
                        seen.add(key)
                        todo.append(more)
        return complete

    def _complain(self, graph: Graph, what: str) -> None:
        if _is_consistent(graph):
            raise Broken(f"{what}\n" + "\n".join(_lines(graph)))

    def _action(self, graph: Graph, thread: int) -> Action | AssertionError | None:
        key = thread, graph.sent[thread]
        if key not in self._next:
            self._next[key] = self._run(*key)
        return self._next[key]

    def _run(self, thread: int, sent: tuple[Any, ...]) -> Action | AssertionError | None:
        body = self._threads[thread]()
        try:
            action = next(body)
            for value in sent:
                action = body.send(value)
        except StopIteration:
            return None
        except AssertionError as error:
            return error
        return action

    def _extensions(self, graph: Graph, thread: int, action: Action) -> Iterator[Graph]:
        """Yield the graph with one more event, in each way that coherence allows."""
        number = thread * _STRIDE + len(graph.sent[thread])
        past = graph.before.get(number - 1, 0) if graph.sent[thread] else 0
        if isinstance(action, Fence):
            yield self._added(graph, number, Event(action, None, None, INITIAL), past)
            return
        writes = (INITIAL, *graph.order.get(action.place, ()))
        oldest = max([0, *_known(graph, action.place, past, writes)])
        if isinstance(action, Write):
            for at in range(oldest + 1, len(writes) + 1):
                # Nothing may come between the write that an Update has read and its own.
                if at == len(writes) or not _is_update(graph, writes[at]):
                    event = Event(action, None, action.value, INITIAL)
                    yield self._added(graph, number, event, past, at)
            return
        for at in range(oldest, len(writes)):
            source = writes[at]
            value = graph.events[source].written if source != INITIAL else self._value(action.place)
            if action.wanted is not None and not action.wanted(value):
                continue
            if isinstance(action, Read):
                yield self._added(graph, number, Event(action, value, None, source), past)
            elif at + 1 == len(writes) or not _is_update(graph, writes[at + 1]):
                event = Event(action, value, action.change(value), source)
                yield self._added(graph, number, event, past, at + 1)

    def _value(self, place: str) -> Any:
        return self._first.get(place, 0)

    def _added(
        self, graph: Graph, number: int, event: Event, past: int, at: int | None = None
    ) -> Graph:
        thread = number // _STRIDE
        sent = list(graph.sent)
        sent[thread] = (*sent[thread], event.read)
        events = graph.events | {number: event}
        order = graph.order
        if at is not None:
            writes = order.get(event.place, ())
            order = order | {event.place: (*writes[: at - 1], number, *writes[at - 1 :])}
        before = past | 1 << number
        for source in _acquired(events, number):
            before |= _released(graph, source)
        more = Graph(tuple(sent), events, order, graph.before | {number: before})
        for other, earlier in graph.events.items():
            is_conflict = earlier.place == event.place and (earlier.writes or event.writes)
            if (
                is_conflict
                and not before >> other & 1
                and PLAIN in (_order(event), _order(earlier))
            ):
                self._complain(more, f"accesses to {event.place!r} race")
        return more


def _order(event: Event) -> str:
    return event.action.order


def _is_update(graph: Graph, number: int) -> bool:
    return isinstance(graph.events[number].action, Update)


def _known(graph: Graph, place: str, past: int, writes: tuple[int, ...]) -> Iterator[int]:
    """Yield the positions of the writes that have happened, or were read, before an event."""
    for other, event in graph.events.items():
        if past >> other & 1 and event.place == place:
            yield writes.index(other if event.writes else event.source)


def _acquired(events: dict[int, Event], number: int) -> Iterator[int]:
    """Yield the writes from which an event acquires."""
    event = events[number]
    if _order(event) not in _ACQUIRES:
        return
    if event.reads:
        yield event.source
    elif isinstance(event.action, Fence):
        for earlier in range(number // _STRIDE * _STRIDE, number):
            if events[earlier].reads and _order(events[earlier]) != PLAIN:
                yield events[earlier].source


def _released(graph: Graph, source: int) -> int:
    """Return what happens before a read that acquires from a write, by its release sequence."""
    before = 0
    while source != INITIAL:
        event = graph.events[source]
        if _order(event) in _RELEASES:
            before |= graph.before[source]
        elif _order(event) != PLAIN:
            for earlier in range(source // _STRIDE * _STRIDE, source):
                fence = graph.events[earlier].action
                if isinstance(fence, Fence) and fence.order in _RELEASES:
                    before |= graph.before[earlier]
        source = event.source if event.reads else INITIAL
    return before


def _lines(graph: Graph) -> Iterator[str]:
    for number, event in sorted(graph.events.items()):
        values = f" reads {event.read!r}" if event.reads else ""
        values += f" writes {event.written!r}" if event.writes else ""
        kind = type(event.action).__name__
        yield f"  thread {number // _STRIDE}: {kind} {event.place} {_order(event)}{values}"


# ---- the order of seq_cst ---------------------------------------------------------------------

Relation = dict[int, set[int]]


def _is_consistent(graph: Graph) -> bool:
    """Whether the relation psc of RC11 has no cycle."""
    events = graph.events
    fences = {n for n, e in events.items() if isinstance(e.action, Fence) and _order(e) == SEQ_CST}
    ordered = {n for n, e in events.items() if _order(e) == SEQ_CST} - fences
    if len(fences) + len(ordered) < 2:
        return True
    program: Relation = {
        n: {m for m in events if m // _STRIDE == n // _STRIDE and m > n} for n in events
    }
    happens: Relation = {n: set() for n in events}
    for later, bits in graph.before.items():
        for n in events:
            if n != later and bits >> n & 1:
                happens[n].add(later)
    writes: Relation = {n: set() for n in events}
    reads: Relation = {n: set() for n in events}
    after: Relation = {n: set() for n in events}
    for place_writes in graph.order.values():
        for at, n in enumerate(place_writes):
            writes[n] |= set(place_writes[at + 1 :])
    for n, event in events.items():
        if event.reads:
            if event.source != INITIAL:
                reads[event.source].add(n)
                after[n] |= writes[event.source] - {n}
            else:
                after[n] |= set(graph.order.get(event.place, ())) - {n}
    eco = _closed(_joined(reads, writes, after))
    elsewhere = {n: {m for m in program[n] if events[m].place != events[n].place} for n in events}
    same = {n: {m for m in happens[n] if events[m].place == events[n].place != ""} for n in events}
    scb = _joined(program, _then(_then(elsewhere, happens), elsewhere), same, writes, after)
    optional = {n: happens[n] | {n} for n in events}
    psc: Relation = {n: set() for n in fences | ordered}
    for n in psc:
        begin = optional[n] if n in fences else {n}
        reached = {m for at in begin for m in scb[at]}
        psc[n] |= reached & ordered
        psc[n] |= {f for m in reached for f in optional[m] & fences}
        if n in fences:
            far = {m for at in happens[n] for m in eco[at]}
            psc[n] |= (happens[n] | {f for m in far for f in happens[m]}) & fences
    closed = _closed(psc)
    return not any(n in closed[n] for n in closed)


def _joined(*relations: Relation) -> Relation:
    return {n: set().union(*(relation[n] for relation in relations)) for n in relations[0]}


def _then(first: Relation, second: Relation) -> Relation:
    return {n: {k for m in first[n] for k in second[m]} for n in first}


def _closed(relation: Relation) -> Relation:
    closed = {n: set(m) for n, m in relation.items()}
    for middle in closed:
        for n in closed:
            if middle in closed[n]:
                closed[n] |= closed[middle]
    return closed
