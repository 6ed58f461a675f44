"""Communicators: messages, collective calls and what makes new communicators."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from typing import Any, Literal, NoReturn, Self, cast

import numpy as np

from unisono.adapters.mpi4py import collectives, messages, objects, ops
from unisono.adapters.mpi4py.buffers import IN_PLACE, Bytes, pickle
from unisono.adapters.mpi4py.datatypes import by_code
from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    NUMBERS,
    PROC_NULL,
    exception_of,
    require,
    translated,
)
from unisono.adapters.mpi4py.handles import Attributes, Group, Handle, Info, Status, WorldRanks
from unisono.adapters.mpi4py.messages import CommState, Predefined
from unisono.adapters.mpi4py.ops import SUM, Combiner, Op
from unisono.adapters.mpi4py.packing import simple
from unisono.adapters.mpi4py.requests import Ongoing, Request, add_calls
from unisono.core.c10d.collectives import all_reduce as _all_reduce
from unisono.core.c10d.new_groups import new_group, split_group
from unisono.core.c10d.objects.functions import all_gather_object
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.methods import in_cpp
from unisono.core.platform import machine
from unisono.errors import ArgumentTypeError, UnisonoError

_ndarray = np.ndarray


class Message(Handle, root=True):
    """A message that a matched probe has taken."""

    error = "ERR_REQUEST"

    class Taken:
        """Its bytes, and its source, tag and size."""

        def __init__(self, data: Bytes, found: tuple[int, int, int]) -> None:
            self.data, self.found = data, found

    @classmethod
    def _probe(cls, comm: Comm, source: int, tag: int, status: Any, waits: bool) -> Self | None:
        state = comm.live
        call = state.recv(source, tag, lambda call, data: setattr(call, "value", data))
        # One step: another thread could take a message that a probe has found.
        if not waits and any(map(messages.is_absent, call.works)):
            return None
        call.wait()
        if status is not None:
            status.set(*call.found)
        if call.value is None:
            return cls(MESSAGE_NO_PROC)
        return cls.of(cls.Taken(call.value, call.found))

    @classmethod
    def Probe(
        cls, comm: Comm, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Self:
        """Wait for a message, and take it."""
        found = cls._probe(comm, source, tag, status, True)
        assert found is not None
        return found

    @classmethod
    def Iprobe(
        cls, comm: Comm, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Self | None:
        """Take a message if there is one."""
        return cls._probe(comm, source, tag, status, False)

    probe, iprobe = Probe, Iprobe

    def _took(self, status: Status | None = None) -> Taken:
        taken: Message.Taken = self.live
        if self is not MESSAGE_NO_PROC:
            self.ob = None
        if status is not None:
            status.set(*taken.found)
        return taken

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Copy the message into an array."""
        taken = self._took(status)
        part = simple(buf, True, taken.found[0])
        require(len(taken.data) <= part.nbytes, "ERR_TRUNCATE")
        part.fill(taken.data)

    def recv(self, status: Status | None = None) -> Any:
        """Return the object."""
        taken = self._took(status)
        return pickle.loads(taken.data) if taken.found[0] != PROC_NULL else None

    def _request(self, receive: Any, *buf: Any) -> Request:
        call = Ongoing()
        call.found = self.live.found
        call.value = receive(*buf)
        return Request.of(call)

    def Irecv(self, buf: Any) -> Request:
        """As Recv, with a request."""
        return self._request(self.Recv, buf)

    def irecv(self) -> Request:
        """As recv, with a request."""
        return self._request(self.recv)


MESSAGE_NULL = Message()


MESSAGE_NO_PROC = Message.of(Message.Taken(np.empty(0, np.uint8), (PROC_NULL, ANY_TAG, 0)))


class Comm(Attributes, Handle, root=True):
    """A communicator."""

    error = "ERR_COMM"

    @property
    def live(self) -> Any:
        """The object in the calling thread's world."""
        ob = self.ob
        if type(ob) is Predefined:
            return ob.find()
        require(ob is not None, self.error, "null handle")
        return ob

    @property
    def unisono(self) -> ProcessGroup:
        """The group; unisono's functions take the communicator for it."""
        if self.ob is None or self.is_inter:
            kind = "null " if self.ob is None else "inter-"
            raise ArgumentTypeError(f"group must have ranks of its own, got a {kind}communicator")
        return cast("ProcessGroup", self.live.group)

    # ---- identity -------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return int(self.live.size)

    def Get_rank(self) -> int:
        """Return this process's rank."""
        return int(self.live.rank)

    def Get_group(self) -> Group:
        """Return the ranks as a group."""
        return Group.of(WorldRanks(self.live.group.ranks))

    def Is_inter(self) -> bool:
        """Return whether messages go to another group."""
        return bool(self.live.is_inter)

    def Is_intra(self) -> bool:
        """Return whether messages stay in the group."""
        return not self.live.is_inter

    def Get_topology(self) -> int:
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        topology = self.live.topology
        return NUMBERS["UNDEFINED"] if topology is None else int(topology.kind)

    size, rank, group = property(Get_size), property(Get_rank), property(Get_group)
    is_inter, is_intra = property(Is_inter), property(Is_intra)
    topology = property(Get_topology)
    is_topo = property(lambda self: self.live.topology is not None)

    def Compare(self, comm: Comm) -> int:
        """Return IDENT, CONGRUENT, SIMILAR or UNEQUAL."""
        mine, other = self.live, comm.live
        if mine is other:
            return NUMBERS["IDENT"]
        if mine.is_inter != other.is_inter:
            return NUMBERS["UNEQUAL"]
        same = mine.group.ranks == other.group.ranks and mine.remote == other.remote
        if same:
            return NUMBERS["CONGRUENT"]
        alike = {*mine.group.ranks} == {*other.group.ranks} and {*mine.remote} == {*other.remote}
        return NUMBERS["SIMILAR" if alike else "UNEQUAL"]

    # ---- new communicators ----------------------------------------------------------------

    def _duplicate(self) -> Any:
        state = self.live
        with translated():
            if not state.is_inter:
                made = CommState(_split(state.group, 0, state.rank))
            else:
                made = state.duplicate()
        made.topology, made.info = state.topology, dict(state.info)
        made.errhandler = state.errhandler
        return made

    def Dup(self, info: Info | None = None) -> Self:
        """Return a communicator of the same ranks, whose messages are apart."""
        made = type(self).of(self._duplicate())
        if info:
            made.Set_info(info)
        self.copy_attributes(made)
        return made

    Clone = Dup
    Dup_with_info = Dup

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """As Dup; it waits for the other ranks."""
        return self.Dup(info), Request.of(Ongoing())

    Idup_with_info = Idup

    def _split(self, color: int, key: int) -> Any:
        state = self.live
        require(not state.is_inter, "ERR_COMM", "an inter-communicator")
        with translated():
            group = _split(state.group, color, key)
        return None if group is None else CommState(group)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Return a communicator of the ranks of one color, ordered by keys."""
        undefined = color == NUMBERS["UNDEFINED"]
        require(color >= 0 or undefined, "ERR_ARG", f"color {color}")
        return self._plain(self._split(-1 if undefined else color, key))

    def _plain(self, state: Any) -> Comm:
        """Return a handle of a communicator without a topology."""
        return Intracomm.of(state)

    def Create(self, group: Group) -> Comm:
        """Return a communicator of the ranks of a group; all ranks call."""
        ranks, me = group.live, self.live.group.ranks[self.live.rank]
        require({*ranks} <= {*self.live.group.ranks}, "ERR_GROUP")
        if me not in ranks:
            return self._plain(self._split(-1, 0))
        return self._plain(self._split(min(ranks), ranks.index(me)))

    def Split_type(self, split_type: int, key: int = 0, info: Info | None = None) -> Comm:
        """Return a communicator of the ranks of this host."""
        shared = split_type == NUMBERS["COMM_TYPE_SHARED"]
        guided = split_type in (
            NUMBERS["COMM_TYPE_HW_GUIDED"],
            NUMBERS["COMM_TYPE_RESOURCE_GUIDED"],
        )
        wish = info.get("mpi_hw_resource_type") if info else None
        state = self.live
        takes_part = shared or (guided and wish == "mpi_shared_memory")
        with translated():
            hosts = [""] * state.size
            name = _host() if takes_part else ""
            all_gather_object(hosts, name, group=state.group)
        color = hosts.index(name) if takes_part else -1
        return self.Split(color if color >= 0 else NUMBERS["UNDEFINED"], key)

    def Free(self) -> None:
        """End the communicator; a collective call."""
        state = self.live
        require(type(self.ob) is not Predefined, "ERR_COMM", state.name)
        self.delete_attributes()
        # The others may still receive what this rank has sent. A broken group is closed at once.
        with contextlib.suppress(UnisonoError):
            state.channel.barrier()
        state.close()
        self.ob = None

    def Disconnect(self) -> None:
        """As Free."""
        self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End all ranks: the other ranks raise an error that names this rank."""
        state = self.live
        text = f"MPI.Comm.Abort({errorcode})"
        state.group.abort(text)
        print(f"rank {state.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(errorcode & 0xFF or 1)

    # ---- messages -------------------------------------------------------------------------

    def Probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Literal[True]:
        """Wait for a message, and leave it."""
        found = self.live.probe(source, tag, True)
        if status is not None:
            status.set(*found)
        return True

    def Iprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Return whether a message has come."""
        found = self.live.probe(source, tag, False)
        if found is not None and status is not None:
            status.set(*found)
        return found is not None

    def Mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """Wait for a message, and take it."""
        return Message.Probe(self, source, tag, status)

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message if there is one."""
        return Message.Iprobe(self, source, tag, status)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # ---- the shortest way -----------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce the data of all ranks, on all ranks."""
        state = self.ob
        if type(state) is Predefined:
            state = state.find()
        if state is not None and not state.is_inter:
            source = None if sendbuf is IN_PLACE else sendbuf
            try:
                if _reduce_plain(recvbuf, op.ob, state.group, source) is None:
                    return
            except UnisonoError as error:
                raise exception_of(error, "Allreduce") from error
        with translated():
            ops.allreduce(self.live.now, sendbuf, recvbuf, op).wait("Allreduce")


def reduce_plain(
    output: Any, op: Combiner | None, group: ProcessGroup, source: Any = None, _learn: Any = None
) -> bool | None:
    """Reduce a plain array in place, after a copy of `source` into it; False: it is not plain."""
    if op is None or type(output) is not _ndarray or not output.flags.carray:
        return False
    kind = by_code.get(output.dtype.char)
    engine = None if kind is None else op.kernel(kind.ob)
    if engine is None:
        return False
    if source is not None:
        plain = type(source) is _ndarray and source.flags.c_contiguous
        if not plain or source.dtype != output.dtype or source.shape != output.shape:
            return False
        output[...] = source
    if _learn is None:
        _all_reduce(output, engine, group)
    else:
        group.all_reduce(output, engine, async_op=False, _learn=_learn)
    return None


# Half of the time of a small call went into its arguments.
_reduce_plain = in_cpp(reduce_plain, "wogc")


def _host() -> str:
    return str(machine.boot_and_processes() or platform.node())


def _split(group: ProcessGroup, color: int, key: int) -> Any:
    return split_group(group, color=color, key=key)


def collective_calls(names: str) -> dict[str, Any]:
    """Return the functions of collective calls on arrays, by name."""
    return {n: vars(ops).get(n.lower()) or getattr(collectives, n.lower()) for n in names.split()}


def object_calls(names: str) -> dict[str, Any]:
    """Return the functions of collective calls on objects, by name."""
    return {name: getattr(objects, name) for name in names.split()}


_MODES = {"": "", "b": "b", "s": "s", "r": ""}
_SENDS = {f"{k}send": objects.sender(mode) for k, mode in _MODES.items() if k != "r"}
_ARRAY_SENDS = {f"{k}send".capitalize(): messages.sender(mode) for k, mode in _MODES.items()}
_REPLACE: dict[str, Any] = {
    "Sendrecv": messages.sendrecv,
    "Sendrecv_replace": messages.sendrecv_replace,
}
add_calls(Comm, {**_ARRAY_SENDS, "Recv": messages.recv}, "now start plan")
add_calls(Comm, _REPLACE, "now start")
add_calls(Comm, {**_SENDS, "recv": objects.recv}, "now start")
ARRAY_COLLECTIVES = collective_calls(
    "Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv "
    "Alltoallw Reduce Allreduce Reduce_scatter_block Reduce_scatter"
)
OBJECT_COLLECTIVES = {
    **object_calls("bcast gather scatter allgather alltoall reduce allreduce"),
    "barrier": collectives.barrier,
}
add_calls(Comm, ARRAY_COLLECTIVES, "now start plan")
add_calls(Comm, {**OBJECT_COLLECTIVES, "sendrecv": objects.sendrecv}, "now")


class Intracomm(Comm):
    """A communicator of one group."""

    def __new__(cls, comm: Comm | None = None) -> Self:
        self = super().__new__(cls, comm)
        if self.ob is not None and self.ob.is_inter:
            raise TypeError("expecting an intra-communicator")
        return self

    def Create_group(self, group: Group, tag: int = 0) -> Intracomm:
        """Return a communicator of the ranks of a group; only they call."""
        require(group.live, "ERR_GROUP")
        with translated():
            made = new_group(list(group.live), use_local_synchronization=True, sort_ranks=False)
        return Intracomm.of(None if made is None else CommState(made))

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "", info: Any = None, errhandler: Any = None
    ) -> Intracomm:
        """Return a communicator of a group; its ranks call."""
        made = new_group(list(group.live), use_local_synchronization=True, sort_ranks=False)
        return Intracomm.of(None if made is None else CommState(made))


add_calls(Intracomm, collective_calls("Scan Exscan"), "now start plan")
add_calls(Intracomm, object_calls("scan exscan"), "now")


COMM_NULL = Comm()


COMM_WORLD = Intracomm.of(Predefined("MPI_COMM_WORLD"))


COMM_SELF = Intracomm.of(Predefined("MPI_COMM_SELF"))
