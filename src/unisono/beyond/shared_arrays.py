"""Arrays that all ranks of a host share: one copy per host, in memory without a name.

The first rank of each host makes an anonymous file in memory. The other ranks open it through the
process id of the first rank. The name of the file ends in a nonce, which proves that it is the same
file. The kernel frees the memory with the last view in the last process, even after SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import mmap
import operator
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from unisono.core.backends import GroupSpec
from unisono.core.base import config
from unisono.core.base.deadline import Timeout
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import dtype_of_numpy
from unisono.core.c10d.arguments import group_rank_of
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.engines import memory_host
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import require_group
from unisono.core.platform.memory import (
    available_memory_bytes,
    has_memory_files,
    new_memory_file,
    open_memory_of,
    reserve,
)
from unisono.core.stores import PrefixStore
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UnisonoError,
    UnsupportedError,
)

_log = get_logger("c10d.shared_arrays")

_APART = (
    "cannot open the shared array of another rank of this host (%s): this rank has its own copy"
)


class SharedArray:
    """An array with one copy per host; made by `shared_array`.

    The memory is freed when no process has a view of it. A view stays valid after the end of the
    group. On one host a write is visible to the other ranks after the next `sync` or barrier.

    Attributes:
        hosts: Global ranks that share each copy.
    """

    def __init__(self, group: ProcessGroup, array: np.ndarray[Any, Any], owners: Sequence[int]):
        self._array = array
        self._group = group
        self._owners = owners
        copies = sorted(set(owners))
        self.hosts = [
            [rank for rank, owner in zip(group.ranks, owners, strict=True) if owner == copy]
            for copy in copies
        ]
        self._copies = copies

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "SharedArray cannot be pickled or copied: it belongs to the ranks of its group",
            hint="call shared_array() in the ranks, or share one by unisono.pool(n).shared_array()",
        )

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """[shape] writable view of this host's copy. `torch.from_numpy(array)` is a view, too."""
        return self._array

    @array.setter
    def array(self, array: np.ndarray[Any, Any]) -> None:
        # `shared.array += 1` assigns the array itself. Another array would not be shared.
        if array is not self._array:
            raise ArgumentTypeError(
                "SharedArray.array cannot become another array",
                hint="write shared.array[...] = values",
            )

    @on_host
    def sync(
        self, src: int | None = None, *, rows: slice | None = None, timeout: Timeout | None = None
    ) -> None:
        """Make the copies of all hosts equal, and wait for all ranks; a collective call.

            shared.sync(src=0)                    # rank 0 has filled the array
            shared.sync(rows=slice(start, stop))  # each rank has filled these rows, or none (None)

        On one host no data moves, and the call is a barrier. The ranks must not write to the array
        during the call. If rows of ranks on several hosts overlap, those of the lowest rank count.

        Args:
            src: Global rank that has filled the array; equal on all ranks.
            rows: Rows of dimension 0 that this rank has filled.
            timeout: Of the whole call; the group's if None.

        Raises:
            InvalidArgumentError: Both, or neither on any rank.
            CollectiveMismatchError: Ranks disagree about `src`, or a rank's arguments are wrong.
            CollectiveTimeoutError, PeerLostError: See `unisono.errors`.
        """
        group = self._group
        with ObjectCall(group, "SharedArray.sync", timeout, None) as call:
            call.check(self._check_source, src, rows)
            # The ranks compare the label, also if one passes an integer of NumPy.
            root = None if src is None else group.group_rank(src)
            call.label = f"SharedArray.sync(src={None if root is None else group.ranks[root]})"
            if root == group.rank():
                rows = slice(None)
            whole = self.array if self.array.ndim else self.array.reshape(1)
            part = None if rows is None else rows.indices(len(whole))[:2]
            parts = call.loads_all(call.all_gather(call.pack(lambda: part)))
            if all(part is None for part in parts):
                raise InvalidArgumentError(
                    f"{call}: no rank passed src or rows",
                    hint="pass src=... on all ranks, or rows=... on the ranks that have written",
                )
            with self._leaders() as leaders:
                if leaders is not None:
                    try:
                        self._exchange(leaders, whole, parts, call)
                    except UnisonoError:
                        # The other ranks of this host must not take this rank for the cause.
                        group.backends["cpu"].adopt_failure(leaders.backends["cpu"])
                        raise
                group.barrier(timeout=call.remaining_s, _label=call.label)

    def _exchange(
        self,
        leaders: ProcessGroup,
        whole: np.ndarray[Any, Any],
        parts: Sequence[tuple[int, int] | None],
        call: ObjectCall,
    ) -> None:
        for rank, part in enumerate(parts):
            data = whole[slice(*part)] if part else whole[:0]
            if data.size:
                root = self._copies.index(self._owners[rank])
                leaders.broadcast(data, root, timeout=call.remaining_s, _label=call.label)

    def _check_source(self, src: int | None, rows: slice | None) -> None:
        if src is not None and rows is not None:
            raise InvalidArgumentError("sync takes src or rows, not both")
        if src is not None:
            group_rank_of(self._group, "SharedArray.sync", src, None)
        if rows is None:
            return
        if not isinstance(rows, slice):
            raise ArgumentTypeError(f"rows must be a slice, got {type(rows).__name__}")
        try:
            consecutive = self.array.ndim and rows.indices(len(self.array))[2] == 1
        except TypeError as error:
            raise ArgumentTypeError(f"rows={rows}: {error}") from None
        except ValueError:  # a step of 0
            consecutive = False
        if not consecutive:
            raise InvalidArgumentError(
                f"rows={rows} of an array of shape {list(self.array.shape)}: expected "
                "consecutive rows of dimension 0"
            )

    @contextlib.contextmanager
    def _leaders(self) -> Iterator[ProcessGroup | None]:
        """Yield the group of one rank per host; None on other ranks, and if there is one host."""
        group, copies = self._group, self._copies
        number = group.counts["sync"]
        group.counts["sync"] += 1
        if len(copies) == 1 or group.rank() not in copies:
            yield None
            return
        key = f"{group.key}/sync/{number}"
        spec = GroupSpec(
            store=PrefixStore(key, group.store),
            rank=copies.index(group.rank()),
            size=len(copies),
            ranks=tuple(group.ranks[rank] for rank in copies),
            name=f"{group.name}:hosts",
            key=key,
            timeout_s=group.timeout_s,
        )
        backend = f"cpu:{group.config.device_backend_map['cpu']}"
        with contextlib.closing(ProcessGroup.from_spec(spec, backend, group)) as leaders:
            yield leaders

    def __repr__(self) -> str:
        shape, dtype = list(self.array.shape), self.array.dtype
        return f"<SharedArray {dtype}{shape} hosts={self.hosts}>"


def shared_array(
    shape: int | Sequence[int],
    dtype: Any = np.float64,
    group: Any = None,
    *,
    timeout: Timeout | None = None,
) -> SharedArray:
    """Make an array of zeros that the ranks of each host share; a collective call.

        shared = dist.shared_array((1000, 1000), np.float32)
        if dist.get_rank() == 0:
            shared.array[:] = values
        shared.sync(src=0)
        mean = shared.array.mean()                # on every rank, without a copy

    A rank that cannot open the memory of its host gets a copy of its own. `hosts` shows it.

    Args:
        shape: Shape of the array; equal on all ranks.
        dtype: Any dtype of NumPy but objects; equal on all ranks.
        group: The ranks that share the array; the default group if None.
        timeout: Of the whole call; the group's if None.

    Raises:
        ArgumentTypeError: `shape` or `dtype` has a wrong type.
        InvalidArgumentError: A negative size, or this rank is no member of the group.
        UnsupportedError: The elements are Python objects, or the system has no memfd_create.
        CollectiveMismatchError: Ranks disagree about shape or dtype, or a rank's are wrong.
        CollectiveError: A rank cannot get the memory; raised on all ranks.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`.
    """
    pg = require_group(group)
    with ObjectCall(pg, "shared_array", timeout, None) as call:
        described: list[Any] = []
        call.check(lambda: described.extend(_checked(shape, dtype)))
        sizes, kind = described
        call.label = f"shared_array({list(sizes)}, {kind})"
        nbytes = math.prod(sizes) * kind.itemsize
        memory, owners = _share(pg, call, max(nbytes, 1))
        return SharedArray(pg, np.ndarray(sizes, kind, memory), owners)


def _checked(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        sizes = tuple(map(operator.index, shape if np.iterable(shape) else (shape,)))
        kind = np.dtype(dtype)
    except Exception as error:  # np.dtype raises errors of many types
        raise ArgumentTypeError(f"no array has shape={shape!r}, dtype={dtype!r}: {error}") from None
    dtype_of_numpy(kind)
    try:
        np.broadcast_to(np.empty((), kind), sizes)
    except ValueError as error:
        raise InvalidArgumentError(
            f"an array cannot have shape={shape!r}, dtype={dtype!r}: {error}"
        ) from None
    if not has_memory_files():
        raise UnsupportedError("shared_array needs memfd_create, which this system does not have")
    return sizes, kind


def _share(pg: ProcessGroup, call: ObjectCall, nbytes: int) -> tuple[mmap.mmap, list[int]]:
    """Return this rank's mapping, and for each rank the rank in the group that made its memory."""
    me = pg.rank()
    failed = f"no {nbytes} bytes of shared memory"
    hosts = call.on_all(lambda: host_of(pg), failed)
    first = hosts.index(hosts[me])
    mapped: list[mmap.mmap] = []
    with contextlib.ExitStack() as stack:
        made = call.on_all(lambda: made_memory(nbytes, stack) if first == me else None, failed)

        def attach() -> int:
            owner = first
            try:
                fd = made[me][1] if first == me else opened_memory(made[first], stack)
            except OSError as error:
                log_once(_log, logging.WARNING, _APART, reason_of(error))
                owner, fd = me, made_memory(nbytes, stack)[1]
            mapped.append(mmap.mmap(fd, nbytes))
            return owner

        # The files stay open until all ranks have opened them.
        owners = call.on_all(attach, failed)
    return mapped[0], owners


def host_of(pg: ProcessGroup) -> str:
    """Return a text that is equal on the ranks of a group that may open each other's memory."""
    host = memory_host() or uuid.uuid4().hex
    per_host = int(config.get_float("UNISONO_RANKS_PER_HOST"))
    return f"{host}/{pg.ranks[pg.rank()] // per_host}" if per_host else host


def made_memory(
    nbytes: int, stack: contextlib.ExitStack, kind: str = "array"
) -> tuple[int, int, str]:
    """Return the process id, descriptor and name of new memory, open until the end of `stack`."""
    free = available_memory_bytes()
    if free is not None and nbytes > free:
        # The kernel would grant the memory, and later kill a process.
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, {free} bytes are available")
    name = f"unisono-{kind}-{uuid.uuid4().hex}"
    fd = new_memory_file(name)
    stack.callback(os.close, fd)
    reserve(fd, nbytes)
    return os.getpid(), fd, name


def opened_memory(made: tuple[int, int, str], stack: contextlib.ExitStack) -> int:
    """Return a descriptor of memory that another rank has made, open until the end of `stack`."""
    pid, fd, name = made
    opened = open_memory_of(pid, fd, name)
    stack.callback(os.close, opened)
    return opened
