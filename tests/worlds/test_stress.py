"""Random programs: the two engines agree bit for bit, and every message arrives once."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono as dist
from unisono.engines import is_native_built
from unisono.schedules import available
from unisono.testing import run

few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
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


SIZES = [0, 1, 10, 1000, 20_000, 300_000]


def random_graph(rank, seed, messages):
    """Messages between random pairs of ranks: several groups, tags, orders; from any source."""
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, rank))
    p = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(sort_ranks=False, ranks=range(p - 1, -1, -1))]
    # What a receive looks like depends on (group, receiver, tag), so that one from any source
    # fits whatever comes.
    size = shared.choice(SIZES, (2, p, 4), p=[0.1, 0.2, 0.3, 0.2, 0.15, 0.05])
    from_any = shared.random((2, p, 4)) < 0.4
    plan = [tuple(int(shared.integers(n)) for n in (2, p, p, 4)) for _ in range(messages)]
    sent, todo = Counter(), []
    for g, source, target, tag in plan:
        k = sent[g, source, target, tag]
        sent[g, source, target, tag] += 1
        if source == rank:
            todo.append(("send", g, target, tag, source * 1000 + k))
        if target == rank:
            todo.append(("recv", g, source, tag, source * 1000 + k))
    first = [each for each in todo if each[0] == "recv"][::2]
    rest = [each for each in todo if each not in first]
    works, got = [], defaultdict(list)
    for what, g, peer, tag, code in [*_shuffled(first, own), *_shuffled(rest, own)]:
        if what == "send":
            x = np.arange(size[g, peer, tag], dtype=np.float64) + code
            if own.random() < 0.3 and peer != rank:
                dist.send(x, peer, groups[g], tag)
            else:
                works.append(dist.isend(x, peer, groups[g], tag))
            continue
        y = np.full(size[g, rank, tag], -1.0)
        source = None if from_any[g, rank, tag] else peer
        works.append(dist.irecv(y, source, groups[g], tag))
        got[g, source, tag].append((works[-1], y))
    for at in own.permutation(len(works)):
        works[at].wait(60)
    _check(plan, rank, got, from_any)
    dist.barrier()


def _shuffled(steps, own):
    """Return the steps in random order, but those of one kind, group, peer and tag in theirs."""
    lanes = defaultdict(list)
    for step in steps:
        lanes[step[:4]].append(step)
    order = [step[:4] for step in steps]
    own.shuffle(order)
    return [lanes[lane].pop(0) for lane in order]


def _check(plan, rank, got, from_any):
    """Every message came once, whole, and those of one source in their order."""
    expected = defaultdict(list)
    count = Counter()
    for g, source, target, tag in plan:
        if target == rank:
            lane = g, None if from_any[g, rank, tag] else source, tag
            expected[lane].append((source, source * 1000 + count[g, source, tag]))
            count[g, source, tag] += 1
    assert got.keys() == expected.keys()
    for lane, pairs in got.items():
        found = []
        for work, y in pairs:
            code = y[0] if y.size else None
            assert y.size == 0 or (y == np.arange(y.size) + code).all()
            found.append((work.source_rank(), code))
        for source in {source for source, _ in expected[lane]}:
            codes = [code for s, code in found if s == source]
            wanted = [code for s, code in expected[lane] if s == source]
            assert len(codes) == len(wanted)
            assert codes[:1] == [None] or codes == wanted, (lane, source)
        assert len(found) == len(expected[lane])


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
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


@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_messages_of_a_random_graph_arrive_once(seed, size):
    run(random_graph, size, args=(seed, 80))


@pytest.mark.ranks(3, kind="processes")
def test_messages_of_a_random_graph_between_processes_arrive_once(rank):
    random_graph(rank, 7, 200)
