"""The calls of a step: those of every operation, in memory of any layout, and some more."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import unisono as dist
from tests.fuzz.memory import Array, Memory
from tests.fuzz.steps import Step, World
from tests.support.operations import COLLECTIVES, Operations
from unisono.core.schedules import available
from unisono.errors import ArgumentTypeError, CollectiveMismatchError

LISTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
TENSORS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


class Call(Operations):
    """One step as one rank makes it: its works, and its memories with what they must become."""

    def __init__(self, world: World, step: Step, group: Any) -> None:
        ranks: Sequence[int] = dist.get_process_group_ranks(group)
        me, p = dist.get_rank(group), len(ranks)
        super().__init__(me, p, step.count, step.root, step.op, np.dtype(step.dtype), ranks=ranks)
        self.world, self.step, self.group = world, step, group
        self.draw = np.random.default_rng((world.seed, 2, step.number, me))
        self.same = np.random.default_rng((world.seed, 3, step.number))
        self.in_place = step.in_place
        self.uneven = step.uneven and step.kind in LISTS + TENSORS
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

    # ---- what the operations are made of

    def value(self, rank: int, part: int = 0, count: int | None = None) -> Array:
        """Return what a rank has: small whole numbers, so that all orders have one sum."""
        count = self.count if count is None else count
        draw = np.random.default_rng((self.world.seed, 4, self.step.number, rank, part))
        if self.dtype.kind == "b":
            return draw.integers(0, 2, count).astype(bool)
        numbers = draw.integers(0, 8, count)
        match self.op.name:
            case "PRODUCT":
                numbers = 1 + numbers % 2
            case "AVG":
                numbers = numbers % 3 * self.p
        return (numbers * (1 + 2j) if self.dtype.kind == "c" else numbers).astype(self.dtype)

    def sizes(self) -> list[int]:
        return [int(n) for n in self._drawn(self.p)]

    def table(self) -> Array:
        return self._drawn((self.p, self.p))

    def _drawn(self, shape: Any) -> Array:
        """Return numbers of elements that all ranks know."""
        if not self.uneven:
            return np.full(shape, self.count)
        return self.same.integers(0, self.count + 2, shape)

    def counts(self) -> list[int]:
        number = self.same.integers(1, 4)
        return [int(n) for n in self.same.integers(0, self.count + 1, number)]

    def write(self, before: Array, after: Array) -> Any:
        return self._memory(before, after).handed

    def read(self, values: Array) -> Any:
        memory = self._memory(values, values)
        if self.draw.random() < 0.3 and isinstance(memory.handed, np.ndarray):
            memory.handed.flags.writeable = False
        return memory.handed

    def _memory(self, before: Array, after: Array) -> Memory:
        # Parts of an array are parts of its first dimension.
        is_flat = self.step.kind in TENSORS and (self.in_place or self.uneven)
        is_flat = is_flat or self.step.kind == "all_to_all_single"
        shape = "flat" if is_flat else self.step.shape
        self.memories.append(Memory(self.draw, before, after, shape))
        return self.memories[-1]

    def options(self) -> dict[str, Any]:
        """Return the keywords of a call, maybe with an algorithm."""
        how: dict[str, Any] = {"group": self.group, "async_op": self.step.is_async}
        name = COLLECTIVES.get(self.step.kind)
        if name and self.step.algorithm is not None and self.p > 1:
            names = available(name, self.p, uneven=self.uneven)
            how["algorithm"] = names[self.step.algorithm % len(names)]
        return how

    # ---- kinds that are no operation

    def coalesced(self) -> Any:
        arrays = self.several()
        manager = dist._coalescing_manager(group=self.group, async_ops=self.step.is_async)
        with manager as works:
            for x in arrays:
                dist.all_reduce(x, self.op, group=self.group)
        return works if self.step.is_async else None

    def ring(self) -> Any:
        """Everyone's message to the next; sent and received in one of four ways."""
        to, source = self.ranks[(self.me + 1) % self.p], self.ranks[(self.me - 1) % self.p]
        x, y = self.read(self.value(self.me)), self.room(self.value((self.me - 1) % self.p))
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
            values, tag = self.value(source, k, int(count)), self.step.number
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
        first = [wanted[self.root] if self.is_root else None]
        dist.broadcast_object_list(first, self.world_root, group=self.group)
        assert first == [wanted[self.root]], first

    # ---- kinds: calls that must fail and change nothing

    def mismatch(self) -> Any:
        """One rank makes another call."""
        if self.p == 1:
            return None
        self.must_fail = (CollectiveMismatchError,)
        if self.is_root:
            return dist.broadcast(self.keep(self.value(self.me)), self.world_root, **self.options())
        return dist.all_reduce(self.keep(self.value(self.me)), self.op, **self.options())

    def refused(self) -> Any:
        """One rank's argument is none."""
        self.must_fail = (ArgumentTypeError,) if self.is_root else (CollectiveMismatchError,)
        x = None if self.is_root else self.keep(self.value(self.me))
        return dist.all_reduce(x, self.op, **self.options())
