"""The communicators behind one group, NCCL's and IntraNodeComm: start, state, abort and end.

No step blocks without a limit. The communicator is non-blocking, so that its start ends at the
group's deadline. `ncclCommAbort` can block in CUDA while another kernel runs, so a thread of its
own calls it, and the caller waits for a limited time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from unisono.adapters.nccl import intra_node
from unisono.adapters.nccl.gpu import GPU
from unisono.adapters.nccl.intra_node import IntraNodeComm
from unisono.adapters.nccl.library import IN_PROGRESS, Libraries, Reduction
from unisono.core.backends.api import CallOptions, GroupSpec
from unisono.core.backends.cpu import CPUBackend
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.net.unencrypted import check_unencrypted, this_host
from unisono.core.base.text import name_ranks
from unisono.core.base.types import DType
from unisono.errors import (
    ClosedError,
    CollectiveTimeoutError,
    CommunicationError,
    Context,
    UsageError,
)

_log = get_logger("backends.nccl")

_ABORT_S = 10.0
_FINALIZE_S = 5.0
_POLL_S = 0.0005
_UID_BYTES = 128
_DIGEST_BYTES = 16
_PLAIN_HINT = "arrays in CPU memory go encrypted; UNISONO_TLS=off on a closed network"
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


def _bits_of(value: float, dtype: DType) -> np.ndarray[Any, Any]:
    """Return [1] a number as elements of a dtype; bfloat16 as its bits, rounded to even."""
    if dtype.name != "bfloat16":
        return np.array([value], dtype.storage)
    bits = int(np.float32(value).view(np.uint32))
    return np.array([(bits + 0x7FFF + (bits >> 16 & 1)) >> 16], np.uint16)


class NCCLLink:
    """A connected communicator, and the stream on which its kernels run.

    To make it is a collective: it ends when all ranks of the group have begun.

    Args:
        libraries: NCCL.
        gpu: Of this rank.
        spec: The group.
        control: CPU group of the same ranks.
        deadline: Of the start.
        called: The call that starts it, for errors; equal on all ranks.
        broken: Raises the error of the group if it is broken or a rank is lost.

    Attributes:
        stream: Of all kernels of the group.
        intra_node: The other communicator, or None.
        no_intra_node: Why there is none.
    """

    def __init__(
        self,
        libraries: Libraries,
        gpu: GPU,
        spec: GroupSpec,
        control: CPUBackend,
        deadline: Deadline,
        called: str,
        broken: Callable[[], None],
    ) -> None:
        self.gpu = gpu
        self._libraries = libraries
        self._spec = spec
        self._ops: dict[tuple[float, int], Any] = {}
        # Around each use of the communicator, which an abort in another thread frees.
        self._lock = threading.RLock()
        self._freed = False
        self.intra_node: IntraNodeComm | None = None
        options = CallOptions(False, deadline, label=called)
        self.no_intra_node = self._check_gpus(control, options)
        uid = self._publish_uid(control, options)
        nccl = libraries.nccl
        with gpu.current():
            self.stream = gpu.make_stream()
            # Without comm_name: NCCL keeps its address, and nccl4py frees the text too early.
            wanted = nccl.NCCLConfig(blocking=False)
            self._comm = nccl.Communicator.init(
                spec.size, spec.rank, nccl.UniqueId.from_bytes(uid), wanted
            )

        def check() -> None:
            broken()
            if deadline.expired():
                raise CollectiveTimeoutError(
                    f"{called} in group '{spec.name}' timed out after {deadline} on rank "
                    f"{spec.ranks[spec.rank]}: NCCL did not connect the ranks in time",
                    context=Context(group=spec.name, op=called, usable=False),
                )

        try:
            self.settle(check)
            if not self.no_intra_node:
                with gpu.current():
                    self.intra_node, self.no_intra_node = intra_node.connect(
                        gpu, self.stream, spec, control, options
                    )
        except BaseException:
            self.abort()
            raise
        if self.no_intra_node and intra_node.is_wanted():
            _log.warning("no IntraNodeComm in group '%s': %s", spec.name, self.no_intra_node)
        self.handle = libraries.calls.Comm(self._comm.ptr)

    def _check_gpus(self, control: CPUBackend, options: CallOptions) -> str:
        """Check that each rank has a GPU of its own; return why no rank may use IntraNodeComm.

        Raises:
            UnsupportedError: On all ranks: they have several hosts, and UNISONO_TLS is on or cert.
        """
        digest, place = (
            blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
            for text in (self.gpu.uuid, this_host())
        )
        mine = np.frombuffer(digest + place + bytes([intra_node.is_wanted()]), np.uint8)
        all_of_them = np.zeros((self._spec.size, mine.size), np.uint8)
        _raise_error(control.all_gather_into_tensor(all_of_them, mine, options))
        if (all_of_them[:, _DIGEST_BYTES:-1] != mine[_DIGEST_BYTES:-1]).any():
            what = f"what NCCL sends between the hosts of group '{self._spec.name}'"
            check_unencrypted(what, _PLAIN_HINT, warns=self._spec.rank == 0)
        unwanted = [
            rank for rank, row in zip(self._spec.ranks, all_of_them, strict=True) if not row[-1]
        ]
        why = f"{intra_node.VARIABLE} is not 1 on {name_ranks(unwanted)}" if unwanted else ""
        if config.environ().get(_SHARED_GPU) == "1":
            return why
        ranks_of: dict[bytes, list[int]] = {}
        for rank, row in zip(self._spec.ranks, all_of_them, strict=True):
            ranks_of.setdefault(row[:_DIGEST_BYTES].tobytes(), []).append(rank)
        for ranks in ranks_of.values():
            if len(ranks) > 1:
                raise UsageError(
                    f"{name_ranks(ranks)} of group '{self._spec.name}' use one GPU; NCCL needs a "
                    "GPU for each rank",
                    hint="call torch.cuda.set_device(LOCAL_RANK), or cupy.cuda.Device(...).use(); "
                    f"to share a GPU on purpose set {_SHARED_GPU}=1",
                )
        return why

    def _publish_uid(self, control: CPUBackend, options: CallOptions) -> bytes:
        """Return the id of the communicator, which the first rank makes."""
        uid = np.zeros(_UID_BYTES, np.uint8)
        if self._spec.rank == 0:
            uid[:] = np.frombuffer(bytes(self._libraries.nccl.get_unique_id()), np.uint8)
        _raise_error(control.broadcast(uid, 0, options))
        return uid.tobytes()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the communicator from being freed inside the block.

        Raises:
            ClosedError: It was aborted, or has ended.
        """
        with self._lock:
            if self._freed:
                raise ClosedError(f"group '{self._spec.name}' was destroyed")
            yield

    def settle(self, check: Callable[[], object]) -> None:
        """Wait until NCCL has taken the last call; most calls are taken at once.

        The first call of a kind connects ranks: NCCL takes it when the other ranks make it, too.

        Args:
            check: Raises the reason to give up; called while NCCL works.

        Raises:
            CommunicationError: NCCL failed.
        """
        while self.state() == "busy":
            check()
            time.sleep(_POLL_S)

    def state(self) -> str | None:
        """Return None if NCCL has nothing to do or to report, "busy" if it works.

        Raises:
            CommunicationError: NCCL failed; has NCCL's text.
        """
        with self.held():
            code = int(self._comm.get_async_error())
            if code == 0:
                return None
            if code == IN_PROGRESS:
                return "busy"
            raise CommunicationError(
                f"NCCL failed in group '{self._spec.name}' on rank "
                f"{self._spec.ranks[self._spec.rank]} with status {code}: "
                f"{self._comm.get_last_error()}"
            )

    def op_of(self, reduction: Reduction, dtype: DType, factor: float | None) -> int:
        """Return the number of a reduce op; with a factor, of one that multiplies first."""
        if factor is None:
            return reduction.op
        made = self._ops.get((factor, reduction.dtype))
        if made is None:
            kind = self._libraries.nccl.NcclDataType(reduction.dtype)
            element = _bits_of(factor, dtype).real
            with self.held():
                made = self._comm.create_pre_mul_sum(np.ascontiguousarray(element), kind)
            self._ops[factor, reduction.dtype] = made
        return int(made)

    def abort(self) -> bool:
        """Stop the kernels and free the communicator; return whether NCCL did so in time."""
        if self.intra_node is not None:
            # Now, because NCCL's abort may block behind these kernels.
            self.intra_node.stop()
        aborted = threading.Event()
        threading.Thread(
            target=self._abort, args=(aborted,), name="unisono-nccl-abort", daemon=True
        ).start()
        return aborted.wait(_ABORT_S)

    def _abort(self, aborted: threading.Event) -> None:
        try:
            with self.gpu.current():
                with self._lock:
                    if not self._freed:
                        self._freed = True
                        self._comm.abort()
                aborted.set()
                # The error need not wait for this, which waits for the stream.
                if self.intra_node is not None:
                    self.intra_node.free()
        except Exception:
            _log.exception("the abort of a communicator of NCCL failed")
        finally:
            aborted.set()

    def close(self, *, orderly: bool) -> None:
        """End the communicator; abort it if the other ranks do not end it, too, or cannot."""
        if not orderly:
            self.abort()
            return
        deadline = Deadline(_FINALIZE_S)
        try:
            with self.gpu.current():
                self._comm.finalize()
                while self.state() == "busy":
                    if deadline.expired():
                        raise TimeoutError("the other ranks did not finalize")
                    time.sleep(_POLL_S)
                with self.held():
                    self._freed = True
                    self._comm.destroy()
                if self.intra_node is not None:
                    self.intra_node.free()
        except Exception as error:
            _log.debug("abort instead of destroy: %r", error)
            self.abort()


def _raise_error(pending: Any) -> None:
    if pending.error is not None:
        raise pending.error
