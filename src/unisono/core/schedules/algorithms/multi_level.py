"""Several levels: the ranks of a host, then groups of hosts, groups of groups, and so on.

In a level of R groups each rank exchanges with R-1 others at once, and keeps an R-th of its part.
docs/howto/algorithms.md builds this algorithm line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, recv_reduce, send

# Ranks that exchange at once. More: fewer rounds, more messages that meet at an interface.
_MOST = 16


def all_reduce(p: int, local: int) -> Schedule:
    """Reduce-scatter level by level, all-gather back.

    Cost: 2 rounds per level, 2n(p-1)/p sent; 2n(H-1)/p of it to other hosts, H = p / `local`.
    Source: hierarchical all-reduce, as in Horovod; the levels are mixed-radix digits of a rank.
    """
    radices = [local, *_radices(p // local)]
    levels = len(radices)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        level = min(k, 2 * levels - 1 - k)
        # A rank's digits are its places in the groups. Its part begins at the parts before it.
        strides = [prod(radices[:i]) for i in range(levels + 1)]
        parts = [p // stride for stride in strides[1:]]
        places = [r // strides[i] % radices[i] for i in range(level + 1)]
        start = sum((places[i] * parts[i] for i in range(level)), np.zeros_like(r))[:, None]
        own, count = places[level][:, None], parts[level]
        other = (own + np.arange(1, radices[level])) % radices[level]
        peer = r[:, None] + (other - own) * strides[level]
        mine, theirs = start + own * count, start + other * count
        if k < levels:
            yield send(r[:, None], peer, Buf.OUTPUT, theirs, count)
            yield recv_reduce(r[:, None], peer, Buf.OUTPUT, mine, count)
        else:
            yield send(r[:, None], peer, Buf.OUTPUT, mine, count)
            yield recv(r[:, None], peer, Buf.OUTPUT, theirs, count)

    return Schedule("all_reduce", "multi_level", p, 2 * levels, exchange, output_chunks=p)


def _radices(hosts: int) -> list[int]:
    """Return factors of a number: the largest up to `_MOST` first, or prime."""
    found = []
    while hosts > 1:
        fits = [n for n in range(2, min(hosts, _MOST) + 1) if hosts % n == 0]
        found.append(max(fits, default=hosts))
        hosts //= found[-1]
    return found
