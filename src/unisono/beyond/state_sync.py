"""Copy the state of a job from the survivors to the newcomers.

The first survivor describes its state: the dict without the arrays. Every rank compares its own
state with it, before an array is written. Then the bytes of all arrays, one after the other, are
divided evenly between the survivors, and each sends its part to each newcomer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.beyond.membership import membership_of_world
from unisono.core.base.buffers import BufferView, is_torch, view
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.types import dtype_of_numpy
from unisono.core.c10d.objects.functions import all_gather_object, broadcast_object_list
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import require_group
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    Context,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)

_TAG = 0x53594E43
_DEEPEST = 100
"""Most levels of dicts and lists in a state; far below the depth at which Python gives up."""
_LEAST = 64 * 1024
"""Bytes below which a survivor's part is not made smaller: a message costs more than it saves."""


@dataclass(frozen=True)
class _Slot:
    """The place of an array in a state: everything but its values."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Slot | None:
        """Return the slot of an array that can be sent; None for any other object."""
        if is_torch(value):
            return cls("torch", str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if isinstance(value, np.ndarray):
            try:
                dtype_of_numpy(value.dtype)
            except UnsupportedError:
                return None
            return cls("numpy", value.dtype.str, value.shape)
        return None

    def allocate(self) -> Any:
        """Return a new array for the slot."""
        if self.kind == "numpy":
            return np.empty(self.shape, self.dtype)
        if (torch := sys.modules.get("torch")) is None:
            raise InvalidArgumentError("it has tensors, but this process has not imported torch")
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)}"


def sync_state(state: dict[Any, Any], timeout: Timeout | None = None) -> None:
    """Copy the state of the survivors to the newcomers of the last `reconfigure`.

    All ranks call this function with dicts of the same structure. On newcomers arrays and tensors
    are filled in place, an array that is missing is made, and every other object is replaced by a
    copy. On survivors nothing changes; they must hold equal states, as they do after the same
    committed steps. Without newcomers the call does nothing.

    Args:
        state: Arrays, tensors and objects that pickle can copy, also in nested dicts and lists.
        timeout: Of the whole call; the default group's if None.

    Raises:
        ArgumentTypeError: `state` is not a dict.
        InvalidArgumentError: The states have different structures, or a dict or list contains
            itself. No array is changed.
        CollectiveError: No rank holds the state: the survivors ended before they sent it.
        CommunicationError: A rank was lost. The arrays of newcomers hold parts of the state, and
            they are newcomers again after the next `reconfigure`.
    """
    if not isinstance(state, dict):
        raise ArgumentTypeError(f"sync_state: state must be a dict, got {type(state).__name__}")
    membership, group = membership_of_world(), require_group(None)
    deadline = Deadline(group.timeout_s if timeout is None else timeout)
    if copy_state(state, membership.sources, deadline):
        membership.hold_state()


def copy_state(state: dict[Any, Any], sources: tuple[int, ...], deadline: Deadline) -> bool:
    """Copy the state of some ranks of the default group to the others, as `sync_state` does.

    Args:
        state: The state, equal on the sources.
        sources: The ranks that hold it.
        deadline: Of the whole call.

    Returns:
        Whether there was a rank to copy to.
    """
    group = require_group(None)
    newcomers = [rank for rank in range(group.size()) if rank not in sources]
    if not newcomers:
        return False
    if not sources:
        raise CollectiveError(
            f"sync_state: no rank of generation {membership_of_world().generation} holds the state",
            context=Context(usable=True),
            hint="the ranks that held it were lost; start again from a checkpoint",
        )
    views = _prepare(group, state, sources[0], receives=group.rank() in newcomers, due=deadline)
    works = []
    for number, piece in _pieces(views, len(sources)):
        how: Any = {"async_op": True, "timeout": deadline.remaining()}
        source = sources[number]
        if group.rank() in newcomers:
            works.append(group.recv(piece, source, _TAG, **how))
        elif group.rank() == source:
            works += [group.send(piece, each, _TAG, **how) for each in newcomers]
    for work in works:
        work.wait()
    for each in views if group.rank() in newcomers else ():
        each.unpack()
    # A newcomer may become a source only when all newcomers have the state.
    group.barrier(timeout=deadline.remaining(), _label="sync_state")
    return True


def _prepare(
    group: ProcessGroup, state: dict[Any, Any], lead: int, *, receives: bool, due: Deadline
) -> list[BufferView]:
    """Compare the states; return the memory of all arrays in the same order on all ranks."""
    box: list[Any] = [None, ""]
    if group.rank() == lead:
        try:
            box[0] = _described(state, "state")
        except UsageError as error:
            box[1] = error.what
    broadcast_object_list(box, src=lead, timeout=due.remaining())
    if box[1]:
        raise InvalidArgumentError(f"sync_state: rank {lead}: {box[1]}")
    views: list[BufferView] = []
    problem = ""
    try:
        merged = _merge(state, box[0], "state", views, receives=receives)
    except UsageError as error:
        problem = error.what
    problems: list[Any] = [None] * group.size()
    all_gather_object(problems, problem, timeout=due.remaining())
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise InvalidArgumentError(
            f"sync_state: the state differs from that of rank {lead}: {'; '.join(found)}"
        )
    if receives:
        _replace(state, merged)
    return views


def _described(value: Any, path: str, parents: tuple[Any, ...] = ()) -> Any:
    """Return a state with slots in place of the arrays; `parents` are what contains the value."""
    if not isinstance(value, (dict, list)):
        return _Slot.of(value) or value
    if len(parents) > _DEEPEST or any(value is each for each in parents):
        raise InvalidArgumentError(f"{path} contains itself, or is more than {_DEEPEST} deep")
    inner = (*parents, value)
    if isinstance(value, dict):
        return {key: _described(each, f"{path}[{key!r}]", inner) for key, each in value.items()}
    return [_described(each, f"{path}[{i}]", inner) for i, each in enumerate(value)]


def _merge(mine: Any, wanted: Any, path: str, views: list[BufferView], *, receives: bool) -> Any:
    """Return `wanted` with arrays of `mine` in the slots, and append the arrays to `views`."""
    if isinstance(wanted, dict):
        own = mine if isinstance(mine, dict) else {}
        if surplus := [key for key in own if key not in wanted]:
            raise InvalidArgumentError(f"{path} has {surplus[0]!r} besides")
        return {
            key: _merge(own.get(key), each, f"{path}[{key!r}]", views, receives=receives)
            for key, each in wanted.items()
        }
    if isinstance(wanted, list):
        fits = isinstance(mine, list) and len(mine) == len(wanted)
        return [
            _merge(mine[i] if fits else None, each, f"{path}[{i}]", views, receives=receives)
            for i, each in enumerate(wanted)
        ]
    if not isinstance(wanted, _Slot):
        return wanted
    if mine is None and receives:
        mine = wanted.allocate()
    if (slot := _Slot.of(mine)) != wanted:
        raise InvalidArgumentError(f"{path} is {slot or type(mine).__name__}, expected {wanted}")
    views.append(view(mine, write=receives, name=path))
    return mine


def _replace(mine: Any, merged: Any) -> Any:
    """Put the parts of `merged` into the dicts and lists of `mine`; return the result."""
    if isinstance(mine, dict) and isinstance(merged, dict):
        for key, each in merged.items():
            mine[key] = _replace(mine.get(key), each)
        return mine
    if isinstance(mine, list) and isinstance(merged, list) and len(mine) == len(merged):
        mine[:] = [_replace(old, new) for old, new in zip(mine, merged, strict=True)]
        return mine
    return merged


def _pieces(views: list[BufferView], sources: int) -> Iterator[tuple[int, Any]]:
    """Cut the bytes of all arrays into a part for each source; yield its number and its pieces."""
    total = sum(each.nbytes for each in views)
    part = max(_LEAST, -(-total // sources))
    at = 0
    for each in views:
        data = each.array.view(np.uint8)
        begin = 0
        while begin < data.size:
            number = (at + begin) // part
            end = min(data.size, (number + 1) * part - at)
            yield number, data[begin:end]
            begin = end
        at += data.size
