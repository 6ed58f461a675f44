"""Gradients that travel together: which parameters share a message, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bucket", "assign_buckets"]


class Bucket:
    """The gradients of some parameters in one flat tensor.

    What a communication hook gets. The parameters are in the order in which backward is expected
    to reach them.

    Args:
        index: Position among the buckets; they are reduced in this order on every rank.
        parameters: Of one dtype and device.
        is_last: No bucket comes after it.

    Source: torch.distributed.GradBucket (2.13).
    """

    def __init__(self, index: int, parameters: Sequence[Any], is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._is_last = is_last
        first = self._parameters[0]
        total = sum(p.numel() for p in self._parameters)
        self.set_buffer(torch.zeros(total, dtype=first.dtype, device=first.device))
        self.pending = 0
        """Parameters whose gradient is still to come in this backward pass."""

    def index(self) -> int:
        """Return the position among the buckets."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket comes after this one."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return [n]: the gradients one after another."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor by one of the same size."""
        self._buffer = buffer
        # Made once: a gradient's place is asked for whenever one arrives.
        self._gradients = self.views(buffer)

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


def assign_buckets(parameters: Sequence[Any], caps_bytes: Sequence[int]) -> list[list[int]]:
    """Return the parameters' numbers, by bucket, in the order in which backward reaches them.

    That order is the reverse of the parameters', as layers are mostly defined in the order of
    their use. A bucket is closed when it has reached its size; the first ones may be smaller, so
    that communication begins early. Parameters of another dtype or device get buckets of their
    own.

    Args:
        parameters: In the order of definition.
        caps_bytes: Sizes of the first, second, ... bucket of each kind; the last one holds for
            all that follow.
    """
    buckets: list[list[int]] = []
    open_ones: dict[object, tuple[list[int], int, int]] = {}
    for number in reversed(range(len(parameters))):
        p = parameters[number]
        kind = (p.dtype, p.device)
        if kind not in open_ones:
            made: list[int] = []
            buckets.append(made)
            open_ones[kind] = (made, 0, 0)
        members, nbytes, position = open_ones[kind]
        members.append(number)
        nbytes += p.numel() * p.element_size()
        if nbytes < caps_bytes[min(position, len(caps_bytes) - 1)]:
            open_ones[kind] = (members, nbytes, position)
            continue
        following: list[int] = []
        buckets.append(following)
        open_ones[kind] = (following, 0, position + 1)
    return sorted((bucket for bucket in buckets if bucket), reverse=True)
