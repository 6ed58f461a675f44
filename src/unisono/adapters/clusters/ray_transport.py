"""Ray's direct transport by messages: arrays that an actor returns go straight to the next actor.

The actors are those of a group of `init_group`. Ray makes the sends and receives in a thread of its
own, so that they have a group of their own too.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from ray._private import ray_constants
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)

from unisono.adapters.clusters.member import Transfers
from unisono.core.base.buffers import view
from unisono.core.groups.process_group import ProcessGroup
from unisono.errors import NotInitializedError

_TIMEOUT_S: float = ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS
"""RAY_rdt_fetch_fail_timeout_milliseconds; then Ray gives the transfer up."""


@dataclass
class _TransferObject(TensorTransportMetadata):
    """The arrays of one object."""

    tag: int = 0


@dataclass
class _TransferRanks(CommunicatorMetadata):
    """The ranks of a transfer; those of no group have an empty token."""

    token: str = ""
    src: int = -1
    dst: int = -1


def register() -> None:
    """Register the transports in this process; see `unisono.ray.register_tensor_transport`."""
    register_tensor_transport("UNISONO_NUMPY", ["cpu"], NumpyTransport, np.ndarray)
    if find_spec("torch"):
        kind = import_module("torch").Tensor
        register_tensor_transport("UNISONO", ["cpu"], TorchTransport, kind)


class _RayTransport(TensorTransportManager):  # type: ignore[misc, unused-ignore]
    """What the transports of NumPy arrays and of tensors share."""

    name = ""

    def tensor_transport_backend(self) -> str:
        """Return the name of the transport."""
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        """Return False: both actors take part."""
        return False

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: otherwise Ray would kill both actors of a transfer that fails."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return whether the actor is in a group of `init_group` that this process knows."""
        return any(actor._actor_id in ids for ids in (Transfers.actors or {}).values())

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[Any]
    ) -> _TransferObject:
        """Describe the arrays of an object.

        Raises:
            UnsupportedError: An array of Python objects.
        """
        for each in rdt_object:
            view(each, write=False)
        places = {str(getattr(each, "device", "cpu")) for each in rdt_object}
        meta = [(tuple(each.shape), each.dtype) for each in rdt_object]
        tag = hashlib.blake2b(obj_id.encode(), digest_size=7).digest()
        return _TransferObject(meta, ", ".join(sorted(places)) or "cpu", int.from_bytes(tag))

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> _TransferRanks:
        """Return the ranks of the actors in their newest group.

        An error here would end the process, so actors of no group get theirs in the transfer.
        """
        src, dst = src_actor._actor_id, dst_actor._actor_id
        for token, ids in reversed([*(Transfers.actors or {}).items()]):
            if src in ids and dst in ids:
                return _TransferRanks(token, ids.index(src), ids.index(dst))
        return _TransferRanks()

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a new array."""
        raise NotImplementedError

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Receive the arrays of an object."""
        group, tag = _group(communicator_metadata), tensor_transport_metadata.tag
        metas = tensor_transport_metadata.tensor_meta
        arrays = target_buffers or [self.empty(*meta) for meta in metas]
        for array in arrays:
            group.recv(array, communicator_metadata.src, tag, timeout=_TIMEOUT_S).wait()
        return arrays

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Send the arrays of an object."""
        group, tag = _group(communicator_metadata), tensor_transport_metadata.tag
        for tensor in tensors:
            group.send(tensor, communicator_metadata.dst, tag, timeout=_TIMEOUT_S).wait()

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        """Do nothing: a transfer holds nothing after its end."""

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """End the transfers of the group: the other side of one has failed, or Ray gave it up."""
        ranks = communicator_metadata
        if ranks.token == Transfers.token and Transfers.group is not None:
            reason = f"Ray ended the transfer from rank {ranks.src} to rank {ranks.dst}"
            Transfers.group.abort(reason)


class NumpyTransport(_RayTransport):
    """Transport of NumPy arrays."""

    name = "UNISONO_NUMPY"

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a new array."""
        return np.empty(shape, dtype)


class TorchTransport(_RayTransport):
    """Transport of torch's tensors."""

    name = "UNISONO"

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a new tensor."""
        return sys.modules["torch"].empty(shape, dtype=dtype)


def _group(ranks: _TransferRanks) -> ProcessGroup:
    """Return the group of a transfer.

    Raises:
        NotInitializedError: This process is in another group, or in none.
    """
    if not ranks.token or ranks.token != Transfers.token or Transfers.group is None:
        raise NotInitializedError(
            "a transfer between Ray actors that are in no group of init_group, or in a later group",
            hint="call unisono.ray.register_tensor_transport, then init_group, before the methods",
        )
    return Transfers.group
