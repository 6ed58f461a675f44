"""One send or receive in C++, and what ends it. `NativeMessages` starts it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.transports.messages import Failure
from unisono.transports.transfers import Transfer

Outcome = tuple[int, int, int, int, int, int, Any]
"""(number, code, source, nbytes, info, tag, message or None) of a send or receive."""


_OF_SUB_CLASSES: tuple[str, ...] = ()


class Started(Completion):
    """A send or receive in C++; a thread that waits for it moves its bytes.

    The attributes are slots of the sub-classes, because only one base of a class can have slots.

    Attributes:
        peer: Global rank of the other end; None for any.
        context: Number of the group's context.
        among: Ranks that may send, if `peer` is None.
        receives: Whether it is a receive.
        number: Number in C++; 0: it has ended at once.
        outcomes: Holds the outcome as soon as it is known.
        cause: The error of a cancelled one; None: `Cancelled`.
    """

    __slots__ = _OF_SUB_CLASSES

    peer: int | None
    context: int
    among: frozenset[int]
    cause: BaseException | None

    def begin(self, messages: Any, *, receives: bool) -> None:
        """Belong to these messages, which start it now."""
        self._messages = messages
        self._quiet = self.receives = receives
        self.number, self.cause = 0, None
        self.outcomes: list[Outcome] = []

    def done(self) -> bool:
        # A thread that took the outcome may have been interrupted before it called `finish`.
        if not self._done and self.outcomes:
            self._messages.finish(self)
        return self._done

    def wait_until(self, deadline: Deadline | None) -> bool:
        return Started.done(self) or bool(self._messages.wait(self, deadline))

    def watch(self) -> None:
        """Make sure that it ends without a waiting thread."""
        if self._quiet and not Started.done(self):
            self._quiet = False
            self._messages.watch(self)

    @abstractmethod
    def is_ended_by(self, failure: Failure) -> bool:
        """Whether the failure of its context ends it."""

    @abstractmethod
    def end(self, outcome: Outcome, status: BaseException | None) -> None:
        """Finish with this outcome; `status`: why it has failed."""


class NativeTransfer(Started, Transfer):
    """A transfer in C++."""

    __slots__ = ("_messages", "_quiet", "cause", "number", "outcomes", "receives")

    def is_ended_by(self, failure: Failure) -> bool:
        return failure.ends(*self.tag)

    def end(self, outcome: Outcome, status: BaseException | None) -> None:
        if status is None and self.receives:
            _, _, self.peer, self.nbytes, self.info, tag, memory = outcome
            self.tag = (self.tag[0], tag)
            self.into = self.into if memory is None else memory.data
        self.finish(status)
