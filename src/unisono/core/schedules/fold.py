"""Fold a world of any size onto a power of two, for an algorithm that needs a power of two.

Let q be the largest power of two <= p. The odd ranks among the first 2(p-q) are *guests*. A guest
sends its data to the even rank before it, its *host*, and takes no part in the algorithm. The other
q ranks, the *members*, are numbered 0..q-1 in order. At the end each host sends its guest the
result.

Source: Thakur, Rabenseifner and Gropp 2005. MPICH folds onto the odd ranks instead.
Here rank 0 is always a member, so a root that is relabelled to 0 is never a guest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from unisono.core.schedules.ir import (
    BoolArray,
    Buf,
    ExchangeRule,
    IntArray,
    recv,
    recv_reduce,
    send,
)


@dataclass(frozen=True)
class Fold:
    """The map between p ranks and q = 2**k members."""

    p: int

    @property
    def q(self) -> int:
        """The number of members."""
        return 1 << (self.p.bit_length() - 1)

    @property
    def guests(self) -> int:
        """The number of guests, p - q."""
        return self.p - self.q

    @property
    def log2(self) -> int:
        """The exponent k of q = 2**k."""
        return self.p.bit_length() - 1

    def is_guest(self, rank: IntArray) -> BoolArray:
        """Return which ranks are guests."""
        guest: BoolArray = np.logical_and(rank < 2 * self.guests, rank % 2 == 1)
        return guest

    def is_host(self, rank: IntArray) -> BoolArray:
        """Return which ranks have a guest."""
        host: BoolArray = np.logical_and(rank < 2 * self.guests, rank % 2 == 0)
        return host

    def member(self, rank: IntArray) -> IntArray:
        """Return the member number of each rank; a guest gets its host's."""
        return np.where(rank < 2 * self.guests, rank // 2, rank - self.guests)

    def rank(self, member: IntArray) -> IntArray:
        """Return the rank of each member; if it is a host, its guest is the next rank."""
        return member + np.minimum(member, self.guests)


def with_fold(
    fold: Fold,
    chunks: int,
    rounds: int,
    inner: Callable[[int, IntArray, IntArray], Iterable[IntArray]],
) -> tuple[int, ExchangeRule]:
    """Wrap an all_reduce of the members into one of all ranks.

    Args:
        fold: The map of ranks to members.
        chunks: Chunks of the vector.
        rounds: Rounds of the inner algorithm.
        inner: `inner(k, ranks, members)` returns the rows of its round `k`.

    Returns:
        The number of rounds, and the function that returns their rows. Both include the rounds
        between hosts and guests.
    """
    if not fold.guests:
        return rounds, lambda k, r: inner(k, r, r)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        guest, host = fold.is_guest(r), fold.is_host(r)
        if k == 0:
            yield send(r, r - 1, Buf.OUTPUT, 0, chunks, where=guest)
            yield recv_reduce(r, r + 1, Buf.OUTPUT, 0, chunks, where=host)
        elif k <= rounds:
            members = r[~guest]
            yield from inner(k - 1, members, fold.member(members))
        else:
            yield send(r, r + 1, Buf.OUTPUT, 0, chunks, where=host)
            yield recv(r, r - 1, Buf.OUTPUT, 0, chunks, where=guest)

    return rounds + 2, exchange
