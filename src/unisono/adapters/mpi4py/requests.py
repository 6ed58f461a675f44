"""Requests: calls under way, each made of works of unisono and of what to do at their end.

Also the forms of a call: it is a function of a handle's object that returns an `Ongoing`, and its
blocking, started and planned methods are made of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, Self

from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    UNDEFINED,
    exception_of,
    require,
    translated,
)
from unisono.adapters.mpi4py.handles import Handle, Status
from unisono.core.base.deadline import Deadline
from unisono.core.operations.work import Work
from unisono.errors import UnisonoError

Finish = Callable[["Ongoing"], "list[Work] | None"]
EMPTY = ANY_SOURCE, ANY_TAG, 0


def _moment() -> Deadline:
    return Deadline(0.0005)


class Ongoing:
    """A call under way.

    Its works are waited for; then `finish` stores the result, or returns the works of a next part.

    Attributes:
        value: The result of a call for objects.
        status: The caller's, of the blocking form.
        found: Source, tag and bytes of the message of a receive.
        is_own: Whether it is a synchronous send to this rank.
    """

    value: Any = None
    status: Status | None = None
    found: tuple[int, int, int] = EMPTY
    is_cancelled = is_done = is_own = False
    _error: BaseException | None = None

    def __init__(self, works: Sequence[Work] = (), finish: Finish | None = None) -> None:
        self.works, self._finish = list(works), finish

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return a call that has ended, with a result."""
        call = cls()
        call.value, call.is_done = value, True
        return call

    def _step(self) -> None:
        """Go on after the end of the works."""
        more = None
        if self._finish is not None:
            try:
                more = self._finish(self)
            except BaseException as error:
                self._error = error
        else:
            self._error = next((e for w in self.works if (e := w.exception())), None)
        self.works = more or []
        if not more:
            self.is_done, self._finish = True, None

    def test(self) -> bool:
        """Return whether the call has ended; goes on with it."""
        while not self.is_done and all(map(self._has_ended, self.works)):
            self._step()
        return self.is_done

    def _has_ended(self, work: Work) -> bool:
        # Only this process can end it. A thread that waits sees the end itself, so that ends come
        # in the order of the messages, and without another thread.
        return work._pending.wait_or_expire(_moment()) if self.is_own else work.is_completed()

    def wait_a_moment(self) -> bool:
        """Wait a little for the first work that has not ended; return whether there is one."""
        for work in self.works:
            if not work.is_completed():
                work._pending.wait_or_expire(_moment())
                return True
        return False

    def wait(self, name: str = "") -> None:
        """Wait for the end, and raise the error of the call; works end by their time-outs.

        Args:
            name: Of the call, for its error.
        """
        while not self.is_done:
            for work in self.works:
                work._pending.wait_or_expire(None)
            self._step()
        if self._error is not None:
            error, self._error = self._error, None
            raise exception_of(error, name) from error

    def then(self, action: Callable[[], object]) -> Self:
        """Do something more at the end; return the call."""
        inner = self._finish

        def finish(call: Ongoing) -> None:
            if inner is not None:
                inner(call)
            action()

        self._finish = finish
        return self

    def cancel(self) -> None:
        """Do nothing: what was sent can be received."""


class Persistent:
    """The object of a persistent request: makes a call at each start."""

    def __init__(self, make: Callable[[], Ongoing]) -> None:
        self.make = make
        self.call: Ongoing | None = None


def _note(call: Ongoing, status: Status | None) -> None:
    if status is not None:
        status.set(*call.found, call.is_cancelled)


class Request(Handle, root=True):
    """A call under way."""

    error = "ERR_REQUEST"

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls, request)
        if cls is Prequest and self.ob is not None and not isinstance(self.ob, Persistent):
            raise TypeError("expecting a persistent request")
        if cls is Grequest and self.ob is not None:
            raise TypeError("expecting a generalized request")
        return self

    def _call(self) -> Ongoing | None:
        """Return the call, None of a null or idle request."""
        return self.ob.call if isinstance(self.ob, Persistent) else self.ob

    def _end(self) -> None:
        if isinstance(self.ob, Persistent):
            self.ob.call = None
        else:
            self.ob = None

    def _wait(self, status: Status | None) -> Any:
        call = self._call()
        if call is None:
            if status is not None:
                status.set(*EMPTY)
            return None
        try:
            call.wait()
        finally:
            if call.is_done:
                self._end()
        _note(call, status)
        return call.value

    def Wait(self, status: Status | None = None) -> Literal[True]:
        """Wait for the end."""
        self._wait(status)
        return True

    def wait(self, status: Status | None = None) -> Any:
        """Wait for the end, and return the object that was received."""
        return self._wait(status)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the call has ended."""
        return self.test(status)[0]

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether the call has ended, and the object that was received."""
        call = self._call()
        if call is not None and not call.test():
            return False, None
        return True, self._wait(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the call has ended; it stays."""
        call = self._call()
        if call is None:
            if status is not None:
                status.set(*EMPTY)
            return True
        if call.test():
            _note(call, status)
        return call.is_done

    get_status = Get_status

    def Cancel(self) -> None:
        """Cancel a message."""
        _ = self.live
        if (call := self._call()) is not None:
            call.cancel()

    cancel = Cancel

    # ---- several --------------------------------------------------------------------------

    def _take(self, status: Status | None, keeps: bool) -> Any:
        return self.Get_status(status) if keeps else self._wait(status)

    @staticmethod
    def _first_ended(requests: Sequence[Request]) -> Any:
        ended = (k for k, r in enumerate(requests) if (c := r._call()) is not None and c.test())
        return next(ended, None)

    @classmethod
    def _any(cls, requests: Sequence[Request], status: Any, waits: bool, keeps: bool) -> Any:
        """Return place, flag and object of one that has ended."""
        if all(r._call() is None for r in requests):
            if status is not None:
                status.set(*EMPTY)
            return UNDEFINED, True, None
        while True:
            if cls._first_ended(requests) is not None:
                # Again: one before it, whose message came first, may have ended meanwhile.
                at = cls._first_ended(requests)
                return at, True, requests[at]._take(status, keeps)
            if not waits:
                return UNDEFINED, False, None
            _wait_a_moment(requests)

    @classmethod
    def _all(cls, requests: Sequence[Request], statuses: Any, waits: bool, keeps: bool) -> Any:
        """Return whether all have ended, and their objects."""
        if not waits:
            ended = [(c := r._call()) is None or c.test() for r in requests]
            if not all(ended):
                return False, None
        made = [Status() for _ in requests]
        values, first = [], None
        for request, status in zip(requests, made, strict=True):
            try:
                values.append(request._take(status, keeps))
            except BaseException as error:
                values.append(None)
                first = first or error
        _give(made, statuses)
        if first is not None:
            raise first
        return True, values

    @classmethod
    def _some(cls, requests: Sequence[Request], statuses: Any, waits: bool, keeps: bool) -> Any:
        """Return places and objects of those that have ended; None if none is active."""
        if all(r._call() is None for r in requests):
            return None, None
        while True:
            ended = [
                at for at, r in enumerate(requests) if (c := r._call()) is not None and c.test()
            ]
            if ended or not waits:
                break
            _wait_a_moment(requests)
        return ended, cls._all([requests[at] for at in ended], statuses, True, keeps)[1]


def _add_several() -> None:
    """Add the calls for several requests: which of the results each returns."""
    picks = {
        "_any": {"wait": (0, 2), "Wait": (0,), "test": (0, 1, 2), "Test": (0, 1)},
        "_all": {"wait": (1,), "Wait": (0,), "test": (0, 1), "Test": (0,)},
        "_some": {"wait": (0, 1), "Wait": (0,), "test": (0, 1), "Test": (0,)},
    }
    for kind, forms in picks.items():
        keeping = forms["Test"]
        for verb, places in {**forms, "Get_status_": keeping, "get_status_": keeping}.items():
            name = verb + kind[1:]
            made = _several(kind, itemgetter(*places), verb.lower() == "wait", verb.endswith("_"))
            made.__name__, made.__doc__ = name, f"See MPI_{name.capitalize()}."
            setattr(Request, name, classmethod(made))


def _several(kind: str, pick: Callable[[Any], Any], waits: bool, keeps: bool) -> Any:
    def several(cls: Any, requests: Sequence[Request], statuses: Any = None, **how: Any) -> Any:
        statuses = how.pop("status", statuses)
        if how:
            raise TypeError(f"unexpected arguments {sorted(how)}")
        return pick(getattr(cls, kind)(requests, statuses, waits, keeps))

    return several


_add_several()


def _give(made: list[Status], statuses: Any) -> None:
    """Fill the caller's statuses; a list gets as many as there are requests."""
    if statuses is None:
        return
    if isinstance(statuses, list):
        statuses += [Status() for _ in range(len(made) - len(statuses))]
    for status, each in zip(statuses, made, strict=False):
        status._fields[:] = each._fields


def _wait_a_moment(requests: Sequence[Request]) -> None:
    """Wait a little for the first call that has not ended."""
    calls = (call for request in requests if (call := request._call()) is not None)
    any(call.wait_a_moment() for call in calls)


class Prequest(Request):
    """A persistent request."""

    def Start(self) -> None:
        """Start the call."""
        plan = self.live
        require(plan.call is None, "ERR_REQUEST", "the request is active")
        plan.call = plan.make()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several calls."""
        for request in requests:
            request.Start()


class Grequest(Request):
    """A generalized request; there are none."""


REQUEST_NULL = Request()


# ---- the forms of calls ----


def add_calls(cls: type, calls: Mapping[str, Callable[..., Ongoing]], forms: str) -> None:
    """Add the forms of calls, each a function of the handle's object, unless the class has them."""
    for name, function in calls.items():
        prefix = "i" if name.islower() else "I"
        made = {
            "now": (name, _now),
            "start": (f"{prefix}{name[0].lower()}{name[1:]}", _started),
            "plan": (f"{name}_init", _planned),
        }
        for called, form in (made[each] for each in forms.split()):
            if called not in vars(cls):
                method = form(function)
                method.__name__, method.__qualname__ = called, f"{cls.__name__}.{called}"
                method.__doc__ = getattr(function, "func", function).__doc__
                setattr(cls, called, method)


def _now(function: Callable[..., Ongoing]) -> Any:
    def now(self: Any, *arguments: Any, **how: Any) -> Any:
        try:
            call = function(self.live.now, *arguments, **how)
        except (UnisonoError, MemoryError) as error:
            raise exception_of(error, now.__name__) from error
        call.wait(now.__name__)
        _note(call, call.status)
        return call.value

    return now


def _without_status(function: Callable[..., Ongoing]) -> inspect.Signature:
    shape = inspect.signature(function)
    return shape.replace(parameters=[p for k, p in shape.parameters.items() if k != "status"])


def _started(function: Callable[..., Ongoing]) -> Any:
    shape = _without_status(function)
    most = len(shape.parameters) - 1

    def started(self: Any, *arguments: Any, **how: Any) -> Request:
        if len(arguments) > most or "status" in how:
            shape.bind(self, *arguments, **how)
        with translated():
            return Request.of(function(self.live, *arguments, **how))

    return started


def _kept(message: Any) -> Any:
    """Return a message as it is now: the lists in it may change before the start."""
    return [_kept(each) for each in message] if isinstance(message, list) else message


def _planned(function: Callable[..., Ongoing]) -> Any:
    shape = _without_status(function)

    def planned(self: Any, *arguments: Any, info: Any = None, **how: Any) -> Prequest:
        plan = shape.bind(
            self.live, *map(_kept, arguments), **{k: _kept(v) for k, v in how.items()}
        )
        with translated():
            function(self.live.rehearsal, *plan.args[1:], **plan.kwargs)
        return Prequest.of(Persistent(lambda: function(*plan.args, **plan.kwargs)))

    return planned
