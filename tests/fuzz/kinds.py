"""One function per kind of call: hands arrays to it, and says what NumPy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import unisono as dist
from tests.fuzz.memory import Array, Memory
from tests.fuzz.steps import Step, World
from unisono.errors import ArgumentTypeError, CollectiveMismatchError
from unisono.schedules import available
from unisono.testing.answers import UFUNCS


class Call:
    """One step as one rank makes it: its works, and its memories with what they must become."""

    def __init__(self, world: World, step: Step, group: Any) -> None:
        self.world, self.step, self.group = world, step, group
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.me, self.p = dist.get_rank(group), len(self.ranks)
        self.draw = np.random.default_rng((world.seed, 2, step.number, self.me))
        self.same = np.random.default_rng((world.seed, 3, step.number))
        self.root = self.ranks[step.root]
        self.is_root = self.me == step.root
        self.memories: list[Memory] = []
        self.works: list[Any] = []
        self.must_fail: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        """Make the call; one that must fail may do so here."""
        made = getattr(self, self.step.kind)()
        works = made if isinstance(made, list) else [made]
        self.works += [work for work in works if work is not None]

    def finish(self) -> None:
        """Wait for the call in any order of its parts, and compare."""
        for at in self.draw.permutation(len(self.works)):
            self.works[at].wait()
        for memory in self.memories:
            memory.check()

    # ---- values

    def values(self, rank: int, part: int = 0, count: int | None = None) -> Array:
        """Return what a rank has: small whole numbers, so that all orders have one sum."""
        count = self.step.count if count is None else count
        draw = np.random.default_rng((self.world.seed, 4, self.step.number, rank, part))
        dtype = np.dtype(self.step.dtype)
        if dtype.kind == "b":
            return draw.integers(0, 2, count).astype(bool)
        numbers = draw.integers(0, 8, count)
        match self.step.op.name:
            case "PRODUCT":
                numbers = 1 + numbers % 2
            case "AVG":
                numbers = numbers % 3 * self.p
        return (numbers * (1 + 2j) if dtype.kind == "c" else numbers).astype(dtype)

    def everyone(self, part: int = 0, count: int | None = None) -> list[Array]:
        return [self.values(rank, part, count) for rank in range(self.p)]

    def reduced(self, parts: Sequence[Array]) -> Array:
        """Return NumPy's reduction of what ranks have."""
        op, dtype = self.step.op, parts[0].dtype
        total = UFUNCS.get(op, np.add).reduce(parts, dtype=dtype)
        if op.name == "PREMUL_SUM":
            total = total * 2
        elif op.name == "AVG":
            total = total / len(parts)
        return np.asarray(total).astype(dtype)

    def sizes(self) -> list[int]:
        """Return how many elements each rank has; all ranks know it."""
        count, p = self.step.count, self.p
        return (
            [int(n) for n in self.same.integers(0, count + 2, p)]
            if self.step.uneven
            else [count] * p
        )

    def table(self) -> Array:
        """Return how many elements rank i has for rank j."""
        count, square = self.step.count, (self.p, self.p)
        return (
            self.same.integers(0, count + 2, square) if self.step.uneven else np.full(square, count)
        )

    # ---- arrays

    def write(self, before: Array, after: Array, *, plain: bool = False) -> Any:
        """Return an array with `before`, which has to become `after`."""
        return self._memory(before, after, plain).handed

    def read(self, values: Array, *, plain: bool = False) -> Any:
        """Return an array with `values`, which has to stay."""
        memory = self._memory(values, values, plain)
        if self.draw.random() < 0.3 and isinstance(memory.handed, np.ndarray):
            memory.handed.flags.writeable = False
        return memory.handed

    def _memory(self, before: Array, after: Array, plain: bool) -> Memory:
        shape = "flat" if plain else self.step.shape
        self.memories.append(Memory(self.draw, before, after, shape))
        return self.memories[-1]

    def room(self, after: Array, *, plain: bool = False) -> Any:
        """Return an array that has to become `after`."""
        return self.write(np.zeros_like(after), after, plain=plain)

    def how(self, collective: str | None = None, *, uneven: bool = False) -> dict[str, Any]:
        """Return the keywords that all calls have; with a name, maybe an algorithm for it."""
        how: dict[str, Any] = {"group": self.group, "async_op": self.step.is_async}
        if collective and self.step.algorithm is not None and self.p > 1:
            names = available(collective, self.p, uneven=uneven)
            how["algorithm"] = names[self.step.algorithm % len(names)]
        return how

    # ---- kinds: one array

    def all_reduce(self) -> Any:
        x = self.write(self.values(self.me), self.reduced(self.everyone()))
        return dist.all_reduce(x, self.step.op, **self.how("all_reduce"))

    def broadcast(self) -> Any:
        x = self.write(self.values(self.me), self.values(self.step.root))
        return dist.broadcast(x, self.root, **self.how("broadcast"))

    def reduce(self) -> Any:
        mine = self.values(self.me)
        x = self.write(mine, self.reduced(self.everyone()) if self.is_root else mine)
        return dist.reduce(x, self.root, self.step.op, **self.how("reduce"))

    def scan(self) -> Any:
        x = self.write(self.values(self.me), self.reduced(self.everyone()[: self.me + 1]))
        return dist.scan(x, self.step.op, **self.how("scan"))

    def exscan(self) -> Any:
        mine = self.values(self.me)
        x = self.write(mine, self.reduced(self.everyone()[: self.me]) if self.me else mine)
        return dist.exscan(x, self.step.op, **self.how("exscan"))

    def all_gather_into_tensor(self) -> Any:
        mine, n = self.values(self.me), self.step.count
        after = np.concatenate(self.everyone())
        if not self.step.in_place:
            whole, x = self.room(after), self.read(mine)
        else:
            before = np.zeros_like(after)
            before[n * self.me :][:n] = mine
            whole = self.write(before, after, plain=True)
            x = whole[n * self.me :][:n]
        return dist.all_gather_into_tensor(whole, x, **self.how("all_gather"))

    def reduce_scatter_tensor(self) -> Any:
        blocks = [self.values(self.me, part) for part in range(self.p)]
        part, x = self.room(self.reduced(self.everyone(self.me))), self.read(np.concatenate(blocks))
        return dist.reduce_scatter_tensor(part, x, self.step.op, **self.how("reduce_scatter"))

    def all_to_all_single(self) -> Any:
        table, me = self.table(), self.me
        blocks = [self.values(me, to, table[me, to]) for to in range(self.p)]
        after = np.concatenate([self.values(r, me, table[r, me]) for r in range(self.p)])
        before = np.concatenate(blocks)
        split = [table[:, me].tolist(), table[me].tolist()] if self.step.uneven else []
        if self.step.in_place and not self.step.uneven:
            out = x = self.write(before, after, plain=True)
        else:
            out, x = self.room(after, plain=True), self.read(before, plain=True)
        how = self.how("all_to_all", uneven=self.step.uneven)
        return dist.all_to_all_single(out, x, *split, **how)

    # ---- kinds: lists of arrays

    def all_gather(self) -> Any:
        sizes = self.sizes()
        parts = [self.values(rank, 0, n) for rank, n in enumerate(sizes)]
        mine = parts[self.me]
        x = self.write(mine, mine) if self.step.in_place else self.read(mine)
        outs = [
            x if self.step.in_place and rank == self.me else self.room(part)
            for rank, part in enumerate(parts)
        ]
        return dist.all_gather(outs, x, **self.how("all_gather", uneven=self.step.uneven))

    def gather(self) -> Any:
        x = self.read(self.values(self.me))
        outs = [self.room(part) for part in self.everyone()] if self.is_root else None
        return dist.gather(x, outs, self.root, **self.how("gather"))

    def scatter(self) -> Any:
        parts = [self.values(self.step.root, part) for part in range(self.p)]
        x = self.room(parts[self.me])
        ins = [self.read(part) for part in parts] if self.is_root else None
        return dist.scatter(x, ins, self.root, **self.how("scatter"))

    def reduce_scatter(self) -> Any:
        sizes, me = self.sizes(), self.me
        x = self.room(self.reduced(self.everyone(me, sizes[me])))
        ins = [self.read(self.values(me, part, n)) for part, n in enumerate(sizes)]
        how = self.how("reduce_scatter", uneven=self.step.uneven)
        return dist.reduce_scatter(x, ins, self.step.op, **how)

    def all_to_all(self) -> Any:
        table, me = self.table(), self.me
        ins = [self.read(self.values(me, to, table[me, to])) for to in range(self.p)]
        outs = [self.room(self.values(r, me, table[r, me])) for r in range(self.p)]
        return dist.all_to_all(outs, ins, **self.how("all_to_all", uneven=self.step.uneven))

    # ---- kinds: several at once

    def _each(self, op: Any = None) -> list[Any]:
        """Return a few arrays to all_reduce."""
        counts = self.same.integers(0, self.step.count + 1, self.same.integers(1, 4))
        parts = [self.everyone(k, int(n)) for k, n in enumerate(counts)]
        return [self.write(part[self.me], self.reduced(part)) for part in parts]

    def all_reduce_coalesced(self) -> Any:
        return dist.all_reduce_coalesced(self._each(), self.step.op, **self.how())

    def coalesced(self) -> Any:
        arrays = self._each()
        manager = dist._coalescing_manager(group=self.group, async_ops=self.step.is_async)
        with manager as works:
            for x in arrays:
                dist.all_reduce(x, self.step.op, group=self.group)
        return works if self.step.is_async else None

    def all_gather_coalesced(self) -> Any:
        counts = [int(n) for n in self.same.integers(0, self.step.count + 1, 2)]
        ins = [self.read(self.values(self.me, k, n)) for k, n in enumerate(counts)]
        outs = [
            [self.room(self.values(rank, k, n)) for k, n in enumerate(counts)]
            for rank in range(self.p)
        ]
        return dist.all_gather_coalesced(outs, ins, **self.how())

    # ---- kinds: no array, or messages

    def barrier(self) -> Any:
        return dist.barrier(**self.how())

    def ring(self) -> Any:
        """Everyone's message to the next; sent and received in one of four ways."""
        to, source = self.ranks[(self.me + 1) % self.p], self.ranks[(self.me - 1) % self.p]
        x, y = self.read(self.values(self.me)), self.room(self.values((self.me - 1) % self.p))
        tag = self.step.number
        send = partial(dist.isend, x, to, self.group, tag)
        receive = partial(dist.irecv, y, source, self.group, tag)
        match self.draw.integers(3 if self.p > 1 else 2):
            case 0:
                return [receive(), send()]
            case 1:
                return [send(), receive()]
            case _:
                work = receive()
                dist.send(x, to, self.group, tag)
                return [work]

    def messages(self) -> Any:
        """A few messages between random ranks, some of one pair and tag; received in order."""
        lanes = [tuple(map(int, each)) for each in self.same.integers(0, self.p, (6, 2))]
        counts = self.same.integers(0, self.step.count + 1, len(lanes))
        works = []
        for k, ((source, to), count) in enumerate(zip(lanes, counts, strict=True)):
            values, tag = self.values(source, k, int(count)), self.step.number
            if self.me == source:
                works.append(dist.isend(self.read(values), self.ranks[to], self.group, tag))
            if self.me == to:
                works.append(dist.irecv(self.room(values), self.ranks[source], self.group, tag))
        return works

    def objects(self) -> None:
        wanted = [{"rank": rank, "text": "x" * (self.step.count % 999)} for rank in range(self.p)]
        got: list[Any] = [None] * self.p
        dist.all_gather_object(got, wanted[self.me], group=self.group)
        assert got == wanted, got
        first = [wanted[self.step.root] if self.is_root else None]
        dist.broadcast_object_list(first, self.root, group=self.group)
        assert first == [wanted[self.step.root]], first

    # ---- kinds: calls that must fail and change nothing

    def _kept(self) -> Any:
        """Return a writable array that nobody may change."""
        return self.write(self.values(self.me), self.values(self.me))

    def mismatch(self) -> Any:
        """One rank makes another call."""
        if self.p == 1:
            return None
        self.must_fail = (CollectiveMismatchError,)
        if self.is_root:
            return dist.broadcast(self._kept(), self.root, **self.how())
        return dist.all_reduce(self._kept(), self.step.op, **self.how())

    def refused(self) -> Any:
        """One rank's argument is none."""
        self.must_fail = (ArgumentTypeError,) if self.is_root else (CollectiveMismatchError,)
        x = None if self.is_root else self._kept()
        return dist.all_reduce(x, self.step.op, **self.how())
