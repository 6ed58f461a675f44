"""The reference engine: programs executed in Python and NumPy.

It is the readable specification of programs. A collective runs in two parts:

1. Agreement. The ranks exchange a fingerprint of the call in ceil(log2 p) rounds (dissemination:
   in round k each rank sends to the rank 2^k further on). Each round merges the fingerprint that
   was received. So in the end every rank knows whether all fingerprints are equal. No buffer is
   written before.
2. The program, step by step. To the program a send takes its value at once. A step that writes
   memory waits first for the sends that still read this memory.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import Self

import numpy as np

from unisono.core.base.buffers import Array, as_bytes
from unisono.core.base.deadline import Deadline
from unisono.core.engines.api import Communicator, Task
from unisono.core.engines.array_lists import concatenated, copy_back
from unisono.core.engines.errors import (
    LATE_S,
    DeadlinePassed,
    engines_error,
    mismatch_error,
    out_of_step,
)
from unisono.core.engines.kernels import Accumulations
from unisono.core.engines.queue import OrderedEngine
from unisono.core.schedules import Buf, Op, Program
from unisono.core.transports import Key, LinkDown, Transfer
from unisono.core.transports.control import Question
from unisono.core.transports.messages import CallStatus, Failure, Purpose
from unisono.errors import CollectiveMismatchError

_AGREEMENT = struct.Struct("<QQ")
# Bytes of the name of an engine, as an error shows it.
_ENGINE_NAME = 16
# How long ranks that disagree wait for each other's texts. All of them are in this call.
_EXPLAIN_S = 1.0


class ReferenceEngine(OrderedEngine):
    """Runs tasks with messages between ranks."""

    name = "reference"
    _compared = False

    def perform(self, task: Task) -> None:
        self._start_record(task)
        with TaskRun(self.comm, task) as run:
            program = task.prepared.program
            if self.comm.size > 1:
                if not self._compared:
                    run.compare_engines(self.name)
                    self._compared = True
                program = run.agree()
            run.execute(program)


class TaskRun:
    """The execution of one task; the end of the with block cancels the open transfers."""

    def __init__(self, comm: Communicator, task: Task) -> None:
        self._comm = comm
        self._task = task
        self._key = Key(comm.context, Purpose.COLLECTIVE, task.seq)
        self._late = task.deadline.earlier(LATE_S)
        self._asked: Question | None = None
        self._open: list[Transfer] = []
        # Sends whose memory is not free yet: (transfer, buffer, first, end).
        self._sends: list[tuple[Transfer, int, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._asked is not None:
            self._comm.transport.close_question(self._asked)
        for transfer in self._open:
            if not transfer.done():
                self._comm.transport.cancel(transfer)

    # ---- agreement ------------------------------------------------------------------------

    def compare_engines(self, name: str) -> None:
        """Check that the group has one engine; a part of its first call.

        Some groups are made without an agreement, over links that are there. Engines do not
        understand each other.

        Raises:
            UnsupportedError: It has several; equal on every rank.
        """
        if self._comm.engine_is_agreed:
            return
        whole = name.encode()
        if self._merge(zlib.crc32(whole), 1)[0] == 0:
            text = whole[:_ENGINE_NAME]
            rows = self._gather(np.frombuffer(text.ljust(_ENGINE_NAME, b"\0"), np.int64).copy())
            names = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
            raise engines_error(self._comm, self._task.call, names)

    def agree(self) -> Program:
        """Check that all ranks are in the same call, and return the program to execute.

        Raises:
            CollectiveMismatchError: They are not; equal on every rank.
        """
        task, prepared = self._task, self._task.prepared
        exchange = prepared.exchange
        word, even = self._merge(prepared.call.fingerprint, exchange.even if exchange else 1)
        if word == 0:
            raise self.mismatch()
        if exchange is not None and even == 0:
            table = self._gather(exchange.mine)
            exchange.check(task.call, table)
            return exchange.program_for(table)
        return prepared.program

    def mismatch(self) -> CollectiveMismatchError | Failure:
        """Ask the other ranks for their calls and return the error that lists them.

        A Failure, which breaks the group, if the ranks are in calls of different numbers.
        """
        comm, call = self._comm, self._task.call
        due = Deadline(_EXPLAIN_S)
        answers = comm.transport.ask(comm.context, call.seq, comm.others, due, places=True)
        site = "" if comm.trace is None else comm.trace.site(call.seq)
        answers[comm.transport.rank] = CallStatus(call.seq, call.text, site=site)
        if failure := self._skipped() or out_of_step(comm, answers):
            return failure
        self._stay_for_questions()
        # Another rank may have detected that first, and then did not stay.
        return self._skipped() or mismatch_error(comm, call, answers)

    def _skipped(self) -> Failure | None:
        """Return the failure of ranks in calls of different numbers, if a rank has reported it."""
        known = self._comm.transport.failure(self._comm.context)
        return known if known is not None and known.kind == "skipped" else None

    def _stay_for_questions(self) -> None:
        """Wait until all ranks have asked; a rank that ends after the error cannot answer."""
        comm, deadline = self._comm, Deadline(_EXPLAIN_S)
        distance = 1
        with contextlib.suppress(LinkDown, Failure):
            while distance < comm.size:
                self.send((comm.rank + distance) % comm.size, memoryview(b"\0"))
                sign = self.recv((comm.rank - distance) % comm.size, memoryview(bytearray(1)))
                if not sign.wait_until(deadline) or sign.error is not None:
                    return
                distance *= 2

    def meet(self, flag: bool) -> bool:
        """Wait until all ranks are in this call; return whether any rank has given `flag`."""
        return self._merge(1, 2 - flag)[1] != 2

    def _merge(self, word: int, even: int) -> tuple[int, int]:
        """Return each of 2 words if it is equal on all ranks, else 0."""
        comm, distance = self._comm, 1
        while distance < comm.size:
            out = memoryview(_AGREEMENT.pack(word, even))
            received = memoryview(bytearray(_AGREEMENT.size))
            self.send((comm.rank + distance) % comm.size, out)
            self.wait(self.recv((comm.rank - distance) % comm.size, received))
            their_word, their_even = _AGREEMENT.unpack(received)
            word = word if word == their_word else 0
            even = even if even == their_even else 0
            distance *= 2
        self.wait_for_sends()
        return word, even

    def _gather(self, mine: Array) -> Array:
        """Return [world_size, k]: the vectors of all ranks."""
        comm = self._comm
        table = np.empty((comm.size, mine.size), np.int64)
        table[comm.rank] = mine
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        receives = [self.recv(rank, as_bytes(table[rank])) for rank in others]
        for rank in others:
            self.send(rank, as_bytes(mine))
        for transfer in receives:
            self.wait(transfer)
        self.wait_for_sends()
        return table

    # ---- program --------------------------------------------------------------------------

    def execute(self, program: Program) -> None:
        """Execute the program's steps in order."""
        task = self._task
        dtype = task.prepared.dtype
        sums = Accumulations(dtype, task.prepared.op)
        scratch = np.empty(program.scratch_count, dtype.storage)
        received = none = np.empty(0, dtype.storage)
        given, result = concatenated(task.input), concatenated(task.output)
        buffers = {
            Buf.INPUT: none if given is None else given,
            Buf.OUTPUT: none if result is None else result,
            Buf.SCRATCH: scratch,
        }
        for op, peer, source, source_at, target, target_at, count, more in program.steps.tolist():
            if op in (Op.SEND, Op.POST):
                data = as_bytes(buffers[source][source_at : source_at + count])
                span = (source, source_at, source_at + count)
                for receiver in [peer] if peer >= 0 else self._peers():
                    transfer = self.send(receiver, data)
                    if not transfer.done():
                        self._sends.append((transfer, *span))
                continue
            end = target_at + count
            into = buffers[target][target_at:end]
            if op in (Op.RECV, Op.READ):
                self.wait_for_sends(target, target_at, end)
                self.wait(self.recv(peer, as_bytes(into)))
                continue
            if op in (Op.RECV_REDUCE, Op.READ_REDUCE):
                if received.size < count:
                    received = np.empty(count, dtype.storage)
                other = received[:count]
                self.wait(self.recv(peer, as_bytes(other)))
            else:
                other = buffers[source][source_at : source_at + count]
            self.wait_for_sends(target, target_at, end)
            if op == Op.COPY:
                into[:] = other
            else:
                # The lower rank's operand comes first, so that two ranks that swap their vectors
                # compute the same expression. Otherwise the results may differ: the payload of a
                # NaN, the sign of a zero, the last bit of a complex product (fused multiply-add).
                swapped = op == Op.RECV_REDUCE and peer < self._comm.rank
                sums.reduce(into, other, swapped=swapped, goes_on=bool(more))
        self.wait_for_sends()
        copy_back(result, task.output)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def wait_for_sends(self, buffer: int | None = None, first: int = 0, end: int = 0) -> None:
        """Wait for the sends that read [first, end) of a buffer; for all if None."""
        kept = []
        for send in self._sends:
            transfer, sent_buffer, sent_first, sent_end = send
            overlaps = sent_buffer == buffer and sent_first < end and first < sent_end
            if buffer is None or overlaps:
                self.wait(transfer)
            elif not transfer.done():
                kept.append(send)
        self._sends = kept
        if buffer is None:
            for transfer in self._open:
                self.wait(transfer)
            self._open.clear()

    # ---- transfers ------------------------------------------------------------------------

    def send(self, peer: int, data: memoryview) -> Transfer:
        """Start sending to a rank of the group."""
        comm = self._comm
        transfer = comm.transport.send(comm.ranks[peer], self._key, data)
        if transfer.error is not None:
            raise transfer.error
        if not transfer.done():
            self._open.append(transfer)
        return transfer

    def recv(self, peer: int, into: memoryview) -> Transfer:
        """Start receiving from a rank of the group."""
        comm = self._comm
        transfer = comm.transport.recv(comm.ranks[peer], self._key, into)
        if not transfer.done():
            self._open.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer; raise its error, or Expired at the deadline of the call."""
        trace, peer = self._comm.trace, transfer.peer
        if trace is None or peer is None or transfer.done():
            self._wait(transfer)
            return
        with trace.waiting(peer):
            self._wait(transfer)

    def _wait(self, transfer: Transfer) -> None:
        if not transfer.wait_until(self._late):
            if self._asked is None:
                comm = self._comm
                self._asked = comm.transport.inquire(comm.context, 0, comm.others, places=True)
            if not transfer.wait_until(self._task.deadline):
                raise DeadlinePassed(self._asked)
        if transfer.error is not None:
            raise transfer.error
