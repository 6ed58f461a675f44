"""The same script under torch.distributed with Gloo and under unisono, in real processes."""

import pytest

import unisono as dist

torch = pytest.importorskip("torch")
theirs = torch.distributed
pytestmark = pytest.mark.usefixtures("forked_with_torch")


@pytest.mark.ranks(3, kind="processes")
def test_results_are_those_of_gloo(rank, tmp_path):
    size, url = dist.get_world_size(), f"file://{tmp_path}/store"
    theirs.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    try:
        expected = script(theirs, torch, rank, size)
    finally:
        theirs.destroy_process_group()
    ours = script(dist, torch, rank, size)
    assert ours.keys() == expected.keys()
    assert len(ours) > 15
    for name, results in expected.items():
        assert ours[name] == results, f"rank {rank}: {name}"


def script(dist, torch, rank, size):
    """Run what Gloo gets right; return {name: result}.

    test_matrix.py has the operations on torch's tensors, and test_operations.py compares them with
    Gloo's.
    """
    results = {}
    x = torch.arange(6.0) + 10 * rank
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        y = torch.zeros(6)
        results["recv"] = [dist.recv(y), y.tolist()]
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        results["ranks"] = [
            dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group),
            dist.get_group_rank(group, 2), dist.get_global_rank(group, 0),
        ]  # fmt: skip
    else:
        results["ranks"] = [dist.get_rank(group), dist.get_world_size(group), group]
    work = dist.all_reduce(x, async_op=True)
    results["async"] = [work.wait(), work.is_completed(), x.tolist()]
    futures = dist.all_reduce(x, async_op=True).get_future()
    results["future"] = futures.then(lambda f: x.tolist()).wait()
    results["sync"] = [dist.all_reduce(x), dist.barrier(), dist.get_rank(), dist.get_world_size()]
    results |= newer_names(dist, torch, rank, size)
    results |= subgroups(dist, torch, rank, size)
    results |= objects(dist, rank, size)
    return results


def newer_names(dist, torch, rank, size):
    """The `_single` names, coalesced calls, queries."""
    results = {}
    whole, part = torch.zeros(2 * size), torch.zeros(2)
    returned = [
        dist.all_gather_single(whole, torch.full((2,), float(rank))),
        dist.reduce_scatter_single(part, torch.arange(2.0 * size) + rank),
    ]
    results["single"] = [whole.tolist(), part.tolist()]
    for async_ops in (False, True):
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            returned += [dist.all_reduce(x) for x in (whole, part)]
        manager.wait()
    returned.append(dist.all_reduce_coalesced([whole, part]))
    results["coalesced"] = [whole.tolist(), part.tolist()]
    returned.append(dist.monitored_barrier())
    with dist.record_comm("part"):
        returned.append(dist.barrier())
    results["returned"] = returned
    results["queries"] = [
        dist.is_available(), dist.is_initialized(), dist.is_gloo_available(),
        dist.is_backend_available("gloo"), dist.is_backend_available("nonesuch"),
        dist.is_ucc_available(), dist.is_torchelastic_launched(), dist.get_node_local_rank(7),
        [dist.supports_complex(getattr(dist.ReduceOp, op)) for op in ("SUM", "MAX", "BAND")],
        [str(dist.Backend(name)) for name in ("GLOO", "Nccl", "other")],
        str(dist.DebugLevel.INFO.name), dist.default_pg_timeout.total_seconds(),
    ]  # fmt: skip
    return results


def objects(dist, rank, size):
    """Object collectives, and what they return."""
    results = {}
    mine = {"rank": rank, "text": "x" * 2000 * rank, "nested": [rank, (rank, None)]}
    got = [None] * size
    returned = [dist.all_gather_object(got, mine)]
    results["all_gather_object"] = got
    got = [None] * size if rank == 1 else None
    returned.append(dist.gather_object(mine, got, dst=1))
    results["gather_object"] = got
    got = [mine, rank, None]
    returned.append(dist.broadcast_object_list(got, src=2))
    results["broadcast_object_list"] = got
    got = [None, "kept"]
    returned.append(
        dist.scatter_object_list(got, [(i, "é") for i in range(size)] if rank == 0 else None)
    )
    results["scatter_object_list"] = got
    if rank == 0:
        returned.append(dist.send_object_list([mine, 3], 1))
    elif rank == 1:
        got = [None, None]
        returned.append(dist.recv_object_list(got, 0))
        results["recv_object_list"] = got
    results["objects returned"] = returned
    return results


def subgroups(dist, torch, rank, size):
    """Groups by size and by lists; group_src and group_dst; who is in them."""
    results = {}
    mine, groups = dist.new_subgroups(1)
    alone = [dist.get_process_group_ranks(mine), dist.get_rank(mine), dist.get_world_size(mine)]
    results["new_subgroups"] = [alone, [dist.get_rank(group) for group in groups]]
    mine, groups = dist.new_subgroups_by_enumeration([[2, 0], [1]])
    results["by enumeration"] = [
        dist.get_process_group_ranks(mine),
        [dist.get_world_size(group) for group in groups],
    ]
    x = torch.full((2,), float(rank))
    dist.broadcast(x, group=mine, group_src=0)
    results["group_src"] = x.tolist()
    outs = [torch.zeros(2) for _ in range(dist.get_world_size(mine))]
    last = dist.get_world_size(mine) - 1
    dist.gather(x, outs if dist.get_rank(mine) == last else None, group=mine, group_dst=last)
    results["group_dst"] = [out.tolist() for out in outs]
    before = dist.get_pg_count()
    dist.new_group([0])
    results["pg_count"] = dist.get_pg_count() - before
    mistakes = [
        lambda: dist.new_subgroups(2), lambda: dist.new_subgroups_by_enumeration([]),
        lambda: dist.new_subgroups_by_enumeration([[0], [0]]), lambda: dist.new_group([0, 0]),
        lambda: dist.get_group_rank(mine, 77), lambda: dist.get_global_rank(mine, 77),
        lambda: dist.get_default_backend_for_device("maia"), lambda: dist.split_group(mine),
        lambda: dist.shrink_group([], mine), lambda: dist.scatter_object_list([], [1] * size),
        lambda: dist.P2POp(dist.isend, x), lambda: dist.batch_isend_irecv([3]),
        lambda: dist.broadcast(x, 0, group_src=0), lambda: dist.init_process_group("gloo"),
    ]  # fmt: skip
    results["mistakes"] = [kind_of_error(call) for call in mistakes]
    return results


def kind_of_error(call):
    """Return which of Python's own errors a call raises, None if none."""
    try:
        call()
    except Exception as error:
        return next(
            kind.__name__ for kind in (ValueError, TypeError, Exception) if isinstance(error, kind)
        )
    return None
