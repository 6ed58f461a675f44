"""Partners on alternating sides: 1, 1, 3, 5, 11, 21, ... ranks away, to the right, left, right, ...

Even ranks go this way, odd ranks the other way. The distances are (1 - (-2)**(s+1)) / 3 for step
s = 0, 1, 2, ... With ranks on a ring or on neighbouring hosts, most messages are shorter than
those to partners 1, 2, 4, ... ranks away.

In the formulas n is the size of the vector, p the world size, `lg` the logarithm to base 2.

Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
allreduce", NSDI 2024. De Sensi et al., "Bine trees: enhancing collective operations by optimizing
communication locality", SC 2025.
"""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.algorithms.halving_doubling import in_halves
from unisono.core.schedules.algorithms.tree import binomial
from unisono.core.schedules.fold import Fold
from unisono.core.schedules.ir import IntArray, Schedule, ceil_log2


def all_reduce(p: int) -> Schedule:
    """Reduce-scatter with the nearest partner first, then all-gather in reverse.

    The nearest partner gets half of the vector, the farthest the smallest part. For other p than
    2**k ranks fold; see `fold`.

    Use: as halving_doubling, where distant ranks are slower, as on a torus.
    Cost: 2 lg p rounds, 2n(p-1)/p sent, n(p-1)/p reduced; for other p than 2**k as
        halving_doubling.
    Source: De Sensi et al. 2024, bandwidth-optimal variant.
    """
    q = Fold(p).q
    rank = _paths(q, range(ceil_log2(q)))
    return in_halves("swing", p, np.argsort(rank), lambda k, member: _partner(q, k, member))


def broadcast(p: int, root: int) -> Schedule:
    """Double the number of ranks that have the vector; the farthest partner is first.

    Only for p = 2**k.

    Use: as binomial, where distant ranks share slow links.
    Cost: lg p rounds, n lg p sent by the root.
    Source: De Sensi et al. 2025, distance-halving tree.
    """
    return binomial("broadcast", "bine", p, root, _paths(p, range(ceil_log2(p))[::-1]))


def reduce(p: int, root: int) -> Schedule:
    """Halve the number of ranks that hold partial results; the nearest partner is first.

    Only for p = 2**k.

    Cost: lg p rounds, n sent, n lg p received and reduced by the root.
    Source: De Sensi et al. 2025, the broadcast in reverse.
    """
    return binomial("reduce", "bine", p, root, _paths(p, range(ceil_log2(p))[::-1]))


def _partner(q: int, step: int, v: IntArray) -> IntArray:
    """Return the partners of ranks v of q = 2**k in a step."""
    distance = int(1 - (-2) ** (step + 1)) // 3
    return (v + np.where(v % 2 == 0, distance, -distance)) % q


def _paths(q: int, steps: range) -> IntArray:
    """Return the ranks that rank 0 reaches: bit lg q - 1 - i of an index is set for step i."""
    rank = np.zeros(1, np.int64)
    for step in steps:
        rank = np.stack([rank, _partner(q, step, rank)], axis=1).ravel()
    return rank
