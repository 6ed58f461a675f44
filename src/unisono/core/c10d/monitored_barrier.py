"""monitored_barrier: a barrier whose error names the missing ranks on every rank.

Rank 0 of the group receives a message from each other rank. Then it sends the list of missing ranks
to all of them, also to ranks that come too late. The group stays usable unless a rank was lost.

Source: torch.distributed.monitored_barrier (2.13), which Gloo alone has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.text import name_ranks
from unisono.core.base.threads.streams import on_host
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, member_group
from unisono.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Context,
    PeerLostError,
    UnisonoError,
)

# Tags that users do not have: one per barrier, so that a rank that is late for a barrier is not
# counted in the next.
_FIRST_TAG = 2**62

# The verdict of rank 0 must reach the other ranks in time. So rank 0 stops waiting early, by a
# tenth of the time but at most a second, and the other ranks wait a little longer.
_EARLY = 0.1
_EARLY_S = 1.0
_TRAVEL_S = 0.1


def monitored_barrier(
    group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Return on no rank before every rank has called it; otherwise the error names the missing.

    Slower than `barrier`, whose error names ranks as well. But after a time-out of
    monitored_barrier the group stays usable.

    Args:
        group: The default group if None.
        timeout: The group's if None.
        wait_all_ranks: When a rank is found to be lost, go on waiting for the other ranks, so that
            the error names every missing rank.

    Raises:
        CollectiveTimeoutError: Some ranks did not call in time. Raised on all ranks that did;
            names the missing ranks.
        PeerLostError: Names the ranks whose processes have ended.
        CollectiveMismatchError: Another rank's arguments are wrong.
    """
    if (pg := member_group(group, "monitored_barrier")) is None:
        return
    if (block := pg._block_here()) is not None and block.takes_all:
        block.refuse("monitored_barrier")
    tag = _FIRST_TAG + pg.counts["monitored_barrier"]
    pg.counts["monitored_barrier"] += 1
    wrong: BaseException | None = None
    hooks, seen = pg._hooks, None
    try:
        deadline = Deadline(pg.timeout_s if timeout is None else timeout)
        seen = None if hooks is None else hooks.begin_named(pg, "monitored_barrier", -1)
    except BaseException as error:
        # The other ranks wait for this rank, so it takes part.
        wrong, deadline = error, Deadline(pg.timeout_s)
    state = _HERE if wrong is None else _REFUSED
    with nullcontext() if hooks is None else hooks.parts():
        if pg.rank() == 0:
            verdict = _collect(pg, tag, deadline, wait_all_ranks, state)
        else:
            verdict = _report(pg, tag, deadline, state)
    if wrong is not None:
        raise wrong
    missing, lost = np.flatnonzero(verdict == _MISSING), np.flatnonzero(verdict == _LOST)
    if missing.size or lost.size:
        raise _error(pg, deadline, missing.tolist(), lost.tolist())
    if (refused := np.flatnonzero(verdict == _REFUSED)).size:
        ranks = tuple(pg.ranks[rank] for rank in refused.tolist())
        raise CollectiveMismatchError(
            f"monitored_barrier in group '{pg.name}' does not match on rank {pg.ranks[pg.rank()]}: "
            f"{name_ranks(ranks)} called it, but refused it: wrong arguments",
            context=Context(
                rank=pg.ranks[pg.rank()],
                group=pg.name,
                op="monitored_barrier",
                peers=ranks,
                usable=True,
            ),
        )
    if hooks is not None and seen is not None:
        hooks.end(seen, None)


_HERE, _MISSING, _LOST, _REFUSED = range(4)


@on_host
def _collect(
    pg: ProcessGroup, tag: int, deadline: Deadline, wait_all_ranks: bool, state: int
) -> np.ndarray[Any, Any]:
    """Wait for all other ranks; return the state of each rank, and send it to them."""
    verdict = np.full(pg.size(), _HERE, np.uint8)
    verdict[0] = state
    boxes = np.empty((pg.size(), 1), np.uint8)
    left_s = deadline.remaining()
    limit_s = left_s - min(_EARLY * left_s, _EARLY_S)
    works = {
        peer: pg.recv(boxes[peer], peer, tag, async_op=True, timeout=limit_s)
        for peer in range(1, pg.size())
    }
    for peer, work in works.items():
        try:
            work.wait()
            verdict[peer] = boxes[peer, 0]
        except CollectiveTimeoutError:
            verdict[peer] = _MISSING
        except PeerLostError:
            verdict[peer] = _LOST
            if not wait_all_ranks:
                break
    for peer, work in works.items():
        if not work.is_completed():
            work.cancel()
        if verdict[peer] != _LOST:
            pg.send(verdict, peer, tag, async_op=True)
    return verdict


@on_host
def _report(pg: ProcessGroup, tag: int, deadline: Deadline, state: int) -> np.ndarray[Any, Any]:
    """Report to rank 0 that this rank has called; return rank 0's state of each rank."""
    verdict = np.empty(pg.size(), np.uint8)
    here = np.full(1, state, np.uint8)
    sent = pg.send(here, 0, tag, async_op=True, timeout=deadline.remaining())
    try:
        pg.recv(verdict, 0, tag, timeout=deadline.remaining() + _TRAVEL_S)
        sent.wait()
    except CollectiveTimeoutError:
        verdict[:] = _HERE
        verdict[0] = _MISSING
    except PeerLostError:
        verdict[:] = _HERE
        verdict[0] = _LOST
    return verdict


def _error(
    pg: ProcessGroup, deadline: Deadline, missing: Sequence[int], lost: Sequence[int]
) -> UnisonoError:
    me = pg.ranks[pg.rank()]
    parts = []
    if missing:
        parts.append(f"{name_ranks([pg.ranks[rank] for rank in missing])} never entered it")
    if lost:
        parts.append(f"lost {name_ranks([pg.ranks[rank] for rank in lost])}")
    head = f"monitored_barrier in group '{pg.name}'"
    context = Context(
        rank=me,
        group=pg.name,
        op="monitored_barrier",
        peers=tuple(pg.ranks[rank] for rank in sorted([*missing, *lost])),
        usable=not lost,
    )
    if missing:
        what = f"{head} timed out after {deadline} on rank {me}"
        return CollectiveTimeoutError(f"{what}: {', '.join(parts)}", context=context)
    return PeerLostError(f"{head} failed on rank {me}: {', '.join(parts)}", context=context)
