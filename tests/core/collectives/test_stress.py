"""Random programs: the two engines agree bit for bit."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono as dist
from unisono.core.schedules import available
from unisono.testing import run

few = settings(max_examples=6, suppress_health_check=list(HealthCheck))
OPS = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"]
REDUCTIONS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX,
              dist.ReduceOp.AVG]  # fmt: skip
DTYPES = ["float32", "float64", "int32", "float16", "complex64", "uint8"]
COUNTS = [0, 1, 3, 64, 1000, 40_000, 200_000]


def random_calls(rank, seed, calls):
    """Return the bytes of all results; every rank draws the same calls and its own values."""
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, rank))
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group([0])]
    results = []
    for _ in range(calls):
        name, dtype = str(shared.choice(OPS)), str(shared.choice(DTYPES))
        count, op = int(shared.choice(COUNTS)), REDUCTIONS[shared.integers(len(REDUCTIONS))]
        if dtype == "complex64" and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            # No order among complex numbers; and NumPy fuses the additions of a product.
            op = dist.ReduceOp.SUM
        if dtype not in ("int32", "uint8"):
            # A call of several pieces gives its elements to the chunks in another way, so that the
            # order of reduction is another one.
            count = min(count, 1000)
        group = groups[shared.integers(len(groups))]
        which, root = shared.integers(1000), int(shared.integers(1000))
        is_async = shared.random() < 0.3
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        p = dist.get_world_size(group)
        names = available(name, p)
        how = {"group": group, "algorithm": names[which % len(names)], "async_op": is_async}
        x = (own.normal(size=p * count) * 50).astype(dtype)
        part, whole = x[:count].copy(), np.zeros(p * p * count, dtype)
        root = dist.get_global_rank(group, root % p)
        match name:
            case "all_reduce":
                work, out = dist.all_reduce(x, op, **how), x
            case "broadcast":
                work, out = dist.broadcast(x, root, **how), x
            case "reduce":
                work, out = dist.reduce(x, root, op, **how), x
            case "all_gather":
                work, out = dist.all_gather_into_tensor(whole, x, **how), whole
            case "reduce_scatter":
                work, out = dist.reduce_scatter_tensor(part, x, op, **how), part
            case _:
                work, out = dist.all_to_all_single(whole[: len(x)], x, **how), whole
        if is_async:
            work.wait()
        results.append((name, how["algorithm"], dtype, count, out.tobytes()))
    return results


@pytest.mark.native
@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_engines_agree_bit_for_bit(seed, size):
    check_engines_agree(size, seed)


def check_engines_agree(size, seed):
    """Run the same random calls on both engines, and compare all results bit for bit."""
    native, reference = (
        run(random_calls, size, engine=engine, args=(seed, 12))
        for engine in ("native", "reference")
    )
    for ours, theirs in zip(native, reference, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == b, a[:4]
