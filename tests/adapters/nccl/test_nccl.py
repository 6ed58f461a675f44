"""The NCCL backend over a fake NCCL: streams are threads, kernels wait, and hang as NCCL's do."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import unisono as dist
from tests.adapters.nccl import fake_cuda
from tests.support.operations import COLLECTIVES, Operations
from tests.support.oracle import DTYPES, REDUCE_OPS, check, reduce_op, reduction, values
from tests.support.together import on_threads
from unisono.adapters.nccl import arrays, link
from unisono.adapters.nccl.gpu import GPU
from unisono.adapters.nccl.library import load
from unisono.core.base import log
from unisono.core.groups.world import World, use
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnisonoError,
    UnsupportedError,
    UsageError,
)
from unisono.lowlevel import CUDAEvent, CUDAStream
from unisono.testing import run
from unisono.workbench.bench.data import Data
from unisono.workbench.bench.libraries import open_library
from unisono.workbench.bench.plan import OPS, REDOPS, BenchPlan, SizeRange, cases

LIMIT_S = 30


@pytest.fixture(autouse=True)
def gpu():
    with fake_cuda.installed():
        yield


def on_gpus(size, body, backend="nccl", *, timeout=LIMIT_S, device_id=lambda rank: None, **how):
    """Run body(rank) on threads, each with a GPU of its own; return the results."""
    store = dist.HashStore()

    def rank_thread(rank):
        fake_cuda.set_device(rank)
        with use(World()):
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device_id(rank),
                **how,
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


@pytest.mark.sweep(5)
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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "float8" not in d and d != "bfloat16"])
def test_every_dtype_and_reduce_op(dtype):
    on_gpus(3, partial(reduce_all, dtype=dtype, count=7))


# ---- layouts, messages, groups ------------------------------------------------------------------


def test_strided_arrays_are_packed_and_read_only_ones_refused():
    def body(rank):
        table = fake_cuda.array(np.arange(12.0).reshape(3, 4) + rank)
        column = table[:, 1]
        dist.all_reduce(column)
        expected = np.arange(12.0).reshape(3, 4) + rank
        expected[:, 1] = 2 * np.arange(12.0).reshape(3, 4)[:, 1] + 1
        assert np.array_equal(table.get(), expected)
        wide = fake_cuda.Array(np.broadcast_to(np.zeros(1), 3), rank)
        with pytest.raises(InvalidArgumentError, match="overlaps itself"):
            dist.all_reduce(wide)

    on_gpus(2, body)


class Numba:
    """An array of another library, which has CUDA's array interface only."""

    def __init__(self, values, *, readonly=False):
        self.host = np.array(values)
        facts = self.host.__array_interface__
        self.__cuda_array_interface__ = facts | {"data": (facts["data"][0], readonly)}


def test_arrays_of_other_libraries_are_taken_over(monkeypatch):
    def body(rank):
        x = Numba([rank + 1.0, 5.0])
        dist.all_reduce(x, async_op=True).wait(LIMIT_S)
        assert x.host.tolist() == [3, 10]
        with pytest.raises(InvalidArgumentError, match="tensor is read-only"):
            dist.all_reduce(Numba([1.0], readonly=True))
        with monkeypatch.context() as patch:
            # CuPy and torch copy an array that is on another GPU.
            patch.setattr(sys.modules["cupy"], "asarray", lambda x: fake_cuda.array(x.host))
            with pytest.raises(InvalidArgumentError, match=rf"x is not on the current GPU {rank}"):
                arrays.view(Numba([1.0]), write=True, name="x")

    on_gpus(2, body)


def test_messages_arrive_in_order_and_in_batches():
    def body(rank):
        other = 1 - rank
        if rank == 0:
            for tag in range(3):
                dist.send(fake_cuda.array([tag + 10.0]), 1, tag=tag)
        else:
            for tag in range(3):
                x = fake_cuda.array([0.0])
                work = dist.irecv(x, 0, tag=tag)
                work.wait()
                assert (x.get().tolist(), work.source_rank()) == ([tag + 10], 0)
        out, column = fake_cuda.array([0, 0, 0]), fake_cuda.array(np.zeros((3, 2), int))
        ops = [
            dist.P2POp(dist.isend, fake_cuda.array([rank, 7, 9]), other),
            dist.P2POp(dist.irecv, out, other),
            dist.P2POp(dist.irecv, column[:, 1], other),
            dist.P2POp(dist.isend, fake_cuda.array([rank + 1] * 3), other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert out.get().tolist() == [other, 7, 9]
        assert column.get()[:, 1].tolist() == [other + 1] * 3

    on_gpus(2, body)


@pytest.mark.parametrize(
    ("sent", "tag", "got"),
    [([1.0], 0, "float64[1] with tag 0"), ([1, 2], 0, "int64[2] with tag 0"),
     ([1.0, 2.0], 5, "float64[2] with tag 5")],
)  # fmt: skip
def test_a_message_that_does_not_fit_is_named(sent, tag, got):
    def body(rank):
        if rank == 0:
            # If rank 1 is fast, the group is broken before this call returns.
            with suppress(CollectiveAbortedError):
                dist.send(fake_cuda.array(sent), 1, tag=tag)
            return ""
        x = fake_cuda.array([0.0, 0.0])
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.irecv(x, 0).wait(LIMIT_S)
        return caught.value.what

    assert on_gpus(2, body)[1] == (
        "recv(float64[2], src=0, tag=0) in group 'default' does not match on rank 1: rank 0 sent "
        + got
    )


def test_coalesced_calls_and_the_manager():
    def body(rank):
        sums = [fake_cuda.array(np.full(n, rank + 1.0)) for n in (2, 3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in sums:
                dist.all_reduce(x)
        manager.wait()
        assert [x.get().tolist() for x in sums] == [[3, 3], [3, 3, 3]]
        pg = dist.group.WORLD
        outs = [fake_cuda.array(np.zeros(2 * n)) for n in (1, 2)]
        ins = [fake_cuda.array(np.full(n, rank + 5.0)) for n in (1, 2)]
        pg.all_gather_into_tensor_coalesced(outs, ins)
        assert [x.get().tolist() for x in outs] == [[5, 6], [5, 5, 6, 6]]
        pg.reduce_scatter_tensor_coalesced(ins, outs)
        assert [x.get().tolist() for x in ins] == [[[10], [12]][rank], [[10] * 2, [12] * 2][rank]]

    on_gpus(2, body)


def test_groups_objects_and_barriers():
    def body(rank):
        dist.barrier()
        everyone = [None] * 3
        dist.all_gather_object(everyone, {"rank": rank})
        assert everyone == [{"rank": r} for r in range(3)]
        assert (dist.get_backend(), dist.get_backend_config()) == ("nccl", "cuda:nccl")
        y = np.ones(2)
        dist.all_reduce(y)
        assert y.tolist() == [3, 3]
        pair = dist.new_group([0, 2])
        if rank != 1:
            x = fake_cuda.array([rank + 1])
            dist.all_reduce(x, group=pair)
            assert x.get().tolist() == [4]
            x = fake_cuda.array([0, 0])
            dist.all_gather_into_tensor(x, fake_cuda.array([rank]), group=pair)
            assert x.get().tolist() == [0, 2]
        if rank != 2:
            smaller = dist.shrink_group([2])
            x = fake_cuda.array([rank + 1])
            dist.all_reduce(x, group=smaller)
            assert x.get().tolist() == [3]

    on_gpus(3, body)


def test_two_backends_and_an_eager_start():
    def body(rank):
        group = dist.group.WORLD
        assert len(fake_cuda._alive) >= 1  # before a call
        assert [b.name for b in group.backends.values()] == ["unisono", "nccl"]
        assert group.backends["cuda"].control is not group.backends["cpu"]
        x, y = fake_cuda.array([1.0]), np.array([1.0])
        dist.all_reduce(x)
        dist.all_reduce(y)
        assert (x.get().tolist(), y.tolist()) == ([2], [2])
        shown = repr(group)
        assert "cuda=nccl state=experimental check=beside" in shown

    on_gpus(2, body, "cpu:unisono,cuda:nccl", device_id=lambda rank: f"cuda:{rank}")


# ---- faults -------------------------------------------------------------------------------------


def mismatch_at_first(rank):
    x = fake_cuda.array(np.ones(4 if rank == 1 else 3))
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(x)
    assert caught.value.context.usable
    x = fake_cuda.array([2.0])
    dist.all_reduce(x)
    assert x.get().tolist() == [6]
    return caught.value.what


def test_a_mismatch_of_the_first_call_changes_nothing():
    for what in on_gpus(3, mismatch_at_first):
        assert "rank 1 called all_reduce(float64[4], SUM)" in what


def mismatch(rank):
    x = fake_cuda.array([1.0])
    dist.all_reduce(x)
    assert x.get().tolist() == [3]
    x = fake_cuda.array(np.ones(4 if rank == 1 else 3))
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(CollectiveMismatchError) as caught:
        work.wait(LIMIT_S)
    again = fake_cuda.array([1.0])
    with pytest.raises(UnisonoError) as broken:
        dist.all_reduce(again)
    return caught.value.what, caught.value.context.usable, str(broken.value)


def test_a_mismatch_is_named_on_all_ranks_and_breaks_the_group():
    for rank, (what, usable, broken) in enumerate(on_gpus(3, mismatch)):
        assert f"does not match on rank {rank} of 3" in what
        assert "ranks 0 and 2 called all_reduce(float64[3], SUM)" in what
        assert "rank 1 called all_reduce(float64[4], SUM)" in what
        assert not usable
        assert "the group is broken" in broken


def mismatch_before(rank):
    x = fake_cuda.array(np.ones(4 if rank == 1 else 3))
    with pytest.raises(CollectiveMismatchError, match="does not match"):
        dist.all_reduce(x)
    assert set(x.get()) == {1.0}
    x = fake_cuda.array([2.0])
    dist.all_reduce(x)
    assert x.get().tolist() == [6]
    assert "check=before" in repr(dist.group.WORLD)


def test_checked_before_a_mismatch_changes_nothing(monkeypatch):
    monkeypatch.setenv("UNISONO_CHECK", "before")
    on_gpus(3, mismatch_before)


def test_an_unknown_kind_of_check_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_CHECK", "often")
    with pytest.raises(InvalidArgumentError, match="UNISONO_CHECK='often' is neither"):
        on_gpus(1, lambda rank: None)


def late(rank):
    dist.all_reduce(fake_cuda.array([1.0]))
    if rank == 2:
        return dist.get_backend()
    work = dist.all_reduce(fake_cuda.array([1.0]), async_op=True, timeout=0.5)
    with pytest.raises(UnisonoError) as caught:
        work.wait(LIMIT_S)
    return caught.value.what


def test_a_rank_that_leaves_early_is_named():
    for what in on_gpus(3, late)[:2]:
        assert "rank 2" in what


def test_ranks_on_one_gpu_are_refused():
    fake_cuda.uuids.update({0: "GPU-x", 2: "GPU-x"})

    def body(rank):
        with pytest.raises(UsageError, match="ranks 0 and 2 of group") as caught:
            dist.all_reduce(fake_cuda.array([1.0]))
        assert caught.value.what == (
            "ranks 0 and 2 of group 'default' use one GPU; NCCL needs a GPU for each rank"
        )

    on_gpus(3, body)


@pytest.mark.parametrize("mode", ["on", "cert", "auto", "off"])
def test_ranks_on_two_hosts_and_encryption(monkeypatch, caplog, mode):
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    monkeypatch.setenv("UNISONO_TLS", mode)
    monkeypatch.setattr(log, "_logged", set())

    def body(rank):
        x = fake_cuda.array([1.0])
        if mode in ("on", "cert") and hosts[0] != hosts[1]:
            with pytest.raises(UnsupportedError) as caught:
                dist.all_reduce(x)
            assert caught.value.what == (
                "all_reduce: what NCCL sends between the hosts of group 'default' is not encrypted "
                f"by unisono, which UNISONO_TLS={mode} forbids"
            )
            assert x.get().tolist() == [1.0]
        else:
            dist.all_reduce(x)
            assert x.get().tolist() == [2.0]

    # The fake NCCL has a store of its own, which needs certificates.
    for hosts in ("aa", "ab")[mode == "cert" :]:
        monkeypatch.setattr(link, "this_host", lambda: hosts[fake_cuda.current_device()])  # noqa: B023
        on_gpus(2, body)
        logged = [line for line in caplog.messages if line.startswith("what NCCL sends between")]
        assert len(logged) == (hosts == "ab" and mode == "auto")


def test_a_failure_of_nccl_is_named_on_all_ranks():
    fake_cuda.failing["all_reduce", 1] = RuntimeError("unhandled CUDA error")

    def body(rank):
        try:
            dist.all_reduce(fake_cuda.array([1.0]), async_op=True).wait(LIMIT_S)
        except UnisonoError as error:
            return error.what
        return ""

    for what in on_gpus(2, body):
        assert "rank 1" in what
        assert "unhandled CUDA error" in what


def test_abort_ends_kernels_on_all_ranks():
    have_met = threading.Barrier(3)

    def body(rank):
        dist.all_reduce(fake_cuda.array([1.0]))
        have_met.wait(LIMIT_S)
        if rank == 0:
            dist.group.WORLD.abort("enough")
            return "enough"
        with pytest.raises(CollectiveAbortedError) as caught:
            dist.all_reduce(fake_cuda.array([1.0]), async_op=True).wait(LIMIT_S)
        return caught.value.what

    for what in on_gpus(3, body):
        assert "enough" in what


def test_what_nccl_cannot_do_is_refused():
    def body(rank):
        x = fake_cuda.array([1.0])
        with pytest.raises(UnsupportedError, match="NCCL chooses algorithm and order itself"):
            dist.all_reduce(x, deterministic=True)
        with pytest.raises(UnsupportedError, match="NCCL has no messages from a rank to itself"):
            dist.isend(x, rank)
        with pytest.raises(
            UnsupportedError, match=r"NCCL takes no shorter messages \(partial=True\)"
        ):
            dist.recv(x, 1 - rank, partial=True)
        with pytest.raises(UnsupportedError, match="has no recv_any_source"):
            dist.recv(x)
        dist.all_reduce(x)
        y = fake_cuda.Array(np.ones(1), device=7)
        with pytest.raises(InvalidArgumentError, match="is on GPU 7, but group 'default' uses"):
            dist.all_reduce(y)
        dist.all_reduce(x)
        assert x.get().tolist() == [4]

    on_gpus(2, body)


# ---- streams ------------------------------------------------------------------------------------


def test_the_stream_waits_and_not_the_host():
    """The host may run ahead of a kernel that waits; what it reads in the stream is the result."""
    entered = threading.Event()

    def body(rank):
        dist.all_reduce(fake_cuda.array([0.0]))
        x = fake_cuda.array([rank + 1.0])
        if rank == 1:
            assert entered.wait(LIMIT_S)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        copy = fake_cuda.array([0.0])
        copy[...] = x
        if rank == 0:
            assert not work.is_completed()
            entered.set()
        assert copy.get().tolist() == [6]
        assert work.wait(LIMIT_S)
        assert work.is_success()

    on_gpus(2, body)


def test_streams_and_events_of_a_gpu():
    def body(rank):
        compute = CUDAStream(fake_cuda.ExternalStream(77 + rank), rank)
        other = CUDAStream(fake_cuda.Stream(88 + rank).handle, rank)
        gate = threading.Event()
        x, y = fake_cuda.array([0.0]), fake_cuda.array([0.0])
        with dist.stream(compute):
            assert dist.current_stream() is compute
            compute.raw.put(gate.wait, LIMIT_S)
            compute.submit(x.__setitem__, ..., rank + 1.0)
            work = dist.all_reduce(x, async_op=True)
            numbers = np.ones(1)
            dist.all_reduce(numbers)
            assert numbers.tolist() == [2]
        assert not compute.query()
        with pytest.raises(CollectiveTimeoutError, match="was not done after"):
            compute.synchronize(0.01)
        with dist.stream(other):
            work.wait()
            y[...] = x
            event = other.record_event()
        assert not event.query()
        gate.set()
        event.synchronize(LIMIT_S)
        assert y.host.tolist() == [3]
        other.wait_stream(compute)
        CUDAEvent().wait(other)
        other.synchronize(LIMIT_S)
        with pytest.raises(UsageError, match="takes events of a GPU only"):
            dist.Event().record(other)
        with pytest.raises(UsageError, match="needs a CUDAStream"):
            CUDAEvent().record()
        assert dist.current_stream() is dist.default_stream()

    on_gpus(2, body)


def test_a_cpu_stream_decides_when_a_call_is_made():
    def body(rank):
        x, gate, compute = fake_cuda.array([0.0]), threading.Event(), dist.Stream("compute")
        with dist.stream(compute):
            compute.submit(gate.wait, LIMIT_S)
            compute.submit(x.host.__setitem__, ..., rank + 1.0)
            work = dist.all_reduce(x, async_op=True)
        gate.set()
        assert work.wait(LIMIT_S)
        assert x.host.tolist() == [3]

    on_gpus(2, body)


# ---- ranks that are late, stuck or dead ---------------------------------------------------------


def test_a_late_rank_is_named_by_all():
    late = threading.Barrier(3)

    def body(rank):
        dist.all_reduce(fake_cuda.array([1.0]))
        if rank == 2:
            late.wait(LIMIT_S)
            return ""
        work = dist.all_reduce(fake_cuda.array([1.0]), async_op=True, timeout=0.5)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(LIMIT_S)
        late.wait(LIMIT_S)
        return caught.value.what

    for what in on_gpus(3, body)[:2]:
        assert "rank 2 never entered it" in what
        assert "timed out after 0.5 s" in what


def test_a_rank_that_is_late_while_nccl_connects_is_named():
    """NCCL connects ranks in the first call of a kind; the host then waits in the call."""
    late = threading.Barrier(3)

    def body(rank):
        texts = []
        if rank != 2:
            begun_s = time.monotonic()
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.all_reduce(fake_cuda.array([1.0]), timeout=0.5)
            texts = [caught.value.what]
            assert time.monotonic() - begun_s < LIMIT_S / 2
        late.wait(LIMIT_S)
        return texts

    store = dist.HashStore()

    def rank_thread(rank):
        fake_cuda.set_device(rank)
        with use(World()):
            dist.init_process_group(
                "nccl", store=store, rank=rank, world_size=3, timeout=LIMIT_S, device_id=rank
            )
            try:
                return body(rank)
            finally:
                dist.destroy_process_group()

    for texts in on_threads(*(partial(rank_thread, rank) for rank in range(3)))[:2]:
        assert "in group 'default' timed out after 0.5 s" in texts[0]
        assert "rank 2 never entered it" in texts[0]


def test_a_communicator_that_was_aborted_is_not_used():
    have_met = threading.Barrier(2)

    def body(rank):
        dist.all_reduce(fake_cuda.array([1.0]))
        link = dist.group.WORLD.backends["cuda"]._kernels.link
        assert link.state() is None
        have_met.wait(LIMIT_S)  # The call of the other rank that fails aborts this one's, too.
        assert link.abort()
        assert link.abort()
        with pytest.raises(ClosedError):
            link.state()
        with pytest.raises(UnisonoError):
            dist.all_reduce(fake_cuda.array([1.0]))

    on_gpus(2, body)


def test_a_callback_makes_calls_while_the_caller_does():
    def body(rank):
        x, y = fake_cuda.array([1.0]), fake_cuda.array([1.0])
        futures = []
        for _ in range(5):
            work = dist.all_reduce(x, async_op=True)
            futures.append(work.get_future().then(lambda _: dist.get_world_size()))
            assert work.wait(LIMIT_S)
        assert [future.wait(LIMIT_S) for future in futures] == [2] * 5
        dist.all_reduce(y, async_op=True).get_future().then(lambda _: dist.barrier()).wait(LIMIT_S)
        assert x.get().tolist() == [32]

    on_gpus(2, body)


def test_the_context_of_a_thread_is_left_as_it_was():
    gpu, seen = GPU(load(), 3), []

    def without_a_context():
        with gpu.current():
            seen.append(fake_cuda.get_context()[1])
        seen.append(fake_cuda.get_context()[1])

    on_threads(without_a_context)
    assert seen == [3, None]


def test_a_kernel_that_does_not_end_is_stopped_at_the_deadline():
    gate, raised = threading.Event(), threading.Barrier(2)

    def body(rank):
        x = fake_cuda.array([1.0])
        dist.all_reduce(x)
        if rank == 1:
            fake_cuda.Stream(0).put(gate.wait, LIMIT_S)
        work = dist.all_reduce(x, async_op=True, timeout=0.5)
        with pytest.raises(UnisonoError) as caught:
            work.wait(LIMIT_S)
        raised.wait(LIMIT_S)  # else the kernel of the other rank could still end
        gate.set()
        return caught.value.what

    texts = on_gpus(2, body)
    assert any("every rank entered it, but the data did not arrive" in text for text in texts)
    assert all("0.5 s" in text for text in texts)


def test_a_message_without_its_other_end_is_named():
    done = threading.Barrier(2)

    def body(rank):
        dist.all_reduce(fake_cuda.array([1.0]))
        what = ""
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.irecv(fake_cuda.array([1.0]), 1, timeout=0.3).wait(LIMIT_S)
            what = caught.value.what
        done.wait(LIMIT_S)
        return what

    what = on_gpus(2, body)[0]
    assert what.startswith(
        "recv(float64[1], src=1, tag=0) in group 'default' timed out after 0.3 s on rank 0 of 2: "
        "rank 1 did not match it"
    )


def test_any_tag_takes_the_next_message():
    def body(rank):
        x = fake_cuda.array([rank + 1.0])
        if rank == 0:
            dist.send(x, 1, tag=9)
            return None
        work = dist.irecv(x, 0, tag=dist.ANY_TAG)
        assert work.wait(LIMIT_S)
        return x.get().tolist(), work.tag(), work.source_rank()

    assert on_gpus(2, body)[1] == ([1], 9, 0)


def test_a_communicator_that_does_not_start_in_time():
    def body(rank):
        if rank == 1:
            fake_cuda.failing["init", 1] = RuntimeError("no device")
        with pytest.raises(UnisonoError) as caught:
            dist.all_reduce(fake_cuda.array([1.0]))
        return caught.value.what

    texts = on_gpus(2, body)
    assert "NCCL did not start on rank 1: no device" in texts[1]
    assert "rank 1" in texts[0]


def stuck(rank):
    """Rank 1 enters a call whose kernel cannot run, and dies."""
    with fake_cuda.installed():
        fake_cuda.set_device(rank)
        group = dist.new_group(backend="nccl", timeout=20)
        x = fake_cuda.array([1.0])
        dist.all_reduce(x, group=group)
        assert x.get().tolist() == [3]
        if rank == 1:
            fake_cuda.Stream(0).put(threading.Event().wait, 60)
        work = dist.all_reduce(x, group=group, async_op=True)
        dist.barrier(group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun_s = time.monotonic()
        with pytest.raises(UnisonoError) as caught:
            work.wait(LIMIT_S)
        # Names within a second on an idle machine; a test machine may be busy.
        return caught.value.what, time.monotonic() - begun_s < 15


def test_a_killed_rank_is_named():
    texts = run(stuck, 3, ranks="processes", dead=(1,))
    for rank in (0, 2):
        what, in_time = texts[rank]
        assert "rank 1" in what, what
        assert in_time, what


def lives(rank, rounds):
    """Make and end groups many times: nothing hangs, nothing is left."""
    for turn in range(rounds):
        group = dist.new_group(backend="nccl")
        x = fake_cuda.array([turn + rank])
        dist.all_reduce(x, group=group)
        if turn % 3 == 1:
            dist.all_reduce(x, group=group, async_op=True)
        if turn % 3 == 2:
            # The other rank, too, has made its call.
            dist.barrier()
            group.abort()
        else:
            assert group.rank() == rank
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize(
    "rounds", [9, pytest.param(200, marks=pytest.mark.whole("200 groups, 20 s"))]
)
def test_groups_start_and_end_many_times(rounds):
    on_gpus(2, partial(lives, rounds=rounds), "unisono")
    assert not fake_cuda._alive


# ---- calls that are refused ---------------------------------------------------------------------


def test_wrong_gpus_and_devices_are_named():
    def body(rank):
        x, y = fake_cuda.array([1.0]), fake_cuda.array([1.0], device=5 + rank)
        with pytest.raises(InvalidArgumentError) as caught:
            dist.all_gather_into_tensor(fake_cuda.array([0.0, 0.0]), y)
        gpus = [rank, 5 + rank]
        assert caught.value.what == (
            f"all_gather_into_tensor: the arrays of one call are on GPUs {gpus}, expected one"
        )
        dist.all_reduce(x)
        with pytest.raises(InvalidArgumentError) as caught:
            dist.all_reduce(y)
        assert caught.value.what == (
            f"all_reduce: the array is on GPU {5 + rank}, but group 'default' uses GPU {rank} on "
            "this rank"
        )

    on_gpus(2, body)
    with pytest.raises(InvalidArgumentError) as caught:
        on_gpus(1, lambda rank: None, device_id=lambda rank: "cuda")
    assert caught.value.what == "device_id='cuda' names no GPU, such as 0 or 'cuda:0'"
    with pytest.raises(UnsupportedError) as caught:
        on_gpus(1, lambda rank: None, "cpu:nccl")
    assert caught.value.what == "backend 'nccl' serves device 'cuda' only, not 'cpu'"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_float8_needs_a_new_gpu(monkeypatch, capability):
    monkeypatch.setattr(fake_cuda.Device, "capability", capability)

    def body(rank):
        x = fake_cuda.array(np.array([rank + 1.0]).astype(ml_dtypes.float8_e5m2))
        out = fake_cuda.array(np.zeros(2, x.dtype))
        dist.all_gather_into_tensor(out, x)
        assert out.get().astype(float).tolist() == [1, 2]
        with pytest.raises(UnsupportedError, match="float8_e5m2"):
            dist.scan(x)
        if capability < (9, 0):
            with pytest.raises(UnsupportedError) as caught:
                dist.all_reduce(x)
            assert caught.value.what == (
                "all_reduce: reduce op SUM on float8_e5m2 needs a GPU of compute capability 9.0 or "
                "newer"
            )
        else:
            dist.all_reduce(x)
            assert x.get().astype(float).tolist() == [3]

    on_gpus(2, body)


def test_failures_of_nccl_and_cuda_have_their_texts(monkeypatch):
    have_met = threading.Barrier(2)

    def body(rank):
        x = fake_cuda.array([1.0])
        dist.all_reduce(x)
        have_met.wait(LIMIT_S)  # A failure of one rank would end this call on the other.
        if rank == 0:
            next(c for c in fake_cuda._alive.values() if c.rank == 0).status = 3
        with pytest.raises(UnisonoError) as caught:
            dist.all_reduce(x, async_op=True).wait(LIMIT_S)
        return caught.value.what

    texts = on_gpus(2, body)
    failed = "NCCL failed in group 'default' on rank 0 with status 3: the cable was cut"
    assert texts[0] == failed
    assert failed in texts[1]
    gpu = GPU(load(), 2)
    monkeypatch.setattr(gpu.driver, "cuMemcpyDtoDAsync", lambda *arguments: (700,))
    with pytest.raises(UnisonoError) as caught:
        gpu.copy(8, 16, 4, fake_cuda.Stream(1))
    assert caught.value.what == "CUDA refused to copy 4 bytes on GPU 2: 700"


def test_an_array_of_an_unknown_library(monkeypatch):
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="x is a Numba, which takes CuPy or torch to read: "):
        arrays.view(Numba([1.0]), write=True, name="x")
    with pytest.raises(ArgumentTypeError, match="x must be an array of a GPU, got list"):
        arrays.view([1.0], write=True, name="x")


def test_streams_take_streams_and_events_no_callbacks():
    with pytest.raises(ArgumentTypeError) as caught:
        CUDAStream("fast")
    assert caught.value.what == "stream must be a stream of a GPU or its handle, got 'fast'"
    event = CUDAEvent()
    with pytest.raises(UsageError, match="an event of a GPU has no callbacks"):
        event.on_reached(print)
    with pytest.raises(UsageError, match="an event of unisono on a GPU has no time"):
        event.elapsed_time(event)


def test_libraries_and_their_state(monkeypatch):
    assert dist.is_nccl_available()
    known = "experimental: run on a single GPU only; IntraNodeComm "
    assert dist.engine_info().nccl == known + "off"
    monkeypatch.setenv("ENABLE_INTRA_NODE_COMM", "1")
    assert dist.engine_info().nccl == known + "on, never run on a GPU"
    assert "NCCL: experimental" in str(dist.engine_info())
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(UnsupportedError, match="backend 'nccl' needs nccl4py and the libraries"):
        on_gpus(1, lambda rank: None)


class BenchData(Data):
    """The arrays of a case of `unisono bench` as arrays of the fake GPU."""

    @property
    def arrays(self):
        return fake_cuda.Array(self.input), fake_cuda.Array(self.output)

    def end(self):
        fake_cuda.Stream(0).sync()


def test_nccl4py_alone_does_every_operation_of_the_benchmark():
    plans = [
        BenchPlan(tuple(OPS), 3, sizes=SizeRange(600, 600), redop=redop, root=1) for redop in REDOPS
    ]
    store = dist.HashStore()
    ops = [op for op in OPS if op != "barrier"]

    def rank_thread(rank):
        fake_cuda.set_device(rank)
        library = open_library("nccl4py", rank, plans[0], store)
        assert library.versions() == {"nccl4py": "0.6.0"}
        for plan in plans:
            for op in ops if plan.redop == "sum" else ["reduce_scatter"]:
                (case,) = cases(op, plan)
                data = BenchData(case, plan, rank)
                data.fill_for_check()
                library.call(data)()
                data.end()
                assert data.count_wrong() == 0, (op, plan.redop)
        (case,) = cases("barrier", plans[0])
        with pytest.raises(UnsupportedError, match="nccl4py has no barrier"):
            library.call(BenchData(case, plans[0], rank))
        library.close()

    on_threads(*(partial(rank_thread, rank) for rank in range(3)))


def test_nccl4py_without_an_operation_does_the_others(monkeypatch):
    plan = BenchPlan(("all_reduce", "all_to_all"), 1, sizes=SizeRange(600, 600))
    fake_cuda.set_device(0)
    library = open_library("nccl4py", 0, plan, dist.HashStore())
    monkeypatch.delattr(type(library._comm), "alltoall")
    (reduces,), (exchanges,) = cases("all_reduce", plan), cases("all_to_all", plan)
    data = BenchData(reduces, plan, 0)
    library.call(data)()
    data.end()
    with pytest.raises(AttributeError, match="alltoall"):
        library.call(BenchData(exchanges, plan, 0))
    library.close()


def test_nccl4py_alone_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(UnsupportedError, match="needs nccl4py and the libraries of CUDA"):
        open_library("nccl4py", 0, BenchPlan(("barrier",), 1), dist.HashStore())


def test_tensors_of_torch_as_flat_memory():
    """What needs no GPU of the adapter of torch, on tensors of the CPU."""
    torch = pytest.importorskip("torch")

    class OnHost(arrays._Torch):
        def index(self, x):
            return 0

    library = OnHost(torch)
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    view = arrays.GPUView(library, x[:, 1], x, write=True, name="x")
    assert (view.packed, view.count, view.dtype.name) == (True, 3, "float32")
    view.pack()
    flat = fake_cuda.at(arrays.address_of(view.array), 12).view(np.float32)
    assert flat.tolist() == [1, 5, 9]
    flat[:] = [7, 8, 9]
    view.unpack()
    assert x[:, 1].tolist() == [7, 8, 9]
    z = torch.tensor([1 + 2j, 3j])
    view = arrays.GPUView(library, z.conj(), z, write=False, name="z")
    view.pack()
    assert np.array_equal(
        fake_cuda.at(arrays.address_of(view.array), 16).view(np.complex64), [1 - 2j, -3j]
    )
    plain = arrays.GPUView(
        library, torch.zeros(2, 3, dtype=torch.bfloat16), None, write=True, name=""
    )
    assert (plain.packed, plain.shape, plain.nbytes) == (False, (2, 3), 12)
    for op, result in zip(
        (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX,
         dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR),
        (9, 18, 3, 6, 2, 7, 5), strict=True,
    ):  # fmt: skip
        total = torch.tensor([3], dtype=torch.int16)
        library.reduce(op.op, total, torch.tensor([6], dtype=torch.int16))
        assert total.tolist() == [result], op
    for dtype in ("uint16", "uint32", "uint64"):
        kind = getattr(torch, dtype)
        top = np.iinfo(dtype).max
        for op, ufunc in ((dist.ReduceOp.SUM, np.add), (dist.ReduceOp.MIN, np.minimum),
                          (dist.ReduceOp.MAX, np.maximum), (dist.ReduceOp.PRODUCT, np.multiply),
                          (dist.ReduceOp.BXOR, np.bitwise_xor)):  # fmt: skip
            mine, other = (np.array(x, dtype) for x in ([1, top, top - 5], [top, 2, top - 1]))
            total = torch.from_numpy(mine.copy())
            library.reduce(op.op, total, torch.from_numpy(other.copy()))
            assert np.array_equal(total.numpy(), ufunc(mine, other)), (dtype, op)
            assert total.dtype is kind
    for dtype in (torch.int16, torch.int64):
        halves = torch.tensor([-3, 3], dtype=dtype)
        library.divide(halves, 2)
        assert halves.tolist() == [-1, 1]
    thirds = torch.from_numpy(np.array([65535, 7], np.uint16))
    library.divide(thirds, 3)
    assert thirds.numpy().tolist() == [21845, 2]
    numbers = torch.tensor([3.0])
    library.divide(numbers, 2)
    library.scale(numbers, 4.0)
    assert numbers.tolist() == [6]
