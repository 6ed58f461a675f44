"""Private-use devices: a made-up one with its own buffers and backend has all of c10d's ops."""

import datetime
import functools
import re
from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.adapters.torch.torch_signatures import calls, overloads
from tests.core.groups.test_dispatch import BoxArray, ThroughCPU, in_own_worlds
from tests.support.calls import operations_of
from tests.support.operations import COLLECTIVES, Operations
from unisono.core.backends import registry
from unisono.errors import ArgumentTypeError
from unisono.lowlevel import OPS, Dispatcher, dispatcher, schema_of

# The operators of c10d's dispatcher (torch/csrc/distributed/c10d/Ops.cpp) that move data.
C10D_OPS = [
    "send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_",
    "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_",
    "barrier",
]  # fmt: skip


def inside(value):
    """Replace the buffers in an argument by what they hold."""
    if isinstance(value, BoxArray):
        return value.values
    if isinstance(value, (list, tuple)):
        return [inside(entry) for entry in value]
    return value


class DrumBackend(ThroughCPU):
    """Has every operation, and records the calls."""

    name = "drums"
    device = "drum"

    def __init__(self, spec, inner=None):
        super().__init__(spec, inner)
        self.asked = []


def _operation(name):
    def method(self, *arguments):
        self.asked.append(name)
        return getattr(self.inner, name)(*map(inside, arguments[:-1]), arguments[-1])

    return method


for _name in OPS:
    setattr(DrumBackend, _name, _operation(_name))


def drum(values):
    return BoxArray(values, "drum:0")


class Drums(Operations):
    """Every operation, on arrays of the made-up device."""

    def write(self, before, after):
        box = drum(before)
        self.made.append((box.values, after))
        return box

    def ends(self):
        """Wait for what the operations have no method for."""
        me, group, other = self.value(self.me), dist.group.WORLD, 1 - self.me
        for tag, call in ((3, group.recv), (0, group.recv_anysource)):
            x = self.room(self.value(other))
            sent = group.send([self.read(me)], other, tag)
            work = call([x], other, tag) if tag else call([x], tag)
            work.wait()
            sent.wait()
            assert work.source_rank() == other
        whole, part = np.concatenate(self.everyone()), self.reduced(range(2), self.me)
        gathered = group.allgather_into_tensor_coalesced([self.room(whole)], [self.read(me)])
        both = self.read(np.concatenate([self.value(self.me, k) for k in range(2)]))
        gathered.wait()
        group.reduce_scatter_tensor_coalesced([self.room(part)], [both]).wait()


def on_drums(rank, store):
    """Run all operations on a drum-only group, and a few where a CPU backend is beside it."""
    dist.init_process_group("drums", store=store, rank=rank, world_size=2)
    try:
        calls = Drums(rank, 2, dtype=np.float64)
        for name in COLLECTIVES:
            getattr(calls, name)()
        calls.ends()
        calls.check()
        asked = set(dist.group.WORLD.backends["drum"].asked)
        x = drum([rank + 1.0])
        dist.all_reduce(x, dist.ReduceOp.PRODUCT)
        assert x.values.tolist() == [2]
        part = dist.new_group([0, 1], backend="cpu:unisono,drum:drums")
        y = np.array([rank + 1.0])
        dist.all_reduce(y, group=part)
        dist.all_reduce(x, group=part)
        assert (y.tolist(), x.values.tolist()) == ([3], [4])
        return asked
    finally:
        dist.destroy_process_group()


@pytest.fixture
def drums(monkeypatch):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    dist.register_backend("drums", lambda spec, device: DrumBackend(spec), ["drum"])


def test_all_operations_on_a_made_up_device(drums):
    dispatched = []

    def wrap(schema, device, kernel):
        def wrapped(group, on, *arguments):
            if on == "drum" and group.rank() == 0:
                dispatched.append(schema.c10d_op)
            return kernel(group, on, *arguments)

        return wrapped

    remove = dispatcher.register_wrapper(wrap)
    try:
        results = in_own_worlds(on_drums)
    finally:
        remove()
    unused = {"agree", "probe", "recv_array", "neighbor_all_to_all"}
    assert results == [set(OPS) - unused] * 2
    assert set(dispatched) - {""} == set(C10D_OPS)


class Alone(DrumBackend):
    """Serves CPU arrays and objects through the backend that it uses itself."""

    def __init__(self, spec, inner=None):
        super().__init__(spec, inner)
        self.control = self.inner
        self.bound = None

    def bind(self, device):
        self.bound = device


def test_a_device_with_a_control_backend_needs_no_other(monkeypatch):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    dist.register_backend("alone", lambda spec, device: Alone(spec), ["drum"])

    def body(rank, store):
        dist.init_process_group("alone", store=store, rank=rank, world_size=2, device_id="drum:3")
        try:
            assert dist.group.WORLD.backends["drum"].bound == "drum:3"
            x, y, names = drum([rank + 1.0]), np.array([rank + 1.0]), [None, None]
            dist.all_reduce(x)
            dist.all_reduce(y)
            dist.all_gather_object(names, f"rank {rank}")
            assert (x.values.tolist(), y.tolist(), names) == ([3], [3], ["rank 0", "rank 1"])
            part = dist.new_group([0, 1], device_id="drum:4")
            dist.barrier(part)
            assert part.backends["drum"].bound == "drum:4"
            assert dist.get_backend_config() == "drum:alone"
        finally:
            dist.destroy_process_group()

    in_own_worlds(body)


def test_the_table_has_exactly_the_operations_of_c10d():
    assert len(C10D_OPS) == 19
    assert sorted(s.c10d_op for s in OPS.values() if s.c10d_op) == sorted(C10D_OPS)


def test_every_c10d_name_is_an_alias():
    for op in C10D_OPS:
        schema = schema_of(op)
        assert schema_of(f"c10d::{op}") is schema is OPS[schema.name]
        own = Dispatcher()
        own.register_kernel(f"c10d::{op}", "drum", print)
        assert own.kernel(schema.name, "drum") is print
        own.unregister_kernel(op, "drum")
        assert own.kernel(schema.name, "drum") is not print


def test_the_names_exist_in_torch():
    torch = pytest.importorskip("torch")
    group = torch.distributed.ProcessGroup
    for schema in OPS.values():
        assert not schema.c10d_op or hasattr(torch.ops.c10d, schema.c10d_op), schema
        assert [n for n in schema.c10d_methods if not hasattr(group, n)] == [], schema


OPTIONS = [
    "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions",
    "BarrierOptions", "BroadcastOptions", "GatherOptions", "ReduceOptions",
    "ReduceScatterOptions", "ScatterOptions",
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_fields_and_defaults_of_torch(name):
    pytest.importorskip("torch")
    from torch._C import _distributed_c10d as c10d

    theirs, ours = getattr(c10d, name)(), getattr(dist, name)()
    fields = {n: getattr(theirs, n) for n in dir(theirs) if not n.startswith("_")}
    assert set(fields) == set(vars(ours))
    for field, value in fields.items():
        if field == "reduceOp":
            assert ours.reduceOp is dist.ReduceOp.SUM
        else:
            assert getattr(ours, field) == value, field


@pytest.fixture
def alone():
    pg = dist.ProcessGroup(dist.HashStore(), 0, 1)
    yield pg
    pg.close()


def value_for(parameter, x, out):
    """Return what to pass for a parameter; `out` is what the call writes."""
    kind = parameter.type
    if "Tensor" in kind:
        data = out if parameter.name.startswith("output") else x
        return functools.reduce(lambda v, _: [v], range(kind.count("Sequence[")), data)
    if "Options" in kind:
        return getattr(dist, re.search(r"\w+Options", kind)[0])()
    if "timedelta" in kind:
        return datetime.timedelta(seconds=5)
    if "ReduceOp" in kind:
        return dist.ReduceOp.SUM
    return [] if "Sequence" in kind else 0


@pytest.fixture
def asked():
    """The names of the operations that groups run during a test."""
    with operations_of() as names:
        yield names


# What makes a message complete in a world of one.
OTHER = {"send": "recv", "recv": "send", "recv_anysource": "send"}
DATA = [(s.name, method) for s in OPS.values() for method in s.c10d_methods]


@pytest.mark.parametrize(("op", "method"), DATA, ids=[method for _, method in DATA])
def test_methods_take_every_form_of_torch(alone, asked, op, method):
    """All arguments in their places, all by name, and the required ones only."""
    torch, made = pytest.importorskip("torch"), 0
    x, out = np.arange(3.0), np.zeros(3)
    value = partial(value_for, x=out if method.startswith("recv") else x, out=out)
    for overload in overloads(getattr(torch.distributed.ProcessGroup, method)):
        written = method in OTHER or any(p.name.startswith("output") for p in overload)
        for arguments, keywords in calls(overload, value):
            out[:] = 0
            works = [getattr(alone, method)(*arguments, **keywords)]
            if method in OTHER:
                box = out if method == "send" else x
                works.append(getattr(alone, OTHER[method])(box, 0, 0, async_op=True))
            for work in works:
                assert work.wait(), overload
            assert (out == x).all() or not written, overload
            made += 1
    assert asked.count(op) == made >= 3


def test_a_form_of_c10d_is_not_mistaken_for_ours(alone):
    x = np.ones(2)
    with pytest.raises(ArgumentTypeError, match="unexpected keyword argument 'optz'"):
        alone.broadcast(x, optz=1)
    assert alone.barrier(dist.BarrierOptions(asyncOp=False)).is_completed()
    assert alone.broadcast.__name__ == "broadcast"
    assert alone.all_to_all_single(np.zeros(2), x, [], [], dist.AllToAllOptions()).wait()


@pytest.mark.ranks(2)
def test_a_call_in_our_form_has_ended_when_it_returns(rank):
    pg, p = dist.group.WORLD, dist.get_world_size()
    x, out = np.arange(2.0 * p), np.zeros(2)
    lists = {
        "reduce_scatter_tensor_coalesced": ([out], [x]), "all_reduce_coalesced": ([out],),
        "all_gather_into_tensor_coalesced": ([np.zeros(2 * p)], [out]),
        "all_gather": ([np.zeros(2) for _ in range(p)], out),
        "all_gather_coalesced": ([[np.zeros(2)] for _ in range(p)], [out]),
        "all_to_all": ([np.zeros(2) for _ in range(p)], [np.zeros(2) for _ in range(p)]),
    }  # fmt: skip
    for name, arguments in lists.items():
        assert getattr(pg, name)(*arguments).is_completed(), name
    for call in (
        pg.broadcast(x, 0), pg.reduce(x, 0), pg.barrier(), pg.all_to_all_single(out[:p], x[:p]),
    ):  # fmt: skip
        assert call.is_completed()
    pg.allreduce(x).wait()
