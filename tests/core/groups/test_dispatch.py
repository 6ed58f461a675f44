"""The dispatcher and the registry of backends: arrays of devices that unisono does not know."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.support.together import on_threads
from unisono.core.backends import registry
from unisono.core.groups.world import World, use
from unisono.errors import InvalidArgumentError, UnsupportedError
from unisono.lowlevel import OPS, DeviceBackend, Dispatcher, Pending, dispatcher


class BoxArray:
    """An array of a made-up device, which no engine of the library could read."""

    def __init__(self, values, device="box:0"):
        self.values = np.array(values, float)
        self.device = device


class ThroughCPU(DeviceBackend):
    """Moves data through the CPU backend."""

    def __init__(self, spec, inner=None):
        super().__init__(spec)
        self.inner = inner or registry.make_backend("unisono", "cpu", spec)

    def split(self, spec):
        return type(self)(spec, self.inner.split(spec))

    def abort(self, reason, failed=False):
        self.inner.abort(reason, failed)

    def close(self):
        self.inner.close()


class BoxBackend(ThroughCPU):
    """Has two operations."""

    name = "boxes"
    device = "box"

    def all_reduce(self, tensor, op, options):
        pending = self.inner.all_reduce(tensor.values, op, options)
        pending.outputs = [tensor]
        return pending

    def barrier(self, options):
        return self.inner.barrier(options)


@pytest.fixture
def boxes(monkeypatch):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    dist.register_backend("boxes", lambda spec, device: BoxBackend(spec), devices=["box"])


def in_own_worlds(body):
    """Run a body that makes its default group itself, on two threads."""
    store = dist.HashStore()

    def in_own_world(rank):
        with use(World()):
            return body(rank, store)

    return on_threads(*(partial(in_own_world, rank) for rank in range(2)))


def on_boxes(rank, store):
    dist.init_process_group("cpu:unisono,boxes", store=store, rank=rank, world_size=2)
    try:
        box, plain = BoxArray([1, 2]), np.ones(2)
        dist.all_reduce(box)
        dist.all_reduce(plain)
        assert plain.tolist() == [2, 2]
        work = dist.all_reduce(box, async_op=True)
        work.wait()
        assert work.result() == [box]
        dist.barrier()
        group = dist.new_group()
        dist.all_reduce(box, group=group)
        assert box.values.tolist() == [8, 16]
        with pytest.raises(UnsupportedError) as caught:
            dist.broadcast(box, 0)
        assert caught.value.what == (
            "backend 'boxes' (box) has no broadcast (it has: all_reduce, barrier)"
        )
        box.device = "drum"
        with pytest.raises(UnsupportedError) as caught:
            dist.all_reduce(box)
        assert caught.value.what == (
            "all_reduce: group 'default' has no backend for device 'drum' "
            "(it has cpu: unisono, box: boxes)"
        )
        assert dist.get_backend_config() == "cpu:unisono,box:boxes"
        assert dist.get_backend() == "unisono"
        shown = repr(dist.group.WORLD)
        assert "cpu=unisono" in shown
        assert shown.endswith(" box=boxes>")
    finally:
        dist.destroy_process_group()


def test_a_made_up_device(boxes):
    in_own_worlds(on_boxes)


def test_every_operation_that_a_backend_lacks_is_named():
    class Empty(DeviceBackend):
        name, device = "boxes", "box"
        split = abort = close = None

    group = SimpleNamespace(backends={"box": object.__new__(Empty)})
    for name in set(OPS) - {"agree"}:  # which every backend has
        with pytest.raises(UnsupportedError) as caught:
            dispatcher.kernel(name, "box")(group, "box")
        assert caught.value.what == f"backend 'boxes' (box) has no {name} (it has: no operation)"


@pytest.mark.ranks(2)
def test_a_registered_kernel(rank):
    seen = []

    def kernel(group, device, tensor, op, options):
        seen.append((group.name, device, op.name, options.async_op))
        tensor.values[:] = 42
        pending = Pending([tensor])
        pending.finish()
        return pending

    box = BoxArray([1])
    if rank == 0:
        dispatcher.register_kernel("all_reduce", "box", kernel)
    dist.barrier()
    try:
        if rank == 0:
            dist.all_reduce(box)
            with pytest.raises(
                InvalidArgumentError, match="all_reduce has a kernel for device 'box'"
            ):
                dispatcher.register_kernel("all_reduce", "box", kernel)
    finally:
        dist.barrier()
        if rank == 0:
            dispatcher.unregister_kernel("all_reduce", "box")
    dist.barrier()
    with pytest.raises(UnsupportedError, match="no backend for device 'box'"):
        dist.all_reduce(box)
    if rank == 0:
        assert (seen, box.values.tolist()) == ([("default", "box", "SUM", False)], [42])


def test_wrappers_compose():
    """test_devices.py shows that a wrapper sees every operation."""
    seen = []

    def wrapper(name):
        def wrap(schema, device, kernel):
            def wrapped(group, dev, *arguments):
                seen.append((name, schema.name, dev))
                return kernel(group, dev, *arguments)

            return wrapped

        return wrap

    dist.init_process_group()
    removers = [dispatcher.register_wrapper(wrapper(name)) for name in ("inner", "outer")]
    try:
        dist.all_reduce(np.ones(1))
        removers[0]()
        dist.barrier()
        both = [("outer", "all_reduce", "cpu"), ("inner", "all_reduce", "cpu")]
        assert seen == [*both, ("outer", "barrier", "cpu")]
    finally:
        removers[1]()
        dist.destroy_process_group()


def test_an_unknown_operation():
    with pytest.raises(InvalidArgumentError, match=r"unknown operation 'sum' \(known: broadcast, "):
        Dispatcher().register_kernel("sum", "cpu", lambda: None)


def test_a_device_that_the_cpu_backend_does_not_serve():
    with pytest.raises(UnsupportedError) as caught:
        dist.init_process_group("cpu:unisono,cuda:gloo")
    assert caught.value.what == "backend 'unisono' serves device 'cpu' only, not 'cuda'"
    assert not dist.is_initialized()


def test_a_tensor_of_another_device_inside_a_call():
    dist.init_process_group()
    try:
        box = BoxArray([1])
        with pytest.raises((TypeError, UnsupportedError)):
            dist.all_gather_into_tensor(box, np.ones(1))
    finally:
        dist.destroy_process_group()
