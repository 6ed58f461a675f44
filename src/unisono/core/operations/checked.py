"""Checks of the arguments of operations: ranks, tags, lists."""

from __future__ import annotations

from typing import Any

from unisono.core.backends import Pending
from unisono.core.base.integers import as_integer
from unisono.core.operations.protocols import GroupView
from unisono.core.transports.messages import ANY_TAG, PROC_NULL
from unisono.errors import ArgumentTypeError, InvalidArgumentError


def one_each(group: GroupView, tensors: Any, name: str) -> None:
    """Check that a list has one entry for each rank.

    Raises:
        ArgumentTypeError: Not a list.
        InvalidArgumentError: More or fewer entries.
    """
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{name} must be a list, got {type(tensors).__name__}")
    if len(tensors) != group.size():
        raise InvalidArgumentError(
            f"{name} has {len(tensors)} entries, expected one for each of {group.size()} ranks"
        )


def list_on_root(group: GroupView, tensors: Any, root: int, name: str) -> None:
    """Check that a list is there on the root, and only there.

    Raises:
        ArgumentTypeError: Not a list.
        InvalidArgumentError: Missing, in the wrong place, or of the wrong length.
    """
    if group.rank() != root:
        # The truth value of an array is not that of a list.
        if len(tensors) if isinstance(tensors, (list, tuple)) else tensors is not None:
            raise InvalidArgumentError(f"{name} is for the root only, which is rank {root}")
    elif tensors is None:
        raise InvalidArgumentError(f"{name} is required on the root, which is this rank")
    else:
        one_each(group, tensors, name)


def member_rank(group: GroupView, rank: Any, what: str) -> int:
    """Check a rank of the group."""
    number = as_integer(rank, what)
    if not 0 <= number < group.size():
        raise InvalidArgumentError(
            f"{what}={number} is not a rank of group '{group.name}' (0..{group.size() - 1})"
        )
    return number


def peer_rank(group: GroupView, rank: Any, what: str) -> int:
    """Check the other rank of a message."""
    number = as_integer(rank, what)
    return number if number == PROC_NULL else member_rank(group, number, what)


def first_of(tensors: Any, name: str) -> Any:
    """Check that a list has an entry; return the first."""
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{name} must be a list, got {type(tensors).__name__}")
    if not tensors:
        raise InvalidArgumentError(f"{name} is empty; expected at least one array")
    return tensors[0]


def first_of_pairs(outputs: Any, tensors: Any) -> Any:
    """Check that two lists have as many entries; return the first of `tensors`."""
    first = first_of(tensors, "inputs")
    first_of(outputs, "outputs")
    if len(outputs) != len(tensors):
        raise InvalidArgumentError(
            f"outputs has {len(outputs)} entries and inputs {len(tensors)}; expected as many"
        )
    return first


def as_tag(tag: Any, *, receives: bool = False) -> int:
    """Check a tag."""
    number = as_integer(tag, "tag")
    if not 0 <= number < 2**63 and not (receives and number == ANY_TAG):
        raise InvalidArgumentError(f"tag={number} is outside 0..2**63-1")
    return number


def nothing_received(output: Any) -> Pending:
    """Return the end of a receive from `PROC_NULL`."""
    pending = Pending([output], done=True)
    pending.source, pending.tag, pending.count = PROC_NULL, ANY_TAG, 0
    return pending
