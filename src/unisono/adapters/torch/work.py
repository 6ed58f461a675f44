"""torch.distributed.Work over a unisono work."""

from __future__ import annotations

import sys
from collections.abc import Generator
from datetime import timedelta
from threading import get_ident
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

from unisono.adapters.torch.callbacks import CallbackThreads
from unisono.adapters.torch.errors import for_torch
from unisono.adapters.torch.futures import listed
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.work import Work
from unisono.errors import UnisonoError

__all__ = ["Caller", "TorchWork", "torch_work"]

_NO_LIMIT = timedelta(0)
# The Python function that calls C++ in a backward pass.
_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward", None)


class Caller(Protocol):
    """torch's process group that makes a call.

    Attributes:
        unisono: The unisono process group.
        callbacks: The threads for callbacks that users chain to a future.
    """

    unisono: ProcessGroup
    callbacks: CallbackThreads


class TorchWork(torch_dist.Work):
    """One operation that was submitted; it is safe to drop the object. `torch_work` makes it.

    Source: torch.distributed.Work (2.13).
    """

    __slots__ = ("_asker", "_caller", "_future", "_gate", "_outputs", "_work")

    _work: Work
    _outputs: list[Any]
    _caller: Caller
    _future: torch.futures.Future[list[Any]] | None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until done; return True, or raise the operation's error."""
        limit = timeout if timeout > _NO_LIMIT else None
        try:
            self._work.wait(limit)
        except UnisonoError as error:
            raise for_torch(error) from None
        return True

    def synchronize(self) -> None:
        """Make the current stream wait; the CPU has no stream, so this is `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `synchronize`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error; never block."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        error = self._work.exception()
        return None if error is None else for_torch(error)

    def result(self) -> list[Any]:
        """Return the tensors that hold the result."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank in the group whose message was received; -1 if unknown."""
        source = self._work.source_rank()
        return -1 if source < 0 else self._caller.unisono.ranks.index(source)

    _source_rank = source_rank

    def _get_duration(self) -> float:
        """Return how long the operation took, in milliseconds."""
        return self._work._get_duration()

    def _get_op_type(self) -> int:
        """Return the value of c10d's OpType."""
        return self._work._get_op_type()

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future of the list of result tensors.

        Chained callbacks run on a separate thread and may wait for other operations, as torch's
        PowerSGD hook does. DDP without such a hook only waits. In this case no other thread has to
        wake.
        """
        if self._future is None:
            # The C++ class, which is made in a fourth of the time that its Python class takes.
            self._gate: Any = torch._C.Future([])
            # An error that `_outcome` raises becomes an error of the C++ future. With
            # `set_exception` it would stay a Python value, on which DDP fails with a segmentation
            # fault.
            future = self._gate.then(self._outcome)
            typed = self._work._op == "all_reduce" and self._outputs[0].dtype is torch.float16
            self._future = listed(future, self._outputs) if typed else future
            self._asker = get_ident()
            self._work.on_end(self._open if _is_asked_by_ddp() and not typed else self._ended)
            self._asker = 0
        return self._future

    def _ended(self) -> None:
        # Nothing is chained yet if the operation ended before it was asked for its future.
        if self._asker == get_ident():
            self._open()
        else:
            self._caller.callbacks.run(self._open)

    def _open(self) -> None:
        self._gate.set_result(None)

    def _outcome(self, gate: Any) -> list[Any]:
        if (error := self.exception()) is not None:
            raise error.with_traceback(_top)
        return self._outputs


def _alone() -> Generator[None]:
    yield


# To the text of an error pybind11 adds the frame that raised it, and all outer frames. A generator
# that waits has none.
_generator: Any = _alone()
next(_generator)
_top = TracebackType(None, _generator.gi_frame, 0, _generator.gi_frame.f_lineno)


def torch_work(work: Work, outputs: list[Any], caller: Caller) -> TorchWork:
    """Return torch's work; a constructor in Python would take as long again.

    Args:
        work: The unisono work.
        outputs: The tensors that hold the result.
        caller: torch's process group that made the call.
    """
    made = TorchWork()
    made._work = work
    made._outputs = outputs
    made._caller = caller
    made._future = None
    return made


def _is_asked_by_ddp() -> bool:
    """Return whether C++ calls in a backward pass, so that no Python code is chained to the future.

    No argument names the caller. But a Python caller has a frame between this module's frames and
    the frame of backward, and C++ has no frame. If another torch version begins backward in another
    function, the result is False, which costs the wake-up of a thread. Compiled Python (Cython) has
    no frames either: a callback that it chains in a hook must not wait for the same group.
    """
    try:
        frame = sys._getframe(2)
    except ValueError:
        return False
    return frame.f_code is getattr(_BACKWARD, "__code__", None)
