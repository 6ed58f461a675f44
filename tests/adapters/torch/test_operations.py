"""Every operation and dtype against Gloo, in real processes."""

import gc
import threading

import pytest

import unisono

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import torch.distributed._functional_collectives as functional  # noqa: E402  needs torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_with_torch")

RANKS = 3

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
REDUCE_OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]


def made(dtype, rank, n=4):
    """Small values that no reduce op rounds."""
    values = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][:n]) % 3 + rank % 2
    return values.bool() if dtype is torch.bool else values.to(torch.float32).to(dtype)


def shown(tensor):
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.to(torch.float32)
    return (str(tensor.dtype), tensor.resolve_conj().tolist())


def matrix(rank, size, group):
    """Return {(operation, dtype): result or "refused"} of calls that are the same on all ranks."""
    results = {}

    def note(name, call, *tensors):
        try:
            call()
        except (RuntimeError, ValueError, TypeError):
            results[name] = "refused"
        else:
            results[name] = [shown(t) for t in tensors]

    for dtype in DTYPES:
        for op in REDUCE_OPS:
            x = made(dtype, rank)
            note(
                f"all_reduce {dtype} {op}",
                lambda x=x, op=op: dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group),
                x,
            )
        x = made(dtype, rank)
        note(f"broadcast {dtype}", lambda x=x: dist.broadcast(x, 1, group=group), x)
        outs = [torch.zeros_like(x) for _ in range(size)]
        note(f"all_gather {dtype}", lambda o=outs, x=x: dist.all_gather(o, x, group=group), *outs)
        whole = torch.zeros(4 * size).to(dtype)
        note(
            f"all_gather_single {dtype}",
            lambda o=whole, x=x: dist.all_gather_single(o, x, group=group),
            whole,
        )
        y = made(dtype, rank, 4 * size)
        out = torch.zeros_like(y)
        note(
            f"all_to_all_single {dtype}",
            lambda o=out, y=y: dist.all_to_all_single(o, y, group=group),
            out,
        )
        outs = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
        note(f"gather {dtype}", lambda o=outs, x=x: dist.gather(x, o, group=group), *(outs or []))
        ins = [made(dtype, r) for r in range(size)] if rank == 0 else None
        out = torch.zeros_like(x)
        note(f"scatter {dtype}", lambda o=out, i=ins: dist.scatter(o, i, group=group), out)
        if dtype.is_floating_point and dtype.itemsize > 1:
            part = torch.zeros(4, dtype=dtype)
            z = made(dtype, rank, 4 * size)
            note(
                f"reduce_scatter_single {dtype}",
                lambda p=part, z=z: dist.reduce_scatter_single(p, z, group=group),
                part,
            )
        z = made(dtype, rank)
        note(f"reduce {dtype}", lambda z=z: dist.reduce(z, 1, group=group), *([z] * (rank == 1)))
    return results


def calls(rank, size, group):
    """Return {name: result} of everything else that Gloo has."""
    results = {}

    def note(name, *tensors):
        results[name] = [shown(t) for t in tensors]

    def new(n=4, shift=0):
        return torch.arange(n, dtype=torch.float32) + 10 * rank + shift

    before = group._get_sequence_number_for_group()
    dist.all_reduce(new(), group=group)
    dist.all_reduce(new(), group=group, async_op=True).wait()
    dist.barrier(group=group)
    results["calls counted"] = group._get_sequence_number_for_group() - before
    with dist._coalescing_manager(group=group):
        pair = [new(), new(3)]
        for x in pair:
            dist.all_reduce(x, group=group)
    note("coalesced all_reduce", *pair)
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        wholes = [torch.zeros(4 * size), torch.zeros(2 * size)]
        dist.all_gather_single(wholes[0], new(), group=group)
        dist.all_gather_single(wholes[1], new(2), group=group)
    manager.wait()
    note("coalesced all_gather", *wholes)
    with dist._coalescing_manager(group=group):
        parts = [torch.zeros(2), torch.zeros(3)]
        dist.reduce_scatter_single(parts[0], new(2 * size), group=group)
        dist.reduce_scatter_single(parts[1], new(3 * size), group=group)
    note("coalesced reduce_scatter", *parts)
    for turn in range(3):  # repeated calls take another way
        part, blocks = torch.zeros(4), [new(4, 100 * r + turn) for r in range(size)]
        dist.reduce_scatter(part, blocks, group=group)
        note(f"reduce_scatter of a list {turn}", part)
        outs = [torch.zeros(4) for _ in range(size)]
        dist.all_to_all(outs, blocks, group=group)
        note(f"all_to_all of lists {turn}", *outs)
    pair = [new(), new(3)]
    dist.all_reduce_coalesced(pair, group=group)
    note("all_reduce_coalesced", *pair)
    outs = [[torch.zeros(4), torch.zeros(2)] for _ in range(size)]
    dist.all_gather_coalesced(outs, [new(), new(2)], group=group)
    note("all_gather_coalesced", *[t for row in outs for t in row])
    results["objects"] = objects(rank, size, group)
    sparse = torch.sparse_coo_tensor([[rank, size + 1]], [1.0 + rank, 2.0], (size + 3,))
    dist.all_reduce(sparse, group=group)
    note("sparse", sparse)
    sparse = torch.sparse_coo_tensor([[rank], [0]], torch.full((1, 2), 3.0), (size, 1, 2))
    work = dist.all_reduce(sparse, group=group, async_op=True)
    work.wait()
    note("sparse hybrid", sparse)
    x = new()
    value = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    note("future", value[0] if isinstance(value[0], torch.Tensor) else value[0][0], x)
    x = new()
    x.requires_grad_()
    dist.all_reduce(x, group=group)
    note("requires grad", x.detach())
    for name, t in (("empty", torch.zeros(0)), ("scalar", torch.tensor(2.0 + rank))):
        dist.all_reduce(t, group=group)
        note(name, t)
    results["any"] = any_source(rank, size, group)
    results |= rare_types(rank, size, group)
    results |= functionals(rank, size, group)
    dist.barrier(group=group)
    return results


def rare_types(rank, size, group):
    """Tensors that NumPy has no type for, or whose numbers are still to come, or that have none."""
    results = {}
    x = torch.complex(torch.arange(4.0), torch.arange(4.0) - rank).to(torch.complex32)
    part, block = torch.zeros_like(x), [x + r for r in range(size)]
    dist.reduce_scatter(part, block, group=group)
    dist.reduce(x, 1, group=group)
    summed = functional.all_reduce(torch.view_as_complex(torch.ones(2, 2).half()), "sum", group)
    for name, t in (("part", part), ("reduced", x[: 4 * (rank == 1)]), ("functional", summed)):
        results[f"complex32 {name}"] = shown(torch.view_as_real(functional.wait_tensor(t)))
    scales = torch.full((4,), 2.0**rank).to(torch.float8_e8m0fnu)
    if rank == 0:
        dist.send(scales, 1, group=group)
    elif rank == 1:
        dist.recv(scales, 0, group=group)
    results["float8_e8m0fnu"] = scales.float().tolist()
    late = functional.all_reduce(torch.full((3,), 1.0 + rank), "sum", group)
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outs, late, group=group)
    dist.all_reduce(late, group=group)
    results["result of a functional"] = [shown(t) for t in (*outs, late + 0)]
    with FakeTensorMode():
        fake, whole = torch.ones(4), torch.empty(4 * size)
        dist.all_reduce(fake, group=group)
        dist.all_gather_single(whole, fake, group=group, async_op=True).wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            dist.all_reduce(fake, group=group)
            dist.reduce_scatter_tensor(fake, whole, group=group)
        results["fake"] = list(whole.shape)
    return results


def objects(rank, size, group):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    some = ["a", {"b": 1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(some, src=0, group=group)
    mine = [None]
    dist.scatter_object_list(mine, list("xyz")[:size] if rank == 0 else None, src=0, group=group)
    at_root = [None] * size if rank == 1 else None
    dist.gather_object(rank * 2, at_root, dst=1, group=group)
    if rank == 0:
        dist.send_object_list([{"from": 0}], dst=1, group=group)
    heard = [None]
    if rank == 1:
        dist.recv_object_list(heard, src=0, group=group)
    return [gathered, some, mine, at_root, heard]


def any_source(rank, size, group):
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, group=group, tag=5)
        return None
    heard = []
    for _ in range(size - 1):
        x = torch.zeros(1)
        source = dist.recv(x, group=group, tag=5)
        heard.append([source, x.item()])
    return sorted(heard)


def functionals(rank, size, group):
    results = {}
    x = torch.arange(2 * size, dtype=torch.float32) + rank
    for name, out in (
        ("f all_reduce", functional.all_reduce(x, "sum", group)),
        ("f max", functional.all_reduce(x, "max", group)),
        ("f all_gather", functional.all_gather_tensor(x.reshape(2, -1), 1, group)),
        ("f reduce_scatter", functional.reduce_scatter_tensor(x, "sum", 0, group)),
        ("f all_to_all", functional.all_to_all_single(x, None, None, group)),
        ("f broadcast", functional.broadcast(x, 1, group)),
    ):
        results[name] = shown(functional.wait_tensor(out))
    for i, out in enumerate(functional.all_reduce_coalesced([x, x + 1], "sum", group)):
        results[f"f coalesced {i}"] = shown(functional.wait_tensor(out))
    return results


@pytest.mark.ranks(RANKS, kind="processes")
def test_the_plugin_computes_what_gloo_computes(rank, tmp_path):
    found = []
    for backend in ("gloo", "unisono"):
        with torch_world(backend, tmp_path) as world:
            whole = dist.group.WORLD
            found.append((matrix(rank, RANKS, whole), calls(rank, RANKS, whole)))
            assert world.name() == backend
    gloo, ours = found
    for theirs, own in zip(gloo, ours, strict=True):
        assert theirs.keys() == own.keys()
        for name, expected in theirs.items():
            assert expected in ("refused", own[name]), name
    check_what_gloo_refuses(gloo[0], ours[0])
    refused = [None] * RANKS
    own = {name for name, value in ours[0].items() if value == "refused"}
    unisono.all_gather_object(refused, own)
    assert refused == [own] * RANKS
    assert {name for name in own if "AVG" in name} == {
        "all_reduce torch.bool AVG",
        "all_reduce torch.float8_e4m3fn AVG",
        "all_reduce torch.float8_e5m2 AVG",
    }


def check_what_gloo_refuses(gloo, ours):
    """Compare with the same numbers in a type that Gloo takes, and AVG, which it lacks, to SUM."""
    compared = set()
    for name, got in ours.items():
        if gloo[name] != "refused" or got == "refused":
            continue
        dtype, op = name.split()[1], name.partition(" ")[2].partition(" ")[2]
        known = "torch.float32" if "reduce_scatter" in name else "torch.int32"
        expected = gloo[name.replace(dtype, known).replace("AVG", "SUM")]
        for (_, mine), (_, theirs) in zip(got, expected, strict=True):
            if op == "AVG":
                theirs = [n // RANKS if "int" in dtype else n / RANKS for n in theirs]
            assert [complex(n) for n in mine] == pytest.approx(theirs, rel=0.01), name
        compared.add((dtype, op))
    assert {("torch.int16", "SUM"), ("torch.uint64", "BXOR"), ("torch.int16", "AVG")} <= compared


@pytest.mark.ranks(RANKS, kind="processes")
def test_sub_groups(rank, tmp_path):
    """Groups of ranks in any order, and parts of parts."""
    with torch_world("unisono", tmp_path):
        some = dist.new_group([RANKS - 1, 0])
        if rank in (0, RANKS - 1):
            dist.all_reduce(x := torch.tensor([1.0 + rank]), group=some)
            found = x.item(), dist.get_rank(some), dist.get_world_size(some)
            assert found == (4.0, int(rank > 0), 2)
            if rank == RANKS - 1:  # rank 1 of the group
                dist.send(torch.tensor([7.0]), dst=0, group=some)
            else:
                y = torch.zeros(1)
                assert (dist.recv(y, group=some), y.item()) == (RANKS - 1, 7.0)
        own = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=own)
        for _ in range(3):
            local = dist.new_group(list(range(RANKS)), use_local_synchronization=True)
            dist.all_reduce(x := torch.ones(2), group=local)
            assert x[0].item() == RANKS
            dist.destroy_process_group(local)
        gloo = dist.new_group(backend="gloo")
        dist.all_reduce(x := torch.ones(1), group=gloo)
        assert (x.item(), dist.get_backend(gloo)) == (RANKS, "gloo")
        part = dist.group.WORLD.split_group([1, 0])
        assert (part is None) == (rank == 2)
        if part is not None:
            x = torch.tensor([float(rank)])
            part.allreduce([x]).wait()
            assert (x.item(), part.rank(), part.size()) == (1.0, 1 - rank, 2)
        dist.group.WORLD.monitored_barrier()


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes")
def test_a_future_that_is_asked_for_after_the_wait_is_complete(rank, tmp_path):
    with torch_world("unisono", tmp_path):
        for _ in range(50):
            work = dist.all_reduce(torch.full((1,), 1.0 + rank), async_op=True)
            work.wait()
            assert work.get_future().value()[0].item() == 3


@pytest.mark.ranks(2, kind="processes")
def test_a_call_in_flight_is_few_objects_for_the_garbage_collector(rank, tmp_path):
    """With more objects the collector takes most of the time, because it visits them again."""
    calls, works, seen, ended = 200, [], [], threading.Event()

    def count_one(future):
        seen.append(future.value()[0])
        if len(seen) == calls:
            ended.set()

    with torch_world("unisono", tmp_path):
        x = torch.full((1,), 1.0 + rank)
        for _ in range(2):
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        if rank == 1:  # so the calls of rank 0 stay in flight
            dist.recv(torch.zeros(1), 0)
        gc.collect()
        gc.disable()
        before = len(gc.get_objects())
        for _ in range(calls):
            works.append(dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).get_future())
        made = len(gc.get_objects()) - before
        gc.enable()
        if rank == 0:
            dist.send(torch.zeros(1), 1)
            assert made < 6.5 * calls
        for future in works:
            future.then(count_one)
        assert ended.wait(60)
        assert [tensor.item() for tensor in seen] == [2.0] * calls
