"""The NCCL backend over a fake NCCL: streams are threads, kernels wait, and hang as NCCL's do."""

from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support import fake_cuda
from tests.support.operations import COLLECTIVES, Operations
from tests.support.oracle import DTYPES, REDUCE_OPS, check, reduce_op, reduction, values
from tests.support.together import on_threads
from unisono.groups.world import World, use

LIMIT_S = 30


@pytest.fixture(autouse=True)
def gpu():
    with fake_cuda.installed():
        yield


def on_gpus(size, body, backend="nccl", *, timeout=LIMIT_S, **how):
    """Run body(rank) on threads, each with a GPU of its own; return the results."""
    store = dist.HashStore()

    def rank_thread(rank):
        fake_cuda.set_device(rank)
        with use(World()):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout, **how
            )
            try:
                return body(rank)
            finally:
                dist.destroy_process_group()

    return on_threads(*(partial(rank_thread, rank) for rank in range(size)))


class OnGPU(Operations):
    """Every operation, on arrays of a GPU."""

    def write(self, before, after):
        made = fake_cuda.array(before)
        self.made.append((made, after))
        return made

    def check(self, *what):
        self.made = [(x.get(), after) for x, after in self.made]
        super().check(*what)


def every_operation(rank, how, async_op):
    calls = OnGPU(rank, dist.get_world_size(), **how)
    works = []
    for name in COLLECTIVES:
        calls.how = {"async_op": async_op}
        works.append((name, getattr(calls, name)()))
    for name, work in works:
        if async_op:
            assert work.wait(), name
    calls.check(how)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {}, {"root": 1, "dtype": np.float32, "op": dist.ReduceOp.AVG, "modulus": 100},
        {"uneven": [3, 0, 5], "op": dist.ReduceOp.MAX}, {"in_place": True},
        {"dtype": np.int16, "modulus": 50}, {"op": dist.ReduceOp.BXOR},
        {"uneven": [2, 1, 0], "op": dist.ReduceOp.BOR}, {"dtype": np.complex64, "modulus": 100},
    ],
    ids=["plain", "average", "uneven", "in place", "int16", "xor", "uneven or", "complex"],
)  # fmt: skip
def test_every_operation(how, async_op):
    on_gpus(3, partial(every_operation, how=how, async_op=async_op))


@pytest.mark.parametrize("size", [1, 2])
def test_every_operation_of_few_ranks(size):
    on_gpus(size, partial(every_operation, how={}, async_op=False))


def reduce_all(rank, dtype, count):
    for op in REDUCE_OPS[dtype]:
        x = fake_cuda.array(values(dtype, rank, count))
        dist.all_reduce(x, reduce_op(op))
        expected, slack = reduction(dtype, op, 3, count)
        check((dtype, op), x.get(), expected, slack)
    part = fake_cuda.array(values(dtype, rank, count))
    whole = fake_cuda.array(np.zeros(3 * count, part.dtype))
    dist.all_gather_into_tensor(whole, part)
    everyone = [values(dtype, r, count) for r in range(3)]
    assert whole.get().tobytes() == np.concatenate(everyone).tobytes()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if "float8" not in d and d != "bfloat16"])
def test_every_dtype_and_reduce_op(dtype):
    on_gpus(3, partial(reduce_all, dtype=dtype, count=7))
