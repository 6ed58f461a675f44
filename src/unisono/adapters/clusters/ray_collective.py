"""The backend "UNISONO" of `ray.util.collective`."""

from __future__ import annotations

import json
import time
from typing import Any

import ray
from ray import cloudpickle as _pickler
from ray.experimental import internal_kv
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from unisono.adapters.clusters.meeting import Meeting, attend, close_meeting, open_meeting
from unisono.core.base.deadline import Deadline
from unisono.core.base.types import ReduceOp
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.stores import PrefixStore, TCPStore
from unisono.errors import NetworkError, RendezvousError, UnisonoError

_START_S = 60.0
_POLL_S = 0.02


class CollectiveGroup(BaseGroup):  # type: ignore[misc, unused-ignore]
    """A group of `ray.util.collective` on a process group of its own.

    `ray.util.collective` passes each tensor in a list of one, because of its calls for several
    GPUs.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        # Two jobs of a cluster may have groups of one name, but not one namespace.
        key = f"unisono/{ray.get_runtime_context().namespace}/{group_name}".encode()
        deadline = Deadline(_START_S)
        meeting = _announce(key, world_size) if rank == 0 else None
        try:
            self._meeting, self._store = (
                (meeting, attend(meeting)) if meeting else _look_up(key, group_name, rank, deadline)
            )
            self._group = ProcessGroup(
                PrefixStore("group", self._store), rank, world_size, None, _START_S, group_name
            )
        except BaseException:
            if meeting:
                close_meeting(meeting)
            raise
        finally:
            if meeting:
                internal_kv._internal_kv_del(key)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return "UNISONO"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the backend needs neither torch nor a GPU."""
        return True

    def destroy_group(self) -> None:
        """Close the group of this actor."""
        self._group.close()
        self._store.close()
        close_meeting(self._meeting)

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        """Replace each rank's tensor by the reduction over all ranks."""
        self._group.all_reduce(tensor[0], _op(allreduce_options)).wait()

    def barrier(self, barrier_options: Any = None) -> None:
        """End on no rank before every rank has begun."""
        self._group.barrier().wait()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Replace the root's tensor by the reduction over all ranks."""
        root = reduce_options.root_rank
        self._group.reduce(tensor[0], root, _op(reduce_options)).wait()

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Copy the tensors of all ranks into the list of each rank."""
        self._group.all_gather(tensor_list[0], tensor[0]).wait()

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Copy the root's tensor into the tensors of all ranks."""
        self._group.broadcast(tensor[0], broadcast_options.root_rank).wait()

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any
    ) -> None:
        """Fill rank i's tensor with the reduction of `tensor_list[i]` over all ranks."""
        op = _op(reducescatter_options)
        self._group.reduce_scatter(tensor[0], tensor_list[0], op).wait()

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send to a rank of this group."""
        self._group.send(tensor[0], send_options.dst_rank).wait()

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive from a rank of this group."""
        self._group.recv(tensor[0], recv_options.src_rank).wait()


def _op(options: Any) -> ReduceOp:
    op: ReduceOp = getattr(ReduceOp, options.reduceOp.name)
    return op


def _announce(key: bytes, size: int) -> Meeting:
    """Serve a store, and publish its address in Ray's key-value store."""
    host = ray.util.get_node_ip_address()
    meeting = open_meeting(host, size, _START_S, None, _pickler.__name__)
    internal_kv._internal_kv_put(key, json.dumps(meeting).encode())
    return meeting


def _look_up(key: bytes, name: str, rank: int, deadline: Deadline) -> tuple[Meeting, TCPStore]:
    """Return the meeting that rank 0 has published, and its store.

    A rank 0 that died during an earlier start may have left an address behind. No store answers
    there, so this rank waits for the next address.
    """
    stale: bytes | None = None
    cause: UnisonoError | None = None
    while not deadline.expired():
        value = internal_kv._internal_kv_get(key)
        if value is not None and value != stale:
            meeting = Meeting(*json.loads(value))
            try:
                return meeting, attend(meeting)
            except NetworkError as error:
                stale, cause = value, error
        time.sleep(_POLL_S)
    raise RendezvousError(
        f"rank {rank} of the collective group {name!r} waited {deadline.timeout_s:g} s for rank 0"
    ) from cause
