"""All 19 operations on a made-up device: its own buffers, its own backend."""

import numpy as np

import unisono as dist
from unisono.backends import make_backend
from unisono.lowlevel import OPS, DeviceBackend


class DrumArray:
    """A buffer that is nothing an engine of the library could read."""

    def __init__(self, values):
        self._hidden = np.array(values, np.float64)
        self.device = "drum:0"

    @property
    def values(self):
        return self._hidden.tolist()


def inside(value):
    """Replace the buffers in an argument by what they hold."""
    if isinstance(value, DrumArray):
        return value._hidden
    if isinstance(value, (list, tuple)):
        return [inside(entry) for entry in value]
    return value


class DrumBackend(DeviceBackend):
    """Has every operation; moves data through the CPU backend and writes down what it was asked."""

    name = "drums"
    device = "drum"

    def __init__(self, spec, device="drum", inner=None):
        super().__init__(spec)
        self.inner = inner or make_backend("unisono", "cpu", spec)
        self.asked = []

    def split(self, spec):
        return DrumBackend(spec, "drum", self.inner.split(spec))

    def abort(self, reason, failed=False):
        self.inner.abort(reason, failed)

    def close(self):
        self.inner.close()


def _operation(name):
    def method(self, *arguments):
        self.asked.append(name)
        return getattr(self.inner, name)(*map(inside, arguments[:-1]), arguments[-1])

    return method


for _name in OPS:
    setattr(DrumBackend, _name, _operation(_name))


def drum(*values):
    return DrumArray(values)


def every_operation(pg, rank):
    """Call c10d's name of every operation on two ranks; return {c10d op: (got, expected)}."""
    me, other = float(rank + 1), 2 - rank
    got = {}

    def check(op, result, *expected):
        arrays = result if isinstance(result, list) else [result]
        got[op] = [a.values for a in arrays], [list(map(float, e)) for e in expected]

    x = drum(me, me)
    pg.broadcast([x], dist.BroadcastOptions(rootRank=1)).wait()
    check("broadcast_", x, [2, 2])
    x = drum(me)
    pg.allreduce([x]).wait()
    check("allreduce_", x, [3])
    pair = [drum(me), drum(10 * me, 0)]
    pg.allreduce_coalesced(pair).wait()
    check("allreduce_coalesced_", pair, [3], [30, 0])
    x = drum(me)
    pg.reduce([x], dist.ReduceOptions(rootRank=0, reduceOp=dist.ReduceOp.MAX)).wait()
    check("reduce_", x, [2])
    outs = [drum(0), drum(0)]
    pg.allgather([outs], [drum(me)]).wait()
    check("allgather_", outs, [1], [2])
    out = drum(0, 0)
    pg._allgather_base(out, drum(me)).wait()
    check("_allgather_base_", out, [1, 2])
    lists = [[drum(0), drum(0, 0)] for _ in range(2)]
    pg.allgather_coalesced(lists, [drum(me), drum(me, -me)]).wait()
    check("allgather_coalesced_", lists[0] + lists[1], [1], [1, -1], [2], [2, -2])
    outs = [drum(0, 0), drum(0, 0, 0, 0)]
    pg.allgather_into_tensor_coalesced(outs, [drum(me), drum(me, -me)]).wait()
    check("allgather_into_tensor_coalesced_", outs, [1, 2], [1, -1, 2, -2])
    outs = [drum(0), drum(0)]
    pg.gather([outs] if rank == 0 else [], [drum(me)], dist.GatherOptions(rootRank=0)).wait()
    check("gather_", outs, *([[1], [2]] if rank == 0 else [[0], [0]]))
    out = drum(0)
    ins = [[drum(5), drum(6)]] if rank == 1 else []
    pg.scatter([out], ins, dist.ScatterOptions(rootRank=1)).wait()
    check("scatter_", out, [5 + rank])
    out = drum(0)
    pg.reduce_scatter([out], [[drum(me), drum(10 * me)]]).wait()
    check("reduce_scatter_", out, [30 if rank else 3])
    out = drum(0)
    pg._reduce_scatter_base(out, drum(me, 10 * me)).wait()
    check("_reduce_scatter_base_", out, [30 if rank else 3])
    outs = [drum(0), drum(0, 0)]
    pg.reduce_scatter_tensor_coalesced(outs, [drum(me, 10 * me), drum(me, me, 7, 8)]).wait()
    check("reduce_scatter_tensor_coalesced_", outs, *([[30], [14, 16]] if rank else [[3], [3, 3]]))
    outs = [drum(0), drum(0)]
    pg.alltoall(outs, [drum(me), drum(-me)]).wait()
    check("alltoall_", outs, *([[-1], [-2]] if rank else [[1], [2]]))
    out = drum(0, 0)
    pg.alltoall_base(out, drum(me, -me), [1, 1], [1, 1]).wait()
    check("alltoall_base_", out, [-1, -2] if rank else [1, 2])
    pg.barrier(dist.BarrierOptions()).wait()
    check("barrier", drum(1), [1])
    sent = pg.send([drum(me)], other - 1, 3)
    x = drum(0)
    pg.recv([x], other - 1, 3).wait()
    sent.wait()
    check("send", drum(1), [1])
    check("recv_", x, [other])
    sent = pg.send([drum(-me)], other - 1, 0)
    x = drum(0)
    work = pg.recv_anysource([x], 0)
    work.wait()
    sent.wait()
    assert work.source_rank() == other - 1
    check("recv_any_source_", x, [-other])
    return got


def on_drums(rank, store):
    """Run all operations on a drum-only group, and a few where a CPU backend is beside it."""
    dist.init_process_group("drums", store=store, rank=rank, world_size=2)
    try:
        pg = dist.group.WORLD
        got = every_operation(pg, rank)
        asked = list(pg.backends["drum"].asked)
        x = drum(rank + 1.0)
        dist.all_reduce(x, dist.ReduceOp.PRODUCT)
        assert x.values == [2]
        part = dist.new_group([0, 1], backend="cpu:unisono,drum:drums")
        y = np.array([rank + 1.0])
        dist.all_reduce(y, group=part)
        dist.all_reduce(x, group=part)
        assert (y.tolist(), x.values) == ([3], [4])
        return got, asked
    finally:
        dist.destroy_process_group()
