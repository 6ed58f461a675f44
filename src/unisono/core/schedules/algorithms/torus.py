"""All-reduce on a grid of ranks: rings along the rows, then rings along the columns.

Rank y*w + x is at (x, y) of w columns and h rows. The width w is the largest divisor of p up to the
square root of p. The bytes are those of a ring, in about 4 sqrt(p) rounds instead of 2p.

In the formulas n is the size of the vector, p = w*h the world size.

Source: Ying, Kumar, Chen, Wang and Cheng, "Image classification at supercomputer scale", 2018
(2-D ring); Mikami et al., "Massively distributed SGD", 2018 (2-D torus).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, recv_reduce, send

OUTPUT = Buf.OUTPUT


def width(p: int) -> int:
    """Return the number of columns, w; 1 if the world size is a prime."""
    return next(w for w in range(isqrt(p), 0, -1) if p % w == 0)


def all_reduce(p: int) -> Schedule:
    """Reduce-scatter along the rows, all-reduce along the columns, all-gather along the rows.

    Use: large data on many ranks: a ring's bytes in about 4 sqrt(p) rounds.
    Cost: 2(w-1) + 2(h-1) rounds, 2n(p-1)/p sent, n(p-1)/p reduced.
    Source: as the module.
    """
    w = width(p)
    h = p // w

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        x, y = r % w, r // w
        if w - 1 <= k < w - 1 + 2 * (h - 1):
            # The rank has the complete row sums of the h chunks from here on.
            first, k = (x + 1) % w * h, k - (w - 1)
            take = recv_reduce if k < h - 1 else recv
            yield send(r, (r + w) % p, OUTPUT, first + (y - k) % h)
            yield take(r, (r - w) % p, OUTPUT, first + (y - k - 1) % h)
            return
        take, k = (recv_reduce, k) if k < w - 1 else (recv, k - 2 * (h - 1))
        yield send(r, y * w + (x + 1) % w, OUTPUT, (x - k) % w * h, h)
        yield take(r, y * w + (x - 1) % w, OUTPUT, (x - k - 1) % w * h, h)

    rounds = 2 * (w - 1) + 2 * (h - 1)
    return Schedule("all_reduce", "torus", p, rounds, exchange, output_chunks=p)
