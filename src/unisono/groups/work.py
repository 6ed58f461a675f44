"""The handle of one submitted operation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

from unisono.backends import Pending
from unisono.base.completion import Completion
from unisono.base.deadline import Deadline, Timeout, to_seconds
from unisono.base.streams import explicit_stream
from unisono.errors import CollectiveTimeoutError
from unisono.groups.future import Future

__all__ = ["Work"]


class Work:
    """One operation on its way. Dropping it is safe: the operation goes on.

    Source: torch.distributed.Work (2.13).
    """

    def __init__(self, pending: Pending, op: str) -> None:
        self._pending = pending
        self._op = op

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done; return True, or raise its error.

        In a stream (`with unisono.stream(s)`) it does not block: the stream does nothing more
        until the operation is done, and has its error. With a `timeout` it blocks there, too.

        Args:
            timeout: Seconds or timedelta; None or zero for no limit but the operation's own.

        Raises:
            CollectiveTimeoutError: `timeout` passed first. The operation goes on and can be
                waited for again. (With Gloo the group is lost then.)
        """
        limit = None if timeout is None or to_seconds(timeout) == 0 else Deadline(timeout)
        stream = explicit_stream()
        if stream is None or limit is not None:
            return self.wait_on_host(limit)
        stream.submit(self.wait_on_host)
        return True

    def wait_on_host(self, limit: Deadline | None = None) -> bool:
        """Block the calling thread, whatever the current stream is; otherwise as `wait`."""
        pending = self._pending
        if not pending.wait_or_expire(limit):
            assert limit is not None
            raise CollectiveTimeoutError(
                f"{self._op} was not done after {limit.timeout_s:g} s of waiting; it goes on"
            )
        if pending.error is not None:
            raise pending.error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly; never blocks."""
        return self._pending.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._pending.done() and self._pending.error is None

    def exception(self) -> BaseException | None:
        """Return its error, or None."""
        return self._pending.error if self._pending.done() else None

    def result(self) -> list[Any]:
        """Return the arrays that hold the result; meaningful once it is done."""
        return self._pending.outputs

    def source_rank(self) -> int:
        """Return the global rank a receive got its message from, -1 if not known."""
        return -1 if self._pending.source is None else self._pending.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait for it; the default one is the calling thread."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future:
        """Return a future of the result arrays."""
        future = Future((self._pending,), self._op)

        def ended(pending: Completion) -> None:
            if pending.error is not None:
                future.set_exception(pending.error)
            else:
                future.set_result(self._pending.outputs)

        self._pending.add_callback(ended)
        return future

    def __await__(self) -> Generator[Any, None, bool]:
        # Here, because it is half of what importing unisono would cost, and few programs await.
        import asyncio

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not done.done():
                done.set_result(None)

        def wake(completion: Completion) -> None:
            # The loop is closed if nobody waits any more, as after asyncio.wait_for.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        self._pending.add_callback(wake)
        own = self._pending.deadline
        watch = None
        if own is not None and own.timeout_s <= threading.TIMEOUT_MAX:
            watch = loop.call_later(own.remaining(), self._pending.expire)
        try:
            yield from done.__await__()
        finally:
            if watch is not None:
                watch.cancel()
        return self.wait_on_host()

    def __repr__(self) -> str:
        if not self._pending.done():
            return f"<Work {self._op} pending>"
        return f"<Work {self._op} {'done' if self.is_success() else 'failed'}>"
