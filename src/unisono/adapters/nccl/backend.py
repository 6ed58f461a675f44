"""The NCCL backend: NCCL moves the data of a call, and a CPU group compares the call.

    caller        checks | compare (control group) | kernels (NCCL's stream) | return
    control       ......... compares on all ranks: who differs, is late, is lost
    watcher       ......... end of both -> the work is done; error -> abort on all ranks

By default the comparison runs beside the kernels, so that the host does not wait. An error then
breaks the group, because kernels may have written. With UNISONO_CHECK=before the host waits for the
comparison: a mismatch leaves arrays and group as they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unisono.adapters.nccl import flat
from unisono.adapters.nccl.calls import GPUCall, OpenCalls
from unisono.adapters.nccl.flat import GPUFlat, index_of
from unisono.adapters.nccl.gpu import GPU
from unisono.adapters.nccl.intra_node import is_wanted
from unisono.adapters.nccl.kernels import CallMemory, Kernels, require_reducible_on
from unisono.adapters.nccl.library import load
from unisono.adapters.nccl.link import NCCLLink
from unisono.core.backends.api import CallOptions, GroupSpec, Pending
from unisono.core.backends.collectives import ArrayBackend
from unisono.core.backends.cpu import CPUBackend
from unisono.core.backends.flat import FlatMemory
from unisono.core.backends.prepared_calls import NO_DTYPE, CallSpec
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.types import code_of, dtype_of_code
from unisono.core.stores import PrefixStore
from unisono.core.transports.messages import ANY_TAG
from unisono.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    Context,
    InvalidArgumentError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
)

# Tag of the control group's messages that describe a send; no program uses this tag.
_NOTE = 2**63 - 2

# A rank that leaves the group in order may be seen before the end of the kernels that it has fed.
_GRACE_S = 0.25

# How long `close` waits for calls under way.
_CLOSE_S = 10.0

_HINT = (
    "all ranks must make the same calls in the same order. NCCL had begun, so the arrays may have "
    "changed; UNISONO_CHECK=before checks first"
)


class NCCLBackend(ArrayBackend):
    """All operations on arrays of a GPU.

    The first call for arrays of a GPU connects the ranks, so all ranks must take part in it.
    `bind` does so before.

    Args:
        spec: The group.
        control: A CPU backend of the same ranks; made if None.
    """

    name = "nccl"
    device = "cuda"
    memory = flat

    def __init__(self, spec: GroupSpec, control: CPUBackend | None = None) -> None:
        super().__init__(spec)
        self._libraries = load()
        self._before = _checks_before()
        if control is None:
            control = CPUBackend(replace(spec, store=PrefixStore("control", spec.store)))
            self.world_number = control.world_number
        self.control: CPUBackend = control
        self.trace = control.trace
        self._prepared = control.calls_of(self.name)
        self._calls = OpenCalls(spec.name, self._require_progress, self._stop)
        self._lock = threading.RLock()
        self._kernels: Kernels | None = None
        self._error: UnisonoError | None = None
        self._batch: list[Callable[[], None]] | None = None
        self._lost_since: dict[int, float] = {}

    # ---- collectives ----------------------------------------------------------------------

    def _submit(
        self,
        spec: CallSpec,
        subject: FlatMemory | None,
        input: FlatMemory | None,
        output: FlatMemory | None,
        results: Sequence[Any],
        options: CallOptions,
    ) -> Pending:
        called = options.label or spec.called
        self._require_usable(called)
        memory = [each for each in (input, output) if isinstance(each, GPUFlat)]
        dtype = NO_DTYPE if subject is None else subject.dtype
        if not memory:
            # A rank without neighbours takes part in the comparison only.
            return self.control.check(self._prepared.get(spec, subject, options), options.deadline)
        gpu = self._gpu(index_of(memory))
        if spec.op is not None:
            require_reducible_on(dtype, spec.op, spec.collective, gpu)
        if options.deterministic or options.algorithm:
            raise UnsupportedError(
                f"{called}: NCCL chooses algorithm and order itself",
                hint="use arrays in CPU memory for algorithm= and deterministic=",
            )
        source, target = (each if isinstance(each, GPUFlat) else None for each in (input, output))

        def run() -> list[Any]:
            given, into = ([] if each is None else each.pieces() for each in (source, target))
            check = partial(self._calls.has_ended, call)
            moved = CallMemory(dtype, given, into, memory[0].library, check)
            return kernels.run(spec, moved)

        # One lock: calls of several threads must have one order for the comparison and NCCL.
        with self._lock:
            prepared = self._prepared.get(spec, subject, options)
            seen = self.control.check(prepared, options.deadline)
            # The host waits for the other ranks in the first call anyway, to connect.
            before = self._before or self._kernels is None
            if before and seen.wait_until(None) and seen.error is not None:
                return seen
            kernels = self._connected(gpu, options.deadline, called)
            call = GPUCall(prepared.call.text, results, seen, options.deadline, [])
            self._enqueue(call, memory, None if spec.members == 0 else target, run)
        return self._returned(call, options)

    def barrier(self, options: CallOptions) -> Pending:
        """Wait for all ranks; the control group does it, so kernels may still run at the end."""
        self._require_usable("barrier")
        return self.control.barrier(options)

    # ---- point to point -------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        return self._message("send", tensor, peer, tag, options)

    def recv(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        return self._message("recv", tensor, peer, tag, options)

    def _message(self, op: str, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        """Send or receive; a note from the sender to the receiver describes the array.

        NCCL has no tags: the messages between two ranks arrive in the order of the calls. The note
        has the tag, so that another order is an error.
        """
        self._require_usable(op)
        sends, rank = op == "send", self.spec.ranks[peer]
        if peer == self.spec.rank:
            raise UnsupportedError(f"{op}: NCCL has no messages from a rank to itself")
        if options.partial:
            raise UnsupportedError(f"{op}: NCCL takes no shorter messages (partial=True)")
        data = flat.one(tensor, write=not sends)
        kernels = self._connected(
            self._gpu(index_of([data])), options.deadline, "send or recv, the first call on a GPU"
        )
        role, shape = "dst" if sends else "src", ", ".join(map(str, data.shape or ()))
        text = f"{op}({data.dtype}[{shape}], {role}={rank}, tag={'any' if tag == ANY_TAG else tag})"
        mine = np.array([code_of(data.dtype), data.count, tag], np.int64)
        note = mine if sends else np.zeros(3, np.int64)
        how = options._replace(async_op=True)

        def run() -> list[Any]:
            messages = [(piece, peer) for piece in data.pieces()]
            given, taken = (messages, []) if sends else ([], messages)
            kernels.exchange(given, taken, data.dtype.itemsize)
            return []

        def verify() -> None:
            if (error := seen.error) is not None:
                hidden = f"{op}(int64[3], {role}={rank}, tag={_NOTE})"
                raise type(error)(
                    error.what.replace(hidden, text), context=self._where(op, (rank,))
                )
            if sends:
                return
            call.tag = int(note[2])
            compared = slice(2 if tag == ANY_TAG else 3)
            if not np.array_equal(note[compared], mine[compared]):
                dtype = dtype_of_code(int(note[0]))
                got = f"{dtype.name if dtype else 'unknown'}[{note[1]}] with tag {note[2]}"
                raise CollectiveMismatchError(
                    f"{text} in group '{self.spec.name}' does not match on rank {self._me}: rank "
                    f"{rank} sent {got}",
                    context=self._where(op, (rank,)),
                    hint="NCCL's messages between two ranks have the order of the calls",
                )

        with self._lock:
            seen = getattr(self.control, op)(note, peer, _NOTE, how)
            call = GPUCall(text, [tensor], seen, options.deadline, [note, mine])
            call.verify, call.late = verify, f"rank {rank} did not match it"
            if not sends:
                call.source, call.count = rank, data.count
            self._enqueue(call, [data], None if sends else data, run)
        return self._returned(call, options)

    @contextmanager
    def _together(self) -> Iterator[None]:
        # Calls of other threads must not join the batch.
        with self._lock:
            batch: list[Callable[[], None]] = []
            self._batch = batch
            try:
                yield
            finally:
                self._batch = None
                if batch:
                    assert self._kernels is not None
                    with self._kernels.launch():
                        for begin in batch[::2]:
                            begin()
                    for end in batch[1::2]:
                        end()

    def together(self) -> AbstractContextManager[object]:
        return self._together()

    # ---- order on the stream --------------------------------------------------------------

    def _enqueue(
        self,
        call: GPUCall,
        memory: Sequence[GPUFlat],
        written: GPUFlat | None,
        run: Callable[[], list[Any]],
    ) -> None:
        """Enqueue the kernels of a call behind the current stream, and watch the call.

        The caller holds the lock: no call of NCCL may follow before the last has settled.

        Args:
            call: Gets the event of its end.
            memory: Of the call.
            written: Memory with copies to write back.
            run: Calls NCCL; returns what must stay alive.
        """
        assert self._kernels is not None
        link = self._kernels.link
        library, index = memory[0].library, link.gpu.index
        call.kept += memory

        def follow() -> None:
            with link.gpu.current():
                link.gpu.stream_of(library.current_stream(index)).wait(call.end)

        def begin() -> None:
            current = link.gpu.stream_of(library.current_stream(index))
            link.stream.wait(current.record())
            with ExitStack() as stack:
                for each in memory:
                    stack.enter_context(each.library.on(index, int(link.stream.handle)))
                    each.begin(link.gpu, link.stream)
                call.kept += run()

        def end() -> None:
            link.settle(partial(self._calls.has_ended, call))
            if written is not None:
                with written.library.on(index, int(link.stream.handle)):
                    written.end()
            call.end, call.follow = link.stream.record(), follow
            self._calls.add(call)

        def guarded(step: Callable[[], None]) -> Callable[[], None]:
            def call_it() -> None:
                try:
                    with link.gpu.current():
                        step()
                except Exception as error:
                    raise self._failed_here(call, error) from error

            return call_it

        steps = (guarded(begin), guarded(end))
        if self._batch is not None:
            self._batch.extend(steps)
            return
        for step in steps:
            step()

    def _returned(self, call: GPUCall, options: CallOptions) -> GPUCall:
        if not options.async_op and self._batch is None:
            call.enqueue_wait()
        return call

    def _gpu(self, index: int) -> GPU:
        """Return the GPU of a call's arrays, which must be that of the communicator."""
        if self._kernels is None:
            return GPU(self._libraries, index)
        gpu = self._kernels.link.gpu
        if (bound := gpu.index) != index:
            raise InvalidArgumentError(
                f"the array is on GPU {index}, but group '{self.spec.name}' uses GPU {bound} on "
                "this rank"
            )
        return gpu

    def _connected(self, gpu: GPU, deadline: Deadline, called: str) -> Kernels:
        """Return the calls of the communicator, which the first call makes."""
        with self._lock:
            if self._kernels is None:
                try:
                    link = NCCLLink(
                        self._libraries,
                        gpu,
                        self.spec,
                        self.control,
                        deadline,
                        called,
                        lambda: self._raise_trouble(called),
                    )
                except UnisonoError:
                    raise
                except Exception as error:
                    reason = f"NCCL did not start on rank {self._me}: {error}"
                    self.control.abort(reason, failed=True)
                    raise CommunicationError(
                        f"{called} in group '{self.spec.name}' failed: {reason}",
                        context=self._where(called),
                    ) from error
                self._kernels = Kernels(self._libraries, link, self.spec.rank, self.spec.size)
        self._gpu(gpu.index)
        return self._kernels

    def bind(self, device: Any) -> None:
        number = str(device).rpartition(":")[2]
        if not number.isdecimal():
            raise InvalidArgumentError(f"device_id={device!r} names no GPU, such as 0 or 'cuda:0'")
        gpu = self._gpu(int(number))
        self._connected(gpu, Deadline(self.spec.timeout_s), "init_process_group")

    # ---- errors ---------------------------------------------------------------------------

    @property
    def _me(self) -> int:
        return self.spec.ranks[self.spec.rank]

    def _where(self, op: str, peers: tuple[int, ...] = ()) -> Context:
        return self.control.comm.where(op=op, peers=peers, usable=False)

    def _require_usable(self, called: str) -> None:
        if (error := self._error) is not None:
            raise type(error)(
                f"{called} in group '{self.spec.name}' cannot run on rank {self._me}: the group "
                f"is broken: {error.what}",
                context=error.context,
            )
        self.control.require_usable(called)

    def _require_progress(self, call: GPUCall) -> None:
        """Raise the reason if kernels of a call that all ranks have made cannot end."""
        assert self._kernels is not None
        self._kernels.link.state()
        op = call.text.partition("(")[0]
        self._raise_trouble(op)
        if call.limit.expired():
            raise CollectiveTimeoutError(
                f"{call.text} in group '{self.spec.name}' timed out after {call.limit} on rank "
                f"{self._me}: {call.late}",
                context=self._where(op),
            )

    def _raise_trouble(self, called: str) -> None:
        """Raise the error of the group if it is broken, or a rank is lost."""
        self.control.require_usable(called)
        for rank, name in enumerate(self.spec.ranks):
            why = None if rank == self.spec.rank else self.control.lost(rank)
            if why is not None and self._has_grace(rank):
                raise PeerLostError(
                    f"{called} in group '{self.spec.name}' failed on rank {self._me}: rank {name} "
                    f"is lost: {why}",
                    context=self._where(called, (name,)),
                )

    def _has_grace(self, rank: int) -> bool:
        """Whether a rank was seen as lost some time ago."""
        first = self._lost_since.setdefault(rank, time.monotonic())
        return time.monotonic() - first > _GRACE_S

    def _stop(self, error: BaseException) -> BaseException:
        """Stop the kernels because of an error, break the group, and return the calls' error."""
        if self._error is not None:
            return self._error
        error = self._named(error, "a call")
        what = error.what
        if isinstance(error, CollectiveMismatchError):
            error = CollectiveMismatchError(
                what, context=replace(error.context, usable=False), hint=error.hint and _HINT
            )
        self._error = error
        if self.control.broken() is None:
            # Ranks that have ended the call must stop their kernels, too.
            self.control.abort(what)
        if self._kernels is not None and not self._kernels.link.abort():
            error.hint = (
                "NCCL did not end its kernels in 10 s, as it can while other kernels run; end "
                "this process"
            )
        return error

    def _failed_here(self, call: GPUCall, error: Exception) -> BaseException:
        """Break the group because its kernels could not be enqueued here; return the error."""
        return self._calls.fail(self._named(error, call.text))

    def _named(self, error: BaseException, text: str) -> UnisonoError:
        """Return an error of ours for an error of a library."""
        if isinstance(error, UnisonoError):
            return error
        return CommunicationError(
            f"{text} in group '{self.spec.name}' failed on rank {self._me}: "
            f"{type(error).__name__}: {error}",
            context=self._where(text.partition("(")[0]),
        )

    # ---- life -----------------------------------------------------------------------------

    def agree(self, text: str, options: CallOptions) -> Pending:
        return self.control.agree(text, options)

    def refuse(self, op: str, why: str, deadline: Deadline, *, wait: bool) -> None:
        self.control.refuse(op, why, deadline, wait=wait)

    def split(self, spec: GroupSpec) -> NCCLBackend:
        store = PrefixStore("control", spec.store)
        return NCCLBackend(spec, self.control.split(replace(spec, store=store)))

    def abort(self, reason: str, failed: bool = False) -> None:
        self.control.abort(reason, failed)

    def adopt_failure(self, other: Any) -> None:
        self.control.adopt_failure(other.control)

    def end_calls(self, cancel: str = "") -> None:
        if not cancel and self.control.comm.closed() is None:
            self._calls.drain(Deadline(self.spec.timeout_s + _CLOSE_S))
        self.control.end_calls(cancel)

    def close(self) -> None:
        """End the communicator after the calls under way; calls that do not end are aborted."""
        if self.control.comm.closed() is not None:
            # A second call, or the child of a fork, where the communicator must not be touched.
            return
        drained = self._calls.drain(Deadline(_CLOSE_S))
        if not drained:
            self._calls.fail(ClosedError(f"group '{self.spec.name}' was destroyed"))
        kernels, self._kernels = self._kernels, None
        if kernels is not None and drained and self._error is None:
            kernels.link.close(orderly=self.control.broken() is None)
        self._calls.join()
        self.control.close()

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self.control.set_timeout(timeout_s)

    def lost(self, rank: int) -> str | None:
        return self.control.lost(rank)

    def has_ended(self, rank: int) -> bool:
        return self.control.has_ended(rank)

    def broken(self) -> str | None:
        return self.control.broken() or (None if self._error is None else self._error.what)

    def blamed(self) -> tuple[int, ...]:
        return self.control.blamed()

    def runs_here(self) -> bool:
        return self.control.runs_here()

    def last_number(self) -> int:
        return self.control.last_number()

    def info(self) -> dict[str, str]:
        check = "before" if self._before else "beside"
        known = {"state": "experimental", "check": check}
        if not is_wanted():
            return known
        kernels = self._kernels
        why = "not connected" if kernels is None else kernels.link.no_intra_node
        return known | {"intra_node": f"no ({why})" if why else "yes"}


def _checks_before() -> bool:
    """Return whether UNISONO_CHECK is "before"."""
    text = config.get("UNISONO_CHECK")
    if text not in ("beside", "before"):
        raise InvalidArgumentError(
            f"environment variable UNISONO_CHECK={text!r} is neither 'beside' nor 'before'"
        )
    return text == "before"
