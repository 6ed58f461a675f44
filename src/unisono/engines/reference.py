"""The reference engine: programs executed in Python and NumPy.

It is the readable specification of what a program means. A collective runs in two parts:

1. Agreement. Ranks pass a fingerprint of the call around in ceil(log2 p) rounds (dissemination:
   in round k to the rank 2^k further on). Each round merges what was heard, so at the end every
   rank knows whether all fingerprints are equal. Until then no buffer has been written.
2. The program, step by step. A send takes its value at once as far as the program can tell: a step
   that writes memory which is still on its way out waits for it first.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.base.buffers import as_bytes
from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.engines.api import Communicator, Engine, Task
from unisono.engines.failures import (
    Expired,
    break_group,
    broken_group_error,
    mismatch_error,
    to_failure,
)
from unisono.engines.kernels import reduce_into
from unisono.errors import ClosedError, CollectiveMismatchError, UsageError
from unisono.schedules import Buf, Op
from unisono.transports import Key, LinkDown, Transfer
from unisono.transports.api import Failure, Kind

__all__ = ["ReferenceEngine"]

Array = np.ndarray[Any, Any]

_AGREEMENT = struct.Struct("<QQ")
# How long ranks that disagree wait for each other's text. All of them are in this very call.
_EXPLAIN_S = 1.0
# How long close() waits for the call that it has broken, and for callbacks that run.
_CLOSE_S = 10.0


class ReferenceEngine(Engine):
    """Runs tasks on the caller's thread, or on a progress thread made when first needed."""

    name = "reference"

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Task, Completion]] = deque()
        self._busy = False
        self._closed = False
        self._seq = 0
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        # Before the lock, which in the child of a fork another thread may hold for ever.
        self._require_open(task)
        with self._changed:
            self._require_open(task)
            free = not self._busy and not self._queue
            if inline and self.runs_here() and not (free and self.comm.transport.may_wait()):
                raise UsageError(
                    f"{task.call.op} on group '{self.comm.name}' waits for the thread it runs on",
                    hint="in a callback of a future, call it with async_op=True",
                )
            self._seq += 1
            task.call = replace(task.call, seq=self._seq)
            if inline and free:
                self._busy = True
            else:
                self._queue.append((task, completion))
                self._start_thread()
                self._changed.notify_all()
        if inline and free:
            self._run_and_finish(task, completion)

    def runs_here(self) -> bool:
        here = threading.current_thread() is self._thread
        return here or not self.comm.transport.may_wait()

    def abort(self, reason: str) -> None:
        me = self.comm.transport.rank
        break_group(self.comm, Failure("aborted", reason, [me], me))

    def close(self) -> None:
        if self.comm.closed():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            dropped, self._queue = self._queue, deque()
            busy, thread = self._busy, self._thread
            self._changed.notify_all()
        for task, completion in dropped:
            told = f"group '{self.comm.name}' was destroyed before {task.call.text} ran"
            completion.finish(ClosedError(told))
        if busy:
            # Its peers are in this call too, and it cannot end any more.
            self.abort(f"rank {self.comm.transport.rank} destroyed the group while a call ran")
            with self._changed:
                self._changed.wait_for(lambda: not self._busy, _CLOSE_S)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
        self.comm.close()

    def _require_open(self, task: Task) -> None:
        closed = self.comm.closed() or ("was destroyed" if self._closed else None)
        if closed:
            raise ClosedError(f"{task.call.op} on group '{self.comm.name}', which {closed}")

    # ---- order ----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"unisono-progress-{self.comm.name}"
            self._thread = threading.Thread(target=self._progress, name=name, daemon=True)
            self._thread.start()

    def _progress(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._busy or not self._queue):
                    self._changed.wait()
                if self._closed:
                    return
                task, completion = self._queue.popleft()
                self._busy = True
            self._run_and_finish(task, completion)
            # A waiting thread must not keep the buffers of a finished task alive.
            del task, completion

    def _run_and_finish(self, task: Task, completion: Completion) -> None:
        error: BaseException | None = None
        try:
            error = self._run(task)
        except BaseException as interrupt:
            # Ctrl-C in the middle of a collective: the other ranks cannot finish it any more.
            error = interrupt
            self.abort(f"{type(interrupt).__name__} on rank {self.comm.transport.rank}")
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            # Not before: a callback may make the next call, which must find the engine free.
            completion.finish(error)

    # ---- one task -------------------------------------------------------------------------

    def _run(self, task: Task) -> BaseException | None:
        """Run a task; return its error."""
        comm, call = self.comm, task.call
        comm.transport.enter(comm.context, call.seq, call.text)
        run = _Run(comm, task)
        try:
            if comm.size > 1:
                run.agree()
            run.execute()
            task.finish()
        except CollectiveMismatchError as error:
            return error
        except Exception as error:
            failure = to_failure(error, comm, call, task.deadline)
            break_group(comm, failure)
            told = broken_group_error(failure, comm, call.op, call.seq, call.nbytes)
            if isinstance(error, (Failure, LinkDown, Expired)):
                # The transport keeps it, and its frames would keep the task's buffers.
                error.__traceback__ = None
            else:
                told.__cause__ = error
            return told
        finally:
            run.cancel()
        return None


class _Run:
    """The execution of one task."""

    def __init__(self, comm: Communicator, task: Task) -> None:
        self._comm = comm
        self._task = task
        self._program = task.program
        self._key = Key(comm.context, Kind.COLLECTIVE, task.call.seq)
        self._open: list[Transfer] = []
        # Sends whose memory is not free yet: (transfer, buffer, first, end).
        self._sends: list[tuple[Transfer, int, int, int]] = []

    # ---- agreement ------------------------------------------------------------------------

    def agree(self) -> None:
        """Make sure that all ranks are in the same call; writes no buffer.

        Raises:
            CollectiveMismatchError: They are not; the same on every rank.
        """
        comm, task = self._comm, self._task
        exchange = task.exchange
        word, even = task.call.fingerprint, exchange.even if exchange else 1
        distance = 1
        while distance < comm.size:
            out = memoryview(_AGREEMENT.pack(word, even))
            heard = memoryview(bytearray(_AGREEMENT.size))
            self._send((comm.rank + distance) % comm.size, out)
            self._wait(self._recv((comm.rank - distance) % comm.size, heard))
            word_heard, even_heard = _AGREEMENT.unpack(heard)
            word = word if word == word_heard else 0
            even = even if even == even_heard else 0
            distance *= 2
        self._settle()
        if word == 0:
            answers = comm.transport.ask(
                comm.context, task.call.seq, comm.others, Deadline(_EXPLAIN_S)
            )
            raise mismatch_error(comm, task.call, answers)
        if exchange is not None and even == 0:
            exchange.check(task.call, self._gather(exchange.mine))
            self._program = exchange.program

    def _gather(self, mine: Array) -> Array:
        """Return [world_size, k]: the vectors of all ranks."""
        comm = self._comm
        table = np.empty((comm.size, mine.size), np.int64)
        table[comm.rank] = mine
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        receives = [self._recv(rank, as_bytes(table[rank])) for rank in others]
        for rank in others:
            self._send(rank, as_bytes(mine))
        for transfer in receives:
            self._wait(transfer)
        self._settle()
        return table

    # ---- program --------------------------------------------------------------------------

    def execute(self) -> None:
        """Execute the program's steps in order."""
        task = self._task
        scratch = np.empty(self._program.scratch_count, task.dtype.storage)
        received = none = np.empty(0, task.dtype.storage)
        buffers = {
            Buf.INPUT: none if task.input is None else task.input,
            Buf.OUTPUT: none if task.output is None else task.output,
            Buf.SCRATCH: scratch,
        }
        for op, peer, source, source_at, target, target_at, count in self._program.steps.tolist():
            if op in (Op.SEND, Op.POST):
                data = as_bytes(buffers[source][source_at : source_at + count])
                span = (source, source_at, source_at + count)
                for receiver in [peer] if peer >= 0 else self._peers():
                    transfer = self._send(receiver, data)
                    if not transfer.done():
                        self._sends.append((transfer, *span))
                continue
            end = target_at + count
            into = buffers[target][target_at:end]
            if op in (Op.RECV, Op.READ):
                self._settle(target, target_at, end)
                self._wait(self._recv(peer, as_bytes(into)))
                continue
            if op in (Op.RECV_REDUCE, Op.READ_REDUCE):
                if received.size < count:
                    received = np.empty(count, task.dtype.storage)
                other = received[:count]
                self._wait(self._recv(peer, as_bytes(other)))
            else:
                other = buffers[source][source_at : source_at + count]
            self._settle(target, target_at, end)
            if op == Op.COPY:
                into[:] = other
            else:
                # The lower rank's operand first: two ranks that swap their vectors then compute
                # the same expression. With a+b and b+a, the payload of a NaN, the sign of a zero
                # and the last bit of a complex product (fused multiply-add) would differ.
                swapped = op == Op.RECV_REDUCE and peer < self._comm.rank
                reduce_into(into, other, task.dtype, task.op, swapped=swapped)
        self._settle()

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def _settle(self, buffer: int | None = None, first: int = 0, end: int = 0) -> None:
        """Wait for the sends that read [first, end) of a buffer; for all if None."""
        kept = []
        for send in self._sends:
            transfer, sent_buffer, sent_first, sent_end = send
            overlaps = sent_buffer == buffer and sent_first < end and first < sent_end
            if buffer is None or overlaps:
                self._wait(transfer)
            elif not transfer.done():
                kept.append(send)
        self._sends = kept
        if buffer is None:
            for transfer in self._open:
                self._wait(transfer)
            self._open.clear()

    # ---- transfers ------------------------------------------------------------------------

    def _send(self, peer: int, data: memoryview) -> Transfer:
        comm = self._comm
        transfer = comm.transport.send(comm.ranks[peer], self._key, data)
        if transfer.error is not None:
            raise transfer.error
        if not transfer.done():
            self._open.append(transfer)
        return transfer

    def _recv(self, peer: int, into: memoryview) -> Transfer:
        comm = self._comm
        transfer = comm.transport.recv(comm.ranks[peer], self._key, into)
        if not transfer.done():
            self._open.append(transfer)
        return transfer

    def _wait(self, transfer: Transfer) -> None:
        if not transfer.wait_until(self._task.deadline):
            raise Expired
        if transfer.error is not None:
            raise transfer.error

    def cancel(self) -> None:
        """Take back what is still open, so that nothing touches the buffers any more."""
        for transfer in self._open:
            if not transfer.done():
                self._comm.transport.cancel(transfer)
