"""Buckets: assign parameters to messages, and hold the gradients of a message in one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bucket", "assign_buckets"]


class Bucket:
    """The gradients of some parameters in one flat tensor.

    A communication hook gets a bucket. The parameters are in the order in which backward is
    expected to reach them.

    Args:
        index: Position among the buckets, which are reduced in this order on every rank.
        parameters: Parameters of one dtype and device. The gradient of a single parameter is
            reduced in place.
        is_last: Whether this is the last bucket.

    Source: torch.distributed.GradBucket (2.13).
    """

    def __init__(self, index: int, parameters: Sequence[Any], is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._is_last = is_last
        self._is_shared = len(self._parameters) > 1
        if self._is_shared:
            self.set_buffer(self._zeros())
        self.pending = 0
        """Number of parameters whose gradient has not arrived yet in this backward pass."""

    def index(self) -> int:
        """Return the position among the buckets."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return [n]: the gradients one after another."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor by one of the same size."""
        self._buffer = buffer
        # Made once, because every arriving gradient needs its view.
        self._gradients = self.views(buffer)

    def take(self, at: int, gradient: Tensor | None, factor: float) -> None:
        """Copy the gradient of one parameter, times `factor`, into the bucket; None means zeros."""
        if not self._is_shared:
            if gradient is None or _is_lent(gradient):
                self.set_buffer(self._zeros())
            else:
                self.set_buffer(gradient.detach().reshape(-1))
        view = self._gradients[at]
        if gradient is None:
            view.zero_()
        elif factor != 1 or view.data_ptr() != gradient.data_ptr():
            torch.mul(gradient, factor, out=view)

    def hand_out(self, flat: Tensor, wanted: Sequence[bool]) -> None:
        """Make the parts of a flat tensor the gradients of the wanted parameters."""
        for parameter, part, is_wanted in zip(
            self._parameters, self.views(flat), wanted, strict=True
        ):
            if not is_wanted:
                continue
            if parameter.grad is None:
                parameter.grad = part.clone() if self._is_shared else part
            elif parameter.grad.data_ptr() != part.data_ptr():
                parameter.grad.copy_(part)
        if not self._is_shared:
            # The buffer is the parameter's gradient. A reference here would keep it alive after
            # `zero_grad`.
            del self._buffer, self._gradients

    def _zeros(self) -> Tensor:
        first = self._parameters[0]
        total = sum(p.numel() for p in self._parameters)
        return torch.zeros(total, dtype=first.dtype, device=first.device)

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return list(self._parameters)

    def gradients(self) -> list[Tensor]:
        """Return the gradients, shaped like the parameters; they are views of the buffer."""
        return list(self._gradients)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor that belong to the parameters."""
        sizes = [p.numel() for p in self._parameters]
        parts = zip(flat.split(sizes), self._parameters, strict=True)
        return [part.view(p.shape) for part, p in parts]


def _is_lent(gradient: Tensor) -> bool:
    """Return whether other tensors use this memory; backward may still read such a view."""
    storage = gradient.untyped_storage()
    # The gradient and `storage` each hold one reference.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def assign_buckets(
    parameters: Sequence[Any], caps_bytes: Sequence[int], alone_bytes: float = math.inf
) -> list[list[int]]:
    """Return the numbers of the parameters by bucket, in the order in which backward reaches them.

    The expected order is the reverse of the parameters' order, because most layers are defined in
    the order of their use. A bucket is closed when it has reached its size. The first buckets may
    be smaller, so that communication begins early. Each dtype and device has separate buckets.

    Args:
        parameters: The parameters in the order of definition.
        caps_bytes: Sizes of the first, second, ... bucket of each kind. The last size is used for
            all later buckets.
        alone_bytes: A parameter of this size or more gets a bucket by itself.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], int, int]] = {}
    for number in reversed(range(len(parameters))):
        p = parameters[number]
        own_bytes = p.numel() * p.element_size()
        if own_bytes >= alone_bytes:
            buckets.append([number])
            continue
        kind = (p.dtype, p.device)
        members, nbytes, position = open_buckets.get(kind, ([], 0, 0))
        if not members:
            buckets.append(members)
        members.append(number)
        nbytes += own_bytes
        if nbytes >= caps_bytes[min(position, len(caps_bytes) - 1)]:
            members, nbytes, position = [], 0, position + 1
        open_buckets[kind] = (members, nbytes, position)
    # A bucket is full when the gradient of its last member arrives.
    return sorted(buckets, key=lambda members: members[-1], reverse=True)
