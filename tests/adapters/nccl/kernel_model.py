"""The kernels of intra_node.cu as steps: what a block of a rank reads, writes and waits for.

A pack is what one block does of each part of the data. A step is an action of
tests/support/memory_model.py, so the same text runs in every execution that the memory model
allows. Values are expressions: 1 is the input of rank 1, (1, 2) the rounded sum of 1 and 2.
"""

import re
from functools import reduce

from tests.support.memory_model import PLAIN, Read, Write


def orders(text):
    """Return the memory orders of the flags: how they are raised, and how they are read."""
    raised = re.search(r"void raise_flag\(.*?\bst\.(\w+)\.sys", text, re.DOTALL)
    read = re.search(r"Meeting flag_of\(.*?\bld\.(\w+)\.sys", text, re.DOTALL)
    return raised[1], read[1]


class Block:
    """One block of a rank.

    Args:
        algorithm: one_shot, two_shot or cube_mesh.
        rank: This rank.
        size: Number of ranks.
        order: Of `orders`.
    """

    def __init__(self, algorithm, rank, size, order):
        self.kernel, self.rank, self.size = getattr(self, algorithm), rank, size
        self.raised, self.seen = order
        self.skip = ()
        """Meetings that are left out: a planted fault."""
        self.reads = []
        """(number of the meeting before, peer, part) of each read of another rank."""
        self.written = set()

    def calls(self, number):
        """Yield the steps of calls in a row; return the results of each."""
        results = []
        for call in range(1, number + 1):
            self.call, self.met, self.out = call, 0, {}
            yield from self.kernel()
            results.append(self.out)
        for place in sorted(self.written):
            yield Write(place, "freed", PLAIN)
        return results

    def value(self, rank, part):
        """Return the input of a rank."""
        return (self.call, rank, part)

    def place(self, rank, part):
        return f"rank {rank} part {part}"

    def write(self, part, value):
        place = self.place(self.rank, part)
        self.written.add(place)
        yield Write(place, value, PLAIN)

    def read(self, rank, part):
        if rank != self.rank:
            self.reads.append((self.met, rank, part))
        return (yield Read(self.place(rank, part), PLAIN))

    def copy_in(self, part):
        yield from self.write(part, self.value(self.rank, part))

    def sum_of(self, ranks, part):
        values = []
        for rank in ranks:
            values.append((yield from self.read(rank, part)))
        return reduce(lambda a, b: ("sum", a, b), values)

    def meet(self, ranks):
        self.met += 1
        if self.met in self.skip:
            return
        meeting = 3 * self.call + self.met - 1
        peers = [rank for rank in ranks if rank != self.rank]
        for peer in peers:
            yield Write(f"flag of {peer} by {self.rank}", meeting, self.raised)
        for peer in peers:
            wanted = meeting.__le__
            yield Read(f"flag of {self.rank} by {peer}", self.seen, wanted)

    def one_shot(self):
        everyone = range(self.size)
        yield from self.copy_in(0)
        yield from self.meet(everyone)
        self.out[0] = yield from self.sum_of(everyone, 0)
        yield from self.meet(everyone)

    def two_shot(self):
        everyone = range(self.size)
        for part in everyone:
            yield from self.copy_in(part)
        yield from self.meet(everyone)
        total = yield from self.sum_of(everyone, self.rank)
        yield from self.write(self.rank, total)
        self.out[self.rank] = total
        yield from self.meet(everyone)
        for turn in range(1, self.size):
            part = (self.rank + turn) % self.size
            self.out[part] = yield from self.read(part, part)
        yield from self.meet(everyone)

    def cube_mesh(self):
        half = self.size // 2
        first = self.rank // half * half
        quad, relay = range(first, first + half), (self.rank + half) % self.size
        yield from self.copy_in(0)
        yield from self.meet(quad)
        own = yield from self.sum_of(quad, 0)
        yield from self.write("partial", own)
        yield from self.meet([relay])
        self.out[0] = ("sum", own, (yield from self.read(relay, "partial")))
        yield from self.meet([*quad, relay])


def run(blocks, number, choose):
    """Run calls with the steps of the blocks in an order that `choose` picks; return the results.

    Raises:
        AssertionError: All blocks wait.
    """
    memory, results, waiting = {}, {}, {}
    threads = {block.rank: block.calls(number) for block in blocks}
    given = dict.fromkeys(threads)
    while threads:
        ready = [rank for rank in threads if rank not in waiting or waiting[rank](memory)]
        assert ready, "all blocks wait"
        rank = choose(ready)
        waiting.pop(rank, None)
        try:
            action = given[rank]
            if isinstance(action, Read):
                action = threads[rank].send(memory.get(action.place, 0))
            else:
                action = next(threads[rank])
        except StopIteration as end:
            results[rank] = end.value
            del threads[rank]
            continue
        given[rank] = action
        if isinstance(action, Write):
            memory[action.place] = action.value
        elif action.wanted is not None:
            waiting[rank] = lambda memory, a=action: a.wanted(memory.get(a.place, 0))
    return results
