"""Global ranks and ranks in a group as arguments, and errors of arguments that other ranks get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unisono.core.base.integers import as_integer
from unisono.core.groups.process_group import ProcessGroup
from unisono.errors import InvalidArgumentError, UsageError


def group_rank_of(
    group: ProcessGroup,
    call: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
    what: str = "peer",
) -> int:
    """Return the rank in `group` that a pair of arguments such as (src, group_src) means.

    Raises:
        InvalidArgumentError: Both or neither given, or not a member.
    """
    if global_rank is not None and group_rank is not None:
        raise InvalidArgumentError(f"{call}: can't specify both a group rank and a global rank")
    if group_rank is None and global_rank is None:
        global_rank = default
    if group_rank is None and global_rank is None:
        raise InvalidArgumentError(
            f"{call}: must specify a global rank or a group rank",
            hint="PROC_NULL is the rank beyond the edge of a grid",
        )
    try:
        if group_rank is not None:
            return as_integer(group_rank, what)
        assert global_rank is not None
        return group.group_rank(global_rank)
    except UsageError as error:
        error.name_call(call)
        raise


@contextlib.contextmanager
def reporting_bad_arguments(group: ProcessGroup, call: str) -> Iterator[None]:
    """Report what ends this block to the other ranks of `group`, which wait in `call`.

    The block checks the arguments of a collective call, and makes no call itself.
    """
    since = group.place()
    try:
        yield
    except BaseException as error:
        # Unless a block inside this block has reported it.
        if not group.is_known_to_all(error, since):
            group.refuse(call, error)
        raise


def root_of(
    pg: ProcessGroup,
    call: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
) -> int:
    """Return as `group_rank_of`, for a collective; report an error to the other ranks too."""
    with reporting_bad_arguments(pg, call):
        return group_rank_of(pg, call, global_rank, group_rank, default, "root")
