"""One script for torch.distributed with Gloo and for unisono: the module is an argument."""


def script(dist, torch, rank, size):
    """Run what Gloo gets right; return {name: result as a list}."""
    results = {}

    def note(name, *tensors):
        results[name] = [(str(t.dtype), t.tolist()) for t in tensors]

    def new(n=6, dtype=torch.float32, shift=0):
        return (torch.arange(n) + 10 * rank + shift).to(dtype)

    def zeros(count, n=6, dtype=torch.float32):
        return [torch.zeros(n, dtype=dtype) for _ in range(count)]

    for dtype in (
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.float16,
    ):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            x = new(6, dtype) % 5 + 1
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            note(f"all_reduce {dtype} {op}", x)
    for op in ("BAND", "BOR", "BXOR"):
        x = new(6, torch.int32)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        note(f"all_reduce {op}", x)
    x = new()
    dist.broadcast(x, 1)
    note("broadcast", x)
    x = new()
    dist.reduce(x, size - 1)
    note("reduce", *([x] if rank == size - 1 else []))
    outs = zeros(size)
    dist.all_gather(outs, new())
    note("all_gather", *outs)
    out = torch.zeros(6 * size)
    dist.all_gather_into_tensor(out, new())
    note("all_gather_into_tensor", out)
    outs = zeros(size)
    dist.gather(new(), outs if rank == 1 else None, dst=1)
    note("gather", *outs)
    out = torch.zeros(6)
    dist.scatter(out, [new(shift=i) for i in range(size)] if rank == 0 else None, src=0)
    note("scatter", out)
    dist.reduce_scatter(out, [new(shift=i) for i in range(size)])
    note("reduce_scatter", out)
    dist.reduce_scatter_tensor(out, new(6 * size))
    note("reduce_scatter_tensor", out)
    out = torch.zeros(2 * size)
    dist.all_to_all_single(out, new(2 * size))
    note("all_to_all_single", out)
    ins, outs = [1 + (rank + i) % 2 for i in range(size)], [1 + (rank + i) % 2 for i in range(size)]
    out = torch.zeros(sum(outs), 3)
    dist.all_to_all_single(out, new(3 * sum(ins)).reshape(-1, 3), outs, ins)
    note("all_to_all_single uneven", out)
    right, left = (rank + 1) % size, (rank - 1) % size
    y = torch.zeros(6)
    works = [dist.isend(new(), right, tag=3), dist.irecv(y, left, tag=3)]
    for work in works:
        work.wait()
    note("isend irecv", y)
    y = torch.zeros(6)
    ops = [dist.P2POp(dist.isend, new(), right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    note("batch", y)
    if rank == 0:
        dist.send(new(), 1)
    elif rank == 1:
        y = torch.zeros(6)
        results["recv"] = [dist.recv(y), y.tolist()]
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        x = new()
        dist.all_reduce(x, group=group)
        note("group", x)
        results["ranks"] = [
            dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group),
            dist.get_group_rank(group, 2), dist.get_global_rank(group, 0),
        ]  # fmt: skip
    else:
        results["ranks"] = [dist.get_rank(group), dist.get_world_size(group), group]
    x = new()
    work = dist.all_reduce(x, async_op=True)
    results["async"] = [work.wait(), work.is_completed(), x.tolist()]
    futures = dist.all_reduce(x, async_op=True).get_future()
    results["future"] = futures.then(lambda f: x.tolist()).wait()
    results["sync"] = [dist.all_reduce(x), dist.barrier(), dist.get_rank(), dist.get_world_size()]
    return results


def with_unisono(rank):
    import torch

    import unisono as dist

    return script(dist, torch, rank, dist.get_world_size())


def with_gloo(rank, path):
    import torch
    import torch.distributed as theirs

    import unisono as ours

    size = ours.get_world_size()
    theirs.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        return script(theirs, torch, rank, size)
    finally:
        theirs.destroy_process_group()
