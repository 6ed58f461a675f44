"""The kernels of IntraNodeComm as steps: the CPU's schedules, every execution, planted faults."""

import random

import numpy as np
import pytest

from tests.adapters.nccl.kernel_model import Block, orders, run
from tests.adapters.nccl.test_intra_node import TEXT
from tests.support.memory_model import ACQUIRE, RELAXED, RELEASE, Broken, Explorer
from unisono.core.schedules.ir import Buf, Op
from unisono.core.schedules.registry import build

ORDER = orders(TEXT)
# The kernel -> the CPU's schedule with the same steps.
SCHEDULES = {"one_shot": "one_shot", "two_shot": "rank_order", "cube_mesh": "cube_mesh"}


def test_the_orders_of_the_kernels():
    assert ORDER == (RELEASE, ACQUIRE)


def of_schedule(schedule, call):
    """Return each rank's result by chunk, as expressions, and its reads of other ranks."""
    p, ranks = schedule.world_size, np.arange(schedule.world_size)
    memory = {
        (r, Buf.OUTPUT, c): (call, r, c) for r in ranks for c in range(schedule.output_chunks)
    }
    reads = {int(r): [] for r in ranks}
    for k in range(schedule.stages):
        rows = [[int(x) for x in row] for row in schedule.steps(k, ranks)]
        posts = {(row[0], row[4]): memory[row[0], row[3], row[4]] for row in rows
                 if row[1] == Op.POST}  # fmt: skip
        for rank, op, peer, source, at, buffer, chunk, _ in rows:
            if op == Op.POST:
                continue
            target = rank, buffer, chunk
            value = memory[rank, source, at] if op in (Op.COPY, Op.REDUCE) else posts[peer, chunk]
            if op in (Op.READ, Op.READ_REDUCE):
                reads[rank].append((k + 1, peer, chunk))
            reduces = op in (Op.REDUCE, Op.READ_REDUCE)
            memory[target] = ("sum", memory[target], value) if reduces else value
    chunks = range(schedule.output_chunks)
    return {r: {c: memory[r, Buf.OUTPUT, c] for c in chunks} for r in range(p)}, reads


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [("one_shot", 2), ("one_shot", 5), ("two_shot", 2), ("two_shot", 3), ("two_shot", 8),
     ("cube_mesh", 8)],
)  # fmt: skip
def test_the_steps_are_those_of_the_cpu(algorithm, size):
    """The same sums in the same order, and the same reads in each round."""
    name = SCHEDULES[algorithm]
    schedule = build("all_reduce", name, size, **({"pipeline": 1} if name == "rank_order" else {}))
    for seed in range(20):
        blocks = [Block(algorithm, rank, size, ORDER) for rank in range(size)]
        results = run(blocks, 3, random.Random(seed).choice)
        for call in (1, 2, 3):
            expected, reads = of_schedule(schedule, call)
            assert {rank: results[rank][call - 1] for rank in range(size)} == expected
        for block in blocks:
            made = [
                (met, peer, 0 if part == "partial" else part) for met, peer, part in block.reads
            ]
            assert sorted(made) == sorted(3 * reads[block.rank])


def threads(algorithm, size, number, order=ORDER, skip=()):
    def thread(rank):
        def body():
            block = Block(algorithm, rank, size, order)
            block.skip = skip
            results = yield from block.calls(number)
            for call, result in enumerate(results, 1):
                assert all(_leaves(sum_, call) for sum_ in result.values()), result
                assert all(_count(sum_) == size for sum_ in result.values()), result

        return body

    return [thread(rank) for rank in range(size)]


def _leaves(value, call):
    """Whether all inputs of a sum are of one call."""
    if value and value[0] == "sum":
        return _leaves(value[1], call) and _leaves(value[2], call)
    return bool(value) and value[0] == call


def _count(value):
    return _count(value[1]) + _count(value[2]) if value[0] == "sum" else 1


@pytest.mark.parametrize(
    ("algorithm", "size", "number"),
    [("one_shot", 2, 3), ("two_shot", 2, 2), ("cube_mesh", 2, 2), ("one_shot", 3, 1)],
)
def test_every_execution_is_right(algorithm, size, number):
    """A cube mesh of 2 ranks has quads of one rank, and relays."""
    assert Explorer(threads(algorithm, size, number)).explore() >= 1


FAULTS = {
    "flags that release nothing": {"order": (RELAXED, ACQUIRE)},
    "flags that acquire nothing": {"order": (RELEASE, RELAXED)},
    "no first meeting": {"skip": (1,)},
    "no last meeting": {"skip": (2,)},
    "no second meeting": {"algorithm": "two_shot", "skip": (2,)},
    "no third meeting": {"algorithm": "two_shot", "skip": (3,)},
    "no meeting of relays": {"algorithm": "cube_mesh", "skip": (2,)},
    "no last meeting of relays": {"algorithm": "cube_mesh", "skip": (3,)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    how = {"algorithm": "one_shot"} | FAULTS[name]
    with pytest.raises(Broken):
        Explorer(threads(how.pop("algorithm"), 2, 2, **how)).explore()
