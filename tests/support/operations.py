"""Every operation once: what each rank gives to it, and what its arrays must hold afterwards."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import unisono as dist
from unisono.testing.answers import UFUNCS

# Operation -> the collective whose algorithms it takes.
COLLECTIVES = {
    "broadcast": "broadcast", "all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "reduce": "reduce", "scan": "scan", "exscan": "exscan", "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather", "all_gather_coalesced": "all_gather",
    "gather": "gather", "scatter": "scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all", "barrier": "barrier",
}  # fmt: skip


@dataclass
class Operations:
    """One rank's calls on new arrays, with values that every rank can compute for every other.

    A method makes the call of its name and returns what the call returned. `check` compares the
    arrays of all calls. A subclass may choose values, sizes and memory.

    Attributes:
        me: Rank in the group.
        p: Number of ranks.
        count: Elements of a block.
        root: Rank of the root in the group.
        op: Reduce op.
        dtype: Of all arrays.
        shift: Added to all values, so that a call cannot pass with the result of another call.
        modulus: Bound of the values, for dtypes that hold small numbers only.
        uneven: Elements of the block of each rank, where these differ.
        in_place: Whether an input is a part of the output, where both have the same blocks.
        ranks: World rank of each rank; None: the same numbers.
        how: Keywords of all calls.
        made: (array, the values it must have) of the calls made.
    """

    me: int
    p: int
    count: int = 11
    root: int = 0
    op: Any = dist.ReduceOp.SUM
    dtype: Any = np.int64
    shift: int = 0
    modulus: int = 1 << 40
    uneven: Any = None
    in_place: bool = False
    ranks: Any = None
    how: dict[str, Any] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)

    def check(self, *what):
        """Compare all arrays with what they must hold; `what` is named on failure."""
        for got, after in self.made:
            assert got.dtype == after.dtype
            assert np.array_equal(got, after), f"{what}: got {got}, expected {after}"

    # ---- values

    def value(self, rank, part=0, count=None):
        """Return the block `part` of a rank."""
        numbers = np.arange(self.count if count is None else count) * 3 + 100 * rank
        return ((numbers + 10_007 * part + self.shift) % self.modulus).astype(self.dtype)

    def everyone(self, part=0, count=None):
        """Return the block `part` of every rank."""
        return [self.value(rank, part, count) for rank in range(self.p)]

    def reduced(self, ranks, part=0, count=None):
        """Return the reduction of the block `part` of some ranks."""
        parts = [self.value(rank, part, count) for rank in ranks]
        total = UFUNCS.get(self.op, np.add).reduce(parts, dtype=parts[0].dtype)
        if self.op.factor is not None:
            total = total * self.op.factor
        elif self.op.name == "AVG":
            total = total / len(parts)
        return np.asarray(total).astype(parts[0].dtype)

    def sizes(self):
        """Return the elements of the block of each rank."""
        return list(self.uneven or [self.count] * self.p)

    def table(self):
        """Return the elements that rank i has for rank j, as [i, j]."""
        return np.tile(self.sizes(), (self.p, 1))

    def rows(self, counts):
        """Return how many entries of an array's first dimension have so many elements."""
        return counts.tolist()

    def counts(self):
        """Return the elements of each array of a call on several arrays."""
        return [self.count, self.count + 2]

    # ---- memory

    def write(self, before, after):
        """Return an array with `before`, which must become `after`."""
        self.made.append((before.copy(), after))
        return self.made[-1][0]

    def keep(self, values):
        """Return an array that the call may write, and whose values must stay."""
        return self.write(values, values)

    def read(self, values):
        """Return an array that the call reads only."""
        return self.keep(values)

    def room(self, after):
        """Return an array that must become `after`."""
        return self.write(np.zeros_like(after), after)

    def rooms(self, afters):
        return [self.room(after) for after in afters]

    def reads(self, parts):
        return [self.read(values) for values in parts]

    def options(self):
        """Return the keywords of a call."""
        return self.how

    # ---- one array

    @property
    def is_root(self):
        return self.me == self.root

    @property
    def world_root(self):
        return self.root if self.ranks is None else self.ranks[self.root]

    def all_reduce(self):
        x = self.write(self.value(self.me), self.reduced(range(self.p)))
        return dist.all_reduce(x, self.op, **self.options())

    def broadcast(self):
        x = self.write(self.value(self.me), self.value(self.root))
        return dist.broadcast(x, self.world_root, **self.options())

    def reduce(self):
        mine = self.value(self.me)
        x = self.write(mine, self.reduced(range(self.p))) if self.is_root else self.keep(mine)
        return dist.reduce(x, self.world_root, self.op, **self.options())

    def scan(self):
        x = self.write(self.value(self.me), self.reduced(range(self.me + 1)))
        return dist.scan(x, self.op, **self.options())

    def exscan(self):
        mine = self.value(self.me)
        x = self.write(mine, self.reduced(range(self.me))) if self.me else self.keep(mine)
        return dist.exscan(x, self.op, **self.options())

    def all_gather_into_tensor(self):
        sizes = self.sizes()
        parts = [self.value(rank, 0, n) for rank, n in enumerate(sizes)]
        after = np.concatenate(parts)
        if self.in_place:
            begin = sum(sizes[: self.me])
            before = np.zeros_like(after)
            before[begin:][: sizes[self.me]] = parts[self.me]
            whole = self.write(before, after)
            x = whole[begin:][: sizes[self.me]]
        else:
            whole, x = self.room(after), self.read(parts[self.me])
        split = {"output_split_sizes": sizes} if self.uneven else {}
        return dist.all_gather_into_tensor(whole, x, **split, **self.options())

    def reduce_scatter_tensor(self):
        sizes = self.sizes()
        x = self.read(np.concatenate([self.value(self.me, to, n) for to, n in enumerate(sizes)]))
        part = self.room(self.reduced(range(self.p), self.me, sizes[self.me]))
        split = {"input_split_sizes": sizes} if self.uneven else {}
        return dist.reduce_scatter_tensor(part, x, self.op, **split, **self.options())

    def all_to_all_single(self):
        table, me = self.table(), self.me
        before = np.concatenate([self.value(me, to, table[me, to]) for to in range(self.p)])
        after = np.concatenate([self.value(r, me, table[r, me]) for r in range(self.p)])
        split = [self.rows(table[:, me]), self.rows(table[me])] if self.uneven else []
        if self.in_place and not self.uneven:
            out = x = self.write(before, after)
        else:
            out, x = self.room(after), self.read(before)
        return dist.all_to_all_single(out, x, *split, **self.options())

    # ---- lists of arrays

    def all_gather(self):
        parts = [self.value(rank, 0, n) for rank, n in enumerate(self.sizes())]
        if self.in_place:
            outs = [self.keep(x) if r == self.me else self.room(x) for r, x in enumerate(parts)]
            x = outs[self.me]
        else:
            outs, x = self.rooms(parts), self.read(parts[self.me])
        return dist.all_gather(outs, x, **self.options())

    def gather(self):
        parts = [self.value(rank, 0, n) for rank, n in enumerate(self.sizes())]
        outs = self.rooms(parts) if self.is_root else None
        return dist.gather(self.read(parts[self.me]), outs, self.world_root, **self.options())

    def scatter(self):
        parts = [self.value(self.root, to, n) for to, n in enumerate(self.sizes())]
        ins = self.reads(parts) if self.is_root else None
        return dist.scatter(self.room(parts[self.me]), ins, self.world_root, **self.options())

    def reduce_scatter(self):
        sizes, me = self.sizes(), self.me
        ins = self.reads([self.value(me, to, n) for to, n in enumerate(sizes)])
        x = self.room(self.reduced(range(self.p), me, sizes[me]))
        return dist.reduce_scatter(x, ins, self.op, **self.options())

    def all_to_all(self):
        table, me = self.table(), self.me
        ins = self.reads([self.value(me, to, table[me, to]) for to in range(self.p)])
        outs = self.rooms([self.value(r, me, table[r, me]) for r in range(self.p)])
        return dist.all_to_all(outs, ins, **self.options())

    # ---- several arrays at once, or none

    def several(self):
        """Return arrays to reduce together."""
        return [
            self.write(self.value(self.me, k, n), self.reduced(range(self.p), k, n))
            for k, n in enumerate(self.counts())
        ]

    def all_reduce_coalesced(self):
        return dist.all_reduce_coalesced(self.several(), self.op, **self.options())

    def all_gather_coalesced(self):
        counts = list(enumerate(self.counts()))
        ins = self.reads([self.value(self.me, k, n) for k, n in counts])
        outs = [self.rooms([self.value(r, k, n) for k, n in counts]) for r in range(self.p)]
        return dist.all_gather_coalesced(outs, ins, **self.options())

    def barrier(self):
        return dist.barrier(**self.options())
