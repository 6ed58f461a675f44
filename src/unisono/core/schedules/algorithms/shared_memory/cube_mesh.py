"""All-reduce on a hybrid cube mesh: eight ranks with four direct neighbours each.

The ranks form two fully connected quads {0,1,2,3} and {4,5,6,7}. A link joins ranks r and r+4. This
is the wiring of NVIDIA's DGX-1. A rank gets the data of its three non-neighbours only from its
neighbour in the other quad, its *relay*.
Source: PyTorch's IntraNodeComm (hybridCubeMeshAllReduce, up to torch 2.6).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.algorithms.shared_memory.one_shot import reduce_in_rank_order
from unisono.core.schedules.ir import Buf, IntArray, Schedule, post, read_reduce

OUTPUT = Buf.OUTPUT
RANKS = 8
QUAD = 4


def all_reduce(p: int) -> Schedule:
    """Reduce within the quad, then add the relay's partial result.

    All ranks of a quad reduce in the same order, and a+b = b+a. The results are bitwise equal.

    Use: small data on 8 GPUs with the links of a DGX-1.
    Cost: 2 rounds, 3n + n read and reduced by every rank.
    Source: PyTorch's hybridCubeMeshAllReduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        first = r // QUAD * QUAD
        if k == 0:
            for turn in range(QUAD):
                yield post(r, first + turn, OUTPUT, 0, where=r != first + turn)
            yield from reduce_in_rank_order(r, first[:, None] + np.arange(QUAD))
        else:
            relay = r ^ QUAD
            yield post(r, relay, OUTPUT, 0)
            yield read_reduce(r, relay, OUTPUT, 0)

    return Schedule("all_reduce", "cube_mesh", p, 2, exchange, scratch_chunks=1)
